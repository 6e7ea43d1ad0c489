"""Finds out whether an optimizer keeps other state for shards of a parameter than for the full parameter.

[Note: State by length]
Some optimizers choose the form of their state by the number of elements: torchao's quantise parameters of whole blocks, of at
least 4096 elements, and keep plain tensors for others. They treat elements alike, but for a shard of an odd length they
compute other numbers than one process. A first step on zeros shows the state for a length. Each rank tries the lengths of all
ranks, so all come to the same result and the same cure: blocks whose length makes the state of the full parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from flatshard._base.errors import name_list
from flatshard._base.optimizers import Group, first_tensors, shorter
from flatshard._composable.construct.layout_plan import Cut, plan_layout
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, flat_param_of
from flatshard.optim._trial import Impossible

Forms = dict[str, tuple[type, torch.dtype]]
"""The form of the state for a length: the class and dtype of each value with dimensions."""


class _Cut(NamedTuple):
    """A parameter that is cut between ranks."""

    flat: FlatParam
    fqn: str
    numel: int
    lengths: frozenset[int]  # of its shards
    forms_of: Callable[[int], Forms]  # for a length that `shorter` returns

    def have_same_state(self, lengths: Iterable[int]) -> bool:
        """Return whether shards of these lengths have state in the form of the full parameter's."""
        full = self.forms_of(shorter(self.numel))
        return all(self.forms_of(n) == full for n in set(map(shorter, lengths)))


def why_not_by_length(optimizer: Optimizer) -> str | None:
    """Return why the optimizer cannot step its parameters as they are cut, or None if lengths do not change its state.

    Raises:
        RuntimeError: it steps flat parameters, and keeps other state for them than for single parameters.
        Impossible: its state cannot be found out.
    """
    name, cuts = type(optimizer).__name__, [cut for group in optimizer.param_groups for cut in _cuts(optimizer, group)]
    wrong = next((cut for cut in cuts if not cut.have_same_state(cut.lengths)), None)
    if wrong is None:
        return None
    length = next(n for n in sorted(wrong.lengths) if not wrong.have_same_state([n]))
    full, shard = (wrong.forms_of(shorter(n)) for n in (wrong.numel, length))
    key = next(key for key in {**full, **shard} if full.get(key) != shard.get(key))
    return (
        f"{name} keeps other state for other numbers of elements: {key!r} of {wrong.fqn!r} ({wrong.numel} elements) would be "
        f"{_describe(full.get(key))}, and of a part of {length}, which a rank has, it is {_describe(shard.get(key))}. Shard "
        f"with {_cure(cuts)}; or use flatshard.optim.WholeParameterOptimizer(params, {name}, ...), which works in any "
        "layout. If that is meant, set `works_on_shards = True` on the optimizer"
    )


def _cuts(optimizer: Optimizer, group: Group) -> Iterator[_Cut]:
    """Yield the parameters of a group that are cut between ranks."""

    @functools.cache
    def forms(dtype: torch.dtype, length: int) -> Forms:
        try:
            made = first_tensors(optimizer, group, length, dtype)
        except RuntimeError as e:
            raise Impossible from e
        return {key: (type(value), value.dtype) for key, value in made.items()}

    for param in group["params"]:
        flat = flat_param_of(param) if isinstance(param, ShardedParameter) else None
        if isinstance(flat, FlatParam):
            forms_of, index, layout = functools.partial(forms, param.dtype), flat.index_of(param), flat.layout
            numels = frozenset(info.numel for info in layout.params)
            if index is None:
                _check_flat(optimizer, _Cut(flat, layout.params[0].fqn, layout.shard_numel, numels, forms_of))
            elif param._flatshard_info.is_cut:
                info = layout.params[index]
                yield _Cut(flat, info.fqn, info.numel, _lengths(layout, index), forms_of)


def _check_flat(optimizer: Optimizer, flat: _Cut) -> None:
    """Raise if the state of a flat parameter is not elementwise. ``flat.lengths`` are those of the parameters inside."""
    forms = flat.forms_of(shorter(flat.numel))
    if not flat.have_same_state(flat.lengths) or any(kind is not torch.Tensor for kind, _ in forms.values()):
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps state by the number of elements, or for blocks of them. That of the flat "
            f"parameter which {flat.fqn!r} is in would be of several parameters: build it on model.parameters(), not on "
            "flat_parameters(model)"
        )


def _describe(form: tuple[type, torch.dtype] | None) -> str:
    return "absent" if form is None else f"a {form[0].__name__} of {form[1]}"


def _cure(cuts: list[_Cut]) -> str:
    """Return the layout with the least padding in which shards have the right state: blocks, and parameters kept whole."""
    longest = max(cut.numel for cut in cuts)
    plans = [(*_planned(cuts, 2**n), 2**n) for n in range(1, longest.bit_length())]
    _, names, block = min(plans, key=lambda plan: plan[0])
    whole = "flatshard.layouts.Whole(max_padding=math.inf)"
    if len(names) == len(cuts):
        return f"layout={whole}"
    rest = f", and give {name_list(names, 3)} the layout {whole} by a callable" if names else ""
    return f"layout=flatshard.layouts.Blocks({block}){rest}"


def _planned(cuts: list[_Cut], block: int) -> tuple[int, list[str]]:
    """Return the elements with padding if parameters are cut between such blocks, and the parameters that must not be cut."""
    total, whole = 0, set[str]()
    for flat in dict.fromkeys(cut.flat for cut in cuts):
        own, infos, size = [cut for cut in cuts if cut.flat is flat], flat.layout.params, flat.kind.dtype.itemsize
        shapes = [(info.fqn, info.shape, info.stride) for info in infos]
        while True:
            blocks = [Cut(info.numel if info.fqn in whole else block) for info in infos]
            layout = plan_layout(shapes, size, flat.layout.world_size, blocks)
            lengths = {info.fqn: _lengths(layout, i) - {info.numel} for i, info in enumerate(infos)}
            # Also with a block more, as other numbers of ranks cut elsewhere.
            wrong = {c.fqn for c in own if not c.have_same_state(lengths[c.fqn] | {n + block for n in lengths[c.fqn]})}
            if not wrong:
                break
            whole |= wrong
        total += layout.padded_numel
    return total, sorted(whole)


def _lengths(layout: FlatLayout, index: int) -> frozenset[int]:
    """Return the lengths of the shards of a parameter."""
    return frozenset(layout.shard_slices(rank)[index].numel for rank in layout.holders(index))
