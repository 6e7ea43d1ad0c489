"""A forward in a forked process (a DataLoader's worker), which has no process group: it says so."""

from __future__ import annotations

import os

import torch
from models import Block, Net
from on_ranks import ranks
from torch import nn

from flatshard import fully_shard


def forward_in_a_fork(model: nn.Module) -> str:
    """What came of it."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        try:
            with torch.no_grad():
                text = str(tuple(model(torch.ones(1, 4)).shape))
        except BaseException as e:
            text = f"{type(e).__name__}: {e}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@ranks(2)
def test_a_forward_in_a_forked_process(ctx):
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    for each, fqn in ((model, "<root>"), (model.blocks[1], "blocks.1")):
        text = forward_in_a_fork(each)
        assert text.startswith(f"RuntimeError: unit {fqn!r} runs a forward in process "), text
        assert f"which was forked from rank {ctx.rank} " in text
    assert forward_in_a_fork(Net()) == "(1, 2)"
    model(torch.ones(1, 4)).sum().backward()  # the parent goes on
