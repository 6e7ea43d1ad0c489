"""Policies: they choose the submodules that become units. ``fully_shard(policy=...)`` also takes a class or a set of classes.

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
