"""LoRA by peft on a sharded base model: two ranks compared with one process."""

from typing import Any

import pytest
import torch
from on_ranks import ranks
from parity import check_same_params, everybody, step_all
from tiny import Tokens, tiny_llama
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


def train(model: nn.Module, rank: int, ranks: int) -> Tensor:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        batch = TOKENS[4 * step : 4 * step + 4][rank::ranks]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        step_all([optimizer])
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("kind", CONFIGS)
@ranks(2, pool="pair")
def test_as_one_process(ctx, path: str, kind: str):
    from peft import PeftModel

    from flatshard.integrations.peft import adapter_state_dict, save_adapter
    from flatshard.integrations.state import count_whole, policy_of

    plain, model = with_adapter(kind), with_adapter(kind)
    counted = model.get_nb_trainable_parameters()
    flatshard.fully_shard(model, policy=policy_of(model))
    count_whole(model)
    assert model.get_nb_trainable_parameters() == counted
    model.print_trainable_parameters()
    losses, expected = train(model, ctx.rank, 2), train(plain, 0, 1)
    torch.testing.assert_close(sum(everybody(ctx, losses)) / 2, expected, rtol=1e-5, atol=1e-5)
    check_same_params(model, plain, rtol=1e-4)
    whole, state = flatshard.checkpoint.full_state_dict(model), adapter_state_dict(model)
    assert set(state) == {n for n, p in model.named_parameters() if p.requires_grad}
    torch.testing.assert_close(state, {n: whole[n] for n in state}, rtol=0, atol=0)
    save_adapter(model, path)
    torch.distributed.barrier(ctx.group)
    opened = PeftModel.from_pretrained(tiny_llama(), path)
    with torch.no_grad():
        logits = model(input_ids=TOKENS[:2]).logits
        torch.testing.assert_close(opened(input_ids=TOKENS[:2]).logits, logits, rtol=1e-4, atol=1e-5)
        with pytest.raises(RuntimeError, match="summon_full_params"):
            model.merge_adapter()
        with flatshard.summon_full_params(model):
            model.merge_adapter()
        torch.testing.assert_close(model(input_ids=TOKENS[:2]).logits, logits, rtol=1e-3, atol=1e-4)
