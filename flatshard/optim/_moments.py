"""Refuses optimizer steps that would have no effect.

[Note: Steps that change nothing]
Three mistakes make ``step()`` return without an error and without any effect. Inside ``no_sync`` gradients are accumulated,
but are not in ``.grad``. Inside ``summon_full_params`` a step changes the shards, and the exit overwrites them by the
unsharded parameters. And an optimizer that was built inside holds the unsharded parameters, which nobody reads afterwards.
Active contexts are kept in two lists, so a step outside of them only checks that the lists are empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from flatshard._composable.features.full_params import copy_names, summoned_units
from flatshard._composable.features.grad_sync import held_back_units
from flatshard._composable.state import Unit, all_units
from flatshard._errors import name_list
from flatshard._handle.slots import UNSHARDED


def check_moment(optimizer: Optimizer) -> None:
    """Check that a step now has an effect. [Note: Steps that change nothing]

    Raises:
        RuntimeError: the step is inside ``no_sync`` or ``summon_full_params``.
    """
    if not held_back_units and not summoned_units:
        return
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = type(optimizer).__name__
    held = [u for units in held_back_units for u in units if u.handle.gradients.is_held]
    if units := _owners(held, params):
        raise RuntimeError(
            f"{name}.step inside no_sync: units {name_list(units, 3)} hold gradients that no rank has reduced, and that are "
            "not in .grad. Run the last backward outside of no_sync, or call flatshard.reduce_gradients(module) after it; "
            "then step"
        )
    shown = [u for units in summoned_units for u in units]
    if units := _owners(shown, params):
        raise RuntimeError(
            f"{name}.step inside summon_full_params of units {name_list(units, 3)}: the step would change the sharded "
            "parameters, and the end of the `with` block would overwrite them. Step after the block"
        )


def _owners(units: Iterable[Unit], params: set[int]) -> list[str]:
    """The FQNs of the ``units`` that own some of ``params``, which are ids."""
    return list(dict.fromkeys(unit.fqn for unit in units if not params.isdisjoint(_own(unit))))


def _own(unit: Unit) -> set[int]:
    flats = unit.handle.flats
    return {id(f.gradients.shard_param) for f in flats} | {id(p) for f in flats for p in f.params}


def holds_whole_ones(optimizer: str, params: Iterable[torch.Tensor]) -> bool:
    """Whether some of ``params`` are unsharded parameters that modules have now. Then the next step must check again.

    Raises:
        RuntimeError: they are unsharded parameters of before. [Note: Steps that change nothing]
    """
    wanted = {id(p) for p in params}
    found: dict[int, tuple[str, bool]] = {}  # by id: the FQN, and whether a module has it now
    for unit in all_units():
        shows = unit.handle.slots.shows
        copies = shows.values() if isinstance(shows, dict) else ()
        found.update((id(p), (copy_names.get(p, ""), True)) for p in copies if id(p) in wanted)
        whole = shows is UNSHARDED and not any(claim.uses and not claim.by_user for claim in unit.claims)
        for flat in unit.handle.flats:
            for info, compute in zip(flat.layout.params, flat.unsharded.computes, strict=True):
                if id(compute) in wanted:
                    found[id(compute)] = info.fqn, whole
    found = {id(p): (name, False) for p, name in copy_names.items() if id(p) in wanted} | found
    if gone := [fqn for fqn, is_shown in found.values() if not is_shown]:
        raise RuntimeError(
            f"{optimizer} was built inside summon_full_params or unshard: it steps {name_list(gone, 3)} as unsharded "
            "parameters, which get no gradients and which nobody reads any more. Build it outside, from model.parameters()"
        )
    return bool(found)
