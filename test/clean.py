"""A check that a step leaves nothing behind, however it ended."""

import torch
from torch import nn

from flatshard._base.config import Until
from flatshard._composable.find import units_below as units
from flatshard._handle.lifetime import GradState
from flatshard._handle.registrations import SHARDED_PARAMS


def storage_nbytes(tensor: torch.Tensor | None) -> int:
    """Return the bytes of a tensor's storage, or 0 for None."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def check_clean(model: nn.Module) -> None:
    """Check that no step has left memory, a record or a registration."""
    for unit in units(model):
        handle, context = unit.handle, unit.context
        kept = unit.config.strategy.placements.until is Until.CHANGE  # with any values
        assert handle.is_sharded or kept, unit
        assert handle.gradients.state is GradState.NONE, unit
        assert handle.registrations.shows is SHARDED_PARAMS, unit
        for grads in handle.gradients.flats:
            assert grads.input is None or storage_nbytes(grads.input.flat) == 0, unit
            assert grads._moved is None, unit
            assert grads.reduction is None, unit
        for flat in handle.flats:
            if kept:
                pass
            elif flat.ranks.pool is None:
                assert flat.unsharded.is_alias or flat.unsharded.flat.untyped_storage().nbytes() == 0, unit
            else:  # it keeps the memory for its next user
                assert flat.unsharded.nbytes == 0, unit
            assert all(c.grad is None for c in flat.unsharded.params), unit
        assert unit.graph.status is None, unit
        assert tuple(unit.claims) == unit.config.claims, unit
        assert not context.forwards
        assert context.backward is None
        assert context.reductions.reducing is None, unit
        # Another model may have reductions, even one that awaits the garbage collector.
        assert unit not in context.reductions.units()
