"""An optimizer's state by name, sharded or whole, and back: also from runs that were not sharded.

The form is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {fqn: {name: value}}, "param_groups": [{"params":
[fqn, ...], "lr": ...}]}``. A value that lies as the parameter does (an average, a momentum) is sharded as the parameter is;
others (a step count, 0-dim) are the same on all ranks. An optimizer over ``flat_parameters`` looks no different.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._composable.features.gathering import Gathering, joined
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._runtime import on_any_rank
from flatshard.checkpoint._gathering import exchange, from_parts, unwrapped_whole
from flatshard.checkpoint._optim_names import Named, Names, Optimizers, as_list, steps_whole
from flatshard.checkpoint._optim_options import first_state, options_of
from flatshard.checkpoint._optim_parts import take_loaded
from flatshard.checkpoint._roll_call import roll_call
from flatshard.checkpoint._sharded_value import sharded_value
from flatshard.checkpoint._state_dict import dtype_named, export, idle_flats, is_first_rank


class Like(NamedTuple):
    """A tensor that lies as its parameter does: this rank's part."""

    tensor: torch.Tensor


class Alone(NamedTuple):
    """A tensor that only this rank has, whole, as the owner of the parameter."""

    tensor: torch.Tensor


State = dict[str, dict[str, Any]]
Kinds = dict[str, dict[str, list[Any]]]
Told = dict[str, tuple[bool, dict[str, list[Any]]]]
"""By one rank, of each parameter: whether it has any element; its state."""


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
    if full:
        receives = not rank0_only or is_first_rank([unit for unit, _ in names.flats])
        state, groups = whole_optim_state(names, optim, receives, torch.device("cpu") if offload_to_cpu else None)
        return {"state": state, "param_groups": groups} if receives else {}
    return own_optim_state(names, optim, for_load)


def own_optim_state(names: Names, optim: Optimizers, for_load: bool | Iterable[str] = False) -> dict[str, Any]:
    """``optim_state_dict(full=False)``."""
    pieces = pieces_of(names, optim, for_load)
    return {"state": pieces.values(), "param_groups": pieces.groups}


def whole_optim_state(
    names: Names, optim: Optimizers, receives: bool, device: torch.device | None
) -> tuple[State, list[dict[str, Any]]]:
    """``optim_state_dict(full=True)``: state and groups. Who does not receive gets no state."""
    pieces = pieces_of(names, optim, False)
    return _gather(names, pieces.named, pieces.state, device, receives), pieces.groups


class Pieces(NamedTuple):
    """The state of optimizers, here."""

    named: list[Named]  # all that they step
    state: State  # of each, tensors in ``Like`` and ``Alone``
    states: dict[nn.Parameter, dict[str, Any]]  # what the pieces are of, by what is stepped
    groups: list[dict[str, Any]]

    def values(self) -> State:
        """As ``torch.distributed.checkpoint`` takes them."""
        return {
            n.fqn: {k: _value(n, v) for k, v in self.state[n.fqn].items()} for n in self.named if n.fqn in self.state
        }


def pieces_of(names: Names, optim: Optimizers, for_load: bool | Iterable[str]) -> Pieces:
    """``for_load``: see ``optim_state_dict``."""
    saved = None if isinstance(for_load, bool) else _Saved(for_load)
    found = Pieces([], {}, {}, [])
    for optimizer in as_list(optim):
        take_loaded(optimizer)
        is_whole = steps_whole(optimizer)
        for given, named in zip(optimizer.param_groups, names.groups(optimizer), strict=True):
            found.groups.append({"params": [n.fqn for n in named], **dict(options_of(given))})
            found.named.extend(named)
            for each in named:
                own = optimizer.state.get(each.stepped, {})
                if not own and (
                    for_load is True and each.param.requires_grad if saved is None else each.fqn in saved.params
                ):
                    own = found.states.get(each.stepped) or _first_state(optimizer, given, each.stepped)
                if own:
                    found.states[each.stepped] = own
                if saved is not None:
                    own = {k: v for k, v in own.items() if f"{each.fqn}.{k}" in saved.states}
                if own:
                    found.state[each.fqn] = {key: _piece(each, key, value, is_whole) for key, value in own.items()}
    return found


class _Saved:
    """What a checkpoint has, by its keys. The user chose what comes before ``state.``, and any part may have dots."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.states = {key[at.end() :] for key in keys for at in re.finditer(r"state\.", key)}
        self.params = {name[: dot.start()] for name in self.states for dot in re.finditer(r"\.", name)}


def _piece(named: Named, key: str, value: Any, whole: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and (named.is_flat or named.stepped.dim()):
        return value
    if whole and named.info is not None:
        if named.info.shard_world_size > 1:
            return Alone(value.detach())
        if value.shape != named.stepped.shape:
            return value
    piece = named.piece(value)
    if piece is not None:
        return Like(piece.detach())
    if named.info is None:
        return value
    raise NotImplementedError(
        f"optim_state_dict: state {key!r} of {named.fqn!r} has shape {tuple(value.shape)}, the parameter has "
        f"{tuple(named.stepped.shape)} here: how it is sharded is known to the optimizer alone. Save "
        "optimizer.state_dict() by each rank"
    )


def _value(named: Named, value: Any) -> Any:
    if isinstance(value, Alone):
        return value.tensor
    if not isinstance(value, Like):
        return value
    return value.tensor if named.info is None else sharded_value(value.tensor, named.param)


def _first_state(optimizer: Optimizer, group: dict[str, Any], stepped: nn.Parameter) -> dict[str, Any]:
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


# -- whole values ------------------------------------------------------------------------------------------------------


def _gather(
    names: Names, everything: list[Named], state: dict[str, dict[str, Any]], device: torch.device | None, receives: bool
) -> State:
    whole: State = {}
    roll_call([flat.placement.runtime for _, flat in names.flats], "optim_state_dict(full=True)")
    kinds = _agree(names, everything, state)
    for _, flat, entries in names.unit_flats(everything):
        present = [n for n in entries if n is not None]
        for each in present:
            own, told = state.get(each.fqn, {}), kinds.get(each.fqn, {})
            if told or own:
                given = {k: _from_text(kind) for k, kind in told.items() if kind[0] in ("scalar", "plain")}
                rest = {k: _copy(v, device) for k, v in own.items() if not isinstance(v, Like | Alone)}
                whole[each.fqn] = {**given, **rest}
            for key, kind in told.items():
                if kind[0] == "alone":
                    here = own.get(key)
                    tensor = here.tensor if isinstance(here, Alone) else None
                    part = None if tensor is None else tensor.reshape(-1)
                    value = from_parts(flat.placement.runtime, part, 0, math.prod(kind[2]), dtype_named(kind[1]))
                    whole[each.fqn][key] = export(value.view(kind[2]), device, None) if receives else None
        tensors = dict.fromkeys(
            (key, kind[1]) for each in present for key, kind in kinds.get(each.fqn, {}).items() if kind[0] == "like"
        )
        for key, dtype in tensors:
            pieces = [_part_for(n, state, key, dtype_named(dtype), flat.slices[i].numel) for i, n in enumerate(entries)]
            gathered = Gathering(flat, joined(flat, pieces, dtype_named(dtype))).wait()
            for named, param, value in zip(entries, flat.params, gathered, strict=True):
                value = unwrapped_whole(value, shard_info(param))
                if named is not None and receives and kinds.get(named.fqn, {}).get(key) == ["like", dtype]:
                    whole[named.fqn][key] = export(value, device, None)
            del gathered
    for named in everything:
        if named.flat is None and named.fqn in state:
            whole[named.fqn] = {k: _copy(v, device) for k, v in state[named.fqn].items()}
    return {n.fqn: whole[n.fqn] for n in everything if n.fqn in whole} if receives else {}


def _agree(names: Names, everything: list[Named], state: State) -> Kinds:
    """What any rank has of each parameter's state: the same on all that hold its parts, once every rank has looked.

    Raises:
        ValueError: on all ranks: the optimizers step different parameters, or have different states of one.
    """
    by_group: dict[int, list[FlatParam]] = {}
    for _, flat in names.flats:
        by_group.setdefault(flat.placement.runtime.number, []).append(flat)
    entries = {id(b): [n for n in found if n is not None] for _, b, found in names.unit_flats(everything)}
    result: Kinds = {}
    problems: list[str] = []
    for _, flats in sorted(by_group.items()):
        whole = {n.fqn: _kinds(state.get(n.fqn, {})) for b in flats if b.is_whole for n in entries.get(id(b), ())}
        result.update(whole)
        sharded = [flat for flat in flats if not flat.is_whole]
        if sharded:
            here = [n for b in sharded for n in entries.get(id(b), ())]
            told = {n.fqn: [_is_here(n), _kinds(state.get(n.fqn, {}))] for n in here}
            ranks: list[Told] = [json.loads(text) for text in exchange(sharded[0], json.dumps(told))]
            for fqn in dict.fromkeys(fqn for rank in ranks for fqn in rank):
                problems += _differences(fqn, ranks)
                having = sorted((rank[fqn] for rank in ranks if fqn in rank), key=lambda each: not each[0])
                result[fqn] = {key: kind for _, kinds in reversed(having) for key, kind in kinds.items()}
    shared = [flat.placement for _, flat in names.flats if not flat.is_whole]
    replicas = [placement.replicas for placement in shared if placement.replicas is not None]
    if on_any_rank(replicas, on_any_rank([placement.runtime for placement in shared], bool(problems))):
        raise ValueError(
            "optim_state_dict(full=True): the ranks' optimizers differ, so no whole state can be put together: "
            + (
                "; ".join(problems[:8])
                or "not on the ranks that this one shares shards with, but on others, which tell more"
            )
            + (f"; ... ({len(problems) - 8} more)" if len(problems) > 8 else "")
            + ". Give every rank's optimizer the same parameters, step all of them together, and load all or none"
        )
    return result


def _is_here(named: Named) -> bool:
    """Whether this rank has any element of it."""
    assert named.flat is not None
    return named.flat.slices[named.index].numel > 0


def _differences(fqn: str, ranks: list[Told]) -> list[str]:
    """What keeps the state of one parameter from being put together, in words."""
    if lacking := [i for i, rank in enumerate(ranks) if fqn not in rank]:
        has = next(i for i, rank in enumerate(ranks) if fqn in rank)
        return [f"{fqn!r} is stepped on rank {has}, and not by the optimizer of {_rank_list(lacking)}"]
    here = {i: rank[fqn][1] for i, rank in enumerate(ranks) if rank[fqn][0]}
    found = []
    for key in dict.fromkeys(key for kinds in here.values() for key, kind in kinds.items() if kind[0] == "like"):
        of_ranks = {i: kinds[key][1] if key in kinds else "none" for i, kinds in here.items()}
        has, expected = next((i, dtype) for i, dtype in of_ranks.items() if dtype != "none")
        if odd := {i: dtype for i, dtype in of_ranks.items() if dtype != expected}:
            each = ", ".join(
                f"{_rank_list([i for i in odd if odd[i] == d])} has {d}" for d in dict.fromkeys(odd.values())
            )
            found.append(f"rank {has} has {key!r} of {fqn!r} in {expected}, {each}")
    return found


def _rank_list(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _copy(value: Any, device: torch.device | None) -> Any:
    value = value.tensor if isinstance(value, Like) else value
    return export(value, device, None) if isinstance(value, torch.Tensor) else value


def _part_for(named: Named | None, state: State, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """This rank's part of one state of one parameter, 1-D; zeros where it has none."""
    value = None if named is None else state.get(named.fqn, {}).get(key)
    if isinstance(value, Like) and value.tensor.dtype is dtype:
        assert named is not None
        assert named.info is not None
        return named.info.in_memory_order(value.tensor)
    return torch.zeros(numel, dtype=dtype)


def _kinds(state: dict[str, Any]) -> dict[str, list[Any]]:
    """What others need to know of one parameter's state."""
    kinds: dict[str, list[Any]] = {}
    for key, value in state.items():
        if isinstance(value, Like):
            kinds[key] = ["like", str(value.tensor.dtype)]
        elif isinstance(value, Alone):
            kinds[key] = ["alone", str(value.tensor.dtype), list(value.tensor.shape)]
        elif isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
            kinds[key] = ["scalar", str(value.dtype), value.item()]
        elif value is None or isinstance(value, bool | int | float | str):
            kinds[key] = ["plain", value]
    return kinds


def _from_text(kind: list[Any]) -> Any:
    return torch.tensor(kind[2], dtype=dtype_named(kind[1])) if kind[0] == "scalar" else kind[1]
