"""What completes a unit in a backward. All that tells how far it is, is written in this file.

[Note: What completes a unit]
When backward reaches a unit, autograd's engine tells how many of the unit's parameters are in the running graph (as for
``torch.autograd.graph.register_multi_grad_hook``). The unit is complete when that many gradients have come. A parameter
that is not in the graph is unused here, and is not waited for. But on another rank it may be in the graph. So these are idle
when they have what was awaited, and complete when backward reaches a unit before them, or recomputes one in a reentrant
checkpoint:

- a unit without any parameter in the graph: it is unused, or inside a reentrant checkpoint;
- a unit that backward will come to again, for another forward (``Way``): of a module called twice, or of an earlier pass if
  losses of two passes were added;
- a unit that lacks parameters and has units inside that backward has not reached: a reentrant checkpoint may run both.

What is left is completed by the end of the graph task (the run of the autograd engine) that reached the unit first:
[Note: Nested backwards].

States:

- UNTOUCHED       no backward is running, or it has not come to the unit.
- TOUCHED         the backward has gathered it, ahead of time or for another unit.
- AWAITING        the backward has reached it. The last gradient completes it.
- IDLE            the same, but the graph task has no gradients for it, or no more. A unit before it completes it.
- COMPLETE        all gradients have come.
- COMPLETE_EARLY  it was idle. The backward may reach another forward of it in the same graph task, which needs its values.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch.autograd.graph import Node

from flatshard._comm.progress import Label
from flatshard._errors import InternalError

# The id of the running graph task, -1 outside of backward; whether it will run a node. Private API: no other way.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node


class CompletionState(enum.IntEnum):
    UNTOUCHED = enum.auto()
    TOUCHED = enum.auto()
    AWAITING = enum.auto()
    IDLE = enum.auto()
    COMPLETE = enum.auto()
    COMPLETE_EARLY = enum.auto()


UNTOUCHED, TOUCHED, AWAITING, IDLE, COMPLETE, COMPLETE_EARLY = CompletionState

COMPLETION_TRANSITIONS: dict[tuple[CompletionState, str], CompletionState] = {
    (UNTOUCHED, "gather"): TOUCHED,
    (TOUCHED, "reach with gradients"): AWAITING,
    (TOUCHED, "reach with none"): IDLE,
    (AWAITING, "reach with gradients"): AWAITING,  # in a graph task inside the one that completes it, as the next three
    (AWAITING, "reach with none"): AWAITING,
    (IDLE, "reach with gradients"): IDLE,
    (IDLE, "reach with none"): IDLE,
    (AWAITING, "postpone"): IDLE,
    (IDLE, "postpone"): IDLE,
    (AWAITING, "complete"): COMPLETE,
    (IDLE, "complete"): COMPLETE,
    (IDLE, "complete early"): COMPLETE_EARLY,
    (COMPLETE, "reach with gradients"): AWAITING,  # in another graph task
    (COMPLETE, "reach with none"): IDLE,
    (COMPLETE_EARLY, "reach with gradients"): AWAITING,  # or in the same one, at another forward of it
    (COMPLETE_EARLY, "reach with none"): IDLE,
    (TOUCHED, "end"): UNTOUCHED,
    (AWAITING, "end"): UNTOUCHED,
    (IDLE, "end"): UNTOUCHED,
    (COMPLETE, "end"): UNTOUCHED,
    (COMPLETE_EARLY, "end"): UNTOUCHED,
}
"""``reach``: a graph task reaches the unit, and has gradients for it or none. ``end``: of the backward, or its failure."""


class Takes(Protocol):
    """The hooks of a unit, as far as this file knows them: see ``UnitHooks``."""

    def take(self, group: int, index: int, task: int) -> int | None:
        """A parameter's gradient has come in graph task ``task``, and more than counting is to be done.

        Returns the graph task whose further gradients are only counted; -1: none. None: this one does not count.
        """

    def finish_previous(self) -> None:
        """As many gradients have come that the reduction of the previous unit is to end."""

    def complete(self) -> None:
        """All gradients have come."""


class Reached(Protocol):
    """A forward of a unit: see ``ForwardRecord``."""

    opened_in: int


Record = TypeVar("Record", bound=Reached)


class Way(Generic[Record]):
    """One way by which backward comes to a forward: an autograd node that made an output. It lives as long as the node.

    It holds the nodes after that one. To hold the node itself would be a cycle, in which the graph would live on.
    """

    __slots__ = ("__weakref__", "_after", "record")

    def __init__(self, record: Record, node: Node) -> None:
        self.record, self._after = record, node.next_functions

    def runs(self) -> bool:
        """Whether the running graph task comes this way, or has come."""
        return all(how_many_run((node,)) for node, _ in self._after if node is not None)


class Completion:
    """How far the running backward is with one unit. The hooks of the unit's parameters count in it, in each step.

    They refer to it as long as autograd's nodes live, where Python's garbage collector finds no cycle. So it refers to
    nothing that refers to the unit.
    """

    def __init__(self, label: Label) -> None:
        """``label``: of the unit."""
        self._label = label
        self.state = UNTOUCHED
        # AWAITING, IDLE: how many gradients each graph task that has reached the unit has for it. The first completes it.
        self.expected: dict[int, int] = {}
        self.pending = 0  # gradients of all of them that are still to come
        # The one whose gradients are only counted: they stay where autograd puts them until all have come. -1: none.
        self.counts_in = -1
        self.some_frozen = False  # whether some parameters did not require grad when it was reached last
        # If this many are pending, the next gradient ends the reduction of the previous unit. 1: none is left to be ended.
        self.finish_at = 1
        self.finished_in = -1  # the graph task in which the unit was last completed
        self.lacks_some = False  # of the parameters in its graph: they are unused, or recomputed later
        # These outlive the backward. Leaves besides the parameters whose gradients count: where forwards may not have run
        # the module. The ways by which backward may come to live forwards.
        self.stand_ins: list[Node] = []
        self._ways: list[weakref.ref[Way[Any]]] = []
        self.leaves_out = False  # whether the unit ever lacked some

    def move(self, label: Label) -> None:
        """The unit is on other ranks. What it has learned of earlier backwards is forgotten; hooks go on to count here."""
        self._label, self.leaves_out, self.finished_in = label, False, -1

    # -- what is asked -------------------------------------------------------------------------------------------------

    @property
    def task(self) -> int | None:
        """The graph task that completes the unit. None: it is complete, or was only gathered, or not even that."""
        return next(iter(self.expected), None)

    @property
    def is_reached(self) -> bool:
        """Whether the backward has reached the unit. False: it has gathered it at most."""
        return self.state > TOUCHED

    def may_get(self, nodes: Collection[Node]) -> int:
        """How many gradients the running graph task has for the unit. ``nodes``: that accumulate those of the parameters."""
        return how_many_run(nodes) + how_many_run(self.stand_ins)

    def comes_again(self) -> bool:
        """Whether the running graph task will reach another forward of the unit."""
        task = current_graph_task()
        for ref in [*self._ways]:
            way = ref()
            if way is not None and way.record.opened_in != task and way.runs():
                return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether the unit has all its gradients, and the running graph task does not reach it again."""
        return self.state is COMPLETE or (self.state > AWAITING and not self.pending and not self.comes_again())

    # -- what happens --------------------------------------------------------------------------------------------------

    def add_way(self, way: Way[Any]) -> None:
        """Backward may come to a forward of the unit by ``way``."""
        self._ways.append(weakref.ref(way, self._ways.remove))

    def gather(self) -> None:
        """The backward comes to the unit for the first time."""
        self.state = COMPLETION_TRANSITIONS.get((self.state, "gather")) or self._refuse("gather")

    def reach(self, task: int, nodes: Collection[Node], all_train: bool, waits_early: bool) -> int:
        """Graph task ``task``, the running one, reaches the unit for the first time. Returns how many gradients it has.

        ``nodes``: see ``may_get``. ``all_train``: they are of all parameters. ``waits_early``: see ``ReductionQueue``.
        """
        self.some_frozen = not all_train
        try:
            of_params, others = sum(map(_will_run, nodes)), sum(map(_will_run, self.stand_ins))
        except RuntimeError:
            of_params, others = how_many_run(nodes), how_many_run(self.stand_ins)
        count = of_params + others
        event = "reach with gradients" if count else "reach with none"
        self.state = COMPLETION_TRANSITIONS.get((self.state, event)) or self._refuse(event)
        self.expected[task] = count
        self.pending += count
        self.finish_at = self.pending - max(0, self.pending // 6 - 1) if waits_early else 1
        if of_params or not others:
            self.lacks_some |= of_params < len(nodes)
            self.leaves_out |= self.lacks_some
        return count

    def hook(self, to_hooks: weakref.ref[Takes], group: int, index: int) -> Callable[[torch.Tensor], None]:
        """The hook of one parameter: number ``index`` of flat parameter ``group``."""

        # This runs for every parameter in every step, so it does little.
        def on_gradient(param: torch.Tensor) -> None:
            """Autograd has accumulated the gradient of one unsharded parameter. Fast path: count it, and leave it there."""
            task = current_graph_task()
            # A frozen parameter that still required grad in its forward has a hook call, but no gradient: see `take`.
            if self.counts_in != task or (self.some_frozen and not param.requires_grad):
                hooks = to_hooks()
                assert hooks is not None
                if (counts_in := hooks.take(group, index, task)) is None:
                    return
                self.counts_in = counts_in
            self.pending = pending = self.pending - 1
            if pending >= self.finish_at:
                return
            hooks = to_hooks()
            assert hooks is not None
            if pending > 0:
                self.finish_at = 1
                hooks.finish_previous()
            elif not pending and next(iter(self.expected)) == task:
                hooks.complete()

        return on_gradient

    def count_other(self) -> bool:
        """The gradient of one of ``stand_ins`` has come. Returns whether it is the last one."""
        self.pending -= 1
        return not self.pending and self.task == current_graph_task()

    def postpone(self) -> None:
        """All gradients have come, but the backward will gather the unit again."""
        self.state = COMPLETION_TRANSITIONS.get((self.state, "postpone")) or self._refuse("postpone")

    def complete(self, early: bool = False) -> bool:
        """All gradients have come, or no more are waited for. Returns whether any were expected.

        ``early``: the backward may reach another forward of the unit in the same graph task.
        """
        event = "complete early" if early else "complete"
        self.state = COMPLETION_TRANSITIONS.get((self.state, event)) or self._refuse(event)
        self.finished_in, were_any = next(iter(self.expected)), any(self.expected.values())
        self.expected.clear()
        self.pending, self.counts_in = 0, -1
        return were_any

    def end(self) -> None:
        """The backward has ended, or failed."""
        self.state = COMPLETION_TRANSITIONS.get((self.state, "end")) or self._refuse("end")
        self.expected.clear()
        self.pending, self.counts_in, self.finished_in, self.lacks_some = 0, -1, -1, False

    def _refuse(self, event: str) -> NoReturn:
        raise InternalError(f"cannot {event} unit {self._label.unit!r} in a backward while it is {self.state.name}")


def how_many_run(nodes: Collection[Any]) -> int:
    """How many of ``nodes`` the running graph task runs, or has run."""
    try:
        return sum(map(_will_run, nodes))
    except RuntimeError:  # `torch.autograd.grad` takes the gradients of some nodes for itself
        return sum(map(_will_accumulate, nodes))


def _will_accumulate(node: Node) -> bool:
    try:
        return _will_run(node)
    except RuntimeError as e:
        if "autograd.grad" in str(e):
            return False
        raise
