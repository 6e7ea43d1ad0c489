"""``flat_parameters``: the flat parameters, for an optimizer."""

from __future__ import annotations

from torch import nn

from flatshard._base.errors import name_list
from flatshard._composable.find import units_of
from flatshard._composable.state import Unit
from flatshard._handle.adapters.tensor_parallel import common_runtime
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.handle import check_has_memory
from flatshard._handle.tensors.shard_info import ShardInfo


def flat_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return one parameter per unit and dtype, to pass to an optimizer in place of ``module.parameters()``.

    An optimizer then runs the fewest operations. Each parameter is this rank's flat shard: 1-D, of shape ``(shard_numel,)``.
    Its attribute ``fqns`` has the names of the parameters in it. From this call on only flat parameters receive gradients,
    and ``.grad`` of a single parameter is a view of its elements there. So ``model.zero_grad()`` clears the flat gradients,
    and torch's ``clip_grad_norm_(model.parameters())`` clips them. A parameter that no rank used gets a gradient of zero
    instead of None. FSDP1 calls this ``use_orig_params=False``.

    >>> optimizer = torch.optim.AdamW(flatshard.flat_parameters(model))

    Raises:
        RuntimeError: parameters are on the meta device or in use (``summon_full_params``), or gradients are being reduced
            (``reduce_gradients(async_op=True)``).
        ValueError: a flat parameter contains trainable and frozen parameters, because one was frozen after sharding, and an
            optimizer cannot treat them differently; it contains parameters from outside of ``module``; or nothing in
            ``module`` is sharded.
    """
    units = units_of(module, "flat_parameters")
    _check_all_inside(module, units)
    if busy := [unit.fqn or "<root>" for unit in units if unit.claims.in_use]:
        raise RuntimeError(
            f"flat_parameters: {name_list(busy)} are in use by a forward or by summon_full_params. Call it outside"
        )
    flats = {flat: unit.handle for unit in units for flat in unit.handle.flats}
    check_has_memory([unit.handle for unit in units], "flat_parameters")
    for unit in units:
        unit.handle.gradients.check_not_deferred("flat_parameters was called")
    for flat in flats:
        if len({p.requires_grad for p in flat.params}) > 1:
            frozen = [i.fqn for p, i in zip(flat.params, flat.layout.params, strict=True) if not p.requires_grad]
            raise ValueError(
                f"{frozen} were frozen after fully_shard and share a flat parameter with trainable ones, so an optimizer on "
                "flat parameters would change them (weight decay). Freeze before fully_shard, or use module.parameters()"
            )
    result = []
    for flat, handle in flats.items():
        if flat.params[0].requires_grad:
            param = handle.use_flat_parameter(flat, _info_of(flat))
            param.fqns = tuple(info.fqn for info in flat.layout.params)  # type: ignore[attr-defined]
            result.append(param)
    return result


def _check_all_inside(module: nn.Module, units: list[Unit]) -> None:
    """Raise if a unit also owns parameters from outside of ``module``, which an optimizer would step, too."""
    inside = set(module.modules())
    for unit in units:
        registered = {id(p) for m, _, p, _ in unit.handle.registrations.entries if m in inside}
        owned = [(p, i.fqn) for f in unit.handle.flats for p, i in zip(f.params, f.layout.params, strict=True)]
        if others := [fqn for param, fqn in owned if id(param) not in registered]:
            raise ValueError(
                f"flat_parameters: this {type(module).__name__} has a part of unit {unit.fqn or '<root>'!r}, whose flat "
                f"parameter also has {name_list(others, 3)}: pass a module that has all of the unit, or make this module a "
                "unit by the policy"
            )


def _info_of(flat: FlatParam) -> ShardInfo:
    """Return the ``ShardInfo`` of a parameter that covers the whole flat shard."""
    layout = flat.layout
    runtime, counted = common_runtime([param._flatshard_info.runtime for param in flat.params])
    others = [s for s, mine in zip(flat.slices, counted, strict=True) if s.numel and not mine]
    start = flat.ranks.rank * layout.shard_numel
    return ShardInfo(
        f"the flat parameter of {name_list((p.fqn for p in layout.params), 3)}",
        (layout.padded_numel,),
        (1,),
        start,
        start + layout.shard_numel,
        layout.world_size,
        runtime=runtime,
        average=flat.ranks.average_now,
        elsewhere=tuple(sorted((s.start, s.stop) for s in others)),
    )
