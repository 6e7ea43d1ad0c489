"""Speech models of transformers drop layers at random, each rank its own: losses and parameters are those of one process."""

from __future__ import annotations

import functools

import pytest
import torch
from parity import check_same_params, step_all, twins
from torch import nn

pytestmark = [pytest.mark.clients("transformers"), pytest.mark.slow, pytest.mark.time_limit(600)]


def make(stable: bool) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    sizes |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    dropouts = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "mask_time_prob")
    other = {**dict.fromkeys(dropouts, 0.0), "layerdrop": 0.5, "do_stable_layer_norm": stable}
    return transformers.Wav2Vec2Model(transformers.Wav2Vec2Config(**sizes, **other)).train()


def train(ctx, stable: bool, checkpointed: bool) -> None:
    from transformers.models.wav2vec2 import modeling_wav2vec2 as wav2vec2

    layers = {wav2vec2.Wav2Vec2EncoderLayer, wav2vec2.Wav2Vec2EncoderLayerStableLayerNorm}
    reference, model = twins(ctx, functools.partial(make, stable), layers)
    if checkpointed:
        for each in (reference, model):
            each.gradient_checkpointing_enable({"use_reentrant": False})
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        torch.manual_seed(step)
        losses, batch = [], torch.randn(ctx.world_size, 2, 200).double()
        for rank, x in enumerate(batch):
            torch.manual_seed(10 * step + rank)
            losses.append(reference(x).last_hidden_state.square().mean())
            (losses[-1] / ctx.world_size).backward()
        torch.manual_seed(10 * step + ctx.rank)
        loss = model(batch[ctx.rank]).last_hidden_state.square().mean()
        loss.backward()
        torch.testing.assert_close(loss, losses[ctx.rank], rtol=1e-12, atol=1e-14)
        step_all(optimizers)
    check_same_params(model, reference)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stable", [False, True])
def test_wav2vec2(pair, stable, checkpointed):
    pair.run(train, stable, checkpointed)
