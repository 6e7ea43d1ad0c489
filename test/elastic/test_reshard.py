"""``redistribute``: training continues on other ranks with the same model, bit for bit, and counted bytes."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from event_lines import sharded, train
from fuzz.random_options import layout_named
from models import Block, NormNet
from models import Net as PlainNet
from on_ranks import ranks
from pairs import all_pairs, some, thorough
from parity import whole_gradients
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard.checkpoint import full_state_dict, optim_state_dict
from flatshard.elastic import LostShardsError, redistribute
from flatshard.tensors import shard_info

S = ShardingStrategy
Optimizer = torch.optim.Optimizer
WORLDS = (1, 2, 3, 4, 3, 2) if thorough else (1, 3, 4, 2)


class Net(NormNet):
    """A net with buffers and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__(blocks=2, width=24)
        self.mean = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.tensor(0.5))  # without dimensions: one rank has it
        self.front.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + 0 * self.mean(x)


def network(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def adamw(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) > 1]
    vectors = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "lr": 1e-2}], lr=1e-3, amsgrad=True)


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def step(model: nn.Module, optimizer: Optimizer, number: int, rank: int = 0, size: int = 1) -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    optimizer.zero_grad()
    mean = x.mean(0)
    x = x.chunk(size)[rank].to(next(model.parameters()).dtype)
    (model(x) - mean.to(x.dtype)).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + number % 3)
    optimizer.step()


def whole(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return all values from all ranks of the model."""
    return [full_state_dict(model), whole_gradients(model), optim_state_dict(model, optimizer, full=True)["state"]]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32), "dtype": torch.float32},
    "bf16 sums": {"mixed_precision": MixedPrecision(torch.bfloat16), "dtype": torch.float32},
    "static": {"static_buffers": True, "backward_prefetch": None},
}
STRATEGIES = (S.FULL_SHARD, S.SHARD_GRAD_OP, S.SHARD_OPTIM, S.NO_SHARD)
CASES = some(
    all_pairs(STRATEGIES, tuple(OPTIONS), (None, "rows", "whole", "blocks"), (adamw, momentum)), 5
)  # each value at least once


class OfRank:
    """The model on one rank while it takes part."""

    def __init__(self, group: Any, make: Callable[[nn.Module], Optimizer], on_meta: bool, **options: Any) -> None:
        dtype = options.pop("dtype", torch.float64)
        self.model: nn.Module = network(dtype)
        if on_meta:
            self.model.to("meta")
        at = {"device_mesh": group} if options.get("strategy", S.FULL_SHARD).is_hybrid else {"process_group": group}
        fully_shard(self.model, policy={type(self.model.blocks[0])}, **at, **options)
        self.optimizer = make(self.model)
        self.objects = [*self.model.parameters(), self.model, self.optimizer]

    def check_objects(self) -> None:
        now = [*self.model.parameters(), self.model, self.optimizer]
        assert all(a is b for a, b in zip(now, self.objects, strict=True))
        assert self.optimizer.state.keys() <= set(self.model.parameters())


@ranks(4, timeout=100)
@pytest.mark.time_limit(110)
def test_worlds(ctx):
    """Grow and shrink a run, with steps in between. Each change keeps all bits, and the run equals one process's."""
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)} | {4: ctx.group}
    for strategy, option, layout, make in CASES:
        ctx.note(f"{strategy} {option} {layout} {make.__name__}")
        options = {"strategy": strategy, "layout": layout_named(layout), **OPTIONS[option]}
        mine = OfRank(ctx.alone, make, False, **options) if ctx.rank == 0 else None
        alone = network(options.get("dtype", torch.float64))
        twin = make(alone)
        for number, (before, now) in enumerate(zip((1, *WORLDS), WORLDS, strict=False)):
            if ctx.rank < max(before, now):
                new, over = groups[now], groups[max(before, now)]
                if mine is None:
                    mine = OfRank(ctx.alone, make, True, **options)
                expected = whole(mine.model, mine.optimizer) if ctx.rank < before else None
                group = new if ctx.rank < now else None
                if before != now:
                    redistribute(mine.model, [mine.optimizer], process_group=group, participants=over)
                if ctx.rank < now:
                    found = whole(mine.model, mine.optimizer)
                    own = torch.cat([buffer.double().reshape(-1) for buffer in mine.model.buffers()])
                    dist.broadcast(first := own.clone(), 0, group=new)
                    if expected is not None:
                        same(found, expected)
                    else:  # a joining rank has the buffers of the first rank
                        torch.testing.assert_close(own, first, rtol=0, atol=0)
                    mine.check_objects()
                    step(mine.model, mine.optimizer, number, ctx.rank, now)
                else:
                    with pytest.raises(RuntimeError, match="has moved to other ranks"):
                        mine.model(torch.zeros(2, 3, dtype=options.get("dtype", torch.float64)))
                    mine = None
            step(alone, twin, number)
        if mine is not None and option in ("plain", "static"):
            values = full_state_dict(mine.model)
            for name, value in alone.state_dict().items():
                if not name.startswith("mean."):
                    torch.testing.assert_close(
                        values[name], value, rtol=1e-9, atol=1e-9, msg=f"{name} {strategy} {layout}"
                    )


def mesh_of(ctx: Any, shape: tuple[int, int]) -> Any:
    return ctx.device_mesh(shape, ("replicate", "shard"))


HYBRID = (S.HYBRID_SHARD, S.HYBRID_SHARD_ZERO2, S.HYBRID_FULL_SHARD, S.HYBRID_SHARD_OPTIM)


@pytest.mark.parametrize("strategy", some(HYBRID, 2))
@ranks(4)
def test_meshes(ctx, strategy):
    """Reshard two replicas of two shards to one of four, then to four of one. Values within a replica are not sent."""
    mine = OfRank(mesh_of(ctx, (2, 2)), adamw, False, strategy=strategy)
    alone = network()
    twin = adamw(alone)
    for number, shape in enumerate(((2, 2), (1, 4), (4, 1), (2, 2))):
        step(mine.model, mine.optimizer, number, ctx.rank, 4)
        step(alone, twin, number)
        expected = whole(mine.model, mine.optimizer)
        sent = redistribute(mine.model, mine.optimizer, device_mesh=mesh_of(ctx, shape))
        assert sent == 0 or number
        same(whole(mine.model, mine.optimizer), expected)
        mine.check_objects()
    values = full_state_dict(mine.model)
    torch.testing.assert_close(values["head.weight"], alone.head.weight.detach(), rtol=1e-9, atol=1e-9)


@ranks(3)
def test_bytes(ctx):
    """Ranks send exactly the bytes that others lack: parameters and one momentum, in double precision."""
    two = dist.new_group([0, 1])
    mine = OfRank(ctx.group, momentum, False)
    step(mine.model, mine.optimizer, 0, ctx.rank, 3)
    mine.optimizer.zero_grad()
    every: list[Any] = [None] * 3

    def here(there: bool = True) -> list[dict[str, range]]:
        infos = {n: shard_info(p) for n, p in mine.model.named_parameters()} if there else {}
        dist.all_gather_object(every, {n: (i.start, i.stop) for n, i in infos.items()}, group=ctx.group)
        return [{n: range(*span) for n, span in row.items()} for row in every]

    before = here()
    sent = redistribute(mine.model, mine.optimizer, process_group=two if ctx.rank < 2 else None, participants=ctx.group)
    after = here(ctx.rank < 2)
    dist.all_gather_object(every, sent, group=ctx.group)
    lacked = [{n: len(set(r) - set(before[rank][n])) for n, r in after[rank].items()} for rank in range(3)]
    frozen = {n for n, p in mine.model.named_parameters() if not p.requires_grad}
    assert sum(every) == sum(8 * n * (1 if name in frozen else 2) for row in lacked for name, n in row.items()) > 0


@ranks(2)
def test_refusals(ctx):
    """Unsupported models and arguments raise on all ranks, and nothing changes."""

    def refused(error: type[Exception], text: str, model: nn.Module, optimizer: Any = (), **given: Any) -> None:
        before = full_state_dict(model)
        with pytest.raises(error, match=text):
            redistribute(model, optimizer, **{"process_group": ctx.alone, "participants": ctx.group, **given})
        same(full_state_dict(model), before)

    def sharded(**options: Any) -> nn.Module:
        return fully_shard(network(), policy={nn.Linear}, process_group=ctx.group, **options)

    model = sharded()
    refused(ValueError, "steps a parameter of shape", model, momentum(network()))
    with flatshard.no_sync(model):
        model(torch.zeros(2, 3, dtype=torch.float64)).sum().backward()
    refused(RuntimeError, "hold gradients", model)
    model = sharded()
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="shown"):
        redistribute(model, process_group=ctx.alone, participants=ctx.group)
    flat = sharded()
    refused(NotImplementedError, "flat_parameters", flat, torch.optim.SGD(flatshard.flat_parameters(flat), 0.1))
    whole_matrices = flatshard.optim.WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor)
    refused(NotImplementedError, "WholeParameterOptimizer", model, whole_matrices)
    odd = fully_shard(network(), policy={(nn.Linear, NormNet)[ctx.rank]}, process_group=ctx.alone)
    with pytest.raises(ValueError, match="another model"):
        redistribute(odd, process_group=ctx.group, participants=ctx.group)
    if ctx.rank:
        model.register_buffer("own", torch.zeros(2, 3))
        adam = torch.optim.Adam(model.parameters())
        adam.state[next(model.parameters())]["rows"] = torch.zeros(3, 3)
    with pytest.raises((NotImplementedError, RuntimeError), match="'rows'"):
        redistribute(model, adam if ctx.rank else (), process_group=ctx.group, participants=ctx.group)
    meta = fully_shard(network().to("meta"), policy={nn.Linear}, process_group=ctx.alone)
    with pytest.raises(LostShardsError, match="no rank has any part"):
        redistribute(meta, process_group=ctx.group, participants=ctx.group)


@ranks(2)
def test_lets_go(ctx):
    """Old shards, gradients and the old group's runtime are freed, and so is a model whose rank has left."""
    mine = OfRank(ctx.group, adamw, False)
    step(mine.model, mine.optimizer, 0, ctx.rank, 2)
    shards = [weakref.ref(f.shard) for u in flatshard._composable.find.units_below(mine.model) for f in u.handle.flats]
    runtime = weakref.ref(flatshard._composable.find.units_below(mine.model)[0].context)
    again = dist.new_group([0, 1])
    redistribute(mine.model, mine.optimizer, process_group=again, participants=ctx.group)
    assert not any(ref() for ref in shards)
    assert runtime() is None
    step(mine.model, mine.optimizer, 1, ctx.rank, 2)
    redistribute(mine.model, mine.optimizer, process_group=None if ctx.rank else ctx.alone, participants=ctx.group)
    if ctx.rank:
        with pytest.raises(RuntimeError, match="has moved to other ranks"):
            mine.model(torch.zeros(2, 3, dtype=torch.float64))
        gone = weakref.ref(mine.model)
        del mine
        gc.collect()
        assert gone() is None


@ranks(2)
def test_a_default_device(ctx):
    """Sent tensors ignore the default device: they are neither empty nor slow."""
    first = ctx.rank == 0
    mine = OfRank(ctx.alone, adamw, on_meta=not first)
    if first:
        step(mine.model, mine.optimizer, 0)
    expected = whole(mine.model, mine.optimizer) if first else None
    with torch.device("meta"):
        redistribute(mine.model, mine.optimizer, process_group=ctx.group, participants=ctx.group)
    found = whole(mine.model, mine.optimizer)
    if first:
        same(found, expected)


class Halves(nn.Linear):
    """Halves its bias in each forward, by new memory."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.data = self.bias.data * 0.5
        return super().forward(x)


@pytest.mark.parametrize("static_buffers", [False, True])
@ranks(2)
def test_changes_by_a_forward_are_kept_on_one_rank(ctx, static_buffers: bool):
    """After the move nothing is gathered any more."""
    model = nn.Sequential(Halves(2, 2), Halves(2, 2))
    fully_shard(model, policy={Halves}, process_group=ctx.group, static_buffers=static_buffers)
    model(torch.ones(1, 2))  # with a graph
    redistribute(model, process_group=ctx.alone, participants=ctx.group)
    before = [layer.bias.detach().clone() for layer in model]
    model(torch.ones(1, 2))
    assert all(torch.equal(layer.bias, bias * 0.5) for layer, bias in zip(model, before, strict=True))


@ranks(2)
def test_what_was_configured_moves(ctx):
    """A divisor set by the user stays; otherwise it is the new number of ranks."""
    for divisor in (None, 1.0):
        model = fully_shard(nn.Linear(3, 3), process_group=ctx.alone)
        if divisor is not None:
            flatshard.configure(model, divide_factor=divisor)
        redistribute(model, process_group=ctx.group, participants=ctx.group)
        model(torch.ones(1, 3)).sum().backward()
        assert all((p.grad == 2 / (divisor or 2)).all() for p in model.parameters())


@ranks(2)
def test_events(ctx):
    """After resharding, a model gathers, reduces and frees like one that was sharded on those ranks."""
    here, moved = sharded(ctx, PlainNet()), fully_shard(PlainNet(), policy=Block, process_group=ctx.alone)
    for _ in range(2):
        train(moved)
    redistribute(moved, process_group=ctx.group, participants=ctx.group)
    for _ in range(3):
        assert train(moved) == train(here)
