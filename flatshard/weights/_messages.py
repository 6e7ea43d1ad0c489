"""The bytes of a message: a header in JSON, a payload, and a checksum over both.

Nothing in a message is executed. A message that was damaged on its way counts as lost.

[Note: What anybody may send]
The checksum finds damage, but anybody can compute one. So a message is checked before it is used: here that the header has
the fields of its kind, and in its users that numbers are within their ranges. A wrong message raises ValueError, and changes
nothing. Memory is allocated for the elements that senders have listed, cell by cell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

from flatshard.checkpoint._container import checksums

_MAGIC = b"flatshard weights 3\n"
_SUM = 8  # bytes
_LENGTH = 4  # bytes: says how many the header has

_INTS = [int]
_ASKED = [(str, _INTS, _INTS, str)]
_PLACED = (str, int, _INTS, _INTS, _INTS, _INTS, int, int)
_FLAT = {"dtype": str, "parts": [_PLACED], "sizes": (int, int, int), "sum": str}
_SENT = {"kind": str, "run": str, "channel": str, "source": int}
_ANSWER = {**_SENT, "nonce": (str, int)}
_STATE = {
    "kind": str,
    "name": {str, int},
    "channel": str,
    "run": {str, NoneType},
    "nonce": (str, int),
    "asks": bool,
    "held": {str: _INTS},
}
_KINDS: dict[str, list[dict[str, Any]]] = {
    "hello": [_ANSWER],
    "plan": [
        {**_ANSWER, "ranks": _INTS, "refused": str},
        {**_ANSWER, "ranks": _INTS, "asked": _ASKED, "cells": [[(int, _INTS, _INTS)]], "names": str},
    ],
    "update": [{**_SENT, "version": int, "index": int, "last": bool}],
    "cells": [{**_SENT, "version": int}],
    "patch": [{"kind": str, "step": int, "flats": [_FLAT]}],
    "state": [{**_STATE, "layout": _ASKED}, {**_STATE, "layout": NoneType}, {**_STATE, "bases": _INTS, "applied": int}],
}
"""The headers of each kind. A value is given by its type; a set lists alternatives, a list has any length, a tuple has these
items, and a dict these names, or any."""


class Received(NamedTuple):
    """A message that has arrived undamaged."""

    header: dict[str, Any]
    payload: memoryview


Bytes = bytes | bytearray | memoryview


def message_of(header: dict[str, Any], payload: Iterable[bytes] = ()) -> bytes:
    """Return a message. ``header``: values of JSON."""
    text = json.dumps(header, separators=(",", ":")).encode()
    data = bytearray(b"".join([_MAGIC, bytes(_SUM), len(text).to_bytes(_LENGTH, "little"), text, *payload]))
    data[len(_MAGIC) : len(_MAGIC) + _SUM] = _sum(data)
    return bytes(data)


def read_message(message: Bytes, verb: str) -> Received | None:
    """Return the message, or None if it has been damaged.

    Raises:
        ValueError: no sender or receiver sends it.
    """
    data = bytearray(message)
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{verb} takes messages of flatshard.weights, as bytes, and got {bytes(data[:20])!r}...")
    at = len(_MAGIC) + _SUM
    if len(data) < at + _LENGTH or data[len(_MAGIC) : at] != _sum(data):
        return None
    length = int.from_bytes(data[at : at + _LENGTH], "little")
    at += _LENGTH
    try:
        header = json.loads(data[at : at + length])
    except (ValueError, RecursionError) as e:
        raise wrong(verb, f"its header is no JSON: {e}") from e
    if not isinstance(header, dict) or not any(_fits(header, each) for each in _KINDS.get(str(header.get("kind")), ())):
        raise wrong(verb, "its header has other fields, or values of other types")
    return Received(header, memoryview(data)[at + length :])


def wrong(verb: str, why: str) -> ValueError:
    """Return the error for an undamaged message that neither side sends."""
    return ValueError(
        f"{verb} got a message that no Sender or Receiver of this version has sent, and left it out: {why}"
    )


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value of JSON is of a kind of ``_KINDS``."""
    if isinstance(kind, type):
        return type(value) is kind and (not isinstance(value, int) or abs(value) < 2**62)
    if isinstance(kind, set):
        return any(_fits(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(each, kind[0]) for each in value)
    if isinstance(kind, tuple):
        return isinstance(value, list) and len(value) == len(kind) and all(map(_fits, value, kind))
    if not isinstance(value, dict):
        return False
    if str in kind:
        return all(_fits(each, kind[str]) for each in value.values())
    return value.keys() == kind.keys() and all(_fits(value[key], kind[key]) for key in kind)


def _sum(data: bytearray) -> bytes:
    """Return the checksum of the bytes that follow it."""
    return digest_of(checksums(memoryview(data)[len(_MAGIC) + _SUM :]))


def digest_of(data: bytes) -> bytes:
    """Return a hash of 8 bytes."""
    return hashlib.blake2b(data, digest_size=_SUM).digest()


def channel_of(layout: Any) -> str:
    """Return the name of the channel that receivers with this layout share."""
    return digest_of(json.dumps(layout).encode()).hex()
