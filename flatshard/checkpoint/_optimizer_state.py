"""The state of optimizers by parameter: one table, from which a sharded and a full state dict follow.

The form is that of ``torch.distributed.checkpoint.state_dict``: ``{"state": {fqn: {name: value}}, "param_groups": [{"params":
[fqn, ...], "lr": ...}]}``. An optimizer over ``flat_parameters`` has the same state dict as one over single parameters.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard._base.old_names import old_arguments
from flatshard._base.optimizers import (
    Group,
    Optimizers,
    as_list,
    first_options,
    first_state,
    options_of,
    steps_elsewhere,
    steps_whole,
)
from flatshard._comm.runtime import on_any_rank
from flatshard._composable.features.full_parameters import Gathering, joined
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard.checkpoint._barrier import barrier, rank_list
from flatshard.checkpoint._gathering import exchange, from_parts, wrap_full
from flatshard.checkpoint._optimizer_names import ParamNames, Quantised, SteppedParam, keep_own_shards
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import dtype_named, export, idle_flats, is_first_rank

State = dict[str, dict[str, Any]]


@old_arguments(optim="optimizers")
def optim_state_dict(
    module: nn.Module,
    optimizers: Optimizers,
    *,
    full: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = True,
    for_load: bool | Iterable[str] = False,
) -> dict[str, Any]:
    """Return the state of ``optimizers``, by the names of ``module``'s parameters.

    By default without communication: sharded values share memory with the optimizer's, so ``torch.distributed.checkpoint``
    saves them as they are, and loads into them.

    Example::

        import torch.distributed.checkpoint as dcp

        state = {"model": model.state_dict(), "optimizer": flatshard.checkpoint.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id="run/dcp")
        whole = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optimizers: one or several, whose states and groups are then in one dict.
        full: gather full, plain tensors, as of the unsharded model, one at a time. All ranks must call it. State that a rank
            lacks because its shard is empty comes from the others.
        rank0_only: with ``full``: only the first of all ranks gets the result, the others ``{}``.
        offload_to_cpu: with ``full``: the result is on CPU.
        for_load: where a trainable parameter has no state yet, add what its first step would make, for
            ``torch.distributed.checkpoint.load`` to fill, and pass the result to :func:`load_optim_state_dict`. No step is
            taken: a copy of the optimizer steps zeros of the parameter's size, one parameter at a time, without hooks.
            A checkpoint may have other state (some parameters were never used, or frozen later) or other options (it was
            saved with a scheduler that is made later here, or the other way round). Then pass its keys,
            ``FileSystemReader(path).read_metadata().state_dict_metadata``, in place of True.

    Raises:
        ValueError: the optimizer steps parameters that are not ``module``'s; nothing is sharded; ``rank0_only`` without
            ``full``; ``for_load`` with it. With ``full``, on all ranks: their optimizers step different parameters, or some
            have no state where others have.
        NotImplementedError: a value has a shape of its own, and how it is sharded is known to the optimizer alone.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    if rank0_only and not full:
        raise ValueError("optim_state_dict(rank0_only=True) needs full=True: otherwise each rank has its own part")
    if for_load is not False and full:
        raise ValueError("optim_state_dict(for_load=True) is for loading into sharded values: leave out full=True")
    names = ParamNames(module, "optim_state_dict", idle_flats(module, "optim_state_dict"))
    state = OptimizerState.read(names, optimizers, for_load)
    if not full:
        return state.to_dict()
    receives = not rank0_only or is_first_rank([unit for unit, _ in names.flats])
    found = state.gather(torch.device("cpu") if offload_to_cpu else None, receives)
    return {"state": found, "param_groups": state.groups} if receives else {}


class Row(NamedTuple):
    """The state of one parameter on this rank."""

    param: SteppedParam
    memory: dict[str, Any]  # as the optimizer has it for what it steps, or as its first step would make it
    values: dict[str, Any]  # as a state dict has it for the parameter


class OptimizerState:
    """The state of optimizers: a row for each parameter that they step here, and the options of their groups."""

    def __init__(self, names: ParamNames) -> None:
        self._names = names
        self.rows: list[Row] = []
        self.groups: list[Group] = []

    @classmethod
    def read(
        cls, names: ParamNames, optimizers: Optimizers, for_load: bool | Iterable[str] = False, *, inside: bool = False
    ) -> OptimizerState:
        """Return the state of ``optimizers``. Tensors share memory with theirs.

        Args:
            names: of the module that they step.
            optimizers: one or several.
            for_load: see :func:`optim_state_dict`.
            inside: show the tensors inside of quantised values.
        """
        state, saved = cls(names), None if isinstance(for_load, bool) else SavedKeys(for_load)
        shows_first = for_load is True or (saved is not None and not saved.groups)
        for optimizer in as_list(optimizers):
            keep_own_shards(optimizer)
            quantised, is_owners = Quantised(optimizer) if inside else None, steps_whole(optimizer)
            for group in optimizer.param_groups:
                made = first_options(optimizer, group) if shows_first else {}
                held = [(stepped, names.find(stepped)) for stepped in group["params"]]
                fqns = [param.fqn for _, params in held for param in params]
                state.groups.append({"params": fqns, **made, **options_of(group)})
                for stepped, params in held:
                    memory = optimizer.state.get(stepped, {})
                    if not memory and for_load is not False and not steps_elsewhere(optimizer, stepped):
                        wanted = (p.param.requires_grad if saved is None else p.fqn in saved.params for p in params)
                        memory = first_state(optimizer, group, stepped) if any(wanted) else memory
                    for param in params:
                        inner = {} if quantised is None else quantised.as_saved(param, group, memory)
                        state.rows.append(Row(param, memory, _values(param, memory, inner, saved, is_owners)))
        if saved is not None and saved.groups:
            state.groups = saved.fill_groups(state.groups)
        return state

    def to_dict(self) -> dict[str, Any]:
        """Return the state dict, with sharded values, as ``torch.distributed.checkpoint`` takes it."""
        state = {
            param.fqn: values if param.is_plain else {key: param.as_owned(key, v) for key, v in values.items()}
            for param, _, values in self.rows
            if values
        }
        return {"state": state, "param_groups": self.groups}

    def gather(self, device: torch.device | None, receives: bool) -> State:
        """Gather the full state by name, in tensors of its own, on ranks where ``receives``. All ranks must call it.

        Args:
            device: of the result, or None for where values are gathered.
            receives: whether this rank gets the result. Otherwise it returns ``{}``.

        Raises:
            ValueError: on all ranks: the optimizers step different parameters, or have different states of one.
        """
        flats = [flat for _, flat in self._names.flats]
        barrier([flat.ranks.runtime for flat in flats], "optim_state_dict(full=True)")
        by_param = {id(row.param.param): row for row in self.rows}
        table = [(flat, [by_param.get(id(p)) for p in flat.params]) for flat in flats]
        placed = _agree_on_placements(table)
        full: State = {}
        for plain in self.rows:
            if plain.param.info is None and plain.values:
                full[plain.param.fqn] = {key: _exported(plain, value, device) for key, value in plain.values.items()}
        for flat, rows in table:
            for row in filter(None, rows):
                if of_param := placed[row.param.fqn]:
                    full[row.param.fqn] = _gather_unsharded(flat, row, of_param, device, receives)
            _gather_sharded(flat, rows, placed, full, device, receives)
        return {row.param.fqn: full[row.param.fqn] for row in self.rows if row.param.fqn in full} if receives else {}


def _values(
    param: SteppedParam,
    memory: dict[str, Any],
    inner: dict[str, dict[str, Any]],
    saved: SavedKeys | None,
    is_owners: bool,
) -> dict[str, Any]:
    """Return the state of ``param`` as state dicts hold it: of ``saved`` keys, or of all.

    Args:
        param: the parameter.
        memory: the state that the optimizer has.
        inner: the tensors inside of quantised values.
        saved: the keys of the checkpoint to load, or None.
        is_owners: whether the rank that steps the parameter has all of its state.
    """
    found = {}
    for key, value in memory.items():
        if saved is not None and f"{param.fqn}.{key}" not in (saved.params if key in inner else saved.values):
            continue
        if key in inner:
            found[key] = inner[key]
        elif is_owners and not param.is_full:
            found[key] = value
        else:
            found[key] = param.as_saved(key, value, strict=not is_owners)
    return found


# -- gathering ---------------------------------------------------------------------------------------------------------

SHARDED, OWNED, REPLICATED, LOCAL = "sharded", "owned", "replicated", "local"
"""Where a value is: in shards on all ranks; on the rank that steps the parameter; the same number, text or None on each rank
that has it; any other value of each rank's own.
"""


class Placed(NamedTuple):
    """The placement of one value, and what a rank without the value needs to know of it. In JSON between ranks."""

    placement: str
    dtype: str | None = None  # of a tensor
    shape: list[int] | None = None  # of an owned tensor
    number: Any = None  # of a replicated value, with a dtype where it is a tensor


Told = dict[str, tuple[bool, dict[str, Placed]]]
"""By parameter, whether a rank has any of its elements, and the placement of each value of its state."""


def _gather_unsharded(
    flat: FlatParam, row: Row, placed: dict[str, Placed], device: torch.device | None, receives: bool
) -> dict[str, Any]:
    """Return all values of a parameter's state that are not sharded. Owned ones come from their owner."""
    found: dict[str, Any] = {}
    for key, at in placed.items():
        if at.placement == OWNED:
            value = _from_owner(flat, row.values.get(key), at)
            if row.param.info is not None and tuple(value.shape) == tuple(row.param.info.shape):
                value = wrap_full(value, row.param.info)
            found[key] = export(value, device, None) if receives else None
        elif key in row.values and at.placement != SHARDED:
            found[key] = _exported(row, row.values[key], device) if receives else None
        elif at.placement == REPLICATED:
            dtype = None if at.dtype is None else dtype_named(at.dtype)
            found[key] = at.number if dtype is None else torch.tensor(at.number, dtype=dtype, device="cpu")
    return found


def _gather_sharded(
    flat: FlatParam,
    rows: list[Row | None],
    placed: dict[str, dict[str, Placed]],
    full: State,
    device: torch.device | None,
    receives: bool,
) -> None:
    """Gather the sharded values of all parameters of ``flat`` into ``full``, those of one key and dtype together."""
    fqns = [None if row is None else row.param.fqn for row in rows]
    every = [(key, at.dtype) for fqn in fqns if fqn for key, at in placed[fqn].items() if at.placement == SHARDED]
    for key, dtype in dict.fromkeys(every):
        assert dtype is not None
        shards = [_shard(row, key, dtype) for row in rows]
        gathered = Gathering(flat, joined(flat, shards, dtype_named(dtype))).wait()
        for fqn, param, value in zip(fqns, flat.params, gathered, strict=True):
            value = wrap_full(value, shard_info(param))
            if fqn is not None and receives and placed[fqn].get(key) == Placed(SHARDED, dtype):
                full[fqn][key] = export(value, device, None)
        del gathered


def _exported(row: Row, value: Any, device: torch.device | None) -> Any:
    """Return a copy of a value that is not gathered."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == row.param.param.shape:
        value = wrap_full(value, row.param.info)
    return export(value, device, None)


def _from_owner(flat: FlatParam, value: torch.Tensor | None, at: Placed) -> torch.Tensor:
    assert at.dtype is not None
    assert at.shape is not None
    own = None if value is None else value.reshape(-1)
    return from_parts(flat.ranks.runtime, own, 0, math.prod(at.shape), dtype_named(at.dtype)).view(at.shape)


def _shard(row: Row | None, key: str, dtype: str) -> torch.Tensor | None:
    """Return this rank's shard of a value, 1-D, or None if it has none of this dtype."""
    value = None if row is None else row.values.get(key)
    return value.to_local() if isinstance(value, ShardedValue) and str(value.dtype) == dtype else None


def _placed(value: Any, is_full: bool) -> Placed:
    """Return the placement of a value. ``is_full``: each rank has all elements of the parameter."""
    if isinstance(value, ShardedValue):
        return Placed(SHARDED, str(value.dtype))
    if is_full:
        return Placed(LOCAL)
    if isinstance(value, torch.Tensor) and value.dim():
        return Placed(OWNED, str(value.dtype), list(value.shape))
    if isinstance(value, torch.Tensor) and not value.is_complex():
        return Placed(REPLICATED, str(value.dtype), number=value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return Placed(REPLICATED, number=value)
    return Placed(LOCAL)


def _agree_on_placements(table: list[tuple[FlatParam, list[Row | None]]]) -> dict[str, dict[str, Placed]]:
    """Return the placement of each value that any rank has, by parameter: the same on all ranks that share its shards.

    Raises:
        ValueError: on all ranks: the optimizers step different parameters, or have different states of one.
    """
    by_ranks: dict[tuple[int, bool], list[tuple[FlatParam, list[Row | None]]]] = {}
    for flat, rows in table:
        by_ranks.setdefault((flat.ranks.runtime.number, flat.holds_all), []).append((flat, rows))
    result: dict[str, dict[str, Placed]] = {}
    problems: list[str] = []
    for (_, is_full), of_ranks in sorted(by_ranks.items(), key=lambda each: each[0]):
        here = [row for _, rows in of_ranks for row in rows if row is not None]
        own = {
            row.param.fqn: (row.param.param.numel() > 0, {k: _placed(v, is_full) for k, v in row.values.items()})
            for row in here
        }
        ranks = [_parsed(text) for text in exchange(of_ranks[0][0], json.dumps(own))]
        for fqn in dict.fromkeys(fqn for rank in ranks for fqn in rank):
            problems += _differences(fqn, ranks)
            told = [rank[fqn] for rank in ranks if fqn in rank]
            ordered = [placed for has, placed in told if not has][::-1] + [placed for has, placed in told if has][::-1]
            # Ranks with elements decide, the first of them last: an empty shard's state may be in another form.
            result[fqn] = {key: at for placed in ordered for key, at in placed.items()}
    shared = [flat.ranks for flat, _ in table if not flat.holds_all]
    replicas = [ranks_of.replicas for ranks_of in shared if ranks_of.replicas is not None]
    if on_any_rank(replicas, on_any_rank([ranks_of.runtime for ranks_of in shared], bool(problems))):
        raise ValueError(
            "optim_state_dict(full=True): the ranks' optimizers differ, so there is no full state: "
            + (
                "; ".join(problems[:8])
                or "not on the ranks that this one shares shards with, but on others, which tell more"
            )
            + (f"; ... ({len(problems) - 8} more)" if len(problems) > 8 else "")
            + ". Give every rank's optimizer the same parameters, step all of them together, and load all or none"
        )
    return result


def _parsed(text: str) -> Told:
    told = json.loads(text).items()
    return {fqn: (has, {key: Placed(*at) for key, at in placed.items()}) for fqn, (has, placed) in told}


def _differences(fqn: str, ranks: list[Told]) -> list[str]:
    """Return what keeps the state of one parameter from being gathered, in words."""
    if lacking := [i for i, rank in enumerate(ranks) if fqn not in rank]:
        has = next(i for i, rank in enumerate(ranks) if fqn in rank)
        return [f"{fqn!r} is stepped on rank {has}, and not by the optimizer of {rank_list(lacking)}"]
    here = {i: rank[fqn][1] for i, rank in enumerate(ranks) if rank[fqn][0]}
    found = []
    for key in dict.fromkeys(key for placed in here.values() for key, at in placed.items() if at.placement == SHARDED):
        dtypes = {i: placed[key].dtype if key in placed else "none" for i, placed in here.items()}
        has, expected = next((i, dtype) for i, dtype in dtypes.items() if dtype != "none")
        if odd := {i: dtype for i, dtype in dtypes.items() if dtype != expected}:
            each = ", ".join(
                f"{rank_list([i for i in odd if odd[i] == d])} has {d}" for d in dict.fromkeys(odd.values())
            )
            found.append(f"rank {has} has {key!r} of {fqn!r} in {expected}, {each}")
    return found


# -- what a checkpoint has ---------------------------------------------------------------------------------------------


class SavedKeys:
    """The keys of optimizer state in a checkpoint. The user chose what precedes ``state.``, and any part may have dots."""

    def __init__(self, keys: Iterable[str]) -> None:
        """``keys``: a mapping to metadata, or the keys alone."""
        kinds: dict[str, Any] = dict(keys) if isinstance(keys, Mapping) else dict.fromkeys(keys)
        self.values: set[str] = set()
        for key in kinds:
            _, *rest = key.split("state.")
            self.values.update(rest if len(rest) == 1 else ("state.".join(rest[i:]) for i in range(len(rest))))
        # Groups of one optimizer; with several, nobody knows whose are asked for.
        optimizers = [key.removesuffix("0.params") for key in kinds if f".{key}".endswith(".param_groups.0.params")]
        start = optimizers[0] if len(optimizers) == 1 else None
        self.groups = {k.removeprefix(start): kinds[k] for k in kinds if start is not None and k.startswith(start)}

    @functools.cached_property
    def params(self) -> set[str]:
        """Names of parameters with any state, and beginnings of names."""
        return {name[: dot.start()] for name in self.values for dot in re.finditer(r"\.", name)}

    def fill_groups(self, own: list[Group]) -> list[Group]:
        """Return the checkpoint's groups, with a value to load into in each place. ``own``: the optimizer's groups."""
        found: dict[str, Any] = {}
        for name, kind in self.groups.items():
            *before, last = name.split(".")
            at, mine = found, {str(i): group for i, group in enumerate(own)}
            for key in before:
                at, mine = at.setdefault(key, {}), _entry(mine, key)
            at[last] = _target(kind, _entry(mine, last))
        return list(_with_lists(found))


def _entry(value: Any, key: str) -> Any:
    """Return the entry of a list or dict, or None if it has none."""
    if isinstance(value, list):
        return value[int(key)] if key.isdecimal() and int(key) < len(value) else None
    return value.get(key) if isinstance(value, dict) else None


def _target(kind: Any, own: Any) -> Any:
    """Return what a value of this ``kind`` of a checkpoint may be loaded into: ``own``, if the kind is unknown."""
    if kind is None:
        return own
    size = getattr(kind, "size", None)
    if size is None:  # no tensor: any object
        return None
    return torch.empty(size, dtype=kind.properties.dtype, device=own.device if isinstance(own, torch.Tensor) else None)


def _with_lists(value: Any) -> Any:
    """Return ``value`` with a list in place of each dict whose keys are numbers."""
    if not isinstance(value, dict):
        return value
    found = {key: _with_lists(each) for key, each in value.items()}
    are_numbers = all(key.isdecimal() for key in found)
    return [found[key] for key in sorted(found, key=int)] if are_numbers else found
