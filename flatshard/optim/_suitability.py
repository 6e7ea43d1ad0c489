"""Whether an optimizer may step shards of its parameters.

[Note: Optimizers that look at shapes]
Muon on some rows of a matrix, or Adafactor on a slice, runs without an error but computes wrong updates. So optimizers are
checked before their first step, and again when they got more parameters or more modules were sharded. All ranks come to the
same result. Known classes are in a table; unknown ones are tried: [Note: Trials of optimizers], [Note: State by length].
Other code can call ``check_whole_parameters``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.errors import name_list
from flatshard._base.old_names import old_arguments
from flatshard._base.optimizers import defaults_of, params_of
from flatshard._composable.find import flat_of
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_parameter import full_shape, shard_info
from flatshard.optim._lengths import why_not_by_length
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._trial import Impossible, is_coupled, looks_at_whole
from flatshard.optim._whole import WholeParameterOptimizer

# Optimizers that look at shapes, by class name, as most are in other packages, and whether they can step empty parameters.
_SHAPE_AWARE = {
    **dict.fromkeys(("muon", "shampoo", "distributedshampoo", "soap", "lamb", "nvlamb", "fusedlamb", "lars"), True),
    **dict.fromkeys(("adafactor", "came", "sm3", "kron", "galoreadamw", "apolloadamw"), False),
}

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
            return why_unsuitable(optimizer) is None
        except RuntimeError:  # has another cure
            return True


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
    if (why := _why_not_full(params, optimizer_name, steps_empty=True)) is not None:
        raise RuntimeError(why)


def steps_empty_parts(optimizer: Optimizer) -> bool | None:
    """Return whether an optimizer that looks at shapes can step empty parameters, or None if it does not look at shapes."""
    if getattr(optimizer, "works_on_shards", False):
        return None
    return _SHAPE_AWARE.get(type(optimizer).__name__.lower())


def why_unsuitable(optimizer: Optimizer) -> str | None:
    """Return why the optimizer cannot step shards of parameters but ``WholeParameterOptimizer`` could, or None if it can.

    See [Note: Optimizers that look at shapes].

    Raises:
        RuntimeError: neither can.
    """
    if isinstance(optimizer, WholeParameterOptimizer):
        assert optimizer.inner is not None
        is_divided = any(_is_divided(shard_info(param)) for param in params_of(optimizer))
        if is_divided or not type(optimizer.inner).__module__.startswith("torch.optim"):
            with contextlib.suppress(Impossible):  # most likely it needs other arguments
                _try(optimizer, optimizer.inner)
        return None
    inner = optimizer.inner if isinstance(optimizer, OffloadedOptimizer) else optimizer
    params, name, steps_empty = params_of(optimizer), type(inner).__name__, steps_empty_parts(inner)
    if steps_empty is not None:
        return _why_not_full(params, name, steps_empty)
    if _is_known(inner):
        return None
    try:
        if (why := _try(optimizer, inner)) is not None:
            return why
    except Impossible as e:
        warnings.warn(
            f"flatshard cannot tell whether {name} may step shards of parameters, because a trial on a small matrix failed: "
            f"{type(e.__cause__).__name__}: {e.__cause__}. If it treats every element alone, set `works_on_shards = True` on "
            f"the optimizer. If not, use flatshard.optim.WholeParameterOptimizer(params, {name}, ...)",
            stacklevel=5,
        )
        return None
    with contextlib.suppress(Impossible):
        return why_not_by_length(inner)
    return None


def _is_known(optimizer: Optimizer) -> bool:
    """Return whether the optimizer treats every element alone, or says so, or the one inside of it is checked instead."""
    return (
        type(optimizer) in _ELEMENTWISE_TYPES
        or getattr(optimizer, "works_on_shards", False)
        or any(isinstance(value, Optimizer) for value in vars(optimizer).values())
    )


def _try(optimizer: Optimizer, inner: Optimizer) -> str | None:
    """Return why ``inner`` cannot step shards, by trials in each param group, or None. [Note: Trials of optimizers]

    Raises:
        RuntimeError: it cannot step some of the parameters alone.
        Impossible: it cannot be tried.
    """
    name, allow = type(inner).__name__, "If that is meant, set `works_on_shards = True` on the optimizer"
    in_full, by_unit = isinstance(optimizer, WholeParameterOptimizer), isinstance(optimizer, OffloadedOptimizer)
    tried = set()
    for settings in optimizer.param_groups:
        options = tuple(
            (key, bool(value)) for key, value in settings.items() if isinstance(value, bool | int | float | None)
        )
        for param in settings["params"]:
            info = shard_info(param)
            if not by_unit and (info is None or info.is_full):
                continue
            ndim = max(1, len(full_shape(param)))
            by_rows = None if info is None or in_full or not info.is_cut else info.by_rows
            if in_full and _is_divided(info):
                by_rows = True  # rows are matrices of a stack
            block = _block_of(param)
            # Parameters with the same options that are cut alike share a trial.
            if (case := (options, ndim, by_rows, block)) in tried:
                continue
            tried.add(case)
            which = "" if info is None else f", such as {info.fqn!r}"
            if is_coupled(inner, settings, ndim):
                raise RuntimeError(
                    f"{name} steps a parameter differently if it has other parameters: it computes something over all of "
                    f"them (a norm to clip by, say), and here it has only some at a time, or shards of them{which}. Turn "
                    "that option off, and call flatshard.clip_grad_norm_ before the step, or use an optimizer that treats "
                    f"parameters one by one. {allow}"
                )
            if by_rows is not None and looks_at_whole(inner, settings, ndim, by_rows, block):
                if in_full:
                    raise RuntimeError(
                        f"{name} looks at more than one matrix: in a trial it stepped a stack differently from its halves, "
                        f"and ranks have different experts of the same parameter{which}. Use a class that steps each "
                        f"matrix of a stack by itself, or that treats every element alone, such as AdamW. {allow}"
                    )
                return (
                    f"{name} looks at more than single elements: in a trial it stepped a full matrix differently from its "
                    f"shards, and ranks have shards{which}. Use flatshard.optim.WholeParameterOptimizer(params, {name}, "
                    f"...), which works in any layout, {_KEEP_WHOLE}. {allow}"
                )
    return None


def _is_divided(info: ShardInfo | None) -> bool:
    """Return whether a mesh divides the parameter's matrices, before it is sharded."""
    return info is not None and info.parallel is not None and info.parallel.is_sharded


def _block_of(param: nn.Parameter) -> int:
    """Return the number of elements in a block, between which a sharded parameter is cut."""
    flat = flat_of(param)
    index = None if flat is None else flat.index_of(param)
    return 1 if flat is None or index is None else flat.layout.params[index].block


def _why_not_full(params: Iterable[torch.Tensor], name: str, steps_empty: bool) -> str | None:
    """Return why an optimizer that looks at shapes cannot step ``params``, or None if no rank has a shard of one.

    ``steps_empty``: whether it can step empty parameters, as other ranks have where one has the full parameter.
    """
    sharded = [(p, i) for p in params if (i := shard_info(p)) is not None]
    infos = [info for _, info in sharded]
    if flat := [info.fqn for param, info in sharded if hasattr(param, "fqns")]:
        raise RuntimeError(
            f"{name} looks at whole parameters, and {flat[0]} has several in one: build it on model.parameters(), not "
            "on flat_parameters(model)"
        )
    parallel = [i.fqn for i in infos if _is_divided(i)]
    if parallel:
        raise RuntimeError(
            f"{name} looks at whole parameters, and no rank has the whole of {name_list(parallel, 3)}, which are "
            "sharded by tensor parallelism: use an optimizer that treats every element alone, such as AdamW"
        )
    if cut := [i.fqn for i in infos if i.is_cut]:
        return (
            f"{name} looks at whole parameters, but ranks have parts of {name_list(cut, 3)}: on parts it would compute "
            f"wrong updates. Use flatshard.optim.WholeParameterOptimizer(params, {name}, ...), which works in any layout"
            + (f", {_KEEP_WHOLE}" if steps_empty else "")
        )
    if not steps_empty and (empty := [i.fqn for i in infos if not i.is_full]):
        return (
            f"{name} cannot step parameters without elements, such as {empty[0]!r} on some ranks: use "
            f"flatshard.optim.WholeParameterOptimizer(params, {name}, ...)"
        )
    return None


def warn_of_lost_rule(optimizer: Optimizer) -> None:
    """Warn if a rule like ``len(p.shape) <= 1`` may have taken matrices for vectors, because their shards are 1-D."""
    groups = optimizer.param_groups
    filled = [group for group in groups if group["params"]]
    if len(filled) != 1:
        return
    params, decay = filled[0]["params"], filled[0].get("weight_decay")
    if len(groups) == 1 and (decay != 0 or not defaults_of(optimizer).get("weight_decay")):
        return
    cut = [p for p in params if len(full_shape(p)) > 1 and len(p.shape) == 1 and not hasattr(p, "fqns")]
    if cut and len(cut) < len(params):
        warnings.warn(
            f"all parameters of this {type(optimizer).__name__} are in one group, with weight_decay={decay}: matrices such "
            f"as {name_list((p._flatshard_info.fqn for p in cut), 3)}, and vectors. If a rule on p.shape made the groups: it "
            "sees this rank's shards, which are 1-D. Use p.ndim or len(flatshard.full_shape(p)) in the rule, make the groups "
            "before fully_shard, or shard with layout=flatshard.layouts.Rows()",
            stacklevel=5,
        )
