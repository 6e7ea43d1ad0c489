"""accelerate: :func:`prepare` in the place of ``accelerator.prepare``.

``accelerator.prepare`` would put DistributedDataParallel around a sharded model. All else of it stays: autocast, the loss
scale, data loaders, schedulers. Attributes of *instances* are set, no class is touched:

- ``model.no_sync``, which ``accelerator.accumulate`` and ``accelerator.no_sync`` look up;
- ``model.num_parameters`` of a model of transformers: it counts full parameters, also for what is saved of it; and
  ``model.get_nb_trainable_parameters`` of one of peft;
- ``model.generate`` of a model of transformers: it runs inside ``flatshard.keep_unsharded(model)``;
- ``accelerator.get_state_dict``, which ``save_state`` and ``save_model`` call: full tensors on the ranks that save, ``{}``
  on the others. All ranks must call it;
- ``state_dict`` of the prepared optimizer: the same for its state.

So ``save_state`` writes what one process would, and any number of processes loads it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import Accelerator
from accelerate.utils import MODEL_NAME, SAFE_MODEL_NAME, DistributedType
from torch import nn
from torch.optim import Optimizer

import flatshard
from flatshard.integrations.state import (
    count_whole,
    generate_kept,
    is_sharded,
    load_whole,
    policy_of,
    whole_optimizer_state,
)


def prepare(accelerator: Accelerator, *objects: Any, **sharding: Any) -> Any:
    """Call ``accelerator.prepare(*objects)``, with each model sharded instead of wrapped by DistributedDataParallel.

    Args:
        objects: models, optimizers, data loaders, schedulers. An optimizer may be built before or after.
        sharding: arguments of ``fully_shard``. ``policy``, if left out: the layers that a model of transformers names itself.

    Raises:
        ValueError: the accelerator is set up for another kind of sharding, or an optimizer has no model here.
    """
    _check(accelerator)
    for model in objects:
        if isinstance(model, nn.Module):
            shard(accelerator, model, **sharding)
    prepared = accelerator.prepare(*objects)
    results = prepared if isinstance(prepared, tuple) else (prepared,)
    for given, result in zip(objects, results, strict=True):
        if isinstance(given, Optimizer):
            result.state_dict = functools.partial(_optimizer_state, accelerator, _model_of(accelerator, given), given)
    return prepared


def shard(accelerator: Accelerator, model: nn.Module, **sharding: Any) -> None:
    """Shard ``model``, if it isn't, and register it, so that ``accelerator.prepare`` leaves it as it is."""
    _check(accelerator)
    if not is_sharded(model):
        if accelerator.device_placement and accelerator.device.type != "cpu":
            sharding.setdefault("device_id", accelerator.device)
        if "policy" not in sharding:
            sharding["policy"] = policy_of(model)
        flatshard.fully_shard(model, **sharding)
    accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # autocast, and no wrapper
    model.no_sync = functools.partial(flatshard.no_sync, model)  # type: ignore[assignment]
    count_whole(model)
    generate_kept(model)
    if "get_state_dict" not in vars(accelerator):
        accelerator.get_state_dict = functools.partial(_state_dict, accelerator)
        accelerator.register_load_state_pre_hook(functools.partial(_load, accelerator))


def _check(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"accelerate is set up for {kind.value}, which would shard the model again: leave out its plugin, and launch "
            "with accelerate launch --multi_gpu, or torchrun"
        )
    if torch.distributed.is_initialized() and accelerator.num_processes != torch.distributed.get_world_size():
        raise ValueError(
            f"accelerate counts {accelerator.num_processes} processes, and torch.distributed "
            f"{torch.distributed.get_world_size()}: every rank would take itself for the one that saves. On CPU use "
            "Accelerator(cpu=True), or accelerate launch --cpu"
        )


def _model_of(accelerator: Accelerator, optimizer: Optimizer) -> nn.Module:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in accelerator._models:
        if stepped <= {id(p) for p in model.parameters()}:
            found: nn.Module = model
            return found
    raise ValueError(
        f"{type(optimizer).__name__} steps parameters of none of the prepared models, or of several: hand its model to the "
        "same prepare(accelerator, model, optimizer)"
    )


def _saves(accelerator: Accelerator) -> bool:
    each_node = accelerator.project_configuration.save_on_each_node
    return bool(accelerator.is_local_main_process if each_node else accelerator.is_main_process)


def _state_dict(accelerator: Accelerator, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
    """Return full tensors on the ranks that save, ``{}`` on the others, as ``accelerator.get_state_dict`` does."""
    if not is_sharded(model):
        state: dict[str, Any] = Accelerator.get_state_dict(accelerator, model, unwrap)
        return state
    each_node = accelerator.project_configuration.save_on_each_node
    whole = flatshard.checkpoint.full_state_dict(model, rank0_only=not each_node)
    return whole if _saves(accelerator) else {}


def _optimizer_state(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if not is_sharded(model):
        return optimizer.state_dict()
    return whole_optimizer_state(model, optimizer, rank0_only=not accelerator.project_configuration.save_on_each_node)


def _load(accelerator: Accelerator, models: list[nn.Module], folder: str) -> None:
    """Before ``accelerator.load_state`` loads ``models``, in its place: its own way compares the storages of sharded values.

    The files are those of ``save_accelerator_state``. ``save_state`` returns on other ranks while rank 0 still writes them.
    """
    accelerator.wait_for_everyone()
    for i, model in enumerate(models):
        ending = f"_{i}" if i else ""
        file = Path(folder) / f"{SAFE_MODEL_NAME}{ending}.safetensors"
        if file.exists():
            load_whole(model, safetensors.torch.load_file(file))
        else:
            load_whole(model, torch.load(Path(folder) / f"{MODEL_NAME}{ending}.bin", map_location="cpu", mmap=True))
    models.clear()
