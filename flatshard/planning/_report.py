"""The result of ``plan``: tables that ``print`` shows, a trace for Perfetto, and a picture by matplotlib."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshard.debug._describe import UnitDescription, counted, table
from flatshard.planning._hardware import Collective, Timeline
from flatshard.planning._memory import CATEGORIES, Memory, Peak, Sample


@dataclass(frozen=True, kw_only=True)
class UnitPlan(UnitDescription):
    """One unit, as ``describe`` would show it, and its bytes on one rank."""

    shard_nbytes: int
    gradient_nbytes: int  # of `.grad`
    optimizer_nbytes: int
    unsharded_nbytes: int
    reduction_nbytes: int  # the input and the output of its reduction
    collectives: int  # in a step
    sent_nbytes: int  # in a step: see ``Collective.sent_nbytes``

    @property
    def numel(self) -> int:
        return sum(f.numel for f in self.flats)

    @property
    def padding(self) -> int:
        """Elements of padding on all ranks."""
        return sum(f.padded_numel - f.numel for f in self.flats)


@dataclass(frozen=True)
class Plan:
    """The result of :func:`plan`. ``print`` shows it as tables. Sizes are bytes on the rank that has most elements."""

    module: str  # class name
    strategy: str
    world_size: tuple[int, int]  # (replicas, ranks to shard over)
    device: str
    units: tuple[UnitPlan, ...]  # in module order
    samples: tuple[Sample, ...]
    """What is in memory from the beginning of a step to its end: one for each change of memory, time or place."""
    collectives: tuple[Collective, ...]
    """All collectives of a step, in the order in which they are issued."""
    timeline: Timeline
    others: tuple[Plan, ...]
    """The same with the other strategies, with ``compare``."""
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def strategies(self) -> tuple[Plan, ...]:
        """This plan, and with ``compare`` those of the other strategies."""
        return (self, *self.others)

    @property
    def numel(self) -> int:
        return sum(u.numel for u in self.units)

    @property
    def between_steps(self) -> Memory:
        """What is in memory between steps, without gradients."""
        return self.samples[0].device

    @property
    def host(self) -> Memory:
        """The same in host memory, with ``cpu_offload``."""
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
    def memory(self) -> tuple[tuple[float, Memory], ...]:
        """(seconds, what is in memory from then on). Of several samples at the same time, the largest."""
        found: list[tuple[float, Memory]] = []
        for sample in self.samples:
            if found and found[-1][0] == sample.seconds:
                if sample.device.total < found[-1][1].total:
                    continue
                found.pop()
            if not found or found[-1][1] != sample.device:
                found.append((sample.seconds, sample.device))
        return (*found, (self.step_seconds, self.samples[-1].device))

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step, by ring algorithms."""
        return sum(c.sent_nbytes for c in self.collectives)

    @property
    def step_seconds(self) -> float:
        """The modelled time of a step, without the optimizer's."""
        return self.timeline.step_seconds

    @property
    def hidden_share(self) -> float | None:
        """See :attr:`Timeline.hidden_share`."""
        return self.timeline.hidden_share

    def __str__(self) -> str:
        return as_text(self)

    @property
    def title(self) -> str:
        """The module, the strategy and the ranks."""
        return f"{self.module}, {self.strategy} over {world(self.world_size)}"

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a step as a JSON trace, to open in https://ui.perfetto.dev or chrome://tracing.

        It has a track for computing, one for each kind of collective, and counters of memory by category.
        """
        spans, categories = self.timeline.spans, self._categories
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": self.title}}]
        for kind in dict.fromkeys(["compute", *(s.kind for s in spans if s.kind != "wait")]):
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": _LANES[kind], "args": {"name": kind}})
        for span in spans:
            at = {"ts": span.start * 1e6, "dur": span.seconds * 1e6, "pid": 0, "tid": _LANES[span.kind]}
            name = span.unit if span.kind != "wait" else f"wait: {span.unit}"
            events.append({"ph": "X", "name": name, "cat": f"{span.kind},{span.phase}", "args": {}, **at})
        for seconds, memory in self.memory:
            sizes = {category: getattr(memory, category) for category in categories}
            events.append({"ph": "C", "name": "memory (bytes)", "ts": seconds * 1e6, "pid": 0, "args": sizes})
        Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory by category for each sample, and the spans below. The extension of ``path`` gives the format.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            figures = importlib.import_module("matplotlib.figure")
        except ImportError as e:
            raise ImportError(
                "Plan.plot draws with matplotlib, which is not installed: `pip install matplotlib`, or write a trace by "
                "Plan.trace(path) and open it in https://ui.perfetto.dev"
            ) from e
        figure = figures.Figure(figsize=(14, 8), layout="constrained")
        figure.suptitle(self.title)
        above, below = figure.subplots(2, 1, height_ratios=[2, 1])
        categories = self._categories
        sizes = [[getattr(memory, c) / 2**20 for _, memory in self.memory] for c in categories]
        above.stackplot(range(len(self.memory)), sizes, labels=categories, step="post")
        above.set(ylabel="MiB on a rank", xlabel="events of a step", xlim=(0, max(1, len(self.memory) - 1)))
        above.legend(loc="upper left")
        for kind, colour in _COLOURS.items():
            bars = [(s.start * 1e3, s.seconds * 1e3) for s in self.timeline.spans if s.kind == kind]
            below.broken_barh(bars, (3 - _LANES[kind], 0.8), color=colour)
        below.set_yticks([3.4 - lane for lane in range(4)], list(_COLOURS))
        below.set(xlabel="ms (modelled)", ylim=(0, 4), xlim=(0, max(1e-9, self.step_seconds * 1e3)))
        figure.savefig(path)

    @property
    def _categories(self) -> list[str]:
        """The categories of memory that occur."""
        return [c for c in CATEGORIES if any(getattr(memory, c) for _, memory in self.memory)]


def _highest(peaks: Iterable[Peak]) -> Peak:
    """The first of the highest, with its last categories: a storage changes its category when it is known what it is."""
    *_, highest = itertools.accumulate(peaks, _higher)
    return highest


def _higher(before: Peak, now: Peak) -> Peak:
    same_place = (now.phase, now.unit) == (before.phase, before.unit)
    return now if now.nbytes > before.nbytes or (now.nbytes == before.nbytes and same_place) else before


_LANES = {"compute": 0, "wait": 0, "all-gather": 1, "reduce-scatter": 2, "all-reduce": 3}
_COLOURS = {"compute": "#59a14f", "all-gather": "#e15759", "reduce-scatter": "#edc948", "all-reduce": "#b07aa1"}


def in_bytes(nbytes: int) -> str:
    """``1.5 GiB``: with three digits."""
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
    """``34%``, or ``-`` if it is not known."""
    return "-" if share is None else f"{share:.0%}"


def world(sizes: tuple[int, int]) -> str:
    """``8 ranks``, or with replicas ``2 x 8 ranks``."""
    return counted(sizes[1], "rank") if sizes[0] == 1 else f"{sizes[0]:,} x {sizes[1]:,} ranks"


def as_text(plan: Plan) -> str:
    """The text that ``print(plan)`` shows."""
    lines = [f"{plan.title}: {plan.numel:,} elements"]
    lines += ["", "units (bytes on a rank, of a step; units that are alike share a line)"]
    lines += table(_unit_rows(plan.units), left=2)
    lines += ["", "memory on a rank"]
    lines += table(_memory_rows(plan))
    lines.append(f"the peak is in {plan.total_peak.phase}, at unit {plan.total_peak.unit}")
    lines += ["", "strategies"]
    lines += table(_strategy_rows(plan.strategies), left=2)
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


_COLUMNS: dict[str, tuple[str, Callable[[int], str]]] = {
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
"""The columns of the table of units: attributes of ``UnitPlan``, and how they are shown."""


def _unit_rows(units: Sequence[UnitPlan]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("unit", "module", *_COLUMNS)]
    for cells, group in itertools.groupby(units, key=lambda unit: (unit.module, *_cells([unit]))):
        alike = list(group)
        name = alike[0].fqn or "<root>"
        rows.append((name if len(alike) == 1 else f"{name} ... {alike[-1].fqn} ({len(alike)})", *cells))
    return [*rows, ("all", "", *_cells(units))]


def _cells(units: Sequence[UnitPlan]) -> tuple[str, ...]:
    """The numbers of ``units`` together, as the cells of one line."""
    return tuple(show(sum(getattr(unit, name) for unit in units)) for name, show in _COLUMNS.values())


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


def _strategy_rows(strategies: Sequence[Plan]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("strategy", "over", "between steps", "peak", "collectives", "sent", "step", "hidden")
    ]
    for each in strategies:
        rows.append(
            (
                each.strategy + (" (this)" if each is strategies[0] else ""),
                world(each.world_size),
                in_bytes(each.between_steps.total),
                in_bytes(each.total_peak.nbytes),
                f"{len(each.collectives):,}",
                in_bytes(each.sent_nbytes),
                in_seconds(each.step_seconds),
                in_percent(each.hidden_share),
            )
        )
    return rows
