"""``flatshard.skip``: its arguments and results, and inner units on other process groups.

The fuzzer, under every option, and ``test_layer_drop`` test ranks that run different units.
"""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from parity import check_same_gradients, check_same_params, step_all, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatshard import BackwardPrefetch, describe, fully_shard, reshard, skip
from flatshard._base.trace import record_events

WIDTH = 4


@ranks(2)
def test_the_call(ctx):
    plain, model = twins(ctx, Net, {Block})
    block, x = model.blocks[0], torch.ones(2, WIDTH).double()
    both = skip(block, x, torch.tensor([3]))
    assert torch.equal(both[0], x)
    assert both[0].requires_grad
    assert both[1].tolist() == [3]
    both[0].sum().backward()
    assert all(p.grad is None for p in block.parameters())  # no rank ran it
    (block(x) if ctx.rank else skip(block, x)).sum().backward()  # an input that requires no gradient
    (plain.blocks[0](x).sum() / 2).backward()
    check_same_gradients(model, plain)
    with torch.no_grad():
        assert not skip(block, x).requires_grad
        assert skip(block) == ()
    with pytest.raises(ValueError, match=r"backward must reach unit 'blocks\.0', so pass a floating-point tensor"):
        skip(block, torch.tensor([3]))
    # The last rank has no more data.
    model.zero_grad()
    plain.zero_grad()
    (plain(x).square().mean() / 2).backward()
    (model(x).square().mean() if ctx.rank == 0 else skip(model, torch.zeros(()))).backward()
    check_same_gradients(model, plain)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)) if ctx.rank == 0 else skip(model) == ()
    assert {u.state for u in describe(model).units} == {"sharded"}


def test_a_checkpoint_recomputes_it(world):
    """Recomputation gathers inner units in the order of a forward, as ranks that run them do."""
    world(2)
    model = fully_shard(nn.Sequential(*(Block() for _ in range(3))), policy={Block}, backward_prefetch=None)
    steps = []
    for call in (model, functools.partial(skip, model)):
        with record_events() as events:
            checkpoint(call, torch.ones(2, WIDTH, requires_grad=True), use_reentrant=False).sum().backward()
        steps.append([event for event in events if event.startswith("all-gather")])
    assert steps[0] == steps[1]


@ranks(4)
def test_units_on_other_process_groups_inside(ctx):
    """Skipping a unit skips the inner units too, whether this rank ran them before or not."""
    elsewhere = torch.distributed.new_group()
    for before in (0, 2):  # steps that ran it before
        torch.manual_seed(0)
        plain = nn.Sequential(Block(), nn.Sequential(Block(), Block()), Block()).double()
        model = copy.deepcopy(plain)
        first, inner, _ = model
        for module in (inner[1], inner, first, model):
            fully_shard(module, process_group=elsewhere if module is inner else ctx.group)
        x = torch.randn(4, 3, WIDTH, dtype=torch.double)
        for step in range(before + 2):
            running = [rank for rank in range(4) if step < before or rank != 1]
            for rank in running:
                (plain(x[rank]).square().mean() / 4).backward()
            mine = x[ctx.rank]
            (model(mine) if ctx.rank in running else skip(model, mine)).square().mean().backward()
        check_same_gradients(model, plain)


class Paths(nn.Module):
    """Pairs of blocks between two layers. A rank runs the pairs of its path, and skips the others."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.pairs = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(3))
        self.skip: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda pair, x: x
        self.path: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        for number, pair in enumerate(self.pairs):
            x = pair(x) if number in self.path else self.skip(pair, x)
        return self.head(x)


@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@ranks(3)
def test_paths_that_differ_between_ranks_and_steps(ctx, prefetch):
    """Gradients and parameters are those of one process, whenever backward gathers: ahead, afterwards, or on demand."""
    plain, model = twins(ctx, Paths, {Block, nn.Sequential}, backward_prefetch=prefetch)
    model.skip = skip
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (plain, model)]
    everyone = [(0, 1, 2)] * 3
    for paths in (everyone, [(0, 1), (1, 2), (0, 2)], [(0,), (1,), ()], [(), (), (2,)], everyone, [(2,), (), (0, 1)]):
        inputs = torch.randn(3, 2, WIDTH, dtype=torch.double)
        for plain.path, x in zip(paths, inputs, strict=True):
            (plain(x).square().mean() / 3).backward()
        model.path = paths[ctx.rank]
        model(inputs[ctx.rank]).square().mean().backward()
        check_same_gradients(model, plain)
        step_all(optimizers)
    check_same_params(model, plain)


class Tower(nn.Module):
    """Frozen blocks for images, beside trained layers with a frozen block in between."""

    def __init__(self, skip: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.skip = skip
        self.words, self.project = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tower = nn.Sequential(Block(), Block()).requires_grad_(False)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.blocks[1].requires_grad_(False)

    def forward(self, ids: torch.Tensor, image: torch.Tensor | None = None, passes_by: bool = False) -> torch.Tensor:
        x = self.words(ids)
        x = self.skip(self.tower, x) if image is None else x + self.project(self.tower(image)).mean()
        x = self.blocks[0](x)
        x = self.skip(self.blocks[1], x.detach()) + x if passes_by else self.blocks[1](x)
        return self.blocks[2](x)


@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
@ranks(3)
def test_units_in_which_nothing_trains(ctx, prefetch):
    """Backward reaches frozen units as on ranks that run them, whatever tensors pass by a skipped unit."""
    torch.manual_seed(0)
    plain, model = Tower(lambda module, x: x).double(), Tower(skip).double()
    model.load_state_dict(plain.state_dict())
    options = {"process_group": ctx.group, "backward_prefetch": prefetch}
    fully_shard(model.tower, policy={Block}, **options)
    fully_shard(model, policy={Block}, **options)
    ids, image = torch.arange(3), torch.ones(2, WIDTH).double()
    # The ranks with an image, and those that skip the middle block. At first all skip it, before any has run it.
    cases = ((), (0, 1, 2)), ((1, 2), (0, 1)), ((), ()), ((0,), (2,)), ((0, 1, 2), (0, 1, 2))
    for number, (having, passing) in enumerate(cases):
        given = [(ids + rank % 2, image if rank in having else None, rank in passing) for rank in range(3)]
        for each in given:
            (plain(*each).square().mean() / 3).backward()
        with record_events() as events:
            model(*given[ctx.rank]).square().mean().backward()
        check_same_gradients(model, plain)
        assert events.count("all-gather tower.1") == 1, having  # not for backward
        assert events.count("all-gather blocks.1") == (2 if number else 1), passing
        assert {u.state for u in describe(model).units} == {"sharded"}


@pytest.mark.parametrize("beside", ["in a group", "another inside", "a tied parameter"])
@ranks(3)
def test_a_module_in_which_nothing_trains_beside_others(ctx, beside):
    """Parameters of its group or of its owners train. Without gradients, backward reaches it on no rank."""
    torch.manual_seed(0)
    plain, model = Tower(lambda module, x: x).double(), Tower(skip).double()
    for each in (plain, model) if beside == "a tied parameter" else ():
        each.tied = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
        each.tower[1].linear.weight = each.tied.weight  # that the outermost unit owns
    model.load_state_dict(plain.state_dict())
    groups = {
        "in a group": {(model.words, model.tower[1])},
        "another inside": {(model.words, model.tower[1].linear), (model.blocks[2], model.tower[1])},
        "a tied parameter": set(),
    }
    fully_shard(model, policy={*groups[beside], Block}, process_group=ctx.group)
    ids, image = torch.arange(3), torch.ones(2, WIDTH).double()
    for having in ((0, 2), (1,), (), (0, 1, 2)):
        given = [(ids + rank % 2, image if rank in having else None) for rank in range(3)]
        for each in given:
            (plain(*each).square().mean() / 3).backward()
        model(*given[ctx.rank]).square().mean().backward()
        check_same_gradients(model, plain)
        assert {u.state for u in describe(model).units} == {"sharded"}


@ranks(2, timeout=30)
def test_a_frozen_unit_beside_garbage_on_one_rank(ctx):
    """Models that one rank still has change nothing: those that trained, copies, and copies that trained."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), Block()]).double()
    plain[1].requires_grad_(False)
    x, garbage = torch.randn(2, 2, WIDTH).double(), []
    for kind in ("a model", "a copy", "a copy that trained"):
        ctx.note(kind)
        plain.zero_grad()
        model = nn.ModuleList(
            [fully_shard(b, process_group=ctx.group, reshard_after_forward=True) for b in copy.deepcopy(plain)]
        )
        other = model if kind == "a model" else copy.deepcopy(model)
        if kind == "a copy that trained":
            other[1](other[0](x[ctx.rank])).square().mean().backward()
        if kind == "a model":
            model = copy.deepcopy(model)
        if ctx.rank:
            garbage.append(other.requires_grad_(False))
        del other
        gc.collect()
        for _ in range(2):
            plain[1](plain[0](x[0])).square().mean().div(2).backward()
            hidden = model[0](x[ctx.rank])
            out = skip(model[1], hidden) if ctx.rank else model[1](hidden)
            (out.square().mean() * (1 - ctx.rank)).backward()
            check_same_gradients(model, plain)


@ranks(2, timeout=30)
def test_a_frozen_unit_of_a_model_made_after_an_error_on_one_rank(ctx):
    """Units whose forward raised on one rank are counted on the other alone."""

    def check(module, args, output):
        assert not ctx.rank, "only here"

    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), Block()]).double()
    plain[1].requires_grad_(False)
    x = torch.randn(2, 2, WIDTH).double()
    trained = fully_shard(copy.deepcopy(plain[0]).requires_grad_(False), process_group=ctx.group).requires_grad_(True)
    trained.linear.register_forward_hook(check)
    with contextlib.suppress(AssertionError):
        trained(x[ctx.rank])
    model = nn.ModuleList(
        [fully_shard(b, process_group=ctx.group, reshard_after_forward=True) for b in copy.deepcopy(plain)]
    )
    plain[1](plain[0](x[0])).square().mean().div(2).backward()
    hidden = model[0](x[ctx.rank])
    out = skip(model[1], hidden) if ctx.rank else model[1](hidden)
    (out.square().mean() * (1 - ctx.rank)).backward()
    check_same_gradients(model, plain)


@ranks(3)
def test_a_frozen_unit_behind_one_that_is_unfrozen_now_and_then(ctx):
    """Ranks that have the answers of earlier steps ask again, as backward comes to the unit only while the other trains."""
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(), Block(), Block()]).double()
    plain[1].requires_grad_(False)
    model = nn.ModuleList(
        [fully_shard(b, process_group=ctx.group, reshard_after_forward=True) for b in copy.deepcopy(plain)]
    )
    x = torch.randn(3, 2, WIDTH).double()
    for trains, running in (
        (False, (0, 1)),
        (True, (1, 2)),
        (False, (2,)),
        (True, (0,)),
        (False, ()),
        (True, ()),
        (True, (1,)),
    ):
        for net in (plain, model):
            net[0].requires_grad_(trains)
        for rank in range(3):
            y = plain[0](x[rank])
            (plain[2](plain[1](y) if rank in running else y).square().mean() / 3).backward()
        y = model[0](x[ctx.rank])
        y = model[1](y) if ctx.rank in running else skip(model[1], y)
        model[2](y).square().mean().backward()
        check_same_gradients(model, plain)
        assert {u.state for u in describe(model).units} == {"sharded"}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(WIDTH)), Block()

    def forward(self, x: torch.Tensor, runs: bool = True) -> torch.Tensor:
        return self.inner(self.scale * x) if runs else skip(self.inner, self.scale * x)


@ranks(2)
def test_a_frozen_unit_inside_one_that_is_unfrozen(ctx):
    """Ranks ask again, though the forward of the unit around it has not ended."""
    torch.manual_seed(0)
    plain = Scaled().double()
    plain.inner.requires_grad_(False)
    model = fully_shard(copy.deepcopy(plain), policy={Block}, process_group=ctx.group, reshard_after_forward=True)
    x = torch.randn(2, 2, WIDTH).double()
    for trains in (False, True, False):
        for net in (plain, model):
            net.scale.requires_grad_(trains)
            net.zero_grad()
        for runs in ((True, False), (False, True)):
            for rank in range(2):
                loss = (plain(x[rank]) if runs[rank] else plain.scale * x[rank]).square().mean() / 2
                if trains:
                    loss.backward()
            loss = model(x[ctx.rank], runs[ctx.rank]).square().mean()
            if trains:
                loss.backward()
            check_same_gradients(model, plain)


@ranks(2)
def test_a_frozen_unit_with_units_inside(ctx):
    """A rank that skips it gathers the units inside before it asks whether backward comes to it."""
    plain, tower = Block(), Scaled().requires_grad_(False)
    model = copy.deepcopy(plain)
    expected = copy.deepcopy(tower)
    fully_shard(tower, policy={Block}, process_group=ctx.group)
    fully_shard(model, process_group=ctx.group)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        y = model(x)
        (skip(tower, y) if ctx.rank else tower(y)).sum().backward()
        y = plain(x)
        ((expected(y).sum() + y.sum()) / 2).backward()
        check_same_gradients(model, plain)


@pytest.mark.parametrize(
    ("strategy", "mesh", "comes"),
    [
        *(("NO_SHARD", (4,), False), ("SHARD_OPTIM", (4,), False)),
        *(("HYBRID_SHARD", (4, 1), False), ("HYBRID_SHARD", (2, 2), True)),
    ],
)
@ranks(4)
def test_a_frozen_unit_of_any_strategy(ctx, strategy, mesh, comes):
    """Backward reaches it on all ranks or none, though it may not gather it: the user may reshard and unfreeze it before."""
    tower, plain = Block().requires_grad_(False), Block()
    model = copy.deepcopy(plain)
    device_mesh = ctx.device_mesh(mesh, ("replicate", "shard")[-len(mesh) :])
    for module in (tower, model):
        fully_shard(module, device_mesh=device_mesh, sharding_strategy=strategy)
    x = torch.ones(2, WIDTH)
    for having in ((), (), (0,), (3,)):
        y = model(x)
        y = y + 0 * tower(y if comes else x) if ctx.rank in having else skip(tower, y)
        reshard(tower)
        tower.requires_grad_(True)
        y.sum().backward()
        plain(x).sum().backward()
        check_same_gradients(model, plain)
        assert all(p.grad is None for p in tower.parameters())
        tower.requires_grad_(False)


@ranks(2)
def test_a_frozen_unit_that_backward_comes_to_now_and_then(ctx):
    """Backward reaches a loss network for generated data, not for real data. The skipped tensors decide on which."""
    net, maker = nn.Sequential(Block(), Block()).requires_grad_(False), Block()
    for module in (net, maker):
        fully_shard(module, policy={Block}, process_group=ctx.group)
    x = torch.ones(2, WIDTH)
    for step in range(3):
        real, made = (net(t) if step == 0 or ctx.rank else skip(net, t) for t in (x, maker(x)))
        with record_events() as events:
            (real - made).square().sum().backward()
        assert [e for e in events if e.startswith("all-gather")] == ["all-gather 1", "all-gather 0"]
    assert {u.state for u in describe(net).units} == {"sharded"}


@ranks(2)
def test_a_forward_without_gradients_in_between(ctx):
    """Generation may run some blocks only. A rank without data skips the blocks that training runs."""
    plain, model = twins(ctx, Net, {Block})
    x, order = torch.ones(2, WIDTH).double(), [0, 1, 2]
    for _ in range(2):
        for m in (plain, model):
            m.order = order
            m.zero_grad()
        (plain(x).square().mean() / 2).backward()
        (skip(model, torch.zeros(())) if ctx.rank else model(x).square().mean()).backward()
        check_same_gradients(model, plain)
        with torch.no_grad():
            for model.order in ([2, 1], [1]):
                model(x)
            skip(model) if ctx.rank else model(x)
