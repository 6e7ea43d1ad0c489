"""Statements of a training step: forward, backward, gradients, and the optimizer."""

import contextlib
import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from fuzz import programs
from fuzz.comparisons import close
from fuzz.random_models import Checkpoint, Env, Island
from fuzz.random_options import CPU
from fuzz.runner import Bang, Fuse, Interrupt, Runner, placed, run
from fuzz.twins import Loss, Twin, recomputed_and_skipped
from parity import everybody, mean_square
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

import flatshard
from flatshard._composable.find import units_below
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import unit_of
from flatshard._handle.tensors.shard import OwnedTensor

LONE = "a term that some ranks do not have, in"
"""Prefix of the note of a backward with a term that some ranks lack. It is right, or ends the program in an
``OutOfStepError`` or ``CollectiveError``. If ranks lack terms of each other, it may also end in the error that they asked for
different values."""


TWO = ("dist", "torch.dist", "F.mse_loss", "F.l1_loss", "F.smooth_l1_loss")
"""Terms that are functions of two tensors."""


def _penalty_of(p: Tensor, s: programs.Penalty) -> Tensor:
    q = eval(programs.ANCHORS[s.anchor], {"p": p})
    return eval(programs.PENALTIES[s.how], {"p": p, "q": q, "torch": torch, "F": F})  # type: ignore[no-any-return]


def has_leaves(t: Tensor) -> bool:
    """Return whether a backward of ``t`` reaches a parameter."""
    todo, seen = [t.grad_fn], set()
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return False


class Training(Runner):
    """Run forwards, backwards and steps."""

    # -- forwards

    def _run_forward(
        self, statement: programs.Forward | programs.Evaluate, twin: Twin, module: nn.Module
    ) -> tuple[Any, list[Any], list[nn.Module]] | None:
        """Run a forward on this rank's slice and on all slices; return both outputs and the models that computed the latter,
        or None if it raised."""
        model, bomb = self.program.model, statement.bomb
        path = twin.path(statement.place)
        assert path is not None
        if not self._runs_alone(twin, path, module):
            return None
        changes = model.has("change") and (not path or "'change'" in repr(model.tree))
        if twin.shown and twin.sharding.mixed:
            return None  # unsharded parameters have their own dtype
        if self.device is not CPU and any(shown.options.get("offload_to_cpu") for shown in twin.shown):
            return None  # unsharded parameters are on the CPU
        if changes and (
            (twin.kept and twin.sharding.static_buffers) or (twin.shown and isinstance(statement, programs.Forward))
        ):
            return None  # a later unit may refuse it when some have changed already
        if bomb and model.has("change") and bomb.error == "KeyboardInterrupt":
            bomb = None  # changes by the forward before the exception may be lost
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
                                mine.data.copy_(theirs)  # without a version bump, as below
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
                for name, value in own.items():  # each rank has its own buffers
                    twin.plain.get_buffer(name).data.copy_(value)  # without a version bump, as BatchNorm does
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
            self.losses[s.loss] = Loss(
                twin, losses[0], losses[1:], copies, twin.changes, bool(s.left_out), bool(s.bomb), tells
            )
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
        if 0 < plain.detach().abs().max() < 1e-12:
            return False  # rounding, of which a norm has any gradient
        info = flatshard.tensors.shard_info(own)
        if info is None or ((info.by_rows or info.never_cut) and ("std" in s.how or s.how in TWO)):
            return False  # the refused value is this rank's
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
        if None in factors and isinstance(found[0], OwnedTensor):
            # An addition sends the owner's number to all ranks, so all need it: as the error says, times zero.
            factors = [factor or 0.0 for factor in factors]
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
            return False  # the oracle's copies would recompute from the values of their forward
        if stale and any(loss.penalties for loss in losses):
            return False  # refused if the gradient of a term needs the parameter's value
        if any(loss.is_lone for loss in losses) and (s.hook or any(loss.fails for loss in losses)):
            return False  # ranks with the term wait for those that have failed
        if any(loss.is_lone and not all(loss.twin.synced.values()) for loss in losses):
            return False  # ranks without the term don't wait: they continue to the next collective of all ranks
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
            assert not any(loss.is_local for loss in losses), "backward accepted a term that is this rank's value"
        except (Bang, Interrupt):
            failed = True
        except CheckpointError:  # as below: a later forward has changed the unit's state
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
            reached |= fuse is not None and fuse.blown  # a backward is over when its last reductions end
            self._fail_backward(involved, reached)
            return True
        try:
            self._run_plain_backward(losses, s.retain)
        except CheckpointError:  # frozen since forward: one process recomputes without it
            self._fail_backward(involved)
        except RuntimeError as e:
            if any(loss.twin.shown for loss in losses):  # changed tensors may be copies outside of the graph
                self._fail_backward(involved)
                return True
            raise AssertionError(f"torch refuses this backward in one process, flatshard did not: {e}") from None
        self._adopt(*involved.values())
        return True

    def _fail_backward(self, involved: dict[int, Twin], reached: bool = True) -> None:
        """Handle a failed backward. If it had ``reached`` no unit, held gradients stay as they were."""
        for twin in involved.values():
            twin.undefined = True
        for twin in self._alive if reached else ():
            twin.held.clear()

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
            brought = has_leaves(total)  # includes parameters that were frozen since forward
            total.backward(retain_graph=retain)
        finally:
            for twin, old in zip(self._alive, before, strict=True):
                found.append({name: p.grad for name, p in twin.plain.named_parameters()})
                for name, p in twin.plain.named_parameters():
                    p.grad = old[name]
        for loss in losses:  # no_sync does not hold these, as they don't pass through the unit
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
        """Return whether ``no_sync`` keeps gradients out of ``.grad``."""
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

    # -- the optimizer

    def _step(self, s: programs.Step, twin: Twin, module: None) -> bool:
        if twin.undefined or twin.shown:
            return False
        if self.attempt(twin.opt.step, twin):
            held = map(twin.plain.get_parameter, twin.held)  # held gradients of frozen parameters are ignored
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
        if twin.rounding or loss.penalties:  # the oracle needs the gradients, which are gone; or they arrive later
            return False
        if any(isinstance(m, Checkpoint) and m.reentrant for m in twin.model.modules()):  # refused in part of a unit
            return False
        steps = flatshard.optim.step_in_backward(twin.model, opt)
        try:
            if not self._backward(programs.Backward((s.loss,)), None, None):
                return False
            assert not twin.undefined, "units have been stepped in a backward that failed"
            assert not twin.held, "some gradients were not reduced"
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
        p = 2.0 if self.program.model.has("empty") else s.norm  # torch has no maximum of zero elements
        norms: list[Tensor] = []
        clip = flatshard.clip_grad_norm_ if s.whose == "flatshard" else nn.utils.clip_grad_norm_
        given = module if s.whose == "flatshard" else module.parameters()
        if self.attempt(lambda: norms.append(clip(given, 0.1, p)), twin, module):
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
            close(norms[0].double(), expected.double(), twin.rtol, "the norm")
        return True
