"""Cuts the gradient shard of one flat parameter into the parts that become its parameters' ``.grad``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_parallel import common_runtime
from flatshard._handle.tensors.sharded_gradient import mark, mark_all
from flatshard._handle.tensors.sharded_parameter import ShardInfo, shard_info

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam


class Parts:
    """Which elements belong to which parameter. Built for one dtype and one device of the gradients."""

    __slots__ = ("_any_shaped", "_empties", "_flat", "_here", "_infos", "_pieces", "_sizes")

    def __init__(self, flat: FlatParam, dtype: torch.dtype) -> None:
        self._flat = flat
        self._sizes: list[int] = []  # of the pieces that the shard is split into: parts, and the padding between them
        self._here: list[int] = []  # the indices of the parameters that have elements on this rank
        self._pieces: list[int] = []  # for each of these, the index of its piece
        end = 0
        for index, part in sorted(enumerate(flat.slices), key=lambda each: each[1].start):
            if part.numel and part.start > end:
                self._sizes.append(part.start - end)
            if part.numel:
                self._here.append(index)
                self._pieces.append(len(self._sizes))
                self._sizes.append(part.numel)
                end = part.stop
        if flat.layout.shard_numel > end:
            self._sizes.append(flat.layout.shard_numel - end)
        infos = [shard_info(p) for p in flat.params]
        if flat.is_whole:
            self._here = [k for k in self._here if (i := infos[k]) is not None and i.runtime is not None]
        self._infos = [i for k in self._here if (i := infos[k]) is not None and i.runtime is not None]
        # Parts without elements never change, so they are created once. `of` fills in the others for each gradient.
        empty_part = torch.empty(0, dtype=dtype, device=flat.device)
        self._empties = [empty_part.new_empty(p.shape if not p.numel() else (0,)) for p in flat.params]
        self._any_shaped = any(info.by_rows for info in flat.layout.params)
        for empty, info in zip(self._empties, infos, strict=True):
            if info is not None and info.runtime is not None:
                mark(empty, info)

    def of(self, shard: torch.Tensor, as_gradients: bool = False) -> list[torch.Tensor]:
        """The part of each parameter in ``shard`` (``shard_numel`` elements): views, in the shapes of the user's parameters.

        ``as_gradients``: return them as they are stored in ``.grad``, see ``ShardedGradient``.
        """
        if self._flat.placement.shards is None:
            whole = [shard.as_strided(info.shape, info.stride, info.start) for info in self._flat.layout.params]
            if as_gradients and self._infos:  # of DTensors, which are sharded over their own mesh
                mark_all([whole[k] for k in self._here], self._infos)
            return whole
        split = shard.split_with_sizes(self._sizes)
        here = [split[k] for k in self._pieces]
        if self._any_shaped:
            here = list(map(self._flat.shaped, self._here, here))
        if as_gradients and self._infos:
            mark_all(here, self._infos)
        parts = self._empties.copy()
        for index, part in zip(self._here, here, strict=True):
            parts[index] = part
        return parts


def info_of_all(flat: FlatParam) -> ShardInfo:
    """The ``ShardInfo`` of a single parameter that covers the whole shard (``flat_parameters``)."""
    layout = flat.layout
    infos = [shard_info(p) for p in flat.params]
    runtime, counted = common_runtime([None if info is None else info.runtime for info in infos])
    others = [s for s, mine in zip(flat.slices, counted, strict=True) if s.numel and not mine]
    start = flat.placement.rank * layout.shard_numel
    return ShardInfo(
        f"the flat parameter of {name_list((p.fqn for p in layout.params), 3)}",
        (layout.padded_numel,),
        (1,),
        start,
        start + layout.shard_numel,
        layout.world_size,
        runtime=runtime,
        elsewhere=tuple(sorted((s.start, s.stop) for s in others)),
    )
