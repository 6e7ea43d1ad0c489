"""The values of ``state_dict()`` for sharded parameters: tensors with the full shape, which hold this rank's shard.

[Note: Checkpoints without communication]
``torch.distributed.checkpoint`` asks a tensor for its regions of the full one, by the three methods of the protocol
``torch.distributed._checkpointable``. The protocol is private, but torch has no other, and only this file uses it. A region
is a box (boxes.py), and the tensor that is written or read is a view of the parameter's memory. So saving takes no
collective on parameters and no copy, and loading fills the shards in place.

[Note: Operations on sharded values]
:class:`ShardedValue` has the full shape, as code that reads a checkpoint's shapes expects. Elementwise operations
(arithmetic, casts, ``clone``, ``lerp_`` for averages of weights) run on this rank's shard. Others raise, so that no shard
passes for the full tensor; only ``full_tensor()`` gathers. Access to the memory raises, too, as libraries that write files
would take it (safetensors, transformers' ``save_pretrained``). Only ``data_ptr()`` is 0, as for any tensor that wraps others,
because torch's stager of asynchronous saves reads it. A pickled value contains its place, and no other rank loads it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import nn
from torch.utils import _pytree as pytree

from flatshard._comm.composite_groups import ExpertRanks
from flatshard._comm.runtime import Runtime
from flatshard._handle.adapters.tensor_parallel import is_dtensor, local_tensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.shard_info import TO_COPY, ShardInfo, attribute_of_dtensors, in_memory_order
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, flat_param_of, sharded_types
from flatshard.checkpoint._barrier import barrier
from flatshard.checkpoint._boxes import Box, Part
from flatshard.checkpoint._gathering import from_parts, wrap_full
from flatshard.checkpoint._standard_helpers import check_writer

aten = torch.ops.aten


class Origin(NamedTuple):
    """The parameter that a value was made of."""

    info: ShardInfo
    runtime: Runtime  # the ranks that have the other shards of the block


def _no_memory(name: str) -> Callable[..., NoReturn]:
    """Return a method in place of ``name``, which gives access to a tensor's bytes. [Note: Operations on sharded values]"""

    @functools.wraps(getattr(torch.Tensor, name))
    def refused(self: ShardedValue, *args: Any, **kwargs: Any) -> NoReturn:
        part = self.part
        raise RuntimeError(
            f"{name}() of {_name(self)}: this rank has only elements {part.start}:{part.stop} of it. Save full tensors: "
            "flatshard.checkpoint.full_state_dict(module) gathers them, flatshard.checkpoint.export_safetensors(module, "
            "path) writes them as safetensors files. All ranks must call it. This rank's elements are value.to_local()"
        )

    return refused


class ShardedValue(torch.Tensor):
    """A sharded tensor in ``model.state_dict()``: it has the full shape, and holds this rank's shard.

    ``torch.distributed.checkpoint`` saves and loads it without communication, and ``model.load_state_dict`` takes it.
    Elementwise operations (arithmetic, ``.to(dtype)``, ``clone``, ``copy_``) run on the shard; others raise.

    Example::

        value = model.state_dict()["4.weight"]
        assert value.shape == (10, 64)
        shard = value.to_local()  # 1-D: this rank's elements
        full = value.full_tensor()  # on all ranks
    """

    _local: torch.Tensor  # 1-D, the shard's elements in memory order
    _origin: Origin | None  # None if it was unpickled
    _known_part: Part | None  # None until somebody asks for `part`

    # No dispatch by function: operations come to `__torch_dispatch__`, as a DTensor's do.
    __torch_function__ = nn.Parameter.__torch_function__

    @staticmethod
    def __new__(cls, local: torch.Tensor, part: Part | None, origin: Origin | None) -> ShardedValue:
        """Wrap ``local``. A ``part`` of None follows from ``origin``, which is of a plain parameter."""
        shape = origin.info.shape if part is None else part.shape  # type: ignore[union-attr]
        # Private, but what every tensor subclass that wraps others is made by; there is no public name for it.
        result: ShardedValue = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=False
        )
        result._local, result._known_part, result._origin = local, part, origin
        return result

    @property
    def part(self) -> Part:
        """Internal: the place of the shard in the full tensor."""
        if self._known_part is None:
            assert self._origin is not None
            self._known_part = part_of(self._origin.info)
        return self._known_part

    def to_local(self) -> torch.Tensor:
        """Return this rank's elements: 1-D, in memory order, sharing memory with the parameter."""
        return self._local

    @property
    def ranks_around(self) -> list[int] | None:
        """Internal: the ranks of an expert (``ExpertRanks``), or None if it is no expert."""
        runtime = None if self._origin is None else self._origin.info.runtime
        return runtime.ranks_around if isinstance(runtime, ExpertRanks) else None

    def full_tensor(self) -> torch.Tensor:
        """Gather the full tensor, as a plain one on the device that computes. All ranks that share it must call it.

        It gathers a single value; ``full_state_dict`` and ``iter_full_params`` gather many at a time.

        Raises:
            RuntimeError: the value was unpickled, so it is unknown who has the other shards; or some ranks, which the message
                names, do not call it.
        """
        part, origin = self.part, self._origin
        if origin is None:
            raise RuntimeError(f"{_name(self)}.full_tensor(): it was unpickled, and {_CURE}")
        if not origin.info.is_full:
            barrier([origin.runtime], f"full_tensor of {origin.info.fqn!r}")
            numel = math.prod(part.block_shape)
            flat = from_parts(origin.runtime, self._local, part.start, numel, self.dtype)
        else:  # with tensor parallelism only
            flat = self._local.clone()
        return wrap_full(flat.as_strided(part.block_shape, part.stride), origin.info)

    redistribute, placements, device_mesh = (
        attribute_of_dtensors(name, lambda value: f"this is {_name(value)}")
        for name in ("redistribute", "placements", "device_mesh")
    )
    untyped_storage = _no_memory("untyped_storage")  # also for `storage()`, which asks for it
    numpy, tolist, __dlpack__ = map(_no_memory, ("numpy", "tolist", "__dlpack__"))

    def __repr__(self) -> str:  # type: ignore[override]
        part = self.part
        inside = "" if part.shape == part.block_shape else f" of its block {part.block_shape} at {part.block_offsets}"
        return (
            f"ShardedValue(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"elements {part.start}:{part.stop}{inside} here)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedValue:
        local = copy.deepcopy(self._local, memo)
        found: ShardedValue = memo.setdefault(id(self), ShardedValue(local, self.part, self._origin))
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the shard with its place, so that no other rank's parameter takes it."""
        part = self.part
        if part.numel < math.prod(part.shape) and not _warned:
            _warned.append(True)
            warnings.warn(
                f"{_name(self)} is pickled (torch.save), and this rank has only elements {part.start}:{part.stop} of it: "
                f"every rank must save a file of its own, which it alone can load. For one file of everything {_TAKE_FULL}",
                stacklevel=2,
            )
        return _unpickled, (self._local, *dataclasses.astuple(part))  # plain values, which any unpickler knows

    # -- torch.distributed.checkpoint --------------------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        boxes = () if self.part.is_copy else self.part.boxes
        if len(boxes) > 1:
            check_writer(fqn)
        return list(_write_items(fqn, self.dtype, self.part.shape, boxes))

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.part.boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for box in self.part.boxes:
            if box.offsets == tuple(index.offset):
                return view_of(self._local, box)
        raise ValueError(f"{index.fqn!r}: this rank has no box at {tuple(index.offset)} of shape {tuple(self.shape)}")

    # -- operations --------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the shards of its operands, or raise. [Note: Operations on sharded values]"""
        kwargs = kwargs or {}
        if func is aten.new_empty.default:
            return _new_empty(*args, **kwargs)
        values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, ShardedValue)]
        if _is_foreach(func):
            return _foreach(func, args, kwargs)
        alike = (
            torch.Tag.pointwise in func.tags and torch.Tag.data_dependent_output not in func.tags
        )  # `equal` has both
        if not alike and func not in _ON_PARTS:
            raise NotImplementedError(f"{func} of {_name(values[0])}: {_CURE}")
        if func is aten.copy_.default and isinstance(args[0], ShardedValue) and not isinstance(args[1], ShardedValue):
            args = (args[0], _as_source(args[0].part, args[1]), *args[2:])
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}  # the part is 1-D
        local = functools.partial(_local_operand, func, values[0])
        result = func(*pytree.tree_map(local, args), **pytree.tree_map(local, kwargs))
        if isinstance(result, torch.Tensor):
            for value in values:  # in place
                if result is value._local:
                    return value
            return _like(values[0], result)
        return result


@functools.lru_cache(maxsize=2**14)  # the same objects in each save, so that equal plans compare quickly
def _write_items(fqn: str, dtype: torch.dtype, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> tuple[Any, ...]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties, size = TensorProperties(dtype=dtype), torch.Size(shape)
    items = []
    for box in boxes:
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, size)
        items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
    return tuple(items)


def _local_operand(func: Any, value: ShardedValue, operand: Any) -> Any:
    """Return ``operand`` as ``func`` takes it together with the shard of ``value``."""
    if isinstance(operand, ShardedValue) and operand.part == value.part:
        return operand._local
    if isinstance(operand, torch.Tensor) and operand.numel() != 1 and not _is_prepared(func, value.part, operand):
        cure = f"{_CURE}. {TO_COPY}" if operand.shape == value.shape else _CURE
        raise ValueError(
            f"{func} of {_name(value)} ({value!r}) and one with another layout ({_describe(operand)}): {cure}"
        )
    return operand


def _like(value: ShardedValue, result: torch.Tensor) -> torch.Tensor:
    """Return the ``result`` of an operation on the shard of ``value``, as a sharded value if it has the shard's size."""
    return ShardedValue(result, value.part, value._origin) if result.numel() == value.part.numel else result


@functools.lru_cache
def _is_foreach(func: Any) -> bool:
    """Return whether ``func`` is an elementwise function of torch on lists, such as ``_foreach_lerp_``."""
    prefix, _, name = func._schema.name.partition("::_foreach_")
    name = name.removesuffix("_")
    if prefix != "aten" or name in ("", "max"):  # `max` of a list reduces, and only `max` of two tensors is pointwise
        return False
    one = getattr(aten, name, None)  # lists have no tag, but the function of one tensor has
    tags = [getattr(one, overload).tags for overload in one.overloads()] if one is not None else []
    return name in ("copy", "zero") or any(torch.Tag.pointwise in found for found in tags)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on lists of tensors, some of them sharded, by one call on this rank's shards."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    lists = {n: list(v) for n, v in given.items() if isinstance(v, list | tuple) and isinstance(v[0], torch.Tensor)}
    firsts = []
    for i, row in enumerate(zip(*lists.values(), strict=True)):
        first = next((v for v in row if isinstance(v, ShardedValue)), None)
        firsts.append(first)
        if first is None:
            continue
        one = aten.copy_.default if func is aten._foreach_copy_.default else func
        if one is aten.copy_.default and isinstance(row[0], ShardedValue) and not isinstance(row[1], ShardedValue):
            row = (row[0], _as_source(first.part, row[1]))
        for tensors, operand in zip(lists.values(), row, strict=True):
            tensors[i] = _local_operand(one, first, operand)
    results = func(**{**given, **lists})
    if results is None:  # in place
        return None
    return [r if v is None else _like(v, r) for v, r in zip(firsts, results, strict=True)]


_warned: list[bool] = []  # once, that a pickled value is a shard


def _unpickled(local: torch.Tensor, *part: Any) -> ShardedValue:
    return ShardedValue(local, Part(*part), None)


torch.serialization.add_safe_globals([_unpickled])  # torch.load(weights_only=True)

_TAKE_FULL = (
    "take full tensors from flatshard.checkpoint.full_state_dict(module) or flatshard.checkpoint.iter_full_params(module), "
    "on all ranks; or hand the dict to torch.distributed.checkpoint"
)
_CURE = f"this rank has only a part of it: {_TAKE_FULL}"

# Elementwise operations that torch does not tag as pointwise.
_ON_PARTS = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten._pin_memory.default,
    aten.is_pinned.default,
}


def _name(value: ShardedValue) -> str:
    name = "a sharded tensor" if value._origin is None else f"the sharded tensor {value._origin.info.fqn!r}"
    return f"{name} of shape {tuple(value.shape)}"


def _describe(value: torch.Tensor) -> str:
    return repr(value) if isinstance(value, ShardedValue) else f"a tensor of shape {tuple(value.shape)}"


def _new_empty(value: torch.Tensor, size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    assert isinstance(value, ShardedValue)
    if tuple(size) == value.part.shape:
        return ShardedValue(value._local.new_empty(value._local.shape, **kwargs), value.part, value._origin)
    return value._local.new_empty(size, **kwargs)


def _as_source(part: Part, source: torch.Tensor) -> torch.Tensor:
    return slice_part(part, source) if tuple(source.shape) == part.shape and source.dim() else source


def _is_prepared(func: Any, part: Part, value: torch.Tensor) -> bool:
    return func is aten.copy_.default and value.shape == (part.numel,) and not isinstance(value, ShardedValue)


# -- shards and full tensors -------------------------------------------------------------------------------------------


_known_part = functools.lru_cache(maxsize=2**16)(Part)  # a load asks several times, and a part computes its boxes once


def part_of(info: ShardInfo) -> Part:
    """Return the place of a sharded parameter in the full one."""
    if info.wrapping is None or info.parallel is None:
        origin = (0,) * len(info.shape)
        return _known_part(info.shape, info.shape, origin, info.stride, info.start, info.stop, info.is_copy)
    # Private, but torch has nothing else that computes the place of a DTensor's local tensor.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    parallel = info.parallel
    shape, offsets = compute_local_shape_and_global_offset(parallel.shape, parallel.mesh, parallel.placements)
    assert tuple(shape) == info.shape, (shape, info)
    place = (tuple(parallel.shape), info.shape, tuple(offsets))
    return _known_part(*place, info.stride, info.start, info.stop, info.is_copy)


def sharded_value(tensor: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return ``tensor``, which lies in memory as ``param`` does, as state dicts hold it. A full tensor stays as it is."""
    info: ShardInfo | None = getattr(param, "_flatshard_info", None)
    if info is None or (info.runtime is None and info.is_full and info.parallel is None):
        return tensor
    local = tensor if tensor.ndim == 1 else info.in_memory_order(tensor)
    flat = flat_param_of(param) if type(param) in sharded_types else None  # type: ignore[arg-type]
    origin = Origin(info, flat.ranks.runtime) if isinstance(flat, FlatParam) else None
    # The part is found when somebody asks: of a plain parameter it follows from `info`.
    is_plain = origin is not None and info.wrapping is None
    return ShardedValue(local, None if is_plain else part_of(info), origin)


def block_value(tensor: torch.Tensor, info: ShardInfo) -> ShardedValue:
    """Return ``tensor``, of the shape of a DTensor's local tensor, as state dicts hold it. It is dense."""
    part = dataclasses.replace(part_of(info), start=0, stop=info.numel, stride=tuple(tensor.stride()))
    return ShardedValue(tensor.detach().as_strided((tensor.numel(),), (1,)), part, None)


def own_block(source: torch.Tensor, info: ShardInfo) -> torch.Tensor | None:
    """Return a copy of a DTensor's local tensor from its ``block_value`` or the full tensor, or None if it is another."""
    own = dataclasses.replace(part_of(info), start=0, stop=info.numel)
    if isinstance(source, ShardedValue):
        is_own = dataclasses.replace(source.part, stride=own.stride) == own
        return source.to_local().clone().as_strided(info.shape, source.part.stride) if is_own else None
    return slice_part(own, source).clone().as_strided(info.shape, own.stride) if source.shape == own.shape else None


def blocks_value(tensor: torch.Tensor, param: nn.Parameter, info: ShardInfo, per: int) -> ShardedValue:
    """Return a 1-D sharded value of ``tensor``, which has one entry for every ``per`` elements of this shard of ``param``."""
    start, shape = info.start // per, (info.numel // per,)
    part = Part(shape, shape, (0,), (1,), start, start + len(tensor), info.is_copy)
    flat = flat_param_of(param) if type(param) in sharded_types else None  # type: ignore[arg-type]
    return ShardedValue(tensor, part, Origin(info, flat.ranks.runtime) if isinstance(flat, FlatParam) else None)


def view_of(local: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of ``box`` in the 1-D shard ``local``, with the tensor's dimensions."""
    step = local.stride(0)
    stride = box.stride if step == 1 else [s * step for s in box.stride]
    return local.as_strided(box.sizes, stride, local.storage_offset() + box.start * step)


def slice_part(part: Part, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's 1-D shard of the full tensor ``full``, or of a block of it. It is a view where possible.

    No other element is read: each rank reads only its bytes of a file that is mapped into memory (``torch.load(mmap=True)``).
    """
    shape = tuple(full.shape)
    if shape != part.block_shape or shape == part.shape:
        full = full[tuple(slice(o, o + n) for o, n in zip(part.block_offsets, part.block_shape, strict=True))]
    if tuple(full.stride()) == part.stride:
        return in_memory_order(full, part.stride)[part.start : part.stop]
    result = torch.empty(part.numel, dtype=full.dtype, device=full.device)
    for box in part.boxes:
        if box.numel:
            region = tuple(slice(o, o + n) for o, n in zip(box.block_offsets, box.sizes, strict=True))
            view_of(result, box).copy_(full[region])
    return result


NO_VALUES = 'it is on the meta device, and has no values: read the file with torch.load(path, map_location="cpu")'
"""The reason why a tensor on meta cannot be loaded."""


def check_source(info: ShardInfo, dtype: torch.dtype, source: object) -> str | None:
    """Return why ``source`` cannot be loaded into a sharded tensor of ``dtype``, or None if ``local_source`` can load it."""
    if not isinstance(source, torch.Tensor):
        return f"expected a tensor, got a {type(source).__name__}"
    if source.is_meta:
        return NO_VALUES
    source = _unwrapped(info, source)
    # Shards come with their place, from `state_dict()` or `keep_vars=True`; others must have the full shape.
    shape = tuple(info.shape if info.parallel is None else info.parallel.shape)
    if is_part(source):
        return None if part_of(source._flatshard_info) == part_of(info) else _other_part(repr(source))
    if tuple(source.shape) != shape and not (shape == () and source.shape == (1,)):
        hint = ""
        if source.shape == info.part_shape:
            hint = ". It has the shape of this rank's part, but does not say whose it is: load values of state_dict()"
        return f"size mismatch: the checkpoint has shape {tuple(source.shape)}, the model has {shape}{hint}"
    if not torch.can_cast(source.dtype, dtype):
        return f"the checkpoint has {source.dtype}, which cannot become {dtype}"
    if isinstance(source, ShardedValue) and source.part != part_of(info):
        return _other_part(repr(source))
    if is_dtensor(source):
        dtensor: Any = source
        parallel = info.parallel
        if (
            parallel is None
            or dtensor.device_mesh != parallel.mesh
            or tuple(dtensor.placements) != tuple(parallel.placements)
        ):
            return (
                "it is a DTensor over other ranks or placements. Load value.full_tensor(), or go through "
                "torch.distributed.checkpoint"
            )
    return None


def _unwrapped(info: ShardInfo, source: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of ``source``, if a full tensor subclass is loaded into a sharded one."""
    known = info.wrapping
    same = isinstance(known, TensorSubclass) and type(source) is known.kind and TensorSubclass.of(source) == known
    return known.unwrap(source) if known is not None and same else source


def is_part(source: object) -> TypeGuard[ShardedParameter]:
    """Return whether ``source`` is a parameter that is cut over ranks, as in ``state_dict(keep_vars=True)``."""
    return isinstance(source, ShardedParameter) and not source._flatshard_info.is_full


def _other_part(what: str) -> str:
    return (
        f"it is sharded otherwise than the model: {what}. Go through torch.distributed.checkpoint.save and load, or load "
        "flatshard.checkpoint.full_state_dict(...) of the other model"
    )


def local_source(info: ShardInfo, source: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``source``, in the shape of the sharded parameter. `check_source` comes first."""
    source = _unwrapped(info, source)
    if is_part(source):  # perhaps with the same elements in another shape
        return info.shaped(source._flatshard_info.in_memory_order(source.detach()))
    if isinstance(source, ShardedValue):
        local = source._local
    elif info.is_full and not is_dtensor(source) and info.parallel is None:
        return source if source.shape == info.shape else source.reshape(info.shape)
    else:
        if not info.shape and source.dim():
            source = source[0]
        local = slice_part(part_of(info), local_tensor(source).detach())
    return info.shaped(local)
