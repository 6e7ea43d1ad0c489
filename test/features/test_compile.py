"""torch.compile of blocks, before or after sharding, and of full models. The graph breaks at the hooks of units."""

import copy
import dataclasses
import functools
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from models import Mlp
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_parity, check_same_gradients, full_params, step_all
from pool import COMPILER, Pool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecision, fully_shard
from flatshard import ShardingStrategy as S
from flatshard._base.trace import record_events

FULL = S.FULL_SHARD
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


def compile_part(model: nn.Sequential, what: str, backend: Any) -> None:
    """Compile a part of ``model``: ``"inner"`` layers, a ``"block"`` (one unit), all ``"blocks"``, or the ``"model"``."""
    blocks = model[:BLOCKS]
    inner = [block.inner for block in blocks]
    for module in {"blocks": blocks, "block": blocks[1:2], "inner": inner, "model": [model]}[what]:
        module.compile(backend=backend)


ORDERS = [f"{what} {when}" for what in ("blocks", "inner", "model") for when in ("before", "after")]
"""Compiled parts, each before or after sharding."""


def shard(model: nn.Sequential, group: Any, order: str, backend: Any, **options: Any) -> nn.Sequential:
    what, when = order.split()
    if when == "before":
        compile_part(model, what, backend)
    fully_shard(model, policy={Block}, process_group=group, **options)
    if when == "after":
        compile_part(model, what, backend)
    return model


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Start separate ranks, because compilers leave threads and caches behind."""
    p = Pool(4, preload=COMPILER)
    yield p
    p.close()


GRAPHS = 2  # one for the first block, whose input requires no gradient, and one for the others


def train(ctx, order: str, backend: str, checkpointed: bool, strategy: S) -> None:
    """All blocks share one graph, which breaks at the hooks around each unit. Nothing is compiled twice."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = check_parity(
        ctx,
        functools.partial(make, checkpointed),
        lambda step, n: torch.randn(n, WIDTH),
        steps=3,
        shard=functools.partial(shard, order=order, backend=counter, strategy=strategy),
    ).sharded
    assert 0 < counter.frame_count <= GRAPHS
    with record_events() as events:
        model(torch.randn(2, WIDTH).double()).sum().backward()
    assert events.count("all-gather 1") == (2 if strategy is FULL else 1)
    assert events.count("reduce-scatter 1") == 1
    counter = CompileCounterWithBackend("eager")
    torch.compile(lambda x: (flatshard.clip_grad_norm_(model, 1.0), x + 1), backend=counter)(torch.ones(2))
    assert (counter.frame_count, counter.op_count) == (1, 1)  # the user's own operation


CASES = all_pairs(ORDERS, ("aot_eager", "eager"), (FULL, S.SHARD_GRAD_OP, S.SHARD_OPTIM), (False, True))


@pytest.mark.parametrize(("order", "backend", "strategy", "checkpointed"), some(CASES, 5))
@ranks(2, timeout=110.0)
def test_parity(ctx, order: str, backend: str, strategy: S, checkpointed: bool):
    train(ctx, order, backend, checkpointed, strategy)


@ranks(4, timeout=110.0)
def test_tensor_parallel(ctx):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    plain = make().double()
    model = copy.deepcopy(plain)
    for block in model[:BLOCKS]:
        parallelize_module(block.inner, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard(model, mesh["dp"].get_group(), "inner after", counter)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(2):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        for each in (plain, model):
            each(x).square().mean().backward()
        step_all(optimizers)
        assert counter.frame_count == GRAPHS
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@ranks(2, timeout=110.0)
def test_inductor(ctx):
    """Compile one unit, with settings that make the C++ compiler fast."""
    import torch._inductor.config as config

    with config.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}):
        train(ctx, "block after", "inductor", False, FULL)


@pytest.mark.slow
@ranks(2)
def test_a_compiled_step_of_an_optimizer(ctx):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group, strategy="shard_optim")
    models = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in models]
    x = torch.ones(2, WIDTH)
    for model in models:
        model(x).square().sum().backward()
    torch.compile(optimizers[0].step, backend="aot_eager")()
    optimizers[1].step()
    torch.testing.assert_close(full_params(models[0]), full_params(models[1]), rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # gathers the stepped parameters
        torch.testing.assert_close(models[0](x), models[1](x), rtol=1e-4, atol=1e-5)


@dataclasses.dataclass
class Output:
    hidden: Tensor


class WithOutput(Block):
    """Returns a dataclass, like Hugging Face's models."""

    def forward(self, x: Output) -> Output:
        return Output(super().forward(x.hidden))


class Counted(flatshard.comm.GlooCollectives):
    """A user's collectives, outside flatshard's package. Dynamo cannot trace them."""

    gathers = 0

    def all_gather(self, output: Tensor, shard: Tensor) -> flatshard.comm.Pending:
        assert not torch.compiler.is_compiling()
        Counted.gathers += print("", end="") is None
        return super().all_gather(output, shard)


@ranks(2)
def test_units_compiled_as_one_graph(ctx):
    """Units return dataclasses. Calls of their hooks, such as a user's collectives, are not compiled."""
    torch.manual_seed(0)
    plain, x = nn.Sequential(WithOutput(), WithOutput()), Output(torch.ones(2, WIDTH))
    low = MixedPrecision(torch.bfloat16, output_dtype=torch.float32, cast_forward_inputs=True)
    for precision, close in ((None, {}), (low, {"rtol": 0.1, "atol": 0.1})):
        torch._dynamo.reset()
        model, Counted.gathers = copy.deepcopy(plain), 0
        options = {"mixed_precision": precision, "collectives": lambda group, _: Counted(group)}
        fully_shard(model, policy={WithOutput}, process_group=ctx.group, **options)
        for block in model:
            block.compile(fullgraph=True, backend="aot_eager")
        for _ in range(2):
            y = model(x).hidden
            torch.testing.assert_close(y, plain(x).hidden, **close)
            y.sum().backward()
        assert Counted.gathers == 2 * 2 * len(model)


@ranks(2)
def test_a_deep_copy_of_compiled_units(ctx):
    """torch's copy of ``torch.compile(module)`` loses its hooks."""
    for grouped in (False, True):
        torch._dynamo.reset()
        plain = nn.Sequential(*(torch.compile(Block(), backend="eager") for _ in range(2)), Block())
        model = copy.deepcopy(plain)
        for unit in [[model[0], model[2]]] if grouped else [model[0], model[1]]:
            fully_shard(unit, process_group=ctx.group)
        made = copy.deepcopy(fully_shard(model, process_group=ctx.group))
        assert str(flatshard.describe(made)) == str(flatshard.describe(model))
        x = torch.arange(2.0 * WIDTH).view(2, WIDTH) / WIDTH
        for each in (plain, made):
            each(x).square().mean().backward()
        check_same_gradients(made, plain, rtol=1e-5)
        assert all(p.grad is None for p in model.parameters())
