"""The state that all units on one process group and device share: the runtime, the running forwards, the backward.

It is shared per group, not per root. So several models issue their collectives in one order, prefetching works across units
that were sharded by separate calls, and no unit needs to know which one is the root.

[Note: Gathered before it changes]
A module may change parameters of units inside it, in its own forward: a momentum encoder (MoCo, BYOL) does. A unit that was
gathered ahead may have its shard read while such a write runs. The write cannot be made to wait: sharded parameters are
plain tensors to torch (an optimizer would pay for a ``__torch_function__`` in every operation), so nothing tells when it is
enqueued. And the current stream cannot wait for the read after each prefetch: collectives read the shard until they end,
so there would be no prefetch left. What the gather has read does no harm, as the version of the shards has changed when
the unit is used, and it is gathered again. From then on the unit is not gathered ahead in a forward any more, so no read
is in flight while it is written, and nothing is gathered twice. Versions are the same on all ranks, so all do the same.
"""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

from torch import nn

from flatshard._comm.collectives import Collectives
from flatshard._comm.progress import Place
from flatshard._composable.backward import Backward, current_graph_task
from flatshard._composable.claims import Claim
from flatshard._composable.exec_order import ForwardOrder
from flatshard._composable.reduction_queue import ReductionQueue
from flatshard._composable.state import Step, Unit
from flatshard._handle.pool import Pool
from flatshard._runtime import Runtime

_forwards, _unit = operator.attrgetter("forwards"), operator.attrgetter("unit")
_MODULE_FILE = nn.Module.__call__.__code__.co_filename


class Forward:
    """One running forward of a unit."""

    __slots__ = ("claims", "frame", "gathers", "in_backward", "instead", "module", "step", "unit")

    def __init__(self, unit: Unit, module: nn.Module, frame: FrameType, in_backward: bool) -> None:
        self.unit = unit
        self.module = module  # the unit's, or the one of its group that runs
        self.frame = frame  # alive as long as the forward is
        self.in_backward = in_backward  # recomputed by activation checkpointing
        self.instead: Callable[[Any], object] | None = None  # if a feature has it: what to call at the end, and no more
        self.gathers = True  # False: a feature shows other parameters, so nothing is gathered
        self.step: Step | None = None  # set at its end, if backward may reach it
        self.claims: list[tuple[Unit, Claim]] = []
        for needed in unit.needs:
            claim = Claim()
            needed.claims.append(claim)
            self.claims.append((needed, claim))

    @property
    def claim(self) -> Claim:
        """The claim on ``unit`` itself."""
        return self.claims[0][1]


class Context:
    """The shared state of the units on one runtime. There is one per runtime: see ``of``."""

    _instances: ClassVar[weakref.WeakValueDictionary[int, Context]] = weakref.WeakValueDictionary()

    checks: ClassVar[list[Callable[[Unit], bool]]] = []
    """Called with the outermost unit before a pass starts. A check is removed when it returns False."""

    make_pool: ClassVar[Callable[[Runtime], Pool] | None] = None
    """Makes the pool of units with static buffers. None: there are no pools."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.reductions = ReductionQueue.of(runtime.device)
        self.waits_early = runtime.streams is None  # reduction_queue.py, [Note: Reductions in flight]
        self.backward: Backward | None = None  # that is running, or has failed, if it has reached a unit of the context
        self.backwards = 0  # counts backwards that have reached a unit
        self.kept_unsharded = False  # `Backward.keeps_unsharded` of the last backward
        self.pass_id = 0  # counts passes; a pass is one call of an outermost unit, outside backward
        self.last_step: Step | None = None  # the latest step of the current pass
        self.forwards: list[Forward] = []  # running now, outermost first
        self.order = ForwardOrder()  # of the current pass
        self._prefetched: dict[Unit, None] = {}  # gathered ahead, and not used yet
        self._pools: dict[Collectives, Pool] = {}  # where there are static buffers
        self.follow(runtime)

    @classmethod
    def of(cls, runtime: Runtime) -> Context:
        found = cls._instances.get(id(runtime))  # the context keeps its runtime alive, so the id stays taken
        if found is None:
            found = cls._instances[id(runtime)] = cls(runtime)
        return found

    def pool_of(self, runtime: Runtime, static_buffers: bool) -> Pool | None:
        """The pool for units with the collectives of ``runtime``. None: each unit has memory of its own."""
        make, wanted = type(self).make_pool, static_buffers or hasattr(runtime.collectives, "allocate")
        if make is None or not wanted:
            return None
        return self._pools.setdefault(runtime.collectives, make(runtime))

    def follow(self, runtime: Runtime) -> None:
        """Make errors and the watch on ``runtime`` report how far this rank has come."""
        if runtime.progress is not None:
            to_self = weakref.ref(self)
            runtime.progress.place = lambda: None if (context := to_self()) is None else context._place()

    def _place(self) -> Place:
        backward = self.backward
        inside = "" if backward is None or backward.has_failed else "backward"
        return self.pass_id, self.backwards, inside or ("forward" if self.forwards else "")

    # -- forwards ----------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit, module: nn.Module, in_backward: bool, frame: FrameType | None) -> Forward:
        """Called when ``module``, one of the ``unit``, starts a forward, from its pre-forward hook.

        ``frame``: a Python frame that is alive during the forward. None: that of the module's ``__call__``, which is found
        from the caller.

        Raises:
            RuntimeError: another thread is in a forward.
        """
        if frame is None:
            frame = sys._getframe(2)
            while frame.f_code.co_filename != _MODULE_FILE and frame.f_back is not None:  # the hook may be wrapped
                frame = frame.f_back
        if not in_backward and (not self.forwards or not _is_inside(frame, self.forwards[-1].frame)):
            self.settle(frame)
            if not self.forwards:
                self._start_pass(unit, frame)
        forward = Forward(unit, module, frame, in_backward)
        self.forwards.append(forward)
        return forward

    def exit_forward(self, module: nn.Module, raised: bool = False) -> Forward | None:
        """Called when ``module`` ends a forward. Returns None if the forward never started (an earlier hook raised).

        ``raised``: it may have raised. Then a running forward of ``module`` may be another thread's.
        """
        try:
            last = self.forwards[-1]
        except IndexError:  # not asked first: forwards without a record may end on other threads
            return None
        return None if last.module is not module or (raised and self._is_elsewhere()) else self.forwards.pop()

    def make_step(self, forward: Forward) -> Step:
        """Create the step of a forward that has just ended, for backward to reach."""
        unit, in_backward = forward.unit, forward.in_backward
        step = Step(unit, None if in_backward else self.last_step, list(map(_unit, self.forwards)))
        forward.step = step
        if unit.handle.has_static_buffers:
            for needed in unit.needs:
                needed.steps = weakref.WeakSet() if needed.steps is None else needed.steps
                needed.steps.add(step)
        if not in_backward:
            self.last_step = step
        return step

    def is_outermost(self, unit: Unit) -> bool:
        """Whether the running forward of ``unit`` is not inside another unit's forward."""
        return self.forwards[0].unit is unit and len(self.forwards) == 1

    @property
    def is_running(self) -> bool:
        """Whether the caller is inside a forward or a backward. Interrupted ones do not count."""
        inside = bool(self.forwards) and _is_inside(sys._getframe(1), self.forwards[-1].frame)
        return inside or (current_graph_task() != -1 and self.backward is not None)

    def _start_pass(self, unit: Unit, frame: FrameType) -> None:
        for busy in list(filter(_forwards, self._instances.values())):
            busy._check_thread(frame)
        self.check(unit)
        self.pass_id += 1
        self.last_step = None
        self.order = unit.order
        self.order.start()

    def check(self, unit: Unit) -> None:
        """Run the checks before the parameters of ``unit``, the outermost, are used."""
        if self.checks:
            self.checks[:] = [check for check in self.checks if check(unit)]

    def end_pass(self) -> None:
        """End the outermost unit's forward. Drops all references to the model, so that it can be freed."""
        self.free_unused()
        self.last_step = None
        self.order = ForwardOrder()
        self.runtime.join()
        self.runtime.wait_for_host_reads()

    # -- prefetching ---------------------------------------------------------------------------------------------------

    def prefetch(self, unit: Unit, limit: int | None) -> None:
        """Gather ``unit`` ahead of time. This is a hint: if the unit is not used, it is freed again.

        ``limit``: in bytes, for all parameters gathered ahead. A prefetch that would exceed it is not done.
        """
        if limit is not None and self._bytes_ahead(unit) > limit:
            return
        for needed in unit.needs:
            if needed.handle.is_sharded:
                blocked = needed.handle.has_static_buffers and needed.handle.is_blocked
                if blocked or (needed.claims and needed.claims.show_copies):
                    continue
                if self.forwards and needed.changes_in_passes:
                    continue
                if self.forwards:
                    needed.handle.check_parameters()
                needed.handle.unshard(self.pass_id, again=not self.forwards)
                self._prefetched[needed] = None

    def _bytes_ahead(self, unit: Unit) -> int:
        """Bytes of unsharded parameters that are gathered ahead and not used yet, including those of ``unit``."""
        ahead = {u for u in self._prefetched if not u.handle.is_sharded}
        ahead.update(needed for needed in unit.needs if needed.handle.is_sharded)
        return sum(u.handle.unsharded_nbytes for u in ahead)

    def make_room(self, unit: Unit) -> None:
        """Free the memory that ``unit`` needs and another unit is using. [Note: Static buffers]"""
        self.free_unused()
        if not unit.steps:
            unit.handle.unblock()

    def keep_for_next(self, unit: Unit) -> None:
        """Called when another module of ``unit`` is to run: it stays unsharded, as if it had been prefetched for it."""
        if not unit.handle.is_sharded:
            self._prefetched[unit] = None

    def used(self, unit: Unit) -> None:
        """Called when ``unit`` is needed."""
        self._prefetched.pop(unit, None)

    def free_unused(self) -> None:
        """Free units that were prefetched and not used."""
        prefetched, self._prefetched = self._prefetched, {}
        for unit in prefetched:
            unit.free_unless_kept()

    # -- exceptions ----------------------------------------------------------------------------------------------------

    def settle(self, frame: FrameType | None = None) -> None:
        """Clean up after an exception that skipped hooks (an interrupt, a failed backward).

        ``frame``: the caller's frame (default: found); forwards that do not enclose it are over.

        Raises:
            RuntimeError: another thread is in a forward or a backward.
        """
        if self.forwards:
            frame = sys._getframe(1) if frame is None else frame
            self._check_thread(frame)
            self._drop_forwards(frame)
            if not self.forwards:
                self.recover()
        backward = self.reductions.backward
        if backward is not None and current_graph_task() == -1:
            # It failed, or is on another thread. On an accelerator it always runs on the autograd engine's threads, and may
            # still be registered there just after it failed.
            if not backward.has_failed and self.runtime.streams is None:
                raise RuntimeError(
                    "a backward of sharded modules is running on another thread. Collectives of several threads would mix: "
                    "run all sharded modules of a process in one thread"
                )
            backward.drop()

    def _drop_forwards(self, frame: FrameType | None) -> None:
        """Drop the running forwards that do not enclose ``frame``. None: all."""
        while self.forwards and (frame is None or not _is_inside(frame, self.forwards[-1].frame)):
            for needed, claim in self.forwards.pop().claims:
                needed.claims.remove(claim)
                needed.show()
                if not needed.claims.pin:
                    needed.handle.reshard()

    def _check_thread(self, frame: FrameType) -> None:
        """Raise if the innermost running forward belongs to another thread. ``frame``: of the caller."""
        last = self.forwards[-1]
        if _is_inside(frame, last.frame):
            return
        if any(_is_inside(running, last.frame) for running in sys._current_frames().values()):
            raise RuntimeError(
                f"unit {last.unit.fqn or '<root>'!r} is in a forward on another thread. Collectives of several threads would "
                "mix: run all sharded modules of a process in one thread. Other threads hand it their inputs, as by a "
                "concurrent.futures.ThreadPoolExecutor(max_workers=1). Or, without gradients, run them inside "
                "flatshard.keep_unsharded(module, threads=True), where nothing is communicated"
            )

    def _is_elsewhere(self) -> bool:
        """Whether the innermost running forward is on another thread."""
        here, frame = threading.get_ident(), self.forwards[-1].frame
        return any(_is_inside(at, frame) for thread, at in sys._current_frames().items() if thread != here)

    def recover(self, drop_held: bool = False) -> None:
        """After an exception: restore the state between two steps.

        ``drop_held``: also drop gradients that earlier backwards hold (``no_sync``).
        """
        self._drop_forwards(None)
        if self.backward is not None:
            self.backward.drop()
        self.reductions.discard(keeps_held=not drop_held)
        self.kept_unsharded = False
        self.free_unused()


def _is_inside(frame: FrameType, outer: FrameType) -> bool:
    """Whether ``frame`` was called, directly or indirectly, from ``outer``."""
    at: FrameType | None = frame
    while at is not None:
        if at is outer:
            return True
        at = at.f_back
    return False
