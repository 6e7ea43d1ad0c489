"""The facts: units, their forwards and backwards under way, and what all units on one process group and device share.

A unit is stored on its module. What is shared (``Context``) is the running forwards, the backward, and the order of
reductions. It is shared per process group, not per root. So several models issue their collectives in one order, prefetching
works across units that were sharded by separate calls, and no unit needs to know which one is the root.

Collectives match by their order, so what gathers, reduces or frees follows from facts that all ranks share. Facts that may
differ say so: "Local to this rank". Lines that read one where a collective may follow say why ranks agree all the same.

The verbs are in other files: forwards begin and end in hooks.py, units are gathered in gathering.py, and backward.py runs a
backward. To drop a record is the reset: ``UnitBackward`` and ``Backward`` at the end of a backward, ``Pass`` and ``Ahead`` at
the end of a pass.

States of a unit that the backward has come to (``CompletionState``):

- TOUCHED         the backward has gathered the unit, and has not reached it.
- AWAITING        the backward has reached it, and awaits gradients. The last one completes it.
- IDLE            the backward has reached it, and the graph task that is to complete it awaits no gradient. It is complete
                  when backward reaches a unit that ran before it in forward, or ends.
- COMPLETE        nothing more is waited for in this graph task. Some gradients may never have come.
- COMPLETE_EARLY  it was idle. The backward may reach another forward of it in the same graph task, which needs its values.
"""

from __future__ import annotations

import copy
import enum
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from flatshard._base.names import UNIT_KEY
from flatshard._comm.progress import Progress
from flatshard._comm.runtime import Runtime
from flatshard._composable.claims import BUFFER, Claim, Claims, Reason
from flatshard._composable.module_tree import ModuleTree, called_modules
from flatshard._composable.outputs import Copied, next_node
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.lifetime import BY_USER
from flatshard._handle.registrations import SHARDED_PARAMS, Shown

T = TypeVar("T")

_id, _referent = operator.attrgetter("id"), weakref.ref.__call__
# The id of the running graph task, -1 outside of backward. Private API: no other way.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id

# The unit that owns a sharded or unsharded parameter, by the parameter's id. The unit keeps both alive, so ids are unique.
_owners: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
# The units of copies that modules show in place of their parameters. The copies may go before the unit does.
_owners_of_copies: MutableMapping[nn.Parameter, weakref.ref[Unit]] = WeakIdKeyDictionary()
made_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()  # by their id, in order of creation


class CompletionState(enum.IntEnum):
    TOUCHED = enum.auto()
    AWAITING = enum.auto()
    IDLE = enum.auto()
    COMPLETE = enum.auto()
    COMPLETE_EARLY = enum.auto()


TOUCHED, AWAITING, IDLE, COMPLETE, COMPLETE_EARLY = CompletionState


class Unit:
    """A module, or several, whose parameters are gathered together. Each call finds anew which unit is the outermost."""

    def __init__(
        self, module: nn.Module, handle: FlatParamHandle, context: Context, runtime: Runtime, config: UnitConfig
    ) -> None:
        self.module = module  # or a `ModuleGroup`
        self.tree = ModuleTree()  # that of the outermost call of `fully_shard`
        self.handle = handle
        self.context = context
        self.runtime = runtime  # of the ranks that the call of `fully_shard` has sharded over
        self.config = config
        # Units to unshard before this unit's forward: itself and the owners of tied parameters.
        self.needs: tuple[Unit, ...] = (self,)
        # Units to gather while this unit computes (see `configure`), or None for the recorded order.
        self.forward_targets: Iterable[Unit] | None = None
        self.backward_targets: Iterable[Unit] | None = None
        self.features: Sequence[object] = ()  # that take part in its forwards; `UnitHooks` sets them
        self.claims = Claims(config.claims)  # claims.py, [Note: Claims]
        self.graph, self.history = UnitGraph(), UnitHistory()
        self._own_parameters()

    def _own_parameters(self) -> None:
        made_units[id(self)] = self
        for flat in self.handle.flats:
            _owners.update((id(p), self) for p in (*flat.params, *flat.unsharded.params))

    def move(self, context: Context, runtime: Runtime) -> None:
        """Follow its handle to other ranks. Forget earlier passes, as ranks may be new."""
        self.context, self.runtime = context, runtime
        self.claims, self.history = Claims(self.config.claims), UnitHistory()
        self._own_parameters()

    def feature(self, kind: type[T]) -> T | None:
        """Return its feature of class ``kind``, or None."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def show(self, unclaimed: Shown = SHARDED_PARAMS) -> None:
        """Register the parameters that the claims ask for, or ``unclaimed`` if none asks for any."""
        for claim in reversed(self.claims):
            if claim.shows is not None:
                unclaimed = claim.shows
                break
        self.handle.registrations.show(unclaimed)

    def release(self, reason: Reason, forward_graph: object = None, lends: bool = False) -> None:
        """Show what the claims ask for, and free the unsharded parameters if no need refuses. claims.py, [Note: Freeing]

        ``forward_graph``, ``lends``: see ``FlatParamHandle.reshard``. Earlier forwards may have outputs that alias the
        parameters, too.
        """
        if reason.in_backward and (backward := self.context.backward) is not None and backward.keeps_unsharded:
            return
        claims, refused_from = self.claims, reason.refused_from
        self.show() if claims else self.handle.registrations.show(SHARDED_PARAMS)
        if claims and refused_from is not None and claims.need >= refused_from:
            return
        if (history := self.history).leaks and refused_from is BUFFER:
            lends = lends or history.leak_version == self.handle.version()
        self.handle.reshard(forward_graph, lends, reason.changes_are_seen)

    def lend(self) -> None:
        """Count as sharded where other ranks release the unit in backward, but leave everything as it is until a release.

        The rest of this rank's graph may read the values, or recompute with them. A gather writes the same values again.
        """
        keeps = self.context.backward is not None and self.context.backward.keeps_unsharded
        if not keeps and not (self.claims and self.claims.need >= BUFFER):
            self.handle.reshard(lends=True)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Rename the unit and its parameters by ``names``, of all modules in a module further out that was sharded."""
        self.handle.rename(", ".join(names[m] for m in called_modules(self.module) if m in names), names)

    @property
    def fqn(self) -> str:
        """The module's FQN, from the outermost module given to ``fully_shard``; a group's are joined: ``"norm, head"``."""
        return self.handle.ranks.label.unit

    @property
    def kind(self) -> str:
        """The name of the module's class; a group's are joined: ``"LayerNorm, Linear"``."""
        return ", ".join(type(m).__name__ for m in called_modules(self.module))

    @property
    def last_gradient_frees(self) -> bool:
        """Whether the values are not needed after all gradients have come. claims.py, [Note: Freeing]

        Local to this rank: see `UnitHistory.leaves_out`. If it is True on some ranks only, others lend the memory, and free
        it when backward has left the unit's first forward. All gather the unit again if it is recomputed.
        """
        lacks_some = self.history.leaves_out or ((status := self.graph.status) is not None and status.lacks_some)
        return self.handle.gradients.accumulators.are_all and not lacks_some

    @property
    def is_outdated(self) -> bool:
        """Whether the unit must be gathered again before use. Buffers of earlier passes count: C++ code may have changed the
        shards unnoticed.
        """
        is_in_step = self.context.forwards or self.context.backward is not None
        return not self.is_current(self.context.latest_pass.id if is_in_step else BY_USER)

    def is_current(self, by: int) -> bool:
        """Return whether the pass ``by``, or ``BY_USER``, may use the unsharded parameters as they are."""
        return self.handle.is_current(by) or (self.claims.keep_buffer and self.handle.is_current())

    @property
    def is_unsharded_by_user(self) -> bool:
        """Whether the user called ``unshard``, and no forward has used the parameters since."""
        return (stamp := self.handle.stamp) is not None and stamp.by == BY_USER

    def __repr__(self) -> str:
        return f"Unit({self.fqn or '<root>'!r}, {self.kind}, {self.handle!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        module = copy.deepcopy(self.module, memo)  # its hooks copy the unit, if they are not being copied already
        if (copied := memo.get(id(self))) is not None:
            found: Unit = copied
            return found
        result = object.__new__(Unit)
        memo[id(self)] = result
        result.__dict__.update(self.__dict__)
        result.features, result.claims = (), Claims(self.config.claims)
        result.graph, result.history = UnitGraph(), UnitHistory()
        result.forward_targets = result.backward_targets = None
        result.module = module
        result.tree = copy.deepcopy(self.tree, memo)
        result.handle = copy.deepcopy(self.handle, memo)
        result.needs = tuple(copy.deepcopy(unit, memo) for unit in self.needs)
        result._own_parameters()
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a sharded module (unit {self.fqn or '<root>'!r}) cannot be pickled, because it has process groups and hooks. "
            "Save it by flatshard.save_checkpoint(path, {'model': module}), or whole tensors by "
            "torch.save(flatshard.checkpoint.full_state_dict(module), ...)"
        )


class Forward:
    """A running forward of a unit."""

    __slots__ = (
        "__weakref__", "claims", "copied", "first_node", "frame", "gathers", "in_backward", "instead", "module", "recorded",
        "unit",
    )  # fmt: skip

    def __init__(self, unit: Unit, module: nn.Module, frame: FrameType, in_backward: bool) -> None:
        self.unit = unit
        self.module = module  # the unit's, or the one of its group that runs
        self.frame = frame  # alive as long as the forward is
        self.first_node = next_node()  # of autograd: the number of the first that it may make
        self.in_backward = in_backward  # recomputed by activation checkpointing
        self.instead: Callable[[Any], object] | None = None  # if a feature has it: what to call at the end, and no more
        self.gathers = True  # False: a feature shows other parameters, so nothing is gathered
        self.recorded: ForwardRecord | None = None  # set at its end, if backward may reach it
        self.copied: Sequence[Copied] = ()  # the user's containers that the module got copies of, and may change
        self.claims = [(needed, Claim()) for needed in unit.needs]  # on the units that it needs, itself first

    @property
    def claim(self) -> Claim:
        """The claim on ``unit`` itself."""
        return self.claims[0][1]


@dataclass(eq=False, slots=True, weakref_slot=True)
class ForwardRecord:
    """A forward of a unit with a backward to come. It lives as long as the autograd graph, whose hooks refer to it."""

    unit: Unit
    previous: ForwardRecord | None  # in its pass. A list of steps could leak instead
    previous_other: ForwardRecord | None  # the last one before it of another unit: what backward gathers next
    outer: Sequence[Unit]  # the units whose forwards enclosed this one, outermost first
    version: int  # of the parameters in this forward
    # The last graph task (run of the autograd engine) that reached this record. Local to this rank: autograd reaches a unit
    # and the last one inside it in either order.
    reached_in: int = -1
    leaks: bool = False  # whether it counts in `UnitHistory.leaks`


@dataclass(eq=False, slots=True)
class AwaitedGradients:
    """The gradients that graph tasks have for a unit. It exists from when they reach the unit until the unit is complete.

    Another graph task that reaches the unit meanwhile replaces it. The hooks of parameters count down.
    Local to this rank: its graph may lack parameters that those of other ranks have.
    """

    task: int  # the graph task that has reached the unit first, and completes it
    some_frozen: bool  # whether some parameters of the unit do not require grad
    expected: dict[int, int]  # by each graph task that has reached the unit: how many gradients it has
    pending: int  # gradients of all of them that are still to come
    # The number of pending gradients at which the previous unit's reduction is to end, or 0 if none is to end any more.
    ends_previous_at: int
    # The graph task whose gradients are only counted, if there is one: they stay with autograd until all have come.
    counts_only_in: int | None = None


@dataclass(eq=False, slots=True)
class UnitBackward:
    """A unit's record in the running backward, from its gather on. Dropping it is the reset.

    Local to this rank: when the unit completes. In which order units are reduced is not.
    """

    completion: CompletionState = TOUCHED
    awaited: AwaitedGradients | None = None  # while the unit is AWAITING or IDLE
    completed_in: int | None = None  # the graph task that last completed the unit
    # Whether its graph lacks parameters: they are unused, or recomputed later. Local to this rank: its data decide.
    lacks_some: bool = False
    last_forward: ForwardRecord | None = None  # the last of its forwards that the backward has reached
    # Counts the forwards that were reached. Leaving a forward with watched inputs subtracts one. None before the first.
    open_forwards: int | None = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Way:
    """An autograd node that made an output, by which backward comes to a forward. It lives as long as the node.

    It holds the nodes after that one. To hold the node itself would be a cycle, in which the graph would live on.
    """

    record: ForwardRecord
    after: tuple[tuple[Node | None, int], ...]


class UnitGraph:
    """The links between one unit and autograd's graph, and the unit's record in the running backward.

    The hooks of parameters refer to this. They live as long as autograd's nodes, where Python's garbage collector finds no
    cycle, so they must not refer to the unit.
    """

    __slots__ = ("stand_ins", "status", "ways")

    def __init__(self) -> None:
        self.status: UnitBackward | None = None  # None if no backward under way has gathered or reached the unit
        # By which backward may come to a forward of the unit, or of another that needs its parameters. Local to this rank:
        # the user's references and garbage collection decide which graphs are alive.
        self.ways: dict[weakref.ref[Way], None] = {}
        # Extra leaves that stand for the parameters where a rank passes the unit by. Their gradients count, too.
        # Local to this rank: others may run the unit.
        self.stand_ins: list[Node] = []


class UnitHistory:
    """Facts about a unit from earlier steps. It gets a new record when it is copied, or moves to other ranks."""

    def __init__(self) -> None:
        self.turn = 0  # its place in the order of reductions: see reduction_queue.py
        self.last_order: list[nn.Module] = []  # of the last pass in which the unit was outermost: see `Pass`
        self.changes_in_passes = False  # between a gather and a use in one: [Note: Gathered before it changes]
        # Whether the graph of a backward with gradients ever lacked some of the unit's parameters. Local to this rank: see
        # `UnitBackward.lacks_some`.
        self.leaves_out = False
        self.was_kept_unsharded = False  # `Backward.keeps_unsharded` of the last backward that has reached it
        # Forwards with a graph. Only units with static buffers list them. Local to this rank: garbage collection decides.
        self.live_forwards: weakref.WeakSet[ForwardRecord] = weakref.WeakSet()
        # Leaks: forwards whose outputs are unsharded parameters, or views of them. The parameters stay until backward has
        # reached these forwards, or the parameters change. Whether their graphs are alive does not count: ranks differ in it.
        self.leaks = 0
        self.leak_version = -1  # of the parameters in these forwards

    def add_leak(self, record: ForwardRecord) -> None:
        """Record that outputs of a forward are the unsharded parameters, or views of them."""
        if record.version != self.leak_version:
            self.leaks, self.leak_version = 0, record.version
        self.leaks += 1
        record.leaks = True

    def drop_leak(self, record: ForwardRecord) -> None:
        """Drop the leak of a forward, if it is one: backward has reached it, and its graph is gone."""
        if record.leaks and record.version == self.leak_version:
            self.leaks -= 1
        record.leaks = False


@dataclass(eq=False, slots=True)
class Pass:
    """A call of an outermost unit, outside of backward: what has run in it. A new record replaces it at its end.

    The order of the last pass is a hint for prefetching, not a rule. If the order changes, one all-gather comes too early or
    too late, and the next pass has the new order. Backward needs no such record: see ``ForwardRecord.previous_other``.
    """

    id: int  # counts the passes of a context
    before: list[nn.Module]  # the order of the last pass of the same outermost unit
    order: list[nn.Module] = field(default_factory=list)  # the modules of units that have begun to run
    latest: ForwardRecord | None = None  # of the forward that ended last


@dataclass(eq=False, slots=True)
class Ahead:
    """The units that a context has gathered ahead of their use: see gathering.py. The end of a pass drops it."""

    units: dict[Unit, None] = field(default_factory=dict)  # gathered ahead, in use or not
    kept: dict[Unit, None] = field(default_factory=dict)  # unsharded, for another module of their group


@dataclass(eq=False, slots=True, weakref_slot=True)
class Backward:
    """A running backward on one process group, from the first unit that it reaches until it ends or fails."""

    context: Context
    task: int  # the outermost graph task; ids increase
    retains_graph: bool
    # The callbacks of the graph tasks under way, outermost first. They die when the engine drops the task.
    tasks: dict[int, weakref.ref[Callable[[], None]]] = field(default_factory=dict)
    # Graph tasks with gradients for at least one unit. Local to this rank: its graph may have no parameter at all.
    bringing: set[int] = field(default_factory=set)
    touched: list[Unit] = field(default_factory=list)  # gathered or reached, in the order of the first touch
    # In the state IDLE: each forward that is reached asks for them. Local to this rank, as `ready` is: see `UnitBackward`.
    idle: dict[Unit, None] = field(default_factory=dict)
    # Complete units in the queue. Local to this rank: reductions wait for their turns.
    ready: set[Unit] = field(default_factory=set)
    leaking: list[ForwardRecord] = field(default_factory=list)  # reached, with outputs that alias parameters
    # It builds a graph (create_graph), or retains a graph that was built so (retain_graph). A backward of that graph
    # runs none of flatshard's hooks, so units stay unsharded.
    keeps_unsharded: bool = False

    every: ClassVar[weakref.WeakSet[Backward]] = weakref.WeakSet()
    """The backwards of all process groups. The engine keeps them alive until their graph tasks have ended."""

    @property
    def has_failed(self) -> bool:
        """Whether a graph task failed with an exception. Other threads ask, too.

        Local to this rank: the other ranks wait for its collectives, and raise. All must begin anew.
        """
        return None in [*map(_referent, [*self.tasks.values()])]


class ReductionQueue:
    """The units of a context that ran forward with gradients, until their reduction has been started.

    It outlives backwards. reduction_queue.py has its verbs, and says why the order is the same on all ranks.
    """

    every: ClassVar[weakref.WeakSet[ReductionQueue]] = weakref.WeakSet()
    """The queues of all contexts."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.finishes_early = runtime.streams is None  # [Note: Reductions in flight]
        # By their turns; they are reduced from the end. True: the unit was put back, or left over, after an earlier backward
        # had reduced this or later turns. Weak references: a forward without a backward must not keep its model alive.
        self.open: OrderedDict[weakref.ref[Unit], bool] = OrderedDict()
        self.turns = 0  # the last one that a unit got
        self.reducing: Unit | None = None  # its reduction is in flight
        self.reduced: list[Unit] = []  # they get `.grad` at the end of the backward: see `_finish_reduction`
        self.deferred: dict[Unit, None] = {}  # they get it when the user says so: [Note: Deferred gradients]
        self.drops = 0  # how often gradients of deferred units have been dropped
        self.every.add(self)

    def units(self) -> Iterator[Unit]:
        """Return an iterator over its live units, in the order of their reductions."""
        return (unit for ref in reversed(self.open) if (unit := ref()) is not None)

    def withholding(self) -> Iterable[Unit]:
        """Return the units whose gradients of earlier backwards are not in ``.grad`` yet."""
        return (u for u in dict.fromkeys([*self.deferred, *self.units()]) if u.handle.gradients.withholds)

    @property
    def is_holding(self) -> bool:
        """Whether some units hold gradients of earlier backwards. Such a unit stays in the queue until it is reduced."""
        return any(unit.handle.gradients.is_unreduced for unit in self.units())

    @property
    def will_free(self) -> bool:
        """Whether the next ``finish_previous`` ends a reduction, and frees its input."""
        return self.reducing is not None and not self.reducing.handle.has_replicas


class Context:
    """The shared state of units on connected process groups. See ``context_over``."""

    every: ClassVar[weakref.WeakSet[Context]] = weakref.WeakSet()

    passes: ClassVar[list[weakref.ref[Context]]] = []
    """The contexts in a pass, outermost first. More than one: units on other process groups run inside a unit."""

    checks: ClassVar[list[Callable[[Unit], bool]]] = []
    """Called with the outermost unit before a pass starts. A check is removed when it returns False."""

    def __init__(self, runtime: Runtime, progresses: Iterable[Progress]) -> None:
        """``progresses``: of the process groups, which are told how far this rank has come."""
        self.runtime = runtime
        self.backward: Backward | None = None  # that is running, or has failed
        self.backward_id = 0  # counts backwards that have reached a unit
        self.latest_pass = Pass(0, [])  # the running one; an empty record after its end
        self.forwards: list[Forward] = []  # running now, outermost first
        self.ahead = Ahead()
        self._progresses = dict.fromkeys(progresses)  # each once
        self.publish_place()
        self.reductions = ReductionQueue(runtime)
        self.every.add(self)

    def report_to(self, progresses: Iterable[Progress]) -> None:
        """Tell these process groups, too, how far this rank has come."""
        self._progresses.update(dict.fromkeys(progresses))
        self.publish_place()

    def take_over(self, other: Context) -> list[Unit]:
        """Move the units of ``other`` to this context, and return them. Raise ``RuntimeError`` within a step."""
        for context in (self, other):
            if context.forwards or context.backward is not None or context.reductions.deferred:
                raise RuntimeError(
                    "fully_shard was called in a step of modules whose process group it connects with another: they are in "
                    "a forward or a backward, or have deferred gradients. Call it between two steps"
                )
        units = [unit for unit in made_units.values() if unit.context is other]
        for unit in units:
            unit.context = self
        self.latest_pass = max(self.latest_pass, other.latest_pass, key=_id)
        self.report_to(other._progresses)
        return units

    def publish_place(self, in_forward: bool = False) -> None:
        """Tell the process groups how far this rank has come, for errors and the watch. Called whenever that changes.

        ``in_forward``: whether a forward is under way.
        """
        in_backward = self.backward is not None and not self.backward.has_failed
        inside = "backward" if in_backward else "forward" if in_forward else ""
        for progress in self._progresses:
            progress.place = self.latest_pass.id, self.backward_id, inside

    def begin_pass(self, unit: Unit) -> None:
        """Begin a pass, in which ``unit`` is the outermost."""
        self.passes[:] = [*(ref for ref in self.passes if (c := ref()) and c.forwards), weakref.ref(self)]
        self.check(unit)
        self.latest_pass = begun = Pass(self.latest_pass.id + 1, unit.history.last_order)
        unit.history.last_order = begun.order
        self.publish_place(in_forward=True)

    def check(self, unit: Unit) -> None:
        """Run the checks before the parameters of ``unit``, the outermost, are used."""
        if self.checks:
            self.checks[:] = [check for check in self.checks if check(unit)]

    def end_pass(self) -> None:
        """End the pass. Drops all references to the model, so that it can be freed."""
        self.passes[:] = [ref for ref in self.passes if ref() is not self]
        self.latest_pass = Pass(self.latest_pass.id, [])
        self.publish_place()

    def drop_ahead(self) -> Ahead:
        """Drop and return the record of what was gathered ahead."""
        dropped, self.ahead = self.ahead, Ahead()
        return dropped

    def set_backward(self, backward: Backward | None) -> None:
        """Record that ``backward`` has reached its first unit, or with None, that it has ended or is given up."""
        self.backward = backward
        self.backward_id += backward is not None
        self.publish_place(bool(self.forwards))


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of ``module``, alone or in a group, or None."""
    found: Unit | None = module.__dict__.get(UNIT_KEY)
    return found


def owner_of(param: nn.Parameter) -> Unit | None:
    """Return the unit that owns ``param``, or None. Modules may show a shard, the full parameter, or a copy."""
    if (found := _owners.get(id(param))) is not None:
        return found
    of_copy = _owners_of_copies.get(param) if _owners_of_copies else None
    return None if of_copy is None else of_copy()


def own_copies(unit: Unit, copies: Iterable[nn.Parameter]) -> None:
    """Record that ``copies`` are of parameters of ``unit``, whose modules may show them."""
    _owners_of_copies.update((copy, weakref.ref(unit)) for copy in copies)
