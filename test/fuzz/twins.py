"""Twins: a sharded model and a plain one, with the state that programs track of them."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from fuzz.comparisons import flat
from fuzz.programs import KINDS, Place
from fuzz.random_models import Checkpoint, Drop, Tower
from fuzz.random_options import Ranks, Rounding, Sharding
from torch import Tensor, nn

import flatshard
from flatshard._composable.find import units_below, units_of_parameters
from flatshard._composable.module_tree import ModuleGroup
from flatshard._composable.state import owner_of, unit_of


@dataclasses.dataclass(eq=False)
class Shown:
    """An active ``summon_full_params``."""

    scope: set[str]
    options: dict[str, bool]
    before: dict[str, tuple[Tensor, Tensor | None]] = dataclasses.field(default_factory=dict)
    """Values and gradients to restore if it writes nothing back."""
    changed: bool = False

    def note(self, plain: nn.Module, names: set[str]) -> None:
        """Record the values and gradients of ``plain``'s parameters ``names`` as those to restore."""
        for name in self.scope & names:
            p = plain.get_parameter(name)
            self.before[name] = p.detach().clone(), None if p.grad is None else p.grad.clone()


class Twin:
    """A sharded model and a plain one, each with its optimizer."""

    def __init__(self, number: int, which: int, sharding: Sharding, ranks: Ranks) -> None:
        self.number, self.which = number, which
        self.sharding, self.ranks = sharding, ranks
        self.sent: Any = None
        self.changes = 0  # number of changes of parameters' values
        self.converted = False
        self.rtol = 1e-9

    def begin(self, model: nn.Module, plain: nn.Module, opt: Any, plain_opt: Any) -> None:
        """Start with these models and optimizers, with nothing in progress."""
        self.model, self.plain, self.opt, self.plain_opt = model, plain, opt, plain_opt
        self.own, self.whole = dict(model.named_parameters()), dict(plain.named_parameters())
        self.names = list(self.own)
        split = {name: name.rpartition(".") for name in self.names}
        self.holders = {name: (model.get_submodule(path), own) for name, (path, _, own) in split.items()}
        self.trained = {name: p.requires_grad for name, p in self.own.items()}
        self.laid_out = self.dtype  # a layout is aligned for the dtype that it was made for
        self.units = units_below(model)
        numbers = {unit: i for i, unit in enumerate(self.units)}
        owners = {name: owner_of(p) for name, p in self.own.items()}
        self.owner = {name: -1 if unit is None else numbers[unit] for name, unit in owners.items()}
        self.synced = dict.fromkeys([*range(len(self.units)), -1], True)
        self.partial: set[int] = set()  # units that do not all-reduce
        self.factors = dict.fromkeys(self.synced, self.sharding.divide_factor)
        self.synced_outside: dict[int, bool] = {}  # gradient_sync of units inside no_sync, as it was outside
        self.held: dict[str, Any] = {}  # the mean of the slices' gradients, or all of them if numbers are rounded
        self.undefined = False  # whether gradients are, since an exception in a backward
        self.unsharded_at = -1  # `changes` at that time
        self.shown: list[Shown] = []
        self.kept = 0
        self.places = places(model)
        self.rounding = Rounding(self.sharding, plain) if self.sharding.rounds else None
        if self.rounding:
            self.rtol = max(self.rtol, self.rounding.rtol)

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.scale.dtype

    def path(self, place: Place) -> str | None:
        found = self.places[place.kind]
        return found[place.index % len(found)] if found else None

    def cuts(self, path: str) -> list[Any]:
        """Return this rank's slices of the parameters in the module at ``path``."""
        inside = {*self.plain.get_submodule(path).parameters()}
        infos = [flatshard.tensors.shard_info(self.own[n]) for n, p in self.plain.named_parameters() if p in inside]
        return [None if info is None else (info.start, info.stop) for info in infos]

    def units_of(self, module: nn.Module, recurse: bool = True) -> list[int]:
        return [self.units.index(unit) for unit in units_of_parameters(module, recurse)]

    def seen(self, name: str) -> nn.Parameter:
        """Return the parameter registered under that name in the sharded model."""
        module, own = self.holders[name]
        return getattr(module, own)  # type: ignore[no-any-return]

    @property
    def shows_own(self) -> bool:
        return all(self.seen(name) is own for name, own in self.own.items())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is shown, kept or held."""
        return self.shows_own and not (self.shown or self.kept or self.held or self.undefined or self.synced_outside)

    def scope(self, name: str) -> Shown | None:
        """Return the innermost ``summon_full_params`` that shows the parameter, or None."""
        return next((s for s in reversed(self.shown) if name in s.scope), None)

    def shows_gradients(self, name: str) -> bool:
        return any(s.options.get("with_grads") and name in s.scope for s in self.shown)

    def reduce_held(self, units: list[int]) -> None:
        """Reduce held gradients. A frozen parameter's is dropped, as torch drops gradients that reach it in backward."""
        for name in [n for n in self.held if self.owner[n] in units and self.owner[n] not in self.partial]:
            held, param = self.held.pop(name), self.plain.get_parameter(name)
            if not param.requires_grad:
                continue
            factor = self.factors[self.owner[name]] or self.ranks.size
            grad = (
                self.rounding.average(name, held, factor, param) if self.rounding else held * (self.ranks.size / factor)
            )
            param.grad = grad if param.grad is None else param.grad + grad

    def adopt(self) -> None:
        """Continue from the sharded model's values if they are rounded, so that rounding does not add up."""
        grads = [n for n in self.names if self.plain.get_parameter(n).grad is not None and self.own[n].grad is not None]
        names = [n for n in self.names if self.owner[n] >= 0]
        targets = [(self.own[n], self.plain.get_parameter(n)) for n in names]
        targets += [(self.own[n].grad, self.plain.get_parameter(n).grad) for n in grads]
        infos = [flatshard.tensors.shard_info(self.own[n]) for n in [*names, *grads]]
        wholes = []
        for (own, plain), info in zip(targets, infos, strict=True):
            whole = torch.full((plain.numel(),), -torch.inf, dtype=torch.float64)
            whole[info.start : info.stop] = flat(own, info).double()
            wholes.append(whole)
        every = torch.cat(wholes)
        dist.all_reduce(every, dist.ReduceOp.MAX, group=self.ranks.group)
        sizes = [plain.numel() for _, plain in targets]
        for (_, plain), info, whole in zip(targets, infos, every.split(sizes), strict=True):
            plain.data.copy_(whole.as_strided(info.shape, info.stride))


def places(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of modules of each kind; see ``KINDS``."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(param, []).append(module)
    for path, module in model.named_modules():
        unit, inside, params = unit_of(module), {*module.modules()}, [*module.parameters()]
        own = [p for p in params if owner_of(p) is unit]
        if not path:
            found["root"].append(path)
        elif unit is not None:
            found["group" if isinstance(unit.module, ModuleGroup) else "unit"].append(path)
            if any(h is not module and unit_of(h) is None for p in own for h in holders[p]):
                found["owner"].append(path)
        elif params and not units_below(module) and any(owner_of(p) for p in params):
            found["inner"].append(path)
        elif units_below(module):
            found["between"].append(path)
        if path.endswith("_orig_mod") and params:
            found["compiled"].append(path)
        if path and any(h not in inside for p in params for h in holders[p]):
            found["tied"].append(path)
    return found


def recomputed_and_skipped(model: nn.Module, numbers: set[int]) -> bool:
    """Return whether a rank that leaves out these modules skips a unit that a reentrant checkpoint runs elsewhere. That rank
    is refused in the middle of a backward."""
    drops = [m for m in model.modules() if isinstance(m, Drop | Tower) and m.number in numbers]
    checkpoints = [m for m in model.modules() if isinstance(m, Checkpoint) and m.reentrant]
    return any(
        not {*units_below(drop.inner)}.isdisjoint(units_of_parameters(each))
        for drop in drops
        for each in checkpoints
        if each not in {*drop.modules()}
    )


@dataclasses.dataclass
class Saved:
    """Saved state of a sharded model and of the plain one."""

    state: Any
    plain: Any
    dtype: torch.dtype
    which: tuple[int, int]
    """The twin's number of restarts modulo 2, which selects its sharding, and its number of ranks."""
    cuts: list[Any]
    trained: dict[str, bool]
    """Which parameters were trainable when it was sharded: frozen ones have a flat parameter of their own."""
    laid_out: torch.dtype


@dataclasses.dataclass
class Loss:
    twin: Twin
    sharded: Tensor
    plain: list[Tensor]
    """The plain model's losses, one for each rank's slice."""
    copies: list[nn.Module]
    """If numbers are rounded, the model that ran each slice."""
    changes: int
    """The twin's number of changes at the forward."""
    left_out: bool
    """Whether some ranks left out modules, so that graphs differ."""
    fails: bool
    """Whether its backward may raise."""
    tells: bool = False
    """Whether it has terms that left a unit besides its output."""
    penalties: list[tuple[str, Tensor]] = dataclasses.field(default_factory=list)
    """Names of parameters with a term in the loss, and the tensors that the term is computed from in ``plain``."""
    is_lone: bool = False
    """Whether some ranks lack such a term."""
    is_local: bool = False
    """Whether such a term is a value of this rank only: then backward must be refused."""
