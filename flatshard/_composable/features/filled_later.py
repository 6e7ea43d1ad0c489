"""Units whose parameters stay on the meta device in ``fully_shard``, and get memory and values later.

``_handle/unfilled.py`` has the parameters, [Note: Filled later]. Here, before a pass starts, all ranks find out together
whether everything in the pass has been filled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from flatshard._composable.context import Context
from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit, units_below
from flatshard._errors import name_list
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.unfilled import FILL, cut_all, shows_pattern
from flatshard._names import plain_name
from flatshard._runtime import Runtime


class FilledLater(Extension):
    """Has the passes of units on meta look whether they have values."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        if any(unit.handle.on_meta for unit in made):
            Context.checks.append(functools.partial(_check, weakref.WeakSet(made)))


def _check(made: weakref.WeakSet[Unit], outermost: Unit) -> bool:
    """A pass of ``outermost`` starts. Returns whether to look again when the next one does.

    Raises:
        RuntimeError: something in it was never filled: on all ranks.
    """
    cut_all()
    inside = list(dict.fromkeys(needed for unit in units_below(outermost.module) for needed in unit.needs))
    todo = [unit for unit in inside if unit in made]
    for unit in todo:
        unit.handle.check_parameters()
    # What is on meta is so on all ranks.
    left = [i.fqn for unit in todo for flat in unit.handle.on_meta for i in flat.layout.params]
    prefix = f"{outermost.fqn}." if outermost.fqn else ""
    if todo:
        left += [prefix + plain_name(name) for name, b in outermost.module.named_buffers() if b.is_meta]
    if left:
        raise RuntimeError(f"{name_list(left)} are on the meta device. {FILL}")
    filled = [flat for unit in todo for flat in unit.handle.flats if flat.filling is not None]
    if left := _left_on_any_rank(filled, outermost.context.runtime):
        raise RuntimeError(
            f"{name_list(left)} got memory by to_empty, and nothing has filled them. Initialise them before the first "
            "forward: by init_weights() or reset_parameters() of their modules, inside "
            "`with flatshard.summon_full_params(model):`, by load_state_dict() or flatshard.load_checkpoint()"
        )
    if left := _unequal_copies(filled, outermost.context.runtime):
        raise RuntimeError(
            f"{name_list(left)} are replicated over a tensor-parallel mesh, and its ranks have filled them with different "
            "values: call torch.manual_seed with the same number on all ranks before init_weights(), and again now"
        )
    for flat in filled:
        if flat.placement.replicas is not None:  # they get the values of the first one, as random generators may differ
            flat.placement.replicas.broadcast_now(flat.shard)
        flat.filling = None
    made.difference_update(todo)
    return bool(made)


def _left_on_any_rank(filled: Iterable[FlatParam], runtime: Runtime) -> list[str]:
    """The FQNs of the parameters of which nothing has filled some rank's part. One all-reduce."""
    left = [
        (info.fqn, bool(part.numel) and shows_pattern(flat.shard[part.start : part.stop]))
        for flat in filled
        for info, part in zip(flat.layout.params, flat.slices, strict=True)
    ]
    told = torch.tensor([float(flag) for _, flag in left], device=runtime.device)
    if left and runtime.world_size > 1:
        runtime.all_reduce_now(told, "max", "whether all parameters have been filled")
    return [fqn for (fqn, _), flag in zip(left, told.tolist(), strict=True) if flag]


def _unequal_copies(filled: Iterable[FlatParam], runtime: Runtime) -> list[str]:
    """The FQNs of DTensors that ranks should hold copies of, and have filled with different values.

    Their random generators differed. The copies may be cut differently, so checksums of whole tensors are compared.
    """
    found = [copied for flat in filled for copied in _copied(flat)]
    if not found:
        return []
    sums = torch.tensor([checksum for _, checksum, _ in found], dtype=torch.float64, device=runtime.device)
    if runtime.world_size > 1:
        runtime.all_reduce_now(sums, "sum", "checksums of parameters")
    most = torch.stack([sums, -sums])
    for replicas in dict.fromkeys(each for _, _, runtimes in found for each in runtimes):
        of_these = torch.tensor([replicas in runtimes for _, _, runtimes in found], device=runtime.device)
        told = torch.where(of_these, most, -torch.inf)
        replicas.all_reduce_now(told, "max", "checksums of parameters")
        most = torch.where(of_these, told, most)
    differ = (most[0] != -most[1]).tolist()
    return [fqn for (fqn, _, _), differs in zip(found, differ, strict=True) if differs]


def _copied(flat: FlatParam) -> Iterator[tuple[str, float, list[Runtime]]]:
    """Of each DTensor with copies: the FQN, the checksum of this rank's part, and the groups of ranks with copies."""
    for info, part, wrapping in zip(flat.layout.params, flat.slices, flat.wrappings, strict=True):
        if wrapping is not None and (runtimes := wrapping.replicas(flat.kind.device)):
            mine = flat.shard[part.start : part.stop].view(torch.uint8)
            counted = flat.placement.shards is not None or flat.placement.is_first_replica
            yield info.fqn, float(mine.sum(dtype=torch.int64)) * counted, runtimes
