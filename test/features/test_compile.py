"""torch.compile: blocks compiled before or after sharding, and whole models. The graph breaks at the hooks of units."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from models import Mlp
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_parity, step_all
from pool import Pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard._config import Until
from flatshard._trace import record_events

WIDTH, BLOCKS = 8, 3


class Block(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inner = Mlp(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return x + inner * self.scale


def make(checkpointed: bool = False) -> nn.Sequential:
    return nn.Sequential(*[Block(checkpointed) for _ in range(BLOCKS)], nn.Linear(WIDTH, 3))


def compile_blocks(model: nn.Sequential, backend: Any) -> None:
    for block in model[:BLOCKS]:
        block.compile(backend=backend)


def compile_inner(model: nn.Sequential, backend: Any) -> None:
    """Part of a unit."""
    for block in model[:BLOCKS]:
        block.inner.compile(backend=backend)


def compile_model(model: nn.Sequential, backend: Any) -> None:
    model.compile(backend=backend)


Compile = Callable[[nn.Sequential, Any], None]

ORDERS: dict[str, tuple[Compile | None, Compile | None]] = {
    "blocks before": (compile_blocks, None),
    "blocks after": (None, compile_blocks),
    "in a unit before": (compile_inner, None),
    "in a unit after": (None, compile_inner),
    "model before": (compile_model, None),
    "model after": (None, compile_model),
}
"""What is compiled before, and what after sharding."""


def shard(model: nn.Sequential, group: Any, order: str, backend: Any, **options: Any) -> nn.Sequential:
    before, after = ORDERS[order]
    if before is not None:
        before(model, backend)
    fully_shard(model, policy={Block}, process_group=group, **options)
    if after is not None:
        after(model, backend)
    return model


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Ranks of their own, as compilers leave threads and caches behind."""
    p = Pool(4)
    yield p
    p.close()


def train(ctx, order: str, backend: str, checkpointed: bool, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model: list[nn.Module] = []

    def shard_it(m: nn.Sequential, group: Any) -> None:
        model.append(shard(m, group, order, backend, **options))

    check_parity(ctx, lambda: make(checkpointed), lambda step, n: torch.randn(n, WIDTH), steps=4, shard=shard_it)
    with record_events() as events:
        model[0](torch.randn(2, WIDTH).double()).sum().backward()
    whole = options.get("strategy", ShardingStrategy.FULL_SHARD).placements.until > Until.FORWARD
    assert events.count("all-gather 1") == (1 if whole else 2)
    assert events.count("reduce-scatter 1") == 1


@pytest.mark.parametrize(
    ("order", "backend", "strategy", "checkpointed", "world_size"),
    some(
        all_pairs(
            list(ORDERS), ("aot_eager", "eager"), ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM"), (False, True), (2, 3)
        ),
        6,
    ),
)
def test_parity(pool, order: str, backend: str, strategy: str, checkpointed: bool, world_size: int):
    options = {"strategy": ShardingStrategy[strategy]}
    pool.run(train, order, backend, checkpointed, options, world_size=world_size)


def count_graphs(ctx, order: str, options: dict[str, Any]) -> list[int]:
    """How many graphs have been compiled after each step."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")  # Dynamo decides what is compiled again, before any backend
    model = shard(make(), ctx.group, order, counter, **options)
    x = torch.randn(2, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    for _ in range(4):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(counter.frame_count)
    return counts


GRAPHS = 2  # that of the first block, whose input requires no gradient, and that of the others


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_compiled_twice(pool, order: str):
    """All blocks share one graph: it breaks before and after them, at a unit's hooks, and nowhere else."""
    bf16 = MixedPrecision(param_dtype=torch.bfloat16)
    cases = [{}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, {"mixed_precision": bf16}]
    for options in some(cases, 1, turn=list(ORDERS).index(order)):
        for counts in pool.run(count_graphs, order, options):
            assert counts == [GRAPHS] * 4, options


def train_tensor_parallel(ctx, order: str) -> list[int]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain)
    for block in model[:BLOCKS]:
        parallelize_module(block.inner, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["dp"].get_group(), order, counter)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    counts = []
    for step in range(4):
        x = torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        plain(x.flatten(0, 1)).square().mean().backward()
        model(x[mesh["dp"].get_local_rank()]).square().mean().backward()
        step_all(optimizers)
        counts.append(counter.frame_count)
    with flatshard.summon_full_params(model, writeback=False):
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor() if isinstance(got, DTensor) else got.data, expected.data)
    return counts


@pytest.mark.parametrize("order", some(["blocks before", "in a unit after", "model before"], 1, turn=1))
def test_tensor_parallel(pool, order: str):
    for counts in pool.run(train_tensor_parallel, order, world_size=4, timeout=110.0):
        assert counts == [GRAPHS] * 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("order", some(["blocks after", "model before"], 1))
def test_inductor(pool, order: str):
    pool.run(train, order, "inductor", False, {}, timeout=110.0)


@dataclasses.dataclass
class Output:
    hidden: Tensor
    loss: Tensor | None = None


class WithOutput(Block):
    """Returns a dataclass, as Hugging Face's models do."""

    def forward(self, x: Tensor) -> Output:
        return Output(super().forward(x))


class OfOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = WithOutput(), WithOutput()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).hidden).hidden


@ranks(2)
def test_units_compiled_as_one_graph_that_return_dataclasses(ctx):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = OfOutputs()
    low = MixedPrecision(torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True)
    for precision, close in ((None, {}), (low, {"rtol": 0.1, "atol": 0.1})):
        model = copy.deepcopy(plain)
        fully_shard(model, policy={WithOutput}, process_group=ctx.group, mixed_precision=precision)
        for block in (model.first, model.second):
            block.compile(fullgraph=True, backend="aot_eager")
        x = torch.ones(2, WIDTH)
        for _ in range(2):
            y = model(x)
            torch.testing.assert_close(y, plain(x), **close)
            y.sum().backward()


class Counted(flatshard.comm.GlooCollectives):
    """A user's collectives. They are outside flatshard's package, and dynamo cannot trace them."""

    gathers = 0

    def all_gather(self, output: Tensor, shard: Tensor) -> flatshard.comm.Pending:
        assert not torch.compiler.is_compiling()
        Counted.gathers += print("", end="") is None
        return super().all_gather(output, shard)


@ranks(2)
def test_collectives_of_the_user_are_not_compiled(ctx):
    """With ``fullgraph=True`` this was an error, as dynamo compiled what the hooks call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    model, Counted.gathers = copy.deepcopy(plain), 0
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    fully_shard(model, policy={Block}, collectives=lambda group, _: Counted(group), process_group=ctx.group)
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        y = model(x)
        torch.testing.assert_close(y, plain(x))
        y.sum().backward()
    assert Counted.gathers == 2 * 2 * len(model)


@pytest.mark.parametrize("grouped", [False, True])
@ranks(2)
def test_a_deep_copy_of_compiled_units(ctx, grouped: bool):
    """torch's copy of ``torch.compile(module)`` has none of its hooks."""
    torch._dynamo.reset()
    plain = [nn.Sequential(*(torch.compile(Block(), backend="eager") for _ in range(2)), Block()) for _ in range(2)]
    plain[1].load_state_dict(plain[0].state_dict())
    model = plain[1]
    for unit in [[model[0], model[2]]] if grouped else [model[0], model[1]]:
        fully_shard(unit, process_group=ctx.group)
    made = copy.deepcopy(fully_shard(model, process_group=ctx.group))
    assert str(flatshard.describe(made)) == str(flatshard.describe(model))
    x = torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH
    for each in (plain[0], made):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(made(x), plain[0](x))
    assert not torch.equal(made(x), model(x))
