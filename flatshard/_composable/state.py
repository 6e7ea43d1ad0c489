"""Units, their forwards and backwards under way, and what all units on one process group and device share.

A unit is stored on its module. What is shared (``Context``) is the running forwards, the backward, and the order of
reductions. It is shared per process group, not per root. So several models issue their collectives in one order, prefetching
works across units that were sharded by separate calls, and no unit needs to know which one is the root.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from flatshard._base import frames
from flatshard._base.names import UNIT_KEY
from flatshard._comm.progress import Progress
from flatshard._comm.runtime import Runtime
from flatshard._composable.claims import BUFFER, NOTHING, Claim, Claims, Need, Reason
from flatshard._composable.module_tree import ModuleTree, called_modules
from flatshard._composable.outputs import Copied, next_node
from flatshard._composable.reduction_queue import ReductionQueue
from flatshard._composable.unit_backward import ForwardRecord, UnitGraph, UnitHistory, current_graph_task
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.lifetime import BY_USER, ParamState
from flatshard._handle.registrations import SHARDED, Shown

T = TypeVar("T")

_forwards, _id, _unit = (operator.attrgetter(name) for name in ("forwards", "id", "unit"))

# The unit that owns a sharded or unsharded parameter, by the parameter's id. The unit keeps both alive, so ids are unique.
_owners: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
# The units of copies that modules show in place of their parameters. The copies may go before the unit does.
_owners_of_copies: MutableMapping[nn.Parameter, weakref.ref[Unit]] = WeakIdKeyDictionary()
made_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()  # by their id, in order of creation


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
        self.graph: UnitGraph[Unit] = UnitGraph()
        self.history: UnitHistory[Unit] = UnitHistory()
        self.turn = 0  # its place in the order of reductions, which `ReductionQueue` gives
        self._own_parameters()

    def _own_parameters(self) -> None:
        made_units[id(self)] = self
        for flat in self.handle.flats:
            _owners.update((id(p), self) for p in (*flat.params, *flat.unsharded.params))
        for ranks in self.handle.all_ranks:
            ranks.label.describe_by(self.handle)

    def move(self, context: Context, runtime: Runtime) -> None:
        """Follow its handle to other ranks. Forget earlier passes, as ranks may be new."""
        self.context, self.runtime = context, runtime
        self.claims, self.history, self.turn = Claims(self.config.claims), UnitHistory(), 0
        self._own_parameters()

    def feature(self, kind: type[T]) -> T | None:
        """Return its feature of class ``kind``, or None."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def show(self, unclaimed: Shown = SHARDED) -> None:
        """Register the parameters that the claims ask for, or ``unclaimed`` if none asks for any."""
        for claim in reversed(self.claims):
            if claim.shows is not None:
                unclaimed = claim.shows
                break
        self.handle.registrations.show(unclaimed)

    def release(self, reason: Reason, forward_graph: object = None) -> None:
        """Show what the claims ask for, and free the unsharded parameters if no need refuses. claims.py, [Note: Freeing]

        ``forward_graph``: see ``FlatParamHandle.reshard``.
        """
        if reason.in_backward and (backward := self.context.backward) is not None and backward.keeps_unsharded:
            return
        is_needed = self.claims or self.history.leaks
        self.show() if self.claims else self.handle.registrations.show(SHARDED)
        if not is_needed or reason.refused_from is None or self.need < reason.refused_from:
            self.handle.reshard(forward_graph)

    @property
    def need(self) -> Need:
        """The greatest need of the unsharded buffer: of a claim, or of a graph with outputs that alias it (a leak)."""
        need = self.claims.need if self.claims else NOTHING
        return max(need, BUFFER) if self.history.leaks else need

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
    def is_done_with_gradients(self) -> bool:
        """Whether the values are not needed after all gradients have come. claims.py, [Note: Freeing]"""
        return self.handle.gradients.accumulators.are_all and not self.history.leaves_out

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
        result.features, result.claims, result.turn = (), Claims(self.config.claims), 0
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
        self.recorded: ForwardRecord[Unit] | None = None  # set at its end, if backward may reach it
        self.copied: Sequence[Copied] = ()  # the user's containers that the module got copies of, and may change
        self.claims = [(needed, Claim()) for needed in unit.needs]  # on the units that it needs, itself first

    @property
    def claim(self) -> Claim:
        """The claim on ``unit`` itself."""
        return self.claims[0][1]


class Pass:
    """A call of an outermost unit, outside of backward: what has run in it. A new record replaces it at its end.

    The order of the last pass is a hint for prefetching, not a rule. If the order changes, one all-gather comes too early or
    too late, and the next pass has the new order. Backward needs no such record: see ``ForwardRecord.previous``.
    """

    __slots__ = ("_before", "id", "latest", "order")

    def __init__(self, id: int, before: list[nn.Module]) -> None:
        """``id``: counts the passes of a context. ``before``: the order of the last pass of the same outermost unit."""
        self.id = id
        self._before = before
        self.order: list[nn.Module] = []  # the modules of units that have begun to run, outside of backward
        self.latest: ForwardRecord[Unit] | None = None  # of the forward that ended last

    def begin_module(self, module: nn.Module) -> nn.Module | None:
        """Record that ``module`` runs now. Return the module that followed it in the last pass, or None."""
        before, at = self._before, len(self.order)
        self.order.append(module)
        if at >= len(before) or before[at] is not module:
            if module not in before:
                return None
            at = before.index(module)
        return before[at + 1] if at + 1 < len(before) else None

    def has_run_in_part(self, modules: Collection[nn.Module]) -> bool:
        """Return whether some of ``modules`` have run and others have not. Counting starts anew when all have run."""
        to_come = set(modules)
        for module in self.order:
            to_come.discard(module)
            to_come = to_come or set(modules)
        return len(to_come) < len(modules)


class Prefetcher:
    """The units that a context has gathered ahead. A unit is in use once something has waited for its gather.

    [Note: Gathered before it changes]
    A module may change parameters of units inside it, in its own forward: a momentum encoder (MoCo, BYOL) does. A unit that
    was gathered ahead may have its shard read while such a write runs. The write cannot be made to wait: sharded parameters
    are plain tensors to torch (an optimizer would pay for a ``__torch_function__`` in every operation), so nothing tells
    when it is enqueued. And the current stream cannot wait for the read after each prefetch: collectives read the shard
    until they end, so there would be no prefetch left. What the gather has read does no harm, as the version of the shards
    has changed when the unit is used, and it is gathered again. From then on the unit is not gathered ahead in a forward any
    more, so no read is in flight while it is written, and nothing is gathered twice. Versions are the same on all ranks, so
    all do the same.
    """

    def __init__(self) -> None:
        self._ahead: dict[Unit, None] = {}  # gathered ahead, in use or not
        self._kept: dict[Unit, None] = {}  # unsharded, for another module of their group

    def prefetch_following(self, unit: Unit, following: nn.Module | None, pass_id: int) -> None:
        """Gather the units that the user chose for a forward of ``unit``, or else that of ``following``, if there is one."""
        targets = unit.forward_targets
        if targets is None:
            if following is None or not unit.config.forward_prefetch or (next_unit := unit_of(following)) is None:
                return
            targets = (next_unit,)
        for target in targets:
            self.prefetch(target, unit.config.prefetch_limit_bytes, pass_id)

    def prefetch(self, unit: Unit, limit: int | None, pass_id: int, for_backward: bool = False) -> None:
        """Gather ``unit`` ahead, unless more than ``limit`` bytes would be ahead then. It is freed if it is not used.

        ``for_backward``: for a backward that needs the values of its forward.
        """
        if limit is not None and self._bytes_with(unit) > limit:
            return
        for needed in unit.needs:
            handle, claims = needed.handle, needed.claims
            if claims and not for_backward and not claims.in_use and needed.is_outdated:
                needed.release(Reason.OUTDATED)
            if handle.stamp is not None or (handle.has_static_buffers and handle.memory.is_blocked):
                continue
            if claims and claims.show_copies:
                continue
            if not for_backward:
                if needed.history.changes_in_passes:
                    continue
                handle.check_parameters()
            handle.unshard(pass_id, for_backward)
            self._ahead[needed] = None

    def _bytes_with(self, unit: Unit) -> int:
        """Return the bytes of unsharded parameters that are not in use yet, including those of ``unit``."""
        ahead = {*self._unused(), *(needed for needed in unit.needs if needed.handle.is_sharded)}
        return sum(u.handle.memory.nbytes for u in ahead)

    def _unused(self) -> list[Unit]:
        """Return the units that are unsharded, and not in use yet."""
        unused = [u for u in self._ahead if u.handle.state is ParamState.UNSHARDING]
        return [*unused, *(u for u in self._kept if not u.handle.is_sharded)]

    def keep_for_next(self, unit: Unit) -> None:
        """Keep ``unit`` unsharded for another module of its group, as if it had been gathered ahead for it."""
        self._kept[unit] = None

    def stop_keeping(self, unit: Unit) -> None:
        """Take back ``keep_for_next``, as the next module has run."""
        self._kept.pop(unit, None)

    def free_unused(self) -> None:
        """Free the units that are not in use, and forget all."""
        unused = self._unused()
        self.clear()
        for unit in unused:
            unit.release(Reason.NOT_USED)

    def clear(self) -> None:
        """Forget all units, which are freed elsewhere."""
        self._ahead.clear()
        self._kept.clear()


class RunningBackward(Protocol):
    """A backward, as far as its context knows it: see ``Backward``, which knows units."""

    keeps_unsharded: bool  # its graph outlives it, so units stay unsharded

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended it."""

    def drop(self) -> None:
        """Drop its gradients and free everything, after an exception."""


class Context:
    """The shared state of units on connected process groups. See ``context_over``."""

    _every: ClassVar[weakref.WeakSet[Context]] = weakref.WeakSet()

    passes: ClassVar[list[weakref.ref[Context]]] = []
    """The contexts in a pass, outermost first. More than one: units on other process groups run inside a unit."""

    checks: ClassVar[list[Callable[[Unit], bool]]] = []
    """Called with the outermost unit before a pass starts. A check is removed when it returns False."""

    def __init__(self, runtime: Runtime, progresses: Iterable[Progress]) -> None:
        """``progresses``: of the process groups, which are told how far this rank has come."""
        self.runtime = runtime
        self.backward: RunningBackward | None = None  # that is running, or has failed
        self.backward_id = 0  # counts backwards that have reached a unit
        self.latest_pass = Pass(0, [])  # the running one; an empty record after its end
        self.forwards: list[Forward] = []  # running now, outermost first
        self.prefetcher = Prefetcher()
        self._progresses = dict.fromkeys(progresses)  # each once
        self.publish_place()
        self.reductions: ReductionQueue[Unit] = ReductionQueue(runtime)
        self._every.add(self)

    def report_to(self, progresses: Iterable[Progress]) -> None:
        """Tell these process groups, too, how far this rank has come."""
        self._progresses.update(dict.fromkeys(progresses))
        self.publish_place()

    def take_over(self, other: Context) -> None:
        """Move the units of ``other`` to this context. Raise ``RuntimeError`` within a step."""
        for context in (self, other):
            context.settle()
            if context.forwards or context.backward is not None or context.reductions.is_deferring:
                raise RuntimeError(
                    "fully_shard was called in a step of modules whose process group it connects with another: they are in "
                    "a forward or a backward, or have deferred gradients. Call it between two steps"
                )
        units = [unit for unit in made_units.values() if unit.context is other]
        self.reductions.take_over(other.reductions, units)
        for unit in units:
            unit.context = self
        self.latest_pass = max(self.latest_pass, other.latest_pass, key=_id)
        self.report_to(other._progresses)

    def publish_place(self, in_forward: bool = False) -> None:
        """Tell the process groups how far this rank has come, for errors and the watch. Called whenever that changes.

        ``in_forward``: whether a forward is under way.
        """
        in_backward = self.backward is not None and not self.backward.has_failed
        inside = "backward" if in_backward else "forward" if in_forward else ""
        for progress in self._progresses:
            progress.place = self.latest_pass.id, self.backward_id, inside

    # -- forwards ----------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit, module: nn.Module, in_backward: bool, frame: FrameType | None) -> Forward:
        """Begin a forward of ``module``, one of the ``unit``, from its pre-forward hook.

        ``frame``: one that is alive during the forward. None: that of the module's ``__call__``, found from the caller.

        Raises:
            RuntimeError: another thread is in a forward.
        """
        around = self.forwards[-1].frame if self.forwards and not in_backward else None
        if frame is None:
            frame, is_inside = frames.of_module_call(2, around)
        else:
            is_inside = around is not None and frames.is_inside(frame, around)
        if not in_backward and not is_inside:
            self.settle(frame)
            if not self.forwards:
                self._start_pass(unit, frame)
        forward = Forward(unit, module, frame, in_backward)
        for needed, claim in forward.claims:
            needed.claims.append(claim)
        self.forwards.append(forward)
        return forward

    def exit_forward(self, module: nn.Module, raised: bool = False) -> Forward | None:
        """End a forward of ``module``, and return it, or None if it never started (an earlier hook raised).

        ``raised``: it may have raised. Then a running forward of ``module`` may be another thread's.
        """
        try:
            last = self.forwards[-1]
        except IndexError:  # not asked first: forwards without a record may end on other threads
            return None
        is_elsewhere = raised and frames.runs(last.frame, elsewhere=True)
        if last.module is not module or is_elsewhere:
            return None
        self.forwards.pop()
        return last

    def record_forward(self, forward: Forward) -> ForwardRecord[Unit]:
        """Create the record of a forward that has just ended, for backward to reach."""
        unit, in_backward = forward.unit, forward.in_backward
        gathered = unit.handle.stamp
        assert gathered is not None  # a forward that makes a graph runs on unsharded parameters
        before = None if in_backward else self.latest_pass.latest
        record = ForwardRecord(unit, before, list(map(_unit, self.forwards)), gathered.version)
        forward.recorded = record
        if unit.handle.has_static_buffers:
            for needed in unit.needs:
                needed.history.live_forwards.add(record)
        if not in_backward:
            self.latest_pass.latest = record
        return record

    @property
    def is_running(self) -> bool:
        """Whether the caller is inside a forward or a backward. Interrupted ones do not count."""
        inside = bool(self.forwards) and frames.is_inside(frames.of_caller(1), self.forwards[-1].frame)
        return inside or (current_graph_task() != -1 and self.backward is not None)

    def _start_pass(self, unit: Unit, frame: FrameType) -> None:
        for busy in list(filter(_forwards, self._every)):
            busy._check_thread(frame)
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
        """End the outermost unit's forward. Drops all references to the model, so that it can be freed."""
        self.passes[:] = [ref for ref in self.passes if ref() is not self]
        self.prefetcher.free_unused()
        self.latest_pass = Pass(self.latest_pass.id, [])
        self.publish_place()
        self.runtime.join()
        self.runtime.wait_for_host_reads()

    # -- exceptions ----------------------------------------------------------------------------------------------------

    def settle(self, frame: FrameType | None = None) -> None:
        """Clean up after an exception that skipped hooks (an interrupt, a failed backward). Forwards that do not enclose
        ``frame``, by default the caller's, are over.

        Raises:
            RuntimeError: another thread is in a forward or a backward.
        """
        if self.forwards:
            frame = frames.of_caller(1) if frame is None else frame
            self._check_thread(frame)
            self._drop_forwards(frame)
            if not self.forwards:
                self.recover()
        if self.backward is not None and current_graph_task() == -1:
            # It failed, or is on another thread. On an accelerator it always runs on the autograd engine's threads, and may
            # still be registered there just after it failed.
            if not self.backward.has_failed and self.runtime.streams is None:
                raise RuntimeError(
                    "a backward of sharded modules is running on another thread. Collectives of several threads would mix: "
                    "run all sharded modules of a process in one thread"
                )
            self.backward.drop()

    def set_backward(self, backward: RunningBackward | None) -> None:
        """Record that ``backward`` has reached its first unit, or with None, that it has ended or is given up."""
        self.backward = backward
        self.backward_id += backward is not None
        self.publish_place(bool(self.forwards))

    def _drop_forwards(self, frame: FrameType | None) -> None:
        """Drop the running forwards that do not enclose ``frame``. None: all."""
        while self.forwards and (frame is None or not frames.is_inside(frame, self.forwards[-1].frame)):
            for needed, claim in self.forwards.pop().claims:
                needed.claims.remove(claim)
                needed.release(Reason.FAILED)
        self.publish_place(bool(self.forwards))

    def _check_thread(self, frame: FrameType) -> None:
        """Raise if the innermost running forward belongs to another thread. ``frame``: of the caller."""
        last = self.forwards[-1]
        if frames.is_inside(frame, last.frame):
            return
        if frames.runs(last.frame):
            raise RuntimeError(
                f"unit {last.unit.fqn or '<root>'!r} is in a forward on another thread. Collectives of several threads would "
                "mix: run all sharded modules of a process in one thread. Other threads hand it their inputs, as by a "
                "concurrent.futures.ThreadPoolExecutor(max_workers=1). Or, without gradients, run them inside "
                "flatshard.keep_unsharded(module, threads=True), where nothing is communicated"
            )

    def recover(self, drop_held: bool = False) -> None:
        """Restore the state between two steps, after an exception.

        ``drop_held``: also drop gradients that earlier backwards hold (``no_sync``).
        """
        self._drop_forwards(None)
        if self.backward is not None:
            self.backward.drop()
        self.reductions.discard(keeps_held=not drop_held)
        self.prefetcher.free_unused()


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
