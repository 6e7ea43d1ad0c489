"""Contenders: the plain model, flatshard, and torch's own kinds of data parallelism, built alike for every benchmark.

Each one gets a plain module and the class of its units, and returns a module that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch import Tensor, nn

import flatshard
from flatshard._comm.backends import by_backend
from flatshard._comm.runtime import Peers
from flatshard.comm import DefaultCollectives


@dataclass(frozen=True)
class Setting:
    """Options of a contender and its step that differ from the defaults."""

    unit: type[nn.Module]
    """Class of the units. The rest of the model is one more unit."""
    bf16: bool = False
    """Whether to compute in bfloat16, with parameters and reductions in float32. The plain model is all bfloat16."""
    prefetch: bool = True
    """Whether to gather a unit in backward while the one before it computes, as all do by default."""
    microbatches: int = 1
    reduced: bool = True
    """Whether to reduce each microbatch, or only the last."""
    collectives: Any = None
    """Argument of flatshard."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of flatshard."""
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


def as_over_nccl(group: dist.ProcessGroup, device: torch.device) -> DefaultCollectives:
    """Return flatshard's collectives for NCCL, even over the fake group, which has others."""
    return DefaultCollectives(group)


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
    """Shard by FSDP1. If ``flat``, the optimizer has one parameter per unit (``use_orig_params=False``)."""
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
    """Replicate by DDP, which has no option for bf16: autocast computes in it, and casts each weight at its use."""
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
"""Contenders that shard as flatshard does."""


def build(name: str, model: nn.Module, setting: Setting) -> nn.Module:
    """Prepare ``model`` for training in the contender's way."""
    return CONTENDERS[name](model, setting)


def numel(config: GPTConfig) -> int:
    """Return the number of a GPT's parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def mean_logit(logits: Tensor) -> Tensor:
    """Return a loss that costs next to nothing."""
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
        with setting.device if setting.device.type == "cuda" else contextlib.nullcontext():  # a CPU would take minutes
            model = GPT(config)
        self.model: Any = build(name, model.to(setting.device), setting)
        self.tokens = tokens.to(setting.device)
        self.optimizer = optimizer(self.model.parameters())

    def passes(self) -> None:
        """Run a forward and a backward for each microbatch. Gradients stay until the next call."""
        drop_gradients(self.model)
        for number in range(self.setting.microbatches):
            is_held = not self.setting.reduced and number < self.setting.microbatches - 1
            with self._unsynchronised() if is_held else contextlib.nullcontext():
                self.loss(self.model(self.tokens)).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Run a training step."""
        self.passes()
        self.optimizer.step()

    def _unsynchronised(self) -> AbstractContextManager[None]:
        """Keep full gradients on this rank in backwards inside, by the contender's ``no_sync``."""
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
    """Drop gradients without an optimizer's bookkeeping."""
    for parameter in model.parameters():
        parameter.grad = None


_FILLING = {"all_gather_single", "_allgather_base", "allgather", "all_to_all_single", "alltoall_base"}
_FILLING |= {"reduce_scatter_single", "_reduce_scatter_base", "reduce_scatter"}
"""Methods of a process group, of several releases of torch, that fill their first argument."""


@contextlib.contextmanager
def filling_nothing() -> Iterator[None]:
    """Leave out the imitation of other ranks: inside, each collective is one call into the fake group, which fills nothing.

    The fake group cuts an all-gather's output and a reduce-scatter's input into a view for each rank, on the host, and fills
    the output. flatshard fills it by operations of its own. No real backend does. Inside, each contender calls what it calls
    over NCCL. So flatshard's collectives are NCCL's, and it records those that it issues, as it does for real ranks. Models
    are built inside, too.
    """

    def stand_in(group: dist.ProcessGroup, output: Any, *_: Any, **__: Any) -> object:
        while isinstance(output, list):  # FSDP1's on CPU has one view per rank
            output = output[0]
        return group.broadcast(output, 0)

    with contextlib.ExitStack() as stack:
        for name in _FILLING & vars(dist.ProcessGroup).keys():
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, stand_in))
        stack.enter_context(mock.patch.dict(by_backend, {"fake": as_over_nccl}))
        # The order check would compare messages that nobody has sent. Over NCCL it is over after the first passes.
        stack.enter_context(mock.patch.object(Peers, "make_monitor", None))
        yield
