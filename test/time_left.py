"""How far a long run of the tests is, and how long the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

WHOLE_RUN = "about 13 minutes on two cores"
"""How long all tests take. Change it with them."""


def announce(reporter: Any, verbosity: int) -> None:
    """Say at once what pytest does: until the first test ends it says nothing else. ``-q -q`` says nothing here, either."""
    if verbosity > -2:
        reporter.write_line(f"collecting the tests; all of them take {WHOLE_RUN}")
        reporter.flush()


class TimeLeft:
    """Says every minute how far a long run is, and how long the rest takes if it is as slow as what has ended.

    Tests differ by a factor of a thousand, and the slow ones lie together. So an estimate needs the seconds that each test
    took before, which pytest's cache keeps; a run without them says only how many tests have ended.
    """

    EVERY = 60.0
    KEY = "flatshard/seconds"
    """Where pytest's cache has the seconds of each test."""
    KNOWN = 0.9
    """The part of a run that must have run before for an estimate."""

    def __init__(self, reporter: Any, cache: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """``cache``: pytest's, or None without one."""
        self._reporter = reporter
        self._cache = cache
        self._clock = clock
        self._before: dict[str, float] = cache.get(self.KEY, {}) if cache is not None else {}
        self._seconds: dict[str, float] = {}
        self._count = self._ended = 0
        self._expected = self._expected_ended = 0.0
        self._began = self._said = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count = len(session.items)
        known = [self._before[item.nodeid] for item in session.items if item.nodeid in self._before]
        if len(known) < self.KNOWN * self._count:
            self._before = {}
        self._expected = sum(known)
        self._began = self._said = self._clock()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._ended += 1
        self._expected_ended += self._before.get(nodeid, 0.0)
        now = self._clock()
        if now - self._said >= self.EVERY and self._ended < self._count:
            self._said = now
            seconds = now - self._began
            line = f"{self._ended} of {self._count} tests in {seconds / 60:.0f} min"
            if self._expected_ended > 0:
                left = seconds * (self._expected / self._expected_ended - 1)
                line += f", about {max(left / 60, 1):.0f} min left"
            self._reporter.ensure_newline()
            self._reporter.write_line(line)

    def pytest_sessionfinish(self) -> None:
        if self._cache is not None and self._seconds:
            kept = self._cache.get(self.KEY, {})
            self._cache.set(self.KEY, kept | {name: round(took, 3) for name, took in self._seconds.items()})
