"""Output of a job in training: a line that changes in place on a terminal, plain lines in a log, and a loss curve."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import TextIO

BAR = 20
REDRAW_SECONDS = 0.1


class Progress:
    """Progress of rank 0's loop over the steps from ``first`` to ``last``, both included.

    On a terminal ``step`` redraws the last line. ``line`` prints a permanent line, on a terminal and in a log.
    """

    def __init__(self, first: int, last: int, tokens_per_step: int, out: TextIO | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self._first, self._last = first, last
        self._tokens_per_step = tokens_per_step
        self._times: list[float] = []
        """Seconds of each step but the first, which is slower as it allocates."""
        self._line_times: list[float] = []
        """Seconds of each step since the last line."""
        self._began = time.perf_counter()
        self._drawn: float | None = None
        """Time when the changing line was drawn, or None if there is none."""

    def step(self, step: int, loss: float) -> None:
        """Record the end of a step, with this rank's loss."""
        now = time.perf_counter()
        self._line_times.append(now - self._began)
        if step > self._first:
            self._times.append(now - self._began)
        self._began = now
        is_due = self._drawn is None or now - self._drawn >= REDRAW_SECONDS or step == self._last
        if self._out.isatty() and is_due:
            filled = BAR * step // self._last
            text = f"[{'#' * filled:.<{BAR}}] step {step}/{self._last}  loss {loss:.3f}"
            rate = f"  {self._rate(self._times):,.0f} tokens/s" if self._times else ""
            self._out.write(f"\r\x1b[K{text}{rate}{self._time_left(step)}")
            self._out.flush()
            self._drawn = now

    def line(self, step: int, loss: float, rest: str = "") -> None:
        """Print a line on the steps since the last line, with their mean ``loss`` over all ranks."""
        rate = f"{self._rate(self._line_times):>9,.0f} tokens/s"
        text = (
            f"step {step:>{len(str(self._last))}}/{self._last}  loss {loss:.3f}  {rest}  {rate}{self._time_left(step)}"
        )
        self.clear()
        print(text, file=self._out, flush=True)
        self._line_times.clear()
        self.pause()

    def pause(self) -> None:
        """Leave out the time since the last step or line."""
        self._began = time.perf_counter()

    def clear(self) -> None:
        """Remove the changing line, if there is one."""
        if self._drawn is not None:
            self._out.write("\r\x1b[K")
            self._drawn = None

    def _rate(self, times: Sequence[float]) -> float:
        return len(times) * self._tokens_per_step / max(sum(times), 1e-9)

    def _time_left(self, step: int) -> str:
        """Return the estimate by the mean of past steps, or "" after the last step and before any was timed."""
        if not self._times or step == self._last:
            return ""
        return f"  {clock((self._last - step) * sum(self._times) / len(self._times))} left"


def clock(seconds: float) -> str:
    """Format seconds as ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss_curve(first: int, losses: Sequence[float], title: str) -> str:
    """Draw the loss of each step from ``first`` on, and its mean over nearby steps, as SVG."""
    left, right, top, bottom = 56, 704, 44, 344
    last = first + len(losses) - 1
    levels = ticks(min(losses), max(losses), 6)
    low, high = min(levels[0], *losses), max(levels[-1], *losses)

    def x(step: float) -> float:
        return left + (step - first) / max(last - first, 1) * (right - left)

    def y(loss: float) -> float:
        return top + (high - loss) / ((high - low) or 1.0) * (bottom - top)

    def text(at_x: float, at_y: float, words: str, anchor: str = "start", colour: str = "#444") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'

    def rule(x1: float, y1: float, x2: float, y2: float) -> str:
        return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'

    def curve(values: Sequence[float], colour: str, width: float) -> str:
        points = " ".join(f"{x(first + i):.1f},{y(v):.1f}" for i, v in enumerate(values))
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}"/>'

    steps = [step for step in ticks(first, last, 8) if first <= step <= last and step == int(step)]
    decimals = 0 if levels[1] - levels[0] >= 1 else math.ceil(-math.log10(levels[1] - levels[0]) - 1e-9)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="400" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(left, 22, title, colour="black"),
        *(rule(left, y(level), right, y(level)) for level in levels),
        *(text(left - 6, y(level) + 4, f"{level:.{decimals}f}", "end") for level in levels),
        *(rule(x(step), top, x(step), bottom) for step in steps),
        *(text(x(step), bottom + 16, f"{step:.0f}", "middle") for step in steps),
        curve(losses, "#9bc", 1),
        curve(mean_around(losses, max(1, len(losses) // 40)), "#036", 1.6),
        text((left + right) / 2, bottom + 34, "step", "middle"),
        text(right, 22, "loss in nats per byte", "end", "#69a"),
        text(right, 37, "its mean over the steps around", "end", "#036"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def mean_around(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and up to ``reach`` neighbours on each side: equally many, so that it does not lag."""
    sums = [0.0, *itertools.accumulate(values)]
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        means.append((sums[i + near + 1] - sums[i - near]) / (2 * near + 1))
    return means


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that cover ``low`` to ``high``: 2 to ``most`` + 1 of them."""
    span = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if end - begin <= most:
            break
    return [number * step for number in range(begin, max(end, begin + 1) + 1)]
