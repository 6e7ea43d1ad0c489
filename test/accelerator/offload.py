"""Optimizer state on the host, with the simulated accelerator: its place and time, and no read too early."""

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from accelerator.harness import Cases, Env, Net, mean_square, numbers
from accelerator.planning import at_allocations, held, peak
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils import _pytree as pytree

import flatshard
from flatshard import MixedPrecision
from flatshard import ShardingStrategy as S
from flatshard._composable import backward
from flatshard._composable.state import Backward
from flatshard.checkpoint import full_state_dict, optim_state_dict
from flatshard.optim import OffloadedOptimizer

cases = Cases()


class Momentum(optim.Optimizer):
    """Optimizer without temporaries, so that a step allocates state only. May raise, and calls back in each turn."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.turns: list[int] = []
        self.fails_at = -1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
                    self.state[p]["momentum"].mul_(0.9).add_(p.grad)
                    p.sub_(self.state[p]["momentum"].mul_(1.0), alpha=group["lr"])
        self.turns.append(len(self.turns))
        if len(self.turns) == self.fails_at:
            raise ArithmeticError


def _same_bits(what: str, ours: list[Any], theirs: list[Any]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a.detach().cpu(), b.detach().cpu()), f"other bits than without offloading: {what} {i}"


ADAMW = {"lr": 0.01, "eps": 1e-3}


@cases.add(
    {
        "amsgrad_mixed": {
            "kind": optim.AdamW,
            "settings": {**ADAMW, "amsgrad": True},
            "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        },
        "momentum": {"kind": Momentum, "settings": {}, "strategy": S.SHARD_OPTIM},
        "none": {"kind": optim.AdamW, "settings": ADAMW, "strategy": S.NO_SHARD},
    },
    watch_host=True,
    rtol=2e-2,
    atol=2e-3,
)
def stepped(env: Env, kind: Any, settings: dict[str, Any], **options: Any) -> Any:
    """Steps give the same bits as without offloading. The host waits only where state is read."""
    results = []
    for make in (kind, lambda params, **given: OffloadedOptimizer(params, kind, **given)):
        model = env.shard(env.make(), **options)
        optimizer = make(model.parameters(), **settings)
        for step in range(3):
            optimizer.zero_grad()
            env.backward(model, step)
            with env.steady(step == 2 and kind is Momentum):  # others read counts on the host
                optimizer.step()
        state = [v for p in model.parameters() for v in optimizer.state[p].values()]
        on_host = {v.device.type == "cpu" for v in state if v.dim()}
        if make is not kind and env.is_simulated:
            assert on_host == {True}
            assert all(v.is_pinned() for v in state if v.numel() and v.dim())
            left = sum(v.nbytes for v in state if v.device.type != "cpu")  # of a parameter without dimensions
            told = f"{sum(v.nbytes for v in state) - left:,} bytes on the host, pinned, {left} on the device"
            assert told in repr(optimizer)
            assert bool(left) == (options.get("strategy") is S.NO_SHARD)
        results.append([*model.parameters(), *(v.clone() for v in state)])  # read on the host
    _same_bits(kind.__name__, *results)
    return numbers(model)


@cases.add(
    {
        "full": {},
        "adamw": {
            "kind": optim.AdamW,
            "settings": ADAMW,
            "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        },
    },
    fake=False,
    watch_host=True,
    rtol=2e-2,
    atol=2e-3,
)
def in_backward(env: Env, kind: Any = Momentum, settings: dict[str, Any] | None = None, **options: Any) -> Any:
    """Stepping each unit at its reduction gives the same bits, with at most two units' state on the device and no race."""
    results = []
    for is_ahead in (False, True):
        model = env.shard(env.make(lambda: Net(blocks=5)), **options)
        optimizer = OffloadedOptimizer(model.parameters(), kind, **(settings or {}))
        if is_ahead:
            flatshard.optim.step_in_backward(model, optimizer)
        for step in range(4):
            with contextlib.ExitStack() as inside:
                if env.is_simulated and is_ahead and step:
                    inside.enter_context(_two_units_at_most(env, optimizer))
                with env.steady(step == 3 and kind is Momentum):
                    env.backward(model, step)
                    optimizer.step()
                    optimizer.zero_grad()
        results.append([*model.parameters(), *(v for p in model.parameters() for v in optimizer.state[p].values())])
    _same_bits("stepped in backward", *results)
    return numbers(model)


@contextlib.contextmanager
def _two_units_at_most(env: Env, optimizer: OffloadedOptimizer) -> Iterator[None]:
    """Assert that the side stream's memory holds the state of at most two units, and at times of two."""
    from accelerator.sim import sim

    side, found = optimizer._traffic[0].side.stream_id, [0]

    def count(nbytes: int, stream: int) -> None:
        there = sum(block.asked for block in sim._blocks if not block.free and block.home == (0, side))
        found.append(there + nbytes * (stream == side))

    of_units = [
        sum(v.nbytes for p in unit for v in optimizer.state[p].values() if v.dim()) for unit in optimizer._units()
    ]
    with at_allocations(count):
        yield
    two = max(a + b for a, b in itertools.pairwise(of_units))
    assert max(found) == two


@cases.add({"full": {}, "none": {"strategy": S.NO_SHARD}, "first": {"steps": 1}})
def bounded(env: Env, steps: int = 3, **options: Any) -> Any:
    """At most two units' state is on the device, even in the first step, which creates it; none is after a step."""
    model = env.shard(env.make(lambda: Net(blocks=6)), **options)
    optimizer = OffloadedOptimizer(model.parameters(), Momentum)
    units = [sum(p.nbytes for p in unit if p.numel()) for unit in optimizer._units()]
    two = max(a + b for a, b in itertools.pairwise(units))
    where: list[list[int]] = []
    for step in range(steps):
        optimizer.zero_grad()
        env.backward(model, step)
        with peak(env) as found:
            optimizer.step()
        if found:
            assert found[1] == optimizer.device_nbytes * (step == 0)
            assert found[0] == two if step else found[0] <= two  # the next unit's state arrives meanwhile
        where.append([v["momentum"].data_ptr() for v in optimizer.state.values() if v["momentum"].dim()])
        assert where[0] == where[-1], "other memory of the host than before"
    return numbers(model)


@cases.add(watch_host=True)
def interrupted(env: Env) -> Any:
    """If a step raises in its second unit, all state is on the host and the next step works."""
    model = env.shard(env.make())
    optimizer = OffloadedOptimizer(model.parameters(), Momentum)
    states = []
    for step in range(4):
        optimizer.zero_grad()
        env.backward(model, step)
        optimizer.inner.fails_at = len(optimizer.inner.turns) + 2 if step in (0, 2) else -1
        with peak(env) as found, contextlib.suppress(ArithmeticError):
            optimizer.step()
        assert not found or found[1] == 0
        states.append([values["momentum"].clone() for values in optimizer.state.values()])
    assert len(states[0]) == sum(map(len, optimizer._units()[:2]))
    assert len(states[1]) == len(list(model.parameters()))
    return numbers(model), states


@cases.add({f"unit{n}": {"unit": n} for n in (0, 2)}, watch_host=True, fake=False)
def lacking_memory(env: Env, unit: int) -> Any:
    """If the device lacks memory for one unit's state, the unit before it and those after it are not stepped."""
    model = env.shard(env.make())
    optimizer = OffloadedOptimizer(model.parameters(), Momentum)
    env.backward(model, 0)
    optimizer.step()
    units = optimizer._units()
    stepped = {p for each in units[: max(0, unit - 1)] for p in each}
    if env.is_simulated:
        calls, side = itertools.count(), optimizer._traffic[0].side.stream_id
        last = sum(p.numel() > 0 for each in units[:unit] for p in each)

        def lack(nbytes: int, stream: int) -> None:
            if stream == side and next(calls) == last:
                raise torch.OutOfMemoryError("simulated")

        with at_allocations(lack), pytest.raises(RuntimeError, match="simulated"):
            optimizer.step()
        assert all(
            v.device.type == "cpu" for of_param in optimizer.state.values() for v in of_param.values() if v.dim()
        )
    else:
        grads = {p: p.grad for p in model.parameters() if p not in stepped}
        for p in grads:
            p.grad = None
        optimizer.step()
        for p, grad in grads.items():
            p.grad = grad
    found = pytree.tree_map(torch.clone, (numbers(model), [optimizer.state[p] for p in model.parameters()]))
    optimizer.step()
    return found, numbers(model), [optimizer.state[p] for p in model.parameters()]


@cases.add({"adamw": {}}, watch_host=True)
def saved(env: Env) -> Any:
    """Save state in every format and load it, in an optimizer with offloading and in one without."""
    model = env.shard(env.make())
    optimizer = OffloadedOptimizer(model.parameters(), optim.AdamW, **ADAMW)
    for step in range(2):
        optimizer.zero_grad()
        env.backward(model, step)
        optimizer.step()
    by_number = copy.deepcopy(optimizer.state_dict())
    whole = optim_state_dict(model, optimizer, full=True)
    results = [whole["state"], optim_state_dict(model, optimizer, full=True, offload_to_cpu=False)["state"]]
    results.append(len(get_optimizer_state_dict(model, optimizer)["state"]))
    start = [p.detach().clone() for p in model.parameters()]
    for load in range(3):
        other: Any = optim.AdamW(model.parameters(), **ADAMW)
        if load:
            other = OffloadedOptimizer(model.parameters(), optim.AdamW, **ADAMW)
        with peak(env) as found:
            if load == 2:
                flatshard.checkpoint.load_optim_state_dict(model, other, copy.deepcopy(whole))
            else:
                other.load_state_dict(copy.deepcopy(by_number))
        if load and found:
            assert found[0] <= other.host_nbytes / 2
        with torch.no_grad():
            for p, value in zip(model.parameters(), start, strict=True):
                p.copy_(value)
        other.zero_grad()
        env.backward(model, 2)
        other.step()
        results.append([p.detach().clone() for p in model.parameters()])
    _same_bits("loaded", results[-1], results[-3])
    _same_bits("loaded", results[-2], results[-3])
    return results


@cases.add(
    {
        "full": {},
        "kept": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, keep_cast_shard=True)},
        "static": {"static_buffers": True},
        "flat": {"is_flat": True},
        "gradients_stay": {"gradients": False},
    },
    fake=False,
    watch_host=True,
    rtol=2e-2,
    atol=2e-3,
)
def switched(env: Env, is_flat: bool = False, gradients: bool = True, **options: Any) -> Any:
    """Offload everything between backward and step, and between steps, and bring it back: the same bits as without."""
    move = functools.partial(flatshard.optim.offload_training_state, gradients=gradients)
    results = []
    for is_switched in (False, True):
        model = env.shard(env.make(), **options)
        params = flatshard.flat_parameters(model) if is_flat else model.parameters()
        optimizer = optim.AdamW(params, **ADAMW)
        for step in range(4):
            env.backward(model, step)
            if is_switched and step in (0, 2):
                _away(env, model, optimizer, move, options)
            with move(model, optimizer) if is_switched and gradients and step == 3 else contextlib.nullcontext():
                optimizer.step()
            optimizer.zero_grad()
            if is_switched and step == 1:
                _away(env, model, optimizer, move, options)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        results.append([*model.parameters(), *(v for p in own for v in optimizer.state[p].values())])
        assert {p.device for p in model.parameters()} == {env.device}
    _same_bits("switched", *results)
    return numbers(model)


def _away(env: Env, model: nn.Module, optimizer: Any, move: Any, options: dict[str, Any]) -> None:
    def tensors() -> list[Tensor]:
        every = [*model.parameters(), *(p.grad for p in model.parameters()), *optimizer.state.values()]
        return [t for t in pytree.tree_leaves(every) if isinstance(t, Tensor)]

    before = [t.detach().clone() for t in tensors()]
    start, kept = held(env), list[Tensor]()
    if not move.keywords["gradients"]:
        kept += [p.grad for p in model.parameters() if p.grad is not None]
    with peak(env) as change:
        away = move(model, optimizer)
        if not env.is_simulated:
            assert away.host_nbytes == 0
            assert repr(away) == "OffloadHandle (nothing: the parameters were on the host)"
            away.restore()
            return
        there = held(env)
        assert all(p.device.type == "cpu" and p.is_pinned() for p in model.parameters() if p.numel())
        saved = optim_state_dict(model, optimizer, full=True)["state"] if optimizer.state else {}
        full_state_dict(model)
        with pytest.raises(RuntimeError, match=r"are in host memory \(flatshard.optim.offload_.*\): call restore\(\)"):
            model(env.batch(0))
        flatshard.recover(model)
        assert all(grad.device == env.device for grad in kept)
        static = away.device_nbytes - sum(grad.nbytes for grad in kept)
        assert static > 0 if options.get("static_buffers") else static == 0
        assert start - there >= away.host_nbytes
        with pytest.raises(ValueError, match=r"is offloaded already: call restore\(\)"):
            flatshard.optim.offload_training_state(model.blocks[0])
        del saved
        now = held(env)
        assert now <= there, "reading it leaves something on the device"
        away.restore()
        away.restore()
        assert held(env) - now >= away.host_nbytes
        assert repr(away) == "OffloadHandle (all is back)"
    assert not change or change[1] <= 0
    _same_bits("brought back", before, tensors())


@cases.add()
def in_and_after_a_step(env: Env) -> Any:
    """An earlier forward has no backward to come. A failed one is over, even if the engine frees it later."""
    model = env.shard(env.make())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for hold in (False, True):
        loss, tasks = mean_square(model(env.batch(0))), list[Any]()
        if hold:
            fails = flatshard.optim.register_gradients_reduced_hook(model.blocks[1], lambda _: 1 // 0)
            with contextlib.suppress(ZeroDivisionError), mock.patch.object(backward, "_enter", _kept(tasks)):
                loss.backward()
            fails.remove()
            if env.is_simulated:
                threading.Timer(0.1, tasks.clear).start()
            tasks = []
        flatshard.optim.offload_training_state(model, optimizer).restore()
        if env.is_simulated and not hold:
            with pytest.raises(RuntimeError, match="between its forward and its backward"):
                loss.backward()
        optimizer.zero_grad()
        env.backward(model, 1)
        optimizer.step()
        optimizer.zero_grad()
    return numbers(model)


def _kept(tasks: list[Any]) -> Any:
    """Return a ``backward._enter`` that keeps the task alive."""
    enter = backward._enter

    def entered(running: Backward, task: int) -> None:
        enter(running, task)
        tasks.append(running.tasks[task]())

    return entered
