"""How units communicate: the built-in collectives, the interface for your own, and communication hooks for gradients.

>>> flatshard.fully_shard(model, policy={Block}, collectives=flatshard.comm.QuantizedCollectives())

To send fewer bytes, first choose the dtype: ``MixedPrecision(reduce_dtype=torch.bfloat16)`` sends and averages gradients in
bfloat16, on every backend. The others do what no dtype can:

- ``DefaultCollectives(group, widens=True)``: gradients that were computed in 16 bits are sent in 16 bits, but added in
  ``reduce_dtype=torch.float32``. Over gloo this is the default. Over NCCL it takes an all-to-all and more memory.
- ``QuantizedCollectives``: parameters and gradients are sent in 8 bits, with an error.
- ``register_comm_hook``: a reduction of your own, such as PowerSGD, or a hook that was written for FSDP1. The ready-made
  ``bf16_compress_hook`` does what ``reduce_dtype=torch.bfloat16`` does. It is there because FSDP1 has it, and because a hook
  can be registered and removed while training.

Classes of collectives call their argument ``group``, as functions of ``torch.distributed`` do, and not ``process_group``.
"""

from flatshard._comm.backends import BuiltinCollectives as BuiltinCollectives
from flatshard._comm.backends import DefaultCollectives, GlooCollectives, builtin_collectives
from flatshard._comm.collectives import Collectives, Pending
from flatshard._comm.quantized import QuantizedCollectives
from flatshard._composable.features.comm_hooks import CommHookHandle as CommHookHandle
from flatshard._composable.features.comm_hooks import (
    CommHookState,
    bf16_compress_hook,
    fp16_compress_hook,
    register_comm_hook,
)

__all__ = [
    "Collectives",
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
