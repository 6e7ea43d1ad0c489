"""Access to full parameters: ``summon_full_params``, ``unshard`` and ``reshard``; ``recover`` after an interruption."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from flatshard._base.errors import RESTRUCTURE_BEFORE, cannot_trace
from flatshard._composable.claims import Claim, Need, Reason
from flatshard._composable.features.full_parameters import FullParameters
from flatshard._composable.find import contexts_of, units_of, units_of_parameters
from flatshard._composable.hooks import is_running, recover_context, settle
from flatshard._composable.state import Unit, own_copies
from flatshard._handle.lifetime import BY_USER
from flatshard._handle.registrations import SHARDED_PARAMS, UNSHARDED_PARAMS, Registrations
from flatshard._handle.tensors.sharded_parameter import shard_info

summoned_units: list[list[Unit]] = []
"""For each ``summon_full_params`` that is active: its units."""

copy_names: MutableMapping[nn.Parameter, str] = WeakIdKeyDictionary()
"""The FQNs of all copies that a ``summon_full_params`` has shown and that still exist."""


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Show ``module``'s parameters unsharded inside: ``nn.Parameter`` of the original shape and dtype, under their FQNs.

    Every rank of the group must enter, outside of forward and backward. Values are exact, even if
    ``fully_shard(collectives=...)`` gathers approximated values for training. Forwards without gradients may run inside; with
    mixed precision they run in full precision. If the body raises, nothing is written back.

    The context can be nested, with the same arguments (``recurse`` may differ). The inner one shows what the outer one shows.
    What the inner one writes back is kept, even if the outer one raises. ``module.to(dtype)`` inside is for good, as it is
    for buffers, also where values are not written back; it is so after :func:`unshard`, too.

    Example::

        with torch.no_grad(), flatshard.summon_full_params(model):
            model[-1].weight[0] = 0  # the first row of the full matrix; the same on all ranks

    Args:
        module: any module with sharded parameters. A unit around it that owns some of them is gathered, too.
        recurse: also the units below ``module``; False: only the units of parameters that no unit below ``module`` has. It
            may be given without a name, as the arguments after it: their order is FSDP1's.
        writeback: keep changes that the body makes. Each rank keeps its own shard, so all ranks must make the same changes.
        rank0_only: only rank 0 of the group gets unsharded parameters, which saves memory on the others. They see their
            sharded parameters.
        offload_to_cpu: put the unsharded parameters on the CPU, and gather one unit at a time. Parameters that are not
            sharded stay where they are.
        with_grads: also unshard existing gradients, and write them back. No forward with gradients may run inside.

    Raises:
        ValueError: ``writeback`` with ``rank0_only``, by which ranks would get different parameters; or nothing in
            ``module`` is sharded.
        RuntimeError: called inside a forward or a backward; or inside one with other arguments.
    """
    units = units_of(module, "summon_full_params", recurse)
    if writeback and rank0_only:
        raise ValueError(
            "summon_full_params(rank0_only=True) needs writeback=False: only rank 0 would keep the changes"
        )
    settle(units)  # so that all ranks find their units in the same state
    arguments = {
        "writeback": writeback,
        "rank0_only": rank0_only,
        "offload_to_cpu": offload_to_cpu,
        "with_grads": with_grads,
    }
    for unit in units:
        _check_may_enter(unit, arguments)
    shown: list[_Summoned] = []
    summoned_units.append(units)
    try:
        for unit in units:
            shown.append(_Summoned(unit, arguments))
            if rank0_only and not unit.handle.ranks.is_rank0:
                shown[-1].hide()
        for context in contexts_of(units):
            context.runtime.wait_for_host_reads()
        yield
        while shown:
            shown.pop().end(writeback)
    finally:
        summoned_units.remove(units)
        while shown:
            shown.pop().end(False)


class _Summoned(Claim):
    """The claim of one ``summon_full_params`` on one unit. Nested contexts make several claims."""

    __slots__ = ("arguments", "before", "on_rank0", "shows_gradients", "unit", "version")

    shown_to_user = True

    def __init__(self, unit: Unit, arguments: dict[str, bool]) -> None:
        self.unit = unit
        self.arguments = arguments
        self.on_rank0 = arguments["rank0_only"]  # the other ranks show sharded parameters
        # The values to restore if nothing is written back: those at entry, or those that an inner context has written back
        # since. Only needed if the body writes into memory that stays in use: the shard itself (a unit that is not cut), or
        # memory that another `summon_full_params` around this one shows as well.
        self.before: list[torch.Tensor] | None = None
        self.shows_gradients = arguments["with_grads"] and not shows_gradients(unit)
        self.version = -1  # of the shown parameters at entry; -1: an outer body has assigned other memory to some
        unit.claims.append(self)
        try:
            self._gather(arguments["offload_to_cpu"])
        except BaseException:
            if self.shows_gradients:
                FullParameters(unit.handle).drop_full_gradients()
            self._release()
            raise
        self.version = self._version_shown()

    def check_forward(self, grad: bool) -> None:
        """Raise if gradients of a forward inside would be lost, or if other ranks would gather for it."""
        unit = self.unit
        if torch.compiler.is_exporting():
            raise cannot_trace("torch.export", f"unit {unit.fqn or '<root>'!r}")
        _check_all_ranks(unit, "a forward", may_on_rank0=True)
        if not grad:
            return
        if self.copies is not None:
            if _is_mixed_precision(unit):
                inside, why = "...", "it would compute gradients of the full-precision copies shown there"
            elif unit.handle.has_static_buffers:
                inside = "..."
                why = "with static buffers the parameters shown are copies, and it would compute gradients of these"
            else:
                inside, why = "offload_to_cpu=True", "it would compute gradients of the copies on the CPU"
        elif self.shows_gradients:
            inside, why = "with_grads=True", "its gradients would be added to those shown"
        else:
            return
        raise RuntimeError(
            f"unit {unit.fqn or '<root>'!r} runs forward with gradients inside summon_full_params({inside}): {why}. Run it "
            "outside, or under torch.no_grad()"
        )

    def check_backward(self) -> None:
        """Raise if the gradients of a backward inside would be overwritten at exit."""
        if self.shows_gradients:
            raise RuntimeError(
                f"unit {self.unit.fqn or '<root>'!r} runs backward inside summon_full_params(with_grads=True), which on exit "
                "would overwrite the new gradients by those it shows. Run it outside"
            )

    @property
    def copies(self) -> dict[int, nn.Parameter] | None:
        """Return the copies that the body sees instead of unsharded parameters, by the sharded parameter's id."""
        return self.shows if isinstance(self.shows, dict) else None

    def _gather(self, offload_to_cpu: bool) -> None:
        unit, handle = self.unit, self.unit.handle
        around = [summoned for summoned in _summons(unit) if summoned is not self]
        converted = {id(param) for param, _, _ in handle.user_changes.conversions()}
        moved = [b.unsharded.adopt_moved() for b in handle.flats if converted.isdisjoint(map(id, b.params))]
        if any(moved):  # `p.data = ...` in an outer body
            for outer in around:
                outer.version = -1
        if around:
            self.shows, self.need = around[-1].shows, around[-1].need
            unit.show()
            if self.shows is not SHARDED_PARAMS:
                self._note_values()
            return
        unit.release(Reason.OUTDATED)  # what an earlier forward left may be
        handle.check_parameters()
        whole = FullParameters(handle)
        # With mixed precision the body gets copies, because the unsharded parameters have the compute dtype.
        policy = unit.config.mixed_precision
        casts = policy.param_dtype is not None or policy.output_dtype is not None
        mixed = _is_mixed_precision(unit) or (casts and not any(b.kind.dtype.is_floating_point for b in handle.flats))
        mixed = mixed or handle.has_static_buffers  # they have no room for all units at the same time
        copies: dict[int, nn.Parameter] | None = None
        if not mixed:
            handle.unshard(unit.context.latest_pass.id, exactly=True)
            handle.wait()
        if offload_to_cpu or mixed:
            copies = whole.copy_full_precision(torch.device("cpu") if offload_to_cpu else None)
            for flat in handle.flats:
                names = [info.fqn for info in flat.layout.params]
                copy_names.update(zip([copies[id(p)] for p in flat.params], names, strict=True))
            own_copies(unit, copies.values())
        if self.shows_gradients:
            whole.gather_gradients(copies)
        self.shows = UNSHARDED_PARAMS if copies is None else copies
        self.need = Need.VALUES if copies is None else Need.COPIES
        if copies is None and handle.never_gathers:
            self._note_values()
        unit.release(Reason.ACCESSED)

    def _note_values(self) -> None:
        self.before = [values.clone() for values in self._values()]

    def _values(self) -> list[torch.Tensor]:
        """Return the tensors that the body sees."""
        copies = self.copies
        if copies is None:
            return [flat.unsharded.flat for flat in self.unit.handle.flats]
        return [copy.data for copy in copies.values()]

    def hide(self) -> None:
        """Free the unsharded parameters, and show the sharded ones: ``rank0_only``, on the other ranks."""
        if self.shows_gradients:
            FullParameters(self.unit.handle).drop_full_gradients()
            self.shows_gradients = False
        self.shows, self.need, self.before = SHARDED_PARAMS, Need.COPIES, None
        self.unit.release(Reason.ACCESSED)

    def end(self, writeback: bool) -> None:
        """Leave the context for this unit, and keep the body's changes if ``writeback``.

        Raises:
            RuntimeError: the body deleted, tied or resized a parameter. Nothing is kept.
        """
        try:
            if writeback:
                self._take_over_assigned()
            if self.shows is not SHARDED_PARAMS:
                self._end(writeback)
        finally:
            self._release()

    def _take_over_assigned(self) -> None:
        """Copy the values of parameters that the body assigned: ``module.weight = nn.Parameter(...)``."""
        for sharded, shown, now in _assigned(self.unit.handle.registrations):
            fqn = getattr(shard_info(sharded), "fqn", "")
            if now is None or shard_info(now) is not None:
                what = "deleted" if now is None else f"tied to {getattr(shard_info(now), 'fqn', '')!r}"
                raise RuntimeError(f"parameter {fqn!r} was {what} inside summon_full_params: {RESTRUCTURE_BEFORE}")
            if now.shape != shown.shape:
                raise RuntimeError(
                    f"parameter {fqn!r} of shape {tuple(shown.shape)} was replaced inside summon_full_params by one of shape "
                    f"{tuple(now.shape)}. A sharded parameter cannot be resized: resize the module before fully_shard"
                )
            with torch.no_grad():
                shown.copy_(now)

    def _end(self, writeback: bool) -> None:
        unit, handle, copies = self.unit, self.unit.handle, self.copies
        whole = FullParameters(handle)
        given = handle.user_changes.conversions(copies)  # `module.to()` in the body is for good, as for buffers
        is_last = len(_summons(unit)) == 1
        changed = bool(given) or any([b.unsharded.adopt_moved() for b in handle.flats])  # `p.data = ...` in the body
        if writeback:
            whole.write_back(copies, shows_gradients(unit), adopts=is_last)
        elif self.before is not None:
            with torch.no_grad():
                for values, before in zip(self._values(), self.before, strict=True):
                    values.copy_(before)
        if given and is_last and not writeback:
            handle.adopt(given)
        if writeback and (changed or any(each.version != each._version_shown() for each in _summons(unit))):
            handle.note_written_back()
        if writeback:  # outer contexts must not undo it
            for outer in _summons(unit):
                if outer.before is not None:
                    outer._note_values()
        if self.shows_gradients:
            whole.drop_full_gradients()
            for param in (copies or {}).values():
                param.grad = None

    def _version_shown(self) -> int:
        """Return a number that grows with each in-place change of the shown parameters, equally on all ranks."""
        copies = self.copies
        computes = [c for b in self.unit.handle.flats for c in b.unsharded.params]
        return sum(p._version for p in (computes if copies is None else copies.values()))

    def _release(self) -> None:
        unit = self.unit
        unit.claims.remove(self)
        if not unit.claims.in_use:
            unit.handle.write_back_if_changed(keep=False)
        unit.release(Reason.ACCESSED)
        unit.handle.drop_kept()  # the body may have changed what no version shows


def _is_mixed_precision(unit: Unit) -> bool:
    """Return whether the unsharded parameters differ from the user's in dtype."""
    return any([b.kind.buffer_dtype is not b.kind.dtype for b in unit.handle.flats])


def _check_may_enter(unit: Unit, arguments: dict[str, bool]) -> None:
    """Raise inside a forward or a backward, and inside a ``summon_full_params`` with other arguments."""
    name = unit.fqn or "<root>"
    around = _summons(unit)
    if is_running(unit.context) or any(claim.uses and claim not in around for claim in unit.claims):
        raise RuntimeError(
            f"summon_full_params of unit {name!r} inside a forward, a backward or keep_unsharded(threads=True): enter it "
            "outside. A forward reads another layer's full parameters between flatshard.unshard(layer) and "
            "flatshard.reshard(layer)"
        )
    outer = around[-1].arguments if around else arguments
    if others := [key for key in arguments if arguments[key] != outer[key]]:
        inside = ", ".join(f"{key}={outer[key]}" for key in others)
        asked = ", ".join(f"{key}={arguments[key]}" for key in others)
        raise RuntimeError(
            f"summon_full_params({asked}) of unit {name!r} inside summon_full_params({inside}): leave the outer one first, "
            "or pass the same arguments"
        )


def _assigned(registrations: Registrations) -> Iterator[tuple[nn.Parameter, nn.Parameter, nn.Parameter | None]]:
    """Return (sharded, shown, registered parameter) of each registration that the body changed."""
    if registrations.shows is SHARDED_PARAMS:
        return
    for module, name, sharded, compute in registrations.entries:
        shown = registrations.shows[id(sharded)] if isinstance(registrations.shows, dict) else compute
        if isinstance(module._parameters, dict):  # not TorchScript, which creates new parameters each time
            now = module._parameters.get(name)
            if now is not shown:
                yield sharded, shown, now


def _summons(unit: Unit) -> list[_Summoned]:
    """Return the claims of active ``summon_full_params`` on ``unit``, the outermost first."""
    return [claim for claim in unit.claims if isinstance(claim, _Summoned)]


def shows_gradients(unit: Unit) -> bool:
    """Return whether a ``summon_full_params(with_grads=True)`` of ``unit`` is active."""
    return any([summoned.shows_gradients for summoned in _summons(unit)])


def _check_all_ranks(unit: Unit, what: str, may_on_rank0: bool = False) -> None:
    """Raise if ``what`` runs inside ``summon_full_params(rank0_only=True)``, where not all ranks would gather.

    ``may_on_rank0``: allow it on a rank that has the unsharded parameters already.
    """
    found = [summoned for summoned in _summons(unit) if summoned.on_rank0]
    if found and not (may_on_rank0 and found[-1].shows is not SHARDED_PARAMS):
        raise RuntimeError(
            f"{what} of unit {unit.fqn or '<root>'!r} inside summon_full_params(rank0_only=True): rank 0 has the unsharded "
            "parameters already, and only the others would gather. Leave the `with` block first, or pass rank0_only=False"
        )


class UnshardHandle:
    """An all-gather in progress, as returned by :func:`unshard` with ``async_op=True``.

    Example::

        handle = flatshard.unshard(model[0], async_op=True)
        x = batch.relu()  # while the unit is gathered
        handle.wait()
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait for the all-gather, and register the unsharded parameters. Idempotent."""
        units, self._units = self._units, []
        for unit in units:
            if unit.is_unsharded_by_user:  # else a forward used and freed it meanwhile
                unit.handle.wait()
                unit.show(UNSHARDED_PARAMS)
                unit.context.runtime.wait_for_host_reads()


def unshard(module: nn.Module, *, recurse: bool = False, async_op: bool = False) -> UnshardHandle | None:
    """Gather the units of ``module``'s own parameters, before a forward or to read them. All ranks must call it.

    They stay unsharded until the end of the unit's next forward, or until :func:`reshard`. If they are unsharded already, but
    have changed since (by an optimizer's step), they are gathered again. ``state_dict()`` and ``load_state_dict()`` register
    the sharded parameters again, without freeing the unsharded ones.

    Example::

        handle = flatshard.unshard(model[0], async_op=True)
        x = batch.relu()  # while the unit is gathered
        handle.wait()
        y = model[0](x)

    Args:
        module: a unit, or another module with sharded parameters: the units that own them are gathered.
        recurse: also the units below ``module``. Other functions have True as default. Here it would take the memory of the
            full model, and FSDP2's ``unshard`` gathers one unit.
        async_op: return at once, with a handle whose ``wait()`` registers the unsharded parameters.
    """
    units = units_of(module, "unshard", recurse)
    settle(units)
    for unit in units:
        _check_all_ranks(unit, "unshard")
    for unit in units:
        if not (unit.handle.is_sharded or unit.claims.in_use) and unit.is_outdated:
            unit.release(Reason.OUTDATED)
        if unit.handle.is_sharded:
            unit.handle.check_parameters()
            unit.handle.unshard(BY_USER)
        elif not unit.claims.in_use:  # a forward left it unsharded for its backward: register the parameters now
            unit.handle.set_used_by(BY_USER)
    handle = UnshardHandle(units)
    if async_op:
        return handle
    handle.wait()
    return None


def reshard(module: nn.Module, *, recurse: bool = True) -> None:
    """Free the unsharded parameters of the units that own parameters of ``module``, without communication.

    The next forward or backward gathers them.

    Example::

        flatshard.unshard(model)
        bias = model[-1].bias.detach().clone()  # full: of shape (10,)
        flatshard.reshard(model)

    Args:
        module: a unit, or another module with sharded parameters.
        recurse: also the units below ``module``.

    Raises:
        RuntimeError: a unit is in its forward or in ``summon_full_params``.
    """
    units = units_of(module, "reshard", recurse)
    settle(units)
    busy = [u.fqn or "<root>" for u in units if u.claims.in_use]
    if busy:
        raise RuntimeError(f"reshard: {busy} are in use by a forward or by summon_full_params")
    for unit in units:
        unit.release(Reason.ASKED)
        unit.handle.drop_kept()


def recover(module: nn.Module) -> None:
    """Free everything that an interrupted step left in memory, for all units of ``module``'s process group.

    The next forward does this by itself. Call it to free the memory at once, for example after an out-of-memory error. It
    starts no communication. ``.grad`` keeps the gradients that were reduced before: call ``zero_grad()`` as usual.
    Gradients accumulated under ``no_sync`` are dropped.

    Example::

        try:
            model(batch).sum().backward()
        except torch.OutOfMemoryError:
            flatshard.recover(model)
            optimizer.zero_grad()

    Args:
        module: a module with sharded parameters.

    Raises:
        RuntimeError: called inside a forward or a backward, where nothing can be freed.
    """
    units = units_of_parameters(module)
    contexts = contexts_of(units)
    if any(is_running(context) for context in contexts):
        raise RuntimeError("recover: called inside a forward or a backward. Call it where the exception is caught")
    for context in contexts:
        recover_context(context, drop_held=True)
    for unit in units:  # units that a forward left unsharded for a backward that did not run
        unit.release(Reason.LET_GO)
