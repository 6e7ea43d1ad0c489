"""The model whose costs are counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 96
"""Makes a block large enough that each gradient is copied as it comes: see ``SMALL`` in incoming.py."""


SMALL_WIDTH = 24


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.front = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
