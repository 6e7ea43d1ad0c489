"""The whole state of optimizers, put together from what all ranks have of it."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from flatshard._composable.features.whole_parameters import Gathering, joined
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._runtime import on_any_rank
from flatshard.checkpoint._barrier import barrier
from flatshard.checkpoint._gathering import exchange, from_parts, unwrapped_whole
from flatshard.checkpoint._optim_params import Row, State
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import Flat, dtype_named, export

Kinds = dict[str, list[Any]]
"""What a rank tells the others of one parameter's state, by key:

- ``["part", dtype]``: a tensor of which ranks have parts;
- ``["alone", dtype, shape]``: a tensor that only the rank has that steps the parameter;
- ``["same", dtype, value]``: a number, text or None, the same where it is; with a dtype, a tensor of no dimension;
- ``["own"]``: any other value, which a rank has or lacks.
"""
Told = dict[str, tuple[bool, Kinds]]
"""By one rank, of each parameter: whether it has any element; its state."""


def whole_state(flats: list[Flat], rows: list[Row], device: torch.device | None, receives: bool) -> State:
    """The values of ``rows``, whole, by name: tensors of their own. All ranks together; who does not receive gets nothing.

    Raises:
        ValueError: on all ranks: the optimizers step different parameters, or have different states of one.
    """
    barrier([flat.ranks.runtime for _, flat in flats], "optim_state_dict(full=True)")
    by_param = {id(row.named.param): row for row in rows}
    entries = [(flat, [by_param.get(id(p)) for p in flat.params]) for _, flat in flats]
    kinds = _agreed(entries)
    whole: State = {}
    for row in rows:
        if row.named.info is None and row.values:
            whole[row.named.fqn] = {key: _copy(row, value, device) for key, value in row.values.items()}
    for flat, own in entries:
        present = [row for row in own if row is not None and kinds[row.named.fqn]]
        for row in present:
            found = whole[row.named.fqn] = {}
            for key, kind in kinds[row.named.fqn].items():
                if kind[0] == "alone":
                    value = _from_owner(flat, row.values.get(key), kind)
                    found[key] = export(value, device, None) if receives else None
                elif key in row.values and kind[0] != "part":
                    found[key] = _copy(row, row.values[key], device) if receives else None
                elif kind[0] == "same":
                    _, dtype, number = kind
                    found[key] = (
                        number if dtype is None else torch.tensor(number, dtype=dtype_named(dtype), device="cpu")
                    )
        every = ((key, kind) for row in present for key, kind in kinds[row.named.fqn].items())
        for key, dtype in dict.fromkeys((key, kind[1]) for key, kind in every if kind[0] == "part"):
            parts = [_part(row, key, dtype) for row in own]
            gathered = Gathering(flat, joined(flat, parts, dtype_named(dtype))).wait()
            for of_param, param, value in zip(own, flat.params, gathered, strict=True):
                value = unwrapped_whole(value, shard_info(param))
                fqn = None if of_param is None else of_param.named.fqn
                if fqn is not None and receives and kinds[fqn].get(key) == ["part", dtype]:
                    whole[fqn][key] = export(value, device, None)
            del gathered
    return {row.named.fqn: whole[row.named.fqn] for row in rows if row.named.fqn in whole} if receives else {}


def _copy(row: Row, value: Any, device: torch.device | None) -> Any:
    """Of a value that is not gathered."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == row.named.param.shape:
        value = unwrapped_whole(value, row.named.info)
    return export(value, device, None)


def _from_owner(flat: FlatParam, value: torch.Tensor | None, kind: list[Any]) -> torch.Tensor:
    _, dtype, shape = kind
    part = None if value is None else value.reshape(-1)
    return from_parts(flat.ranks.runtime, part, 0, math.prod(shape), dtype_named(dtype)).view(shape)


def _part(row: Row | None, key: str, dtype: str) -> torch.Tensor | None:
    """This rank's part of one state of one parameter, 1-D. None: it has none, or it is of another dtype."""
    value = None if row is None else row.values.get(key)
    return value.to_local() if isinstance(value, ShardedValue) and str(value.dtype) == dtype else None


def _kinds(values: dict[str, Any], is_whole: bool) -> Kinds:
    kinds: Kinds = {}
    for key, value in values.items():
        if isinstance(value, ShardedValue):
            kinds[key] = ["part", str(value.dtype)]
        elif is_whole:
            kinds[key] = ["own"]
        elif isinstance(value, torch.Tensor) and value.dim():
            kinds[key] = ["alone", str(value.dtype), list(value.shape)]
        elif isinstance(value, torch.Tensor) and not value.is_complex():
            kinds[key] = ["same", str(value.dtype), value.item()]
        elif value is None or isinstance(value, bool | int | float | str):
            kinds[key] = ["same", None, value]
        else:
            kinds[key] = ["own"]
    return kinds


def _agreed(entries: list[tuple[FlatParam, list[Row | None]]]) -> dict[str, Kinds]:
    """What any rank has of each parameter's state: the same on all that hold its parts, once every rank has looked.

    Raises:
        ValueError: on all ranks: the optimizers step different parameters, or have different states of one.
    """
    by_group: dict[tuple[int, bool], list[tuple[FlatParam, list[Row | None]]]] = {}
    for flat, own in entries:
        by_group.setdefault((flat.ranks.runtime.number, flat.is_whole), []).append((flat, own))
    result: dict[str, Kinds] = {}
    problems: list[str] = []
    for (_, is_whole), of_group in sorted(by_group.items(), key=lambda each: each[0]):
        here = [row for _, own in of_group for row in own if row is not None]
        told = {r.named.fqn: (r.named.param.numel() > 0, _kinds(r.values, is_whole)) for r in here}
        ranks: list[Told] = [json.loads(text) for text in exchange(of_group[0][0], json.dumps(told))]
        for fqn in dict.fromkeys(fqn for rank in ranks for fqn in rank):
            problems += _differences(fqn, ranks)
            having = sorted((rank[fqn] for rank in ranks if fqn in rank), key=lambda each: not each[0])
            result[fqn] = {key: kind for _, kinds in reversed(having) for key, kind in kinds.items()}
    shared = [flat.ranks for flat, _ in entries if not flat.is_whole]
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


def _differences(fqn: str, ranks: list[Told]) -> list[str]:
    """What keeps the state of one parameter from being put together, in words."""
    if lacking := [i for i, rank in enumerate(ranks) if fqn not in rank]:
        has = next(i for i, rank in enumerate(ranks) if fqn in rank)
        return [f"{fqn!r} is stepped on rank {has}, and not by the optimizer of {_rank_list(lacking)}"]
    here = {i: rank[fqn][1] for i, rank in enumerate(ranks) if rank[fqn][0]}
    found = []
    for key in dict.fromkeys(key for kinds in here.values() for key, kind in kinds.items() if kind[0] == "part"):
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
