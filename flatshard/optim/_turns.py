"""Steps of an optimizer in turns, each for some of its parameters.

[Note: Options that a step changes]
In a turn the groups have the turn's parameters alone. Options that steps change (timm's Adan counts steps) must change once,
not in every turn. So in each turn but its last one a group has copies of its options from before the step, and in the last
turn the optimizer has the group itself, which then is as after one step.

This equals a single step if the optimizer treats parameters one by one, and keeps everything in its state and its options.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatshard._base.optimizers import Group, copied_option, options_of
from flatshard._composable.state import owner_of
from flatshard._handle.tensors.sharded_parameter import shard_info

Turn = list[nn.Parameter]
"""The parameters that are stepped together."""


def by_unit(params: Sequence[nn.Parameter]) -> list[Turn]:
    """Return ``params`` by unit and device, in the order of their first ones. A parameter in no unit is alone."""
    found: dict[Any, Turn] = {}
    for param in params:
        unit = owner_of(param) if shard_info(param) is not None else None
        found.setdefault((param if unit is None else unit, param.device), []).append(param)
    return list(found.values())


def shares_of(groups: Sequence[Group], turns: Sequence[Turn]) -> list[dict[int, Turn]]:
    """Return for each turn its parameters, by the index of their group. An empty group belongs to the first turn."""
    number = {param: n for n, turn in enumerate(turns) for param in turn}
    found: list[dict[int, Turn]] = [{} for _ in turns]
    for i, group in enumerate(groups):
        own = [param for param in group["params"] if param in number]
        for param in own:
            found[number[param]].setdefault(i, []).append(param)
        if not own:
            found[0][i] = []
    return found


def in_turns(optimizer: Optimizer, turns: Sequence[Turn], ends: bool = True) -> Generator[None, None, None]:
    """Show ``optimizer`` the parameters of one turn after the other. [Note: Options that a step changes]

    ``ends``: whether the step ends with the last turn. If not, options are restored.
    """
    groups = optimizer.param_groups
    held = [group["params"] for group in groups]
    shares = shares_of(groups, turns)
    last = {i: n for n, share in enumerate(shares) for i in share} if ends else {}
    try:
        for n, share in enumerate(shares):
            shown = []
            for i, params in share.items():
                if last.get(i) == n:
                    groups[i]["params"] = params
                    shown.append(groups[i])
                elif params:
                    options = {key: copied_option(value) for key, value in options_of(groups[i]).items()}
                    shown.append({**options, "params": params})
            optimizer.param_groups = shown
            yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, held, strict=True):
            group["params"] = params
