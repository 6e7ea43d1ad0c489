"""Parameters that are more than one plain tensor: DTensors, quantised weights, other tensor subclasses.

[Note: What is sharded of a tensor subclass]
A flat parameter is plain memory. So of a parameter that is a tensor subclass a plain tensor is taken out and sharded like any
other, and while it is unsharded the module sees the subclass again, built once over that tensor's range of the unsharded
buffer. Between, the registered parameter is a :class:`ShardedParameter` with a part of the plain tensor: a new object, since
Python cannot make a subclass with a layout of its own a plain tensor in place. What the plain tensor is, and how the subclass
is made of it, is a :class:`Wrapping`: see ``tensor_parallel.py`` for DTensors, ``tensor_subclass.py`` for the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from flatshard._runtime import Runtime

_ATTRIBUTE = "_flatshard_wrapping"


class Wrapping(ABC):
    """How the tensor that modules see is made of the plain tensor that is sharded. Immutable."""

    shape: tuple[int, ...]  # of what modules see
    stride: tuple[int, ...]

    @abstractmethod
    def unwrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain tensor of what modules see, without a graph. A plain one itself."""

    @abstractmethod
    def wrap(self, plain: torch.Tensor) -> torch.Tensor:
        """What modules see, over the memory of ``plain``. No communication."""

    @abstractmethod
    def point(self, param: nn.Parameter, plain: torch.Tensor) -> None:
        """Make ``param`` what modules see over the memory of ``plain``, which may have another dtype or device than before.

        Raises:
            RuntimeError: it cannot be had so.
        """

    @abstractmethod
    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the plain tensor, given that of what modules see."""

    def wrap_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The way back."""
        return grad

    def replicas(self, device: torch.device) -> list[Runtime]:
        """Groups of ranks besides those sharded over that must hold the same plain tensor."""
        return []

    def norm_runtime(self, runtime: Runtime | None, device: torch.device) -> Runtime | None:
        """The ranks that hold the parts of a gradient. ``runtime``: of those that hold parts of the plain tensor."""
        return runtime

    def take_apart(self, param: nn.Parameter) -> nn.Parameter:
        """A new, plain parameter with what is sharded of ``param``, to be registered in its place."""
        with torch.no_grad():
            result = nn.Parameter(self.unwrap(param), param.requires_grad)
            if param.grad is not None:
                result.grad = self.local_gradient(param.grad)
        its_own = self.wrap(result.data).__dict__  # the rest a user has set, or nn.Parameter, which is known by it
        result.__dict__.update({k: v for k, v in param.__dict__.items() if k not in its_own})
        remember(result, self)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapping:
        return self


def remember(param: torch.Tensor, wrapping: Wrapping) -> None:
    """Have ``param`` known as made of, or sharded from, what ``wrapping`` makes."""
    param.__dict__[_ATTRIBUTE] = wrapping


def remembered(param: torch.Tensor) -> Wrapping | None:
    """What was said of ``param`` to ``remember``."""
    found: Wrapping | None = param.__dict__.get(_ATTRIBUTE)
    return found
