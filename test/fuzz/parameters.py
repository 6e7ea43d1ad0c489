"""Statements about parameters: contexts, residency, options, and changes by the user."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from fuzz import programs
from fuzz.runner import ERRORS, Bang, Interrupt, Runner
from fuzz.twins import Shown, Twin
from parity import everybody
from torch import nn

import flatshard
from flatshard._composable.find import units_below, units_of_parameters
from flatshard._composable.state import owner_of, unit_of


class Parameters(Runner):
    """Unshard, reshard, configure and change parameters."""

    # -- blocks

    def _within(
        self, s: Any, module: nn.Module, verb: Any, enter: Callable[[], None], leave: Callable[[bool], None]
    ) -> None:
        """Run the body inside a context. ``leave`` gets whether the body succeeded; if entering is refused, neither is
        called."""
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
            if keeps:  # unsharded values are kept for good, whoever changed them and whatever encloses this context
                for outer in twin.shown:
                    shown.changed |= outer.changed
                    outer.note(twin.plain, shown.scope)
                if twin.shown:
                    twin.shown[-1].changed |= shown.changed
            if shown.changed:  # the change may be a forward's, whose backward may be refused later
                twin.unsharded_at = -1
                twin.changes += 1

        self._within(s, module, functools.partial(flatshard.summon_full_params, **options), enter, leave)
        return True

    # -- parameters

    def _unshard(self, s: programs.Unshard, twin: Twin, module: nn.Module) -> bool:
        if self.interrupted:
            return False
        # Parameters that are unsharded already keep their values.
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
        if isinstance(value, tuple):  # its next units: later ones in forward, earlier ones in backward
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
        return self._train_some(s.value, twin, twin.own[name], twin.plain.get_parameter(name), [twin.own[name]])

    def _freeze(self, s: programs.Freeze, twin: Twin, module: nn.Module) -> bool:
        plain = twin.plain.get_submodule(twin.path(s.place))
        return twin.shows_own and self._train_some(s.value, twin, module, plain, [*module.parameters()])

    def _train_some(self, value: bool, twin: Twin, mine: Any, theirs: Any, params: list[nn.Parameter]) -> bool:
        recomputes = any(loss.twin is twin for loss in self.losses.values()) and any(
            u.config.recompute for u in twin.units
        )
        if value and recomputes:
            return False  # torch's checkpoint would read other tensors than those of the forward
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
            return False  # unsharded by the user: a change has undefined results
        unnoticed = shown is None and s.how == "mul_data"
        if unnoticed:  # a rank that has skipped a unit may have freed it: all ranks do the same
            unseen = bool(twin.kept) or any(u.is_unsharded_by_user for u in twin.units)
            if any(everybody(self._there(twin), unseen)):
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
        flatshard.reshard(twin.model)  # parameters that unshard() left unsharded
        twin.plain.to(dtype)
        twin.held = {name: grad.to(dtype) for name, grad in twin.held.items()}
        twin.opt, twin.plain_opt = self._optimizer(twin.model), self._optimizer(twin.plain)
        twin.sent = None
        return True
