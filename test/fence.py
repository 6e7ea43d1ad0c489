"""A debug mode for memory that gloo still uses: it finds violations even if no thread writes there at that moment.

While :func:`install` is active,

- every message and collective of a process group is tracked until its ``wait`` returns. Freeing its storage by ``resize_``
  is a *violation*. So is dropping the work, unless the group has failed: the rest of its message would stay on the link;
- memory that a storage frees or allocates is first filled with 0xFF, which is NaN in every floating-point dtype;
- sends are delayed at random by at most ``delay`` seconds, so that works stay pending for longer;
- :meth:`Fence.interrupt_at` raises a KeyboardInterrupt before or after a chosen wait, like Ctrl-C. The wait for a header in
  shared memory is one wait, whether it waits for a message or not. It does not spin.

A rule is better than a fence of pages, which needs a thread to write at the wrong moment.
"""

import contextlib
import ctypes
import dataclasses
import gc
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from flatshard._comm.shared_memory import mailboxes

VERBS = ("send", "recv", "allreduce", "broadcast")
"""Methods of a group by which flatshard uses memory after the call."""

REAL = {verb: dist.ProcessGroup.__dict__[verb] for verb in VERBS}
REAL_HEADER = mailboxes.Inbox.wait
REAL_RESIZE = torch.UntypedStorage.resize_


@dataclasses.dataclass
class Fence:
    delay: float = 0.0
    violations: list[str] = dataclasses.field(default_factory=list)
    waits: int = 0
    """Number of waits since ``interrupt_at``."""
    under_way: dict[int, tuple[str, list[tuple[int, int]]]] = dataclasses.field(default_factory=dict, repr=False)
    """Pending works by number: the verb, and the addresses that it uses."""
    finalized: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict, repr=False)
    """Works whose object was finalized meanwhile, with the place; see ``let_go``."""
    made: int = 0
    _gone: list[str] = dataclasses.field(default_factory=list, repr=False)
    _interrupt: tuple[int, bool] | None = None
    _random: random.Random = dataclasses.field(default_factory=lambda: random.Random(0), repr=False)

    def interrupt_at(self, wait: int | None, after: bool = False) -> None:
        """Raise at the ``wait``-th wait from now on, or after it if ``after``. None cancels."""
        self.waits = 0
        self._interrupt = None if wait is None else (wait, after)

    def violate(self, what: str) -> None:
        self.violations.append(f"{what}\n{''.join(traceback.format_stack(limit=14)[:-2])}")

    def check(self) -> None:
        """Raise if there were violations or dropped works, and forget them."""
        self.let_go()
        found, self.violations[:], self._gone[:] = [*self.violations, *self._gone], [], []
        assert not found, "\n".join(found)

    def let_go(self) -> None:
        """Find dropped works, and let gloo forget their memory, as it does when a work is destroyed.

        Works are alive if another object's finalizer has resurrected them, in a cycle that was finalized as a whole.
        """
        alive = {o.key for o in gc.get_objects() if type(o) is FencedWork} if self.finalized else set()
        for key in [key for key in self.finalized if key not in alive]:
            where, _ = self.finalized.pop(key)
            if self.under_way.pop(key, None) is not None:
                self._gone.append(where)

    def before_wait(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # interrupts go to the main thread
        self.waits += 1
        if self._interrupt == (self.waits, False):
            self._interrupt = None
            raise KeyboardInterrupt("at a wait")

    def after_wait(self) -> None:
        if self._interrupt == (self.waits, True) and threading.current_thread() is threading.main_thread():
            self._interrupt = None
            raise KeyboardInterrupt("at a wait")

    @property
    def memory_in_use(self) -> list[str]:
        """The verbs of pending works that use memory. A message without contents may wait as long as its group lives."""
        return [verb for verb, ranges in self.under_way.values() if ranges]

    def sleep(self) -> None:
        if self.delay and self._random.random() < 0.3:
            time.sleep(self.delay * self._random.random())


class FencedWork:
    """A work of a process group, tracked until it ends."""

    def __init__(self, fence: Fence, work: Any, verb: str, tensors: list[torch.Tensor], is_bell: bool) -> None:
        self._fence, self._work, self._verb, self._is_bell = fence, work, verb, is_bell
        storages = [t.untyped_storage() for t in tensors]
        self.key = fence.made = fence.made + 1
        fence.under_way[self.key] = verb, [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]

    def wait(self, *args: Any) -> Any:
        if not self._is_bell:
            self._fence.before_wait()
        try:
            result = self._work.wait(*args)
        finally:  # after an error gloo has closed the connection
            self._fence.under_way.pop(self.key, None)
        if not self._is_bell:
            self._fence.after_wait()
        return result

    def is_completed(self) -> bool:
        return self.key not in self._fence.under_way

    def __del__(self) -> None:
        if self.key in self._fence.under_way:
            where = "".join(traceback.format_stack(limit=14)[:-1])
            self._fence.finalized[self.key] = f"a {self._verb} was dropped before it had ended\n{where}", self._work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _fenced(fence: Fence, verb: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if verb == "send":
            fence.sleep()
        work = real(self, tensors, *args, **kwargs)
        found = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        return FencedWork(fence, work, verb, [t for t in found if t.numel()], mailboxes.BELL in args)

    return call


def _fenced_header(fence: Fence, real: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any) -> Any:
        fence.before_wait()
        found = real(self, *args)
        fence.after_wait()
        return found

    return wait


def _poison(storage: torch.UntypedStorage, start: int) -> None:
    if storage.nbytes() > start and storage.device.type == "cpu":
        ctypes.memset(storage.data_ptr() + start, 0xFF, storage.nbytes() - start)


def _fenced_resize(fence: Fence, real: Callable[..., Any]) -> Callable[..., Any]:
    def resize_(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        if size < before and self.device.type == "cpu":
            start = self.data_ptr()
            fence.let_go()
            for verb, ranges in list(fence.under_way.values()):
                if any(a < start + before and start + size < b for a, b in ranges):
                    fence.violate(f"memory was freed that a {verb} still uses")
                    return None  # the memory stays, so gloo's writes do no harm
            _poison(self, size)
        result = real(self, size)
        _poison(self, before)
        return result

    return resize_


@contextlib.contextmanager
def install(delay: float = 0.0) -> Iterator[Fence]:
    """Fence all process groups and storages of this process. An outer fence is inactive meanwhile."""
    fence = Fence(delay)
    before = {verb: dist.ProcessGroup.__dict__[verb] for verb in VERBS}
    resize_before = torch.UntypedStorage.resize_
    header, spin = mailboxes.Inbox.wait, mailboxes._SPIN
    mailboxes.Inbox.wait, mailboxes._SPIN = _fenced_header(fence, REAL_HEADER), 0.0  # type: ignore[method-assign]
    for verb, method in REAL.items():
        setattr(dist.ProcessGroup, verb, _fenced(fence, verb, method.__func__))
    torch.UntypedStorage.resize_ = _fenced_resize(fence, REAL_RESIZE)  # type: ignore[method-assign]
    try:
        yield fence
    finally:
        for verb, method in before.items():
            setattr(dist.ProcessGroup, verb, method)
        mailboxes.Inbox.wait, mailboxes._SPIN = header, spin  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = resize_before  # type: ignore[method-assign]
