"""Torch optimizers: their parameters, the options of their groups, and what a first step would make of both.

[Note: Options of groups]
Everything in a group besides its parameters is an option. The user or a scheduler sets some (``initial_lr``), a step others
(``step`` of timm's Adan). A load sets each option that the checkpoint has, whether the group has it yet or not: a scheduler
may be made before or after loading. An option that the checkpoint lacks stays.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Optimizers = Optimizer | Iterable[Optimizer]
Group = dict[str, Any]

LENGTH = 2**16
"""No optimizer treats lengths differently by more than this power of two."""


# -- parameters and options --------------------------------------------------------------------------------------------


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups, in the order of the numbers in ``state_dict()``."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def options_of(given: Group) -> Group:
    """Return everything that a group has besides its parameters and their names."""
    return {key: value for key, value in given.items() if key not in ("params", "param_names")}


def defaults_of(optimizer: Optimizer) -> Group:
    """Return the default options of groups: none for a class that does without torch's constructor."""
    return getattr(optimizer, "defaults", {})


def copied_option(value: Any) -> Any:
    """Return a copy of an option that a step may change in place."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """Return the optimizers that have the state of one optimizer or several."""
    return list(map(innermost, [optimizers] if isinstance(optimizers, Optimizer) else optimizers))


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with the state, inside of wrappers such as accelerate's and torch's ``_NamedOptimizer``."""
    while "state" not in vars(optimizer) and not hasattr(type(optimizer), "first_step"):
        inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        if len(inner) != 1:
            break
        optimizer = inner[0]
    return optimizer


def steps_whole(optimizer: Optimizer) -> bool:
    """Return whether each parameter's state is on the rank that steps it: a ``WholeParameterOptimizer``."""
    return getattr(optimizer, "steps_whole_parameters", False)


def steps_elsewhere(optimizer: Optimizer, param: nn.Parameter) -> bool:
    """Return whether another rank steps ``param``, and so has its state."""
    return steps_whole(optimizer) and not optimizer.steps_here(param)  # type: ignore[attr-defined]


def load_into(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Call ``optimizer.load_state_dict``, and keep the list of groups: schedulers that hold it see the loaded ones."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(state_dict)
    groups[:] = optimizer.param_groups
    optimizer.param_groups = groups


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return the ``step`` of the optimizer's class, without hooks of users, also those on all optimizers."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    found: Callable[..., Any] = step
    return found


# -- a first step, which is not taken ----------------------------------------------------------------------------------


def first_state(optimizer: Optimizer, group: Group, param: nn.Parameter) -> dict[str, Any]:
    """Return the state that a first step would make for ``param`` of ``group``."""
    return _preview_step(optimizer, group, param)[0]


def first_options(optimizer: Optimizer, group: Group) -> Group:
    """Return all options of ``group`` after a first step, or none if its parameters have been stepped."""
    if not any(p.requires_grad and not optimizer.state.get(p) for p in group["params"]):
        return {}
    return _preview_step(optimizer, group, _smallest(group))[1]


def first_tensors(optimizer: Optimizer, group: Group, numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors with dimensions that a first step on the CPU would make for ``numel`` elements in ``group``.

    Raises:
        RuntimeError: a step of a copy raised.
    """
    options = {
        key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in options_of(group).items()
    }
    options |= {key: False for key in ("capturable", "fused") if key in options}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), uncompiled():
        made = first_state(optimizer, options, nn.Parameter(torch.zeros(numel, dtype=dtype, device="cpu")))
    return {key: value for key, value in made.items() if isinstance(value, torch.Tensor) and value.dim()}


def _smallest(group: Group) -> nn.Parameter:
    """Return the trainable parameter whose step costs least."""
    params: list[nn.Parameter] = [p for p in group["params"] if p.requires_grad]
    return min(params, key=lambda p: (p.numel() == 0, p.numel()))


def _preview_step(optimizer: Optimizer, group: Group, param: nn.Parameter) -> tuple[dict[str, Any], Group]:
    """Return the state and options of a first step; optimizers that step by an inner one answer themselves."""
    try:
        if (preview := getattr(type(optimizer), "first_step", None)) is not None:
            found: tuple[dict[str, Any], Group] = preview(optimizer, param, group)
            return found
        return step_copy(optimizer, group, torch.zeros_like(param.detach()))
    except Exception as e:
        raise RuntimeError(
            f"what the first step of {type(optimizer).__name__} would make is not known, as a step of a copy raised "
            f"{type(e).__name__}: {e}. Take a step before loading"
        ) from e


@torch.no_grad()
def step_copy(optimizer: Optimizer, group: Group, zeros: torch.Tensor) -> tuple[dict[str, Any], Group]:
    """Step a copy of ``optimizer`` over one parameter of ``group`` in the memory of ``zeros``.

    The copy has no hooks. It shares what the optimizer keeps besides state and options, with copies of its containers.

    Returns:
        The parameter's state, and the options of the group: [Note: Options of groups].
    """
    param = nn.Parameter(zeros)
    param.grad = torch.zeros_like(zeros)
    stand_in: Any = object.__new__(type(optimizer))
    own = vars(optimizer).items()
    vars(stand_in).update((k, copy.copy(v) if isinstance(v, list | dict | set | deque) else v) for k, v in own)
    vars(stand_in).pop("step", None)  # a scheduler's, which counts
    stand_in._optimizer_step_pre_hooks, stand_in._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [{**{k: copied_option(v) for k, v in options_of(group).items()}, "params": [param]}]
    unhooked_step(optimizer)(stand_in)
    return dict(stand_in.state.get(param, {})), options_of(stand_in.param_groups[0])


def shorter(numel: int) -> int:
    """Return a length to try in place of ``numel``: little more than ``LENGTH``, with the same remainder."""
    return numel if numel < 2 * LENGTH else LENGTH + numel % LENGTH


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Run code that torch compiles as it is written: compiling takes longer than a trial."""
    loaded = "torch._dynamo" in sys.modules  # importing it takes long as well
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
