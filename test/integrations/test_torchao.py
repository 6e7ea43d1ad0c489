"""torchao's float8 training: products in float8 are those of one process; gathering in float8 is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.clients("torchao"), pytest.mark.slow]

WIDTH = 32


def made(**config: Any) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, **config))


def train(model: nn.Module) -> list[float]:
    """On the same data on every rank: what is scaled is a whole batch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fit(ctx: Any) -> None:
    import flatshard

    plain = made()
    kind = type(plain[0])
    assert kind.__name__ == "Float8Linear"
    sharded = flatshard.fully_shard(copy.deepcopy(plain), policy={kind})
    assert train(sharded) == pytest.approx(train(plain), rel=1e-6)
    whole = flatshard.checkpoint.full_state_dict(sharded)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value)

    model = made(enable_fsdp_float8_all_gather=True)
    with pytest.raises(
        ValueError,
        match=r"parameter '0.weight' is a WeightWithDynamicFloat8CastTensor, which converts its values before FSDP2's.*"
        r"Float8LinearConfig\(enable_fsdp_float8_all_gather=False\)",
    ):
        flatshard.fully_shard(model, policy={kind})


def test_float8(pair):
    pair.run(fit, world_size=2)
