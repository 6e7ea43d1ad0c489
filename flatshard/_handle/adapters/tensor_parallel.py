"""Parameters that are DTensors: tensor parallelism first, then sharding.

``parallelize_module`` makes a parameter a DTensor over the tensor-parallel mesh. Its local tensor is sharded like any other
parameter, over the ranks of the data-parallel group, which hold the same local tensor: see ``wrapping.py``, [Note: What is
sharded of a tensor subclass]. The module sees a DTensor with the original placements. Build the optimizer after
``fully_shard``: the registered parameters are new objects.

[Note: Norms over two meshes]
A gradient whose DTensor is sharded has shards on all ranks of both meshes. A replicated one has equal copies along the
tensor-parallel mesh, and only one copy counts: see ``norm_runtime``. A flat parameter (``flat_parameters``) may contain
parameters of both kinds. So the norm of its gradient is taken over all ranks of both meshes, and of equal copies only that of
the first rank counts: see ``common_runtime``. (The alternative is a flat parameter for each kind. It would cost every unit
one more all-gather and one more reduction, even if no norms of flat parameters are taken.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatshard._comm.composite_groups import ManyGroups
from flatshard._comm.rank_group import RankGroup
from flatshard._comm.runtime import Runtime
from flatshard._handle.adapters.wrapping import Wrapping


@dataclass(frozen=True, slots=True)
class TensorParallel(Wrapping):
    """The wrapping of a DTensor, which is built from its local tensor."""

    mesh: Any  # DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]  # of the DTensor
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorParallel | None:
        """Return the wrapping of a DTensor, or None for any other tensor."""
        if not is_dtensor(tensor):
            return None
        dtensor: Any = tensor
        return cls(dtensor.device_mesh, tuple(dtensor.placements), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of the mesh have different elements."""
        return any(p.is_shard() for p in self.placements)

    @property
    def is_stack(self) -> bool:
        """Whether ranks of the mesh have different matrices of a stack, each in full, such as experts."""
        return len(self.shape) > 2 and all(p.dim == 0 for p in self.placements if p.is_shard())

    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Wrapping``."""
        return local_tensor(tensor).detach()

    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """See ``Wrapping``."""
        from torch.distributed.tensor import DTensor

        result: torch.Tensor = DTensor.from_local(
            plain, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )
        return result

    def point(self, param: nn.Parameter, plain: torch.Tensor) -> None:
        """See ``Wrapping``."""
        given: Any = self.wrap(plain)
        param.data = given
        param._local_tensor, param._spec = given._local_tensor, given._spec  # type: ignore[attr-defined]

    @property
    def adds_gradients(self) -> bool:  # type: ignore[override]
        """See ``Wrapping``. The gradient of a replicated DTensor may be a partial sum."""
        return any(p.is_replicate() and self.mesh.size(i) > 1 for i, p in enumerate(self.placements))

    def local_gradient(self, grad: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Wrapping``. The gradient gets the parameter's placements: a partial sum is reduced over the mesh."""
        dtensor: Any = grad
        if not is_dtensor(grad):
            return grad
        if tuple(dtensor.placements) != self.placements:
            if dtype is not None and any(p.is_partial() for p in dtensor.placements):
                dtensor = dtensor.to(torch.promote_types(dtype, dtensor.dtype))
            dtensor = dtensor.redistribute(placements=self.placements)
        return local_tensor(dtensor)

    def wrap_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """See ``Wrapping``."""
        return self.wrap(grad)

    def replicas(self, device: torch.device) -> list[Runtime]:
        """See ``Wrapping``. One group per mesh dimension with replicas."""
        sizes = [self.mesh.size(i) if p.is_replicate() else 1 for i, p in enumerate(self.placements)]
        return [Runtime.of(self.mesh.get_group(i), device) for i, size in enumerate(sizes) if size > 1]

    def norm_runtime(self, runtime: RankGroup | None, device: torch.device) -> RankGroup | None:
        """See ``Wrapping``."""
        if device.type == "meta":  # in a plan, which has no norms
            return runtime
        sharded = [
            self.mesh.get_group(i) for i, p in enumerate(self.placements) if p.is_shard() and self.mesh.size(i) > 1
        ]
        runtimes = [*([] if runtime is None else [runtime]), *(Runtime.of(group, device) for group in sharded)]
        if len(runtimes) < 2:
            return runtimes[0] if runtimes else None
        return ManyGroups(runtimes)


def common_runtime(runtimes: Sequence[RankGroup | None]) -> tuple[RankGroup | None, list[bool]]:
    """Return a runtime for several tensors, where ``runtimes[i]`` are the ranks that hold shards of tensor ``i``.

    Also returns whether this rank's shard of each tensor counts in a norm over it. [Note: Norms over two meshes]
    """
    parts = [r.groups if isinstance(r, ManyGroups) else () if r is None else (r,) for r in runtimes]
    every = list(dict.fromkeys(itertools.chain(*parts)))
    counts = [all(runtime in own or runtime.rank == 0 for runtime in every) for own in parts]
    return (ManyGroups(every) if len(every) > 1 else every[0] if every else None), counts


def is_dtensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a DTensor. Checked by its slots, because importing the class takes half a second."""
    return hasattr(type(tensor), "_local_tensor")


def is_copy(parallel: TensorParallel | None, beside: TensorParallel | None) -> bool:
    """Return whether a lower tensor-parallel rank holds the same parameter.

    ``beside``: the wrapping of a DTensor in the same flat parameter, if any.

    A plain parameter beside DTensors in a flat parameter is replicated over their mesh. In a flat parameter without DTensors
    all tensor-parallel ranks cut parameters in the same way, so a checkpoint finds that their shards are the same.
    """
    if parallel is None:
        return beside is not None and any(beside.mesh.get_coordinate())
    return any(
        at for at, p in zip(parallel.mesh.get_coordinate(), parallel.placements, strict=True) if not p.is_shard()
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, without a graph, after its collective. Other tensors are returned as is."""
    if not is_dtensor(tensor):
        return tensor
    local: Any = tensor._local_tensor  # type: ignore[attr-defined]
    result: torch.Tensor = local.wait() if hasattr(local, "wait") else local  # an AsyncCollectiveTensor
    return result
