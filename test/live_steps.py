"""Peak memory of a training step by phase: live bytes of all storages."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from counting import LiveBytes
from torch import Tensor, nn

from flatshard._base import environment

STEPS = 6
"""Number of steps. The first ones compare the order of ranks."""


def measured(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Tensor] | dict[str, Tensor],
    loss_of: Callable[[Any], Tensor],
) -> dict[str, int]:
    """Return the peak of live bytes in each phase of a late step. Outputs are freed after the loss.

    Ranks send no payload in shared memory, as if they were on several hosts: plans are of these.
    """
    peaks: dict[str, int] = {}
    live = LiveBytes()

    def watch(phase: str, do: Callable[[], Any]) -> Any:
        with live.watch() if len(steps) == STEPS else contextlib.nullcontext():
            result = do()
        peaks[phase] = live.peak
        return result

    steps: list[int] = []  # started steps
    given, named = ((), batch) if isinstance(batch, dict) else (batch, {})
    with mock.patch.object(environment, "SHARED_MEMORY", 0), live:
        live.add([*model.parameters(), *model.buffers(), *given, *named.values()])
        while len(steps) < STEPS:
            steps.append(len(steps))
            loss = watch("forward", lambda: loss_of(model(*given, **named)))
            watch("backward", loss.backward)
            watch("optimizer", optimizer.step)
            del loss
            optimizer.zero_grad()
    return peaks
