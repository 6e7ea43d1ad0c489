"""Buffers that are allocated once: ``static_buffers=True``, and collectives with an ``allocate``."""

import copy
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Net
from on_ranks import ranks
from parity import check_same_gradients, full_params
from recording import GRAD_OP, NO_SHARD, Recording, collectives_of
from torch import Tensor, nn

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, MixedPrecision, fully_shard
from flatshard._base.trace import record_events
from flatshard._composable.find import units_below

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def net(blocks: int = 6) -> nn.Module:
    return Net(blocks, width=10, inputs=10, outputs=10)


def static(module: nn.Module, policy: Any = (Block,), **options: Any) -> nn.Module:
    return fully_shard(module, policy={*policy}, **{"static_buffers": True} | options)


class Allocating(Recording):
    """The built-in collectives with an allocator of their own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.made: list[Tensor] = []
        self.elsewhere: list[str] = []

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.made.append(torch.full((numel,), 7, dtype=dtype, device=device))
        return self.made[-1]

    def note(self, call: str, *tensors: Tensor) -> None:
        for tensor in tensors[:1] if call == "all_gather" else tensors:
            start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            if not any(m.data_ptr() <= start and stop <= m.data_ptr() + m.nbytes for m in self.made):
                self.elsewhere.append(call)
        super().note(call)


def trained(ctx: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = fully_shard(net(4), policy={Block}, process_group=ctx.group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(4):
        torch.manual_seed(10 * number + ctx.rank)
        if number == 2:  # a different order, so the prefetched unit is not the next one
            model.order.reverse()
        with flatshard.no_sync(model) if number % 2 else torch.enable_grad():
            model(torch.randn(3, 10)).square().mean().backward()
        model(torch.randn(3, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@ranks(3)
def test_trains_alike(ctx: Any) -> None:
    for options in ({}, {"mixed_precision": BF16}, {"strategy": GRAD_OP}, {"strategy": NO_SHARD}):
        ctx.note(str(options))
        usual, once = trained(ctx, **options), trained(ctx, static_buffers=True, **options)
        allocated = trained(ctx, collectives=lambda *place: Allocating(*place), **options)
        collectives = collectives_of(allocated)
        assert not collectives.elsewhere
        uses = {"all_reduce"} if options.get("strategy") is NO_SHARD else {"all_gather", "reduce_scatter"}
        assert {*collectives.calls} >= uses
        for a, b, c in zip(*(full_params(model).values() for model in (usual, once, allocated)), strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c)  # gloo adds in another dtype if it need not cast


class Partly(Block):
    """A block with a parameter that only rank 0 uses, one that no rank uses, and one without elements."""

    def __init__(self, width: int, idle: bool) -> None:
        super().__init__(width)
        self.linear = nn.Identity() if idle else self.linear
        self.on_one = nn.Parameter(torch.ones(width))
        self.on_none, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.on_one if dist.get_rank() == 0 else 0.0)


@ranks(2)
def test_units_that_lack_gradients_share_buffers(ctx: Any) -> None:
    """They are freed at the end of the backward, unless another unit needs the memory earlier."""
    for idle, when in itertools.product([False, True], [None, *BackwardPrefetch]):
        for blocks in (4, 3):
            torch.manual_seed(0)
            model = Net(blocks)
            model.blocks = nn.ModuleList(Partly(4, idle) for _ in range(blocks))
            plain = copy.deepcopy(model)
            static(model, [Partly], process_group=ctx.group, backward_prefetch=when)
            for each in (model, plain):
                for _ in range(2):
                    each(torch.ones(2, 4) + ctx.rank).square().mean().backward()
            for p in plain.parameters():
                if (grad := p.grad) is not None or p.shape == (4,):
                    p.grad = torch.zeros_like(p) if grad is None else grad
                    dist.all_reduce(p.grad, group=ctx.group)
                    p.grad /= ctx.world_size
            check_same_gradients(model, plain, 1e-6)


class OnOne(Block):
    """A block with a parameter that only rank 0 uses, if it ``differs``."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.on_one, self.differs = nn.Parameter(torch.ones(width)), True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.on_one if dist.get_rank() == 0 or not self.differs else 0.0)


def steps(ctx: Any, model: nn.Module, orders: list[list[int]]) -> Iterator[list[int]]:
    """Run a step in each order. All ranks must gather and reduce in one order, and bind units to the same buffers."""
    flats = [flat for unit in units_below(model) for flat in unit.handle.flats]
    for model.order in orders:
        yield model.order
        with record_events() as events:
            model(torch.ones(2, 4) + ctx.rank).square().mean().backward()
        made = [buffer.flat.data_ptr() for buffer in flats[0].ranks.pool.buffers]
        used = [flat.unsharded.flat.data_ptr() for flat in flats]
        mine = (
            [made.index(at) for at in used if at in made],
            [e for e in events if not e.startswith(("reshard", "lend"))],
        )
        every = [None] * ctx.world_size
        dist.all_gather_object(every, mine, group=ctx.group)
        assert every[0] == every[1]


@pytest.mark.parametrize("targets", [False, True])
@ranks(2)
def test_ranks_that_free_at_different_times_gather_in_one_order(ctx, targets):
    """Rank 1 frees a block when backward ends, or when another needs its buffer. Rank 0 has freed it by then."""
    torch.manual_seed(0)
    model = static(Net(7, block=OnOne), [OnOne], process_group=ctx.group)
    orders = [[0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [6, 4, 5, 0, 2, 1, 3], [1, 6, 3, 0, 2, 4, 5]]
    for order in steps(ctx, model, [*orders, *orders]):
        blocks = [model.blocks[i] for i in order]
        for before, block in itertools.pairwise(blocks if targets else ()):  # mostly not the next one
            others = [each for each in blocks if each not in (block, before)]
            flatshard.configure(block, backward_prefetch=others[:1])


@ranks(2)
def test_ranks_that_free_in_different_orders_choose_the_same_buffers(ctx):
    model = static(Net(4, block=OnOne), [OnOne], process_group=ctx.group, forward_prefetch=False)
    model.blocks[0].differs = False
    for _ in steps(ctx, model, [[0, 1], [2, 0, 1]]):
        pass


def test_addresses_stay_and_are_few(world):
    world(4)
    model = static(net(8))
    units, addresses = units_below(model), []
    for unit in units[1:]:
        unit.module.register_forward_pre_hook(
            lambda m, args: addresses.append(m.linear.weight.untyped_storage().data_ptr())
        )
    for _ in range(4):
        model(torch.randn(2, 10)).sum().backward()
    assert addresses == addresses[:8] * 4
    assert len({*addresses}) == 2
    assert all(a != b for a, b in itertools.pairwise(addresses[:8]))
    pool = units[0].handle.flats[0].ranks.pool
    block, root = (u.handle.flats[0].layout.padded_numel * 4 for u in (units[1], units[0]))
    assert pool.nbytes == (root + 2 * block) + (root + block)  # unsharded units in use; and inputs


def test_units_of_earlier_calls_share_the_buffers(world):
    world(4)
    inner = [static(Block(10)), static(net(2))]
    inner[1](torch.randn(2, 10)).sum().backward()
    model = static(nn.Sequential(*inner))
    model(torch.randn(2, 10)).sum().backward()
    first, *others = [flat.ranks.pool.buffers for unit in units_below(model) for flat in unit.handle.flats]
    assert others == [first] * 3
    assert len({*first}) == len(first)


def test_a_unit_whose_memory_is_taken_gets_other_memory_unless_its_graph_has_views_of_it(world):
    world(4)
    model = static(net())
    loss = model(torch.randn(2, 10)).sum()
    flatshard.unshard(model.blocks[0])
    message = r"unit 'blocks.2' shares a static buffer with another unit, and this backward"
    with pytest.raises(RuntimeError, match=message):
        flatshard.unshard(model.blocks[2])
    flatshard.reshard(model.blocks[0])
    loss.backward()
    del loss
    for block in model.blocks:
        flatshard.unshard(block)
    assert len({block.linear.weight.data_ptr() for block in model.blocks}) == 6
    flatshard.reshard(model)
    model(torch.randn(2, 10)).sum().backward()


def test_units_of_several_flat_parameters_are_unsharded_in_any_order(world):
    world(4)
    linear = functools.partial(nn.Linear, 8, 8, bias=False)
    pairs = [nn.Sequential(linear(), linear().requires_grad_(False)) for _ in range(3)]  # two flat parameters each
    units = [*pairs, *(linear() for _ in range(3))]
    fully_shard(nn.Sequential(*units), policy=CustomPolicy(lambda m: m in units), static_buffers=True)
    rng, are_unsharded = random.Random(0), dict.fromkeys(units, False)
    for _ in range(100):
        unit = rng.choice(units)
        (flatshard.reshard if are_unsharded[unit] else flatshard.unshard)(unit)
        are_unsharded[unit] = not are_unsharded[unit]
        weights = [p for unit, is_unsharded in are_unsharded.items() if is_unsharded for p in unit.parameters()]
        assert len({p.data_ptr() for p in weights}) == len(weights)
