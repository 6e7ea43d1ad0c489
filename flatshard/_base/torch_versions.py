"""Differences between the supported versions of torch. No other file asks for a version."""

from __future__ import annotations

from typing import Any, Final

import torch

VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

ALL_GATHER: Final = "all_gather_single" if VERSION >= (2, 13) else "_allgather_base"
REDUCE_SCATTER: Final = "reduce_scatter_single" if VERSION >= (2, 13) else "_reduce_scatter_base"
ALL_TO_ALL: Final = "all_to_all_single" if VERSION >= (2, 13) else "alltoall_base"
"""The methods of a process group that this torch's own functions call. A group written in Python may lack other ones."""

UNSORTED: Final[dict[str, Any]] = {"sort_ranks": False} if VERSION >= (2, 12) else {}
"""Arguments with which ``torch.distributed.new_group`` keeps the order of its ranks. Empty if this torch sorts them."""

FSDP2_REDUCES_IN_PARAM_DTYPE: Final = VERSION < (2, 15)
"""Whether ``reduce_dtype=None`` in FSDP2's policy means the dtype of computation, as in FSDP1.

Since 2.15 it means the dtype of the gradients, which is that of the parameters: fp32, also where they compute in bf16.
"""
