"""What people do in a training step beyond ``model(x).sum().backward()``: each at parity with one process, or refused.

A :class:`Case` is a model, what it does in a step, and how the step is made. Every case trains under each strategy and
must leave every unit settled: sharded, with no gradient buffer and nothing waited for.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from pairs import some
from parity import check_parity, full_params, mean_square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardingStrategy, fully_shard, unshard
from flatshard._composable.find import units_below
from flatshard._handle.lifetime import GradState
from flatshard._handle.registrations import SHARDED
from flatshard._trace import record_events

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
WIDTH = 5


class Block(nn.Module):
    """What the policy of this file makes a unit: this class and all below it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("linear",):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """A unit between two others; ``take`` makes a tensor of what the middle one returns."""

    def __init__(self, middle: nn.Module, take: Callable[[Any], Tensor] = lambda out: out) -> None:
        super().__init__()
        self.front = Block()
        self.middle = middle
        self.head = nn.Linear(WIDTH, 3)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.take(self.middle(self.front(x)))))


def make_input(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


@dataclasses.dataclass
class Case:
    make: Callable[[], nn.Module]
    train: Callable[[nn.Module, Any, float], Tensor] | None = None
    before_step: Callable[[nn.Module, int], None] | None = None
    shard: Callable[[nn.Module, Any, ShardingStrategy], None] | None = None
    steps: int = 2
    strategies: tuple[ShardingStrategy, ...] = STRATEGIES
    set_to_none: bool = True


CASES: dict[str, Case] = {}


def shard(model: nn.Module, group: Any, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    return fully_shard(model, policy=Block, process_group=group, strategy=strategy)


def check_settled(model: nn.Module) -> None:
    """No unit of ``model`` has anything left from a step."""
    for unit in units_below(model):
        assert unit.handle.is_sharded, unit
        assert unit.handle.lifetime.grads is GradState.NONE, unit
        assert (unit.claims, unit.is_in_backward, unit.completion.pending) == ([], False, 0), unit
        assert unit.handle.registrations.shows is SHARDED, unit
        assert all(c.grad is None for f in unit.handle.flats for c in f.unsharded.params), unit
        assert all(f.gradients._filled is f.gradients.reduction is None for f in unit.handle.flats), unit
        assert not unit.context.forwards
        assert unit.context.backward is None
        assert unit.context.reductions._reducing is None


def run_case(ctx, name: str, strategies: list[ShardingStrategy]) -> None:
    case = CASES[name]
    for strategy in strategies:
        ctx.note(f"{name}: {strategy.name}")
        run = check_parity(
            ctx,
            case.make,
            make_input,
            steps=case.steps,
            shard=lambda model, group, strategy=strategy: (case.shard or shard)(model, group, strategy) and None,
            train=case.train,
            before_step=case.before_step,
            set_to_none=case.set_to_none,
        )
        check_settled(run.sharded)


# ---------------------------------------------------------------------------------------------------------------------
# Forwards and backwards in every combination
# ---------------------------------------------------------------------------------------------------------------------


def three_forwards(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    loss = sum(mean_square(model(x * k), x) for k in (1.0, 0.5, -1.0))
    (loss * scale).backward()
    return loss.detach()


def two_of_each(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    first, second = mean_square(model(x), x), mean_square(model(x * 0.5), x)
    (first * scale).backward()
    (second * scale).backward()
    return (first + second).detach()


def two_of_each_last_first(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    first, second = mean_square(model(x), x), mean_square(model(x * 0.5), x)
    (second * scale).backward()
    (first * scale).backward()
    return (first + second).detach()


def backward_three_times(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    loss = mean_square(model(x), x)
    for k in (1.0, 0.5, 0.25):
        (loss * scale * k).backward(retain_graph=k > 0.25)
    return loss.detach()


def accumulate(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    total = torch.zeros((), dtype=torch.double)
    for k in (1.0, 0.5):
        loss = mean_square(model(x * k), x)
        (loss * scale).backward()
        total += loss.detach()
    return total


def discard_a_forward(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    model(x * 2)
    loss = mean_square(model(x), x)
    model(x * 3)
    (loss * scale).backward()
    return loss.detach()


def two_losses_of_parts(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    """Two backwards through a common trunk, each through some units of its own."""
    hidden = model.front(x)
    first, second = mean_square(model.middle(hidden), x), mean_square(model.head(hidden), x)
    (first * scale).backward(retain_graph=True)
    (second * scale).backward()
    return (first + second).detach()


def zero_grad_in_between(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    loss = mean_square(model(x), x)
    model.zero_grad()
    (loss * scale).backward()
    return loss.detach()


def zero_to_zeros_in_between(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    if scale == 1.0:  # the reference runs one slice after the other: it must not drop the first one's gradients
        loss = mean_square(model(x), x)
        model.zero_grad(set_to_none=False)
        (loss * scale).backward()
        return loss.detach()
    return zero_grad_in_between(model, x, scale)


def plain() -> nn.Module:
    return Net(Block())


for train in (
    three_forwards,
    two_of_each,
    two_of_each_last_first,
    backward_three_times,
    accumulate,
    discard_a_forward,
    zero_grad_in_between,
    zero_to_zeros_in_between,
):
    CASES[train.__name__] = Case(plain, train)
CASES["zero_grad to zeros"] = Case(plain, set_to_none=False, steps=5)
CASES["zero_grad to None"] = Case(plain, steps=5)


def shard_all(model: nn.Module, group: Any, strategy: ShardingStrategy) -> None:
    for child in model.children():
        fully_shard(child, process_group=group, strategy=strategy)


CASES["two losses of parts"] = Case(plain, two_losses_of_parts, shard=shard_all)


class Repeated(Block):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Repeats(nn.Module):
    """One unit called three times in a forward, once in the midst of another."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.other(self.block(x)) + self.block(x))


class Recursive(Block):
    """A unit that calls itself, its parameters used before and after."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self.linear(self(x, depth - 1)) + x if depth else x


CASES["called three times"] = Case(lambda: Net(Repeats()))
CASES["recursive"] = Case(lambda: Net(Recursive()))


class Optional(nn.Module):
    """Calls one of two units, by the step."""

    step = 0

    def __init__(self) -> None:
        super().__init__()
        self.even, self.third = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        if self.step % 2 == 0:
            x = self.even(x)
        return self.third(x) if self.step % 3 == 2 else x


def tell_step(model: nn.Module, step: int) -> None:
    model.middle.step = step


# AdamW's weight decay would move a parameter with a gradient of zero in place of None: check_parity looks.
CASES["units left out"] = Case(lambda: Net(Optional()), before_step=tell_step, steps=6)
CASES["units left out, zeroed gradients"] = dataclasses.replace(CASES["units left out"], set_to_none=False)


class Ignored(nn.Module):
    """A unit whose output is dropped: backward does not come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped, self.used = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        self.dropped(x)
        return self.used(x)


CASES["output dropped"] = Case(lambda: Net(Ignored()))


def evaluate_under(context: Callable[[], Any], mode: bool = False) -> Callable[[nn.Module, int], None]:
    """Run forward before each step, twice: nothing of it may be left."""

    def before_step(model: nn.Module, step: int) -> None:
        model.train(mode)
        with context():
            for _ in range(2):
                model(torch.ones(2, WIDTH, dtype=torch.double))
        model.train()

    return before_step


CASES["no_grad first"] = Case(plain, before_step=evaluate_under(torch.no_grad))
CASES["inference_mode first"] = Case(plain, before_step=evaluate_under(torch.inference_mode))
CASES["eval with gradients first"] = Case(plain, before_step=evaluate_under(contextlib.nullcontext))
CASES["a discarded forward first"] = Case(plain, before_step=evaluate_under(contextlib.nullcontext, True))


# ---------------------------------------------------------------------------------------------------------------------
# What a unit may return
# ---------------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclasses.dataclass
class Record:
    hidden: Tensor
    extra: dict[str, Any]
    name: str = "record"


class Bag:
    """An object with attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("_private", "hidden")

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden
        self._private = None


class ModelOutput(collections.OrderedDict):
    """As in transformers: a dict and a dataclass at once, whose items can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Returns(Block):
    """Returns what ``pack`` makes of two tensors, of which each uses one of two layers."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__("one", "two")
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(torch.tanh(self.one(x)), self.two(x))


OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out[0] * out[1]),
    "list with others": (lambda a, b: [a, None, "text", 3, b], lambda out: out[0] * out[4]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: out["a"] * out["b"]),
    "namedtuple": (Pair, lambda out: out.first * out.second),
    "namedtuple with None": (lambda a, b: Pair(a + b, None), lambda out: out.first),
    "dataclass": (lambda a, b: Record(a, {"b": [b]}), lambda out: out.hidden * out.extra["b"][0]),
    "nested": (lambda a, b: [{"x": (a, [b, None])}, 1.0], lambda out: out[0]["x"][0] * out[0]["x"][1][0]),
    "object": (lambda a, b: Bag(a=a, b=Bag(c=b)), lambda out: out.a * out.b.c),
    "object with slots": (lambda a, b: (Slotted(a), Slotted(b)), lambda out: out[0].hidden * out[1].hidden),
    "model output": (lambda a, b: ModelOutput(a=a, past=(b, b)), lambda out: out.a * out.past[1]),
    "one of two used": (lambda a, b: (a, b), lambda out: out[1]),
    "view": (lambda a, b: (a * b).view(-1), lambda out: out.view(-1, WIDTH)),
    "view changed in place": (lambda a, b: (a * b).view(-1), lambda out: out.mul_(2).view(-1, WIDTH)),
    "slices changed in place": (lambda a, b: (a * b).unbind(), lambda out: torch.stack([t * 2 for t in out])),
    "changed in place": (lambda a, b: a + b, lambda out: out.mul_(0.5).add_(1)),
    "changed through a view": (lambda a, b: a + b, lambda out: out.t().mul_(0.5).t()),
    "detached part": (lambda a, b: (a, b.detach()), lambda out: out[0] * out[1]),
}
for form, (pack, take) in OUTPUTS.items():
    CASES[f"returns: {form}"] = Case(lambda pack=pack, take=take: Net(Returns(pack), take), steps=2)


class ReturnsInput(Block):
    """One output is the input itself, and the other is computed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class Identity(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x


class ReturnsParameter(Block):
    """Outputs that are the parameters, or views of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(x), self.linear.weight, self.linear.weight.t(), self.linear.bias


CASES["returns its input"] = Case(lambda: Net(ReturnsInput(), lambda out: out[0] * out[1]))
CASES["returns its input only"] = Case(lambda: Net(Identity()))
CASES["returns parameters"] = Case(
    lambda: Net(ReturnsParameter(), lambda out: out[0] @ out[1] + out[0] @ out[2] + out[3])
)


# ---------------------------------------------------------------------------------------------------------------------
# What leaves a unit past its output
# ---------------------------------------------------------------------------------------------------------------------


class Stash(Block):
    """Leaves a tensor in an attribute; the loss uses it. ``late``: made after the output, from parameters of its own."""

    def __init__(self, where: str, late: bool) -> None:
        super().__init__("linear", "aux")
        self.where = where
        self.late = late
        self.kept: Any = {"list": [], "dict": {}}.get(where)
        if where == "buffer":
            self.register_buffer("kept_buffer", torch.zeros(()), persistent=False)

    def keep(self, value: Tensor) -> None:
        match self.where:
            case "attribute":
                self.kept = value
            case "list":
                self.kept[:] = [value]
            case "dict":
                self.kept["value"] = value
            case "buffer":
                self.kept_buffer = value
            case "new attribute":
                self.fresh = value
            case "inner module":
                self.aux.kept = value

    def kept_value(self) -> Tensor:
        match self.where:
            case "list":
                return self.kept.pop()
            case "dict":
                return self.kept.pop("value")
            case "buffer":
                value = self.kept_buffer
                self.kept_buffer = value.detach()
                return value
            case "new attribute":
                return self.__dict__.pop("fresh")
            case "inner module":
                return self.aux.__dict__.pop("kept")
        value, self.kept = self.kept, None
        return value

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.keep(self.aux(x).square().mean() if self.late else y.square().mean())
        return y * 2


class DropsOutput(Stash):
    """The stashed tensor is the only way back: the output has no graph."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.detach() * 0.5


def with_stash(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    loss = mean_square(model(x), x)
    loss = loss + model.middle.kept_value()
    (loss * scale).backward()
    return loss.detach()


def stash_only(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    model(x)
    loss = model.middle.kept_value()
    (loss * scale).backward()
    return loss.detach()


for where in ("attribute", "list", "dict", "buffer", "new attribute", "inner module"):
    CASES[f"stash: {where}"] = Case(lambda where=where: Net(Stash(where, False)), with_stash)
    CASES[f"stash: {where}, late"] = Case(lambda where=where: Net(Stash(where, True)), with_stash)
    CASES[f"stash: {where}, loss of its own"] = Case(lambda where=where: Net(Stash(where, True)), stash_only)
CASES["stash, output without a graph"] = Case(lambda: Net(DropsOutput("attribute", True)), with_stash)


def catch_inner(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    """A user's forward hook on a layer inside of a unit: a feature loss, as in distillation."""
    caught: list[Tensor] = []
    handle = model.middle.linear.register_forward_hook(lambda module, args, out: caught.append(out))
    y = model(x)
    handle.remove()
    loss = mean_square(y, x) + caught[0].square().mean()
    (loss * scale).backward()
    return loss.detach()


def catch_inner_only(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    caught: list[Tensor] = []
    handle = model.middle.linear.register_forward_hook(lambda module, args, out: caught.append(out))
    model(x)
    handle.remove()
    loss = caught[0].square().mean()
    (loss * scale).backward()
    return loss.detach()


CASES["caught by a hook"] = Case(plain, catch_inner)
CASES["caught by a hook, loss of its own"] = Case(plain, catch_inner_only)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of other things than parameters, and of gradients
# ---------------------------------------------------------------------------------------------------------------------


def input_gradient(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    """``torch.autograd.grad`` with respect to inputs is no step: it leaves no ``.grad``, and the training after is right."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    loss = mean_square(model(x.detach() + grad), x)
    (loss * scale).backward()
    return loss.detach()


def input_gradient_then_backward(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    x = x.clone().requires_grad_()
    loss = mean_square(model(x), x)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * scale).backward()
    return (loss + grad.sum() * 0).detach()


def gradient_penalty(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    loss = mean_square(y, x) + grad.square().mean()
    (loss * scale).backward()
    return loss.detach()


def penalty_only(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = grad.square().mean()
    (loss * scale).backward()
    return loss.detach()


def input_gradient_in_backward(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    """Of a unit that is complete, and waits for its turn to be reduced: units keep the order of their first forwards."""

    def ask(grad: Tensor) -> None:
        with torch.enable_grad():
            y = torch.ones_like(grad).requires_grad_()
            torch.autograd.grad(model.front(y).sum(), y)

    model.middle(model.front(x))
    hidden = model.middle(x)
    hidden.register_hook(ask)
    loss = mean_square(model.front(hidden), x)
    (loss * scale).backward()
    return loss.detach()


for train in (
    input_gradient,
    input_gradient_then_backward,
    gradient_penalty,
    penalty_only,
    input_gradient_in_backward,
):
    CASES[train.__name__] = Case(plain, train)


# ---------------------------------------------------------------------------------------------------------------------
# Frozen parameters
# ---------------------------------------------------------------------------------------------------------------------


class Adapter(Block):
    """A frozen layer with a trainable low-rank branch."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.up(self.down(x)))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


CASES["frozen units between"] = Case(lambda: Net(nn.Sequential(frozen(Block()), Block(), frozen(Block()))))
CASES["frozen front"] = Case(lambda: Net(nn.Sequential(frozen(Block()), Block())))
CASES["adapters"] = Case(lambda: Net(nn.Sequential(Adapter(), Adapter(), Adapter())))


def freeze_by_step(model: nn.Module, step: int) -> None:
    model.middle.linear.weight.requires_grad_(step % 2 == 0)
    model.front.requires_grad_(step % 3 != 2)


CASES["frozen and thawed"] = Case(plain, before_step=freeze_by_step, steps=6)


def freeze_in_between(model: nn.Module, x: Tensor, scale: float) -> Tensor:
    """``requires_grad_`` between forward and backward comes too late, as in one process, for what the graph holds."""
    loss = mean_square(model(x), x)
    (loss * scale).backward()
    model.middle.requires_grad_(False)
    second = mean_square(model(x), x)
    model.middle.requires_grad_(True)
    (second * scale).backward()
    return loss.detach()


CASES["frozen for one of two forwards"] = Case(plain, freeze_in_between)


def frozen_events(ctx) -> list[str]:
    model = shard(Net(nn.Sequential(frozen(Block()), Adapter(), frozen(Block()))), ctx.group)
    model(torch.ones(2, WIDTH)).sum().backward()
    with record_events() as events:
        loss = model(torch.ones(2, WIDTH)).sum()
        del events[:]
        loss.backward()
    check_settled(model)
    return events


def test_frozen_units_are_freed_in_backward(pool):
    events = pool.run(frozen_events)[0]
    assert [e for e in events if e.startswith("reduce")] == [
        "reduce-scatter middle.1",
        "reduce-scatter front",
        "reduce-scatter <root>",
    ]
    # Not only at its end: at most two units are whole at a time, the current one and the one gathered ahead.
    whole: set[str] = set()
    for what, unit in (e.split() for e in events):
        if what == "all-gather":
            whole.add(unit)
        elif what == "reshard" and unit != "<root>":
            whole.remove(unit)
        assert len(whole) <= 2, events


# ---------------------------------------------------------------------------------------------------------------------
# Activation checkpointing
# ---------------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Computes its inner module again in backward. Not a unit itself."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class CheckpointInside(Block):
    """A unit that checkpoints part of itself."""

    def __init__(self, reentrant: bool, by_function: bool = False) -> None:
        super().__init__("before", "inner", "after")
        self.reentrant = reentrant
        self.by_function = by_function

    def compute_inner(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.inner.weight, self.inner.bias))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        inner = self.compute_inner if self.by_function else self.inner
        x = checkpoint(inner, x, use_reentrant=self.reentrant)
        return self.after(torch.tanh(x))


class CheckpointedUnits(nn.Module):
    """One checkpoint over several units and something of the root's own."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.reentrant = reentrant

    def several(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.several, x, use_reentrant=self.reentrant)


for reentrant in (False, True):
    kind = "reentrant" if reentrant else "non-reentrant"
    CASES[f"{kind} checkpoint: around a unit"] = Case(lambda r=reentrant: Net(Checkpointed(Block(), r)))
    CASES[f"{kind} checkpoint: inside a unit"] = Case(lambda r=reentrant: Net(CheckpointInside(r)))
    CASES[f"{kind} checkpoint: inside a unit, of a function"] = Case(lambda r=reentrant: Net(CheckpointInside(r, True)))
    CASES[f"{kind} checkpoint: across units"] = Case(lambda r=reentrant: Net(CheckpointedUnits(r)))
    CASES[f"{kind} checkpoint: of every unit"] = Case(
        lambda r=reentrant: Net(nn.Sequential(*(Checkpointed(Block(), r) for _ in range(3))))
    )
    CASES[f"{kind} checkpoint: nested"] = Case(
        lambda r=reentrant: Net(Checkpointed(nn.Sequential(Block(), Checkpointed(Block(), r)), r))
    )
    CASES[f"{kind} checkpoint: one unit for all"] = Case(
        lambda r=reentrant: Net(CheckpointInside(r)),
        shard=lambda model, group, strategy: fully_shard(model, process_group=group, strategy=strategy) and None,
    )
    CASES[f"{kind} checkpoint: twice backward"] = Case(
        lambda r=reentrant: Net(Checkpointed(Block(), r)), backward_three_times
    )


# ---------------------------------------------------------------------------------------------------------------------
# Others
# ---------------------------------------------------------------------------------------------------------------------


class NoGradient(torch.autograd.Function):
    """Multiplies by a weight, and withholds the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.t(), None


class WithheldGradient(Block):
    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = NoGradient.apply(x, self.weight)
        return self.linear(x) if hasattr(self, "linear") else x


class OnlyWithheld(Block):
    def __init__(self) -> None:
        super().__init__()
        del self.linear
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(x, self.weight)


CASES["a withheld gradient"] = Case(lambda: Net(WithheldGradient()))
CASES["the only gradient withheld"] = Case(lambda: Net(OnlyWithheld()))


class Gan(nn.Module):
    """Two models without a common root."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Net(Block())
        self.judge = nn.Sequential(nn.Linear(3, WIDTH), Block(), nn.Linear(WIDTH, 1))


def train_gan(gan: nn.Module, x: Tensor, scale: float) -> Tensor:
    fake = gan.generator(x)
    judge_loss = gan.judge(fake.detach()).square().mean() + (gan.judge(x[:, :3]) - 1).square().mean()
    (judge_loss * scale).backward()
    generator_loss = (gan.judge(fake) - 1).square().mean()
    (generator_loss * scale).backward()
    return (judge_loss + generator_loss).detach()


def train_gan_frozen_judge(gan: nn.Module, x: Tensor, scale: float) -> Tensor:
    fake = gan.generator(x)
    gan.judge.requires_grad_(False)
    generator_loss = (gan.judge(fake) - 1).square().mean()
    gan.judge.requires_grad_(True)
    judge_loss = gan.judge(fake.detach()).square().mean()
    (generator_loss * scale).backward()
    (judge_loss * scale).backward()
    return (judge_loss + generator_loss).detach()


def shard_gan(gan: nn.Module, group: Any, strategy: ShardingStrategy) -> None:
    shard(gan.generator, group, strategy)
    shard(gan.judge, group, strategy)


CASES["two models"] = Case(Gan, train_gan, shard=shard_gan)
CASES["two models, one frozen"] = Case(Gan, train_gan_frozen_judge, shard=shard_gan)


@pytest.mark.parametrize("name", CASES)
def test_parity(pool, name):
    """By the first strategy, and every third case by another one too."""
    first, *others = CASES[name].strategies
    turn = list(CASES).index(name)
    pool.run(run_case, name, [first, *some(others, 0 if turn % 3 else 1, turn // 3)], timeout=20)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what follows the newest values
# ---------------------------------------------------------------------------------------------------------------------


def refusals(ctx) -> None:
    for strategy in STRATEGIES:
        model = shard(Net(Block()), ctx.group, strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(2, WIDTH)
        with pytest.raises(RuntimeError, match=r"gradient of '[\w.]+' has a graph of its own.*create_graph"):
            model(x).sum().backward(create_graph=True)
        optimizer.zero_grad()
        model(x).sum().backward()
        loss = model(x).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="parameters of unit '<root>' were changed in place between"):
            loss.backward()
        hidden = model.middle(x)
        optimizer.step()
        with pytest.raises(RuntimeError, match="parameters of unit 'middle' were changed in place between"):
            hidden.sum().backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        check_settled(model)


def test_refusals(pool):
    pool.run(refusals)


def left_unsharded(ctx) -> None:
    """After a forward without a backward, parameters may be left whole: the next forward must not believe them."""
    for strategy in STRATEGIES:
        for change in ("optimizer", "data", "load"):
            ctx.note(f"{strategy.name}, {change}")
            torch.manual_seed(0)
            model = shard(Net(Block()), ctx.group, strategy)
            x = torch.ones(2, WIDTH)
            model(x).sum().backward()
            model(x)  # no backward
            if change == "optimizer":
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            elif change == "data":
                for p in model.parameters():
                    p.data.add_(0.5)
            else:
                model.load_state_dict({k: torch.full_like(v, 0.25) for k, v in model.state_dict().items()})
            torch.manual_seed(0)
            plain = Net(Block())
            plain.load_state_dict(full_params(model))
            torch.testing.assert_close(model(x), plain(x))
            with torch.no_grad():
                torch.testing.assert_close(model(x), plain(x))


def drop_after(ctx, act: str) -> weakref.ref[nn.Module]:
    model = shard(Net(Block()), ctx.group)
    if act != "forward":
        model(torch.ones(2, WIDTH)).sum().backward()
    if act != "backward":
        model(torch.ones(2, WIDTH))
    return weakref.ref(model)


def dropped_models(ctx) -> None:
    """A forward without a backward leaves records of what backward would need: they must not keep a model alive."""
    for act in ("backward", "forward", "backward and forward"):
        model = drop_after(ctx, act)
        gc.collect()
        assert model() is None, act


def test_a_forward_without_backward_keeps_no_model_alive(pool):
    pool.run(dropped_models)


def test_parameters_left_whole_are_not_trusted(pool):
    pool.run(left_unsharded)


def grad_of_unsharded_parameters(ctx) -> None:
    """``autograd.grad`` takes the gradients for itself: as they are on this rank, and none is reduced."""
    torch.manual_seed(0)
    plain = Net(Block())
    model = shard(copy.deepcopy(plain), ctx.group)
    x = make_input(0, 3)
    for _ in range(2):
        unshard(model, recurse=True)
        params = list(model.parameters())
        with record_events() as events:
            found = torch.autograd.grad(model(x).sum(), params)
        assert not [e for e in events if e.startswith("reduce-scatter")]
        expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
        for grad, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, wanted)
        assert all(p.grad is None for p in (*params, *model.parameters()))
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_autograd_grad_of_unsharded_parameters(pool):
    pool.run(grad_of_unsharded_parameters, world_size=2)
