"""Units whose parameters stay on the meta device in ``fully_shard``, and get memory and values later.

``_handle/unfilled.py`` has the parameters, [Note: Filled later]. Here, before a pass starts, all ranks find out together
whether everything in the pass has been filled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection

from torch import nn

from flatshard._composable.context import Context
from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit, units_below
from flatshard._errors import name_list
from flatshard._handle.unfilled import FILL, cut_all, end_filling, left_on_any_rank, unequal_copies
from flatshard._names import plain_name


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
    filling = [flat.filling for unit in todo for flat in unit.handle.flats if flat.filling is not None]
    if left := left_on_any_rank(filling, outermost.context.runtime):
        raise RuntimeError(
            f"{name_list(left)} got memory by to_empty, and nothing has filled them. Initialise them before the first "
            "forward: by init_weights() or reset_parameters() of their modules, inside "
            "`with flatshard.summon_full_params(model):`, by load_state_dict() or flatshard.load_checkpoint()"
        )
    if left := unequal_copies(filling, outermost.context.runtime):
        raise RuntimeError(
            f"{name_list(left)} are replicated over a tensor-parallel mesh, and its ranks have filled them with different "
            "values: call torch.manual_seed with the same number on all ranks before init_weights(), and again now"
        )
    for unit in todo:
        end_filling(unit.handle)
        made.discard(unit)
    return bool(made)
