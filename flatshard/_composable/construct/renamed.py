"""The keyword names of FSDP1's ``FullyShardedDataParallel`` and FSDP2's ``fully_shard``: one table."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from flatshard._config import ShardingStrategy, as_enum
from flatshard._errors import name_list

SAME_VALUES = {
    "auto_wrap_policy": "policy",
    "sharding_strategy": "strategy",
    "mesh": "device_mesh",
    "mp_policy": "mixed_precision",
    "offload_policy": "cpu_offload",
    "ignored_modules": "ignored_states",
    "ignored_params": "ignored_states",
}
"""Accepted: the value means the same under our name."""

OTHER_VALUES = {
    "shard_placement_fn": "say how parameters may be cut by layout=flatshard.layouts.Rows(), Blocks(n) or Whole(), and over "
    "which mesh by shard_mesh_fn=lambda fqn, param: mesh['dp'] if 'experts' in fqn else None",
    "use_orig_params": "omit it: parameters always are your own; for one per unit see flatshard.flat_parameters",
}
"""Refused, with what to do."""


def check_named(function: Callable[..., Any], unnamed: Sequence[object]) -> None:
    """Raise ``TypeError`` if ``function`` got an argument without a name, and say which it may be: one whose annotation has
    the class of what was given.
    """
    for kind in [type(value).__name__ for value in unnamed]:
        known = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        fitting = [p for p in known if kind in re.findall(r"\w+", str(p.annotation))]
        names = name_list([f"{p.name}=" for p in fitting or known], 4)
        raise TypeError(f"{function.__name__} takes only the module without a name: name the {kind}, by {names}")


def renamed(given: Mapping[str, Any], ours: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``fully_shard``: those ``given`` under FSDP's names, and ``ours``, under our names.

    ``defaults``: of all our names.

    Raises:
        TypeError: a name is nobody's, or means something else here, or one thing is given twice.
    """
    result, given = dict(ours), dict(given)
    dims = given.pop("dp_mesh_dims", None)
    named: dict[str, str] = {}  # by our name: under which name it was given
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
    return result


def data_parallel_dims(mesh: Any, dims: Any, strategy: Any) -> tuple[DeviceMesh, Any]:
    """FSDP2's ``dp_mesh_dims``: the mesh of these dimensions of ``mesh``, and the strategy that shards and replicates so.

    Raises:
        TypeError, ValueError: they are no dimensions of ``mesh``, or several to shard over, or to replicate over.
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
    """The end of an error about an unknown ``name``: the most similar of the ``known``, if there is one."""
    known = list(known)
    close = [*difflib.get_close_matches(name, known, 1), *(each for each in known if each.startswith(name))]
    return f": did you mean {close[0]!r}?" if close else ""
