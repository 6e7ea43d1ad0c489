"""Block-wise int8 collectives: their errors, bytes and special values, and the quality of training with them."""

from typing import Any

import pytest
import torch
from models import Block
from on_ranks import ranks
from recording import Net, make_input, same_everywhere, sent_bytes
from torch import Tensor, nn

from flatshard import describe, fully_shard, summon_full_params, unshard
from flatshard.comm import DefaultCollectives, QuantizedCollectives


def quantised(group: Any, block: int = 256, by_default: bool = False) -> Any:
    collectives = QuantizedCollectives(block)(group, torch.device("cpu"))
    if by_default:  # the default over NCCL: calls that every backend knows
        collectives._inner = DefaultCollectives(group)
    return collectives


@pytest.mark.parametrize(("world_size", "by_default"), [(2, False), (4, False), (3, True)])
@ranks()
def test_quantisation_error_of_each_operation(ctx, by_default: bool):
    size, rank = ctx.world_size, ctx.rank
    for dtype, rounding in ((torch.float32, 0), (torch.float64, 0), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        for numel, block in ((4096, 256), (1000, 256), (96, 256), (100, 7)):  # tails, one short block, odd blocks
            ctx.note(f"{numel} {dtype} in blocks of {block}")
            torch.manual_seed(3)
            values = torch.randn(size, size * numel).mul(torch.logspace(-1, 1, size * numel)).to(dtype)
            mean = values.double().mean(0)
            collectives = quantised(ctx.group, block, by_default)
            step = values.double().abs().max().item() / 254 * (1 + 1e-6)

            def check(got: Tensor, expected: Tensor, bound: float, rounding: float = rounding) -> None:
                """Assert that the largest error is within the format's bound, and the mean error small."""
                got, expected = got.double(), expected.double()
                assert (got - expected).abs().max() <= bound + rounding * expected.abs().max()
                # 7e-3 is for one rounding of normal numbers. Magnitudes grow within a block, and all-reduce rounds
                # twice.
                assert 1e-3 < (got - expected).norm() / expected.norm() < 1.3e-2

            shards = values[:, :numel]
            output = torch.empty(size * numel, dtype=dtype)
            output.view(size, -1)[rank].copy_(shards[rank])
            collectives.all_gather(output, shards[rank].clone()).wait()
            assert same_everywhere(ctx.group, output)
            check(output, shards.reshape(-1), step)

            part = torch.empty(numel, dtype=dtype)
            collectives.reduce_scatter(part, values[rank].clone()).wait()
            check(part, mean.view(size, numel)[rank], step)

            whole = values[rank, : numel + 1].clone()  # not divisible by the number of ranks
            collectives.all_reduce(whole).wait()
            assert same_everywhere(ctx.group, whole)
            check(whole, mean[: numel + 1], 2 * step)


@ranks(2, 3)
def test_what_quantisation_keeps(ctx) -> None:
    size, rank = ctx.world_size, ctx.rank
    collectives = quantised(ctx.group, block=4)
    for dtype in (torch.uint8, torch.int64):  # sent unchanged
        everything = torch.arange(5 * size, dtype=dtype)
        output, shard = torch.zeros_like(everything), everything.view(size, -1)[rank].clone()
        collectives.all_gather(output, shard).wait()
        assert torch.equal(output, everything)

    # Zeros of either sign, a tiny number, an infinity and a NaN, one block each; equal on all ranks.
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

    # -0.0 on one rank and a value on another.
    part = torch.full((4,), -0.0)
    if rank == 1:
        part = torch.tensor([0.0, -0.0, 127, -1e-9])
    reduced = torch.empty(4)
    collectives.reduce_scatter(reduced, part.repeat(size)).wait()
    assert torch.equal(reduced, torch.tensor([0, 0, 127 / size, 0]))
    assert reduced.signbit().tolist() == [False, True, False, False]


@ranks(2)
def test_whole_parameters_are_exact(ctx) -> None:
    model = nn.Linear(8, 8)
    whole = model.weight.detach().clone()
    fully_shard(model, process_group=ctx.group, collectives=QuantizedCollectives())
    unshard(model)
    assert not torch.equal(model.weight, whole)
    with summon_full_params(model):
        assert torch.equal(model.weight, whole)


@ranks(3)
def test_bytes_on_the_wire(ctx):
    def wire(numel: int, block: int) -> int:
        """Return the bytes on the wire; ``block`` 0 means unquantised."""
        return -(-(numel + 4 * -(-numel // block)) // 16) * 16 if block else 4 * numel

    for collectives, gathers, reduces in (
        (None, 0, 0),
        (QuantizedCollectives(), 256, 256),
        (QuantizedCollectives(64), 64, 64),
        (QuantizedCollectives(reduce=False), 256, 0),
        (QuantizedCollectives(all_gather=False), 0, 256),
    ):
        model = Net(blocks=2, width=64)
        fully_shard(model, policy={Block}, process_group=ctx.group, collectives=collectives)
        for _ in range(4):  # the order is checked in these steps
            model(make_input(0, 2)).sum().backward()
        with sent_bytes() as forward:
            loss = model(make_input(0, 2)).sum()
        with sent_bytes() as backward:
            loss.backward()
        root, *blocks = (flat.shard_numel for unit in describe(model).units for flat in unit.flats)
        assert sum(forward) == 2 * sum(wire(n, gathers) for n in (root, *blocks))
        of_blocks = sum(wire(n, gathers) + wire(n, reduces) for n in blocks)
        assert sum(backward) == 2 * (wire(root, reduces) + of_blocks)
