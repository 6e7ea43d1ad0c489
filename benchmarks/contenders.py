"""Who is compared: the plain model, flatshard, and torch's own ways of data parallelism, built alike for every benchmark.

All take a plain module and the class of its units, and give a module that trains.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn

import flatshard
from flatshard import _torch


@dataclass(frozen=True)
class Setting:
    """What is asked of a contender beyond its defaults, and of its step."""

    unit: type[nn.Module]
    """Every module of this class is a unit, and the rest of the model one more."""
    bf16: bool = False
    """Parameters kept and gradients reduced in float32, computed with in bfloat16. Plain: all of it in bfloat16."""
    prefetch: bool = True
    """Whether a unit is gathered in backward while the one before it computes: the default of all."""
    microbatches: int = 1
    reduced: bool = True
    """Whether each microbatch is reduced, or the last alone."""
    collectives: Any = None
    """Flatshard's own argument."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More of flatshard's own."""
    device: torch.device = torch.device("cpu")  # noqa: RUF009  (immutable)


def plain(model: nn.Module, setting: Setting) -> nn.Module:
    return model.bfloat16() if setting.bf16 else model


def ours(model: nn.Module, setting: Setting) -> nn.Module:
    options: dict[str, Any] = {"policy": {setting.unit}, "collectives": setting.collectives, **setting.options}
    if setting.bf16:
        options["mixed_precision"] = flatshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    if not setting.prefetch:
        options |= {"backward_prefetch": None, "forward_prefetch": False}
    return flatshard.fully_shard(model, **options)


def fsdp2(model: nn.Module, setting: Setting) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if setting.bf16 else {}
    units = [module for module in model.modules() if isinstance(module, setting.unit)]
    sharded = [fully_shard(module, **options) for module in [*units, model]]
    if not setting.prefetch:
        for module in sharded:
            module.set_modules_to_backward_prefetch([module])  # itself: an empty list would mean the default order
    return model


def fsdp1(model: nn.Module, setting: Setting, flat: bool = False) -> nn.Module:
    """``flat``: one parameter a unit for the optimizer (``use_orig_params=False``)."""
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if setting.bf16 else None
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({setting.unit}),
        use_orig_params=not flat,
        device_id=setting.device,
        mixed_precision=precision,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if setting.prefetch else None,
    )


def fsdp1_flat(model: nn.Module, setting: Setting) -> nn.Module:
    return fsdp1(model, setting, flat=True)


def ddp(model: nn.Module, setting: Setting) -> nn.Module:
    """It has no setting for bf16: autocast computes in it, and casts each weight when it is used."""
    if setting.bf16:
        model.forward = torch.autocast(setting.device.type, torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    return nn.parallel.DistributedDataParallel(model)


FSDP1_FLAT = "FSDP1 flat"

CONTENDERS: dict[str, Callable[[nn.Module, Setting], nn.Module]] = {
    "plain": plain,
    "flatshard": ours,
    "FSDP2": fsdp2,
    "FSDP1": fsdp1,
    FSDP1_FLAT: fsdp1_flat,
    "DDP": ddp,
}

SHARDED = ["flatshard", "FSDP2", "FSDP1", FSDP1_FLAT]
"""Those that do what flatshard does."""


def build(name: str, model: nn.Module, setting: Setting) -> nn.Module:
    """``model``, to be trained the contender's way."""
    return CONTENDERS[name](model, setting)


def numel(config: GPTConfig) -> int:
    """Of a GPT's parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def mean_logit(logits: Tensor) -> Tensor:
    """A loss that costs next to nothing."""
    return logits.float().mean()


class Job:
    """A contender that trains a GPT, always on the same batch."""

    def __init__(
        self,
        name: str,
        config: GPTConfig,
        setting: Setting,
        tokens: Tensor,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        loss: Callable[[Tensor], Tensor] = mean_logit,
    ) -> None:
        torch.manual_seed(0)
        self.name, self.setting, self.loss = name, setting, loss
        self.model: Any = build(name, GPT(config).to(setting.device), setting)
        self.tokens = tokens.to(setting.device)
        self.optimizer = optimizer(self.model.parameters())

    def passes(self) -> None:
        """A forward and a backward of each microbatch. The gradients stay until the next ones."""
        drop_gradients(self.model)
        for number in range(self.setting.microbatches):
            is_held = not self.setting.reduced and number < self.setting.microbatches - 1
            with self._unsynchronised() if is_held else contextlib.nullcontext():
                self.loss(self.model(self.tokens)).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Of training."""
        self.passes()
        self.optimizer.step()

    def _unsynchronised(self) -> AbstractContextManager[None]:
        """Backwards inside keep their gradients on this rank, in whole: the contender's ``no_sync``."""
        if self.name == "flatshard":
            return flatshard.no_sync(self.model)
        if self.name == "FSDP2":
            return self._without_gradient_sync()
        return contextlib.nullcontext() if self.name == "plain" else self.model.no_sync()

    @contextlib.contextmanager
    def _without_gradient_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)


def drop_gradients(model: nn.Module) -> None:
    """``zero_grad`` without an optimizer's bookkeeping."""
    for parameter in model.parameters():
        parameter.grad = None


_TENSOR_COLLECTIVES = {
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    _torch.ALL_GATHER,  # which may have another name than above; both are called
    _torch.REDUCE_SCATTER,
}


@contextlib.contextmanager
def filling_nothing() -> Iterator[None]:
    """Over the fake group, a collective of ``torch.distributed`` on tensors is one call into the group, and fills nothing.

    The fake group itself fills the output of an all-gather rank by rank, which no real backend does. (FSDP1 on CPU gathers
    into a list of one view a rank, which stays.)
    """

    def stand_in(collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            work = (given.get("group") or dist.group.WORLD).broadcast(next(iter(given.values())), 0)
            return work if given.get("async_op") else work.wait() and None

        return call

    with contextlib.ExitStack() as stack:
        for collective in _TENSOR_COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, collective, stand_in(getattr(dist, collective))))
        yield
