"""The functional names of FSDP2, so that a script migrates by one import::

    from flatshard.fsdp2 import MixedPrecisionPolicy, fully_shard  # was: from torch.distributed.fsdp import ...

Each call makes its module one unit, inner modules first. The class stays; the methods of ``FSDPModule`` that scripts and
clients call are attributes of the instance. Parameters are this rank's shards, no DTensors: in place of
``p.full_tensor()`` and ``p.placements`` use ``flatshard.summon_full_params`` and ``flatshard.tensors.shard_info``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._base.config import ShardingStrategy
from flatshard._base.errors import name_list
from flatshard._composable.features import grad_sync, summon
from flatshard._composable.features.configure import configure
from flatshard._composable.features.forward_method import register_forward_method
from flatshard._composable.find import unit_for, units_in, unwrapped
from flatshard._composable.fully_shard import fully_shard as _fully_shard
from flatshard._composable.state import unit_of

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "add_methods",
    "fully_shard",
    "register_fsdp_forward_method",
]

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """A mixed-precision policy with the fields of FSDP2's. See :class:`flatshard.MixedPrecision`.

    Example::

        from flatshard.fsdp2 import MixedPrecisionPolicy, fully_shard

        bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model[:4]:
            fully_shard(block, mp_policy=bf16)
        fully_shard(model, mp_policy=bf16)
    """

    param_dtype: torch.dtype | None = None
    """In which units compute. None: the parameters' own."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are reduced. None: as FSDP2 of the torch that is installed has it."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of a unit's forward are cast to it. None: left alone."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of a unit's forward to ``param_dtype``."""
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    """The dtype in which a parameter computes, one by one: its own, or None for ``param_dtype``."""


@dataclass
class OffloadPolicy:
    """An offload policy that offloads nothing.

    Example::

        from flatshard.fsdp2 import OffloadPolicy, fully_shard

        fully_shard(model, offload_policy=OffloadPolicy())
    """


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """An offload policy with the fields of FSDP2's. See :class:`flatshard.CPUOffload`.

    Example::

        from flatshard.fsdp2 import CPUOffloadPolicy, fully_shard

        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    """

    pin_memory: bool = True
    """Shards and gradients in page-locked memory."""


class _UnitCheck(type):
    """The class of :class:`FSDPModule`: being an instance is a property of the object, as no class is swapped."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, nn.Module) and unit_of(unwrapped(instance)) is not None


class FSDPModule(metaclass=_UnitCheck):
    """The modules that are units, for ``isinstance``. Their class is not a subclass of this one.

    A unit of :func:`fully_shard` has the methods of FSDP2's ``FSDPModule``. For one that :func:`flatshard.fully_shard` has
    made, call :func:`add_methods`.

    Example::

        from flatshard.fsdp2 import FSDPModule

        assert isinstance(model, FSDPModule)
        assert not isinstance(model[0].norm, FSDPModule)
    """


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> M:
    """Make ``module`` a unit, without the units inside it, as ``torch.distributed.fsdp.fully_shard`` does.

    Example::

        from flatshard.fsdp2 import fully_shard

        for block in model[:4]:
            fully_shard(block)
        fully_shard(model)
        model.set_requires_gradient_sync(True)


    Args:
        module: a module, or a list of modules that become one unit.
        reshard_after_forward: free the parameters after forward. None: True, but False for the outermost unit. An int:
            reshard to so many ranks. See :func:`flatshard.fully_shard`.
        mp_policy: see :class:`MixedPrecisionPolicy`.
        offload_policy: see :class:`CPUOffloadPolicy`.
        ignored_params: parameters that are not sharded. The caller must reduce their gradients. It may have others, too.
        mesh: 1-D: shard over it. 2-D: replicate over the first dimension, and shard over the second.
        dp_mesh_dims: a ``torch.distributed.fsdp.DataParallelMeshDims``: which dimensions of ``mesh`` to shard and replicate
            over, one each. Parameters that are DTensors are so over other dimensions.
        shard_placement_fn: must be None: :func:`flatshard.fully_shard` has ``layout=`` instead.

    Raises:
        NotImplementedError: ``shard_placement_fn`` was given.
        ValueError: the module's class has an attribute of the name of one of FSDP2's methods. Nothing has been changed.
    """
    if shard_placement_fn is not None:
        raise NotImplementedError(
            "flatshard.fsdp2.fully_shard takes no shard_placement_fn: call flatshard.fully_shard(module, "
            "layout=flatshard.layouts.Rows()), and see layouts.Blocks and layouts.Whole. To shard some parameters over "
            "another mesh than the rest (experts): shard_mesh_fn=lambda fqn, param: mesh['dp'] if 'experts' in fqn else None"
        )
    modules: Sequence[Any] = module if isinstance(module, list | tuple) else [module]
    for each in modules:
        _check_names(each)
    hybrid = dp_mesh_dims is None and isinstance(mesh, DeviceMesh) and mesh.ndim == 2
    _fully_shard(
        module,
        device_mesh=mesh,
        strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mp_policy,
        cpu_offload=offload_policy,
        ignored_states=None if ignored_params is None else _inside(modules, ignored_params),
        dp_mesh_dims=dp_mesh_dims,
    )
    for each in modules:
        add_methods(each)
    return module


def _inside(modules: Sequence[nn.Module], params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the ``params`` that are in ``modules``: scripts pass the same set to each call."""
    own = {id(p) for module in modules for p in module.parameters()}
    return [p for p in params if id(p) in own]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the unit's parameters for calls of this method, too, as the function in ``torch.distributed.fsdp`` does.

    Example::

        class Encoder(nn.Linear):
            def encode(self, x):
                return self(x).relu()

        encoder = flatshard.fsdp2.fully_shard(Encoder(64, 8))
        flatshard.fsdp2.register_fsdp_forward_method(encoder, "encode")
        encoder.encode(batch).sum().backward()

    Args:
        module: a unit.
        method_name: the method's name. See :func:`flatshard.register_forward_method`, also for what it raises.
    """
    register_forward_method(module, method_name)


def add_methods(module: nn.Module) -> None:
    """Add the methods that clients look for to the instance: ``no_sync``, and the following of ``FSDPModule``.

    ``set_requires_gradient_sync``, ``set_requires_all_reduce``, ``set_is_last_backward``, ``set_reshard_after_forward``,
    ``set_reshard_after_backward``, ``set_gradient_divide_factor``, ``set_modules_to_forward_prefetch``,
    ``set_modules_to_backward_prefetch``, ``unshard``, ``reshard``, ``set_keep_unsharded_storage``,
    ``set_manual_backward_finalization``, ``finalize_backward``, ``set_reduce_scatter_unused_params``, ``reset_iter_state``.
    ``fully_shard`` of this module has done so already.

    Example::

        flatshard.fully_shard(model, policy={Block})
        flatshard.fsdp2.add_methods(model)
        model.set_requires_gradient_sync(True)

    Raises:
        ValueError: ``module`` is not a unit, or its class has an attribute of such a name.
    """
    unit_for(module, "add_methods")
    _check_names(module)
    module.__dict__.update({name: functools.partial(method, module) for name, method in _METHODS.items()})


def _check_names(module: nn.Module) -> None:
    if taken := [name for name in _METHODS if hasattr(type(module), name)]:
        raise ValueError(
            f"{type(module).__name__} has {', '.join(taken)} of its own, which would hide FSDP2's: call "
            "flatshard.fully_shard, and flatshard's functions in place of the methods"
        )


def _no_sync(module: nn.Module) -> AbstractContextManager[None]:
    return grad_sync.no_sync(module)


def _set_requires_gradient_sync(module: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    configure(module, recurse=recurse, gradient_sync=requires_gradient_sync)


def _set_requires_all_reduce(module: nn.Module, requires_all_reduce: bool, *, recurse: bool = True) -> None:
    configure(module, recurse=recurse, all_reduce=requires_all_reduce)


def _set_is_last_backward(module: nn.Module, is_last_backward: bool) -> None:
    """Do nothing: every backward here ends with all its reductions."""


def _set_reshard_after_forward(module: nn.Module, reshard_after_forward: bool, recurse: bool = True) -> None:
    configure(module, recurse=recurse, reshard_after_forward=reshard_after_forward)


def _set_reshard_after_backward(module: nn.Module, reshard_after_backward: bool, *, recurse: bool = True) -> None:
    if not reshard_after_backward:
        raise NotImplementedError(
            "set_reshard_after_backward(False): parameters are always freed after backward. To keep them over several "
            "backwards, run these inside `with flatshard.keep_unsharded(module):`"
        )


def _set_gradient_divide_factor(module: nn.Module, factor: float) -> None:
    configure(module, recurse=False, divide_factor=factor)


def _set_modules_to_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module]) -> None:
    configure(module, forward_prefetch=modules)


def _set_modules_to_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module]) -> None:
    configure(module, backward_prefetch=modules)


def _unshard(module: nn.Module, async_op: bool = False) -> summon.UnshardHandle | None:
    return summon.unshard(module, async_op=async_op)


def _reshard(module: nn.Module) -> None:
    summon.reshard(module, recurse=False)


def _set_keep_unsharded_storage(module: nn.Module, keep: bool, *, recurse: bool = True) -> None:
    configure(module, recurse=recurse, keep_unsharded_storage=keep)


def _set_manual_backward_finalization(module: nn.Module, enabled: bool) -> None:
    configure(module, manual_finalization=enabled)


def _finalize_backward(module: nn.Module, *, async_op: bool = False) -> grad_sync.ReductionHandle | None:
    """End the backwards. As in FSDP2, held gradients are reduced if synchronisation is on now."""
    units = units_in(module, True, "finalize_backward")
    if automatic := [unit.fqn for unit in units if not unit.handle.gradients.defers]:
        raise RuntimeError(
            f"finalize_backward: backwards of units {name_list(automatic, 3)} end by themselves. Call "
            "set_manual_backward_finalization(True) before the backward. To reduce gradients that were accumulated without "
            "synchronisation, call flatshard.reduce_gradients(module)"
        )
    return grad_sync.finalize(units, [unit for unit in units if unit.handle.gradients.reduces], async_op)


def _set_reduce_scatter_unused_params(
    module: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Do nothing: parameters that a rank did not use take part in each reduction here, as zeros."""


def _reset_iter_state(module: nn.Module) -> None:
    """Drop all gradients, as FSDP2 does: those of the failed iteration, and those in ``.grad``."""
    summon.recover(module)
    for unit in units_in(module, True, "reset_iter_state"):
        for flat in unit.handle.flats:
            for param in flat.owners:
                param.grad = None


_METHODS: dict[str, Callable[..., Any]] = {
    method.__name__.removeprefix("_"): method
    for method in (
        _no_sync,
        _set_requires_gradient_sync,
        _set_requires_all_reduce,
        _set_is_last_backward,
        _set_reshard_after_forward,
        _set_reshard_after_backward,
        _set_gradient_divide_factor,
        _set_modules_to_forward_prefetch,
        _set_modules_to_backward_prefetch,
        _unshard,
        _reshard,
        _set_keep_unsharded_storage,
        _set_manual_backward_finalization,
        _finalize_backward,
        _set_reduce_scatter_unused_params,
        _reset_iter_state,
    )
}
