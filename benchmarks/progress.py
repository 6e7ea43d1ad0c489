"""What a job prints while it trains: a line that changes in place on a terminal, plain lines in a log, and a loss curve."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from html import escape
from typing import TextIO

BAR = 20
REDRAW_SECONDS = 0.1


class Progress:
    """The progress of rank 0's loop over steps.

    On a terminal ``step`` redraws the last line. ``line`` prints one that stays, on a terminal and in a log.
    """

    def __init__(self, first: int, last: int, tokens_per_step: int, out: TextIO | None = None) -> None:
        """For the steps from ``first`` to ``last``, both included."""
        self._out = out if out is not None else sys.stdout
        self._first, self._last = first, last
        self._tokens_per_step = tokens_per_step
        self._seconds = 0.0  # of the steps that were timed
        self._timed = 0
        self._line_seconds = 0.0  # the same since the last line
        self._line_steps = 0
        self._began = time.perf_counter()
        self._drawn = 0.0
        self._is_drawn = False

    def step(self, step: int, loss: float) -> None:
        """Step ``step`` has ended, with this loss on this rank."""
        now = time.perf_counter()
        self._line_seconds += now - self._began
        self._line_steps += 1
        if step > self._first:  # the first one is slower: it allocates
            self._seconds += now - self._began
            self._timed += 1
        self._began = now
        if self._out.isatty() and (now - self._drawn >= REDRAW_SECONDS or step == self._last):
            filled = BAR * step // self._last
            bar = "#" * filled + "." * (BAR - filled)
            self._out.write(f"\r\x1b[K[{bar}] step {step}/{self._last}  loss {loss:.3f}  {self.time_left(step)}")
            self._out.flush()
            self._drawn, self._is_drawn = now, True

    def line(self, step: int, loss: float, rest: str = "") -> None:
        """Prints a line on the steps since the last line, whose mean loss over all ranks is ``loss``."""
        width = len(str(self._last))
        rate = self._line_steps * self._tokens_per_step / max(self._line_seconds, 1e-9)
        text = f"step {step:>{width}}/{self._last}  loss {loss:.3f}  {rest}  {rate:>9,.0f} tokens/s  {self.time_left(step)}"
        self.clear()
        print(text.rstrip(), file=self._out, flush=True)
        self._line_seconds, self._line_steps = 0.0, 0
        self._began = time.perf_counter()

    def pause(self) -> None:
        """What has happened since the last step or line was no step: do not count it."""
        self._began = time.perf_counter()

    def clear(self) -> None:
        """Takes the line away that changes in place, if one is there."""
        if self._is_drawn:
            self._out.write("\r\x1b[K")
            self._is_drawn = False

    def time_left(self, step: int) -> str:
        """As text, from the mean of the steps so far; empty after the last one, and before any was timed."""
        if not self._timed or step == self._last:
            return ""
        return f"{clock((self._last - step) * self._seconds / self._timed)} left"


def clock(seconds: float) -> str:
    """``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loss_curve(first: int, losses: Sequence[float], title: str) -> str:
    """An SVG of the loss at each step from ``first`` on, and of its running mean."""
    width, height, left, right, top, bottom = 720, 400, 56, 16, 40, 44
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0

    def points(values: Sequence[float]) -> str:
        x_step = (width - left - right) / max(len(values) - 1, 1)
        y_of = [top + (high - v) / span * (height - top - bottom) for v in values]
        return " ".join(f"{left + i * x_step:.1f},{y:.1f}" for i, y in enumerate(y_of))

    smooth, mean = [], losses[0]
    for loss in losses:
        mean = 0.9 * mean + 0.1 * loss
        smooth.append(mean)
    ticks = [low + span * i / 4 for i in range(5)]
    grid = "\n".join(
        f'<line x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.2f}</text>'
        for tick in ticks
        for y in [top + (high - tick) / span * (height - top - bottom)]
    )
    size = f'width="{width}" height="{height}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="{left}" y="22" font-size="14">{escape(title)}</text>
{grid}
<polyline fill="none" stroke="#9bc" points="{points(losses)}"/>
<polyline fill="none" stroke="#036" stroke-width="2" points="{points(smooth)}"/>
<text x="{left}" y="{height - 24}">step {first}</text>
<text x="{width - right}" y="{height - 24}" text-anchor="end">step {first + len(losses) - 1}</text>
<text x="{(left + width) // 2}" y="{height - 8}" text-anchor="middle">loss in nats per byte; dark: its running mean</text>
</svg>
"""
