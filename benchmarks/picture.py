"""Draw the picture of README.md: one unit's flat buffer, its shards, and the views that modules compute with.

    python benchmarks/picture.py > benchmarks/idea.svg

A test compares the file with this output. The colours follow the reader's theme, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

PARAMETERS = {"norm": 40, "up.weight": 196, "up.bias": 64, "down.weight": 196, "down.bias": 72, "": 8}
"""Widths of a block's parameters in the picture. The last one is padding."""
RANKS = 4
LEFT, WIDTH = 132, sum(PARAMETERS.values())
HEIGHT = 22  # of a bar

STYLE = """
  text { font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .small { font-size: 11.5px } .faint { fill: #59636e } .end { text-anchor: end } .middle { text-anchor: middle }
  .cut { stroke: #59636e; stroke-dasharray: 3 3 } .arrow { stroke: #59636e; fill: none } .head { fill: #59636e }
  .p0 { fill: #b6e3ff } .p1 { fill: #aceebb } .p2 { fill: #fae17d } .p3 { fill: #ffcecb } .p4 { fill: #ecd8ff }
  .pad { fill: #d1d9e0 } rect { stroke: #59636e; stroke-width: 0.8 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .faint { fill: #9198a1 } .cut, .arrow { stroke: #9198a1 } .head { fill: #9198a1 }
    .p0 { fill: #0c2d6b } .p1 { fill: #033a16 } .p2 { fill: #4b2900 } .p3 { fill: #67060c } .p4 { fill: #3c1e70 }
    .pad { fill: #3d444d } rect { stroke: #9198a1 }
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


def picture() -> str:
    """Return the picture as SVG."""
    parts: list[str] = []
    shard = WIDTH / RANKS
    top = 46.0
    parts.append(text(-LEFT + 8, 20, "Between steps: each rank keeps one shard of the unit, and that part of .grad"))
    for rank in range(RANKS):
        parts.append(text(-14, top + 15, f"rank {rank}", "end"))
        parts += bar(top, rank * shard, (rank + 1) * shard)
        top += HEIGHT + 6
    for cut in range(RANKS + 1):
        parts.append(f'<path class="cut" d="M{LEFT + cut * shard:g} 38V{top + 2:g}"/>')
    parts += arrow(0.125 * WIDTH, top + 6, top + 62)
    parts.append(text(0.125 * WIDTH + 10, top + 30, "all-gather, before the"))
    parts.append(text(0.125 * WIDTH + 10, top + 47, "unit computes"))
    parts += arrow(0.625 * WIDTH, top + 62, top + 6)
    parts.append(text(0.625 * WIDTH + 10, top + 30, "reduce-scatter, when its"))
    parts.append(text(0.625 * WIDTH + 10, top + 47, "gradients have come"))
    top += 72
    parts.append(text(-14, top + 15, "every rank", "end"))
    parts += bar(top, labels=True)
    parts.append(
        text(
            -LEFT + 8,
            top + 50,
            "In forward and backward: the all-gather's output is the memory of the whole parameters.",
        )
    )
    parts.append(
        text(
            -LEFT + 8,
            top + 69,
            "Each parameter that a module sees is a view of it, so nothing is copied. Then it is freed.",
        )
    )
    height = top + 84
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60:g} {height:g}" '
            f'width="{LEFT + WIDTH + 60:g}" height="{height:g}" role="img">',
            "<title>A unit's flat buffer: sharded between steps, gathered while the unit computes</title>",
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(picture())
