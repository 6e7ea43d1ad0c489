"""One unit in one backward: how many of its gradients are still to come, and whether it is complete.

Two records outlive a backward: a unit's links with autograd's graph, and what earlier steps have shown of it.

[Note: What completes a unit]
When backward reaches a unit, autograd's engine tells how many of the unit's parameters are in the running graph (as for
``torch.autograd.graph.register_multi_grad_hook``). The unit is complete when that many gradients have come. A parameter that
is not in the graph is unused here, and is not waited for. But on another rank it may be in the graph. So these units are idle
when they have all awaited gradients, and complete when backward reaches a unit before them, or recomputes one in a reentrant
checkpoint:

- a unit without any parameter in the graph: it is unused, or inside a reentrant checkpoint;
- a unit that backward will come to again, for another forward (``Way``): of a module called twice, of an earlier pass if
  losses of two passes were added, or of a unit that uses its tied parameters;
- a unit that lacks parameters and has units inside that backward has not reached: a reentrant checkpoint may run both.

The end of the graph task (the run of the autograd engine) that reached a unit first completes all others:
[Note: Nested backwards].

States of a unit that the backward has come to:

- TOUCHED         the backward has gathered it, ahead of time or for another unit.
- AWAITING        the backward has reached it. The last gradient completes it.
- IDLE            the same, but the graph task has no gradients for it, or no more. It is complete
                  when backward reaches a unit that ran before it in forward, or ends.
- COMPLETE        nothing more is waited for in this graph task. Some gradients may never have come.
- COMPLETE_EARLY  it was idle. The backward may reach another forward of it in the same graph task, which needs its values.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node

from flatshard._base.errors import InternalError
from flatshard._comm.progress import Label
from flatshard._handle.unit_gradients import Accumulators

# The id of the running graph task, -1 outside of backward; whether it will run a node. Private API: no other way.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node


class CompletionState(enum.IntEnum):
    TOUCHED = enum.auto()
    AWAITING = enum.auto()
    IDLE = enum.auto()
    COMPLETE = enum.auto()
    COMPLETE_EARLY = enum.auto()


TOUCHED, AWAITING, IDLE, COMPLETE, COMPLETE_EARLY = CompletionState

COMPLETION_TRANSITIONS: dict[tuple[CompletionState, str], CompletionState] = {
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
}
"""``reach``: a graph task reaches the unit, and has gradients for it or none."""

U = TypeVar("U")  # the unit


class ForwardRecord(Generic[U]):
    """A forward of a unit with a backward to come. It lives as long as the autograd graph, whose hooks refer to it."""

    __slots__ = ("__weakref__", "outer", "previous", "reached_in", "unit", "version")

    def __init__(self, unit: U, previous: ForwardRecord[U] | None, outer: Sequence[U], version: int) -> None:
        self.unit = unit
        self.previous = previous  # in its pass: what backward gathers next. A list of steps could leak instead
        self.outer = outer  # the units whose forwards enclosed this one, outermost first
        self.version = version  # of the parameters in this forward
        self.reached_in = -1  # the last graph task (run of the autograd engine) that reached this record


class AwaitedGradients:
    """The gradients that graph tasks have for a unit. It exists from when they reach the unit until the unit is complete."""

    __slots__ = ("counts_only_in", "expected", "finishes_previous_at", "pending", "some_frozen", "task")

    def __init__(self, task: int, some_frozen: bool) -> None:
        """``task``: the graph task that reaches the unit first, and completes it."""
        self.task = task
        self.some_frozen = some_frozen  # whether some parameters of the unit do not require grad
        self.expected: dict[int, int] = {}  # by each graph task that has reached the unit: how many gradients it has
        self.pending = 0  # gradients of all of them that are still to come
        # When `pending` falls to this number, that gradient ends the previous unit's reduction. 0: no gradient does.
        self.finishes_previous_at = 0
        # The graph task whose gradients are only counted: they stay where autograd puts them until all have come.
        self.counts_only_in: int | None = None

    def add(self, task: int, count: int, finishes_early: bool) -> None:
        """Await ``count`` gradients of ``task``. ``finishes_early``: see ``ReductionQueue``."""
        self.expected[task] = count
        self.pending = pending = self.pending + count
        self.finishes_previous_at = pending - max(1, pending // 6) if finishes_early and pending else 0

    def count_other(self) -> bool:
        """Count the gradient of a stand-in. Return whether it is the last gradient of the unit."""
        self.pending -= 1
        return not self.pending and self.task == current_graph_task()


class UnitBackward(Generic[U]):
    """A unit's record in the running backward, from its gather on. Dropping it is the reset."""

    __slots__ = ("_label", "awaited", "completed_in", "lacks_some", "last_forward", "open_forwards", "state")

    def __init__(self, label: Label) -> None:
        """``label``: of the unit."""
        self._label = label
        self.state = TOUCHED
        self.awaited: AwaitedGradients | None = None  # while the unit is AWAITING or IDLE
        self.completed_in: int | None = None  # the graph task that last completed the unit
        self.lacks_some = False  # whether its graph lacks parameters: they are unused, or recomputed later
        self.last_forward: ForwardRecord[U] | None = None  # the last of its forwards that the backward has reached
        # Forwards reached and, where inputs are watched, not left yet. None before the first.
        self.open_forwards: int | None = None

    @property
    def is_reached(self) -> bool:
        """Whether the backward has reached the unit, beyond gathering it."""
        return self.state > TOUCHED

    def reach(
        self, task: int, accumulators: Accumulators, stand_ins: Collection[Node], finishes_early: bool
    ) -> AwaitedGradients:
        """Count the gradients of ``task``, the running graph task, when it reaches the unit for the first time.

        Args:
            accumulators: of the unit's trainable parameters.
            stand_ins: see ``UnitGraph``.
            finishes_early: see ``ReductionQueue``.
        """
        nodes = accumulators.nodes
        try:
            of_params, others = sum(map(_will_run, nodes)), sum(map(_will_run, stand_ins))
        except RuntimeError:
            of_params, others = how_many_run(nodes), how_many_run(stand_ins)
        self.move("reach with gradients" if of_params or others else "reach with none")
        if of_params or not others:
            self.lacks_some |= of_params < len(nodes)
        if (awaited := self.awaited) is None:
            awaited = self.awaited = AwaitedGradients(task, not accumulators.are_all)
        awaited.add(task, of_params + others, finishes_early)
        return awaited

    def complete(self, early: bool = False) -> bool:
        """Note that all gradients have come, or that no more are waited for. Return whether any were expected.

        Args:
            early: the backward may reach another forward of the unit in the same graph task.
        """
        self.move("complete early" if early else "complete")
        awaited, self.awaited = self.awaited, None
        assert awaited is not None
        self.completed_in = awaited.task
        return any(awaited.expected.values())

    def move(self, event: str) -> None:
        """Change the state by an event of the table."""
        state = COMPLETION_TRANSITIONS.get((self.state, event))
        if state is None:
            raise InternalError(f"cannot {event} unit {self._label.unit!r} in a backward while it is {self.state.name}")
        self.state = state


class Way(Generic[U]):
    """An autograd node that made an output, by which backward comes to a forward. It lives as long as the node.

    It holds the nodes after that one. To hold the node itself would be a cycle, in which the graph would live on.
    """

    __slots__ = ("__weakref__", "after", "record")

    def __init__(self, record: ForwardRecord[U], node: Node) -> None:
        self.record, self.after = record, node.next_functions


class UnitGraph(Generic[U]):
    """The links between one unit and autograd's graph, and the unit's record in the running backward.

    The hooks of parameters refer to this. They live as long as autograd's nodes, where Python's garbage collector finds no
    cycle, so they must not refer to the unit.
    """

    __slots__ = ("now", "stand_ins", "ways")

    def __init__(self) -> None:
        self.now: UnitBackward[U] | None = None  # None if no backward under way has gathered or reached the unit
        self.ways: list[weakref.ref[Way[U]]] = []  # to forwards whose graphs are alive
        # Extra leaves that stand for the parameters where a rank passes the unit by. Their gradients count, too.
        self.stand_ins: list[Node] = []

    def add_way(self, way: Way[U]) -> None:
        """Record that backward may come by ``way`` to a forward of the unit, or of another that needs its parameters."""
        self.ways.append(weakref.ref(way, self.ways.remove))


class UnitHistory(Generic[U]):
    """Facts about a unit from earlier steps. It gets a new record when it is copied, or moves to other ranks."""

    def __init__(self) -> None:
        self.last_order: list[nn.Module] = []  # of the last pass in which the unit was outermost: see `Pass`
        self.changes_in_passes = False  # between a gather and a use in one: [Note: Gathered before it changes]
        self.leaves_out = False  # whether a graph ever lacked some of the unit's parameters
        self.was_kept_unsharded = False  # `Backward.keeps_unsharded` of the last backward that has reached it
        # Forwards with a graph. Only units with static buffers list them.
        self.live_forwards: weakref.WeakSet[ForwardRecord[U]] = weakref.WeakSet()
        # Forwards whose outputs are unsharded parameters, or hide tensors that use them. The parameters stay until backward
        # has reached these forwards.
        self.leaks: weakref.WeakSet[ForwardRecord[U]] | None = None

    def add_leak(self, record: ForwardRecord[U]) -> None:
        """Record that outputs of a forward are the unsharded parameters, or views of them."""
        self.leaks = weakref.WeakSet() if self.leaks is None else self.leaks
        self.leaks.add(record)

    def drop_leaks(self, since: int) -> None:
        """Drop the leaks whose graphs are gone: backward has reached them in graph task ``since`` or later."""
        if self.leaks:
            self.leaks -= {record for record in self.leaks if record.reached_in >= since}


def gradient_hook(
    graph: UnitGraph[Any],
    receive: Callable[[int], AwaitedGradients | None],
    finish_previous: Callable[[], object],
    complete: Callable[[], object],
) -> Callable[[torch.Tensor], None]:
    """Return the hook that counts the gradients of one parameter.

    Args:
        receive: called with the running graph task at its first gradient, and where more than counting is to be done. Returns
            what the unit awaits, or None if this gradient does not count.
        finish_previous: finishes the reduction of the previous unit, when enough gradients have come.
        complete: called when all gradients of the unit have come.
    """

    # This runs for every parameter in every step, so it does little.
    def on_gradient(param: torch.Tensor) -> None:
        """Count the gradient that autograd has accumulated, and leave it there."""
        now, task = graph.now, current_graph_task()
        awaited = None if now is None else now.awaited
        # A frozen parameter that still required grad in its forward has a hook call, but no gradient.
        if (
            awaited is None or awaited.counts_only_in != task or (awaited.some_frozen and not param.requires_grad)
        ) and (awaited := receive(task)) is None:
            return
        awaited.pending = pending = awaited.pending - 1
        if pending > awaited.finishes_previous_at:
            return
        if pending > 0:
            awaited.finishes_previous_at = 0
            finish_previous()
        elif not pending and awaited.task == task:
            complete()

    return on_gradient


def how_many_run(nodes: Collection[Any]) -> int:
    """Return how many of ``nodes`` the running graph task runs, or has run."""
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
