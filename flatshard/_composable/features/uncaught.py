"""Notes on errors of torch that end the script, if a shard explains them.

[Note: Errors in C]
``average.lerp_(p, 0.1)``, with a full average and the sharded parameter ``p``, runs no code of ours: a sharded parameter has
no ``__torch_function__``, as optimizers would pay for it (sharded_parameter.py). So torch's error about two sizes is all that
its user gets. The same holds for ``torch.autograd.grad`` with respect to ``p``. Python calls ``sys.excepthook`` with an error
that nobody catches. There the frames that it has left still have their variables, and a sharded parameter among them explains
the error. Torch's own prefix, ``[rank0]:``, comes the same way. Notebooks have another hook, and show torch's error alone.
"""

from __future__ import annotations

import itertools
import re
import sys
from types import TracebackType
from typing import Any

import torch

from flatshard._base import frames
from flatshard._composable.extensions import Extension
from flatshard._handle.tensors.sharded_parameter import shard_info

_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_UNUSED = re.compile(r"differentiated Tensor at index (\d+) appears to not have been used in the graph")


class Uncaught(Extension):
    """Notes on errors that nobody catches."""

    def set_up(self) -> None:
        shown = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if (note := explain(error)) is not None:
                error.add_note(note)
            shown(kind, error, trace)

        sys.excepthook = excepthook


def explain(error: BaseException) -> str | None:
    """Return why torch raised ``error``, if a shard among the variables of its frames explains it; else None."""
    if not isinstance(error, RuntimeError):
        return None
    if found := _SIZES.search(str(error)):
        return _explain_sizes(error, *map(int, found.groups()))
    if found := _UNUSED.search(str(error)):
        return _explain_unused(error, int(found[1]))
    return None


def _explain_sizes(error: RuntimeError, one: int, other: int) -> str | None:
    for variables in frames.variables_left_by(error):
        values = list(variables.values())
        lists = [value for value in values if isinstance(value, list | tuple)]
        for value in itertools.chain(values, *lists):
            info = shard_info(value) if isinstance(value, torch.Tensor) else None
            if info is not None and any(
                a in info.part_shape and b in info.full_shape for a, b in ((one, other), (other, one))
            ):
                return info.explain_full_shape("torch's operation")
    return None


def _explain_unused(error: RuntimeError, index: int) -> str | None:
    inputs: Any = next(
        (v["inputs"] for v in frames.variables_left_by(error) if "inputs" in v), None
    )  # of torch.autograd.grad
    given = inputs if isinstance(inputs, list | tuple) else [inputs]
    info = shard_info(given[index]) if index < len(given) else None
    if info is None:
        return None
    return (
        f"parameter {info.fqn!r} is sharded, and a graph has the full parameter in its place. Call loss.backward() and read "
        "p.grad, of which p.grad.norm() is the full norm. Or take the gradient of an activation, such as the layer's output"
    )
