"""Ends of backwards that the user calls: ``manual_finalization``, and ``reduce_gradients(async_op=True)``."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clean import check_clean
from models import Block, Net
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_same_gradients, parts, step_all, twins
from recording import Recording, collectives_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy as S


def make(ctx, width: int = 5, **options: Any) -> tuple[nn.Module, nn.Module]:
    def net() -> nn.Module:
        model = Net(width=width, inputs=width)
        model.never = nn.Linear(width, 2)
        return model

    return twins(ctx, net, {Block}, **options)


def backward(ctx, plain: nn.Module | None, model: nn.Module) -> None:
    x = torch.randn(2 * ctx.world_size, model.head.in_features).double()
    for m, part in zip((plain, model), parts(ctx, x), strict=True):
        if m is not None:
            m(part).square().mean().backward()


def check_ended(plain: nn.Module, model: nn.Module, flat: bool) -> None:
    """Assert equal gradients and a clean model. ``flat``: every element of a flat parameter has a gradient."""
    for p in plain.parameters() if flat else ():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    check_same_gradients(model, plain)
    check_clean(model)


SYNCS = ((True,), (False, True), (False, False), (True, True), (True, False))
STRATEGIES = (S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD, S.SHARD_OPTIM)
CHOICES = {
    2: (STRATEGIES, (5, 200), (False, True), SYNCS, ("at once", "async", "later")),
    4: ((S.HYBRID_SHARD,), (5,), (False, True), SYNCS, ("async", "later")),
}


@ranks(2, 4)
def test_training(ctx):
    """Steps of several microbatches equal those of one process. ``.grad`` changes in the finalization only."""
    cases = some(all_pairs(*CHOICES[ctx.world_size]), 8 if ctx.world_size == 2 else 3)
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
                backward(ctx, plain, model)
                assert i or all(p.grad is None for p in params)
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
            check_ended(plain, model, flat)
            step_all(optimizers)


@ranks(1)
def test_a_single_rank(ctx):
    """Gradients become ``.grad`` immediately, except those of flat parameters."""
    for flat, held in ((False, False), (True, False), (True, True)):
        plain, model = make(ctx, process_group=ctx.alone)
        params = flatshard.flat_parameters(model) if flat else [*model.parameters()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        flatshard.configure(model, manual_finalization=not held, gradient_sync=not held)
        backward(ctx, plain, model)
        if flat:
            assert all(p.grad is None for p in params)
            with pytest.raises(RuntimeError, match=r"SGD\.step.*not .*in \.grad"):
                optimizer.step()
        else:
            optimizer.step()
        flatshard.reduce_gradients(model)
        check_ended(plain, model, flat)
        optimizer.step()


@ranks(2)
def test_in_between(ctx):
    """Hooks on gradients run in the finalization, and zero_grad drops only ``.grad``.
    Changes of mode, dtype and device raise and change nothing.
    """
    plain, model = make(ctx)
    flatshard.configure(model, manual_finalization=True)
    seen: list[Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(seen.append)
    backward(ctx, plain, model)
    assert seen == []
    flatshard.reduce_gradients(model)
    assert len(seen) == len([p for p in model.parameters() if p.grad is not None]) > 0
    plain.zero_grad()
    backward(ctx, plain, model)
    model.zero_grad()  # keeps gradients in flight, as under no_sync
    for change, what in (
        (lambda: flatshard.configure(model, manual_finalization=False), r"configure\(manual_finalization=...\)"),
        (lambda: flatshard.flat_parameters(model), "flat_parameters"),
    ):
        with pytest.raises(RuntimeError, match=rf"{what} was called after a backward, before .* call flatshard.reduce"):
            change()
    for p in model.parameters():
        p.data = p.data.clone()  # the same values at another address
    flatshard.reduce_gradients(model)
    check_same_gradients(model, plain)
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


def fails(*_: Any) -> None:
    raise ZeroDivisionError


@ranks(2)
def test_failures(ctx):
    plain, model = make(ctx)
    flatshard.configure(model, manual_finalization=True)
    x = torch.zeros(1, 5).double()
    # A forward that raises keeps gradients of earlier backwards, and so does another model on the group.
    backward(ctx, plain, model)
    other_plain, other = make(ctx)
    backward(ctx, other_plain, other)
    check_same_gradients(other, other_plain)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    flatshard.reduce_gradients(other)
    assert all(p.grad is None for p in model.parameters())
    with model.blocks[1].register_forward_hook(fails), pytest.raises(ZeroDivisionError):
        model(x)
    flatshard.reduce_gradients(model)
    check_same_gradients(model, plain)
    # A backward that raises before it reaches these units drops their gradients, as under no_sync; so does recover.
    for how in ("backward", "recover"):
        model.zero_grad()
        plain.zero_grad()
        backward(ctx, None, model)
        pending = flatshard.reduce_gradients(model, async_op=True)
        if how == "recover":
            flatshard.recover(model)
        else:
            with other.blocks[1].register_full_backward_hook(fails), pytest.raises(ZeroDivisionError):
                other(x).sum().backward()
            flatshard.recover(other)
        check_clean(model)
        with pytest.raises(RuntimeError, match=r"dropped, by flatshard\.recover or an exception.*zero_grad"):
            pending.wait()
        model.zero_grad()
        backward(ctx, plain, model)
        flatshard.reduce_gradients(model)
        check_same_gradients(model, plain)
        pending.wait()


class Waited(Recording):
    """Records when a reduction is waited for."""

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        pending = super().reduce_scatter(output, input)
        return SimpleNamespace(wait=lambda: (self.calls.append("wait"), pending.wait()))


@ranks(2)
def test_order(ctx):
    """Reductions start as usual, and the last is in flight when backward ends. Finalization starts held ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=ctx.group, collectives=Waited)
    calls = collectives_of(model[0]).calls
    for held, expected in ((False, ["reduce_scatter", "wait", "reduce_scatter"]), (True, [])):
        flatshard.configure(model, manual_finalization=True, gradient_sync=not held)
        calls.clear()
        model(torch.ones(1, 4)).sum().backward()
        assert [call for call in calls if call != "all_gather"] == expected
        handle = flatshard.reduce_gradients(model, async_op=True)
        assert calls.count("reduce_scatter") == 2
        assert calls[-1] == "reduce_scatter"  # the last one is in flight here, too
        handle.wait()
        assert calls.count("wait") == 2


class Recomputed(nn.Module):
    """Runs one block twice, each time in a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


@ranks(2)
def test_a_backward_reduces_a_unit_twice_in_a_row(ctx):
    plain, model = twins(ctx, Recomputed, {nn.Linear})
    flatshard.configure(model, manual_finalization=True)
    for _ in range(2):
        x = torch.randn(2 * ctx.world_size, 4, dtype=torch.double)
        for m, part in zip((plain, model), parts(ctx, x), strict=True):
            m(part).square().mean().backward()
        flatshard.reduce_gradients(model)
        check_same_gradients(model, plain)
        check_clean(model)
