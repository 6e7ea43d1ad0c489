"""The single parameters of a flat parameter that gets their gradients: since ``flat_parameters`` was called.

[Note: A part of a flat gradient]
Where modules have flat parameters, as of FSDP1, ``model.zero_grad()`` clears their gradients. Here modules have the single
parameters. So their ``.grad`` is their part of the flat gradient: a view that a read makes. None clears the part, and the
flat gradient is None when all parts are. A step makes no such views, and optimizers of flat parameters read none.
"""

from __future__ import annotations

from typing import Any

import torch

from flatshard._handle.tensors.sharded_parameter import ShardedParameter, home_of


class FlatMember(ShardedParameter):
    """[Note: A part of a flat gradient]"""

    def _get_grad(self) -> torch.Tensor | None:
        home: Any = home_of(self)
        found: torch.Tensor | None = home.gradients.part(home.index_of(self))
        return found

    def _set_grad(self, grad: torch.Tensor | None) -> None:
        home: Any = home_of(self)
        home.gradients.set_part(home.index_of(self), grad)

    def _del_grad(self) -> None:
        self._set_grad(None)

    grad = property(_get_grad, _set_grad, _del_grad)
