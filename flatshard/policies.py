"""Policies, which choose the submodules that become units. ``fully_shard(policy=...)`` also takes a class or a set of them.

>>> flatshard.fully_shard(model, policy=flatshard.policies.size_based_auto_wrap_policy)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flatshard._base.names import module_names
from flatshard._composable.construct.policy import CustomPolicy, ModuleWrapPolicy, SplitRoot
from flatshard._composable.construct.repeated import repeated_blocks

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "SplitRoot",
    "find_blocks",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that ``module`` repeats, by name, as ``policy="auto"`` makes them units; none if it repeats none.

    Blocks are modules of one class in a list, a ``Sequential`` or a ``ModuleDict``, or under numbered names. Of rows inside
    rows the outermost is chosen of which two members have the same shapes: layers, and not the experts in them; blocks, and
    not the stages around them, if each stage has another size. Modules that are small beside the largest block are left out.
    A single module beside them, such as the middle of a U-Net, is one more block, if it has a quarter of the elements of the
    largest block or more, and consists of several layers. The choice depends on the model alone, so it is the same on all
    ranks.

    Example::

        print(list(flatshard.policies.find_blocks(copy.deepcopy(model))))  # before it is sharded: ["0", "1", "2", "3"]
        flatshard.fully_shard(model, policy="auto")
    """
    names = module_names(module)
    return {names[block]: block for block in repeated_blocks(module, set())}


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Choose a unit for every ``min_num_params`` elements, counted from the leaves up.

    Example::

        policy = functools.partial(flatshard.policies.size_based_auto_wrap_policy, min_num_params=30_000)
        flatshard.fully_shard(model, policy=policy)

    Args:
        module: the module to decide about.
        recurse: True asks whether to look at the submodules, False whether ``module`` becomes a unit. ``fully_shard`` asks.
        nonwrapped_numel: elements of the parameters in ``module`` that are in no unit yet.
        min_num_params: the elements that a unit has at least.
        force_leaf_modules: classes of modules in which there are no units. None: ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes of modules that are no units. None: ``nn.ModuleList`` and ``nn.ModuleDict``.
    """
    leaves = tuple(force_leaf_modules if force_leaf_modules is not None else {nn.MultiheadAttention})
    excluded = tuple(exclude_wrap_modules if exclude_wrap_modules is not None else {nn.ModuleList, nn.ModuleDict})
    large = nonwrapped_numel >= min_num_params
    if recurse:
        return large and not isinstance(module, leaves)
    return large and not isinstance(module, excluded)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Choose each module of the given classes as a unit.

    Example::

        policy = functools.partial(flatshard.policies.transformer_auto_wrap_policy, transformer_layer_cls={Block})
        flatshard.fully_shard(model, policy=policy)

    Args:
        module: the module to decide about.
        recurse: True asks whether to look at the submodules, False whether ``module`` becomes a unit. ``fully_shard`` asks.
        nonwrapped_numel: elements of the parameters in ``module`` that are in no unit yet.
        transformer_layer_cls: the classes.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Choose each module as a unit for which ``lambda_fn(module)`` is true.

    Example::

        policy = functools.partial(
            flatshard.policies.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)
        )
        flatshard.fully_shard(model, policy=policy)

    Args:
        module: the module to decide about.
        recurse: True asks whether to look at the submodules, False whether ``module`` becomes a unit. ``fully_shard`` asks.
        nonwrapped_numel: elements of the parameters in ``module`` that are in no unit yet.
        lambda_fn: called with each module; returns whether it becomes a unit.
    """
    return recurse or lambda_fn(module)
