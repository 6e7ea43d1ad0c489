"""The types of a sharded module's parameters and gradients between steps, and what they say about this rank's part.

>>> flatshard.tensors.shard_info(model.head.weight).shape
"""

from flatshard._handle.tensors.sharded_gradient import ShardedGradient
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, ShardInfo, full_shape, shard_info

__all__ = ["ShardInfo", "ShardedGradient", "ShardedParameter", "full_shape", "shard_info"]
