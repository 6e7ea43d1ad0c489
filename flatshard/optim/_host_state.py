"""Copies of an optimizer's state between the host and a device.

[Note: State that comes and goes]
While a unit is stepped, the state of the next is copied to the device on a stream of its own, the *side* stream, after the
state of the previous unit was copied to the host on it. All copies run on this one stream, so copies to the device reuse the
memory of the previous ones, and at most two units' state is on the device. ``_comm/streams.py`` has the rule for memory that
two streams use; here it means:

- Copies on the device are allocated on the side stream. The current stream waits for them. The side stream waits for the
  current one before it copies to the host and frees.
- Tensors that an optimizer makes, mostly in its first step, are allocated on the current stream. That waits for the copies to
  the host before they are freed.
- The host waits only where it reads: ``wait_on_host``.

The optimizer's state refers to the host's tensor until the copy on the device is shown, and to the device's until it is
copied back. So no exception in between loses state.
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
"""A value of the state: the index of its parameter, and its key."""
States = MutableMapping[Any, dict[str, Any]]
"""The type of ``optimizer.state``."""


class Traffic:
    """The side stream of one accelerator, for all optimizers. [Note: State that comes and goes]"""

    _made: ClassVar[weakref.WeakValueDictionary[torch.device, Traffic]] = weakref.WeakValueDictionary()

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._module = torch.get_device_module(device)
        self.streams = streams
        self.side = self._module.Stream(device=device)
        self._gone: StreamEvent | None = None  # completes when all copies to the host are there

    @classmethod
    def of(cls, device: torch.device) -> Traffic | None:
        """Return the traffic of ``device``, or None for the host, where nothing moves."""
        streams = None if device.type == "meta" else Streams.of(device)
        if streams is None:
            return None
        if (found := cls._made.get(device)) is None:
            found = cls._made[device] = cls(device, streams)
        return found

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Issue and allocate on ``stream``."""
        with self._module.stream(stream):
            yield

    def went_out(self) -> StreamEvent:
        """Record copies to the host that were issued on the side stream."""
        self._gone = self.streams.record()
        return self._gone

    def wait_on_host(self) -> None:
        """Wait until the host may read the copies."""
        if self._gone is not None:
            event, self._gone = self._gone, None
            event.wait_on_host()


class Visit:
    """The state of some parameters of one device, while an optimizer steps them."""

    def __init__(self, states: States, params: Sequence[torch.Tensor], pin_memory: bool) -> None:
        """``states``: the optimizer's state by parameter."""
        self._states, self._params, self._pin = states, params, pin_memory
        self._traffic = Traffic.of(params[0].device) if params else None
        self._device = params[0].device if params else None
        self._came: dict[At, torch.Tensor] = {}  # on the device
        self._came_at: StreamEvent | None = None
        self._left: dict[At, torch.Tensor] = {}  # their originals on the host
        self._made: list[torch.Tensor] = []  # by the optimizer, kept until their copies to the host are there
        self._made_on: Any = None  # the stream that they were allocated on
        self._gone: StreamEvent | None = None

    def fetch(self) -> None:
        """Start to copy the state to the device."""
        if self._traffic is None:
            return
        with self._traffic.on(self._traffic.side):
            for at, value in self._values():
                if value.device.type == "cpu":
                    self._came[at] = map_plain(value, self._on_device)
                    self._left[at] = value
            self._came_at = self._traffic.streams.record()

    def show(self) -> None:
        """Put the copies in the optimizer's state, for work that is issued from now on."""
        if self._came_at is not None:
            self._came_at.wait()
            for (number, key), value in self._came.items():
                self._states[self._params[number]][key] = value

    def put_away(self) -> None:
        """Copy the state to the host, after all work that has been issued, and free the device's memory."""
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
        if host is not None and _have_one_layout(host, value):
            for to, source in zip(_plain(host), _plain(value), strict=True):
                to.copy_(source, non_blocking=True)
        else:
            host = map_plain(value, self._on_host)
        if value is not self._came.get(at):
            self._made.append(value)
        number, key = at
        self._states[self._params[number]][key] = host

    def release(self) -> None:
        """Free the tensors that the optimizer made, after their copies, before the next unit is stepped."""
        if self._made:
            assert self._traffic is not None
            assert self._gone is not None
            with self._traffic.on(self._made_on):
                self._gone.wait()
            self._made.clear()

    def _values(self) -> Iterator[tuple[At, torch.Tensor]]:
        """Iterate over the tensors that move: those with dimensions."""
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
    """Return the plain tensors inside of a wrapper subclass, or the tensor itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [plain for name in names for plain in _plain(getattr(value, name))]


def map_plain(value: torch.Tensor, copied: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return ``value`` with ``copied`` applied to each plain tensor inside."""
    if not is_traceable_wrapper_subclass(value):
        return copied(value)
    names, rest = value.__tensor_flatten__()
    inside = {name: map_plain(getattr(value, name), copied) for name in names}
    made: torch.Tensor = type(value).__tensor_unflatten__(inside, rest, value.size(), value.stride())
    return made


def _have_one_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the plain tensors of both have the same dtypes, shapes and strides."""

    def kind(value: torch.Tensor) -> list[Any]:
        return [type(value), *((p.dtype, p.shape, p.stride()) for p in _plain(value))]

    return kind(one) == kind(other)


def nbytes_on(states: States, where: Callable[[torch.device], bool]) -> int:
    """Return the bytes of all tensors of ``states`` on devices for which ``where`` is True."""
    values = (value for of_param in states.values() for value in of_param.values() if isinstance(value, torch.Tensor))
    return sum(plain.nbytes for value in values for plain in _plain(value) if where(plain.device))
