"""Draw a random program from a seed, and shrink a failing one."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.programs import (
    ANCHORS,
    ASKED,
    CHANGES,
    FUNCTIONS,
    KINDS,
    LOADS,
    MOVES,
    OPTIONS,
    PENALTIES,
    ROOT,
    SAVES,
    VERBS,
    Ahead,
    Ask,
    Backward,
    Block,
    Bomb,
    Change,
    Clip,
    Collect,
    Configure,
    Convert,
    Copy,
    Evaluate,
    Forget,
    Forward,
    Freeze,
    Generate,
    Keep,
    Load,
    NoSync,
    Penalty,
    Place,
    Program,
    Recover,
    Reduce,
    Reshard,
    ReshardOver,
    Restart,
    Save,
    Statement,
    Step,
    Summon,
    Toggle,
    Unshard,
    ZeroGrad,
)
from fuzz.random_models import WAYS, Model, draw_model, make_tree
from fuzz.random_options import FIRSTS, Sharding, draw_rounding, draw_sharding


def make_world_size(seed: int) -> int:
    return 1 + seed % 4


def draw(seed: int, additions: bool = True) -> Program:
    """Draw a program. ``additions=False`` leaves out :class:`_Additions`, parts of which need more than the simulated
    accelerator."""
    rng = random.Random(f"program {seed}")
    world_size = make_world_size(seed)
    model = draw_model(rng)
    optimizer = rng.choice(["sgd", "sgd", "adamw", "adamw", "flat", "whole"])
    if not _suits(optimizer, model):
        optimizer = "sgd"
    can_round = optimizer in ("sgd", "adamw") and not model.has("batchnorm", "change")
    rounding = draw_rounding(rng, optimizer) if can_round and rng.random() < 0.3 else {}
    elsewhere = rng.choice(["same", "alone", *["half"] * 2 * (world_size == 4)])
    sizes = world_size, {"same": world_size, "alone": 1, "half": 2}[elsewhere]
    shardings = [draw_sharding(rng, size, model, rounding) for size in sizes]
    if optimizer == "flat":  # flat optimizers only have the trainable ones
        shardings = [dataclasses.replace(sharding, ignored=None) for sharding in shardings]
    drawing = _Drawing(rng, world_size, model, bool(rounding), 1 if rounding else rng.choice([1, 1, 1, 2]))
    body = tuple(drawing.body(0, rng.randint(2, 4)))
    optimizer_first = rng.random() < 0.5 and optimizer in ("sgd", "adamw") and shardings[0].start == "as it is"
    if optimizer == "adamw" and not optimizer_first and seed % 3:
        optimizer = "offloaded"
    program = Program(
        seed=seed,
        world_size=world_size,
        model=model,
        shardings=(shardings[0], shardings[1]),
        elsewhere=elsewhere,
        optimizer=optimizer,
        optimizer_first=optimizer_first,
        models=drawing.models,
        body=_with_more(seed, drawing.models, optimizer, body),
    )
    return _Additions(program).program if additions else program


def _suits(optimizer: str, model: Model) -> bool:
    """Return whether the optimizer can train the model: Adafactor needs the mean of each parameter, so none may be empty."""
    return optimizer != "whole" or not model.has("empty")


def _with_more(seed: int, models: int, optimizer: str, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
    """Insert statements that move models, or step in backward. They have their own generator: seeds keep their other
    draws."""
    rng, found = random.Random(f"moves {seed}"), list(body)
    for _ in range(rng.choice([0, 0, 1, 2])):
        found.insert(rng.randint(0, len(found)), ReshardOver(rng.randrange(models), rng.choice(MOVES)))
    for i in range(rng.choice([1, 1, 2]) if optimizer == "offloaded" else 0):
        at, model = rng.randint(0, len(found)), rng.randrange(models)
        found[at:at] = [Forward(f"A{i}", model, ROOT, 1000 + i), Ahead(f"A{i}", model)]
    return tuple(found)


STORES = ("TCPStore", "FileStore", "PrefixStore", "HashStore")
"""Stores of process groups. A HashStore serves a single process."""


class _Additions:
    """Later additions to the grammar, with their own generator as in :func:`_with_more`. The result is ``program``."""

    def __init__(self, program: Program) -> None:
        self.rng = random.Random(f"additions {program.seed}")
        self.program = program
        self._inputs = 2000
        self._add_modules()
        self._towers = [spec[1] for spec in self.program.model.tree[1:] if spec[0] == "tower"]
        self._fill_later()
        rng, size = self.rng, program.world_size
        self._penalties = 0.5 * (rng.random() < 0.5)
        body = list(self._rewritten(program.body))
        for _ in range(rng.choice([0, 0, 0, 1] if self.program.model.decoder is None else [1, 1, 2])):
            self._inputs += 1
            generate = Generate(rng.randrange(program.models), self._inputs, rng.randint(1, 2), rng.random() < 0.5)
            body.insert(rng.randint(0, len(body)), generate)
        store = rng.choice([s for s in STORES if s != "HashStore" or size == 1])
        self.program = dataclasses.replace(self.program, body=tuple(body), store=store)

    def _add_modules(self) -> None:
        rng, model = self.rng, self.program.model
        parts, names = list(model.tree[1:]), []
        if rng.random() < 0.25:
            told = ("told", rng.choice(list(WAYS)), rng.random() < 0.3, make_tree(rng, rng.randint(0, 1)))
            parts.insert(rng.randint(0, len(parts)), told)
            names.append("Teller")
        if rng.random() < 0.2:
            tower = ("tower", len(model.drops), make_tree(rng, rng.randint(0, 1), ("seq", "residual")))
            parts.insert(rng.randint(0, len(parts)), tower)
            names.append("Tower")
        decoder = make_tree(rng, rng.randint(0, 1)) if rng.random() < 0.2 else None
        names += ["Decoder"] * (decoder is not None)
        model = dataclasses.replace(model, tree=("seq", *parts), decoder=decoder)
        if names and _suits(self.program.optimizer, model):
            shardings = tuple(self._sharded(sharding, model, tuple(names)) for sharding in self.program.shardings)
            self.program = dataclasses.replace(self.program, model=model, shardings=shardings)

    def _sharded(self, sharding: Sharding, model: Model, names: tuple[str, ...]) -> Sharding:
        """Add the new classes to a policy that selects units by class. A recomputation must do as the forward did."""
        kind, *rest = policy = sharding.policy
        if kind == "class":
            policy = ("set", *rest, *names)
        elif kind in ("set", "wrap", "custom"):
            policy = (*policy, *names)
        recompute = sharding.recompute and not model.has("change", "drop", "skip", "tower")
        return dataclasses.replace(sharding, policy=policy, recompute=recompute)

    def _fill_later(self) -> None:
        """Let the user's code initialise some models after sharding."""
        firsts = [self.rng.choice(FIRSTS) if s.start == "to_empty" else "forward" for s in self.program.shardings]
        first, second = (
            dataclasses.replace(s, first=first, start="init" if s.start == "to_empty" else s.start)
            for s, first in zip(self.program.shardings, firsts, strict=True)
        )
        if self.rng.random() < 0.7:
            self.program = dataclasses.replace(self.program, shardings=(first, second))

    def _rewritten(self, body: tuple[Statement, ...]) -> Iterator[Statement]:
        rng, size = self.rng, self.program.world_size
        for statement in body:
            if isinstance(statement, Block):
                yield dataclasses.replace(statement, body=tuple(self._rewritten(statement.body)))
                continue
            if isinstance(statement, Forward) and self._towers and statement.bomb is None and rng.random() < 0.6:
                left_out = {*statement.left_out, *((rng.randrange(size), rng.choice(self._towers)) for _ in range(2))}
                statement = dataclasses.replace(statement, left_out=tuple(sorted(left_out)))
            if isinstance(statement, Forward) and self.program.model.has("told"):
                statement = dataclasses.replace(statement, trains_told=rng.random() < 0.8)
            yield statement
            if isinstance(statement, Forward) and rng.random() < self._penalties:
                anchor = rng.choice(list(ANCHORS))
                how, param = rng.choice(list(PENALTIES)), rng.randrange(30)
                yield Penalty(statement.loss, statement.model, param, how, anchor, self._factors(how))

    def _factors(self, how: str) -> tuple[float | None, ...]:
        rng, size = self.rng, self.program.world_size
        factors: list[float | None] = [rng.choice([0.5, -1.0, 2.0])] * size
        kind = rng.choice(["same", "differ", *["alone"] * (how not in FUNCTIONS)])
        if kind == "differ":
            factors = [rng.choice([0.0, 0.5, -1.0, 2.0]) for _ in range(size)]
        elif kind == "alone":
            lone = rng.randrange(size)
            factors = [factor if rank == lone else None for rank, factor in enumerate(factors)]
        return tuple(factors)


class _Drawing:
    def __init__(self, rng: random.Random, world_size: int, model: Model, rounds: bool, models: int) -> None:
        self.rng = rng
        self.world_size = world_size
        self.drops = model.drops
        self.rounds = rounds
        self.models = models
        self._made = self.models
        self._losses: list[str] = []
        self._saved: list[Save] = []
        self._inputs = 0

    # -- lines of training

    def body(self, depth: int, steps: int) -> Iterator[Statement]:
        for _ in range(steps):
            draw = self.rng.choice([self._train, self._train, self._accumulate, self._two_losses, self._train_places])
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

    def _train_places(self, depth: int) -> Iterator[Statement]:
        """Draw a training step of one model, with another model's forward in between, or of a single unit."""
        first, second = self._forward(), self._forward()
        yield first
        yield dataclasses.replace(second, place=self._place(), method=False)
        losses = [first.loss, second.loss]
        self.rng.shuffle(losses)
        for loss in losses:
            yield self._backward((loss,))
        yield from self._end(first.model)

    def _accumulate(self, depth: int) -> Iterator[Statement]:
        rng, model = self.rng, self._model()
        place = self._place() if rng.random() < 0.3 else ROOT
        inside: list[Statement] = []
        for _ in range(rng.randint(1, 3)):
            loss = dataclasses.replace(self._forward(), model=model)
            inside += [*self._verbs(depth + 1), loss, *self._verbs(depth + 1), self._backward((loss.loss,))]
        if rng.random() < 0.4:
            option = "gradient_sync" if rng.random() < 0.6 else "all_reduce"
            yield Configure(model, place, option, False)
            yield from inside
            yield Configure(model, place, option, True)
        else:
            yield NoSync(model, place, tuple(inside), self._error() if rng.random() < 0.15 else None)
        how = rng.random()
        if how < 0.25:
            yield Reduce(model, ROOT if rng.random() < 0.7 else self._place())
        elif how < 0.85:  # otherwise the whole step was inside no_sync
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
        rng = self.rng
        if rng.random() < 0.25:
            place = ROOT if rng.random() < 0.7 else self._place()
            yield Clip(model, place, rng.choice(["torch", "flatshard"]), rng.choice([2.0, 2.0, 1.0, float("inf")]))
        if rng.random() < 0.7:
            yield Step(model)
        if rng.random() < 0.8:
            yield ZeroGrad(model, rng.random() < 0.8)

    # -- verbs

    def _verb(self, depth: int) -> Statement:
        rng, model = self.rng, self._model()
        simple: list[tuple[float, Callable[[], Statement]]] = [
            (2, self._evaluate),
            (1, self._forward),
            (1, lambda: self._backward((self._loss(),))),
            (0.5, lambda: Forget(self._loss())),
            (1, lambda: Toggle(model, rng.randrange(30), rng.random() < 0.5)),
            (0.5, lambda: Freeze(model, self._place(), rng.random() < 0.6)),
            (2, lambda: Change(model, rng.randrange(30), rng.choice(list(CHANGES)))),
            (1.5, lambda: self._configure(model)),
            (1, lambda: Unshard(model, self._place(), rng.random() < 0.5, rng.random() < 0.6)),
            (0.7, lambda: Reshard(model, self._place())),
            (1.5, lambda: self._save(model)),
            (0.7, lambda: self._load(model)),
            (2, lambda: Ask(model, self._place(), rng.choice(ASKED))),
            (0.4, lambda: Restart(model, rng.choice(["job", "full"]))),
            (0.5, lambda: Recover(model)),
            (0.5, lambda: Reduce(model, self._place())),
            (0.4, lambda: ZeroGrad(model, rng.random() < 0.7)),
            (0.3, lambda: Step(model)),
            (0.3, Collect),
        ]
        if not self.rounds:
            simple += [
                (0.3, lambda: Convert(model, rng.choice(["float32", "float64"]))),
                (0.5, self._copy),
            ]
        blocks: list[tuple[float, Callable[[], Statement]]] = [
            (2.5, lambda: self._summon(depth)),
            (1, lambda: Keep(model, self._place(), self._inside(depth), self._raises())),
            (0.7, lambda: NoSync(model, self._place(), self._inside(depth), self._raises())),
        ]
        choices = simple + (blocks if depth < 2 else [])
        weights, makers = zip(*choices, strict=True)
        return rng.choices(makers, weights)[0]()

    def _save(self, model: int) -> Statement:
        saved = Save(model, self._place(), self.rng.choice(list(SAVES)))
        self._saved += [saved] * (saved.kind in LOADS)
        return saved

    def _load(self, model: int) -> Statement:
        """Load, in most cases, the latest save."""
        place, kind = self._place(), self.rng.choice(LOADS)
        last = self._saved[-1] if self._saved and place.index % 5 < 4 else None
        return Load(last.model, last.place, last.kind) if last else Load(model, place, kind)

    def _configure(self, model: int) -> Statement:
        option = self.rng.choice(list(OPTIONS))
        return Configure(model, self._place(), option, self.rng.choice(OPTIONS[option]), self.rng.random() < 0.8)

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
            change = Change(model, rng.randrange(30), rng.choice(list(CHANGES)))
            body.append(rng.choice([change, self._evaluate(), self._verb(depth + 1)]))
        return Summon(model, self._place(), tuple(body), self._raises(), tuple(options.items()))

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
        return Evaluate(self._model(), self._place(), self._inputs, guard, bomb, rng.random() < 0.3)

    def _forward(self) -> Forward:
        rng = self.rng
        self._inputs += 1
        loss = f"L{len(self._losses)}"
        self._losses.append(loss)
        left_out: tuple[tuple[int, int], ...] = ()
        bomb = None
        if self.drops and rng.random() < 0.6:
            every = [(rank, number) for rank in range(self.world_size) for number in self.drops]
            left_out = tuple(sorted(rng.sample(every, rng.randint(1, min(3, len(every))))))
        elif rng.random() < 0.2:
            bomb = self._bomb(["forward", "backward", "hook"])
        method = rng.random() < 0.15
        return Forward(loss, self._model(), ROOT, self._inputs, rng.choice([0, 0, 1]), left_out, bomb, method)

    def _bomb(self, whens: list[str]) -> Bomb:
        rng = self.rng
        return Bomb(rng.choice(whens), rng.choice(["before", "after"]), rng.randrange(30), self._error())

    def _error(self) -> str:
        return self.rng.choice(["ValueError", "ValueError", "KeyboardInterrupt"])

    def _raises(self) -> str | None:
        return self._error() if self.rng.random() < 0.15 else None

    def _backward(self, losses: tuple[str, ...]) -> Backward:
        rng = self.rng
        hook = (self._model(), self._place(), self._error()) if rng.random() < 0.05 else None
        return Backward(losses, rng.random() < 0.15, hook)

    def _loss(self) -> str:
        return self.rng.choice(self._losses[-4:]) if self._losses else "L0"

    def _model(self) -> int:
        return self.rng.randrange(self._made)

    def _place(self) -> Place:
        kind = "root" if self.rng.random() < 0.3 else self.rng.choice(KINDS[1:])
        return Place(kind, 0 if kind == "root" else self.rng.randrange(10))


# ---------------------------------------------------------------------------------------------------------------------
# Minimising
# ---------------------------------------------------------------------------------------------------------------------


SIMPLEST = dict[str, Any](models=1, elsewhere="same", optimizer="sgd", optimizer_first=False, width=3)
SIMPLEST |= {"raises": None, "options": (), "place": ROOT, "guard": "no_grad"}
"""Simplest values of fields without a default."""


def smaller(what: Any) -> Iterator[Any]:
    """Yield smaller variants, largest removals first: something left out, or set to its default. Not all are valid
    programs."""
    if type(what) is tuple:
        size, kept = len(what), bool(what) and isinstance(what[0], str)  # a kind of module or of policy
        while size:
            for start in range(kept, len(what), size):
                yield what[:start] + what[start + size :]
            size //= 2
        for i, each in enumerate(what):
            if isinstance(each, Block):
                yield what[:i] + each.body + what[i + 1 :]
            yield from ((*what[:i], new, *what[i + 1 :]) for new in smaller(each))
    elif dataclasses.is_dataclass(what):
        for field in reversed(dataclasses.fields(what)):
            value, simplest = getattr(what, field.name), SIMPLEST.get(field.name, field.default)
            if simplest not in (value, dataclasses.MISSING):
                yield dataclasses.replace(what, **{field.name: simplest})
            yield from (dataclasses.replace(what, **{field.name: new}) for new in smaller(value))
