"""Steps of an optimizer that would change nothing: at the wrong moment, or of parameters that are not the user's own.

[Note: Steps that change nothing]
Inside ``no_sync`` the gradients wait on each rank and ``.grad`` has none of them; what is stepped inside
``summon_full_params`` is overwritten by the whole parameters at its end; and an optimizer that was built there holds these,
which nobody looks at any more. In each case ``step()`` would return, and nothing would be trained. Blocks under way are
few, and are noted where they begin, so a step outside of them pays for a look at two empty lists.
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
    """[Note: Steps that change nothing]

    Raises:
        RuntimeError: it is a step inside ``no_sync`` or ``summon_full_params``.
    """
    if not held_back_units and not summoned_units:
        return
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    name = type(optimizer).__name__
    held = [u for units in held_back_units for u in units if u.handle.holds_gradients]
    if units := _owners(held, params):
        raise RuntimeError(
            f"{name}.step inside no_sync: units {name_list(units, 3)} hold gradients that no rank has reduced, and .grad has "
            "none of them. Run the last backward outside of no_sync, or call flatshard.reduce_gradients(module) after it; "
            "then step"
        )
    shown = [u for units in summoned_units for u in units]
    if units := _owners(shown, params):
        raise RuntimeError(
            f"{name}.step inside summon_full_params: it shows whole parameters of units {name_list(units, 3)}, which would "
            "not follow, and would overwrite the step at its end. Step after the `with` block"
        )


def _owners(units: Iterable[Unit], params: set[int]) -> list[str]:
    """The FQNs of those that own some of ``params`` (ids)."""
    return list(dict.fromkeys(unit.fqn for unit in units if not params.isdisjoint(_own(unit))))


def _own(unit: Unit) -> set[int]:
    flats = unit.handle.flats
    return {id(f.gradients.shard_param) for f in flats} | {id(p) for f in flats for p in f.params}


def holds_whole_ones(optimizer: str, params: Iterable[torch.Tensor]) -> bool:
    """Whether some of ``params`` are whole parameters that flatshard shows now: then they are to be looked at again.

    Raises:
        RuntimeError: it shows them no more. [Note: Steps that change nothing]
    """
    wanted = {id(p) for p in params}
    found: dict[int, tuple[str, bool]] = {}  # by id: the FQN, and whether modules show it now
    for unit in all_units():
        shows = unit.handle.slots.shows
        copies = shows.values() if isinstance(shows, dict) else ()
        found.update((id(p), (copy_names.get(p, ""), True)) for p in copies if id(p) in wanted)
        whole = shows is UNSHARDED and not any(claim.uses and not claim.by_user for claim in unit.claims)
        for flat in unit.handle.flats:
            for info, compute in zip(flat.layout.params, flat.computes, strict=True):
                if id(compute) in wanted:
                    found[id(compute)] = info.fqn, whole
    found = {id(p): (name, False) for p, name in copy_names.items() if id(p) in wanted} | found
    if gone := [fqn for fqn, is_shown in found.values() if not is_shown]:
        raise RuntimeError(
            f"{optimizer} steps {name_list(gone, 3)}, but as whole parameters that summon_full_params or unshard showed "
            "for a time: no gradient comes to them, and nobody reads them. Build it outside, from model.parameters()"
        )
    return bool(found)
