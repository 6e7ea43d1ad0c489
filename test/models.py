"""Small models that many tests train. A model with a feature of its own belongs in the test that needs it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Block(nn.Module):
    """A layer with a residual connection."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Blocks between two layers, called in the order of ``order``."""

    def __init__(
        self, blocks: int = 3, width: int = 4, inputs: int = 4, outputs: int = 2, block: type[nn.Module] = Block
    ) -> None:
        super().__init__()
        self.front = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, outputs)
        self.order = list(range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


class Mlp(nn.Module):
    """Two layers with a residual connection. ``hidden`` is the width between them, by default twice ``width``."""

    def __init__(self, width: int, hidden: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = hidden or 2 * width
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


WIDTH, SMALL_WIDTH = 96, 24
"""Widths of norm blocks. With ``WIDTH`` each gradient is copied when it arrives, with ``SMALL_WIDTH`` all together; see
``SMALL`` in gradients.py."""


class NormBlock(nn.Module):
    """A layer norm and two layers with a residual connection. For ``hidden`` and ``bias`` see ``Mlp``."""

    def __init__(self, width: int, hidden: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = hidden or 2 * width
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class NormNet(Net):
    """Norm blocks between two layers."""

    def __init__(self, blocks: int = 4, width: int = WIDTH) -> None:
        super().__init__(blocks, width, 3, 3, NormBlock)


class Gather(torch.autograd.Function):
    """Stack the tensors of all ranks of a group. (torch's own function takes a group's ranks for global ones.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        rows = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(rows, x.contiguous(), group=group)
        return torch.stack(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()], None
