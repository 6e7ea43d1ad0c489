"""Norms of parameters that have different values under the same names on other ranks, as experts have."""

from __future__ import annotations

import weakref
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from flatshard._comm.rank_group import RankGroup
from flatshard._comm.runtime import Runtime


class ExpertRanks(RankGroup):
    """The ranks of ``runtime``, which hold the same experts. Other ranks of ``around`` hold others under the same names.

    A norm of one expert is over these ranks; a total norm adds up those of all ranks of ``around``. Only for reductions of a
    few numbers.
    """

    _by_parts: ClassVar[weakref.WeakValueDictionary[tuple[int, int], ExpertRanks]] = weakref.WeakValueDictionary()

    def __init__(self, runtime: Runtime, around: Runtime) -> None:
        super().__init__(runtime.device, runtime.rank, runtime.world_size, self.number_of(runtime, around))
        self.runtime, self.around = runtime, around

    @classmethod
    def within(cls, runtime: Runtime, around: Runtime) -> ExpertRanks | None:
        """Return the object for these process groups, or None unless ``runtime`` has some ranks of ``around``, and no others.

        It is shared, because gradients are grouped by their runtime.
        """
        ours, others = (set(dist.get_process_group_ranks(each.group)) for each in (runtime, around))
        if not ours < others:
            return None
        key = runtime.number, around.number
        found = cls._by_parts.get(key)
        if found is None:
            found = cls._by_parts[key] = cls(runtime, around)
        return found

    @property
    def group(self) -> dist.ProcessGroup:
        return self.runtime.group

    @property
    def ranks_around(self) -> list[int]:
        """The numbers that these ranks have in ``around``."""
        every = dist.get_process_group_ranks(self.around.group)
        return [every.index(rank) for rank in dist.get_process_group_ranks(self.group)]

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"], question: str) -> None:
        """See :class:`RankGroup`."""
        self.runtime.all_reduce_now(tensor, op, question)
