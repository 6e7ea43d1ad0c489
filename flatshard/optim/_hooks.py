"""Checks of optimizers of sharded parameters before they step.

[Note: Steps that change nothing]
Four mistakes would make ``step()`` return without an error and without effect. Inside ``no_sync``, and after it until they
are reduced, gradients are accumulated but not in ``.grad``. Inside ``summon_full_params`` a step changes the shards, which
the exit overwrites with the unsharded parameters. An optimizer that was built inside holds the unsharded parameters, which
nobody reads afterwards. And after ``p.data = ...`` the step of a flat parameter, or of a full one, would change the previous
memory of ``p``, while the next forward adopts the new one: so a step adopts what was replaced since the last step. Any other
step pays for two checks: that no queue holds gradients, and that no such context is active.

[Note: Optimizers that look at shapes]
Muon on some rows of a matrix, or Adafactor on a slice, runs without an error but computes wrong updates. So optimizers are
checked before their first step, and again when they got more parameters or more modules were sharded. All ranks come to the
same result. Known classes are in a table; unknown ones are tried: [Note: Trials of optimizers], [Note: State by length].
Other code can call ``check_whole_parameters``.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from flatshard._base.config import Until
from flatshard._base.errors import name_list
from flatshard._base.old_names import old_arguments
from flatshard._base.optimizers import defaults_of, params_of
from flatshard._composable.extensions import Extension
from flatshard._composable.features.grad_sync import check_reduced, held_units
from flatshard._composable.features.other_code import added_later
from flatshard._composable.features.summon import copy_names, summoned_units
from flatshard._composable.find import all_units, flat_of
from flatshard._composable.state import Unit
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.registrations import UNSHARDED
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard.checkpoint._optimizer_hooks import hook_optimizer
from flatshard.optim._lengths import why_not_by_length
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._trial import Impossible, check_one_by_one, looks_at_whole


class CheckedOptimizers:
    """A set of optimizers. An optimizer that got more parameters since (``add_param_group``) is no longer in it."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: Optimizer) -> bool:
        return self._counts.get(optimizer) == _count(optimizer)

    def add(self, optimizer: Optimizer) -> None:
        """Note that ``optimizer`` has been checked with the parameters that it has now."""
        self._counts[optimizer] = _count(optimizer)

    def clear(self) -> None:
        """Forget all optimizers, so that they are checked again."""
        self._counts.clear()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


_checked = CheckedOptimizers()
_adopted: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # `changes.count` at the last step
_kept: weakref.WeakKeyDictionary[Optimizer, list[nn.Parameter]] = (
    weakref.WeakKeyDictionary()
)  # `_kept_parameters` when it was checked
_LOW = (torch.bfloat16, torch.float16)
_checked_state = CheckedOptimizers()
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of state in 16 bits
_after_step: dict[Callable[..., None], RemovableHandle] = {}  # hooks for which some unit has a use


class Optimizers(Extension):
    """Registers the hooks that check optimizers before they step."""

    def set_up(self) -> None:
        register_optimizer_step_pre_hook(_before_step)
        _see_state_dicts()

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        _checked.clear()  # an optimizer may have stepped before its parameters were sharded
        _checked_state.clear()
        if any([_keeps(unit.config) for unit in made]):
            _call_after_steps(_note_step)
        if any([flat.kind.dtype in _LOW and flat.kind.is_trainable for unit in made for flat in unit.handle.flats]):
            _call_after_steps(_warn_of_low_precision)


def _call_after_steps(hook: Callable[..., None]) -> None:
    if hook not in _after_step:
        _after_step[hook] = register_optimizer_step_post_hook(hook)


def _warn_of_low_precision(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, once, if the optimizer keeps its state for sharded parameters in bf16 or fp16."""
    if optimizer in _checked_state or optimizer in _warned:
        return
    _checked_state.add(optimizer)
    found = [
        info.fqn
        for p, state in optimizer.state.items()
        if (info := shard_info(p)) is not None
        and p.dtype in _LOW
        and any(isinstance(v, torch.Tensor) and v.dtype in _LOW for v in state.values())
    ]
    if found:
        _warned.add(optimizer)
        warnings.warn(
            f"{type(optimizer).__name__} keeps its state for {name_list(found, 3)} in 16 bits, because these sharded "
            "parameters have 16 bits: small updates are rounded to zero, and training stalls. Load the model in float32 and "
            "pass mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) to fully_shard",
            stacklevel=2,
        )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Mark stepped parameters of units that stay gathered until a change as changed, alike on all ranks.

    Version counters do not show a step in C++ through a pointer, or of an optimizer that skips empty shards.
    """
    increment_version([p for p in _kept.get(optimizer, ()) if p.grad is not None])


def _kept_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters in units that stay gathered until a change, alone or in flat parameters.

    Shards without elements are among them: other ranks gather after the step, so this one must, too.
    """
    kept = [flat for unit in all_units() if _keeps(unit.config) for flat in unit.handle.flats]
    ids = {id(p) for flat in kept for p in (*flat.params, flat.shard_param)}
    return [p for p in params_of(optimizer) if id(p) in ids and full_shape(p).numel()]


def _take_adopted(optimizer: Optimizer) -> None:
    """Replace parameters that the user registered in place of sharded ones, as ``load_state_dict(assign=True)`` does.

    The optimizer was built before flatshard noticed.
    """
    for group in optimizer.param_groups:
        adopted = {p: own for p in group["params"] if (own := p.__dict__.get("_flatshard_adopted")) is not None}
        if adopted:  # several may stand for one tied parameter, which stays tied
            group["params"][:] = dict.fromkeys(adopted.get(p, p) for p in group["params"])
            for param in adopted.keys() & optimizer.state.keys():
                optimizer.state[adopted[param]] = optimizer.state.pop(param)


def _keeps(config: UnitConfig) -> bool:
    return config.strategy.placements.until is Until.CHANGE or config.strategy.joins_axes


def _see_state_dicts() -> None:
    """Hook optimizers of sharded parameters before their state is read. [Note: What an optimizer hands out]"""
    of_torch = Optimizer.state_dict

    @functools.wraps(of_torch)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        _take_adopted(self)
        if any(isinstance(p, ShardedParameter) for p in params_of(self)):
            hook_optimizer(self)
        return of_torch(self)

    Optimizer.state_dict = state_dict  # type: ignore[method-assign]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check the optimizer, and return other arguments or None. ``args``: the optimizer, and perhaps a closure."""
    _check_moment(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        _check_held(optimizer)
    if _adopted.get(optimizer) != changes.count:
        for unit in _stepped(all_units(), {id(p) for p in params_of(optimizer)}):
            if not unit.claims.in_use:
                unit.handle.check_parameters()
        _take_adopted(optimizer)
        _adopted[optimizer] = changes.count
    if optimizer not in _checked:
        _kept[optimizer] = _kept_parameters(optimizer)
        check_optimizer(optimizer)
    if not callable(closure):
        return None

    def computed() -> Any:
        loss = closure()  # which may run the last backward of several
        _check_held(optimizer)
        return loss

    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], computed, *args[2:]), rest


def check_optimizer(optimizer: Optimizer) -> None:
    """Check once, before its first step, that ``optimizer`` can step its parameters.

    Raises:
        RuntimeError: it cannot. Nothing has been stepped.
    """
    params = params_of(optimizer)
    if plain := [p for p in params if not isinstance(p, ShardedParameter)]:
        if _holds_unsharded(type(optimizer).__name__, plain):
            return
        _refuse_added(optimizer, {id(p) for p in plain if p.requires_grad})
    if any(isinstance(p, ShardedParameter) for p in params):
        if (why := _why_not_parts(optimizer, params)) is not None:
            raise RuntimeError(why)
        hook_optimizer(optimizer)
        _check_lost_rule(optimizer)
    _checked.add(optimizer)


def _check_moment(optimizer: Optimizer) -> None:
    """Raise if the step is inside ``summon_full_params``. [Note: Steps that change nothing]"""
    if not summoned_units:
        return
    params = {id(p) for p in params_of(optimizer)}
    name = type(optimizer).__name__
    if found := _stepped([u for units in summoned_units for u in units], params):
        units = name_list((unit.fqn for unit in found), 3)
        raise RuntimeError(
            f"{name}.step inside summon_full_params of units {units}: the step would change the sharded "
            "parameters, and the end of the `with` block would overwrite them. Step after the block"
        )


def _check_held(optimizer: Optimizer) -> None:
    """Raise if units hold gradients (``no_sync``), and warn if there are none. [Note: Steps that change nothing]"""
    if held := held_units():
        params = {id(p) for p in params_of(optimizer)}
        check_reduced(_stepped(held, params), f"{type(optimizer).__name__}.step")
    if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        _warn_of_no_gradients(optimizer)


def _warn_of_no_gradients(optimizer: Optimizer) -> None:
    """Warn if units have run forward and no backward has reached them: ``backward(inputs=...)`` finds no parameters."""
    found = [
        u for u in _stepped(all_units(), {id(p) for p in params_of(optimizer)}) if u in u.context.reductions.units()
    ]
    if found:
        warnings.warn(
            f"{type(optimizer).__name__}.step changes nothing: no parameter has a gradient, and no backward has reached "
            f"units {name_list((unit.fqn for unit in found), 3)} since they ran. loss.backward(inputs=...) and "
            "torch.autograd.grad do not find sharded parameters: call loss.backward(), and freeze what shall get none",
            stacklevel=5,
        )


def _stepped(units: Iterable[Unit], params: set[int]) -> list[Unit]:
    """Return the units that own any of ``params``, which are ids."""
    owned = [(u, p) for u in units for f in u.handle.flats for p in (f.shard_param, *f.params)]
    return list(dict.fromkeys(unit for unit, param in owned if id(param) in params))


def _holds_unsharded(optimizer: str, params: Iterable[torch.Tensor]) -> bool:
    """Return whether some of ``params`` are unsharded parameters of modules now. Then the next step must check again.

    Raises:
        RuntimeError: modules have them no more. [Note: Steps that change nothing]
    """
    wanted = {id(p) for p in params}
    found: dict[int, tuple[str, bool]] = {}  # by id: the FQN, and whether a module has the parameter now
    for unit in all_units():
        shows = unit.handle.registrations.shows
        copies = shows.values() if isinstance(shows, dict) else ()
        found.update((id(p), (copy_names.get(p, ""), True)) for p in copies if id(p) in wanted)
        whole = shows is UNSHARDED and not any(claim.uses and not claim.shown_to_user for claim in unit.claims)
        for flat in unit.handle.flats:
            for info, compute in zip(flat.layout.params, flat.unsharded.params, strict=True):
                if id(compute) in wanted:
                    found[id(compute)] = info.fqn, whole
    found = {id(p): (name, False) for p, name in copy_names.items() if id(p) in wanted} | found
    if gone := [fqn for fqn, is_shown in found.values() if not is_shown]:
        raise RuntimeError(
            f"{optimizer} was built inside summon_full_params or unshard: it steps {name_list(gone, 3)} as unsharded "
            "parameters, which get no gradients and which nobody reads any more. Build it outside, from model.parameters()"
        )
    return bool(found)


def _refuse_added(optimizer: Optimizer, plain: set[int]) -> None:
    """Raise if the optimizer steps parameters that were registered after ``fully_shard``: [Note: Added after sharding].

    ``plain``: ids of its trainable parameters that are not sharded.
    """
    found: dict[int, str] = {}
    for unit in sorted(all_units(), key=lambda unit: len(unit.fqn)):  # outermost first, so that FQNs are complete
        if max(unit.runtime.world_size, getattr(unit.handle.ranks.replicas, "world_size", 1)) > 1:
            for _, fqn, param in added_later(unit.module):
                if id(param) in plain:
                    found.setdefault(id(param), f"{unit.fqn}.{fqn}" if unit.fqn else fqn)
    if found:
        raise RuntimeError(
            f"{type(optimizer).__name__} steps {name_list(found.values(), 3)}, registered in a sharded module after "
            "fully_shard: nobody averages their gradients, so they would differ between ranks. Add modules and parameters "
            "(adapters, heads) before fully_shard, or call fully_shard on each new module and then build the optimizer. To "
            "average them yourself, add them before fully_shard and pass them as ignored_states"
        )


# Optimizers that look at shapes, by class name, as most are in other packages, and whether they can step empty parameters.
_SHAPE_AWARE = {
    **dict.fromkeys(("muon", "shampoo", "distributedshampoo", "soap", "lamb", "nvlamb", "fusedlamb", "lars"), True),
    **dict.fromkeys(("adafactor", "came", "sm3", "kron", "galoreadamw", "apolloadamw"), False),
}


def steps_empty_parts(optimizer: Optimizer) -> bool | None:
    """Return whether an optimizer that looks at shapes can step empty parameters, or None if it does not look at shapes."""
    if getattr(optimizer, "works_on_shards", False):
        return None
    return _SHAPE_AWARE.get(type(optimizer).__name__.lower())


# Optimizers that treat every element independently, with any options.
_ELEMENTWISE = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
_ELEMENTWISE_TYPES = {*(getattr(torch.optim, name) for name in _ELEMENTWISE), torch.optim.SparseAdam}


# The default limit of padding would still cut parameters of small units.
_KEEP_WHOLE = (
    "or shard with layout=flatshard.layouts.Whole(max_padding=math.inf), which cuts no parameter and pads as it must"
)


def works_on_shards(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` may step its parameters as they are sharded. :class:`WholeParameterOptimizer` always may.

    The result is False if its first step would raise because it looks at more than single elements and ranks have shards of
    its parameters. It is the same on all ranks, without communication. Nothing is stepped.

    Example::

        optimizer = torch.optim.Adafactor(model.parameters())
        if not flatshard.optim.works_on_shards(optimizer):
            optimizer = flatshard.optim.WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor)

    Args:
        optimizer: any optimizer, before its first step.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step warns
        try:
            return _why_not_parts(optimizer, params_of(optimizer)) is None
        except RuntimeError:  # has another cure
            return True


def _why_not_parts(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> str | None:
    """Return why the optimizer cannot step shards of parameters but ``WholeParameterOptimizer`` could, or None if it can.

    See [Note: Optimizers that look at shapes].

    Raises:
        RuntimeError: neither can.
    """
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer = optimizer.inner
    kind, name, steps_empty = type(optimizer), type(optimizer).__name__, steps_empty_parts(optimizer)
    if steps_empty is not None:
        if (why := _why_not_whole(params, name, steps_empty)) is not None:
            return why
        scattered = [i for p in params if (i := shard_info(p)) is not None and not i.is_whole]
        if not steps_empty and scattered:
            return (
                f"{name} cannot step parameters without elements, such as {scattered[0].fqn!r} on some ranks: use "
                f"flatshard.optim.WholeParameterOptimizer(params, {name}, ...)"
            )
    elif kind not in _ELEMENTWISE_TYPES and not (
        getattr(optimizer, "works_on_shards", False)
        or getattr(optimizer, "steps_whole_parameters", False)
        or any(isinstance(value, Optimizer) for value in vars(optimizer).values())  # that one is checked itself
    ):
        if (why := _try_it(optimizer)) is not None:
            return why
        with contextlib.suppress(Impossible):
            return why_not_by_length(optimizer)
    return None


def _try_it(optimizer: Optimizer) -> str | None:
    """Try each param group, and return why the optimizer cannot step shards, or None. [Note: Trials of optimizers]"""
    name = type(optimizer).__name__
    allow = "If that is meant, set `works_on_shards = True` on the optimizer"
    tried = set()
    for settings in optimizer.param_groups:
        options = tuple(
            (key, bool(value)) for key, value in settings.items() if isinstance(value, bool | int | float | None)
        )
        for param in settings["params"]:
            info = shard_info(param)
            if info is None or info.is_whole:
                continue
            ndim, is_cut, by_rows, block = max(1, len(info.shape)), info.is_cut, info.by_rows, _block_of(param)
            # Parameters with the same options that are cut alike share a trial.
            if (case := (options, ndim, is_cut, by_rows, block)) in tried:
                continue
            tried.add(case)
            try:
                check_one_by_one(optimizer, settings, ndim, info.fqn, f". {allow}")
                looks = is_cut and looks_at_whole(optimizer, settings, ndim, by_rows, block)
            except Impossible as e:
                warnings.warn(
                    f"flatshard cannot tell whether {name} may step parts of parameters, such as {info.fqn!r}, because a "
                    f"trial on a small matrix failed: {type(e.__cause__).__name__}: {e.__cause__}. If {name} treats every "
                    "element alone, set `works_on_shards = True` on the optimizer. If not, use "
                    f"flatshard.optim.WholeParameterOptimizer(params, {name}, ...)",
                    stacklevel=6,
                )
                return None
            if looks:
                return (
                    f"{name} looks at more than single elements: in a trial it stepped a whole matrix differently from "
                    f"its parts, and ranks have parts of {info.fqn!r}. Use "
                    f"flatshard.optim.WholeParameterOptimizer(params, {name}, ...), which works in any layout, "
                    f"{_KEEP_WHOLE}. {allow}"
                )
    return None


def _block_of(param: nn.Parameter) -> int:
    """Return the number of elements in a block, between which a sharded parameter is cut."""
    flat = flat_of(param)
    index = None if flat is None else flat.index_of(param)
    return 1 if flat is None or index is None else flat.layout.params[index].block


def _check_lost_rule(optimizer: Optimizer) -> None:
    """Warn if a rule like ``len(p.shape) <= 1`` may have taken matrices for vectors, because their shards are 1-D.

    Raises:
        RuntimeError: a group with weight decay is empty, and one without has matrices and vectors.
    """
    settings = optimizer.param_groups
    filled = [each for each in settings if each["params"]]
    default = defaults_of(optimizer).get("weight_decay")
    if len(filled) != 1 or (len(settings) == 1 and not (default and filled[0].get("weight_decay") == 0)):
        return
    cut = [p for p in filled[0]["params"] if len(full_shape(p)) > 1 and len(p.shape) == 1 and not hasattr(p, "fqns")]
    if cut and len(cut) < len(filled[0]["params"]):
        decay, names = filled[0].get("weight_decay"), name_list((p._flatshard_info.fqn for p in cut), 3)
        told = (
            f"all parameters of this {type(optimizer).__name__} are in one group, with weight_decay={decay}: matrices such "
            f"as {names}, and vectors. If a rule on p.shape made the groups: it sees this rank's parts, which are "
            "1-D. Use p.ndim or len(flatshard.full_shape(p)) in the rule, make the groups before fully_shard, or shard with "
            "layout=flatshard.layouts.Rows()"
        )
        if not decay and any(not each["params"] and each.get("weight_decay") for each in settings):
            raise RuntimeError(f"{told}. If it is meant, leave the empty group out")
        warnings.warn(told, stacklevel=5)


@old_arguments(optimizer="optimizer_name")
def check_whole_parameters(params: Iterable[torch.Tensor], optimizer_name: str = "this optimizer") -> None:
    """Raise if a parameter is cut between ranks, for optimizers that look at more than single elements.

    All ranks come to the same result, without communication. flatshard calls it before the first step of optimizers named
    Muon, Shampoo, SOAP, LAMB, LARS, Adafactor and similar, unless they have an attribute ``works_on_shards = True``.
    Optimizers of unknown classes are tried on a small matrix.

    Example::

        whole = flatshard.layouts.Whole(max_padding=math.inf)
        flatshard.fully_shard(model, policy={Block}, layout=whole)
        flatshard.optim.check_whole_parameters(model.parameters(), "MyShampoo")

    Args:
        params: sharded and plain parameters.
        optimizer_name: for the message.

    Raises:
        RuntimeError: a parameter is cut between ranks, has 1-D shards although it has more dimensions, or is sharded by
            tensor parallelism.
    """
    if (why := _why_not_whole(params, optimizer_name, steps_empty=True)) is not None:
        raise RuntimeError(why)


def _why_not_whole(params: Iterable[torch.Tensor], optimizer: str, steps_empty: bool) -> str | None:
    """Return why an optimizer that looks at shapes cannot step ``params``, or None if no rank has a part of one.

    ``steps_empty``: whether it can step empty parameters, as other ranks have where one has the full parameter.
    """
    sharded = [(p, i) for p in params if (i := shard_info(p)) is not None]
    infos = [info for _, info in sharded]
    if flat := [info.fqn for param, info in sharded if hasattr(param, "fqns")]:
        raise RuntimeError(
            f"{optimizer} looks at whole parameters, and {flat[0]} has several in one: build it on model.parameters(), not "
            "on flat_parameters(model)"
        )
    parallel = [i.fqn for i in infos if i.parallel is not None and any(p.is_shard() for p in i.parallel.placements)]
    if parallel:
        raise RuntimeError(
            f"{optimizer} looks at whole parameters, and no rank has the whole of {name_list(parallel, 3)}, which are "
            "sharded by tensor parallelism: use an optimizer that treats every element alone, such as AdamW"
        )
    if cut := [i.fqn for i in infos if i.is_cut]:
        return (
            f"{optimizer} looks at whole parameters, but ranks have parts of {name_list(cut, 3)}: on parts it would compute "
            f"wrong updates. Use flatshard.optim.WholeParameterOptimizer(params, {optimizer}, ...), which works in any layout"
            + (f", {_KEEP_WHOLE}" if steps_empty else "")
        )
    return None
