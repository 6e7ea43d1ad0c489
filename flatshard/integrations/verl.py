"""verl's ``delta_sharded`` weight sync: shards for its trainer, or flushes for its loader in SGLang.

verl compares each rank's shard with a copy, and gathers the changed elements to rank 0. An engine class of verl exports the
shards, and :func:`iter_param_shards` is that export. Who has no trainer of verl sends :func:`iter_flushes` to SGLang, where
verl's ``delta_loader.apply_delta`` reads them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum
from verl.workers.engine.spec import ShardSpec

from flatshard.tensors import ShardedParameter, shard_info
from flatshard.weights import Patch

Named = list[tuple[str, torch.Tensor]]


def iter_param_shards(
    model: nn.Module, process_group: dist.ProcessGroup, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor, ShardSpec]]:
    """Yield (name, this rank's shard, its place), for ``get_per_tensor_param_shard`` of a verl engine. No communication.

    Tied parameters come by their first name. A rank without elements of a parameter yields none, as verl's gathers expect all
    ranks.

    Args:
        model: sharded over ``process_group``.
        process_group: the ranks over which verl gathers, as ``dist.group.WORLD``.
        dtype: the dtype of floating-point parameters on the rollout side. Default: each in its own dtype.

    Raises:
        ValueError: a shard is no range of the full parameter in row-major order, or replicas have it. The error names it.
    """
    world, state = dist.get_world_size(process_group), model.state_dict()
    for name, param in model.named_parameters():
        cast = dtype if dtype is not None and param.is_floating_point() else param.dtype
        info = shard_info(param)
        if not isinstance(param, ShardedParameter) or info is None or info.is_full:
            yield name, param.detach().to(cast), ShardSpec(full_shape=tuple(param.shape))
            continue
        why = None
        if info.wrapping is not None:
            why = "is a tensor subclass"
        elif info.stride != torch.empty(info.shape, device="meta").stride():
            why = f"has strides {info.stride} for shape {info.shape}, and verl counts in row-major order"
        elif info.shard_world_size != world:
            why = f"is sharded over {info.shard_world_size} of {world} ranks, and verl gathers from all"
        if why is not None:
            raise ValueError(f"verl: {name!r} {why}: use iter_flushes, or a checkpoint engine of full weights")
        spec = ShardSpec(full_shape=info.shape, place=info.start, gather_group=process_group)
        yield name, state[name].to_local().to(cast), spec  # a plain tensor, which verl indexes


def iter_flushes(patches: Iterable[Patch], *, bucket_bytes: int = 256 * 2**20) -> Iterator[Named]:
    """Yield flushes: the named tensors of one call of verl's ``delta_loader.apply_delta`` each.

    SGLang's ``update_weights_from_tensor`` takes one with ``load_format`` of that loader. A flush has one dtype.

    Args:
        patches: of ``flatshard.weights.decode_patches``.
        bucket_bytes: the most bytes of a flush, but at least one patch.

    Raises:
        ValueError: the loader could not take a parameter, which the error names.
    """
    bucket: list[Patch] = []
    size = 0
    for patch in patches:
        if not patch.values.is_floating_point() or patch.indices.dtype is not torch.int32 or patch.values.isnan().any():
            raise ValueError(
                f"verl: {patch.name!r} is {patch.values.dtype} of shape {patch.shape}, and may have become NaN: flushes are "
                "of floating-point numbers with int32 indices, and NaN stands for an unchanged element. Send full weights"
            )
        nbytes = patch.indices.nbytes + patch.values.nbytes
        if bucket and (size + nbytes > bucket_bytes or patch.values.dtype != bucket[0].values.dtype):
            yield _flush(bucket)
            bucket, size = [], 0
        bucket.append(patch)
        size += nbytes
    if bucket:
        yield _flush(bucket)


def _flush(patches: list[Patch]) -> Named:
    """Return the tensors of a flush: where each parameter's elements are, their positions as bytes, and their values."""
    positions = torch.cat([patch.indices for patch in patches]).view(torch.uint8)
    values = torch.cat([patch.values for patch in patches])
    params: list[dict[str, Any]] = []
    start = 0
    for patch in patches:
        end = start + patch.values.numel()
        dtype = str(patch.values.dtype).removeprefix("torch.")
        width = patch.indices.itemsize
        param = DeltaParam(
            name=patch.name,
            dtype=dtype,
            shape=list(patch.shape),
            pos_start=start * width,
            pos_end=end * width,
            pos_width=width,
            val_start=start,
            val_end=end,
        )
        params.append(dataclasses.asdict(param))
        start = end
    spec = {"encoding": "indices", "params": params, "checksum": int(checksum(positions, values))}
    encoded = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
    return [("__delta_spec__", encoded), ("__positions__", positions), ("__values__", values)]
