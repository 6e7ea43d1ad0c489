"""Groups of ranks that are made of process groups, for reductions of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from flatshard._comm.process_groups import members_of
from flatshard._comm.rank_group import RankGroup
from flatshard._comm.runtime import Runtime


class ManyGroups(RankGroup):
    """The ranks of several orthogonal process groups, as one group."""

    def __init__(self, groups: Sequence[RankGroup]) -> None:
        self.groups = tuple(groups)
        rank, world_size = 0, 1
        for each in groups:
            rank = rank * each.world_size + each.rank
            world_size *= each.world_size
        super().__init__(groups[0].device, rank, world_size, self.number_of(*groups))

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"], question: str) -> None:
        """See :class:`RankGroup`."""
        for each in self.groups:
            each.all_reduce_now(tensor, op, question)


class ExpertRanks(RankGroup):
    """The ranks of ``runtime``, which hold the same experts. Other ranks of ``around`` hold others under the same names.

    A norm of one expert is over these ranks; a total norm adds up those of all ranks of ``around``.
    """

    def __init__(self, runtime: Runtime, around: Runtime) -> None:
        super().__init__(runtime.device, runtime.rank, runtime.world_size, self.number_of(runtime, around))
        self.runtime, self.around = runtime, around

    @classmethod
    def within(cls, runtime: Runtime, around: Runtime) -> ExpertRanks | None:
        """Return the ranks, or None unless ``runtime`` has some ranks of ``around``, and no others."""
        ours, others = (set(members_of(each.group).ranks) for each in (runtime, around))  # empty: all
        return cls(runtime, around) if ours and (not others or ours < others) else None

    @property
    def ranks_around(self) -> list[int]:
        """The numbers that these ranks have in ``around``."""
        every = dist.get_process_group_ranks(self.around.group)
        return [every.index(rank) for rank in dist.get_process_group_ranks(self.runtime.group)]

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"], question: str) -> None:
        """See :class:`RankGroup`."""
        self.runtime.all_reduce_now(tensor, op, question)
