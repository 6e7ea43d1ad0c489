"""``state_dict()`` and ``load_state_dict()`` of optimizers that step sharded parameters.

[Note: What an optimizer hands out]
``torch.distributed.checkpoint.save({"optim": optimizer})``, ``get_optimizer_state_dict`` and ``torch.save`` take tensors in
``optimizer.state_dict()`` for full ones, and would save one rank's shard for all of it. So it has sharded values, as the
model's has. Loaded values may be sharded values of this rank, full tensors, or shards.

torch has hooks for steps of all optimizers, and none for their construction. So an optimizer gets its hooks at the first of
three moments: before its first step on sharded parameters, in ``load_optim_state_dict``, or when its state is asked for
(Adagrad has state as soon as it is built). For the third, the first ``fully_shard`` wraps ``Optimizer.state_dict`` itself.
State that plain ``load_state_dict`` put there earlier is checked at that moment: each rank keeps its shard of it, and raises
if it is another rank's.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from flatshard._base.optimizers import params_of, steps_whole
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape
from flatshard.checkpoint._optimizer_names import (
    ParamNames,
    SteppedParam,
    count_keys,
    keep_own_shards,
    needs_own_shards,
    own_shards,
)
from flatshard.checkpoint._optimizer_state import OptimizerState
from flatshard.checkpoint._standard_helpers import Request, request
from flatshard.checkpoint._state_dict import idle_flats

_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def hook_optimizer(optimizer: Optimizer) -> None:
    """Register the hooks, and keep this rank's shards of what was loaded before. Idempotent.

    Raises:
        ValueError: a loaded value is another rank's. Its state is not changed.
    """
    register_hooks(optimizer)
    keep_own_shards(optimizer)


def register_hooks(optimizer: Optimizer) -> None:
    """Have ``state_dict()`` return sharded values, and ``load_state_dict()`` load shards of them. Idempotent."""
    if optimizer in _hooked:
        return
    _hooked.add(optimizer)
    if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # else the optimizer inside has, as of timm's Lookahead
        optimizer.register_state_dict_post_hook(_with_sharded_values)
        optimizer.register_load_state_dict_pre_hook(_with_own_shards)


def _with_sharded_values(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with sharded values in place of this rank's shards, or full values for torch's helper."""
    asked = request("optim")
    if asked is not None:
        _check_helper(optimizer)
        if asked.is_full:
            return _with_full_values(optimizer, state_dict, asked)
    if steps_whole(optimizer):
        return state_dict
    state = dict(state_dict["state"])
    for number, param in enumerate(params_of(optimizer)):
        if number in state and isinstance(param, ShardedParameter):
            stepped = SteppedParam.alone(param)
            # The helper would save a value with a shape of its own as a full one.
            strict = asked is not None and (not stepped.is_full or param._flatshard_info.parallel is not None)
            state[number] = {key: stepped.as_saved(key, value, strict) for key, value in state[number].items()}
    return {**state_dict, "state": state}


def _check_helper(optimizer: Optimizer) -> None:
    """Raise if ``get_optimizer_state_dict`` cannot have the state of ``optimizer``."""
    if steps_whole(optimizer):
        raise NotImplementedError(
            f"torch's helper wants every parameter's state on every rank, and {type(optimizer).__name__} keeps each on "
            "one: call flatshard.checkpoint.optim_state_dict(module, optimizer)"
        )
    if any(hasattr(p, "fqns") for p in params_of(optimizer)):
        raise RuntimeError(
            "get_optimizer_state_dict knows no flat parameters (flatshard.flat_parameters): call "
            "flatshard.checkpoint.optim_state_dict(module, optimizer)"
        )


def _with_full_values(optimizer: Optimizer, state_dict: dict[str, Any], asked: Request) -> dict[str, Any]:
    call = "get_optimizer_state_dict(full_state_dict=True)"
    state = OptimizerState.read(ParamNames(asked.module, call, idle_flats(asked.module, call)), optimizer)
    full = state.gather(asked.device, asked.receives)
    order = enumerate(row.param.fqn for row in state.rows)
    return {**state_dict, "state": {number: full[fqn] for number, fqn in order if fqn in full}}


def _with_own_shards(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``state_dict`` with this rank's shards in place of sharded values and full tensors."""
    params = params_of(optimizer)
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if steps_whole(optimizer) or len(params) != len(keys):  # the optimizer raises if they differ
        return None
    state = dict(state_dict["state"])
    loaded = {key: param for key, param in zip(keys, params, strict=True) if key in state}
    sharded = {key: param for key, param in loaded.items() if isinstance(param, ShardedParameter)}
    if not any([needs_own_shards(param, state[key]) for key, param in sharded.items()]):
        return None
    counts = count_keys((full_shape(param), state[key]) for key, param in loaded.items())
    state.update({key: own_shards(param, state[key], counts) for key, param in sharded.items()})
    return {**state_dict, "state": state}
