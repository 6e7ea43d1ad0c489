"""Layouts on real ranks: shapes of the parts, what they are good for, and everything else as before.

Training and checkpoints in all layouts are in the fuzzers (test_fuzz.py, test_resharding.py); plans in test_layout.py.
"""

from __future__ import annotations

import copy
import textwrap
import warnings
from typing import Any

import fence
import pytest
import torch
from expecttest import assert_expected_inline
from on_ranks import ranks
from pairs import some
from pool import RankFailure
from torch import Tensor, nn

import flatshard
from flatshard import CustomPolicy, fully_shard
from flatshard.checkpoint import full_state_dict
from flatshard.layouts import Blocks, Elements, Rows, Whole, work_of
from flatshard.optim import get_total_norm
from flatshard.tensors import shard_info

FREE = 1e9  # no limit to padding


class Net(nn.Module):
    """A convolution in channels-last, matrices, vectors, a scalar."""

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
        "conv.weight": Rows(max_padding=FREE),
        "up.weight": Whole(max_padding=FREE),
        "norm.weight": Blocks(4, FREE),
    }.get(fqn)


def parts(ctx, layout: Any) -> list[list[str]]:
    """Of each parameter: its name, its owner, its rows on this rank, and the shape of what this rank has."""
    model = fully_shard(net(), process_group=ctx.group, layout=layout)
    found = []
    for name, param in model.named_parameters():
        info = shard_info(param)
        assert info is not None
        assert tuple(param.shape) == info.part_shape
        assert tuple(flatshard.full_shape(param)) == info.shape
        assert info.rows is None or info.rows[1] - info.rows[0] == param.shape[0]
        first = "" if info.rows is None or not param.numel() else f" from {info.rows[0]}"
        found.append([name, str(info.owner), f"{'x'.join(map(str, param.shape)) if param.numel() else '-'}{first}"])
    return found


def test_parts(pool):
    """By rows they keep their dimensions, whole ones lie on one rank; a layout for each parameter."""
    lines = []
    for head, layout, world_size in (
        ("Rows", Rows(max_padding=FREE), 2),
        ("Whole", Whole(max_padding=FREE), 2),
        ("mixed", mixed, 3),
    ):
        first, *others = pool.run(parts, layout, world_size=world_size)
        lines.append(f"{head + ', ' + str(world_size) + ' ranks':18}owner")
        for i, (name, owner, shape) in enumerate(first):
            columns = "".join(f"{text:17}" for text in (shape, *(rank[i][2] for rank in others)))
            lines.append(f"  {name:16}{owner:6}{columns}".rstrip())
    assert_expected_inline(
        "\n".join(lines),
        """\
Rows, 2 ranks     owner
  scale           0     1                -
  conv.weight     0     5x3x3x3 from 0   -
  conv.bias       0     5 from 0         -
  up.weight       None  7x20 from 0      6x20 from 7
  up.bias         1     -                13 from 0
  norm.weight     1     -                13 from 0
  norm.bias       1     -                13 from 0
  down.weight     1     -                7x13 from 0
  down.bias       1     -                7 from 0
Whole, 2 ranks    owner
  scale           1     -                1
  conv.weight     1     -                5x3x3x3 from 0
  conv.bias       1     -                5 from 0
  up.weight       0     13x20 from 0     -
  up.bias         1     -                13 from 0
  norm.weight     1     -                13 from 0
  norm.bias       1     -                13 from 0
  down.weight     1     -                7x13 from 0
  down.bias       0     7 from 0         -
mixed, 3 ranks    owner
  scale           1     -                1                -
  conv.weight     1     -                5x3x3x3 from 0   -
  conv.bias       1     -                5                -
  up.weight       0     13x20 from 0     -                -
  up.bias         1     -                13               -
  norm.weight     1     -                13               -
  norm.bias       1     -                13               -
  down.weight     2     -                -                91
  down.bias       1     -                7                -""",
    )


LAYOUTS = {
    "rows": Rows(max_padding=FREE),
    "pairs": Rows(2, FREE),
    "blocks": Blocks(6, FREE),
    "whole": Whole(FREE),
    "mixed": mixed,
}


@pytest.mark.parametrize("name", LAYOUTS)
@ranks(3)
def test_the_rest_of_the_interface(ctx, name: str) -> None:
    """Whole parameters and gradients, copies, flat parameters, replacing, norms, checks, local state."""
    reference, model = net(), fully_shard(net(), process_group=ctx.group, layout=LAYOUTS[name])
    x = torch.randn(4, 3, 2, 2)
    torch.manual_seed(1)
    for m in (reference, model):
        m(torch.ones(2, 3, 2, 2)).square().mean().backward()
    total = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    torch.testing.assert_close(get_total_norm(model), total)
    torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9), total)
    for (fqn, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        assert p.grad.shape == p.shape
        torch.testing.assert_close(p.grad.norm(), q.grad.norm(), msg=fqn)
    with flatshard.summon_full_params(model, with_grads=True):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p, q)
            torch.testing.assert_close(p.grad, q.grad)
            with torch.no_grad():
                p.mul_(2)
            p.grad.mul_(3)
    with torch.no_grad():
        for q in reference.parameters():
            q.mul_(2)
    for p in model.parameters():
        assert p.grad.shape == p.shape
    torch.testing.assert_close(get_total_norm(model), total * 3)
    copied = copy.deepcopy(model)
    assert [p.shape for p in copied.parameters()] == [p.shape for p in model.parameters()]
    torch.testing.assert_close(copied(x), reference(x))
    for p in copied.parameters():
        p.data = p.data.clone() + 1
    with torch.no_grad():
        for q in reference.parameters():
            q.add_(1)
    torch.testing.assert_close(copied(x), reference(x))
    copied.load_state_dict(net().state_dict())
    torch.testing.assert_close(copied(x), net()(x))
    saved = copy.deepcopy(flatshard.checkpoint.local_state_dict(copied))
    for flat in flatshard.flat_parameters(copied):
        flat.data.zero_()
    flatshard.checkpoint.load_local_state_dict(copied, saved)
    torch.testing.assert_close(copied(x), net()(x))
    copied.double()
    torch.testing.assert_close(copied(x.double()), net().double()(x.double()))


class BlockMomentum(torch.optim.Optimizer):
    """Momentum kept as 8-bit integers in blocks of 16 elements with a scale each, as 8-bit optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            flat, state = p.grad.detach().as_subclass(Tensor).reshape(-1), self.state[p]
            padded = nn.functional.pad(flat, (0, -flat.numel() % 16)).view(-1, 16)
            momentum = padded + 0.9 * state["int8"].to(padded.dtype) * state["scale"] if state else padded
            state["scale"] = momentum.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
            state["int8"] = (momentum / state["scale"]).round().to(torch.int8)
            p.sub_(0.1 * momentum.view(-1)[: flat.numel()].view(p.shape))


class RowNormalised(torch.optim.Optimizer):
    """Each row of a matrix moves by the same length."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            grad = p.grad.detach().as_subclass(Tensor)
            p.sub_(0.1 * (nn.functional.normalize(grad, dim=1) if p.dim() == 2 else grad))


def step_by(ctx, kind: type[torch.optim.Optimizer], layout: Any) -> bool:
    """Whether the parameters are those of one process with the same gradients, bit for bit."""
    reference, model = net(), fully_shard(net(), process_group=ctx.group, layout=layout)
    optimizers = kind(reference.parameters()), kind(model.parameters())
    optimizers[1].works_on_shards = isinstance(layout, Elements)  # else it raises, as what comes out is wrong
    for step in range(3):
        torch.manual_seed(10 * step + ctx.rank)
        model(torch.randn(4, 3, 2, 2)).square().mean().backward()
        with flatshard.summon_full_params(model, with_grads=True):
            for p, q in zip(reference.parameters(), model.parameters(), strict=True):
                # Of channels-last, blocks are counted in memory order: give the reference the memory's order too.
                p.grad = q.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    found = full_state_dict(model)
    return all(torch.equal(found[n], v) for n, v in reference.state_dict().items() if n != "conv.weight")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_optimizers_of_blocks_and_of_rows(pool, world_size):
    """What ``Blocks`` and ``Rows`` are for, and what is lost without them."""
    assert all(pool.run(step_by, BlockMomentum, Blocks(16, FREE), world_size=world_size))
    assert all(pool.run(step_by, RowNormalised, Rows(max_padding=FREE), world_size=world_size))
    assert not any(pool.run(step_by, BlockMomentum, Elements(), world_size=world_size))
    assert not any(pool.run(step_by, RowNormalised, Elements(), world_size=world_size))


@pytest.mark.parametrize("name", some(LAYOUTS, 2))
@ranks(3)
def test_with_quantized_collectives(ctx, name: str) -> None:
    """Other collectives see one flat buffer, whatever lies in it: its padding is zero, whatever memory held before."""
    x = torch.randn(4, 3, 2, 2)
    reference = net()
    reference(x).square().mean().backward()
    model = net()
    collectives = flatshard.comm.QuantizedCollectives()
    with fence.install():  # what memory held is NaN
        fully_shard(model, process_group=ctx.group, layout=LAYOUTS[name], collectives=collectives)
        model(x).square().mean().backward()
    with flatshard.summon_full_params(model, with_grads=True):
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(p, q)
            assert float((p.grad - q.grad).norm()) <= 0.15 * float(q.grad.norm())


@pytest.mark.parametrize(("world_size", "most"), [(2, 1.0), (4, 1.02), (8, 1.05)])
def test_work_on_whole_parameters_is_even_over_units(world, world_size, most):
    """Each unit has fewer matrices than ranks, so no unit is balanced; all of them together are."""
    world(world_size)
    blocks = [
        nn.Sequential(nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(24)
    ]
    model = fully_shard(nn.Sequential(*blocks), policy=CustomPolicy(lambda m: m in blocks), layout=Whole(FREE))
    loads = [0] * world_size
    for p in model.parameters():
        info = shard_info(p)
        loads[info.owner] += work_of(info.shape)
    assert max(loads) <= most * sum(loads) / world_size, loads


def fall_back(ctx) -> str:
    odd = nn.Sequential(nn.Linear(101, 103, bias=False), nn.Linear(103, 107, bias=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(copy.deepcopy(odd), process_group=ctx.group, layout=Whole(max_padding=0.01))
    (warning,) = [str(w.message) for w in caught]
    model = copy.deepcopy(odd)
    before = copy.deepcopy(model.state_dict())
    message = r"unit '<root>': the layout of .* would take \d+% padding, over the limit of 1%"
    with pytest.raises(ValueError, match=message):
        fully_shard(model, process_group=ctx.group, layout=Whole(max_padding=0.01, strict=True))
    assert type(model[0].weight) is nn.Parameter  # nothing has been changed
    torch.testing.assert_close(model.state_dict(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = {"strategy": flatshard.ShardingStrategy.NO_SHARD, "layout": Whole(0.0)}
        fully_shard(copy.deepcopy(odd), process_group=ctx.group, **whole)
    return warning


def test_too_much_padding_is_cut_anywhere_with_a_warning_or_raises(pool):
    text = pool.run(fall_back, world_size=4)[0]
    assert_expected_inline(
        "\n".join(textwrap.wrap(text, 110)),
        """\
unit '<root>': the layout of '0.weight', '1.weight' (Whole) would take 105% padding, over the limit of 1%, so
they are cut anywhere, as by Elements(). To keep the layout, allow it by max_padding=1.06, make larger units
(several layers each), or choose Elements() for some of the parameters by a callable layout;
flatshard.optim.WholeParameterOptimizer steps whole matrices in any layout""",
    )


@ranks(2)
def test_a_policy_overrides_it_for_a_unit(ctx) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = CustomPolicy(lambda m: {"layout": Whole(FREE)} if m is model[1] else isinstance(m, nn.Linear))
    fully_shard(model, policy=policy, process_group=ctx.group)
    assert (model[0].weight.dim(), model[1].weight.dim()) == (1, 2)
    text = str(flatshard.describe(model, verbose=True))
    assert "1.weight  8x8         whole" in text, text


def differ(ctx) -> None:
    layout = Rows(max_padding=FREE) if ctx.rank else Whole(FREE)
    model = fully_shard(nn.Linear(40, 41), process_group=ctx.group, layout=layout)
    model(torch.ones(1, 40))


def test_ranks_that_lay_out_differently_are_told(pool):
    with pytest.raises(RankFailure) as e:
        pool.run(differ)
    assert {f.type_name for f in e.value.failures} == {"OutOfStepError"}


def test_choices_that_cannot_be(fake_group):
    for made, match in (
        (lambda: Rows(0), "Rows.multiple=0.*: cuts are between at least 1"),
        (lambda: Blocks(0), "Blocks.numel=0.*: cuts are between at least 1"),
        (lambda: Whole(max_padding=-1), "max_padding is a fraction of at least 0"),
    ):
        with pytest.raises(ValueError, match=match):
            made()
    for layout, given in ((lambda fqn, p: 3, "3"), ("rows", "'rows'")):
        with pytest.raises(TypeError, match=rf"layout of 'weight': {given}\. It must be flatshard\.layouts\.Elements"):
            fully_shard(nn.Linear(2, 2), layout=layout)
