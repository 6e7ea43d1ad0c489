"""Losses that leave a unit outside its output: auxiliary heads, deep supervision, multi-token prediction."""

import collections
import contextvars
import copy
import dataclasses
import itertools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import ranks
from parity import check_parity, check_same_gradients, parts, twins
from recording import Recording
from torch import Tensor, nn

import flatshard
from flatshard import BackwardPrefetch, MixedPrecision, ShardingStrategy, fully_shard

WIDTH = 4
LOW = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)


class Late(Recording):
    """Collectives that deliver as late as possible: when their result is waited for."""

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        landing = torch.empty_like(output)
        inner = self.inner.all_gather(landing, landing.view(self.inner.size, -1)[self.inner.rank].copy_(shard))
        output.fill_(1e6 if output.is_floating_point() else 1)

        def wait() -> None:
            inner.wait()
            output.copy_(landing)

        return types.SimpleNamespace(wait=wait)


@dataclasses.dataclass
class Kept:
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    total: Tensor | float = 0.0


class Notes:
    """An object of the user."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss)


EVERYWHERE: list[Tensor] = []
OF_THE_CONTEXT: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("losses")
OF_THE_THREAD = threading.local()


def containers() -> dict[str, tuple[Any, Callable[[Tensor], object], Callable[[], list[Tensor]]]]:
    """Return, by name, a unit's argument, a function that hands a loss over, and a function that returns the losses."""
    a_list: list[Tensor] = []
    a_deque, a_namespace = collections.deque[Tensor](), types.SimpleNamespace(losses=[])
    kept, notes = Kept(), Notes()
    OF_THE_CONTEXT.set([])
    OF_THE_THREAD.losses = []
    EVERYWHERE.clear()
    return {
        "append": (a_list.append, a_list.append, lambda: a_list),
        "method": (notes.note, notes.note, lambda: notes.losses),
        "namespace": (a_namespace, a_namespace.losses.append, lambda: a_namespace.losses),
        "dataclass": (kept, kept.losses.append, lambda: kept.losses),
        "deque": (a_deque, a_deque.append, lambda: [*a_deque]),
        "tuple": ((a_list,), a_list.append, lambda: a_list),
        "global": (None, EVERYWHERE.append, lambda: EVERYWHERE),
        "context": (None, OF_THE_CONTEXT.get().append, OF_THE_CONTEXT.get),
        "thread": (None, OF_THE_THREAD.losses.append, lambda: OF_THE_THREAD.losses),
    }


class Block(nn.Module):
    """Hands over its own head's loss, and returns the head's input."""

    def __init__(self, output: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.output = output

    def forward(self, x: Tensor, given: object, hand_over: Callable[[Tensor], object]) -> Any:
        y = x + torch.tanh(self.linear(x))
        hand_over((self.head(y) * self.scale).square().mean())
        return self.output(y)


class Net(nn.Module):
    def __init__(
        self, output: Callable[[Tensor], Any] = lambda y: y, read: Callable[[Any], Tensor] = lambda y: y
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(output) for _ in range(4))
        self.last = nn.Linear(WIDTH, 2)
        self.read, self.way = read, "append"

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        given, hand_over, found = containers()[self.way]
        for block in self.blocks:
            x = self.read(block(x, given, hand_over))
        return self.last(x), [*found()]


def loss_of(output: tuple[Tensor, list[Tensor]], _: Tensor) -> Tensor:
    return output[0].square().mean() + torch.stack(output[1]).sum()


def inputs(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


def shard(model: nn.Module, group: Any, **options: Any) -> nn.Module:
    return fully_shard(model, policy={Block}, process_group=group, collectives=Late, **options)


WAYS = ("append", "method", "namespace", "dataclass", "deque", "tuple", "global", "context", "thread")


@ranks(2)
def test_losses_that_are_handed_over(ctx):
    """Gradients equal those of one process, for each container of losses and each time of gathering."""
    for way in WAYS:
        for when in BackwardPrefetch if way == "append" else [BackwardPrefetch.BACKWARD_PRE]:
            ctx.note(f"{way}, {when}")

            def make(way: str = way) -> nn.Module:
                model = Net()
                model.way = way
                return model

            check_parity(
                ctx,
                make,
                inputs,
                steps=2,
                loss_fn=loss_of,
                shard=lambda m, g, when=when: shard(m, g, backward_prefetch=when),
            )


class Collecting(nn.Module):
    """Blocks that add losses, one in fp32, to given containers, which hold earlier blocks' losses."""

    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks[1].requires_grad_(trainable)

    @staticmethod
    def add_losses(_: None, y: Tensor, given: Any) -> None:
        loss = y.float().square().mean()
        given["list"].append(loss)
        given["pair"][0].append(loss)
        given["deque"].append(loss)
        given["kept"].losses.append(loss)
        given["kept"].total = given["kept"].total + loss
        given[f"loss {len(given)}"] = loss

    def forward(self, x: Tensor) -> list[Tensor]:
        given: dict[str, Any] = {"list": [], "pair": ([],), "deque": collections.deque(), "kept": Kept()}
        for block in self.blocks:
            x = block(x, given)
        every = [*given["list"], *given["pair"][0], *given["deque"], *given["kept"].losses]
        return [given["kept"].total, *every, *(loss for name, loss in given.items() if name.startswith("loss"))]


class Adding(nn.Linear):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        y = torch.tanh(super().forward(x))
        Collecting.add_losses(None, y, given)
        return y


@ranks(2)
def test_containers_that_a_unit_is_given_are_the_callers(ctx):
    """A caller's containers receive the losses even if a unit gets copies, for cast inputs or for backward's entry."""
    for trainable, policy in itertools.product([True, False], [None, LOW]):
        model = Collecting(trainable)
        for i in range(3):
            block = Adding(WIDTH, WIDTH)
            model.blocks[i] = block.requires_grad_(trainable or i != 1)
        plain = copy.deepcopy(model)
        fully_shard(model, policy={Adding}, process_group=ctx.group, mixed_precision=policy or MixedPrecision())
        x = torch.ones(2, WIDTH)
        losses, expected = model(x), plain(x)
        assert len(losses) == len(expected) == 16
        torch.testing.assert_close(losses, expected, rtol=5e-2, atol=1e-3)
        sum(losses).backward()
        sum(expected).backward()
        check_same_gradients(model, plain, 1e-5 if policy is None else 5e-2)


STRUCTURES = {
    "with a closure": (lambda y: (y, lambda: y), lambda out: out[0]),
    "in a dict": (lambda y: {"y": y, "n": 1}, lambda out: out["y"]),
    "a view": (lambda y: y.view(-1, WIDTH), lambda out: out),
}


@ranks(2)
def test_structures_of_outputs(ctx):
    for name, (output, read) in STRUCTURES.items():
        ctx.note(name)
        check_parity(
            ctx, lambda output=output, read=read: Net(output, read), inputs, steps=2, loss_fn=loss_of, shard=shard
        )


class Slots:
    """A structure that torch cannot rebuild with other tensors."""

    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


@ranks(2)
def test_what_is_not_there_is_not_read(ctx):
    """If backward enters a unit by a loss alone, autograd refuses to read its freed parameters. The next step is right."""
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append
    logging.getLogger("flatshard").addHandler(handler)
    for options in ({}, {"static_buffers": True}):
        for output, read, loss_of_both in [
            (lambda y: y, lambda out: out, lambda out, losses: losses[1]),
            (lambda y: y.detach(), lambda out: out, lambda out, losses: losses[-1]),
            (Slots, lambda out: out.y, lambda out, losses: out.square().mean() + sum(losses)),
        ]:
            model = shard(Net(output, read), ctx.group, **options)
            heard.clear()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss_of_both(*model(torch.ones(2, WIDTH))).backward()
            if output is Slots:
                assert "'blocks.3'" in heard[0].getMessage()
            assert all(p.grad is None for p in model.parameters())
            for block in model.blocks:
                block.output = lambda y: y
            model.read = lambda out: out
            plain = Net()
            plain.load_state_dict(flatshard.checkpoint.full_state_dict(model))
            for each in (plain, model):
                loss_of(each(torch.ones(2, WIDTH)), torch.empty(0)).backward()
            check_same_gradients(model, plain)
    logging.getLogger("flatshard").removeHandler(handler)


@ranks(2)
def test_what_an_earlier_backward_has_freed_is_not_read_either(ctx):
    model = shard(Net(), ctx.group)
    first = loss_of(model(torch.ones(2, WIDTH)), torch.empty(0))
    model.read = torch.Tensor.detach
    output, losses = model(torch.ones(2, WIDTH))
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (output.square().mean() + losses[-1]).backward()


class Aside(nn.Module):
    """Stores two losses elsewhere: one of a graph of its own, one of the graph of its output. May return a weight, too."""

    def __init__(self, lends: bool = False) -> None:
        super().__init__()
        self.lends = lends
        self.weight, self.other = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        EVERYWHERE[:] = [(torch.tanh(part @ self.other) @ self.other).sum() for part in (x.detach(), torch.tanh(y))]
        return (y, self.other.t()) if self.lends else y


@ranks(2)
def test_what_the_backward_of_the_output_has_freed_is_not_read(ctx):
    for number, retains_graph in ((0, False), (0, True), (1, True)):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Aside(), nn.Linear(WIDTH, WIDTH))
        fully_shard(model, policy={Aside, nn.Linear}, process_group=ctx.group)
        model(torch.ones(2, WIDTH)).square().mean().backward(retain_graph=retains_graph)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            EVERYWHERE[number].backward()
    EVERYWHERE.clear()


@ranks(2)
def test_values_of_a_later_step_are_not_read(ctx):
    """A loss that a forward kept in a list outlives an optimizer's step, and the next gather."""
    nexts = [lambda model: model(torch.ones(2, WIDTH)), lambda model: flatshard.unshard(model, recurse=True)]
    for strategy, lends, run_next in itertools.product(
        ("full_shard", "shard_grad_op", "no_shard"), (False, True), nexts
    ):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Aside(lends))
        fully_shard(model, policy={Aside, nn.Linear}, process_group=ctx.group, strategy=strategy)
        output, (loss, _) = model(torch.ones(2, WIDTH)), EVERYWHERE  # while the output lives, it may use lent memory
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(model.parameters(), 0.1).step()
        run_next(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del output
    EVERYWHERE.clear()


class Product(torch.autograd.Function):
    """A matrix product whose backward reads the weight's ``data``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.data.t(), x.t() @ grad


class OwnBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight)


@ranks(2)
def test_a_backward_may_read_the_data_of_parameters(ctx):
    plain, model = twins(ctx, lambda: nn.Sequential(OwnBackward(), OwnBackward()), {OwnBackward})
    for _ in range(3):
        for each, x in zip((plain, model), parts(ctx, torch.randn(2, WIDTH).double()), strict=True):
            each(x).square().mean().backward()
    check_same_gradients(model, plain)


@ranks(2)
def test_a_forward_that_may_not_begin_between_a_forward_and_its_backward(ctx):
    """No value is written back from memory that is already freed."""
    model = shard(Net(), ctx.group, forward_prefetch=False)
    before = flatshard.checkpoint.full_state_dict(model)
    output = model(torch.ones(2, WIDTH))
    scale = model.blocks[1].scale
    right = scale.data
    scale.data = torch.ones(7)
    with pytest.raises(RuntimeError, match=r"parameter 'blocks.1.scale' was replaced by a tensor of shape \(7,\)"):
        model(torch.ones(2, WIDTH))
    scale.data = right
    torch.testing.assert_close(flatshard.checkpoint.full_state_dict(model), before, rtol=0, atol=0)
    del output


@ranks(2)
def test_a_write_between_a_forward_and_the_next(ctx):
    for options in ({}, {"static_buffers": True}):
        model, plain = shard(Net(), ctx.group, **options), Net()
        plain.load_state_dict(flatshard.checkpoint.full_state_dict(model))
        kept = model(torch.ones(2, WIDTH))
        with flatshard.summon_full_params(model):
            for p in model.parameters():
                p.data.mul_(0.5)
        for p in plain.parameters():
            p.data.mul_(0.5)
        for each in (model, plain):
            loss_of(each(torch.ones(2, WIDTH)), torch.empty(0)).backward()
        check_same_gradients(model, plain, 1e-5)
        del kept


class Lazy:
    def __init__(self, y: Tensor) -> None:
        self.y = y

    def __call__(self) -> Tensor:
        return self.y


class Holder(nn.Module):
    def __init__(self, y: Tensor) -> None:
        super().__init__()
        self.y = y


HIDDEN = {
    "an iterator": (lambda y: iter([y]), next),
    "a generator": (lambda y: (each for each in [y]), next),
    "a closure": (lambda y: lambda: y, lambda out: out()),
    "closures": (lambda y: [lambda: y], lambda out: out[0]()),
    "a module": (Holder, lambda out: out.y),
    "a callable": (Lazy, lambda out: out()),
}


@pytest.mark.filterwarnings("ignore:unit")
@ranks(2)
def test_outputs_that_nothing_is_found_in(ctx):
    """The unit stays unsharded, as the warning says, so that backward may enter it anywhere."""
    for name, (output, read) in HIDDEN.items():
        ctx.note(name)
        with pytest.warns(UserWarning, match="stay unsharded"):
            check_parity(ctx, lambda o=output, r=read: Net(o, r), inputs, steps=2, loss_fn=loss_of, shard=shard)


class HidesTwice(nn.Module):
    """Calls a partly frozen unit twice, in whose output nothing is found."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hides = nn.Linear(WIDTH, WIDTH), Frozen()

    def forward(self, x: Tensor) -> Tensor:
        return self.hides(self.hides(self.first(x))())()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        y = torch.tanh(self.frozen(torch.tanh(self.trained(x))))
        return lambda: y


@pytest.mark.filterwarnings("ignore:unit")
@ranks(2)
def test_a_unit_in_whose_outputs_nothing_is_found_is_called_twice(ctx):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        plain, model = twins(ctx, HidesTwice, {Frozen}, strategy=strategy)
        for _ in range(2):
            x = torch.randn(2 * ctx.world_size, WIDTH, dtype=torch.double)
            for m, part in zip((plain, model), parts(ctx, x), strict=True):
                m(part).square().mean().backward()
            check_same_gradients(model, plain)
