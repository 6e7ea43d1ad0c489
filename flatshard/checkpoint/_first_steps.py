"""What a first step of an optimizer would make: state, and options of groups. No step is taken.

[Note: Options of groups]
All that a group has besides its parameters is an option. Some are given, by the user or a scheduler (``initial_lr``). Others
are made by steps (``step`` of timm's Adan), and are state. The checkpoint decides: each option that it has is loaded, whether
the group has it yet or not. So a scheduler may be made before or after loading, as with a plain optimizer. An option that the
checkpoint lacks stays if it was given. It goes if steps make it, as the state that a checkpoint lacks does.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard.checkpoint._optim_params import Group, defaults_of, options_of

LENGTH = 2**16
"""Optimizers that treat some lengths otherwise than others do not look at more than this power of two."""


def first_options(optimizer: Optimizer, group: Group) -> Group:
    """All options of ``group`` after a first step, where one is still to come."""
    if not any(p.requires_grad and not optimizer.state.get(p) for p in group["params"]):
        return {}
    return first_step_of(optimizer, group, _smallest(group))[1]


def made_by_steps(optimizer: Optimizer, given: Group, names: Collection[str]) -> set[str]:
    """Return the options of ``given`` that a first step would make, if it had none of ``names``."""
    odd = set(names) - defaults_of(optimizer).keys()
    if not odd or not any(p.requires_grad for p in given["params"]):
        return set()
    without = {key: value for key, value in given.items() if key not in odd}
    try:
        return odd & first_step_of(optimizer, without, _smallest(given))[1].keys()
    except RuntimeError:  # a step needs some of them: they were given
        return set()


def _smallest(group: Group) -> nn.Parameter:
    """The trainable parameter by which it takes least to see what a step does."""
    params: list[nn.Parameter] = [p for p in group["params"] if p.requires_grad]
    return min(params, key=lambda p: (p.numel() == 0, p.numel()))


def first_step_of(optimizer: Optimizer, group: Group, stepped: nn.Parameter) -> tuple[dict[str, Any], Group]:
    """What :func:`first_step` says, or an optimizer that steps by another one inside."""
    try:
        if (of_class := getattr(type(optimizer), "first_step", None)) is not None:
            found: tuple[dict[str, Any], Group] = of_class(optimizer, stepped, group)
            return found
        return first_step(optimizer, group, torch.zeros_like(stepped.detach()))
    except Exception as e:
        raise RuntimeError(
            f"what the first step of {type(optimizer).__name__} would make is not known, as a step of a copy raised "
            f"{type(e).__name__}: {e}. Take a step before loading"
        ) from e


@torch.no_grad()
def first_step(optimizer: Optimizer, group: Group, zeros: torch.Tensor) -> tuple[dict[str, Any], Group]:
    """Return what a first step would make for a parameter of ``group`` in the memory of ``zeros``.

    Its state, and the options of the group: [Note: Options of groups].

    Nothing of ``optimizer`` is stepped: a copy is, over this parameter alone and without hooks. It shares what the optimizer
    keeps besides state and options, but has copies of its containers.
    """
    kind = type(optimizer)
    param = nn.Parameter(zeros)
    param.grad = torch.zeros_like(zeros)
    stand_in: Any = object.__new__(kind)
    own = vars(optimizer).items()
    vars(stand_in).update((k, copy.copy(v) if isinstance(v, list | dict | set | deque) else v) for k, v in own)
    vars(stand_in).pop("step", None)  # a scheduler's, which counts
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [{**{k: copied_option(v) for k, v in options_of(group).items()}, "params": [param]}]
    step: Any = kind.step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # without hooks that are on all optimizers
    step(stand_in)
    return dict(stand_in.state.get(param, {})), options_of(stand_in.param_groups[0])


def copied_option(value: Any) -> Any:
    """Return a copy of an option that a step may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def shorter(numel: int) -> int:
    """The length that stands for ``numel`` elements in trials: not much more than ``LENGTH``, with the same remainder."""
    return numel if numel < 2 * LENGTH else LENGTH + numel % LENGTH


def first_tensors(optimizer: Optimizer, group: Group, numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state that a first step would make on the CPU for ``numel`` elements in ``group``: what has dimensions.

    Raises:
        RuntimeError: a step of a copy raised.
    """
    options = {
        key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in options_of(group).items()
    }
    options |= {key: False for key in ("capturable", "fused") if key in options}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), uncompiled():
        made, _ = first_step_of(optimizer, options, nn.Parameter(torch.zeros(numel, dtype=dtype, device="cpu")))
    return {key: value for key, value in made.items() if isinstance(value, torch.Tensor) and value.dim()}


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Run code that torch compiles as it is written: a trial takes less time than to compile it."""
    loaded = "torch._dynamo" in sys.modules  # to import it takes long as well
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
