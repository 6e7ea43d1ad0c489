"""A picture of what is in memory over a step: of plans, and of fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flatshard.planning._records import CATEGORIES, Sample

_COLORS = ("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#9c755f")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 1000, 420, 80, 40, 140, 30


def draw(path: str | os.PathLike[str], samples: Sequence[Sample], title: str, budget: int | None = None) -> None:
    """Draw what is in memory over a step, by category, as an SVG. Needs no library.

    Raises:
        ValueError: ``path`` does not end in ``.svg``.
    """
    if Path(path).suffix != ".svg":
        raise ValueError(f"plot: writes SVG, got {os.fspath(path)!r}: give it a name that ends in .svg")
    Path(path).write_text(_picture(samples, f"{title}: memory on a rank over a step", budget))


def _picture(samples: Sequence[Sample], title: str, budget: int | None) -> str:
    shown = _thinned(samples)
    peak = max(sample.device.total for sample in shown)
    most = 1.05 * max(budget or 0, peak, 1)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + width * at / len(shown)

    def y(nbytes: float) -> float:
        return _TOP + height * (1 - nbytes / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif"',
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/><text x="{_LEFT}" y="22" font-size="14">{title}</text>',
    ]
    below = [0] * len(shown)
    categories = [c for c in CATEGORIES if any(getattr(sample.device, c) for sample in shown)]
    for number, (category, color) in enumerate(zip(categories, _COLORS, strict=False)):
        above = [low + getattr(sample.device, category) for low, sample in zip(below, shown, strict=True)]
        edge = [(x(at + step), y(n)) for at, n in enumerate(above) for step in (0, 1)]
        back = [(x(at + step), y(n)) for at, n in reversed(list(enumerate(below))) for step in (1, 0)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in edge + back)
        parts.append(f'<polygon points="{points}" fill="{color}"/>')
        at = _TOP + 18 * number
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 12}" y="{at}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 30}" y="{at + 11}">{category}</text>')
        below = above
    for phase, at in _beginnings(shown):
        parts.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{_TOP + height}" stroke="#999"/>')
        parts.append(f'<text x="{x(at) + 4:.1f}" y="{_HEIGHT - 10}">{phase}</text>')
    lines = [(peak, "peak", "4"), *([] if budget is None else [(budget, "budget", "")])]
    for nbytes, text, dash in lines:
        line = f'x1="{_LEFT}" x2="{_LEFT + width}" y1="{y(nbytes):.1f}" y2="{y(nbytes):.1f}"'
        parts.append(f'<line {line} stroke="black" stroke-dasharray="{dash}"/>')
        parts.append(f'<text x="{_LEFT + 6}" y="{y(nbytes) - 4:.1f}">{text} {in_bytes(nbytes)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _beginnings(samples: Sequence[Sample]) -> list[tuple[str, int]]:
    phases = [sample.phase for sample in samples]
    return [(phase, at) for at, phase in enumerate(phases) if at == 0 or phases[at - 1] != phase]


def _thinned(samples: Sequence[Sample], most: int = 1500) -> list[Sample]:
    """Return at most ``most`` samples: the highest of each few in a row, so that no peak is lost."""
    size = -(-len(samples) // most)
    return [max(samples[at : at + size], key=lambda s: s.device.total) for at in range(0, len(samples), size)]


def in_bytes(nbytes: float) -> str:
    """Return a size as text, with three digits: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if nbytes < 1000 or unit == "PiB":
            break
        nbytes /= 1024
    return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.3g} {unit}"
