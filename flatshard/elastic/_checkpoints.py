"""The newest checkpoints of a job, in one directory: what is left when too many ranks die at once."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from flatshard._comm.monitor.messages import default_group, membership
from flatshard.checkpoint import MeetingError, save_checkpoint
from flatshard.elastic._exchange import Channel

_NAME = re.compile(r"step-(\d+)")
_KEPT = 2


class Checkpoints:
    """Saves beside the training, and removes what is older than the newest two of its own.

    Args:
        directory: that all ranks see.
        every: how many steps.
        say: is called with a line of text.
    """

    def __init__(self, directory: Path, every: int, say: Callable[[str], object]) -> None:
        self.directory, self.every, self._say = directory, every, say
        self._under: tuple[Path, Future[None]] | None = None
        self._has_begun = False  # some save has, so what is given can be saved
        self._saved: list[Path] = []  # whole, oldest first

    def newest(self) -> str | None:
        """The path of the newest checkpoint in the directory."""
        if not self.directory.is_dir():
            return None
        found = [(int(m[1]), path) for path in self.directory.iterdir() if (m := _NAME.fullmatch(path.name))]
        return str(max(found)[1]) if found else None

    def save(self, step: int, state: Mapping[str, Any], timeout: timedelta) -> None:
        """Begin to save, if it is time. All ranks call it after the same step.

        What cannot be saved at all raises, at the first save. Why a later one cannot begin is said: a disk is full, or a
        process that was stopped has begun to save there. A rank that has died is found by the collectives of the next step.

        Raises:
            MeetingError: the first save could not begin.
            CollectiveError: a rank has died.
        """
        if step % self.every:
            return
        group = default_group()
        assert group is not None
        path = self.directory / f"step-{step}"
        ended = self._under is None or self._under[1].done()
        told = Channel(group, torch.device("cpu")).objects((ended, self._has_begun))
        if not all(ended for ended, _ in told):
            self._say(f"{path} is not saved: the save before has not ended, so it takes longer than {self.every} steps")
            return
        self.wait()
        if membership(group)[0] == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
        try:
            save = save_checkpoint(path, state, overwrite=True, wait=False, timeout=timeout)
        except MeetingError as e:
            if not any(has_begun for _, has_begun in told):
                raise
            self._say(f"{path} is not saved: {e}")
        else:
            self._under, self._has_begun = (path, save), True

    def wait(self) -> None:
        """Wait for what is under way, and say how it ended."""
        if self._under is None:
            return
        (path, save), self._under = self._under, None
        if (error := save.exception()) is not None:
            self._say(f"{path} is not saved: {error}")
            return
        self._saved = [*(each for each in self._saved if each != path), path]
        is_first = membership(default_group())[0] == 0
        while len(self._saved) > _KEPT:
            old = self._saved.pop(0)
            if is_first and old.exists():
                gone = old.with_name(f".{old.name}-removed")
                old.rename(gone)  # at once: what is half removed is no checkpoint
                shutil.rmtree(gone)
