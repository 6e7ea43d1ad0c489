"""Communication hooks in the place of the reductions: FSDP1's own work unchanged, ready-made ones halve the bytes."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block
from on_ranks import ranks
from pairs import some
from parity import check_parity, full_params, whole_gradients
from recording import FULL, GRAD_OP, NO_SHARD, Net, Recording, make_input, sent_bytes
from suite import fake_world
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

import flatshard
from flatshard import CollectiveError, CustomPolicy, ShardingStrategy, fully_shard
from flatshard._comm.monitor.order_check import OrderCheck
from flatshard._comm.progress import GATHER
from flatshard._composable.find import units_below
from flatshard.comm import (
    CommHookState,
    QuantizedCollectives,
    bf16_compress_hook,
    fp16_compress_hook,
    register_comm_hook,
)

STRATEGIES = (FULL, GRAD_OP, NO_SHARD, ShardingStrategy.SHARD_OPTIM)
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


def built(group: Any, strategy: ShardingStrategy = FULL, model: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Net() if model is None else model
    return fully_shard(model, policy={Block}, process_group=group, strategy=strategy, **options)


def backward(model: nn.Module, rank: int) -> None:
    torch.manual_seed(100 + rank)
    x = make_input(0, 4).to(next(model.parameters()).dtype)
    model(x).square().sum().backward()


# -- A user's own ------------------------------------------------------------------------------------------------------


class Seen:
    """A hook that reduces by torch's own calls and looks at what it is given."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: list[tuple[torch.dtype, int, int]] = []

    def __call__(self, state: Any, gradient: Tensor, output: Tensor | None = None) -> None:
        assert state == "mine"
        assert not torch.is_grad_enabled()
        size = dist.get_world_size(self.group)
        assert gradient.dim() == 1
        assert gradient.is_contiguous()
        assert not gradient.requires_grad
        if output is None:
            dist.all_reduce(gradient, group=self.group)
            gradient.div_(size)
        else:
            assert output.numel() * size == gradient.numel()
            assert output.dtype == gradient.dtype
            dist.reduce_scatter_tensor(output, gradient, group=self.group)
            output.div_(size)
        self.calls.append((gradient.dtype, gradient.numel(), 0 if output is None else output.numel()))


@EVERY_STRATEGY
@ranks(2, 3)
def test_a_hook_does_the_reduction(ctx, strategy: ShardingStrategy):
    hooks = []

    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, policy={Block}, process_group=group, strategy=strategy)
        hooks.append(Seen(group))
        register_comm_hook(model, "mine", hooks[0])

    def make() -> nn.Module:
        model = Net()
        model.front.weight.requires_grad_(False)  # in a flat parameter of its own: nothing to reduce
        model.unused = nn.Parameter(torch.ones(3))
        return model

    run = check_parity(ctx, make, make_input, steps=3, shard=shard)
    sizes = [
        (flat.dtype, flat.padded_numel, 0 if strategy is NO_SHARD else flat.shard_numel)
        for unit in reversed(flatshard.describe(run.sharded).units)  # in the order in which backward completes them
        for flat in unit.flats
        if flat.trainable
    ]
    assert hooks[0].calls == sizes * 3


class Mixed(nn.Module):
    """Two dtypes in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x.float()).cfloat()).abs()


def average(state: Any, gradient: Tensor, output: Tensor | None = None) -> Any:
    return state.all_reduce(gradient) if output is None else state.reduce_scatter(output, gradient)


@EVERY_STRATEGY
@ranks(3)
def test_a_hook_without_a_state_gets_the_reduction(ctx, strategy: ShardingStrategy):
    """``state=None``: the hook gets what it takes the place of, and what that returns may be its result."""
    states = []

    def hook(state: CommHookState, *tensors: Tensor) -> Any:
        states.append(state)
        assert state.process_group is ctx.group
        assert (state.rank, state.world_size) == (ctx.rank, ctx.world_size)
        return average(state, *tensors)

    plain, model = (built(ctx.group, strategy, Mixed()) for _ in range(2))
    register_comm_hook(model, None, hook)
    for m in (plain, model):
        backward(m, ctx.rank)
    torch.testing.assert_close(whole_gradients(model), whole_gradients(plain), rtol=0, atol=0)
    assert len(states) == 2  # a dtype each


@ranks(2)
def test_where_hooks_are_registered(ctx):
    """Which units, for how long, and in copies."""
    calls: list[Any] = []

    def hook(state: Any, gradient: Tensor, output: Tensor) -> Any:
        calls.append(gradient.numel())
        return average(state, gradient, output)

    def count(model: nn.Module) -> int:
        calls.clear()
        backward(model, ctx.rank)
        return len(calls)

    model = built(ctx.group)
    handle = register_comm_hook(model, None, hook, recurse=False)
    assert count(model) == 1  # the root
    inner = register_comm_hook(model.blocks, None, hook)  # not a unit itself: those below
    assert count(model) == 3
    assert count(copy.deepcopy(model)) == 3
    with pytest.raises(ValueError, match=r"units the root module, 'blocks.0', 'blocks.1' have a communication hook"):
        register_comm_hook(model, None, hook)
    handle.remove()
    handle.remove()
    assert count(model) == 2
    again = register_comm_hook(model, None, hook, recurse=False)
    handle.remove()  # not its hook
    assert count(model) == 3
    again.remove()
    inner.remove()
    assert count(model) == 0

    # A unit that is frozen now may be thawed.
    model = built(ctx.group, model=(net := Net()).requires_grad_(False))
    register_comm_hook(model, None, hook)
    net.requires_grad_(True)
    assert count(model) == 3


def test_what_cannot_be_registered_raises_before_anything_is_changed():
    def sharded_only(state: Any, gradient: Tensor, output: Tensor) -> None: ...

    with fake_world(1):
        alone = built(None)
    with fake_world(4):
        model, replicated = built(None), built(None, NO_SHARD)
        # Some units under one strategy and some under another: the hook must do for all.
        mixed = fully_shard(Net(), policy=CustomPolicy(lambda m: isinstance(m, Block) and {"strategy": NO_SHARD}))
        integers = nn.Module()
        integers.forward = lambda: None
        integers.codes = nn.Parameter(torch.arange(8), requires_grad=False)
        integers = fully_shard(integers)
        of_sharded = r"FULL_SHARD and calls hook\(state, gradient, output\), but .* does not take"
        for module, state, hook, message in (
            (model, None, "sum", of_sharded),
            (model, None, lambda state: None, of_sharded),
            (model, None, lambda state, gradient: None, of_sharded),
            (replicated, None, sharded_only, r"NO_SHARD and calls hook\(state, gradient\), but .*'output'"),
            (mixed, None, sharded_only, r"unit 'blocks.0' is NO_SHARD"),
            (nn.Linear(2, 2), None, average, "nothing in this Linear is sharded; call fully_shard first"),
            (integers, None, average, r"units the root module have no gradients to reduce \(they have no floating"),
            (alone, None, average, r"no gradients to reduce \(they are sharded over a single rank\).*do not register"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                register_comm_hook(module, state, hook)
        with pytest.raises(ValueError, match="this ModuleList is not a unit, but contains units"):
            register_comm_hook(model.blocks, None, average, recurse=False)
        for sharded in (model, replicated, mixed):
            handle = register_comm_hook(sharded, None, average)  # nothing was registered by what raised
            sharded(make_input(0, 2)).sum().backward()
        del mixed, sharded
        handle.remove()  # of a model that is no more


@ranks(2)
def test_a_hook_that_goes_wrong_is_named(ctx):
    def forgets_to_cast_back(state: Any, gradient: Tensor, output: Tensor) -> None:
        output.data = gradient[: output.numel()].half()

    def changes_shape(state: Any, gradient: Tensor, output: Tensor) -> None:
        output.data = gradient.clone()

    def returns_a_tensor(state: Any, gradient: Tensor, output: Tensor) -> Tensor:
        return output

    def breaks(state: Any, gradient: Tensor, output: Tensor) -> None:
        raise ZeroDivisionError("of the hook")

    for hook, message in (
        (
            forgets_to_cast_back,
            r"TypeError: the communication hook replaced a gradient of shape .* by one of shape .* torch.float16 on cpu",
        ),
        (changes_shape, "TypeError: the communication hook replaced a gradient of shape"),
        (returns_a_tensor, "AttributeError: 'Tensor' object has no attribute 'wait'"),
        (breaks, "ZeroDivisionError: of the hook"),
    ):
        ctx.note(hook.__name__)
        model, plain = built(ctx.group), built(ctx.group)
        handle = register_comm_hook(model.blocks[1], None, hook)
        with pytest.raises(CollectiveError, match=f"^the reduce-scatter of unit 'blocks.1' failed .*{message}"):
            backward(model, ctx.rank)
        handle.remove()
        model.zero_grad()
        for m in (model, plain):
            backward(m, ctx.rank)
        torch.testing.assert_close(whole_gradients(model), whole_gradients(plain), rtol=0, atol=0)


# -- FSDP1's -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def record_stream_on_cpu() -> Iterator[None]:
    """torch's 16-bit hooks call it on whatever the device; on CPU it raises, though there is nothing to do."""
    torch.Tensor.record_stream = lambda tensor, stream: None
    try:
        yield
    finally:
        del torch.Tensor.record_stream


@pytest.mark.parametrize("strategy", [FULL, NO_SHARD])
@ranks(3)
@record_stream_on_cpu()
def test_hooks_of_fsdp1_work_unchanged(ctx, strategy: ShardingStrategy):
    """torch's own hooks, with their own states: the averages are those without a hook, up to rounding."""
    plain = built(ctx.group, strategy)
    backward(plain, ctx.rank)
    expected = whole_gradients(plain)
    average = default_hooks.allreduce_hook if strategy is NO_SHARD else default_hooks.reduce_scatter_hook
    low = functools.partial(default_hooks.LowPrecisionState, ctx.group)
    for state, hook, rtol in (
        (default_hooks.DefaultState(ctx.group), average, 1e-6),
        (low(), default_hooks.bf16_compress_hook, 2**-6),
        (low(), default_hooks.fp16_compress_hook, 2**-9),
    ):
        ctx.note(hook.__name__)
        model = built(ctx.group, strategy)
        register_comm_hook(model, state, hook)
        for _ in range(2):  # an input that has been pointed elsewhere must not have been the one for the next step
            model.zero_grad()
            backward(model, ctx.rank)
        for name, grad in whole_gradients(model).items():
            assert grad.dtype == torch.float32
            assert (grad - expected[name]).abs().max() <= rtol * expected[name].abs().max(), name


# -- Ready-made --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "dtype"), some(itertools.product(STRATEGIES, (torch.bfloat16, torch.float16)), 4))
@ranks(3)
def test_compression_to_16_bits(ctx, strategy: ShardingStrategy, dtype: torch.dtype):
    """The average of rounded gradients, itself rounded once; over gloo summed in float32."""
    hook = bf16_compress_hook if dtype is torch.bfloat16 else fp16_compress_hook
    plain, model = built(ctx.group, strategy), built(ctx.group, strategy)
    register_comm_hook(model, None, hook)
    for _ in range(4):  # in which the order is checked
        for each in (plain, model):
            backward(each, ctx.rank)
            each.zero_grad()
    with sent_bytes() as sent:
        backward(plain, ctx.rank)
    with sent_bytes() as compressed:
        backward(model, ctx.rank)
    expected, got = whole_gradients(plain), whole_gradients(model)
    for name, grad in got.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, grad.to(dtype).float()), name
        rounding = 1.01 * torch.finfo(dtype).eps * (1 if strategy is not NO_SHARD else 2)
        assert (grad - expected[name]).abs().max() <= rounding * expected[name].abs().max() * ctx.world_size, name
    if strategy is not NO_SHARD:  # gloo's own all-reduce is not counted
        shards = [u.flats[0].shard_numel for u in flatshard.describe(model).units]
        gathered = {FULL: sum(shards) + sum(shards[1:]), GRAD_OP: sum(shards)}.get(strategy, 0)
        peers = ctx.world_size - 1
        assert sum(sent) == peers * 4 * (gathered + sum(shards))
        assert sum(compressed) == peers * (4 * gathered + 2 * sum(shards))


class Switch(nn.Module):
    """Rank 0 uses ``a``, with a gradient below float16's range, nobody uses ``b``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.a, self.b = (nn.Parameter(torch.ones((), dtype=dtype)) for _ in range(2))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.linear(x).abs().sum() - (1e-12 * self.a.abs() if rank == 0 else 0)


@ranks(3)
def test_compression_keeps_unused_parameters_apart(ctx):
    for strategy in (FULL, NO_SHARD):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
            for hook in (bf16_compress_hook, fp16_compress_hook):
                ctx.note(f"{strategy.name}, {dtype}, {hook.__name__}")
                model = built(ctx.group, strategy, Switch(dtype))
                register_comm_hook(model, None, hook)
                model(torch.ones(2, 8, dtype=dtype), ctx.rank).backward()
                assert model.b.grad is None
                here = model.a.numel() > 0
                assert (model.a.grad is not None) == here or not here
                if here:
                    assert model.a.grad is not None
                    assert model.a.grad.as_subclass(torch.Tensor).abs() <= 1e-12  # on this rank alone
                assert all(p.grad is not None and p.grad.dtype == dtype for p in model.linear.parameters())


@ranks(4)
def test_float16_overflows_to_infinity(ctx):
    """float16: what is too large is infinite, not wrong; a sum over ranks that is too large is no matter."""
    model = built(ctx.group, model=nn.Linear(1, 3, bias=False))
    register_comm_hook(model, None, fp16_compress_hook)
    x = torch.ones(1, 1)
    (model(x) * torch.tensor([6e4, 7e4, -1e-3])).sum().backward()
    grad = whole_gradients(model)["weight"].view(-1)
    assert grad[0] == torch.tensor(6e4).half().float()
    assert grad[1] == float("inf")
    assert grad[2] == torch.tensor(-1e-3).half().float()


class Watched(Recording):
    """Notes whether shards come from elsewhere. Its reductions may be issued in another order on another rank."""

    out_of_place, widens = True, True
    compared = (GATHER,)

    def note(self, call: str, *tensors: Tensor) -> None:
        output, sent = tensors
        assert output.dtype == sent.dtype
        inside = output.data_ptr() <= sent.data_ptr() < output.data_ptr() + output.nbytes
        super().note(f"{call} in place" if inside else call)


@ranks(2)
def test_what_a_hook_hands_on_of_the_collectives_below(ctx):
    """With a hook the collectives below are used as without: no copy more, and nothing compared that may differ."""
    compared: list[int] = []
    announce = OrderCheck.announce

    def note(self: OrderCheck, issued: Any) -> Any:
        compared.append(issued.kind)
        return announce(self, issued)

    OrderCheck.announce = note
    try:
        for policy in (None, flatshard.MixedPrecision(torch.bfloat16, torch.float32)):
            model = built(ctx.group, collectives=Watched, mixed_precision=policy)
            (watched,) = {unit.context.runtime.using(Watched).collectives for unit in units_below(model)}
            register_comm_hook(model, None, lambda state, gradient, output: state.reduce_scatter(output, gradient))
            backward(model, ctx.rank)
            if policy is None:
                assert {call for call in watched.calls if "gather" in call} == {"all_gather"}
    finally:
        OrderCheck.announce = announce
    assert set(compared) == {GATHER}


@ranks(2)
def test_a_hook_over_other_collectives(ctx):
    """A hook on units with collectives of their own takes the place of their reductions only."""
    model = built(ctx.group, collectives=QuantizedCollectives())
    register_comm_hook(model, "mine", Seen(ctx.group))
    plain = built(ctx.group, collectives=QuantizedCollectives(reduce=False))
    for m in (model, plain):
        backward(m, ctx.rank)
    torch.testing.assert_close(whole_gradients(model), whole_gradients(plain), rtol=1e-5, atol=1e-6)
    expected = {n: p.clone() for n, p in full_params(built(ctx.group)).items()}
    assert all(torch.equal(v, expected[n]) for n, v in full_params(model).items())  # still exact
