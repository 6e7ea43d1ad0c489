"""Block-wise int8 collectives: how far off, how many bytes, what they keep, and that a model trains as well with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block
from on_ranks import ranks
from pairs import some
from recording import FULL, NO_SHARD, Net, make_input, same_everywhere, sent_bytes
from torch import Tensor, nn

from flatshard import ShardingStrategy, describe, fully_shard, summon_full_params, unshard
from flatshard.comm import DefaultCollectives, QuantizedCollectives


def rms(t: Tensor) -> float:
    return t.double().square().mean().sqrt().item()


def quantised(group: Any, block: int = 256, by_default: bool = False) -> Any:
    collectives = QuantizedCollectives(block)(group, torch.device("cpu"))
    if by_default:  # as it is over NCCL, by the calls that every backend knows
        collectives._inner = DefaultCollectives(group)
    return collectives


def errors_of_operations(ctx, by_default: bool) -> dict[str, float]:
    """Relative RMS error of each operation; that no element is off by more than the format allows is asserted here."""
    size, rank = ctx.world_size, ctx.rank
    found = {}
    for dtype, rounding in ((torch.float32, 0), (torch.float64, 0), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        for numel, block in ((4096, 256), (1000, 256), (96, 256), (100, 7)):  # tails, one short block, odd blocks
            torch.manual_seed(3)
            values = torch.randn(size, size * numel).mul(torch.logspace(-1, 1, size * numel)).to(dtype)
            mean = values.double().mean(0)
            collectives = quantised(ctx.group, block, by_default)

            step = values.double().abs().max().item() / 254 * (1 + 1e-6)
            case = f"of {numel} {dtype} in blocks of {block}"

            def error(got: Tensor, expected: Tensor, bound: float, rounding: float = rounding) -> float:
                difference = got.double() - expected.double()
                assert difference.abs().max() <= bound + rounding * expected.double().abs().max()
                return rms(difference) / rms(expected)

            shards = values[:, :numel]
            output = torch.empty(size * numel, dtype=dtype)
            output.view(size, -1)[rank].copy_(shards[rank])
            collectives.all_gather(output, shards[rank].clone()).wait()
            assert same_everywhere(ctx.group, output)
            found[f"all-gather {case}"] = error(output, shards.reshape(-1), step)

            part = torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter(part, values[rank].clone()).wait()
            found[f"reduce-scatter {case}"] = error(part, mean.view(size, numel)[rank], step)

            whole = values[rank, : numel + 1].clone()  # not divisible by the number of ranks
            collectives.all_reduce(whole).wait()
            assert same_everywhere(ctx.group, whole)
            found[f"all-reduce {case}"] = error(whole, mean[: numel + 1], 2 * step)
    return found


@pytest.mark.parametrize(("world_size", "by_default"), [(2, False), (3, False), (4, False), (3, True)])
def test_quantisation_error_of_each_operation(pool, world_size, by_default):
    for errors in pool.run(errors_of_operations, by_default, world_size=world_size):
        for what, error in errors.items():
            # 7e-3 for one rounding of normal numbers; here magnitudes grow within a block, and all-reduce rounds twice.
            assert 1e-3 < error < 1.3e-2, f"{what}: {error}"


@ranks(2, 3)
def test_what_quantisation_keeps(ctx) -> None:
    size, rank = ctx.world_size, ctx.rank
    collectives = quantised(ctx.group, block=4)
    for dtype in (torch.uint8, torch.int64, torch.complex64):  # as they are
        shard = torch.arange(5).mul(rank + 1).to(dtype)
        if dtype is torch.complex64:  # parameters that a backend may not know come as bytes
            shard = shard.view(torch.uint8)
        output = shard.new_zeros(size * shard.numel())
        output.view(size, -1)[rank].copy_(shard)
        collectives.all_gather(output, shard).wait()
        for other in range(size):
            expected = torch.arange(5).mul(other + 1).to(dtype).view(shard.dtype)
            assert torch.equal(output.view(size, -1)[other], expected)

    # Zeros of either sign, a tiny number, an infinity and a NaN, one block each; every rank has the same.
    inf, nan = float("inf"), float("nan")
    part = torch.tensor([0.0, -0.0, 0, 0, 1e-42, 0, 0, 0, 1, -inf, 0, 0, nan, 2, 3, 4, -0.0, 1, -1e-6, 127])
    for reduced in (torch.empty(20), part.repeat(size)):
        if reduced.numel() == 20:
            collectives.reduce_scatter(reduced, part.repeat(size)).wait()
        else:
            collectives.all_reduce(reduced).wait()
        for got in reduced.view(-1, 20):
            assert got[:8].eq(0).all()
            assert got[:4].signbit().tolist() == [False, True, False, False]
            assert got[8:16].isnan().all()
            assert got[16:].tolist() == [0, 1, 0, 127]
            assert got[16:].signbit().tolist() == [True, False, False, False]  # a small number does not look unused

    # -0.0 on one rank, and something on another.
    part = torch.full((4,), -0.0)
    if rank == 1:
        part = torch.tensor([0.0, -0.0, 127, -1e-9])
    reduced = torch.empty(4)
    collectives.reduce_scatter(reduced, part.repeat(size)).wait()
    assert torch.equal(reduced, torch.tensor([0, 0, 127 / size, 0]))
    assert reduced.signbit().tolist() == [False, True, False, False]

    numbers = torch.randn(size * 6, dtype=torch.complex64)
    reduced = torch.empty(6, dtype=torch.complex64)
    collectives.reduce_scatter(reduced, numbers.clone()).wait()
    torch.testing.assert_close(reduced, numbers.view(size, -1)[rank], atol=numbers.abs().max() / 127, rtol=0)


@ranks(2)
def test_whole_parameters_are_exact(ctx) -> None:
    model = nn.Linear(8, 8)
    whole = model.weight.detach().clone()
    fully_shard(model, process_group=ctx.group, collectives=QuantizedCollectives())
    unshard(model)
    assert not torch.equal(model.weight, whole)
    with summon_full_params(model):
        assert torch.equal(model.weight, whole)


class TwoWays(nn.Module):
    """Uses one of two scalars, or neither, besides a layer; all of them share a block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.a, self.b, self.c = (nn.Parameter(torch.ones(())) for _ in range(3))

    def forward(self, x: Tensor, use: str) -> Tensor:
        return self.linear(x).square().sum() - (1e-9 * self.a if use == "a" else 0)


@pytest.mark.parametrize("strategy", [FULL, NO_SHARD])
@ranks(3)
def test_quantised_gradients_of_unused_parameters_are_none(ctx, strategy: ShardingStrategy) -> None:
    model = TwoWays()
    fully_shard(model, process_group=ctx.group, strategy=strategy, collectives=QuantizedCollectives())
    model(torch.ones(2, 8), "a" if ctx.rank == 0 else "").backward()
    assert model.b.grad is None
    assert model.c.grad is None
    assert model.linear.weight.grad is not None
    used = torch.tensor(float(model.a.grad is not None and model.a.grad.numel() > 0))
    dist.all_reduce(used, group=ctx.group)
    assert used.item() == (ctx.world_size if strategy is NO_SHARD else 1)  # on the rank that holds it


def bytes_of_a_step(ctx, collectives: Any) -> dict[str, int]:
    model = Net(blocks=2, width=64)
    fully_shard(model, policy={Block}, process_group=ctx.group, collectives=collectives)
    for _ in range(4):  # in which the order is checked
        model(make_input(0, 2)).sum().backward()
    with sent_bytes() as forward:
        loss = model(make_input(0, 2)).sum()
    with sent_bytes() as backward:
        loss.backward()
    shards = [flat.shard_numel for unit in describe(model).units for flat in unit.flats]
    return {"forward": sum(forward), "backward": sum(backward), "shards": shards}


def test_bytes_on_the_wire(pool):
    size, peers = 3, 2

    def wire(numel: int, block: int) -> int:
        return -(-(numel + 4 * -(-numel // block)) // 16) * 16

    plain = pool.run(bytes_of_a_step, None, world_size=size)[0]
    root, *blocks = plain["shards"]
    assert plain["forward"] == peers * 4 * (root + sum(blocks))
    assert plain["backward"] == peers * 4 * (root + 2 * sum(blocks))
    for block in (256, 64):
        got = pool.run(bytes_of_a_step, QuantizedCollectives(block), world_size=size)[0]
        assert got["forward"] == peers * sum(wire(n, block) for n in (root, *blocks))
        assert got["backward"] == peers * (wire(root, block) + 2 * sum(wire(n, block) for n in blocks))
        assert got["forward"] / plain["forward"] < (1 + 4 / block) / 4 + 0.01
    got = pool.run(bytes_of_a_step, QuantizedCollectives(reduce=False), world_size=size)[0]
    assert got["backward"] == peers * (4 * root + sum(4 * n + wire(n, 256) for n in blocks))
    got = pool.run(bytes_of_a_step, QuantizedCollectives(all_gather=False), world_size=size)[0]
    assert got["forward"] == plain["forward"]
    assert got["backward"] == peers * (wire(root, 256) + sum(4 * n + wire(n, 256) for n in blocks))


def training_curve(ctx, collectives: Any, strategy: ShardingStrategy, steps: int = 100) -> list[float]:
    """Losses of a small regression, averaged over the ranks."""
    torch.manual_seed(0)
    model, teacher = Net(blocks=2, width=48), nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    fully_shard(model, policy={Block}, process_group=ctx.group, strategy=strategy, collectives=collectives)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        x = torch.randn(ctx.world_size, 32, 8)[ctx.rank]
        loss = (model(x) - teacher(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=ctx.group)
        losses.append(mean.item() / ctx.world_size)
    return losses


def test_training_is_close_to_that_without_quantisation(pool):
    plain = torch.tensor(pool.run(training_curve, None, FULL)[0])
    assert plain[-1] < plain[0] / 10
    for strategy in some((FULL, NO_SHARD), 1):
        run = pool.run(training_curve, QuantizedCollectives(), strategy)
        assert run[0] == run[1]
        again = pool.run(training_curve, QuantizedCollectives(), strategy, steps=10)
        assert again[0] == run[0][:10], "not reproducible"
        curve = torch.tensor(run[0])
        assert ((curve - plain).abs() / plain).max() < 0.1
        assert (curve[-10:].mean() / plain[-10:].mean() - 1).abs() < 0.05
        assert not torch.equal(curve, plain), "nothing was quantised"
