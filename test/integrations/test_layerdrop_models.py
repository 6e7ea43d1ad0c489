"""Speech models of transformers drop layers at random, each rank its own: losses and parameters are those of one process."""

from __future__ import annotations

import pytest
import torch
from parity import full_params
from torch import nn

from flatshard import fully_shard

pytestmark = [pytest.mark.clients("transformers"), pytest.mark.slow, pytest.mark.time_limit(600)]


def make(stable: bool) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=24,
        num_hidden_layers=5,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        layerdrop=0.5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        mask_time_prob=0.0,
        do_stable_layer_norm=stable,
    )
    return transformers.Wav2Vec2Model(config).double().train()


def train(ctx, stable: bool, checkpointed: bool) -> None:
    from transformers.models.wav2vec2 import modeling_wav2vec2 as wav2vec2

    reference, model = make(stable), make(stable)
    if checkpointed:
        for each in (reference, model):
            each.gradient_checkpointing_enable({"use_reentrant": False})
    fully_shard(
        model,
        policy={wav2vec2.Wav2Vec2EncoderLayer, wav2vec2.Wav2Vec2EncoderLayerStableLayerNorm},
        process_group=ctx.group,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        torch.manual_seed(step)
        losses, batch = [], torch.randn(ctx.world_size, 2, 200).double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank, x in enumerate(batch):
            torch.manual_seed(10 * step + rank)
            losses.append(reference(x).last_hidden_state.square().mean())
            (losses[-1] / ctx.world_size).backward()
        torch.manual_seed(10 * step + ctx.rank)
        loss = model(batch[ctx.rank]).last_hidden_state.square().mean()
        loss.backward()
        torch.testing.assert_close(loss, losses[ctx.rank], rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
    for name, full in full_params(model).items():
        torch.testing.assert_close(full, reference.get_parameter(name).detach(), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stable", [False, True])
def test_wav2vec2(pair, stable, checkpointed):
    pair.run(train, stable, checkpointed)
