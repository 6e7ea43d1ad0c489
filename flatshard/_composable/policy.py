"""The policy walker: which submodules become units.

A policy may be

- a module class, or a set, list or tuple of classes;
- :class:`ModuleWrapPolicy` (the same, spelled out) or :class:`CustomPolicy` (a function of the module, which may answer
  with keyword overrides for that unit);
- a callable ``(module, recurse, nonwrapped_numel) -> bool``, such as :func:`size_based_auto_wrap_policy`,
  :func:`transformer_auto_wrap_policy` or :func:`lambda_auto_wrap_policy` with ``functools.partial``.

The policies of ``torch.distributed.fsdp.wrap`` are accepted too. They are known by their shape, not by import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from torch import nn

from flatshard._errors import name_list

Overrides = dict[str, Any]
Policy: TypeAlias = (
    "type[nn.Module] | Iterable[type[nn.Module]] | ModuleWrapPolicy | CustomPolicy | Callable[..., bool] | None"
)


class ModuleWrapPolicy:
    """Every module of the given classes becomes a unit.

    >>> fully_shard(model, policy=ModuleWrapPolicy({TransformerBlock}))
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = _as_classes(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(c.__name__ for c in self.module_classes)}}})"


class CustomPolicy:
    """``function(module)`` answers True (a unit), False (not), or a dict: a unit with these arguments of ``fully_shard``.

    >>> CustomPolicy(lambda m: {"strategy": ShardingStrategy.SHARD_GRAD_OP} if m is model.head else isinstance(m, Block))
    """

    def __init__(self, function: Callable[[nn.Module], bool | Overrides]) -> None:
        self.function = function


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """A unit whenever ``min_num_params`` elements have come together, counted from the leaves up."""
    leaves = tuple(force_leaf_modules if force_leaf_modules is not None else {nn.MultiheadAttention})
    excluded = tuple(exclude_wrap_modules if exclude_wrap_modules is not None else {nn.ModuleList, nn.ModuleDict})
    large = nonwrapped_numel >= min_num_params
    if recurse:
        return large and not isinstance(module, leaves)
    return large and not isinstance(module, excluded)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """A unit for each module of the given classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """A unit wherever ``lambda_fn(module)`` is true."""
    return recurse or lambda_fn(module)


def choose_units(root: nn.Module, policy: Policy, ignored: set[nn.Module]) -> dict[nn.Module, Overrides]:
    """The submodules of ``root`` that ``policy`` makes units, with the arguments each overrides.

    ``root`` itself is a unit in any case and is in the result only where the policy overrides arguments for it.

    Raises:
        ValueError: ``policy`` is none of the kinds above.
    """
    if policy is None:
        return {}
    if isinstance(policy, ModuleWrapPolicy):
        return _by_class(root, policy.module_classes, ignored)
    if isinstance(policy, CustomPolicy):
        return _by_function(root, policy.function, ignored)
    if isinstance(policy, type) or _is_classes(policy):
        return _by_class(root, _as_classes(policy), ignored)
    torch_classes = getattr(policy, "_module_classes", None)  # torch.distributed.fsdp.wrap.ModuleWrapPolicy
    if torch_classes is not None:
        return _by_class(root, _as_classes(torch_classes), ignored)
    torch_function = getattr(policy, "_lambda_fn", None)  # torch.distributed.fsdp.wrap.CustomPolicy
    if torch_function is not None:
        return _by_function(root, torch_function, ignored)
    if callable(policy):
        chosen: dict[nn.Module, Overrides] = {}
        _walk(root, policy, ignored, chosen, is_root=True)
        return _warn_if_none(chosen, root, "the policy's condition", [])
    raise ValueError(
        f"policy={policy!r} is not a policy: pass a module class, a set of classes, ModuleWrapPolicy, CustomPolicy, or a "
        "callable (module, recurse, nonwrapped_numel) -> bool"
    )


def _as_classes(value: Any) -> tuple[type[nn.Module], ...]:
    classes = (value,) if isinstance(value, type) else tuple(value)
    for item in classes:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            raise ValueError(f"policy: {item!r} is not an nn.Module class")
    if not classes:
        raise ValueError("policy: an empty collection of classes selects nothing; pass policy=None for a single unit")
    return classes


def _is_classes(value: Any) -> bool:
    return isinstance(value, set | frozenset | list | tuple)


def _modules(root: nn.Module, ignored: set[nn.Module]) -> Iterable[nn.Module]:
    return (m for m in root.modules() if m not in ignored)


def _by_class(
    root: nn.Module, classes: tuple[type[nn.Module], ...], ignored: set[nn.Module]
) -> dict[nn.Module, Overrides]:
    chosen: dict[nn.Module, Overrides] = {m: {} for m in _modules(root, ignored) if isinstance(m, classes)}
    return _warn_if_none(chosen, root, "the policy's classes", [c.__qualname__ for c in classes])


def _by_function(
    root: nn.Module, function: Callable[[nn.Module], bool | Overrides], ignored: set[nn.Module]
) -> dict[nn.Module, Overrides]:
    chosen: dict[nn.Module, Overrides] = {}
    for module in _modules(root, ignored):
        answer = function(module)
        if isinstance(answer, dict):
            chosen[module] = answer
        elif isinstance(answer, bool):
            if answer:
                chosen[module] = {}
        else:
            raise ValueError(
                f"the CustomPolicy function answered {answer!r} for a {type(module).__name__}; it must answer True, "
                "False, or a dict of keyword arguments"
            )
    return _warn_if_none(chosen, root, "the policy's function", [])


def _walk(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    chosen: dict[nn.Module, Overrides],
    is_root: bool = False,
) -> int:
    """The recursion that FSDP1 runs on callables: children first, each told how many elements no unit below took."""
    numel = sum(p.numel() for p in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(_walk(child, policy, ignored, chosen) for child in module.children() if child not in ignored)
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        chosen[module] = {}
        return numel
    return taken


def _warn_if_none(
    chosen: dict[nn.Module, Overrides], root: nn.Module, sought: str, names: list[str]
) -> dict[nn.Module, Overrides]:
    if not chosen:
        seen = sorted({type(m).__name__ for m in root.modules()})
        warnings.warn(
            f"fully_shard: {sought} {name_list(names) + ' ' if names else ''}matched no submodule, so "
            f"{type(root).__name__} is a single unit: its whole size is unsharded at once. Classes in the module: "
            f"{name_list(seen, 20)}",
            stacklevel=4,
        )
    return chosen
