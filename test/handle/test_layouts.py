"""Layouts on real ranks: the shapes of shards, operations that need them, and everything else unchanged.

The fuzzers train and save in all layouts (test_fuzz.py, test_resharding.py); test_layout.py covers plans.
"""

import copy
import warnings

import fence
import pytest
import torch
from expecttest import assert_expected_inline
from on_ranks import ranks
from parity import check_same_params, step_all, twins
from torch import Tensor, nn

import flatshard
from flatshard import CustomPolicy, fully_shard
from flatshard.layouts import Blocks, Rows, Whole, work_of
from flatshard.optim import get_total_norm
from flatshard.tensors import shard_info

FREE = 1e9  # unlimited padding


class Net(nn.Module):
    """A channels-last convolution, matrices, vectors, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.up = nn.Linear(5 * 4, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(self.conv(x).relu().flatten(1)))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def mixed(fqn: str, param: nn.Parameter) -> flatshard.layouts.Layout | None:
    return {
        **dict.fromkeys(("conv.weight", "up.weight"), Rows(max_padding=FREE)),
        "norm.weight": Blocks(4, FREE),
        "down.weight": Whole(max_padding=FREE),
    }.get(fqn)


def parts(ctx) -> list[list[str]]:
    """Describe each parameter by its name, its owner, and this rank's shape and first row."""
    model = fully_shard(net(), process_group=ctx.group, layout=mixed)
    found = []
    for name, param in model.named_parameters():
        info = shard_info(param)
        assert tuple(param.shape) == info.part_shape
        assert tuple(flatshard.full_shape(param)) == info.shape
        assert info.rows is None or info.rows[1] - info.rows[0] == param.shape[0]
        first = "" if info.rows is None or not param.numel() else f" from {info.rows[0]}"
        found.append([name, str(info.owner), f"{'x'.join(map(str, param.shape)) if param.numel() else '-'}{first}"])
    return found


def test_parts(pool):
    """Row shards keep their dimensions, full parameters are each on one rank, and a layout may be chosen for each
    parameter."""
    lines = []
    for rows in zip(*pool.run(parts, world_size=3), strict=True):
        lines.append("".join(f"{text:17}" for text in (*rows[0][:2], *(row[2] for row in rows))).rstrip())
    assert_expected_inline(
        "\n".join(lines),
        """\
scale            0                1                -                -
conv.weight      0                5x3x3x3 from 0   -                -
conv.bias        0                5                -                -
up.weight        None             -                9x20 from 0      4x20 from 9
up.bias          0                13               -                -
norm.weight      0                13               -                -
norm.bias        None             8                5                -
down.weight      2                -                -                7x13 from 0
down.bias        2                -                -                7""",
    )


LAYOUTS = {"pairs": Rows(2, FREE), "blocks": Blocks(6, FREE), "whole": Whole(FREE), "mixed": mixed}


@pytest.mark.parametrize("name", LAYOUTS)
@ranks(3)
def test_whole_parameters_gradients_and_norms(ctx, name: str) -> None:
    """Quantised collectives see one flat buffer, so its padding is zero whatever the memory held before."""
    x, reference = torch.randn(4, 3, 2, 2), net()
    reference(x).square().mean().backward()
    total = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    for collectives in (None, flatshard.comm.QuantizedCollectives()):
        with fence.install():  # fresh memory is NaN
            model = fully_shard(net(), process_group=ctx.group, layout=LAYOUTS[name], collectives=collectives)
            model(x).square().mean().backward()
        with flatshard.summon_full_params(model, with_grads=True):
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(p, q)
                assert float((p.grad - q.grad).norm()) <= (0.15 if collectives else 1e-5) * float(q.grad.norm())
                p.grad.mul_(3)
        if collectives is None:
            torch.testing.assert_close(get_total_norm(model), total * 3)
            torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), total * 3)


@pytest.mark.parametrize(("world_size", "most"), [(2, 1.0), (8, 1.05)])
def test_work_on_whole_parameters_is_even_over_units(world, world_size, most):
    """Each unit has fewer matrices than ranks, so no unit is balanced; all of them together are."""
    world(world_size)
    sizes = ((16, 48), (16, 16), (16, 64), (64, 16))
    blocks = [nn.Sequential(*(nn.Linear(*size) for size in sizes)) for _ in range(24)]
    model = fully_shard(nn.Sequential(*blocks), policy=CustomPolicy(lambda m: m in blocks), layout=Whole(FREE))
    loads = [0] * world_size
    for p in model.parameters():
        info = shard_info(p)
        loads[info.owner] += work_of(info.shape)
    assert max(loads) <= most * sum(loads) / world_size, loads


def test_too_much_padding_is_cut_anywhere_with_a_warning_or_raises(world):
    world(4)
    odd = nn.Sequential(nn.Linear(101, 103, bias=False), nn.Linear(103, 107, bias=False))
    with pytest.raises(ValueError, match=r"unit '<root>': the layout of .* would take \d+% padding, over the limit"):
        fully_shard(odd, layout=Whole(max_padding=0.01, strict=True))
    assert type(odd[0].weight) is nn.Parameter  # nothing has changed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(copy.deepcopy(odd), strategy=flatshard.ShardingStrategy.NO_SHARD, layout=Whole(0.0))
    with pytest.warns(UserWarning, match=r"would take 105% padding.*cut anywhere.* allow it by max_padding=1\.06"):
        fully_shard(odd, layout=Whole(max_padding=0.01))


@ranks(2)
def test_a_policy_overrides_it_for_a_unit(ctx) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = CustomPolicy(lambda m: {"layout": Whole(FREE)} if m is model[1] else isinstance(m, nn.Linear))
    fully_shard(model, policy=policy, process_group=ctx.group)
    assert (len(model[0].weight.shape), len(model[1].weight.shape)) == (1, 2)
    text = str(flatshard.describe(model, verbose=True))
    assert "1.weight  8x8         whole" in text, text


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_small_units_on_a_million_ranks(world, strategy):
    """A rank holds at most its share of each unit and one element, and a gather at most an element of each rank."""
    world(2**20)
    model = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 8), nn.LayerNorm(8))
    fully_shard(model, policy={nn.Linear, nn.LayerNorm}, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    described = flatshard.describe(model)
    assert [flat.shard_numel for unit in described.units for flat in unit.flats] == [2, 1, 1]
    assert [flat.padded_numel for unit in described.units for flat in unit.flats] == [2**21, 2**20, 2**20]
    assert described.shard_nbytes == 4 * (2 + 1 + 1)


def test_choices_that_cannot_be(fake_group):
    for make, match in (
        (lambda: Rows(0), "Rows.multiple=0.*: cuts are between at least 1"),
        (lambda: Blocks(0), "Blocks.numel=0.*: cuts are between at least 1"),
        (lambda: Whole(max_padding=-1), "max_padding is a fraction of at least 0"),
        (lambda: fully_shard(nn.Linear(2, 2), layout=lambda fqn, p: 3), "layout of 'weight': 3. It must be flatsh"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            make()


class Byol(nn.Module):
    """A network, a predictor, and a copy of the network that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3))
        self.predictor = nn.Linear(3, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.still = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.predictor(self.online(x)).sum(1) - (self.target(x) + self.still(x).sum(1, keepdim=True)).sum(1)

    @torch.no_grad()
    def follow(self) -> None:
        for ours, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = 0.75 * target.data + 0.25 * ours.data
            target.data.mul_(0.75).add_(ours.data, alpha=0.25)
            target.mul_(0.75).add_(ours, alpha=0.25)
            target.lerp_(ours, 0.25)
            target.copy_(0.75 * target + 0.25 * ours)


@ranks(2, 3)
def test_a_network_and_its_copy_in_one_unit(ctx):
    """Both are cut alike, so the copy can follow shard by shard. A single frozen layer of several is no copy."""
    for policy in (None, {nn.Linear}):
        plain, model = twins(ctx, Byol, policy)
        optimizers = [torch.optim.SGD(m.online.parameters(), lr=0.5) for m in (plain, model)]
        x = torch.linspace(-1, 1, 18, dtype=torch.double).view(6, 3)
        for _ in range(2):
            for m, given in ((plain, x), (model, x.chunk(ctx.world_size)[ctx.rank])):
                m(given).square().mean().backward()
            step_all(optimizers)
            plain.follow()
            model.follow()
        check_same_params(model, plain)
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)), nn.Linear(2, 3))
    layers[0].requires_grad_(False)
    [unit] = flatshard.describe(fully_shard(layers, process_group=ctx.group)).units
    assert len(unit.flats) == 2
