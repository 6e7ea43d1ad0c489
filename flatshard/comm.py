"""Collectives: how units communicate, ours and the interface for your own, and hooks in the place of reductions.

>>> flatshard.fully_shard(model, policy={Block}, collectives=flatshard.comm.QuantizedCollectives())
"""

from flatshard._comm.backends import DefaultCollectives, GlooCollectives, builtin_collectives
from flatshard._comm.collectives import Collectives, Pending
from flatshard._comm.quantized import QuantizedCollectives
from flatshard._composable.features.comm_hooks import (
    CommHookHandle,
    CommHookState,
    bf16_compress_hook,
    fp16_compress_hook,
    register_comm_hook,
)

__all__ = [
    "Collectives",
    "CommHookHandle",
    "CommHookState",
    "DefaultCollectives",
    "GlooCollectives",
    "Pending",
    "QuantizedCollectives",
    "bf16_compress_hook",
    "builtin_collectives",
    "fp16_compress_hook",
    "register_comm_hook",
]
