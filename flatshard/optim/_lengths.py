"""Finds out whether an optimizer keeps other state for parts of a parameter than for the whole.

[Note: State by length]
Some optimizers choose the form of their state by the number of elements: those of torchao quantise whole blocks only, of 4096
elements at least, and keep plain tensors for the rest. They treat every element alike, but with a part of an odd length they
compute other numbers than one process. Which state an optimizer makes, a first step on zeros shows, for the lengths that all
ranks have. So all come to the same result, and to the same cure: blocks whose length makes the state of the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from flatshard._composable.construct.layout_plan import Cut, plan_layout
from flatshard._errors import name_list
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, home_of
from flatshard._optimizers import Group, first_tensors, shorter
from flatshard.optim._trial import Impossible

Forms = dict[str, tuple[type, torch.dtype]]
"""The state that is made for some length: the class and dtype of each value that has dimensions."""


class _Cut(NamedTuple):
    """A parameter that ranks have parts of."""

    flat: FlatParam
    fqn: str
    numel: int
    parts: frozenset[int]  # their lengths
    forms_of: Callable[[int], Forms]  # of a length that `shorter` gives

    def is_same(self, lengths: Iterable[int]) -> bool:
        """Whether parts of these lengths have the state of the whole."""
        whole = self.forms_of(shorter(self.numel))
        return all(self.forms_of(n) == whole for n in set(map(shorter, lengths)))


def why_not_by_length(optimizer: Optimizer) -> str | None:
    """Why the optimizer cannot step its parameters as they are cut. None: lengths change no state.

    Raises:
        RuntimeError: it steps flat parameters, and keeps other state of them than of single parameters.
        Impossible: it is not known which state it keeps.
    """
    name, cuts = type(optimizer).__name__, [cut for group in optimizer.param_groups for cut in _cuts(optimizer, group)]
    wrong = next((cut for cut in cuts if not cut.is_same(cut.parts)), None)
    if wrong is None:
        return None
    length = next(n for n in sorted(wrong.parts) if not wrong.is_same([n]))
    of_whole, of_part = (wrong.forms_of(shorter(n)) for n in (wrong.numel, length))
    key = next(key for key in {**of_whole, **of_part} if of_whole.get(key) != of_part.get(key))
    return (
        f"{name} keeps other state for other numbers of elements: {key!r} of {wrong.fqn!r} ({wrong.numel} elements) would be "
        f"{_told(of_whole.get(key))}, and of a part of {length}, which a rank has, it is {_told(of_part.get(key))}. Shard "
        f"with {_cure(cuts)}; or use flatshard.optim.WholeParameterOptimizer(params, {name}, ...), which works in any "
        "layout. If that is meant, set `works_on_shards = True` on the optimizer"
    )


def _cuts(optimizer: Optimizer, group: Group) -> Iterator[_Cut]:
    """Yield the parameters of a group that are cut."""

    @functools.cache
    def forms(dtype: torch.dtype, length: int) -> Forms:
        try:
            made = first_tensors(optimizer, group, length, dtype)
        except RuntimeError as e:
            raise Impossible from e
        return {key: (type(value), value.dtype) for key, value in made.items()}

    for param in group["params"]:
        flat = home_of(param) if isinstance(param, ShardedParameter) else None
        if isinstance(flat, FlatParam):
            forms_of, index, layout = functools.partial(forms, param.dtype), flat.index_of(param), flat.layout
            numels = frozenset(info.numel for info in layout.params)
            if index is None:
                _check_flat(optimizer, _Cut(flat, layout.params[0].fqn, layout.shard_numel, numels, forms_of))
            elif param._flatshard_info.is_cut:
                info = layout.params[index]
                yield _Cut(flat, info.fqn, info.numel, _lengths(layout, index), forms_of)


def _check_flat(optimizer: Optimizer, flat: _Cut) -> None:
    """Raise if the state of a flat parameter is none of single elements. ``parts``: its single parameters."""
    forms = flat.forms_of(shorter(flat.numel))
    if not flat.is_same(flat.parts) or any(kind is not torch.Tensor for kind, _ in forms.values()):
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps state by the number of elements, or for blocks of them. That of the flat "
            f"parameter which {flat.fqn!r} is in would be of several parameters: build it on model.parameters(), not on "
            "flat_parameters(model)"
        )


def _told(form: tuple[type, torch.dtype] | None) -> str:
    return "absent" if form is None else f"a {form[0].__name__} of {form[1]}"


def _cure(cuts: list[_Cut]) -> str:
    """The layout with the least padding in which all parts have the state of the whole: blocks, and some that are not cut."""
    longest = max(cut.numel for cut in cuts)
    plans = [(*_planned(cuts, 2**n), 2**n) for n in range(1, longest.bit_length())]
    _, names, block = min(plans, key=lambda plan: plan[0])
    whole = "flatshard.layouts.Whole(max_padding=math.inf)"
    if len(names) == len(cuts):
        return f"layout={whole}"
    rest = f", and give {name_list(names, 3)} the layout {whole} by a callable" if names else ""
    return f"layout=flatshard.layouts.Blocks({block}){rest}"


def _planned(cuts: list[_Cut], block: int) -> tuple[int, list[str]]:
    """If parameters are cut between such blocks: the elements with padding; and those that must not be cut."""
    total, whole = 0, set[str]()
    for flat in dict.fromkeys(cut.flat for cut in cuts):
        own, infos, size = [cut for cut in cuts if cut.flat is flat], flat.layout.params, flat.kind.dtype.itemsize
        shapes = [(info.fqn, info.shape, info.stride) for info in infos]
        while True:
            blocks = [Cut(info.numel if info.fqn in whole else block) for info in infos]
            layout = plan_layout(shapes, size, flat.layout.world_size, blocks)
            lengths = {info.fqn: _lengths(layout, i) - {info.numel} for i, info in enumerate(infos)}
            # With a block more, too: other ranks or units cut elsewhere.
            wrong = {c.fqn for c in own if not c.is_same(lengths[c.fqn] | {n + block for n in lengths[c.fqn]})}
            if not wrong:
                break
            whole |= wrong
        total += layout.padded_numel
    return total, sorted(whole)


def _lengths(layout: FlatLayout, index: int) -> frozenset[int]:
    """The lengths of the shards that ranks have of a parameter."""
    return frozenset(layout.shard_slices(rank)[index].numel for rank in layout.holders(index))
