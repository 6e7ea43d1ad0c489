"""Runs a random program (fuzz_programs.py) on the ranks, and beside it on plain models in one process: the oracle.

Every rank keeps *twins*: a sharded model that trains on this rank's slice of each batch, and a plain one that runs the
forward of one slice after the other and trains on the mean of their losses. Each statement runs on the sharded model first,
then on the plain one; after each, this rank's parts of parameters and gradients, and whole parameters where they are shown,
are compared. That communicates nothing and touches no state of the library.

What a plain model has no verb for is written out here: what ``no_sync`` holds, by parameter; what ``summon_full_params``
brings back; when gradients are undefined (from an exception in a backward to ``zero_grad``).

A documented refusal (:data:`REFUSALS`) means that nothing happened. Some are allowed only where they are true:
see ``_check_refusal``. Statements with a meaning that nobody promises are left out, on both sides: ``p.data.mul_()`` where
the user keeps parameters unsharded, an optimizer's step inside ``summon_full_params``, a backward of what came before
``p.data = ...``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from clean import check_clean
from fuzz_programs import (
    WIDTH,
    Backward,
    Bomb,
    Change,
    Clip,
    Collect,
    Convert,
    Copy,
    Drop,
    Evaluate,
    Forward,
    Freeze,
    Keep,
    Load,
    NoSync,
    Program,
    Recover,
    Reduce,
    Reshard,
    Save,
    SetReshard,
    SetSync,
    Statement,
    Step,
    Summon,
    Toggle,
    Unshard,
    ZeroGrad,
)
from parity import in_texts
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import flatshard
from flatshard import BackwardPrefetch, ShardingStrategy
from flatshard._composable.state import unit_of, units_below, units_of_parameters

PER_RANK = 2
"""Rows of each batch that a rank trains on."""

REFUSALS = {
    "torch's own": r"needed for gradient computation has been modified by an inplace operation",
    "stepped": r"changed in place .*between its forward and its backward",
    "gradients inside": r"runs forward with gradients inside summon_full_params",
    "changed inside": r"were changed in place .* inside its forward, a registered method of it or summon_full_params",
    "replaced inside": r"were replaced .* inside keep_unsharded",
    "copied unsharded": r"cannot copy unit .* while its parameters are unsharded: copy outside",
    "reshard busy": r"reshard: .* are in use by a forward or by summon_full_params",
    "state inside": r"are in a forward or in summon_full_params, where state_dict\(\) has whole tensors",
    "state whole": r"are shown whole since unshard\(\): call flatshard.reshard\(module\) first",
    "held": r"units .* hold gradients that have not been averaged over all ranks",
    "rank0 writes": r"summon_full_params\(rank0_only=True\) needs writeback=False",
}
"""Errors that are right, each with a cure in its text."""


class Bang(ValueError):
    """Raised by a program on purpose."""


class Interrupt(KeyboardInterrupt):
    """The same, as Ctrl-C is: not an ``Exception``."""


ERRORS: dict[str, type[BaseException]] = {"ValueError": Bang, "KeyboardInterrupt": Interrupt}


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


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
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fuse()
        return grad, None


@dataclasses.dataclass
class Env:
    """What a forward is to do besides computing."""

    first: bool = True
    """Whether this is the forward of the batch's first slice, or the only one: it changes what a forward changes."""
    mode: int = 0
    left_out: tuple[int, ...] = ()
    bomb: Bomb | None = None
    fuse: Fuse | None = None

    def at(self, place: str, block: int, x: Tensor) -> Tensor:
        bomb, fuse = self.bomb, self.fuse
        if bomb is None or fuse is None or (bomb.place, bomb.block) != (place, block):
            return x
        if bomb.when == "forward":
            fuse()
        elif x.requires_grad and bomb.when == "hook":
            x.register_hook(fuse)
        elif x.requires_grad:
            x = _Raises.apply(x, fuse)
        return x


class Block(nn.Module):
    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.kind, self.index = kind, index
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.aux: Any = 0.0
        if kind == "scale":
            self.scale = nn.Parameter(torch.tensor(1.5))
        if kind == "partly":
            self.other = nn.Linear(WIDTH, WIDTH)
        if kind == "frozen":
            self.down.weight.requires_grad_(False)
        if kind == "nest":
            self.inner = Block("mlp", index)

    def forward(self, x: Tensor, env: Env) -> Tensor:
        match self.kind:
            case "checkpoint" | "reentrant":
                return x + checkpoint(self.compute, x, env, use_reentrant=self.kind == "reentrant")
            case "twice":
                return self.compute(torch.tanh(self.compute(x, env)), env)
            case "nest":
                return x + self.inner(self.compute(x, env), env)
            case "partly" if env.mode == 1:
                return x + self.other(x)
            case "change" if env.first:
                with torch.no_grad():
                    self.up.weight.mul_(0.9)
        return x + self.compute(x, env)

    def compute(self, x: Tensor, env: Env) -> Tensor:
        hidden = env.at("inside", self.index, torch.tanh(self.up(x)))
        if self.kind == "stash":
            self.aux = hidden
        if self.kind == "scale":
            hidden = hidden * self.scale
        return self.down(hidden)


class Net(nn.Module):
    def __init__(self, blocks: tuple[str, ...], tie: tuple[int, int] | None) -> None:
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, i) for i, kind in enumerate(blocks))
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.head = nn.Linear(WIDTH, 2)
        if tie is not None:
            self.blocks[tie[1]].up.weight = self.blocks[tie[0]].up.weight

    def forward(self, x: Tensor, env: Env) -> Tensor:
        x = self.front(x) * self.scale
        for i, block in enumerate(self.blocks):
            if i not in env.left_out:
                x = block(x, env)
            elif units_below(block):
                x = flatshard.skip(block, x)
            x = env.at("after", i, x)
            if isinstance(block.aux, Tensor) and i not in env.left_out:
                x = x + block.aux.mean()
        return self.head(x)


def run(module: nn.Module, x: Tensor, env: Env) -> Tensor:
    """A forward of a model or a block; what it stashed is forgotten then, as a copy of the model would not take it."""
    try:
        return module(x, env)
    finally:
        for m in module.modules():
            if isinstance(m, Block):
                m.aux = 0.0


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

    def __init__(self, number: int, model: nn.Module, plain: nn.Module, optimizers: tuple[Any, Any]) -> None:
        self.number = number
        self.model, self.plain = model, plain
        self.opt, self.plain_opt = optimizers
        self.own = dict(model.named_parameters())
        self.names = list(self.own)
        units = flatshard.describe(model).units
        self.owner = {fqn: unit.fqn for unit in units for flat in unit.flats for fqn in flat.fqns}
        self.synced = {unit.fqn: True for unit in units}
        self.synced_outside: dict[str, bool] = {}  # of those inside no_sync
        self.held: dict[str, Tensor] = {}
        self.undefined = False  # gradients, since an exception in a backward
        self.changes = 0  # of parameters' values
        self.unsharded_at = -1  # `changes` then
        self.shown: list[Shown] = []
        self.kept = 0
        self.rtol = 1e-9
        self.converted = False

    @property
    def dtype(self) -> torch.dtype:
        return self.plain.scale.dtype

    def module(self, path: str) -> nn.Module | None:
        """Of the sharded model; None: there is no such unit."""
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            return None
        return module if unit_of(module) is not None else None

    def units(self, path: str) -> list[str]:
        return [fqn for fqn in self.synced if not path or fqn == path or fqn.startswith(f"{path}.")]

    def seen(self, name: str) -> nn.Parameter:
        """What is registered under that name in the sharded model."""
        return self.model.get_parameter(name)

    @property
    def shows_own(self) -> bool:
        return all(self.seen(name) is own for name, own in self.own.items())

    def scope(self, name: str) -> Shown | None:
        """The innermost ``summon_full_params`` that shows the parameter."""
        return next((s for s in reversed(self.shown) if name in s.scope), None)

    def shows_gradients(self, name: str) -> bool:
        return any(s.options.get("with_grads") and name in s.scope for s in self.shown)

    def reduce_held(self, units: list[str]) -> None:
        """Of frozen parameters it is dropped, as torch drops what comes to them in backward."""
        for name in [n for n in self.held if self.owner[n] in units]:
            grad, param = self.held.pop(name), self.plain.get_parameter(name)
            if param.requires_grad:
                param.grad = grad if param.grad is None else param.grad + grad


@dataclasses.dataclass
class Loss:
    twin: Twin
    sharded: Tensor
    plain: Tensor
    changes: int
    """The twin's, when its forward ran."""


def part_of(own: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's part of what is in whole in one process."""
    info = flatshard.tensors.shard_info(own)
    assert info is not None
    if whole.stride() == info.stride and whole.is_contiguous():
        return whole.detach().view(-1)[info.start : info.stop]
    dense = torch.empty_strided(whole.shape, info.stride, dtype=whole.dtype).copy_(whole.detach())
    return dense.as_strided((dense.numel(),), (1,))[info.start : info.stop]


Pair = tuple[Tensor, Tensor, float, str, Tensor | None]
"""What was found, what was expected, and the rest of :func:`close`'s arguments."""


def all_close(pairs: list[Pair]) -> None:
    """:func:`close` for each, after a look at all of them at once, in which nearly always all are much closer."""
    if not pairs:
        return
    alike = all(got.dtype == expected.dtype and got.numel() == expected.numel() for got, expected, *_ in pairs)
    if alike:
        found, wanted = (torch.cat([pair[i].detach().reshape(-1) for pair in pairs]) for i in range(2))
        if not found.numel() or (found - wanted).abs().max().item() <= LEAST_SCALE * min(pair[2] for pair in pairs):
            return
    for pair in pairs:
        close(*pair)


LEAST_SCALE = 1e-2


def close(got: Tensor, expected: Tensor, rtol: float, what: str, whole: Tensor | None = None) -> None:
    """``whole``: what ``expected`` is a part of, whose magnitude counts."""
    got, expected = got.detach(), expected.detach()
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    got, expected = got.reshape(-1), expected.reshape(-1)
    assert got.shape == expected.shape, f"{what}: {got.numel()} elements, expected {expected.numel()}"
    if not got.numel():
        return
    scale = max((expected if whole is None else whole).detach().abs().max().item(), LEAST_SCALE)
    error = (got - expected).abs().max().item() / scale
    assert error <= rtol, f"{what}: {got[:4].tolist()}, expected {expected[:4].tolist()} ({error:.2g} relative)"


# ---------------------------------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------------------------------


class Machine:
    """Runs one program on this rank."""

    def __init__(self, ctx: Any, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.twins: list[Twin | None] = [None] * 3
        self.losses: dict[str, Loss] = {}
        self.saved: dict[str, tuple[Any, Any, torch.dtype]] = {}
        self.outcomes: list[str] = []
        self.interrupted = False  # a forward, and nothing has cleaned up since
        self.errors: list[BaseException] = []  # raised at the end of a body under way
        for number in range(program.models):
            self.twins[number] = self._make(number)

    def _make(self, number: int) -> Twin:
        program, twins = self.program, []
        optimizers = [None, None]
        for _ in range(2):
            torch.manual_seed(100 + number)
            twins.append(Net(program.blocks, program.tie).double())
        model, plain = twins
        optimizers[1] = self._optimizer(plain)
        if program.optimizer_first:
            optimizers[0] = self._optimizer(model)
        units = [model.get_submodule(path) for path in program.paths if path]
        flatshard.fully_shard(
            model,
            policy=flatshard.CustomPolicy(lambda m: m in units) if units else None,
            process_group=self.ctx.group,
            strategy=ShardingStrategy[program.strategy],
            reshard_after_forward=program.reshard_after_forward,
            backward_prefetch=program.backward_prefetch and BackwardPrefetch[program.backward_prefetch],
        )
        if not program.optimizer_first:
            optimizers[0] = self._optimizer(model)
        return Twin(number, model, plain, (optimizers[0], optimizers[1]))

    def _optimizer(self, model: nn.Module) -> Any:
        if self.program.seed % 2:
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-3)

    # -- running

    def main(self) -> list[str]:
        """Run all, then see that nothing is left of it, and that a plain step is right."""
        self.run(self.program.body)
        self.ctx.note("the end")
        self.losses.clear()
        for twin in self._alive:
            module = twin.model
            flatshard.recover(module)
            flatshard.reshard(module)
            twin.held.clear()
        self.interrupted = False
        for twin in self._alive:
            check_clean(twin.model)
        for twin in self._alive:
            self.do(SetSync(twin.number, "", True))
            self.do(ZeroGrad(twin.number, True))
            self.do(Forward("last", twin.number, "", 1000))
            self.do(Backward(("last",)))
            self.do(Step(twin.number))
            self.do(Evaluate(twin.number, "", 1001, "no_grad"))
            self.do(Save(twin.number, "full"))
        texts = in_texts(self.ctx, "; ".join(self.outcomes))
        assert len(set(texts)) == 1, f"ranks were refused different things: {texts}"
        return self.outcomes

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
            if twin is None and not isinstance(statement, Copy):
                return
        if twin is not None and self.rank0_only(twin):
            return
        module = None
        if twin is not None and hasattr(statement, "path"):
            module = twin.module(statement.path)
            if module is None:
                return
        try:
            getattr(self, f"_{type(statement).__name__.lower()}")(statement, twin, module)
            self.check()
        except AssertionError as e:
            if not getattr(e, "is_told", False):
                e.is_told = True  # type: ignore[attr-defined]
                e.add_note(f"at: {next(statement.lines())}")
            raise

    @staticmethod
    def rank0_only(twin: Twin) -> bool:
        """Whether only rank 0 has whole parameters of it: then what communicates for it is for no rank to do."""
        return any(shown.options.get("rank0_only") for shown in twin.shown)

    def attempt(self, what: Callable[[], object], twin: Twin | None = None) -> bool:
        """Whether it was done; False: refused, as is documented."""
        try:
            what()
        except (RuntimeError, ValueError, NotImplementedError) as e:
            self._check_refusal(e, twin)
            return False
        return True

    def _check_refusal(self, error: BaseException, twin: Twin | None) -> str:
        """That ``error`` is documented, and true."""
        text = str(error)
        found = next((key for key, pattern in REFUSALS.items() if re.search(pattern, text, re.DOTALL)), None)
        if found is None or isinstance(error, Bang):
            raise error
        self.outcomes.append(found)
        if found == "state inside" or found == "reshard busy" or found == "gradients inside":
            assert any(t.shown for t in self._alive) or self.interrupted, f"not inside summon_full_params: {text}"
        if found == "changed inside":
            assert twin, text
            assert any(t.shown for t in self._alive), f"not inside summon_full_params: {text}"
            assert twin.changes, f"nothing was changed: {text}"
        if found == "state whole":
            assert twin, text
            assert not twin.shows_own, f"nothing is shown whole: {text}"
        if found == "held":
            assert twin, text
            assert twin.held or twin.synced_outside, f"nothing is held: {text}"
        if found == "replaced inside":
            assert any(t.kept for t in self._alive), f"not inside keep_unsharded: {text}"
        if found == "copied unsharded":
            assert twin, text
            busy = (
                twin.shown
                or twin.kept
                or self.interrupted
                or any(u.is_unsharded_by_user for u in units_below(twin.model))
            )
            assert busy, f"nothing of the user's is unsharded: {text}"
        return found

    def check(self) -> None:
        """Everything that can be compared without communication."""
        pairs: list[Pair] = []
        for twin in self._alive:
            for name, plain in twin.plain.named_parameters():
                own, seen, shown = twin.own[name], twin.seen(name), twin.scope(name)
                what = f"{name} of m{twin.number}"
                if shown is None:
                    pairs.append((own, part_of(own, plain), twin.rtol, f"this rank's part of {what}", None))
                if seen is not own and not self.interrupted and (shown or twin.unsharded_at == twin.changes):
                    pairs.append((seen, plain, twin.rtol, f"the whole {what}", None))
                assert own.requires_grad == plain.requires_grad, f"{what}: requires_grad {own.requires_grad}"
                if twin.undefined:
                    continue
                where = own
                if twin.shows_gradients(name):
                    if seen is own or self.interrupted or self.rank0_only(twin):
                        continue
                    where = seen
                there = where.grad is not None
                assert there == (plain.grad is not None), f"{what} has {'a' if there else 'no'} gradient"
                if there:
                    expected = plain.grad if where is seen and seen is not own else part_of(own, plain.grad)
                    pairs.append((where.grad, expected, twin.rtol, f"the gradient of {what}", plain.grad))
        all_close(pairs)

    # -- forwards

    def _inputs(self, number: int, twin: Twin) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(PER_RANK * self.ctx.world_size, WIDTH, generator=generator, dtype=torch.float64)
        return list(batch.to(twin.dtype).split(PER_RANK))

    def _run_forward(
        self, statement: Forward | Evaluate, twin: Twin, module: nn.Module
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The outputs of this rank's slice and of all slices. None: a bomb went off, or it was refused."""
        bomb = statement.bomb
        changing = [i for i, kind in enumerate(self.program.blocks) if kind == "change"]
        # A unit with a reentrant checkpoint inside may not be skipped in one forward and run in another of one backward.
        kept = [i for i, kind in enumerate(self.program.blocks) if kind in ("change", "reentrant")]
        if changing and twin.shown and isinstance(statement, Forward):
            return None  # it may be refused at a later unit, when some have changed already
        if bomb and changing and bomb.error == "KeyboardInterrupt":
            bomb = None  # what the forward changed before it is lost, or not
        fuse = Fuse(bomb.error) if bomb else None
        mode = getattr(statement, "mode", 0)
        lefts = [
            tuple(block for r, block in getattr(statement, "left_out", ()) if r == rank and block not in kept)
            for rank in range(self.ctx.world_size)
        ]
        xs = self._inputs(statement.inputs, twin)
        rank, out = self.ctx.rank, []
        env = Env(True, mode, lefts[rank], bomb, fuse)
        plain_module = twin.plain.get_submodule(statement.path)
        try:
            if not self.attempt(lambda: out.append(run(module, xs[rank], env)), twin):
                return None
            self.interrupted = False
        except (Bang, Interrupt):
            assert fuse is not None
            assert fuse.blown
            self.interrupted = isinstance(bomb, Bomb) and bomb.error == "KeyboardInterrupt"
            with contextlib.suppress(Bang, Interrupt):
                run(plain_module, xs[0], Env(True, mode, lefts[0], bomb, Fuse(bomb.error) if bomb else None))
            self._note_change(twin, bool(changing))
            return None
        outs = [run(plain_module, x, Env(r == 0, mode, lefts[r])) for r, x in enumerate(xs)]
        self._note_change(twin, bool(changing))
        close(out[0], outs[rank], twin.rtol, "the output")
        return out[0], outs

    @staticmethod
    def _note_change(twin: Twin, changed: bool) -> None:
        if changed:
            twin.changes += 1
            twin.unsharded_at = -1
            for shown in twin.shown:
                shown.changed = True

    def _forward(self, s: Forward, twin: Twin, module: nn.Module) -> None:
        self.losses.pop(s.loss, None)
        found = self._run_forward(s, twin, module)
        if found is None:
            return
        out, outs = found
        assert s.left_out or out.requires_grad == outs[0].requires_grad
        losses = [o.square().mean() for o in outs]
        if all(loss.requires_grad for loss in losses):
            self.losses[s.loss] = Loss(twin, out.square().mean(), sum(losses) / len(losses), twin.changes)

    def _evaluate(self, s: Evaluate, twin: Twin, module: nn.Module) -> None:
        with getattr(torch, s.guard)():
            self._run_forward(s, twin, module)

    # -- backwards

    def _backward(self, s: Backward, twin: None, module: None) -> None:
        losses = [self.losses[name] for name in dict.fromkeys(s.losses) if name in self.losses]
        if not losses or any(self.rank0_only(loss.twin) for loss in losses) or self._mixes_gradients():
            return
        hook, fuse, involved = None, None, {id(loss.twin): loss.twin for loss in losses}
        if s.hook and (hooked := self.twins[s.hook[0]]) and (place := hooked.module(s.hook[1])):
            fuse = Fuse(s.hook[2])
            hook = flatshard.optim.register_gradients_reduced_hook(place, fuse)
            involved[id(hooked)] = hooked
        stale = any(loss.changes != loss.twin.changes for loss in losses)
        try:
            sum(loss.sharded for loss in losses).backward(retain_graph=s.retain)
            failed = False
        except (Bang, Interrupt):
            failed = True
        except CheckpointError:  # as below: where a later forward has made the unit follow
            failed = True
        except RuntimeError as e:
            failed = True
            found = self._check_refusal(e, None)
            if found not in ("stepped", "torch's own") or not stale:
                raise AssertionError(f"nothing was changed since forward: {e}") from e
        finally:
            if hook is not None:
                hook.remove()
        if failed or not s.retain:
            for name in s.losses:
                self.losses.pop(name, None)
        if failed:
            self._fail_backward(involved)
            return
        try:
            self._run_plain_backward(losses, s.retain)
        except (
            CheckpointError
        ):  # frozen since forward: in one process the recomputation follows that, which nobody needs
            self._fail_backward(involved)
        except RuntimeError as e:
            if any(loss.twin.shown for loss in losses):  # what was changed may be copies, which the graph does not hold
                self._fail_backward(involved)
                return
            raise AssertionError(f"torch refuses this backward in one process, flatshard did not: {e}") from None

    def _fail_backward(self, involved: dict[int, Twin]) -> None:
        for twin in involved.values():
            twin.undefined = True
        for twin in self._alive:
            twin.held.clear()

    def _mixes_gradients(self) -> bool:
        """Then new gradients are refused."""
        return any(s.options.get("with_grads") for twin in self._alive for s in twin.shown)

    def _run_plain_backward(self, losses: list[Loss], retain: bool) -> None:
        before = [{n: p.grad for n, p in twin.plain.named_parameters()} for twin in self._alive]
        for twin in self._alive:
            for p in twin.plain.parameters():
                p.grad = None
        brought = False
        found: list[dict[str, Tensor | None]] = []
        try:
            sum(loss.plain for loss in losses).backward(retain_graph=retain)
        finally:
            for twin, old in zip(self._alive, before, strict=True):
                found.append({name: p.grad for name, p in twin.plain.named_parameters()})
                for name, p in twin.plain.named_parameters():
                    p.grad = old[name]
        for twin, of_twin in zip(self._alive, found, strict=True):
            for name, p in twin.plain.named_parameters():
                new = of_twin[name]
                if new is None:
                    continue
                brought = True
                if self.ctx.world_size == 1:
                    p.grad = new if p.grad is None else p.grad + new
                else:
                    twin.held[name] = twin.held[name] + new if name in twin.held else new
        for twin in self._alive if brought else ():
            twin.reduce_held([unit for unit, synced in twin.synced.items() if synced])

    def _drop(self, s: Drop, twin: None, module: None) -> None:
        self.losses.pop(s.loss, None)

    def _discard_losses(self, twin: Twin) -> None:
        for name in [n for n, loss in self.losses.items() if loss.twin is twin]:
            del self.losses[name]

    # -- the optimizer

    def _step(self, s: Step, twin: Twin, module: None) -> None:
        if twin.undefined or twin.shown:
            return
        if self.attempt(twin.opt.step, twin):
            twin.plain_opt.step()
            twin.changes += 1

    def _zerograd(self, s: ZeroGrad, twin: Twin, module: None) -> None:
        if any(shown.options.get("with_grads") for shown in twin.shown):
            return
        for optimizer in (twin.opt, twin.plain_opt):
            optimizer.zero_grad(set_to_none=s.to_none or twin.undefined)
        twin.undefined = False

    def _clip(self, s: Clip, twin: Twin, module: None) -> None:
        if twin.undefined or not twin.shows_own:
            return
        found: list[Tensor] = []
        if self.attempt(lambda: found.append(flatshard.clip_grad_norm_(twin.model, 0.1)), twin):
            expected = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.1)
            close(found[0].double(), expected.double(), twin.rtol, "the norm")

    # -- blocks

    def _within(self, s: Any, context: Any, enter: Callable[[], None], leave: Callable[[bool], None]) -> None:
        """Run the body inside. ``leave`` is told whether it ended well; neither is called where entering is refused."""
        error = ERRORS[s.raises]("at the end of the body") if s.raises else None
        if not self.attempt(context.__enter__):
            return
        enter()
        try:
            self.check()
            self.run(s.body)
            if error is not None:
                raise error
        except (Bang, Interrupt) as e:
            if e is not error or context.__exit__(type(e), e, e.__traceback__):
                raise
        except BaseException as e:  # ours, of a comparison: leave the others to the timeout
            context.__exit__(type(e), e, e.__traceback__)
            raise
        else:
            context.__exit__(None, None, None)
        leave(error is None)

    def _nosync(self, s: NoSync, twin: Twin, module: nn.Module) -> None:
        units = twin.units(s.path)
        before = {u: twin.synced[u] for u in units}
        outside = dict(twin.synced_outside)

        def enter() -> None:
            for unit in units:
                twin.synced_outside.setdefault(unit, twin.synced[unit])
                twin.synced[unit] = False

        def leave(well: bool) -> None:
            twin.synced.update(before)
            twin.synced_outside = outside

        self._within(s, flatshard.no_sync(module), enter, leave)

    def _keep(self, s: Keep, twin: Twin, module: nn.Module) -> None:

        def count(by: int) -> None:
            twin.kept += by

        self._within(s, flatshard.keep_unsharded(module), lambda: count(1), lambda well: count(-1))

    def _summon(self, s: Summon, twin: Twin, module: nn.Module) -> None:
        options = dict(s.options)
        shown = Shown(set(), options)
        units = {unit.fqn for unit in units_of_parameters(module, options.get("recurse", True))}

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

        self._within(s, flatshard.summon_full_params(module, **options), enter, leave)

    # -- parameters

    def _unshard(self, s: Unshard, twin: Twin, module: nn.Module) -> None:
        if self.interrupted:
            return
        fresh = (
            twin.shows_own and all(u.handle.is_sharded for u in units_below(twin.model)) and not twin.kept
        )  # else what is whole already stays as it is
        if self.attempt(lambda: flatshard.unshard(module, recurse=s.recurse, async_op=not s.wait), twin):
            twin.unsharded_at = twin.changes if fresh else -1

    def _reshard(self, s: Reshard, twin: Twin, module: nn.Module) -> None:
        self.attempt(lambda: flatshard.reshard(module), twin)

    def _setreshard(self, s: SetReshard, twin: Twin, module: nn.Module) -> None:
        flatshard.configure(module, reshard_after_forward=s.value)

    def _setsync(self, s: SetSync, twin: Twin, module: nn.Module) -> None:
        flatshard.configure(module, gradient_sync=s.value)
        twin.synced.update(dict.fromkeys(twin.units(s.path), s.value))

    def _toggle(self, s: Toggle, twin: Twin, module: None) -> None:
        name = twin.names[s.param % len(twin.names)]
        twin.own[name].requires_grad_(s.value)
        twin.plain.get_parameter(name).requires_grad_(s.value)

    def _freeze(self, s: Freeze, twin: Twin, module: nn.Module) -> None:
        if twin.shows_own:
            module.requires_grad_(s.value)
            twin.plain.get_submodule(s.path).requires_grad_(s.value)

    def _change(self, s: Change, twin: Twin, module: None) -> None:
        name = twin.names[s.param % len(twin.names)]
        own, seen, shown = twin.own[name], twin.seen(name), twin.scope(name)
        plain = twin.plain.get_parameter(name)
        if self.interrupted:
            return
        if s.how in ("grad", "no_grad"):
            shows = twin.shows_gradients(name)
            if twin.undefined or (seen is not own and not shows):
                return
            for p in (seen if shows else own, plain):
                if s.how == "no_grad":
                    p.grad = None
                elif p.grad is not None:
                    p.grad.mul_(0.5)
            if shows and shown:
                shown.changed = True
            return
        if (seen is own) == (shown is not None):
            return  # unsharded by the user: what becomes of a change is not said
        unnoticed = shown is None and s.how == "mul_data"
        if unnoticed and (twin.kept or any(u.is_unsharded_by_user for u in units_below(twin.model))):
            return
        for p in (seen, plain):
            with torch.no_grad():
                match s.how:
                    case "set_data":
                        p.data = 0.5 * p.data + 0.25
                    case "mul_data":
                        p.data.mul_(0.5)
                    case "mul":
                        p.mul_(0.5)
                    case "detach":
                        p.detach().mul_(0.5)
                    case "copy":
                        p.copy_(0.5 * p + 0.25)
        if s.how.endswith("data"):
            self._discard_losses(twin)
        twin.changes += 1
        if shown is not None:
            shown.changed = True

    def _convert(self, s: Convert, twin: Twin, module: None) -> None:
        if not twin.shows_own or twin.kept:
            return
        dtype = getattr(torch, s.dtype)
        if dtype is not twin.dtype:
            self._discard_losses(twin)
        if dtype is not twin.dtype:
            twin.rtol = 1e-3
            twin.converted = True
            twin.changes += 1
        twin.model.to(dtype)
        twin.plain.to(dtype)
        twin.held = {name: grad.to(dtype) for name, grad in twin.held.items()}
        twin.opt, twin.plain_opt = self._optimizer(twin.model), self._optimizer(twin.plain)

    # -- copies and files

    def _copy(self, s: Copy, twin: Twin | None, module: None) -> None:
        if twin is None or self.twins[s.to] is not None:
            return
        found: list[nn.Module] = []
        if not self.attempt(lambda: found.append(copy.deepcopy(twin.model)), twin):
            return
        plain = copy.deepcopy(twin.plain)
        new = Twin(s.to, found[0], plain, (self._optimizer(found[0]), self._optimizer(plain)))
        new.synced = {**twin.synced, **twin.synced_outside}
        new.rtol, new.converted = twin.rtol, twin.converted
        self.twins[s.to] = new

    def _save(self, s: Save, twin: Twin, module: None) -> None:
        if self.interrupted and s.kind == "sharded":
            return
        found: list[Any] = []
        verbs: dict[str, Callable[[], Any]] = {
            "full": lambda: flatshard.checkpoint.full_state_dict(twin.model),
            "stream": lambda: dict(flatshard.checkpoint.iter_full_params(twin.model)),
            "sharded": lambda: copy.deepcopy(twin.model.state_dict()),
            "local": lambda: copy.deepcopy(flatshard.checkpoint.local_state_dict(twin.model)),
            "optim": lambda: flatshard.checkpoint.optim_state_dict(twin.model, twin.opt, full=True),
        }
        if twin.shown and s.kind == "sharded":
            return
        if not self.attempt(lambda: found.append(verbs[s.kind]()), twin):
            return
        state = found[0]
        plain: Any = {name: value.detach().clone() for name, value in twin.plain.state_dict().items()}
        if s.kind in ("full", "stream"):
            params = dict(twin.plain.named_parameters())
            assert set(state) == set(plain if s.kind == "full" else params)
            for name, value in state.items():
                close(value, plain[name], twin.rtol, f"{name} of what was saved")
        if s.kind == "optim":
            plain = copy.deepcopy(twin.plain_opt.state_dict())
            self._compare_optimizers(state, twin)
        self.saved[s.kind] = (state, plain, twin.dtype)

    @staticmethod
    def _compare_optimizers(state: dict[str, Any], twin: Twin) -> None:
        for name, p in twin.plain.named_parameters():
            expected, got = twin.plain_opt.state.get(p, {}), state["state"].get(name, {})
            assert set(got) == set(expected), f"the optimizer's state of {name}: {set(got)}, expected {set(expected)}"
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    close(got[key], value, twin.rtol, f"{key} of {name}")

    def _load(self, s: Load, twin: Twin, module: None) -> None:
        if s.kind not in self.saved or twin.shown or self.interrupted:
            return
        state, plain, dtype = self.saved[s.kind]
        if dtype is not twin.dtype:
            return
        verbs: dict[str, Callable[[], Any]] = {
            "full": lambda: twin.model.load_state_dict(state),
            "sharded": lambda: twin.model.load_state_dict(state),
            "local": lambda: flatshard.checkpoint.load_local_state_dict(twin.model, state),
            "optim": lambda: flatshard.checkpoint.load_optim_state_dict(twin.model, twin.opt, state),
        }
        if not self.attempt(verbs[s.kind], twin):
            return
        if s.kind == "optim":
            twin.plain_opt.load_state_dict(plain)
        else:
            twin.plain.load_state_dict(plain)
            twin.changes += 1

    # -- the rest

    def _recover(self, s: Recover, twin: Twin, module: None) -> None:
        flatshard.recover(twin.model)
        self.interrupted = False
        for each in self._alive:
            each.held.clear()

    def _reduce(self, s: Reduce, twin: Twin, module: nn.Module) -> None:
        if self._mixes_gradients():
            return
        flatshard.reduce_gradients(module)
        twin.reduce_held(twin.units(s.path))

    def _collect(self, s: Collect, twin: None, module: None) -> None:
        gc.collect()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_program(ctx: Any, program: Program) -> list[str]:
    """Returns what was refused."""
    with _quietly():
        return Machine(ctx, program).main()
