"""An optimizer's state by name, sharded or whole, and back: also from runs that were not sharded.

The form is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {fqn: {name: value}}, "param_groups": [{"params":
[fqn, ...], "lr": ...}]}``. A value that lies as the parameter does (an average, a momentum) is sharded as the parameter is;
others (a step count, 0-dim) are the same on all ranks. An optimizer over ``flat_parameters`` looks no different.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._handle.gathering import Gathering, exchange
from flatshard._handle.sharded_value import ShardedValue, check_source, local_source, sharded_value
from flatshard._optim_names import Named, Names, Optimizers, as_list, rekey
from flatshard._state_dict import export, is_first_rank

State = dict[str, dict[str, Any]]


def optim_state_dict(
    module: nn.Module,
    optim: Optimizers,
    *,
    full: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = True,
    for_load: bool | Iterable[str] = False,
) -> dict[str, Any]:
    """The state of ``optim``, by the names of ``module``'s parameters.

    By default without communication: sharded values share memory with the optimizer's, so ``torch.distributed.checkpoint``
    saves them as they are, and loads into them.

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optim: an optimizer, or several: then their states and groups come in one dict.
        full: whole, plain tensors of their own, as of the unsharded model, gathered one at a time. All ranks must call it. A
            state that a rank lacks, where its part is empty, is taken from the others.
        rank0_only: with ``full``: only the first of all ranks gets the result, the others ``{}``.
        offload_to_cpu: with ``full``: the result is on CPU.
        for_load: where a trainable parameter has no state yet, show what its first step would make, for
            ``torch.distributed.checkpoint.load`` to fill. The optimizer and the parameters stay as they are: hand the dict to
            :func:`load_optim_state_dict` then. Where some parameters were never used, a checkpoint has no state of them:
            give its keys, ``FileSystemReader(path).read_metadata().state_dict_metadata``, in the place of True.

    Raises:
        ValueError: the optimizer steps parameters that are not ``module``'s; nothing is sharded; ``rank0_only`` without
            ``full``; ``for_load`` with it.
        NotImplementedError: a state has a shape of its own, of which only the optimizer knows how it is sharded.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    if rank0_only and not full:
        raise ValueError("optim_state_dict(rank0_only=True) needs full=True: otherwise each rank has its own part")
    if for_load is not False and full:
        raise ValueError("optim_state_dict(for_load=True) is for loading into sharded values: leave out full=True")
    names = Names(module, "optim_state_dict")
    saved = set() if isinstance(for_load, bool) else {key[at:] for key in for_load for at in _after_state(key)}
    state: State = {}
    groups: list[dict[str, Any]] = []
    everything: list[Named] = []
    for optimizer in as_list(optim):
        made = {} if for_load is False else _first_states(optimizer)
        for given, named in zip(optimizer.param_groups, names.groups(optimizer), strict=True):
            rest = {k: v for k, v in given.items() if k not in ("params", "param_names")}
            groups.append({"params": [n.fqn for n in named], **rest})
            everything += named
            for each in named:
                found = optimizer.state.get(each.stepped) or made.get(each.stepped, {})
                if for_load is not False and for_load is not True:
                    found = {k: v for k, v in found.items() if f"{each.fqn}.{k}" in saved}
                if found:
                    state[each.fqn] = {key: _piece(each, key, value) for key, value in found.items()}
    if not full:
        state = {n.fqn: {k: _value(n, v) for k, v in state[n.fqn].items()} for n in everything if n.fqn in state}
        return {"state": state, "param_groups": groups}
    receives = not rank0_only or is_first_rank([unit for unit, _ in names.flats])
    device = torch.device("cpu") if offload_to_cpu else None
    whole = _gather(names, everything, state, device, receives)
    return {"state": whole, "param_groups": groups} if receives else {}


def _after_state(key: str) -> list[int]:
    """Where the name of a parameter may begin in a checkpoint's key: the user chose what comes before, ``optim.state.``"""
    return [i + len("state.") for i in range(len(key)) if key.startswith("state.", i)]


class _Like:
    """A tensor that lies as its parameter does: this rank's part."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _piece(named: Named, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and (named.is_flat or named.stepped.dim()):
        return value
    piece = named.piece(value)
    if piece is not None:
        return _Like(piece.detach())
    if named.info is None:
        return value
    raise NotImplementedError(
        f"optim_state_dict: state {key!r} of {named.fqn!r} has shape {tuple(value.shape)}, the parameter has "
        f"{tuple(named.stepped.shape)} here: how it is sharded is known to the optimizer alone. Save "
        "optimizer.state_dict() by each rank"
    )


def _value(named: Named, value: Any) -> Any:
    if not isinstance(value, _Like):
        return value
    return value.tensor if named.info is None else sharded_value(value.tensor, named.info)


def _first_states(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    """The states that a first step makes, taken on gradients of zero and undone."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(optimizer.state.get(p) for p in params):
        return {}
    before, optimizer.state = optimizer.state, defaultdict(dict)
    kept = [(p, p.grad, p.detach().clone()) for p in params]
    groups = [{k: v for k, v in given.items() if k != "params"} for given in optimizer.param_groups]
    try:
        for param in params:
            param.grad = torch.zeros_like(param.detach())
        type(optimizer).step(optimizer)  # not by the attribute, which a scheduler counts
        return dict(optimizer.state)
    finally:
        optimizer.state = before
        for options, was in zip(optimizer.param_groups, groups, strict=True):
            options.update(was)
        with torch.no_grad():
            for param, grad, value in kept:
                param.grad = grad
                param.copy_(value)


# -- whole values ------------------------------------------------------------------------------------------------------


def _gather(
    names: Names, everything: list[Named], state: dict[str, dict[str, Any]], device: torch.device | None, receives: bool
) -> State:
    whole: State = {}
    for unit, buffers, entries in names.unit_flats(everything):
        present = [n for n in entries if n is not None]
        kinds = _agree(exchange(unit.handle, json.dumps({n.fqn: _kinds(state.get(n.fqn, {})) for n in present})))
        for each in present:
            if each.fqn in kinds or each.fqn in state:
                own = state.get(each.fqn, {})
                given = {k: _from_text(kind) for k, kind in kinds.get(each.fqn, {}).items() if kind[0] != "like"}
                whole[each.fqn] = {**given, **{k: _copy(v, device) for k, v in own.items() if not isinstance(v, _Like)}}
        tensors = dict.fromkeys(
            (key, kind[1]) for each in present for key, kind in kinds.get(each.fqn, {}).items() if kind[0] == "like"
        )
        for key, dtype in tensors:
            pieces = [_part_for(n, state, key, _dtype(dtype), buffers.slices[i].numel) for i, n in enumerate(entries)]
            gathered = Gathering(unit.handle, buffers, pieces).wait()
            for named, value in zip(entries, gathered, strict=True):
                if named is not None and receives and kinds.get(named.fqn, {}).get(key) == ["like", dtype]:
                    whole[named.fqn][key] = export(value, device, None)
            del gathered
    for named in everything:
        if named.buffers is None and named.fqn in state:
            whole[named.fqn] = {k: _copy(v, device) for k, v in state[named.fqn].items()}
    return {n.fqn: whole[n.fqn] for n in everything if n.fqn in whole} if receives else {}


def _copy(value: Any, device: torch.device | None) -> Any:
    value = value.tensor if isinstance(value, _Like) else value
    return export(value, device, None) if isinstance(value, torch.Tensor) else value


def _part_for(named: Named | None, state: State, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """This rank's part of one state of one parameter, 1-D; zeros where it has none."""
    value = None if named is None else state.get(named.fqn, {}).get(key)
    if isinstance(value, _Like) and value.tensor.dtype is dtype:
        assert named is not None
        assert named.info is not None
        return named.info.in_memory_order(value.tensor)
    return torch.zeros(numel, dtype=dtype)


def _kinds(state: dict[str, Any]) -> dict[str, list[Any]]:
    """What others need to know of one parameter's state."""
    kinds: dict[str, list[Any]] = {}
    for key, value in state.items():
        if isinstance(value, _Like):
            kinds[key] = ["like", str(value.tensor.dtype)]
        elif isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
            kinds[key] = ["scalar", str(value.dtype), value.item()]
        elif value is None or isinstance(value, bool | int | float | str):
            kinds[key] = ["plain", value]
    return kinds


def _agree(texts: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """What any rank has."""
    result: dict[str, dict[str, list[Any]]] = {}
    for text in texts:
        for fqn, kinds in json.loads(text).items():
            if kinds:
                result[fqn] = kinds | result.get(fqn, {})
    return result


def _from_text(kind: list[Any]) -> Any:
    return torch.tensor(kind[2], dtype=_dtype(kind[1])) if kind[0] == "scalar" else kind[1]


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


# -- loading -----------------------------------------------------------------------------------------------------------


def load_optim_state_dict(module: nn.Module, optim: Optimizers, state: dict[str, Any], *, strict: bool = True) -> None:
    """Give ``optim`` the ``state`` that :func:`optim_state_dict` or an unsharded run gave. No communication.

    Everything is looked at before anything is changed. Arguments and errors: :func:`optim_state_dict_to_load`.
    """
    optimizers = as_list(optim)
    loads = _to_load(module, optimizers, state, strict)
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
    return _to_load(module, [optim], state, strict)[0]


def _to_load(
    module: nn.Module, optimizers: list[Optimizer], state: dict[str, Any], strict: bool
) -> list[dict[str, Any]]:
    names = Names(module, "load_optim_state_dict")
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ValueError("load_optim_state_dict takes a dict with 'state' and 'param_groups'")
    named = [names.groups(optimizer) for optimizer in optimizers]
    own = [n for groups in named for group in groups for n in group]
    if any(isinstance(key, int) for group in state["param_groups"] for key in group["params"]):
        state = rekey(state, _order(names, own, state))
    values: State = {names.aliases.get(fqn, fqn): value for fqn, value in state["state"].items()}
    options = {
        names.aliases.get(fqn, fqn): {k: v for k, v in given.items() if k not in ("params", "param_names")}
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
            'flatshard.rekey(state, names, to="names")'
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
            parts = {n.fqn: _local(n, values[n.fqn], like, problems) for n in by_param[id(param)] if n.fqn in values}
            if parts:
                state[i] = _join(param, by_param[id(param)], parts, problems)
    return {"state": state, "param_groups": new_groups}


def _local(named: Named, saved: dict[str, Any], like: set[str], problems: list[str]) -> dict[str, Any]:
    """One parameter's state with this rank's parts."""
    result: dict[str, Any] = {}
    for key, value in saved.items():
        whole = isinstance(value, torch.Tensor) and not isinstance(value, ShardedValue)
        if not isinstance(value, torch.Tensor) or (whole and value.dim() == 0 and (named.shape or key not in like)):
            result[key] = value
        elif named.info is None:
            if tuple(value.shape) != named.shape:
                problems.append(f"{named.fqn}: {key}: shape {tuple(value.shape)}, the parameter has {named.shape}")
            result[key] = _Like(value.clone())
        elif problem := check_source(named.info, value.dtype, value):
            problems.append(f"{named.fqn}: {key}: {problem}")
        else:
            result[key] = _Like(local_source(named.info, value).clone())
    return result


def _join(
    param: nn.Parameter, named: list[Named], parts: dict[str, dict[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """The state of what the optimizer steps: one parameter's, or put together for a flat one."""
    if not named[0].is_flat:
        (state,) = parts.values()
        return {k: v.tensor if isinstance(v, _Like) else v for k, v in state.items()}
    result: dict[str, Any] = {}
    for key in dict.fromkeys(k for state in parts.values() for k in state):
        found = {n.fqn: parts[n.fqn][key] for n in named if key in parts.get(n.fqn, {})}
        first = next(iter(found.values()))
        if isinstance(first, _Like):
            result[key] = torch.zeros(param.shape, dtype=first.tensor.dtype, device=first.tensor.device)
            for each in named:
                if isinstance(value := found.get(each.fqn), _Like):
                    target = each.piece(result[key])
                    assert target is not None
                    target.copy_(value.tensor)
        elif any(v != first for v in found.values()):
            problems.append(f"one flat parameter here, saved with different {key!r}: {', '.join(map(repr, found))}")
        else:
            result[key] = first
    return result
