"""Draw the pictures of README.md: one unit's flat buffer, with its shards and views; and the memory of a step.

    python benchmarks/picture.py

This writes ``idea.svg`` and ``memory.svg`` beside it; a test compares the first. The bytes in the second are counted, as in
``memory.py``. The colours follow the reader's theme, light or dark.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import torch
from contenders import Job, Setting, mean_logit
from copied_bytes import CONFIG, RANKS, TOKENS
from counting import LiveBytes
from gpt import Block
from suite import fake_world

PARAMETERS = {"norm": 40, "up.weight": 196, "up.bias": 64, "down.weight": 196, "down.bias": 72, "": 8}
"""Widths of a block's parameters in the picture. The last one is padding."""
SHARDS = 4
LEFT, WIDTH = 132, sum(PARAMETERS.values())
HEIGHT = 22  # of a bar

STYLE = """
  text { font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px } .faint { fill: #59636e } .end { text-anchor: end } .middle { text-anchor: middle }
  .cut { stroke: #59636e; stroke-dasharray: 3 3 } .arrow { stroke: #59636e; fill: none } .head { fill: #59636e }
  .p0 { fill: #b6e3ff } .p1 { fill: #aceebb } .p2 { fill: #fae17d } .p3 { fill: #ffcecb } .p4 { fill: #ecd8ff }
  .pad { fill: #d1d9e0 } .line { fill: none; stroke-width: 2 } .grid { stroke: #d1d9e0 }
  .l0 { stroke: #8250df } .l1 { stroke: #bc4c00 } .l2 { stroke: #0969da } rect { stroke: #59636e; stroke-width: 0.8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .faint { fill: #9198a1 } .cut, .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
    .p0 { fill: #0c2d6b } .p1 { fill: #033a16 } .p2 { fill: #4b2900 } .p3 { fill: #67060c } .p4 { fill: #3c1e70 }
    .pad { fill: #3d444d } .grid { stroke: #3d444d } rect { stroke: #9198a1 }
  }
"""


def bar(top: float, begin: float = 0, end: float = WIDTH, labels: bool = False) -> Iterator[str]:
    """Draw the flat buffer from ``begin`` to ``end``, in the colours of the parameters in it."""
    start = 0.0
    for number, (name, width) in enumerate(PARAMETERS.items()):
        left, right = max(start, begin), min(start + width, end)
        if left < right:
            kind = f"p{number}" if name else "pad"
            yield f'<rect class="{kind}" x="{LEFT + left:g}" y="{top:g}" width="{right - left:g}" height="{HEIGHT}"/>'
            if labels:
                yield text((left + right) / 2, top + 15, name, "small middle")
        start += width


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{LEFT + x:g}" y="{y:g}">{escape(words)}</text>'


def arrow(x: float, begin: float, end: float) -> Iterator[str]:
    head = 6 if end > begin else -6
    yield f'<path class="arrow" d="M{LEFT + x:g} {begin:g}V{end - head:g}"/>'
    yield f'<path class="head" d="M{LEFT + x - 4:g} {end - head:g}h8l-4 {head}z"/>'


def svg(title: str, width: float, height: float, parts: list[str]) -> str:
    """Return the file of a picture."""
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def idea() -> str:
    """Return the picture of a flat buffer."""
    parts: list[str] = []
    shard = WIDTH / SHARDS
    top = 46.0
    parts.append(
        text(
            -LEFT + 8,
            20,
            "Between steps, a rank keeps one shard of the unit, of .grad and of the optimizer's state:",
        )
    )
    for rank in range(SHARDS):
        parts.append(text(-14, top + 15, f"rank {rank}", "end"))
        parts += bar(top, rank * shard, (rank + 1) * shard)
        top += HEIGHT + 6
    parts.append(text(WIDTH + 7, top - 13, "padding", "small faint"))
    for cut in range(SHARDS + 1):
        parts.append(f'<path class="cut" d="M{LEFT + cut * shard:g} 38V{top + 2:g}"/>')
    parts += arrow(0.125 * WIDTH, top + 6, top + 62)
    parts.append(text(0.125 * WIDTH + 10, top + 30, "all-gather, before the"))
    parts.append(text(0.125 * WIDTH + 10, top + 47, "unit computes"))
    parts += arrow(0.625 * WIDTH, top + 62, top + 6)
    parts.append(text(0.625 * WIDTH + 10, top + 30, "reduce-scatter, when its"))
    parts.append(text(0.625 * WIDTH + 10, top + 47, "gradients are complete"))
    top += 72
    parts.append(text(-14, top + 15, "every rank", "end"))
    parts += bar(top, labels=True)
    below = [
        "In forward and backward, the all-gather's output is the memory of the full parameters.",
        "Each parameter that a module sees is a view of it, so nothing is copied. Then it is freed.",
    ]
    parts += [text(-LEFT + 8, top + 50 + 19 * number, words) for number, words in enumerate(below)]
    title = "A unit's flat buffer: sharded between steps, gathered while the unit computes"
    return svg(title, LEFT + WIDTH + 60, top + 84, parts)


# -- memory over a step ------------------------------------------------------------------------------------------------

LINES = {"plain": "one process", "FSDP2": "FSDP2", "flatshard": "flatshard"}
"""Contenders, by the names in the picture."""
POINTS = 60
"""Points of a line in each phase: the most bytes in so many stretches of operations."""


class History(LiveBytes):
    """Live bytes after each operation, by phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.phases:
            self.phases[-1].append(self.now())
        return result


def history(name: str) -> list[list[int]]:
    """Return the bytes in a contender's forward, backward and optimizer step. Call it in a fake group."""
    with History() as live:

        def loss(logits: torch.Tensor) -> torch.Tensor:
            value = mean_logit(logits)
            live.phases.append([])
            return value

        job = Job(name, CONFIG, Setting(Block), TOKENS, functools.partial(torch.optim.AdamW, foreach=True), loss)
        live.add(job.model.parameters())
        for _ in range(2):
            job.step()
        job.model.zero_grad()
        live.phases = [[]]
        with live.watch():
            job.passes()
            live.phases.append([])
            job.optimizer.step()
    return live.phases


def memory(found: dict[str, list[list[int]]]) -> str:
    """Return the picture of the memory over a step."""
    left, width, base, scale = 40.0, 640.0, 300.0, 5.0  # pixels for each MiB
    words = f"Memory of a rank over a training step, in MiB: a GPT of 12 blocks, fp32, AdamW, {RANKS} ranks"
    parts = [text(8 - LEFT, 20, words)]
    for mib in range(0, 60, 10):
        y = base - scale * mib
        parts.append(f'<path class="grid" d="M{left:g} {y:g}H{left + width:g}"/>')
        parts.append(text(left - LEFT - 8, y + 4, str(mib), "small faint end"))
    for number, phase in enumerate(("forward", "backward", "optimizer's step")):
        x = left + width * number / 3
        parts.append(f'<path class="cut" d="M{x:g} 40V{base:g}"/>')
        parts.append(text(x - LEFT + width / 6, base + 18, phase, "small faint middle"))
    for kind, (name, label) in enumerate(LINES.items()):
        points: list[str] = []
        for number, phase in enumerate(found[name]):
            for at in range(POINTS):
                begin = at * len(phase) // POINTS
                most = max(phase[begin : max((at + 1) * len(phase) // POINTS, begin + 1)])
                x = left + width * (number + (at + 0.5) / POINTS) / 3
                points.append(f"{x:.1f},{base - scale * most / 2**20:.1f}")
        parts.append(f'<polyline class="line l{kind}" points="{" ".join(points)}"/>')
        peak = max(map(max, found[name])) / 2**20
        parts.append(f'<path class="line l{kind}" d="M{left + 24 + 215 * kind:g} {base + 38:g}h20"/>')
        parts.append(text(left - LEFT + 50 + 215 * kind, base + 42, f"{label}, at most {peak:.1f}"))
    return svg("Memory of a rank over a training step", left + width + 20, base + 56, parts)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    with fake_world(RANKS):
        counted = {name: history(name) for name in LINES}
    for file, picture in (("idea.svg", idea()), ("memory.svg", memory(counted))):
        (Path(__file__).parent / file).write_text(picture)
