"""``configure``: changes options of ``fully_shard`` later, for the units of a module.

[Note: Memory that is kept]
A CUDA graph that has captured a forward reads parameters at the addresses of its capture. Usually a unit's storage is resized
to zero when it is resharded, and the allocator may place it elsewhere next time. Units with static buffers share memory that
is never freed; ``keep_unsharded_storage`` is for memory of a unit's own, and takes that of the whole model once all units
have been gathered.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from flatshard._base.config import BackwardPrefetch, as_enum, as_reshard_after_forward, check_reshard_after_forward
from flatshard._base.errors import name_list
from flatshard._composable.features.kept_shards import set_source
from flatshard._composable.find import unit_for, units_in
from flatshard._composable.hooks import is_running
from flatshard._composable.state import Unit
from flatshard._handle.unsharded import FlatBuffer


class _Unchanged(enum.Enum):
    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged.UNCHANGED


def configure(
    module: nn.Module,
    *,
    recurse: bool = True,
    reshard_after_forward: bool | int | _Unchanged | None = UNCHANGED,
    gradient_sync: bool | _Unchanged = UNCHANGED,
    all_reduce: bool | _Unchanged = UNCHANGED,
    manual_finalization: bool | _Unchanged = UNCHANGED,
    keep_unsharded_storage: bool | _Unchanged = UNCHANGED,
    divide_factor: float | _Unchanged | None = UNCHANGED,
    forward_prefetch: bool | Iterable[nn.Module] | _Unchanged = UNCHANGED,
    backward_prefetch: BackwardPrefetch | str | Iterable[nn.Module] | _Unchanged | None = UNCHANGED,
) -> None:
    """Change options of ``module``'s units. Options that are not given stay as they are. All ranks must make the same calls.

    Example::

        flatshard.configure(model, gradient_sync=False)  # as FSDP2's set_requires_gradient_sync(False)
        flatshard.configure(model, gradient_sync=True)
        flatshard.configure(model[3], reshard_after_forward=False)
        flatshard.configure(model[0], forward_prefetch=[model[1], model[2]])

    Args:
        module: a unit, or with ``recurse`` a module that contains units.
        recurse: also the units below ``module``.
        reshard_after_forward: takes effect in the next forward. True: free the parameters after forward, also those of the
            outermost unit. False: keep them for backward, which saves an all-gather and takes more memory. None: the
            strategy's default. An int: the size of a smaller group to reshard to, see :func:`fully_shard`; every rank of
            the world must make this call.
        gradient_sync: whether backwards reduce gradients. False is :func:`no_sync` without a context.
        all_reduce: for hybrid strategies: whether backwards also average over the replicas. False only reduce-scatters,
            within the shard group, and accumulates this rank's shard until a backward that all-reduces. This takes the memory
            of one more shard, not of full gradients.
        manual_finalization: True: backwards start their reductions, but ``.grad`` changes when :func:`reduce_gradients` is
            called after them, which waits for the reductions. So the end of a backward is a call of yours, which a schedule
            can place, and a CUDA graph that has captured the backward. Until then norms, clipping and an optimizer's step
            raise, and ``zero_grad()`` does not drop these gradients. Further backwards before it accumulate.
        keep_unsharded_storage: True: the memory of unsharded parameters stays allocated when they are resharded, so that each
            has the same address whenever it is gathered: for CUDA graphs. It is that of the full parameters, in the compute
            dtype. It begins with the next gather, and ends with False, which frees the memory of units that are sharded.
            ``module.to(...)`` and other changes of dtype or device change addresses.
        divide_factor: the number by which the sum of the gradients over all ranks is divided. None: the number of ranks.
        forward_prefetch: what to gather while a unit computes forward. True: the unit that followed it in the last pass.
            False: nothing. A list of modules, each a unit: these, in this order. A list applies to ``module``'s own unit
            only, whatever ``recurse`` is. A deep copy does not have it.
        backward_prefetch: as for :func:`fully_shard`. Or a list of modules as above, to gather while ``module`` computes
            backward, instead of the units that ran before it in forward. They are gathered at the point that
            ``backward_prefetch`` gave before, or before ``module``'s backward computes if that was None. A unit that has no
            backward is gathered for nothing. One whose gradients have come is not gathered; list only units that backward
            reaches later, if ranks leave out different layers.

    Raises:
        TypeError, ValueError: an argument is wrong, or not possible for a unit, which the message names. Nothing has been
            changed.
        RuntimeError: ``manual_finalization`` inside a backward, or between it and ``reduce_gradients``. Nothing has been
            changed.
    """
    units = units_in(module, recurse, "configure")
    # Check all arguments before anything is changed.
    changes: list[tuple[Unit, dict[str, Any]]] = []
    if reshard_after_forward is not UNCHANGED:
        _check_reshard_after_forward(units, reshard_after_forward)
    if all_reduce is not UNCHANGED:
        _check_all_reduce(units)
    if divide_factor is not UNCHANGED and divide_factor is not None and not divide_factor > 0:
        raise ValueError(f"configure: divide_factor must be positive or None, got {divide_factor}")
    if keep_unsharded_storage is True:
        _check_may_keep(units)
    if manual_finalization is not UNCHANGED:
        _check_between_backwards([unit for unit in units if unit.handle.gradients.defers is not manual_finalization])
    if forward_prefetch is not UNCHANGED:
        if isinstance(forward_prefetch, bool):
            changes += [(unit, {"forward_prefetch": forward_prefetch, "ahead_in_forward": None}) for unit in units]
        else:
            unit, chosen = _chosen(module, forward_prefetch, "forward_prefetch")
            changes.append((unit, {"ahead_in_forward": chosen}))
    if backward_prefetch is not UNCHANGED:
        if backward_prefetch is None or isinstance(backward_prefetch, BackwardPrefetch | str):
            when = (
                None if backward_prefetch is None else as_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch")
            )
            changes += [(unit, {"backward_prefetch": when, "ahead_in_backward": None}) for unit in units]
        else:
            unit, chosen = _chosen(module, backward_prefetch, "backward_prefetch")
            changes.append((unit, {"ahead_in_backward": chosen}))

    for unit in units:
        if reshard_after_forward is not UNCHANGED:
            to = as_reshard_after_forward(reshard_after_forward, unit.runtime.world_size)
            unit.config = replace(unit.config, reshard_after_forward=to)
            set_source(unit)
        if gradient_sync is not UNCHANGED:
            unit.handle.gradients.set_sync(gradient_sync)
        if manual_finalization is not UNCHANGED:
            unit.handle.gradients.set_deferral(manual_finalization)
        if keep_unsharded_storage is not UNCHANGED:
            _set_kept(unit, keep_unsharded_storage)
        if all_reduce is not UNCHANGED:
            unit.handle.ranks.averaging.reduces_replicas = all_reduce
        if divide_factor is not UNCHANGED:
            unit.handle.ranks.averaging.divide_factor = divide_factor
    for unit, change in changes:
        if "ahead_in_forward" in change:
            unit.forward_targets = change.pop("ahead_in_forward")
        if "ahead_in_backward" in change:
            unit.backward_targets = change.pop("ahead_in_backward")
        unit.config = replace(unit.config, **change)


def _check_reshard_after_forward(units: list[Unit], value: bool | int | None) -> None:
    """Raise if some of ``units`` cannot have this ``value``."""
    for unit in units:
        try:
            check_reshard_after_forward(value, unit.config.strategy)
            size = as_reshard_after_forward(value, unit.runtime.world_size)
            if size is not None and not isinstance(size, bool) and len(unit.handle.all_ranks) > 1:
                raise ValueError(
                    f"reshard_after_forward={size} is for one group of ranks, and shard_mesh_fn has sharded some of its "
                    "parameters over others: pass True or False"
                )
        except ValueError as e:
            raise ValueError(f"configure: unit {unit.fqn or '<root>'!r}: {e}") from None


def _check_all_reduce(units: list[Unit]) -> None:
    for unit in units:
        if not unit.handle.has_replicas or not unit.config.strategy.is_hybrid:
            raise ValueError(
                f"configure(all_reduce=...): unit {unit.fqn or '<root>'!r} has strategy {unit.config.strategy.name} and no "
                "replicas to reduce over: use gradient_sync=..., or a hybrid strategy over more than one group"
            )


def _check_between_backwards(units: list[Unit]) -> None:
    """Raise if the gradients of some of ``units`` are on their way to ``.grad``."""
    if any(is_running(unit.context) and unit.context.backward is not None for unit in units):
        raise RuntimeError("configure(manual_finalization=...): called inside a backward. Call it before or after")
    for unit in units:
        unit.handle.gradients.check_not_deferred("configure(manual_finalization=...) was called")


def _chosen(module: nn.Module, modules: Iterable[nn.Module], name: str) -> tuple[Unit, ChosenUnits]:
    """Return the unit of ``module``, and the units to gather while it computes."""
    verb = f"configure({name}=...)"
    unit = unit_for(module, verb)
    chosen = [unit_for(each, verb) for each in modules]
    for other in chosen:
        fqn = repr(other.fqn or "<root>")
        if other is unit:
            raise ValueError(f"{verb}: unit {fqn} cannot be prefetched for itself")
        if other.context is not unit.context:
            raise ValueError(
                f"{verb}: unit {fqn} is on another process group or device than {unit.fqn or '<root>'!r}: units can be "
                "prefetched within one group only"
            )
    return unit, ChosenUnits(chosen)


class ChosenUnits:
    """The user's choice of units to gather ahead while another unit computes, instead of the recorded order.

    The references are weak: units of another model may be among them.
    """

    __slots__ = ("_refs",)

    def __init__(self, units: Sequence[Unit]) -> None:
        self._refs = [weakref.ref(unit) for unit in units]

    def __iter__(self) -> Iterator[Unit]:
        return (unit for ref in self._refs if (unit := ref()) is not None)


class KeptBuffer(FlatBuffer):
    """A buffer that keeps its memory from the first allocation on."""

    __slots__ = ()

    def take(self, user: object) -> None:
        """Allocate the memory for ``user``, if this is the first call."""
        if self._storage.nbytes():
            self.taken_by = user
        else:
            super().take(user)

    def free(self) -> None:
        """Mark the memory as free."""
        self.taken_by = None


def _check_may_keep(units: Iterable[Unit]) -> None:
    """Raise for units whose memory is shared with other units."""
    if pooled := [unit.fqn for unit in units if unit.handle.has_static_buffers]:
        raise ValueError(
            f"configure(keep_unsharded_storage=True): units {name_list(pooled, 3)} have static buffers (static_buffers=True, "
            "or collectives with allocate()), which are never freed, and which units use in turn. For a buffer of its own "
            "for each unit, shard without them"
        )


def _set_kept(unit: Unit, keep: bool) -> None:
    """Keep the memory of ``unit`` from its next gather on, or free it after use again."""
    for flat in unit.handle.flats:
        flat.unsharded.use_buffers(KeptBuffer if keep else FlatBuffer)
