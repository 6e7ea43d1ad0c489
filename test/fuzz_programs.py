"""Random programs: sequences of flatshard's public verbs between and inside training steps, as plain data.

A program is a function of its seed alone: :func:`draw` makes a :class:`Program`, which prints as lines of Python
(``str(program)``). ``program_machine.py`` runs it on the ranks, and beside it the same program on a plain model in one
process. A statement that has nothing to act on (a backward of a loss that is no more) does nothing, so any part of a
program is a program: :func:`smaller` lists programs with something left out, for a minimiser.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

WIDTH = 3
BLOCKS = ("mlp", "mlp", "scale", "partly", "twice", "frozen", "checkpoint", "reentrant", "nest", "stash", "change")
VERBS = 3
"""Random verbs between two lines of a training step, at most."""


@dataclasses.dataclass(frozen=True)
class Bomb:
    """An exception from the user's code, on all ranks at the same place of a forward or its backward."""

    when: str
    """``"forward"``: raised there; ``"backward"``: in the backward of a function there; ``"hook"``: in a tensor's hook."""
    place: str
    """``"inside"`` a block, or ``"after"`` it, where no inner unit runs."""
    block: int
    error: str

    def __str__(self) -> str:
        return f"{self.error} in {self.when} {self.place} block {self.block}"


@dataclasses.dataclass(frozen=True)
class Statement:
    """One statement. ``model``: its number; none of that number: nothing to do."""

    def lines(self) -> Iterator[str]:
        yield str(self)


@dataclasses.dataclass(frozen=True)
class Block(Statement):
    """A ``with`` statement. ``raises``: the body ends in this exception, which is caught outside."""

    model: int
    path: str
    body: tuple[Statement, ...]
    raises: str | None

    @property
    def head(self) -> str:
        raise NotImplementedError

    def lines(self) -> Iterator[str]:
        yield f"with {self.head}:"
        inner = [line for statement in self.body for line in statement.lines()]
        if self.raises:
            inner.append(f"raise {self.raises}  # caught outside")
        for line in inner or ["pass"]:
            yield f"    {line}"


def name(model: int, path: str) -> str:
    return f"m{model}.{path}" if path else f"m{model}"


@dataclasses.dataclass(frozen=True)
class Forward(Statement):
    loss: str
    model: int
    path: str
    inputs: int
    mode: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    """(rank, block): where that rank calls ``skip``."""
    bomb: Bomb | None = None

    def __str__(self) -> str:
        notes = [f"mode {self.mode}"] if self.mode else []
        notes += [f"rank {rank} skips block {block}" for rank, block in self.left_out]
        notes += [str(self.bomb)] if self.bomb else []
        comment = f"  # {', '.join(notes)}" if notes else ""
        return f"{self.loss} = {name(self.model, self.path)}(x{self.inputs}).square().mean(){comment}"


@dataclasses.dataclass(frozen=True)
class Evaluate(Statement):
    model: int
    path: str
    inputs: int
    guard: str
    bomb: Bomb | None = None

    def __str__(self) -> str:
        comment = f"  # {self.bomb}" if self.bomb else ""
        return f"with torch.{self.guard}(): {name(self.model, self.path)}(x{self.inputs}){comment}"


@dataclasses.dataclass(frozen=True)
class Backward(Statement):
    losses: tuple[str, ...]
    retain: bool = False
    hook: tuple[int, str, str] | None = None
    """(model, unit, error): a hook on the unit's reduced gradients raises."""

    def __str__(self) -> str:
        sum_ = self.losses[0] if len(self.losses) == 1 else f"({' + '.join(self.losses)})"
        comment = f"  # {self.hook[2]} in a reduced hook of {name(*self.hook[:2])}" if self.hook else ""
        return f"{sum_}.backward({'retain_graph=True' if self.retain else ''}){comment}"


@dataclasses.dataclass(frozen=True)
class Drop(Statement):
    loss: str

    def __str__(self) -> str:
        return f"del {self.loss}"


@dataclasses.dataclass(frozen=True)
class Step(Statement):
    model: int

    def __str__(self) -> str:
        return f"opt{self.model}.step()"


@dataclasses.dataclass(frozen=True)
class ZeroGrad(Statement):
    model: int
    to_none: bool = True

    def __str__(self) -> str:
        return f"opt{self.model}.zero_grad({'' if self.to_none else 'set_to_none=False'})"


@dataclasses.dataclass(frozen=True)
class NoSync(Block):
    @property
    def head(self) -> str:
        return f"no_sync({name(self.model, self.path)})"


@dataclasses.dataclass(frozen=True)
class Keep(Block):
    @property
    def head(self) -> str:
        return f"keep_unsharded({name(self.model, self.path)})"


@dataclasses.dataclass(frozen=True)
class Summon(Block):
    options: tuple[tuple[str, bool], ...]
    """What differs from the defaults."""

    @property
    def head(self) -> str:
        text = "".join(f", {k}={v}" for k, v in self.options)
        return f"summon_full_params({name(self.model, self.path)}{text})"


@dataclasses.dataclass(frozen=True)
class SetSync(Statement):
    model: int
    path: str
    value: bool

    def __str__(self) -> str:
        return f"configure({name(self.model, self.path)}, gradient_sync={self.value})"


@dataclasses.dataclass(frozen=True)
class Unshard(Statement):
    model: int
    path: str
    recurse: bool
    wait: bool

    def __str__(self) -> str:
        async_op = "" if self.wait else ", async_op=True"
        return f"unshard({name(self.model, self.path)}, recurse={self.recurse}{async_op})"


@dataclasses.dataclass(frozen=True)
class Reshard(Statement):
    model: int
    path: str

    def __str__(self) -> str:
        return f"reshard({name(self.model, self.path)})"


@dataclasses.dataclass(frozen=True)
class SetReshard(Statement):
    model: int
    path: str
    value: bool | None

    def __str__(self) -> str:
        return f"configure({name(self.model, self.path)}, reshard_after_forward={self.value})"


@dataclasses.dataclass(frozen=True)
class Toggle(Statement):
    """``param``: counts a model's parameters, round and round."""

    model: int
    param: int
    value: bool

    def __str__(self) -> str:
        return f"params(m{self.model})[{self.param}].requires_grad_({self.value})"


@dataclasses.dataclass(frozen=True)
class Freeze(Statement):
    model: int
    path: str
    value: bool

    def __str__(self) -> str:
        return f"{name(self.model, self.path)}.requires_grad_({self.value})"


@dataclasses.dataclass(frozen=True)
class Change(Statement):
    """Change a parameter's values; see ``CHANGES``. Inside summon_full_params: what it shows."""

    model: int
    param: int
    how: str

    def __str__(self) -> str:
        return CHANGES[self.how].replace("p", f"params(m{self.model})[{self.param}]", 1)


CHANGES = {
    "set_data": "p.data = 0.5 * p.data + 0.25",
    "mul_data": "p.data.mul_(0.5)",
    "mul": "p.mul_(0.5)  # without gradients",
    "detach": "p.detach().mul_(0.5)",
    "copy": "p.copy_(0.5 * p + 0.25)  # without gradients",
    "grad": "p.grad.mul_(0.5)",
    "no_grad": "p.grad = None",
}


@dataclasses.dataclass(frozen=True)
class Convert(Statement):
    model: int
    dtype: str

    def __str__(self) -> str:
        return f"m{self.model}.to(torch.{self.dtype})"


@dataclasses.dataclass(frozen=True)
class Copy(Statement):
    model: int
    to: int

    def __str__(self) -> str:
        return f"m{self.to} = copy.deepcopy(m{self.model}); opt{self.to} = SGD(m{self.to}.parameters())"


@dataclasses.dataclass(frozen=True)
class Save(Statement):
    model: int
    kind: str

    def __str__(self) -> str:
        return f"saved = {SAVES[self.kind].format(m=f'm{self.model}', o=f'opt{self.model}')}"


SAVES = {
    "full": "full_state_dict({m})",
    "sharded": "deepcopy({m}.state_dict())",
    "local": "deepcopy(local_state_dict({m}))",
    "stream": "dict(iter_full_params({m}))",
    "optim": "optim_state_dict({m}, {o}, full=True)",
}


@dataclasses.dataclass(frozen=True)
class Load(Statement):
    """What was saved of that kind last."""

    model: int
    kind: str

    def __str__(self) -> str:
        return f"m{self.model}: load the last {self.kind!r}"


@dataclasses.dataclass(frozen=True)
class Clip(Statement):
    model: int

    def __str__(self) -> str:
        return f"clip_grad_norm_(m{self.model}, 0.1)"


@dataclasses.dataclass(frozen=True)
class Recover(Statement):
    model: int

    def __str__(self) -> str:
        return f"recover(m{self.model})"


@dataclasses.dataclass(frozen=True)
class Reduce(Statement):
    model: int
    path: str

    def __str__(self) -> str:
        return f"reduce_gradients({name(self.model, self.path)})"


@dataclasses.dataclass(frozen=True)
class Collect(Statement):
    def __str__(self) -> str:
        return "gc.collect()"


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    world_size: int
    blocks: tuple[str, ...]
    tie: tuple[int, int] | None
    """Two blocks that share a weight."""
    policy: str
    """``"blocks"``: each is a unit; ``"root"``: one unit; ``"some"``: every other block is one."""
    strategy: str
    reshard_after_forward: bool | int | None
    backward_prefetch: str | None
    optimizer_first: bool
    models: int
    body: tuple[Statement, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the units, the root's first."""
        return unit_paths(self.blocks, self.policy)

    def __str__(self) -> str:
        tie = f", tied: {self.tie}" if self.tie else ""
        options = f"policy={self.policy!r}, strategy={self.strategy}"
        if self.reshard_after_forward is not None:
            options += f", reshard_after_forward={self.reshard_after_forward}"
        if self.backward_prefetch != "BACKWARD_PRE":
            options += f", backward_prefetch={self.backward_prefetch}"
        when = "before" if self.optimizer_first else "after"
        lines = [f"# seed {self.seed}, {self.world_size} ranks, optimizers built {when} sharding"]
        lines += [f"m{i} = fully_shard(Net({self.blocks}{tie}), {options})" for i in range(self.models)]
        lines += [line for statement in self.body for line in statement.lines()]
        return "\n".join(lines)


def unit_paths(blocks: tuple[str, ...], policy: str) -> tuple[str, ...]:
    paths = [""]
    for i, kind in enumerate(blocks):
        if policy == "blocks" or (policy == "some" and i % 2 == 0):
            paths.append(f"blocks.{i}")
        if kind == "nest" and policy == "blocks":
            paths.append(f"blocks.{i}.inner")
    return tuple(paths)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------------------------------


def make_world_size(seed: int) -> int:
    return 1 + seed % 4


def draw(seed: int) -> Program:
    rng = random.Random(f"program {seed}")
    world_size = make_world_size(seed)
    blocks = tuple(rng.choice(BLOCKS) for _ in range(rng.randint(1, 3)))
    mlps = [i for i, kind in enumerate(blocks) if kind == "mlp"]
    strategy = rng.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
    reshard: list[bool | int | None] = [None, None, None, False]
    if strategy != "NO_SHARD":
        reshard += [True, True, *([2] if world_size == 4 else [])]
    policy = rng.choice(["blocks", "blocks", "blocks", "some", "root"])
    drawing = _Drawing(rng, world_size, blocks, policy, strategy)
    return Program(
        seed=seed,
        world_size=world_size,
        blocks=blocks,
        tie=(mlps[0], mlps[-1]) if len(mlps) > 1 and rng.random() < 0.5 else None,
        policy=policy,
        strategy=strategy,
        reshard_after_forward=rng.choice(reshard),
        backward_prefetch=rng.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None]),
        optimizer_first=rng.random() < 0.5,
        models=drawing.models,
        body=tuple(drawing.body(0, rng.randint(2, 4))),
    )


class _Drawing:
    def __init__(
        self, rng: random.Random, world_size: int, blocks: tuple[str, ...], policy: str, strategy: str
    ) -> None:
        self.rng = rng
        self.world_size = world_size
        self.blocks = blocks
        self.paths = unit_paths(blocks, policy)
        self.strategy = strategy
        self.models = rng.choice([1, 1, 1, 2])
        self._made = self.models
        self._losses: list[str] = []
        self._inputs = 0

    # -- lines of training

    def body(self, depth: int, steps: int) -> Iterator[Statement]:
        for _ in range(steps):
            draw = self.rng.choice([self._train, self._train, self._accumulate, self._two_losses, self._train_blocks])
            for statement in draw(depth):
                yield from self._verbs(depth)
                yield statement
        yield from self._verbs(depth)

    def _verbs(self, depth: int) -> Iterator[Statement]:
        for _ in range(VERBS):
            if self.rng.random() < 0.25:
                yield self._verb(depth)

    def _train(self, depth: int) -> Iterator[Statement]:
        model, loss = self._model(), self._forward()
        yield dataclasses.replace(loss, model=model)
        yield self._backward((loss.loss,))
        yield from self._end(model)

    def _train_blocks(self, depth: int) -> Iterator[Statement]:
        """Of one model, with another's forward in between, or a unit alone."""
        first, second = self._forward(), self._forward()
        yield first
        yield dataclasses.replace(second, path=self._path())
        losses = [first.loss, second.loss]
        self.rng.shuffle(losses)
        for loss in losses:
            yield self._backward((loss,))
        yield from self._end(first.model)

    def _accumulate(self, depth: int) -> Iterator[Statement]:
        model, path = self._model(), self._path() if self.rng.random() < 0.3 else ""
        inside: list[Statement] = []
        for _ in range(self.rng.randint(1, 2)):
            loss = dataclasses.replace(self._forward(), model=model)
            inside += [*self._verbs(depth + 1), loss, *self._verbs(depth + 1), self._backward((loss.loss,))]
        if self.rng.random() < 0.3:
            yield SetSync(model, path, False)
            yield from inside
            yield SetSync(model, path, True)
        else:
            yield NoSync(model, path, tuple(inside), self._error() if self.rng.random() < 0.15 else None)
        if self.rng.random() < 0.3:
            yield Reduce(model, "" if self.rng.random() < 0.7 else self._path())
        else:
            loss = dataclasses.replace(self._forward(), model=model)
            yield loss
            yield self._backward((loss.loss,))
        yield from self._end(model)

    def _two_losses(self, depth: int) -> Iterator[Statement]:
        first, second = self._forward(), self._forward()
        yield first
        yield second
        if self.rng.random() < 0.5:
            yield self._backward((first.loss, second.loss))
        else:
            losses = [first.loss, second.loss]
            self.rng.shuffle(losses)
            for loss in losses:
                yield self._backward((loss,))
        yield from self._end(first.model)

    def _end(self, model: int) -> Iterator[Statement]:
        if self.rng.random() < 0.2:
            yield Clip(model)
        if self.rng.random() < 0.7:
            yield Step(model)
        if self.rng.random() < 0.8:
            yield ZeroGrad(model, self.rng.random() < 0.8)

    # -- verbs

    def _verb(self, depth: int) -> Statement:
        rng, model = self.rng, self._model()
        simple: list[tuple[float, Callable[[], Statement]]] = [
            (2, self._evaluate),
            (1, self._forward),
            (1, lambda: self._backward((self._loss(),))),
            (0.5, lambda: Drop(self._loss())),
            (1, lambda: Toggle(model, rng.randrange(30), rng.random() < 0.5)),
            (0.5, lambda: Freeze(model, rng.choice(self.paths), rng.random() < 0.6)),
            (3, lambda: Change(model, rng.randrange(30), rng.choice(list(CHANGES)))),
            (1, lambda: SetSync(model, self._path(), rng.random() < 0.7)),
            (1, lambda: Unshard(model, self._path(), rng.random() < 0.5, rng.random() < 0.6)),
            (0.7, lambda: Reshard(model, self._path())),
            (0.5, lambda: SetReshard(model, self._path(), rng.choice([None, False, self.strategy != "NO_SHARD"]))),
            (1, lambda: Save(model, rng.choice(list(SAVES)))),
            (0.5, lambda: Load(model, rng.choice([k for k in SAVES if k != "stream"]))),
            (0.5, lambda: Recover(model)),
            (0.5, lambda: Reduce(model, self._path())),
            (0.3, lambda: Convert(model, rng.choice(["float32", "float64"]))),
            (0.3, Collect),
            (0.3, lambda: ZeroGrad(model, rng.random() < 0.7)),
            (0.3, lambda: Step(model)),
            (0.5, self._copy),
        ]
        blocks: list[tuple[float, Callable[[], Statement]]] = [
            (2.5, lambda: self._summon(depth)),
            (1, lambda: Keep(model, self._path(), self._inside(depth), self._raises())),
            (0.7, lambda: NoSync(model, self._path(), self._inside(depth), self._raises())),
        ]
        choices = simple + (blocks if depth < 2 else [])
        weights, makers = zip(*choices, strict=True)
        return rng.choices(makers, weights)[0]()

    def _inside(self, depth: int) -> tuple[Statement, ...]:
        rng = self.rng
        found = [self._verb(depth + 1) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            loss = self._forward()
            found += [loss, self._backward((loss.loss,))]
        return tuple(found)

    def _summon(self, depth: int) -> Statement:
        rng, model = self.rng, self._model()
        options: dict[str, bool] = {}
        if rng.random() < 0.4:
            options["writeback"] = False
            if rng.random() < 0.2:
                options["rank0_only"] = True
        if rng.random() < 0.25:
            options["offload_to_cpu"] = True
        if rng.random() < 0.3:
            options["with_grads"] = True
        if rng.random() < 0.2:
            options["recurse"] = False
        body: list[Statement] = []
        for _ in range(rng.randint(1, 3)):
            body.append(
                rng.choice(
                    [
                        Change(model, rng.randrange(30), rng.choice(list(CHANGES))),
                        self._evaluate(),
                        self._verb(depth + 1),
                    ]
                )
            )
        return Summon(model, self._path(), tuple(body), self._raises(), tuple(options.items()))

    def _copy(self) -> Statement:
        if self._made >= 3:
            return Collect()
        self._made += 1
        return Copy(self._model(), self._made - 1)

    def _evaluate(self) -> Statement:
        rng = self.rng
        self._inputs += 1
        guard = "no_grad" if rng.random() < 0.75 else "inference_mode"
        bomb = self._bomb(["forward"]) if rng.random() < 0.15 else None
        return Evaluate(self._model(), self._path(), self._inputs, guard, bomb)

    def _forward(self) -> Forward:
        rng = self.rng
        self._inputs += 1
        loss = f"L{len(self._losses)}"
        self._losses.append(loss)
        left_out: tuple[tuple[int, int], ...] = ()
        bomb = None
        if self.world_size > 1 and rng.random() < 0.15:
            every = [(rank, block) for rank in range(self.world_size) for block in range(len(self.blocks))]
            left_out = tuple(sorted(rng.sample(every, rng.randint(1, min(3, len(every))))))
        elif rng.random() < 0.2:
            bomb = self._bomb(["forward", "backward", "hook"])
        return Forward(loss, self._model(), "", self._inputs, rng.choice([0, 0, 1]), left_out, bomb)

    def _bomb(self, whens: list[str]) -> Bomb:
        rng = self.rng
        return Bomb(rng.choice(whens), rng.choice(["inside", "after"]), rng.randrange(len(self.blocks)), self._error())

    def _error(self) -> str:
        return self.rng.choice(["ValueError", "ValueError", "KeyboardInterrupt"])

    def _raises(self) -> str | None:
        return self._error() if self.rng.random() < 0.15 else None

    def _backward(self, losses: tuple[str, ...]) -> Backward:
        rng = self.rng
        hook = (self._model(), self._path(), self._error()) if rng.random() < 0.05 else None
        return Backward(losses, rng.random() < 0.15, hook)

    def _loss(self) -> str:
        return self.rng.choice(self._losses[-4:]) if self._losses else "L0"

    def _model(self) -> int:
        return self.rng.randrange(self._made)

    def _path(self) -> str:
        return "" if self.rng.random() < 0.5 else self.rng.choice(self.paths)


# ---------------------------------------------------------------------------------------------------------------------
# Minimising
# ---------------------------------------------------------------------------------------------------------------------


def smaller(program: Program) -> Iterator[Program]:
    """Programs with something left out: large parts first."""
    for body in _without_parts(program.body):
        yield dataclasses.replace(program, body=body)
    for body in _simpler(program.body):
        yield dataclasses.replace(program, body=body)
    simplest: dict[str, Any] = {
        "world_size": max(1, program.world_size - 1),
        "models": 1,
        "tie": None,
        "policy": "root",
        "strategy": "FULL_SHARD",
        "reshard_after_forward": None,
        "backward_prefetch": "BACKWARD_PRE",
        "optimizer_first": False,
    }
    for field, value in simplest.items():
        if getattr(program, field) != value:
            yield dataclasses.replace(program, **{field: value})
    for i in range(len(program.blocks)):
        if len(program.blocks) > 1 and program.tie is None:
            yield dataclasses.replace(program, blocks=program.blocks[:i] + program.blocks[i + 1 :])
        if program.blocks[i] != "mlp":
            yield dataclasses.replace(program, blocks=(*program.blocks[:i], "mlp", *program.blocks[i + 1 :]))


def _without_parts(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    size = len(body)
    while size:
        for start in range(0, len(body), size):
            yield body[:start] + body[start + size :]
        size //= 2


def _simpler(body: tuple[Statement, ...]) -> Iterator[tuple[Statement, ...]]:
    for i, statement in enumerate(body):
        for new in _simpler_statements(statement):
            yield body[:i] + new + body[i + 1 :]


def _simpler_statements(statement: Statement) -> Iterator[tuple[Statement, ...]]:
    """What may stand in the statement's place."""
    if isinstance(statement, Block):
        yield statement.body
        for body in (*_without_parts(statement.body), *_simpler(statement.body)):
            yield (dataclasses.replace(statement, body=body),)
    plain: dict[str, Any] = {
        "raises": None,
        "options": (),
        "hook": None,
        "bomb": None,
        "left_out": (),
        "mode": 0,
        "path": "",
        "retain": False,
        "guard": "no_grad",
        "to_none": True,
    }
    fields = {field.name for field in dataclasses.fields(statement)}
    for field, value in plain.items():
        if field in fields and getattr(statement, field) != value:
            yield (dataclasses.replace(statement, **{field: value}),)
