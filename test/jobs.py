"""Small jobs whose saves and loads are made to fail."""

import contextlib
import datetime
import errno
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from flatshard import fully_shard
from flatshard.checkpoint import RankError
from flatshard.checkpoint._container import memory_of

FULL = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
SHORT = datetime.timedelta(seconds=1)
METADATA = ".metadata"


class Four(nn.Sequential):
    """Four matrices for groups of parameters."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__(OrderedDict((name, nn.Linear(3, 3, bias=False)) for name in "abcd"))
        for layer in self:
            nn.init.constant_(layer.weight, value)


def four(ctx: Any, value: float = 1.0) -> nn.Module:
    return fully_shard(Four(value), policy={nn.Linear}, process_group=ctx.group)


def expect(pattern: str) -> Any:
    return pytest.raises(RankError, match=pattern)


@contextlib.contextmanager
def patched(owner: Any, name: str, new: Any, when: bool = True) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if when:
            patch.setattr(owner, name, new)
        yield


def values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    found = [p.detach().clone() for p in model.parameters()]
    states = [] if optimizer is None else list(optimizer.state.values())
    return found + [v.clone() for state in states for v in state.values() if isinstance(v, Tensor)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(memory_of(tensor.contiguous()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
