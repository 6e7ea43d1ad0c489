"""The state of one unit, stored on its module, and the records of a forward and a backward of it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from flatshard._comm.collectives import CollectivesFactory
from flatshard._composable.claims import Claims
from flatshard._composable.exec_order import ForwardOrder
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.lifetime import BY_USER
from flatshard._handle.slots import SHARDED, Shown
from flatshard._names import UNIT_KEY
from flatshard.layouts import LayoutChoice

if TYPE_CHECKING:
    from flatshard._composable.context import Context
    from flatshard._composable.extensions import ForwardFeature

T = TypeVar("T")

MeshChoice = Callable[[str, nn.Parameter], DeviceMesh | None] | None
"""The mesh of a parameter, by its FQN; None: that of the call."""


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """The options of one unit."""

    strategy: ShardingStrategy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    collectives: CollectivesFactory | None = None  # None: the backend's own
    # None: as the strategy says, but the outermost unit keeps its parameters. An int: as True, and a feature reads it.
    reshard_after_forward: bool | int | None = None
    prefetch_limit_bytes: int | None = None  # for unsharded parameters that were gathered ahead and are not in use yet
    layout: LayoutChoice = None
    static_buffers: bool = False  # [Note: Static buffers]
    shard_mesh_fn: MeshChoice = None

    def stays_for_backward(self, outermost: bool) -> bool:
        """Whether the parameters stay unsharded from a forward to its backward. ``outermost``: this is the outermost unit."""
        if self.reshard_after_forward is None:
            return outermost or self.strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        return not self.reshard_after_forward


class Step:
    """One forward of one unit with a backward to come. It lives as long as the autograd graph, whose hooks refer to it.

    ``previous`` links the steps of one pass, so that backward knows what to prefetch. A list of steps could leak instead.
    """

    __slots__ = ("__weakref__", "opened_in", "outer", "previous", "unit", "version")

    def __init__(self, unit: Unit, previous: Step | None, outer: Sequence[Unit]) -> None:
        self.unit = unit
        self.previous = previous
        self.outer = outer  # the units whose forwards enclosed this one, outermost first
        gathered = unit.handle.gathered
        assert gathered is not None  # a forward that makes a graph runs on unsharded parameters
        self.version = gathered.version  # of the parameters in this forward
        self.opened_in = -1  # the last graph task (run of the autograd engine) that reached this step

    @property
    def is_first(self) -> bool:
        """Whether it is the first one of its unit in its pass."""
        before = self.previous
        while before is not None:
            if before.unit is self.unit:
                return False
            before = before.previous
        return True


class BackwardRecord:
    """What is known about one unit in the current backward. Dropped when the backward ends or fails."""

    __slots__ = ("expected", "finished_early", "finished_in", "last_step", "steps")

    def __init__(self) -> None:
        # The gradients that graph tasks have for the unit, by graph task. The first one completes it. Empty: it is complete,
        # or was only gathered.
        self.expected: dict[int, int] = {}
        self.finished_in = -1  # the graph task in which the unit was last completed
        self.finished_early = False  # completed though backward may reach another forward of it, which needs its values
        # Steps that backward has reached and not left yet; only counted if some parameters are frozen. -1: none was reached.
        self.steps = -1
        self.last_step: Step | None = None  # the last step that backward reached

    @property
    def task(self) -> int | None:
        """The graph task that completes the unit. None: the unit is complete, or was only gathered."""
        return next(iter(self.expected), None)

    @property
    def is_reached(self) -> bool:
        """Whether backward has reached the unit. False: it was only gathered."""
        return bool(self.expected) or self.finished_in != -1

    def complete(self) -> bool:
        """Record that all gradients have come. Returns whether any were expected."""
        self.finished_in, self.finished_early = next(iter(self.expected)), False
        expected = any(self.expected.values())
        self.expected.clear()
        return expected

    def leave(self) -> None:
        """Backward leaves a step, through the unit's inputs."""
        self.steps = max(0, self.steps - 1)

    @property
    def has_left(self) -> bool:
        """Whether backward has reached steps, and left all of them."""
        return self.steps == 0

    @property
    def has_left_first(self) -> bool:
        """Whether backward has left the first forward of the unit in its pass, too."""
        return self.has_left and (self.last_step is None or self.last_step.is_first)


# The unit that owns a sharded or unsharded parameter, by the parameter's id. The unit keeps both alive, so ids are unique.
_owners: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
# The units of copies that modules show in place of their parameters. The copies may go before the unit does.
_owners_of_copies: MutableMapping[nn.Parameter, weakref.ref[Unit]] = WeakIdKeyDictionary()
_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()  # by their id, in order of creation


class ModuleGroup(nn.ModuleList):
    """The modules that are one unit together. Such a group is not in the user's module tree, and is never called."""


class Unit:
    """One module, or several, whose parameters are gathered together. It has one handle.

    A unit works standalone: which unit is outermost is found anew in each call.
    """

    def __init__(self, module: nn.Module, handle: FlatParamHandle, context: Context, config: UnitConfig) -> None:
        self.module = module  # or a `ModuleGroup`
        self.handle = handle
        self.context = context
        self.config = config
        # This unit, and the units that own parameters which are also registered here (a tied embedding). All of them are
        # unsharded for its forward and backward.
        self.needs: tuple[Unit, ...] = (self,)
        self.order = ForwardOrder()  # for passes in which this unit is outermost
        self.requires_gradient_sync = True  # whether backwards reduce gradients
        self.defers_gradients = False  # what a backward has reduced becomes `.grad` when the user says so
        # Units to gather while this unit computes: see `configure`. None: according to the recorded order.
        self.forward_prefetch: Iterable[Unit] | None = None
        self.backward_prefetch: Iterable[Unit] | None = None
        # Whether its shards have changed between an all-gather and a use of it in one pass. context.py, [Note: Gathered
        # before it changes]
        self.changes_in_passes = False
        self._reset()
        self._own_parameters()

    def _own_parameters(self) -> None:
        _units[id(self)] = self
        for flat in self.handle.flats:
            _owners.update((id(p), self) for p in (*flat.params, *flat.unsharded.computes))
        self.handle.make_room = functools.partial(self.context.make_room, self)
        for placement in self.handle.placements:
            placement.label.handle = weakref.ref(self.handle)

    def _reset(self) -> None:
        self.features: Sequence[ForwardFeature] = ()  # that take part in its forwards; `UnitHooks` sets them
        # Forward.
        self.claims = Claims()  # claims.py, [Note: Claims]
        self.steps: weakref.WeakSet[Step] | None = None  # steps with a live graph; only recorded with static buffers
        # Steps whose outputs were the unsharded parameters or views of them. Autograd nodes outside of the unit have saved
        # these, so the memory must stay until backward has reached these steps.
        self.leaks: weakref.WeakSet[Step] | None = None
        # Backward.
        # Leaves besides the parameters whose gradients it waits for: where forwards may not have run the module.
        self.stand_ins: list[Node] = []
        self.record: BackwardRecord | None = None  # None: the current backward has not reached the unit
        self.turn = 0  # its place in the order of reductions, which `ReductionQueue` gives
        self.partial = False  # a backward found some of the parameters outside its graph: unused, or recomputed later

    def feature(self, kind: type[T]) -> T | None:
        """Its feature of this class, or None."""
        return next((feature for feature in self.features if isinstance(feature, kind)), None)

    def show(self, unclaimed: Shown = SHARDED) -> None:
        """Register the parameters that the claims ask for. If none asks for any: ``unclaimed``."""
        for claim in reversed(self.claims):
            if claim.shows is not None:
                unclaimed = claim.shows
                break
        self.handle.slots.show(unclaimed)

    def free_if_unused(self) -> None:
        """Register the parameters that the claims ask for, and free the unsharded parameters if nothing needs them."""
        self.show()
        self.free_unless_kept()

    def free_unless_kept(self, until: Step | None = None) -> None:
        """Free the unsharded parameters, unless a claim or a live graph needs them.

        ``until``: the step whose backward will gather them again.
        """
        if not (self.leaks or (self.claims and (self.claims.keep or self.claims.pin))):
            self.handle.reshard(until)

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Rename the unit and its parameters after a module further out was sharded, as FQNs now start there.

        ``names``: of all modules in that module.
        """
        self.handle.rename(", ".join(names[m] for m in called_modules(self.module) if m in names), names)

    @property
    def fqn(self) -> str:
        """The module's FQN, relative to the outermost module that ``fully_shard`` was called with. Of a group: all FQNs,
        as ``"norm, head"``.
        """
        return self.handle.placement.label.unit

    @property
    def kind(self) -> str:
        """The name of the module's class. Of a group: all names, as ``"LayerNorm, Linear"``."""
        return ", ".join(type(m).__name__ for m in called_modules(self.module))

    @property
    def is_done_with_gradients(self) -> bool:
        """Whether the values are not needed after all gradients have come. hooks.py, [Note: Freeing in backward]"""
        return self.handle.gradients.accumulators.are_all and not self.partial

    def is_outdated(self, pass_id: int) -> bool:
        """Whether the unsharded parameters must be gathered again before pass ``pass_id`` uses them."""
        handle = self.handle
        return not (handle.is_current(pass_id) or (self.claims.keep and handle.is_current()))

    @property
    def is_unsharded_by_user(self) -> bool:
        """Whether the user called ``unshard``, and no forward has used the parameters since."""
        gathered = self.handle.gathered
        return gathered is not None and gathered.by == BY_USER

    def __repr__(self) -> str:
        return f"Unit({self.fqn or '<root>'!r}, {self.kind}, {self.handle!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        result = object.__new__(Unit)
        memo[id(self)] = result
        copies_in(memo)[weakref.ref(self)] = result
        result.__dict__.update(self.__dict__)
        result._reset()
        result.order = ForwardOrder()
        result.forward_prefetch = copy.deepcopy(self.forward_prefetch, memo)
        result.backward_prefetch = copy.deepcopy(self.backward_prefetch, memo)
        result.module = copy.deepcopy(self.module, memo)
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


def copies_in(memo: dict[int, Any]) -> dict[weakref.ref[Unit], Unit]:
    """The units that have been copied so far in the deep copy of ``memo``."""
    copies: dict[weakref.ref[Unit], Unit] = memo.setdefault(id(Unit), {})
    return copies


def called_modules(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules whose forwards are those of the unit of ``module``: itself, or those in the group."""
    return tuple(module) if isinstance(module, ModuleGroup) else (module,)


def unit_of(module: nn.Module) -> Unit | None:
    """The unit whose module is ``module``, or has it in its group. None if there is none."""
    found: Unit | None = module.__dict__.get(UNIT_KEY)
    return found


def owner_of(param: nn.Parameter) -> Unit | None:
    """The unit that owns a parameter, or None. ``param``: what modules show of it now: a part, the whole, or a copy."""
    if (found := _owners.get(id(param))) is not None:
        return found
    of_copy = _owners_of_copies.get(param) if _owners_of_copies else None
    return None if of_copy is None else of_copy()


def own_copies(unit: Unit, copies: Iterable[nn.Parameter]) -> None:
    """``copies`` are of parameters of ``unit``, whose modules may show them."""
    _owners_of_copies.update((copy, weakref.ref(unit)) for copy in copies)


def flat_of(param: nn.Parameter) -> FlatParam | None:
    """The flat parameter that a sharded parameter is in, or None."""
    unit = owner_of(param)
    return None if unit is None else next((f for f in unit.handle.flats if f.index_of(param) is not None), None)


def all_units() -> list[Unit]:
    """All units of this process, also those that own no parameters."""
    return [unit for unit in _units.values() if unit_of(unit.module) is unit]  # not those of an unfinished deep copy


def set_unit(module: nn.Module, unit: Unit) -> None:
    for each in {module, *called_modules(module)}:
        each.__dict__[UNIT_KEY] = unit


def units_below(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """The units of ``module`` and, with ``recurse``, of its submodules, in module order."""
    modules = module.modules() if recurse else iter([module])
    return list(dict.fromkeys([unit for m in modules if (unit := unit_of(m)) is not None]))


def units_of_parameters(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """The units that own the parameters registered in ``module``, wherever their modules are: in it, around it, or beside it
    (for a tied parameter). Those in it also if they own none. First in module order, and the same on all ranks.

    ``recurse``: also in units below ``module``.
    """
    found: dict[Unit, None] = {}
    for each in module.modules() if recurse else _in_no_unit_below(module):
        if (unit := unit_of(each)) is not None:
            found.update(dict.fromkeys(unit.needs))
        for param in each._parameters.values():
            if param is not None and (owner := owner_of(param)) is not None:
                found.setdefault(owner)
    return list(found)


def _in_no_unit_below(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and the modules in it, but not those in a unit below it."""
    yield module
    for child in module.children():
        if unit_of(child) is None:
            yield from _in_no_unit_below(child)
