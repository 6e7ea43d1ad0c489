"""The result of ``plan_step``: tables that ``print`` shows, and a picture."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flatshard.debug._describe import UnitDescription, table
from flatshard.planning._picture import draw, in_bytes
from flatshard.planning._records import CATEGORIES, Memory, Peak, PlannedCollective, Ranks, Sample


@dataclass(frozen=True, kw_only=True)
class UnitPlan(UnitDescription):
    """A unit as ``describe`` would show it, and its bytes on one rank.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        largest = max(plan.units, key=lambda unit: unit.unsharded_nbytes)
        print(largest.fqn, largest.shard_nbytes, largest.sent_nbytes)
    """

    shard_nbytes: int  # of its parameters between steps
    gradient_nbytes: int  # of `.grad`
    optimizer_nbytes: int  # of the optimizer's state
    unsharded_nbytes: int  # of the gathered parameters
    reduction_nbytes: int  # the input and the output of its reduction
    collectives: int  # in a step
    sent_nbytes: int  # in a step: see ``PlannedCollective.sent_nbytes``
    flops: int  # floating-point operations in a step, while it is the innermost unit that runs

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.flats)

    @property
    def padding(self) -> int:
        """Elements of padding on all ranks."""
        return sum(f.padded_numel - f.numel for f in self.flats)


@dataclass(frozen=True)
class StepPlan:
    """The result of :func:`plan_step`. ``print`` shows it as tables. Sizes are bytes on the rank that has most elements.

    Example::

        plan = flatshard.plan_step(model, policy={Block}, world_size=8)
        print(plan)
        print(plan.total_peak.nbytes, [other.strategy for other in plan.others])
    """

    module: str  # class name
    strategy: str  # a name of ``ShardingStrategy``
    world_size: Ranks  # (replicas, ranks to shard over)
    device: str  # its type
    units: tuple[UnitPlan, ...]  # in module order
    samples: tuple[Sample, ...]
    """The memory from the beginning of a step to its end: a sample for each change of memory, phase or unit."""
    collectives: tuple[PlannedCollective, ...]
    """All collectives of a step, in the order in which they are issued."""
    flops: int | None
    """Floating-point operations of a step on a rank, as torch's flop counter counts them. None: without example inputs."""
    others: tuple[StepPlan, ...]
    """The plans of the other strategies, with ``compare``."""
    warnings: tuple[str, ...]  # what is probably not meant
    assumptions: tuple[str, ...]  # what the numbers rest on

    @property
    def title(self) -> str:
        """The module, the strategy and the ranks."""
        return f"{self.module}, {self.strategy} over {self.world_size}"

    @property
    def strategies(self) -> tuple[StepPlan, ...]:
        """This plan, and with ``compare`` those of the other strategies."""
        return (self, *self.others)

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def between_steps(self) -> Memory:
        """The memory between steps, without gradients."""
        return self.samples[0].device

    @property
    def host(self) -> Memory:
        """The host memory between steps, with ``cpu_offload``."""
        return self.samples[0].host

    @property
    def peak(self) -> Peak:
        """The peak of what flatshard and the optimizer allocate: without activations, buffers and ignored parameters."""
        return _highest(Peak(s.device.held, s.device, s.phase, s.unit) for s in self.samples)

    @property
    def total_peak(self) -> Peak:
        """The peak of everything that is recorded."""
        return _highest(Peak(s.device.total, s.device, s.phase, s.unit) for s in self.samples)

    @property
    def host_peak(self) -> Peak:
        """The peak in host memory, with ``cpu_offload``."""
        return _highest(Peak(s.host.total, s.host, s.phase, s.unit) for s in self.samples)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step, by ring algorithms."""
        return sum(c.sent_nbytes for c in self.collectives)

    def __str__(self) -> str:
        sections = {
            "units (bytes on a rank, of a step; units that are alike share a line)": _unit_table(self.units),
            "memory on a rank": _memory_table(self),
            "collectives by group of ranks": _group_table(self.collectives),
            "strategies": _strategy_table(self.strategies),
            "warnings": _bullets(self.warnings),
            "assumptions": _bullets(self.assumptions),
        }
        operations = "" if self.flops is None else f", {self.flops:,} floating-point operations in a step"
        lines = [f"{self.title}: {self.numel:,} elements{operations}"]
        for title, text in sections.items():
            if text:
                lines += ["", title, *text]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw what is in memory over a step, by category, as an SVG.

        Raises:
            ValueError: ``path`` does not end in ``.svg``.
        """
        draw(path, self.samples, self.title)


def _highest(peaks: Iterable[Peak]) -> Peak:
    """Return the first of the highest peaks, by its last sample: a storage's category may be known only then."""
    peaks = list(peaks)
    nbytes = max(peak.nbytes for peak in peaks)
    highest = [peak for peak in peaks if peak.nbytes == nbytes]
    place = highest[0].phase, highest[0].unit
    return [peak for peak in highest if (peak.phase, peak.unit) == place][-1]


def _bullets(texts: Iterable[str]) -> list[str]:
    return [line for t in texts for line in textwrap.wrap(t, 118, initial_indent="- ", subsequent_indent="  ")]


_UNIT_COLUMNS: dict[str, tuple[str, Callable[[int], str]]] = {
    "numel": ("numel", "{:,}".format),
    "padding": ("padding", "{:,}".format),
    "shard": ("shard_nbytes", in_bytes),
    ".grad": ("gradient_nbytes", in_bytes),
    "optimizer": ("optimizer_nbytes", in_bytes),
    "unsharded": ("unsharded_nbytes", in_bytes),
    "reducing": ("reduction_nbytes", in_bytes),
    "collectives": ("collectives", "{:,}".format),
    "sent": ("sent_nbytes", in_bytes),
}
"""Attributes of ``UnitPlan``, and how they are shown."""


def _unit_table(units: Sequence[UnitPlan]) -> list[str]:
    def cells(*units: UnitPlan) -> list[str]:
        return [show(sum(getattr(unit, name) for unit in units)) for name, show in _UNIT_COLUMNS.values()]

    rows = [["unit", "module", *_UNIT_COLUMNS]]
    for (module, *numbers), group in itertools.groupby(units, key=lambda unit: [unit.module, *cells(unit)]):
        first, *more = (unit.fqn or "<root>" for unit in group)
        rows.append([f"{first} ... {more[-1]} ({1 + len(more)})" if more else first, module, *numbers])
    return table([*rows, ["all", "", *cells(*units)]], left=2)


def _memory_table(plan: StepPlan) -> list[str]:
    peak = plan.total_peak
    columns = {"between steps": plan.between_steps, "at the peak": peak.memory}
    if plan.host_peak.nbytes:
        columns["on the host"] = plan.host_peak.memory
    rows = [["", *columns]]
    for name in (*CATEGORIES, "total"):
        sizes = [getattr(memory, name) for memory in columns.values()]
        if any(sizes) or name == "total":
            rows.append(["all" if name == "total" else name, *map(in_bytes, sizes)])
    return [*table(rows), f"the peak is in {peak.phase}, at unit {peak.unit or '<root>'}"]


def _group_table(collectives: Iterable[PlannedCollective]) -> list[str]:
    by_group: dict[tuple[str, int, str], list[PlannedCollective]] = {}
    for each in collectives:
        by_group.setdefault((each.group, each.ranks, each.kind), []).append(each)
    if len({name for name, *_ in by_group}) < 2:
        return []
    rows = [["group", "ranks", "collective", "number", "bytes", "sent"]]
    for (name, ranks, kind), issued in sorted(by_group.items()):
        sizes = in_bytes(sum(c.nbytes for c in issued)), in_bytes(sum(c.sent_nbytes for c in issued))
        rows.append([name, f"{ranks:,}", kind, f"{len(issued):,}", *sizes])
    return table(rows, left=1)


def _strategy_table(plans: Sequence[StepPlan]) -> list[str]:
    rows = [["strategy", "over", "between steps", "peak", "collectives", "sent"]]
    for plan in plans:
        name = plan.strategy + (" (this)" if plan is plans[0] else "")
        sizes = in_bytes(plan.between_steps.total), in_bytes(plan.total_peak.nbytes)
        sent = f"{len(plan.collectives):,}", in_bytes(plan.sent_nbytes)
        rows.append([name, str(plan.world_size), *sizes, *sent])
    return table(rows, left=2)
