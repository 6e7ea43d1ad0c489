"""Classes of parameters that encode their shards in fewer bytes.

[Note: Classes that encode]
FSDP2 calls ``fsdp_pre_all_gather`` of a class to encode this rank's shard, and ``fsdp_post_all_gather`` to build the full
parameter from the gathered shards. flatshard calls both if the class

- has one floating-point tensor inside, of its own shape,
- takes the scale of its values from the attribute ``_precomputed_scale``, and then needs no communication of its own, and
- encodes each element of any shard as one float8 number: the element, multiplied by the scale.

So a parameter may be cut anywhere, also within a row. A call of the class with a few elements tells whether it does so. The
scale maps the largest magnitude of the full tensor to the largest number of the float8 dtype. torchao's
``WeightWithDynamicFloat8CastTensor``, of ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)``, is such a class.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from flatshard._handle.adapters.tensor_subclass import TensorSubclass

_SMALLEST = 1e-12  # the largest magnitude of a tensor of zeros, to have a scale: torchao's


def encoded_dtype(wrapping: TensorSubclass) -> torch.dtype | None:
    """Return the float8 dtype that the class encodes in, or None if it does not. [Note: Classes that encode]"""
    if len(wrapping.leaves) != 1 or not hasattr(wrapping.kind, "fsdp_post_all_gather"):
        return None
    (leaf,) = wrapping.leaves
    if not leaf.dtype.is_floating_point or leaf.shape != wrapping.shape:
        return None
    asked = _over(wrapping, torch.zeros(8, 8, dtype=leaf.dtype, device="cpu"))
    pre = getattr(asked, "fsdp_pre_all_gather", None)
    if pre is None or not hasattr(asked, "_precomputed_scale") or len(inspect.signature(pre).parameters) != 1:
        return None
    sent = _ask(asked, torch.ones((), device="cpu"))[0]
    is_float8 = len(sent) == 1 and sent[0].dtype.is_floating_point and sent[0].itemsize == 1
    return sent[0].dtype if is_float8 and sent[0].shape == asked.shape else None


def encode(wrapping: TensorSubclass, part: torch.Tensor, scale: torch.Tensor) -> tuple[Any, torch.Tensor, Any]:
    """Encode ``part``, plain and of any shape.

    Returns:
        An object of the class, for its ``fsdp_post_all_gather``; the encoded part; the metadata for this method.
    """
    asked = _over(wrapping, part)
    (sent,), metadata = _ask(asked, scale)
    return asked, sent, metadata


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales for tensors whose largest magnitudes are ``largest``, to be encoded in ``dtype``."""
    return (torch.finfo(dtype).max / largest.double().clamp(min=_SMALLEST)).float()


def _over(wrapping: TensorSubclass, part: torch.Tensor) -> Any:
    """Build the subclass over a tensor of any shape."""
    return replace(wrapping.root, shape=tuple(part.shape), stride=part.stride()).build(iter([part]))


def _ask(asked: Any, scale: torch.Tensor) -> Any:
    asked._precomputed_scale = scale
    with torch.no_grad():
        return asked.fsdp_pre_all_gather(None)  # the mesh, which it doesn't need
