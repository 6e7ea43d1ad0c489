"""Access to whole parameters: ``summon_full_params``, ``unshard`` and ``reshard``; ``recover`` after an interruption."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from flatshard._composable.claims import Claim
from flatshard._composable.find import units_registered_in
from flatshard._composable.state import Unit, settle, units_below
from flatshard._handle.lifetime import BY_USER
from flatshard._handle.slots import SHARDED, UNSHARDED
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._handle.whole_parameters import WholeParameters

summoned_units: list[list[Unit]] = []
"""Of each ``summon_full_params`` under way."""

copy_names: MutableMapping[nn.Parameter, str] = WeakIdKeyDictionary()
"""The FQNs of all copies that any has shown, as long as somebody holds them."""


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Inside, ``module``'s parameters are whole: ``nn.Parameter`` of original shape and dtype, under their own FQNs.

    Every rank of the group must enter. Values are exact, also where ``fully_shard(collectives=...)`` gathers approximations
    for training; inside a forward, they are those that it computes with. Forwards without gradients may run inside (with
    mixed precision: in full precision). If the body raises, nothing is written back. They nest: the inner one shows what the
    outer one does, and what it writes back, the outer's changes so far included, stays.

    Args:
        module: a sharded module, or one that holds sharded ones.
        recurse: also the units below ``module``; False: only ``module``'s own unit.
        writeback: keep what the body changes. Each rank keeps its own part, so all must make the same change.
        rank0_only: only the group's rank 0 sees whole parameters; the others see their sharded ones. Saves memory.
        offload_to_cpu: whole parameters on CPU, gathered one unit at a time. Parameters nobody shards stay as they are.
        with_grads: whole gradients as well, where there are any; written back too. No forward with gradients inside.

    Raises:
        ValueError: ``writeback`` with ``rank0_only`` (ranks would come apart), or nothing in ``module`` is sharded.
    """
    units = units_registered_in(module, recurse, "summon_full_params")
    if writeback and rank0_only:
        raise ValueError(
            "summon_full_params(rank0_only=True) needs writeback=False: only rank 0 would keep the changes"
        )
    settle(units)
    shown: list[_Summoned] = []
    summoned_units.append(units)
    try:
        for unit in units:
            shown.append(_Summoned(unit, with_grads, offload_to_cpu, rank0_only))
            if rank0_only and not unit.handle.placement.is_rank0:
                shown[-1].hide()
        for context in {unit.context for unit in units}:
            context.runtime.wait_for_host_reads()
        yield
        while shown:
            shown.pop().end(writeback)
    finally:
        summoned_units.remove(units)
        while shown:
            shown.pop().end(False)


class _Summoned(Claim):
    """One unit in one ``summon_full_params``; they nest."""

    __slots__ = ("before", "on_rank0", "shares_copies", "shows_gradients", "unit", "version")

    by_user = True

    def __init__(self, unit: Unit, with_grads: bool, offload_to_cpu: bool, on_rank0: bool) -> None:
        super().__init__()
        self.unit = unit
        self.on_rank0 = on_rank0  # and nowhere else
        # The values at entry, or written back by an inner one since, where what the body changes would stay without a
        # write-back: the shard is the whole, or an outer forward or `summon_full_params` shows the same memory.
        self.before: list[torch.Tensor] | None = None
        self.shares_copies = False  # with an outer `summon_full_params`
        self.shows_gradients = with_grads and not shows_gradients(unit)
        self.version = -1  # of what is shown at entry; -1: that has changed since
        unit.claims.append(self)
        try:
            self._gather(offload_to_cpu)
        except BaseException:
            if self.shows_gradients:
                WholeParameters(unit.handle).drop_full_gradients()
            self._release()
            raise
        self.version = self._version_shown()

    def check_forward(self, grad: bool) -> None:
        """Raise if its gradients would go astray, or if other ranks would gather what this one shows."""
        unit = self.unit
        _check_all_ranks(unit, "a forward", may_on_rank0=True)
        if not grad:
            return
        if self.copies is not None:
            if unit.handle.is_mixed_precision:
                inside, why = "...", "the parameters shown are full-precision copies, and would take its gradients"
            elif unit.handle.has_static_buffers:
                inside = "..."
                why = "the parameters shown are copies, as buffers are static, and would take its gradients"
            else:
                inside, why = "offload_to_cpu=True", "its gradients would be those of copies"
        elif self.shows_gradients:
            inside, why = "with_grads=True", "its new gradients would mix with those shown"
        else:
            return
        raise RuntimeError(
            f"unit {unit.fqn or '<root>'!r} runs forward with gradients inside summon_full_params({inside}): {why}. Run it "
            "outside, or under torch.no_grad()"
        )

    def check_backward(self) -> None:
        """Raise if its gradients would be overwritten."""
        if self.shows_gradients:
            raise RuntimeError(
                f"unit {self.unit.fqn or '<root>'!r} runs backward inside summon_full_params(with_grads=True): its new "
                "gradients would be lost where those shown are written back. Run it outside"
            )

    @property
    def copies(self) -> dict[int, nn.Parameter] | None:
        """What the body sees in place of the unsharded parameters."""
        return self.shows if isinstance(self.shows, dict) else None

    def _gather(self, offload_to_cpu: bool) -> None:
        unit, handle = self.unit, self.unit.handle
        whole = WholeParameters(handle)
        around = [claim.shows for claim in unit.claims if claim.by_user and isinstance(claim.shows, dict)]
        alone = unit.is_alone(self)
        if any([b.unsharded.take_back_moved() for b in handle.flats]):  # `p.data = ...` in an outer body
            for outer in _summons(unit):
                outer.version = -1
        if alone:
            handle.reshard()  # what an earlier forward left: the shards may have changed since
            handle.check_parameters()
        # Then the unsharded parameters are not what the user calls the parameters; nor is the dtype of the inputs.
        policy = unit.config.mixed_precision
        casts = policy.param_dtype is not None or policy.output_dtype is not None
        mixed = handle.is_mixed_precision or (casts and not any(b.dtype.is_floating_point for b in handle.flats))
        mixed = mixed or handle.has_static_buffers  # in which there is no room for all units at a time
        copies: dict[int, nn.Parameter] | None = None
        if around and not offload_to_cpu:
            copies, self.shares_copies = around[-1], True
        elif around:
            copies = whole.copy_copies(around[-1], torch.device("cpu"))
        else:
            if not mixed or not alone:
                handle.unshard(unit.context.pass_id, exactly=True)
                handle.wait()
            if offload_to_cpu or mixed:
                copies = whole.copy_full_precision(torch.device("cpu") if offload_to_cpu else None)
                for flat in handle.flats:
                    names = [info.fqn for info in flat.layout.params]
                    copy_names.update(zip([copies[id(p)] for p in flat.params], names, strict=True))
        if self.shows_gradients:
            whole.gather_gradients(copies)
        elif copies is not None and shows_gradients(unit):
            whole.copy_shown_gradients(copies)
        self.shows = UNSHARDED if copies is None else copies
        self.pins = copies is None
        if self.shares_copies or (copies is None and (handle.is_alias or not alone)):
            self._note_values()
        unit.show()
        if not unit.is_pinned:
            handle.reshard()

    def _note_values(self) -> None:
        copies = self.copies
        if copies is None:
            self.before = WholeParameters(self.unit.handle).copy_unsharded()
        else:
            self.before = [p.detach().clone() for p in copies.values()]

    def hide(self) -> None:
        """On ranks other than the first, with ``rank0_only``: what was gathered goes, the claim stays, and says so."""
        if self.shows_gradients:
            WholeParameters(self.unit.handle).drop_full_gradients()
            self.shows_gradients = False
        self.shows, self.pins, self.before = SHARDED, False, None
        self.unit.show()
        if not self.unit.is_pinned:
            self.unit.handle.reshard()

    def end(self, writeback: bool) -> None:
        """``writeback``: keep what the body changed.

        Raises:
            RuntimeError: the body assigned a parameter that cannot take the place of what was there. Nothing is kept.
        """
        try:
            if writeback:
                self._take_over_assigned()
            if self.shows is not SHARDED:
                self._end(writeback)
        finally:
            self._release()

    def _take_over_assigned(self) -> None:
        """``module.weight = nn.Parameter(...)`` in the body: its values."""
        for sharded, shown, now in self.unit.handle.slots.assigned():
            fqn = getattr(shard_info(sharded), "fqn", "")
            if now is None or shard_info(now) is not None:
                what = "deleted" if now is None else f"tied to {getattr(shard_info(now), 'fqn', '')!r}"
                raise RuntimeError(
                    f"parameter {fqn!r} was {what} inside summon_full_params: change a module's structure before "
                    "fully_shard"
                )
            if now.shape != shown.shape:
                raise RuntimeError(
                    f"parameter {fqn!r} was replaced inside summon_full_params by one of shape {tuple(now.shape)}, it has "
                    f"shape {tuple(shown.shape)}. A sharded parameter cannot be resized: resize the module before fully_shard"
                )
            with torch.no_grad():
                shown.copy_(now)

    def _end(self, writeback: bool) -> None:
        unit, handle, copies = self.unit, self.unit.handle, self.copies
        whole = WholeParameters(handle)
        changed = any([b.unsharded.take_back_moved() for b in handle.flats])  # `p.data = ...` in the body
        if copies is not None:
            if writeback:
                whole.write_back_copies(copies, shows_gradients(unit))
                self._refresh(copies)
            elif self.before is not None:
                with torch.no_grad():
                    torch._foreach_copy_([p.data for p in copies.values()], self.before)
        elif writeback:
            whole.write_back(shows_gradients(unit))
        elif self.before is not None:
            whole.restore_unsharded(self.before)
        if writeback and (changed or any(each.version != each._version_shown() for each in _summons(unit))):
            handle.note_written_back()
        if writeback:  # for good, whatever becomes of those further out
            for outer in _summons(unit):
                if outer.before is not None:
                    outer._note_values()
        if self.shows_gradients:
            whole.drop_full_gradients()
            for param in (copies or {}).values():
                param.grad = None

    def _version_shown(self) -> int:
        """Grows with the changes that the body makes in place, on all ranks alike."""
        copies = self.copies
        computes = [c for b in self.unit.handle.flats for c in b.computes]
        return sum(p._version for p in (computes if copies is None else copies.values()))

    def _refresh(self, copies: dict[int, nn.Parameter]) -> None:
        """Have what shows the same parameters further out show the values that were just written back."""
        unit, handle = self.unit, self.unit.handle
        around = [c.shows for c in unit.claims if c is not self and c.by_user and isinstance(c.shows, dict)]
        if around and not self.shares_copies:
            for key, outer in around[-1].items():
                outer.data.copy_(copies[key].data)
        if unit.is_pinned:  # the unsharded parameters are in use: refill them
            handle.gather_again()

    def _release(self) -> None:
        unit = self.unit
        unit.claims.remove(self)
        if not unit.is_used:
            unit.handle.write_back_if_changed(keep=False)
        unit.show()
        if not unit.is_pinned:
            unit.handle.reshard()


def _summons(unit: Unit) -> list[_Summoned]:
    """Those under way, the outermost first."""
    return [claim for claim in unit.claims if isinstance(claim, _Summoned)]


def shows_gradients(unit: Unit) -> bool:
    """Whether ``summon_full_params`` shows whole gradients of ``unit``."""
    return any([summoned.shows_gradients for summoned in _summons(unit)])


def _check_all_ranks(unit: Unit, what: str, may_on_rank0: bool = False) -> None:
    """Raise if ``what`` would gather on some ranks only, inside ``summon_full_params(rank0_only=True)``.

    ``may_on_rank0``: where parameters are whole it gathers nothing, and may be.
    """
    found = [summoned for summoned in _summons(unit) if summoned.on_rank0]
    if found and not (may_on_rank0 and found[-1].shows is not SHARDED):
        raise RuntimeError(
            f"{what} of unit {unit.fqn or '<root>'!r} inside summon_full_params(rank0_only=True), where only the first rank "
            "has whole parameters and the others would gather: leave the `with` block first, or pass rank0_only=False"
        )


class UnshardHandle:
    """An unshard under way, as returned by :func:`unshard` with ``async_op=True``."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Have the parameters registered whole, ready for what the caller does next. Idempotent."""
        units, self._units = self._units, []
        for unit in units:
            if unit.is_unsharded_by_user:  # else it was used and freed in the meantime
                unit.handle.wait()
                unit.show(UNSHARDED)
                unit.context.runtime.wait_for_host_reads()


def unshard(module: nn.Module, *, recurse: bool = False, async_op: bool = False) -> UnshardHandle | None:
    """Gather the parameters of ``module``'s own unit, ahead of its forward or to read them. All ranks must call it.

    They stay whole until that unit's next forward is over, or until :func:`reshard`. If they are whole already, and have
    changed since (an optimizer's step), they are gathered again. ``state_dict()`` and ``load_state_dict()`` show the sharded
    ones again, without freeing anything.

    Args:
        module: a unit.
        recurse: the units below it as well.
        async_op: return at once, with a handle whose ``wait`` makes the parameters visible.
    """
    units = units_registered_in(module, recurse, "unshard")
    settle(units)
    for unit in units:
        _check_all_ranks(unit, "unshard")
    for unit in units:
        if not (unit.handle.is_sharded or unit.is_used) and unit.is_outdated(unit.context.pass_id):
            unit.show()
            unit.handle.reshard()
        if unit.handle.is_sharded:
            unit.handle.check_parameters()
            unit.context.make_room(unit)
            unit.handle.unshard(BY_USER)
        elif not unit.is_used:  # left by a forward for its backward: shown as well
            unit.handle.take_over(BY_USER)
    handle = UnshardHandle(units)
    if async_op:
        return handle
    handle.wait()
    return None


def reshard(module: nn.Module, *, recurse: bool = True) -> None:
    """Free the whole parameters of ``module``'s units, by now or until they are needed again. No communication.

    Raises:
        RuntimeError: a unit is in its forward or in ``summon_full_params``.
    """
    units = units_registered_in(module, recurse, "reshard")
    settle(units)
    busy = [u.fqn or "<root>" for u in units if u.is_used]
    if busy:
        raise RuntimeError(f"reshard: {busy} are in use by a forward or by summon_full_params")
    for unit in units:
        unit.show()
        unit.handle.reshard()


def recover(module: nn.Module) -> None:
    """Free everything that an interrupted step left behind in ``module``'s process group. No communication starts.

    The next forward does this by itself. Call it to have the memory back at once, after an out-of-memory error, say.
    ``.grad`` keeps what had been reduced by then: call ``zero_grad()`` as usual. What ``no_sync`` holds is dropped.

    Raises:
        RuntimeError: called inside a forward or a backward, where nothing can be freed.
    """
    units = units_below(module)
    contexts = {unit.context for unit in units}
    if any(context.is_running for context in contexts):
        raise RuntimeError("recover: called inside a forward or a backward. Call it where the exception is caught")
    for context in contexts:
        context.recover(drop_held=True)
    for unit in units:  # those that a forward left whole for a backward that did not come
        unit.free_if_unused()
