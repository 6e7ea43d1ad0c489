"""Checkpoints of other systems, and for them, bit for bit; and a file of which each rank reads its part.

From one layout and number of ranks to another: the fuzzer, in whose programs jobs are restarted.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import net, same_tensors, step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from flatshard import fully_shard
from flatshard.checkpoint import full_state_dict, load_optim_state_dict, optim_state_dict


class Ours:
    def __init__(self, ctx, seed: int) -> None:
        self.model = fully_shard(net(seed), policy={nn.Linear}, process_group=ctx.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self, for_load: bool = False) -> dict[str, Any]:
        optim = optim_state_dict(self.model, self.optimizer, for_load=for_load)
        return {"model": self.model.state_dict(), "optim": optim}

    def whole(self) -> dict[str, Any]:
        return {"model": full_state_dict(self.model), "optim": optim_state_dict(self.model, self.optimizer, full=True)}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optim_state_dict(self.model, self.optimizer, state["optim"])


class Torchs:
    """A model of torch's own: plain or FSDP2, whose state is read by torch's own functions, and loaded in place."""

    def __init__(self, ctx, seed: int, sharded: bool) -> None:
        self.model: nn.Module = net(seed)
        if sharded:
            for child in (self.model.up, self.model.down, self.model):
                fsdp2(child, mesh=ctx.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self, for_load: bool = False) -> dict[str, Any]:
        if for_load:
            get_optimizer_state_dict(self.model, self.optimizer)  # which makes it
        return {"model": self.model.state_dict(), "optim": get_optimizer_state_dict(self.model, self.optimizer)}

    def whole(self) -> dict[str, Any]:
        return torch.utils._pytree.tree_map(lambda v: v.full_tensor() if hasattr(v, "full_tensor") else v, self.state())

    def load(self, state: dict[str, Any]) -> None: ...


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    same_tensors(found["model"], expected["model"])
    for name, values in expected["optim"]["state"].items():
        same_tensors(found["optim"]["state"][name], values)


@pytest.mark.parametrize(("sharded", "world_size"), [(True, 3), (False, 2)])
@ranks()
def test_to_and_from_fsdp2_and_plain_models(ctx, path: str, sharded: bool) -> None:
    for source, target in ((Torchs(ctx, 0, sharded), Ours(ctx, 1)), (Ours(ctx, 0), Torchs(ctx, 1, sharded))):
        step(source.model, source.optimizer)
        at = f"{path}/{type(source).__name__}"
        dcp.save(source.state(), checkpoint_id=at, process_group=ctx.group)
        state = target.state(for_load=True)
        dcp.load(state, checkpoint_id=at, process_group=ctx.group)
        target.load(state)
        assert_same(target.whole(), source.whole())
        other = Ours(ctx, 2)
        flatshard.load_checkpoint(at, {"model": other.model, "optim": other.optimizer}, process_group=ctx.group)
        assert_same(other.whole(), source.whole())


@ranks(2)
def test_to_and_from_fsdp1(ctx, path: str) -> None:
    def build(seed: int) -> nn.Module:
        options = {"process_group": ctx.group, "device_id": torch.device("cpu"), "use_orig_params": True}
        wrapped = FullyShardedDataParallel(net(seed), **options)
        FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
        return wrapped

    model, theirs = fully_shard(net(1), process_group=ctx.group), build(2)
    for number, (source, target) in enumerate(((build(0), model), (model, theirs))):
        dcp.save(source.state_dict(), checkpoint_id=f"{path}/{number}", process_group=ctx.group)
        state = target.state_dict()
        dcp.load(state, checkpoint_id=f"{path}/{number}", process_group=ctx.group)
        target.load_state_dict(state)
    same_tensors(full_state_dict(model), net(0).state_dict())
    with FullyShardedDataParallel.summon_full_params(theirs):
        same_tensors({n: p.detach() for n, p in theirs.module.named_parameters()}, dict(net(0).named_parameters()))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux which pages were read")
@ranks(4)
def test_each_rank_reads_its_own_bytes_of_a_file(ctx, path: str) -> None:
    if ctx.rank == 0:
        torch.save({"weight": torch.arange(4_000_000).float().view(2000, 2000)}, path)
    dist.barrier(ctx.group)
    model = fully_shard(nn.Linear(2000, 2000, bias=False), process_group=ctx.group)
    state = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(state)
    start, part = 1_000_000 * ctx.rank, 4_000_000
    assert torch.equal(model.weight.detach(), torch.arange(start, start + model.weight.numel()).float())
    mappings = [m for m in Path("/proc/self/smaps").read_text().split("VmFlags:") if path in m]
    resident = sum(int(m.partition("\nRss:")[2].split()[0]) * 1024 for m in mappings)
    assert part * 0.9 < resident < part + 5_000_000, resident  # the kernel maps up to 2 MB around what is read
