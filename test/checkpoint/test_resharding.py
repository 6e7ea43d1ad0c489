"""Checkpoints saved in one layout and loaded in another, bit for bit: random models, other systems, plain models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz_options import layout_named
from on_ranks import ranks
from pairs import some
from saving import CommunicationWatch, net, same, step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard.checkpoint import full_state_dict, load_optim_state_dict, optim_state_dict

CASES = 40
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


class Leaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def make(seed: int) -> nn.Module:
    """Modules in modules with any parameters, and random values: the same wherever it is called."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [Leaf() for _ in range(rng.randint(1, 5))]
    root = Leaf()
    for i, leaf in enumerate(leaves):
        rng.choice([root, *leaves[:i]]).add_module(f"leaf{i}", leaf)
    made: list[nn.Parameter] = []
    for i in range(rng.randint(1, 9)):
        if made and rng.random() < 0.2:
            param = rng.choice(made)
        else:
            shape = [
                rng.choice([0, 1, 1, 2, 3, 5, 8, 13]) if rng.random() < 0.9 else 0 for _ in range(rng.randint(0, 4))
            ]
            order = rng.sample(range(len(shape)), len(shape))
            value = torch.randn([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
            dtype = rng.choice(DTYPES)
            if rng.random() < 0.1:
                param = nn.Parameter((value * 9).long(), requires_grad=False)
            else:
                param = nn.Parameter(value.to(dtype), requires_grad=rng.random() < 0.8)
            made.append(param)
        rng.choice([root, *leaves]).register_parameter(f"p{i}", param)
    for i in range(rng.randint(0, 2)):
        rng.choice(leaves).register_buffer(f"b{i}", torch.randn(rng.randint(0, 4)))
    return root


def shard(ctx, model: nn.Module, rng: random.Random) -> nn.Module:
    """In any way."""
    options: dict[str, Any] = {"process_group": ctx.group}
    options["policy"] = rng.choice([None, {Leaf}])
    options["strategy"] = rng.choice([s for s in ShardingStrategy if not s.is_hybrid])
    if ctx.world_size == 4 and rng.random() < 0.4:
        del options["process_group"]
        options["device_mesh"] = ctx.device_mesh((2, 2), ("replicate", "shard"))
        options["strategy"] = rng.choice([s for s in ShardingStrategy if s.is_hybrid])
    if rng.random() < 0.3:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    options["layout"] = layout_named(rng.choice([None, "rows", "pairs", "blocks", "whole", "mixed"]))
    with_ignored = [p for p in dict.fromkeys(model.parameters()) if random.Random(str(p.shape)).random() < 0.1]
    return fully_shard(model, ignored_states=with_ignored, **options)


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer | None:
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, weight_decay=0.5) if params else None


def optimizer_state(model: nn.Module) -> dict[str, Any]:
    """As of an unsharded run, with random values."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(1)
    state = {
        n: {"step": torch.tensor(7.0), "exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)}
        for n, p in trainable.items()
    }
    (group,) = torch.optim.AdamW(trainable.values(), weight_decay=0.5).state_dict()["param_groups"]
    return {"state": state, "param_groups": [{**group, "params": list(trainable)}]}


def save_random(ctx, seed: int, path: str) -> None:
    source = make(seed)
    model = shard(ctx, make(seed), random.Random(seed + 1))
    optimizer = optimizer_for(model)
    state = {"model": model.state_dict()}
    if optimizer is not None:
        load_optim_state_dict(model, optimizer, optimizer_state(source))
        state["optim"] = optim_state_dict(model, optimizer)
    with CommunicationWatch() as watch:
        dcp.save(state, checkpoint_id=path, process_group=ctx.group)
    assert watch.data == []


def load_random(ctx, seed: int, path: str) -> None:
    source = make(seed)
    for choice in range(2):
        model = make(seed)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        if choice:
            shard(ctx, model, random.Random(seed + 2))
        optimizer = optimizer_for(model)
        state = {"model": model.state_dict()}
        if choice and optimizer is not None:
            state["optim"] = optim_state_dict(model, optimizer, for_load=True)
        dcp.load(state, checkpoint_id=path, process_group=ctx.group)
        whole = model.state_dict()
        if choice:
            whole = full_state_dict(model)
            model.load_state_dict(state["model"])
            if optimizer is not None:
                load_optim_state_dict(model, optimizer, state["optim"])
                same(optim_state_dict(model, optimizer, full=True), optimizer_state(source))
        assert whole.keys() == source.state_dict().keys()
        for name, value in source.state_dict().items():
            assert whole[name].dtype == value.dtype, name
            assert torch.equal(whole[name], value), name


@pytest.mark.parametrize("block", range(4))
def test_random_models(pool, block, tmp_path):
    for seed in some(range(block * CASES // 4, (block + 1) * CASES // 4), 4):
        rng = random.Random(seed)
        path = str(tmp_path / str(seed))
        sizes = rng.randint(1, 4), rng.randint(1, 4)
        pool.run(save_random, seed, path, world_size=sizes[0])
        pool.run(load_random, seed, path, world_size=sizes[1])


# -- other systems -----------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self, ctx, seed: int) -> None:
        self.model = fully_shard(net(seed), policy={nn.Linear}, process_group=ctx.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def state(self, for_load: bool = False) -> dict[str, Any]:
        optim = optim_state_dict(self.model, self.optimizer, for_load=for_load)
        return {"model": self.model.state_dict(), "optim": optim}

    def whole(self) -> dict[str, Any]:
        optim = optim_state_dict(self.model, self.optimizer, full=True)
        return {"model": flatshard.checkpoint.full_state_dict(self.model), "optim": optim}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optim_state_dict(self.model, self.optimizer, state["optim"])


class Torchs:
    """A model of torch's own: plain or FSDP2, whose state is read by torch's own functions."""

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

    def load(self, state: dict[str, Any]) -> None:
        """Done in place."""


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    for name, values in expected["optim"]["state"].items():
        for key, value in values.items():
            assert torch.equal(found["optim"]["state"][name][key], value), (name, key)


@pytest.mark.parametrize(("sharded", "world_size"), [(True, 1), (True, 2), (True, 3), (False, 2)])
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
        model = net(seed)
        wrapped = FullyShardedDataParallel(
            model, process_group=ctx.group, device_id=torch.device("cpu"), use_orig_params=True
        )
        FullyShardedDataParallel.set_state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT)
        return wrapped

    source = net(0).state_dict()
    dcp.save(build(0).state_dict(), checkpoint_id=f"{path}/1", process_group=ctx.group)
    model = fully_shard(net(1), process_group=ctx.group)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{path}/1", process_group=ctx.group)
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, source[name]), name
    dcp.save(model.state_dict(), checkpoint_id=f"{path}/2", process_group=ctx.group)
    theirs = build(2)
    state = theirs.state_dict()
    dcp.load(state, checkpoint_id=f"{path}/2", process_group=ctx.group)
    theirs.load_state_dict(state)
    with FullyShardedDataParallel.summon_full_params(theirs):
        for name, value in theirs.module.named_parameters():
            assert torch.equal(value, source[name]), name


def map_file(ctx, path: str) -> None:
    model = fully_shard(nn.Linear(4000, 4000, bias=False), process_group=ctx.group)
    state = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(state)
    start = sum(p.numel() for p in model.parameters()) * ctx.rank  # 4 ranks divide it
    assert torch.equal(model.weight.detach(), torch.arange(start, start + model.weight.numel()).float())
    resident = 0
    for mapping in Path("/proc/self/smaps").read_text().split("VmFlags:"):
        if path in mapping:
            resident += int(mapping.partition("\nRss:")[2].split()[0]) * 1024
    part = 64_000_000 // ctx.world_size
    assert part * 0.9 < resident < part + 5_000_000, (resident, part)  # the kernel maps up to 2 MB around what is read


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux which pages were read")
def test_each_rank_reads_its_own_bytes_of_a_file(pool, tmp_path):
    path = str(tmp_path / "whole.pt")
    torch.save({"weight": torch.arange(16_000_000).float().view(4000, 4000)}, path)
    pool.run(map_file, path, world_size=4)
