"""The C library keeps freed memory if units live on CPU: steps after the first cause no page faults."""

import platform
import resource

import pytest
import torch
from on_ranks import ranks
from torch import nn

from flatshard import fully_shard
from flatshard._base import environment
from flatshard._comm import host_memory

WIDTH = 1024  # 4 MiB per unit


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(not environment.KEEP_MEMORY, reason="told not to, or the user has settings of the C library's own")
@ranks(2)
def test_a_steady_step_takes_no_new_memory(ctx):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    x = torch.randn(2, WIDTH)
    found = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(x).sum().backward()
        model.zero_grad()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    pages = 4 * WIDTH * WIDTH // resource.getpagesize()
    # Some 14 units are gathered and reduced in a step. The new pages may be those of one reduction's input that shared
    # memory has released, or of two if a rank lags.
    assert min(found) < 3 * pages


def test_it_can_be_left_alone(monkeypatch):
    monkeypatch.setattr(environment, "KEEP_MEMORY", False)
    assert host_memory.keep_freed_memory.__wrapped__() is False
