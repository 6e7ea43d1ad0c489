"""A newcomer's mistakes that no other test makes: each is told early, with who it is about and what to do."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Net

import flatshard
from flatshard import fully_shard

X = torch.ones(2, 4)


def inside_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        fully_shard(Net())


@torch.no_grad()
def copy_a_whole_value(model: Any) -> None:
    model.head.weight.copy_(torch.zeros(2, 4))


MISTAKES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
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
    "inference mode": (inside_inference_mode, RuntimeError, r"called inside torch.inference_mode\(\).*call it outside"),
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
    "copying a whole value into a part": (
        copy_a_whole_value,
        RuntimeError,
        r"'head.weight' is sharded.*was given the whole.*module.load_state_dict\(...\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(world, name: str):
    world(4)
    mistake, kind, told = MISTAKES[name]
    model = fully_shard(Net(), policy={Block})
    with pytest.raises(kind, match=f"(?s){told}"):
        mistake(model)
