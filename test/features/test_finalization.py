"""The end of a backward as a call of the user's: ``manual_finalization``, and ``reduce_gradients(async_op=True)``."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import pytest
import torch
from clean import check_clean
from models import Block, Net
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_same_gradients, parts, step_all, twins
from recording import Recording, collectives_of
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, fully_shard
from flatshard import ShardingStrategy as S
from flatshard._trace import record_events


def net(width: int) -> nn.Module:
    model = Net(width=width, inputs=width)
    model.never = nn.Linear(width, 2)
    return model


def make(ctx, width: int = 5, **options: Any) -> tuple[nn.Module, nn.Module]:
    return twins(ctx, lambda: net(width), {Block}, **options)


def backward(ctx, plain: nn.Module | None, model: nn.Module) -> None:
    x = torch.randn(2 * ctx.world_size, model.head.in_features).double()
    for m, part in zip((plain, model), parts(ctx, x), strict=True):
        if m is not None:
            m(part).square().mean().backward()


def given(params: list[Tensor]) -> list[Any]:
    return [None if p.grad is None else (p.grad, p.grad._version) for p in params]


def same(before: list[Any], after: list[Any]) -> bool:
    return all(
        (b is None) == (a is None) and (b is None or (b[0] is a[0] and b[1] == a[1]))
        for b, a in zip(before, after, strict=True)
    )


def train(ctx, cases: list[Any]) -> None:
    """Steps of several microbatches, against one process. ``.grad`` changes in the finalization only."""
    for strategy, width, flat, syncs, ends in cases:
        ctx.note(f"{strategy} {width} {flat} {syncs} {ends}")
        options: dict[str, Any] = {"strategy": strategy}
        if strategy is S.HYBRID_SHARD:
            options["device_mesh"] = ctx.device_mesh((2, ctx.world_size // 2), ("replicate", "shard"))
        plain, model = make(ctx, width, **options)
        params = flatshard.flat_parameters(model) if flat else [*model.parameters()]
        optimizers = [torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0) for p in (plain.parameters(), params)]
        flatshard.configure(model, manual_finalization=True)
        for _ in range(2):
            for i, sync in enumerate(syncs):
                plain.order = model.order = [0, 2] if i else [0, 1, 2]  # leaves a block out
                flatshard.configure(model, gradient_sync=sync)
                before = given(params)
                backward(ctx, plain, model)
                assert i or same(before, given(params))
                with pytest.raises(RuntimeError, match=r"AdamW\.step.*not .*in \.grad"):
                    optimizers[1].step()
                with pytest.raises(RuntimeError, match=r"clip_grad_norm_.*not in \.grad"):
                    flatshard.clip_grad_norm_(model, 1.0)
            handle = flatshard.reduce_gradients(model, async_op=ends != "at once")
            if ends == "later":
                with pytest.raises(RuntimeError, match=r"being reduced, and are not in \.grad yet"):
                    optimizers[1].step()
                with torch.no_grad():  # collectives in between
                    model(torch.zeros(1, width).double())
            if handle is not None:
                handle.wait()
                handle.wait()
            for p in plain.parameters() if flat else ():  # all of a flat parameter has a gradient
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            check_same_gradients(model, plain)
            step_all(optimizers)
            check_clean(model)


SYNCS = ((True,), (False, True), (False, False), (True, True), (True, False))
STRATEGIES = (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD, S.SHARD_OPTIM)
CHOICES = {
    2: (STRATEGIES, (5, 200), (False, True), SYNCS, ("at once", "async", "later")),
    3: ((S.FULL_SHARD,), (5,), (False, True), SYNCS, ("async",)),
    4: ((S.HYBRID_SHARD,), (5,), (False, True), SYNCS, ("async", "later")),
}


@pytest.mark.parametrize("world_size", CHOICES)
def test_training(pool, world_size):
    pool.run(train, some(all_pairs(*CHOICES[world_size]), 12 if world_size == 2 else 4), world_size=world_size)


# -- options -----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_mixed_precision(ctx):
    """The same bits as of backwards that end by themselves, also for gradients sent as they were computed."""
    policy = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
    for width in (5, 200):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(fully_shard(net(width), policy={Block}, process_group=ctx.group, mixed_precision=policy))
        flatshard.configure(models[0], manual_finalization=True)
        for held in (False, True):
            x = torch.randn(2, width)
            for model in models:
                with flatshard.no_sync(model) if held else contextlib.nullcontext():
                    model(x).square().mean().backward()
                flatshard.reduce_gradients(model)
        for p, q in zip(*(m.parameters() for m in models), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)


@ranks(1)
def test_a_single_rank(ctx):
    """A single rank: gradients become ``.grad`` at once, but not those of flat parameters."""
    for flat, held in ((False, False), (True, False), (True, True)):
        plain, model = make(ctx, process_group=ctx.alone)
        params = flatshard.flat_parameters(model) if flat else [*model.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        flatshard.configure(model, manual_finalization=not held, gradient_sync=not held)
        backward(ctx, plain, model)
        if flat:
            assert given(params) == [None] * len(params)
            with pytest.raises(RuntimeError, match=r"SGD\.step.*not .*in \.grad"):
                optimizer.step()
        flatshard.reduce_gradients(model)
        for p in plain.parameters() if flat else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        check_same_gradients(model, plain)
        optimizer.step()
        check_clean(model)


@ranks(2)
def test_hooks_on_gradients(ctx):
    """Hooks on gradients run in the finalization, on the user's thread, and an optimizer in backward steps there."""
    plain, model = make(ctx)
    flatshard.configure(model, manual_finalization=True)
    seen: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen.append)
    backward(ctx, plain, model)
    assert seen == []
    flatshard.reduce_gradients(model)
    assert len(seen) == len([p for p in model.parameters() if p.grad is not None]) > 0


@ranks(2)
def test_several_models(ctx):
    """Models on one group: the other's backward, forward and finalization leave a model's reductions alone."""
    plain, model = make(ctx)
    other_plain, other = make(ctx)
    flatshard.configure(model, manual_finalization=True)
    backward(ctx, plain, model)
    before = given([*model.parameters()])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    backward(ctx, other_plain, other)
    check_same_gradients(other, other_plain)
    optimizer.step()
    flatshard.reduce_gradients(other)
    assert same(before, given([*model.parameters()]))
    flatshard.reduce_gradients(model)
    check_same_gradients(model, plain)


# -- exceptions, and what the user does in between ------------------------------------------------------------------------


@ranks(2)
def test_in_between(ctx):
    """zero_grad drops what is in ``.grad``; changes of mode, dtype and device raise, and have changed nothing."""
    plain, model = make(ctx)
    flatshard.configure(model, manual_finalization=True)
    backward(ctx, plain, model)
    flatshard.reduce_gradients(model)
    plain.zero_grad()
    backward(ctx, plain, model)
    model.zero_grad()  # as under no_sync: not the gradients that are on their way
    before = [p.detach().clone() for p in model.parameters()]
    for change, what in (
        (
            lambda: flatshard.configure(model, manual_finalization=False),
            r"configure\(manual_finalization=...\) was called",
        ),
        (lambda: flatshard.flat_parameters(model), "flat_parameters was called"),
    ):
        with pytest.raises(RuntimeError, match=rf"{what} after a backward, before .* call flatshard.reduce_gradients"):
            change()
    for p in model.parameters():
        p.data = p.data.clone()  # the same values elsewhere
    flatshard.reduce_gradients(model)
    check_same_gradients(model, plain)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    plain.zero_grad()
    backward(ctx, plain, model)
    model.float()
    with pytest.raises(RuntimeError, match="given another dtype or device after a backward"):
        model(torch.zeros(1, 5))
    model.double()
    flatshard.reduce_gradients(model)
    check_same_gradients(model, plain)
    backward(ctx, plain, model)
    for p in model.parameters():
        p.grad = None
        p.grad_dtype = torch.float32
    with pytest.raises(RuntimeError, match=r"p\.grad_dtype was set after a backward"):
        model(torch.zeros(1, 5).double())


@ranks(2)
def test_failures(ctx):
    plain, model = make(ctx)
    flatshard.configure(model, manual_finalization=True)
    # A forward that raises keeps what earlier backwards have left.
    backward(ctx, plain, model)
    handle = model.blocks[1].register_forward_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.zeros(1, 5).double())
    handle.remove()
    with torch.no_grad():
        model(torch.zeros(1, 5).double())
    flatshard.reduce_gradients(model)
    check_same_gradients(model, plain)
    # A backward that raises before it reaches these units drops it, as under no_sync; so does recover.
    _, other = make(ctx)
    for how in ("backward", "recover"):
        model.zero_grad()
        plain.zero_grad()
        backward(ctx, None, model)
        pending = flatshard.reduce_gradients(model, async_op=True)
        if how == "recover":
            flatshard.recover(model)
        else:
            handle = other.blocks[1].register_full_backward_hook(lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                other(torch.zeros(1, 5).double()).sum().backward()
            handle.remove()
            flatshard.recover(other)
        check_clean(model)
        with pytest.raises(RuntimeError, match=r"dropped, by flatshard\.recover or an exception.*zero_grad"):
            pending.wait()
        model.zero_grad()
        backward(ctx, plain, model)
        flatshard.reduce_gradients(model)
        check_same_gradients(model, plain)
        pending.wait()


def events_of(ctx) -> list[list[str]]:
    """Reductions start where they always do; those of held gradients all at once, before a wait."""
    _, model = make(ctx)
    found = []
    for manual, held in ((False, False), (True, False), (True, True)):
        flatshard.configure(model, manual_finalization=manual, gradient_sync=not held)
        with record_events() as events:
            backward(ctx, None, model)
            events.append("end of backward")
            handle = flatshard.reduce_gradients(model, async_op=True)
            events.append("finalized")
            handle.wait()
        found.append([e for e in events if not e.startswith(("all-gather", "reshard"))])
    return found


class Waited(Recording):
    """Notes when a reduction is waited for."""

    class Noting(NamedTuple):
        pending: Any
        calls: list[str]

        def wait(self) -> None:
            self.calls.append("wait")
            self.pending.wait()

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return self.Noting(super().reduce_scatter(output, input), self.calls)


@ranks(2)
def test_the_last_reduction_is_in_flight_when_backward_ends(ctx):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group, collectives=Waited)
    flatshard.configure(model, manual_finalization=True)
    model(torch.ones(1, 4)).sum().backward()
    calls = [call for call in collectives_of(model[0]).calls if call != "all_gather"]
    assert calls == ["reduce_scatter", "wait", "reduce_scatter"]


def test_order(pool):
    reductions = [f"reduce-scatter {unit}" for unit in ("blocks.2", "blocks.1", "blocks.0", "<root>")]
    expected = [[*reductions, "end of backward", "finalized"]] * 2 + [["end of backward", *reductions, "finalized"]]
    assert pool.run(events_of) == [expected] * 2
