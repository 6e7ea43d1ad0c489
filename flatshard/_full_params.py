"""Access to whole parameters: ``summon_full_params``, ``unshard`` and ``reshard``; ``recover`` after an interruption."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from flatshard._composable.state import Unit, units_below
from flatshard._handle.sharded_parameter import shard_info
from flatshard._handle.whole_parameters import WholeParameters


def units_of(module: nn.Module, recurse: bool, verb: str) -> list[Unit]:
    """The units whose parameters are registered in ``module``, owners of tied ones included."""
    units: dict[Unit, None] = {}
    for unit in units_below(module, recurse):
        units.update(dict.fromkeys(unit.needs))
    if not units:
        if any(shard_info(p) is not None for p in module.parameters()):
            raise ValueError(
                f"{verb}: this {type(module).__name__} is part of a unit, and is none itself: call it on the unit, or give "
                "the module a unit of its own by the policy"
            )
        raise ValueError(f"{verb}: nothing in this {type(module).__name__} is sharded; call fully_shard first")
    return list(units)


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
    mixed precision: in full precision). If the body raises, nothing is written back.

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
    units = units_of(module, recurse, "summon_full_params")
    if writeback and rank0_only:
        raise ValueError(
            "summon_full_params(rank0_only=True) needs writeback=False: only rank 0 would keep the changes"
        )
    shown: list[_Shown] = []
    try:
        for unit in units:
            shown.append(_show(unit, with_grads, offload_to_cpu))
            if rank0_only and not unit.is_rank0:
                _hide(shown.pop(), False)
        yield
        while shown:
            _hide(shown.pop(), writeback)
    finally:
        while shown:
            _hide(shown.pop(), False)


@dataclass
class _Shown:
    """One unit in one ``summon_full_params``; they nest."""

    unit: Unit
    grads: bool  # whole gradients are shown from here on
    copies: dict[int, nn.Parameter] | None = None  # what the body sees in place of the unsharded parameters
    # The values at entry, where what the body changes would stay without a write-back: the shard is the whole, or an
    # outer forward or `summon_full_params` shows the same memory.
    before: list[torch.Tensor] | None = None
    shares_copies: bool = False  # with an outer `summon_full_params`


def _show(unit: Unit, with_grads: bool, offload_to_cpu: bool) -> _Shown:
    unit.users += 1
    unit.holds += 1
    shown = _Shown(unit, with_grads and not unit.shows_gradients)
    try:
        _gather(shown, offload_to_cpu)
    except BaseException:
        if shown.grads:
            WholeParameters(unit.handle).drop_full_gradients()
            unit.shows_gradients = False
        unit.users -= 1
        if unit.users == 0:
            unit.handle.slots.register_sharded()
        _release(unit)
        raise
    return shown


def _gather(shown: _Shown, offload_to_cpu: bool) -> None:
    unit, handle = shown.unit, shown.unit.handle
    whole = WholeParameters(handle)
    if unit.users == 1:
        if not handle.is_sharded:  # left by an earlier forward: the shards may have changed since
            handle.reshard()
        unit.context.runtime.before_pass()
        handle.check_parameters()
    # Then the unsharded parameters are not what the user calls the parameters; nor is the dtype of the inputs.
    mixed = handle.is_mixed_precision or (unit.casts and not any(b.dtype.is_floating_point for b in handle.buffers))
    if unit.copies and not offload_to_cpu:
        shown.copies, shown.shares_copies = unit.copies[-1], True
        shown.before = [p.detach().clone() for p in shown.copies.values()]
    else:
        if not mixed or (not unit.copies and unit.users > 1):
            handle.unshard(exactly=True)
            handle.wait()
            unit.gathered_in = unit.context.pass_id
            unit.gathered_version = handle.version()
        handle.slots.register_unsharded()
        if offload_to_cpu or mixed:
            shown.copies = whole.copy_full_precision(torch.device("cpu") if offload_to_cpu else None)
        elif handle.is_alias or unit.users > 1:
            shown.before = whole.copy_unsharded()
    if shown.grads:
        whole.gather_gradients(shown.copies)
        unit.shows_gradients = True
    elif shown.copies is not None and unit.shows_gradients:
        whole.copy_shown_gradients(shown.copies)
    if shown.copies is not None:
        if not shown.shares_copies:
            handle.slots.register(shown.copies)
        unit.copies.append(shown.copies)
        _release(unit)


def _hide(shown: _Shown, writeback: bool) -> None:
    unit, handle = shown.unit, shown.unit.handle
    whole = WholeParameters(handle)
    if shown.copies is not None:
        unit.copies.pop()
        if writeback:
            whole.write_back_copies(shown.copies, unit.shows_gradients)
            _refresh(shown)
        elif shown.before is not None:
            with torch.no_grad():
                torch._foreach_copy_([p.data for p in shown.copies.values()], shown.before)
    elif writeback:
        whole.write_back(unit.shows_gradients)
    elif shown.before is not None:
        whole.restore_unsharded(shown.before)
    if shown.grads:
        whole.drop_full_gradients()
        for param in (shown.copies or {}).values():
            param.grad = None
        unit.shows_gradients = False
    if shown.copies is not None and not shown.shares_copies:
        handle.slots.unregister()
    unit.users -= 1
    if unit.users == 0:
        handle.write_back_if_changed(keep=False)
        handle.slots.register_sharded()
    if shown.copies is None:
        _release(unit)


def _refresh(shown: _Shown) -> None:
    """Have what shows the same parameters further out show the values that were just written back."""
    unit, handle = shown.unit, shown.unit.handle
    if unit.copies and not shown.shares_copies:
        assert shown.copies is not None
        for key, outer in unit.copies[-1].items():
            outer.data.copy_(shown.copies[key].data)
    if unit.holds:  # the unsharded parameters are in use: refill them
        handle.reshard()
        handle.unshard(exactly=handle.is_exact)
        handle.wait()


def _release(unit: Unit) -> None:
    unit.holds -= 1
    if unit.holds == 0:
        unit.handle.reshard()


class UnshardHandle:
    """An unshard under way, as returned by :func:`unshard` with ``async_op=True``."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Have the parameters registered whole, ready for what the caller does next. Idempotent."""
        units, self._units = self._units, []
        for unit in units:
            if unit.gathered_in == -1 and not unit.handle.is_sharded:  # else it was used and freed in the meantime
                unit.handle.wait()
                unit.handle.slots.register_unsharded()


def unshard(module: nn.Module, *, recurse: bool = False, async_op: bool = False) -> UnshardHandle | None:
    """Gather the parameters of ``module``'s own unit, ahead of its forward or to read them. All ranks must call it.

    They stay whole until that unit's next forward is over, or until :func:`reshard`.

    Args:
        module: a unit.
        recurse: the units below it as well.
        async_op: return at once, with a handle whose ``wait`` makes the parameters visible.
    """
    units = units_of(module, recurse, "unshard")
    for unit in units:
        if unit.handle.is_sharded:
            unit.context.runtime.before_pass()
            unit.handle.check_parameters()
            unit.handle.unshard()
            unit.gathered_in = -1
            unit.gathered_version = unit.handle.version()
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
    units = units_of(module, recurse, "reshard")
    busy = [u.fqn or "<root>" for u in units if u.holds]
    if busy:
        raise RuntimeError(f"reshard: {busy} are in use by a forward or by summon_full_params")
    for unit in units:
        unit.handle.slots.register_sharded()
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
