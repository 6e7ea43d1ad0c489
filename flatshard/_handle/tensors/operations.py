"""The table of operations on shards of tensors: one for sharded parameters and gradients.

A rank has a shard of each parameter and gradient: some elements, as 1-D, or some rows. The kind of an operation decides what
it may do with a shard, whoever calls it. Names are those of ``torch.Tensor``, ``torch`` and ``torch.nn.functional``. A name
stands for the operation in place, too (``mul_``), and for the operators (``__rmul__``). Operations that torch tags as
pointwise are elementwise without being named here. Anything else that is not in the table is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch


class OperationKind(enum.Enum):
    """The kinds of operations, by what they need of a tensor."""

    ELEMENTWISE = "each element alone: works on the shard, and gives a shard"
    RANDOM = "a number for each element, by its place in the full tensor: in place, or as a new tensor (`rand_like`)"
    REDUCTION = "all elements, in any order: gives the number of the full tensor, and communicates"
    ALIAS = "the same elements, perhaps in another dtype or on another device: gives a shard"
    MEMORY = "what this rank holds: its address, dtype, shape, bytes; a copy or a new tensor like it, which is plain"
    DIMENSIONS = "how many dimensions (`ndim`, `dim()`): the full tensor's. The length of `shape` is this rank's"
    SIZE = "a size of this rank's memory (`size(0)`): refused for a dimension that only the full tensor has"
    FLAT = "the elements in a row (`view(-1)`): gives a shard, and any other shape is refused"
    SELECT = "some elements: all of them (`[:]`) or a mask of the shard's shape; anything else is refused"
    SHAPE = "rows, columns, places or the shape: refused, unless this rank's shard is whole rows"
    TRANSPOSE = "rows as columns: the same, but a vector may"


_OPERATIONS = {
    # Only operations that torch does not tag as pointwise.
    OperationKind.ELEMENTWISE: """
        absolute and conj copy divide fill fix floor_divide floordiv imag invert isreal lshift mod multiply negative or pos
        real resolve_conj resolve_neg rshift subtract truediv xor zero arccos arccosh arcsin arcsinh arctan arctan2 arctanh
        constant greater greater_equal less less_equal not_equal hardswish logsigmoid softsign tanhshrink
    """,
    OperationKind.RANDOM: """
        bernoulli cauchy exponential geometric log_normal normal random uniform rand_like randn_like randint_like
    """,
    OperationKind.REDUCTION: """
        all amax amin any count_nonzero dot item max mean min norm sum vdot vector_norm
    """,
    OperationKind.ALIAS: """
        detach data to float double half bfloat16 cpu cuda type_as contiguous view_as_real
    """,
    OperationKind.MEMORY: """
        clone deepcopy zeros_like ones_like empty_like full_like new new_empty new_empty_strided
        new_full new_ones new_tensor new_zeros as_subclass
        allclose equal isclose is_same_size is_set_to
        array array_wrap dlpack dlpack_device numpy tolist repr str format hash sizeof dir reduce reduce_ex setstate getstate
        delattr setattr getattribute class
        data_ptr const_data_ptr storage storage_offset storage_type untyped_storage element_size nbytes itemsize numel
        nelement shape stride dim_order is_contiguous is_pinned pin_memory is_shared share_memory record_stream
        module_load set
        dtype device layout names is_complex is_floating_point is_signed is_inference is_conj is_neg is_distributed
        is_coalesced get_device type is_cpu is_cuda is_xpu is_mps is_mtia is_maia is_meta is_nested is_quantized is_sparse
        is_sparse_csr is_mkldnn is_ipu is_vulkan is_ort is_hpu is_xla is_leaf result_type can_cast
        bool byte char short int long cfloat cdouble chalf xpu mtia ipu has_names
        requires_grad grad grad_fn grad_dtype output_nr retains_grad retain_grad register_hook
        register_post_accumulate_grad_hook volatile backward name
    """,
    OperationKind.DIMENSIONS: "ndim dim ndimension",
    OperationKind.SIZE: "size",
    OperationKind.FLAT: "flatten ravel reshape view view_as reshape_as",
    OperationKind.SELECT: "getitem setitem masked_scatter index_put",
    # Known ones. They differ from what is not in the table only in that shards that are whole rows may use them.
    OperationKind.SHAPE: """
        matmul mm mv bmm addmm addmv addbmm baddbmm linear swapaxes swapdims movedim moveaxis
        unbind select narrow split chunk index_select gather take sort argsort topk cumsum cumprod flip roll diag
        diagonal tril triu trace unsqueeze squeeze expand expand_as repeat unflatten softmax log_softmax std var prod
        logsumexp argmax argmin aminmax median quantile len iter contains reversed nonzero
        split_with_sizes tensor_split scatter scatter_add index_add index_copy index_fill
    """,
    OperationKind.TRANSPOSE: "t transpose permute T mT H mH adjoint",
}

NAMED: dict[str, OperationKind] = {
    name: kind for kind, names in reversed(_OPERATIONS.items()) for name in names.split()
}
"""The kind of each operation that has to be named, by its name without underscores at its ends."""


def is_pointwise(name: str) -> bool:
    """Return whether torch tags the operation ``name`` so."""
    packets: list[Any] = [getattr(torch.ops.aten, each, None) for each in (name, name.rstrip("_"), f"special_{name}")]
    return any(
        torch.Tag.pointwise in getattr(packet, overload).tags
        for packet in packets
        if hasattr(packet, "overloads")
        for overload in packet.overloads()
    )


def _kind(name: str) -> OperationKind | None:
    return NAMED.get(name) or NAMED.get(name.rstrip("_")) or (OperationKind.ELEMENTWISE if is_pointwise(name) else None)


_NUMBERS = {f"__{name}__" for name in ("bool", "nonzero", "float", "int", "index", "complex")}  # as `item()`


def kind_of(name: str) -> OperationKind | None:
    """Return the kind of the function or attribute ``name``, or None if it is not in the table, and refused."""
    if name.startswith("__") and name.endswith("__"):
        inner = name[2:-2]
        if name in _NUMBERS:
            return OperationKind.REDUCTION
        return _kind(inner) or (_kind(inner[1:]) if inner[:1] in "ri" else None)
    name = name.removeprefix("linalg_").removeprefix("special_")
    if name.startswith("_"):  # torch's own, between its functions
        return OperationKind.MEMORY
    return _kind(name)


def is_of_many(name: str) -> bool:
    """Return whether ``name`` works on lists of tensors, as optimizers do: elementwise, into plain tensors of this rank."""
    return name.startswith(("_foreach_", "_fused_", "_amp_"))


def is_in_place(name: str) -> bool:
    """Return whether ``name`` changes its first argument elementwise, and returns that: on this rank's shard, as it is."""
    written = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")
    return written and kind_of(name) is OperationKind.ELEMENTWISE


# -- the arguments of a call ---------------------------------------------------------------------------------------------


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, or of the attribute that it gets or sets."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__", "__delete__") else name  # type: ignore[attr-defined]


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``arguments``, which may be nested."""
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, list | tuple | dict):
        for argument in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from tensors_in(argument)


def part_in(*arguments: Any) -> Any:
    """Return the first shard in ``arguments``: a :class:`ShardTensor`, or a sharded parameter."""
    return next((t for t in tensors_in(arguments) if hasattr(t, "_flatshard_info")), None)


def replaced(argument: Any, by: dict[int, torch.Tensor]) -> Any:
    """Replace tensors in ``argument``, which may be nested. ``by``: the new ones, by the ids of the old ones."""
    if isinstance(argument, list | tuple):
        return type(argument)([replaced(each, by) for each in argument])
    if isinstance(argument, dict):
        return {key: replaced(each, by) for key, each in argument.items()}
    return by.get(id(argument), argument)


_FIRST = frozenset(("input", "tensor", "x", "A"))
"""The names that torch's functions have for the first argument."""


def first_by_place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move the first argument to its place if it was given by its name."""
    names = () if args else _FIRST.intersection(kwargs)
    return (*args, *(kwargs[name] for name in names)), {k: v for k, v in kwargs.items() if k not in names}
