"""A model of nothing but host time: units of twelve small parameters, whose arithmetic is negligible."""

from __future__ import annotations

from collections.abc import Callable

import torch
from contenders import drop_gradients
from suite import seconds
from torch import Tensor, nn

PARAMS = 12
WIDTH = 16


class Unit(nn.Module):
    """Twelve bias-free linears in a row: (batch, 16) -> (batch, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PARAMS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Units(nn.Module):
    """``count`` of them in a row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def timed_step(model: nn.Module, dtype: torch.dtype = torch.float32) -> Callable[[], float]:
    """A forward and a backward, which returns its seconds; gradients are dropped outside of them."""
    x = torch.ones(2, WIDTH, dtype=dtype)

    def step() -> float:
        elapsed = seconds(lambda: model(x).sum().backward())
        drop_gradients(model)
        return elapsed

    return step
