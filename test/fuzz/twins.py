"""Twins: a sharded model and a plain one, and what programs note about them."""

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
    """A ``summon_full_params`` under way."""

    scope: set[str]
    options: dict[str, bool]
    before: dict[str, tuple[Tensor, Tensor | None]] = dataclasses.field(default_factory=dict)
    """Values and gradients to go back to, where it writes nothing back."""
    changed: bool = False

    def note(self, plain: nn.Module, names: set[str]) -> None:
        """What ``plain`` has now is what to go back to, of parameters ``names``."""
        for name in self.scope & names:
            p = plain.get_parameter(name)
            self.before[name] = p.detach().clone(), None if p.grad is None else p.grad.clone()


class Twin:
    """A sharded model and a plain one, each with its optimizer."""

    def __init__(self, number: int, which: int, sharding: Sharding, ranks: Ranks) -> None:
        self.number, self.which = number, which
        self.sharding, self.ranks = sharding, ranks
        self.sent: Any = None
        self.changes = 0  # of parameters' values
        self.converted = False
        self.rtol = 1e-9

    def begin(self, model: nn.Module, plain: nn.Module, opt: Any, plain_opt: Any) -> None:
        """With these, and nothing under way."""
        self.model, self.plain, self.opt, self.plain_opt = model, plain, opt, plain_opt
        self.own, self.whole = dict(model.named_parameters()), dict(plain.named_parameters())
        self.names = list(self.own)
        split = {name: name.rpartition(".") for name in self.names}
        self.holders = {name: (model.get_submodule(path), own) for name, (path, _, own) in split.items()}
        self.trained = {name: p.requires_grad for name, p in self.own.items()}
        self.units = units_below(model)
        numbers = {unit: i for i, unit in enumerate(self.units)}
        owners = {name: owner_of(p) for name, p in self.own.items()}
        self.owner = {name: -1 if unit is None else numbers[unit] for name, unit in owners.items()}
        self.synced = dict.fromkeys([*range(len(self.units)), -1], True)
        self.partial: set[int] = set()  # those that do not all-reduce
        self.factors = dict.fromkeys(self.synced, self.sharding.divide_factor)
        self.synced_outside: dict[int, bool] = {}  # of those inside no_sync
        self.held: dict[str, Any] = {}  # the mean of the slices' gradients, or all of them where numbers are rounded
        self.undefined = False  # gradients, since an exception in a backward
        self.unsharded_at = -1  # `changes` then
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
        """This rank's parts of the parameters in the module there."""
        inside = {*self.plain.get_submodule(path).parameters()}
        infos = [flatshard.tensors.shard_info(self.own[n]) for n, p in self.plain.named_parameters() if p in inside]
        return [None if info is None else (info.start, info.stop) for info in infos]

    def units_of(self, module: nn.Module, recurse: bool = True) -> list[int]:
        return [self.units.index(unit) for unit in units_of_parameters(module, recurse)]

    def seen(self, name: str) -> nn.Parameter:
        """What is registered under that name in the sharded model."""
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
        """The innermost ``summon_full_params`` that shows the parameter."""
        return next((s for s in reversed(self.shown) if name in s.scope), None)

    def shows_gradients(self, name: str) -> bool:
        return any(s.options.get("with_grads") and name in s.scope for s in self.shown)

    def reduce_held(self, units: list[int]) -> None:
        """Of frozen parameters it is dropped, as torch drops what comes to them in backward."""
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
        """Go on from the sharded model's values, where these are rounded: no rounding adds up."""
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
    """The paths of modules of each kind: see ``KINDS``."""
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
    """Whether a rank that leaves out the modules of these numbers skips a unit that a reentrant checkpoint elsewhere runs:
    that rank is refused then, in the middle of a backward.
    """
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
    """What was saved of a sharded model, and of the plain one."""

    state: Any
    plain: Any
    dtype: torch.dtype
    which: tuple[int, int]
    """How the twin is sharded, and over how many ranks."""
    cuts: list[Any]
    trained: dict[str, bool]
    """Its parameters, when it was sharded: those that were frozen have a flat parameter of their own."""


@dataclasses.dataclass
class Loss:
    twin: Twin
    sharded: Tensor
    plain: list[Tensor]
    """Of each rank's slice."""
    copies: list[nn.Module]
    """Where numbers are rounded: what each slice ran in."""
    changes: int
    """The twin's, when its forward ran."""
    left_out: bool
    """Whether some ranks left out modules, so that graphs differ."""
    tells: bool = False
    """Whether it has terms that left a unit besides its output."""
    penalties: list[tuple[str, Tensor]] = dataclasses.field(default_factory=list)
    """Parameters that it has terms of, and what these are computed of in ``plain``."""
    is_lone: bool = False
    """Whether some ranks have no such term."""
    is_local: bool = False
    """Whether such a term was this rank's number: then backward must be refused."""
