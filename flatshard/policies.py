"""Which submodules become units: what ``fully_shard(policy=...)`` takes besides a class or a set of classes.

>>> flatshard.fully_shard(model, policy=flatshard.policies.size_based_auto_wrap_policy)
"""

from flatshard._composable.policy import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]
