"""An optimizer's state by name, sharded or whole: also of one that was never sharded. And by number, as torch has it.

The form is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {fqn: {name: value}}, "param_groups": [{"params":
[fqn, ...], "lr": ...}]}``. An optimizer over ``flat_parameters`` looks no different.

[Note: What an optimizer hands out]
``torch.distributed.checkpoint.save({"optim": optimizer})``, ``get_optimizer_state_dict`` and ``torch.save`` take what
``optimizer.state_dict()`` has for whole tensors, unless they can see otherwise, and would save one rank's part of each for
all of it. So it has sharded values, as the model's. What is loaded may be sharded values of this rank, whole tensors, or
parts.

torch tells when an optimizer steps, and not when one is made. So an optimizer gets its hooks at the first of three moments:
before its first step on sharded parameters, in ``load_optim_state_dict``, or when its state is asked for (Adagrad has state
as soon as it is built). To see the third, the first ``fully_shard`` wraps ``Optimizer.state_dict`` itself. State that plain
``load_state_dict`` put there earlier is checked at that moment: each rank keeps its part of it, and raises if it is another
rank's part.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard._optimizers import (
    Group,
    Optimizers,
    as_list,
    first_options,
    first_state,
    options_of,
    params_of,
    steps_elsewhere,
    steps_whole,
)
from flatshard.checkpoint._inner_state import Quantised
from flatshard.checkpoint._optim_params import (
    Named,
    Names,
    Row,
    State,
    parts_of_state,
    shown,
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

    Example::

        import torch.distributed.checkpoint as dcp

        state = {"model": model.state_dict(), "optimizer": flatshard.checkpoint.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id="run/dcp")
        whole = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)

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
            A checkpoint may have other state: where some parameters were never used, or were frozen after some steps. And it
            may have other options: where it was saved with a scheduler, and that is made later here, or the other way round.
            Then give what it has, ``FileSystemReader(path).read_metadata().state_dict_metadata``, in the place of True.

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


def rows_of(
    names: Names, optim: Optimizers, for_load: bool | Iterable[str] = False, *, inside: bool = False
) -> tuple[list[Row], list[Group]]:
    """The table that every form of state comes from: a row for each parameter that is stepped; and the groups.

    ``for_load``: see :func:`optim_state_dict`. ``inside``: show the tensors inside of quantised values.
    """
    asked = None if isinstance(for_load, bool) else _Asked(for_load)
    shows_first = for_load is True or (asked is not None and not asked.groups)
    rows: list[Row] = []
    groups: list[Group] = []
    for optimizer in as_list(optim):
        take_loaded(optimizer)
        quantised = Quantised(optimizer) if inside else None
        for group in optimizer.param_groups:
            fqns: list[str] = []
            made = first_options(optimizer, group) if shows_first else {}
            groups.append({"params": fqns, **made, **options_of(group)})
            for stepped in group["params"]:
                held = names.of(stepped)
                fqns += [named.fqn for named in held]
                memory = optimizer.state.get(stepped, {})
                if not memory and for_load is not False:
                    wanted = (n.param.requires_grad if asked is None else n.fqn in asked.params for n in held)
                    if any(wanted) and not steps_elsewhere(optimizer, stepped):
                        memory = first_state(optimizer, group, stepped)
                for named in held:
                    found = {} if quantised is None else quantised.shown(named, group, memory)
                    rows.append(Row(named, memory, _values(named, memory, found, steps_whole(optimizer), asked)))
    return rows, groups if asked is None or not asked.groups else asked.as_groups(groups)


class _Asked:
    """What a checkpoint has, by its keys. The user chose what comes before ``state.``, and any part may have dots."""

    def __init__(self, keys: Iterable[str]) -> None:
        """``keys``: with what is there, or without."""
        kinds: dict[str, Any] = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys)
        self.states = {key[at.end() :] for key in kinds for at in re.finditer(r"state\.", key)}
        # Those of one optimizer: of several nobody knows which is asked for.
        optimizers = [key.removesuffix("0.params") for key in kinds if f".{key}".endswith(".param_groups.0.params")]
        start = optimizers[0] if len(optimizers) == 1 else None
        self.groups = {k.removeprefix(start): kinds[k] for k in kinds if start is not None and k.startswith(start)}

    @functools.cached_property
    def params(self) -> set[str]:
        """The names of those that have some state, and beginnings of names."""
        return {name[: dot.start()] for name in self.states for dot in re.finditer(r"\.", name)}

    def as_groups(self, own: list[Group]) -> list[Group]:
        """The checkpoint's groups, with something in each place to load into. ``own``: the optimizer's."""
        found: dict[str, Any] = {}
        for name, kind in self.groups.items():
            *before, last = name.split(".")
            at, mine = found, {str(i): group for i, group in enumerate(own)}
            for key in before:
                at, mine = at.setdefault(key, {}), _inside(mine, key)
            at[last] = _room(kind, _inside(mine, last))
        return list(_with_lists(found))


def _inside(value: Any, key: str) -> Any:
    """What ``value`` has there."""
    if isinstance(value, list):
        return value[int(key)] if key.isdecimal() and int(key) < len(value) else None
    return value.get(key) if isinstance(value, dict) else None


def _room(kind: Any, own: Any) -> Any:
    """What a value of this ``kind`` of a checkpoint may be loaded into; of an unknown kind: ``own``."""
    if kind is None:
        return own
    size = getattr(kind, "size", None)
    if size is None:  # no tensor: whatever it is
        return None
    return torch.empty(size, dtype=kind.properties.dtype, device=own.device if isinstance(own, torch.Tensor) else None)


def _with_lists(value: Any) -> Any:
    """With a list in the place of each dict whose keys are numbers."""
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(each) for key, each in value.items()}
    are_numbers = all(key.isdecimal() for key in found)
    return [found[key] for key in sorted(found, key=int)] if are_numbers else found


def _values(
    named: Named, memory: dict[str, Any], found: dict[str, Any], is_whole: bool, asked: _Asked | None
) -> dict[str, Any]:
    """``found``: of some, what is shown. ``is_whole``: ``memory`` is the owner's, of the whole parameter."""
    is_alone = is_whole and named.info is not None and not named.info.is_whole
    return {
        key: found[key] if key in found else value if is_alone else shown(named, key, value, not is_whole)
        for key, value in memory.items()
        if asked is None or f"{named.fqn}.{key}" in (asked.params if key in found else asked.states)
    }


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
            raises = asked is not None and (not info.is_whole or info.parallel is not None)
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
