"""Parameters that are not one plain tensor: DTensors, quantised weights, other tensor subclasses.

[Note: What is sharded of a tensor subclass]
A flat parameter is plain memory. So for a parameter that is a tensor subclass, a plain tensor is taken out of it, and sharded
like any other. While the parameter is unsharded, the module sees the subclass again, built once over that tensor's range of
the unsharded buffer. Otherwise the registered parameter is a :class:`ShardedParameter` with a shard of the plain tensor. This
is a new object: Python cannot turn a subclass with a layout of its own into a plain tensor in place. A :class:`Wrapping`
defines the plain tensor, and how the subclass is built from it: see ``tensor_parallel.py`` for DTensors, and
``tensor_subclass.py`` for other subclasses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from flatshard._comm.rank_group import RankGroup
from flatshard._comm.runtime import Runtime
from flatshard._handle.tensors.grad_dtype import hand_on

REMEMBERED = "_flatshard_wrapping"
"""The attribute of a tensor that has the wrapping recorded by ``remember``."""


class Wrapping(ABC):
    """Builds a tensor subclass, which modules see, from the plain tensor that is sharded. Immutable."""

    shape: tuple[int, ...]  # of the subclass
    stride: tuple[int, ...]

    @abstractmethod
    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor inside ``tensor``, without a graph. A plain ``tensor`` is returned as is."""

    @abstractmethod
    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """Build the subclass over the memory of ``plain``. No communication."""

    @abstractmethod
    def point(self, param: nn.Parameter, plain: torch.Tensor) -> None:
        """Make ``param``, a subclass, use the memory of ``plain``, which may have another dtype or device than before.

        Raises:
            RuntimeError: this is not possible.
        """

    adds_gradients = False  # `local_gradient` may add up summands from several ranks

    @abstractmethod
    def local_gradient(self, grad: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Convert the gradient of the subclass to the gradient of the plain tensor.

        ``dtype``: summands from several ranks are added up in it, if it is wider than that of ``grad``.
        """

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Return whether the subclass can be built over a plain tensor that was cast to ``dtype``."""
        return True

    def wrap_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Invert ``local_gradient``."""
        return grad

    def replicas(self, device: torch.device) -> list[Runtime]:
        """Return further groups of ranks that must hold the same plain tensor, beside the group that it is sharded over."""
        return []

    def norm_runtime(self, runtime: RankGroup | None, device: torch.device) -> RankGroup | None:
        """Return the ranks that hold shards of the full gradient. ``runtime``: the ranks with shards of the plain tensor."""
        return runtime

    def take_apart(self, param: nn.Parameter) -> nn.Parameter:
        """Return a new, plain parameter with the plain tensor inside ``param``, to register in place of ``param``."""
        with torch.no_grad():
            result = nn.Parameter(self.unwrap(param), param.requires_grad)
            hand_on(param, result)
            if param.grad is not None:
                result.grad = self.local_gradient(param.grad)
        its_own = self.wrap(result.data).__dict__  # not copied; other attributes are the user's or nn.Parameter's
        result.__dict__.update({k: v for k, v in param.__dict__.items() if k not in its_own})
        remember(result, self)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapping:
        return self


def remember(param: torch.Tensor, wrapping: Wrapping) -> None:
    """Record that ``param`` belongs to ``wrapping``: it was built by it, or is the plain tensor inside."""
    param.__dict__[REMEMBERED] = wrapping
