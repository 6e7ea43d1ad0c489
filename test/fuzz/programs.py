"""Random programs: sequences of flatshard's public verbs between and inside training steps, as plain data.

A program is a function of its seed: :func:`drawing.draw` makes a :class:`Program`. ``str(program)`` prints it as lines of
Python; evaluating its ``repr`` makes it again. It has a model (``random_models.py``), ways to shard the model
(``random_options.py``), and statements. ``machine.py`` runs it on the ranks, and on a plain model in one process. A statement
without an object does nothing, such as a backward of a loss that does not exist. So any part of a program is a program, and
:func:`drawing.smaller` lists smaller variants for the minimiser.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from fuzz.random_models import Model
from fuzz.random_options import Sharding

VERBS = 3
"""Maximum number of random verbs between two lines of a training step."""

KINDS = ("root", "unit", "group", "owner", "inner", "between", "compiled", "tied")
"""Kinds of modules that verbs are called with. An ``"owner"`` is an inner unit that owns parameters of its submodules. An
``"inner"`` module's parameters belong to an outer unit. A module ``"between"`` is no unit, but contains units. A
``"compiled"`` one is inside torch.compile's wrapper. A ``"tied"`` one has a parameter that is registered elsewhere, too."""


class Place(NamedTuple):
    """The ``index``-th module of a kind, modulo their number."""

    kind: str = "root"
    index: int = 0

    def of(self, model: int) -> str:
        return f"m{model}" if self.kind == "root" else f"{self.kind}(m{model}, {self.index})"


ROOT = Place()

MOVES = ("all", "half", "alone")
"""Destinations of ``ReshardOver``."""


@dataclasses.dataclass(frozen=True)
class Bomb:
    """An exception from the user's code, on all ranks at the same point of a forward or its backward."""

    when: str
    """``"forward"``, ``"backward"`` (of a function called in forward), or ``"hook"`` (of a tensor)."""
    where: str
    """``"before"`` or ``"after"`` the module's forward."""
    module: int
    error: str

    def __str__(self) -> str:
        return f"{self.error} in {self.when} {self.where} module {self.module}"


@dataclass_transform(frozen_default=True)
class Statement:
    """A statement of a program, as a frozen dataclass. It does nothing if there is no model with the number ``model``."""

    text: ClassVar[str]
    """Template of its line. ``{m}`` is the model or the module; other names are fields."""

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        model, place = getattr(self, "model", 0), getattr(self, "place", ROOT)
        return self.text.format(m=place.of(model), s=self)

    def lines(self) -> Iterator[str]:
        yield str(self)


class Block(Statement):
    """A ``with`` statement. If ``raises``, the body ends in this exception, which is caught outside."""

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
    """Pairs (rank, number of a ``Drop``): modules that a rank leaves out."""
    bomb: Bomb | None = None
    method: bool = False
    """Whether to call ``encode``, a registered forward method of the root."""
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
    """Call inner modules past the root, as encoder-decoder models generate. If ``uneven``, rank r makes r more steps."""

    model: int
    inputs: int
    steps: int
    uneven: bool
    text = "with no_grad(), keep_unsharded(m{s.model}): m{s.model}.generate(x{s.inputs}, {s.steps}, uneven={s.uneven})"


class Penalty(Statement):
    """A term of a parameter in the loss; see ``PENALTIES``. ``factors`` has one for each rank, or None for no term."""

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
"""Functions of torch that may take this rank's shard for the full parameter, if backward is refused then."""
ANCHORS = {"copy": "0.5 * p.detach().clone()", "part": "0.5 * p.detach()"}


class Backward(Statement):
    losses: tuple[str, ...]
    retain: bool = False
    hook: tuple[int, Place, str] | None = None
    """(model, unit, error) of a hook that raises when the unit's gradients are reduced."""

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
    """Run a step in which each unit is stepped in backward as soon as its gradients are reduced."""

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
    """Options that differ from their defaults."""

    def __str__(self) -> str:
        return f"summon_full_params({self.place.of(self.model)}{''.join(f', {k}={v}' for k, v in self.options)})"


class Configure(Statement):
    """Change an option. If it is a list of modules, ``value`` is how many of those that follow the unit."""

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
    """Freeze or unfreeze a parameter. ``param`` is its index modulo the number of parameters."""

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
    """Change a parameter's values; see ``CHANGES``. Inside summon_full_params, change the full parameter."""

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
    """Save everything, build the model again, shard it differently over other ranks, and load everything."""

    model: int
    how: str
    """``"job"``: by save_checkpoint. ``"full"``: by full state dicts."""
    text = "m{s.model}, opt{s.model} = restarted, by {s.how!r}"


class ReshardOver(Statement):
    """Move the model to other ranks, in memory: to ``"all"``, to ``"half"`` of them, or to each rank ``"alone"``."""

    model: int
    to: str
    text = "redistribute(m{s.model}, opt{s.model}, over {s.to!r} ranks)"


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
    """Load the latest save of that kind and place."""

    model: int
    place: Place
    kind: str
    text = "{m}: load the last {s.kind!r}"


class Clip(Statement):
    """Clip gradients by ``clip_grad_norm_``, torch's or flatshard's as ``whose`` says."""

    model: int
    place: Place
    whose: str
    norm: float
    text = "{s.whose}.clip_grad_norm_({m}, 0.1, {s.norm})"


class Ask(Statement):
    """Call a verb that changes nothing; see ``ASKED``."""

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
    """Shardings of the models: the first one, and the one after an odd number of restarts."""
    elsewhere: str
    """Ranks of the second sharding: the ``"same"``, each rank ``"alone"``, or ``"half"`` of them."""
    optimizer: str
    """``"sgd"``, ``"adamw"``, ``"flat"`` (SGD of ``flat_parameters``), ``"whole"`` (Adafactor of full parameters), or
    ``"offloaded"`` (AdamW with its state on the host)."""
    optimizer_first: bool
    models: int
    body: tuple[Statement, ...]
    store: str = "TCPStore"
    """Store of the process group; see ``STORES``."""

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
    """Yield all statements, including nested ones."""
    for statement in body:
        yield statement
        if isinstance(statement, Block):
            yield from statements(statement.body)
