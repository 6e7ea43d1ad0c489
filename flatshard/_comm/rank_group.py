"""Ranks over which a few numbers can be reduced: those of a process group, or of several, or of some among others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch


class RankGroup:
    """Some ranks, over which a few numbers can be reduced. Two with the same ``number`` are equal: norms of what they shard
    are added up together.
    """

    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, device: torch.device, rank: int, world_size: int, number: int | None = None) -> None:
        """
        Args:
            device: of the numbers.
            rank: of this process in the group of ``world_size`` ranks.
            number: None: a new one. They increase in the order in which groups are first used, the same on all ranks.
        """
        self.number = next(self.numbers) if number is None else number
        self.device = device
        self.rank, self.world_size = rank, world_size

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
