"""A plan as an SVG, written by hand: memory over a step, what runs when, and strategies side by side."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

from flatshard._plan_data import Numbers
from flatshard._plan_ledger import CATEGORIES, Memory
from flatshard._plan_text import in_bytes, in_percent, in_seconds, world
from flatshard._plan_time import Span

WIDTH, LEFT, RIGHT = 1100, 150, 30
_PLOT = WIDTH - LEFT - RIGHT
_COLOURS = dict(
    zip(
        CATEGORIES,
        ("#4e79a7", "#f28e2b", "#76b7b2", "#e15759", "#edc948", "#b07aa1", "#9c755f", "#bab0ac"),
        strict=True,
    )
)
_KINDS = {
    "compute": "#59a14f",
    "all-gather": "#e15759",
    "reduce-scatter": "#edc948",
    "all-reduce": "#b07aa1",
    "wait": "#d0d0d0",
}
_LANES = ("compute", "all-gather", "reduce-scatter", "all-reduce")
MOST_STEPS = 2000
"""Points of the memory's outline, so that a large model's file stays small."""


class _Page:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = 0

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.2):.2f}" height="{height:.2f}" '
            f"fill={quoteattr(colour)}>{inside}</rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#888"/>')

    def legend(self, entries: Iterable[tuple[str, str]]) -> None:
        x = float(LEFT)
        for name, colour in entries:
            self.box(x, self.y - 10, 12, 12, colour)
            self.text(x + 17, self.y, name)
            x += 40 + 7 * len(name)
        self.y += 22


def as_svg(plan: Numbers) -> str:
    """The whole drawing."""
    page = _Page()
    page.y = 30
    page.text(LEFT, page.y, f"{plan.module}: {plan.strategy} over {world(plan.world_size)}", size=18)
    page.y += 20
    page.text(
        LEFT,
        page.y,
        f"{plan.numel:,} elements in {len(plan.units)} units; step {in_seconds(plan.step_seconds)} (modelled)",
    )
    page.y += 35
    _draw_memory(page, plan)
    _draw_timeline(page, plan)
    _draw_units(page, plan)
    _draw_strategies(page, plan)
    body = "\n".join(page.parts)
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{page.y}" '
        f'viewBox="0 0 {WIDTH} {page.y}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{page.y}" fill="white"/>\n{body}\n</svg>\n'
    )


def _draw_memory(page: _Page, plan: Numbers) -> None:
    """Areas, one on the other. Their x is the order of events, as times may be zero."""
    height = 220
    page.text(LEFT, page.y, "memory on a rank, event by event", size=14)
    page.y += 20
    samples = _thinned([memory for _, memory in plan.memory])
    shown = [c for c in CATEGORIES if any(getattr(m, c) for m in samples)]
    page.legend((c, _COLOURS[c]) for c in shown)
    top, bottom = page.y, page.y + height
    most = max(1, max(m.total for m in samples))
    below = [0] * len(samples)
    step = _PLOT / len(samples)
    for category in shown:
        above = [b + getattr(m, category) for b, m in zip(below, samples, strict=True)]
        outline = [*_corners(above, step), *reversed(list(_corners(below, step)))]
        points = " ".join(f"{LEFT + x:.1f},{bottom - n * height / most:.1f}" for x, n in outline)
        page.parts.append(f'<polygon points="{points}" fill="{_COLOURS[category]}"><title>{category}</title></polygon>')
        below = above
    for part in range(5):
        y = bottom - part * height / 4
        page.line(LEFT - 5, y, LEFT, y)
        page.text(LEFT - 8, y + 4, in_bytes(most * part // 4), anchor="end")
    page.line(LEFT, top, LEFT, bottom)
    page.line(LEFT, bottom, WIDTH - RIGHT, bottom)
    page.y = bottom + 45


def _corners(values: list[int], step: float) -> Iterable[tuple[float, int]]:
    for index, value in enumerate(values):
        yield index * step, value
        yield (index + 1) * step, value


def _thinned(samples: list[Memory]) -> list[Memory]:
    """At most ``MOST_STEPS``: of neighbours the largest."""
    if len(samples) <= MOST_STEPS:
        return samples
    size = -(-len(samples) // MOST_STEPS)
    return [max(samples[i : i + size], key=lambda m: m.total) for i in range(0, len(samples), size)]


def _draw_timeline(page: _Page, plan: Numbers) -> None:
    spans, end = plan.timeline.spans, plan.step_seconds
    page.text(
        LEFT, page.y, f"what runs when (modelled; {in_percent(plan.hidden_share)} of communication hidden)", size=14
    )
    page.y += 20
    page.legend(_KINDS.items())
    for lane in _LANES:
        mine = [s for s in spans if s.kind == lane or (lane == "compute" and s.kind == "wait")]
        if lane != "compute" and not mine:
            continue
        page.text(LEFT - 8, page.y + 15, lane, anchor="end")
        for span in mine:
            _draw_span(page, span, end)
        page.line(LEFT, page.y + 24, WIDTH - RIGHT, page.y + 24)
        page.y += 28
    for part in range(5):
        page.text(LEFT + part * _PLOT / 4, page.y + 12, in_seconds(end * part / 4) if part else "0", anchor="middle")
    page.y += 50


def _draw_span(page: _Page, span: Span, end: float) -> None:
    x, width = LEFT + span.start / end * _PLOT, (span.stop - span.start) / end * _PLOT
    title = f"{span.kind} {span.unit}, {span.phase}: {in_seconds(span.stop - span.start)}"
    page.box(x, page.y, width, 20, _KINDS[span.kind], title)
    if width > 7 * len(span.unit) and span.kind != "wait":
        page.text(x + 3, page.y + 14, span.unit, size=11)


def _draw_units(page: _Page, plan: Numbers) -> None:
    page.text(LEFT, page.y, "units, unsharded", size=14)
    page.y += 12
    most = max([1, *(u.unsharded_nbytes for u in plan.units)])
    for unit in plan.units:
        name = unit.fqn or "<root>"
        page.text(LEFT - 8, page.y + 11, name if len(name) < 21 else f"...{name[-17:]}", anchor="end", size=11)
        width = unit.unsharded_nbytes / most * (_PLOT - 260)
        page.box(LEFT, page.y, width, 13, _COLOURS["unsharded"], f"{name}: {unit.numel:,} elements")
        label = f"{in_bytes(unit.unsharded_nbytes)}, {unit.numel:,} elements"
        page.text(LEFT + width + 6, page.y + 11, label, size=11)
        page.y += 17
    page.y += 35


def _draw_strategies(page: _Page, plan: Numbers) -> None:
    page.text(LEFT, page.y, "strategies: the peak, of it between steps", size=14)
    page.y += 12
    most = max([1, *(s.peak_nbytes for s in plan.strategies)])
    for each in plan.strategies:
        page.text(LEFT - 8, page.y + 14, each.strategy, anchor="end", size=11)
        scale = (_PLOT - 330) / most
        page.box(LEFT, page.y, each.peak_nbytes * scale, 18, _COLOURS["unsharded"])
        page.box(LEFT, page.y, each.between_steps_nbytes * scale, 18, _COLOURS["shards"])
        label = (
            f"{in_bytes(each.peak_nbytes)}; sends {in_bytes(each.sent_nbytes)}; step {in_seconds(each.step_seconds)}"
        )
        page.text(LEFT + each.peak_nbytes * scale + 6, page.y + 14, f"{label} over {world(each.world_size)}", size=11)
        page.y += 24
    page.y += 20
