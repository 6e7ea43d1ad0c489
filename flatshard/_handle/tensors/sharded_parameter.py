"""Sharded parameters, which the user and the optimizer see between steps: the user's own objects, with this rank's shard.

[Note: The user's Parameter objects survive]
An optimizer, an EMA or a weight-decay rule may have been built from ``model.parameters()`` before sharding. So the
original ``nn.Parameter`` objects are kept: their ``.data`` is set once to a slice of the local shard, and their
``__class__`` becomes :class:`ShardedParameter` (as torch's lazy parameters change their class when they materialise).
The class has no ``__torch_function__``, so every operation on it costs as much as on a plain parameter. A tensor that is
assigned to ``.grad`` becomes a :class:`ShardedGradient`, which has one.

[Note: Changes by .data]
An unsharded unit must notice when its shards change, on all ranks alike, also on ranks whose part is empty. Autograd's
version counter shows this if it counts every change. For a plain tensor it does not count ``p.data = ...`` and
``p.data.add_()``. For a sharded parameter it does: the setter of ``.data`` increments it, and the getter returns
``p.detach()``, which shares it. Autograd's own check does not become stricter by this, because the graph of a forward never
holds a sharded parameter.

[Note: Shards are not matrices]
For a 1-D shard of a matrix, ``w.T`` is the shard, ``w[3] = 0`` sets one element (another one on each rank), and ``b @ a`` may
even fit. Code that means the full parameter uses these on the parameter itself. So they are Python methods of this class,
which check first; optimizers use none of them. ``p.detach()`` and ``p.data`` are a :class:`ShardTensor`, which checks every
function. Functions such as ``torch.sum`` of the parameter itself are noticed in backward alone (``direct.py``), and
``torch.rand_like`` draws for the shard alone, while ``torch.rand_like(p.data)`` draws for the full parameter.

Initialisers that compute from the shape (``kaiming_uniform_``, ``orthogonal_``) ask for the number of dimensions first. They
are refused on all ranks, unless one rank has all of the parameter in its shape: whole rows have another fan-out, too. Some
initialisers skip an empty tensor before they ask, so reading the ``shape`` of an empty shard checks, too. Initialisers that
treat each element alike are allowed.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import optimizer as _torch_optimizer
from torch.overrides import has_torch_function
from torch.utils.hooks import RemovableHandle

from flatshard._base.callers import Caller
from flatshard._base.errors import RESTRUCTURE_BEFORE
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.direct import leaf_of
from flatshard._handle.tensors.grad_dtype import hand_on, plain_grad_dtype
from flatshard._handle.tensors.local_numbers import reduce_local
from flatshard._handle.tensors.operations import OperationKind, kind_of
from flatshard._handle.tensors.shard import (
    ShardTensor,
    as_leaves,
    draw,
    handler_of,
    refuse,
    refuse_initialiser,
    share_numbers,
)
from flatshard._handle.tensors.shard_info import DTENSOR_CURES, ShardInfo, attribute_of_dtensors
from flatshard._handle.tensors.sharded_gradient import mark, plain_grad

_plain_data: Any = torch.Tensor.data
_plain_shape: Any = torch.Tensor.shape
_plain_detach: Any = torch.Tensor.detach


class Filling(Protocol):
    """A feature that gives a flat parameter memory and values after ``fully_shard``. filled_later.py, [Note: Filled later]"""

    @property
    def unit(self) -> str:
        """The unit's FQN."""

    def allocate(self, device: torch.device) -> None:
        """Give parameters that are on meta their memory, to be filled."""

    def show(self, param: ShardedParameter, beside: Iterable[Any]) -> nn.Parameter:
        """Return ``param`` or the full one, for code that reads it from a module with the parameters ``beside``."""

    def shows(self, param: ShardedParameter) -> bool:
        """Return whether ``param`` is shown in full now."""

    def cut(self) -> None:
        """Keep this rank's shard of parameters that are shown in full, and leave ``shown_full``."""


# Both are empty unless a model is being filled. A filling adds itself.
fillings: weakref.WeakSet[Filling] = weakref.WeakSet()  # all that exist
shown_full: list[Filling] = []  # those with parameters that are shown in full


# By the sharded parameter's id: the `FlatParam` that it is a slice of, whose module imports this one.
_flat_params: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# By the id of its `__dict__`, which the unsharded parameter in modules shares. It also gives each parameter a weak reference,
# against `swap_tensors`: see changes.py, [Note: Looking only after a change].
_by_attributes: weakref.WeakValueDictionary[int, ShardedParameter] = weakref.WeakValueDictionary()


def _filled_or_drawn(name: str) -> Any:
    """Make the method ``name``, which draws random numbers. filled_later.py, [Note: Filled later]"""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def fill(self: ShardedParameter, *args: Any, **kwargs: Any) -> Any:
        shown = show_full(self)
        if shown is not self or not _is_part(self):
            method(shown, *args, **kwargs)
        else:
            draw(method, (self, *args), kwargs)
        return self

    return fill


def _is_part(param: ShardedParameter) -> bool:
    """Return whether other ranks have other shards of ``param``."""
    info = param._flatshard_info
    if info.runtime is None or info.is_full:
        return False
    flat = _flat_params.get(id(param))
    return (
        flat is None or flat.filling is None or not flat.filling.shows(param)
    )  # filled_later.py, [Note: Filled later]


_NOT_RECORDED = OperationKind.DIMENSIONS, OperationKind.SIZE
"""Kinds of operations that autograd does not record."""


def _by_the_table(name: str, method: Callable[..., Any], handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method``, which follows the table of operations where ``param`` is a shard."""
    is_recorded = kind_of(name) not in _NOT_RECORDED

    @functools.wraps(method)
    def of_a_part(self: ShardedParameter, *rest: Any, **kwargs: Any) -> Any:
        if not torch._C._is_torch_function_enabled() or not _is_part(self):  # inside `plainly()`
            return method(self, *rest, **kwargs)
        args: tuple[Any, ...] = (self, *rest)
        if is_recorded and torch.is_grad_enabled():
            args, kwargs = as_leaves(args, kwargs)
        if has_torch_function((*args[1:], *kwargs.values())):
            reduce_local(args, kwargs)
            if (settled := share_numbers(method, args, kwargs)) is not None:
                args, kwargs = settled
        return handler(method, args, kwargs)

    return of_a_part


@functools.wraps(_plain_detach)
def _detach(self: ShardedParameter) -> torch.Tensor:
    """Return a :class:`ShardTensor` without the table's detours: a state dict detaches every parameter."""
    result: torch.Tensor = _plain_detach(self)
    info = self._flatshard_info
    is_full = info.runtime is None or info.shard_world_size == 1 or (shown_full and not _is_part(self))
    if not is_full and torch._C._is_torch_function_enabled():
        result.__class__ = ShardTensor
        result._flatshard_info = info  # type: ignore[attr-defined]
    return result


def _methods_of_the_table() -> dict[str, Any]:
    """Return the methods and properties of tensors that differ for a shard."""
    found: dict[str, Any] = {"detach": _detach}
    for name in dir(torch.Tensor):
        kind, attribute, handler = kind_of(name), getattr(torch.Tensor, name), handler_of(name)
        if handler is None or (kind is None and name.startswith("__")) or name in found:
            continue
        if kind is OperationKind.RANDOM:
            found[name] = _filled_or_drawn(name)
            continue
        if callable(attribute):
            found[name] = _by_the_table(name, attribute, handler)
        else:
            found[name] = property(_by_the_table(name, attribute.__get__, handler))
    return found


def _counted(plain: Any) -> Any:
    """Return the attribute ``plain`` of tensors, of which a change counts. changes.py, [Note: Looking only after a change]"""

    def write(self: ShardedParameter, value: Any) -> None:
        plain.__set__(self, value)
        changes.note()

    return property(plain.__get__, write)


class ShardedParameter(nn.Parameter):
    """A parameter of which each rank holds a shard, in the parameter's own dtype. The shard is 1-D, ``(stop - start,)``, or
    ``(rows, *rest)`` if the layout is ``Rows`` or ``Whole``.

    If the shard group has a single rank (``NO_SHARD``, world size 1), it keeps its original shape.

    Example::

        p = model[0].up.weight
        assert isinstance(p, flatshard.tensors.ShardedParameter) and p.ndim == 2
        with torch.no_grad():
            p.mul_(0.99)  # each rank its own shard
    """

    _flatshard_info: ShardInfo

    locals().update(_methods_of_the_table())
    __hash__ = torch.Tensor.__hash__  # a class that defines `__eq__` has none

    def __init_subclass__(cls) -> None:
        sharded_types.add(cls)
        _torch_optimizer._foreach_supported_types.append(cls)

    def _set_grad(self, grad: torch.Tensor | None) -> None:
        plain_grad.__set__(self, grad)
        if grad is not None:
            mark(grad, self._flatshard_info)

    full_tensor, redistribute, to_local, placements, device_mesh = map(attribute_of_dtensors, DTENSOR_CURES)

    # A property of C functions for reads, which optimizers do in every step.
    grad = property(plain_grad.__get__, _set_grad, plain_grad.__delete__)

    # changes.py, [Note: Looking only after a change], [Note: Changes by .data]

    def _set_data(self, data: torch.Tensor) -> None:
        if not _is_same(self, data):  # module.to() may assign the same memory
            caller = Caller()
            if handle_to_empty(self, caller, data):
                return
            if caller.assigns_vector and _is_part(self):
                refuse(self._flatshard_info, "vector_to_parameters")
            _plain_data.__set__(self, data)
            increment_version(self)
            changes.note()

    def _get_data(self) -> torch.Tensor:
        return self.detach()

    data = property(_get_data, _set_data)

    requires_grad = _counted(torch.Tensor.requires_grad)
    grad_dtype = _counted(plain_grad_dtype)  # grad_dtype.py, [Note: The dtype of a gradient]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Change ``requires_grad``, as in torch."""
        super().requires_grad_(requires_grad)
        changes.note()
        return self

    def set_(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing if ``set_`` would change nothing, and raise otherwise: a shard stays where it is."""
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not _is_same(self, args[0]):
            raise RuntimeError(
                f"parameter {self._flatshard_info.fqn!r} is sharded, and set_ would give it other memory: "
                f"{RESTRUCTURE_BEFORE}. For other values use copy_, or assign to p.data"
            )
        return self

    def copy_(self, src: Any, non_blocking: bool = False) -> Self:
        """Copy ``src`` into this rank's shard, as in torch."""
        if isinstance(src, torch.Tensor) and src.shape == full_shape(self) != self.shape:
            raise RuntimeError(self._flatshard_info.explain_full_shape("copy_"))
        super().copy_(src, non_blocking)
        return self

    # [Note: Shards are not matrices]

    def _get_shape(self) -> torch.Size:
        shape: torch.Size = _plain_shape.__get__(self)
        if 0 in shape:  # initialisers leave it alone, where those of other ranks go on
            caller = Caller()
            if _is_part(self):
                refuse_initialiser(self._flatshard_info, caller)
        return shape

    shape = property(_get_shape)

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter has it
        info: ShardInfo | None = self.__dict__.get("_flatshard_info")
        if info is None:
            return str(super().__repr__())  # type: ignore[no-untyped-call]
        return (
            f"ShardedParameter({info.fqn!r}, shape={info.shape}, dtype={self.dtype}, device={self.device}, "
            f"requires_grad={self.requires_grad}, elements {info.start}:{info.stop} here)"
        )

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """Register a hook, as in torch. It gets this rank's own, full gradient, before it is averaged.

        DistributedDataParallel does the same. For this rank's shard of the averaged gradient, which becomes ``.grad``, use
        ``register_post_accumulate_grad_hook``.
        """
        if (flat := _flat_params.get(id(self))) is not None:
            flat.compute_of(self)  # raises for a flat parameter
        handle: RemovableHandle = super().register_hook(hook)  # type: ignore[no-untyped-call]
        self._share_hooks()
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Register a hook, as in torch: ``hook(p)`` runs in backward, when ``p.grad`` has its shard of the averaged gradient.

        It may step an optimizer on ``p`` and set ``p.grad`` to None. It does not run under ``no_sync``.
        """
        handle: RemovableHandle = super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._share_hooks()
        return handle

    _as_leaf = leaf_of

    def _share_hooks(self) -> None:
        """Register hooks where they will run: autograd never computes a gradient of this tensor."""
        flat = _flat_params.get(id(self))
        if flat is not None:
            if self._post_accumulate_grad_hooks:
                flat.watch()
            if self._backward_hooks:  # the same dict: hooks that are added or removed later count, too
                flat.compute_of(self)._backward_hooks = self._backward_hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with this rank's shard. A copy of the module is sharded again by ``FlatParamHandle``."""
        if id(self) in memo:
            found: nn.Parameter = memo[id(self)]
            return found
        attributes = {k: v for k, v in self.__dict__.items() if k != "_flatshard_info"}
        result = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = result
        hand_on(self, result)
        result.__dict__.update(copy.deepcopy(attributes, memo))
        return result

    @classmethod
    def adopt(cls, param: nn.Parameter, info: ShardInfo, flat: Any) -> Self:
        """Internal: turn the user's own ``param`` into a sharded parameter, in place."""
        param.__class__ = cls  # [Note: The user's Parameter objects survive]
        assert isinstance(param, cls)
        param._flatshard_info = info
        _by_attributes[id(vars(param))] = param
        _flat_params[id(param)] = flat
        param._share_hooks()
        return param


sharded_types: set[type] = {ShardedParameter}
"""The exact classes of sharded parameters."""


def is_sharded_parameter(value: Any) -> TypeGuard[ShardedParameter]:
    """Return whether ``value`` is a sharded parameter, quicker than ``isinstance``, which runs Python code here."""
    return type(value) in sharded_types


# torch.optim selects foreach and fused implementations by exact type, from this list. DTensor registers itself there, too.
# The list is private, but there is no public way. Without it every optimizer on CUDA would run one kernel per parameter.
_torch_optimizer._foreach_supported_types.append(ShardedParameter)


def handle_to_empty(param: ShardedParameter, caller: Caller, new: torch.Tensor) -> bool:
    """Allocate the shard of ``param`` on meta and return True, if ``module.to_empty()`` gives it the memory ``new``.

    It is filled afterwards: filled_later.py, [Note: Filled later].

    Raises:
        RuntimeError: ``param`` has its values, which would be lost.
    """
    if not caller.empties:
        return False
    flat = flat_param_of(param)
    if flat is not None and flat.filling is not None:
        flat.filling.allocate(new.device)
        return True
    raise RuntimeError(
        f"parameter {param._flatshard_info.fqn!r} is sharded and has its values, which to_empty would throw away. To move a "
        "sharded module use module.to(device)"
    )


def flat_param_of(param: ShardedParameter) -> Any:
    """Return the flat parameter that ``param`` is a slice of, or None for an unpickled copy."""
    return _flat_params.get(id(param))


def own_of(shown: nn.Parameter) -> ShardedParameter | None:
    """Return the sharded parameter of ``shown`` in a module, or None for a plain one and for some tensor subclasses."""
    return _by_attributes.get(id(vars(shown)))


def show_full(param: ShardedParameter, beside: Iterable[Any] = ()) -> nn.Parameter:
    """Return ``param`` for code that reads it from its module, or the full parameter while it is being filled.

    ``beside`` has the module's own parameters.
    """
    flat = _flat_params.get(id(param))
    if flat is None or flat.filling is None:
        return param
    shown: nn.Parameter = flat.filling.show(param, beside)
    return shown


def show_shards() -> None:
    """Show this rank's shards again, everywhere: code that is no initialiser reads parameters."""
    while shown_full:
        shown_full[-1].cut()


def _is_same(param: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether ``data`` is the same memory as ``param``. It compares storages: an empty tensor has no address."""
    return bool(
        data.dtype is param.dtype
        and data.shape == param.shape
        and data.stride() == param.stride()
        and data.storage_offset() == param.storage_offset()
        and data.untyped_storage()._cdata == param.untyped_storage()._cdata
    )


def shard_info(param: torch.Tensor) -> ShardInfo | None:
    """Return how ``param``, a parameter or its ``.grad``, is sharded, or None for a plain tensor.

    It has the FQN, the full shape, and this rank's elements and rows.

    Example::

        for p in model.parameters():
            info = flatshard.tensors.shard_info(p)
            assert p.numel() == info.stop - info.start
    """
    return getattr(param, "_flatshard_info", None)


def full_shape(param: torch.Tensor) -> torch.Size:
    """Return the shape of the full parameter of which ``param`` is this rank's shard. A plain tensor has its own shape.

    Rules that look at the shape keep working after sharding::

        decay = [p for p in model.parameters() if len(flatshard.full_shape(p)) >= 2]
    """
    info = shard_info(param)
    if info is None:
        return param.shape
    return torch.Size(info.shape if info.wrapping is None else info.wrapping.shape)


def take_place(new: Any, old: Any) -> None:
    """Give ``new`` the hooks on ``old``, and its choice of a gradient's dtype."""
    if old._backward_hooks is not None:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks is not None:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
    hand_on(old, new)
