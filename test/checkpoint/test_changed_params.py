"""Weights for another system: what has changed in each rank's shards, put in place by a receiver."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from saving import CommunicationWatch, make, shard
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard.checkpoint import SentParams, apply_changed_params, iter_changed_params
from flatshard.checkpoint._changed_params import _gaps, _offsets

STEPS = 20


def test_gaps():
    for at in ([0], [255], [256], [257], [0, 1, 2], [3, 259, 260, 5000], [511, 512], list(range(1000, 9000, 257))):
        found = _offsets(_gaps(torch.tensor(at)))
        assert set(at) <= set(found.tolist())
        assert found[-1] == at[-1]
        assert found.diff().gt(0).all()
        assert len(found) <= len(at) + at[-1] // 256 + 1


def weights(model: nn.Module) -> dict[str, Tensor]:
    """What a receiver has: the values in the dtype that computes, and of parameters only."""
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    return {n: v for n, v in model.state_dict().items() if n in names}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(2):
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def follow(ctx) -> None:
    """Every kind of parameter, in all strategies; every rank has a receiver, to which all ranks' changes go."""
    for strategy, dtype in (
        (ShardingStrategy.FULL_SHARD, torch.bfloat16),
        (ShardingStrategy.SHARD_GRAD_OP, None),
        (ShardingStrategy.NO_SHARD, torch.bfloat16),
    ):
        ctx.note(f"{strategy.name}, {dtype}")
        model = shard(ctx, make(), strategy, {nn.Linear})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        server = make()
        if dtype is not None:
            server = server.to(dtype)
        with CommunicationWatch() as watch:
            since = SentParams(model, dtype=dtype)
            assert list(iter_changed_params(since)) == []
        assert watch.seen == []
        plans = everybody(ctx, since.plan)
        for seed in range(2):
            train(model, optimizer, seed)
            with watch:
                mine = list(iter_changed_params(since))
                assert list(iter_changed_params(since)) == []
            assert watch.seen == []
            for plan, changes in zip(plans, everybody(ctx, mine), strict=True):
                for changed in changes:
                    apply_changed_params(weights(server), plan, changed)
            check(server, model, dtype)


def check(server: nn.Module, model: nn.Module, dtype: torch.dtype | None) -> None:
    expected = flatshard.checkpoint.full_state_dict(model, dtype=dtype)
    for name, value in weights(server).items():
        assert torch.equal(value, expected[name]), name
        assert value.dtype is expected[name].dtype


def everybody(ctx, value: object) -> list:
    """Each rank's, by files that pickle: without numpy ``all_gather_object`` has no way."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ctx.world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=ctx.group)
    found = [torch.zeros(max(map(int, sizes)), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, torch.cat([data, data.new_zeros(len(found[0]) - len(data))]), group=ctx.group)
    return [pickle.loads(bytes(each[: int(size)].tolist())) for each, size in zip(found, sizes, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_receiver_that_follows(pool, world_size):
    pool.run(follow, world_size=world_size)


def follow_parallel(ctx) -> None:
    """With tensor parallelism, and in replicas, of which one sends."""
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    plain.load_state_dict({n: torch.ones_like(p) / 3 for n, p in plain.state_dict().items()})
    start = plain.state_dict()
    for tensor_parallel in (True, False):
        mesh = ctx.device_mesh((2, 2), ("dp", "tp") if tensor_parallel else ("replicate", "shard"))
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
        model.load_state_dict(start)
        if tensor_parallel:
            plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            fully_shard(model, device_mesh=mesh["dp"])
        else:
            fully_shard(model, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
        server = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
        server.load_state_dict(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        since = SentParams(model)
        assert tensor_parallel or bool(since.plan) == (ctx.rank < 2)
        plans = everybody(ctx, since.plan)
        train(model, optimizer, 0)
        for plan, changes in zip(plans, everybody(ctx, list(iter_changed_params(since))), strict=True):
            for changed in changes:
                apply_changed_params(weights(server), plan, changed)
        check(server, model, None)


def test_tensor_parallel_modules_and_replicas(pool):
    pool.run(follow_parallel, world_size=4)


class Gpt(nn.Module):
    """An embedding that is tied to the head, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def serve(ctx) -> tuple[int, int] | None:
    """Ranks 0 and 1 train, rank 2 is a server that gets what they send after each step."""
    mesh = ctx.device_mesh((2, 2), ("side", "rank"))  # two trainers; the server, and a rank that only takes part
    torch.manual_seed(0)
    server = Gpt().bfloat16()
    torch.manual_seed(0)
    sent = full = 0
    if ctx.rank < 2:
        bf16 = MixedPrecision(param_dtype=torch.bfloat16)
        model = fully_shard(Gpt(), policy={nn.TransformerEncoderLayer}, device_mesh=mesh["rank"], mixed_precision=bf16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        since = SentParams(model)
        deliver(pickle.dumps(since.plan))
    elif ctx.rank == 2:
        plans = [pickle.loads(receive(r)) for r in range(2)]
    for number in range(STEPS):
        if ctx.rank < 2:
            torch.manual_seed(number)
            tokens = torch.randint(64, (2, 8))
            model(tokens).float().log_softmax(-1).gather(-1, tokens[..., None].roll(1, 1)).mean().neg().backward()
            optimizer.step()
            optimizer.zero_grad()
            changes = list(iter_changed_params(since))
            deliver(pickle.dumps(changes))
            sent, full = sent + sum(c.nbytes for c in changes), full + since.nbytes
        elif ctx.rank == 2:
            for rank, plan in enumerate(plans):
                for changed in pickle.loads(receive(rank)):
                    apply_changed_params(server.state_dict(), plan, changed)
    if ctx.rank < 2:
        expected = flatshard.checkpoint.full_state_dict(model, dtype=torch.bfloat16)
        deliver(pickle.dumps({n: v.float().tolist() for n, v in expected.items()} if ctx.rank == 0 else {}))
        return sent, full
    if ctx.rank == 2:
        expected = pickle.loads(receive(0)) | pickle.loads(receive(1))
        for name, value in server.state_dict().items():
            assert torch.equal(value, torch.tensor(expected[name]).bfloat16()), name
    return None


def deliver(data: bytes) -> None:
    dist.send(torch.tensor([len(data)]), 2)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 2)


def receive(rank: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    data = torch.zeros(int(size), dtype=torch.uint8)
    dist.recv(data, rank)
    return bytes(data.tolist())


def test_a_server_is_equal_bit_for_bit(pool):
    """After 20 steps, each followed by what has changed: in all 4% of the bytes that whole models would have been."""
    results = pool.run(serve, world_size=4)
    sent, full = (sum(r[i] for r in results[:2]) for i in range(2))
    print(f"bytes sent over the model's bytes: {sent / full:.3f}")
    assert sent < 0.06 * full


def test_what_does_not_fit(world):
    world(1)
    model = fully_shard(nn.Linear(3, 2))
    since = SentParams(model)
    with torch.no_grad():
        model.weight.add_(1)
    for _ in range(2):  # what was not followed by another one may be lost, and comes again
        changed = next(iter_changed_params(since))
    assert (changed.flat, changed.values.numel(), changed.nbytes) == (0, 6, 6 * 5)
    for bad in ({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, {"bias": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"'weight' is sent as \(2, 3\), the weights have (\(2, 2\)|nothing)$"):
            apply_changed_params(bad, since.plan, changed)
        assert not any(t.any() for t in bad.values())
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype or None"):
        SentParams(model, dtype=torch.int8)
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="Call it outside"):
        list(iter_changed_params(since))
