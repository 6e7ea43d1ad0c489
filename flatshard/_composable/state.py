"""The state of one unit, kept on its module, and the record of one forward of it."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node

from flatshard._comm.collectives import CollectivesFactory
from flatshard._comm.progress import Flats
from flatshard._composable.claims import Claim
from flatshard._composable.exec_order import ChosenUnits, ForwardOrder
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_reshard_after_forward
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.inner_shards import InnerShards, Kept
from flatshard._handle.slots import SHARDED, Shown
from flatshard.layouts import LayoutChoice

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
    static_buffers: bool = False  # pool.py, [Note: Static buffers]

    def stays_for_backward(self, outermost: bool) -> bool:
        """Whether the parameters stay unsharded from a forward to its backward."""
        if self.reshard_after_forward is None:
            return outermost or self.strategy not in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
        return not self.reshard_after_forward


class Step:
    """One forward of one unit, to which backward will come back. Lives as long as the autograd graph, whose hooks hold it.

    ``previous`` chains the steps of one pass, so that backward knows what to prefetch without a list that could leak.
    """

    __slots__ = ("__weakref__", "kept", "opened_in", "outer", "previous", "unit", "version")

    def __init__(self, unit: Unit, previous: Step | None, outer: Sequence[Unit]) -> None:
        self.unit = unit
        self.previous = previous
        self.outer = outer  # the units whose forwards were around this one, outermost first
        self.version = unit.gathered_version  # of the parameters in this forward
        self.kept: list[Kept | None] | None = None  # held for this backward: [Note: The life of an inner shard]
        self.opened_in = -1  # the graph task (one run of backward) that came back to this step last


class BackwardRecord:
    """What the backward under way has come to know of one unit. Dropped when it ends, in whatever way."""

    __slots__ = ("counted_tasks", "finished_early", "finished_in", "has_left", "last_step", "reduces", "steps", "task")

    def __init__(self) -> None:
        self.task: int | None = None  # the graph task in which the unit's gradients are awaited; None: in none
        self.counted_tasks: set[int] = set()  # graph tasks whose gradients for the unit are counted in its arrivals
        self.reduces = False  # gradients were expected, so there is a reduction, whether or not they came
        self.finished_in = -1  # the graph task in which the unit was completed last
        self.finished_early = False  # before another forward of it that backward may come to, and that needs its values
        self.steps = 0  # that backward has come back to and has not yet left; only where parameters are frozen
        self.has_left = False  # backward has left all of them
        self.last_step: Step | None = None  # the one that backward came back to last

    def complete(self) -> bool:
        """The gradients are there. Returns whether they are to be reduced."""
        assert self.task is not None
        self.finished_in, self.finished_early = self.task, False
        reduces, self.reduces, self.task = self.reduces, False, None
        self.counted_tasks.clear()
        return reduces

    def come_to(self, step: Step) -> None:
        """Backward has come back to ``step``."""
        self.steps += 1
        self.has_left = False
        self.last_step = step

    def leave(self) -> None:
        """Backward has left a step through the unit's inputs."""
        self.steps = max(0, self.steps - 1)
        self.has_left = not self.steps


# Which unit owns a sharded parameter, by the parameter's id: it stays taken as long as the unit lives.
_owners: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()


class Unit:
    """One module whose parameters are gathered together: one unit, one handle, one state object.

    A unit works standalone: which one is outermost is found out call by call, and never fixed.
    """

    def __init__(self, module: nn.Module, handle: FlatParamHandle, context: Context, config: UnitConfig) -> None:
        self.module = module
        self.handle = handle
        self.context = context
        self.config = config
        # This unit, and the units that own parameters which are registered in this one too (a tied embedding): all of
        # them are unsharded for its forward and backward.
        self.needs: tuple[Unit, ...] = (self,)
        self.left_alone: list[tuple[nn.Module, str]] = []  # where ignored parameters are, in no unit further in
        self.order: ForwardOrder[Unit] = ForwardOrder()  # of the passes in which this unit is outermost
        self.requires_gradient_sync = True  # whether backwards reduce gradients
        # Value to restore after `no_sync`; deep copies get this one. None: not inside.
        self.syncs_after: bool | None = None
        # What to gather while this unit computes, in place of the recorded order; None: as recorded.
        self.forward_prefetch: ChosenUnits[Unit] | None = None
        self.backward_prefetch: ChosenUnits[Unit] | None = None
        self._reset()
        self._own_parameters()

    def _own_parameters(self) -> None:
        for buffers in self.handle.buffers:
            _owners.update((id(p), self) for p in buffers.params)
        self.handle.label.contents = functools.partial(_contents, weakref.ref(self.handle))

    def _reset(self) -> None:
        self.ref = weakref.ref(self)
        # Called with the module each time that gradients have come into `.grad`. Not copied, as a parameter's are not.
        self.reduced_callbacks: OrderedDict[int, Callable[[nn.Module], object]] = OrderedDict()
        # Forward.
        self.claims: list[Claim] = []  # claims.py, [Note: Claims]
        self.steps: weakref.WeakSet[Step] | None = None  # whose graphs are alive; only where buffers are static
        # Forwards whose outputs were the unsharded parameters, or views of them. Nodes outside of the unit have saved these,
        # so the memory must stay until backward has come to these forwards.
        self.leaks: weakref.WeakSet[Step] | None = None
        self.gathered_in = -1  # the pass that unsharded the parameters; -1: the user did, by `unshard`
        self.gathered_version = -1  # `handle.version()` then
        # What a forward that passes by the unit uses in place of its parameters. [Note: Taking part without running]
        self.anchor: torch.Tensor | None = None
        self.anchor_node: Node | None = None
        self.ran_inside: list[Unit] | None = None  # the units that its last forward ran, in order; None: it never ran
        # Backward.
        self.record: BackwardRecord | None = None  # of the backward under way; None: it has not come here
        self.partial = False  # a backward found some of the parameters outside its graph: unused, or recomputed later

    def set_gradient_sync(self, value: bool) -> None:
        """Whether backwards from now on reduce the gradients."""
        self.requires_gradient_sync = value
        self.handle.accumulates |= not value

    @property
    def is_pinned(self) -> bool:
        """Whether a claim needs the unsharded parameters."""
        return bool(self.claims) and any([claim.pins for claim in self.claims])

    @property
    def is_used(self) -> bool:
        """Whether a claim relies on the values as they are: that of a forward does."""
        return bool(self.claims) and any([claim.uses for claim in self.claims])

    def is_alone(self, claim: Claim) -> bool:
        """Whether no other claim than ``claim`` does."""
        return len(self.claims) == 1 or not any([c.uses for c in self.claims if c is not claim])

    @property
    def is_kept(self) -> bool:
        """Whether a claim wants the unsharded storage to stay, whatever it holds."""
        return bool(self.claims) and not all([claim.uses for claim in self.claims])

    @property
    def shows_copies(self) -> bool:
        """Whether the user is shown copies of the parameters, which forwards inside use as they are."""
        return bool(self.claims) and any([claim.by_user and isinstance(claim.shows, dict) for claim in self.claims])

    def show(self, unclaimed: Shown = SHARDED) -> None:
        """Register what the claims say; ``unclaimed`` if they say nothing."""
        for claim in reversed(self.claims):
            if claim.shows is not None:
                unclaimed = claim.shows
                break
        self.handle.slots.show(unclaimed)

    def free_if_unused(self) -> None:
        """Register what the claims say, and free the unsharded parameters unless somebody needs them."""
        self.show()
        self.free_unless_kept()

    def free_unless_kept(self) -> None:
        """Free the unsharded parameters, unless a claim, the user or a graph wants them kept."""
        if not (self.leaks or (self.claims and (self.is_kept or self.is_pinned))):
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

    @property
    def fqn(self) -> str:
        """Of the module, as seen from the outermost one that ``fully_shard`` was called with."""
        return self.handle.label.unit

    @property
    def is_rank0(self) -> bool:
        """Whether this is the first of all ranks that the unit is on."""
        replicas = self.handle.replicas
        return self.context.runtime.rank == 0 and (replicas is None or replicas.rank == 0)

    @property
    def is_done_with_gradients(self) -> bool:
        """Whether no value is needed any more once all gradients are there. hooks.py, [Note: Freeing in backward]"""
        return self.handle.all_trainable and not self.partial

    def note_gathered(self) -> None:
        """The unsharded parameters have the values that the shards have now."""
        self.gathered_version = self.handle.version()

    def is_outdated(self, pass_id: int) -> bool:
        """Whether the shards have changed since the parameters were unsharded, or may have.

        Values from an earlier pass count as outdated, as C++ code may change parameters without changing their version.
        Values that the user unsharded do not.
        """
        if self.gathered_version != self.handle.version():
            return True
        return not (self.claims and self.is_kept) and self.gathered_in not in (-1, pass_id)

    def __repr__(self) -> str:
        return f"Unit({self.fqn or '<root>'!r}, {type(self.module).__name__}, {self.handle!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        result = object.__new__(Unit)
        memo[id(self)] = result
        ChosenUnits.note_copy(self, result, memo)
        result.__dict__.update(self.__dict__)
        result._reset()
        if result.syncs_after is not None:
            result.requires_gradient_sync, result.syncs_after = result.syncs_after, None
        result.order = ForwardOrder()
        result.forward_prefetch = copy.deepcopy(self.forward_prefetch, memo)
        result.backward_prefetch = copy.deepcopy(self.backward_prefetch, memo)
        result.module = copy.deepcopy(self.module, memo)
        result.handle = copy.deepcopy(self.handle, memo)
        result.needs = tuple(copy.deepcopy(unit, memo) for unit in self.needs)
        result.left_alone = [(copy.deepcopy(module, memo), name) for module, name in self.left_alone]
        result._own_parameters()
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a sharded module (unit {self.fqn or '<root>'!r}) cannot be pickled: process groups and hooks do not travel. "
            "Save it by flatshard.save_checkpoint(path, {'model': module}), or whole tensors by "
            "torch.save(flatshard.checkpoint.full_state_dict(module), ...)"
        )


def _contents(ref: weakref.ref[FlatParamHandle]) -> Flats:
    """See ``Label``. Read by the watch's thread, too."""
    handle = ref()
    return [
        (str(b.compute_dtype), b.layout.shard_numel, [(i.fqn, list(i.shape)) for i in b.layout.params])
        for b in (() if handle is None else handle.buffers)
    ]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is, or None."""
    found: Unit | None = module.__dict__.get(_KEY)
    return found


def owner_of(param: nn.Parameter) -> Unit | None:
    """The unit that owns a sharded parameter."""
    return _owners.get(id(param))


def all_units() -> list[Unit]:
    """Of this process, whatever they are in; those that own parameters."""
    found = dict.fromkeys(_owners.values())
    return [unit for unit in found if unit_of(unit.module) is unit]  # else a copy that was not finished


def set_unit(module: nn.Module, unit: Unit) -> None:
    module.__dict__[_KEY] = unit


def units_below(module: nn.Module, recurse: bool = True) -> list[Unit]:
    """The units of ``module`` and, with ``recurse``, of its submodules, in module order."""
    modules = module.modules() if recurse else iter([module])
    return [unit for m in modules if (unit := unit_of(m)) is not None]
