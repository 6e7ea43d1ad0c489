"""What a user can choose, and the environment: read once, here."""

from __future__ import annotations

import enum
import os
from typing import Any, TypeVar


class ShardingStrategy(enum.Enum):
    """What each rank keeps, and when it frees what it gathered.

    The names are those of FSDP1; members of ``torch.distributed.fsdp.ShardingStrategy`` are accepted wherever these are.
    """

    FULL_SHARD = "full_shard"
    """ZeRO-3: parameters, gradients and optimizer state sharded; parameters freed after forward and after backward."""
    SHARD_GRAD_OP = "shard_grad_op"
    """ZeRO-2: as FULL_SHARD, but parameters stay unsharded from forward to backward: one all-gather instead of two."""
    NO_SHARD = "no_shard"
    """Every rank keeps everything; gradients are all-reduced, one collective a unit."""
    HYBRID_SHARD = "hybrid_shard"
    """FULL_SHARD within a node, replicated across nodes. Not implemented yet: raises."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """SHARD_GRAD_OP within a node, replicated across nodes. Not implemented yet: raises."""

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)


class BackwardPrefetch(enum.Enum):
    """When the all-gather of the next unit in backward is issued. ``None`` in its place: never ahead of need."""

    BACKWARD_PRE = "backward_pre"
    """Before the current unit's backward computes: most overlap, one more unit unsharded."""
    BACKWARD_POST = "backward_post"
    """After the current unit's backward, when its parameters are freed: less overlap, less memory."""


E = TypeVar("E", bound=enum.Enum)


def as_enum(kind: type[E], value: Any, argument: str) -> E:
    """``value`` as a member of ``kind``; members of an enum of the same name (FSDP1's) are taken by their names."""
    if isinstance(value, kind):
        return value
    if isinstance(value, enum.Enum) and type(value).__name__ == kind.__name__ and value.name in kind.__members__:
        return kind[value.name]
    members = ", ".join(f"{kind.__name__}.{name}" for name in kind.__members__)
    raise ValueError(f"{argument}={value!r} is not one of {members}")


REDUCTIONS_IN_FLIGHT = 2
"""Gradient reductions that may hold their input at a time (FSDP2's knob has the same default in its torchtitan use)."""

TRACE = os.environ.get("FLATSHARD_TRACE", "0") not in ("0", "")
"""``FLATSHARD_TRACE=1``: log every unshard, reshard and collective with the unit's FQN (logger ``flatshard``, INFO)."""
