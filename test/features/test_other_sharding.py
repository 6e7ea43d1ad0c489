"""torch's own FSDP on a model that is sharded already."""

from __future__ import annotations

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2

from flatshard import fully_shard


@ranks(2)
def test_torchs_fsdp_on_a_sharded_model(ctx):
    def fsdp1(module: nn.Module, use_orig_params: bool) -> None:
        FullyShardedDataParallel(
            module, process_group=ctx.group, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )

    for shard in (
        lambda m: fsdp2(m, mesh=ctx.mesh),
        lambda m: fsdp2(m.blocks[0].linear, mesh=ctx.mesh),
        lambda m: fsdp2(m.blocks[0], mesh=ctx.mesh),
        lambda m: fsdp1(m, True),
        lambda m: fsdp1(nn.Sequential(m), False),
    ):
        model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
        message = r"parameter '.*' is sharded by flatshard.fully_shard, and torch's FSDP would"
        with pytest.raises(RuntimeError, match=message):
            shard(model)
