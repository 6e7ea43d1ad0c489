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

from flatshard.debug._describe import UnitDescription, table
from flatshard.planning._records import CATEGORIES, Collective, Memory, Peak, Ranks, Sample, Timeline


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
    world_size: Ranks  # (replicas, ranks to shard over)
    device: str
    units: tuple[UnitPlan, ...]  # in module order
    samples: tuple[Sample, ...]
    """What is in memory from the beginning of a step to its end: one for each change of memory, time or place."""
    timeline: Timeline
    others: tuple[Plan, ...]
    """The same with the other strategies, with ``compare``."""
    warnings: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def title(self) -> str:
        """The module, the strategy and the ranks."""
        return f"{self.module}, {self.strategy} over {self.world_size}"

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
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step, in the order in which they are issued."""
        return tuple(s for s in self.timeline.spans if isinstance(s, Collective))

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
        time = self.timeline
        sections = {
            "units (bytes on a rank, of a step; units that are alike share a line)": _unit_table(self.units),
            "memory on a rank": _memory_table(self),
            "strategies": _strategy_table(self.strategies),
            "time of a step": [
                f"{in_seconds(time.step_seconds)}: computing {in_seconds(time.compute_seconds)}, waiting for communication "
                f"{in_seconds(time.exposed_seconds)}; communication {in_seconds(time.communication_seconds)}, hidden "
                f"{in_percent(time.hidden_share)}"
            ],
            "warnings": _bullets(self.warnings),
            "assumptions": _bullets(self.assumptions),
        }
        lines = [f"{self.title}: {self.numel:,} elements"]
        for title, text in sections.items():
            if text:
                lines += ["", title, *text]
        return "\n".join(lines)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a step as a JSON trace, to open in https://ui.perfetto.dev or chrome://tracing.

        It has a track for computing, one for each kind of collective, and counters of memory by category.
        """
        kinds, categories = {"compute", *(span.kind for span in self.timeline.spans)}, self._categories
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": self.title}}]
        for kind in (kind for kind in _TRACKS if kind in kinds and kind != "wait"):
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": _TRACKS[kind], "args": {"name": kind}})
        for span in self.timeline.spans:
            name = ("wait: " if span.kind == "wait" else "") + (span.unit or "<root>")
            at = {"ts": span.start * 1e6, "dur": span.seconds * 1e6, "pid": 0, "tid": _TRACKS[span.kind]}
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
        memory, categories = self.memory, self._categories
        sizes = [[getattr(each, category) / 2**20 for _, each in memory] for category in categories]
        above.stackplot(range(len(memory)), sizes, labels=categories, step="post")
        above.set(ylabel="MiB on a rank", xlabel="events of a step", xlim=(0, max(1, len(memory) - 1)))
        above.legend(loc="upper left")
        for kind, colour in _COLOURS.items():
            bars = [(s.start * 1e3, s.seconds * 1e3) for s in self.timeline.spans if s.kind == kind]
            below.broken_barh(bars, (3 - _TRACKS[kind], 0.8), color=colour)
        below.set_yticks([3.4 - _TRACKS[kind] for kind in _COLOURS], list(_COLOURS))
        below.set(xlabel="ms (modelled)", ylim=(0, 4), xlim=(0, max(1e-9, self.step_seconds * 1e3)))
        figure.savefig(path)

    @property
    def _categories(self) -> list[str]:
        """The categories of memory that occur."""
        return [c for c in CATEGORIES if any(getattr(memory, c) for _, memory in self.memory)]


_TRACKS = {"compute": 0, "wait": 0, "all-gather": 1, "reduce-scatter": 2, "all-reduce": 3}
_COLOURS = {"compute": "#59a14f", "all-gather": "#e15759", "reduce-scatter": "#edc948", "all-reduce": "#b07aa1"}


def _highest(peaks: Iterable[Peak]) -> Peak:
    """The first of the highest, with its last categories: a storage changes its category when it is known what it is."""
    peaks = list(peaks)
    nbytes = max(peak.nbytes for peak in peaks)
    highest = [peak for peak in peaks if peak.nbytes == nbytes]
    place = highest[0].phase, highest[0].unit
    return [peak for peak in highest if (peak.phase, peak.unit) == place][-1]


def in_bytes(nbytes: float) -> str:
    """``1.5 GiB``: with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if nbytes < 1000 or unit == "PiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"


def in_seconds(seconds: float) -> str:
    """``12.3 ms``."""
    factor, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.3g} {unit}"


def in_percent(share: float | None) -> str:
    """``34%``, or ``-`` if it is not known."""
    return "-" if share is None else f"{share:.0%}"


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


def _memory_table(plan: Plan) -> list[str]:
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


def _strategy_table(plans: Sequence[Plan]) -> list[str]:
    rows = [["strategy", "over", "between steps", "peak", "collectives", "sent", "step", "hidden"]]
    for plan in plans:
        name = plan.strategy + (" (this)" if plan is plans[0] else "")
        sizes = in_bytes(plan.between_steps.total), in_bytes(plan.total_peak.nbytes)
        sent = f"{len(plan.collectives):,}", in_bytes(plan.sent_nbytes)
        times = in_seconds(plan.step_seconds), in_percent(plan.hidden_share)
        rows.append([name, str(plan.world_size), *sizes, *sent, *times])
    return table(rows, left=2)
