"""Who is compared: the plain model, flatshard, and torch's own ways of data parallelism, built alike for every benchmark.

All take a plain module and the class of its units, and give a module that trains. Where a setting is not to be had by a
contender's public interface, :class:`Unavailable` says so, and stands in the table.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import flatshard


class Unavailable(Exception):
    """A contender has no such setting, or is not installed: why."""


@dataclass(frozen=True)
class Setting:
    """What is asked of a contender beyond its defaults."""

    unit: type[nn.Module]
    """Every module of this class is a unit, and the rest of the model one more."""
    bf16: bool = False
    """Parameters kept and gradients reduced in float32, computed with in bfloat16. Plain: all of it in bfloat16."""
    prefetch: bool = True
    """Whether a unit is gathered in backward while the one before it computes: the default of all."""
    microbatches: int = 1
    """Of a step: see :func:`passes`."""
    reduced: bool = True
    """Whether each microbatch is reduced, or the last alone."""
    group: dist.ProcessGroup | None = None
    """None: the default one."""
    collectives: Any = None
    """Flatshard's own argument."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of flatshard's own."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)


def plain(model: nn.Module, setting: Setting) -> nn.Module:
    return model.bfloat16() if setting.bf16 else model


def ours(model: nn.Module, setting: Setting) -> nn.Module:
    options: dict[str, Any] = {"collectives": setting.collectives, "process_group": setting.group}
    if setting.bf16:
        options["mixed_precision"] = flatshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    if not setting.prefetch:
        options |= {"backward_prefetch": None, "forward_prefetch": False}
    return flatshard.fully_shard(model, policy={setting.unit}, **options, **setting.options)


def fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {}
    if setting.group is not None:
        options["mesh"] = DeviceMesh.from_group(setting.group, setting.device.type)
    if setting.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    units = [module for module in model.modules() if isinstance(module, setting.unit)]
    sharded = [fully_shard(module, **options) for module in [*units, model]]
    if not setting.prefetch:
        for module in sharded:
            module.set_modules_to_backward_prefetch([module])  # itself: an empty list would mean the default order
    return model


def fsdp1(flat: bool) -> Callable[[nn.Module, Setting], nn.Module]:
    """``flat``: one parameter a unit for the optimizer (``use_orig_params=False``)."""

    def make(model: nn.Module, setting: Setting) -> nn.Module:
        from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if setting.bf16 else None
        return FullyShardedDataParallel(
            model,
            process_group=setting.group,
            auto_wrap_policy=ModuleWrapPolicy({setting.unit}),
            use_orig_params=not flat,
            device_id=setting.device,
            mixed_precision=precision,
            backward_prefetch=BackwardPrefetch.BACKWARD_PRE if setting.prefetch else None,
        )

    return make


def ddp(model: nn.Module, setting: Setting) -> nn.Module:
    if setting.bf16:
        raise Unavailable("no public setting")
    return nn.parallel.DistributedDataParallel(model, process_group=setting.group)


FSDP1_FLAT, ONE_CALL = "FSDP1 flat", "FSDP1 flat, one call"

CONTENDERS: dict[str, Callable[[nn.Module, Setting], nn.Module]] = {
    "plain": plain,
    "flatshard": ours,
    "FSDP2": fsdp2,
    "FSDP1": fsdp1(flat=False),
    FSDP1_FLAT: fsdp1(flat=True),
    ONE_CALL: fsdp1(flat=True),
    "DDP": ddp,
}
"""``FSDP1 flat, one call`` is to be run within :func:`as_on_gpus`."""

SHARDED = ["flatshard", "FSDP2", "FSDP1", FSDP1_FLAT]
"""Those that do what flatshard does."""


def build(name: str, model: nn.Module, setting: Setting) -> nn.Module:
    """``model``, to be trained the contender's way.

    Raises:
        Unavailable: it has no such setting.
    """
    return CONTENDERS[name](model, setting)


@contextlib.contextmanager
def unsynchronised(name: str, model: Any) -> Iterator[None]:
    """Backwards inside keep their gradients on this rank, in whole: the contender's ``no_sync``."""
    if name == "flatshard":
        with flatshard.no_sync(model):
            yield
    elif name == "FSDP2":
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif name == "plain":
        yield
    else:
        with model.no_sync():
            yield


def passes(name: str, model: nn.Module, setting: Setting, loss: Callable[[], Tensor]) -> None:
    """A forward, which computes the ``loss``, and a backward of each microbatch."""
    for number in range(setting.microbatches):
        held = not setting.reduced and number < setting.microbatches - 1
        with unsynchronised(name, model) if held else contextlib.nullcontext():
            loss().backward()  # type: ignore[no-untyped-call]


_TENSOR_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
)
"""By either name: torch 2.13 has renamed some."""


@contextlib.contextmanager
def filling_nothing(before: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Over the fake group, a collective of ``torch.distributed`` on tensors is one call into the group, and fills nothing.

    The fake group itself fills the output of an all-gather rank by rank, which no real backend does. ``before`` is called
    before each.
    """

    def stand_in(collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            before()
            work = (given.get("group") or dist.group.WORLD).broadcast(next(iter(given.values())), 0)
            return work if given.get("async_op") else work.wait() and None

        return call

    with contextlib.ExitStack() as stack:
        for collective in _TENSOR_COLLECTIVES:
            if hasattr(dist, collective):
                stack.enter_context(mock.patch.object(dist, collective, stand_in(getattr(dist, collective))))
        yield


@contextlib.contextmanager
def nothing_moves(name: str) -> Iterator[None]:
    """Over the fake group, a peer's collective fills nothing, and is one call into the group, as flatshard's is there.

    FSDP1 on CPU gathers into a list of one view a rank, which stays; under its name with ``one call`` it gathers into one
    tensor.
    """
    if name in ("plain", "flatshard"):
        yield
        return
    with filling_nothing(), as_on_gpus() if name == ONE_CALL else contextlib.nullcontext():
        yield


def drop_gradients(model: nn.Module) -> None:
    """``zero_grad`` without an optimizer's bookkeeping."""
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """FSDP1 gathers by one call into one tensor, as it does on GPUs, and not into a list of views, as it does on CPU."""

    def all_gather(outputs: list[Tensor], shard: Tensor, group: Any = None, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(outputs[0]._base, shard, group=group, async_op=async_op)

    with mock.patch.object(dist, "all_gather", all_gather):
        yield
