"""What must be left of a step, however it ended: nothing."""

from __future__ import annotations

import torch
from torch import nn

from flatshard._composable.state import Unit, units_below
from flatshard._handle.lifetime import GradState
from flatshard._handle.slots import SHARDED


def storage_nbytes(tensor: torch.Tensor | None) -> int:
    """Bytes of what a tensor lies in; None has none."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def units(model: nn.Module) -> list[Unit]:
    return units_below(model)


def check_clean(model: nn.Module) -> None:
    """Nothing is left of any step: no memory, no record, no registration."""
    for unit in units(model):
        handle, backward = unit.handle, unit.context.backward
        assert handle.is_sharded, unit
        assert handle.lifetime.grads is GradState.NONE, unit
        assert handle.slots.shows is SHARDED, unit
        for flat in handle.flats:
            assert flat.is_alias or flat.unsharded.flat.untyped_storage().nbytes() == 0, unit
            assert storage_nbytes(flat.gradients.incoming.input) == 0, unit
            assert flat.gradients.incoming.is_empty, unit
        assert (unit.claims, unit.handle.arrivals.pending, unit.record) == ([], 0, None), unit
        assert not unit.context.forwards
        assert backward._reducing is None
        assert [*backward._open, *backward._ready, *backward._tasks, *backward._reached, *backward._idle] == []
