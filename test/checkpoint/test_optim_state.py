"""An optimizer's state by name: against the plain optimizer's own, from it, and through checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import CommunicationWatch, MemoryWatch, Model, layers, make, on_four, same, shard, train
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.optimizer import register_optimizer_step_post_hook

import flatshard
from flatshard import ShardingStrategy
from flatshard.checkpoint import ShardedValue, load_optim_state_dict, optim_state_dict, rekey

FULL, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
Optimizer = torch.optim.Optimizer


def one_group(model: Model) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def two_groups(model: Model) -> Optimizer:
    decay = [p for p in model.parameters() if len(flatshard.full_shape(p)) > 1]
    rest = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}], amsgrad=True)


def momentum(model: Model) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


KINDS = [one_group, two_groups, momentum]


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """A plain optimizer's state."""
    ids = {id(p): n for n, p in model.named_parameters()}
    order = [ids[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return rekey(optimizer.state_dict(), order)


def drop_empty(optimizer: Optimizer) -> None:
    """As some optimizers do, which make no state for nothing."""
    for param in [p for p in optimizer.state if not p.numel()]:
        del optimizer.state[param]


@pytest.mark.parametrize("kind", KINDS)
@ranks(1, 2, 3)
def test_from_a_plain_optimizer_and_back(ctx, kind: Callable[[Model], Optimizer]) -> None:
    plain = make()
    reference = kind(plain)
    train(plain, reference)
    expected = by_name(plain, reference)
    numbered = copy.deepcopy(reference.state_dict())
    for strategy in (FULL, NO_SHARD):
        for policy in (None, {nn.Linear}):
            ctx.note(f"{strategy.name}, policy {policy}")
            model = shard(ctx, make(), strategy, policy)
            optimizer = kind(model)
            with CommunicationWatch() as watch:
                load_optim_state_dict(model, optimizer, expected)
                state = optim_state_dict(model, optimizer)
            assert watch.seen == []
            sharded = ctx.world_size > 1 and strategy is FULL
            values = [v for s in state["state"].values() for v in s.values() if isinstance(v, Tensor)]
            assert any(isinstance(v, ShardedValue) for v in values) == sharded
            same(optim_state_dict(model, optimizer, full=True), expected)
            drop_empty(optimizer)
            same(optim_state_dict(model, optimizer, full=True), expected)
            only = optim_state_dict(model, optimizer, full=True, rank0_only=True)
            same(only, expected) if ctx.rank == 0 else None
            assert bool(only) == (ctx.rank == 0)
            other = kind(model)
            load_optim_state_dict(model, other, copy.deepcopy(state))
            same(optim_state_dict(model, other, full=True), expected)
            other = kind(model)
            load_optim_state_dict(model, other, numbered)
            same(optim_state_dict(model, other, full=True), expected)
            other.load_state_dict(flatshard.checkpoint.optim_state_dict_to_load(model, optimizer, expected))
            same(optim_state_dict(model, other, full=True), expected)


@ranks(1, 2, 3)
def test_flat_parameters(ctx) -> None:
    """An optimizer over flat parameters loads and saves what one over single parameters does."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    start = copy.deepcopy(plain)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, reference)
    expected = by_name(plain, reference)
    for strategy in (FULL, NO_SHARD):
        model = flatshard.fully_shard(
            copy.deepcopy(start), policy={nn.Linear}, strategy=strategy, process_group=ctx.group
        )
        optimizer = torch.optim.AdamW(flatshard.flat_parameters(model), lr=1e-2)
        for state in (expected, reference.state_dict()):
            load_optim_state_dict(model, optimizer, state)
            same(optim_state_dict(model, optimizer, full=True), expected)
        again = torch.optim.AdamW(flatshard.flat_parameters(model), lr=1e-2)
        load_optim_state_dict(model, again, optim_state_dict(model, optimizer))
        same(optim_state_dict(model, again, full=True), expected)
        template = optim_state_dict(model, torch.optim.AdamW(flatshard.flat_parameters(model)), for_load=True)
        assert template["state"].keys() == expected["state"].keys()
        single = copy.deepcopy(model)
        other = torch.optim.AdamW(single.parameters())
        load_optim_state_dict(single, other, optim_state_dict(model, again))
        same(optim_state_dict(single, other, full=True), expected)
    bad = copy.deepcopy(expected)
    bad["state"]["0.bias"]["step"] += 1
    with pytest.raises(ValueError, match=r"one flat parameter here, saved with different 'step': '0.weight', '0.bias'"):
        load_optim_state_dict(model, optimizer, bad)
    bad = copy.deepcopy(expected)
    bad["param_groups"] = [
        {**bad["param_groups"][0], "params": ["0.bias"], "lr": 3.0},
        {**bad["param_groups"][0], "params": [n for n in bad["param_groups"][0]["params"] if n != "0.bias"]},
    ]
    with pytest.raises(ValueError, match=r"saved with other options than the first of it: '0.bias'"):
        load_optim_state_dict(model, optimizer, bad)


@ranks(2)
def test_several_optimizers(ctx) -> None:
    def halves(model: Model) -> list[Optimizer]:
        params = list(model.parameters())
        return [torch.optim.AdamW(params[:4]), torch.optim.SGD(params[4:], lr=0.1, momentum=0.5)]

    model = shard(ctx, make(), policy={nn.Linear})
    optimizers = halves(model)
    for optimizer in optimizers:
        train(model, optimizer)
    state = optim_state_dict(model, optimizers)
    whole = optim_state_dict(model, optimizers, full=True)
    assert len(state["param_groups"]) == 2
    for given in (state, whole):
        others = halves(model)
        load_optim_state_dict(model, others, given)
        same(optim_state_dict(model, others, full=True), whole)
    others = halves(model)
    with pytest.raises(ValueError, match=r"unexpected: .*'conv.bias'"):
        load_optim_state_dict(model, others[0], state)
    load_optim_state_dict(model, others[0], state, strict=False)
    assert len(others[0].state) == 4 - 1  # one was never used


class Wrapper(torch.optim.Optimizer):
    """Holds another one, as accelerate's does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)


@ranks(2)
def test_an_optimizer_that_holds_another(ctx) -> None:
    model = shard(ctx, make(), policy={nn.Linear})
    optimizer = one_group(model)
    train(model, optimizer)
    state = optim_state_dict(model, Wrapper(optimizer), full=True)
    fresh = one_group(model)
    template = optim_state_dict(model, Wrapper(fresh), for_load=True)
    assert template["state"].keys() >= state["state"].keys()
    assert not fresh.state
    load_optim_state_dict(model, Wrapper(fresh), state)
    same(optim_state_dict(model, fresh, full=True), state)


class Factored(torch.optim.SGD):
    """Keeps a row of its own for each matrix."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["rows"] = torch.ones(3, 2)


@ranks(1, 2)
def test_what_does_not_fit_raises_and_changes_nothing(ctx) -> None:
    model = shard(ctx, make())
    optimizer = one_group(model)
    train(model, optimizer)
    good = optim_state_dict(model, optimizer, full=True)
    before = copy.deepcopy(good)

    def wrong(pattern: str, change: Callable[[dict], Any]) -> None:
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(ValueError, match=pattern):
            load_optim_state_dict(model, optimizer, bad)
        same(optim_state_dict(model, optimizer, full=True), before)

    def drop(state: dict) -> None:
        state["param_groups"][0]["params"].remove("scale")
        state["param_groups"][0]["params"].remove("up.bias")

    wrong(r"nothing has been changed:\n\tmissing: 'scale', 'up.bias'$", drop)
    wrong("unexpected: 'nobody'", lambda s: s["state"].update(nobody={}))
    wrong(
        r"up.weight: exp_avg: size mismatch.*\(3, 3\)",
        lambda s: s["state"]["up.weight"].update(exp_avg=torch.ones(3, 3)),
    )
    wrong(r"ignored: exp_avg: shape \(7,\)", lambda s: s["state"]["ignored"].update(exp_avg=torch.ones(7)))
    wrong("with 'state' and 'param_groups'", lambda s: s.pop("state"))
    with pytest.raises(ValueError, match=r"steps a parameter of shape \(2, 2\) that this Model has not"):
        optim_state_dict(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))], lr=1))
    plain = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1)
    with pytest.raises(ValueError, match="the state numbers 1 parameters"):
        load_optim_state_dict(model, optimizer, plain.state_dict())
    with pytest.raises(ValueError, match="needs full=True"):
        optim_state_dict(model, optimizer, rank0_only=True)
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="Call it outside"):
        optim_state_dict(model, optimizer)
    factored = Factored(model.parameters(), lr=0.1)
    train(model, factored, 1)
    with pytest.raises(NotImplementedError, match=r"state 'rows' of '.*' has shape \(3, 2\)"):
        optim_state_dict(model, factored)


def test_rekey():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    named = rekey(state, ["weight", "bias"])
    assert list(named["state"]) == named["param_groups"][0]["params"] == ["weight", "bias"]
    assert rekey(named, ["weight", "bias"], "ids") == state
    with pytest.raises(ValueError, match="rekey: '1' are not among the 1 names given"):
        rekey(state, ["weight"])
    with pytest.raises(ValueError, match="to must be 'names' or 'ids', got 'x'"):
        rekey(state, [], "x")


@ranks(4)
def test_tensor_parallelism(ctx, path: str) -> None:
    """With tensor parallelism, uneven: states are cut as DTensors and then as shards."""
    plain = layers()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, reference)
    expected = by_name(plain, reference)
    model = on_four(ctx, "tp")
    optimizer = torch.optim.AdamW(model.parameters())
    load_optim_state_dict(model, optimizer, expected)
    same(optim_state_dict(model, optimizer, full=True), expected)
    assert bool(optim_state_dict(model, optimizer, full=True, rank0_only=True)) == (ctx.rank == 0)
    dcp.save(optim_state_dict(model, optimizer), checkpoint_id=path)
    for other in (on_four(ctx, "tp"), on_four(ctx, "plain")):
        fresh = torch.optim.AdamW(other.parameters())
        state = optim_state_dict(other, fresh, for_load=True)
        dcp.load(state, checkpoint_id=path)
        load_optim_state_dict(other, fresh, state)
        same(optim_state_dict(other, fresh, full=True), expected)


@ranks(3)
def test_where_optimizers_of_ranks_differ_all_ranks_raise(ctx) -> None:
    """A part that an optimizer lacks is an error on all ranks, not zeros, whether its unit has other parameters or none."""
    for policy, dropped in ((None, {"up.weight"}), ({nn.Linear}, {"up.weight", "up.bias"})):
        ctx.note(f"policy {policy}")
        model = shard(ctx, make(), policy=policy)
        here = [p for n, p in model.named_parameters() if ctx.rank != 1 or n not in dropped]
        optimizer = torch.optim.AdamW(here, lr=1e-2)
        train(model, optimizer)
        for rank0_only in (False, True):
            with pytest.raises(
                ValueError, match=r"'up.weight' is stepped on rank 0, and not by the optimizer of rank 1"
            ):
                optim_state_dict(model, optimizer, full=True, rank0_only=rank0_only)
    model = shard(ctx, make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    if ctx.rank == 2:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"has 'exp_avg' of '[a-z.]+' in torch.float32, rank 2 has none"):
        optim_state_dict(model, optimizer, full=True)


@ranks(4)
def test_where_optimizers_of_replicas_differ(ctx) -> None:
    """Replicas of what is missing raise, too."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    model = flatshard.fully_shard(nn.Linear(5, 7), device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    here = [p for n, p in model.named_parameters() if ctx.rank != 1 or n != "weight"]
    optimizer = torch.optim.AdamW(here)
    train(model, optimizer)
    told = "'weight' is stepped on rank 0" if ctx.rank < 2 else "but on others, which tell more"
    with pytest.raises(ValueError, match=told):
        optim_state_dict(model, optimizer, full=True)


@ranks(2)
def test_names_under_checkpoint_wrapper(ctx, path: str) -> None:
    """Names are those of the state dict, which has none of checkpoint_wrapper's, whoever is wrapped: in all ways to load."""

    def build(wraps: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 5), nn.Tanh()), nn.LayerNorm(5))
        model.tied = model[2]
        if wraps:
            model[1] = checkpoint_wrapper(model[1])
            model[2] = checkpoint_wrapper(model[2])
        return model

    plain = build(False)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, reference)
    expected = by_name(plain, reference)
    plain_wrapped = build(True)
    for stepped in (list(plain_wrapped.parameters()), plain_wrapped.named_parameters()):
        theirs = torch.optim.AdamW(stepped, lr=1e-2)
        train(plain_wrapped, theirs)
    numbered = theirs.state_dict()  # with their names
    for flat in (False, True):
        model = flatshard.fully_shard(build(True), policy={nn.Linear}, process_group=ctx.group)
        optimizer = torch.optim.AdamW(flatshard.flat_parameters(model) if flat else model.parameters(), lr=1e-2)
        load_optim_state_dict(model, optimizer, expected)
        state = optim_state_dict(model, optimizer)
        assert state["state"].keys() == expected["state"].keys() <= model.state_dict().keys()
        same(optim_state_dict(model, optimizer, full=True), expected)
        template = optim_state_dict(model, torch.optim.AdamW(model.parameters()), for_load=True)
        assert flat or template["state"].keys() == expected["state"].keys()
        load_optim_state_dict(model, optimizer, numbered)
    flatshard.save_checkpoint(path, {"model": plain_wrapped, "optim": theirs}, process_group=ctx.group)
    model = flatshard.fully_shard(build(False), process_group=ctx.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    flatshard.load_checkpoint(path, {"model": model, "optim": optimizer}, process_group=ctx.group)


class Counting(torch.optim.AdamW):
    """Has an attribute of its own and options that a step changes in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.steps: int = 0
        for group in self.param_groups:
            group["seen"] = [0]
            group["count"] = torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["seen"][0] += 1
            group["count"] += 1
        return super().step(closure)


@pytest.mark.parametrize("flat", [False, True])
@ranks(1, 2)
def test_a_template_takes_no_step(ctx, flat: bool) -> None:
    """A template comes of no step: no hook runs, nothing moves, and a parameter at a time is held besides."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    optimizer = Counting(flatshard.flat_parameters(model) if flat else model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which counts calls of ``optimizer.step``
    everybody = register_optimizer_step_post_hook(lambda o, *_: seen.append("all") if o is optimizer else None)
    kept = [p.detach().clone() for p in model.parameters()]
    with MemoryWatch() as watch:
        state = optim_state_dict(model, optimizer, for_load=True)["state"]
    everybody.remove()
    part = model[0].weight.nbytes
    assert watch.peak <= 6 * 2 * part + 6 * part  # the averages; values, gradients and what AdamW needs of one
    assert seen == []
    assert not getattr(optimizer, "_opt_called", False)
    assert optimizer.steps == 0
    assert all(g["seen"] == [0] and g["count"] == 0 for g in optimizer.param_groups)
    assert not optimizer.state
    assert all(p.grad is None and torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))
    assert {n: set(v) for n, v in state.items()} == {
        n: {"step", "exp_avg", "exp_avg_sq"} for n, _ in model.named_parameters()
    }
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    found = optim_state_dict(model, optimizer)["state"]
    for name, values in found.items():
        for key, value in values.items():
            made = state[name][key]
            assert (type(made), made.shape, made.dtype) == (type(value), value.shape, value.dtype), (name, key)


def test_templates_of_torchs_optimizers(world):
    """What a template shows is what a step makes."""
    world(2)
    kinds = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    more = (("Adam", {"fused": True}), ("Adam", {"lr": torch.tensor(0.1)}), ("SGD", {"lr": 0.1, "momentum": 0.9}))
    for kind, options in (*((kind, {}) for kind in kinds), *more):
        model = flatshard.fully_shard(nn.Linear(5, 7))
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        state = optim_state_dict(model, optimizer, for_load=True)["state"]
        for param in model.parameters():
            param.grad = torch.zeros_like(param.detach())
        optimizer.step()
        assert forms(state) == forms(optim_state_dict(model, optimizer)["state"]), kind


def forms(state: dict[str, Any]) -> dict[tuple[str, str], Any]:
    every = {(name, key): value for name, values in state.items() for key, value in values.items()}
    return {k: (type(v), v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for k, v in every.items()}


@ranks(2)
def test_parameters_frozen_after_some_steps(ctx, path: str) -> None:
    """What was frozen after some steps keeps its state, and a checkpoint of it loads into the same model."""

    def build() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        flatshard.fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build()
    train(model, optimizer)
    model[0].weight.requires_grad_(False)
    train(model, optimizer)
    flatshard.save_checkpoint(path, {"model": model, "optim": optimizer}, process_group=ctx.group)
    expected = optim_state_dict(model, optimizer, full=True)
    assert "0.weight" in expected["state"]
    other, other_optimizer = build()
    other[0].weight.requires_grad_(False)
    for target, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        flatshard.load_checkpoint(path, {"model": target, "optim": its_optimizer}, process_group=ctx.group)
        same(optim_state_dict(target, its_optimizer, full=True), expected)
        train(target, its_optimizer, 1)
    everything = optim_state_dict(*build(), for_load=True)
    assert everything["state"].keys() == expected["state"].keys()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Linear(5, 6, bias=False), nn.Linear(6, 6)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.embed(x)) @ self.head.weight


@ranks(2)
def test_tied_weights_and_flat_parameters(ctx, path: str) -> None:
    torch.manual_seed(0)
    model = flatshard.fully_shard(Tied(), process_group=ctx.group)
    optimizer = torch.optim.AdamW(flatshard.flat_parameters(model), lr=1e-2)
    train(model, optimizer)
    expected = optim_state_dict(model, optimizer, full=True)
    flatshard.save_checkpoint(path, {"model": model, "optim": optimizer}, process_group=ctx.group)
    other = flatshard.fully_shard(Tied(), process_group=ctx.group)
    again = torch.optim.AdamW(flatshard.flat_parameters(other), lr=1e-2)
    flatshard.load_checkpoint(path, {"model": other, "optim": again}, process_group=ctx.group)
    same(optim_state_dict(other, again, full=True), expected)
    stranger = torch.optim.AdamW(flatshard.flat_parameters(model))
    with pytest.raises(RuntimeError, match=r"optimizer 'optim' steps parameters of no module in the state"):
        flatshard.save_checkpoint(f"{path}2", {"model": other, "optim": stranger}, process_group=ctx.group)
