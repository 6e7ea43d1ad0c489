"""Ranks over which a few numbers can be reduced: those of a process group, or of several, or of some among others.

[Note: Ranks collect garbage at different times]
A model that nobody refers to may live on for a while, as modules and hooks are cycles, and each rank's garbage collector
ends it at another time. So what decides which collectives are issued, and in which order, must not depend on whether it
still lives. It belongs to one module tree (the buffers that units share, the order of its units), or it lives as long as the
process group (how many collectives each unit has had, the groups' numbers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import ClassVar, Literal

import torch


class RankGroup:
    """Some ranks, over which a few numbers can be reduced. Two with the same ``number`` are equal: norms of what they shard
    are added up together.
    """

    _numbers: ClassVar[dict[tuple[Hashable, ...], int]] = {}  # of what is made of other groups
    next_number: ClassVar[Callable[[], int]] = itertools.count().__next__

    def __init__(self, device: torch.device, rank: int, world_size: int, number: int) -> None:
        """
        Args:
            device: of the numbers.
            rank: of this process in the group of ``world_size`` ranks.
            number: it says in which order groups are first used, and is the same on all ranks.
        """
        self.number = number
        self.device = device
        self.rank, self.world_size = rank, world_size

    @classmethod
    def number_of(cls, *parts: RankGroup) -> int:
        """The number of a group of this class that is made of ``parts``: the same each time. See the note above."""
        key = cls, *(part.number for part in parts)
        if (found := cls._numbers.get(key)) is None:
            found = cls._numbers[key] = cls.next_number()
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankGroup) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def all_reduce_now(self, tensor: torch.Tensor, op: Literal["sum", "max"], question: str) -> None:
        """Replace ``tensor`` (a few numbers, dense) by its sum or maximum over the ranks, on the current stream.

        Args:
            tensor: the numbers.
            op: how they are combined.
            question: what is computed, in words, for the error if a rank waits in vain.
        """
        raise NotImplementedError
