"""Objects and tensors between ranks, and the ranges of elements that go from one layout to another.

[Note: As few bytes as the two layouts allow]
A rank copies the elements that it holds already from itself, and receives each of the others once, from one of their holders.
Padding is not sent. The two layouts tell each rank what it sends and receives, so messages do not describe their contents.
The tensors of a unit go in one message between two ranks, while each rank copies from itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flatshard._base.errors import CollectiveError
from flatshard._comm.backends import builtin_collectives
from flatshard._comm.payloads import decode, encode
from flatshard._comm.progress import NOBODY

Span = tuple[int, int]


class Range(NamedTuple):
    """Elements ``start:stop`` of a parameter, which ``rank`` has in shard ``shard``."""

    rank: int
    shard: int
    start: int
    stop: int


def sources(need: Span, rank: int, cut: Sequence[Span], holders: Sequence[Sequence[int]]) -> Iterator[Range]:
    """Yield the sources of the elements ``need`` of ``rank``: itself where possible.

    Args:
        need: a half-open range.
        rank: the rank that needs them.
        cut: the range of each shard.
        holders: the ranks that hold each shard.
    """
    for shard, (start, stop) in enumerate(cut):
        start, stop = max(start, need[0]), min(stop, need[1])
        if start < stop:
            held = holders[shard]
            yield Range(rank if rank in held else held[rank % len(held)], shard, start, stop)


class Channel:
    """A channel for objects and tensors between the ranks of a process group, beside collectives of other threads."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._collectives, self._device = builtin_collectives(group, device), device
        self.rank, self.size = self._collectives.rank, self._collectives.size
        self.sent = 0  # bytes of tensors that this rank has sent

    def objects(self, value: Any) -> list[Any]:
        """Return the value of each rank, by rank. payloads.py, [Note: Nothing from another rank is executed]"""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(encode(value).encode()), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([data.numel()], device="cpu")).tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        rows = self.gather(padded).view(self.size, -1)
        return [decode(ctypes.string_at(row.data_ptr(), n)) for row, n in zip(rows, sizes, strict=True)]

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return the ``row`` of each rank, end to end."""
        with self.failing("exchange", ""):
            row = row.to(self._device)
            output = row.new_empty(self.size * row.numel())
            self._collectives.all_gather(output, row, NOBODY).wait()
            return output.cpu()

    def share(self, data: bytes | None, first: int, to: Sequence[int]) -> bytes:
        """Send the bytes of rank ``first`` to the ranks ``to``. Return them on these."""
        own = bytearray(data or b"")
        size = int(self.gather(torch.tensor([len(own)], device="cpu"))[first])
        if self.rank == first:
            self.exchange({rank: [torch.frombuffer(own, dtype=torch.uint8)] for rank in to}, {})
            return bytes(own)
        place = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.exchange({}, {first: [place]} if self.rank in to else {})
        return ctypes.string_at(place.data_ptr(), size)

    def exchange(
        self,
        sent: dict[int, list[torch.Tensor]],
        received: dict[int, list[torch.Tensor]],
        unit: str = "",
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Send 1-D tensors to ranks, and receive others. ``meanwhile``: called when all messages are on their way.

        Raises:
            CollectiveError: a rank has died, or left.
        """
        with self.failing("exchange", unit), torch.no_grad():
            out = [
                (torch.cat([as_bytes(tensor).to(self._device) for tensor in tensors]), rank)
                for rank, tensors in sorted(sent.items())
            ]
            into = [
                (torch.empty(sum(t.nbytes for t in tensors), dtype=torch.uint8, device=self._device), rank)
                for rank, tensors in sorted(received.items())
            ]
            self.sent += sum(message.nbytes for message, _ in out)
            pending = self._collectives.exchange(out, into, NOBODY)
            meanwhile()
            pending.wait()
            for message, rank in into:
                sizes = [target.nbytes for target in received[rank]]
                for part, target in zip(torch.split(message, sizes), received[rank], strict=True):
                    as_bytes(target).copy_(part)

    @contextlib.contextmanager
    def failing(self, phase: str, unit: str) -> Iterator[None]:
        """Context in which errors of the backend become a :class:`CollectiveError`."""
        try:
            yield
        except CollectiveError:
            raise
        except RuntimeError as e:
            raise CollectiveError(phase, unit, self.rank, self.size, str(e)) from e


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a 1-D, contiguous tensor as bytes."""
    return tensor.view(torch.uint8)


def saved(value: Any, what: str) -> bytes:
    """Return tensors and plain values of users as bytes for other ranks, in the form that a checkpoint has.

    This rank tries to read them, so what others would refuse raises before they need it.

    Args:
        value: the values.
        what: their name in the error.

    Raises:
        TypeError: other ranks would refuse it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        loaded(stream.getvalue())
    except (pickle.PickleError, AttributeError, TypeError) as e:
        raise TypeError(
            f"{what} is not what a rank that joins would read, as it executes nothing: make it tensors, numbers, strings, or "
            f"lists and dicts of such; or name its classes to torch.serialization.add_safe_globals. {e}"
        ) from e
    return stream.getvalue()


def loaded(data: bytes) -> Any:
    """Return the values that ``saved`` was given. Nothing in ``data`` is executed.

    Raises:
        pickle.UnpicklingError: ``data`` has values of other classes.
    """
    return torch.load(io.BytesIO(data), weights_only=True)
