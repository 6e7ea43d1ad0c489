"""Where ranks meet: keys in a store that all of them reach.

[Note: No read waits]
A key that was seen may be gone when it is read, if its writer was stopped in between, gave up, and deleted it. Then
``store.get`` blocks for the store's timeout. So one request reads a value, or finds that there is none. Waiting is a loop of
such requests, which knows its deadline, and can ask meanwhile whether other ranks live. ``store.wait`` with a timeout would
not do: if it expires while the key is set, TCPStore's client may lose its place in the server's answers, and a later call of
this process hangs (torch 2.13.0: within 1,500 waits of 1 to 5 ms on four ranks).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

from flatshard._comm.payloads import decode, encode

_NOTHING = b"\0nothing"  # no value of ours
_PIECE = 2**20  # bytes under one key: stores limit them
_IN_PIECES = b"in pieces: "


def polls(seconds: float = math.inf, longest: float = 0.5) -> Iterator[float]:
    """Yield the seconds waited so far, until ``seconds`` have passed; the last time when they have.

    A pause takes a twentieth of the time waited so far, and at most ``longest``: so long waits cost a store little.
    """
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield waited
        if waited >= seconds:
            return
        time.sleep(min(max(waited / 20, 0.0001), longest, seconds - waited))


class Rendezvous:
    """Keys of a store (TCPStore, FileStore, HashStore, or a PrefixStore over one) that begin with ``prefix``.

    Values are JSON: [Note: Nothing from another rank is executed]. No method waits for another rank, except ``await_all``.

    Args:
        store: a store that all ranks reach.
        prefix: the beginning of each key.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, key: str, value: Any) -> None:
        """Set a key. Long values are cut into pieces under keys of their own."""
        data, key = encode(value).encode(), self._prefix + key
        if len(data) > _PIECE:
            pieces = [data[i : i + _PIECE] for i in range(0, len(data), _PIECE)]
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)
            data = _IN_PIECES + b"%d" % len(pieces)
        self._store.set(key, data)  # last: who sees it finds all pieces

    def propose(self, key: str, value: Any) -> Any:
        """Set a key unless it is set, and return its value: that of the first rank, on all ranks."""
        return decode(self._store.compare_set(self._prefix + key, "", encode(value)))

    def peek(self, key: str) -> bytes | None:
        """Return the bytes under a key, or None if it is not set. [Note: No read waits]"""
        # A store returns the expected bytes if the key is not set.
        found: bytes = self._store.compare_set(self._prefix + key, _NOTHING, _NOTHING)
        return None if found == _NOTHING else found

    def read(self, key: str) -> Any:
        """Return the value of a key, or None if it is not set.

        Raises:
            ValueError: no rank of this version wrote it.
        """
        data, _ = self._fetch(key)
        return None if data is None else decode(data)

    def take(self, key: str) -> Any:
        """Return the value of a key as ``read`` does, and delete it."""
        data, keys = self._fetch(key)
        for each in keys:
            self.remove(each)
        return None if data is None else decode(data)

    def _fetch(self, key: str) -> tuple[bytes | None, list[str]]:
        """Return the bytes of a value, or None if some are missing, and the keys that hold them."""
        head = self.peek(key)
        if head is None or not head.startswith(_IN_PIECES):
            return head, [key]
        keys = [f"{key}/{number}" for number in range(int(head.removeprefix(_IN_PIECES)))]
        pieces = [self.peek(each) for each in keys]
        return None if None in pieces else b"".join(filter(None, pieces)), [key, *keys]

    def remove(self, key: str) -> None:
        """Delete a key."""
        self._store.delete_key(self._prefix + key)

    def has(self, key: str) -> bool:
        """Return whether a key is set."""
        return bool(self._store.check([self._prefix + key]))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys that are not set."""
        return [key for key in keys if not self.has(key)]

    def await_all(self, keys: list[str], seconds: float) -> bool:
        """Wait until all keys are set. Return whether they are after ``seconds``."""
        return any(self._store.check([self._prefix + key for key in keys]) for _ in polls(seconds, longest=0.1))

    def add(self, key: str, number: int) -> int:
        """Add ``number`` to a counter, and return the new value."""
        return int(self._store.add(self._prefix + key, number))

    def count(self, key: str) -> int:
        """Return the value of a counter, or 0 if it is not set."""
        return int(self.peek(key) or 0)
