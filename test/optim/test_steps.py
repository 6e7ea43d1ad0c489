"""Steps that would change nothing, or the wrong thing, raise and leave everything unchanged."""

import contextlib
import functools
import warnings
from collections import defaultdict
from typing import Any

import pytest
import restarts
import torch
from models import Block, Net
from on_ranks import ranks
from pairs import all_pairs
from parity import check_same_params, full_params, parts, twins
from torch import nn
from torch.distributed.optim import _NamedOptimizer

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard

X = torch.ones(2, 4)
MAKE = {
    "parameters": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "flat": lambda m: torch.optim.SGD(flatshard.flat_parameters(m), lr=0.1),
    "whole": lambda m: flatshard.optim.WholeParameterOptimizer(m.parameters(), torch.optim.SGD, lr=0.1),
}


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@contextlib.contextmanager
def refused(model: nn.Module, match: str):
    """Expect an error, and no change of ``model``."""
    before = values(model)
    with pytest.raises(RuntimeError, match=match):
        yield
    assert all(map(torch.equal, before, values(model)))


def sharded(ctx, **arguments: Any) -> Net:
    torch.manual_seed(0)
    return fully_shard(Net(), policy={Block}, process_group=ctx.group, **arguments)


# -- during a pass -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MAKE))
@ranks(2)
def test_inside_no_sync(ctx, kind: str) -> None:
    model, beside = sharded(ctx), nn.Linear(2, 2)
    optimizer, other = MAKE[kind](model), torch.optim.SGD(beside.parameters())
    beside(torch.ones(2)).sum().backward()
    with flatshard.no_sync(model):
        optimizer.step()  # no gradients are missing
        model(X).sum().backward()
        other.step()
        held_refused(model, optimizer, " inside no_sync")
        other.step()
    held_refused(model, optimizer, "")  # the loop ended inside no_sync
    other.step()
    flatshard.reduce_gradients(model)  # the error's cure
    trained(model, optimizer)

    with flatshard.no_sync(model.blocks[0]):
        model(X).sum().backward()
    held_refused(model, optimizer, "")
    torch.optim.SGD(model.head.parameters(), lr=0.1).step()  # of another unit
    model(X).sum().backward()  # the error's cure: the last backward is outside of no_sync
    trained(model, optimizer)

    with flatshard.no_sync(model):
        model(X).sum().backward()
    flatshard.recover(model)  # drops held gradients
    optimizer.step()


def held_refused(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    held = (
        rf"{where}: units .*'blocks.0'.* hold gradients .* not in .grad. .*reduce_gradients\(module\) after it; then "
    )
    for verb in (flatshard.optim.get_total_norm, flatshard.optim.gradient_statistics):
        with refused(model, verb.__name__ + held):
            verb(model)
    with refused(model, "clip_grad_norm_" + held):
        flatshard.clip_grad_norm_(model, 1.0)
    with refused(model, "step" + held):
        optimizer.step()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    before = values(model)
    flatshard.clip_grad_norm_(model, 1.0)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, values(model), strict=True) if a.numel())
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", list(MAKE))
@ranks(2)
def test_after_values_were_replaced(ctx, kind: str) -> None:
    """Flat and full parameters have memory of their own, without the new values."""
    plain, model = twins(ctx, Net, {Block})
    for each, optimizer in ((model, MAKE[kind](model)), (plain, MAKE["parameters"](plain))):
        each(X.double()).sum().backward()
        for param in each.parameters():
            param.data = 0.5 * param.data + 0.25
        optimizer.step()
    check_same_params(model, plain)


@pytest.mark.parametrize("ahead", [False, True])
@ranks(3)
def test_units_of_which_ranks_have_no_elements(ctx, ahead: bool) -> None:
    """A step also changes these units on ranks without elements, so all ranks gather again, even if no version was
    counted."""
    adagrad = functools.partial(torch.optim.Adagrad, lr=0.1, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: slice) -> None:
        for step in range(3):
            batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            (model(batch[rows]).tanh() - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = restarts.network(0), restarts.network(0)
    train(plain, adagrad(plain.parameters()), slice(None))
    layout = flatshard.layouts.Blocks(4, max_padding=9)
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group, strategy="shard_optim", layout=layout)
    assert (model[2].weight.numel() > 0) == (ctx.rank == 0)
    optimizer = adagrad(model.parameters())
    if ahead:
        optimizer = flatshard.optim.OffloadedOptimizer(model.parameters(), adagrad)
        flatshard.optim.step_in_backward(model, optimizer)
    train(model, optimizer, slice(2 * ctx.rank, 2 * ctx.rank + 2))
    restarts.check(model, plain.state_dict(), "Adagrad")


@ranks(4)
def test_replicas_to_come(ctx) -> None:
    """Gradients are reduced within the shard group, but not yet over the replicas."""
    mesh = ctx.device_mesh((2, 2), ("replicas", "shards"))
    model = fully_shard(Net(), policy={Block}, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    flatshard.configure(model, all_reduce=False)
    model(X).sum().backward()
    cure = r"call flatshard.configure\(module, all_reduce=True\), then flatshard.reduce_gradients\(module\)"
    with refused(model, cure):
        optimizer.step()
    flatshard.configure(model, all_reduce=True)
    flatshard.reduce_gradients(model)
    trained(model, optimizer)


ARGUMENTS = ({}, {"strategy": ShardingStrategy.NO_SHARD}, {"mixed_precision": MixedPrecision(torch.bfloat16)})


@ranks(2)
def test_inside_summon_full_params(ctx) -> None:
    for arguments in ARGUMENTS:
        model = sharded(ctx, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(X).sum().backward()
        with flatshard.summon_full_params(model.blocks[0]):
            with refused(model, r"step inside summon_full_params of units .*'blocks.0'.* Step after the block"):
                optimizer.step()
            torch.optim.SGD(model.head.parameters(), lr=0.1).step()  # of another unit
        optimizer.step()
        with flatshard.summon_full_params(model, with_grads=True):
            expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]
            torch.optim.SGD(model.parameters(), lr=0.5).step()  # built inside
        torch.testing.assert_close(list(full_params(model).values()), expected)


# -- parameters from inside a context ----------------------------------------------------------------------------------


@contextlib.contextmanager
def unsharded(model: nn.Module):
    flatshard.unshard(model, recurse=True)
    yield
    flatshard.reshard(model)


@ranks(2)
def test_built_inside_summon_full_params(ctx) -> None:
    """Optimizers built there, or between unshard and reshard, raise."""
    summon = flatshard.summon_full_params
    ways = [
        *((each, summon) for each in ARGUMENTS),
        ({}, functools.partial(summon, offload_to_cpu=True)),
        ({}, unsharded),
    ]
    for arguments, around in ways:
        ctx.note(f"{arguments} {around}")
        model = sharded(ctx, **arguments)
        with around(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(X).sum().backward()
            with refused(model, r"built inside summon_full_params or unshard: it steps 'front.weight', .*model.param"):
                optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, like timm's, which does not call torch's ``__init__``."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()


@ranks(2)
def test_wrapper_without_the_init_of_torch(ctx) -> None:
    """Only the inner optimizer is checked, and it is a known one."""
    model = sharded(ctx)
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1))
    before = values(model)
    model(torch.randn(2, 4)).sum().backward()
    with warnings.catch_warnings(action="error"):
        optimizer.step()
    assert not all(map(torch.equal, values(model), before))
    assert isinstance(optimizer.state_dict()["state"][0]["exp_avg"], flatshard.checkpoint.ShardedValue)


class Bare(torch.optim.Optimizer):
    """An optimizer with groups and state only, and no other attributes of torch's ``__init__``."""

    def __init__(self, params: Any, lr: float) -> None:
        self.param_groups, self.state = [{"params": list(params), "lr": lr}], defaultdict(dict)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p.grad))
                p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.state = defaultdict(dict, {params[n]: values for n, values in state_dict["state"].items()})
        self.param_groups = [{**group, "params": params} for group in state_dict["param_groups"]]


def named_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return _NamedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.1)


@ranks(2)
def test_optimizers_without_what_the_init_of_torch_makes(ctx, path: str) -> None:
    """They train, and continue from a checkpoint, with a scheduler, as in one process. Others that hold their groups see
    changes."""
    for make in (named_adamw, lambda model: Bare(model.parameters(), 0.1)):
        (plain, model), (_, other) = (twins(ctx, Net, {Block}) for _ in range(2))
        models = model, other
        jobs = [{"model": m, "optimizer": make(m)} for m in (plain, *models)]
        x = parts(ctx, torch.rand(4, 4).double())

        def train(job: Any, x: torch.Tensor) -> None:
            job["model"](x).square().mean().backward()
            job["optimizer"].step()
            job["model"].zero_grad()

        train(jobs[0], x[0])
        train(jobs[1], x[1])
        jobs[0]["optimizer"].param_groups[0]["lr"] = jobs[1]["optimizer"].param_groups[0]["lr"] = 0.02
        flatshard.save_checkpoint(path, jobs[1], process_group=ctx.group, overwrite=True)
        assert flatshard.load_checkpoint(path, jobs[2], process_group=ctx.group)["optimizer"] is jobs[2]["optimizer"]
        state = flatshard.checkpoint.optim_state_dict(models[0], jobs[1]["optimizer"], full=True)
        flatshard.checkpoint.load_optim_state_dict(models[0], jobs[1]["optimizer"], state)
        for job, own in zip(jobs, (x[0], x[1], x[1]), strict=True):
            assert job["optimizer"].param_groups[0]["lr"] == 0.02
            job["optimizer"].param_groups[0]["lr"] = 0.01
            train(job, own)
        for model in models:
            check_same_params(model, plain)


def test_between_a_forward_and_its_backward(world):
    """torch refuses this backward, whose gradients would be for other weights."""
    for how, strategy, size in all_pairs(("", "flat", "data"), list(ShardingStrategy)[:3], (1, 2)):
        world(size)
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), strategy=strategy)
        optimizer = torch.optim.SGD(flatshard.flat_parameters(model) if how == "flat" else model.parameters(), lr=0.1)
        earlier, loss = (model(torch.ones(2, 4)).sum() for _ in range(2))
        loss.backward()
        if how == "data":
            for p in model.parameters():
                p.data = 2 * p.data
        else:
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
            earlier.backward()


def test_a_backward_that_names_its_inputs_is_warned_of(world):
    world(2)
    model = fully_shard(Net(), policy={Block})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # no pass is running
    model(X).sum().backward(inputs=list(model.head.parameters()))
    with pytest.warns(
        UserWarning, match=r"SGD.step changes nothing.* units the root module, 'blocks.0', .*backward\(inputs"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(X).sum().backward()  # the error's cure
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
