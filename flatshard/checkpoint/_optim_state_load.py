"""Into an optimizer: the state that ``optim_state_dict`` gave, or that of a run that was not sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._composable.state import flat_of
from flatshard.checkpoint._optim_hooks import hook_optimizer
from flatshard.checkpoint._optim_names import Named, Names, Optimizers, as_list, rekey, steps_whole
from flatshard.checkpoint._optim_options import options_of
from flatshard.checkpoint._optim_state_dict import Like, State
from flatshard.checkpoint._sharded_value import ShardedValue, check_source, local_source
from flatshard.checkpoint._state_dict import idle_flats


def load_optim_state_dict(module: nn.Module, optim: Optimizers, state: dict[str, Any], *, strict: bool = True) -> None:
    """Give ``optim`` the ``state`` that :func:`optim_state_dict` or an unsharded run gave. No communication.

    Everything is looked at before anything is changed. Arguments and errors: :func:`optim_state_dict_to_load`.
    """
    optimizers = as_list(optim)
    loads = to_load(_names(module), optimizers, state, strict)
    for optimizer, load in zip(optimizers, loads, strict=True):
        optimizer.load_state_dict(load)


def optim_state_dict_to_load(
    module: nn.Module, optim: Optimizer, state: dict[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    """``state`` as ``optim.load_state_dict`` takes it: by number, with this rank's parts. No communication.

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optim: the optimizer to load. Its groups may be cut otherwise than those saved, as long as parameters of one group
            were saved with the same options.
        state: by name, with whole tensors (each rank takes its part) or sharded values of this layout; or by number, as
            ``optimizer.state_dict()`` of a plain model has it: numbers count the parameters as ``optim`` was given them, or,
            where it steps flat parameters, as ``module.named_parameters()`` does.
        strict: every parameter of ``optim`` is in a saved group, and everything saved belongs to ``optim``.

    Raises:
        ValueError: names, shapes or dtypes do not fit; the message has all of them. Nothing is changed.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    return to_load(_names(module), as_list(optim), state, strict)[0]


def _names(module: nn.Module) -> Names:
    return Names(module, "load_optim_state_dict", idle_flats(module, "load_optim_state_dict"))


def to_load(names: Names, optimizers: list[Optimizer], state: dict[str, Any], strict: bool) -> list[dict[str, Any]]:
    """``optim_state_dict_to_load`` for each of the optimizers, or an error for all of them."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ValueError("load_optim_state_dict takes a dict with 'state' and 'param_groups'")
    named = [names.groups(optimizer) for optimizer in optimizers]
    own = [n for groups in named for group in groups for n in group]
    if any(isinstance(key, int) for group in state["param_groups"] for key in group["params"]):
        state = rekey(state, _order(names, own, state))
    values: State = {names.aliases.get(fqn, fqn): value for fqn, value in state["state"].items()}
    options = {
        names.aliases.get(fqn, fqn): dict(options_of(given))
        for given in state["param_groups"]
        for fqn in given["params"]
    }
    problems: list[str] = []
    if strict:
        fqns = {n.fqn for n in own}
        if missing := [n.fqn for n in own if n.fqn not in options]:
            problems.append(f"missing: {', '.join(map(repr, missing))}")
        if unexpected := [fqn for fqn in dict.fromkeys([*options, *values]) if fqn not in fqns]:
            problems.append(f"unexpected: {', '.join(map(repr, unexpected))}")
    like = _names_of_averages(own, values)
    loads = [_load_one(o, groups, values, options, like, problems) for o, groups in zip(optimizers, named, strict=True)]
    if problems:
        lines = "\n\t".join(problems)
        raise ValueError(f"load_optim_state_dict: the state does not fit, and nothing has been changed:\n\t{lines}")
    for optimizer in optimizers:
        hook_optimizer(optimizer)  # torch's helpers may see what is loaded before there is a step
    return loads


def _order(names: Names, own: list[Named], state: dict[str, Any]) -> list[str]:
    """The names that a plain run's numbers stand for."""
    saved = {
        key: name
        for g in state["param_groups"]
        for key, name in zip(g["params"], g.get("param_names", ()), strict=False)
    }
    count = sum(len(g["params"]) for g in state["param_groups"])
    if len(saved) == count:
        return [saved[i] for i in range(count)]
    order = names.params if any(n.is_flat for n in own) else [n.fqn for n in own]
    if len(order) != count:
        raise ValueError(
            f"load_optim_state_dict: the state numbers {count} parameters, there are {len(order)}. Name them: "
            'flatshard.checkpoint.rekey(state, names, to="names")'
        )
    return order


def _names_of_averages(own: list[Named], values: State) -> set[str]:
    """Which states lie as their parameters do: for 0-dim parameters cannot tell."""
    found = {
        key
        for n in own
        for key, value in values.get(n.fqn, {}).items()
        if n.shape and isinstance(value, torch.Tensor) and value.dim()
    }
    scalars = {key for n in own if n.shape for key, v in values.get(n.fqn, {}).items() if key not in found}
    alone = {key for n in own for key in values.get(n.fqn, {}) if key not in scalars and key != "step"}
    return found | alone


def _load_one(
    optimizer: Optimizer,
    groups: list[list[Named]],
    values: State,
    options: dict[str, dict[str, Any]],
    like: set[str],
    problems: list[str],
) -> dict[str, Any]:
    """``optimizer.load_state_dict``'s argument; adds to ``problems``."""
    state: dict[int, dict[str, Any]] = {}
    new_groups: list[dict[str, Any]] = []
    number = 0
    for given, named in zip(optimizer.param_groups, groups, strict=True):
        new = {k: v for k, v in given.items() if k != "params"}
        saved = [options[n.fqn] for n in named if n.fqn in options]
        if any(s != saved[0] for s in saved):
            odd = [n.fqn for n in named if n.fqn in options and options[n.fqn] != saved[0]]
            problems.append(
                f"one group here, saved with other options than the first of it: {', '.join(map(repr, odd))}"
            )
        new.update(saved[0] if saved else {})
        ids = range(number, number + len(given["params"]))
        new_groups.append({**new, "params": list(ids)})
        number = ids.stop
        by_param: dict[int, list[Named]] = {}
        for each in named:
            by_param.setdefault(id(each.stepped), []).append(each)
        for i, param in zip(ids, given["params"], strict=True):
            if _is_elsewhere(optimizer, param):
                continue
            found = [n for n in by_param[id(param)] if n.fqn in values]
            parts = {n.fqn: _local(n, values[n.fqn], like, problems, steps_whole(optimizer)) for n in found}
            if parts:
                state[i] = _join(param, by_param[id(param)], parts, problems)
    return {"state": state, "param_groups": new_groups}


def stepped_elsewhere(names: Names, optimizer: Optimizer) -> set[str]:
    """The names of parameters whose state is on another rank."""
    return {n.fqn for group in names.groups(optimizer) for n in group if _is_elsewhere(optimizer, n.stepped)}


def _is_elsewhere(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Whether another rank steps it, and so has its state."""
    owner: Callable[[nn.Parameter], int | None] | None = getattr(optimizer, "owner", None)
    flat = flat_of(param)
    if not steps_whole(optimizer) or owner is None or flat is None:
        return False
    return owner(param) not in (None, flat.placement.rank)


def _local(named: Named, saved: dict[str, Any], like: set[str], problems: list[str], whole: bool) -> dict[str, Any]:
    """One parameter's state with this rank's parts; ``whole``: with all of it."""
    result: dict[str, Any] = {}
    for key, value in saved.items():
        if whole and isinstance(value, ShardedValue):
            problems.append(
                f"{named.fqn}: {key}: this rank needs all of it, and got its part ({value!r}): go through "
                "torch.distributed.checkpoint.save and load, or give the other run's optim_state_dict(full=True)"
            )
            continue
        if whole and isinstance(value, torch.Tensor):
            result[key] = value.clone()
            continue
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, ShardedValue)
        if not isinstance(value, torch.Tensor) or (is_plain and value.dim() == 0 and (named.shape or key not in like)):
            result[key] = value
        elif named.info is None:
            if tuple(value.shape) != named.shape:
                problems.append(f"{named.fqn}: {key}: shape {tuple(value.shape)}, the parameter has {named.shape}")
            result[key] = Like(value.clone())
        elif problem := check_source(named.info, value.dtype, value):
            problems.append(f"{named.fqn}: {key}: {problem}")
        else:
            result[key] = Like(local_source(named.info, value).clone())
    return result


def _join(
    param: nn.Parameter, named: list[Named], parts: dict[str, dict[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """The state of what the optimizer steps: one parameter's, or put together for a flat one."""
    if not named[0].is_flat:
        (state,) = parts.values()
        return {k: v.tensor if isinstance(v, Like) else v for k, v in state.items()}
    result: dict[str, Any] = {}
    for key in dict.fromkeys(k for state in parts.values() for k in state):
        found = {n.fqn: parts[n.fqn][key] for n in named if key in parts.get(n.fqn, {})}
        first = next(iter(found.values()))
        if isinstance(first, Like):
            result[key] = torch.zeros(param.shape, dtype=first.tensor.dtype, device=first.tensor.device)
            for each in named:
                if isinstance(value := found.get(each.fqn), Like):
                    target = each.piece(result[key])
                    assert target is not None
                    target.copy_(value.tensor)
        elif any(v != first for v in found.values()):
            problems.append(f"one flat parameter here, saved with different {key!r}: {', '.join(map(repr, found))}")
        else:
            result[key] = first
    return result
