"""The state of one unit, kept on its module, and the record of one forward of it."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from flatshard._collectives import CollectivesFactory
from flatshard._composable.exec_order import ChosenUnits, ForwardOrder
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_reshard_after_forward
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.inner_shards import InnerShards, Kept
from flatshard._handle.whole_parameters import WholeParameters
from flatshard._layouts import LayoutChoice

if TYPE_CHECKING:
    from flatshard._composable.context import Context

_KEY = "_flatshard_unit"  # in the __dict__ of the unit's module


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """What a user chose for one unit."""

    strategy: ShardingStrategy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    collectives: CollectivesFactory | None = None  # None: the backend's own
    # None: as the strategy says, and not where the unit is outermost. An int: to that many ranks, between 1 and all.
    reshard_after_forward: bool | int | None = None
    prefetch_limit_bytes: int | None = None  # of unsharded parameters gathered ahead
    layout: LayoutChoice = None

    def stays_for_backward(self, outermost: bool) -> bool:
        """Whether the parameters stay unsharded from a forward to its backward."""
        if self.reshard_after_forward is None:
            return outermost or self.strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        return not self.reshard_after_forward


class Step:
    """One forward of one unit, to which backward will come back. Lives as long as the autograd graph, whose hooks hold it.

    ``previous`` chains the steps of one pass, so that backward knows what to prefetch without a list that could leak.
    """

    __slots__ = ("kept", "opened_in", "outer", "previous", "unit", "version")

    def __init__(self, unit: Unit, previous: Step | None, outer: Sequence[Unit]) -> None:
        self.unit = unit
        self.previous = previous
        self.outer = outer  # the units whose forwards were around this one, outermost first
        self.version = unit.gathered_version  # of the parameters in this forward
        self.kept: list[Kept | None] | None = None  # held for this backward: [Note: The life of an inner shard]
        self.opened_in = -1  # the graph task (one run of backward) that came back to this step last


# Which unit owns a sharded parameter, by the parameter's id: it stays taken as long as the unit lives.
_owners: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()


class UnitLink:
    """A unit, for hooks on the modules that belong to it.

    A copy has no unit until the unit is copied, which must begin with its module; nor where a submodule is copied alone.
    """

    def __init__(self, unit: Unit | None) -> None:
        self._ref = None if unit is None else weakref.ref(unit)

    @property
    def unit(self) -> Unit | None:
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitLink:
        return UnitLink(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitLink, (self.unit,)  # which refuses, and says what to do

    def give_to_copy(self, unit: Unit, memo: dict[int, Any]) -> UnitLink:
        """The copy by ``memo``, which is now that of ``unit``."""
        result = copy.deepcopy(self, memo)
        result._ref = weakref.ref(unit)
        return result


class Unit:
    """One module whose parameters are gathered together: one unit, one handle, one state object.

    A unit works standalone: which one is outermost is found out call by call, and never fixed.
    """

    def __init__(
        self, module: nn.Module, fqn: str, handle: FlatParamHandle, context: Context, config: UnitConfig
    ) -> None:
        self.module = module
        self.fqn = fqn
        self.handle = handle
        self.arrivals = handle.arrivals  # looked at from here, too
        self.context = context
        self.config = config
        # This unit, and the units that own parameters which are registered in this one too (a tied embedding): all of
        # them are unsharded for its forward and backward.
        self.needs: tuple[Unit, ...] = (self,)
        self.order: ForwardOrder[Unit] = ForwardOrder()  # of the passes in which this unit is outermost
        self.requires_gradient_sync = True  # False: `no_sync`
        self.syncs_after: bool | None = None  # inside `no_sync`: what the line above is outside, and so in a copy
        # What to gather while this unit computes, in place of the recorded order; None: as recorded.
        self.forward_prefetch: ChosenUnits[Unit] | None = None
        self.backward_prefetch: ChosenUnits[Unit] | None = None
        policy = config.mixed_precision
        # Whether forward has anything to cast, as most have not.
        self.casts = policy.param_dtype is not None or policy.output_dtype is not None
        self.link = UnitLink(self)
        self._reset()
        self._own_parameters()

    def _own_parameters(self) -> None:
        for buffers in self.handle.buffers:
            _owners.update((id(p), self) for p in buffers.params)

    def _reset(self) -> None:
        self.ref = weakref.ref(self)
        # Called with the module each time that gradients have come into `.grad`. Not copied, as a parameter's are not.
        self.reduced_callbacks: OrderedDict[int, Callable[[nn.Module], object]] = OrderedDict()
        # Forward; written by hooks.py and full_params.py.
        self.users = 0  # forwards under way that need the compute parameters registered; they nest
        self.holds = 0  # reasons to stay unsharded: those forwards, and `summon_full_params`
        self.kept = 0  # `keep_unsharded` under way: holds, but what is held may be outdated; they nest
        self.kept_places: list[int] | None = None  # `places()` when what is kept was gathered
        # While kept: what forwards in full precision (`full_precision_in_eval`) show, and `handle.version()` then.
        self.kept_copies: tuple[int, dict[int, nn.Parameter]] | None = None
        self.gathered_in = -1  # the pass that unsharded the parameters; -1: the user did, by `unshard`
        self.gathered_version = -1  # `handle.version()` then
        self.shows_gradients = False  # `summon_full_params(with_grads=True)` is under way
        # What `summon_full_params` shows in place of the unsharded parameters, by id of the user's; they nest.
        self.copies: list[dict[int, nn.Parameter]] = []
        self.full_forwards = 0  # forwards under way in full precision (`full_precision_in_eval`)
        # What a forward that passes by the unit uses in place of its parameters. [Note: Taking part without running]
        self.anchor: torch.Tensor | None = None
        self.anchor_node: Node | None = None
        self.ran_inside: list[Unit] | None = None  # the units that its last forward ran, in order; None: it never ran
        # Backward; written by backward.py.
        self.task: int | None = None  # the graph task in which this unit's backward began, while it is incomplete
        self.counted_tasks: set[int] = set()  # graph tasks whose gradients for this unit are counted in `pending`
        self.finished_task = -1  # the graph task in which the unit was completed last
        self.finished_early = False  # before another forward of it that backward may come to, and that needs its values
        self.reduce_wanted = False  # gradients were expected, so there is a reduction, whether or not they came
        self.partial = False  # a backward found some of the parameters outside its graph: unused, or recomputed later
        self.active_steps = 0  # steps that backward has come back to and has not yet left; only where params are frozen
        self.has_left = False  # backward has left all of them
        self.last_step: Step | None = None  # the step that backward came back to last

    def set_gradient_sync(self, value: bool) -> None:
        """Whether backwards from now on reduce the gradients."""
        self.requires_gradient_sync = value
        self.handle.accumulates |= not value

    def show_sharded_if_unused(self) -> None:
        """Register the user's parameters, unless somebody needs the unsharded ones."""
        if self.holds == 0:
            self.handle.slots.register_sharded()

    def free_if_unused(self) -> None:
        """Register the user's parameters and free the unsharded ones, unless somebody needs them."""
        if self.holds == 0:
            self.handle.slots.register_sharded()
            self.free_unless_kept()

    def free_unless_kept(self) -> None:
        """Free the unsharded parameters, which no forward needs now, unless the user wants them kept."""
        if not self.kept:
            self.handle.reshard()

    def set_reshard_after_forward(self, value: bool | int | None) -> None:
        """From the next forward on. ``Runtime.split`` comes before an int."""
        value = as_reshard_after_forward(value, self.context.runtime.world_size)
        self.config = replace(self.config, reshard_after_forward=value)
        self.handle.inner = None
        if value is not None and not isinstance(value, bool):
            self.handle.inner = InnerShards(self.context.runtime.within(value, self.config.collectives))

    def rename(self, fqn: str) -> None:
        """Name the unit and its parameters as seen from a module further out."""
        self.handle.rename(self.fqn, fqn)
        self.fqn = fqn

    @property
    def is_rank0(self) -> bool:
        """Whether this is the first of all ranks that the unit is on."""
        replicas = self.handle.replicas
        return self.context.runtime.rank == 0 and (replicas is None or replicas.rank == 0)

    @property
    def is_done_with_gradients(self) -> bool:
        """Whether all gradients being there means that no value is needed any more. hooks.py, [Note: Freeing in backward]"""
        return self.handle.all_trainable and not self.partial

    def note_gathered(self) -> None:
        """The unsharded parameters have the values that the shards have now."""
        self.gathered_version = self.handle.version()
        self.kept_places = self.places() if self.kept else None

    def places(self) -> list[int] | None:
        """Where the parameters' data lies: other numbers, on every rank, if the user replaced any. None: not registered."""
        if self.handle.slots.replaced():
            return None
        return [p.untyped_storage().data_ptr() for b in self.handle.buffers for p in b.params]

    def refuse_replaced(self) -> None:
        """Raise if the user replaced parameters since what `keep_unsharded` keeps was gathered."""
        if self.places() != self.kept_places:
            raise RuntimeError(
                f"parameters of unit {self.fqn or '<root>'!r} were replaced (p.data = ..., module.to(), load_state_dict("
                "assign=True), ...) inside keep_unsharded, which still shows the old values. Replace them before it, or "
                "change them in place"
            )

    def copy_full_precision(self) -> dict[int, nn.Parameter]:
        """See ``WholeParameters``; kept while `keep_unsharded` is under way and the shards do not change."""
        if not self.kept:
            return WholeParameters(self.handle).copy_full_precision()
        version = self.handle.version()
        if self.kept_copies is None or self.kept_copies[0] != version:
            self.kept_copies = None  # first, for the memory
            self.kept_copies = version, WholeParameters(self.handle).copy_full_precision()
            self.kept_places = self.places()
        return self.kept_copies[1]

    def is_outdated(self, pass_id: int) -> bool:
        """Whether the unsharded parameters are left from an earlier pass: the shards may have changed since.

        ``p.data.add_()`` cannot be noticed, so only what the user unsharded on purpose is trusted across passes.
        """
        if self.gathered_in == -1 or self.kept:
            return self.gathered_version != self.handle.version()
        return self.gathered_in != pass_id

    def __repr__(self) -> str:
        return f"Unit({self.fqn or '<root>'!r}, {type(self.module).__name__}, {self.handle!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        result = object.__new__(Unit)
        memo[id(self)] = result
        ChosenUnits.note_copy(self, result, memo)
        result.__dict__.update(self.__dict__)
        result._reset()
        result.link = self.link.give_to_copy(result, memo)
        if result.syncs_after is not None:
            result.requires_gradient_sync, result.syncs_after = result.syncs_after, None
        result.order = ForwardOrder()
        result.forward_prefetch = copy.deepcopy(self.forward_prefetch, memo)
        result.backward_prefetch = copy.deepcopy(self.backward_prefetch, memo)
        result.module = copy.deepcopy(self.module, memo)
        result.handle = copy.deepcopy(self.handle, memo)
        result.arrivals = result.handle.arrivals
        result.needs = tuple(copy.deepcopy(unit, memo) for unit in self.needs)
        result._own_parameters()
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a sharded module (unit {self.fqn or '<root>'!r}) cannot be pickled: process groups and hooks do not travel. "
            "Save module.state_dict() instead"
        )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is, or None."""
    found: Unit | None = module.__dict__.get(_KEY)
    return found


def owner_of(param: nn.Parameter) -> Unit | None:
    """The unit that owns a sharded parameter."""
    return _owners.get(id(param))


def set_unit(module: nn.Module, unit: Unit) -> None:
    module.__dict__[_KEY] = unit


def units_below(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """The units of ``module`` and, with ``recurse``, of its submodules, in module order."""
    modules = module.modules() if recurse else iter([module])
    return [unit for m in modules if (unit := unit_of(m)) is not None]
