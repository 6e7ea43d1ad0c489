"""timm's optimizers and parameter groups with sharded models, compared with one process."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_ranks import ranks
from tiny import check_equal, tiny_vit
from torch import nn

import flatshard

pytestmark = [pytest.mark.clients("timm", "torchvision"), pytest.mark.slow, pytest.mark.time_limit(600)]


def sharded() -> nn.Module:
    from timm.models.vision_transformer import Block

    return flatshard.fully_shard(tiny_vit().double(), policy={Block})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, steps: int = 3) -> None:
    """Train on the rank's half of each batch, or on full batches if ``rank`` is None."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 3, 8, 8, generator=g, dtype=torch.float64), torch.randint(4, (8,), generator=g)
        part = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-2, "weight_decay": 0.1, "layer_decay": 0.7},
    "lookahead_nadamw": {"lr": 1e-2, "weight_decay": 0.1, "filter_bias_and_bn": False},
    "lamb": {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None},
    "adafactor": {"lr": 1e-2, "layer_decay": 0.7},
}


@ranks(2, pool="pair")
def test_optimizers(ctx):
    """timm's own function makes the groups of the plain model, and optimizers that step full matrices."""
    from timm.optim import create_optimizer_v2

    for name, settings in OPTIMIZERS.items():
        ctx.note(name)
        alone, model = tiny_vit().double(), sharded()
        theirs, ours = (create_optimizer_v2(m, name, **settings) for m in (alone, model))
        described = [[(len(g["params"]), g["weight_decay"]) for g in o.param_groups] for o in (ours, theirs)]
        assert described[0] == described[1]
        if name in ("lamb", "adafactor"):
            with pytest.raises(RuntimeError, match="WholeParameterOptimizer"):
                train(model, ours, ctx.rank)
            options = {key: value for key, value in settings.items() if key != "layer_decay"}
            make = functools.partial(create_optimizer_v2, opt=name, **options)
            model = sharded()
            groups = create_optimizer_v2(model, name, **settings).param_groups
            ours = flatshard.optim.WholeParameterOptimizer(groups, make)
        train(alone, theirs, None)
        train(model, ours, ctx.rank)
        check_equal(flatshard.checkpoint.full_state_dict(model), alone.state_dict(), 1e-8)
