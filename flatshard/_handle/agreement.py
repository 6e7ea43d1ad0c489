"""What ranks tell each other before they raise, so that all of them do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flatshard._runtime import Runtime


def on_any_rank(runtimes: Iterable[Runtime], flag: bool) -> bool:
    """Whether any rank of these process groups gives True; one all-reduce each, in the same order on all ranks.

    What a rank learns from one group it tells the next.
    """
    for runtime in sorted({r.number: r for r in runtimes}.values(), key=lambda r: r.number):
        if runtime.world_size > 1:
            told = torch.tensor([float(flag)], device=runtime.device)
            runtime.all_reduce_now(told, "max")
            flag = bool(told.item())
    return flag
