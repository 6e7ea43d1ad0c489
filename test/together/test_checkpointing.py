"""Activation checkpointing: every kind of it, in every place, under every strategy and precision, with dropout.

The oracle is the plain model without checkpoints in one process, which runs each rank's slice after the other from that
rank's random state. In bfloat16 it is the sharded model without checkpoints, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from checkpointed import BF16, FULL, GRAD_OP, HYBRID, KINDS, PLACES, WIDTH, Block, Net, loss_of
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_same_gradients, parts, step_all, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import CPUOffload, fully_shard
from flatshard._trace import record_events


def make(kind: str, place: str) -> Net:
    torch.manual_seed(0)
    return Net(kind, place).double()


def train(ctx, kind: str, place: str, options: dict[str, Any], steps: int = 2) -> dict[str, Tensor]:
    """Train sharded and plain, and compare. Returns the sharded model's parameters."""
    options = dict(options)
    accumulates = options.pop("accumulates", False)
    low_precision = "mixed_precision" in options
    hybrid = options.get("strategy") is HYBRID
    plain, model = make("none", place), make(kind, place)
    if options.pop("frozen", False):
        for m in (plain, model):
            for name, param in m.named_parameters():
                param.requires_grad_("norm" not in name and "up" not in name)
    group = (ctx.group, ctx.alone) if hybrid else ctx.group
    fully_shard(model, policy={Block}, process_group=group, **options)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (plain, model)]
    for step, micro in itertools.product(range(steps), range(2)):
        x = torch.randn(ctx.world_size, 3, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        if not accumulates and micro:
            continue
        for rank in range(ctx.world_size):
            (loss_of(plain, x[rank], rank, step + micro) / ctx.world_size).backward()
        holds = flatshard.no_sync(model) if accumulates and not micro else contextlib.nullcontext()
        with holds, record_events() as events:
            loss_of(model, x[ctx.rank], ctx.rank, step + micro).backward()
        # A reentrant checkpoint runs forward without gradients, so a unit in it does not stay unsharded for backward.
        stays = options.get("strategy") is GRAD_OP and (kind != "reentrant" or place == "inside")
        check_collectives(events, 1 if stays else 2, int(not accumulates or micro))
        if accumulates and not micro:
            continue
        step_all(optimizers)
    with flatshard.summon_full_params(model, writeback=False):
        got = {name: p.detach().clone() for name, p in model.named_parameters()}
    if not low_precision:
        for (name, a), b in zip(plain.named_parameters(), got.values(), strict=True):
            torch.testing.assert_close(b, a.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    return got


def check_collectives(events: list[str], gathers: int, reductions: int) -> None:
    """Each unit is gathered for forward and once more for recomputation and backward together, and reduced once."""
    counts = Counter(e.replace("._checkpoint_wrapped_module", "") for e in events)
    for index in range(4):
        assert counts[f"all-gather blocks.{index}"] == gathers, events
        assert counts[f"reduce-scatter blocks.{index}"] == reductions, events


def run_place(ctx, kinds: list[str], place: str, options: dict[str, Any]) -> None:
    expected: dict[str, Tensor] | None = None
    for kind in kinds:
        ctx.note(f"{kind} {place} {options}")
        got = train(ctx, kind, place, options)
        if expected is None:
            expected = got
        if "mixed_precision" in options:
            for (name, a), b in zip(expected.items(), got.values(), strict=True):
                assert torch.equal(a, b), f"{kind}: {name}"


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{s.name}": {"strategy": s} for s in (FULL, GRAD_OP, HYBRID)},
    **{f"{s.name}, bf16": {"strategy": s, "mixed_precision": BF16} for s in (FULL, HYBRID)},
    "offload": {"cpu_offload": CPUOffload()},
    "no_sync": {"accumulates": True},
    "frozen": {"frozen": True},
}


# Every two choices come together in 48 cases, of which half are run: the fuzzer has checkpoints everywhere, too.
CASES = some(all_pairs(list(OPTIONS), PLACES, KINDS), 24)


@pytest.mark.parametrize(("name", "place"), sorted({case[:2] for case in CASES}))
def test_every_kind(pool, name: str, place: str):
    kinds = [kind for other, where, kind in CASES if (other, where) == (name, place)]
    if "mixed_precision" in OPTIONS[name]:
        kinds = [KINDS[0], *(kind for kind in kinds if kind != KINDS[0])]  # to compare bits with
    pool.run(run_place, kinds, place, OPTIONS[name], world_size=3 if name == "FULL_SHARD" else 2)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


class Nested(nn.Module):
    """A unit around a reentrant checkpoint, inside another checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.unit, self.head = nn.Linear(4, 4), Around(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(checkpoint(self.unit, self.front(x), use_reentrant=False)))


@ranks(1, 3)
def test_two_forwards_of_a_unit_around_a_reentrant_checkpoint(ctx):
    """The unit gets its gradients in nested backwards, and is come to once more when the first have been reduced."""
    plain, model = twins(ctx, Nested, {Around}, strategy=GRAD_OP)
    for _ in range(2):
        x = torch.randn(2 * ctx.world_size, 3, 4).double()
        for module, given in zip((plain, model), parts(ctx, x), strict=True):
            first, second = module(given), module(given.flip(1))
            (first.square().mean() + second.mean()).backward()
        check_same_gradients(model, plain)
        for module in (plain, model):
            module.zero_grad()


class Partly(nn.Module):
    """Some of its parameters are used inside a reentrant checkpoint only."""

    def __init__(self, uses_before: bool) -> None:
        super().__init__()
        self.uses_before = uses_before
        self.before, self.inside, self.after = (nn.Parameter(torch.rand(5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.before if self.uses_before else x
        return checkpoint(lambda y: torch.tanh(y * self.inside), x, use_reentrant=True) * self.after


@pytest.mark.parametrize("uses_before", [True, False])
@ranks(2)
def test_a_unit_partly_inside_a_reentrant_checkpoint(ctx, uses_before: bool):
    """It stays whole for what is recomputed, and is complete with its last gradient, before the next unit is gathered."""
    plain, model = twins(
        ctx, lambda: nn.Sequential(nn.Linear(5, 5), Partly(uses_before)), {nn.Linear, Partly}, backward_prefetch=None
    )
    for _ in range(2):
        x = torch.randn(2 * ctx.world_size, 5, generator=torch.Generator().manual_seed(0)).double()
        for m, part in zip((plain, model), parts(ctx, x), strict=True):
            with record_events() as events:
                m(part).square().mean().backward()
        check_same_gradients(model, plain)
        assert events.index("reduce-scatter 1") < events.index("all-gather 0", events.index("all-gather 1"))
