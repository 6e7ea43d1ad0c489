"""The cost of a step in numbers that do not depend on the machine: bytes copied and sent, memory held, operations.

The fake process group simulates any number of ranks in one process. :class:`Wire` replaces its collectives: it records
what would be sent and moves nothing, so every counted byte is local.

An operation reads the bytes of its tensor arguments and writes those of its results. Views, allocations and arguments
that are only written count as no reads. Every number here is the difference to the plain model's.
"""

import contextlib
import functools
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from counting import CopiedBytes, LiveBytes, Wire, storages
from expecttest import assert_expected_inline
from models import SMALL_WIDTH, WIDTH
from models import NormBlock as Block
from models import NormNet as Net
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._base import torch_versions
from flatshard._composable import reduction_queue
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard._handle.tensors.changes import changes

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


def sharded(blocks: int = 4, width: int = WIDTH, **options: Any) -> nn.Module:
    return fully_shard(Net(blocks, width), policy=Block, **options)


def step(model: nn.Module) -> None:
    """Run forward and backward, then drop the gradients."""
    model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()


class Cost(NamedTuple):
    operations: int
    bytes: int


def extra(model: nn.Module, plain: nn.Module) -> Cost:
    """Return how much more a step costs on ``model`` than on ``plain``."""
    step(model)  # the first step may build state that later ones reuse
    costs = []
    for each in (model, plain):
        with CopiedBytes() as cost:
            step(each)
        costs.append(cost)
    return Cost(costs[0].operations - costs[1].operations, costs[0].total - costs[1].total)


def test_a_single_rank_copies_and_sends_nothing(world):
    world(1)
    for strategy in (FULL, GRAD_OP, NO_SHARD):
        wire = Wire()
        assert extra(sharded(strategy=strategy, collectives=wire.factory), Net()).bytes == 0
        assert not wire.sent


BF16 = flatshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)


def test_shard_optim_gathers_once_in_a_step(world):
    """Parameters are gathered once per step, whatever forwards run in between and whichever rank's optimizer writes."""

    class ByPointer(torch.optim.SGD):
        """Writes through pointers like a C++ optimizer: no version changes, and ranks with empty shards write nothing."""

        def step(self) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel()):
                torch.from_dlpack(p.detach()).sub_(torch.from_dlpack(p.grad.detach().clone()))

    world(64)
    wire = Wire()
    model = sharded(strategy=ShardingStrategy.SHARD_OPTIM, collectives=wire.factory)
    model.head.requires_grad_(False)
    units = [unit.handle.memory.nbytes for unit in units_below(model)]
    for optimizer_class in (torch.optim.SGD, ByPointer):
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        step(model)
        for _ in range(2):
            for hold in (True, True, False):
                with flatshard.no_sync(model) if hold else contextlib.nullcontext():
                    model(torch.ones(2, 3)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 3))
            del wire.sent[:]
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.ones(2, 3)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 3))
            kinds = Counter(kind for kind, _ in wire.sent)
            assert sorted(n for kind, n in wire.sent if kind == "all-gather") == sorted(units)
            assert kinds == {"all-gather": len(units), "reduce-scatter": 3 * len(units)}
    described = flatshard.describe(model)
    assert described.kept_nbytes == sum(units)
    assert parameter_storages(model) == described.shard_nbytes + described.kept_nbytes
    flatshard.reshard(model)
    assert parameter_storages(model) == described.shard_nbytes


def parameter_storages(model: nn.Module) -> int:
    tensors: list[Tensor] = [*model.parameters()]
    for unit in units_below(model):
        for b in unit.handle.flats:
            tensors += [
                b.shard,
                *b.params,
                *b.unsharded.params,
                b.unsharded.flat,
                b.unsharded.gather_output,
                b.unsharded.own,
            ]
        tensors += [g.input.flat for g in unit.handle.gradients.flats if g.input is not None]
    return sum(storages(tensors).values())


FOLDER = str(Path(flatshard.__file__).parent)


@contextlib.contextmanager
def lines_of_flatshard() -> Iterator[list[int]]:
    """Count the lines of this library that run, loops included: its work on the host."""
    count = [0]

    def in_function(frame: Any, event: str, arg: Any) -> Any:
        count[0] += event == "line"
        return in_function

    def in_any(frame: Any, event: str, arg: Any) -> Any:
        return in_function if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(in_any)
    try:
        yield count
    finally:
        sys.settrace(before)


def host_costs(
    blocks: int, strategy: ShardingStrategy, width: int = SMALL_WIDTH, freezes: bool = False
) -> tuple[int, int]:
    """Return operations beyond the plain model's, and lines of this library, in a step. ``freezes``: every other block."""
    gc.collect()  # backward checks whether other process groups hold gradients: drop those of earlier tests
    model, plain = sharded(blocks, width, strategy=strategy), Net(blocks, width)
    for block in (*model.blocks[::2], *plain.blocks[::2]) if freezes else ():
        block.requires_grad_(False)
    operations = extra(model, plain).operations
    with lines_of_flatshard() as lines:
        step(model)
    return operations, lines[0]


@pytest.mark.parametrize(("strategy", "freezes"), [(FULL, True), (GRAD_OP, False), (NO_SHARD, True)])
def test_host_work_per_unit_does_not_grow_with_units(world, strategy, freezes: bool):
    world(8)
    few, more, many = (host_costs(n, strategy, freezes=freezes) for n in (6, 12, 24))
    (first, second), (lines_first, lines_second) = (
        ((b - a) / 6, (c - b) / 12) for a, b, c in zip(few, more, many, strict=True)
    )
    assert second == first > 0
    # Leftovers of earlier tests may add some lines. Growing work would double them.
    assert 0 < lines_second <= lines_first * 1.15


def test_a_frozen_unit_has_no_place_in_the_order_of_reductions(world, monkeypatch):
    """With a place in the order, each backward would sort the unit in again."""
    world(8)
    model, added, add_back = sharded(), set(), reduction_queue.add_back
    model.blocks[2].requires_grad_(False)
    monkeypatch.setattr(reduction_queue, "add_back", lambda queue, unit: (added.add(unit), add_back(queue, unit)))
    step(model)
    assert added == {*units_below(model)} - {unit_of(model.blocks[2])}


def test_host_work_per_unit_does_not_grow_with_ranks(world):
    costs = []
    for size in (8, 4096):
        world(size)
        few, more = host_costs(5, FULL, WIDTH), host_costs(10, FULL, WIDTH)
        costs.append([b - a for a, b in zip(few, more, strict=True)])
    (operations, lines), (same, others) = costs
    assert operations == same
    # A parameter with an empty shard may take a line more or less, whatever the number of ranks.
    assert abs(lines - others) <= 5 * len(list(Block(WIDTH).parameters()))


@pytest.mark.parametrize("accumulates", [False, True])
def test_parameters_are_looked_at_only_after_a_change(world, accumulates: bool):
    """If a step equals the last, no Python loop of a unit visits its parameters."""
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
    assert (costs[1] - costs[0]) / 16 <= 7  # per parameter: its gradient's hook, and placing the gradient


def checkpointed(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        composable_checkpoint(block)
    return model


def frozen(model: nn.Module) -> nn.Module:
    """Freeze one block, and the next except for its norm."""
    model.blocks[1].requires_grad_(False)
    model.blocks[2].requires_grad_(False)
    model.blocks[2].norm.requires_grad_(True)
    return model


def divided(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply tensor parallelism."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Skipping(Net):
    """Runs every other block and skips the rest, which other ranks would run."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for i, block in enumerate(self.blocks):
            x = flatshard.skip(block, x) if i % 2 else block(x)
        return self.head(x)


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model(torch.ones(2, 3))


def accumulate(model: nn.Module, holds: bool) -> None:
    """Run three microbatches. ``holds``: only the last is reduced."""
    for number in range(3):
        with flatshard.no_sync(model) if holds and number < 2 else contextlib.nullcontext():
            model(torch.ones(2, 3)).sum().backward()
    model.zero_grad()


def traced(tp: DeviceMesh) -> dict[str, tuple[nn.Module, dict[str, Any], Callable[[nn.Module], None]]]:
    """Return the model, the options of ``fully_shard`` and the step of each case. ``tp``: a mesh of (4, 2)."""

    def hybrid(mesh: DeviceMesh) -> dict[str, Any]:
        return {"strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}

    return {
        "full": (Net(), {}, step),
        "full, small": (Net(width=SMALL_WIDTH), {}, step),
        "no prefetch": (Net(), {"forward_prefetch": False, "backward_prefetch": None}, step),
        "evaluated": (Net(), {}, evaluate),
        "shard-grad-op": (Net(), {"strategy": GRAD_OP}, step),
        "no-shard": (Net(), {"strategy": NO_SHARD}, step),
        "hybrid": (Net(), hybrid(tp), step),
        "one replica": (Net(), hybrid(init_device_mesh("cpu", (1, 8))), step),  # equals "full"
        "replicas of one": (Net(), hybrid(init_device_mesh("cpu", (8, 1))), step),  # equals "no-shard"
        "checkpointed": (checkpointed(Net()), {}, step),
        "3 x no_sync": (Net(), {}, functools.partial(accumulate, holds=True)),
        "3 x reduced": (Net(), {}, functools.partial(accumulate, holds=False)),
        "skipped": (Skipping(), {}, step),
        "tensor parallel": (divided(Net(), tp["tp"]), {"device_mesh": tp["dp"]}, step),
        "bf16": (Net(), {"mixed_precision": BF16}, step),
        "bf16, widened": (Net(), {"mixed_precision": BF16}, step),  # widened by the collectives
        "frozen": (frozen(Net()), {}, step),
        "resharded to 2": (Net(), {"reshard_after_forward": 2}, step),
    }


KINDS = {"all-gather": "G", "reduce-scatter": "R", "all-reduce": "A"}


@pytest.mark.skipif(torch_versions.VERSION < (2, 12), reason="counts operators of DTensors: needs torch 2.12 or later")
def test_traces_of_models(world):
    """Record the third step of each model: a changed line means that a step does something else, wanted or not.

    Columns: bytes sent; live bytes on rank 0 between steps (kept) and their maximum in a step (peak); bytes copied and
    operations, the model's own included; collectives in order. G is all-gather, R reduce-scatter, A all-reduce; 3G is
    three all-gathers.
    """
    world(8)
    tp = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    lines = ["                       sent     kept       peak     copied  ops  collectives"]
    for name, (model, options, run) in traced(tp).items():
        wire = Wire(out_of_place=True, widens=name.endswith("widened"))
        with LiveBytes() as live:
            fully_shard(model, policy=Block, collectives=wire.factory, **options)
            live.add(model.parameters())
            for _ in range(2):
                run(model)
            del wire.sent[:]
            before = live.now()
            with live.watch():
                run(model)
        sent = wire.sent.copy()
        with CopiedBytes() as cost:
            run(model)
        order = "".join(
            (str(n) if (n := len(list(same))) > 1 else "") + KINDS[kind]
            for kind, same in itertools.groupby(kind for kind, _ in sent)
        )
        total = sum(n for _, n in sent)
        numbers = f"{total:10,} {before:8,} {live.peak - before:10,} {cost.total:10,} {cost.operations:4}"
        lines.append(f"{name:<16} {numbers}  {order}")
    assert_expected_inline(
        "\n".join(lines),
        """\
                       sent     kept       peak     copied  ops  collectives
full              1,799,680   75,104    496,712  3,135,084  203  7GRGRG3R
full, small         124,416    5,216     35,592    315,244  187  7GRGRG3R
no prefetch       1,799,680   75,104    438,584  3,135,084  203  6GRGRGRG2R
evaluated           600,832   75,104    305,688    647,956   33  5G
shard-grad-op     1,201,664   75,104    764,520  3,135,084  203  5G5R
no-shard            600,320  600,320    678,200  3,134,572  251  5A
hybrid            2,100,096  300,416    758,344  3,135,084  203  7GRGARGARARARA
one replica       1,799,680   75,104    496,712  3,135,084  203  7GRGRG3R
replicas of one     600,320  600,320    678,200  3,134,572  251  5A
checkpointed      1,799,680   75,104    493,624  3,463,852  279  7GRGRG3R
3 x no_sync       4,197,376   75,104    991,452 10,593,140  583  25GRGRG3R
3 x reduced       5,399,040   75,104    540,616  9,855,876  619  7GRGRG3R7GRGRG3R7GRGRG3R
skipped           1,799,680   75,104    475,064  1,877,804  145  7GRGRG3R
tensor parallel     908,672   75,984    272,776  3,158,956  227  7GRGRG3R
bf16              1,200,256   75,104    340,252  2,095,606  213  7GRGRG3R
bf16, widened       899,840   75,104    267,044  1,792,374  213  7GRGRG3R
frozen            1,502,976   75,200    464,744  2,228,588  157  9GRGRG2R
resharded to 2    1,802,496   75,104    615,016  4,336,748  233  8GRGRG3R""",
    )


MOST = {"SGD": 10, "AdamW": 18, "RMSprop": 18, "NAdam": 26, "ASGD": 10, "Adamax": 70, "Rprop": 190}
"""Lines of this library that run for each parameter if an optimizer steps parameters one by one. Most come from
functions that compute a new sharded tensor from a gradient. A foreach step needs hardly any.
"""


def test_a_step_of_parts_costs_few_lines(world):
    world(2)
    for name, most in MOST.items():
        for foreach, allowed in ((False, 20 * most), (True, 64)):
            model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(10))), policy={nn.Linear})
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, foreach=foreach)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()  # creates its state
            with lines_of_flatshard() as lines:
                optimizer.step()
            assert lines[0] <= allowed, (name, foreach, lines[0])
