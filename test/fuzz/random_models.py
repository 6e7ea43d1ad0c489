"""Random models for the fuzzer: trees of modules as plain data, and functions that build them.

A :class:`Spec` prints and shrinks well; :meth:`Model.build` builds the same modules from it each time. All modules map
(batch, width) to (batch, width), in the dtype of their input. :data:`NOW` holds the options of the running forward.
"""

import contextlib
import dataclasses
import functools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from models import Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard._composable.find import units_below


@dataclasses.dataclass(frozen=True)
class Env:
    """Options of a forward."""

    first: bool = True
    """Whether this is the forward of the batch's first slice, or its only one. Only this one may change parameters."""
    mode: int = 0
    left_out: frozenset[int] = frozenset()
    """Numbers of the :class:`Drop` and :class:`Tower` modules that this rank leaves out."""
    trains_told: bool = True
    """Whether backward goes through the terms of :class:`Teller` modules."""
    told: Any = dataclasses.field(default_factory=list)
    """Terms that modules added to the loss."""


NOW = Env(told=deque(maxlen=0))


@contextlib.contextmanager
def during(env: Env) -> Iterator[None]:
    global NOW
    before, NOW = NOW, env
    try:
        yield
    finally:
        NOW = before


class Scale(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Empty(nn.Module):
    """A parameter without elements, which still gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class Transposed(nn.Module):
    """A parameter that is not contiguous."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width + 2, width).mul_(0.3).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class Frozen(nn.Module):
    """A unit with a single trainable parameter."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Integer(nn.Module):
    """An integer parameter, as in quantised models, and a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-2, 3, (width,)), requires_grad=False)
        self.register_buffer("offset", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.codes + self.offset.to(x.dtype)


class Listed(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for bias in self.biases:
            x = torch.tanh(x + bias)
        return x


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(torch.stack([x, 0.5 * x], 1))[0][:, -1]


class Around(nn.Module):
    """A module with one module inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Fork(nn.Module):
    """Return the branches' outputs in a structure, so that a unit's output is no plain tensor."""

    def __init__(self, form: str, branches: list[nn.Module]) -> None:
        super().__init__()
        self.form = form
        for i, branch in enumerate(branches):
            self.add_module(f"branch{i}", branch)

    def forward(self, x: Tensor) -> Any:
        outputs = [branch(x) for branch in self.children()]
        if self.form == "dict":
            return {f"out{i}": out for i, out in enumerate(outputs)}
        if self.form == "nested":
            return [{"first": outputs[0]}, tuple(outputs[1:]), None, "text"]
        return tuple(outputs)


class Join(nn.Module):
    """Add a fork's outputs; with the form ``"drop"`` return the first only, so that the others get no gradient."""

    def __init__(self, fork: Fork) -> None:
        super().__init__()
        self.fork = fork

    def forward(self, x: Tensor) -> Tensor:
        out = self.fork(x)
        if self.fork.form == "dict":
            return sum(out.values())
        if self.fork.form == "nested":
            return out[0]["first"] + sum(out[1])
        return out[0] if self.fork.form == "drop" else sum(out)


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class TwoNames(nn.Module):
    """A module registered under two names: its parameters have two FQNs, and its forward runs twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.one, self.other = inner, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + torch.tanh(self.other(x))


class Unused(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Stash(Around):
    """Store a tensor that is not part of the output; the root adds it to its own output."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.seen = y.mean()
        return torch.tanh(y)

    def forget(self) -> None:
        self.seen = None


class Pocket:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.terms: list[Tensor] = []

    def add(self, term: Tensor) -> None:
        self.terms.append(term)


@dataclasses.dataclass
class Record:
    term: Tensor | None = None


TOLD: list[Tensor] = []
CONTEXT: ContextVar[Tensor | None] = ContextVar("term", default=None)
THREAD = threading.local()
WAYS: dict[str, Callable[[], Any]] = {
    "append": list,
    "method": Pocket,
    "namespace": SimpleNamespace,
    "dataclass": Record,
    "deque": deque,
    "tuple": lambda: ([], []),
    "global": lambda: TOLD,
    "context": lambda: CONTEXT,
    "thread": lambda: THREAD,
    "attribute": Pocket,
    "closure": lambda: None,
}
"""Ways for a term of the loss to leave a module besides its output, each with the object that holds the term then."""


class Teller(Around):
    """Pass on a term of the loss in one of ``WAYS``, as auxiliary heads do. ``"append"`` to ``"tuple"`` are arguments."""

    def __init__(self, inner: nn.Module, width: int, way: str) -> None:
        super().__init__(inner)
        self.head = nn.Linear(width, width)
        self.way = way
        self.pocket: Any = Pocket()

    def forward(self, x: Tensor, to: Any = None) -> Any:
        y = torch.tanh(self.inner(x))
        term = self.head(y).square().mean()  # computed after the output, so backward reaches it first
        match self.way:
            case "append" | "method":
                to(term)
            case "namespace" | "dataclass":
                to.term = term
            case "deque":
                to.append(term)
            case "tuple":
                to[1].append(term)
            case "global":
                TOLD.append(term)
            case "context":
                CONTEXT.set(term)
            case "thread":
                THREAD.term = term
            case "attribute":
                self.pocket.add(term)
            case "closure":
                return y, lambda: term
        return y

    def forget(self) -> None:
        """Drop recorded terms, including those from recomputation in backward."""
        TOLD.clear()
        CONTEXT.set(None)
        THREAD.term = None
        self.pocket = Pocket()


class Listener(Around):
    """Call a teller, and add the term to the output or to the loss."""

    def __init__(self, inner: nn.Module, is_added: bool) -> None:
        super().__init__(inner)
        self.is_added = is_added

    def forward(self, x: Tensor) -> Tensor:
        way = self.inner.way
        holder = WAYS[way]()
        match way:
            case "append":
                y = self.inner(x, holder.append)
            case "method":
                y = self.inner(x, holder.add)
            case "closure":
                y, read = self.inner(x)
                holder = [read()]
            case "namespace" | "dataclass" | "deque" | "tuple":
                y = self.inner(x, holder)
            case _:
                y = self.inner(x)
        term = _newest(self.inner.pocket if way == "attribute" else holder)
        term = term if NOW.trains_told else term.detach()
        if self.is_added:
            return y + term
        NOW.told.append(term)
        return y


def _newest(holder: Any) -> Tensor:
    match holder:
        case Pocket():
            return holder.terms[-1]
        case list() | deque():
            return holder[-1]
        case tuple():
            return holder[1][-1]
        case ContextVar():
            return holder.get()
    return holder.term


def forget(model: nn.Module) -> None:
    """Drop tensors that forwards let out besides their outputs, as a copy of the model fails with them."""
    for m in model.modules():
        if isinstance(m, Stash | Teller):
            m.forget()


class Modify(nn.Module):
    """Change the output of a possible unit in place, through a view or not."""

    def __init__(self, width: int, view: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        (y.view(-1) if self.view else y).mul_(0.9).add_(0.1)
        return y


class Island(Around):
    """A module that computes in another dtype than its surroundings."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(inner)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).to(x.dtype)


class Skip(Around):
    """Leave the inner block out in mode 1, on all ranks alike."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if NOW.mode == 0 else x


class Drop(Around):
    """A block that some ranks leave out, depending on the data. If its output needs a gradient on the other ranks only, no
    rank leaves it out: a unit must be reached by backward on all ranks, or be skipped."""

    def __init__(self, inner: nn.Module, number: int) -> None:
        super().__init__(inner)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if self.number not in NOW.left_out or not x.requires_grad:
            return x + self.inner(x)
        return flatshard.skip(self.inner, x) if units_below(self.inner) else x


class Tower(Around):
    """A frozen module on data without gradients. Depending on the data, some ranks use the result of ``skip`` in its
    place."""

    def __init__(self, inner: nn.Module, width: int, number: int) -> None:
        super().__init__(inner.requires_grad_(False))
        self.project = nn.Linear(width, width)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach()
        if self.number not in NOW.left_out:
            seen = self.inner(seen)
        elif units_below(self.inner):
            x = flatshard.skip(self.inner, x)
        elif torch.is_grad_enabled() and any(p.requires_grad for p in self.inner.parameters()):
            seen.requires_grad_()  # backward comes to `project` on all ranks, though it may be a frozen unit
        return x + self.project(seen)


class Chunked(Around):
    """Run the inner block on slices of the batch in turn, as losses of large vocabularies do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(part) for part in x.chunk(2)])


class Change(nn.Module):
    """Change a parameter in forward, as momentum encoders do."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.query, self.key = (nn.Parameter(torch.randn(width, width).mul_(0.3)) for _ in range(2))
        self.key.requires_grad_(False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if NOW.first:
            with torch.no_grad():
                match self.how:
                    case "mul":
                        self.key.mul_(0.9).add_(self.query, alpha=0.1)
                    case "data_in_place":
                        self.key.data.mul_(0.9).add_(self.query.data, alpha=0.1)
                    case "data":
                        self.key.data = self.key.data * 0.9 + self.query.data * 0.1
        return x + torch.tanh(x @ self.query) * (x @ self.key)


class Checkpoint(Around):
    """Drop inner activations, and recompute them in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__(inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        env = NOW

        def run(x: Tensor) -> Tensor:
            with during(env):  # for its recomputation, too
                return self.inner(x)

        if self.reentrant and not x.requires_grad:  # torch would train nothing inside, and warn
            return self.inner(x)
        return checkpoint(run, x, use_reentrant=self.reentrant)


class Decoder(Around):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + memory)


class Root(nn.Module):
    """An optional embedding, a tree, an optional decoder, a head that always trains, and a parameter of its own. The output
    has one of several forms."""

    def __init__(
        self, front: nn.Embedding | None, body: nn.Module, decoder: Decoder | None, width: int, output: str
    ) -> None:
        super().__init__()
        if front is not None:
            self.front = front
        self.body = body
        if decoder is not None:
            self.decoder = decoder
        self.head = nn.Linear(width, 7)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        stashes = [m for m in self.modules() if isinstance(m, Stash)]
        for stash in stashes:
            stash.seen = None
        x = self.front(inputs).mean(1) if hasattr(self, "front") else inputs
        hidden = self.body(x * self.scale.to(x.dtype))
        for stash in stashes:
            if stash.seen is not None:
                hidden = hidden + stash.seen
        if hasattr(self, "decoder"):
            hidden = self.decoder(hidden, hidden)
        y = self.head(torch.tanh(hidden))
        if self.output == "tuple":
            return y, hidden
        if self.output == "dict":
            return {"y": y, "aux": [{"mean": hidden.mean(1)}, inputs]}
        return y

    def encode(self, inputs: Tensor) -> Any:
        return self.forward(inputs)

    def generate(self, inputs: Tensor, steps: int) -> Tensor:
        """Call inner modules in turn: the encoder once, the decoder at each step."""
        memory = y = self.body(self.front(inputs).mean(1) if hasattr(self, "front") else inputs)
        for _ in range(steps):
            y = self.decoder(y, memory) if hasattr(self, "decoder") else self.body(y)
        return self.head(torch.tanh(y))


LEAVES = ("linear", "mlp", "norm", "scale", "empty", "transposed", "frozen", "int", "list", "gru", "tanh", "silu")
LEAVES += ("modify",)
CONTAINERS = ("seq", "residual", "branch", "twice", "two_names", "skip", "unused", "island", "checkpoint", "stash")
CONTAINERS += ("chunked", "compiled")
FORMS = ("tuple", "dict", "nested", "drop")
CHANGES = ("mul", "data", "data_in_place")
CLASSES: dict[str, type[nn.Module]] = {
    c.__name__: c
    for c in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Sequential, nn.GRU, nn.Tanh, Mlp, Scale, Empty, Transposed)
    + (Frozen, Integer, Listed, Recurrent, Residual, Fork, Join, Twice, TwoNames, Skip, Drop, Unused, Island, Chunked)
    + (Checkpoint, Stash, Modify, Change, Teller, Tower, Decoder)
}

Spec = tuple[Any, ...]
"""A node of a tree: a name, then numbers and words, then the specs of its children."""


def build(spec: Spec, width: int, other: torch.dtype) -> nn.Module:
    """Build the modules of a spec. ``other`` is the dtype of islands, which they get once the whole model has its own."""
    module = _build(spec, width, other)
    module.is_node = True  # type: ignore[assignment]  # it can run alone
    return module


OF_A_WIDTH: dict[str, Callable[..., nn.Module]] = {
    "mlp": Mlp,
    "transposed": Transposed,
    "frozen": Frozen,
    "int": Integer,
    "list": Listed,
    "gru": Recurrent,
    "modify": Modify,
    "change": Change,
    "linear": lambda width, bias: nn.Linear(width, width, bias=bias),
    "norm": functools.partial(nn.LayerNorm, eps=0.1),  # at width 1 it amplifies rounding by 1 / sqrt(eps)
    "batchnorm": functools.partial(nn.BatchNorm1d, eps=0.1),
}
OF_MODULES: dict[str, Callable[..., nn.Module]] = {
    "seq": nn.Sequential,
    "residual": Residual,
    "twice": Twice,
    "two_names": TwoNames,
    "unused": Unused,
    "stash": Stash,
    "skip": Skip,
    "drop": Drop,
    "chunked": Chunked,
    "checkpoint": Checkpoint,
    "scale": Scale,
    "empty": Empty,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,  # no ReLU: rounding around 0 changes its gradient
}


def _build(spec: Spec, width: int, other: torch.dtype) -> nn.Module:
    name, *rest = spec
    children = [build(child, width, other) for child in rest if isinstance(child, tuple)]
    choices = [choice for choice in rest if not isinstance(choice, tuple)]
    match name:
        case "branch":
            return Join(Fork(choices[0], children))
        case "island":
            return Island(*children, other)
        case "told":
            return Listener(Teller(*children, width, choices[0]), choices[1])
        case "tower":
            return Tower(*children, width, choices[0])
        case "compiled":  # forwards run eagerly (see the machine): only the wrapper matters
            if hasattr(children[0], "_orig_mod"):  # torch 2.15 makes a function of a compiled module
                return children[0]
            return torch.compile(children[0], backend="eager")  # type: ignore[return-value]
    return OF_A_WIDTH[name](width, *choices) if name in OF_A_WIDTH else OF_MODULES[name](*children, *choices)


@dataclasses.dataclass(frozen=True)
class Model:
    """A description of a model, as plain values."""

    tree: Spec
    width: int
    front: str = "none"
    """``"none"``, ``"embedding"``, ``"frozen"`` (a frozen embedding), or ``"tied"`` (an embedding that shares the head's
    weight)."""
    output: str = "tensor"
    ties: tuple[tuple[int, int], ...] = ()
    """Pairs of indices into the model's linear layers; those with equal shapes and dtypes share their weights."""
    float32: bool = False
    """Whether the model is float32 with float64 islands, instead of the reverse."""
    decoder: Spec | None = None

    def build(self, islands: torch.dtype | None = None) -> nn.Module:
        """Build the model; the same one at every call after the same ``torch.manual_seed``."""
        main, other = (torch.float32, torch.float64) if self.float32 else (torch.float64, torch.float32)
        front = None if self.front == "none" else nn.Embedding(7, self.width)
        if front is not None and self.front == "frozen":
            front.requires_grad_(False)
        body = build(self.tree, self.width, other)
        decoder = None if self.decoder is None else Decoder(build(self.decoder, self.width, other))
        model = Root(front, body, decoder, self.width, self.output).to(main)
        for module in model.modules():
            if isinstance(module, Island):
                module.to(other)
                module.dtype = islands or other
        if front is not None and self.front == "tied":
            model.head.weight = front.weight
        linears = [m for m in model.modules() if type(m) is nn.Linear]
        for i, j in self.ties:
            a, b = linears[i % len(linears)], linears[j % len(linears)]
            kinds = [(m.weight.shape, m.weight.dtype, m.weight.requires_grad) for m in (a, b)]
            if kinds[0] == kinds[1]:
                b.weight = a.weight
        return model

    def has(self, *names: str) -> bool:
        return any(repr(name) in repr((self.tree, self.decoder)) for name in names)

    @property
    def rounds_to_float32(self) -> bool:
        return self.float32 or self.has("island")

    @property
    def drops(self) -> list[int]:
        return [spec[1] for spec in self.tree[1:] if spec[0] in ("drop", "tower")]


def _registrations(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the registrations of each parameter."""
    return Counter(p for m in module.modules() for p in m._parameters.values() if p is not None)


def nestable(model: nn.Module) -> list[nn.Module]:
    """List submodules that can be sharded before the root: they share no parameter with modules outside of them."""
    everywhere = _registrations(model)
    return [
        module
        for module in model.modules()
        if module is not model
        and not isinstance(module, nn.ParameterList)
        and all(count == everywhere[param] for param, count in _registrations(module).items())
    ]


def make_tree(rng: random.Random, depth: int, among: tuple[str, ...] = CONTAINERS + ("seq", "seq")) -> Spec:
    """Draw a random tree of at most this depth."""
    name = rng.choice(LEAVES if depth == 0 or rng.random() < 0.3 else among)
    children = [make_tree(rng, depth - 1, among) for _ in range(rng.randint(2, 3))] if name in CONTAINERS else []
    match name:
        case "linear" | "frozen" | "modify":
            return name, rng.random() < 0.6
        case "mlp":
            return name, rng.choice([1, 2, 3, 5, 11]), rng.random() < 0.6
        case "list":
            return name, rng.randint(1, 3)
        case "seq":
            return name, *children
        case "branch":
            return name, rng.choice(FORMS), *children
        case "checkpoint":
            return name, rng.random() < 0.5, children[0]
    return name, *children[:1]


def draw_model(rng: random.Random) -> Model:
    parts = [make_tree(rng, rng.randint(0, 2)) for _ in range(rng.randint(1, 4))]
    # The other modules are in the outermost sequence only, where nothing runs them twice or recomputes them.
    if rng.random() < 0.15:
        parts.insert(rng.randint(0, len(parts)), ("change", rng.choice(CHANGES)))
    if rng.random() < 0.1:
        parts.insert(rng.randint(0, len(parts)), ("batchnorm",))
    for number in range(rng.choice([0, 0, 0, 1, 2])):
        # A module that one rank leaves out runs exactly once on the others.
        inner = make_tree(rng, rng.randint(0, 1), ("seq", "residual"))
        parts.insert(rng.randint(0, len(parts)), ("drop", number, inner))
    return Model(
        tree=("seq", *parts),
        width=rng.choice([1, 3, 4, 5, 7, 8, 13]),
        front=rng.choice(["none", "none", "embedding", "frozen", "tied"]),
        output=rng.choice(["tensor", "tuple", "dict"]),
        ties=tuple((rng.randrange(20), rng.randrange(20)) for _ in range(rng.choice([0, 0, 1, 2, 3]))),
        float32=rng.random() < 0.1,
    )
