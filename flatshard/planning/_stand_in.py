"""The search on a shortened model, for that on the whole one. [Note: Long models]"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn

from flatshard.planning._choices import Costs
from flatshard.planning._settings import EVERYTHING, Setting, Step
from flatshard.planning._shorter import KEPT, Shortened, like_with
from flatshard.planning._timeline import Timeline

Search = Any
"""``_Search`` of ``_fit.py``, which imports this file."""


class StandIn:
    """The search on a shortened model, for that on the whole one. [Note: Long models]"""

    def __init__(self, whole: Search, made: Shortened) -> None:
        self.whole, self.made = whole, made
        self.growths: dict[tuple[int, Setting, bool], tuple[int, int]] = {}
        self.search = self._search_of(made.module)
        self.search.plan(Setting(), self.search.start)
        self.search._check_recompute()

    def _search_of(self, module: nn.Module) -> Search:
        whole = self.whole
        step = Step(module, whole.step.options, whole.step.others)
        names = [name for name in whole.names if _has(module, name)]
        return type(whole)(step, whole.ranks, names, whole.budget, whole.flops_per_byte, whole.recomputes)

    def setting(self, setting: Setting) -> Setting:
        """The same for the shortened model."""
        if not setting.offload or setting.offload == EVERYTHING:
            return setting
        hosts, names = set(setting.offload), self.search.names
        firsts = [self.made.like.index(unit) for unit in range(len(names))]
        offload = tuple(name for name, first in zip(names, firsts, strict=True) if self.whole.names[first] in hosts)
        return dataclasses.replace(setting, offload=offload)

    def can_have(self, on_host: Sequence[bool]) -> bool:
        """Whether the shortened model can stand for the whole one, if these units are on the host. [Note: Long models]"""
        for run, first in zip(self.made.runs, self.made.firsts, strict=True):
            flags = list(on_host[first : first + run.length])
            hosted = sum(flags)
            is_both = KEPT // 2 <= hosted <= run.length - KEPT // 2 and all(flags[run.length - hosted :])
            if hosted not in (0, run.length) and not is_both:
                return False
        return True

    def timeline(self, setting: Setting) -> Timeline:
        """That of the whole model."""
        here = self.setting(setting)
        short: Timeline = self.search._timeline(here)
        hosts = set(setting.offload)
        on_host = [name in hosts for name in self.whole.names]
        begins = more = 0
        for number, (run, first) in enumerate(zip(self.made.runs, self.made.firsts, strict=True)):
            at = self.made.like[first]
            kept = [name in here.offload for name in self.search.names[at : at + KEPT]]
            for hosted in {*kept}:
                times = on_host[first : first + run.length].count(hosted) - kept.count(hosted)
                grown = self._growth(number, here, hosted)
                begins += times * grown[0]
                more += times * grown[1]
        return short.repeated(self.whole.names, like_with(self.made, on_host), begins, more)

    def _growth(self, number: int, setting: Setting, hosted: bool) -> tuple[int, int]:
        """What one block more of the run of this ``number`` takes all the time, and what the optimizer takes more."""
        key = (
            number,
            dataclasses.replace(setting, limit=None, split=False),
            hosted,
        )  # which change nothing between steps
        if key not in self.growths:
            short = self.search._timeline(setting)
            search = self._search_of(self.made.grown[number])
            search.recomputes = self.search.recomputes
            middle = self.made.like[self.made.firsts[number]] + KEPT // 2
            if setting.offload != EVERYTHING:
                flags = [name in setting.offload for name in self.search.names]
                flags.insert(middle, hosted)
                setting = dataclasses.replace(setting, offload=tuple(itertools.compress(search.names, flags)))
            grown = Timeline([search.plan(setting, search.least)], search.names, setting.limit)
            grown.learn(search.least, search.plan(setting, search.least))
            steps = [line.taken(line.rows[-1], (None, None))[0] for line in (short, grown)]
            self.growths[key] = grown.begins - short.begins, steps[1] - steps[0]
        return self.growths[key]

    def costs(self, setting: Setting) -> Costs:
        """Those of the whole model."""
        costs: Costs = self.search._costs(self.setting(setting))
        like = self.made.like
        gather, flops = [costs.gather[unit] for unit in like], [costs.flops[unit] for unit in like]
        return dataclasses.replace(costs, gather=gather, flops=flops)


def _has(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True
