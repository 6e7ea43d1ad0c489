"""timm's optimizers, groups of parameters and averages of weights on sharded models, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import check_equal
from torch import nn

import flatshard

pytestmark = [pytest.mark.clients("timm", "torchvision"), pytest.mark.slow, pytest.mark.time_limit(600)]


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
    # The gradient of keys' biases is 0 but for rounding errors, which Adafactor steps by.
    return VisionTransformer(**sizes, qkv_bias=False).double()


def sharded() -> nn.Module:
    from timm.models.vision_transformer import Block

    return flatshard.fully_shard(vit(), policy={Block})


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, steps: int = 3) -> None:
    """``rank``: on its half of each batch; None: on all of it."""
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 3, 8, 8, generator=g, dtype=torch.float64), torch.randint(4, (8,), generator=g)
        part = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        optimizer.zero_grad()
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 1e-2, "weight_decay": 0.1, "layer_decay": 0.7},
    "lookahead_nadamw": {"lr": 1e-2, "weight_decay": 0.1, "filter_bias_and_bn": False},
    "lamb": {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None, "whole": True},
    "adafactor": {"lr": 1e-2, "layer_decay": 0.7, "whole": True},
    "muon": {"lr": 1e-2, "weight_decay": 0.1, "whole": True},
}


def step_all(ctx: Any) -> None:
    from timm.optim import create_optimizer_v2

    from flatshard.integrations.timm import create_optimizer

    for name, settings in OPTIMIZERS.items():
        ctx.note(name)
        alone, model = vit(), sharded()
        theirs = create_optimizer_v2(alone, name, **{k: v for k, v in settings.items() if k != "whole"})
        ours = create_optimizer(model, name, **settings)
        described = [[(len(g["params"]), g["weight_decay"]) for g in o.param_groups] for o in (ours, theirs)]
        assert described[0] == described[1]
        train(alone, theirs, None)
        train(model, ours, ctx.rank)
        check_equal(flatshard.checkpoint.full_state_dict(model), alone.state_dict(), 1e-8)
    for name, whole, match in (
        ("lamb", False, "WholeParameterOptimizer"),
        ("muon", False, "WholeParameterOptimizer"),
        ("lamb", True, "Lamb steps a parameter differently if it has other"),  # its max_grad_norm
    ):
        model = sharded()
        with pytest.raises(RuntimeError, match=match):
            train(model, create_optimizer(model, name, whole=whole, lr=1e-2), ctx.rank)


def test_optimizers(pair):
    """Those of whole matrices train as in one process where they are told so, and are refused where not."""
    pair.run(step_all, timeout=400)


AVERAGES: dict[str, dict[str, Any]] = {
    "V2": {"decay": 0.7},
    "V3 float32": {"decay": 0.7, "foreach": False, "exclude_buffers": True, "dtype": torch.float32},
    "V3 foreach": {"decay": 0.7},
    "V3 foreach, warmup": {"use_warmup": True},
}


def average(ctx: Any) -> None:
    import timm.utils

    for name, options in AVERAGES.items():
        ctx.note(name)
        averaged = []
        for rank, model in ((None, vit()), (ctx.rank, sharded())):
            ema = (timm.utils.ModelEmaV2 if name == "V2" else timm.utils.ModelEmaV3)(model, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(1, 4):
                train(model, optimizer, rank, 1)
                ema.update(model, *([] if name == "V2" else [step]))
            x = torch.linspace(-1, 1, 192, dtype=ema.module.pos_embed.dtype).view(1, 3, 8, 8)
            with torch.no_grad():
                output = ema.module(x)
            state = ema.module.state_dict() if rank is None else flatshard.checkpoint.full_state_dict(ema.module)
            averaged.append({**state, "output": output})
        check_equal(averaged[1], averaged[0], 1e-5 if "float32" in name else 1e-8)


def test_averages_of_weights(pair):
    pair.run(average, timeout=400)
