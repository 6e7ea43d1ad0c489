"""Lightning: a ``Strategy`` for its ``Trainer``, registered as ``"flatshard"``, and a ``parallelize_fn`` for its Fabric.

>>> trainer = Trainer(strategy=FlatshardStrategy(policy={Block}))
>>> fabric = Fabric(strategy=ModelParallelStrategy(parallelize_fn({Block}), data_parallel_size=8, tensor_parallel_size=1))
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import ModelSummary, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities import model_summary as summaries
from torch import nn

import flatshard
from flatshard.checkpoint import full_state_dict, load_optim_state_dict, optim_state_dict
from flatshard.integrations.state import whole_optimizer_state

__all__ = ["FlatshardStrategy", "parallelize_fn"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class FlatshardStrategy(DDPStrategy):
    """Trains a ``LightningModule`` sharded by :func:`flatshard.fully_shard`, which is called after ``configure_model``.

    Processes are started and connected as by Lightning's ``DDPStrategy``. Clipping, accumulation, precision plugins and
    ``sync_batchnorm`` work as with it, and its summary counts full parameters (by the callback's ``_summary``). Each step
    method of the module is a forward of it, so it may use any parameter. Under manual optimization it is not, as the step
    itself steps the optimizer: there, call ``self(...)``, or networks that are units (``policy={Generator, Critic}``).

    Args:
        policy: which modules are units; see :func:`flatshard.fully_shard`. ``configure_model`` may shard modules itself.
        state_dict_type: ``"full"``: a checkpoint is one file, as without sharding, gathered and written by rank 0, which any
            strategy opens. ``"sharded"``: a directory, as of :func:`flatshard.save_checkpoint`, to which each rank writes
            its shards. Both are loaded by any number of ranks, whichever is set here.
        shard_options: more arguments of ``fully_shard``. Initial values are rank 0's, as under ``DDPStrategy``, unless
            ``sync_module_states`` is False.
        options: arguments of ``DDPStrategy``, but those of ``DistributedDataParallel``.
    """

    strategy_name = "flatshard"

    def __init__(
        self,
        policy: Any = None,
        *,
        state_dict_type: Literal["full", "sharded"] = "full",
        shard_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type must be 'full' or 'sharded', got {state_dict_type!r}")
        super().__init__(**options)
        if self._ddp_kwargs or self._ddp_comm_hook or self._model_averaging_period:
            wrong = [*self._ddp_kwargs, *(n for n in ("ddp_comm_hook", "model_averaging_period") if options.get(n))]
            raise TypeError(
                f"FlatshardStrategy has no {', '.join(wrong)}; arguments of fully_shard go into shard_options="
            )
        self._shard_options = {"policy": policy, "sync_module_states": True, **(shard_options or {})}
        self._sharded_files = state_dict_type == "sharded"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name with Lightning's registry. The names of its own classes stay."""
        strategy_registry.register(cls.strategy_name, cls, description="Parameters, gradients, optimizer state sharded")

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded into a model that is sharded already."""
        return True

    def setup(self, trainer: Any) -> None:
        """Shard the model, in ``trainer.validate`` too, and build the optimizers over its parameters."""
        assert self.accelerator is not None
        _refuse_averages(trainer.callbacks)
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        module: Any = self.lightning_module
        if fitting and self._layer_sync:
            module = self._layer_sync.apply(module)
        module = self.precision_plugin.convert_module(module)
        for callback in trainer.callbacks:
            if isinstance(callback, ModelSummary):
                callback._summary = functools.partial(_summary, callback)
        if not _is_unit(module):
            flatshard.fully_shard(module, **{"device_id": self._device_to_shard_on(), **self._shard_options})
        self.model = module
        self.model_to_device()
        if module.automatic_optimization:
            flatshard.register_forward_method(module, [n for n in _STEPS if hasattr(module, n)])
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _device_to_shard_on(self) -> torch.device | None:
        return None if self.root_device.type == "cpu" else self.root_device

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Hold gradients of all microbatches but the last, for which Lightning does not enter it."""
        with flatshard.no_sync(self.model):
            yield

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return full tensors on rank 0, or with ``"sharded"`` each rank's shards."""
        return self.model.state_dict() if self._sharded_files else full_state_dict(self.model, rank0_only=True)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return full tensors on rank 0, by number as of the plain model, or with ``"sharded"`` shards, by name."""
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._sharded_files:
            return optim_state_dict(self.model, optimizer)
        return whole_optimizer_state(self.model, optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file from rank 0, or a directory from all ranks."""
        if not self._sharded_files:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("with state_dict_type='sharded' no CheckpointIO is used, and there are no storage_options")
        optimizers = checkpoint.pop("optimizer_states", None)
        state: dict[str, Any] = {"model": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": saved for i, saved in enumerate(optimizers or ())}
        rest = io.BytesIO()
        torch.save(
            checkpoint if optimizers is None else checkpoint | {"optimizer_states": [{}] * len(optimizers)}, rest
        )
        path = self.broadcast(filepath)
        flatshard.save_checkpoint(path, state | {"lightning": rest.getvalue().hex()}, overwrite=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizers of a directory at once. Those of a file are loaded by the methods below."""
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            return super().load_checkpoint(path, weights_only)  # type: ignore[no-any-return]
        found = flatshard.load_checkpoint(path, {"lightning": ""})["lightning"]
        loaded: dict[str, Any] = torch.load(io.BytesIO(bytes.fromhex(found)), weights_only=weights_only)
        state: dict[str, Any] = {"model": self.model}
        if "optimizer_states" in loaded:
            state |= {f"optimizer_{i}": optimizer for i, optimizer in enumerate(self.optimizers)}
        flatshard.load_checkpoint(path, state, strict=self.lightning_module.strict_loading)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shards of full values."""
        if "state_dict" in checkpoint:  # else it was a directory
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of full values."""
        if "state_dict" in checkpoint:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_optim_state_dict(self.model, optimizer, state)


StrategyRegistry.register(
    FlatshardStrategy.strategy_name, FlatshardStrategy, description="Parameters, gradients and optimizer state sharded"
)


class _Summary(summaries.ModelSummary):
    """A summary that counts full parameters. Lightning has such a class for DeepSpeed, and asks by that strategy's name."""

    @property
    def total_parameters(self) -> int:
        return flatshard.tensors.num_parameters(self._model)

    @property
    def trainable_parameters(self) -> int:
        return flatshard.tensors.num_parameters(self._model, trainable_only=True)

    @property
    def param_nums(self) -> list[int]:
        return [flatshard.tensors.num_parameters(layer._module) for layer in self._layer_summary.values()]


def _refuse_averages(callbacks: Iterable[Any]) -> None:
    """Raise for callbacks that average full parameters: they copy the model before it is sharded."""
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise TypeError(
                f"{type(callback).__name__} copies the model before FlatshardStrategy shards it, so that its parameters "
                "have other shapes. Average each rank's shards in a callback of your own: in on_fit_start "
                "`averages = [p.detach().clone() for p in pl_module.parameters()]`, in on_train_batch_end "
                "`average.lerp_(p.detach(), 1 - decay)` for each, and at the end `p.data.copy_(average)`"
            )


def _summary(callback: ModelSummary, trainer: Any, module: nn.Module) -> summaries.ModelSummary:
    return _Summary(module, max_depth=callback._max_depth)


def parallelize_fn(policy: Any = None, **shard_options: Any) -> Callable[[nn.Module, Any], nn.Module]:
    """Return a ``parallelize_fn`` for Fabric's ``ModelParallelStrategy`` that shards over the mesh's ``"data_parallel"``.

    ``no_backward_sync`` changes no result, and saves no communication: use :func:`flatshard.no_sync`. ``fabric.save`` looks
    for DTensors. Here, ``flatshard.save_checkpoint(path, {"model": model.module, "optimizer": optimizer.optimizer})``.
    """

    def shard(module: nn.Module, device_mesh: Any) -> nn.Module:
        options = {"device_mesh": device_mesh["data_parallel"], "sync_module_states": True, **shard_options}
        return flatshard.fully_shard(module, policy=policy, **options)

    return shard


def _is_unit(module: nn.Module) -> bool:
    try:
        flatshard.register_forward_method(module, ())
    except ValueError:
        return False
    return True
