"""The bytes of a message: what it is, in JSON, what it carries, and a sum over both.

Nothing in a message is executed. One that was damaged on its way counts as lost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from flatshard.checkpoint._container import checksums

_MAGIC = b"flatshard weights 1\n"
_SUM = 8  # bytes
_LENGTH = 4  # bytes: says how many the header has


class Received(NamedTuple):
    """A message that has arrived as it was sent."""

    header: dict[str, Any]
    payload: memoryview


Bytes = bytes | bytearray | memoryview


def message_of(header: dict[str, Any], payload: Iterable[bytes] = ()) -> bytes:
    """A message. ``header``: what JSON holds."""
    text = json.dumps(header, separators=(",", ":")).encode()
    data = bytearray(b"".join([_MAGIC, bytes(_SUM), len(text).to_bytes(_LENGTH, "little"), text, *payload]))
    data[len(_MAGIC) : len(_MAGIC) + _SUM] = _sum(data)
    return bytes(data)


def read_message(message: Bytes, verb: str) -> Received | None:
    """What was sent. None: it has been damaged.

    Raises:
        ValueError: it is no such message.
    """
    data = bytearray(message)
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"{verb} takes what a flatshard.weights.Sender or Receiver sent, as bytes, and got {bytes(data[:20])!r}..."
        )
    at = len(_MAGIC) + _SUM
    if len(data) < at + _LENGTH or data[len(_MAGIC) : at] != _sum(data):
        return None
    length = int.from_bytes(data[at : at + _LENGTH], "little")
    at += _LENGTH
    return Received(json.loads(data[at : at + length]), memoryview(data)[at + length :])


def _sum(data: bytearray) -> bytes:
    """Over all that comes after it."""
    return digest_of(checksums(memoryview(data)[len(_MAGIC) + _SUM :]))


def digest_of(data: bytes) -> bytes:
    """8 bytes."""
    return hashlib.blake2b(data, digest_size=_SUM).digest()
