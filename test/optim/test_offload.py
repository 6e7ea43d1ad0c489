"""Optimizers with state on the host, stepped unit by unit, give the same bits. See ``accelerator/offload.py``."""

import contextlib
import copy
import functools
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from encoded import Wrapped
from models import Block, Net
from on_ranks import ranks
from pairs import all_pairs, some
from parity import full_params
from restarts import Clipping, Counting
from saving import same as same_by_name
from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard.checkpoint import optim_state_dict
from flatshard.layouts import Whole
from flatshard.optim import OffloadedOptimizer, WholeParameterOptimizer

Optimizer = torch.optim.Optimizer


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "foreach": (optim.AdamW, {"lr": 0.01, "foreach": True}),
    "fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),  # it has state before its first step
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "counting": (Counting, {"lr": 0.1}),
}


class Unused(Net):
    """A model with a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def sharded(ctx, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    where = {} if ctx is None or "device_mesh" in options else {"process_group": ctx.group}
    return fully_shard(Unused(), policy={Block}, **where, **options)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, each with parameters of all units."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2], "lr": 0.05}]


def backward(ctx, model: nn.Module, step: int, scale: float = 1.0) -> Tensor:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
    loss = model(x).float().square().mean() * scale
    loss.backward()
    return loss


def same_bits(one: Any, other: Any) -> None:
    """Compare bit for bit, including dicts and lists of tensors."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def same(one: Optimizer, other: Optimizer) -> None:
    """Compare parameters, state, and options of groups."""
    params = [[p for group in each.param_groups for p in group["params"]] for each in (one, other)]
    same_bits(*([p.detach() for p in each] for each in params))
    assert len(one.state) == len(other.state)
    same_bits([one.state.get(p) for p in params[0]], [other.state.get(p) for p in params[1]])
    same_bits(*([{k: v for k, v in g.items() if k != "params"} for g in each.param_groups] for each in (one, other)))


def flat_and_alone(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [*flatshard.flat_parameters(model), nn.Parameter(torch.ones(3))]}]


def groups_and_alone(model: nn.Module) -> list[dict[str, Any]]:
    first, second = groups(model)
    return [first, {**second, "params": [*second["params"], nn.Parameter(torch.ones(3))]}]


MIXED = MixedPrecision(torch.bfloat16, torch.float32)
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "NO_SHARD", "HYBRID_SHARD", "HYBRID_FULL_SHARD"]
CHOICES = (list(KINDS), STRATEGIES, (None, MIXED), (1, 2), (False, True))
CASES = [
    (*case, 4 if case[1].startswith("HYBRID") else 1 + turn % 3, ahead)
    for ahead, count in ((False, 10), (True, 7))
    for turn, case in enumerate(some(all_pairs(*CHOICES), count, turn=ahead))
]
CASES += [("fused", "SHARD_OPTIM", None, 1, False, 3, True)]  # C++ changes parameters by pointers


@pytest.mark.parametrize(("kind", "strategy", "precision", "micro", "is_flat", "world_size", "ahead"), CASES, ids=str)
@ranks()
def test_the_same_bits(ctx, kind: str, strategy: str, precision: Any, micro: int, is_flat: bool, ahead: bool) -> None:
    """Steps agree with the optimizer's own, with a scheduler, after clipping, and with ``ahead`` in backward, where gradients
    are freed."""
    where: dict[str, Any] = {"strategy": ShardingStrategy[strategy], "mixed_precision": precision}
    if strategy.startswith("HYBRID"):
        where["device_mesh"] = ctx.device_mesh((2, 2), ("replicate", "shard"))
    (cls, settings), arrange = KINDS[kind], flat_and_alone if is_flat else groups_and_alone
    models = [sharded(ctx, **where) for _ in range(2)]
    makes = [functools.partial(OffloadedOptimizer, optimizer_class=cls), cls]
    both = [(m, make(arrange(m), **copy.deepcopy(settings))) for m, make in zip(models, makes, strict=True)]
    schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.9) for _, o in both]
    if ahead:
        flatshard.optim.step_in_backward(*both[0])
    for step in range(3):
        for (model, optimizer), scheduler in zip(both, schedulers, strict=True):
            *params, alone = (p for group in optimizer.param_groups for p in group["params"])
            alone.grad = torch.full((3,), 0.5)
            for i in range(micro):
                with flatshard.no_sync(model) if ahead and i + 1 < micro else contextlib.nullcontext():
                    backward(ctx, model, micro * step + i)
            assert any(p.grad is not None for p in params) is not (ahead and optimizer is both[0][1])
            if not ahead:
                flatshard.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        same(*(o for _, o in both))


@ranks(2)
def test_the_state_of_either_goes_on_in_the_other(ctx, path: str) -> None:
    """Each continues from the other's state by number or name, sharded or full, and by torch's helper. A checkpoint with the
    scheduler continues with the bits of an uninterrupted job."""

    def job(make: Callable[..., Optimizer]) -> dict[str, Any]:
        model = sharded(ctx)
        optimizer = make(groups(model), **options)
        return {"model": model, "optimizer": optimizer, "scheduler": optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

    def train(job: dict[str, Any], steps: range) -> None:
        for step in steps:
            backward(ctx, job["model"], step)
            job["optimizer"].step()
            job["optimizer"].zero_grad()
            job["scheduler"].step()

    for kind in some(KINDS, 3, turn=1):
        cls, options = KINDS[kind]
        away = functools.partial(OffloadedOptimizer, optimizer_class=cls)
        for make, other in ((away, cls), (cls, away), (away, away)):
            ctx.note(f"{kind} {make} {other}")
            first = job(make)
            train(first, range(2))
            model, optimizer = first["model"], first["optimizer"]
            fresh = other(groups(model), **options)
            fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if isinstance(fresh, OffloadedOptimizer):
                assert {type(v) for values in fresh.state.values() for v in values.values()} <= {Tensor, float}
            fresh.state_dict()  # a plain optimizer checks its shards here if it has not stepped
            same(optimizer, fresh)
            same_by_name(*(optim_state_dict(model, o, full=True) for o in (fresh, optimizer)))
            helped = [get_optimizer_state_dict(model, o)["state"].keys() for o in (optimizer, fresh)]
            assert helped[0] == helped[1]
            assert type(copy.deepcopy(fresh)) is type(fresh)
            flatshard.save_checkpoint(path, first, overwrite=True, process_group=ctx.group)
            train(first, range(2, 4))
            then = job(other)
            flatshard.load_checkpoint(path, then, process_group=ctx.group)
            train(then, range(2, 4))
            same(first["optimizer"], then["optimizer"])


@ranks(2)
def test_groups_closures_hooks_and_plain_parameters(ctx) -> None:
    both = []
    for make in (functools.partial(OffloadedOptimizer, optimizer_class=optim.AdamW), optim.AdamW):
        model, alone = sharded(ctx), nn.Parameter(torch.ones(3, 3))
        alone.grad = torch.full((3, 3), 0.5)
        params = list(model.parameters())
        optimizer = make([{"params": params[:3], "lr": 0.1}, {"params": []}], weight_decay=0.1)
        optimizer.add_param_group({"params": [*params[3:], alone], "betas": (0.5, 0.6)})
        both.append((model, optimizer))
    for model, optimizer in both:
        ran: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, ran=ran: ran.append("before"))
        optimizer.register_step_post_hook(lambda *_, ran=ran: ran.append("after"))
        assert optimizer.step(functools.partial(backward, ctx, model, 0)).requires_grad
        assert ran == ["before", "after"]
    same(*(o for _, o in both))
    optimizer = both[0][1]
    assert [len(unit) for unit in optimizer._units()] == [5, 2, 2, 2, 1]
    assert [(len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [(3, 0.1), (0, 1e-3), (9, 1e-3)]
    count = sum(v.nbytes for values in optimizer.state.values() for v in values.values())
    assert (optimizer.host_nbytes, optimizer.device_nbytes) == (count, 0)
    assert f"AdamW (12 parameters in 5 units; state here: {count:,} bytes on the host" in repr(optimizer)


class Failing(optim.AdamW):
    """An optimizer that raises when it steps or loads one parameter."""

    at: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        if any(p is self.at for group in self.param_groups for p in group["params"]):
            raise ArithmeticError
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if any(p is self.at for group in self.param_groups for p in group["params"]):
            raise ArithmeticError


@ranks(2)
def test_an_error_in_a_step_loses_nothing(ctx) -> None:
    """Earlier units have been stepped, and later ones not; groups are complete, and the next step works."""
    model, theirs = sharded(ctx), sharded(ctx)
    params = list(model.parameters())
    optimizer = OffloadedOptimizer(groups(model), Failing, lr=0.1)
    backward(ctx, model, 0)
    units = optimizer._units()
    before = [p.detach().clone() for p in params]
    held = [group["params"] for group in optimizer.param_groups]
    optimizer.inner.at = units[1][0]
    with pytest.raises(ArithmeticError):
        optimizer.step()
    changed = {p for p, old in zip(params, before, strict=True) if not torch.equal(p, old)}
    with_elements = [{p for p in unit if p.numel() and p.grad is not None} for unit in units]
    assert changed == with_elements[0] | with_elements[1]
    assert all(mine is group["params"] for mine, group in zip(held, optimizer.param_groups, strict=True))
    assert set(optimizer.state) == {p for unit in units[:2] for p in unit if p.grad is not None}
    optimizer.inner.at = None
    optimizer.step()
    of_theirs = optim.AdamW(groups(theirs), lr=0.1)
    backward(ctx, theirs, 0)
    of_theirs.step()
    for p, q in zip(params, theirs.parameters(), strict=True):
        if not any(p is each for unit in units[:2] for each in unit):
            q.grad = None
    of_theirs.step()
    same(optimizer, of_theirs)


@ranks(2)
def test_a_load_that_fails_changes_nothing(ctx) -> None:
    model = sharded(ctx)
    optimizer = OffloadedOptimizer(groups(model), Failing, lr=0.1)
    backward(ctx, model, 0)
    optimizer.step()
    held, before = optimizer.param_groups, copy.deepcopy([*optimizer.state.values()])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.inner.at = optimizer._units()[-1][-1]
    with pytest.raises(ArithmeticError):
        optimizer.load_state_dict(saved)
    saved["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match=r"groups of \[5, 5\] parameters, this optimizer of \[5, 6\]"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups is held
    same_bits([*optimizer.state.values()], before)


# -- in backward ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_gradients_exist_for_one_unit_at_a_time(ctx) -> None:
    model = sharded(ctx)
    optimizer = OffloadedOptimizer(model.parameters(), optim.SGD, lr=0.1)
    found: list[int] = []
    units = [{*unit} for unit in optimizer._units()]
    for unit in [model, *model.blocks]:

        def note(_: nn.Module) -> None:
            having = {p for p in optimizer.param_groups[0]["params"] if p.grad is not None}
            found.append(sum(not having.isdisjoint(unit) for unit in units))

        flatshard.optim.register_gradients_reduced_hook(unit, note)
    backward(ctx, model, 0)
    assert found == [1, 2, 3, 4]
    optimizer.zero_grad()
    found.clear()
    steps = flatshard.optim.step_in_backward(model, optimizer)
    assert repr(steps) == "StepInBackwardHandle of SGD (4 units)"
    for step in range(2):
        backward(ctx, model, step)
        assert found == [1] * 4
        optimizer.step()
        found.clear()
    steps.remove()
    steps.remove()
    backward(ctx, model, 0)
    assert found == [1, 2, 3, 4]
    flatshard.clip_grad_norm_(model, 1.0)


@ranks(2)
def test_what_needs_all_gradients_is_refused_in_backward(ctx) -> None:
    model = sharded(ctx)
    optimizer = OffloadedOptimizer(model.parameters(), optim.AdamW)
    with pytest.raises(TypeError, match=r"takes a flatshard.optim.OffloadedOptimizer, got a SGD"):
        flatshard.optim.step_in_backward(model, optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter of a unit of this Unused"):
        flatshard.optim.step_in_backward(sharded(ctx), optimizer)
    steps = flatshard.optim.step_in_backward(model, optimizer)
    with pytest.raises(ValueError, match="are stepped in backward already"):
        flatshard.optim.step_in_backward(model, optimizer)
    for verb in (functools.partial(flatshard.clip_grad_norm_, max_norm=1.0), flatshard.optim.get_total_norm):
        with pytest.raises(RuntimeError, match="are stepped and freed in backward"):
            verb(model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    backward(ctx, model, 0)
    with pytest.raises(RuntimeError, match="GradScaler with step_in_backward"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unit 'blocks.2'.* reduced twice before .*use_reentrant=True is around it"):
        backward(ctx, model, 1)
    flatshard.recover(model)
    optimizer.step()
    optimizer.zero_grad()
    steps.remove()
    backward(ctx, model, 0)
    scaler.step(optimizer)


@ranks(2)
def test_a_unit_in_a_reentrant_checkpoint(ctx):
    """A unit that is entirely inside the checkpoint is stepped once. With part of it inside, it would be stepped twice."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1] = checkpoint_wrapper(model[1], CheckpointImpl.REENTRANT)
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    optimizer = OffloadedOptimizer(model.parameters(), optim.SGD, lr=0.1)
    flatshard.optim.step_in_backward(model, optimizer)
    before = full_params(model)
    backward(ctx, model, 0)
    optimizer.step()
    assert not any(torch.equal(before[name], value) for name, value in full_params(model).items())


class OwnMuon(optim.Muon):
    pass


class Wrapping(optim.SGD):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.base = optim.SGD(self.param_groups, lr=0.1)


REFUSED = [
    (Wrapping, {}, ValueError, "Wrapping steps by another optimizer inside"),
    (WholeParameterOptimizer, {"optimizer_class": optim.SGD}, TypeError, "optimizer_class"),
    (lambda params: list(params), {}, TypeError, "made a list, which is no torch.optim.Optimizer"),
]


def test_what_cannot_step_unit_by_unit_is_refused(fake_group):
    """Optimizers of full matrices are refused as without offloading, as the inner optimizer is checked."""
    for kind, options, error, text in REFUSED:
        with pytest.raises(error, match=re.escape(text)):
            OffloadedOptimizer(sharded(None).parameters(), kind, **options)
    parts, whole = (OffloadedOptimizer(sharded(None).parameters(), each) for each in (optim.AdamW, optim.Adafactor))
    assert (flatshard.optim.works_on_shards(parts), flatshard.optim.works_on_shards(whole)) == (True, False)
    with pytest.raises(RuntimeError, match="Adafactor looks at whole parameters"):
        whole.step()


@ranks(2, 3)
def test_what_needs_whole_matrices_is_refused_before_a_backward(ctx) -> None:
    """Ranks with an empty shard also raise, and so does an unknown optimizer class. The cure steps in backward."""
    for kind, layout, match in (
        (optim.Adafactor, None, "Adafactor looks at whole parameters"),
        (optim.Adafactor, Whole(math.inf), "Adafactor cannot step parameters without elements"),
        (optim.Muon, None, "Muon looks at whole parameters"),
        (OwnMuon, None, "OwnMuon looks at more than single elements"),
        (optim.Muon, Whole(math.inf), None),
    ):
        layers = [
            nn.Linear(4, 3, bias=False),
            nn.Tanh(),
            nn.Linear(3, 1, bias=False),
        ]  # 3 elements: fewer than ranks
        model = fully_shard(nn.Sequential(*layers), policy={nn.Linear}, layout=layout, process_group=ctx.group)
        optimizer = OffloadedOptimizer(model.parameters(), kind, lr=0.1)
        before = full_params(model)
        with contextlib.nullcontext() if match is None else pytest.raises(RuntimeError, match=match):
            flatshard.optim.step_in_backward(model, optimizer)
        model(torch.ones(1, 4)).square().sum().backward()
        assert all(torch.equal(before[name], p) == bool(match) for name, p in full_params(model).items())


def test_what_couples_parameters_is_refused(world):
    """It raises at the first step, before any parameter is stepped, even if parameters are not cut or not sharded."""
    world(1)
    for model in (fully_shard(Net(), policy={Block}), nn.Linear(4, 4)):
        optimizer = OffloadedOptimizer(model.parameters(), Clipping, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="Clipping steps a parameter differently"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))


class WrappedMomentum(optim.SGD):
    """An optimizer whose state has a subclass with an inner tensor, like torchao's."""

    works_on_shards = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()):
            momentum = self.state[p].setdefault("momentum", Wrapped.of(torch.zeros(p.shape)))
            momentum.inner.mul_(0.9).add_(p.grad.as_subclass(Tensor))
            p.sub_(momentum.inner, alpha=0.1)


@ranks(2)
def test_state_with_tensors_inside(ctx) -> None:
    """Its state is stepped, and moved to the host and back. Each rank has a checkpoint of its own, as the error says."""
    found = []
    for make in (WrappedMomentum, lambda params: OffloadedOptimizer(params, WrappedMomentum)):
        model = sharded(ctx)
        optimizer = make(model.parameters())
        for step in range(4):
            backward(ctx, model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                flatshard.optim.offload_training_state(model, optimizer).restore()
                with pytest.raises(
                    NotImplementedError, match=r"is a Wrapped, .*Save optimizer.state_dict\(\) by each rank"
                ):
                    optim_state_dict(model, optimizer)
                saved = io.BytesIO()
                torch.save(optimizer.state_dict(), saved)
                saved.seek(0)
                optimizer = make(model.parameters())
                optimizer.load_state_dict(torch.load(saved, weights_only=False))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


# -- between phases ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_on_cpu_nothing_is_offloaded(ctx) -> None:
    """Forwards run. Gradients that would be lost, and parameters in use, are refused on CPU, too."""
    model = sharded(ctx)
    optimizer = optim.AdamW(model.parameters())
    before = [p.data_ptr() for p in model.parameters()]
    with flatshard.optim.offload_training_state(model, optimizer) as away:
        backward(ctx, model, 0)
        assert (away.host_nbytes, away.device_nbytes) == (0, 0)
        assert repr(away) == "OffloadHandle (nothing: the parameters were on the host)"
    optimizer.step()
    assert [p.data_ptr() for p in model.parameters()] == before
    for block in (flatshard.summon_full_params, flatshard.keep_unsharded):
        with (
            block(model),
            pytest.raises(RuntimeError, match=r"offload_.*: .* (in summon_full_params|are kept unsharded)"),
        ):
            flatshard.optim.offload_training_state(model)
    with flatshard.no_sync(model):
        backward(ctx, model, 1)
    with pytest.raises(RuntimeError, match=r"offload_training_state.*hold|reduce_gradients"):
        flatshard.optim.offload_training_state(model)
    flatshard.reduce_gradients(model)
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
        flatshard.optim.offload_training_state(nn.Linear(2, 2))
