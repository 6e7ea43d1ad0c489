"""What a job prints while it trains: a line that changes in place on a terminal, plain lines in a log, and a loss curve."""

from __future__ import annotations

import itertools
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
            text = f"[{bar}] step {step}/{self._last}  loss {loss:.3f}  {self._mean_rate()}  {self.time_left(step)}"
            self._out.write(f"\r\x1b[K{text.rstrip()}")
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

    def _mean_rate(self) -> str:
        """Of the steps so far, as text; empty before any was timed."""
        if not self._timed:
            return ""
        return f"{self._timed * self._tokens_per_step / max(self._seconds, 1e-9):,.0f} tokens/s"

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
    left, right, top, bottom = 56, 704, 40, 356
    low, high = min(losses), max(losses)
    smooth = list(itertools.accumulate(losses, lambda mean, loss: 0.9 * mean + 0.1 * loss))

    def y(loss: float) -> float:
        return top + (high - loss) / ((high - low) or 1.0) * (bottom - top)

    def text(x: int, at: float, words: str, anchor: str = "start") -> str:
        return f'<text x="{x}" y="{at:.1f}" text-anchor="{anchor}">{escape(words)}</text>'

    def line(values: Sequence[float], colour: str) -> str:
        step = (right - left) / max(len(values) - 1, 1)
        points = " ".join(f"{left + i * step:.1f},{y(v):.1f}" for i, v in enumerate(values))
        return f'<polyline fill="none" stroke="{colour}" points="{points}"/>'

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="400" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(left, 22, title),
        *(text(left - 6, y(tick) + 4, f"{tick:.2f}", "end") for tick in (low, (low + high) / 2, high)),
        line(losses, "#9bc"),
        line(smooth, "#036"),
        text(left, 376, f"step {first}"),
        text(right, 376, f"step {first + len(losses) - 1}", "end"),
        text((left + right) // 2, 392, "loss in nats per byte; dark: its running mean", "middle"),
        "</svg>\n",
    ]
    return "\n".join(parts)
