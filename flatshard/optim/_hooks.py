"""Checks before and after each step of an optimizer of sharded parameters.

[Note: Steps that change nothing]
Four mistakes would make ``step()`` return without an error and without effect. Inside ``no_sync``, and after it until they
are reduced, gradients are accumulated but not in ``.grad``. Inside ``summon_full_params`` a step changes the shards, which
the exit overwrites with the unsharded parameters. An optimizer that was built inside holds the unsharded parameters, which
nobody reads afterwards. And after ``p.data = ...`` the step of a flat parameter, or of a full one, would change the previous
memory of ``p``, while the next forward adopts the new one: so a step adopts what was replaced since the last step. Any other
step pays for two checks: that no queue holds gradients, and that no such context is active.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flatshard._base.config import Until
from flatshard._base.errors import name_list
from flatshard._base.optimizers import params_of
from flatshard._composable.extensions import Extension
from flatshard._composable.features.grad_sync import check_reduced, held_units
from flatshard._composable.features.other_code import added_later
from flatshard._composable.features.summon import copy_names, summoned_units
from flatshard._composable.find import all_units
from flatshard._composable.state import Unit
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.registrations import UNSHARDED_PARAMS
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard.checkpoint._optimizer_hooks import hook_optimizer
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._suitability import warn_of_lost_rule, why_unsuitable


@dataclass
class _CheckRecord:
    """An optimizer that may step the parameters that it has. Dropped when it gets more, or more modules are sharded."""

    count: int  # of its parameters
    kept: list[nn.Parameter]  # see `_kept_parameters`
    changes: int = -1  # `changes.count` at its last step
    has_state: bool = False  # its state has been looked at

    @staticmethod
    def of(optimizer: Optimizer) -> _CheckRecord | None:
        """Return the record of ``optimizer``, or None if it must be checked."""
        found = _checked.get(optimizer)
        if found is None or found.count != sum(len(group["params"]) for group in optimizer.param_groups):
            return None
        return found


_checked: weakref.WeakKeyDictionary[Optimizer, _CheckRecord] = weakref.WeakKeyDictionary()
_LOW = (torch.bfloat16, torch.float16)
_after_step: dict[Callable[..., None], RemovableHandle] = {}  # hooks for which some unit has a use


class Optimizers(Extension):
    """Registers the hooks that check optimizers before they step."""

    def set_up(self) -> None:
        register_optimizer_step_pre_hook(_before_step)
        _see_state_dicts()

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        _checked.clear()  # an optimizer may have stepped before its parameters were sharded
        if any([_keeps(unit.config) for unit in made]):
            _call_after_steps(_note_step)
        if any([flat.kind.dtype in _LOW and flat.kind.is_trainable for unit in made for flat in unit.handle.flats]):
            _call_after_steps(_warn_of_low_precision)


def _call_after_steps(hook: Callable[..., None]) -> None:
    if hook not in _after_step:
        _after_step[hook] = register_optimizer_step_post_hook(hook)


def _warn_of_low_precision(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, once, if the optimizer keeps its state for sharded parameters in bf16 or fp16."""
    checked = _CheckRecord.of(optimizer)
    if checked is None or checked.has_state:
        return
    checked.has_state = True
    found = [
        info.fqn
        for p, state in optimizer.state.items()
        if (info := shard_info(p)) is not None
        and p.dtype in _LOW
        and any(isinstance(v, torch.Tensor) and v.dtype in _LOW for v in state.values())
    ]
    if found:
        warnings.warn(
            f"{type(optimizer).__name__} keeps its state for {name_list(found, 3)} in 16 bits, because these sharded "
            "parameters have 16 bits: small updates are rounded to zero, and training stalls. Load the model in float32 and "
            "pass mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) to fully_shard",
            stacklevel=2,
        )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Mark stepped parameters of units that stay gathered until a change as changed, alike on all ranks.

    Version counters do not show a step in C++ through a pointer, or of an optimizer that skips empty shards.
    """
    if (checked := _checked.get(optimizer)) is not None:
        increment_version([p for p in checked.kept if p.grad is not None])


def _kept_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in units that stay gathered until a change, alone or in flat parameters.

    Shards without elements are among them: other ranks gather after the step, so this one must, too.
    """
    kept = [flat for unit in all_units() if _keeps(unit.config) for flat in unit.handle.flats]
    ids = {id(p) for flat in kept for p in (*flat.params, flat.shard_param)}
    return [p for p in params_of(optimizer) if id(p) in ids and full_shape(p).numel()]


def _take_adopted(optimizer: Optimizer) -> None:
    """Replace parameters that the user registered in place of sharded ones, as ``load_state_dict(assign=True)`` does.

    The optimizer was built before flatshard noticed.
    """
    for group in optimizer.param_groups:
        adopted = {p: own for p in group["params"] if (own := p.__dict__.get("_flatshard_adopted")) is not None}
        if adopted:  # several may stand for one tied parameter, which stays tied
            group["params"][:] = dict.fromkeys(adopted.get(p, p) for p in group["params"])
            for param in adopted.keys() & optimizer.state.keys():
                optimizer.state[adopted[param]] = optimizer.state.pop(param)


def _keeps(config: UnitConfig) -> bool:
    return config.strategy.placements.until is Until.CHANGE or config.strategy.joins_axes


def _see_state_dicts() -> None:
    """Hook optimizers of sharded parameters before their state is read. [Note: What an optimizer hands out]"""
    of_torch = Optimizer.state_dict

    @functools.wraps(of_torch)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        _take_adopted(self)
        if any(isinstance(p, ShardedParameter) for p in params_of(self)):
            hook_optimizer(self)
        return of_torch(self)

    Optimizer.state_dict = state_dict  # type: ignore[method-assign]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check the optimizer, and return other arguments or None. ``args``: the optimizer, and perhaps a closure."""
    _check_moment(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _check_held(optimizer)
    checked = _CheckRecord.of(optimizer)
    if checked is None or checked.changes != changes.count:
        for unit in _stepped(all_units(), {id(p) for p in params_of(optimizer)}):
            if not unit.claims.in_use:
                unit.handle.check_parameters()
        _take_adopted(optimizer)
        if (checked := check_optimizer(optimizer)) is not None:
            checked.changes = changes.count
    if not callable(closure):
        return None

    def computed() -> Any:
        loss = closure()  # which may run the last backward of several
        _check_held(optimizer)
        return loss

    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], computed, *args[2:]), rest


def check_optimizer(optimizer: Optimizer) -> _CheckRecord | None:
    """Check once, before its first step, that ``optimizer`` can step its parameters. Return the record.

    Returns:
        None if it steps unsharded parameters, of which nobody knows how long modules have them.

    Raises:
        RuntimeError: it cannot. Nothing has been stepped.
    """
    if (checked := _CheckRecord.of(optimizer)) is not None:
        return checked
    params = params_of(optimizer)
    if plain := [p for p in params if not isinstance(p, ShardedParameter)]:
        if _holds_unsharded(type(optimizer).__name__, plain):
            return None
        _refuse_added(optimizer, {id(p) for p in plain if p.requires_grad})
    if len(plain) < len(params) or isinstance(optimizer, OffloadedOptimizer):
        if (why := why_unsuitable(optimizer)) is not None:
            raise RuntimeError(why)
        hook_optimizer(optimizer)
        warn_of_lost_rule(optimizer)
    checked = _checked[optimizer] = _CheckRecord(len(params), _kept_parameters(optimizer))
    return checked


def _check_moment(optimizer: Optimizer) -> None:
    """Raise if the step is inside ``summon_full_params``. [Note: Steps that change nothing]"""
    if not summoned_units:
        return
    params = {id(p) for p in params_of(optimizer)}
    name = type(optimizer).__name__
    if found := _stepped([u for units in summoned_units for u in units], params):
        units = name_list((unit.fqn for unit in found), 3)
        raise RuntimeError(
            f"{name}.step inside summon_full_params of units {units}: the step would change the sharded "
            "parameters, and the end of the `with` block would overwrite them. Step after the block"
        )


def _check_held(optimizer: Optimizer) -> None:
    """Raise if units hold gradients (``no_sync``), and warn if there are none. [Note: Steps that change nothing]"""
    if held := held_units():
        params = {id(p) for p in params_of(optimizer)}
        check_reduced(_stepped(held, params), f"{type(optimizer).__name__}.step")
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        _warn_of_no_gradients(optimizer)


def _warn_of_no_gradients(optimizer: Optimizer) -> None:
    """Warn if units have run forward and no backward has reached them: ``backward(inputs=...)`` finds no parameters."""
    found = [
        u for u in _stepped(all_units(), {id(p) for p in params_of(optimizer)}) if u in u.context.reductions.units()
    ]
    if found:
        warnings.warn(
            f"{type(optimizer).__name__}.step changes nothing: no parameter has a gradient, and no backward has reached "
            f"units {name_list((unit.fqn for unit in found), 3)} since they ran. loss.backward(inputs=...) and "
            "torch.autograd.grad do not find sharded parameters: call loss.backward(), and freeze what shall get none",
            stacklevel=5,
        )


def _stepped(units: Iterable[Unit], params: set[int]) -> list[Unit]:
    """Return the units that own any of ``params``, which are ids."""
    owned = [(u, p) for u in units for f in u.handle.flats for p in (f.shard_param, *f.params)]
    return list(dict.fromkeys(unit for unit, param in owned if id(param) in params))


def _holds_unsharded(optimizer: str, params: Iterable[torch.Tensor]) -> bool:
    """Return whether some of ``params`` are unsharded parameters of modules now. Then the next step must check again.

    Raises:
        RuntimeError: modules have them no more. [Note: Steps that change nothing]
    """
    wanted = {id(p) for p in params}
    found: dict[int, tuple[str, bool]] = {}  # by id: the FQN, and whether a module has the parameter now
    for unit in all_units():
        shows = unit.handle.registrations.shows
        copies = shows.values() if isinstance(shows, dict) else ()
        found.update((id(p), (copy_names.get(p, ""), True)) for p in copies if id(p) in wanted)
        whole = shows is UNSHARDED_PARAMS and not any(claim.uses and not claim.shown_to_user for claim in unit.claims)
        for flat in unit.handle.flats:
            for info, compute in zip(flat.layout.params, flat.unsharded.params, strict=True):
                if id(compute) in wanted:
                    found[id(compute)] = info.fqn, whole
    found = {id(p): (name, False) for p, name in copy_names.items() if id(p) in wanted} | found
    if gone := [fqn for fqn, is_shown in found.values() if not is_shown]:
        raise RuntimeError(
            f"{optimizer} was built inside summon_full_params or unshard: it steps {name_list(gone, 3)} as unsharded "
            "parameters, which get no gradients and which nobody reads any more. Build it outside, from model.parameters()"
        )
    return bool(found)


def _refuse_added(optimizer: Optimizer, plain: set[int]) -> None:
    """Raise if the optimizer steps parameters that were registered after ``fully_shard``: [Note: Added after sharding].

    ``plain``: ids of its trainable parameters that are not sharded.
    """
    found: dict[int, str] = {}
    for unit in sorted(all_units(), key=lambda unit: len(unit.fqn)):  # outermost first, so that FQNs are complete
        if max(unit.runtime.world_size, getattr(unit.handle.ranks.replicas, "world_size", 1)) > 1:
            for _, fqn, param in added_later(unit.module):
                if id(param) in plain:
                    found.setdefault(id(param), f"{unit.fqn}.{fqn}" if unit.fqn else fqn)
    if found:
        raise RuntimeError(
            f"{type(optimizer).__name__} steps {name_list(found.values(), 3)}, registered in a sharded module after "
            "fully_shard: nobody averages their gradients, so they would differ between ranks. Add modules and parameters "
            "(adapters, heads) before fully_shard, or call fully_shard on each new module and then build the optimizer. To "
            "average them yourself, add them before fully_shard and pass them as ignored_states"
        )
