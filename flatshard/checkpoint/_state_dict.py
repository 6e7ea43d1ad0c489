"""State dicts of full tensors, which communicate, and of this rank's flat shards.

``model.state_dict()`` is neither: its values are shards that know their place (`ShardedValue`). Saving them sends nothing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.names import plain_name
from flatshard._comm.composite_groups import ExpertRanks
from flatshard._comm.progress import Label
from flatshard._comm.runtime import Runtime
from flatshard._composable.features.full_parameters import Gathering
from flatshard._composable.find import units_of
from flatshard._composable.hooks import settle
from flatshard._composable.state import Unit, current_graph_task
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.handle import check_has_memory
from flatshard._handle.registrations import SHARDED_PARAMS
from flatshard._handle.tensors.aggregate import in_order
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, shard_info
from flatshard.checkpoint._barrier import barrier
from flatshard.checkpoint._boxes import Part
from flatshard.checkpoint._gathering import check_one_value, exchange_over, wrap_full
from flatshard.checkpoint._sharded_value import ShardedValue

_FORMAT = 2  # of local_state_dict
_LET_GO = 2.0  # seconds to wait in `_is_running`

Flat = tuple[Unit, FlatParam]
T = TypeVar("T")


def full_state_dict(
    module: nn.Module,
    *,
    rank0_only: bool = False,
    offload_to_cpu: bool = True,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Return ``module.state_dict()`` with full, plain tensors, as the unsharded model has it. All ranks must call it.

    One flat parameter is gathered at a time, so a rank holds at most one unit beyond the result. Nothing shares memory with
    the model. Tied parameters are one tensor under all their names. Buffers and ignored parameters are this rank's own; for
    BatchNorm's statistics see ``flatshard.sync_buffers``.

    Example::

        whole = flatshard.checkpoint.full_state_dict(model, rank0_only=True)
        if dist.get_rank() == 0:
            torch.save(whole, "model.pt")

    Args:
        module: a sharded module, or one that holds sharded ones.
        rank0_only: only the first of all ranks gets the result. Others get ``{}``, and hold at most one unit.
            ``load_state_dict`` needs it on all ranks; torch's ``set_model_state_dict`` sends it to them, with
            ``broadcast_from_rank0=True``.
        offload_to_cpu: whether the result is on CPU, and not on the device that computes. ``summon_full_params`` has False
            as default, as in FSDP1: its parameters compute, and these are for saving.
        dtype: the dtype of floating-point values, or None to keep the dtype of each.

    Raises:
        ValueError: nothing in ``module`` is sharded, or ``dtype`` is no floating-point dtype.
        RuntimeError: it was called inside a forward or ``summon_full_params``, where ``state_dict()`` has full tensors; or
            other ranks, which the message names, did not call it within five minutes, or the group's timeout if shorter.
    """
    flats = idle_flats(module, "full_state_dict")
    check_dtype(dtype, "full_state_dict")
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    receives = not rank0_only or is_first_rank([unit for unit, _ in flats])
    device = torch.device("cpu") if offload_to_cpu else None
    wanted = {id(v) for v in state.values() if isinstance(v, ShardedParameter)}
    exported = gather_parameters(flats, wanted, "full_state_dict", receives, device, dtype)
    if not receives:
        return {}
    for value in state.values():
        if isinstance(value, torch.Tensor) and id(value) not in exported:
            exported[id(value)] = export(value, device, dtype)
    for name, value in state.items():  # the OrderedDict of module.state_dict() has the modules' versions
        state[name] = exported.get(id(value), value)
    return state


def gather_parameters(
    flats: list[Flat],
    wanted: Container[int],
    call: str,
    receives: bool,
    device: torch.device | None,
    dtype: torch.dtype | None = None,
) -> dict[int, torch.Tensor]:
    """Return plain full tensors by the ids of their parameters. All ranks must call it.

    Args:
        flats: the flat parameters to gather.
        wanted: the ids of the parameters to return.
        call: the user's call, for errors: see ``barrier``.
        receives: whether this rank gets the values. If not, it gets tensors without memory.
        device: the device of the result, or None for the one that computes.
        dtype: the dtype of floating-point values, or None to keep the dtype of each.
    """
    found: dict[int, torch.Tensor] = {}
    for param, value in gathered(flats, wanted, call):
        found[id(param)] = (
            export(value, device, dtype) if receives else torch.empty(value.shape, dtype=value.dtype, device="meta")
        )
        del value
    return found


def gathered(
    flats: list[Flat], wanted: Container[int], call: str, bucket_bytes: int = 1
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Iterate over parameters and their full values, in the same order on all ranks. A bucket of units is gathered at a time.

    A value is a view of the gathered buffer. Drop it before asking for the next one, so that the buffer is freed.
    """
    barrier([flat.ranks.runtime for _, flat in flats], call)
    check_experts(flats)
    asked = [(unit, flat) for unit, flat in flats if any(id(p) in wanted for p in flat.params)]
    for bucket in batches(asked, lambda each: each[1].layout.padded_numel * each[1].kind.dtype.itemsize, bucket_bytes):
        gatherings = [Gathering(flat) for _, flat in reversed(bucket)]
        for _, flat in bucket:
            values = gatherings.pop().wait()
            values.reverse()
            for param in flat.params:
                value = wrap_full(values.pop(), shard_info(param))
                if id(param) in wanted:
                    yield param, value
                del value


def iter_full_params(
    module: nn.Module,
    *,
    bucket_bytes: int = 256 * 2**20,
    names: Container[str] | Callable[[str], bool] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over (FQN, full tensor) of each parameter, without holding all of them at a time.

    All ranks must iterate over the same names, and to the same point. The order is the same on all ranks; parameters that
    are not sharded come last. Several flat parameters are gathered together, as far as they fit in ``bucket_bytes``, but at
    least one. No more is held beyond the tensors that the caller keeps. These are copies on the device that computes.

    Example::

        for name, tensor in flatshard.checkpoint.iter_full_params(model, dtype=torch.bfloat16):
            print(name, tuple(tensor.shape))

    Args:
        module: a sharded module, or one that holds sharded ones.
        bucket_bytes: the most bytes to gather at a time.
        names: a collection of FQNs, or a function that returns whether to include one. A tied parameter comes under every
            name that is included. None iterates over all parameters, each once.
        dtype: the dtype of floating-point parameters, or None to keep the dtype of each.

    Raises:
        ValueError: nothing in ``module`` is sharded, a name is unknown, or ``dtype`` is no floating-point dtype.
        RuntimeError: it was called inside a forward or ``summon_full_params``, where parameters are full; or other ranks
            do not call it, once the first parameter is asked for.
    """
    flats = idle_flats(module, "iter_full_params")
    check_dtype(dtype, "iter_full_params")
    every = [(plain_name(n), p) for n, p in module.named_parameters(remove_duplicate=names is None)]
    chosen: dict[int, list[str]] = {}
    for name, param in every:
        if names is None or (names(name) if callable(names) else name in names):
            chosen.setdefault(id(param), []).append(name)
    asked: Iterable[str] = names if isinstance(names, Iterable) and not callable(names) else ()
    if unknown := [n for n in asked if n not in dict(every)]:
        raise ValueError(f"iter_full_params: {type(module).__name__} has no parameters {name_list(unknown)}")
    return _stream(flats, [p for _, p in every], chosen, bucket_bytes, dtype)


def _stream(
    flats: list[Flat],
    params: list[nn.Parameter],
    chosen: dict[int, list[str]],
    bucket_bytes: int,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    for param, value in gathered(flats, chosen, "iter_full_params", bucket_bytes):
        for name in chosen[id(param)]:
            yield name, export(value, None, dtype)
        del value
    for param in dict.fromkeys(params):
        if not isinstance(param, ShardedParameter):
            for name in chosen.get(id(param), ()):
                yield name, export(param, None, dtype)


def batches(items: Iterable[T], nbytes: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Iterate over ``items`` in batches of at most ``limit`` bytes, but at least one item."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and size + nbytes(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += nbytes(item)
    if batch:
        yield batch


# -- this rank's own ---------------------------------------------------------------------------------------------------


def local_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return this rank's shards and their places, as plain tensors and numbers. Nothing is sent or copied.

    Each rank saves and loads its own, by ``torch.save`` and ``torch.load(weights_only=True)``, in a job with the same ranks
    and layout: for restarts, or with ``copy.deepcopy`` for snapshots in memory. For any other layout use ``state_dict()``.

    Example::

        torch.save(flatshard.checkpoint.local_state_dict(model), f"rank-{dist.get_rank()}.pt")

    Raises:
        ValueError: nothing in ``module`` is sharded.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    idle_flats(module, "local_state_dict")
    state = module.state_dict()
    places = {n: dataclasses.astuple(v.part) for n, v in state.items() if isinstance(v, ShardedValue)}
    values = {n: v.to_local() if isinstance(v, ShardedValue) else v for n, v in state.items()}
    return {"format": _FORMAT, "places": places, "values": values}


def load_local_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Load the result of :func:`local_state_dict` on this rank, into a model that is sharded in the same way.

    Example::

        snapshot = copy.deepcopy(flatshard.checkpoint.local_state_dict(model))
        optimizer.step()
        flatshard.checkpoint.load_local_state_dict(model, snapshot)

    Args:
        module: the sharded module.
        state: the result of ``local_state_dict``.

    Raises:
        ValueError: ``state`` is of another layout, rank, world size or format. The message says where. Nothing is changed.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    idle_flats(module, "load_local_state_dict")
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError(f"load_local_state_dict takes what local_state_dict returned, format {_FORMAT}")
    places = {name: Part(*place) for name, place in state["places"].items()}
    if damaged := [n for n, part in places.items() if state["values"][n].numel() != part.numel]:
        raise ValueError(f"load_local_state_dict: the shard of {name_list(damaged)} is damaged")
    values = {n: ShardedValue(v, places[n], None) if n in places else v for n, v in state["values"].items()}
    try:
        module.load_state_dict(values)
    except RuntimeError as e:
        raise ValueError(f"load_local_state_dict: {e}") from None


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype whose ``str()`` is ``name``."""
    found: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return found


# -- shared ------------------------------------------------------------------------------------------------------------


def check_experts(flats: list[Flat]) -> None:
    """Raise, on all ranks, if ranks have different values of one name."""
    apart: dict[Runtime, dict[str, list[int]]] = {}
    labels: dict[Runtime, Label] = {}
    for unit, flat in flats:
        for info in (shard_info(p) for p in flat.params):
            if info is not None and isinstance(info.runtime, ExpertRanks):
                around = unit.handle.runtime
                labels.setdefault(around, unit.handle.ranks.label)
                apart.setdefault(around, {})[info.fqn] = info.runtime.ranks_around
    for around in in_order(apart):
        check_one_value(map(json.loads, exchange_over(around.exact, labels[around], json.dumps(apart[around]))))


def idle_flats(module: nn.Module, verb: str) -> list[Flat]:
    """Return the flat parameters of ``module``, each with its unit, for ``verb``.

    Raises:
        RuntimeError: some of them are in a forward or a backward, are shown unsharded, or have no memory.
    """
    return check_idle(units_of(module, verb), verb)


def check_idle(units: list[Unit], verb: str) -> list[Flat]:
    """Return the flat parameters of ``units``, as ``idle_flats`` does."""
    if busy := [u.fqn for u in units if u.claims.in_use]:
        raise RuntimeError(
            f"{verb}: {name_list(busy)} are in a forward or in summon_full_params, where state_dict() has full tensors. "
            "Call it outside"
        )
    if reached := [u for u in units if u.graph.status is not None]:
        if _is_running(reached):
            names = name_list(u.fqn or "<root>" for u in reached)
            raise RuntimeError(f"{verb}: {names} are in a backward. Call it when loss.backward() has returned")
        settle(reached)
    unsharded = [
        u.fqn or "<root>" for u in units if u.handle.flats and u.handle.registrations.shows is not SHARDED_PARAMS
    ]
    if unsharded:
        raise RuntimeError(
            f"{verb}: {name_list(unsharded)} are unsharded since unshard(): call flatshard.reshard(module) first"
        )
    check_has_memory([unit.handle for unit in units], verb)
    return [(unit, flat) for unit in units for flat in unit.handle.flats]


def _is_running(units: list[Unit]) -> bool:
    """Return whether a backward that reached ``units`` is still running.

    On an accelerator the engine's threads end a failed one a little later than ``backward()`` raises. That is waited for.
    """
    end = time.monotonic() + _LET_GO
    while any(u.context.backward is not None and not u.context.backward.has_failed for u in units):
        on_device = all(u.context.runtime.streams is not None for u in units)
        if not on_device or current_graph_task() != -1 or time.monotonic() > end:
            return True
        time.sleep(0.001)
    return False


def is_first_rank(units: list[Unit]) -> bool:
    return has_first_copy(units) and all(unit.handle.ranks.is_rank0 for unit in units)


def has_first_copy(units: list[Unit]) -> bool:
    """Return whether this rank is in the first replica, and first in all meshes of tensor parallelism."""
    infos = [shard_info(p) for u in units for b in u.handle.flats for p in b.params]
    parallels = [info.parallel for info in infos if info is not None and info.parallel is not None]
    return not any(any(p.mesh.get_coordinate()) for p in parallels) and all(
        flat.ranks.is_first_replica for u in units for flat in u.handle.flats
    )


def check_dtype(dtype: object, verb: str) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{verb}: dtype must be a floating-point dtype or None, got {dtype!r}")


def export(value: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a copy of ``value``. A tensor subclass keeps its dtype, as only its class knows how to cast it."""
    if (subclass := TensorSubclass.of(value)) is not None:
        return subclass.wrap(subclass.unwrap(value).to(device=device or value.device, copy=True))
    target = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to(device=device or value.device, dtype=target, copy=True)
