"""The C library keeps freed memory where units live on CPU: no page faults from one step to the next."""

import platform
import resource

import pytest
import torch
from on_ranks import ranks
from torch import nn

from flatshard import _config, fully_shard
from flatshard._comm import host_memory

WIDTH = 1024  # 4 MiB a unit


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.skipif(not _config.KEEP_MEMORY, reason="told not to, or the user has settings of the C library's own")
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
    # Of some 14 units gathered and reduced: an input of a reduction that shared memory has given back, or two if a rank lags.
    assert min(found) < 3 * pages


def test_it_can_be_left_alone(monkeypatch):
    monkeypatch.setattr(_config, "KEEP_MEMORY", False)
    assert host_memory.keep_freed_memory.__wrapped__() is False
