"""The events of a step as lines, which must agree on all ranks, and a small model to record."""

from typing import Any

import torch
from models import Block
from torch import Tensor, nn

from flatshard import fully_shard
from flatshard._base.trace import record_events


def sharded(ctx: Any, model: nn.Module, policy: Any = Block, **options: Any) -> nn.Module:
    return fully_shard(model, policy=policy, process_group=ctx.group, **options)


def train(model: nn.Module, x: Tensor | None = None) -> list[str]:
    """Run a step; return the events of forward and backward, with a line between."""
    with record_events() as events:
        loss = model(torch.ones(2, 4) if x is None else x).sum()
        events.append("-- backward")
        loss.backward()
    return events


def same_everywhere(results: list[Any]) -> Any:
    """Return the ranks' common result; raise if they differ."""
    assert all(r == results[0] for r in results), results
    return results[0]


def as_text(steps: list[list[str]], only: str = "") -> str:
    """Print a column for each step, with the lines that start with ``only``."""
    steps = [[line for line in step if line.startswith((only, "--"))] for step in steps]
    width = max(len(line) for step in steps for line in step) + 2
    rows = max(len(step) for step in steps)
    columns = [step + [""] * (rows - len(step)) for step in steps]
    return "\n".join("".join(c[i].ljust(width) for c in columns).rstrip() for i in range(rows))
