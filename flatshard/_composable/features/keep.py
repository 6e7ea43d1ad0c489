"""``keep_unsharded``: units are gathered once, and stay unsharded. With ``threads=True`` any threads run forwards meanwhile.

[Note: Forwards without a record]
A forward keeps a record for what comes after it: freeing, a backward, the order of collectives. The records of a process
group are one stack, so one thread at a time may run forwards. While units stay unsharded, show their unsharded parameters,
and run without gradients, a forward has nothing to note, and its hooks do no more than cast inputs and outputs. What keeps
this true is checked in each forward: gradients are off, and the parameters have not changed since they were gathered.

[Note: Calls past a unit]
``generate`` of an encoder-decoder model calls ``model.encoder(...)``. The encoder is no unit, and its embedding belongs to
the unit around it, whose forward does not run. While a unit is kept, such a call is a forward of it: it shows parameters,
casts the inputs, and leads backward to the unit. A hook on each of the unit's modules sees whether they are shown already.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from flatshard._base import frames
from flatshard._base.old_names import old_arguments
from flatshard._composable.claims import Claim, Kept, Reason
from flatshard._composable.extensions import ForwardFeature
from flatshard._composable.find import units_of
from flatshard._composable.hooks import UnitHooks, overridden, settle
from flatshard._composable.module_tree import called_modules
from flatshard._composable.state import Unit, owner_of, unit_of
from flatshard._handle.registrations import SHARDED_PARAMS, UNSHARDED_PARAMS


class Threads:
    """Units that run forwards without a record, with the units that they need. All ranks create one together."""

    def __init__(self, units: Iterable[Unit]) -> None:
        needed = list(dict.fromkeys(each for unit in units for each in unit.needs))
        for unit in needed:
            _check(unit)
        self._running: dict[int, list[nn.Module]] = {}  # forwards under way, the outermost first, by thread
        self._ended = threading.Condition()
        self._units: list[_Unrecorded] = []
        try:
            for unit in needed:
                unit.context.check(unit)
                self._units.append(_Unrecorded(unit, self))
            for each in self._units:
                each.wait()
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Wait until the forwards on other threads have ended, and record forwards again."""
        with self._ended:
            while (self._running.keys() - {threading.get_ident()}) & frames.threads():
                self._ended.wait(1.0)
            for each in reversed(self._units):
                each.leave()
            self._units.clear()

    def begin(self, module: nn.Module) -> bool:
        """Begin a forward on this thread. Return whether it is the outermost one."""
        with self._ended:
            if not self._units:
                raise RuntimeError("keep_unsharded(threads=True) has ended while a forward began on another thread")
            running = self._running.setdefault(threading.get_ident(), [])
            running.append(module)
            return len(running) == 1

    def end(self, module: nn.Module) -> bool:
        """End a forward on this thread. Return False if it had not begun."""
        thread = threading.get_ident()
        with self._ended:
            running = self._running.get(thread)
            if not running or running[-1] is not module:
                return False
            running.pop()
            if not running:
                del self._running[thread]
                self._ended.notify_all()
        return True


class _Unrecorded(Claim):
    """The claim of one unit of :class:`Threads` to be unsharded, and the functions that run in place of its hooks."""

    def __init__(self, unit: Unit, threads: Threads) -> None:
        self.unit, self._threads = unit, threads
        self._before = overridden(unit.features, ForwardFeature.before_unrecorded)
        self._after = overridden(unit.features, ForwardFeature.after_unrecorded)
        handle = unit.handle
        if not unit.claims.in_use:
            unit.release(Reason.OUTDATED)  # what an earlier forward left may be
            handle.check_parameters()
        self.shows = UNSHARDED_PARAMS
        unit.claims.append(self)
        self._hooks = UnitHooks.of(unit)
        self._around = self._hooks.replace_by(self)
        handle.unshard(unit.context.latest_pass.id)
        self._version = handle.version()

    def wait(self) -> None:
        """Show the parameters once they are gathered."""
        self.unit.handle.wait()
        self.unit.show()
        self.unit.context.runtime.wait_for_host_reads()

    def leave(self) -> None:
        unit = self.unit
        self._hooks.replace_by(self._around)
        unit.claims.remove(self)
        if not unit.claims.in_use:
            unit.handle.write_back_if_changed()
        unit.release(Reason.LET_GO)

    def check(self) -> Callable[[Any], object]:
        """Raise if a forward needs a record."""
        unit = self.unit
        name = f"unit {unit.fqn or '<root>'!r} runs forward inside keep_unsharded(threads=True)"
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} with gradients: run it under torch.no_grad(), which each thread enters for itself, or outside"
            )
        if unit.handle.version() != self._version:
            raise RuntimeError(
                f"{name}, and its parameters have changed since (by an optimizer step, for example): leave the context, "
                "change them, and enter it again"
            )
        return _nothing

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Show the parameters to this thread's stream, and cast the inputs."""
        outermost = self._threads.begin(module)
        for needed in self.unit.needs:
            needed.handle.wait()
            if needed.handle.registrations.shows is not UNSHARDED_PARAMS:  # `state_dict` has shown the sharded ones
                needed.show()
        changed: tuple[Any, Any] | None = None
        for before in self._before:
            if (new := before(args, kwargs, outermost)) is not None:
                args, kwargs = changed = new
        return changed

    def end(self, module: nn.Module, output: Any) -> Any:
        """Cast the output."""
        changed = None
        if self._threads.end(module) and output is not None:
            for after in self._after:
                if (new := after(output)) is not None:
                    output = changed = new
        return changed


def _nothing(output: Any) -> None:
    """Do nothing with the output of a forward without a record."""


def _check(unit: Unit) -> None:
    name = unit.fqn or "<root>"
    if any(claim.uses and not isinstance(claim, _Unrecorded) for claim in unit.claims):
        raise RuntimeError(
            f"keep_unsharded(threads=True): unit {name!r} is in a forward or in summon_full_params. Enter it outside"
        )
    if unit.config.mixed_precision.full_precision_in_eval:
        raise ValueError(
            f"keep_unsharded(threads=True): unit {name!r} has full_precision_in_eval=True, by which each forward chooses the "
            "dtype of the parameters. Shard with MixedPrecision(full_precision_in_eval=False), or use one thread"
        )
    if unit.handle.has_static_buffers:
        raise ValueError(
            f"keep_unsharded(threads=True): unit {name!r} shares static buffers with others, which cannot all be unsharded. "
            "Shard with static_buffers=False, or use one thread"
        )


@old_arguments(positional=("recurse", "threads"))
@contextlib.contextmanager
def keep_unsharded(module: nn.Module, *, recurse: bool = True, threads: bool = False) -> Iterator[None]:
    """Keep units unsharded after their first use inside: for generation and evaluation.

    Further forwards inside do not communicate. A call of any module in a unit is a forward of the unit: ``generate`` may
    call ``model.encoder``, though that is no unit. If parameters change (by an optimizer's step or ``p.data = ...``), the
    next forward gathers them again. ``module.parameters()`` still returns the sharded parameters. The memory is that of the
    full parameters in the compute dtype. On exit the units are freed; a unit that is in a forward then is freed at its end.
    All ranks must enter together. The context can be nested.

    A forward raises while one runs on another thread, unless ``threads`` is True. A server with many threads, or with
    ``asyncio``, either passes it, or gives the model to one thread, ``ThreadPoolExecutor(max_workers=1)``.

    With ``threads=True`` nothing is communicated between entry and exit, so ranks may answer different requests, in any
    order. The units are gathered at entry, and ``module.parameters()`` are full, in the compute dtype. All forwards run
    without gradients: each thread enters ``torch.no_grad()`` for itself. If parameters change, the next forward raises: leave
    the context, and enter it again. On exit, forwards on other threads are waited for.

    Example::

        with torch.no_grad(), flatshard.keep_unsharded(model):
            for x in batch:  # from here on ranks may differ in how often they call the model
                y = model(x)

    Example::

        from concurrent.futures import ThreadPoolExecutor

        @torch.no_grad()
        def answer(request):
            return model(request)

        with flatshard.keep_unsharded(model, threads=True), ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(answer, batch))

    Args:
        module: a unit, or another module with sharded parameters: the units that own them are kept.
        recurse: also the units below ``module``.
        threads: any number of threads may run forwards at the same time.

    Raises:
        ValueError: nothing in ``module`` is sharded; or ``threads`` with an option of ``fully_shard`` that rules it out.
        RuntimeError: ``threads`` inside a forward or ``summon_full_params``.
    """
    units = units_of(module, "keep_unsharded", recurse)
    settle(units)
    if threads:
        together = Threads(units)
        try:
            yield
        finally:
            together.leave()
        return
    kept = [(unit, Keep(unit)) for unit in units]
    try:
        yield
    finally:
        for unit, claim in kept:
            claim.leave()
            if not unit.claims.keep_buffer:
                unit.release(Reason.LET_GO)


class Keep(Kept):
    """The claim of one ``keep_unsharded`` on one unit."""

    def __init__(self, unit: Unit) -> None:
        # Copies that forwards in full precision use (`full_precision_in_eval`), with the `handle.version()` they are of.
        self.full_precision: tuple[int, dict[int, nn.Parameter]] | None = None
        if not unit.claims and unit.is_outdated:
            unit.release(Reason.OUTDATED)
        unit.claims.insert(0, self)
        self._unit = unit
        self._hooks = [
            inner.register_forward_pre_hook(_Past(unit, module).before, prepend=True, with_kwargs=True)
            for module in called_modules(unit.module)
            for inner in _using(module, unit)
            if inner is not module
        ]

    def leave(self) -> None:
        """Give up the claim."""
        for hook in self._hooks:
            hook.remove()
        self._unit.claims.remove(self)


class _Past:
    """A hook for calls of a module in ``module`` past the forward of its unit. [Note: Calls past a unit]"""

    def __init__(self, unit: Unit | None, module: nn.Module) -> None:
        self.unit = unit  # None: in a deep copy of the module, which nothing keeps
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> _Past:
        return _Past(None, self.module)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a forward of the unit, if its parameters are not shown already; the forward pre-hook of ``module``."""
        unit = self.unit
        if torch.compiler.is_compiling() or unit is None:
            return None
        if unit.handle.registrations.shows is not SHARDED_PARAMS and (unit.claims.in_use or not unit.is_outdated):
            return None
        hooks = UnitHooks.of(unit)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            ended.remove()
            return hooks.post_forward(self.module, args, kwargs, output)

        ended = module.register_forward_hook(after, with_kwargs=True, always_call=True)
        return hooks.pre_forward(self.module, args, kwargs, frames.of_module_call(1, None)[0])


def _using(module: nn.Module, unit: Unit) -> list[nn.Module]:
    """Yield ``module`` and modules in it, outside units below, that have or contain parameters which ``unit`` gathers."""
    below = [found for child in module.children() if unit_of(child) is None for found in _using(child, unit)]
    own = any(p is not None and owner_of(p) in unit.needs for p in module._parameters.values())
    return [module, *below] if own or below else []
