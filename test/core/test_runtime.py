"""Training steps beyond ``model(x).sum().backward()``: each gives the gradients of one process, or raises.

The fuzzer, ``together/test_programs`` and ``test_checkpointing`` cover several forwards and backwards, units left out,
accumulation, and checkpoints in every place. This file has cases that they do not draw.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from clean import check_clean
from on_ranks import ranks
from parity import check_same_gradients, mean_square, parts, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy, recover
from flatshard._base.trace import record_events

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
WIDTH = 5


class Block(nn.Module):
    """A class that this file's policy makes a unit, with its subclasses."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names or ("linear",):
            self.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """A unit between two others. ``take`` makes a tensor of the middle one's output."""

    def __init__(self, middle: nn.Module, take: Callable[[Any], Tensor] = lambda out: out) -> None:
        super().__init__()
        self.front = Block()
        self.middle = middle
        self.head = nn.Linear(WIDTH, 3)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.take(self.middle(self.front(x)))))


def plain() -> nn.Module:
    return Net(Block())


def usual(model: nn.Module, x: Tensor) -> None:
    mean_square(model(x), x).backward()


class Case(NamedTuple):
    make: Callable[[], nn.Module] = plain
    step: Callable[[nn.Module, Tensor], None] = usual
    policy: Any = Block
    uses_output: bool = True


# -- Forwards and backwards --------------------------------------------------------------------------------------------


def backward_three_times(model: nn.Module, x: Tensor) -> None:
    loss = mean_square(model(x), x)
    for k in (1.0, 0.5, 0.25):
        (loss * k).backward(retain_graph=k > 0.25)


class Repeats(nn.Module):
    """Calls one unit three times in a forward, with another unit's call in between."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.other(self.block(x)) + self.block(x))


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
    """Withholds its weight's gradient. ``only``: the weight is the only parameter."""

    def __init__(self, only: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        if only:
            self.linear = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(NoGradient.apply(x, self.weight))


class Recomputes(Block):
    """Recomputes a layer in backward by a function of its parameters, without calling its forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__("before", "inner", "after")
        self.reentrant = reentrant

    def compute_inner(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, self.inner.weight, self.inner.bias))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.after(checkpoint(self.compute_inner, x, use_reentrant=self.reentrant))


PASSES = {
    "backward three times": Case(step=backward_three_times),
    "called three times": Case(lambda: Net(Repeats())),
    "a withheld gradient": Case(lambda: Net(WithheldGradient(False))),
    "the only gradient withheld": Case(lambda: Net(WithheldGradient(True))),
}
for reentrant in (False, True):
    PASSES[f"recomputed, {reentrant}"] = Case(lambda r=reentrant: Net(Recomputes(r)), backward_three_times)
    PASSES[f"recomputed in one unit, {reentrant}"] = Case(lambda r=reentrant: Net(Recomputes(r)), policy=None)


# -- Outputs of a unit -------------------------------------------------------------------------------------------------


Record = dataclasses.make_dataclass("Record", ["hidden", "extra"])


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Returns(Block):
    """Returns ``pack(...)`` of two tensors, which use one layer each, of the input and of the first layer."""

    def __init__(self, pack: Callable[..., Any]) -> None:
        super().__init__("one", "two")
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(torch.tanh(self.one(x)), self.two(x), x, self.one)


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "objects": (
        lambda a, b, *_: SimpleNamespace(a=a, b=Record(None, [Slotted(b)])),
        lambda out: out.a * out.b.extra[0].hidden,
    ),
    "view changed in place": (lambda a, b, *_: (a * b).view(-1), lambda out: out.mul_(2).view(-1, WIDTH)),
    "slices changed": (lambda a, b, *_: (a * b).unbind(), lambda out: torch.stack([t * 2 for t in out])),
    "changed in place": (lambda a, b, *_: a + b, lambda out: out.mul_(0.5).add_(1)),
    "changed through a view": (lambda a, b, *_: a + b, lambda out: out.t().mul_(0.5).t()),
    "detached part": (lambda a, b, *_: (a, b.detach()), lambda out: out[0] * out[1]),
    "its input and its parameters": (
        lambda a, b, x, own: (x, own.weight, own.weight.t(), own.bias),
        lambda out: out[0] @ out[1] + out[0] @ out[2] + out[3],
    ),
}
OUTPUTS = {name: Case(lambda pack=pack, take=take: Net(Returns(pack), take)) for name, (pack, take) in FORMS.items()}


# -- Tensors that leave a unit outside its output ----------------------------------------------------------------------


STASHES: dict[str, tuple[Callable[["Stash", Tensor], None], Callable[["Stash"], Tensor]]] = {
    "attribute": (lambda m, value: setattr(m, "kept", value), lambda m: [m.kept, setattr(m, "kept", None)][0]),
    "list": (lambda m, value: m.listed.append(value), lambda m: m.listed.pop()),
    "buffer": (lambda m, value: setattr(m, "buffer", value), lambda m: [m.buffer, m.forget_buffer()][0]),
    "inner module": (lambda m, value: setattr(m.aux, "fresh", value), lambda m: m.aux.__dict__.pop("fresh")),
}
"""Places where a unit stores a tensor, each with the loss's way to read it."""


class Stash(Block):
    """Stores a tensor for the loss, computed from its own parameters after the output. ``drops`` the output's graph."""

    def __init__(self, where: str, drops: bool = False) -> None:
        super().__init__("linear", "aux")
        self.keep, self.kept_value = (functools.partial(each, self) for each in STASHES[where])
        self.drops = drops
        self.kept: Any = None
        self.listed: list[Tensor] = []
        self.register_buffer("buffer", torch.zeros(()), persistent=False)

    def forget_buffer(self) -> None:
        self.buffer = self.buffer.detach()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.keep(self.aux(x).square().mean())
        return x.detach() * 0.5 if self.drops else y * 2


def with_stash(model: nn.Module, x: Tensor) -> None:
    loss = mean_square(model(x), x)
    (loss + model.middle.kept_value()).backward()


def stash_only(model: nn.Module, x: Tensor) -> None:
    model(x)
    model.middle.kept_value().backward()


def catch_inner(model: nn.Module, x: Tensor) -> None:
    """Read a layer inside a unit by a forward hook of the user, for a feature loss as in distillation."""
    caught: list[Tensor] = []
    with model.middle.linear.register_forward_hook(lambda module, args, out: caught.append(out)):
        model(x)
    caught[0].square().mean().backward()


ESCAPES = {
    "output without a graph": Case(lambda: Net(Stash("attribute", True)), with_stash),
    "caught by a hook": Case(step=catch_inner, uses_output=False),
}
for where in STASHES:
    ESCAPES[where] = Case(lambda where=where: Net(Stash(where)), with_stash)
    ESCAPES[f"{where}, loss of its own"] = Case(lambda where=where: Net(Stash(where)), stash_only, uses_output=False)


# -- Gradients with respect to inputs, and of gradients ----------------------------------------------------------------


def gradient_penalty(model: nn.Module, x: Tensor, adds: bool = True, penalises: bool = True) -> None:
    """Take a gradient with respect to inputs, which leaves no ``.grad``."""
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=penalises, retain_graph=True)
    ((mean_square(y, x) if adds else 0) + (grad.square().mean() if penalises else 0)).backward()


def input_gradient_in_backward(model: nn.Module, x: Tensor) -> None:
    """Take an input gradient of a completed unit that waits for its reduction: units keep their first forwards' order."""

    def ask(grad: Tensor) -> None:
        with torch.enable_grad():
            y = torch.ones_like(grad).requires_grad_()
            torch.autograd.grad(model.front(y).sum(), y)

    model.middle(model.front(x))
    hidden = model.middle(x)
    hidden.register_hook(ask)
    mean_square(model.front(hidden), x).backward()


GRADIENTS = {
    "of inputs, then backward": Case(step=functools.partial(gradient_penalty, penalises=False)),
    "penalty": Case(step=gradient_penalty),
    "penalty only, through a unit called three times": Case(
        lambda: Net(Repeats()), functools.partial(gradient_penalty, adds=False)
    ),
    "of inputs in backward": Case(step=input_gradient_in_backward),
}

CASES = {"passes": PASSES, "outputs": OUTPUTS, "escapes": ESCAPES, "gradients": GRADIENTS}


@pytest.mark.parametrize("table", CASES)
@ranks(2, timeout=30)
def test_gradients_are_those_of_one_process(ctx, table: str):
    """Run each case for two steps, by the first strategy and one of the others. No state is left after either."""
    for turn, (name, case) in enumerate(CASES[table].items()):
        for strategy in (STRATEGIES[0], STRATEGIES[1 + turn % 2]):
            ctx.note(f"{name}: {strategy.name}")
            one, model = twins(ctx, case.make, case.policy, strategy=strategy)
            for number in range(2):
                torch.manual_seed(number)
                batch = torch.randn(3 * ctx.world_size, WIDTH, dtype=torch.double)
                for m, x in zip((one, model), parts(ctx, batch), strict=True):
                    m.zero_grad()
                    case.step(m, x)
                check_same_gradients(model, one)
            if not case.uses_output:  # the next pass would drop a forward that no backward has reached
                recover(model)
            check_clean(model)


# -- Freed memory and refused calls ------------------------------------------------------------------------------------


class Adapter(Block):
    """A frozen layer with a trainable low-rank branch."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.up(self.down(x)))


@ranks(2)
def test_frozen_units_are_freed_in_backward(ctx):
    """Backward frees frozen units before its end: at most the current and the prefetched unit are unsharded."""

    def make() -> nn.Module:
        return Net(nn.Sequential(Block().requires_grad_(False), Adapter(), Block().requires_grad_(False)))

    for strategy in reversed(STRATEGIES):
        one, model = twins(ctx, make, Block, strategy=strategy)
        for _ in range(2):
            for m, x in zip((one, model), parts(ctx, torch.ones(4, WIDTH).double()), strict=True):
                m.zero_grad()
                loss = m(x).square().mean()
                with record_events() as events:
                    loss.backward()
            check_clean(model)
            check_same_gradients(model, one)
    assert [e.split()[1] for e in events if e.startswith("reduce")] == ["middle.1", "front", "<root>"]
    whole: set[str] = set()
    for what, unit in (e.split() for e in events):
        if what == "all-gather":
            whole.add(unit)
        elif what == "reshard" and unit != "<root>":
            whole.remove(unit)
        assert len(whole) <= 2, events


@ranks(2)
def test_gradients_with_graphs_are_refused(ctx):
    for strategy in STRATEGIES:
        _, model = twins(ctx, plain, Block, torch.float32, strategy=strategy)
        x = torch.ones(2, WIDTH)
        with pytest.raises(RuntimeError, match=r"gradient of '[\w.]+' has a graph of its own.*create_graph"):
            model(x).sum().backward(create_graph=True)
        model.zero_grad()
        model(x).sum().backward()
        check_clean(model)


@ranks(2)
def test_another_default_device(ctx, path):
    """Tensors of flatshard ignore the default device: in a step, a norm, a checkpoint, and comparisons of ranks."""
    plain, model = twins(ctx, lambda: Net(Block()), policy={Block})
    x = torch.ones(2, WIDTH).double()
    for each in (plain, model):
        each(x).sum().backward()
    torch.set_default_device("meta")
    try:
        model.zero_grad()
        model(x).sum().backward()
        flatshard.clip_grad_norm_(model, 1e9)
        flatshard.debug.check_replicas(model, buffers=True)
        flatshard.save_checkpoint(path, {"model": model}, process_group=ctx.group)
        flatshard.load_checkpoint(path, {"model": model}, process_group=ctx.group)
        with flatshard.summon_full_params(model, with_grads=True):
            flatshard.describe(model)
    finally:
        torch.set_default_device(None)
    check_same_gradients(model, plain)
