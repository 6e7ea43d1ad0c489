"""The options of one unit: what they say, and how they follow from arguments, FSDP's names and a policy's overrides."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._base.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    Until,
    as_enum,
    as_reshard_after_forward,
    check_reshard_after_forward,
)
from flatshard._base.errors import name_list
from flatshard._comm.collectives import CollectivesFactory
from flatshard._composable.claims import KEPT, Claim
from flatshard.layouts import LayoutChoice

MeshChoice = Callable[[str, nn.Parameter], DeviceMesh | None] | None
"""A function that chooses the mesh of a parameter, or None for the mesh of the call."""


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """The options of one unit."""

    strategy: ShardingStrategy
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    mixed_precision: MixedPrecision
    cpu_offload: CPUOffload
    collectives: CollectivesFactory | None = None  # None: the backend's own
    # None: as the strategy says, but the outermost unit keeps its parameters. An int means True, and a feature reads it.
    reshard_after_forward: bool | int | None = None
    prefetch_limit_bytes: int | None = None  # for unsharded parameters that were gathered ahead and are not in use yet
    layout: LayoutChoice = None
    static_buffers: bool = False  # unsharded.py, [Note: Static buffers]
    shard_mesh_fn: MeshChoice = None
    recompute: bool = False  # a feature reads it

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The claims that a unit has as long as it exists."""
        return (KEPT,) if self.strategy.placements.until is Until.CHANGE else ()

    @property
    def subgroup_size(self) -> int | None:
        """The number of ranks to reshard to after forward, or None if it is all of them, or none."""
        value = self.reshard_after_forward
        return None if isinstance(value, bool) else value

    @property
    def keeps_shards(self) -> bool:
        """Whether a unit is gathered again from other shards than those of all ranks, which a feature keeps."""
        return self.mixed_precision.keep_cast_shard or self.strategy.joins_axes or self.subgroup_size is not None

    @property
    def casts(self) -> bool:
        """Whether the inputs, outputs or buffers of a unit are cast, which a feature does."""
        policy = self.mixed_precision
        return (policy.param_dtype or policy.output_dtype or policy.buffer_dtype) is not None


# -- from arguments ----------------------------------------------------------------------------------------------------

SAME_VALUES = {
    "auto_wrap_policy": "policy",
    "sharding_strategy": "strategy",
    "mesh": "device_mesh",
    "mp_policy": "mixed_precision",
    "offload_policy": "cpu_offload",
    "ignored_modules": "ignored_states",
    "ignored_params": "ignored_states",
}
"""Names of FSDP's whose values mean the same under our name."""

OTHER_VALUES = {
    "shard_placement_fn": "say how parameters may be cut by layout=flatshard.layouts.Rows(), Blocks(n) or Whole(), and over "
    "which mesh by shard_mesh_fn=lambda fqn, param: mesh['dp'] if 'experts' in fqn else None",
    "use_orig_params": "omit it: parameters always are your own; for one per unit see flatshard.flat_parameters",
}
"""Names of FSDP's that are refused, with the cure."""


def unit_config(
    *, strategy: Any, backward_prefetch: Any, mixed_precision: Any, cpu_offload: Any, **others: Any
) -> UnitConfig:
    """Return the options of a unit that these arguments of ``fully_shard`` mean. ``others`` are used as they are.

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
    if config.strategy.is_replicated and getattr(config.collectives, "reduce", None) is False:
        raise ValueError(
            f"collectives={config.collectives!r} would do nothing for a unit under {config.strategy.name}, which gathers no "
            "parameters: pass reduce=True, or omit `collectives`"
        )
    return config


def configure_units(
    config: UnitConfig, overrides: Mapping[nn.Module, dict[str, Any]], world_size: int
) -> dict[nn.Module, UnitConfig]:
    """Return the options of each unit over ``world_size`` ranks: ``config``, with what the policy overrides for it.

    Raises:
        TypeError, ValueError: the policy overrides what it cannot, or by a wrong value.
    """
    resolved = _resolve_reshard(config, world_size)
    return {
        module: _resolve_reshard(_override(config, given, module), world_size) if given else resolved
        for module, given in overrides.items()
    }


def _override(config: UnitConfig, given: dict[str, Any], module: nn.Module) -> UnitConfig:
    """Return ``config`` with the arguments ``given`` that the policy returned for ``module``."""
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


def _resolve_reshard(config: UnitConfig, world_size: int) -> UnitConfig:
    """Return ``config`` with ``reshard_after_forward`` as it is over ``world_size`` ranks: all of them means True."""
    value = as_reshard_after_forward(config.reshard_after_forward, world_size)
    return dataclasses.replace(config, reshard_after_forward=value)


def check_limit_all_gathers(limit_all_gathers: bool) -> None:
    """Raise if the argument is not True. In FSDP1, False removes a wait of the host, which does not exist here."""
    if limit_all_gathers is not True:
        raise ValueError(
            "limit_all_gathers=False has no meaning here: the host never waits for an all-gather, and the order of streams "
            "bounds memory. Omit the argument"
        )


def check_named(function: Callable[..., Any], unnamed: Sequence[object]) -> None:
    """Raise ``TypeError`` if ``function`` got an argument without a name.

    The message proposes the names of arguments whose annotation contains the class of the value.
    """
    for kind in [type(value).__name__ for value in unnamed]:
        known = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        fitting = [p for p in known if kind in re.findall(r"\w+", str(p.annotation))]
        names = name_list([f"{p.name}=" for p in fitting or known], 4)
        raise TypeError(f"{function.__name__} takes only the module without a name: name the {kind}, by {names}")


class FSDPNamed(NamedTuple):
    """The arguments of ``fully_shard`` that FSDP has under other names."""

    policy: Any
    device_mesh: Any
    strategy: Any
    mixed_precision: Any
    cpu_offload: Any
    ignored_states: Any


def renamed(given: Mapping[str, Any], ours: FSDPNamed, defaults: Mapping[str, Any]) -> FSDPNamed:
    """Return ``ours``, with the arguments that were ``given`` under FSDP's names.

    ``defaults`` has the default of each argument of ``fully_shard``.

    Raises:
        TypeError: a name is unknown, has another meaning here, or says what another one says.
    """
    result, given = ours._asdict(), dict(given)
    dims = given.pop("dp_mesh_dims", None)
    named: dict[str, str] = {}  # the name that was given, by our name
    for name, value in given.items():
        if name in OTHER_VALUES:
            raise TypeError(f"fully_shard has no argument {name!r}: {OTHER_VALUES[name]}")
        if name not in SAME_VALUES:
            raise TypeError(f"fully_shard has no argument {name!r}{did_you_mean(name, [*defaults, *SAME_VALUES])}")
        own = SAME_VALUES[name]
        if own in named or result.get(own, defaults[own]) is not defaults[own]:
            raise TypeError(
                f"fully_shard: {named.get(own, own)!r} and {name!r} are two names of {own!r}: pass one of them"
            )
        named[own] = name
        result[own] = value
    if dims is not None:
        chosen = data_parallel_dims(result["device_mesh"], dims, result["strategy"])
        result["device_mesh"], result["strategy"] = chosen
    return FSDPNamed(**result)


def data_parallel_dims(mesh: Any, dims: Any, strategy: Any) -> tuple[DeviceMesh, Any]:
    """Return the submesh and the strategy that FSDP2's ``dp_mesh_dims=dims`` means for ``mesh``.

    Raises:
        TypeError, ValueError: they are no dimensions of ``mesh``, or several to shard over, or several to replicate over.
    """
    if not hasattr(dims, "shard_names") or not hasattr(dims, "replicate_names"):
        raise TypeError(f"dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, got {dims!r}")
    shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
    known = (isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names) or ()
    if missing := [name for name in (*shard, *replicate) if name not in known]:
        raise ValueError(
            f"dp_mesh_dims names {missing[0]!r}; the mesh has the dimensions {list(known)}: pass mesh= with names"
        )
    for names, verb in ((shard, "shard"), (replicate, "replicate")):
        if len(names) > 1:
            raise ValueError(
                f"dp_mesh_dims: {verb}={names} are several dimensions, and flatshard needs one to {verb} over: make a mesh "
                "that has them as one, init_device_mesh(...), and pass it as device_mesh="
            )
    if replicate and shard:
        strategy = as_enum(ShardingStrategy, strategy, "strategy").across_replicas()
    elif replicate:
        strategy = ShardingStrategy.NO_SHARD
    return mesh[(*replicate, *shard)], strategy


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown ``name``: the most similar of the ``known``, or an empty string."""
    known = list(known)
    close = [*difflib.get_close_matches(name, known, 1), *(each for each in known if each.startswith(name))]
    return f": did you mean {close[0]!r}?" if close else ""
