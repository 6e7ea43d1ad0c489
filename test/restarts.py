"""Interrupted runs that other ranks continue, with each way to save an optimizer's state, compared with one process."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from flatshard import fully_shard
from flatshard.checkpoint import (
    full_state_dict,
    load_checkpoint,
    load_optim_state_dict,
    optim_state_dict,
    save_checkpoint,
)
from flatshard.optim import WholeParameterOptimizer

Optimizer = torch.optim.Optimizer
Make = Callable[..., Optimizer]
ROWS = 6  # per batch: divides by 1, 2 and 3 ranks
STEPS = 2  # before and after the restart


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = ((5, 8), (8, 4), (4, 1))  # matrices only, for Muon; a third rank has no element of the last one
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes)).double()


class Counting(Optimizer):
    """An optimizer that adds options to its groups in its first step and reads them, like timm's Adan."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("history", {"scale": torch.zeros(2), "rates": [1.0]})
            group["history"]["scale"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p.grad))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(momentum * group["lr"] / group["step"] / group["history"]["scale"].sum())


class Clipping(torch.optim.SGD):
    """An optimizer that clips the total norm in its step, like timm's Lamb."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        return super().step(closure)


def train(model: nn.Module, optimizer: Optimizer, start: int, ctx: Any = None, steps: int = STEPS) -> None:
    """Train from step ``start``, on this rank's slice of each batch if ``ctx`` is given."""
    for number in range(start, start + steps):
        batch = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        if ctx is not None:
            batch = batch.chunk(ctx.world_size)[ctx.rank]
        optimizer.zero_grad()
        (model(batch).tanh() - 1).square().mean().backward()
        optimizer.step()


def in_one_process(make: Make, steps: int, is_restarted: bool = False) -> dict[str, Tensor]:
    """Train in one process, perhaps restarted after ``STEPS``. Loading by torch casts an optimizer's own float32 to
    float64."""
    model = network(0)
    optimizer = make(model.parameters())
    train(model, optimizer, 0, steps=min(steps, STEPS))
    if is_restarted:
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = make(model.parameters())
        optimizer.load_state_dict(state)
    train(model, optimizer, STEPS, steps=steps - STEPS)
    return model.state_dict()


def sharded(ctx: Any, make: Make, seed: int, steps_whole: bool) -> tuple[nn.Module, Optimizer]:
    model = fully_shard(network(seed), policy={nn.Linear}, process_group=ctx.group)
    params = model.parameters()
    return model, WholeParameterOptimizer(params, make) if steps_whole else make(params)


def check(model: nn.Module, expected: dict[str, Tensor], where: str) -> None:
    torch.testing.assert_close(full_state_dict(model), expected, rtol=1e-9, atol=1e-9, msg=lambda m: f"{where}: {m}")


# -- functions that save, and that load ----------------------------------------------------------------------------------


def save_job(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    save_checkpoint(path, {"optim": optimizer, "model": model}, process_group=ctx.group)


def load_job(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer, strict: bool = True) -> None:
    load_checkpoint(path, {"optim": optimizer, "model": model}, process_group=ctx.group, strict=strict)


def save_dcp(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    dcp.save({"optim": optim_state_dict(model, optimizer)}, checkpoint_id=path, process_group=ctx.group)


def load_dcp(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer, saved: Any = True) -> None:
    state = {"optim": optim_state_dict(model, optimizer, for_load=saved)}
    dcp.load(state, checkpoint_id=path, process_group=ctx.group)
    load_optim_state_dict(model, optimizer, state["optim"])


def load_dcp_as_it_is(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    load_dcp(ctx, path, model, optimizer, saved)


def save_helper(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    dcp.save({"optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path, process_group=ctx.group)


def load_helper(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, process_group=ctx.group)
    set_optimizer_state_dict(model, optimizer, state["optim"])


def save_whole(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    state = optim_state_dict(model, optimizer, full=True)
    if ctx.rank == 0:
        torch.save(state, path)


def load_whole(ctx: Any, path: str, model: nn.Module, optimizer: Optimizer) -> None:
    load_optim_state_dict(model, optimizer, torch.load(path))


SAVES = {"job": save_job, "dcp": save_dcp, "helper": save_helper, "whole": save_whole}
LOADS: dict[str, tuple[str, Callable[..., None]]] = {
    "load_checkpoint": ("job", load_job),
    "load_checkpoint, not strict": ("job", functools.partial(load_job, strict=False)),
    "dcp": ("dcp", load_dcp),
    "dcp, as it is saved": ("dcp", load_dcp_as_it_is),
    "helper": ("helper", load_helper),
    "dcp of a helper": ("helper", load_dcp),
    "whole": ("whole", load_whole),
}


def save(ctx: Any, name: str, make: Make, path: str) -> bool:
    """Train, save, and continue without a restart and from numbered state. Return whether the optimizer steps full
    parameters."""
    ctx.note(f"{name}: save")
    steps_whole = False
    try:
        model, optimizer = sharded(ctx, make, 0, steps_whole)
        train(model, optimizer, 0, ctx)
    except (RuntimeError, ValueError) as e:
        if "WholeParameterOptimizer" not in str(e) and "Muon only supports 2D parameters" not in str(e):
            raise
        steps_whole = True  # the error's cure
        model, optimizer = sharded(ctx, make, 0, steps_whole)
        train(model, optimizer, 0, ctx)
    check(model, in_one_process(make, STEPS), f"{name} before the restart")
    for kind, write in SAVES.items():
        if not (steps_whole and kind == "helper"):
            write(ctx, f"{path}-{name}-{kind}", model, optimizer)
    numbered, whole = copy.deepcopy(optimizer.state_dict()), full_state_dict(model)
    other, its_optimizer = sharded(ctx, make, 1, steps_whole)
    other.load_state_dict(whole)
    its_optimizer.load_state_dict(numbered)
    for each, stepped_by in ((model, optimizer), (other, its_optimizer)):
        train(each, stepped_by, STEPS, ctx)
        check(each, in_one_process(make, 2 * STEPS, is_restarted=each is other), f"{name} going on")
    if ctx.rank == 0:
        torch.save(whole, f"{path}-{name}-model")
    return steps_whole


def restart(ctx: Any, name: str, make: Make, path: str, steps_whole: bool) -> None:
    """Load what other ranks saved, in each way, and continue."""
    expected = in_one_process(make, 2 * STEPS, is_restarted=True)
    whole = torch.load(f"{path}-{name}-model")
    for how, (kind, load) in LOADS.items():
        if steps_whole and kind == "helper":
            continue
        ctx.note(f"{name}: {how}")
        model, optimizer = sharded(ctx, make, 1, steps_whole)
        model.load_state_dict(whole)
        load(ctx, f"{path}-{name}-{kind}", model, optimizer)
        train(model, optimizer, STEPS, ctx)
        check(model, expected, f"{name} by {how}")
