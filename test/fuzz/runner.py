"""Run statements on twins: deliberate exceptions, documented refusals, and a comparison after each statement."""

import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fuzz import programs
from fuzz.comparisons import Pair, all_close, close, flat, largest, part_of
from fuzz.programs import Bomb, Program, Statement
from fuzz.random_models import Env, during, forget
from fuzz.random_options import CPU, Ranks
from fuzz.twins import Loss, Saved, Twin
from parity import FLOOR
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import flatshard
from flatshard._composable.state import unit_of
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
    "state inside": r"are in a forward or in summon_full_params, where state_dict\(\) has full tensors",
    "state whole": r"are unsharded since unshard\(\): call flatshard.reshard\(module\) first",
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
    "does not move": r"redistribute: .*(several process groups|have reshard_after_forward=<|do(es)? not move|is transposed)",
    "move busy": r"redistribute: .*(are kept unsharded|hold gradients that are not reduced|is running)",
    "not used": r"redistribute: parameters got memory by to_empty, and have not been used yet",
    "cut otherwise": "is sharded otherwise than the model",
    "told past a unit": r"unit '.*' .*by a tensor that",
    "part for whole": r"a function of torch took this shard for the full parameter",
    "a part": r"is sharded: this rank has .*, and '.*' needs the full tensor\. It is full inside",
}
"""Patterns of documented errors, each with its cure."""


class Bang(ValueError):
    """A deliberate exception."""


class Interrupt(KeyboardInterrupt):
    """A deliberate exception like Ctrl-C: not an ``Exception``."""


ERRORS: dict[str, type[BaseException]] = {"ValueError": Bang, "KeyboardInterrupt": Interrupt}


class Fuse:
    """A function that raises once."""

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
    """Place the bomb in one of the modules inside ``module``."""
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
    """Run a forward; return its output, and the terms that it added to the loss."""
    env = dataclasses.replace(env, told=[])
    try:
        with during(env):
            out = call(x)
    finally:
        forget(module)
    return (out, env.told) if env.told else out


class Runner:
    """The state of a program on this rank. Subclasses have a method for each kind of statement."""

    def __init__(self, ctx: Any, program: Program, halves: Any = None, device: torch.device = CPU) -> None:
        self.ctx, self.program, self.device = ctx, program, device
        group = ctx.group if program.store == "TCPStore" else ctx.group_over(program.store)
        here = Ranks(group, ctx.rank, ctx.world_size, ctx.alone, halves, device)
        others = {"same": here, "alone": Ranks(ctx.alone, 0, 1, ctx.alone, device=device)}
        if halves is not None:
            half = halves.get_group("shard"), halves.get_local_rank("shard"), 2
            others["half"] = Ranks(*half, ctx.alone, device=device)
        self.noted: list[Pair] = []  # comparisons deferred to the end
        self.ranks, self.everywhere = (here, others[program.elsewhere]), list(others.values())
        self.twins: list[Twin | None] = [None] * 3
        self.losses: dict[str, Loss] = {}
        self.saved: dict[tuple[str, str], Saved] = {}
        self.loads_other_cuts = False  # load checkpoints whose shards may be cut differently
        self.outcomes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.interrupted = False  # a forward was interrupted, and nothing has cleaned up since
        self.models: list[set[int]] = []  # numbers of twins that a backward reached together while some held gradients
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
        """Shard a copy of ``plain`` as it is now; return the arguments of ``Twin.begin``."""
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
        # Before first use, modules show full parameters. Islands don't evaluate in full precision, so they are unsharded
        # explicitly.
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
        """Call a verb after initialisation and before any forward: it must find and leave shards."""
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
                if all(p.grad_dtype in (None, p.dtype) for p in model.parameters()):  # else torch refuses any model
                    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
                list(
                    model.parameters()
                )  # torch reads the last one by its name, as initialisers do, and skips frozen ones
        numels = [p.numel() for p in params.values()]
        for numel, (name, p) in zip(numels, params.items(), strict=True):
            part = part_of(p, plain.get_parameter(name))
            assert numel == part.numel(), f"{name} has {numel} elements after {verb}, expected {part.numel()}"
            close(flat(p, flatshard.tensors.shard_info(p)), part, 1e-6, f"this rank's part of {name}")

    def _optimizer(self, model: nn.Module) -> Any:
        """Make an optimizer with settings that don't amplify rounding; see parity.py."""
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
        """Return whether only rank 0 has the full parameters: then no verb that communicates for them may run."""
        return any(shown.options.get("rank0_only") for shown in twin.shown)

    def attempt(self, what: Callable[[], object], twin: Twin | None = None, module: nn.Module | None = None) -> bool:
        """Call ``what``. Return False if it was refused as documented."""
        try:
            what()
        except (RuntimeError, ValueError, NotImplementedError) as e:
            self._check_refusal(e, twin, module)
            return False
        return True

    def _check_refusal(self, error: BaseException, twin: Twin | None, module: nn.Module | None = None) -> str:
        """Raise if ``error`` is not documented, or its condition is not met."""
        text = str(error)
        found = next((key for key, pattern in REFUSALS.items() if re.search(pattern, text, re.DOTALL)), None)
        if found is None or isinstance(error, Bang):
            raise error
        self.outcomes.append(found)
        shown = any(t.shown for t in self._alive)
        by_user = twin is not None and any(u.is_unsharded_by_user for u in twin.units)
        # Gradients are held until a cleanup after a failed backward, or if no rank used the unit, as none knows that.
        dying = twin is not None and any(u.context.backward is not None for u in twin.units)
        holding = [] if twin is None else [i for i, u in enumerate(twin.units) if u.handle.gradients.withholds]
        unused = any(i not in map(twin.owner.get, twin.held) for i in holding)
        true: dict[str, Callable[[], object]] = {  # refusals with conditions beside their text
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
            "not used": lambda: (
                twin and twin.sharding.start in ("to_empty", "init") and self.program.model.has("island")
            ),
            "cut otherwise": lambda: self.loads_other_cuts,
            "copied unsharded": lambda: twin and (twin.shown or twin.kept or self.interrupted or by_user),
        }
        assert true.get(found, lambda: True)(), f"refused, though its condition is not met: {text}"
        return found

    def _uses(self, option: str) -> bool:
        return any(getattr(twin.sharding, option) for twin in self._alive)

    def check(self) -> None:
        """Check everything that needs no communication."""
        pairs: list[Pair] = []
        for twin in self._alive:
            grads = {name: largest(p.grad) for name, p in twin.whole.items()}
            least = FLOOR * max(grads.values())
            shows = {name: twin.seen(name) for name in twin.whole}
            list(
                twin.model.parameters()
            )  # before the first forward, the line above shows full parameters, as to an initialiser
            for name, plain in twin.whole.items():
                own, seen, shown = twin.own[name], shows[name], twin.scope(name)
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
                    is_full = where is seen and seen is not own
                    expected = plain.grad if is_full else part_of(own, plain.grad)
                    got = where.grad if is_full else flat(where.grad, info)
                    scale = max(grads[name], least, twin.rounding.scales.get(name, 0.0) if twin.rounding else 0.0)
                    pairs.append((got, expected, twin.rtol, f"the gradient of {what}", scale))
            if not (self.interrupted or twin.rounding):
                pairs += [
                    (mine, theirs, twin.rtol, f"buffer {name} of m{twin.number}", 0.0)
                    for (name, mine), theirs in zip(twin.model.named_buffers(), twin.plain.buffers(), strict=True)
                ]
        self.compare(pairs)

    def compare(self, pairs: list[Pair]) -> None:
        """Compare now; on an accelerator at the end, so that kernels may run as late as in a user's program."""
        if self.device is CPU:
            all_close(pairs)
        else:
            self.noted += [(got.detach().clone(), expected.detach().clone(), *more) for got, expected, *more in pairs]

    # -- shared by statements

    def _inputs(self, number: int, twin: Twin, is_root: bool, plain: nn.Module | None = None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        rows, model = PER_RANK * self.ctx.world_size, self.program.model
        if is_root and model.front != "none":
            batch = torch.randint(7, (rows, 3), generator=generator)
        else:
            batch = torch.randn(rows, model.width, generator=generator, dtype=torch.float64)
            batch = batch.to((plain or twin.plain).scale.dtype)
        return list(batch.split(rows // twin.ranks.size))

    def _adopt(self, *twins: Twin) -> None:
        """Let twins adopt their sharded model's values; see ``Twin.adopt``."""
        for twin in twins:
            if twin.rounding and not (twin.shown or twin.undefined or self.interrupted):
                self.check()
                twin.adopt()

    def _mixes_gradients(self) -> bool:
        """Return whether full gradients are shown: then new gradients are refused."""
        return any(s.options.get("with_grads") for twin in self._alive for s in twin.shown)

    def _discard_losses(self, twin: Twin) -> None:
        for name in [n for n, loss in self.losses.items() if loss.twin is twin]:
            del self.losses[name]

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """Return a new folder, the same on all ranks."""
        self.folders += 1
        owner = torch.tensor(os.getpid())  # rank 0's after the broadcast
        dist.broadcast(owner, group=self.ctx.group, group_src=0)
        path = Path(tempfile.gettempdir(), f"fuzz-{owner}-{self.program.seed}-{self.folders}")
        if self.ctx.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier(self.ctx.group)
        yield path
        dist.barrier(self.ctx.group)
        if self.ctx.rank == 0:
            shutil.rmtree(path, ignore_errors=True)

    @staticmethod
    def _there(twin: Twin) -> SimpleNamespace:
        """Return the ranks of a twin, as ``everybody`` takes them."""
        return SimpleNamespace(group=twin.ranks.group, world_size=twin.ranks.size)

    def _first(self, twin: Twin) -> int:
        """Return the pool's number of the twin's first rank."""
        return dist.get_global_rank(twin.ranks.group, 0)
