"""A linear layer whose weight encodes its gather: float8 elements with one scale, like torchao's."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

WIDTH = 21
FLOAT8 = torch.float8_e4m3fn
KEPT = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
"""Operations that return the subclass."""


def encoded(tensor: Tensor, scale: Tensor) -> Tensor:
    return (tensor * scale).float().clamp(-448, 448).to(FLOAT8)


class Inner(Tensor):
    """A subclass with inner tensors ``names`` and a dtype of its own."""

    names: ClassVar[list[str]]

    @classmethod
    def make(cls, dtype: torch.dtype, *inner: Tensor) -> Any:
        first = inner[0]
        result = Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=dtype, device=first.device
        )
        result.__dict__.update(zip(cls.names, inner, strict=True))
        return result

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.names, self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls.make(dtype, *(inner[name] for name in cls.names))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.view.default), func
        first, *others = (getattr(args[0], name) for name in cls.names)
        return cls.make(args[0].dtype, func(first, *args[1:]), *others)


class Received(Inner):
    """A gathered weight."""

    names: ClassVar[list[str]] = ["data8", "scale"]

    @property
    def decoded(self) -> Tensor:
        return self.data8.to(self.dtype) / self.scale.to(self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl


class Wrapped(Inner):
    """A subclass with an inner tensor of the same shape and dtype, which may be a subclass itself."""

    names: ClassVar[list[str]] = ["inner"]

    @classmethod
    def of(cls, inner: Tensor) -> Any:
        return cls.make(inner.dtype, inner)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Any:
        return cls.of(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return cls.of(out) if func in KEPT else out


class Weight(Wrapped):
    """A weight whose matrix products use float8 elements with a single scale."""

    _precomputed_scale: Tensor | None = None

    @property
    def decoded(self) -> Tensor:
        scale = (448 / self.inner.abs().max().double()).float()
        return encoded(self.inner, scale).to(self.dtype) / scale.to(self.dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self._precomputed_scale
        assert scale is not None
        return (encoded(self.inner, scale),), (scale,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            assert type(out) is Received
            out.scale = metadata[0]
            return None
        return Received.make(param_dtype, outputs[0], metadata[0]), outputs


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.decoded.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.decoded, grad.t() @ x


class Linear8(nn.Linear):
    """A linear layer with such a weight. If ``later``, it is plain until ``encode``, as ``module.to(device)`` lacks
    support."""

    def __init__(self, dtype: torch.dtype = torch.float64, width: int = WIDTH, later: bool = False) -> None:
        super().__init__(width, width, dtype=dtype)
        if not later:
            self.encode()

    def encode(self) -> None:
        self.weight = nn.Parameter(Weight.of(self.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias
