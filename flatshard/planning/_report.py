"""What a plan says: numbers, tables for ``print``, and what is worth a warning."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flatshard._errors import name_list
from flatshard.debug._describe import FlatDescription
from flatshard.planning._hardware import Collective, Timeline
from flatshard.planning._memory import CATEGORIES, Memory, Peak
from flatshard.planning._trace import write_picture, write_trace


@dataclass(frozen=True)
class UnitPlan:
    """One unit. Bytes are those of one rank."""

    fqn: str
    module: str  # class name
    strategy: str
    flats: tuple[FlatDescription, ...]  # as in ``describe``
    reshard_after_forward: bool | int | None
    shard_nbytes: int
    gradient_nbytes: int  # of `.grad`
    optimizer_nbytes: int
    unsharded_nbytes: int
    reduction_nbytes: int  # the input and the output of its reduction
    collectives: int  # in a step
    sent_nbytes: int  # in a step: see ``Collective.sent_nbytes``
    gather_seconds: float  # of one all-gather, modelled

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.flats)

    @property
    def padding(self) -> int:
        """Elements over all ranks."""
        return sum(f.padded_numel - f.numel for f in self.flats)


@dataclass(frozen=True)
class StrategyPlan:
    """A strategy beside the others."""

    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    between_steps_nbytes: int
    peak_nbytes: int
    collectives: int
    sent_nbytes: int
    step_seconds: float
    hidden_share: float | None


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found. ``print(plan(...))`` shows it as tables; sizes are bytes on one rank, the fullest."""

    module: str  # class name
    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    device: str
    units: tuple[UnitPlan, ...]  # in module order
    between_steps: Memory
    """What is held between steps, gradients dropped."""
    host: Memory
    """The same off the device, with ``cpu_offload``."""
    peak: Peak
    """The most that flatshard and the optimizer hold during a step: without activations, buffers and ignored parameters."""
    total_peak: Peak
    """The most of everything known."""
    host_peak: Peak
    collectives: tuple[Collective, ...]
    """Of a step, in the order in which they are issued."""
    timeline: Timeline
    memory: tuple[tuple[float, Memory], ...]
    """(seconds, what is held from then on)."""
    strategies: tuple[StrategyPlan, ...]
    """This plan's strategy and, if asked for, others, side by side."""
    rank_numels: tuple[int, int]
    """Elements of parameters on the emptiest and on the fullest rank, without padding."""
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step by ring algorithms."""
        return sum(c.sent_nbytes for c in self.collectives)

    @property
    def step_seconds(self) -> float:
        """Modelled, without the optimizer's step."""
        return self.timeline.step_seconds

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that runs while something computes. None: no communication, or computing unknown."""
        return self.timeline.hidden_share

    def __str__(self) -> str:
        return as_text(self)

    @property
    def title(self) -> str:
        """The module, the strategy and the ranks."""
        return f"{self.module}, {self.strategy} over {world(self.world_size)}"

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a step as JSON that https://ui.perfetto.dev and chrome://tracing open: spans, and memory by category."""
        write_trace(path, self.title, self.timeline, self.memory)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the same as a picture, by matplotlib; the file's extension says in which format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        write_picture(path, self.title, self.timeline, self.memory)


def in_bytes(nbytes: int) -> str:
    """``1.5 GiB``: three digits at least."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1000 or unit == "PiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """``12.3 ms``."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def in_percent(share: float | None) -> str:
    """``34%``, or ``-`` where it is not known."""
    return "-" if share is None else f"{share:.0%}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """``rows``, the first being the head, in columns; the first ``left`` ones to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def world(sizes: tuple[int, int]) -> str:
    """``8 ranks``, or with replicas ``2 x 8 ranks``."""
    return f"{sizes[1]:,} ranks" if sizes[0] == 1 else f"{sizes[0]:,} x {sizes[1]:,} ranks"


def as_text(plan: Plan) -> str:
    """The whole plan."""
    lines = [f"{plan.title}: {plan.numel:,} elements"]
    lines += ["", "units (bytes on a rank, of a step; units that are alike share a line)"]
    lines += table(_unit_rows(plan.units), left=2)
    lines += ["", "memory on a rank"]
    lines += table(_memory_rows(plan))
    lines.append(f"the peak is in {plan.total_peak.phase}, at unit {plan.total_peak.unit}")
    lines += ["", "strategies"]
    lines += table(_strategy_rows(plan), left=2)
    time = plan.timeline
    lines += ["", "time of a step"]
    lines.append(
        f"{in_seconds(time.step_seconds)}: computing {in_seconds(time.compute_seconds)}, waiting for communication "
        f"{in_seconds(time.exposed_seconds)}; communication {in_seconds(time.communication_seconds)}, hidden "
        f"{in_percent(time.hidden_share)}"
    )
    for title, texts in (("warnings", plan.warnings), ("assumptions", plan.assumptions)):
        if texts:
            lines += ["", title]
            for text in texts:
                lines += textwrap.wrap(text, 118, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _unit_rows(units: Sequence[UnitPlan]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "unit",
            "module",
            "numel",
            "padding",
            "shard",
            ".grad",
            "optimizer",
            "unsharded",
            "reducing",
            "collectives",
            "sent",
        )
    ]
    for numbers, alike in itertools.groupby(units, key=_numbers_of):
        found = list(alike)
        name = found[0].fqn or "<root>"
        if len(found) > 1:
            name = f"{name} ... {found[-1].fqn} ({len(found)})"
        rows.append((name, *numbers))
    count = sum(u.collectives for u in units)
    totals = [sum(n) for n in zip(*(_bytes_of(u) for u in units), strict=True)]
    sent = totals.pop()
    rows.append(
        (
            "all",
            "",
            f"{sum(u.numel for u in units):,}",
            f"{sum(u.padding for u in units):,}",
            *map(in_bytes, totals),
            f"{count:,}",
            in_bytes(sent),
        )
    )
    return rows


def _bytes_of(unit: UnitPlan) -> tuple[int, ...]:
    own = (unit.shard_nbytes, unit.gradient_nbytes, unit.optimizer_nbytes, unit.unsharded_nbytes, unit.reduction_nbytes)
    return (*own, unit.sent_nbytes)


def _numbers_of(unit: UnitPlan) -> tuple[str, ...]:
    *sizes, sent = map(in_bytes, _bytes_of(unit))
    return (unit.module, f"{unit.numel:,}", f"{unit.padding:,}", *sizes, f"{unit.collectives:,}", sent)


def _memory_rows(plan: Plan) -> list[tuple[str, ...]]:
    columns = [("between steps", plan.between_steps), ("at the peak", plan.total_peak.memory)]
    if plan.host_peak.nbytes:
        columns += [("on the host", plan.host_peak.memory)]
    rows: list[tuple[str, ...]] = [("", *(name for name, _ in columns))]
    for category in CATEGORIES:
        sizes = [getattr(memory, category) for _, memory in columns]
        if any(sizes):
            rows.append((category, *map(in_bytes, sizes)))
    rows.append(("all", *(in_bytes(memory.total) for _, memory in columns)))
    return rows


def _strategy_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("strategy", "over", "between steps", "peak", "collectives", "sent", "step", "hidden")
    ]
    for each in plan.strategies:
        rows.append(
            (
                each.strategy + (" (this)" if each is plan.strategies[0] else ""),
                world(each.world_size),
                in_bytes(each.between_steps_nbytes),
                in_bytes(each.peak_nbytes),
                f"{each.collectives:,}",
                in_bytes(each.sent_nbytes),
                in_seconds(each.step_seconds),
                in_percent(each.hidden_share),
            )
        )
    return rows


MUCH_PADDING = 0.05
"""Of a unit's elements, from which on it is worth a warning."""
MUCH_IMBALANCE = 0.1
"""By which the fullest rank is over the average, likewise."""
DOMINANT = 0.5
"""Of all elements in one unit, likewise."""


def size_warnings(units: Sequence[UnitPlan], mean_numel: float, fullest_numel: int) -> list[str]:
    """What is odd about sizes."""
    found = []
    padded = [u for u in units if u.padding > MUCH_PADDING * u.numel]
    if padded:
        worst = max(padded, key=lambda u: u.padding / max(1, u.numel))
        found.append(
            f"{_named(padded)} more than {MUCH_PADDING:.0%} padding ({worst.fqn or '<root>'!r}: "
            f"{worst.padding / max(1, worst.numel):.0%}). Parameters begin at multiples of 16 bytes and shards are multiples "
            "of 128 bytes, so other sizes, few elements for many ranks, and layouts by rows or blocks leave gaps: make "
            "larger units"
        )
    if fullest_numel > (1 + MUCH_IMBALANCE) * mean_numel:
        found.append(
            f"shards are unbalanced: the fullest rank has {fullest_numel:,} elements, the average is {mean_numel:,.0f}"
        )
    numel = sum(u.numel for u in units)
    if len(units) > 1:
        for unit in units:
            if unit.numel > DOMINANT * numel:
                found.append(
                    f"unit {unit.fqn or '<root>'!r} has {unit.numel / numel:.0%} of all elements, which are unsharded at "
                    "once: choose units inside it too"
                )
    return found


def _named(units: Iterable[UnitPlan]) -> str:
    names = [u.fqn or "<root>" for u in units]
    return f"unit {names[0]!r} has" if len(names) == 1 else f"{len(names)} units ({name_list(names, 3)}) have"
