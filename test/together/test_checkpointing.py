"""Activation checkpointing of every kind in every place, with dropout and tensor parallelism; the fuzzer has more.

The reference in float64 is the plain model without checkpoints in one process: it runs each rank's slice in turn from the
rank's random state. In bfloat16 it is the sharded model without checkpoints, bit for bit.
"""

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from checkpointed import BF16, FULL, GRAD_OP, HYBRID, KINDS, PLACES, WIDTH, WRAPS, Block, loss_of, make, parallelize
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_same_gradients, full_params, parts, step_all, twins
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import CustomPolicy, fully_shard
from flatshard._base.trace import record_events


def where(ctx, tensor_parallel: bool, hybrid: bool) -> tuple[dict[str, Any], Any, int, int]:
    """Return arguments of ``fully_shard``, the mesh of tensor parallelism, the data-parallel size, and this rank's index in
    it."""
    if not tensor_parallel:
        group = (ctx.group, ctx.alone) if hybrid else ctx.group
        return {"process_group": group}, None, ctx.world_size, ctx.rank
    if hybrid:
        mesh = ctx.device_mesh((2, 1, 2), ("replicate", "shard", "tp"))
        return {"device_mesh": mesh["replicate", "shard"]}, mesh["tp"], 2, ctx.rank // 2
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    return {"device_mesh": mesh["dp"]}, mesh["tp"], 2, ctx.rank // 2


def train(ctx, kind: str, place: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train a sharded and a plain model, and compare; return the sharded model's parameters."""
    parallel, low_precision = options.get("parallel"), "mixed_precision" in options
    plain, model = (make(each, place, parallel != "sequence") for each in ("none", kind))
    strategy = options["strategy"]
    over, tp, size, mine = where(ctx, parallel is not None, strategy is HYBRID)
    if parallel:
        parallelize(model, tp, parallel == "sequence")
    fully_shard(model, policy={Block}, **over, **{name: options[name] for name in options if name != "parallel"})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(2):
        x = torch.randn(size, 3, 4, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        for rank in range(size):
            (loss_of(plain, x[rank], rank, step) / size).backward()
        with record_events() as events:
            loss_of(model, x[mine], mine, step).backward()
        # A reentrant checkpoint runs forward without gradients, so its units don't stay unsharded for backward.
        stays = strategy is GRAD_OP and (kind != "reentrant" or place == "inside")
        if not (parallel and strategy is HYBRID):  # there each tensor-parallel rank has a half
            check_collectives(events, 1 if stays else 2)
        if parallel and not low_precision:
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.5), expected, rtol=1e-9, atol=0)
        step_all(optimizers)
    got = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in full_params(model).items()}
    if not low_precision:
        for (name, a), b in zip(plain.named_parameters(), got.values(), strict=True):
            torch.testing.assert_close(b, a.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return got


def check_collectives(events: list[str], gathers: int) -> None:
    """Each unit is gathered for forward, once more for recomputation and backward together, and reduced once."""
    counts = Counter(e.replace("._checkpoint_wrapped_module", "") for e in events)
    for index in range(4):
        assert counts[f"all-gather blocks.{index}"] == gathers, events
        assert counts[f"reduce-scatter blocks.{index}"] == 1, events


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{s.name}": {"strategy": s} for s in (FULL, GRAD_OP, HYBRID)},
    "bf16": {"strategy": FULL, "mixed_precision": BF16},
    **{f"tensor parallel, {s.name}": {"parallel": "tensor", "strategy": s} for s in (FULL, HYBRID)},
    **{f"sequence parallel, {s.name}": {"parallel": "sequence", "strategy": s} for s in (GRAD_OP, HYBRID)},
    "tensor parallel, bf16": {"parallel": "tensor", "strategy": GRAD_OP, "mixed_precision": BF16},
    "sequence parallel, bf16": {"parallel": "sequence", "strategy": FULL, "mixed_precision": BF16},
}


# Covering all pairs of options takes 70 cases. A few are enough here, as the fuzzer has checkpoints everywhere.
CASES = some(all_pairs(list(OPTIONS), PLACES, KINDS), 11)


def world_size(name: str) -> int:
    return 4 if "parallel" in OPTIONS[name] else 3 if name == "FULL_SHARD" else 2


@pytest.mark.parametrize(
    ("name", "place", "world_size"), sorted({(name, place, world_size(name)) for name, place, _ in CASES})
)
@ranks()
def test_every_kind(ctx, name: str, place: str):
    options = OPTIONS[name]
    expected = train(ctx, "none", place, options) if "mixed_precision" in options else {}
    for kind in [kind for other, where, kind in CASES if (other, where) == (name, place)]:
        ctx.note(kind)
        got = train(ctx, kind, place, options)
        for fqn, value in expected.items():
            assert torch.equal(value, got[fqn]), f"{kind}: {fqn}"


def test_what_recompute_changes(world):
    """Blocks run twice, the first time without gradients. Copies recompute independently. Classes and names are unchanged."""
    world(2)
    plain, model = make("none", "inside", True), make("none", "inside", True)
    calls: Counter[nn.Module] = Counter()
    for inner in [block.inner for block in model.blocks]:
        inner.register_forward_pre_hook(lambda module, args: calls.update([module]))
    fully_shard(model, policy={Block}, recompute=True)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    x = torch.ones(2, WIDTH).double()
    with record_events() as events:
        model(x).sum().backward()
    assert list(calls.values()) == [2] * 4
    check_collectives(events, 2)
    copy.deepcopy(model)(x).sum().backward()
    with torch.no_grad():
        model(x)
    assert list(calls.values()) == [3] * 4 + [2] * 4
    fully_shard(plain, policy=CustomPolicy(lambda module: module is plain.blocks[1] and {"recompute": True}))
    assert [block.forward.__class__.__name__ for block in plain.blocks] == ["method", "Recomputed", "method", "method"]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


def nested() -> nn.Module:
    """Make a unit around a reentrant checkpoint, inside another checkpoint."""
    return nn.Sequential(nn.Linear(4, 4), WRAPS["wrapper"](Around()), nn.Tanh(), nn.Linear(4, 4))


@ranks(1, 3)
def test_two_forwards_of_a_unit_around_a_reentrant_checkpoint(ctx):
    """The unit gets gradients in nested backwards, and backward reaches it again when the first have been reduced."""
    plain, model = twins(ctx, nested, {Around}, strategy=GRAD_OP)
    for _ in range(2):
        x = torch.randn(2 * ctx.world_size, 3, 4).double()
        for module, given in zip((plain, model), parts(ctx, x), strict=True):
            first, second = module(given), module(given.flip(1))
            (first.square().mean() + second.mean()).backward()
        check_same_gradients(model, plain)
        for module in (plain, model):
            module.zero_grad()


class Partly(nn.Module):
    """A module that uses some of its parameters only inside a reentrant checkpoint."""

    def __init__(self, uses_before: bool) -> None:
        super().__init__()
        self.uses_before = uses_before
        self.before, self.inside, self.after = (nn.Parameter(torch.rand(5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.before if self.uses_before else x
        return checkpoint(lambda y: torch.tanh(y * self.inside), x, use_reentrant=True) * self.after


def partly(uses_before: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), Partly(uses_before))


@ranks(2)
def test_a_unit_partly_inside_a_reentrant_checkpoint(ctx):
    """The unit stays unsharded for recomputation, and completes with its last gradient before the next unit is gathered."""
    for uses_before in (True, False):
        make = functools.partial(partly, uses_before)
        plain, model = twins(ctx, make, {nn.Linear, Partly}, backward_prefetch=None)
        for _ in range(2):
            x = torch.randn(2 * ctx.world_size, 5).double()
            for m, part in zip((plain, model), parts(ctx, x), strict=True):
                with record_events() as events:
                    m(part).square().mean().backward()
            check_same_gradients(model, plain)
            assert events.index("reduce-scatter 1") < events.index("all-gather 0", events.index("all-gather 1"))
