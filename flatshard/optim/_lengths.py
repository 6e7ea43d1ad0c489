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

from flatshard._base.optimizers import Group, first_tensors, shorter
from flatshard._composable.construct.layout_plan import Cut, plan_layout
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, flat_param_of
from flatshard.optim._trial import Impossible

Forms = dict[str, tuple[type, torch.dtype]]
"""The form of the state for a length: the class and dtype of each value with dimensions."""


class _Split(NamedTuple):
    """A parameter that is cut between ranks."""

    flat: FlatParam
    number: int  # in the flat parameter
    forms_of: Callable[[int], Forms]  # for a length that `shorter` returns

    @property
    def numel(self) -> int:
        return self.flat.layout.params[self.number].numel

    def lengths(self, layout: FlatLayout) -> set[int]:
        """Return the lengths of its shards in ``layout``."""
        return {layout.shard_slices(rank)[self.number].numel for rank in layout.holders(self.number)}

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
    name = type(optimizer).__name__
    splits = [split for group in optimizer.param_groups for split in _splits(optimizer, group)]
    for split in splits:
        for length in sorted(split.lengths(split.flat.layout)):
            if not split.have_same_state([length]):
                full, shard = (split.forms_of(shorter(n)) for n in (split.numel, length))
                key = next(key for key in {**full, **shard} if full.get(key) != shard.get(key))
                return (
                    f"{name} keeps other state for other numbers of elements: {key!r} of "
                    f"{split.flat.layout.params[split.number].fqn!r} ({split.numel} elements) would be "
                    f"{_describe(full.get(key))}, and of a shard of {length}, which a rank has, it is "
                    f"{_describe(shard.get(key))}. Shard with layout=flatshard.layouts.{_cure(splits)}; or use "
                    f"flatshard.optim.WholeParameterOptimizer(params, {name}, ...), which works in any layout. If that is "
                    "meant, set `works_on_shards = True` on the optimizer"
                )
    return None


def _splits(optimizer: Optimizer, group: Group) -> Iterator[_Split]:
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
            forms_of, index = functools.partial(forms, param.dtype), flat.index_of(param)
            if index is None:
                _check_flat(optimizer, flat, forms_of)
            elif param._flatshard_info.is_cut:
                yield _Split(flat, index, forms_of)


def _check_flat(optimizer: Optimizer, flat: FlatParam, forms_of: Callable[[int], Forms]) -> None:
    """Raise if the state of a flat parameter is not elementwise, or differs from that of the parameters inside."""
    params = flat.layout.params
    lengths = {flat.layout.shard_numel, *(info.numel for info in params)}
    found = [forms_of(n) for n in sorted(set(map(shorter, lengths)))]
    if any(forms != found[0] for forms in found) or any(kind is not torch.Tensor for kind, _ in found[0].values()):
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps state by the number of elements, or for blocks of them. That of the flat "
            f"parameter which {params[0].fqn!r} is in would be of several parameters: build it on model.parameters(), not on "
            "flat_parameters(model)"
        )


def _describe(form: tuple[type, torch.dtype] | None) -> str:
    return "absent" if form is None else f"a {form[0].__name__} of {form[1]}"


def _cure(splits: list[_Split]) -> str:
    """Return the layout with the smallest blocks in which all shards have the right state. The largest cut nothing."""

    def is_right(block: int) -> bool:
        for split in splits:
            lengths = split.lengths(_in_blocks(split.flat, block)) - {split.numel}
            # Also with a block more, as other numbers of ranks cut elsewhere.
            if not split.have_same_state(lengths | {n + block for n in lengths}):
                return False
        return True

    longest = max(split.numel for split in splits)
    return f"Blocks({next(2**n for n in range(1, longest.bit_length() + 1) if is_right(2**n))})"


def _in_blocks(flat: FlatParam, block: int) -> FlatLayout:
    """Return the layout of a flat parameter that is cut between blocks of ``block`` elements."""
    shapes = [(info.fqn, info.shape, info.stride) for info in flat.layout.params]
    return plan_layout(shapes, flat.kind.dtype.itemsize, flat.layout.world_size, [Cut(block)] * len(shapes))
