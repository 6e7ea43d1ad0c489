"""An optimizer's state by name, sharded or whole: also of one that was never sharded. And by number, as torch has it.

The form is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {fqn: {name: value}}, "param_groups": [{"params":
[fqn, ...], "lr": ...}]}``. An optimizer over ``flat_parameters`` looks no different.

[Note: What an optimizer hands out]
``torch.distributed.checkpoint.save({"optim": optimizer})``, ``get_optimizer_state_dict`` and ``torch.save`` take what
``optimizer.state_dict()`` has for whole tensors, unless they can see otherwise, and would save one rank's part of each for
all of it. So it has sharded values, as the model's. What is loaded may be sharded values of this rank, whole tensors, or
parts.

torch has no seam for optimizers that are made, only one for all steps. So an optimizer gets its hooks before its first step
on sharded parameters, or by ``load_optim_state_dict``; before that it has no state, but what plain ``load_state_dict`` put
there. That is looked at before the first step: then each rank takes its part, or refuses what isn't its own.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard.checkpoint._optim_params import (
    Group,
    Named,
    Names,
    Optimizers,
    Row,
    State,
    as_list,
    options_of,
    params_of,
    parts_of_state,
    shown,
    steps_whole,
    take_loaded,
)
from flatshard.checkpoint._optim_whole import whole_state
from flatshard.checkpoint._standard_helpers import request
from flatshard.checkpoint._state_dict import idle_flats, is_first_rank


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
            ``torch.distributed.checkpoint.load`` to fill. No step is taken (a copy of the optimizer steps zeros of the
            parameter's size, one parameter at a time, without hooks): hand the dict to :func:`load_optim_state_dict` then.
            Where some parameters were never used, or were frozen after some steps, a checkpoint has state of others than
            those that are trainable: give its keys, ``FileSystemReader(path).read_metadata().state_dict_metadata``, in the
            place of True.

    Raises:
        ValueError: the optimizer steps parameters that are not ``module``'s; nothing is sharded; ``rank0_only`` without
            ``full``; ``for_load`` with it. With ``full``, on all ranks: their optimizers step different parameters, or some
            have no state where others have.
        NotImplementedError: a state has a shape of its own, of which only the optimizer knows how it is sharded.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    if rank0_only and not full:
        raise ValueError("optim_state_dict(rank0_only=True) needs full=True: otherwise each rank has its own part")
    if for_load is not False and full:
        raise ValueError("optim_state_dict(for_load=True) is for loading into sharded values: leave out full=True")
    names = Names(module, "optim_state_dict", idle_flats(module, "optim_state_dict"))
    rows, groups = rows_of(names, optim, for_load)
    if not full:
        return {"state": by_name(rows), "param_groups": groups}
    receives = not rank0_only or is_first_rank([unit for unit, _ in names.flats])
    state = whole_state(names.flats, rows, torch.device("cpu") if offload_to_cpu else None, receives)
    return {"state": state, "param_groups": groups} if receives else {}


def by_name(rows: list[Row]) -> State:
    """As ``torch.distributed.checkpoint`` takes them."""
    return {row.named.fqn: row.values for row in rows if row.values}


def rows_of(names: Names, optim: Optimizers, for_load: bool | Iterable[str] = False) -> tuple[list[Row], list[Group]]:
    """The table that every form of state comes from: a row for each parameter that is stepped; and the groups.

    ``for_load``: see :func:`optim_state_dict`.
    """
    asked = None if isinstance(for_load, bool) else _Asked(for_load)
    rows: list[Row] = []
    groups: list[Group] = []
    for optimizer in as_list(optim):
        take_loaded(optimizer)
        for group in optimizer.param_groups:
            fqns: list[str] = []
            groups.append({"params": fqns, **options_of(group)})
            for stepped in group["params"]:
                held = names.of(stepped)
                fqns += [named.fqn for named in held]
                memory = optimizer.state.get(stepped, {})
                if not memory and for_load is not False:
                    wanted = (n.param.requires_grad if asked is None else n.fqn in asked.params for n in held)
                    memory = _first_state(optimizer, group, stepped) if any(wanted) else {}
                rows += [Row(n, memory, _values(n, memory, steps_whole(optimizer), asked)) for n in held]
    return rows, groups


class _Asked:
    """What a checkpoint has, by its keys. The user chose what comes before ``state.``, and any part may have dots."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.states = {key[at.end() :] for key in keys for at in re.finditer(r"state\.", key)}
        self.params = {name[: dot.start()] for name in self.states for dot in re.finditer(r"\.", name)}


def _values(named: Named, memory: dict[str, Any], is_whole: bool, asked: _Asked | None) -> dict[str, Any]:
    """``is_whole``: ``memory`` is the owner's, of the whole parameter."""
    is_alone = is_whole and named.info is not None and named.info.shard_world_size > 1
    return {
        key: value if is_alone else shown(named, key, value, not is_whole)
        for key, value in memory.items()
        if asked is None or f"{named.fqn}.{key}" in asked.states
    }


# -- the state that a first step would make -----------------------------------------------------------------------------


def _first_state(optimizer: Optimizer, group: Group, stepped: nn.Parameter) -> dict[str, Any]:
    if steps_whole(optimizer):
        state: dict[str, Any] = optimizer.first_state(stepped)  # type: ignore[attr-defined]
        return state
    try:
        return first_state(optimizer, group, torch.zeros_like(stepped.detach()))
    except Exception as e:
        raise RuntimeError(
            f"what the first step of {type(optimizer).__name__} would make is not known, as a step of a copy raised "
            f"{type(e).__name__}: {e}. Take a step before loading"
        ) from e


@torch.no_grad()
def first_state(optimizer: Optimizer, group: Group, zeros: torch.Tensor) -> dict[str, Any]:
    """The state that a first step would make for a parameter of ``group`` that lies as ``zeros`` does, which become it.

    Nothing of ``optimizer`` is stepped: a copy is, over this parameter alone and without hooks. It shares what the optimizer
    keeps besides state and options, as ``copy.copy`` does.
    """
    kind = type(optimizer)
    param = nn.Parameter(zeros)
    param.grad = torch.zeros_like(zeros)
    stand_in: Any = object.__new__(kind)
    vars(stand_in).update(vars(optimizer))
    vars(stand_in).pop("step", None)  # a scheduler's, which counts
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [{**{k: copied_option(v) for k, v in options_of(group).items()}, "params": [param]}]
    step: Any = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without hooks that are on all optimizers
    step(stand_in)
    return dict(stand_in.state.get(param, {}))


def copied_option(value: Any) -> Any:
    """One that a step of a copy may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


# -- by number: [Note: What an optimizer hands out] --------------------------------------------------------------------

_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def hook_optimizer(optimizer: Optimizer) -> None:
    """Have ``state_dict()`` and ``load_state_dict()`` know that parameters are sharded."""
    if optimizer in _hooked:
        return
    _hooked.add(optimizer)
    if hasattr(optimizer, "_optimizer_state_dict_post_hooks"):  # else the optimizer inside has, as of timm's Lookahead
        optimizer.register_state_dict_post_hook(_handed_out)
        optimizer.register_load_state_dict_pre_hook(_taken_in)


def _handed_out(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Sharded values in the place of this rank's parts; for a helper that asks for them, whole ones."""
    params = params_of(optimizer)
    asked = request("optim")
    if steps_whole(optimizer):
        if asked is not None:
            raise NotImplementedError(
                f"torch's helper wants every parameter's state on every rank, and {type(optimizer).__name__} keeps each on "
                "one: call flatshard.checkpoint.optim_state_dict(module, optimizer)"
            )
        return state_dict
    if asked is not None and any(hasattr(p, "fqns") for p in params):
        raise RuntimeError(
            "get_optimizer_state_dict knows no flat parameters (flatshard.flat_parameters): call "
            "flatshard.checkpoint.optim_state_dict(module, optimizer)"
        )
    if asked is not None and asked.whole:
        call = "get_optimizer_state_dict(full_state_dict=True)"
        names = Names(asked.module, call, idle_flats(asked.module, call))
        rows, _ = rows_of(names, optimizer)
        whole = whole_state(names.flats, rows, asked.device, asked.receives)
        order = enumerate(row.named.fqn for row in rows)
        return {**state_dict, "state": {number: whole[fqn] for number, fqn in order if fqn in whole}}
    state = dict(state_dict["state"])
    for number, param in enumerate(params):
        if number in state and isinstance(param, ShardedParameter):
            info = param._flatshard_info
            named = Named(info.fqn, param, param)
            # The helper would take a value in a shape of its own for the whole.
            raises = asked is not None and (info.shard_world_size > 1 or info.parallel is not None)
            state[number] = {key: shown(named, key, value, raises) for key, value in state[number].items()}
    return {**state_dict, "state": state}


def _taken_in(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's parts in the place of sharded values and whole tensors."""
    params = params_of(optimizer)
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    if steps_whole(optimizer) or len(params) != len(keys):  # of the latter the optimizer tells
        return None
    state = dict(state_dict["state"])
    for key, param in zip(keys, params, strict=True):
        if isinstance(param, ShardedParameter) and key in state:
            state[key] = parts_of_state(param, state[key])
    return {**state_dict, "state": state}
