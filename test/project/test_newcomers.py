"""A newcomer's mistakes that no other test makes: each is told early, with who it is about and what to do."""

import copy
import io
import sys
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


@torch.no_grad()
def average(mean: nn.Module, model: nn.Module) -> None:
    """A step of a moving average, as scripts write it."""
    for e, p in zip(mean.parameters(), model.parameters(), strict=True):
        e.lerp_(p, 0.1)


def test_an_average_that_was_copied_before_is_told_when_the_script_ends(world, capsys):
    """Torch runs no code of ours there, so the note comes when nobody has caught its error."""
    world(4)
    model = Net()
    mean = copy.deepcopy(model)
    fully_shard(model, policy={Block})
    with pytest.raises(RuntimeError, match="must match the size") as found:
        average(mean, model)
    sys.excepthook(found.type, found.value, found.tb)
    assert "RuntimeError: The size of tensor a" in (said := capsys.readouterr().err)
    assert "'front.weight' is sharded" in said
    assert "of shape (4, 4) as a 1-D shard, and torch's operation was given the full parameter" in said
    fully_shard(mean, policy={Block})  # as it says
    average(mean, model)


def test_a_gradient_with_respect_to_a_shard_is_told_when_the_script_ends(world, capsys):
    """The same: torch.autograd.grad looks into the graph alone."""
    world(4)
    model = fully_shard(Net(), policy={Block})
    out = model(torch.ones(2, 4))
    for inputs in (model.head.weight, [out, model.head.weight]):
        with pytest.raises(RuntimeError, match="not have been used in the graph") as found:
            torch.autograd.grad(out.sum(), inputs, retain_graph=True)
        sys.excepthook(found.type, found.value, found.tb)
        assert (
            "'head.weight' is sharded, and a graph has the full parameter in its place. Call" in capsys.readouterr().err
        )
    torch.autograd.grad(out.sum(), out, retain_graph=True)  # as it says
    out.sum().backward()
    assert model.head.weight.grad.norm() >= 0


def test_other_errors_that_end_a_script_get_no_note(world):
    world(4)
    p = fully_shard(Net(), policy={Block}).front.weight
    with pytest.raises(RuntimeError, match="must match the size") as found:
        torch.zeros(2) + torch.zeros(3)
    assert p.ndim == 2
    sys.excepthook(found.type, found.value, found.tb)
    assert not hasattr(found.value, "__notes__")
