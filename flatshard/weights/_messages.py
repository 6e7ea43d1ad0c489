"""The bytes of a message: what it is, in JSON, what it carries, and a sum over both.

Nothing in a message is executed. One that was damaged on its way counts as lost.

[Note: What anybody may send]
The sum finds damage, and anybody can make one. So all of a message is looked at before it is used. Its header has the fields
of its kind: that is seen here. Numbers are within what they number: that is seen where it is known. What is wrong raises
ValueError, and has changed nothing. Memory is made for the elements that senders have listed, cell by cell.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from types import NoneType
from typing import Any, NamedTuple

from flatshard.checkpoint._container import checksums

_MAGIC = b"flatshard weights 2\n"
_SUM = 8  # bytes
_LENGTH = 4  # bytes: says how many the header has

_INTS = [int]
_ASKED = [(str, _INTS, _INTS, str)]
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
    "state": [{**_STATE, "layout": _ASKED}, {**_STATE, "layout": NoneType}, {**_STATE, "bases": _INTS, "applied": int}],
}
"""What headers of each kind hold. Of values: a type; a set: one of these; a list: any number; a tuple: one after the other; a
dict: by name, or any names."""


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
    try:
        header = json.loads(data[at : at + length])
    except (ValueError, RecursionError) as e:
        raise wrong(verb, f"its header is no JSON: {e}") from e
    if not isinstance(header, dict) or not any(_fits(header, each) for each in _KINDS.get(str(header.get("kind")), ())):
        raise wrong(verb, "its header has other fields, or values of other types")
    return Received(header, memoryview(data)[at + length :])


def wrong(verb: str, why: str) -> ValueError:
    """Make the error for a message that arrived as it was sent, and that neither side sends."""
    return ValueError(
        f"{verb} got a message that no Sender or Receiver of this version has sent, and left it out: {why}"
    )


def _fits(value: Any, kind: Any) -> bool:
    """Tell whether JSON's ``value`` is of a kind of ``_KINDS``."""
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
    """Over all that comes after it."""
    return digest_of(checksums(memoryview(data)[len(_MAGIC) + _SUM :]))


def digest_of(data: bytes) -> bytes:
    """8 bytes."""
    return hashlib.blake2b(data, digest_size=_SUM).digest()


def channel_of(layout: Any) -> str:
    """Name what receivers with this layout share."""
    return digest_of(json.dumps(layout).encode()).hex()
