"""The newest checkpoints of a job, in one directory, for the case that too many ranks die at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch

from flatshard._comm.process_groups import default_group, membership
from flatshard.checkpoint import RankError, save_checkpoint
from flatshard.checkpoint._location import Location
from flatshard.elastic._exchange import Channel

_NAME = re.compile(r"step-(\d+)")
_KEPT = 2


class Checkpoints:
    """The checkpoints of a job, which are saved while training continues. All but the newest two are removed.

    Args:
        directory: a directory that all ranks see, or a URL.
        every: the number of steps between two saves.
        say: called with lines of text for the user.
    """

    def __init__(self, directory: Location, every: int, say: Callable[[str], object]) -> None:
        self.directory, self.every, self._say = directory, every, say
        self._under_way: tuple[str, Future[None]] | None = None
        self._has_begun = False  # a save has, so the state can be saved
        self._saved: list[str] = []  # names, oldest first

    def newest(self) -> str | None:
        """Return the path of the newest checkpoint in the directory, or None."""
        found = [(int(m[1]), name) for name in self.directory.checkpoints() if (m := _NAME.fullmatch(name))]
        return str(self.directory.child(max(found)[1])) if found else None

    def save(self, step: int, state: Mapping[str, Any], timeout: timedelta) -> None:
        """Begin to save, if it is time. All ranks call it after the same step.

        If the first save cannot begin, it raises: the state cannot be saved at all. If a later one cannot, ``say`` gets the
        reason: a full disk, or a stopped process that has begun to save there. The collectives of the next step find dead
        ranks.

        Raises:
            RankError: the first save could not begin.
            CollectiveError: a rank has died.
        """
        if step % self.every:
            return
        group = default_group()
        assert group is not None
        name = f"step-{step}"
        path = str(self.directory.child(name))
        ended = self._under_way is None or self._under_way[1].done()
        begun = Channel(group, torch.device("cpu")).objects((ended, self._has_begun))
        if not all(ended for ended, _ in begun):
            self._say(f"{path} is not saved: the save before has not ended, so it takes longer than {self.every} steps")
            return
        self.wait()
        try:
            save = save_checkpoint(path, state, overwrite=True, async_op=True, timeout=timeout)
        except RankError as e:
            if not any(has_begun for _, has_begun in begun):
                raise
            self._say(f"{path} is not saved: {e}")
        else:
            self._under_way, self._has_begun = (name, save), True

    def wait(self) -> None:
        """Wait for the save that is under way, and report a failure."""
        if self._under_way is None:
            return
        (name, save), self._under_way = self._under_way, None
        if (error := save.exception()) is not None:
            self._say(f"{self.directory.child(name)} is not saved: {error}")
            return
        self._saved = [*(each for each in self._saved if each != name), name]
        is_first = membership(default_group())[0] == 0
        while len(self._saved) > _KEPT:
            old = self.directory.child(self._saved.pop(0))
            if is_first:
                old.remove()
