"""Whether an optimizer that nobody knows may step parts: found out by a trial.

[Note: Trials of optimizers]
An optimizer that looks at norms, rows or other parameters steps this rank's parts without any error, and trains something
else. A list of names never ends. So one of an unknown class is tried before its first step: an instance of its own, with the
same options, steps a small matrix whole, and others step the two parts that two ranks would have. Elements come out the
same, unless it looks at more than single elements. The losses are sums over elements, so gradients say nothing of others.
A trial sees no user's hook, leaves every random generator as it was, and touches nothing of the real optimizer. It takes
milliseconds, and comes out the same on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.partial import NORMS, norm_arguments, retype

# Even, and above 128, from which on optimizers factor their state.
_SHAPES = {1: (260,), 2: (132, 130), 3: (132, 130, 2)}
_STEPS = 4
_TOLERANCE = 1e-6  # of the largest update


class Impossible(Exception):
    """The optimizer cannot be tried: its class takes other arguments, say. ``__cause__`` tells."""


def couples_parameters(optimizer: Optimizer, settings: Mapping[str, Any], ndim: int) -> bool:
    """Whether it steps a parameter in another way where there is a second one.

    Raises:
        Impossible: it cannot be tried.
    """
    a, b = _start(ndim), 1.5 * _start(ndim).flip(0)
    return _differ(optimizer, settings, [a, b], [[a], [b]])


def looks_at_whole(optimizer: Optimizer, settings: Mapping[str, Any], ndim: int, by_rows: bool, block: int) -> bool:
    """Whether it steps a parameter of ``ndim`` dimensions in another way than two parts of it, 1-D or ``by_rows``.

    ``block``: of 1-D parts, the number of elements that no cut separates.

    Raises:
        Impossible: it cannot be tried.
    """
    whole = _start(ndim)
    flat, cut = whole.flatten(), -(-98 // block) * block
    if not by_rows and cut >= len(flat):
        return False
    parts = (whole[:50], whole[50:]) if by_rows else (flat[:cut], flat[cut:])
    return _differ(optimizer, settings, [whole], [[part] for part in parts])


def _differ(
    optimizer: Optimizer, settings: Mapping[str, Any], whole: list[torch.Tensor], ranks: Sequence[list[torch.Tensor]]
) -> bool:
    start = torch.cat([t.flatten() for t in whole])
    with _unseen():
        try:
            once = _stepped(optimizer, settings, [whole], 0)
            allowed = _TOLERANCE * float((once - start).abs().nan_to_num().max()) + 1e-12

            def same(other: torch.Tensor) -> bool:
                return torch.allclose(once, other, rtol=0, atol=allowed, equal_nan=True)

            # If it differs from itself, it draws random numbers, and nothing can be told.
            parts = _stepped(optimizer, settings, ranks, 0, are_parts=len(whole) == 1)
            return not same(parts) and same(_stepped(optimizer, settings, [whole], 1))
        except Exception as e:
            raise Impossible from e


def _start(ndim: int) -> torch.Tensor:
    """Values of which no two rows, and no two halves, are alike."""
    shape = _SHAPES.get(ndim, (132, 130, 2, 2) + (1,) * (ndim - 4))
    each = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return (torch.sin(1.7 * each) * (1 + 6 * each / len(each))).reshape(shape)


class _Gradient(torch.Tensor):
    """Of a part: as sharded gradients do, it gives norms of the ``whole`` one."""

    whole: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with plainly():
            if func in NORMS and isinstance(args[0], cls):
                ord, rest = norm_arguments(func, args, kwargs)
                if not rest:
                    return torch.linalg.vector_norm(args[0].whole, ord)
            return func(*args, **kwargs)


def _stepped(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    starts: Sequence[list[torch.Tensor]],
    seed: int,
    are_parts: bool = False,
) -> torch.Tensor:
    """All elements after some steps, of an instance for each rank that has what is of this rank only: ``are_parts`` of one
    parameter, or parameters."""
    ranks = [[nn.Parameter(start.clone()) for start in of_rank] for of_rank in starts]
    tried = [_like(optimizer, settings, params) for params in ranks]
    step = type(optimizer).step
    while getattr(step, "hooked", False):  # torch's wrapper calls the hooks that users registered for all optimizers
        step = step.__wrapped__  # type: ignore[attr-defined]
    start = torch.cat([each.flatten() for of_rank in starts for each in of_rank])
    sizes = [each.numel() for of_rank in starts for each in of_rank]
    for number in range(_STEPS):
        now = torch.cat([param.detach().flatten() for params in ranks for param in params])
        whole = (now - start.cos()) * start.square()
        if number % 2:  # at right angles to the values, by pairs: some look at that
            whole = (now.reshape(-1, 2).flip(1) * torch.tensor([-1.0, 1.0], dtype=now.dtype)).flatten()
        grads = iter(whole.split(sizes))  # type: ignore[no-untyped-call]
        for params, instance in zip(ranks, tried, strict=True):
            torch.default_generator.manual_seed(1000 * seed + number)
            random.seed(1000 * seed + number)
            for param in params:
                grad = next(grads).reshape(param.shape).clone()
                param.grad = grad
                if are_parts:
                    retype([grad], _Gradient, "whole", [whole])
            step(instance)
    return torch.cat([param.detach().flatten() for params in ranks for param in params])


def _like(optimizer: Optimizer, settings: Mapping[str, Any], params: list[nn.Parameter]) -> Optimizer:
    """One of the same class with the options of a group, ``settings``."""
    kind: Any = type(optimizer)
    options = {key: copy.deepcopy(value) for key, value in settings.items() if key not in ("params", "param_names")}
    if "lr" in options:
        options["lr"] = 0.01  # not the 0 with which a warm-up begins
    options |= {key: False for key in ("capturable", "fused") if key in options}
    known = inspect.signature(kind).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    given = {key: options[key] for key in copy.deepcopy(optimizer.defaults) if key in options}
    given = {key: value for key, value in given.items() if takes_any or key in known}
    result: Optimizer = kind([{**options, "params": params}], **given)
    return result


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Random generators and the default dtype are as before, afterwards. Only the CPU's are used."""
    python, own, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    try:
        with torch.device("cpu"):
            yield
    finally:
        random.setstate(python)
        torch.set_rng_state(own)
        torch.set_default_dtype(dtype)
