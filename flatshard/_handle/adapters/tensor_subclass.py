"""Parameters that are tensor subclasses with plain tensors inside: quantised weights, weights with their own dispatch.

The class lists the tensors inside by ``__tensor_flatten__``, and is built from them by ``__tensor_unflatten__``. This is the
protocol that ``torch.compile`` and FSDP2 use.

[Note: Bytes of several tensors]
If there is one tensor inside, it is sharded in its own dtype. If there are several (int8 values, scales and zero points of a
quantised weight), their bytes are sharded as one frozen ``uint8`` parameter: end to end, each tensor aligned to 16 bytes. So
all of them are gathered in the unit's one all-gather, and are never cast. Such a parameter must be frozen. Its gradient would
be one tensor of floating-point numbers, so of another dtype and size than the bytes that are sharded; and an optimizer would
have to change this rank's shard by the class's own operators (torchao's rounds at random, for each row anew), while a sharded
parameter has none: it is plain memory, cut anywhere.

[Note: Classes with hooks for FSDP2's gathers]
FSDP2 calls ``fsdp_pre_all_gather`` of a class to encode a shard, and ``fsdp_post_all_gather`` to build the full parameter.
flatshard calls them if the class encodes in float8 by a given scale: ``encoding.py``. For other classes neither is called:
the tensor inside is gathered, and the class is built over it, as in one process. A class that quantises does so in its
products, from all values, so its scale is that of the full tensor and needs no communication. But FSDP2 passes the policy's
dtype to the second hook, so a class that has it can compute in that dtype. If the class has this dtype when it is built over
a cast tensor, the tensor inside is cast, and gathered in the compute dtype. Other classes keep their dtype: only they know
what a cast means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatshard._handle.adapters.tensor_parallel import TensorParallel, is_dtensor, local_tensor
from flatshard._handle.adapters.wrapping import REMEMBERED, Wrapping
from flatshard._handle.layout import dense_stride
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_parameter import take_place

_ALIGNMENT = 16  # bytes; the size of the widest dtype


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A plain tensor inside a subclass."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # first byte; [Note: Bytes of several tensors]
    stop: int

    def of_bytes(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.stop].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Node:
    """A tensor subclass, perhaps inside another one."""

    kind: Any  # the class
    context: Any  # the second result of `__tensor_flatten__`
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner: tuple[tuple[str, _Node | None], ...]  # the tensors inside, by name; None for a plain tensor, the next leaf

    def build(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        tensors = {name: next(leaves) if node is None else node.build(leaves) for name, node in self.inner}
        result: torch.Tensor = self.kind.__tensor_unflatten__(tensors, self.context, self.shape, self.stride)
        return result


@dataclass(frozen=True, slots=True)
class TensorSubclass(Wrapping):
    """The wrapping of a tensor subclass, which is built from the tensors inside."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    root: _Node
    leaves: tuple[_Leaf, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSubclass | None:
        """Return the wrapping of a tensor subclass, or None for a plain tensor or a DTensor."""
        if not is_wrapper(tensor):
            return None
        leaves: list[_Leaf] = []
        root = _make_node(tensor, leaves)
        return cls(root.shape, root.stride, root, tuple(leaves))

    @property
    def kind(self) -> type[torch.Tensor]:
        """The class."""
        result: type[torch.Tensor] = self.root.kind
        return result

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Wrapping``. If there are several tensors inside, a copy of their bytes."""
        if not is_wrapper(tensor):
            return tensor.detach()
        inside = [t.detach() for t in plain_tensors(tensor)]
        if len(inside) == 1:
            return inside[0]
        result = torch.zeros(self.leaves[-1].stop, dtype=torch.uint8, device=inside[0].device)
        for leaf, part in zip(self.leaves, inside, strict=True):
            leaf.of_bytes(result).copy_(part)
        return result

    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """See ``Wrapping``."""
        parts = [plain] if len(self.leaves) == 1 else [leaf.of_bytes(plain) for leaf in self.leaves]
        return self.root.build(iter(parts))

    def point(self, param: nn.Parameter, plain: torch.Tensor) -> None:
        """See ``Wrapping``. Swaps ``param`` with a new object: there is no other way to change the tensors inside."""
        swap_inside(param, self.wrap(plain))

    def local_gradient(self, grad: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Wrapping``."""
        return self.unwrap(grad)

    def computes_in(self, dtype: torch.dtype) -> bool:
        """See ``Wrapping``. [Note: Classes with hooks for FSDP2's gathers]"""
        if len(self.leaves) != 1 or not hasattr(self.kind, "fsdp_post_all_gather"):
            return False
        (leaf,) = self.leaves
        return self.wrap(torch.empty_strided(leaf.shape, leaf.stride, dtype=dtype, device="meta")).dtype is dtype

    def check(self, tensor: torch.Tensor) -> str | None:
        """Return the reason why ``tensor``, of this wrapping, cannot be sharded, or None if it can."""
        if any(is_dtensor(t) for t in _inside(tensor, through_dtensors=False)):
            return "has a DTensor inside, which cannot be sharded: use the subclass without tensor parallelism"
        if tensor.requires_grad:
            if len(self.leaves) > 1:
                return (
                    f"requires grad, but has {len(self.leaves)} tensors inside: a step would go through the class, and a "
                    "sharded parameter is plain memory. Freeze it, and train parameters beside it (adapters)"
                )
            if self.leaves[0].shape != self.shape or not self.leaves[0].dtype.is_floating_point:
                return (
                    "requires grad, but the tensor inside is not a floating-point tensor of the same shape: freeze it"
                )
        plain = self.unwrap(tensor)
        made = self.wrap(plain)
        if type(made) is not self.kind or tuple(made.shape) != self.shape:
            return "is not rebuilt by its own __tensor_unflatten__"
        inside, memory = plain_tensors(made), plain.untyped_storage()
        if any(t.numel() and t.untyped_storage().data_ptr() != memory.data_ptr() for t in inside):
            return "copies the tensors that its __tensor_unflatten__ is given, so it cannot lie in a flat parameter"
        return None


def swap_inside(param: nn.Parameter, made: torch.Tensor) -> None:
    """Give ``param`` the tensors inside ``made``. The user's attributes of it stay, and what is registered on it.

    It is another leaf for autograd then, which has another AccumulateGrad node: this counts as a change.
    """
    fresh = nn.Parameter(made, param.requires_grad)
    for name, value in param.__dict__.items():
        fresh.__dict__.setdefault(name, value)
    take_place(fresh, param)
    torch.utils.swap_tensors(param, fresh)  # type: ignore[no-untyped-call]
    changes.note()


def is_wrapper(tensor: object) -> bool:
    """Return whether ``tensor`` is a subclass with plain tensors inside, and not a DTensor."""
    kind = type(tensor)
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__") and not is_dtensor(tensor)


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors inside a subclass, the local tensor of a DTensor, or a plain ``tensor`` itself."""
    return [tensor] if type(tensor) is torch.Tensor else list(_inside(tensor))


def wrapping_of(tensor: torch.Tensor) -> Wrapping | None:
    """Return the wrapping of a subclass, of a DTensor, or of a plain parameter taken out of one; None for other tensors."""
    found: Wrapping | None = tensor.__dict__.get(REMEMBERED)
    if found is None and type(tensor) is not nn.Parameter:
        found = TensorParallel.of(tensor) or TensorSubclass.of(tensor)
    return found


def _inside(tensor: torch.Tensor, through_dtensors: bool = True) -> Iterator[torch.Tensor]:
    if is_wrapper(tensor):
        flattened: Any = tensor
        for name in flattened.__tensor_flatten__()[0]:
            yield from _inside(getattr(tensor, name), through_dtensors)
    elif through_dtensors and is_dtensor(tensor):
        yield from _inside(local_tensor(tensor))
    else:
        yield tensor


def _make_node(tensor: Any, leaves: list[_Leaf]) -> _Node:
    names, context = tensor.__tensor_flatten__()
    inner: list[tuple[str, _Node | None]] = []
    for name in names:
        part: torch.Tensor = getattr(tensor, name)
        if is_wrapper(part):
            inner.append((name, _make_node(part, leaves)))
            continue
        inner.append((name, None))
        start = -(-leaves[-1].stop // _ALIGNMENT) * _ALIGNMENT if leaves else 0
        stride = dense_stride(part.shape, part.stride())
        leaves.append(_Leaf(part.dtype, tuple(part.shape), stride, start, start + part.numel() * part.itemsize))
    return _Node(type(tensor), context, tuple(tensor.shape), tuple(tensor.stride()), tuple(inner))
