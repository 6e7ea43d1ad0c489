"""Random module trees, policies, strategies, options and world sizes, each against single-process training.

A case is a function of its seed alone: :func:`make_case` draws a :class:`Case`, a description made of plain values that
prints and shrinks well; :func:`build` turns its tree into modules. ``--fuzz N`` runs N cases, ``--fuzz-seed S`` starts
at seed S; a failing case prints the command that runs it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_options import HOOKS, Options, Rounded, draw_options, layout_named, make_halves
from fuzz_programs import make_world_size
from parity import check_parity, mean_square
from pool import RankFailure
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import flatshard

CHUNK = 25
"""Cases per pytest test: a test's overhead is larger than a case's."""
CASE_TIMEOUT = 20.0
MAX_FAILURES = 3
"""Failing cases after which a chunk gives up."""


# ---------------------------------------------------------------------------------------------------------------------
# Modules: each maps (batch, width) to (batch, width), in whatever dtype it gets
# ---------------------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


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
    """A parameter whose strides are not those of its shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width + 2, width).mul_(0.3).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class Frozen(nn.Module):
    """A unit of which only one parameter trains."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        self.linear.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Integer(nn.Module):
    """An integer parameter, as quantised models have them, and a buffer."""

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


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Fork(nn.Module):
    """Returns its branches' outputs in a structure, so that a unit's output is no plain tensor."""

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
    """Adds up a fork's outputs; with the form ``"drop"`` only the first, so that the others get no gradient."""

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


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class TwoNames(nn.Module):
    """One module registered under two names: its parameters have two FQNs and are called for twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.one, self.other = inner, inner

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + torch.tanh(self.other(x))


class SkipOdd(nn.Module):
    """Leaves its inner block out on odd steps, on all ranks alike."""

    step = 0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.step % 2 == 0 else x


class Unused(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x


class Checkpoint(nn.Module):
    """Forgets its inner activations and computes them again in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant and not x.requires_grad:  # it would train nothing inside, and warn
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Stash(nn.Module):
    """Lets a tensor out past its output: the root adds it to its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.seen = y.mean()
        return torch.tanh(y)


class Modify(nn.Module):
    """Changes the output of a possible unit in place, through a view or not."""

    def __init__(self, width: int, view: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        (y.view(-1) if self.view else y).mul_(0.9).add_(0.1)
        return y


class Island(nn.Module):
    """Computes in another dtype than its surroundings."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).to(x.dtype)


class Root(nn.Module):
    """An optional embedding, a tree, a head that always trains; the output in the form of the case."""

    def __init__(self, front: nn.Embedding | None, body: nn.Module, head: nn.Linear, output: str) -> None:
        super().__init__()
        if front is not None:
            self.front = front
        self.body = body
        self.head = head
        self.output = output

    def forward(self, inputs: Tensor) -> Any:
        stashes = [m for m in self.modules() if isinstance(m, Stash)]
        for stash in stashes:
            stash.seen = None
        x = self.front(inputs).mean(1) if hasattr(self, "front") else inputs
        hidden = self.body(x)
        for stash in stashes:
            if stash.seen is not None:
                hidden = hidden + stash.seen
        y = self.head(torch.tanh(hidden))
        if self.output == "tuple":
            return y, hidden
        if self.output == "dict":
            return {"y": y, "aux": [{"mean": hidden.mean(1)}, inputs]}
        return y


LEAVES = ("linear", "mlp", "norm", "scale", "empty", "transposed", "frozen", "int", "list", "gru", "tanh", "relu")
LEAVES += ("modify",)
CONTAINERS = ("seq", "residual", "branch", "twice", "two_names", "skip", "unused", "island", "checkpoint", "stash")
FORMS = ("tuple", "dict", "nested", "drop")
CLASSES: dict[str, type[nn.Module]] = {
    c.__name__: c
    for c in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Sequential, nn.GRU, nn.Tanh, Mlp, Scale, Empty, Transposed)
    + (Frozen, Integer, Listed, Recurrent, Residual, Fork, Join, Twice, TwoNames, SkipOdd, Unused, Island)
    + (Checkpoint, Stash, Modify)
}

TRAINING = ("plain", "plain", "plain", "accumulate", "two_forwards", "retain_graph")
STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "NO_SHARD")
STRATEGIES += ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
INTERLUDES = ("nothing", "nothing", "evaluate", "discard", "freeze", "forward_raises", "backward_raises", "summon")

Spec = tuple[Any, ...]
"""A node of a tree: a name, then numbers and words, then the specs of its children."""


def build(spec: Spec, width: int, other: torch.dtype) -> nn.Module:
    """The modules of a spec. ``other`` is the dtype of islands, which they get once the whole model has its own."""
    name, *rest = spec
    children = [build(child, width, other) for child in rest if isinstance(child, tuple)]
    match name:
        case "linear":
            return nn.Linear(width, width, bias=rest[0])
        case "mlp":
            return Mlp(width, *rest)
        case "norm":
            return nn.LayerNorm(width, eps=0.1)  # at width 1 it amplifies rounding by 1 / sqrt(eps)
        case "scale":
            return Scale()
        case "empty":
            return Empty()
        case "transposed":
            return Transposed(width)
        case "frozen":
            return Frozen(width, *rest)
        case "int":
            return Integer(width)
        case "list":
            return Listed(width, *rest)
        case "gru":
            return Recurrent(width)
        case "modify":
            return Modify(width, *rest)
        case "tanh":
            return nn.Tanh()
        case "relu":
            return nn.ReLU(inplace=False)
        case "seq":
            return nn.Sequential(*children)
        case "residual":
            return Residual(*children)
        case "branch":
            return Join(Fork(rest[0], children))
        case "twice":
            return Twice(*children)
        case "two_names":
            return TwoNames(*children)
        case "skip":
            return SkipOdd(*children)
        case "unused":
            return Unused(*children)
        case "island":
            return Island(*children, other)
        case "checkpoint":
            return Checkpoint(*children, rest[0])
        case "stash":
            return Stash(*children)
    raise AssertionError(name)


# ---------------------------------------------------------------------------------------------------------------------
# Cases
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything about one run, as plain values."""

    seed: int
    world_size: int
    tree: Spec
    width: int
    front: str
    """``"none"``, ``"embedding"``, ``"frozen"`` (embedding) or ``"tied"`` (embedding that is the head's weight)."""
    output: str
    ties: tuple[tuple[int, int], ...]
    """Pairs of indices into the model's linear layers; those with equal shapes and dtypes share their weights."""
    float32: bool
    """Whether the model is float32 with float64 islands, instead of the other way round."""
    policy: tuple[Any, ...]
    strategy: str
    backward_prefetch: str | None
    forward_prefetch: bool
    optimizer: str
    optimizer_first: bool
    set_to_none: bool
    training: str
    """What a step consists of: one of :data:`TRAINING`."""
    interlude: str
    """What happens before each step: one of :data:`INTERLUDES`."""
    steps: int
    batch_per_rank: int
    options: Options

    def model(self) -> nn.Module:
        """Build the model; the same one at every call after the same ``torch.manual_seed``."""
        main, other = (torch.float32, torch.float64) if self.float32 else (torch.float64, torch.float32)
        front = None if self.front == "none" else nn.Embedding(7, self.width)
        if front is not None and self.front == "frozen":
            front.requires_grad_(False)
        model = Root(front, build(self.tree, self.width, other), nn.Linear(self.width, 7), self.output).to(main)
        for module in model.modules():
            if isinstance(module, Island):
                module.to(other)
                module.dtype = self.options.param_dtype or other
        if front is not None and self.front == "tied":
            model.head.weight = front.weight
        linears = [m for m in model.modules() if type(m) is nn.Linear]
        for i, j in self.ties:
            a, b = linears[i % len(linears)], linears[j % len(linears)]
            if a.weight.shape == b.weight.shape and a.weight.dtype == b.weight.dtype:
                b.weight = a.weight
        return model

    def inputs(self, step: int, batch: int) -> Tensor:
        """A global batch from torch's global RNG."""
        if self.front != "none":
            return torch.randint(7, (batch, 3))
        return torch.randn(batch, self.width, dtype=torch.float32 if self.float32 else torch.float64)

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Settings under which rounding stays rounding; see parity.py."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
        eps = 1e-2 if self.rounds_to_float32 else 1e-4
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=eps)

    @property
    def rounds_to_float32(self) -> bool:
        return self.float32 or "'island'" in repr(self.tree)

    @property
    def rtol(self) -> float:
        return 1e-4 if self.rounds_to_float32 else 1e-9

    def shard(self, model: nn.Module, ctx: Any, halves: Any) -> nn.Module:
        """Shard the model as the case's policy says, with its hook."""
        options, groups = self.options, self.options.groups(ctx, halves)

        def shard_one(module: nn.Module, policy: Any = None, strategy: str = self.strategy) -> nn.Module:
            prefetch = self.backward_prefetch and getattr(flatshard.BackwardPrefetch, self.backward_prefetch)
            where = {"process_group": ctx.group} if strategy == "NO_SHARD" else groups
            return flatshard.fully_shard(
                module,
                policy=policy,
                strategy=getattr(flatshard.ShardingStrategy, strategy),
                mixed_precision=options.mixed_precision(module is model),
                cpu_offload=options.offload,
                backward_prefetch=prefetch,
                forward_prefetch=self.forward_prefetch,
                prefetch_limit_bytes=options.prefetch_limit_bytes,
                reshard_after_forward=options.reshard_after_forward,
                layout=layout_named(options.layout),
                **where,
            )

        self._shard_units(model, shard_one)
        if options.hook is not None:
            flatshard.comm.register_comm_hook(model, None, HOOKS[options.hook][0])
        return model

    def _shard_units(self, model: nn.Module, shard_one: Any) -> nn.Module:
        kind, *rest = self.policy
        if kind == "manual":
            candidates = nestable(model)
            chosen = {i % len(candidates) for i in rest if candidates}
            strategies = itertools.cycle(self.options.unit_strategies or (self.strategy,))
            for i in sorted(chosen, reverse=True):  # named_modules() lists parents first
                assert shard_one(candidates[i], strategy=next(strategies)) is candidates[i]
            return shard_one(model)
        if kind == "groups":  # pairs of modules that are beside each other
            candidates, policy = nestable(model), []
            for i, j in itertools.pairwise(i % len(candidates) for i in rest if candidates):
                pair, taken = (candidates[i], candidates[j]), {m for others in policy for m in others}
                if i != j and pair[0] not in pair[1].modules() and pair[1] not in pair[0].modules():
                    policy += [] if taken & {*pair} else [pair]
            return shard_one(model, policy or None)
        classes = {CLASSES[name] for name in rest} if kind in ("class", "set", "wrap", "custom") else set()
        policies: dict[str, Any] = {
            "none": None,
            "class": next(iter(classes), None),
            "set": classes,
            "wrap": ModuleWrapPolicy(classes) if classes else None,
            "custom": CustomPolicy(lambda module: type(module) in classes),
            "size": SizePolicy(rest[0] if kind == "size" else 0),
        }
        return shard_one(model, policies[kind])


@dataclasses.dataclass
class SizePolicy:
    """Wraps what has at least so many parameters that no inner unit took, except containers that are never called."""

    least: int

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if recurse:
            return True
        return nonwrapped_numel >= self.least and not isinstance(module, nn.ParameterList)


def nestable(model: nn.Module) -> list[nn.Module]:
    """Submodules that can be sharded before the root is: no shared parameter is both inside and outside of them."""
    holders: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders[param] = holders.get(param, 0) + 1
    result = []
    for module in model.modules():
        inside: dict[nn.Parameter, int] = {}
        for sub in module.modules():
            for param in sub._parameters.values():
                if param is not None:
                    inside[param] = inside.get(param, 0) + 1
        closed = all(count == holders[param] for param, count in inside.items())
        if closed and module is not model and not isinstance(module, nn.ParameterList):
            result.append(module)
    return result


def make_tree(rng: random.Random, depth: int) -> Spec:
    """A random tree of at most this depth."""
    name = rng.choice(LEAVES if depth == 0 or rng.random() < 0.3 else CONTAINERS + ("seq", "seq"))
    children = [make_tree(rng, depth - 1) for _ in range(rng.randint(2, 3))] if name in CONTAINERS else []
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


def class_names(spec: Spec) -> set[str]:
    """Names of classes that occur in a tree."""
    names = {type(module).__name__ for module in build(spec, 3, torch.float32).modules()}
    return names & set(CLASSES)


def make_case(seed: int) -> Case:
    """Draw the case of a seed."""
    rng = random.Random(seed)
    tree: Spec = ("seq", *(make_tree(rng, rng.randint(0, 2)) for _ in range(rng.randint(1, 4))))
    policy: tuple[Any, ...] = (
        rng.choice(("none", "class", "set", "wrap", "custom", "size", "manual", "manual", "groups")),
    )
    names = sorted(class_names(tree) | {"Linear"})
    if policy[0] == "class":
        policy += (rng.choice(names),)
    elif policy[0] in ("set", "wrap", "custom"):
        policy += tuple(sorted(rng.sample(names, rng.randint(1, len(names)))))
    elif policy[0] == "size":
        policy += (rng.choice([1, 5, 20, 100]),)
    elif policy[0] in ("manual", "groups"):
        policy += tuple(rng.randrange(100) for _ in range(rng.randint(1, 6)))
    strategy = rng.choice(STRATEGIES)
    optimizer = rng.choice(["sgd", "adamw"])
    training = rng.choice(TRAINING)
    options = draw_options(
        seed, make_world_size(seed), strategy, policy[0], training, optimizer == "adamw", "'empty'" in repr(tree)
    )
    if options.mesh is None and strategy.startswith("HYBRID"):
        strategy = "FULL_SHARD"
    return Case(
        seed=seed,
        world_size=make_world_size(seed),
        tree=tree,
        width=rng.choice([1, 3, 4, 5, 7, 8, 13]),
        front=rng.choice(["none", "none", "embedding", "frozen", "tied"]),
        output=rng.choice(["tensor", "tuple", "dict"]),
        ties=tuple((rng.randrange(20), rng.randrange(20)) for _ in range(rng.choice([0, 0, 1, 2, 3]))),
        float32=rng.random() < 0.15,
        policy=policy,
        strategy=strategy,
        backward_prefetch=rng.choice(["BACKWARD_PRE", "BACKWARD_POST", None]),
        forward_prefetch=rng.random() < 0.7,
        optimizer=optimizer,
        optimizer_first=rng.random() < 0.5,
        set_to_none=rng.random() < 0.8 or options.mixed,  # what an interlude leaves in .grad is of other dtypes
        training=training,
        interlude=rng.choice(INTERLUDES),
        steps=rng.choice([2, 3]),
        batch_per_rank=rng.choice([1, 2]),
        options=options,
    )


class Oops(Exception):
    """Raised by a case on purpose."""


def oops(*args: Any) -> None:
    raise Oops


def before_step(case: Case, model: nn.Module, step: int) -> None:
    """Tell the modules the step, and do something that must leave no trace (or, for ``freeze``, an equal one)."""
    for module in model.modules():
        if isinstance(module, SkipOdd):
            module.step = step
    inputs = case.inputs(step, case.batch_per_rank)
    sharded = any(isinstance(p, flatshard.tensors.ShardedParameter) for p in model.parameters())
    if case.options.mixed and not sharded and case.interlude != "freeze":
        return  # what must leave no trace need not run in the reference, which cannot run in its own dtypes here
    match case.interlude:
        case "evaluate":
            if case.options.full_precision_in_eval and "'island'" not in repr(case.tree):
                model.eval()
            with torch.no_grad():
                model(inputs)
            model.train()
        case "discard":
            model(inputs)
        case "freeze":
            params = [p for p in model.body.parameters() if p.is_floating_point()]
            if params:
                param = params[(case.seed + step) % len(params)]
                param.requires_grad_(not param.requires_grad)
        case "forward_raises":
            inner = [m for m in model.body.modules() if not isinstance(m, nn.ParameterList)]
            handle = inner[(case.seed + step) % len(inner)].register_forward_pre_hook(oops)
            with contextlib.suppress(Oops):
                model(inputs)
            handle.remove()
        case "backward_raises":
            inner = list(model.body.children())
            handle = inner[(case.seed + step) % len(inner)].register_forward_hook(raise_in_backward)
            with contextlib.suppress(Oops):
                mean_square(model(inputs), inputs).backward()
            handle.remove()
        case "summon":
            if sharded:
                with flatshard.summon_full_params(model):
                    pass


def raise_in_backward(module: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(oops)


def run_backwards(case: Case, scale: float, model: nn.Module, inputs: Tensor, around: Callable[[int], Any]) -> Tensor:
    """A step's forwards and backwards, the ``index``-th of the latter inside ``around(index)``. Returns the first loss."""

    def forward(inputs: Tensor) -> Tensor:
        return mean_square(model(inputs), inputs)

    loss, count = forward(inputs), len(case.options.backwards)
    match case.training:
        case "plain":
            with around(count - 1):
                (loss * scale).backward()
        case "accumulate":
            skips = [(m, m.step) for m in model.modules() if isinstance(m, SkipOdd)]
            for i in range(count):
                for module, step in skips:  # so that a microbatch may leave out what another trained
                    module.step = step + i
                another = loss if i == 0 else forward(inputs.flip(1).roll(i, 1))
                with around(i):
                    (another * scale).backward()
            for module, step in skips:
                module.step = step
        case "two_forwards":
            another = forward(inputs.flip(1))
            with around(count - 1):
                ((loss + another) * scale).backward()
        case "retain_graph":
            for i in range(count):
                with around(i):
                    (loss * scale * 0.5**i).backward(retain_graph=i + 1 < count)
    return loss.detach()


def run_case(ctx, case: Case, halves: Any) -> None:
    """Train the case on this rank, sharded and plain, and compare. ``halves``: see ``Options.groups``."""
    options, world_size = case.options, ctx.world_size

    def train(model: nn.Module, inputs: Tensor, scale: float) -> Tensor:
        sharded = any(isinstance(p, flatshard.tensors.ShardedParameter) for p in model.parameters())
        around = functools.partial(options.around_backward, model) if sharded else contextlib.nullcontext
        loss = run_backwards(case, scale, model, inputs, around)
        if sharded and options.forward_before_step:
            model(inputs)
        return loss

    def shard(model: nn.Module, group: Any) -> nn.Module:
        case.shard(model, ctx, halves)
        flatshard.configure(model, divide_factor=options.divide_factor)
        return model

    strategies = {case.strategy, *options.unit_strategies}
    copies = {world_size for s in strategies if s == "NO_SHARD"}
    copies |= {options.mesh[0] if options.mesh else 1 for s in strategies if s != "NO_SHARD"}
    check_parity(
        ctx,
        case.model,
        case.inputs,
        steps=case.steps,
        optimizer=case.make_optimizer,
        shard=shard,
        rtol=case.rtol,
        dtype=None,
        oracle="slices",
        batch_per_rank=case.batch_per_rank,
        optimizer_first=case.optimizer_first,
        seed=case.seed,
        before_step=functools.partial(before_step, case),
        train=train,
        set_to_none=case.set_to_none,
        copies=copies,
        divide_factor=options.divide_factor,
        rounded=Rounded(options, world_size, functools.partial(run_backwards, case, 1.0)) if options.rounds else None,
        clip=options.clip_gradients if options.clip else None,
        same_strides=options.layout in (None, "blocks", "whole"),  # rows must lie one after the other
    )


def run_seeds(ctx, seeds: list[int]) -> None:
    halves = make_halves(ctx.world_size)
    for seed in seeds:
        ctx.note(f"seed {seed}")
        run_case(ctx, make_case(seed), halves)


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    first, count = metafunc.config.getoption("--fuzz-seed"), metafunc.config.getoption("--fuzz")
    params = []
    for world_size in range(1, 5):
        seeds = [seed for seed in range(first, first + count) if make_world_size(seed) == world_size]
        for start in range(0, len(seeds), CHUNK):
            chunk = seeds[start : start + CHUNK]
            params.append(pytest.param(world_size, chunk, id=f"world{world_size}-seeds{chunk[0]}to{chunk[-1]}"))
    metafunc.parametrize(("world_size", "seeds"), params)


@pytest.mark.time_limit(300)
def test_random_models_train_as_in_one_process(pool, world_size, seeds):
    failures = []
    while seeds:
        try:
            pool.run(run_seeds, seeds, world_size=world_size, timeout=CASE_TIMEOUT)
            break
        except RankFailure as e:
            first = e.failures[0]
            if not first.note:
                raise  # not a case's failure: this file does not import, or the pool is broken
            seed = int(first.note.removeprefix("seed "))
            failures.append(
                f"python -m pytest test/fuzz/test_fuzz.py --fuzz 1 --fuzz-seed {seed}\n{make_case(seed)}\n{e}",
            )
            seeds = seeds[seeds.index(seed) + 1 :]
        if len(failures) == MAX_FAILURES:
            break
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


def test_a_case_depends_on_its_seed_only():
    for seed in range(20):
        case = make_case(seed)
        assert make_case(seed) == case
        assert case.world_size == make_world_size(seed)
        models = []
        for _ in range(2):
            torch.manual_seed(seed)
            models.append(case.model())
        assert [(n, p.shape) for n, p in models[0].named_parameters()] == [
            (n, p.shape) for n, p in models[1].named_parameters()
        ]


def test_the_cases_cover_what_they_are_meant_to():
    cases = [make_case(seed) for seed in range(300)]
    text = " ".join(repr(case.tree) for case in cases)
    assert [name for name in LEAVES + CONTAINERS + FORMS if f"'{name}'" not in text] == []
    combinations = {(case.world_size, case.strategy, case.policy[0]) for case in cases}
    assert len({c[:2] for c in combinations}) == 4 * 5
    assert len({c[1:] for c in combinations}) >= 5 * 8 - 1
    for field in dataclasses.fields(Options):
        values = {getattr(case.options, field.name) for case in cases}
        assert len(values) > 1, f"{field.name} is always {values}"
    assert {case.options.reshard_after_forward for case in cases} == {None, False, True, 2}
    assert len({case.options.layout for case in cases}) == 6
    meshes = {case.options.mesh for case in cases if case.world_size > 1}
    assert meshes == {None, (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2)}
    assert {how for case in cases for how in case.options.backwards} == {"sync", "hold", "flag", "partial"}
    models = [case.model() for case in cases]
    tied = [m for m in models if len(list(m.named_parameters(remove_duplicate=False))) > len(list(m.parameters()))]
    assert len(tied) > 50
