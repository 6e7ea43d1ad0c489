"""What all units on one process group and device share: the runtime, the forwards under way, the backward.

Shared per group, not per root: so several models interleave their collectives in one order, prefetch works across
manually nested units, and no unit needs to know which one is the root.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import ClassVar

from torch import nn

from flatshard._composable.backward import Backward, current_graph_task
from flatshard._composable.exec_order import ForwardOrder
from flatshard._composable.state import Step, Unit
from flatshard._progress import Place
from flatshard._runtime import Runtime

_MODULE_FILE = nn.Module.__call__.__code__.co_filename


class Context:
    """One per runtime: see ``of``."""

    _instances: ClassVar[weakref.WeakValueDictionary[int, Context]] = weakref.WeakValueDictionary()

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.backward = Backward(waits_early=runtime.device.type == "cpu")
        self.pass_id = 0  # counts passes; a pass is one call of an outermost unit, outside backward
        self.last_step: Step | None = None  # of the current pass
        # Forwards under way, outermost first, each with the frame that its module's __call__ runs in.
        self._forwards: list[tuple[Unit, FrameType]] = []
        self._order: ForwardOrder[Unit] = ForwardOrder()
        self._prefetched: dict[Unit, None] = {}  # gathered ahead and not used yet
        self.follow(runtime)

    @classmethod
    def of(cls, runtime: Runtime) -> Context:
        found = cls._instances.get(id(runtime))  # the context keeps its runtime alive, so the id stays taken
        if found is None:
            found = cls._instances[id(runtime)] = cls(runtime)
        return found

    def follow(self, runtime: Runtime) -> None:
        """Have errors and the watch on ``runtime`` know where this rank is."""
        if runtime.progress is not None:
            to_self = weakref.ref(self)
            runtime.progress.place = lambda: None if (context := to_self()) is None else context._place()

    def _place(self) -> Place:
        inside = "" if self.backward.is_idle or self.backward.is_stale else "backward"
        return self.pass_id, self.backward.count, inside or ("forward" if self._forwards else "")

    # -- forwards ----------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit, in_backward: bool, frame: FrameType | None) -> None:
        """``unit`` starts a forward; called from its pre-forward hook.

        ``frame`` is alive as long as the forward is. None: that of the module's ``__call__``, found from the hook's caller.
        """
        if frame is None:
            frame = sys._getframe(2)
            while frame.f_code.co_filename != _MODULE_FILE and frame.f_back is not None:  # somebody wrapped the hook
                frame = frame.f_back
        if not in_backward:
            if self._forwards and not _is_inside(frame, self._forwards[-1][1]):
                self.recover()
            if not self._forwards:
                self._start_pass(unit)
        self._forwards.append((unit, frame))

    def exit_forward(self, unit: Unit) -> bool:
        """``unit`` ends a forward. Returns False where it had not started one (an earlier hook raised)."""
        if not self._forwards or self._forwards[-1][0] is not unit:
            return False
        self._forwards.pop()
        return True

    def make_step(self, unit: Unit, in_backward: bool) -> Step:
        """The forward of ``unit`` that has just ended, as backward may come back to it."""
        step = Step(unit, None if in_backward else self.last_step, [u for u, _ in self._forwards])
        if not in_backward:
            self.last_step = step
        return step

    @property
    def is_idle(self) -> bool:
        """No forward is under way."""
        return not self._forwards

    def is_outermost(self, unit: Unit) -> bool:
        """Whether the forward of ``unit`` that is under way was called from outside of all others."""
        return self._forwards[0][0] is unit and len(self._forwards) == 1

    @property
    def is_running(self) -> bool:
        """Whether the caller is inside a forward or a backward: an interrupted one does not count."""
        inside = bool(self._forwards) and _is_inside(sys._getframe(1), self._forwards[-1][1])
        return inside or (current_graph_task() != -1 and not self.backward.is_idle)

    def _start_pass(self, unit: Unit) -> None:
        if self.backward.is_stale:
            self.backward.recover()
        self.pass_id += 1
        self.last_step = None
        self._order = unit.order
        self._order.start()
        self.runtime.before_pass()

    def end_pass(self) -> None:
        """The outermost unit's forward is over. Keep nothing of it: the model may be dropped before the next pass."""
        self.free_unused()
        self.last_step = None
        self._order = ForwardOrder()

    # -- prefetching ---------------------------------------------------------------------------------------------------

    def next_forward(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` runs; the unit that is likely to run after it."""
        return self._order.advance(unit)

    def ran_since(self, unit: Unit) -> list[Unit]:
        """What has run since ``unit`` did, in this pass: inside it, where its forward has just ended."""
        return self._order.since(unit)

    def prefetch(self, unit: Unit, limit: int | None) -> None:
        """Gather ``unit`` ahead of need. A hint: freed quietly if it is not used.

        ``limit``: on the bytes gathered ahead; a prefetch that would exceed it is left out.
        """
        if limit is not None and self._bytes_ahead(unit) > limit:
            return
        for needed in unit.needs:
            if needed.handle.is_sharded:
                if self._forwards:
                    needed.handle.check_parameters()
                needed.handle.unshard(again=not self._forwards)
                if self._forwards or needed.kept:  # in backward nobody asks
                    needed.note_gathered()
                needed.gathered_in = self.pass_id
                self._prefetched[needed] = None

    def _bytes_ahead(self, unit: Unit) -> int:
        """Bytes of unsharded parameters gathered ahead and not used yet, with those of ``unit``."""
        ahead = {u for u in self._prefetched if not u.handle.is_sharded}
        ahead.update(needed for needed in unit.needs if needed.handle.is_sharded)
        return sum(u.handle.unsharded_nbytes for u in ahead)

    def used(self, unit: Unit) -> bool:
        """``unit`` is needed now: if it was prefetched, that was right. Returns whether it was."""
        return self._prefetched.pop(unit, False) is None

    def free_unused(self) -> None:
        """Free what was prefetched and not used."""
        prefetched, self._prefetched = self._prefetched, {}
        for unit in prefetched:
            if unit.holds == 0:
                unit.free_unless_kept()

    # -- exceptions ----------------------------------------------------------------------------------------------------

    def recover(self, drop_held: bool = False) -> None:
        """After an exception that skipped hooks (an interrupt, a failed backward): be as between two steps.

        ``drop_held``: gradients that earlier backwards hold (``no_sync``), too.
        """
        for unit, _ in self._forwards:
            for needed in unit.needs:
                needed.users = needed.holds = 0
                while needed.full_forwards:
                    needed.full_forwards -= 1
                    needed.handle.slots.unregister()
                needed.handle.slots.register_sharded()
                needed.handle.reshard()
        self._forwards.clear()
        self.backward.recover(drop_held)
        self.free_unused()


def _is_inside(frame: FrameType, outer: FrameType) -> bool:
    """Whether ``frame`` was called, through whatever is between, from ``outer``."""
    at: FrameType | None = frame
    while at is not None:
        if at is outer:
            return True
        at = at.f_back
    return False
