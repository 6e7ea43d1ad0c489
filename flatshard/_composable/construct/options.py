"""The options of a unit, from the arguments of ``fully_shard`` and from what a policy overrides."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from flatshard._composable.construct.validate import default_device
from flatshard._composable.unit_config import UnitConfig
from flatshard._config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    as_enum,
    as_reshard_after_forward,
    check_reshard_after_forward,
)
from flatshard._errors import name_list


def unit_config(
    *, strategy: Any, backward_prefetch: Any, mixed_precision: Any, cpu_offload: Any, **others: Any
) -> UnitConfig:
    """Turn arguments of ``fully_shard`` into the options of a unit. ``others`` are taken as they are.

    Raises:
        TypeError, ValueError: one of them is wrong.
    """
    if backward_prefetch is not None:
        backward_prefetch = as_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch")
    config = UnitConfig(
        strategy=as_enum(ShardingStrategy, strategy, "strategy"),
        backward_prefetch=backward_prefetch,
        mixed_precision=MixedPrecision.of(mixed_precision),
        cpu_offload=CPUOffload.of(cpu_offload),
        **others,
    )
    check_reshard_after_forward(config.reshard_after_forward, config.strategy)
    if not isinstance(config.recompute, bool):
        raise ValueError(f"recompute must be True or False, got {config.recompute!r}")
    if config.strategy.is_whole and getattr(config.collectives, "reduce", None) is False:
        raise ValueError(
            f"collectives={config.collectives!r} would do nothing for a unit under {config.strategy.name}, which gathers no "
            "parameters: pass reduce=True, or omit `collectives`"
        )
    return config


def check_limit_all_gathers(limit_all_gathers: bool) -> None:
    """Raise if it is not True.

    In FSDP1, False removes a wait of the host.
    """
    if limit_all_gathers is not True:
        raise ValueError(
            "limit_all_gathers=False has no meaning here: the host never waits for an all-gather, and the order of streams "
            "bounds memory. Omit the argument"
        )


def override(config: UnitConfig, given: dict[str, Any], module: nn.Module) -> UnitConfig:
    """``config`` with the arguments ``given`` that a CustomPolicy returned for one module."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    given = {("strategy" if key == "sharding_strategy" else key): value for key, value in given.items()}
    if unknown := [key for key in given if key not in fields]:
        raise ValueError(
            f"the policy overrides {name_list(unknown)} for a {type(module).__name__}; it can override {sorted(fields)}"
        )
    try:
        result = unit_config(**(fields | given))
    except (TypeError, ValueError) as e:
        raise type(e)(f"the policy's {e} (for a {type(module).__name__})") from None
    if result.strategy.placements.over_outer is not config.strategy.placements.over_outer:
        raise ValueError(
            f"the policy chose {result.strategy} for a {type(module).__name__}, in a call with {config.strategy}: they "
            "take different process groups, so shard this module in a separate call"
        )
    return result


def over(world_size: int, config: UnitConfig) -> UnitConfig:
    """``config`` over that many ranks."""
    value = as_reshard_after_forward(config.reshard_after_forward, world_size)
    return dataclasses.replace(config, reshard_after_forward=value)


def as_device(device_id: int | torch.device | str | None) -> torch.device | None:
    """The argument ``device_id`` as a device, with an index."""
    if device_id is None:
        return None
    kind = default_device().type
    try:
        device = torch.device(kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device_id={device_id!r} is no device: pass a torch.device, its name or its index") from e
    if device.type == "cpu":
        return torch.device("cpu")  # without an index: the device of tensors is "cpu", which does not equal "cpu:0"
    if device.index is None and not torch.accelerator.is_available():
        raise ValueError(f"device_id={device_id!r}, but this process has no accelerator: omit it, or pass 'cpu'")
    if device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device
