"""A note on errors of torch that end the script, if they come from a shard beside a tensor of the full shape.

[Note: Errors in C]
``average.lerp_(p, 0.1)``, with a full average and the sharded parameter ``p``, runs no code of ours: a sharded parameter has
no ``__torch_function__``, as optimizers would pay for it (sharded_parameter.py). So torch's error about two sizes is all that
its user gets. Python calls ``sys.excepthook`` with an error that nobody catches. There the frames that it has left still have
their variables, and a sharded parameter among them explains the sizes. Torch's own prefix, ``[rank0]:``, comes the same way.
Notebooks have another hook, and show torch's error alone.
"""

from __future__ import annotations

import itertools
import re
import sys
from types import TracebackType

import torch

from flatshard._base import frames
from flatshard._composable.extensions import Extension
from flatshard._handle.tensors.sharded_parameter import shard_info

_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")


class Uncaught(Extension):
    """Notes on errors that nobody catches."""

    def set_up(self) -> None:
        shown = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if (note := explain_sizes(error)) is not None:
                error.add_note(note)
            shown(kind, error, trace)

        sys.excepthook = excepthook


def explain_sizes(error: BaseException) -> str | None:
    """Return why torch found two sizes that differ, if a shard among the variables explains it; else None."""
    found = _SIZES.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    one, other = map(int, found.groups())
    pairs = (one, other), (other, one)
    for variables in frames.variables_left_by(error):
        values = variables.values()
        lists = [value for value in values if isinstance(value, list | tuple)]
        for value in itertools.chain(values, *lists):
            info = shard_info(value) if isinstance(value, torch.Tensor) else None
            if info is not None and any(a in info.part_shape and b in info.full_shape for a, b in pairs):
                return info.explain_full_shape("torch's operation")
    return None
