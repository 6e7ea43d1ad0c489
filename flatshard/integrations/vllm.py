"""vLLM's weight transfer: patches in the coordinates of the checkpoint, and a source that its trainers gather from.

vLLM maps names, cuts for tensor parallelism and fuses by its own ``load_weights``. Its backend ``sparse_nccl`` takes the
changed elements of a parameter, and the other backends full tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch
from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch

from flatshard.checkpoint import iter_full_params
from flatshard.tensors import full_shape, shard_info
from flatshard.weights import Patch, decode_patches


def sparse_weight_patches(
    messages: Iterable[bytes], *, device: torch.device | str | None = None
) -> list[SparseWeightPatch]:
    """Return a step's changes for ``send_weights`` of vLLM's ``SparseNCCLTrainerWeightTransferEngine``.

    Args:
        messages: of ``flatshard.weights.PatchSource.encode_changes()``, one of each rank. Only the process that calls
            ``send_weights`` needs them.
        device: the device of the engine's communicator. Default: CPU.

    Raises:
        ValueError: the messages are damaged or incomplete, or vLLM cannot take a parameter, which the error names.
    """
    return [
        SparseWeightPatch(patch.name, patch.indices.to(device), patch.values.to(device), patch.shape)
        for patch in _checked(decode_patches(messages))
    ]


def checkpoint_weight_patches(
    messages: Iterable[bytes], *, device: torch.device | str | None = None
) -> list[CheckpointWeightPatch]:
    """Return a step's changes for vLLM's ``load_checkpoint_weight_patches``, in a worker that gets the messages itself.

    A message has a third of the bytes of these patches. Arguments and errors are those of :func:`sparse_weight_patches`.
    """
    return [
        CheckpointWeightPatch(p.name, p.shape, p.values.dtype, p.values.to(device), p.indices.to(device))
        for p in _checked(decode_patches(messages))
    ]


def _checked(patches: list[Patch]) -> list[Patch]:
    """Return the patches if vLLM can take them: in these, NaN stands for an element that has not changed."""
    for patch in patches:
        why = None
        if not patch.values.dtype.is_floating_point:
            why = f"is {patch.values.dtype}, and vLLM patches floating-point parameters only"
        elif patch.indices.dtype is not torch.int32:
            why = f"has {patch.shape} elements, more than the int32 indices of vLLM count"
        elif patch.values.isnan().any():
            why = "has become NaN, which vLLM's patches cannot say"
        if why is not None:
            raise ValueError(
                f"vLLM: {patch.name!r} {why}: bring the engine full weights, by ModelSource or sync_weights"
            )
    return patches


class ModelSource(WeightSource):
    """The full parameters of a sharded model as a vLLM ``WeightSource``, gathered unit by unit.

    It goes to ``WeightTransferTrainerFactory.trainer_init(..., source=)``. All ranks iterate it, as vLLM's trainers do.
    Tied parameters come by their first name. vLLM's ``ModuleSource`` would gather each parameter by itself.

    Args:
        model: a sharded model.
        dtype: the dtype of floating-point parameters. Default: each in its own dtype.
    """

    def __init__(self, model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._model, self._dtype = model, dtype

    @functools.cached_property
    def metadata(self) -> list[ParamMeta]:
        """Name, dtype and shape of each parameter, in the order of ``iter_full``. No communication."""
        cast = self._dtype
        return [
            ParamMeta(name, cast if cast is not None and p.is_floating_point() else p.dtype, tuple(full_shape(p)))
            for name, p in self._model.named_parameters()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, full tensor) in the order of ``metadata``. All ranks must iterate to the end.

        Units are gathered in their own order. A tensor that comes before its turn is held until then: of a model whose layers
        are units, those are the parameters outside of the layers that come after them.
        """
        params = dict(self._model.named_parameters())
        sharded = {name for name, param in params.items() if shard_info(param) is not None}
        gathered = iter_full_params(self._model, names=sharded, dtype=self._dtype)
        early: dict[str, torch.Tensor] = {}
        for name, param in params.items():
            if name not in sharded:
                cast = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
                yield name, param.detach().to(cast)
                continue
            while name not in early:
                found, tensor = next(gathered)
                early[found] = tensor
            yield name, early.pop(name)
        for _ in gathered:
            raise AssertionError("each parameter has had its turn")
