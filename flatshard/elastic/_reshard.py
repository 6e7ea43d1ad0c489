"""``redistribute``: the move of a model in training to other ranks, in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from flatshard._base.errors import name_list
from flatshard._base.old_names import old_arguments
from flatshard._comm.process_groups import default_group
from flatshard._composable.find import units_of
from flatshard._handle.layout import PlannedFlat
from flatshard.elastic import _exchange, _units
from flatshard.elastic._exchange import Channel, sources
from flatshard.elastic._units import Destination
from flatshard.elastic._values import (
    GRAD,
    PARAM,
    Common,
    Image,
    Live,
    Manifest,
    ParamAt,
    Trained,
    Value,
    allocate_buffers,
    set_common,
    set_state,
)

T = TypeVar("T")
Targets = dict[ParamAt, dict[Any, torch.Tensor]]
"""The memory for this rank's new shards of a unit's values, by parameter and name."""

_VERB = "redistribute"


class LostShardsError(RuntimeError):
    """Some shards of the model are on no rank that is left: too many ranks died at once.

    Example::

        try:
            flatshard.elastic.redistribute(model, optimizer, process_group=dist.group.WORLD)
        except flatshard.elastic.LostShardsError as e:
            print(e)  # names the shards
    """


@old_arguments(model="module", over="participants")
def redistribute(
    module: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer] = (),
    *,
    process_group: Any = None,
    device_mesh: DeviceMesh | None = None,
    participants: dist.ProcessGroup | None = None,
) -> int:
    """Move a sharded model in training to other ranks, in memory: fewer, more, or others. Call it between two steps.

    All ``participants`` call it: the ranks that have the model now, and the ranks that will have it. Parameters, ``.grad``
    and optimizer state keep their bits. The model, its parameters and the optimizers stay the same objects.

    A rank that joins builds its model on meta, calls ``fully_shard`` with a group of itself alone, and builds optimizers. It
    gets buffers, unsharded parameters, and the optimizers' options from the first rank that has the model. Other ranks keep
    their own buffers. A rank that leaves passes no ``process_group``, and drops the model afterwards.

    Units move one at a time, so no rank has more than one full unit. A rank receives each element that it lacks once, and
    nothing else is sent.

    Example::

        half = dist.new_group([0, 1])
        mine = half if dist.get_rank() < 2 else None
        flatshard.elastic.redistribute(model, optimizer, process_group=mine)

    Args:
        module: sharded by ``fully_shard`` over one process group, or on meta.
        optimizers: those that step it, in the same order on all ranks.
        process_group: the new ranks, as for ``fully_shard``: two groups for a hybrid strategy, or None if this rank leaves.
        device_mesh: the same as a mesh.
        participants: the ranks that call this. Default: all.

    Returns:
        The bytes that this rank has sent.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: on all ranks, if one of them cannot move: the model is in
            use, or ranks have different ones; parameters are DTensors or other tensor subclasses, or are stepped whole or
            flat. Nothing has been changed.
        LostShardsError: some shard of the model is on no rank. Nothing has been changed.
        CollectiveError: a rank died meanwhile. Units that have moved cannot go back: build the model anew.
    """
    everyone = default_group() if participants is None else participants
    if everyone is None:
        raise RuntimeError(f"{_VERB} needs a process group: call torch.distributed.init_process_group(...) first")
    channel = Channel(everyone, units_of(module, _VERB)[0].runtime.device)

    def prepare() -> tuple[Trained, Live | None, Destination | None]:
        _units.check_movable(units_of(module, _VERB), _VERB)
        job = Trained(module, optimizers, _VERB)
        on_meta = {bool(unit.handle.on_meta) for unit in job.units if unit.handle.flats}
        if any(
            flat.filling is not None and not flat.kind.is_on_meta for unit in job.units for flat in unit.handle.flats
        ):
            raise RuntimeError(
                f"{_VERB}: parameters got memory by to_empty, and have not been used yet: run a forward first"
            )
        if len(on_meta) > 1:
            raise RuntimeError(f"{_VERB}: some units are on the meta device and others not: all or none")
        job.check_others()
        live = None if on_meta == {True} else Live(job, with_gradients=True)
        is_here = process_group is not None or device_mesh is not None
        return job, live, _units.destination_over(job.units, process_group, device_mesh) if is_here else None

    # Errors of any rank are raised on all before anything moves.
    job, live, destination = agreed(channel, prepare)
    held = None if live is None else Held(live.manifest, live.common(), [live])
    Move(job, channel, destination, held).run()
    return channel.sent


def vacate(job: Trained, channel: Channel, destination: Destination) -> None:
    """Move all units without their values, which a checkpoint will give. Called on all ranks of ``channel``.

    Raises:
        LostShardsError: no rank has the buffers, which a checkpoint may lack.
    """
    lacks = channel.objects(any(buffer.is_meta for buffer in job.buffers().values()))
    if any(lacks):
        if all(lacks):
            raise LostShardsError(f"{job.verb}: all ranks that had the model died")
        first = lacks.index(False)
        to = [rank for rank, lack in enumerate(lacks) if lack]
        given = channel.share(_exchange.saved(job.buffers(), "a buffer") if channel.rank == first else None, first, to)
        if lacks[channel.rank]:
            allocate_buffers(job)
            values = _exchange.loaded(given)
            for name, buffer in job.buffers().items():
                buffer.copy_(values[name])
    for unit, planned in zip(job.units, _units.cuts(job.units, destination.size), strict=True):
        _units.allocate(unit)
        shards = [flat.shard_for(plan.layout) for flat, plan in zip(unit.handle.flats, planned, strict=True)]
        _units.move(unit, destination, planned, shards)
    for optimizer in job.optimizers:
        optimizer.state.clear()


def agreed(channel: Channel, do: Callable[[], T]) -> T:
    """Return the result of ``do``. If it raises on a rank, all raise."""
    try:
        result = do()
    except Exception as e:
        channel.objects(f"{type(e).__name__}: {e}")
        raise
    texts = channel.objects(None)
    if told := {f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None}:
        raise RuntimeError("; ".join(sorted(told)))
    return result


class Held(NamedTuple):
    """The shards of one generation that a rank has, as copies or as its live values."""

    manifest: Manifest
    common: Common
    shards: Sequence[Live | Image]


class Move:
    """The move of a job from a generation that ranks hold to a new layout."""

    def __init__(self, job: Trained, channel: Channel, destination: Destination | None, held: Held | None) -> None:
        """
        Args:
            job: the job on this rank.
            channel: the channel between the ranks that hold the job, and the ranks that will.
            destination: the new ranks, or None if this rank leaves.
            held: this rank's shards, or None if the model has no values yet.
        """
        self._job, self._channel, self._destination = job, channel, destination
        self._common = None if held is None else held.common
        self._holders = {each.number: each for each in (held.shards if held else ())}
        place = None if destination is None else (destination.rank, destination.size)
        told = channel.objects((job.digest(), place, tuple(self._holders), held is not None))
        if odd := [rank for rank, (digest, *_) in enumerate(told) if digest != told[0][0]]:
            raise ValueError(
                f"{job.verb}: ranks {odd} have another model, other options of fully_shard or other optimizers than rank 0: "
                "names, shapes, dtypes and param groups must be the same on all"
            )
        self._places: list[tuple[int, int] | None] = [place for _, place, *_ in told]
        self._held: list[tuple[int, ...]] = [numbers for _, _, numbers, _ in told]
        self._lacking = [rank for rank, (*_, has) in enumerate(told) if not has]
        self._first = next((rank for rank, (*_, has) in enumerate(told) if has), None)
        given = channel.objects(held.manifest.to_payload() if held and channel.rank == self._first else None)
        if self._first is None:
            raise LostShardsError(f"{job.verb}: no rank has any part of the model that could move")
        self.manifest = Manifest.from_payload(given[self._first])
        self._check_complete()
        sizes = {place[1] for place in self._places if place is not None}
        if len(sizes) > 1:
            raise ValueError(f"{job.verb}: ranks are to shard over groups of different sizes, {sorted(sizes)}")
        (size,) = sizes or {1}
        self._planned: list[list[PlannedFlat]] = agreed(channel, functools.partial(self._plan, size))

    def _plan(self, size: int) -> list[list[PlannedFlat]]:
        planned = _units.cuts(self._job.units, size)
        for old, new in zip(self.manifest.layouts, planned, strict=True):
            for layout, flat in zip(old, new, strict=True):
                for before, after in zip(layout.params, flat.layout.params, strict=True):
                    if before.stride != after.stride:
                        raise NotImplementedError(
                            f"{self._job.verb}: {after.fqn!r} is transposed, and lies in another order over {size} ranks "
                            "with layout=Rows(): use another layout for it"
                        )
        return planned

    def _check_complete(self) -> None:
        held = {number for numbers in self._held for number in numbers}
        missing = sorted(set(range(self.manifest.size)) - held)
        if missing and not all(map(self.manifest.is_replicated, range(len(self.manifest.layouts)))):
            size = self.manifest.size
            raise LostShardsError(
                f"{self._job.verb}: nobody has shards {missing} of {size}, which are parts of "
                f"{name_list(self._names(missing), 4)}: their ranks died, and those that held copies of them"
            )

    def _names(self, numbers: Sequence[int]) -> list[str]:
        found: dict[str, None] = {}
        for u, layouts in enumerate(self.manifest.layouts):
            for layout in layouts:
                for number in numbers:
                    parts = layout.shard_slices(self.manifest.shard_of(u, number))
                    found.update((i.fqn, None) for i, p in zip(layout.params, parts, strict=True) if p.numel)
        return list(found)

    def run(self) -> None:
        """Move all units, and set the values that are not sharded. Gradients that did not move are dropped."""
        common = self._receive_common()
        for number in range(len(self._job.units)):
            self._move_unit(number, common)
        if self._destination is None:
            _units.leave(self._job.units, self._job.verb)
            return
        set_common(self._job, common)

    def _receive_common(self) -> Common:
        """Return the values that are not sharded: this rank's own, or the first rank's."""
        channel, first, common = self._channel, self._first, self._common
        assert first is not None
        if self._lacking:
            tells = common if channel.rank == first else None
            data = agreed(channel, lambda: None if tells is None else tells.to_bytes())
            data = channel.share(data, first, self._lacking)
            if common is None:
                return Common.from_bytes(data)
        assert common is not None
        return common

    # -- one unit ------------------------------------------------------------------------------------------------------

    def _move_unit(self, number: int, common: Common) -> None:
        job, destination, planned = self._job, self._destination, self._planned[number]
        unit = job.units[number]
        if destination is None:
            self._fill(number, {})
            return
        if self._common is None:  # it joins
            _units.allocate(unit)
        shards = [flat.shard_for(plan.layout) for flat, plan in zip(unit.handle.flats, planned, strict=True)]
        targets: Targets = {at: {} for at in job.params if at.unit == number}
        for value in self.manifest.values[number]:
            targets[value.at][value.name] = self._target(value, shards, self._shard(number, self._channel.rank))
        self._fill(number, targets)
        _units.move(unit, destination, planned, shards)
        for at, values in targets.items():
            param, flat = job.params[at], job.flat(at)
            if GRAD in values:
                param.grad = flat.shaped(at.param, values[GRAD])
            for n, optimizer in enumerate(job.optimizers):
                states = [
                    (name[1], value) for name, value in values.items() if name not in (PARAM, GRAD) and name[0] == n
                ]
                sharded = {key: flat.shaped(at.param, value) for key, value in states}
                set_state(optimizer, param, common.states[n].get(at), sharded)

    def _shard(self, unit: int, rank: int) -> int:
        """Return the shard of a unit that a rank will have."""
        place = self._places[rank]
        assert place is not None
        return 0 if self._job.units[unit].config.strategy.is_replicated else place[0]

    def _span(self, at: ParamAt, shard: int) -> tuple[int, int]:
        part = self._planned[at.unit][at.flat].layout.shard_slices(shard)[at.param]
        return part.offset, part.offset + part.numel

    def _target(self, value: Value, shards: Sequence[torch.Tensor], shard: int) -> torch.Tensor:
        """Return memory for this rank's new shard of ``value``: 1-D."""
        at = value.at
        part = self._planned[at.unit][at.flat].layout.shard_slices(shard)[at.param]
        if value.name == PARAM:
            return shards[at.flat][part.start : part.stop]
        return torch.empty(part.numel, dtype=value.dtype, device=self._job.flat(at).kind.device)

    def _fill(self, number: int, targets: Targets) -> None:
        """Fill ``targets`` from all ranks. Called on all. _exchange.py, [Note: As few bytes as the two layouts allow]"""
        manifest, me = self.manifest, self._channel.rank
        holders: list[list[int]] = []
        count = max((layout.world_size for layout in manifest.layouts[number]), default=1)
        for shard in range(count):
            holders.append(
                [r for r, held in enumerate(self._held) if any(manifest.shard_of(number, s) == shard for s in held)]
            )
        sent: dict[int, list[torch.Tensor]] = {}
        received: dict[int, list[torch.Tensor]] = {}
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        # All ranks loop in the same order, so the messages between two ranks match.
        with torch.no_grad():
            for value in manifest.values[number]:
                cut = [manifest.span(value.at, shard) for shard in range(count)]
                for rank, place in enumerate(self._places):
                    if place is None:
                        continue
                    need = self._span(value.at, self._shard(number, rank))
                    for source, shard, start, stop in sources(need, rank, cut, holders):
                        if rank == me:
                            target = targets[value.at][value.name][start - need[0] : stop - need[0]]
                            if source == me:
                                part = self._held_part(number, shard, value)
                                own.append((target, part[start - cut[shard][0] : stop - cut[shard][0]]))
                            else:
                                received.setdefault(source, []).append(target)
                        elif source == me:
                            part = self._held_part(number, shard, value)
                            sent.setdefault(rank, []).append(part[start - cut[shard][0] : stop - cut[shard][0]])

        def copy_own() -> None:
            for target, part in own:
                target.copy_(part)

        self._channel.exchange(sent, received, self._job.units[number].fqn, copy_own)

    def _held_part(self, unit: int, shard: int, value: Value) -> torch.Tensor:
        for number, holder in self._holders.items():
            if self.manifest.shard_of(unit, number) == shard:
                return holder.part(value)
        raise AssertionError("a rank holds what it is said to hold")
