"""Differences between the supported versions of torch. No other file asks for a version."""

from __future__ import annotations

from typing import Any, Final

import torch

VERSION: Final = tuple(int(part) for part in torch.__version__.split(".")[:2])

ALL_GATHER: Final = "all_gather_single" if VERSION >= (2, 13) else "all_gather_into_tensor"
REDUCE_SCATTER: Final = "reduce_scatter_single" if VERSION >= (2, 13) else "reduce_scatter_tensor"
"""The names of these functions of ``torch.distributed``. torch 2.13 renamed them, and keeps the old names as aliases."""

UNSORTED: Final[dict[str, Any]] = {"sort_ranks": False} if VERSION >= (2, 12) else {}
"""Arguments with which ``torch.distributed.new_group`` keeps the order of its ranks. Empty if this torch sorts them."""

FSDP2_REDUCES_IN_PARAM_DTYPE: Final = VERSION < (2, 15)
"""Whether ``reduce_dtype=None`` in FSDP2's policy means the dtype of computation, as in FSDP1.

Since 2.15 it means the dtype of the gradients, which is that of the parameters: fp32, also where they compute in bf16.
"""
