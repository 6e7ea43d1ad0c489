"""Checks of the parameters to shard, and warnings about them. Each message names the FQN and the cure."""

from __future__ import annotations

import itertools
import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import UninitializedParameter

from flatshard._base.errors import name_list
from flatshard._composable.construct.groups import default_device
from flatshard._composable.construct.partition import PlannedUnit
from flatshard._composable.state import Unit
from flatshard._handle.adapters.tensor_parallel import is_dtensor, local_tensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, plain_tensors
from flatshard._handle.planned import Groups


def check_parameters(units: list[PlannedUnit], device: torch.device | None, groups: Groups | None) -> torch.device:
    """Check that parameters can be sharded over ``groups``, or over groups of their own.

    Returns the device of the parameters after ``fully_shard``: ``device``, or the one that they are on.

    Raises:
        TypeError, ValueError, NotImplementedError: a parameter cannot be sharded; the message says why.
    """
    by_device: dict[torch.device, list[str]] = {}
    ranges: list[tuple[str, int, int, str]] = []
    for owned in [each for unit in units for each in unit.owned]:
        fqn, param = owned.fqn, owned.param
        inside: Iterable[torch.Tensor] = (param,)
        if type(param) is not nn.Parameter:
            _check_class(fqn, param)
            inside = plain_tensors(param)
            if is_dtensor(param):
                _check_mesh(fqn, param, [each for each in owned.groups or groups or () if each is not None])
        # A package beside torch, which annotates plain tensors. FSDP2 of torch 2.15 makes DTensors of these.
        if (spmd := sys.modules.get("spmd_types")) is not None and (types := spmd.get_local_type(param)):
            raise NotImplementedError(
                f"parameter {fqn!r} is annotated by spmd_types with {types}, which flatshard does not read: its gradient "
                "would not be reduced over other axes than those to shard over. Use DTensors in its place "
                "(parallelize_module), or pass it in ignored_states"
            )
        if param.layout is not torch.strided:
            raise ValueError(f"parameter {fqn!r} has layout {param.layout}: only dense parameters can be sharded")
        if not param.is_leaf:
            raise ValueError(f"parameter {fqn!r} is not a leaf of autograd's graph")
        for module, _ in owned.registrations:
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and owned.param.requires_grad:
                raise ValueError(
                    f"parameter {fqn!r} is that of an {type(module).__name__} with sparse=True, whose gradient cannot be "
                    "reduced into a flat gradient: set module.sparse = False, or pass the parameter in ignored_states"
                )
        by_device.setdefault(param.device, []).append(fqn)
        for plain in inside:
            if not plain.is_meta and plain.numel():
                start = plain.data_ptr()
                span = sum([(n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True)]) + 1
                ranges.append((str(plain.device), start, start + span * plain.itemsize, fqn))
    _check_overlap(ranges)
    if device is not None:
        return device
    real = {d: names for d, names in by_device.items() if d.type != "meta"}
    if len(real) > 1:
        where = "; ".join(f"{name_list(names, 3)} on {d}" for d, names in real.items())
        raise ValueError(f"parameters are on different devices: {where}. Move the module first, or pass device_id=...")
    return next(iter(real)) if real else default_device()


def _check_class(fqn: str, param: nn.Parameter) -> None:
    """Raise if ``param``, which is not a plain ``nn.Parameter``, is of a class that cannot be sharded."""
    if isinstance(param, UninitializedParameter):
        raise ValueError(f"parameter {fqn!r} is lazy and has no shape yet: run one forward before fully_shard")
    if (subclass := TensorSubclass.of(param)) is not None:
        if any(t.is_meta for t in plain_tensors(param)):
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__} on the meta device, which fully_shard cannot initialise: "
                "build it with its values (quantise after loading)"
            )
        if (why := subclass.check(param)) is not None:
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__}, which {why}. Or pass it in ignored_states"
            )
    elif is_dtensor(param):
        if type(local := local_tensor(param)) is not torch.Tensor:
            raise NotImplementedError(
                f"parameter {fqn!r} is a DTensor with a {type(local).__name__} inside: tensor subclasses can be sharded only "
                "without tensor parallelism. Pass it in ignored_states"
            )
    else:
        kind: Any = type(param)
        has_function = kind.__torch_function__ is not torch._C._disabled_torch_function_impl
        if has_function or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ValueError(
                f"parameter {fqn!r} is a {type(param).__name__}, a tensor subclass that does not say which tensors are "
                "inside: give it __tensor_flatten__ and __tensor_unflatten__, or pass it in ignored_states"
            )


def _check_mesh(fqn: str, param: Any, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise if a DTensor's mesh has ranks in common with the ``groups`` to shard over, or if its placements do not fit."""
    odd = [p for p in param.placements if not (p.is_replicate() or (p.is_shard() and type(p).__name__ == "Shard"))]
    if odd:
        raise ValueError(
            f"parameter {fqn!r} is a DTensor placed as {odd[0]}: only Shard(dim) and Replicate() can be sharded further. "
            "Redistribute it before fully_shard (param.redistribute(placements=[...]))"
        )
    mine, inside = dist.get_rank(), {int(rank) for rank in param.device_mesh.mesh.flatten()}
    for group in groups:
        if shared := sorted((inside & set(dist.get_process_group_ranks(group))) - {mine}):
            raise ValueError(
                f"parameter {fqn!r} is a DTensor over ranks {sorted(inside)}, and would be sharded over ranks "
                f"{dist.get_process_group_ranks(group)}: rank {mine} has rank {shared[0]} in both. Shard over the other "
                "dimension of the mesh: fully_shard(..., device_mesh=mesh['dp']), where mesh = init_device_mesh(..., "
                "mesh_dim_names=('dp', 'tp')). If other parameters are to be sharded over all these ranks (experts in a "
                "model): fully_shard(model, shard_mesh_fn=lambda fqn, param: mesh['dp'] if 'experts' in fqn else None), or "
                "first call fully_shard(experts, device_mesh=mesh['dp']), and then fully_shard(model)"
            )


def _check_overlap(ranges: list[tuple[str, int, int, str]]) -> None:
    """Raise if two different parameters are in the same memory: sharding would silently make them independent."""
    ranges.sort(key=operator.itemgetter(0, 1))  # by device and start
    for (device, _, stop, fqn), (other_device, start, _, other) in itertools.pairwise(ranges):
        if device == other_device and start < stop and fqn != other:  # tensors inside one subclass are copied
            raise ValueError(
                f"parameters {fqn!r} and {other!r} are different Parameter objects in the same memory. Register one "
                "object under both names to tie them, or clone one"
            )


def warn_of_old_parameters(units: Iterable[PlannedUnit]) -> None:
    """Warn if the program still holds tensor subclasses that were replaced."""
    if held := [o.fqn for unit in units for o in unit.owned if o.was is not None and o.was() is not None]:
        warnings.warn(
            "fully_shard registered new parameters in the place of tensor subclasses (such as DTensors), but something "
            f"still holds the old {name_list(held)}. If it is an optimizer, it will not train them: build it after "
            "fully_shard",
            stacklevel=3,
        )


def warn_of_experts(units: Iterable[Unit], group: dist.ProcessGroup) -> None:
    """Warn of plain parameters of ``units`` that are sharded over some of the ranks of ``group`` only, not replicated."""
    ranks = set(dist.get_process_group_ranks(group))
    experts = [
        info.fqn
        for unit in units
        for flat in unit.handle.flats
        if flat.ranks.replicas is None and set(dist.get_process_group_ranks(flat.ranks.runtime.group)) < ranks
        for info, wrapping in zip(flat.layout.params, flat.wrappings, strict=True)
        if wrapping is None
    ]
    if experts:
        warnings.warn(
            f"{name_list(experts)} were sharded by an earlier call, over some of the ranks of this one. Norms and "
            "checkpoints take what the other ranks have under these names for copies. If they are other parameters, such as "
            "other experts, shard them in this call: fully_shard(..., shard_mesh_fn=lambda fqn, param: mesh['dp'] if "
            "'experts' in fqn else None), or make them DTensors first",
            stacklevel=3,
        )
