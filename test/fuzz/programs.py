"""Random programs: sequences of flatshard's public verbs between and inside training steps, as plain data.

A program is a function of its seed alone: :func:`drawing.draw` makes a :class:`Program`, which prints as lines of Python
(``str(program)``), and whose ``repr`` makes it again. It has a model (``random_models.py``), ways to shard it
(``random_options.py``), and statements. ``machine.py`` runs it on the ranks, and beside it the same program on a plain
model in one process. A statement that has nothing to act on (a backward of a loss that is no more) does nothing, so any part
of a program is a program: :func:`drawing.smaller` lists what is left where something is left out, for a minimiser.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from fuzz.random_models import Model
from fuzz.random_options import Sharding

VERBS = 3
"""Random verbs between two lines of a training step, at most."""

KINDS = ("root", "unit", "group", "owner", "inner", "between", "compiled", "tied")
"""Of modules that a verb is given. ``"owner"``: a unit inside that owns parameters of modules in it; ``"inner"``: its
parameters belong to a unit further out; ``"between"``: no unit, but around units; ``"compiled"``: inside torch.compile's
wrapper; ``"tied"``: has a parameter that is also registered elsewhere."""


class Place(NamedTuple):
    """The ``index``-th module of a kind, round and round."""

    kind: str = "root"
    index: int = 0

    def of(self, model: int) -> str:
        return f"m{model}" if self.kind == "root" else f"{self.kind}(m{model}, {self.index})"


ROOT = Place()

MOVES = ("all", "half", "alone")
"""Where ``ReshardOver`` moves to."""


@dataclasses.dataclass(frozen=True)
class Bomb:
    """An exception from the user's code, on all ranks at the same place of a forward or its backward."""

    when: str
    """``"forward"``: raised there; ``"backward"``: in the backward of a function there; ``"hook"``: in a tensor's hook."""
    where: str
    """``"before"`` a module runs, or ``"after"`` it."""
    module: int
    error: str

    def __str__(self) -> str:
        return f"{self.error} in {self.when} {self.where} module {self.module}"


@dataclass_transform(frozen_default=True)
class Statement:
    """One statement, a frozen dataclass. ``model``: its number; none of that number: nothing to do."""

    text: ClassVar[str]
    """Of the line: ``{m}`` is the model or the module, other names are fields."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        model, place = getattr(self, "model", 0), getattr(self, "place", ROOT)
        return self.text.format(m=place.of(model), s=self)

    def lines(self) -> Iterator[str]:
        yield str(self)


class Block(Statement):
    """A ``with`` statement. ``raises``: the body ends in this exception, which is caught outside."""

    model: int
    place: Place
    body: tuple[Statement, ...]
    raises: str | None

    def lines(self) -> Iterator[str]:
        yield f"with {self}:"
        inner = [line for statement in self.body for line in statement.lines()]
        if self.raises:
            inner.append(f"raise {self.raises}  # caught outside")
        for line in inner or ["pass"]:
            yield f"    {line}"


class Forward(Statement):
    loss: str
    model: int
    place: Place
    inputs: int
    mode: int = 0
    left_out: tuple[tuple[int, int], ...] = ()
    """(rank, number of a ``Drop``) that this rank leaves out."""
    bomb: Bomb | None = None
    method: bool = False
    """Whether it is the registered method ``encode`` of the root."""
    trains_told: bool = True
    """See ``Env``."""

    def __str__(self) -> str:
        call = f"{self.place.of(self.model)}{'.encode' if self.method else ''}(x{self.inputs})"
        notes = [f"mode {self.mode}"] if self.mode else []
        notes += [f"rank {rank} drops {number}" for rank, number in self.left_out]
        notes += [str(self.bomb)] if self.bomb else []
        return f"{self.loss} = mean_square({call})" + (f"  # {', '.join(notes)}" if notes else "")


class Evaluate(Statement):
    model: int
    place: Place
    inputs: int
    guard: str
    bomb: Bomb | None = None
    is_eval: bool = False

    def __str__(self) -> str:
        call = f"{self.place.of(self.model)}{'.eval()' if self.is_eval else ''}(x{self.inputs})"
        return f"with torch.{self.guard}(): {call}" + (f"  # {self.bomb}" if self.bomb else "")


class Generate(Statement):
    """What encoder-decoder models do: modules are called past the outermost one. ``uneven``: rank r makes r steps more."""

    model: int
    inputs: int
    steps: int
    uneven: bool
    text = "with no_grad(), keep_unsharded(m{s.model}): m{s.model}.generate(x{s.inputs}, {s.steps}, uneven={s.uneven})"


class Penalty(Statement):
    """A term of a parameter in the loss; see ``PENALTIES``. ``factors``: one for each rank; None: a rank without the term."""

    loss: str
    model: int
    param: int
    how: str
    anchor: str
    factors: tuple[float | None, ...]

    def __str__(self) -> str:
        term = PENALTIES[self.how].replace("p", f"params(m{self.model})[{self.param}]", 1)
        return f"{self.loss} += {self.factors}[rank] * {term}  # q = {ANCHORS[self.anchor]}"


PENALTIES = {
    "squares": "p.pow(2).sum()",
    "differences": "(p - q).square().mean()",
    **{name: f"p.{name}()" for name in ("sum", "mean", "norm", "std")},
    "torch.sum": "torch.sum(p)",
    "torch.mean": "torch.mean(p)",
    "torch.std": "torch.std(p)",
    "torch.norm": "torch.norm(p)",
    "vector_norm": "torch.linalg.vector_norm(p)",
    "dist": "p.dist(q)",
    **{name: f"{name}(p, q)" for name in ("torch.dist", "F.mse_loss", "F.l1_loss", "F.smooth_l1_loss")},
}
FUNCTIONS = tuple(how for how in PENALTIES if how.startswith(("torch.", "F.")) or how == "vector_norm")
"""Of torch, which may take this rank's part for the whole, if backward is refused then."""
ANCHORS = {"copy": "0.5 * p.detach().clone()", "part": "0.5 * p.detach()"}


class Backward(Statement):
    losses: tuple[str, ...]
    retain: bool = False
    hook: tuple[int, Place, str] | None = None
    """(model, unit, error): a hook on the unit's reduced gradients raises."""

    def __str__(self) -> str:
        note = f"  # {self.hook[2]} in a reduced hook of {self.hook[1].of(self.hook[0])}" if self.hook else ""
        return f"({' + '.join(self.losses)}).backward(retain_graph={self.retain}){note}"


class Forget(Statement):
    loss: str
    text = "del {s.loss}"


class Step(Statement):
    model: int
    text = "opt{s.model}.step()"


class Ahead(Statement):
    """A step in which each unit is stepped in backward, as soon as it is reduced."""

    loss: str
    model: int

    def __str__(self) -> str:
        return (
            f"steps = step_in_backward(m{self.model}, opt{self.model}); {self.loss}.backward(); opt{self.model}.step(); "
            f"opt{self.model}.zero_grad(); steps.remove()"
        )


class ZeroGrad(Statement):
    model: int
    to_none: bool = True
    text = "opt{s.model}.zero_grad(set_to_none={s.to_none})"


class NoSync(Block):
    text = "no_sync({m})"


class Keep(Block):
    text = "keep_unsharded({m})"


class Summon(Block):
    options: tuple[tuple[str, bool], ...]
    """What differs from the defaults."""

    def __str__(self) -> str:
        return f"summon_full_params({self.place.of(self.model)}{''.join(f', {k}={v}' for k, v in self.options)})"


class Configure(Statement):
    """``value``: plain. In place of a list of modules: how many, which follow the module's own unit."""

    model: int
    place: Place
    option: str
    value: Any
    recurse: bool = True
    text = "configure({m}, {s.option}={s.value!r}, recurse={s.recurse})"


OPTIONS: dict[str, tuple[Any, ...]] = {
    "gradient_sync": (True, True, False),
    "reshard_after_forward": (None, False, True, 2),
    "all_reduce": (True, False),
    "divide_factor": (None, 2.0, 3.0),
    "forward_prefetch": (True, False, (1,), (2,)),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", None, (1,), (2,)),
}


class Unshard(Statement):
    model: int
    place: Place
    recurse: bool
    wait: bool
    text = "unshard({m}, recurse={s.recurse}, async_op=not {s.wait})"


class Reshard(Statement):
    model: int
    place: Place
    text = "reshard({m})"


class Toggle(Statement):
    """``param``: counts a model's parameters, round and round."""

    model: int
    param: int
    value: bool
    text = "params(m{s.model})[{s.param}].requires_grad_({s.value})"


class Freeze(Statement):
    model: int
    place: Place
    value: bool
    text = "{m}.requires_grad_({s.value})"


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


class Convert(Statement):
    model: int
    dtype: str
    text = "m{s.model}.to(torch.{s.dtype})"


class Copy(Statement):
    model: int
    to: int
    text = "m{s.to} = copy.deepcopy(m{s.model}); opt{s.to} = optimizer(m{s.to})"


class Restart(Statement):
    """Save all, build the model again, shard it in another way over other ranks, load all."""

    model: int
    how: str
    """``"job"``: save_checkpoint; ``"full"``: whole state dicts."""
    text = "m{s.model}, opt{s.model} = restarted, by {s.how!r}"


class ReshardOver(Statement):
    """Move the model to other ranks, in memory. ``to``: ``"all"``, ``"half"`` of them, or each rank ``"alone"``."""

    model: int
    to: str
    text = "reshard_over(m{s.model}, opt{s.model}, over {s.to!r} ranks)"


class Save(Statement):
    model: int
    place: Place
    kind: str

    def __str__(self) -> str:
        return f"saved = {SAVES[self.kind].format(m=self.place.of(self.model), o=f'opt{self.model}')}"


SAVES = {
    "full": "full_state_dict({m})",
    "sharded": "deepcopy({m}.state_dict())",
    "local": "deepcopy(local_state_dict({m}))",
    "stream": "dict(iter_full_params({m}))",
    "files": "export_safetensors({m}, folder)",
    "optim": "optim_state_dict({m}, {o}, full=True)",
}


LOADS = ("full", "sharded", "local", "optim")


class Load(Statement):
    """What was saved of that kind and place last."""

    model: int
    place: Place
    kind: str
    text = "{m}: load the last {s.kind!r}"


class Clip(Statement):
    """``whose``: torch's ``clip_grad_norm_`` or flatshard's."""

    model: int
    place: Place
    whose: str
    norm: float
    text = "{s.whose}.clip_grad_norm_({m}, 0.1, {s.norm})"


class Ask(Statement):
    """A verb that changes nothing: see ``ASKED``."""

    model: int
    place: Place
    what: str
    text = "{s.what}({m})"


ASKED = (
    *("describe", "check_replicas", "num_parameters", "get_total_norm", "gradient_statistics", "segment_reduce"),
    *("iter_changed_params", "optim_state_dict", "summed_gradients"),
)


class Recover(Statement):
    model: int
    text = "recover(m{s.model})"


class Reduce(Statement):
    model: int
    place: Place
    text = "reduce_gradients({m})"


class Collect(Statement):
    text = "gc.collect()"


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    world_size: int
    model: Model
    shardings: tuple[Sharding, Sharding]
    """The models', and what they are restarted in; then the first again."""
    elsewhere: str
    """The ranks of the second: ``"same"``, ``"alone"`` (each by itself), or ``"half"`` of them."""
    optimizer: str
    """``"sgd"``, ``"adamw"``, ``"flat"``: SGD of ``flat_parameters``, ``"whole"``: Adafactor of whole parameters,
    ``"offloaded"``: AdamW with its state on the host.
    """
    optimizer_first: bool
    models: int
    body: tuple[Statement, ...]
    store: str = "TCPStore"
    """Of the ranks' process group: one of ``STORES``."""

    def __str__(self) -> str:
        when = "before" if self.optimizer_first else "after"
        lines = [f"# seed {self.seed}, {self.world_size} ranks, {self.store}, {self.optimizer} built {when} sharding"]
        lines += [f"m{i} = fully_shard({self.model}, {self.shardings[0]})" for i in range(self.models)]
        if any("restarted" in line for line in self._lines()):
            lines.append(f"# restarted over {self.elsewhere!r} ranks: {self.shardings[1]}")
        return "\n".join([*lines, *self._lines()])

    def _lines(self) -> list[str]:
        return [line for statement in self.body for line in statement.lines()]


def statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """All, also those inside others."""
    for statement in body:
        yield statement
        if isinstance(statement, Block):
            yield from statements(statement.body)
