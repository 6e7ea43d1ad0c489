"""LoRA by peft on a sharded base model: two ranks against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tokens, be_alone, copied, tiny_llama
from torch import Tensor, nn

import flatshard

pytestmark = [pytest.mark.clients("peft", "transformers"), pytest.mark.time_limit(600)]

TOKENS = Tokens(16).tokens
CONFIGS: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "saved modules": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"], "bias": "all"},
}


def with_adapter(kind: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(tiny_llama(), LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **CONFIGS[kind]))


def train(model: nn.Module, rank: int, ranks: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        batch = TOKENS[4 * step : 4 * step + 4][rank::ranks]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def alone(ctx, kind: str, folder: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Trains; and opens what two ranks have saved."""
    from peft import PeftModel

    be_alone()
    model = with_adapter(kind)
    losses = train(model, 0, 1)
    opened = PeftModel.from_pretrained(tiny_llama(), folder)
    with torch.no_grad():
        return losses, copied(model), opened(input_ids=TOKENS[:2]).logits


def sharded(ctx, kind: str, folder: str) -> tuple[list[Tensor], dict[str, Tensor], Tensor, Tensor]:
    from flatshard.integrations.peft import adapter_state_dict, save_adapter
    from flatshard.integrations.state import count_whole, policy_of

    model = with_adapter(kind)
    counted = model.get_nb_trainable_parameters()
    flatshard.fully_shard(model, policy=policy_of(model))
    count_whole(model)
    assert model.get_nb_trainable_parameters() == counted
    model.print_trainable_parameters()
    losses = train(model, ctx.rank, 2)
    whole, state = flatshard.checkpoint.full_state_dict(model), adapter_state_dict(model)
    assert set(state) == {n for n, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(state, {n: whole[n] for n in state}, rtol=0, atol=0)
    save_adapter(model, folder)
    with torch.no_grad():
        logits = model(input_ids=TOKENS[:2]).logits
        with pytest.raises(RuntimeError, match="summon_full_params"):
            model.merge_adapter()
        with flatshard.summon_full_params(model):
            model.merge_adapter()
        merged = model(input_ids=TOKENS[:2]).logits
    return losses, whole, logits, merged


@pytest.mark.parametrize("kind", CONFIGS)
def test_as_one_process(pair, single, tmp_path: Path, kind: str):
    (two, whole, logits, merged), (other, *_) = pair.run(sharded, kind, str(tmp_path), world_size=2)
    [(one, weights, opened)] = single.run(alone, kind, str(tmp_path), world_size=1)
    torch.testing.assert_close((torch.stack(two) + torch.stack(other)) / 2, torch.stack(one), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close({n: whole[n] for n in weights}, weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(opened, logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged, logits, rtol=1e-3, atol=1e-4)
