"""Communication hooks that replace the reductions: FSDP1's own work unchanged, and the ready-made ones halve the bytes."""

import copy
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from models import Block
from on_ranks import ranks
from parity import whole_gradients
from recording import FULL, GRAD_OP, NO_SHARD, Net, Recording, make_input, sent_bytes
from suite import fake_world
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

import flatshard
from flatshard import CollectiveError, CustomPolicy, ShardingStrategy, fully_shard
from flatshard._comm.collectives import GATHER
from flatshard._comm.monitor.monitor import OrderCheck
from flatshard.comm import CommHookState, bf16_compress_hook, fp16_compress_hook, register_comm_hook


def built(group: Any, strategy: ShardingStrategy = FULL, model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Net() if model is None else model
    return fully_shard(model, policy={Block}, process_group=group, strategy=strategy, **options)


def same_gradients(ctx: Any, model: nn.Module, plain: nn.Module) -> None:
    """Assert that a backward of each model gives equal gradients."""
    for m in (model, plain):
        m.zero_grad()
        backward(m, ctx.rank)
    torch.testing.assert_close(whole_gradients(model), whole_gradients(plain), rtol=0, atol=0)


def backward(model: nn.Module, rank: int) -> None:
    torch.manual_seed(100 + rank)
    x = make_input(0, 4).to(next(model.parameters()).dtype)
    model(x).square().sum().backward()


def average(state: Any, gradient: Tensor, output: Tensor | None = None) -> Any:
    return state.all_reduce(gradient) if output is None else state.reduce_scatter(output, gradient)


@ranks(2)
def test_where_hooks_are_registered(ctx):
    """Register hooks on some units, remove them, copy the model. A hook without a state gets the replaced reduction."""
    calls: list[list[int]] = []

    def hook(state: CommHookState, *tensors: Tensor) -> Any:
        calls.append([t.numel() for t in tensors])
        assert (state.process_group, state.rank, state.world_size) == (ctx.group, ctx.rank, ctx.world_size)
        assert not torch.is_grad_enabled()
        assert not any(t.requires_grad for t in tensors)
        assert all(t.dim() == 1 and t.is_contiguous() for t in tensors)
        return average(state, *tensors)

    def count(model: nn.Module) -> int:
        calls.clear()
        same_gradients(ctx, model, plain)
        return len(calls)

    plain, model = built(ctx.group), built(ctx.group)
    handle = register_comm_hook(model, None, hook, recurse=False)
    assert count(model) == 1  # the root
    inner = register_comm_hook(model.blocks, None, hook)  # not a unit itself: applies to the units below
    assert count(model) == count(copy.deepcopy(model)) == 3
    units = reversed(flatshard.describe(model).units)  # the order in which backward completes them
    assert calls == [[flat.padded_numel, flat.shard_numel] for unit in units for flat in unit.flats]
    with pytest.raises(ValueError, match=r"units the root module, 'blocks.0', 'blocks.1' have a communication hook"):
        register_comm_hook(model, None, hook)
    handle.remove()
    assert count(model) == 2
    again = register_comm_hook(model, None, hook, recurse=False)
    handle.remove()  # does nothing: the current hook is another
    assert count(model) == 3
    again.remove()
    inner.remove()
    assert count(model) == 0
    torch.manual_seed(0)
    model = built(ctx.group, NO_SHARD, Net().requires_grad_(False))
    register_comm_hook(model, None, hook)
    model.requires_grad_(True)  # frozen parameters may train later
    assert count(model) == 3


def test_what_cannot_be_registered_raises_before_anything_is_changed():
    def sharded_only(state: Any, gradient: Tensor, output: Tensor) -> None: ...

    with fake_world(1):
        alone = built(None)
    with fake_world(4):
        model, replicated = built(None), built(None, NO_SHARD)
        # Units of several strategies: the hook must fit all of them.
        mixed = fully_shard(Net(), policy=CustomPolicy(lambda m: isinstance(m, Block) and {"strategy": NO_SHARD}))
        of_sharded = r"FULL_SHARD and calls hook\(state, gradient, output\), but .* does not take"
        for module, hook, message in (
            (model, "sum", of_sharded),
            (model, lambda state, gradient: None, of_sharded),
            (replicated, sharded_only, r"NO_SHARD and calls hook\(state, gradient\), but .*'output'"),
            (mixed, sharded_only, r"unit 'blocks.0' is NO_SHARD"),
            (alone, average, r"no gradients to reduce \(they are sharded over a single rank\).*do not register"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                register_comm_hook(module, None, hook)
        for sharded in (model, replicated, mixed):
            handle = register_comm_hook(sharded, None, average)  # the calls that raised registered nothing
            sharded(make_input(0, 2)).sum().backward()
        del mixed, sharded
        handle.remove()  # the model is already freed


@ranks(2)
def test_a_hook_that_goes_wrong_is_named(ctx):
    def forgets_to_cast_back(state: Any, gradient: Tensor, output: Tensor) -> None:
        output.data = gradient[: output.numel()].half()

    def breaks(state: Any, gradient: Tensor, output: Tensor) -> None:
        raise ZeroDivisionError("of the hook")

    model, plain = built(ctx.group), built(ctx.group)
    replaced = r"TypeError: .* replaced a gradient of shape .* by one of shape .* torch.float16 on cpu"
    for hook, message in ((forgets_to_cast_back, replaced), (breaks, "ZeroDivisionError: of the hook")):
        ctx.note(hook.__name__)
        handle = register_comm_hook(model.blocks[1], None, hook)
        with pytest.raises(CollectiveError, match=f"^the reduce-scatter of unit 'blocks.1' failed .*{message}"):
            backward(model, ctx.rank)
        handle.remove()
        same_gradients(ctx, model, plain)


@ranks(3)
@mock.patch.object(Tensor, "record_stream", mock.Mock())  # torch's hooks call it; on CPU it raises
def test_hooks_of_fsdp1_work_unchanged(ctx):
    """torch's own hooks with their own states give the averages of training without a hook, up to rounding."""
    low = functools.partial(default_hooks.LowPrecisionState, ctx.group)
    for strategy, exact in ((FULL, default_hooks.reduce_scatter_hook), (NO_SHARD, default_hooks.allreduce_hook)):
        plain = built(ctx.group, strategy)
        backward(plain, ctx.rank)
        expected = whole_gradients(plain)
        for state, hook, rtol in (
            (default_hooks.DefaultState(ctx.group), exact, 1e-6),
            (low(), default_hooks.bf16_compress_hook, 2**-6),
            (low(), default_hooks.fp16_compress_hook, 2**-9),
        ):
            ctx.note(hook.__name__)
            model = built(ctx.group, strategy)
            register_comm_hook(model, state, hook)
            for _ in range(2):  # a hook that replaced a reduction's input must not affect the next step
                model.zero_grad()
                backward(model, ctx.rank)
            for name, grad in whole_gradients(model).items():
                assert grad.dtype == torch.float32
                assert (grad - expected[name]).abs().max() <= rtol * expected[name].abs().max(), name


@ranks(3)
def test_compression_to_16_bits(ctx):
    """Hooks halve the bytes. The fuzzer checks values, with rounding in its oracle."""
    optim = ShardingStrategy.SHARD_OPTIM
    for strategy, hook in ((FULL, bf16_compress_hook), (GRAD_OP, fp16_compress_hook), (optim, bf16_compress_hook)):
        ctx.note(strategy.name)
        plain, model = built(ctx.group, strategy), built(ctx.group, strategy)
        register_comm_hook(model, None, hook)
        shards = [u.flats[0].shard_numel for u in flatshard.describe(model).units]
        gathered = {FULL: sum(shards) + sum(shards[1:]), GRAD_OP: sum(shards)}.get(strategy, 0)
        for each, width in ((plain, 4), (model, 2)):
            for _ in range(4):  # the order is checked in these steps
                backward(each, ctx.rank)
                each.zero_grad()
            with sent_bytes() as sent:
                backward(each, ctx.rank)
            assert sum(sent) == (ctx.world_size - 1) * (4 * gathered + width * sum(shards))


class Switch(nn.Module):
    """Rank 0 uses ``a``, with a gradient below float16's range. No rank uses ``b``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.a, self.b = (nn.Parameter(torch.ones((), dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.linear(x).abs().sum() - (1e-12 * self.a.abs() if rank == 0 else 0)


@ranks(3)
def test_compression_keeps_unused_parameters_apart(ctx):
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.complex64
    hooks = bf16_compress_hook, fp16_compress_hook
    for strategy, dtype, hook in itertools.product((FULL, NO_SHARD), dtypes, hooks):
        ctx.note(f"{strategy.name}, {dtype}, {hook.__name__}")
        model = built(ctx.group, strategy, Switch(dtype))
        register_comm_hook(model, None, hook)
        model(torch.ones(2, 8, dtype=dtype), ctx.rank).backward()
        assert model.b.grad is None
        if model.a.numel() > 0:  # on this rank
            assert model.a.grad is not None
            assert model.a.grad.as_subclass(torch.Tensor).abs() <= 1e-12
        assert all(p.grad is not None and p.grad.dtype == dtype for p in model.linear.parameters())


class Watched(Recording):
    """Collectives that may widen, and whose reductions may be issued in any order."""

    widens, compared = True, (GATHER,)

    def note(self, call: str, *tensors: Tensor) -> None:
        assert len({t.dtype for t in tensors}) == 1  # a hook gets an output of the gradient's dtype only


@ranks(2)
def test_what_a_hook_hands_on_of_the_collectives_below(ctx):
    """Ranks compare only the order of gathers, as a hook's own collectives may differ."""
    announce = mock.patch.object(OrderCheck, "announce", autospec=True, side_effect=OrderCheck.announce)
    for policy in (None, flatshard.MixedPrecision(torch.bfloat16, torch.float32)):
        model = built(ctx.group, collectives=Watched, mixed_precision=policy)
        register_comm_hook(model, None, average)
        with announce as announced:
            backward(model, ctx.rank)
        assert {issued.kind for _, issued in (call.args for call in announced.call_args_list)} == {GATHER}
