"""Progress of a long run of the tests."""

import time
from typing import Any

import pytest

WHOLE_RUN = "about 6 minutes on two idle cores"
"""Duration of a full run. Change it when tests change."""


class TimeLeft:
    """A plugin that prints a line at the start, as pytest is silent until the first test ends, and one every minute."""

    EVERY = 60.0

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter
        self._count = self._ended = 0
        self._began = self._said = time.monotonic()
        reporter.write_line(f"collecting the tests; all of them take {WHOLE_RUN}")
        reporter.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count = len(session.items)
        self._began = self._said = time.monotonic()

    def pytest_runtest_logfinish(self) -> None:
        self._ended += 1
        now = time.monotonic()
        if now - self._said >= self.EVERY and self._ended < self._count:
            self._said = now
            self._reporter.ensure_newline()
            self._reporter.write_line(f"{self._ended} of {self._count} tests in {(now - self._began) / 60:.0f} min")
