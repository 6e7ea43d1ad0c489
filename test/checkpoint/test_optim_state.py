"""Optimizer state by name: compared with the plain optimizer's, loaded from it, and in checkpoints."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import ranks
from restarts import Counting
from saving import CommunicationWatch, MemoryWatch, Model, by_name, layers, make, same, shard, train
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import ShardedValue, load_optim_state_dict, optim_state_dict

FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
Optimizer = torch.optim.Optimizer


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_groups(model: Model) -> Optimizer:
    decay = [p for p in model.parameters() if len(flatshard.full_shape(p)) > 1]
    rest = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], amsgrad=True)


def drop_empty(optimizer: Optimizer) -> None:
    """Remove state of empty parameters, like optimizers that create none for them."""
    for param in [p for p in optimizer.state if not p.numel()]:
        del optimizer.state[param]


@pytest.mark.parametrize("kind", [adamw, two_groups])
@ranks(3)
def test_from_a_plain_optimizer_and_back(ctx, kind: Callable[[Model], Optimizer]) -> None:
    plain = make()
    reference = kind(plain)
    train(plain, reference)
    expected = by_name(plain, reference)
    numbered = copy.deepcopy(reference.state_dict())
    for strategy, policy in itertools.product((FULL, NO_SHARD), (None, {nn.Linear})):
        ctx.note(f"{strategy.name}, policy {policy}")
        model = shard(ctx, make(), strategy, policy)
        optimizer = kind(model)
        with CommunicationWatch() as watch:
            load_optim_state_dict(model, optimizer, expected)
            state = optim_state_dict(model, optimizer)
        assert watch.seen == []
        values = [v for s in state["state"].values() for v in s.values()]
        assert any(isinstance(v, ShardedValue) for v in values) == (strategy is FULL)
        whole(model, optimizer, expected)
        drop_empty(optimizer)
        whole(model, optimizer, expected)
        only = optim_state_dict(model, optimizer, full=True, rank0_only=True)
        same(only, expected) if ctx.rank == 0 else None
        assert bool(only) == (ctx.rank == 0)
        for given in (copy.deepcopy(state), numbered):
            other = kind(model)
            load_optim_state_dict(model, other, given)
            whole(model, other, expected)
        other.load_state_dict(flatshard.checkpoint.optim_state_dict_to_load(model, optimizer, expected))
        whole(model, other, expected)


def whole(model: nn.Module, optimizer: Any, expected: dict[str, Any]) -> None:
    same(optim_state_dict(model, optimizer, full=True), expected)


@ranks(2)
def test_plain_model_and_optimizer_continue(ctx) -> None:
    """Training continues without flatshard from full state, as docs/checkpoints.md says."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = fully_shard(copy.deepcopy(plain), policy={nn.Linear}, process_group=ctx.group)
    optimizer, later = adamw(model), adamw(plain)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    plain.load_state_dict(flatshard.checkpoint.full_state_dict(model))
    later.load_state_dict(optim_state_dict(model, optimizer, full=True))
    for each, its_optimizer in ((model, optimizer), (plain, later)):
        each(x).sum().backward()
        its_optimizer.step()
    torch.testing.assert_close({**flatshard.checkpoint.full_state_dict(model)}, {**plain.state_dict()})


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.linear(x)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)])
@ranks(2)
def test_a_parameter_without_dimensions(ctx, kind: Callable[..., Optimizer]) -> None:
    """State from before sharding, or of a plain run, is sharded: its averages have no dimensions, as counts have."""

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    plain = Gained()
    optimizer = kind(plain.parameters(), lr=0.1)
    step(plain, optimizer)
    for loads in ("never", "before", "after"):
        ctx.note(loads)
        model, reference = copy.deepcopy(plain), copy.deepcopy(plain)
        ours, theirs = kind(model.parameters(), lr=0.1), kind(reference.parameters(), lr=0.1)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which would share tensors
        if loads == "never":
            step(model, ours)
            step(reference, theirs := kind(reference.parameters(), lr=0.1))
        elif loads == "before":
            ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        fully_shard(model, process_group=ctx.group)
        if loads == "after":
            ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(2):
            step(model, ours)
            step(reference, theirs)
        for each in (ours, theirs):
            each.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for param, state in ours.state.items():
            assert {v.numel() for key, v in state.items() if key != "step"} == {param.numel()}
        step(model, ours)
        step(reference, theirs)
        for name, value in flatshard.checkpoint.full_state_dict(model).items():
            torch.testing.assert_close(value, reference.state_dict()[name])


@ranks(3)
def test_flat_parameters(ctx) -> None:
    """An optimizer over flat parameters loads and saves the same state as one over single parameters."""
    plain, expected = trained_layers()
    for strategy in (FULL, NO_SHARD):
        model = fully_shard(layers(), policy={nn.Linear}, strategy=strategy, process_group=ctx.group)
        single = copy.deepcopy(model)
        optimizers = [torch.optim.AdamW(flatshard.flat_parameters(model), lr=1e-2) for _ in range(2)]
        template = optim_state_dict(model, torch.optim.AdamW(flatshard.flat_parameters(model)), for_load=True)
        assert template["state"].keys() == expected["state"].keys()
        for optimizer, state in zip(optimizers, (expected, plain.state_dict()), strict=True):
            load_optim_state_dict(model, optimizer, state)
            whole(model, optimizer, expected)
        for module, fresh in ((model, torch.optim.AdamW(flatshard.flat_parameters(model))), (single, adamw(single))):
            load_optim_state_dict(module, fresh, optim_state_dict(model, optimizer))
            whole(module, fresh, expected)
    counted, regrouped = copy.deepcopy(expected), copy.deepcopy(expected)
    counted["state"]["0.bias"]["step"] += 1
    (group,) = regrouped["param_groups"]
    group["params"].remove("0.bias")
    regrouped["param_groups"].append({**group, "params": ["0.bias"], "lr": 3.0})
    for bad, match in (
        (counted, "saved with different 'step': '0.weight', '0.bias'"),
        (regrouped, "saved with other options than the first of it: '0.bias'"),
    ):
        with pytest.raises(ValueError, match=match):
            load_optim_state_dict(model, optimizer, bad)


def trained_layers() -> tuple[Optimizer, dict[str, Any]]:
    """Return the optimizer of a plain model and its state by name."""
    plain = layers()
    optimizer = adamw(plain)
    train(plain, optimizer)
    return optimizer, by_name(plain, optimizer)


class Wrapper(torch.optim.Optimizer):
    """Holds another optimizer, like accelerate's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


@ranks(2)
def test_several_optimizers_of_which_one_holds_another(ctx) -> None:
    def halves(model: Model) -> list[Optimizer]:
        params = list(model.parameters())
        return [torch.optim.AdamW(params[:4]), torch.optim.SGD(params[4:], lr=0.1, momentum=0.5)]

    model = shard(ctx, make(), policy={nn.Linear})
    first, second = halves(model)
    for optimizer in (first, second):
        train(model, optimizer)
    expected = optim_state_dict(model, [first, second], full=True)
    for given in (optim_state_dict(model, [Wrapper(first), second]), expected):
        others = halves(model)
        holding = [Wrapper(others[0]), others[1]]
        template = optim_state_dict(model, holding, for_load=True)
        assert template["state"].keys() >= expected["state"].keys()
        assert not any(other.state for other in others)
        load_optim_state_dict(model, holding, given)
        whole(model, others, expected)
    with pytest.raises(ValueError, match=r"unexpected: .*'conv.bias'"):
        load_optim_state_dict(model, others[0], given)


class Factored(torch.optim.SGD):
    """Keeps an unrelated row of state for each matrix."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["rows"] = torch.ones(3, 2)


@ranks(2)
def test_what_does_not_fit_raises_and_changes_nothing(ctx) -> None:
    model = shard(ctx, make())
    optimizer = adamw(model)
    train(model, optimizer)
    good = optim_state_dict(model, optimizer, full=True)
    numbered = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1).state_dict()
    states, (group,) = good["state"], good["param_groups"]

    def but(fqn: str, **values: Any) -> dict[str, Any]:
        return {**good, "state": {**states, fqn: {**states.get(fqn, {}), **values}}}

    kept = [n for n in group["params"] if n not in ("scale", "up.bias")]
    for pattern, bad in (
        ("missing: 'scale', 'up.bias'$", {**good, "param_groups": [{**group, "params": kept}]}),
        ("unexpected: 'nobody'", but("nobody")),
        (r"up.weight: exp_avg: size mismatch.*\(3, 3\)", but("up.weight", exp_avg=torch.ones(3, 3))),
        (r"ignored: exp_avg: shape \(7,\)", but("ignored", exp_avg=torch.ones(7))),
        ("the state numbers 1 parameters", numbered),
    ):
        with pytest.raises(ValueError, match=pattern):
            load_optim_state_dict(model, optimizer, bad)
        whole(model, optimizer, good)
    with pytest.raises(ValueError, match=r"steps a parameter of shape \(2, 2\) that this Model has not"):
        optim_state_dict(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], lr=1))
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="Call it outside"):
        optim_state_dict(model, optimizer)
    factored = Factored(model.parameters(), lr=0.1)
    train(model, factored, 1)
    with pytest.raises(NotImplementedError, match=r"state 'rows' of '.*' has shape \(3, 2\)"):
        optim_state_dict(model, factored)


@ranks(4)
def test_where_optimizers_of_ranks_differ_all_ranks_raise(ctx) -> None:
    """Missing optimizer state raises on all ranks, also of other replicas, rather than loading as zeros."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    lacks = r"'0.weight' is stepped on rank 0, and not by the optimizer of rank 1"
    for policy, where, dropped in (
        (None, {"process_group": ctx.group}, {"0.weight"}),
        ({nn.Linear}, {"process_group": ctx.group}, {"0.weight", "0.bias"}),  # its unit has no others
        (None, {"device_mesh": mesh, "strategy": ShardingStrategy.HYBRID_SHARD}, {"0.weight"}),
    ):
        ctx.note(f"policy {policy}, {where}")
        model = fully_shard(layers(), policy=policy, **where)
        optimizer = torch.optim.AdamW(p for n, p in model.named_parameters() if ctx.rank != 1 or n not in dropped)
        train(model, optimizer)
        told = lacks if ctx.rank < 2 or "strategy" not in where else "but on others, which tell more"
        for rank0_only in (False, True):
            with pytest.raises(ValueError, match=told):
                optim_state_dict(model, optimizer, full=True, rank0_only=rank0_only)
    model = fully_shard(layers(), process_group=ctx.group)
    optimizer = adamw(model)
    train(model, optimizer)
    with pytest.raises(ValueError, match=r"has 'exp_avg' of '[0-9.a-z]+' in torch.float32, rank 2 has none"):
        optim_state_dict(model, adamw(model) if ctx.rank == 2 else optimizer, full=True)


@ranks(2)
def test_names_under_checkpoint_wrapper(ctx, path: str) -> None:
    """Names are those of the state dict, without checkpoint_wrapper's prefix, in all ways to load."""

    def build(wraps: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.LayerNorm(5))
        model.tied = model[2]
        if wraps:
            model[1] = checkpoint_wrapper(model[1])
            model[2] = checkpoint_wrapper(model[2])
        return model

    plain, wrapped = build(False), build(True)
    reference, theirs = adamw(plain), torch.optim.AdamW(wrapped.named_parameters(), lr=1e-2)  # with the wrappers' names
    train(plain, reference)
    train(wrapped, theirs)
    expected = by_name(plain, reference)
    for flat in (False, True):
        model = fully_shard(build(True), policy={nn.Linear}, process_group=ctx.group)
        template = optim_state_dict(model, adamw(model), for_load=True)
        assert template["state"].keys() == expected["state"].keys() <= model.state_dict().keys()
        optimizer = torch.optim.AdamW(flatshard.flat_parameters(model) if flat else model.parameters(), lr=1e-2)
        load_optim_state_dict(model, optimizer, expected)
        assert optim_state_dict(model, optimizer)["state"].keys() == expected["state"].keys()
        whole(model, optimizer, expected)
        load_optim_state_dict(model, optimizer, theirs.state_dict())
    flatshard.save_checkpoint(path, {"model": wrapped, "optim": theirs}, process_group=ctx.group)
    model = fully_shard(build(False), process_group=ctx.group)
    flatshard.load_checkpoint(path, {"model": model, "optim": adamw(model)}, process_group=ctx.group)


@pytest.mark.parametrize("flat", [False, True])
@ranks(2)
def test_a_template_takes_no_step(ctx, flat: bool) -> None:
    """A template takes no step: no hook runs, no value changes, and it holds one more parameter at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    optimizer = Counting(flatshard.flat_parameters(model) if flat else model.parameters())
    (group,) = optimizer.param_groups
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    kept = [p.detach().clone() for p in model.parameters()]
    with MemoryWatch() as watch:
        state = optim_state_dict(model, optimizer, for_load=True)["state"]
    part = model[0].weight.nbytes
    assert watch.peak <= 6 * part + 6 * part  # the momentum of all; temporaries of one parameter's step
    assert seen == []
    assert not optimizer.state
    assert "step" not in group
    assert all(p.grad is None and torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    assert forms(state) == forms(optim_state_dict(model, optimizer)["state"])
    assert {key for _, key in forms(state)} == {"momentum"}
    optimizer.state.clear()
    optim_state_dict(model, optimizer, for_load=True)
    assert group["step"] == group["history"]["scale"].max() == 1  # a step changes these in place


def forms(state: dict[str, Any]) -> dict[tuple[str, str], Any]:
    every = {(name, key): value for name, values in state.items() for key, value in values.items()}
    return {k: (type(v), v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for k, v in every.items()}


@ranks(2)
def test_tied_weights_and_flat_parameters(ctx, path: str) -> None:
    jobs = []
    for _ in range(2):
        model = shard(ctx, make())
        jobs.append({"model": model, "optim": torch.optim.AdamW(flatshard.flat_parameters(model), lr=1e-2)})
    train(*jobs[0].values())
    flatshard.save_checkpoint(path, jobs[0], process_group=ctx.group)
    flatshard.load_checkpoint(path, jobs[1], process_group=ctx.group)
    whole(*jobs[1].values(), optim_state_dict(*jobs[0].values(), full=True))
    with pytest.raises(RuntimeError, match=r"optimizer 'optim' steps parameters of no module in the state"):
        flatshard.save_checkpoint(f"{path}2", jobs[0] | {"model": model}, process_group=ctx.group)
