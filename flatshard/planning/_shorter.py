"""A model with fewer of the blocks that it repeats, which is planned in place of a long one.

[Note: Long models]
Blocks that are alike take alike. So what a step of a long model takes follows from a model that has a few of them: each
stretch of a block in the middle is repeated as often as there are blocks, and what all blocks have between steps grows with
each. The search is made on what follows so, and the choice that it finds is planned itself, at its full length. If that plan
says something else, the search is made on plans of the whole model.

Units that are on the host differ from those on the device. So of blocks that are alike either all are, or a run of them at
the end: then the first half of those that remain is on the device, the other half on the host, and a block of each half is
repeated. At least half of ``KEPT`` are on each side. [Note: Units on the host]
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

LONG = 24
"""Units, from which models are shortened."""
KEPT = 8
"""Blocks that remain of those that are alike."""


class Run(NamedTuple):
    """Blocks in a row that are alike."""

    holder: str  # the FQN of the module whose children they are
    first: int  # of its children
    length: int


class Shortened(NamedTuple):
    """A model that has ``KEPT`` of each of ``runs``."""

    module: nn.Module
    like: list[int]  # for each unit of the whole model one of this model's
    runs: list[Run]
    firsts: list[int]  # for each of the runs: the unit of the whole model with which it begins
    grown: list[nn.Module]  # for each of the runs: the same with one block more of it


def shortened(module: nn.Module, units: Sequence[str]) -> Shortened | None:
    """``module`` with fewer of its ``units``. None: they are not alike, or few; or some have units inside."""
    runs = [run for run in runs_of(module, units) if run.length > 2 * KEPT] if len(units) >= LONG else []
    around = {holder for unit in units for holder in itertools.accumulate(unit.split(".")[:-1], joined)}
    if not runs or not around.isdisjoint(units):
        return None
    by_name = {name: at for at, name in enumerate(units)}
    gone, firsts = [0] * len(units), []
    for run in runs:
        keys = list(module.get_submodule(run.holder)._modules)
        firsts.append(by_name[joined(run.holder, keys[run.first])])
        for key in keys[run.first + KEPT // 2 : run.first + run.length - KEPT // 2]:
            gone[by_name[joined(run.holder, key)]] = 1
    like, kept = [], -1
    for is_gone in gone:
        kept += 0 if is_gone else 1
        like.append(kept)  # one that is gone is like the last one before it
    counts = [KEPT] * len(runs)
    grown = [without(module, runs, [*counts[:at], KEPT + 1, *counts[at + 1 :]]) for at in range(len(runs))]
    return Shortened(without(module, runs, counts), like, runs, firsts, grown)


def like_with(made: Shortened, on_host: Sequence[bool]) -> list[int]:
    """For each unit of the whole model one of the shortened one's that is in the same place. [Note: Long models]"""
    like = list(made.like)
    half = KEPT // 2
    for run, first in zip(made.runs, made.firsts, strict=True):
        hosted = sum(on_host[first : first + run.length])
        if 0 < hosted < run.length:
            begin = made.like[first]
            for start, count in ((0, run.length - hosted), (run.length - hosted, hosted)):
                for at in range(count):
                    same = min(at, half // 2 - 1) if at < count - (half - half // 2) else half - (count - at)
                    like[first + start + at] = begin + half * bool(start) + same
    return like


def joined(holder: str, key: str) -> str:
    return f"{holder}.{key}" if holder else key


def runs_of(module: nn.Module, units: Sequence[str]) -> Iterator[Run]:
    """The longest rows of units that are alike, one in each numbered list of modules."""
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
    tensors = (*block.named_parameters(), *block.named_buffers())
    return type(block), str(block), tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def without(module: nn.Module, runs: Sequence[Run], counts: Sequence[int]) -> nn.Module:
    """A shallow copy that has only so many blocks of each of ``runs``."""
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
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
