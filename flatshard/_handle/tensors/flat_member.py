"""A single gradient for a flat parameter, and the parameters that show slices of it: after ``flat_parameters``.

[Note: Slices of a flat gradient]
In FSDP1 modules have flat parameters, and ``model.zero_grad()`` clears their gradients. Here modules have the single
parameters. So their ``.grad`` is a slice of the flat gradient: a view that each read makes. Setting None clears the slice,
and when all slices are cleared the flat gradient becomes None. A step makes no such views: optimizers of flat parameters
read none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatshard._handle.layout import ShardSlice
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.sharded_gradient import mark
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, flat_param_of


class FlatGrad:
    """The gradient of ``param``, a parameter over a shard of which ``members`` have ``slices``."""

    def __init__(
        self, param: ShardedParameter, members: Sequence[ShardedParameter], slices: Sequence[ShardSlice]
    ) -> None:
        self.param = param
        self._members, self._slices = members, slices
        self._cleared: set[int] = set()  # members whose slices were cleared since the last backward

    def add(self, grad: torch.Tensor) -> None:
        """Set or add to the gradient, after a backward."""
        self._cleared.clear()
        if self.param.grad is None:
            self.param.grad = grad
        else:
            self.param.grad.add_(grad)

    def slices(self) -> list[torch.Tensor | None]:
        """Return each member's slice: views, plain. None if there is no gradient."""
        return [self._view(index) for index in range(len(self._members))]

    def _view(self, index: int) -> torch.Tensor | None:
        grad, place = self.param.grad, self._slices[index]
        if grad is None:
            return None
        with torch.no_grad(), plainly():
            return self._members[index]._flatshard_info.shaped(grad[place.start : place.stop])

    def get(self, index: int) -> torch.Tensor | None:
        """Return a member's slice as its ``.grad``: a view, or None if there is no gradient."""
        if (view := self._view(index)) is not None:
            mark(view, self._members[index]._flatshard_info)
        return view

    def set(self, index: int, grad: torch.Tensor | None) -> None:
        """Copy ``grad`` into a member's slice, or clear it. The gradient becomes None when all slices are cleared.

        Raises:
            RuntimeError: ``grad`` has another shape.
        """
        member, view = self._members[index], self.get(index)
        if grad is None:
            self._cleared.add(index)
            if len(self._cleared) == len(self._members):
                self.param.grad = None
            elif view is not None:
                view.zero_()
            return
        if grad.shape != member.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} for {member._flatshard_info.fqn!r}, of which this rank has a shard "
                f"of shape {tuple(member.shape)}"
            )
        if view is None:
            self.param.grad = torch.zeros_like(self.param.detach(), dtype=self.param.grad_dtype or grad.dtype)
            view = self.get(index)
            assert view is not None
        self._cleared.discard(index)
        with torch.no_grad():
            view.copy_(grad)


class FlatMember(ShardedParameter):
    """A parameter whose ``.grad`` is a slice of a flat gradient. [Note: Slices of a flat gradient]"""

    def _get_grad(self) -> torch.Tensor | None:
        flat: Any = flat_param_of(self)
        found: torch.Tensor | None = flat.flat_grad.get(flat.index_of(self))
        return found

    def _set_grad(self, grad: torch.Tensor | None) -> None:
        flat: Any = flat_param_of(self)
        flat.flat_grad.set(flat.index_of(self), grad)

    def _del_grad(self) -> None:
        self._set_grad(None)

    grad = property(_get_grad, _set_grad, _del_grad)
