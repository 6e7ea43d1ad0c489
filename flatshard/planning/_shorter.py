"""Blocks that a long model repeats, and the model with fewer of them. [Note: Long models]"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from flatshard.planning._choices import joined

LONG = 24
"""Least number of units of a long model."""


class Run(NamedTuple):
    """Blocks in a row that are alike."""

    holder: str  # the FQN of the module whose children they are
    first: int  # of its children
    length: int

    @property
    def names(self) -> list[str]:
        """The FQNs of the blocks."""
        return [joined(self.holder, str(self.first + number)) for number in range(self.length)]


def runs_of_blocks(module: nn.Module, units: Sequence[str]) -> list[Run]:
    """Return the rows of blocks that are alike and have the same units inside, or none if the model is not long."""
    found = []
    for run in _runs(module, units) if len(units) >= LONG else ():
        names = run.names
        inside = {tuple(unit[len(name) :] for unit in units if unit.startswith(f"{name}.")) for name in names}
        around = {*itertools.accumulate(run.holder.split("."), joined)}
        is_last = list(module.get_submodule(run.holder)._modules)[run.first :] == [n.rpartition(".")[2] for n in names]
        if is_last and around.isdisjoint(units) and len(inside) == 1:
            found.append(run)
    return found


def _runs(module: nn.Module, units: Sequence[str]) -> Iterator[Run]:
    """Yield the longest row of units that are alike, of each numbered list of modules."""
    known = set(units)
    for holder in dict.fromkeys(unit.rpartition(".")[0] for unit in units):
        children = module.get_submodule(holder)._modules
        names = [joined(holder, key) for key in children]
        if not isinstance(module.get_submodule(holder), nn.ModuleList | nn.Sequential) or not known.issuperset(names):
            continue
        kinds = [None if child is None else _kind(child) for child in children.values()]
        rows = [(kind, len(list(group))) for kind, group in itertools.groupby(kinds)]
        starts = itertools.accumulate((count for _, count in rows), initial=0)
        yield max(
            (Run(holder, start, count) for (kind, count), start in zip(rows, starts, strict=False) if kind is not None),
            key=lambda run: run.length,
            default=Run(holder, 0, 0),
        )


def _kind(block: nn.Module) -> Any:
    """Return a key that is equal for blocks that are alike."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    return type(block), str(block), tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def without(module: nn.Module, runs: Sequence[Run], counts: Sequence[int]) -> nn.Module:
    """Return a shallow copy of ``module`` that has only ``counts`` blocks of each of ``runs``."""
    root = _copied(module)
    for run, count in zip(runs, counts, strict=True):
        holder = root
        for name in run.holder.split(".") if run.holder else ():
            child = holder._modules[name]
            assert child is not None
            holder._modules[name] = _copied(child)
            holder = holder.get_submodule(name)
        children = list(holder._modules.values())
        del children[run.first + count // 2 : run.first + run.length - (count - count // 2)]
        holder._modules = {str(number): child for number, child in enumerate(children)}
    return root


def _copied(module: nn.Module) -> nn.Module:
    """Return a shallow copy of ``module`` with a dict of children of its own."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
