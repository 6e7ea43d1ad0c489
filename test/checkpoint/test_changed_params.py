"""Weights for another system: what has changed in each rank's shards, put in place by a receiver."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from saving import CommunicationWatch, layers, make, on_four, shard
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import SentParams, apply_changed_params, full_state_dict, iter_changed_params
from flatshard.checkpoint._changed_params import _gaps, _offsets


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


@ranks(1, 2, 3)
def test_a_receiver_that_follows(ctx) -> None:
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
    expected = full_state_dict(model, dtype=dtype)
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


@ranks(4)
def test_tensor_parallel_modules_and_replicas(ctx) -> None:
    """With tensor parallelism, and in replicas, of which one sends."""
    for how in ("tp", "replicas"):
        server, model = layers(), on_four(ctx, how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        since = SentParams(model)
        assert how == "tp" or bool(since.plan) == (ctx.rank < 2)
        plans = everybody(ctx, since.plan)
        train(model, optimizer, 0)
        for plan, changes in zip(plans, everybody(ctx, list(iter_changed_params(since))), strict=True):
            for changed in changes:
                apply_changed_params(weights(server), plan, changed)
        check(server, model, None)


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
