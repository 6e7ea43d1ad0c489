"""Ranks agree on whether to raise: if one rank has an error, all of them raise."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flatshard._runtime import Runtime


def on_any_rank(runtimes: Iterable[Runtime], flag: bool) -> bool:
    """Whether ``flag`` is True on any rank of these process groups. One all-reduce per group, in the same order on all ranks.

    The result of one group is the input to the next.
    """
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        if runtime.world_size > 1:
            told = torch.tensor([float(flag)], device=runtime.device)
            runtime.all_reduce_now(told, "max", "whether a rank has found an error")
            flag = bool(told.item())
    return flag
