"""torchtitan: a ``parallelize_fn`` for its decoders, and its ``CheckpointManager`` with Hugging Face's format.

>>> spec = dataclasses.replace(spec, parallelize_fn=parallelize)

Its optimizer container, learning rate schedulers, clipping and checkpoints in torch's format need no adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.models.common.attention import FusedQKVLinear

import flatshard
from flatshard.checkpoint import ShardedValue

__all__ = ["FlatshardCheckpointManager", "parallelize"]


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
    **shard_options: Any,
) -> nn.Module:
    """Apply activation checkpointing, compile, then :func:`flatshard.fully_shard`: the ``parallelize_fn`` of a ``ModelSpec``.

    Each transformer block is a unit, and so are the embeddings and the head, which torchtitan's chunked losses call alone.
    Tensor and expert parallelism come first, as in torchtitan; experts are sharded over ``efsdp``.
    As under torchtitan's FSDP, gradients are summed: the loss is divided by the number of tokens on all ranks. A fused weight
    of queries, keys and values stays one in state dicts, as a rank's shard of it can't be split.

    Args:
        model: a decoder, with ``tok_embeddings``, ``layers`` and ``lm_head``. On meta as torchtitan builds it, or not.
        shard_options: more arguments of ``fully_shard``, given by ``functools.partial``.

    Raises:
        NotImplementedError: context or pipeline parallelism is asked for; tensor parallelism in a model with experts; or
            either of tensor and expert parallelism without ``partial_dtensor``.
    """
    for name in ("cp", "pp"):
        if getattr(parallel_dims, f"{name}_enabled"):
            raise NotImplementedError(
                f"parallelize: {name} > 1; flatshard's parallelize_fn has data, tensor and expert parallelism only"
            )
    divides = parallel_dims.tp_enabled or parallel_dims.ep_enabled
    if divides and parallel_dims.spmd_backend != "partial_dtensor":
        raise NotImplementedError(
            f"parallelize: tensor and expert parallelism need DTensors, but spmd_backend is {parallel_dims.spmd_backend!r}: "
            'pass ParallelismConfig(spmd_backend="partial_dtensor", ...)'
        )
    if parallel_dims.tp_enabled and any(
        getattr(block, "moe_enabled", False) for block in model.get_submodule("layers").children()
    ):
        raise NotImplementedError(
            "parallelize: tp > 1 in a model with experts was not compared with one process: use ep"
        )
    if divides:
        decoder: Any = model
        decoder.parallelize(parallel_dims)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    for _, module in _fused(model):
        for key, hook in list(module._state_dict_hooks.items()):
            if hook is FusedQKVLinear._split_qkv_on_save:
                del module._state_dict_hooks[key]
    hybrid = parallel_dims.dp_replicate_enabled
    dimension = "fsdp" if parallel_dims.spmd_backend == "partial_dtensor" else "dp_shard"
    options: dict[str, Any] = {
        "device_mesh": parallel_dims.get_mesh(["dp_replicate", dimension] if hybrid else dimension),
        "strategy": flatshard.ShardingStrategy.HYBRID_SHARD if hybrid else flatshard.ShardingStrategy.FULL_SHARD,
        "mixed_precision": flatshard.MixedPrecision(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
        "cpu_offload": training.enable_cpu_offload,
        **shard_options,
    }
    OptimizersContainer.works_on_shards = True  # the optimizers inside are checked themselves
    if parallel_dims.ep_enabled:
        own = parallel_dims.get_mesh(["dp_replicate", "efsdp"] if hybrid else "efsdp")
        options["shard_mesh_fn"] = lambda fqn, param: own if _is_expert(param) else None
        utils._clip_grad_norm_with_ep = _clip_with_experts
    reshard = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, pp_enabled=False)
    ends = [getattr(model, name, None) for name in ("tok_embeddings", "lm_head")]
    held = [{id(p) for p in end.parameters()} for end in ends if end is not None]
    alone = [] if len(held) == 2 and held[0] & held[1] else ends  # tied weights are the outermost unit's
    for unit in (*alone, *model.get_submodule("layers").children()):
        if unit is not None:
            flatshard.fully_shard(unit, reshard_after_forward=reshard, **options)
    flatshard.fully_shard(model, **options)
    flatshard.configure(model, divide_factor=1.0)
    return model


def _is_expert(param: nn.Parameter) -> bool:
    """Return whether the ranks of ``ep`` divide ``param``."""
    return isinstance(param, DTensor) and "ep" in (param.device_mesh.mesh_dim_names or ())


_clip_dtensors = utils._clip_grad_norm_with_ep


def _clip_with_experts(parameters: Any, max_norm: float, *options: Any) -> torch.Tensor:
    """Clip as torchtitan with expert parallelism, which takes all parameters for DTensors. Sharded ones know their ranks."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(isinstance(param, DTensor) for param in parameters):
        return _clip_dtensors(parameters, max_norm, *options)  # type: ignore[no-any-return]
    norm_type, error_if_nonfinite, foreach, _ = options
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _fused(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.", m) for name, m in model.named_modules() if isinstance(m, FusedQKVLinear)]


class _Model(ModelWrapper):
    """A model wrapper without torchtitan's cache of values, as sharded values share the parameters' memory."""

    def state_dict(self) -> dict[str, Any]:
        """Return sharded values."""
        return self._get_state_dict()  # type: ignore[no-any-return]


class FlatshardCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager for sharded models: Hugging Face's format is made of full values.

    ``to_hf`` of a state dict adapter permutes rows of matrices, which a shard of a matrix can't do. So values are gathered
    one at a time, and rank 0 writes them; to read them, each rank holds the full model on CPU. torch's format is as before,
    without either.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of the manager, as torchtitan has them."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], **kwargs: Any) -> None:
        super().__init__(config, model_parts=model_parts, **kwargs)
        if self.enable:
            self.states[MODEL] = _Model(model_parts)

    @torch.no_grad()
    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: Any, **kwargs: Any) -> Any:
        """Save ``state_dict``; called by ``save``."""
        if not kwargs.get("to_hf"):
            return super().dcp_save(state_dict, checkpoint_id, async_mode, **kwargs)
        first = dist.get_rank() == 0
        whole = {}
        for name, value in state_dict.items():
            gathered = value.full_tensor() if isinstance(value, ShardedValue) else value
            if first:
                whole[name] = gathered.cpu()
        if first:
            for prefix, module in self._fused():
                module._split_qkv_on_save(module, whole, prefix, {})
        writer = HuggingFaceStorageWriter(
            path=checkpoint_id, fqn_to_index_mapping=self.sd_adapter.fqn_to_index_mapping, save_distributed=False
        )
        # On all ranks, so that none goes on before the files are there.
        save(self.sd_adapter.to_hf(whole) if first else {}, storage_writer=writer)
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load into ``state_dict``; called by ``load``."""
        if not from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        whole = {name: torch.empty(v.shape, dtype=v.dtype, device="cpu") for name, v in state_dict.items()}
        for prefix, module in self._fused():
            module._split_qkv_on_save(module, whole, prefix, {})
        read = self.sd_adapter.to_hf(whole)
        reader = self.sd_adapter.get_hf_storage_reader(checkpoint_id, from_quantized)
        load(read, storage_reader=reader, no_dist=True)
        self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(read))

    def _fused(self) -> list[tuple[str, Any]]:
        return [found for part in self.states[MODEL].model for found in _fused(part)]
