"""Finds out by a trial whether an optimizer of an unknown class may step shards of parameters.

[Note: Trials of optimizers]
An optimizer that uses norms, rows or other parameters steps shards without an error, but computes wrong updates. A list of
class names would never be complete. So an optimizer of an unknown class is tried before its first step. A new instance of the
class, with the same options, steps a small matrix. Two others step the two shards that two ranks would have. The results are
the same if the optimizer treats every element independently, as each element's gradient depends on that element only. A trial
runs no hooks of the user, restores all random generators, and does not touch the real optimizer. It takes milliseconds, and
has the same result on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.optimizers import Group, defaults_of, options_of, uncompiled, unhooked_step

# Even, and above 128, because some optimizers factor their state from that size on.
_SHAPES = {1: (260,), 2: (132, 130), 3: (132, 130, 2)}
_STEPS = 4
_TOLERANCE = 1e-6  # relative to the largest update


class Impossible(Exception):
    """The optimizer cannot be tried, for example because its class takes other arguments. ``__cause__`` says why."""


def is_coupled(optimizer: Optimizer, settings: Group, ndim: int) -> bool:
    """Return whether the optimizer steps a parameter of ``ndim`` dimensions differently beside a second parameter.

    Raises:
        Impossible: it cannot be tried.
    """
    a, b = _start(ndim), 1.5 * _start(ndim).flip(0)
    return type(optimizer) is torch.optim.LBFGS or _differ(optimizer, settings, [a, b], [[a], [b]])


def looks_at_whole(optimizer: Optimizer, settings: Group, ndim: int, by_rows: bool, block: int) -> bool:
    """Return whether the optimizer steps a parameter of ``ndim`` dimensions differently from two shards of it.

    The shards are 1-D, or have full rows (``by_rows``). An optimizer with state by blocks is right if 1-D shards are cut
    between blocks of ``block`` elements, and one with state by length if they have other lengths: either suffices.

    Raises:
        Impossible: it cannot be tried.
    """
    full = _start(ndim)
    flat, between_blocks = full.flatten(), -(-98 // block) * block
    if by_rows:
        return _differ(optimizer, settings, [full], [[full[:50]], [full[50:]]])
    cuts = {98, min(between_blocks, len(flat))}
    return all(_differ(optimizer, settings, [full], [[flat[:cut]], [flat[cut:]]]) for cut in sorted(cuts))


def _differ(
    optimizer: Optimizer, settings: Group, full: list[torch.Tensor], ranks: Sequence[list[torch.Tensor]]
) -> bool:
    """Return whether ``ranks`` end with other values than ``full``, or raise where a full parameter is stepped."""
    start, once = torch.cat([t.flatten() for t in full]), None
    with _unseen():
        try:
            once = _stepped(optimizer, settings, [full], 0)
            allowed = _TOLERANCE * float((once - start).abs().nan_to_num().max()) + 1e-12

            def same(other: torch.Tensor) -> bool:
                return torch.allclose(once, other, rtol=0, atol=allowed, equal_nan=True)

            # If another seed changes the result, the optimizer uses random numbers, and a difference means nothing.
            return not same(_stepped(optimizer, settings, ranks, 0)) and same(_stepped(optimizer, settings, [full], 1))
        except Exception as e:
            if once is not None and len(full) == 1:
                return True
            raise Impossible from e


def _start(ndim: int) -> torch.Tensor:
    """Return initial values, of which all rows and the two halves differ."""
    shape = _SHAPES.get(ndim, (132, 130, 2, 2) + (1,) * (ndim - 4))
    each = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return (torch.sin(1.7 * each) * (1 + 6 * each / len(each))).reshape(shape)


def _stepped(optimizer: Optimizer, settings: Group, starts: Sequence[list[torch.Tensor]], seed: int) -> torch.Tensor:
    """Step an instance of the optimizer for each entry of ``starts``, and return all elements in the end.

    An entry has the tensors of one rank.
    """
    ranks = [[nn.Parameter(start.clone()) for start in of_rank] for of_rank in starts]
    tried = [_like(optimizer, settings, params) for params in ranks]
    start = torch.cat([each.flatten() for of_rank in starts for each in of_rank])
    sizes = [each.numel() for of_rank in starts for each in of_rank]
    for number in range(_STEPS):
        now = torch.cat([param.detach().flatten() for params in ranks for param in params])
        grad = (now - start.cos()) * start.square()
        if number % 2:  # orthogonal to the values, because some optimizers project the gradient
            grad = (now.reshape(-1, 2).flip(1) * torch.tensor([-1.0, 1.0], dtype=now.dtype, device="cpu")).flatten()
        grads = iter(grad.split(sizes))  # type: ignore[no-untyped-call]
        for params, instance in zip(ranks, tried, strict=True):
            torch.default_generator.manual_seed(1000 * seed + number)
            random.seed(1000 * seed + number)
            for param in params:
                param.grad = next(grads).reshape(param.shape).clone()
            unhooked_step(instance)(instance)
    return torch.cat([param.detach().flatten() for params in ranks for param in params])


def _like(optimizer: Optimizer, settings: Group, params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same class, with the options of the group ``settings``."""
    kind: Any = type(optimizer)
    options = copy.deepcopy(options_of(settings))
    if "lr" in options:
        options["lr"] = 0.01  # it may be 0 at the beginning of a warm-up
    options |= {key: False for key in ("capturable", "fused") if key in options}
    known = inspect.signature(kind).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    given = {key: options[key] for key in defaults_of(optimizer) if key in options and (takes_any or key in known)}
    result: Optimizer = kind([{**options, "params": params}], **given)
    return result


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Restore random generators and the default dtype afterwards. Inside, tensors are created on the CPU."""
    python, own, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    try:
        with torch.device("cpu"), uncompiled():
            yield
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        torch.set_default_dtype(dtype)
