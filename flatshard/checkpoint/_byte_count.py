"""How far one rank's saving or loading is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from flatshard._base.trace import logger

Report = Callable[[int, int], object]

_EVERY = 10.0  # seconds between lines


class ByteCount:
    """Counts bytes, and reports them: to ``report``, or, on rank 0, with a line on stderr every few seconds."""

    def __init__(self, verb: str, path: Path, report: Report | None, is_first: bool) -> None:
        self._verb, self.path, self._report = verb, path, report
        self._began = self._said = time.monotonic()
        self._is_first = is_first
        self.done = self.total = 0  # bytes; of the total those of tensors

    def add(self, nbytes: int) -> None:
        """So much more has been done."""
        self.done += nbytes
        if self._report is not None:
            try:
                self._report(self.done, self.total)
            except Exception:  # what is shown does not decide on a checkpoint
                logger.exception("%s %r goes on, without progress, which raised", self._verb, str(self.path))
                self._report = lambda done, total: None
        elif self._is_first and time.monotonic() - self._said > _EVERY:
            self._said = time.monotonic()
            seconds = self._said - self._began
            print(
                f"{self._verb} {str(self.path)!r}: {self} on rank 0 after {seconds:.0f} s", file=sys.stderr, flush=True
            )

    def __str__(self) -> str:
        """``12.5 of 64.0 MiB``."""
        divisor, unit = (2**30, "GiB") if self.total >= 2**30 else (2**20, "MiB")
        return f"{self.done / divisor:.2f} of {self.total / divisor:.2f} {unit}"
