"""Ranks over which a few numbers can be reduced: of one process group, or of several.

[Note: Ranks collect garbage at different times]
Modules and hooks form cycles, so a model without references lives until the garbage collector runs, on each rank at another
time. So state that decides which collectives are issued, and in which order, must not depend on whether it still lives. Such
state belongs to one module tree (the buffers that units share, the order of its units), or lives as long as the process group
(the number of collectives of each unit, the groups' numbers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import ClassVar, Literal

import torch


class RankGroup:
    """Some ranks, over which a few numbers can be reduced.

    Two with the same ``number`` are equal: norms of parameters that they shard are added up together.
    """

    _numbers: ClassVar[dict[tuple[Hashable, ...], int]] = {}  # of groups that are made of other groups
    next_number: ClassVar[Callable[[], int]] = itertools.count().__next__

    def __init__(self, device: torch.device, rank: int, world_size: int, number: int) -> None:
        """
        Args:
            device: of the numbers.
            rank: of this process in the group of ``world_size`` ranks.
            number: by which groups are ordered; the same on all ranks.
        """
        self.number = number
        self.device = device
        self.rank, self.world_size = rank, world_size

    @classmethod
    def number_of(cls, *parts: RankGroup) -> int:
        """Return the number of a group of this class that is made of ``parts``: the same each time. See the note above."""
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
            question: names the numbers in the error if a rank waits in vain.
        """
        raise NotImplementedError
