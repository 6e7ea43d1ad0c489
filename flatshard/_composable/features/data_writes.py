"""Keeps what a forward writes to its own parameters through ``.data``: ``p.data.mul_(m)``, as momentum encoders do.

[Note: Written through .data]
At the end of a forward its unit writes back what the forward changed of its own parameters. It looks at autograd's version
counters for that. But ``.data`` of a plain tensor has a counter of its own, so such a write cannot be seen, and would be
lost when the unit is resharded. A class of its own for unsharded parameters could note who asks for ``.data``; it would cost
half a microsecond for each use of a parameter, as torch then looks for ``__torch_function__``. So ``nn.Parameter`` itself
gets the property, at the first ``fully_shard``, and only a read of ``.data`` costs more. A unit of which ``.data`` was read
is written back.

Not seen: a write to memory that an earlier forward has stored, a write by code outside of torch, one to a tensor subclass,
and one inside a compiled function.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from flatshard._comm.runtime import Runtime
from flatshard._composable.extensions import Extension
from flatshard._composable.state import owner_of
from flatshard._composable.unit_config import UnitConfig

_Tensor: Any = torch.Tensor  # whose `data` a library may replace, too


def _get(param: nn.Parameter) -> torch.Tensor:
    if (unit := owner_of(param)) is not None:
        for flat in unit.handle.flats:
            flat.unsharded.assume_changed()
    data: torch.Tensor = _Tensor.data.__get__(param)
    return data


def _set(param: nn.Parameter, value: torch.Tensor) -> None:
    _Tensor.data.__set__(param, value)


class DataWrites(Extension):
    """Records reads of ``.data``. [Note: Written through .data]"""

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        if "data" not in vars(nn.Parameter):
            nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]
