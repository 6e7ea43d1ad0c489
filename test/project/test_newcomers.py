"""A newcomer's mistakes that no other test makes: each is told early, with who it is about and what to do."""

import io
from collections.abc import Callable

import pytest
import torch
from models import Block, Net
from torch import nn

import flatshard
from flatshard import fully_shard

WITH_FULL: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "p.copy_": lambda p, full: p.copy_(full),
    "p.data.copy_": lambda p, full: p.data.copy_(full),
    "p.data[:] =": lambda p, full: p.data.__setitem__(slice(None), full),
    "p - full": lambda p, full: p - full,
    "full - p.detach()": lambda p, full: full - p.detach(),
    "full.lerp_": lambda p, full: full.lerp_(p.detach(), 0.1),
    "a list": lambda p, full: torch._foreach_lerp_([full], [p.detach()], 0.1),
    "a gradient": lambda p, full: p.detach().pow(2).add_(full),
}

MISTAKES: dict[str, tuple[Callable[[nn.Module], object], type[Exception], str]] = {
    "parameters in the place of the module": (
        lambda _: fully_shard(Net().parameters()),
        TypeError,
        "got a generator.*pass the model itself, not its parameters or its state",
    ),
    "a dtype in the place of a policy": (
        lambda _: fully_shard(Net(), mixed_precision=torch.bfloat16),
        TypeError,
        r"got torch.bfloat16.*pass flatshard.MixedPrecision\(param_dtype=torch.bfloat16, reduce_dtype",
    ),
    "inference mode": (
        torch.inference_mode()(lambda _: fully_shard(Net())),
        RuntimeError,
        r"called inside torch.inference_mode\(\).*call it outside",
    ),
    "pickling the model": (
        lambda m: torch.save(m, io.BytesIO()),
        TypeError,
        r"\(unit '<root>'\) cannot be pickled.*flatshard.save_checkpoint\(path, {'model': module}\)",
    ),
    "clipping parameters by our function": (
        lambda m: flatshard.clip_grad_norm_(m.parameters(), 1.0),
        TypeError,
        "takes the module, got a generator.*pass the model.*torch.nn.utils.clip_grad_norm_",
    ),
} | {
    f"a tensor of the full shape beside a shard: {name}": (
        torch.no_grad()(lambda m, mistake=mistake: mistake(m.head.weight, torch.zeros(2, 4))),
        RuntimeError,
        r"'head.weight' is sharded: .* elements 0:0 of shape \(2, 4\).* was given the full parameter.*"
        r"call fully_shard on the copy, too.*module.load_state_dict\(...\).*summon_full_params\(module\)",
    )
    for name, mistake in WITH_FULL.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(world, name: str):
    world(4)
    mistake, kind, told = MISTAKES[name]
    model = fully_shard(Net(), policy={Block})
    with pytest.raises(kind, match=f"(?s){told}"):
        mistake(model)
