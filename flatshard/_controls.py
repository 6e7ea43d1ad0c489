"""What a user may decide at run time: methods that run as forwards, when parameters are freed, what is gathered ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.utils.hooks import RemovableHandle

from flatshard._composable.exec_order import ChosenUnits
from flatshard._composable.forward_method import check_methods, register_methods
from flatshard._composable.state import Unit, owner_of, unit_of, units_below
from flatshard._config import as_reshard_after_forward, check_reshard_after_forward
from flatshard._errors import name_list
from flatshard._runtime import Runtime


def _unit(module: nn.Module, verb: str) -> Unit:
    """The unit that ``module`` is."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{verb} takes an nn.Module, got a {type(module).__name__}")
    if (unit := unit_of(module)) is not None:
        return unit
    kind = type(module).__name__
    owners = dict.fromkeys(owner for p in module.parameters() if (owner := owner_of(p)) is not None)
    if below := units_below(module):
        raise ValueError(
            f"{verb}: this {kind} is not a unit, but units lie in it: {name_list(u.fqn for u in below)}. Call fully_shard on "
            "it as well, or name one of these"
        )
    if owners:
        raise ValueError(
            f"{verb}: this {kind} is part of unit {name_list(u.fqn for u in owners)}, and is none itself: name that unit, or "
            "give the module a unit of its own by the policy"
        )
    raise ValueError(f"{verb}: this {kind} is not sharded; call fully_shard first")


def _units(module: nn.Module, recurse: bool, verb: str) -> list[Unit]:
    """The units of ``module`` and, with ``recurse``, of its submodules; at least one."""
    return (units_below(module) if recurse and isinstance(module, nn.Module) else []) or [_unit(module, verb)]


def register_forward_method(module: nn.Module, method_name: str | Iterable[str]) -> None:
    """Have calls of ``module.method_name(...)`` run the unit as calls of ``module(...)`` do.

    Its own parameters are gathered before, and freed after; outputs lead backward back to it. For ``generate``, ``encode``,
    ``training_step``: whatever uses parameters of ``module`` that no unit below it owns. Methods that only call other
    units, or ``module(...)`` itself, need it not. A generator function is a forward each time it is resumed; between two
    items the parameters are sharded. Module hooks do not run. ``torch.distributed.fsdp`` calls it
    ``register_fsdp_forward_method``.

    Args:
        module: a unit.
        method_name: the method's name, or several. What is registered already stays so.

    Raises:
        ValueError: ``module`` is not a unit, or has no such method. Nothing has been registered.
        NotImplementedError: the method is async.
    """
    unit = _unit(module, "register_forward_method")
    register_methods(unit, check_methods(module, method_name))


def set_reshard_after_forward(module: nn.Module, value: bool | int | None, recurse: bool = True) -> None:
    """Whether units free their parameters after forward and gather them again for backward, from the next forward on.

    Args:
        module: a unit, or with ``recurse`` a module that holds units.
        value: True frees them, in the outermost unit as well. False keeps them: one all-gather a step, more memory. None: as
            the strategy says. An int: the size of a smaller group to reshard to, see :func:`fully_shard`; then every rank of
            the world must make the same call.
        recurse: also the units below ``module``.

    Raises:
        ValueError: ``value`` is none of these, does not divide the number of ranks, or frees what a ``NO_SHARD`` unit
            always keeps; nothing has been changed.
    """
    units = _units(module, recurse, "set_reshard_after_forward")
    split: dict[Runtime, int] = {}
    for unit in units:
        try:
            check_reshard_after_forward(value, unit.config.strategy)
            size = as_reshard_after_forward(value, unit.context.runtime.world_size)
        except ValueError as e:
            raise ValueError(f"unit {unit.fqn or '<root>'!r}: {e}") from None
        if size is not None and not isinstance(size, bool):
            split.setdefault(unit.context.runtime, size)
    for runtime, size in split.items():
        runtime.split(size)
    for unit in units:
        unit.set_reshard_after_forward(value)


@contextlib.contextmanager
def keep_unsharded(module: nn.Module, recurse: bool = True) -> Iterator[None]:
    """Inside, units are gathered once, at first use, and stay: for generation and evaluation, where forwards are many.

    Forwards inside then communicate nothing. In-place changes of the parameters (an optimizer's step) are noticed, and the
    next forward gathers again; but not those of ``p.data``. ``module.parameters()`` are the user's sharded ones, as ever.
    On exit the units are freed, or where one is inside a forward, at the end of that. Memory: whole parameters in the
    compute dtype. All ranks must enter alike. They nest.

    Example::

        with torch.no_grad(), flatshard.keep_unsharded(model):
            for _ in range(100):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)

    Args:
        module: a unit, or with ``recurse`` a module that holds units.
        recurse: also the units below ``module``.

    Raises:
        ValueError: nothing in ``module`` is a unit.
        RuntimeError: from a forward inside, if parameters were replaced (``p.data = ...``, ``module.half()``) since entry.
    """
    units = list(dict.fromkeys(n for u in _units(module, recurse, "keep_unsharded") for n in u.needs))
    for unit in units:
        _begin_to_keep(unit)
    try:
        yield
    finally:
        for unit in units:
            unit.kept -= 1
            if not unit.kept:
                unit.kept_copies = None
                unit.free_if_unused()


def _begin_to_keep(unit: Unit) -> None:
    unit.kept += 1
    if unit.kept > 1 or unit.handle.is_sharded:
        return
    in_this_pass = unit.gathered_in == unit.context.pass_id and unit.context.is_running
    if in_this_pass or unit.holds or unit.gathered_in == -1:  # the last: by `unshard`
        unit.kept_places = unit.places()
    else:  # left by an earlier forward, and perhaps outdated
        unit.handle.slots.register_sharded()
        unit.handle.reshard()


def set_modules_to_forward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Gather ``modules``, in this order, while ``module`` computes forward: in place of the order of the last pass.

    Args:
        module: a unit.
        modules: units on the same process group and device; none of them gathers nothing ahead. None: the recorded order.

    Raises:
        ValueError: one of them is not a unit, or of another group, or ``module`` itself. Nothing has been changed.
    """
    verb = "set_modules_to_forward_prefetch"
    unit = _unit(module, verb)
    unit.forward_prefetch = _chosen(unit, modules, verb)


def set_modules_to_backward_prefetch(module: nn.Module, modules: Iterable[nn.Module] | None) -> None:
    """Gather ``modules``, in this order, while ``module`` computes backward: in place of the order in which forward ran.

    They are gathered when ``backward_prefetch`` says, or if that is None, before ``module``'s backward computes. One that
    backward does not come to is gathered in vain, and freed at backward's end.

    Args and raises: as :func:`set_modules_to_forward_prefetch`.
    """
    verb = "set_modules_to_backward_prefetch"
    unit = _unit(module, verb)
    unit.backward_prefetch = _chosen(unit, modules, verb)


def _chosen(unit: Unit, modules: Iterable[nn.Module] | None, verb: str) -> ChosenUnits[Unit] | None:
    if modules is None:
        return None
    if isinstance(modules, nn.Module) and unit_of(modules) is not None:
        raise TypeError(f"{verb} takes a list of modules, got a {type(modules).__name__}")
    chosen = [_unit(module, verb) for module in modules]
    for other in chosen:
        name = repr(other.fqn or "<root>")
        if other is unit:
            raise ValueError(f"{verb}: unit {name} cannot be gathered ahead of itself")
        if other.context is not unit.context:
            raise ValueError(
                f"{verb}: unit {name} is on another process group or device than {unit.fqn or '<root>'!r}, whose order of "
                "collectives it does not share: name units of one group"
            )
    return ChosenUnits(chosen)


def register_gradients_reduced_hook(module: nn.Module, hook: Callable[[nn.Module], object]) -> RemovableHandle:
    """Call ``hook(module)`` each time that the unit's gradients have been reduced into ``.grad``, during backward.

    At that moment each parameter's ``.grad`` is complete, and ``hook`` may step on them and set them to None: the memory of
    all gradients is never needed at once. It runs on the thread that runs backward, without gradient mode, after hooks
    of ``p.register_post_accumulate_grad_hook``; not under ``no_sync``, where nothing is reduced. An exception in it is one
    in backward. Deep copies of the module do not have it.

    Example::

        for unit in flatshard.describe(model).units:
            own = [params[fqn] for flat in unit.flats for fqn in flat.fqns]  # dict(model.named_parameters())
            optimizer = torch.optim.AdamW(own)
            def step(_, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()
            flatshard.register_gradients_reduced_hook(model.get_submodule(unit.fqn), step)

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        ValueError: ``module`` is not a unit.
        TypeError: ``hook`` is not callable.
    """
    unit = _unit(module, "register_gradients_reduced_hook")
    if not callable(hook):
        raise TypeError(f"register_gradients_reduced_hook takes a callable, got {hook!r}")
    handle = RemovableHandle(unit.reduced_callbacks)
    unit.reduced_callbacks[handle.id] = hook
    return handle
