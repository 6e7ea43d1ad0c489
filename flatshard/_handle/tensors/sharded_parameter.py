"""What the user and the optimizer see between steps: the user's own parameters, holding this rank's part.

[Note: The user's Parameter objects survive]
An optimizer, an EMA or a weight-decay rule may have been built from ``model.parameters()`` before sharding. So the
original ``nn.Parameter`` objects are kept for life: their ``.data`` is pointed once at a slice of the local shard, and
their ``__class__`` becomes :class:`ShardedParameter` (as torch's own lazy parameters change class when they
materialise). The class adds no ``__torch_function__``: every operation on it costs what it costs on a plain parameter.
What is assigned to ``.grad`` becomes a :class:`ShardedGradient`, which has one.

[Note: What is seen of changes by .data]
A unit that is gathered must notice when its shards change, and all ranks must notice alike, also those whose part is empty.
Autograd's version counter tells, if it counts every change. Of a plain tensor it doesn't count ``p.data = ...`` and
``p.data.add_()``. Of a sharded parameter it does: the setter counts, and the getter gives ``p.detach()``, which shares the
counter. The graph of a forward never holds a sharded parameter, so autograd's own check isn't made stricter by that.

[Note: Parts are no matrices]
Of a 1-D part of a matrix, ``w.T`` is the part, ``w[3] = 0`` sets an element, another one on each rank, and ``b @ a`` may
even fit. Code that means the whole writes these of the parameter itself. So they are methods in Python here, which look
first; optimizers use none of them. Of ``p.data``, and by functions (``torch.matmul``), nobody looks.
"""

from __future__ import annotations

import copy
import functools
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import optimizer as _torch_optimizer
from torch.utils.hooks import RemovableHandle

from flatshard._handle.adapters.tensor_parallel import TensorParallel
from flatshard._handle.adapters.wrapping import Wrapping
from flatshard._handle.layout import part_shape
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_gradient import plain_grad, set_gradient
from flatshard._runtime import Runtime

_plain_data: Any = torch.Tensor.data
_plain_requires_grad: Any = torch.Tensor.requires_grad
_TO_EMPTY = nn.Module.to_empty.__code__


class Home(Protocol):
    """What a sharded parameter lies in: its flat parameter."""

    is_watched: bool  # somebody asked to be called when the gradient of one of its parameters has come

    def compute_of(self, param: nn.Parameter) -> nn.Parameter:
        """The parameter that autograd sees in place of ``param``."""


_homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()  # by the sharded parameter's id
# For the weak references themselves: see [Note: Looking only after a change].
_unswappable: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which part of which parameter a sharded parameter holds: ``flatshard.tensors.shard_info(p)``."""

    fqn: str
    shape: tuple[int, ...]  # of the whole parameter
    stride: tuple[int, ...]  # of the whole parameter, dense: the memory order that ``start`` and ``stop`` count in
    start: int  # this rank's elements, half-open, in memory order
    stop: int
    shard_world_size: int
    by_rows: bool = False  # this rank's part consists of whole rows, and has the parameter's dimensions
    owner: int | None = None  # the rank, of those sharded over, that has all of it; None: it is cut, or this is a copy
    # Over whose ranks; None where the shard group has a single rank, and in a copy that was pickled.
    runtime: Runtime | None = field(default=None, repr=False, compare=False)
    # Of a tensor subclass. Then all of the above but `runtime` is about the plain tensor that is taken out of it.
    wrapping: Wrapping | None = field(default=None, repr=False, compare=False)
    # A tensor-parallel rank holds the same, perhaps cut elsewhere, and is the one that writes it into checkpoints.
    is_copy: bool = field(default=False, repr=False, compare=False)
    # Of this rank's elements, counted from ``start``, what another rank of ``runtime`` has, too, and counts in norms: sorted.
    elsewhere: tuple[tuple[int, int], ...] = field(default=(), repr=False, compare=False)

    @property
    def parallel(self) -> TensorParallel | None:
        """What is sharded over another mesh as well."""
        return self.wrapping if isinstance(self.wrapping, TensorParallel) else None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of this rank's part: ``(stop - start,)``; ``(rows, *rest)`` where it consists of rows; whole, where it is alone."""
        if self.shard_world_size == 1:
            return self.shape
        return part_shape(self.shape, self.stop - self.start, self.by_rows)

    @property
    def rows(self) -> tuple[int, int] | None:
        """The rows of the parameter that this rank has, half-open; None where it was not cut by rows."""
        if not self.shape or not (self.by_rows or self.shard_world_size == 1):
            return None
        row = max(1, math.prod(self.shape[1:]))
        return self.start // row, self.stop // row

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def in_memory_order(self, part: torch.Tensor) -> torch.Tensor:
        """``part``, which lies as this rank's part does, as 1-D; a view, where it has that stride."""
        return part if part.dim() == 1 else in_memory_order(part, self.stride)

    def shaped(self, part: torch.Tensor) -> torch.Tensor:
        """The way back."""
        shape = self.part_shape
        return part if shape == part.shape else part.as_strided(shape, self.stride)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardInfo, (
            self.fqn,
            self.shape,
            self.stride,
            self.start,
            self.stop,
            self.shard_world_size,
            self.by_rows,
        )


def _not_of_a_part(name: str, of_vectors: bool = False) -> Callable[..., Any]:
    """The method ``name``, where this rank's part has the dimensions of the whole. [Note: Parts are no matrices]"""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def checked(self: ShardedParameter, *args: Any, **kwargs: Any) -> Any:
        _refuse_as_whole(self, name, of_vectors)
        return method(self, *args, **kwargs)

    return checked


def _property_not_of_a_part(name: str) -> property:
    attribute = getattr(torch.Tensor, name)

    def get(self: ShardedParameter) -> Any:
        _refuse_as_whole(self, name)
        return attribute.__get__(self)

    return property(get)


class ShardedParameter(nn.Parameter):
    """A parameter of which each rank holds a part, in the parameter's own dtype: 1-D, shape ``(stop - start,)``, or, where
    its layout is ``Rows`` or ``Whole``, ``(rows, *rest)``.

    Where the shard group has a single rank (``NO_SHARD``, world size 1) it keeps its original shape.
    """

    _flatshard_info: ShardInfo

    def _set_grad(self, grad: torch.Tensor | None) -> None:
        set_gradient(self, grad, self._flatshard_info)

    # A property of C functions where it is read, in every step of an optimizer.
    grad = property(plain_grad.__get__, _set_grad, plain_grad.__delete__)

    # [Note: Looking only after a change], [Note: What is seen of changes by .data]

    def _set_data(self, data: torch.Tensor) -> None:
        if not _is_same(self, data):  # else module.to() of what it is
            refuse_to_empty(self, sys._getframe(1))
            _plain_data.__set__(self, data)
            increment_version(self)
            changes.count += 1

    data = property(torch.Tensor.detach, _set_data)

    def _set_requires_grad(self, requires_grad: bool) -> None:
        _plain_requires_grad.__set__(self, requires_grad)
        changes.count += 1

    requires_grad = property(_plain_requires_grad.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in torch."""
        super().requires_grad_(requires_grad)
        changes.count += 1
        return self

    def set_(self, *args: Any, **kwargs: Any) -> Self:
        """As in torch: like ``p.data = ...``."""
        super().set_(*args, **kwargs)
        changes.count += 1
        return self

    # [Note: Parts are no matrices]

    __getitem__ = _not_of_a_part("__getitem__", of_vectors=True)
    __setitem__ = _not_of_a_part("__setitem__", of_vectors=True)
    __matmul__ = _not_of_a_part("__matmul__")
    __rmatmul__ = _not_of_a_part("__rmatmul__")
    matmul, mm, mv = map(_not_of_a_part, ("matmul", "mm", "mv"))
    t, transpose, permute = map(_not_of_a_part, ("t", "transpose", "permute"))
    T, mT, H, mH = map(_property_not_of_a_part, ("T", "mT", "H", "mH"))

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter has it
        info: ShardInfo | None = self.__dict__.get("_flatshard_info")
        if info is None:
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        return (
            f"ShardedParameter({info.fqn!r}, shape={info.shape}, dtype={self.dtype}, device={self.device}, "
            f"requires_grad={self.requires_grad}, elements {info.start}:{info.stop} here)"
        )

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """As in torch, where ``hook`` gets this rank's own gradient: whole, in its original shape, before it is averaged.

        So it was under DistributedDataParallel. For the averaged gradient's part that ``.grad`` gets, use
        ``register_post_accumulate_grad_hook``.
        """
        if (home := _homes.get(id(self))) is not None:
            home.compute_of(self)  # may refuse
        handle: RemovableHandle = super().register_hook(hook)  # type: ignore[no-untyped-call]
        self._pass_hooks_on()
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """As in torch: ``hook(p)`` runs in backward, when ``p.grad`` has its part of the averaged gradient. It may step on
        it and set it to None. Not under ``no_sync``.
        """
        handle: RemovableHandle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._pass_hooks_on()
        return handle

    def _pass_hooks_on(self) -> None:
        """No gradient of autograd's ever reaches this tensor: have its hooks run where they come."""
        home = _homes.get(id(self))
        if home is not None:
            home.is_watched |= bool(self._post_accumulate_grad_hooks)
            if self._backward_hooks:  # the same dict: what is added or removed later counts too
                home.compute_of(self)._backward_hooks = self._backward_hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with this rank's part. Copying the module shards it anew (``FlatParamHandle``)."""
        if id(self) in memo:
            found: nn.Parameter = memo[id(self)]
            return found
        attributes = {k: v for k, v in self.__dict__.items() if k != "_flatshard_info"}
        result = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(attributes, memo))
        return result

    @classmethod
    def adopt(cls, param: nn.Parameter, info: ShardInfo, home: Home) -> Self:
        """Make the user's own ``param`` a sharded parameter, in place."""
        param.__class__ = cls  # [Note: The user's Parameter objects survive]
        assert isinstance(param, cls)
        param._flatshard_info = info
        _unswappable[id(param)] = param
        _homes[id(param)] = home
        param._pass_hooks_on()
        return param


# torch.optim picks its foreach and fused implementations by exact type. DTensor registers itself in the same list.
# Private, and there is no public way: without it every optimizer on CUDA would fall back to one kernel per parameter.
_torch_optimizer._foreach_supported_types.append(ShardedParameter)


_SYMBOLS = {"__getitem__": "p[...]", "__setitem__": "p[...] = ...", "__matmul__": "@", "__rmatmul__": "@"}


def _refuse_as_whole(param: ShardedParameter, use: str, of_vectors: bool = False) -> None:
    """[Note: Parts are no matrices]. ``of_vectors``: the use is of a part of a vector no more than of a matrix."""
    info = param._flatshard_info
    shape = tuple(full_shape(param))
    if info.shard_world_size == 1 or info.by_rows or not (of_vectors or len(shape) > 1) or hasattr(param, "fqns"):
        return
    raise RuntimeError(
        f"parameter {info.fqn!r} is sharded: this rank has elements {info.start}:{info.stop} of shape {shape} as a 1-D part, "
        f"and {_SYMBOLS.get(use, use)!r} means the whole. It is whole inside "
        "`with flatshard.summon_full_params(module):` and in the forward of its module; a method of yours that "
        "computes with it is one for flatshard.register_forward_method"
    )


def refuse_to_empty(param: ShardedParameter, writer: FrameType) -> None:
    """Raise if ``writer``, which gives ``param`` other memory, is ``module.to_empty()``: the values would be lost."""
    frame: FrameType | None = writer
    while frame is not None and frame.f_code.co_name == "_apply":
        frame = frame.f_back
    if frame is not None and frame.f_code is _TO_EMPTY and not param.is_meta:
        raise RuntimeError(
            f"parameter {param._flatshard_info.fqn!r} is sharded and has its values, which to_empty would throw away. "
            "fully_shard gives modules on the meta device their memory and values itself, by param_init_fn=... or their "
            "reset_parameters(): leave to_empty out. To move a sharded module use module.to(device)"
        )


def _is_same(param: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether ``data`` is the memory that ``param`` has. By its storage, as an empty tensor has no address."""
    return (
        data.dtype is param.dtype
        and data.shape == param.shape
        and data.stride() == param.stride()
        and data.storage_offset() == param.storage_offset()
        and data.untyped_storage()._cdata == param.untyped_storage()._cdata
    )


def shard_info(param: torch.Tensor) -> ShardInfo | None:
    """How ``param``, a parameter or its ``.grad``, is sharded: its name, the whole's shape, and which elements, and which
    rows, this rank has. None for a plain tensor.
    """
    return getattr(param, "_flatshard_info", None)


def full_shape(param: torch.Tensor) -> torch.Size:
    """The shape of the whole parameter that ``param`` is this rank's part of; a plain tensor's own shape.

    Rules that look at the shape keep working after sharding::

        decay = [p for p in model.parameters() if len(flatshard.full_shape(p)) >= 2]
    """
    info = shard_info(param)
    if info is None:
        return param.shape
    return torch.Size(info.shape if info.wrapping is None else info.wrapping.shape)


def in_memory_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``tensor``'s elements as 1-D, in the order of a dense ``stride``; a view where ``tensor`` has that stride."""
    if any(a != b and n > 1 for a, b, n in zip(tensor.stride(), stride, tensor.shape, strict=True)):
        dense = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
