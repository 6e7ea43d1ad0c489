"""The types of a sharded module's parameters and gradients between steps, and what they say about this rank's shard.

>>> flatshard.tensors.shard_info(model[0].up.weight).shape
"""

from torch import nn

from flatshard._handle.tensors.shard_info import ShardInfo as ShardInfo
from flatshard._handle.tensors.sharded_gradient import ShardedGradient
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info

__all__ = ["ShardedGradient", "ShardedParameter", "full_shape", "num_parameters", "shard_info"]


def num_parameters(module: nn.Module, *, trainable_only: bool = False) -> int:
    """Return how many elements the full parameters of ``module`` have. Tied ones count once. No communication.

    ``sum(p.numel() for p in module.parameters())`` of a sharded module counts this rank's shards.

    Example::

        print(f"{flatshard.tensors.num_parameters(model) / 1e6:.1f} M parameters")

    Args:
        module: any module, sharded or not.
        trainable_only: leave out parameters that require no gradient.
    """
    params = (p for p in module.parameters() if p.requires_grad or not trainable_only)
    return sum(full_shape(p).numel() for p in params)
