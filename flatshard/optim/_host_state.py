"""The state of some parameters, on the host or on their device: how it moves between the two.

[Note: State that comes and goes]
While one unit is stepped, the state of the next comes in, on a stream of its own, the *side* stream; what the unit before had
has gone out on it. All copies in both directions run on this one stream, so what comes in takes the memory of what went out,
and two units' state are on the device at most. The rule for memory that two streams use is in ``_comm/streams.py``. Here:

- What comes in is allocated on the side stream. The current stream waits for it, and the side stream waits for the current
  one before it copies out and frees.
- What an optimizer makes in a step (its first, mostly) is allocated on the current stream. That waits for the copies before
  it is freed.
- The host waits only where it reads: ``wait_on_host``.

Until a value is copied out, the optimizer's state has what is on the device; until it is shown, what is on the host. So state
is never in neither place, whatever raises in between.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatshard._comm.streams import StreamEvent, Streams

At = tuple[int, str]
"""A value: the place of its parameter, and its key."""
States = MutableMapping[Any, dict[str, Any]]
"""As ``optimizer.state``."""


class Traffic:
    """The side stream of one accelerator, for all optimizers. [Note: State that comes and goes]"""

    _made: ClassVar[weakref.WeakValueDictionary[torch.device, Traffic]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._module = torch.get_device_module(device)
        self.streams = streams
        self.side = self._module.Stream(device=device)
        self._gone: StreamEvent | None = None  # completes when all that went out is on the host

    @classmethod
    def of(cls, device: torch.device) -> Traffic | None:
        """That of ``device``. None: it is the host, and nothing moves."""
        streams = None if device.type == "meta" else Streams.of(device)
        if streams is None:
            return None
        if (found := cls._made.get(device)) is None:
            found = cls._made[device] = cls(device, streams)
        return found

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """What is issued and allocated inside is on ``stream``."""
        with self._module.stream(stream):
            yield

    def went_out(self) -> StreamEvent:
        """Called on the side stream, when copies to the host have been issued."""
        self._gone = self.streams.record()
        return self._gone

    def wait_on_host(self) -> None:
        """Wait until code on the host may read what went out."""
        if self._gone is not None:
            event, self._gone = self._gone, None
            event.wait_on_host()


class Visit:
    """The state of some parameters, for as long as an optimizer works on them. They are on one device."""

    def __init__(self, states: States, params: Sequence[torch.Tensor], pin_memory: bool) -> None:
        """``states``: of an optimizer, which has it by parameter."""
        self._states, self._params, self._pin = states, params, pin_memory
        self._traffic = Traffic.of(params[0].device) if params else None
        self._device = params[0].device if params else None
        self._came: dict[At, torch.Tensor] = {}  # on the device
        self._came_at: StreamEvent | None = None
        self._left: dict[At, torch.Tensor] = {}  # what they are copies of, on the host
        self._made: list[
            torch.Tensor
        ] = []  # by the optimizer: memory of the stream that it ran on, until it has gone out
        self._made_on: Any = None
        self._gone: StreamEvent | None = None

    def fetch(self) -> None:
        """Start to copy the state to the device."""
        if self._traffic is None:
            return
        with self._traffic.on(self._traffic.side):
            for at, value in self._values():
                if value.device.type == "cpu":
                    self._came[at] = of_plain(value, self._on_device)
                    self._left[at] = value
            self._came_at = self._traffic.streams.record()

    def show(self) -> None:
        """Give the optimizer what has come, for the work that is issued from now on."""
        if self._came_at is not None:
            self._came_at.wait()
            for (number, key), value in self._came.items():
                self._states[self._params[number]][key] = value

    def put_away(self) -> None:
        """Copy the state to the host, as it is after the work that has been issued, and free the device's memory."""
        if self._traffic is None:
            return
        self._made_on = self._traffic.streams.current
        self._traffic.side.wait_stream(self._made_on)
        with self._traffic.on(self._traffic.side):
            try:
                for at, value in list(self._values()):
                    if value.device == self._device:
                        self._put_away(at, value)
            finally:
                self._gone = self._traffic.went_out()
        self._came.clear()
        self._left.clear()

    def _put_away(self, at: At, value: torch.Tensor) -> None:
        host = self._left.get(at)
        if host is not None and _lie_alike(host, value):
            for to, source in zip(_plain(host), _plain(value), strict=True):
                to.copy_(source, non_blocking=True)
        else:
            host = of_plain(value, self._on_host)
        if value is not self._came.get(at):
            self._made.append(value)
        number, key = at
        self._states[self._params[number]][key] = host

    def release(self) -> None:
        """Free what the optimizer made, after its copies: before the next unit is worked on."""
        if self._made:
            assert self._traffic is not None
            assert self._gone is not None
            with self._traffic.on(self._made_on):
                self._gone.wait()
            self._made.clear()

    def _values(self) -> Iterator[tuple[At, torch.Tensor]]:
        """All that moves: tensors that have dimensions. What has none stays where the optimizer keeps it."""
        for number, param in enumerate(self._params):
            if param in self._states:
                for key, value in self._states[param].items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        yield (number, key), value

    def _on_device(self, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device=self._device).copy_(value, non_blocking=True)

    def _on_host(self, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(value, device="cpu", pin_memory=self._pin).copy_(value, non_blocking=True)


def _plain(value: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor consists of: those inside of a subclass that quantises, or itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(value, name))]


def of_plain(value: torch.Tensor, copied: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The same of copies of the plain tensors."""
    if not is_traceable_wrapper_subclass(value):
        return copied(value)
    names, rest = value.__tensor_flatten__()
    inside = {name: of_plain(getattr(value, name), copied) for name in names}
    made: torch.Tensor = type(value).__tensor_unflatten__(inside, rest, value.size(), value.stride())
    return made


def _lie_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether each element of one has its place in the other."""

    def kind(value: torch.Tensor) -> list[Any]:
        return [type(value), *((p.dtype, p.shape, p.stride()) for p in _plain(value))]

    return kind(one) == kind(other)


def nbytes_on(states: States, where: Callable[[torch.device], bool]) -> int:
    """Bytes of all tensors of ``states`` whose device is ``where`` says."""
    values = (value for of_param in states.values() for value in of_param.values() if isinstance(value, torch.Tensor))
    return sum(plain.nbytes for value in values for plain in _plain(value) if where(plain.device))
