"""Runs a random program (fuzz_programs.py) on the ranks, and beside it on plain models in one process: the oracle.

Every rank keeps *twins*: a sharded model that trains on this rank's slice of each batch, and a plain one that runs the
forward of one slice after the other and trains on the mean of their losses. Each statement runs on the sharded model first,
then on the plain one; after each, this rank's parts of parameters and gradients, and whole parameters where they are shown,
are compared. That communicates nothing and touches no state of the library. Where numbers are rounded on the way: see
[Note: An oracle that rounds].

What a plain model has no verb for is written out here: what ``no_sync`` holds, by parameter; what ``summon_full_params``
brings back; when gradients are undefined (from an exception in a backward to ``zero_grad``).

A documented refusal (:data:`REFUSALS`) means that nothing happened. Some are allowed only where they are true:
see ``_check_refusal``. Statements with a meaning that nobody promises are left out, on both sides: ``p.data.mul_()`` where
the user keeps parameters unsharded, an optimizer's step inside ``summon_full_params``, a backward of what came before
``p.data = ...``.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz_programs as programs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from clean import check_clean
from fuzz_models import Checkpoint, Drop, Env, Island, Tower, during, forget
from fuzz_options import CPU, Ranks, Rounding, Sharding
from fuzz_programs import KINDS, ROOT, Bomb, Place, Program, Statement
from parity import FLOOR, everybody, mean_square
from saving import read_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

import flatshard
from flatshard import checkpoint as saving
from flatshard._composable.find import units_below, units_of_parameters
from flatshard._composable.module_tree import ModuleGroup, called_modules
from flatshard._composable.state import owner_of, unit_of
from flatshard.checkpoint import ShardedValue

PER_RANK = 2
"""Rows of each batch that a rank trains on."""

REFUSALS = {
    "torch's own": r"needed for gradient computation has been modified by an inplace operation",
    "stepped": r"changed in place .*between its forward and its backward",
    "gradients inside": r"runs forward with gradients inside summon_full_params",
    "changed inside": r"were changed in place .* inside its forward, a registered method of it or summon_full_params",
    "replaced inside": r"were replaced .* inside keep_unsharded",
    "copied unsharded": r"cannot copy (unit|the module of parameter) .* while its parameters are unsharded",
    "reshard busy": r"reshard: .* are in use by a forward or by summon_full_params",
    "state inside": r"are in a forward or in summon_full_params, where state_dict\(\) has whole tensors",
    "state whole": r"are shown whole since unshard\(\): call flatshard.reshard\(module\) first",
    "held": r"units .* hold gradients that have not been averaged over all ranks",
    "other arguments": r"summon_full_params\(.*inside summon_full_params\(.*or pass the same arguments",
    "rank0 writes": r"summon_full_params\(rank0_only=True\) needs writeback=False",
    "no unit": r"(is part of (a )?unit|is not a unit).*not a unit itself|is not a unit, but contains units|nothing in this",
    "no parameters": r"has no parameters to export",
    "no replicas": r"no replicas to reduce over",
    "nothing to compare": r"check_replicas: no unit has the strategy NO_SHARD or a hybrid one",
    "not dividing": r"reshard_after_forward=\d does not divide|reshard_after_forward=.*(has no meaning|reshards to its)",
    "other group": r"another process group or device than .*: units can be prefetched within one group only",
    "one mesh": r"reshard_after_forward.*mesh",
    "static": r"static_buffers",
    "does not move": r"reshard_over: .*(several process groups|have reshard_after_forward=<|do(es)? not move|is transposed)",
    "move busy": r"reshard_over: .*(are kept unsharded|hold gradients that are not reduced|is running)",
    "cut otherwise": r"is sharded otherwise than the model|load_local_state_dict: .*(flat parameters for a|another layout)",
    "told past a unit": r"unit '.*' .*by a tensor that",
    "part for whole": r"a function of torch took this part for the whole",
    "a part": r"is sharded: this rank has .*, and '.*' needs the whole\. It is whole inside",
}
"""Errors that are right, each with a cure in its text."""


LONE = "a term that some ranks do not have, in"
"""Begins the note of a backward that ends the program in an ``OutOfStepError`` or ``CollectiveError``, or is right."""


class Bang(ValueError):
    """Raised by a program on purpose."""


class Interrupt(KeyboardInterrupt):
    """The same, as Ctrl-C is: not an ``Exception``."""


ERRORS: dict[str, type[BaseException]] = {"ValueError": Bang, "KeyboardInterrupt": Interrupt}


class Fuse:
    """Raises once."""

    def __init__(self, error: str) -> None:
        self.error = error
        self.blown = False

    def __call__(self, *args: Any) -> None:
        if not self.blown:
            self.blown = True
            raise ERRORS[self.error]("on purpose")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fuse()
        return grad, None


@contextlib.contextmanager
def placed(bomb: Bomb | None, fuse: Fuse | None, module: nn.Module) -> Iterator[None]:
    """The bomb is in one of the modules of ``module``."""
    if bomb is None or fuse is None:
        yield
        return

    def at(x: Any) -> Any:
        if bomb.when == "forward":
            fuse()
        elif isinstance(x, Tensor) and x.requires_grad:
            if bomb.when == "backward":
                return _Raises.apply(x, fuse)
            x.register_hook(fuse)
        return x

    modules = [m for m in module.modules() if not isinstance(m, nn.ParameterList)]
    where = modules[bomb.module % len(modules)]
    if bomb.where == "before":
        handle = where.register_forward_pre_hook(lambda m, args: (at(args[0]), *args[1:]))
    else:
        handle = where.register_forward_hook(lambda m, args, out: at(out))
    try:
        yield
    finally:
        handle.remove()


def run(call: Callable[[Tensor], Any], module: nn.Module, x: Tensor, env: Env) -> Any:
    """A forward: its output, and with it what was told besides."""
    env = dataclasses.replace(env, told=[])
    try:
        with during(env):
            out = call(x)
    finally:
        forget(module)
    return (out, env.told) if env.told else out


# ---------------------------------------------------------------------------------------------------------------------
# Twins
# ---------------------------------------------------------------------------------------------------------------------


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


def flat(own: Tensor, info: Any) -> Tensor:
    """A part in memory order."""
    own = own.detach().as_subclass(torch.Tensor)
    return own.reshape(-1) if info is None or own.dim() < 2 or own.is_contiguous() else info.in_memory_order(own)


def part_of(own: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of what is in whole in one process."""
    info = flatshard.tensors.shard_info(own)
    if info is None:
        return whole.detach().reshape(-1)
    if whole.stride() == info.stride and whole.is_contiguous():
        return whole.detach().view(-1)[info.start : info.stop]
    dense = torch.empty_strided(whole.shape, info.stride, dtype=whole.dtype).copy_(whole.detach())
    return dense.as_strided((dense.numel(),), (1,))[info.start : info.stop]


Pair = tuple[Tensor, Tensor, float, str, float]
"""What was found, what was expected, and the rest of :func:`close`'s arguments."""


def all_close(pairs: list[Pair]) -> None:
    """:func:`close` for each, after a look at all of them at once, in which nearly always all are much closer."""
    if not pairs:
        return
    alike = all(got.dtype == expected.dtype and got.numel() == expected.numel() for got, expected, *_ in pairs)
    if alike:
        found, wanted = (torch.cat([pair[i].detach().reshape(-1).double() for pair in pairs]) for i in range(2))
        if not found.numel() or (found - wanted).abs().max().item() <= FLOOR * min(pair[2] for pair in pairs):
            return
    for pair in pairs:
        close(*pair)


TWO = ("dist", "torch.dist", "F.mse_loss", "F.l1_loss", "F.smooth_l1_loss")
"""Terms that are functions of two tensors."""


def _penalty_of(p: Tensor, s: programs.Penalty) -> Tensor:
    q = eval(programs.ANCHORS[s.anchor], {"p": p})
    return eval(programs.PENALTIES[s.how], {"p": p, "q": q, "torch": torch, "F": F})  # type: ignore[no-any-return]


def has_leaves(t: Tensor) -> bool:
    """Whether a backward of ``t`` comes to a parameter."""
    todo, seen = [t.grad_fn], set()
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return False


def largest(t: Tensor | None) -> float:
    return t.detach().abs().max().item() if t is not None and t.numel() else 0.0


def close(got: Tensor, expected: Tensor, rtol: float, what: str, scale: float = 0.0) -> None:
    """``scale``: a magnitude that counts, where it is larger."""
    got, expected = got.detach().cpu(), expected.detach()
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    got, expected = got.reshape(-1), expected.reshape(-1)
    assert got.shape == expected.shape, f"{what}: {got.numel()} elements, expected {expected.numel()}"
    if not got.numel() or torch.equal(got, expected):
        return
    scale = max(largest(expected.double()), scale, FLOOR)
    error = (got.double() - expected.double()).abs().max().item() / scale
    assert error <= rtol, f"{what}: {got[:4].tolist()}, expected {expected[:4].tolist()} ({error:.2g} relative)"


# ---------------------------------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------------------------------


class Machine:
    """Runs one program on this rank."""

    def __init__(self, ctx: Any, program: Program, halves: Any = None, device: torch.device = CPU) -> None:
        self.ctx, self.program, self.device = ctx, program, device
        group = ctx.group if program.store == "TCPStore" else ctx.group_over(program.store)
        here = Ranks(group, ctx.rank, ctx.world_size, ctx.alone, halves, device)
        others = {"same": here, "alone": Ranks(ctx.alone, 0, 1, ctx.alone, device=device)}
        if halves is not None:
            half = halves.get_group("shard"), halves.get_local_rank("shard"), 2
            others["half"] = Ranks(*half, ctx.alone, device=device)
        self.noted: list[Pair] = []  # comparisons for which the host does not wait
        self.ranks, self.everywhere = (here, others[program.elsewhere]), list(others.values())
        self.twins: list[Twin | None] = [None] * 3
        self.losses: dict[str, Loss] = {}
        self.saved: dict[tuple[str, str], Saved] = {}
        self.loads_other_cuts = False  # of a model whose parameters may have been cut otherwise
        self.outcomes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.interrupted = False  # a forward, and nothing has cleaned up since
        self.models: list[set[int]] = []  # numbers of twins that a backward reached together, while some held gradients
        self.folders = 0
        for number in range(program.models):
            twin = Twin(number, 0, program.shardings[0], self.ranks[0])
            plain = self._build(number)
            twin.begin(*self._make(twin, plain))
            self.twins[number] = twin

    def _build(self, seed: int) -> nn.Module:
        torch.manual_seed(100 + seed)
        return self.program.model.build(self.program.shardings[0].param_dtype)

    def _make(self, twin: Twin, plain: nn.Module, plain_opt: Any = None) -> tuple[nn.Module, nn.Module, Any, Any]:
        """A sharded model as ``plain`` is now, and what ``Twin.begin`` takes."""
        sharding, ranks = twin.sharding, twin.ranks
        if self.program.model.rounds_to_float32:
            twin.rtol = 1e-4
        sharding.ignore(plain)
        if sharding.start in ("meta", "to_empty", "init"):
            with torch.device("meta"):
                model = self._build(twin.number)
        else:
            model = self._build(twin.number)
            if plain_opt is None:
                model.load_state_dict(plain.state_dict())
            model.to(self.device)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        if sharding.start == "sync" and ranks.rank:
            ignored = [p for module in sharding.ignore(model) for p in module.parameters()]
            for p in model.parameters():
                p.data += not any(p is other for other in ignored)
        first = self.program.optimizer_first and plain_opt is None
        opt = self._optimizer(model) if first else None
        params = dict(model.named_parameters())
        sharding.shard(model, ranks, plain)
        if sharding.start == "init":
            self._do_first(twin, model, params, plain)
        # Up to the first use, parameters that are read from modules are whole. Islands don't evaluate in full precision.
        fills = sharding.start in ("to_empty", "init")
        if fills and sharding.full_precision_in_eval and self.program.model.has("island"):
            flatshard.unshard(model)
            flatshard.reshard(model)
        elif fills:
            with torch.no_grad(), during(Env(first=False)):
                model.eval()(self._inputs(0, twin, True, plain)[ranks.rank].to(self.device))
            model.train()
        return model, plain, opt or self._optimizer(model), plain_opt or self._optimizer(plain)

    def _do_first(self, twin: Twin, model: nn.Module, params: dict[str, nn.Parameter], plain: nn.Module) -> None:
        """What comes after an initialisation, before any forward, finds and leaves parts."""
        verb, group = twin.sharding.first, twin.ranks.group
        self.ctx.note(f"seed {self.program.seed}: {verb} before the first forward")
        match verb:
            case "forward":
                return
            case "state_dict":
                for name, value in model.state_dict().items():
                    if name in params:
                        own = value.to_local() if isinstance(value, ShardedValue) else value
                        assert own.numel() == params[name].numel(), f"{name} has {own.numel()} elements"
            case "describe":
                assert str(flatshard.describe(model))
            case "reshard":
                flatshard.reshard(model)
            case "save_checkpoint":
                with self._folder() as folder:
                    path = folder / str(dist.get_global_rank(group, 0))
                    path.parent.mkdir(exist_ok=True)
                    flatshard.save_checkpoint(path, {"model": model}, process_group=group)
            case "optimizer":
                self._optimizer(model)
            case "gradients":
                assert all(p.grad is None for p in model.parameters())
            case "torch's":
                get_model_state_dict(model)
                get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
        numels = [p.numel() for p in params.values()]
        for numel, (name, p) in zip(numels, params.items(), strict=True):
            part = part_of(p, plain.get_parameter(name))
            assert numel == part.numel(), f"{name} has {numel} elements after {verb}, expected {part.numel()}"
            close(flat(p, flatshard.tensors.shard_info(p)), part, 1e-6, f"this rank's part of {name}")

    def _optimizer(self, model: nn.Module) -> Any:
        """Settings under which rounding stays rounding; see parity.py."""
        params: Any = list(model.parameters())
        match self.program.optimizer:
            case "sgd":
                return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
            case "adamw" | "offloaded" as kind:
                adamw = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-2 if self.program.model.rounds_to_float32 else 1e-3}
                if kind == "offloaded" and unit_of(model) is not None:
                    return flatshard.optim.OffloadedOptimizer(params, torch.optim.AdamW, **adamw)
                return torch.optim.AdamW(params, **adamw)
            case "flat":
                sharded = unit_of(model) is not None
                return torch.optim.SGD(flatshard.flat_parameters(model) if sharded else params, lr=0.05)
            case _:
                settings: dict[str, Any] = {"lr": 1e-2, "eps": (1e-2, 1e-2)}
                if unit_of(model) is not None:
                    return flatshard.optim.WholeParameterOptimizer(params, torch.optim.Adafactor, **settings)
                return torch.optim.Adafactor(params, **settings)

    # -- running

    def main(self) -> tuple[list[str], Counter[str]]:
        """Run all, then see that nothing is left of it, and that a plain step is right."""
        self.run(self.program.body)
        self.ctx.note(f"seed {self.program.seed}: the end")
        self.losses.clear()
        for twin in self._alive:
            flatshard.recover(twin.model)
            flatshard.reshard(twin.model)
            twin.held.clear()
        self.interrupted = False
        for twin in self._alive:
            check_clean(twin.model)
        for twin in self._alive:
            for unit in twin.partial:
                twin.units[unit].handle.ranks.averaging.reduces_replicas = True
            twin.partial.clear()
            self.do(programs.Configure(twin.number, ROOT, "gradient_sync", True))
            self.do(programs.ZeroGrad(twin.number, True))
            self.do(programs.Forward("last", twin.number, ROOT, 1000, trains_told=False))
            self.do(programs.Backward(("last",)))
            self.do(programs.Step(twin.number))
            self.do(programs.Evaluate(twin.number, ROOT, 1001, "no_grad"))
            self.do(programs.Save(twin.number, ROOT, "full"))
        texts = everybody(self.ctx, "; ".join(self.outcomes))
        assert len(set(texts)) == 1, f"ranks were refused different things: {texts}"
        all_close([(got.cpu(), expected, *more) for got, expected, *more in self.noted])
        return self.outcomes, self.counts

    @property
    def _alive(self) -> list[Twin]:
        return [twin for twin in self.twins if twin is not None]

    def run(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            self.do(statement)

    def do(self, statement: Statement) -> None:
        self.ctx.note(f"seed {self.program.seed}: {next(statement.lines())}")
        twin = None
        if hasattr(statement, "model"):
            twin = self.twins[statement.model]
            if twin is None and not isinstance(statement, programs.Copy):
                return
        if twin is not None and self.rank0_only(twin):
            return
        module = None
        if twin is not None and hasattr(statement, "place"):
            path = twin.path(statement.place)
            if path is None:
                return
            module = twin.model.get_submodule(path)
        before = len(self.outcomes)
        try:
            done = getattr(self, f"_{type(statement).__name__.lower()}")(statement, twin, module)
            self.check()
        except AssertionError as e:
            if not getattr(e, "is_told", False):
                e.is_told = True  # type: ignore[attr-defined]
                e.add_note(f"at: {next(statement.lines())}")
            raise
        outcome = "refused" if len(self.outcomes) > before else "left out" if done is False else "done"
        self.counts[f"{type(statement).__name__.lower()} | {outcome}"] += 1

    @staticmethod
    def rank0_only(twin: Twin) -> bool:
        """Whether only rank 0 has whole parameters of it: then what communicates for it is for no rank to do."""
        return any(shown.options.get("rank0_only") for shown in twin.shown)

    def attempt(self, what: Callable[[], object], twin: Twin | None = None, module: nn.Module | None = None) -> bool:
        """Whether it was done; False: refused, as is documented."""
        try:
            what()
        except (RuntimeError, ValueError, NotImplementedError) as e:
            self._check_refusal(e, twin, module)
            return False
        return True

    def _check_refusal(self, error: BaseException, twin: Twin | None, module: nn.Module | None = None) -> str:
        """That ``error`` is documented, and true."""
        text = str(error)
        found = next((key for key, pattern in REFUSALS.items() if re.search(pattern, text, re.DOTALL)), None)
        if found is None or isinstance(error, Bang):
            raise error
        self.outcomes.append(found)
        shown = any(t.shown for t in self._alive)
        by_user = twin is not None and any(u.is_unsharded_by_user for u in twin.units)
        # Held until it is cleaned up: of a failed backward; of a unit that no rank has used, as none knows of the others.
        dying = twin is not None and any(u.context.backward is not None for u in twin.units)
        holding = [] if twin is None else [i for i, u in enumerate(twin.units) if u.handle.gradients.withholds]
        unused = any(i not in map(twin.owner.get, twin.held) for i in holding)
        true: dict[str, Callable[[], object]] = {  # of what has more than its text
            "state inside": lambda: shown or self.interrupted,
            "reshard busy": lambda: shown or self.interrupted,
            "gradients inside": lambda: shown or self.interrupted,
            "changed inside": lambda: twin and shown and twin.changes,
            "state whole": lambda: twin and not twin.shows_own,
            "move busy": lambda: twin and (holding or by_user or not twin.is_idle or twin.ranks.size == 1),
            "held": lambda: twin and (twin.synced_outside or twin.held or dying or unused),
            "no unit": lambda: module is not None and unit_of(module) is None,
            "other arguments": lambda: twin and twin.shown,
            "static": lambda: self._uses("static_buffers"),
            "replaced inside": lambda: any(t.kept for t in self._alive),
            "cut otherwise": lambda: self.loads_other_cuts,
            "copied unsharded": lambda: twin and (twin.shown or twin.kept or self.interrupted or by_user),
        }
        assert true.get(found, lambda: True)(), f"this is not so: {text}"
        return found

    def _uses(self, option: str) -> bool:
        return any(getattr(twin.sharding, option) for twin in self._alive)

    def check(self) -> None:
        """Everything that can be compared without communication."""
        pairs: list[Pair] = []
        for twin in self._alive:
            grads = {name: largest(p.grad) for name, p in twin.whole.items()}
            least = FLOOR * max(grads.values())
            for name, plain in twin.whole.items():
                own, seen, shown = twin.own[name], twin.seen(name), twin.scope(name)
                info, what = flatshard.tensors.shard_info(own), f"{name} of m{twin.number}"
                if shown is None:
                    pairs.append((flat(own, info), part_of(own, plain), twin.rtol, f"this rank's part of {what}", 0.0))
                if seen is not own and not self.interrupted and (shown or twin.unsharded_at == twin.changes):
                    value = plain if seen.dtype == plain.dtype else plain.detach().to(seen.dtype)
                    pairs.append((seen, value, twin.rtol, f"the whole {what}", largest(plain)))
                assert own.requires_grad == plain.requires_grad, f"{what}: requires_grad {own.requires_grad}"
                if twin.undefined or self.program.optimizer == "flat":
                    continue
                where = own
                if twin.shows_gradients(name):
                    if seen is own or self.interrupted or self.rank0_only(twin):
                        continue
                    where = seen
                there = where.grad is not None
                assert there == (plain.grad is not None) or not plain.numel(), (
                    f"{what} has {'a' if there else 'no'} gradient"
                )
                if there and plain.grad is not None:
                    is_whole = where is seen and seen is not own
                    expected = plain.grad if is_whole else part_of(own, plain.grad)
                    got = where.grad if is_whole else flat(where.grad, info)
                    scale = max(grads[name], least, twin.rounding.scales.get(name, 0.0) if twin.rounding else 0.0)
                    pairs.append((got, expected, twin.rtol, f"the gradient of {what}", scale))
            if not (self.interrupted or twin.rounding):
                pairs += [
                    (mine, theirs, twin.rtol, f"buffer {name} of m{twin.number}", 0.0)
                    for (name, mine), theirs in zip(twin.model.named_buffers(), twin.plain.buffers(), strict=True)
                ]
        self.compare(pairs)

    def compare(self, pairs: list[Pair]) -> None:
        """At once; on an accelerator at the end, so that kernels may be as late as they are in a user's program."""
        if self.device is CPU:
            all_close(pairs)
        else:
            self.noted += [(got.detach().clone(), expected.detach().clone(), *more) for got, expected, *more in pairs]

    # -- forwards

    def _inputs(self, number: int, twin: Twin, is_root: bool, plain: nn.Module | None = None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        rows, model = PER_RANK * self.ctx.world_size, self.program.model
        if is_root and model.front != "none":
            batch = torch.randint(7, (rows, 3), generator=generator)
        else:
            batch = torch.randn(rows, model.width, generator=generator, dtype=torch.float64)
            batch = batch.to((plain or twin.plain).scale.dtype)
        return list(batch.split(rows // twin.ranks.size))

    def _run_forward(
        self, statement: programs.Forward | programs.Evaluate, twin: Twin, module: nn.Module
    ) -> tuple[Any, list[Any], list[nn.Module]] | None:
        """The outputs of this rank's slice and of all slices, and what these ran in. None: it ended in an exception."""
        model, bomb = self.program.model, statement.bomb
        path = twin.path(statement.place)
        assert path is not None
        if not self._runs_alone(twin, path, module):
            return None
        changes = model.has("change") and (not path or "'change'" in repr(model.tree))
        if twin.shown and twin.sharding.mixed:
            return None  # what is shown has the parameters' own dtype
        if self.device is not CPU and any(shown.options.get("offload_to_cpu") for shown in twin.shown):
            return None  # what is shown is on the CPU
        if changes and twin.shown and isinstance(statement, programs.Forward):
            return None  # it may be refused at a later unit, when some have changed already
        if bomb and model.has("change") and bomb.error == "KeyboardInterrupt":
            bomb = None  # what the forward changed before it is lost, or not
        if changes and model.has("data", "data_in_place"):
            self._discard_losses(twin)
        fuse = Fuse(bomb.error) if bomb else None
        size, rank = twin.ranks.size, twin.ranks.rank
        drops = getattr(statement, "left_out", ()) if size == self.ctx.world_size else ()
        if recomputed_and_skipped(twin.model, {number for _, number in drops}):
            drops = ()
        mode, told = getattr(statement, "mode", 0), getattr(statement, "trains_told", True)
        envs = [Env(r == 0, mode, frozenset(n for of, n in drops if of == r), told) for r in range(size)]
        xs, out, method = self._inputs(statement.inputs, twin, not path), [], getattr(statement, "method", False)
        plain_module = twin.plain.get_submodule(path)
        ends = contextlib.ExitStack()
        if getattr(statement, "is_eval", False) and not (twin.rounding and model.has("island")):
            for each in (module, plain_module):
                each.eval()
                ends.callback(each.train)
        first = dataclasses.replace(envs[rank], first=True)
        with ends:
            try:
                with placed(bomb, fuse, module):
                    call = module.encode if method else module
                    x = xs[rank].to(self.device, non_blocking=True)
                    if not self.attempt(lambda: out.append(run(call, module, x, first)), twin):
                        if model.has("batchnorm"):  # it may have run before the unit that refused
                            for mine, theirs in zip(twin.plain.buffers(), twin.model.buffers(), strict=True):
                                mine.data.copy_(theirs)  # unseen by autograd, as below
                        return None
                self.interrupted = False
            except (Bang, Interrupt):
                assert fuse is not None
                assert fuse.blown
                self.interrupted = bomb is not None and bomb.error == "KeyboardInterrupt"
                again = Fuse(bomb.error) if bomb and not twin.rounding else None  # models that round change nothing
                with contextlib.suppress(Bang, Interrupt), placed(bomb, again, plain_module):
                    if again is not None:
                        run(plain_module, plain_module, xs[rank], first)
                self._note_change(twin, changes)
                return None
            outs, copies = [], []
            for r, x in enumerate(xs):
                own = {name: b.clone() for name, b in twin.plain.named_buffers()} if r != rank else {}
                runs = plain_module
                if twin.rounding and (plain_module.training or not twin.sharding.full_precision_in_eval):
                    runs, x = twin.rounding.lowered(plain_module), twin.rounding.input(x)
                copies.append(runs)
                outs.append(run(runs, runs, x, envs[r]))
                for name, value in own.items():  # each rank has its own
                    twin.plain.get_buffer(name).data.copy_(value)  # unseen by autograd, as BatchNorm does
        self._note_change(twin, changes)
        for got, expected in zip(pytree.tree_leaves(out[0]), pytree.tree_leaves(outs[rank]), strict=True):
            if isinstance(got, Tensor) and got.is_floating_point():
                rtol = max(twin.rtol, twin.rounding.loss_rtol * 4) if twin.rounding else twin.rtol
                expected = expected.to(got.dtype) if twin.rounding else expected
                self.compare([(got, expected, rtol, "the output", 0.5 * bool(twin.rounding))])
        return out[0], outs, copies

    def _runs_alone(self, twin: Twin, path: str, module: nn.Module) -> bool:
        if not path:
            return True
        above = [twin.model.get_submodule(path[:i]) for i in range(len(path)) if path[i] == "."]
        islands = any(isinstance(m, Island) for m in [*above, *module.modules()])
        if islands or twin.rounding or not getattr(module, "is_node", False):
            return False
        inside = {m for unit in units_below(module) for each in called_modules(unit.module) for m in each.modules()}
        return all(m in inside or not m._parameters for m in module.modules())

    @staticmethod
    def _note_change(twin: Twin, changed: bool) -> None:
        if changed:
            twin.changes += 1
            twin.unsharded_at = -1
            for shown in twin.shown:
                shown.changed = True

    def _forward(self, s: programs.Forward, twin: Twin, module: nn.Module) -> bool:
        self.losses.pop(s.loss, None)
        found = self._run_forward(s, twin, module)
        if found is None:
            return False
        out, outs, copies = found
        losses = [mean_square(o, None) for o in (out, *outs)]
        assert s.left_out or losses[0].requires_grad == losses[1].requires_grad
        if all(loss.requires_grad for loss in losses):
            tells = s.trains_told and self.program.model.has("told")
            self.losses[s.loss] = Loss(twin, losses[0], losses[1:], copies, twin.changes, bool(s.left_out), tells)
        return True

    def _generate(self, s: programs.Generate, twin: Twin, module: None) -> bool:
        if twin.rounding or twin.shown or self.interrupted or self.program.model.has("change"):
            return False
        x, steps, got = self._inputs(s.inputs, twin, True)[twin.ranks.rank], s.steps + s.uneven * twin.ranks.rank, []

        def generate(model: nn.Module, x: Tensor) -> Tensor:
            model.eval()
            try:
                return run(functools.partial(model.generate, steps=steps), model, x, Env())
            finally:
                model.train()

        with torch.no_grad():
            with flatshard.keep_unsharded(twin.model):
                self.attempt(lambda: got.append(generate(twin.model, x.to(self.device))), twin)
            pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves([generate(twin.plain, x)] * len(got)), strict=True)
        self.compare([(mine, theirs, twin.rtol, "what was generated", 0.0) for mine, theirs in pairs])
        return True

    def _penalty(self, s: programs.Penalty, twin: Twin, module: None) -> bool:
        loss, name = self.losses.get(s.loss), twin.names[s.param % len(twin.names)]
        own, plain = twin.own[name], twin.plain.get_parameter(name)
        if loss is None or loss.twin is not twin or loss.changes != twin.changes or not s.factors:
            return False
        if twin.rounding or twin.shown or twin.partial or not twin.shows_own or self.program.optimizer == "flat":
            return False
        if not plain.requires_grad or plain.numel() < 2 or twin.owner[name] < 0:
            return False
        info = flatshard.tensors.shard_info(own)
        if info is None or ((info.by_rows or info.never_cut) and ("std" in s.how or s.how in TWO)):
            return False  # that is this rank's
        factors = [s.factors[rank % len(s.factors)] for rank in range(twin.ranks.size)]
        if {*factors} == {None}:
            return False
        leaf, found, local = plain.detach().clone().requires_grad_(), [], False
        if not self.attempt(lambda: found.append(_penalty_of(own, s)), twin):
            return True
        expected = _penalty_of(leaf, s)
        try:
            close(found[0], expected, twin.rtol, f"{s.how} of {name}", 1e-3)
        except AssertionError:
            if s.how not in programs.FUNCTIONS:
                raise
            found[0] = found[0].nan_to_num(0.0, 0.0, 0.0)
            local = True
        loss.is_local |= any(everybody(self._there(twin), local))
        mine = factors[twin.ranks.rank]
        loss.sharded = loss.sharded if mine is None else loss.sharded + mine * found[0]
        loss.plain = [of + (factor or 0.0) * expected for of, factor in zip(loss.plain, factors, strict=True)]
        loss.penalties.append((name, leaf))
        loss.is_lone |= None in factors
        return True

    def _evaluate(self, s: programs.Evaluate, twin: Twin, module: nn.Module) -> bool:
        with getattr(torch, s.guard)():
            return self._run_forward(s, twin, module) is not None

    # -- backwards

    def _backward(self, s: programs.Backward, twin: None, module: None) -> bool:
        losses = [self.losses[name] for name in dict.fromkeys(s.losses) if name in self.losses]
        if not losses or any(self.rank0_only(loss.twin) for loss in losses) or self._mixes_gradients():
            return False
        stale = any(loss.changes != loss.twin.changes for loss in losses)
        if stale and any(loss.left_out for loss in losses):
            return False  # each rank is refused at another point, after other collectives
        if stale and self.program.model.has("checkpoint") and any(loss.twin.rounding for loss in losses):
            return False  # the oracle's copies would be recomputed from the values of their forward
        if stale and any(loss.penalties for loss in losses):
            return False  # some terms of parameters need their values, and are refused
        if any(loss.is_lone and not all(loss.twin.synced.values()) for loss in losses):
            return False  # ranks without the term wait for nothing: they go on, until the next collective of all
        hook, fuse, involved = None, None, {id(loss.twin): loss.twin for loss in losses}
        if s.hook and (hooked := self.twins[s.hook[0]]) and (path := hooked.path(s.hook[1])) is not None:
            place = hooked.model.get_submodule(path)
            if unit_of(place) is not None:
                fuse = Fuse(s.hook[2])
                hook = flatshard.optim.register_gradients_reduced_hook(place, fuse)
                involved[id(hooked)] = hooked
        if any(loss.is_lone for loss in losses):
            self.ctx.note(f"seed {self.program.seed}: {LONE} {s}")
        try:
            sum(loss.sharded for loss in losses).backward(retain_graph=s.retain)
            failed = False
            assert not any(loss.is_local for loss in losses), "a term was this rank's number, and nothing said so"
        except (Bang, Interrupt):
            failed = True
        except CheckpointError:  # as below: where a later forward has made the unit follow
            failed = True
        except RuntimeError as e:
            failed = True
            found = self._check_refusal(e, None)
            told = found == "told past a unit" and any(loss.tells for loss in losses)
            told |= found == "part for whole" and any(loss.penalties for loss in losses)
            if not told and found != "static" and (found not in ("stepped", "torch's own") or not stale):
                raise AssertionError(f"nothing was changed since forward: {e}") from e
        finally:
            if hook is not None:
                hook.remove()
        if failed or not s.retain:
            for name in s.losses:
                self.losses.pop(name, None)
        if failed:
            reached = any(unit.context.backward is not None for twin in self._alive for unit in twin.units)
            reached |= fuse is not None and fuse.blown  # the backward is over when its last reductions end
            self._fail_backward(involved, reached)
            return True
        try:
            self._run_plain_backward(losses, s.retain)
        except CheckpointError:  # frozen since forward: in one process the recomputation follows that, as nobody needs
            self._fail_backward(involved)
        except RuntimeError as e:
            if any(loss.twin.shown for loss in losses):  # what was changed may be copies, which the graph does not hold
                self._fail_backward(involved)
                return True
            raise AssertionError(f"torch refuses this backward in one process, flatshard did not: {e}") from None
        self._adopt(*involved.values())
        return True

    def _adopt(self, *twins: Twin) -> None:
        """See ``Twin.adopt``."""
        for twin in twins:
            if twin.rounding and not (twin.shown or twin.undefined or self.interrupted):
                self.check()
                twin.adopt()

    def _fail_backward(self, involved: dict[int, Twin], reached: bool = True) -> None:
        """``reached``: whether it had come to a unit. Otherwise what is held was not touched, and stays."""
        for twin in involved.values():
            twin.undefined = True
        for twin in self._alive if reached else ():
            twin.held.clear()

    def _mixes_gradients(self) -> bool:
        """Then new gradients are refused."""
        return any(s.options.get("with_grads") for twin in self._alive for s in twin.shown)

    def _run_plain_backward(self, losses: list[Loss], retain: bool) -> None:
        if any(loss.twin.rounding for loss in losses):
            for loss in losses:
                self._run_rounded_backward(loss, retain)
            at_once = not self._holds_back(loss.twin)
            loss.twin.reduce_held([unit for unit, synced in loss.twin.synced.items() if synced or at_once])
            return
        before = [{n: p.grad for n, p in twin.plain.named_parameters()} for twin in self._alive]
        for twin in self._alive:
            for p in twin.plain.parameters():
                p.grad = None
        found: list[dict[str, Tensor | None]] = []
        try:
            total = sum(sum(loss.plain) / len(loss.plain) for loss in losses)
            brought = has_leaves(total)  # also those that were frozen since
            total.backward(retain_graph=retain)
        finally:
            for twin, old in zip(self._alive, before, strict=True):
                found.append({name: p.grad for name, p in twin.plain.named_parameters()})
                for name, p in twin.plain.named_parameters():
                    p.grad = old[name]
        for loss in losses:  # not held: nothing comes to the unit
            for name, leaf in loss.penalties:
                param, unit = loss.twin.plain.get_parameter(name), loss.twin.owner[name]
                new = leaf.grad * (loss.twin.ranks.size / (loss.twin.factors[unit] or loss.twin.ranks.size))
                leaf.grad = None
                if param.requires_grad:
                    param.grad = new if param.grad is None else param.grad + new
        for twin, of_twin in zip(self._alive, found, strict=True):
            for name, new in of_twin.items():
                if new is not None:
                    brought = True
                    twin.held[name] = twin.held[name] + new if name in twin.held else new
            if not self._holds_back(twin):
                twin.reduce_held(list(twin.synced))
        groups = {unit.context for loss in losses for unit in loss.twin.units}
        involved = {loss.twin.number for loss in losses}
        if any(twin.held for twin in self._alive):
            involved |= {number for model in self.models if model & involved for number in model}
            self.models = [*(model for model in self.models if not model & involved), involved]
        for twin in self._alive if brought else ():
            if twin.number not in involved:
                continue
            mine = [unit for unit, synced in twin.synced.items() if synced]
            twin.reduce_held([unit for unit in mine if unit < 0 or twin.units[unit].context in groups])

    def _holds_back(self, twin: Twin) -> bool:
        """Whether ``no_sync`` keeps gradients out of ``.grad``."""
        return twin.ranks.size > 1 or self.program.optimizer == "flat"

    def _run_rounded_backward(self, loss: Loss, retain: bool) -> None:
        twin = loss.twin
        for rank, (of_slice, runs) in enumerate(zip(loss.plain, loss.copies, strict=True)):
            of_slice.backward(retain_graph=retain)
            for name, p in runs.named_parameters():
                if p.grad is not None and twin.plain.get_parameter(name).requires_grad:
                    every = twin.held.setdefault(name, [None] * twin.ranks.size)
                    new = twin.rounding.kept(name, p.grad)
                    every[rank] = new if every[rank] is None else every[rank] + new
            runs.zero_grad()

    def _forget(self, s: programs.Forget, twin: None, module: None) -> None:
        self.losses.pop(s.loss, None)

    def _discard_losses(self, twin: Twin) -> None:
        for name in [n for n, loss in self.losses.items() if loss.twin is twin]:
            del self.losses[name]

    # -- the optimizer

    def _step(self, s: programs.Step, twin: Twin, module: None) -> bool:
        if twin.undefined or twin.shown:
            return False
        if self.attempt(twin.opt.step, twin):
            held = map(twin.plain.get_parameter, twin.held)  # those of frozen parameters are not wanted
            assert not any(p.requires_grad and p.numel() for p in held), "stepped while gradients are held"
            twin.plain_opt.step()
            twin.changes += 1
            self._adopt(twin)
        return True

    def _ahead(self, s: programs.Ahead, twin: Twin, module: None) -> bool:
        loss, opt = self.losses.get(s.loss), twin.opt
        if loss is None or loss.twin is not twin or not isinstance(opt, flatshard.optim.OffloadedOptimizer):
            return False
        if loss.changes != twin.changes or not twin.is_idle or twin.partial or not all(twin.synced.values()):
            return False  # refused after some units have been stepped, or not all are reduced
        if twin.rounding or loss.penalties:  # the oracle goes on from the gradients, which are gone; or they come later
            return False
        if any(isinstance(m, Checkpoint) and m.reentrant for m in twin.model.modules()):  # refused around a unit's part
            return False
        steps = flatshard.optim.step_in_backward(twin.model, opt)
        try:
            if not self._backward(programs.Backward((s.loss,)), None, None):
                return False
            assert not twin.undefined, "units have been stepped in a backward that failed"
            assert not twin.held, "not all was reduced"
            twin.changes += 1
            opt.step()
        finally:
            steps.remove()
        twin.plain_opt.step()
        for each in (opt, twin.plain_opt):
            each.zero_grad()
        return True

    def _zerograd(self, s: programs.ZeroGrad, twin: Twin, module: None) -> bool:
        if any(shown.options.get("with_grads") for shown in twin.shown):
            return False
        for optimizer in (twin.opt, twin.plain_opt):
            optimizer.zero_grad(set_to_none=s.to_none or twin.undefined)
        twin.undefined = False
        return True

    def _clip(self, s: programs.Clip, twin: Twin, module: nn.Module) -> bool:
        if twin.undefined or not twin.shows_own or self.program.optimizer == "flat":
            return False
        plain = twin.plain.get_submodule(twin.path(s.place))
        p = 2.0 if self.program.model.has("empty") else s.norm  # of no elements torch knows no maximum
        norms: list[Tensor] = []
        clip = flatshard.clip_grad_norm_ if s.whose == "flatshard" else nn.utils.clip_grad_norm_
        given = module if s.whose == "flatshard" else module.parameters()
        if self.attempt(lambda: norms.append(clip(given, 0.1, p)), twin, module):
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
            close(norms[0].double(), expected.double(), twin.rtol, "the norm")
        return True

    # -- blocks

    def _within(
        self, s: Any, module: nn.Module, verb: Any, enter: Callable[[], None], leave: Callable[[bool], None]
    ) -> None:
        """Run the body inside. ``leave`` is told whether it ended well; neither is called where entering is refused."""
        error = ERRORS[s.raises]("at the end of the body") if s.raises else None
        try:
            with contextlib.ExitStack() as inside:
                if not self.attempt(lambda: inside.enter_context(verb(module)), self.twins[s.model], module):
                    return
                enter()
                self.check()
                self.run(s.body)
                if error is not None:
                    raise error
        except (Bang, Interrupt) as e:
            if e is not error:
                raise
        else:
            assert error is None, "the block has swallowed the exception"
        leave(error is None)

    def _nosync(self, s: programs.NoSync, twin: Twin, module: nn.Module) -> None:
        units = twin.units_of(module)
        before = {u: twin.synced[u] for u in units}
        outside = dict(twin.synced_outside)

        def enter() -> None:
            for unit in units:
                twin.synced_outside.setdefault(unit, twin.synced[unit])
                twin.synced[unit] = False

        def leave(well: bool) -> None:
            twin.synced.update(before)
            twin.synced_outside = outside

        self._within(s, module, flatshard.no_sync, enter, leave)

    def _keep(self, s: programs.Keep, twin: Twin, module: nn.Module) -> None:
        before = twin.kept

        def count(kept: int) -> None:
            twin.kept = kept

        self._within(s, module, flatshard.keep_unsharded, lambda: count(before + 1), lambda well: count(before))

    def _summon(self, s: programs.Summon, twin: Twin, module: nn.Module) -> bool:
        options = dict(s.options)
        shown = Shown(set(), options)
        units: set[int] = set()
        with contextlib.suppress(ValueError):
            units = {twin.units.index(u) for u in units_of_parameters(module, options.get("recurse", True))}

        def enter() -> None:
            self.interrupted = False
            for name in dict(twin.plain.named_parameters()):
                if twin.owner[name] in units and twin.seen(name) is not twin.own[name]:
                    shown.scope.add(name)
            shown.note(twin.plain, shown.scope)
            twin.shown.append(shown)

        def leave(well: bool) -> None:
            twin.shown.remove(shown)
            keeps = well and options.get("writeback", True)
            if shown.changed and not keeps:
                self._discard_losses(twin)
            if not keeps and shown.changed:
                for name, (value, grad) in shown.before.items():
                    p = twin.plain.get_parameter(name)
                    p.data.copy_(value)
                    if options.get("with_grads"):
                        p.grad = grad
            if keeps:  # what is shown is kept for good, whoever changed it, and whatever becomes of those around
                for outer in twin.shown:
                    shown.changed |= outer.changed
                    outer.note(twin.plain, shown.scope)
                if twin.shown:
                    twin.shown[-1].changed |= shown.changed
            if shown.changed:  # perhaps by a forward inside, whose backward may be refused then
                twin.unsharded_at = -1
                twin.changes += 1

        self._within(s, module, functools.partial(flatshard.summon_full_params, **options), enter, leave)
        return True

    # -- parameters

    def _unshard(self, s: programs.Unshard, twin: Twin, module: nn.Module) -> bool:
        if self.interrupted:
            return False
        # Else what is whole already stays as it is.
        fresh = twin.shows_own and all(u.handle.is_sharded for u in twin.units) and not twin.kept
        if self.attempt(lambda: flatshard.unshard(module, recurse=s.recurse, async_op=not s.wait), twin, module):
            twin.unsharded_at = twin.changes if fresh else -1
        return True

    def _reshard(self, s: programs.Reshard, twin: Twin, module: nn.Module) -> None:
        self.attempt(lambda: flatshard.reshard(module), twin, module)

    def _configure(self, s: programs.Configure, twin: Twin, module: nn.Module) -> bool:
        value = s.value
        if (
            s.option == "reshard_after_forward"
            and value == 2
            and (twin.ranks.size != 4 or self._uses("static_buffers"))
        ):
            return False
        if isinstance(value, tuple):  # the units that follow, of its group; in backward those before it
            if unit_of(module) is None:
                return False
            order = [m for m in twin.model.modules() if unit_of(m) and unit_of(m).context is unit_of(module).context]
            if s.option == "backward_prefetch":
                order.reverse()
            at = order.index(module)
            units = {unit_of(m): m for m in order[at + 1 : at + 1 + value[0]] if unit_of(m) is not unit_of(module)}
            value = list(units.values())
        elif isinstance(value, str):
            value = flatshard.BackwardPrefetch[value]
        options: dict[str, Any] = {s.option: value}
        if not self.attempt(lambda: flatshard.configure(module, recurse=s.recurse, **options), twin, module):
            return True
        units = [twin.units.index(u) for u in (units_below(module) if s.recurse else []) or [unit_of(module)]]
        if s.option == "gradient_sync":
            twin.synced.update(dict.fromkeys(units, value))
        elif s.option == "all_reduce":
            twin.partial = twin.partial - {*units} if value else twin.partial | {*units}
        elif s.option == "divide_factor":
            twin.factors.update(dict.fromkeys(units, value))
        return True

    def _toggle(self, s: programs.Toggle, twin: Twin, module: None) -> bool:
        name = twin.names[s.param % len(twin.names)]
        return self._train_some(s.value, twin.own[name], twin.plain.get_parameter(name), [twin.own[name]])

    def _freeze(self, s: programs.Freeze, twin: Twin, module: nn.Module) -> bool:
        plain = twin.plain.get_submodule(twin.path(s.place))
        return twin.shows_own and self._train_some(s.value, module, plain, [*module.parameters()])

    def _train_some(self, value: bool, mine: Any, theirs: Any, params: list[nn.Parameter]) -> bool:
        if self.program.optimizer == "flat" or not all(p.is_floating_point() and owner_of(p) for p in params):
            return False
        mine.requires_grad_(value)
        theirs.requires_grad_(value)
        return True

    def _change(self, s: programs.Change, twin: Twin, module: None) -> bool:
        name = twin.names[s.param % len(twin.names)]
        own, seen, shown = twin.own[name], twin.seen(name), twin.scope(name)
        plain = twin.plain.get_parameter(name)
        if self.interrupted or not own.is_floating_point():
            return False
        if s.how in ("grad", "no_grad"):
            shows = twin.shows_gradients(name)
            if twin.undefined or (seen is not own and not shows) or self.program.optimizer == "flat":
                return False
            for p in (seen if shows else own, plain):
                if p.grad is not None:
                    exec(programs.CHANGES[s.how], {"p": p})
            if shows and shown:
                shown.changed = True
            return True
        if (seen is own) == (shown is not None):
            return False  # unsharded by the user: what becomes of a change is not said
        unnoticed = shown is None and s.how == "mul_data"
        if unnoticed and (twin.kept or any(u.is_unsharded_by_user for u in twin.units)):
            return False
        for p in (seen, plain):
            with torch.no_grad():
                exec(programs.CHANGES[s.how], {"p": p})
        if s.how.endswith("data"):
            self._discard_losses(twin)
        twin.changes += 1
        if shown is not None:
            shown.changed = True
        return True

    def _convert(self, s: programs.Convert, twin: Twin, module: None) -> bool:
        model, optimizer = self.program.model, self.program.optimizer
        if twin.shown or self.interrupted or twin.kept or model.has("island"):
            return False
        if optimizer not in ("sgd", "adamw", "offloaded"):
            return False
        dtype = getattr(torch, s.dtype)
        if dtype is not twin.dtype:
            self._discard_losses(twin)
            twin.rtol = 1e-3
            twin.converted = True
            twin.changes += 1
        twin.model.to(dtype)
        flatshard.reshard(twin.model)  # what unshard() has shown
        twin.plain.to(dtype)
        twin.held = {name: grad.to(dtype) for name, grad in twin.held.items()}
        twin.opt, twin.plain_opt = self._optimizer(twin.model), self._optimizer(twin.plain)
        twin.sent = None
        return True

    # -- copies and files

    def _copy(self, s: programs.Copy, twin: Twin | None, module: None) -> bool:
        if twin is None or self.twins[s.to] is not None or self.program.optimizer == "flat":
            return False
        for each in (twin.model, twin.plain):
            forget(each)  # what backward computed again
        found: list[nn.Module] = []
        if not self.attempt(lambda: found.append(copy.deepcopy(twin.model)), twin):
            return True
        plain = copy.deepcopy(twin.plain)
        new = Twin(s.to, twin.which, twin.sharding, twin.ranks)
        new.rtol, new.converted = twin.rtol, twin.converted
        new.begin(found[0], plain, self._optimizer(found[0]), self._optimizer(plain))
        new.trained = twin.trained
        new.synced = {**twin.synced, **twin.synced_outside}
        new.factors, new.partial = dict(twin.factors), set(twin.partial)
        self.twins[s.to] = new
        return True

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """A new name, the same on all ranks."""
        self.folders += 1
        owner = torch.tensor(os.getpid())  # that of rank 0
        dist.broadcast(owner, group=self.ctx.group, group_src=0)
        path = Path(tempfile.gettempdir(), f"fuzz-{owner}-{self.program.seed}-{self.folders}")
        if self.ctx.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier(self.ctx.group)
        yield path
        dist.barrier(self.ctx.group)
        if self.ctx.rank == 0:
            shutil.rmtree(path, ignore_errors=True)

    def _restart(self, s: programs.Restart, twin: Twin, module: None) -> bool:
        if not twin.is_idle or self.interrupted or twin.partial or not all(twin.synced.values()):
            return False
        if any(u.is_unsharded_by_user for u in twin.units) or twin.converted:
            return False
        new = Twin(twin.number, 1 - twin.which, self.program.shardings[1 - twin.which], self.ranks[1 - twin.which])
        new.rtol = twin.rtol
        plain, plain_opt = twin.plain, twin.plain_opt
        self._discard_losses(twin)
        plain_opt.zero_grad()
        with self._folder() as folder:
            path = folder / str(self._first(twin))
            if s.how == "job":
                folder.mkdir(exist_ok=True)
                job = {"model": twin.model, "optimizer": twin.opt, "step": 5}
                flatshard.save_checkpoint(path, job, process_group=twin.ranks.group)
            else:
                whole = saving.full_state_dict(twin.model), saving.optim_state_dict(twin.model, twin.opt, full=True)
            dist.barrier(self.ctx.group)
            model, plain, opt, plain_opt = self._make(new, plain, plain_opt)
            if s.how == "job":
                job = {"model": model, "optimizer": opt, "step": 0}
                loaded = flatshard.load_checkpoint(folder / "0", job, process_group=new.ranks.group)
                assert loaded["step"] == 5
            else:
                model.load_state_dict(whole[0])
                saving.load_optim_state_dict(model, opt, whole[1])
        for buffer in plain.buffers() if s.how == "job" else ():
            dist.broadcast(buffer.data, dist.get_global_rank(self.ctx.group, 0), self.ctx.group)
        new.begin(model, plain, opt, plain_opt)
        new.changes = twin.changes + 1
        self.twins[twin.number] = new
        return True

    def _reshardover(self, s: programs.ReshardOver, twin: Twin, module: None) -> bool:
        """The ranks of a program are all there, whatever its models are sharded over: all take part."""
        places = {ranks.size: ranks for ranks in self.everywhere}
        to = places.get({"all": self.ctx.world_size, "half": 2 * (self.ctx.world_size == 4), "alone": 1}[s.to])
        if to is None or self.interrupted or twin.undefined or twin.shown or twin.partial:
            return False
        sharding, where = twin.sharding.over(to)
        self._discard_losses(twin)
        if self.attempt(
            lambda: flatshard.elastic.reshard_over(twin.model, twin.opt, over=self.ctx.group, **where), twin
        ):
            twin.ranks, twin.sharding = to, sharding
            twin.changes += 1
            twin.sent = None
        return True

    @staticmethod
    def _there(twin: Twin) -> SimpleNamespace:
        """The ranks that a twin is sharded over, for ``everybody``."""
        return SimpleNamespace(group=twin.ranks.group, world_size=twin.ranks.size)

    def _first(self, twin: Twin) -> int:
        """The number, in the pool, of the first rank of those that this model is sharded over here."""
        return dist.get_global_rank(twin.ranks.group, 0)

    def _save(self, s: programs.Save, twin: Twin, module: nn.Module) -> bool:
        if (self.interrupted and s.kind == "sharded") or (twin.shown and s.kind == "sharded"):
            return False
        if s.kind == "optim":
            module = twin.model
        found: list[Any] = []
        verbs: dict[str, Callable[[], Any]] = {
            "full": lambda: saving.full_state_dict(module),
            "stream": lambda: dict(saving.iter_full_params(module)),
            "files": lambda: self._export(twin, module),
            "sharded": lambda: copy.deepcopy(module.state_dict()),
            "local": lambda: copy.deepcopy(saving.local_state_dict(module)),
            "optim": lambda: saving.optim_state_dict(twin.model, twin.opt, full=True),
        }
        if not self.attempt(lambda: found.append(verbs[s.kind]()), twin, module):
            return True
        state, path = found[0], twin.path(s.place) if s.kind != "optim" else ""
        plain_module = twin.plain.get_submodule(path)
        plain: Any = {name: value.detach().clone() for name, value in plain_module.state_dict().items()}
        if s.kind in ("full", "stream", "files"):
            expected = plain if s.kind == "full" else {n: p.detach() for n, p in plain_module.named_parameters()}
            buffers = dict(plain_module.named_buffers()) if s.kind == "files" else {}
            expected = {**expected, **{n: b for n, b in buffers.items() if n in state}}
            assert set(state) == set(expected), f"{sorted(state)}, expected {sorted(expected)}"
            for name, value in state.items():
                assert value.shape == expected[name].shape, f"{name}: {value.shape}, expected {expected[name].shape}"
                if name not in buffers:
                    close(value, expected[name], twin.rtol, f"{name} of what was saved")
        if s.kind == "optim":
            plain = copy.deepcopy(twin.plain_opt.state_dict())
            self._compare_optimizers(state, twin)
        self.saved[s.kind, path] = Saved(
            state, plain, twin.dtype, (twin.which, twin.ranks.size), twin.cuts(path), twin.trained
        )
        return True

    def _export(self, twin: Twin, module: nn.Module) -> dict[str, Tensor]:
        """What ``export_safetensors`` writes, read back."""
        state: dict[str, Tensor] = {}
        with self._folder() as folder:
            path = folder / str(self._first(twin))
            saving.export_safetensors(module, path)
            dist.barrier(self.ctx.group)
            for file in sorted(path.glob("*.safetensors")):
                state |= read_safetensors(file)
        return state

    @staticmethod
    def _compare_optimizers(state: dict[str, Any], twin: Twin) -> None:
        for name, p in twin.plain.named_parameters():
            expected, got = twin.plain_opt.state.get(p, {}), state["state"].get(name, {})
            if not p.numel():  # nobody can tell whether another rank has used it
                continue
            assert set(got) == set(expected), f"the optimizer's state of {name}: {set(got)}, expected {set(expected)}"
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    close(got[key], value, twin.rtol, f"{key} of {name}", largest(value))

    def _load(self, s: programs.Load, twin: Twin, module: nn.Module) -> bool:
        path = twin.path(s.place) if s.kind != "optim" else ""
        if (s.kind, path) not in self.saved or twin.shown or self.interrupted:
            return False
        saved = self.saved[s.kind, path]
        state, plain = saved.state, saved.plain
        if saved.dtype is not twin.dtype or saved.which != (twin.which, twin.ranks.size):
            return False
        self.loads_other_cuts = saved.trained != twin.trained and s.kind in ("sharded", "local")
        if self.loads_other_cuts and len({*everybody(self.ctx, saved.cuts == twin.cuts(path))}) > 1:
            return False  # refused on some ranks only
        verbs: dict[str, Callable[[], Any]] = {
            "full": lambda: module.load_state_dict(state),
            "sharded": lambda: module.load_state_dict(state),
            "local": lambda: saving.load_local_state_dict(module, state),
            "optim": lambda: saving.load_optim_state_dict(twin.model, twin.opt, state),
        }
        if not self.attempt(verbs[s.kind], twin, module):
            return True
        if s.kind == "optim":
            twin.plain_opt.load_state_dict(plain)
        else:
            twin.plain.get_submodule(path).load_state_dict(plain)
            twin.changes += 1
        return True

    # -- questions

    def _ask(self, s: programs.Ask, twin: Twin, module: nn.Module) -> bool:
        if self.interrupted or (not twin.is_idle and s.what not in ("describe", "num_parameters")):
            return False
        if self.program.optimizer == "flat" and s.what in ("get_total_norm", "gradient_statistics"):
            return False
        plain = twin.plain.get_submodule(twin.path(s.place))
        return self.attempt(lambda: getattr(self, f"_ask_{s.what}")(twin, module, plain), twin, module) or True

    def _ask_describe(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        found = flatshard.describe(module)
        own = [n for n in twin.names if twin.owner[n] in twin.units_of(module)]
        expected = sum(twin.plain.get_parameter(n).numel() for n in own)
        assert found.numel == expected, f"{found.numel} elements, expected {expected}"
        assert found.world_size == twin.ranks.size or twin.sharding.mesh
        assert str(found)

    def _ask_num_parameters(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        numels = [(p.numel(), p.requires_grad) for p in plain.parameters()]
        assert flatshard.tensors.num_parameters(module) == sum(n for n, _ in numels)
        assert flatshard.tensors.num_parameters(module, trainable_only=True) == sum(n for n, trains in numels if trains)

    def _ask_check_replicas(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        flatshard.debug.check_replicas(module)

    def _ask_get_total_norm(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        expected = nn.utils.get_total_norm(grads)
        close(flatshard.optim.get_total_norm(module).double(), expected.double(), twin.rtol, "the norm")

    def _ask_gradient_statistics(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        found = sorted(flatshard.optim.gradient_statistics(module).values(), key=lambda g: (g.norm, g.numel))
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        expected = sorted((g.norm().item(), g.numel(), largest(g)) for g in grads)
        got = torch.tensor([[g.norm, float(g.numel), g.max_abs] for g in found])
        close(got, torch.tensor(expected), max(twin.rtol, 1e-6), "statistics")

    def _ask_segment_reduce(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        params = [p for p in module.parameters() if p.is_floating_point()]
        found = flatshard.optim.segment_reduce([p.detach() for p in params], params)
        expected = [p.norm().item() for p in plain.parameters() if p.is_floating_point()]
        close(found.double(), torch.tensor(expected, dtype=torch.float64), max(twin.rtol, 1e-6), "norms")

    def _ask_iter_changed_params(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        """What a server has after each ask is what the model had."""
        if twin.sent is not None and twin.sent[0]._module is twin.model:
            sent, weights = twin.sent
            for plan, changes in everybody(self._there(twin), (sent.plan, list(saving.iter_changed_params(sent)))):
                for change in changes:
                    saving.apply_changed_params(weights, plan, change)
        else:
            names = {n for n, _ in twin.model.named_parameters(remove_duplicate=False)}
            weights = dict(saving.iter_full_params(twin.model, names=names))
            if twin.sharding.param_dtype is None:
                twin.sent = saving.SentParams(twin.model), weights
        for name, p in twin.plain.named_parameters():
            close(weights[name], p, twin.rtol, f"the server's {name}")

    def _ask_optim_state_dict(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        state = saving.optim_state_dict(twin.model, twin.opt)
        saving.load_optim_state_dict(twin.model, twin.opt, state)
        self._compare_optimizers(saving.optim_state_dict(twin.model, twin.opt, full=True), twin)

    def _ask_summed_gradients(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        infos = [flatshard.tensors.shard_info(p) for p in module.parameters()]
        if any(info is not None and info.never_cut for info in infos):
            return  # what is computed from such a gradient is its owner's
        if self.program.optimizer == "flat":
            return  # only the flat parameters have gradients
        got, expected = (
            sum(p.grad.pow(2).sum() for p in m.parameters() if p.grad is not None) for m in (module, plain)
        )
        close(torch.as_tensor(got).double(), torch.as_tensor(expected).double(), twin.rtol, "the sum")

    # -- the rest

    def _recover(self, s: programs.Recover, twin: Twin, module: None) -> None:
        flatshard.recover(twin.model)
        self.interrupted = False
        for each in self._alive:
            each.held.clear()

    def _reduce(self, s: programs.Reduce, twin: Twin, module: nn.Module) -> bool:
        if self._mixes_gradients():
            return False
        if self.attempt(lambda: flatshard.reduce_gradients(module), twin, module):
            twin.reduce_held(twin.units_of(module))
            self._adopt(twin)
        return True

    def _collect(self, s: programs.Collect, twin: None, module: None) -> None:
        gc.collect()


def run_program(
    ctx: Any, program: Program, halves: Any = None, device: torch.device = CPU
) -> tuple[list[str], Counter[str]]:
    """Returns what was refused, and counts of statements."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        return Machine(ctx, program, halves, device).main()


def run_seeds(ctx: Any, programs: list[Program]) -> list[Counter[str]]:
    """Several of them. Returns each one's counts."""
    halves = ctx.device_mesh((2, 2), ("replicate", "shard")) if ctx.world_size == 4 else None
    return [run_program(ctx, program, halves)[1] for program in programs]
