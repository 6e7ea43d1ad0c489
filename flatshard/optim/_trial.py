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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.optimizers import Group, defaults_of, options_of, uncompiled, unhooked_step
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.local_numbers import NORMS, norm_arguments, retype

# Even, and above 128, because some optimizers factor their state from that size on.
_SHAPES = {1: (260,), 2: (132, 130), 3: (132, 130, 2)}
_STEPS = 4
_TOLERANCE = 1e-6  # relative to the largest update


class Impossible(Exception):
    """The optimizer cannot be tried, for example because its class takes other arguments. ``__cause__`` says why."""


def check_one_by_one(optimizer: Optimizer, settings: Group, ndim: int, fqn: str, cure: str = "") -> None:
    """Raise if the optimizer steps a parameter, such as ``fqn``, differently beside a second parameter.

    Raises:
        RuntimeError: it does, or it is ``LBFGS``, which needs a closure.
        Impossible: it cannot be tried.
    """
    a, b = _start(ndim), 1.5 * _start(ndim).flip(0)
    if type(optimizer) is torch.optim.LBFGS or _differ(optimizer, settings, [a, b], [[a], [b]]):
        raise RuntimeError(
            f"{type(optimizer).__name__} steps a parameter differently if it has other parameters: it computes something "
            f"over all of them (a norm to clip by, say), and this rank has only some, or parts of them, such as {fqn!r}. "
            "Turn that option off, and call flatshard.clip_grad_norm_ before the step, or use an optimizer that treats "
            f"parameters one by one{cure}"
        )


def check_in_turns(
    optimizer: Optimizer, settings: Group, ndim: int, step_in_turns: Callable[[Optimizer], object]
) -> None:
    """Raise if stepping one parameter after the other, by ``step_in_turns``, differs from one step of the optimizer.

    Raises:
        RuntimeError: it differs.
        Impossible: the optimizer cannot be tried.
    """
    a, b = _start(ndim), 1.5 * _start(ndim).flip(0)
    if _differ(optimizer, settings, [a, b], [[a, b]], step_in_turns):
        raise RuntimeError(
            f"{type(optimizer).__name__} cannot be stepped unit by unit: in a trial it stepped two parameters together "
            "differently than one after the other. It computes something over all of them (a norm to clip by, say: turn "
            "that off, and call flatshard.clip_grad_norm_ before the step), or keeps what it knows elsewhere than in its "
            "state and its groups. Use it without OffloadedOptimizer, or one that treats parameters one by one"
        )


def looks_at_whole(optimizer: Optimizer, settings: Group, ndim: int, by_rows: bool, block: int) -> bool:
    """Return whether the optimizer steps a parameter of ``ndim`` dimensions differently from two shards of it.

    The shards are 1-D, or have full rows (``by_rows``). 1-D shards are cut between blocks of ``block`` elements.

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
    optimizer: Optimizer,
    settings: Group,
    whole: list[torch.Tensor],
    ranks: Sequence[list[torch.Tensor]],
    step: Callable[[Optimizer], object] | None = None,
) -> bool:
    """Return whether ``ranks``, stepped by ``step`` or by that of the class, end with other values than ``whole``.

    It also differs if the optimizer steps a full parameter and raises for its shards.
    """
    start, are_parts, once = torch.cat([t.flatten() for t in whole]), len(whole) == 1, None
    with _unseen():
        try:
            once = _stepped(optimizer, settings, [whole], 0)
            allowed = _TOLERANCE * float((once - start).abs().nan_to_num().max()) + 1e-12

            def same(other: torch.Tensor) -> bool:
                return torch.allclose(once, other, rtol=0, atol=allowed, equal_nan=True)

            # If another seed changes the result, the optimizer uses random numbers, and a difference means nothing.
            parts = _stepped(optimizer, settings, ranks, 0, are_parts, step)
            return not same(parts) and same(_stepped(optimizer, settings, [whole], 1))
        except Exception as e:
            if once is not None and are_parts:
                return True
            raise Impossible from e


def _start(ndim: int) -> torch.Tensor:
    """Return initial values, of which all rows and the two halves differ."""
    shape = _SHAPES.get(ndim, (132, 130, 2, 2) + (1,) * (ndim - 4))
    each = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    return (torch.sin(1.7 * each) * (1 + 6 * each / len(each))).reshape(shape)


class _TrialGradient(torch.Tensor):
    """The gradient of a shard. Its norm is that of the ``whole`` gradient, as for a sharded gradient."""

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
    settings: Group,
    starts: Sequence[list[torch.Tensor]],
    seed: int,
    are_parts: bool = False,
    stepping: Callable[[Optimizer], object] | None = None,
) -> torch.Tensor:
    """Step an instance of the optimizer for each entry of ``starts``, and return all elements in the end.

    An entry has the tensors of one rank. ``are_parts``: whether they are shards of one parameter. ``stepping``: see
    ``_differ``.
    """
    ranks = [[nn.Parameter(start.clone()) for start in of_rank] for of_rank in starts]
    tried = [_like(optimizer, settings, params) for params in ranks]
    step: Callable[[Any], object] = stepping or unhooked_step(optimizer)
    start = torch.cat([each.flatten() for of_rank in starts for each in of_rank])
    sizes = [each.numel() for of_rank in starts for each in of_rank]
    for number in range(_STEPS):
        now = torch.cat([param.detach().flatten() for params in ranks for param in params])
        whole = (now - start.cos()) * start.square()
        if number % 2:  # orthogonal to the values, because some optimizers project the gradient
            whole = (now.reshape(-1, 2).flip(1) * torch.tensor([-1.0, 1.0], dtype=now.dtype, device="cpu")).flatten()
        grads = iter(whole.split(sizes))  # type: ignore[no-untyped-call]
        for params, instance in zip(ranks, tried, strict=True):
            torch.default_generator.manual_seed(1000 * seed + number)
            random.seed(1000 * seed + number)
            for param in params:
                grad = next(grads).reshape(param.shape).clone()
                param.grad = grad
                if are_parts:
                    retype([grad], _TrialGradient, "whole", [whole])
            step(instance)
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
