"""What a step costs, in numbers that do not depend on the machine: bytes copied, bytes sent, memory held, operations.

The fake process group stands for any number of ranks in one process. A :class:`Wire` in place of its collectives moves
nothing, so that every byte counted is a local one, and notes what would have been sent.

What "bytes" means: an operation reads the bytes of its tensor arguments and writes those of its results; views,
allocations, and arguments that are only written are not read. A model's own cost is what the plain model costs, and
every number here is the difference to that.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from clean import resident_nbytes, storage_nbytes
from counting import CopiedBytes, Wire, storages
from models import SMALL_WIDTH, WIDTH
from models import NormBlock as Block
from models import NormNet as Net
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.state import Unit, units_below
from flatshard._handle.gradients import SMALL
from flatshard._handle.tensors.changes import changes

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


def sharded(blocks: int = 4, width: int = WIDTH, **options: Any) -> nn.Module:
    return fully_shard(Net(blocks, width), policy=Block, **options)


def step(model: nn.Module) -> None:
    """Forward and backward, and no gradients left."""
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()


def padded(unit: Unit) -> int:
    """Bytes of a unit's parameters in whole."""
    return sum(b.layout.padded_numel * b.kind.dtype.itemsize for b in unit.handle.flats)


def in_shard(unit: Unit) -> int:
    return sum(b.layout.shard_numel * b.kind.dtype.itemsize for b in unit.handle.flats)


# ---------------------------------------------------------------------------------------------------------------------
# Counters
# ---------------------------------------------------------------------------------------------------------------------


def put_on_wire(model: nn.Module, out_of_place: bool = False, widens: bool = False) -> Wire:
    wire = Wire(out_of_place, widens)
    units_below(model)[0].context.runtime.collectives = wire
    return wire


class Cost(NamedTuple):
    operations: int
    bytes: int
    by_operation: Counter[str]


def extra(model: nn.Module, plain: nn.Module, run: Callable[[nn.Module], None] = step) -> Cost:
    """What ``run`` costs on ``model`` beyond what it costs on ``plain``."""
    run(model)  # the first step may build what the later ones use
    with CopiedBytes() as cost:
        run(model)
    with CopiedBytes() as base:
        run(plain)
    return Cost(cost.operations - base.operations, cost.total - base.total, cost.by_operation)


# ---------------------------------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("width", [WIDTH, SMALL_WIDTH])
@pytest.mark.parametrize("out_of_place", [False, True])
def test_local_bytes_of_a_step(world, size, strategy, width, out_of_place):
    world(size)
    model = sharded(width=width, strategy=strategy)
    put_on_wire(model, out_of_place)
    cost = extra(model, Net(width=width))
    expected = numel = 0
    for unit in units_below(model):
        for flat in unit.handle.flats:
            layout = flat.layout
            numel += layout.numel
            expected += 8 * layout.numel  # each gradient is read once, and written into the reduction's input
            expected += 4 * (layout.padded_numel - layout.numel)  # whose padding is zeroed
            if 4 * layout.padded_numel < SMALL:
                expected += 8 * layout.padded_numel  # one more pass over the input, in place of many operations
            if strategy is not NO_SHARD:
                gathers = 2 if strategy is FULL and unit.fqn else 1
                # The shard goes to its place in the all-gather's output; the built-in collectives put it there themselves.
                expected += 0 if out_of_place else gathers * 8 * layout.shard_numel
    assert cost.bytes == expected, cost.by_operation.most_common(10)
    if size == 8 and width == WIDTH:
        assert cost.bytes <= 8 * numel * (1 + 3 / size)


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("width", [WIDTH, SMALL_WIDTH])
@pytest.mark.parametrize("widens", [False, True])
def test_local_bytes_of_a_step_in_mixed_precision(world, strategy, width, widens):
    """fp32 masters, bf16 compute, fp32 reduction, over a plain bf16 model: 6 P + 12 P / N, every cast being a copy.

    4 P where gradients are sent as they were computed.
    """
    world(8)

    def step_bf16(model: nn.Module) -> None:
        model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        model.zero_grad()

    policy = flatshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(width=width, strategy=strategy, mixed_precision=policy)
    wire = put_on_wire(model, widens=widens)
    narrow = widens and strategy is not NO_SHARD
    size = 2 if narrow else 4  # bytes of an element that is sent
    cost = extra(model, Net(width=width).bfloat16(), step_bf16)
    expected = numel = 0
    for unit in units_below(model):
        for flat in unit.handle.flats:
            layout = flat.layout
            numel += layout.numel
            expected += (2 + size) * layout.numel + size * (layout.padded_numel - layout.numel)  # bf16 read
            if 4 * layout.padded_numel < SMALL:
                expected += 2 * size * layout.padded_numel
            gathers = 2 if strategy is FULL and unit.fqn else 1
            expected += gathers * 6 * layout.shard_numel  # fp32 read, bf16 written into its place
    assert cost.bytes == expected, cost.by_operation.most_common(10)
    if strategy is FULL and width == WIDTH:
        assert cost.bytes <= (2 + size + 12 / 8) * numel * 1.05
    del wire.sent[:]
    step_bf16(model)
    halves = {n for kind, n in wire.sent if kind == "all-gather"}
    wholes = {n for kind, n in wire.sent if kind != "all-gather"}
    assert halves == (set() if strategy is NO_SHARD else wholes if narrow else {n // 2 for n in wholes})


def test_local_bytes_of_an_evaluation(world):
    world(8)

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.ones(2, 3))

    for strategy in (FULL, GRAD_OP, NO_SHARD):
        model = sharded(strategy=strategy)
        put_on_wire(model)
        moved = 0 if strategy is NO_SHARD else sum(2 * in_shard(u) for u in units_below(model))
        assert extra(model, Net(), evaluate).bytes == moved


def test_accumulating_gradients_costs_a_shard_each(world):
    world(8)

    def twice(model: nn.Module) -> None:
        model(torch.ones(2, 3)).sum().backward()
        step(model)

    model, other = sharded(), sharded()
    put_on_wire(model)
    once = extra(model, Net()).bytes
    put_on_wire(other)
    both = extra(other, Net(), twice).bytes
    numel = sum(p.numel() for p in Net().parameters())
    held = sum(p.numel() for p in model.parameters())
    # Plain: ``.grad`` and the new gradient are read, and written, in whole. Sharded: the same for this rank's part.
    assert both == 2 * once - 12 * numel + 12 * held


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
def test_a_single_rank_copies_nothing(world, strategy):
    world(1)
    model = sharded(strategy=strategy)
    wire = put_on_wire(model)
    assert extra(model, Net()).bytes == 0
    assert wire.sent == []


@pytest.mark.parametrize("size", [8, 64])
def test_collectives_and_their_payload(world, size):
    world(size)
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        model = sharded(strategy=strategy)
        wire = put_on_wire(model)
        step(model)
        del wire.sent[:]
        step(model)
        root, *inner = [padded(u) for u in units_below(model)]
        numel = sum(p.numel() for p in Net().parameters())
        if strategy is NO_SHARD:
            assert sorted(wire.sent) == sorted(("all-reduce", n) for n in (root, *inner))
            continue
        gathered = [root, *inner, *(inner if strategy is FULL else [])]
        assert sorted(n for kind, n in wire.sent if kind == "all-gather") == sorted(gathered)
        assert sorted(n for kind, n in wire.sent if kind == "reduce-scatter") == sorted([root, *inner])
        assert len(wire.sent) == len(gathered) + 1 + len(inner)
        # Padding: 16 bytes a parameter and 128 bytes a shard at most.
        assert 0 <= root + sum(inner) - 4 * numel <= 16 * len(list(model.parameters())) + 128 * size * (1 + len(inner))


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


def parameter_storages(model: nn.Module) -> dict[int, int]:
    tensors: list[Tensor] = [*model.parameters()]
    for unit in units_below(model):
        for b in unit.handle.flats:
            tensors += [
                b.shard,
                b.unsharded.flat,
                *b.params,
                *b.unsharded.computes,
                b.unsharded.wire,
                b.unsharded.own,
                *([] if b.gradients.input is None else [b.gradients.input]),
            ]
    return storages(tensors)


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
def test_between_steps_a_rank_holds_its_padded_shard(world, size, strategy):
    world(size)
    model = sharded(strategy=strategy)
    shard = sum(in_shard(u) for u in units_below(model))
    assert sum(parameter_storages(model).values()) == shard == flatshard.describe(model).shard_nbytes
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        assert sum(parameter_storages(model).values()) == shard
        # With padding, but one slice may hold none of it: gradients are at most a shard.
        gradients = storages(p.grad for p in model.parameters() if p.grad is not None)
        assert sum(gradients.values()) <= shard
        optimizer.step()
        optimizer.zero_grad()
        for unit in units_below(model):
            for flat in unit.handle.flats:
                assert flat.unsharded.flat.untyped_storage().nbytes() == 0
                assert storage_nbytes(flat.gradients.input) == 0
                assert resident_nbytes(flat) == flat.layout.shard_numel * 4
        assert sum(parameter_storages(model).values()) == shard


def test_no_tensor_of_full_size_is_left_after_a_step(world):
    world(8)
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    weight = 4 * WIDTH * 2 * WIDTH  # bytes of a matrix of a block

    def large() -> list[tuple[int, ...]]:
        gc.collect()
        live = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and o.untyped_storage().nbytes() >= weight]
        return [tuple(t.shape) for t in live if id(t) not in before]

    before: set[int] = set()
    shard = max(in_shard(u) for u in units_below(model))
    assert shard < weight, "a shard must not look like a whole parameter"
    before = {id(o) for o in gc.get_objects() if issubclass(type(o), Tensor)} - {
        id(t) for u in units_below(model) for b in u.handle.flats for t in (b.unsharded.flat, *b.unsharded.computes)
    }
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert large() == []
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert large() == []
    other = sharded(strategy=GRAD_OP)
    loss = other(torch.ones(2, 3)).sum()
    assert large() != [], "units are whole between forward and backward here: this test can see"
    loss.backward()
    assert large() == []


class Watch(TorchDispatchMode):
    """The most bytes of parameters, and of reduction inputs, that are there at any operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.units = units_below(model)
        self.parameters = self.gradients = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = sum(resident_nbytes(b) for u in self.units for b in u.handle.flats)
        inputs = sum(storage_nbytes(f.gradients.input) for u in self.units for f in u.handle.flats)
        self.parameters, self.gradients = max(self.parameters, held), max(self.gradients, inputs)
        return result


def test_most_parameters_at_a_time(world):
    world(8)
    for options in ({}, {"forward_prefetch": False, "backward_prefetch": None}):
        model = sharded(6, **options)
        step(model)
        root, *inner = units_below(model)
        shard = sum(in_shard(u) for u in units_below(model))
        ahead = 1 if options else 2
        with Watch(model) as forward:
            loss = model(torch.ones(2, 3)).sum()
        assert forward.parameters == shard + padded(root) + ahead * padded(inner[0])
        assert forward.gradients == 0
        with Watch(model) as backward:
            loss.backward()
        assert backward.parameters == shard + padded(root) + ahead * padded(inner[0])
        # Reductions under way, the unit in work, and the root, which waits for the end.
        assert backward.gradients <= padded(root) + 3 * padded(inner[0])
        with Watch(model) as evaluation, torch.no_grad():
            model(torch.ones(2, 3))
        assert evaluation.parameters == forward.parameters


# ---------------------------------------------------------------------------------------------------------------------
# Operations
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lines_of_flatshard() -> Iterator[list[int]]:
    """The number of lines of this library that run: what the host does, loops included."""
    folder = str(Path(flatshard.__file__).parent)
    count = [0]

    def in_function(frame: Any, event: str, arg: Any) -> Any:
        count[0] += event == "line"
        return in_function

    def in_any(frame: Any, event: str, arg: Any) -> Any:
        return in_function if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    sys.settrace(in_any)
    try:
        yield count
    finally:
        sys.settrace(before)


def host_costs(blocks: int, strategy: ShardingStrategy, width: int = SMALL_WIDTH) -> tuple[int, int]:
    """Operations beyond the plain model's, and lines of this library, in a step."""
    model = sharded(blocks, width, strategy=strategy)
    operations = extra(model, Net(blocks, width)).operations
    with lines_of_flatshard() as lines:
        step(model)
    return operations, lines[0]


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD])
def test_host_work_per_unit_does_not_grow_with_units(world, strategy):
    world(8)
    few, more, many = (host_costs(n, strategy) for n in (10, 20, 100))
    for kind, a, b, c in zip(("operations", "lines"), few, more, many, strict=True):
        per_unit = (b - a) / 10
        assert (c - b) / 80 == per_unit, kind
        assert per_unit > 0


def test_host_work_per_unit_does_not_grow_with_ranks(world):
    costs = {}
    for size in (8, 64, 4096):
        world(size)
        few, more = host_costs(5, FULL, WIDTH), host_costs(10, FULL, WIDTH)
        costs[size] = [b - a for a, b in zip(few, more, strict=True)]
    operations, lines = zip(*costs.values(), strict=True)
    assert len(set(operations)) == 1
    # A parameter of which this rank holds nothing may take a line more or less, whatever the number of ranks.
    assert max(lines) - min(lines) <= 5 * len(list(Block(WIDTH).parameters()))


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (WIDTH, {"FULL_SHARD": 18, "SHARD_GRAD_OP": 15, "NO_SHARD": 20}),
        (SMALL_WIDTH, {"FULL_SHARD": 14, "SHARD_GRAD_OP": 11, "NO_SHARD": 18}),
    ],
)
def test_operations_per_unit(world, width, expected):
    """The number itself, of units with six parameters: a change of it is a change of the host path, wanted or not.

    It includes the fake group's collectives: two operations for a gather or a reduce-scatter, one for an all-reduce.
    """
    world(8)
    operations = {}
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        operations[strategy.name] = (host_costs(6, strategy, width)[0] - host_costs(4, strategy, width)[0]) / 2
    assert operations == expected


def calls_in_a_step(units: int) -> int:
    """Calls of functions of this library, comprehensions included, in a step and ``zero_grad``."""
    model = sharded(units, SMALL_WIDTH)
    for _ in range(3):
        step(model)
        model.zero_grad()
    folder, calls = str(Path(flatshard.__file__).parent), [0]

    def note(frame: Any, event: str, arg: Any) -> None:
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(folder)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step(model)
        model.zero_grad()
    finally:
        sys.setprofile(before)
    return calls[0]


def test_calls_per_unit(world):
    """Features that a unit does not use add none; those that look at each unit (escapes, transforms, ...) add one or two."""
    world(8)
    per_unit = (calls_in_a_step(20) - calls_in_a_step(10)) / 10
    assert per_unit <= 195


@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_are_looked_at_only_after_a_change(world, accumulates: bool):
    """Once a step is like the last, a unit's Python loops don't go over its parameters, however many they are."""
    world(8)
    costs = []
    for layers in (12, 20):
        model = fully_shard(nn.Sequential(*[nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(layers)]))
        x = torch.ones(2, SMALL_WIDTH)
        for _ in range(3):
            model(x).sum().backward()
            if not accumulates:
                model.zero_grad()
        before = changes.count
        with lines_of_flatshard() as lines:
            model(x).sum().backward()
        assert changes.count == before
        costs.append(lines[0])
        model[0].bias.requires_grad_(False)
        assert changes.count > before
    per_parameter = (costs[1] - costs[0]) / 16
    assert per_parameter <= 7  # the hook of its gradient, and placing that
