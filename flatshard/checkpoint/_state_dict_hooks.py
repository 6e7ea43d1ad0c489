"""``state_dict()`` and ``load_state_dict()`` of sharded modules, by torch's own hooks on each of them.

The hooks are on every module of a unit, so that the state dict of any submodule is right, too.

[Note: Nothing is changed by a bad checkpoint]
torch loads module by module, and raises at the end. Here the hook of the outermost module checks all keys, shapes and dtypes
below it. It raises one error with all names before anything is copied. If the values are full tensors, all ranks raise, as
each may have been given others: ``{}``, by ``full_state_dict(rank0_only=True)``. Shards are checked by each rank alone.
Modules that translate their values are not checked: their class overrides ``_load_from_state_dict``, or they have pre-hooks
of their own.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flatshard._base.callers import variables_of
from flatshard._composable.claims import Reason
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.find import FeatureLink
from flatshard._composable.state import Unit, owner_of
from flatshard._handle.registrations import SHARDED_PARAMS
from flatshard._handle.tensors.shard import ShardTensor
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, is_sharded_parameter, sharded_types
from flatshard._handle.unit_ranks import UnitRanks
from flatshard.checkpoint._barrier import agree
from flatshard.checkpoint._sharded_value import (
    NO_VALUES,
    ShardedValue,
    check_source,
    is_part,
    local_source,
    sharded_value,
)
from flatshard.checkpoint._standard_helpers import HELPERS, Request, model_request
from flatshard.checkpoint._state_dict import gather_parameters, idle_flats


class _Checked(threading.local):
    """The last ``load_state_dict`` that was checked. Its list of errors identifies it."""

    errors: list[str] | None = None
    prefix = ""


_checked = _Checked()


class StateDicts(Extension):
    """Hooks the modules of every unit, so that their state dicts have sharded values."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> UnitStateDicts:
        feature = UnitStateDicts(unit)
        hooks = StateDictHooks(feature.link)
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                module.register_state_dict_pre_hook(hooks.before_state_dict)  # type: ignore[no-untyped-call]
                module.register_state_dict_post_hook(functools.partial(_after_state_dict))  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(hooks.before_load)  # type: ignore[no-untyped-call]
        return feature


class UnitStateDicts(ForwardFeature):
    """The unit of the hooks on its modules."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.link = FeatureLink(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitStateDicts:
        result = UnitStateDicts(copy.deepcopy(self.unit, memo))
        result.link = self.link.give_to_copy(result, memo)
        return result


class StateDictHooks:
    """Hooks on the modules of one unit."""

    def __init__(self, link: FeatureLink[UnitStateDicts]) -> None:
        self._link = link

    def adopt_changes(self) -> None:
        """Take over what the user replaced, so that what is registered is what the shards hold.

        After ``unshard()`` the sharded parameters are registered again: the memory of unsharded ones is freed later.
        """
        feature = self._link.feature
        for unit in () if feature is None else feature.unit.needs:
            if unit.claims and unit.claims.in_use:
                continue
            if unit.is_unsharded_by_user:
                unit.show()
                if unit.handle.user_changes.conversions():
                    unit.release(Reason.ASKED)  # which adopts them
            if unit.handle.registrations.shows is SHARDED_PARAMS:
                unit.handle.check_parameters()

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if vars(module)["_parameters"]:
            self.adopt_changes()

    def before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Replace full values by this rank's shards."""
        self.adopt_changes()
        if _checked.errors is not error_msgs or not prefix.startswith(_checked.prefix):
            _check(module, state_dict, prefix)
            _checked.errors, _checked.prefix = error_msgs, prefix
        for name, param in module._parameters.items():
            key = prefix + name
            if is_sharded_parameter(param) and key in state_dict:
                info = param._flatshard_info
                if problem := check_source(info, param.dtype, state_dict[key]):
                    raise RuntimeError(f"load_state_dict: {key!r}: {problem}")
                state_dict[key] = local_source(info, state_dict[key])


def _after_state_dict(module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace each shard in ``destination`` by a `ShardedValue`. With ``keep_vars`` the parameters stay themselves."""
    parameters: dict[str, Any] = vars(module)["_parameters"]
    for name, param in dict.items(parameters):  # the sharded parameters, whatever the module shows
        key = prefix + name
        value = destination.get(key)
        if value is None or type(param) not in sharded_types or type(value) not in (torch.Tensor, ShardTensor):
            continue  # other hooks may have put something else there
        if type(value) is torch.Tensor and (value.shape != param.shape or parameters.get(name) is not param):
            continue  # a full parameter
        destination[key] = found = sharded_value(value.as_subclass(torch.Tensor), param)
        if HELPERS in sys.modules and isinstance(found, ShardedValue):
            request = model_request(destination)
            if request is not None and request.is_full:
                destination[key] = _full_values(destination, request)[id(param)]


def _full_values(destination: dict[str, Any], request: Request) -> dict[int, torch.Tensor]:
    """Return the full values of all parameters by id. _standard_helpers.py, [Note: Full state for the standard helpers]

    They are gathered together, for the hooks of several modules. An attribute of the dict keeps them as long as it lives.
    """
    kept = vars(destination)
    if _FULL not in kept:
        call = "get_model_state_dict(full_state_dict=True)"
        wanted = {id(p) for p in request.module.parameters() if isinstance(p, ShardedParameter)}
        flats = idle_flats(request.module, call)
        kept[_FULL] = gather_parameters(flats, wanted, call, request.receives, request.device)
    found: dict[int, torch.Tensor] = kept[_FULL]
    return found


_FULL = "_flatshard_full"


# -- checking ----------------------------------------------------------------------------------------------------------


def _check(root: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """[Note: Nothing is changed by a bad checkpoint]

    Raises:
        RuntimeError: ``state_dict`` does not fit ``root``.
    """
    expected: set[str] = set()
    missing: list[str] = []
    problems: list[str] = []
    free: list[str] = []  # prefixes of modules that translate
    for at, module in _named_modules(root, prefix):
        if at.startswith(tuple(free)):
            continue
        if translates(module):
            free.append(at)
            continue
        for name, tensor in _persistent(module):
            expected.add(at + name)
            if at + name not in state_dict:
                if name != "num_batches_tracked":  # old checkpoints lack it
                    missing.append(at + name)
            elif problem := _problem(tensor, state_dict[at + name]):
                problems.append(f"{at + name}: {problem}")
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            expected.add(f"{at}_extra_state")
            if f"{at}_extra_state" not in state_dict:
                missing.append(f"{at}_extra_state")
    if _is_strict():
        unexpected = [
            k for k in state_dict if k.startswith(prefix) and k not in expected and not k.startswith(tuple(free))
        ]
        if unexpected:
            problems.insert(0, f"Unexpected key(s) in state_dict: {', '.join(map(repr, unexpected))}. ")
        if missing:
            problems.insert(0, f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}. ")
    if problems and not any(key.startswith(prefix) for key in state_dict):
        problems.append(_EMPTY)
    lines = "\n\t".join(problems)
    text = f"Error(s) in loading state_dict for {type(root).__name__}, in which nothing has been changed:\n\t{lines}"
    agree(_to_ask(root, state_dict, prefix), "load_state_dict", text if problems else None, RuntimeError)


_EMPTY = (
    "It is empty here. Only the first rank has the values of full_state_dict(rank0_only=True): for all to load them, call "
    "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state, options=StateDictOptions("
    "full_state_dict=True, broadcast_from_rank0=True)), for which torch needs NumPy. Or read one file on all ranks, "
    "torch.load(path, mmap=True)"
)


def _to_ask(root: nn.Module, state_dict: dict[str, Any], prefix: str) -> set[UnitRanks]:
    """Return the ranks that must agree on this load: if full values are loaded, all that have shards of a parameter."""
    if any(isinstance(v, ShardedValue) or is_part(v) for key, v in state_dict.items() if key.startswith(prefix)):
        return set()
    sharded = [param for module in root.modules() for param in module._parameters.values() if is_part(param)]
    return {each for param in sharded if (owner := owner_of(param)) is not None for each in owner.handle.all_ranks}


def _named_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over modules as ``load_state_dict`` does: under each of their names."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{prefix}{name}.")


def translates(module: nn.Module) -> bool:
    """Return whether ``module`` may load other values than the state dict has under its names."""
    load = type(module)._load_from_state_dict
    if load is not nn.Module._load_from_state_dict and not load.__module__.startswith("torch.nn.modules."):
        return True
    hooks = [getattr(h, "hook", h) for h in module._load_state_dict_pre_hooks.values()]
    return any([not isinstance(getattr(h, "__self__", None), StateDictHooks) for h in hooks])


def has_plain_names(module: nn.Module) -> bool:
    """Return whether the state dict has the parameters of ``module`` under the names that modules have."""
    kind, hooks = type(module), module._state_dict_hooks.values()
    is_plain = kind.state_dict is nn.Module.state_dict and kind._save_to_state_dict is nn.Module._save_to_state_dict
    return is_plain and all([getattr(hook, "func", None) is _after_state_dict for hook in hooks])


def _persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def _problem(tensor: torch.Tensor, source: Any) -> str | None:
    if is_sharded_parameter(tensor):
        return check_source(tensor._flatshard_info, tensor.dtype, source)
    if not isinstance(source, torch.Tensor):
        return f"expected a tensor, got a {type(source).__name__}"
    if source.is_meta and not tensor.is_meta:
        return NO_VALUES
    if nn.parameter.is_lazy(tensor) or (tensor.dim() == 0 and source.shape == (1,)):
        return None
    if tensor.shape != source.shape:
        return f"size mismatch: the checkpoint has shape {tuple(source.shape)}, the model has {tuple(tensor.shape)}"
    return None  # any dtype, as in torch


def _is_strict() -> bool:
    """Return the ``strict=`` that the user gave to ``load_state_dict``. Hooks get True in any case."""
    call = variables_of(nn.Module.__module__, "load_state_dict")
    return call is not None and bool(call["strict"])
