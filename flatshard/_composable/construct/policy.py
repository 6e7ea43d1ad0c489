"""Which submodules become units: policies, and checks of the modules that they choose.

A policy may be

- a module class, or a set, list or tuple of classes. A tuple of modules among them makes these modules one unit:
  ``{Block, (model.norm, model.head)}``;
- :class:`ModuleWrapPolicy` (classes, spelled out) or :class:`CustomPolicy` (a function of the module, which may return
  keyword arguments that override those of the call for this unit);
- a callable ``(module, recurse, nonwrapped_numel) -> bool``, such as :func:`size_based_auto_wrap_policy`,
  :func:`transformer_auto_wrap_policy` or :func:`lambda_auto_wrap_policy` with ``functools.partial``;
- names of modules with the arguments of ``fully_shard`` that each overrides: ``{"layers.0": {}, "layers.1": {...}}``;
- ``"auto"``: the blocks that the module repeats, as :func:`~flatshard.policies.find_blocks` finds them;
- :class:`SplitRoot` of one of these, which makes units of what it leaves, too.

The policies of ``torch.distributed.fsdp.wrap`` are accepted, too. They are recognised by their attributes, without an import.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from flatshard._base.errors import name_list, warn_user, why_not_called
from flatshard._base.names import plain_name
from flatshard._composable.construct.repeated import repeated_blocks
from flatshard._composable.module_tree import ModuleGroup, called_modules
from flatshard._composable.state import unit_of
from flatshard._handle.tensors.sharded_parameter import shard_info

_SCRIPTED_CURE = "a scripted module can be inside a unit, but not a unit itself. Shard the module that calls it"

Overrides = dict[str, Any]
Policy: TypeAlias = (
    "type[nn.Module] | Iterable[type[nn.Module] | Sequence[nn.Module]] | ModuleWrapPolicy | CustomPolicy | "
    "SplitRoot | Mapping[str, Overrides] | str | Callable[..., bool] | None"
)


class ModuleWrapPolicy:
    """Every module of the given classes becomes a unit. ``policy={Block}`` means the same.

    >>> flatshard.fully_shard(model, policy=flatshard.policies.ModuleWrapPolicy({Block}))

    Args:
        module_classes: the classes; subclasses count.

    Raises:
        TypeError: something in ``module_classes`` is not a class.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self.module_classes = _as_classes(module_classes)

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(c.__name__ for c in self.module_classes)}}})"


class CustomPolicy:
    """A policy that asks ``function(module)``: True for a unit, False for none, or a dict for a unit with these arguments.

    The dict has arguments of ``fully_shard``. An empty dict counts as False, as in FSDP1.

    Example::

        def choose(module):
            if module is model[0]:
                return {"strategy": flatshard.ShardingStrategy.SHARD_GRAD_OP}
            return isinstance(module, Block)

        flatshard.fully_shard(model, policy=flatshard.CustomPolicy(choose))
    """

    def __init__(self, function: Callable[[nn.Module], bool | Overrides]) -> None:
        self.function = function


class SplitRoot:
    """A policy that splits the outermost unit: modules before and after the units of ``policy`` become units, too.

    Without it, embeddings, final norm and head are one unit, the outermost, which stays gathered from its forward to the end
    of backward. With it they are gathered when they run, and freed afterwards, as blocks are. The peak of memory is lower,
    and each is gathered twice in a step instead of once. Numbers and checkpoints are the same. The unit at the end is the
    first that backward needs: ``configure(model.head, reshard_after_forward=False)`` saves its second gather.

    Modules beside the units become units. Neighbours, in the order of registration, are one unit: ``norm`` and ``head``.
    The outermost unit keeps parameters of the model itself and of modules around units, and modules that are also inside
    a unit or in two of the new ones. A parameter that is tied between two new units belongs to the first. The other gathers
    it, too; in between it is freed in forward, but not in backward. If ``policy`` chooses no unit, nothing is split.

    Units are gathered by calling them. **A module whose weight is used without calling it** (``F.linear(x,
    self.embedding.weight)``) has shards there, which mostly raises an error of shapes. Then don't split: name the modules
    that are called, as in ``policy={Block, (model.norm, model.head)}``.

    >>> flatshard.fully_shard(model, policy=flatshard.policies.SplitRoot({Block}))

    Args:
        policy: any policy that ``fully_shard`` accepts; None to split around the units of earlier calls.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy


def choose_units(
    root: nn.Module,
    policy: Policy,
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    earlier: Sequence[nn.Module],
) -> tuple[dict[nn.Module, Overrides], list[nn.Module]]:
    """Return the modules (or groups of them) that become units, with the arguments that ``policy`` overrides for each.

    ``root`` is always among them. The second result has those that :class:`SplitRoot` adds at the ends. The units of
    ``earlier`` calls, and everything below them, stay as they are.

    Raises:
        TypeError, ValueError: ``policy`` is none of the above, or a module that it chose cannot be a unit.
    """
    sharded = {module for unit in earlier for module in unit.modules()}
    overrides = _ask_policy(root, policy, ignored | sharded, ignored_params)
    ends = []
    if isinstance(policy, SplitRoot):
        ends = _choose_ends(root, [*overrides, *earlier], ignored, ignored_params)
        overrides |= dict.fromkeys(ends, overrides.get(root, {}))
    _check_chosen(root, overrides, ignored, sharded)
    overrides.setdefault(root, {})
    return overrides, ends


def _ask_policy(
    root: nn.Module, policy: Policy, ignored: set[nn.Module], ignored_params: set[nn.Parameter]
) -> dict[nn.Module, Overrides]:
    """Return the modules that ``policy`` chooses, with the arguments that it overrides; it is not asked about ``ignored``."""
    policy, groups = _without_groups(policy.policy if isinstance(policy, SplitRoot) else policy)
    chosen: dict[nn.Module, Overrides] = {}
    sought: str | None = None  # names the kind of policy in the warning if it chooses nothing
    classes = _classes_of(policy)
    if policy is None:
        pass
    elif isinstance(policy, Mapping):
        chosen = _by_name(root, policy, ignored)
    elif isinstance(policy, str):
        if policy != "auto":
            raise ValueError(
                f"policy={policy!r}: the only policy with a name is 'auto', the blocks that a model repeats. For the modules "
                "of some classes: policy={Block}"
            )
        chosen = {block: {} for block in repeated_blocks(root, ignored)}
        sought = "policy='auto', which looks for blocks that are repeated,"
    elif classes is not None:
        chosen = {m: {} for m in root.modules() if isinstance(m, classes) and m not in ignored}
        sought = "the policy's classes"
    elif function := policy.function if isinstance(policy, CustomPolicy) else getattr(policy, "_lambda_fn", None):
        chosen = _by_function(root, function, ignored)
        sought = "the policy's function"
    else:
        _walk(root, _checked_callable(policy), ignored, ignored_params, chosen, is_root=True)
        sought = "the policy's condition"
    chosen = {m: overrides for m, overrides in chosen.items() if not is_never_called(m)}
    if not chosen and sought is not None:
        seen = sorted({type(m).__name__ for m in root.modules()})
        sought += f" {name_list([c.__qualname__ for c in classes])}" if classes else ""
        warn_user(
            f"fully_shard: {sought} matched no submodule, so {'the rest of ' if groups else ''}{type(root).__name__} is a "
            f"single unit: its whole size is unsharded at once. Classes in the module: {name_list(seen, 20)}"
        )
    for group in groups:
        for module in group:
            chosen.pop(module, None)
        chosen[group] = {}
    return chosen


def _choose_ends(
    root: nn.Module, units: Iterable[nn.Module], ignored: set[nn.Module], ignored_params: set[nn.Parameter]
) -> list[nn.Module]:
    """Return the modules, or groups of them, that :class:`SplitRoot` makes units beside ``units``."""
    called = {m for unit in units if unit is not root for m in called_modules(unit)}
    inside = {m for unit in called for m in unit.modules()}
    runs: list[list[nn.Module]] = [[]]  # a new one after each unit
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child in called:
                runs.append([])
            elif child not in ignored | seen:
                seen.add(child)
                if not has_forward(child) or not inside.isdisjoint(child.modules()):
                    visit(child)
                elif not isinstance(child, torch.jit.ScriptModule) and not ignored_params.issuperset(
                    child.parameters()
                ):
                    runs[-1].append(child)

    for module in called_modules(root) if called else ():
        visit(module)
    times = Counter(m for run in runs for each in run for m in each.modules())
    alone = [[each for each in run if all(times[m] == 1 for m in each.modules())] for run in runs]
    return [run[0] if len(run) == 1 else ModuleGroup(run) for run in alone if run]


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` can be called."""
    # torch.compile(module) returns a module whose forward is an attribute of the instance.
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def is_never_called(module: nn.Module) -> bool:
    """Return whether this is the ``out_proj`` of an ``nn.MultiheadAttention``, which reads its weight without calling it.

    Hooks on it would never run, so its parameters belong to the enclosing unit.
    """
    return isinstance(module, NonDynamicallyQuantizableLinear)


def _without_groups(policy: Policy) -> tuple[Policy, list[ModuleGroup]]:
    """Return ``policy`` without its tuples of modules, and a group for each of these."""
    if not isinstance(policy, set | frozenset | list | tuple):
        return policy, []
    given = [item for item in policy if isinstance(item, list | tuple)]
    for item in given:
        if odd := [each for each in item if not isinstance(each, nn.Module)]:
            raise ValueError(
                f"policy: {odd[0]!r} is not a module: a tuple among the classes holds the modules of one unit, as in "
                "policy={Block, (model.norm, model.head)}"
            )
    classes = [item for item in policy if item not in given]
    return classes if classes or not given else None, [ModuleGroup(item) for item in given]


def _classes_of(policy: Any) -> tuple[type[nn.Module], ...] | None:
    """Return the classes of a policy that consists of classes, flatshard's or torch's; None for other policies."""
    if isinstance(policy, ModuleWrapPolicy):
        return policy.module_classes
    if isinstance(policy, type | set | frozenset | list | tuple):
        return _as_classes(policy)
    torch_classes = getattr(policy, "_module_classes", None)  # torch.distributed.fsdp.wrap.ModuleWrapPolicy
    return None if torch_classes is None else _as_classes(torch_classes)


def _checked_callable(policy: Any) -> Callable[..., bool]:
    if isinstance(policy, nn.Module):  # its `__call__` takes anything
        raise ValueError(f"policy is a {type(policy).__name__}: pass the class, policy={{{type(policy).__name__}}}")
    if (why := why_not_called(policy, module=None, recurse=True, nonwrapped_numel=0)) is not None:
        raise ValueError(
            f"policy={getattr(policy, '__name__', policy)} cannot be called as policy(module=..., recurse=..., "
            f"nonwrapped_numel=...): {why}. For a function of the module alone use policy=flatshard.CustomPolicy(function); "
            "for the modules of some classes policy={Block}"
        )
    checked: Callable[..., bool] = policy
    return checked


def _as_classes(value: Any) -> tuple[type[nn.Module], ...]:
    classes = (value,) if isinstance(value, type) else tuple(value)
    for item in classes:
        if not (isinstance(item, type) and issubclass(item, nn.Module)):
            if isinstance(item, nn.Module):
                kind = type(item).__name__
                raise ValueError(f"policy holds an instance of {kind}: pass the class, policy={{{kind}}}")
            raise ValueError(f"policy: {item!r} is not an nn.Module class: pass classes, as in policy={{Block}}")
    if not classes:
        raise ValueError("policy: an empty collection of classes selects nothing; pass policy=None for a single unit")
    return classes


def _by_name(root: nn.Module, policy: Mapping[str, Overrides], ignored: set[nn.Module]) -> dict[nn.Module, Overrides]:
    modules = {plain_name(name): module for name, module in root.named_modules()}
    chosen: dict[nn.Module, Overrides] = {}
    for name, overrides in policy.items():
        module = modules.get(name)
        if module is None or module in ignored:
            why = "has no such module" if module is None else "has it, but it is ignored or sharded already"
            raise ValueError(
                f"the policy names {name!r}, and {type(root).__name__} {why}. Its modules: {name_list(modules, 20)}"
            )
        if not isinstance(overrides, dict):
            raise ValueError(f"the policy has {overrides!r} for {name!r}: it must be a dict of arguments, or {{}}")
        chosen[module] = overrides
    return chosen


def _by_function(
    root: nn.Module, function: Callable[[nn.Module], bool | Overrides], ignored: set[nn.Module]
) -> dict[nn.Module, Overrides]:
    chosen: dict[nn.Module, Overrides] = {}
    for module in root.modules():
        answer = module not in ignored and function(module)
        if not isinstance(answer, dict | bool):
            raise ValueError(
                f"the CustomPolicy function returned {answer!r} for a {type(module).__name__}; it must return True, "
                "False, or a dict of keyword arguments"
            )
        if answer:
            chosen[module] = answer if isinstance(answer, dict) else {}
    return chosen


def _walk(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
    chosen: dict[nn.Module, Overrides],
    is_root: bool = False,
) -> int:
    """Choose units as FSDP1 does for callables: children first. Return the number of elements that are in units now."""
    # Parameters that earlier calls sharded are not counted: they are in a unit, and their size depends on the rank.
    numel = sum(p.numel() for p in module.parameters() if p not in ignored_params and shard_info(p) is None)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    children = [child for child in module.children() if child not in ignored]
    taken = sum([_walk(child, policy, ignored, ignored_params, chosen) for child in children])
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        chosen[module] = {}
        return numel
    return taken


def check_module(module: Any, what: str = "module") -> None:
    """Raise if ``module``, the argument ``what``, cannot be a unit."""
    if not isinstance(module, nn.Module):
        cure = "pass the model itself, not its parameters or its state"
        raise TypeError(f"fully_shard takes an nn.Module as {what}, got a {type(module).__name__}; {cure}")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "fully_shard was called inside torch.inference_mode(), where tensors are made that cannot be trained: call it "
            "outside. The model's forward may run inside"
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"fully_shard cannot hook a {type(module).__name__}: {_SCRIPTED_CURE}")
    if unit_of(module) is not None:
        raise ValueError(
            f"this {type(module).__name__} is sharded already: fully_shard was called on it, or a policy chose it. Call "
            "fully_shard once per module, and on inner modules first"
        )
    if is_never_called(module):
        raise ValueError(
            "this is the out_proj of an nn.MultiheadAttention, which reads its weight but never calls it, so its hooks would "
            "never run. Shard the MultiheadAttention instead"
        )
    if not has_forward(module):
        raise ValueError(
            f"{type(module).__name__} has no forward, so its hooks would never run. Shard its items, "
            "`for m in container: fully_shard(m)`, or the module that calls them"
        )


def check_group(modules: Sequence[Any], what: str = "fully_shard of a list") -> None:
    """Raise if ``modules`` cannot be one unit. ``what`` names, in errors, the call that asks for it."""
    if not modules:
        raise ValueError(f"{what}: it is empty. List the modules that are to be one unit: [model.norm, model.head]")
    for module in modules:
        check_module(module, "an item of the list")
    for module, other in itertools.permutations(modules, 2):
        if other in set(module.modules()):
            found = f"a {type(other).__name__} is in it twice"
            if other is not module:
                found = f"a {type(other).__name__} in it is inside a {type(module).__name__} in it"
            raise ValueError(f"{what}: {found}. List modules that are beside each other, each once")


def _check_chosen(
    root: nn.Module, chosen: Iterable[nn.Module], ignored: set[nn.Module], sharded: set[nn.Module]
) -> None:
    """Raise if a module that a policy chose cannot be a unit."""
    names = {m: n for n, m in root.named_modules()}
    grouped: dict[nn.Module, ModuleGroup] = {}
    for module in chosen:
        if isinstance(module, ModuleGroup):
            check_group(tuple(module), "a tuple of modules in the policy")
            for each in module:
                what = f"a tuple of modules in the policy has a {type(each).__name__}"
                if each is root or each not in names:
                    raise ValueError(f"{what}, which is not a submodule of the {type(root).__name__} to shard")
                if each in ignored or each in sharded:
                    why = "is sharded already" if each in sharded else "is in ignored_states, too"
                    raise ValueError(f"{what}, {names[each]!r}, which {why}")
                if grouped.setdefault(each, module) is not module:
                    raise ValueError(f"{what}, {names[each]!r}, which is in another tuple, too: one unit has it")
            continue
        what = f"the policy chose {names[module]!r}, a {type(module).__name__}"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{what}, which fully_shard cannot hook: {_SCRIPTED_CURE}")
        if not has_forward(module):
            raise ValueError(f"{what}, which has no forward: choose its items instead")
