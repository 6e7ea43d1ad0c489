"""Writes a step as a trace for Perfetto and chrome://tracing, or as a picture, if matplotlib is installed."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatshard.planning._hardware import Timeline
from flatshard.planning._memory import CATEGORIES, Memory

Samples = Sequence[tuple[float, Memory]]

_LANES = {"compute": 0, "wait": 0, "all-gather": 1, "reduce-scatter": 2, "all-reduce": 3}
_COLOURS = {"compute": "#59a14f", "all-gather": "#e15759", "reduce-scatter": "#edc948", "all-reduce": "#b07aa1"}


def write_trace(path: str | os.PathLike[str], title: str, timeline: Timeline, memory: Samples) -> None:
    """Write the trace: one track for computing, one for each kind of collective, and counters of memory by category."""
    kinds = dict.fromkeys(["compute", *(s.kind for s in timeline.spans if s.kind != "wait")])
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}]
    for kind in kinds:
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": _LANES[kind], "args": {"name": kind}})
    for span in timeline.spans:
        at = {"ts": span.start * 1e6, "dur": span.seconds * 1e6, "pid": 0, "tid": _LANES[span.kind]}
        name = span.unit if span.kind != "wait" else f"wait: {span.unit}"
        events.append({"ph": "X", "name": name, "cat": f"{span.kind},{span.phase}", "args": {}, **at})
    shown = [c for c in CATEGORIES if any(getattr(m, c) for _, m in memory)]
    for seconds, each in memory:
        sizes = {c: nbytes for c, nbytes in asdict(each).items() if c in shown}
        events.append({"ph": "C", "name": "memory (bytes)", "ts": seconds * 1e6, "pid": 0, "args": sizes})
    Path(path).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}), encoding="utf-8")


def write_picture(path: str | os.PathLike[str], title: str, timeline: Timeline, memory: Samples) -> None:
    """Draw memory by category for each sample, and the spans below.

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
    figure.suptitle(title)
    above, below = figure.subplots(2, 1, height_ratios=[2, 1])
    shown = [c for c in CATEGORIES if any(getattr(m, c) for _, m in memory)]
    sizes = [[getattr(m, c) / 2**20 for _, m in memory] for c in shown]
    above.stackplot(range(len(memory)), sizes, labels=shown, step="post")
    above.set(ylabel="MiB on a rank", xlabel="events of a step", xlim=(0, max(1, len(memory) - 1)))
    above.legend(loc="upper left")
    for kind, colour in _COLOURS.items():
        bars = [(s.start * 1e3, s.seconds * 1e3) for s in timeline.spans if s.kind == kind]
        below.broken_barh(bars, (3 - _LANES[kind], 0.8), color=colour)
    below.set_yticks([3.4 - lane for lane in range(4)], list(_COLOURS))
    below.set(xlabel="ms (modelled)", xlim=(0, max(1e-9, timeline.step_seconds * 1e3)))
    figure.savefig(path)
