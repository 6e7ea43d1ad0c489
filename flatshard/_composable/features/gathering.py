"""Gathers the whole values of one flat parameter into a new buffer, for reading rather than for training.

The values are those of the parameters, or other tensors of the same layout, such as gradients or an optimizer's averages.
They are exact, whatever collectives are used for training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flatshard._comm.collectives import Done, Pending
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.reduction import views_of


class Gathering:
    """One all-gather in flight. All ranks start the same ones in the same order."""

    def __init__(self, flat: FlatParam, own: torch.Tensor | None = None) -> None:
        """Start. ``own``: this rank's part of the values, like the shard; the same dtype on all ranks. None: the shard."""
        self._flat, self._layout = flat, flat.layout
        self._pending: Pending = Done()
        own = flat.shard if own is None else own
        if flat.is_whole:
            self.flat = own
            return
        rank, size = flat.placement.rank, self._layout.shard_numel
        self.flat = torch.zeros(self._layout.padded_numel, dtype=own.dtype, device=flat.kind.compute_device)
        place = self.flat[rank * size :][:size].copy_(own)
        if size:
            self._pending = gather_exactly(flat, self.flat, place)

    def wait(self) -> list[torch.Tensor]:
        """The whole tensor of each parameter, in its shape and stride: views of one buffer. Of a tensor subclass (a DTensor,
        for one) this is the plain tensor inside.
        """
        try:
            self._pending.wait()
        except Exception as e:
            self._flat.placement.runtime.fail("all-gather", self._flat.placement.label.unit, e)
        return views_of(self.flat, self._layout)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.flat.nbytes


def gather_exactly(flat: FlatParam, output: torch.Tensor, own: torch.Tensor) -> Pending:
    """Start gathering ``own``, this rank's part of ``output``, bit for bit, from the ranks that ``flat`` is sharded over."""
    runtime = flat.placement.runtime.exact
    try:  # as bytes: no backend supports every dtype
        return runtime.all_gather(output.view(torch.uint8), own.view(torch.uint8), flat.placement.label)
    except Exception as e:
        runtime.fail("all-gather", flat.placement.label.unit, e)


def joined(flat: FlatParam, pieces: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
    """This rank's part of each parameter, laid out as the shard. ``pieces``: 1-D in memory order, or None for zeros."""
    result = torch.zeros(flat.layout.shard_numel, dtype=dtype, device=flat.kind.compute_device)
    for part, piece in zip(flat.slices, pieces, strict=True):
        if piece is not None:
            result[part.start : part.stop].copy_(piece)
    return result
