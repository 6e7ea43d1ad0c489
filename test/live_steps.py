"""What a training step takes, measured: live bytes of all memory behind tensors, phase by phase."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from counting import LiveBytes
from torch import Tensor, nn

STEPS = 6
"""The first ones compare the order of ranks."""


def measured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Tensor] | dict[str, Tensor],
    loss_of: Callable[[Any], Tensor],
) -> dict[str, int]:
    """The most live bytes in each phase of a later step of a sharded model. Outputs are not kept beyond the loss."""
    peaks: dict[str, int] = {}
    live = LiveBytes()

    def watch(phase: str, do: Callable[[], Any]) -> Any:
        with live.watch() if len(steps) == STEPS else contextlib.nullcontext():
            result = do()
        peaks[phase] = live.peak
        return result

    steps: list[int] = []  # those begun
    given, named = ((), batch) if isinstance(batch, dict) else (batch, {})
    with live:
        live.add([*model.parameters(), *model.buffers(), *given, *named.values()])
        while len(steps) < STEPS:
            steps.append(len(steps))
            loss = watch("forward", lambda: loss_of(model(*given, **named)))
            watch("backward", loss.backward)
            watch("optimizer", optimizer.step)
            del loss
            optimizer.zero_grad()
    return peaks
