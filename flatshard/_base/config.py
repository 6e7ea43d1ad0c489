"""The options of ``fully_shard`` that have classes of their own: strategies, precision, offload, prefetching."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import torch
from torch import nn

from flatshard._base import torch_versions
from flatshard._base.errors import name_list


class Placement(enum.Enum):
    """The placement of a tensor over the ranks of one axis of a mesh."""

    SHARDED = "sharded"  # each rank has another shard
    REPLICATED = "replicated"  # each rank has all of it
    SUMMAND = "summand"  # the sum over the ranks is the tensor


class Until(enum.IntEnum):
    """The time at which gathered parameters are freed. A later one keeps them wherever an earlier one does."""

    FORWARD = enum.auto()  # after a forward, and after a backward
    BACKWARD = enum.auto()  # after a backward
    CHANGE = enum.auto()  # after the shards have changed: an optimizer's step, a load, ...


class Placements(NamedTuple):
    """The placements of a unit under one strategy.

    [Note: Strategies as placements]
    The ranks that have a unit are a mesh. The unit is sharded over the inner axis. Only hybrid strategies have an outer
    axis, whose ranks replicate a shard. A strategy is a row of one table, and code that depends on it reads the row:

    - ``over_inner``, ``over_outer``: the placement of the user's parameters, their ``.grad`` and the optimizer's state over
      either axis. All three are cut alike. Code that steps, saves or measures them asks the parameter, not the strategy.
    - ``until``: modules compute with parameters that are gathered from these shards, and this says how long they stay.
    - Each rank computes the gradient for its own data, a summand of the result: gradients are *partial* over both axes.
      A reduction places them like the shards: by a reduce-scatter where these are sharded, by an all-reduce where they
      are replicated. It comes with each backward; under ``no_sync`` gradients stay partial, whatever the strategy.
    """

    over_inner: Placement
    until: Until
    over_outer: Placement | None = None  # None without an outer axis

    @property
    def parameters(self) -> Placement:
        """The placement, between steps, of the parameters that modules compute with."""
        return Placement.REPLICATED if self.until is Until.CHANGE else self.over_inner


class ShardingStrategy(enum.Enum):
    """The values that each rank keeps, and the time at which it frees gathered parameters.

    The names are those of FSDP1. Members of ``torch.distributed.fsdp.ShardingStrategy``, and strings such as
    ``"full_shard"`` or ``"zero3"``, are accepted wherever these are.

    Example::

        flatshard.fully_shard(model, policy={Block}, strategy=flatshard.ShardingStrategy.SHARD_GRAD_OP)
    """

    if TYPE_CHECKING:
        placements: Placements
        is_hybrid: bool
        is_replicated: bool
        joins_axes: bool
        stays_for_backward: bool

    def __new__(cls, value: str, placements: Placements) -> Self:
        """Internal: create a member with this ``value``."""
        member = object.__new__(cls)
        member._value_, member.placements = value, placements
        member.is_hybrid = placements.over_outer is not None
        member.is_replicated = placements.over_inner is Placement.REPLICATED  # nothing is sharded
        member.joins_axes = placements.over_outer is Placement.SHARDED  # shards are over the ranks of both axes
        member.stays_for_backward = placements.until is not Until.FORWARD
        return member

    FULL_SHARD = "full_shard", Placements(Placement.SHARDED, Until.FORWARD)
    """ZeRO-3: parameters, gradients and optimizer state sharded; parameters freed after forward and after backward."""
    SHARD_GRAD_OP = "shard_grad_op", Placements(Placement.SHARDED, Until.BACKWARD)
    """ZeRO-2: as FULL_SHARD, but parameters stay unsharded from forward to backward: one all-gather instead of two."""
    SHARD_OPTIM = "shard_optim", Placements(Placement.SHARDED, Until.CHANGE)
    """ZeRO-1, as DDP with ZeroRedundancyOptimizer: each rank has whole parameters, and a part of the optimizer's state.
    One all-gather of each unit in a step of the optimizer, whatever the number of microbatches and evaluations.

    The user's parameters are parts, as with FULL_SHARD, and an optimizer steps these. The whole ones, in the compute dtype,
    are gathered again when a unit is used after its parts have changed. So both take memory; with mixed precision fp32
    parameters are in parts only. Gradients stay whole under ``no_sync``; a backward outside of it reduces them to parts.
    With ``cpu_offload`` the parts are on the CPU, and whole parameters on the device. ``summon_full_params`` and ``reshard``
    free a unit, and its next forward gathers it.

    Where a change of parameters leaves autograd's version counters as they are (``dist.all_reduce(p)``; C++ that writes
    through a pointer, outside of a ``torch.optim.Optimizer``), call ``flatshard.reshard(module)`` after it."""
    NO_SHARD = "no_shard", Placements(Placement.REPLICATED, Until.BACKWARD)
    """Every rank keeps everything; gradients are all-reduced, one collective a unit."""
    HYBRID_SHARD = "hybrid_shard", Placements(Placement.SHARDED, Until.FORWARD, Placement.REPLICATED)
    """FULL_SHARD within a group, usually a node; replicated across groups, which average gradients shard by shard."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2", Placements(Placement.SHARDED, Until.BACKWARD, Placement.REPLICATED)
    """SHARD_GRAD_OP within a group, replicated across groups."""
    HYBRID_SHARD_OPTIM = "hybrid_shard_optim", Placements(Placement.SHARDED, Until.CHANGE, Placement.REPLICATED)
    """SHARD_OPTIM within a group, replicated across groups."""
    HYBRID_FULL_SHARD = "hybrid_full_shard", Placements(Placement.SHARDED, Until.FORWARD, Placement.SHARDED)
    """HYBRID_SHARD, with the optimizer's state, ``.grad`` and the user's parameters over all ranks of both axes.

    Parameters are gathered across groups once in a step of the optimizer: each rank then has what it has under HYBRID_SHARD,
    in the compute dtype, until the parts change (as SHARD_OPTIM says of whole parameters). Forward and backward gather within
    the group. Gradients are reduce-scattered within the group, and then across groups."""

    @property
    def has_replicas(self) -> bool:
        """Internal: whether other ranks have the same shard of the optimizer's state."""
        return Placement.REPLICATED in (self.placements.over_inner, self.placements.over_outer)

    def across_replicas(self) -> ShardingStrategy:
        """Internal: return the strategy that shards like this one within a group, and replicates across groups.

        Returns this one if there is none.
        """
        wanted = self.placements._replace(over_outer=Placement.REPLICATED)
        return next((each for each in ShardingStrategy if each.placements == wanted), self)


class BackwardPrefetch(enum.Enum):
    """The time at which the all-gather of the next unit in backward is issued. ``None`` instead: never ahead of need.

    Example::

        later = flatshard.BackwardPrefetch.BACKWARD_POST
        flatshard.fully_shard(model, policy={Block}, backward_prefetch=later)
    """

    BACKWARD_PRE = "backward_pre"
    """Before the current unit's backward computes: most overlap, one more unit unsharded. On CPU it first
    waits for the reduction in flight."""
    BACKWARD_POST = "backward_post"
    """After the current unit's backward, when its parameters are freed: less overlap, less memory."""


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a unit's step. The master weights, ``.grad`` and the optimizer's state keep the parameters' own dtype.

    The fields of FSDP1's ``MixedPrecision``, and ``output_dtype`` of FSDP2's policy; both are accepted in its place.

    Example::

        bf16 = flatshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        flatshard.fully_shard(model, policy={Block}, mixed_precision=bf16)

    Raises:
        ValueError: a dtype is not a floating-point ``torch.dtype``, or gradients would be reduced in float8.
    """

    param_dtype: torch.dtype | None = None
    """Of the unsharded floating-point parameters, in forward and backward. None: their own."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are reduced, and accumulated under ``no_sync``. None: see ``reduce_in_param_dtype``; where
    parameters have a ``p.grad_dtype`` other than their dtype, the promoted dtype of all.

    This is how to send gradients in 16 bits: ``reduce_dtype=torch.bfloat16``. With ``param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32`` the sum is exact; over gloo gradients are sent in bfloat16 even then, and added in float32.
    ``flatshard.comm`` says what the other ways are for.
    """
    buffer_dtype: torch.dtype | None = None
    """Floating-point buffers are cast to it once, by ``fully_shard``. None: left alone."""
    keep_low_precision_grads: bool = False
    """``.grad`` keeps ``reduce_dtype`` instead of being cast to the parameters' own dtype."""
    cast_forward_inputs: bool = False
    """Cast floating-point tensors in the arguments of every unit's forward to ``param_dtype``."""
    cast_root_forward_inputs: bool = True
    """The same for a unit that is called from outside of all others only."""
    module_classes_to_ignore: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)
    """Modules of these classes keep their own dtype: their inputs are cast to it, and their outputs back."""
    output_dtype: torch.dtype | None = None
    """Cast floating-point tensors in the output of the unit's forward to it. None: left alone."""
    full_precision_in_eval: bool = False
    """A forward in ``eval()`` mode without gradients uses the parameters' own dtype. It casts outputs only."""
    reduce_in_param_dtype: bool = True
    """With ``reduce_dtype=None``, gradients are reduced in ``param_dtype``. False: in the parameters' own dtype.

    FSDP1 reduces in ``param_dtype``, as FSDP2 did before torch 2.15. Since then FSDP2 reduces in the dtype of ``.grad``: the
    bf16 gradients 256 and 1 of two ranks give 128.5, where they gave 128.0. A policy of FSDP2's class means what it means in
    the torch that is installed. One of this class means what it always did, as does FSDP1's: for fp32 parameters that
    compute in bf16, reductions in fp32 send 4 bytes per element instead of 2, so a step of FULL_SHARD sends 8 instead of 6,
    and the input of a reduction is twice as large. Over gloo both send 2: see ``reduce_dtype``."""
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None
    """As in FSDP2's policy: called once for each floating-point parameter; returns its own dtype, to compute in that, or
    ``param_dtype``, or None for it. The same on every rank. Inputs are still cast to ``param_dtype``. Parameters of a unit
    that compute in different dtypes are in different flat parameters, and each is gathered and reduced by itself.
    ``describe`` and ``plan_step`` show them."""
    keep_cast_shard: bool = False
    """Keep this rank's cast shard from forward to backward: one cast instead of two, ``param_dtype`` bytes / N more memory.

    Pays with CPU offload, where it halves what travels to the device. Has no effect with ``reshard_after_forward=k`` and
    ``HYBRID_FULL_SHARD``, which keep more, nor with collectives that approximate."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecision({name}={dtype!r}): must be a floating-point torch.dtype or None")
        takes_param_dtype = self.reduce_dtype is None and self.reduce_in_param_dtype
        name = "param_dtype" if takes_param_dtype else "reduce_dtype"
        dtype = getattr(self, name)
        if dtype is not None and dtype.itemsize == 1:
            raise ValueError(
                f"MixedPrecision({name}={dtype}): gradients would be reduced in it without a scale. Most would become zero "
                "or overflow, and the -0.0 that marks unused parameters may be lost. Use reduce_dtype=torch.bfloat16; or, to "
                "send 8 bits with a scale for each block, collectives=flatshard.comm.QuantizedCollectives()"
            )
        object.__setattr__(self, "module_classes_to_ignore", tuple(self.module_classes_to_ignore))

    @classmethod
    def of(cls, value: Any) -> MixedPrecision:
        """Internal: return ours for ``value``: None, ours, FSDP1's ``MixedPrecision`` or FSDP2's ``MixedPrecisionPolicy``.

        Raises:
            TypeError: it is none of these.
            ValueError: it asks for something that has no counterpart here.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        kind = type(value).__name__
        if kind == "MixedPrecision":
            fields = _fields_of(value, "mixed_precision", _FSDP1_PRECISION)
            return cls(**fields | {"module_classes_to_ignore": fields["module_classes_to_ignore"] or ()})
        if kind == "MixedPrecisionPolicy":
            fields = _fields_of(value, "mixed_precision", _FSDP2_PRECISION)
            return cls(
                **fields,
                cast_root_forward_inputs=value.cast_forward_inputs,
                module_classes_to_ignore=(),
                reduce_in_param_dtype=torch_versions.FSDP2_REDUCES_IN_PARAM_DTYPE,
            )
        dtype = value if isinstance(value, torch.dtype) else torch.bfloat16
        raise TypeError(
            f"mixed_precision must be a flatshard.MixedPrecision or one of FSDP's, got {value!r}: pass "
            f"flatshard.MixedPrecision(param_dtype={dtype}, reduce_dtype=torch.float32)"
        )

    def compute_dtype_of(self, fqn: str, param: nn.Parameter) -> torch.dtype | None:
        """Internal: return the dtype that ``param`` is cast to, or None for its own.

        Raises:
            ValueError: ``param_dtype_override_fn`` returned something else than it may.
        """
        chosen = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(param)
        if chosen is not None and not (isinstance(chosen, torch.dtype) and chosen in (param.dtype, self.param_dtype)):
            raise ValueError(
                f"param_dtype_override_fn returned {chosen!r} for parameter {fqn!r}: it may return the parameter's own "
                f"dtype, {param.dtype}, or None for param_dtype={self.param_dtype}"
            )
        return chosen or self.param_dtype


_FSDP2_PRECISION = {
    **{name: name for name in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")},
    "param_dtype_override_fn": "param_dtype_override_fn",  # since torch 2.15
}
_FSDP1_PRECISION = {
    **{name: name for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads")},
    **{name: name for name in ("cast_forward_inputs", "cast_root_forward_inputs")},
    "_module_classes_to_ignore": "module_classes_to_ignore",
}


def _fields_of(value: Any, argument: str, ours: dict[str, str]) -> dict[str, Any]:
    """Return the fields of one of torch's dataclasses by our names, which ``ours`` has by theirs.

    Raises:
        ValueError: another field is not at its default, so it asks for something that has no counterpart here.
    """
    found = {}
    for field in dataclasses.fields(value):
        given = getattr(value, field.name)
        if field.name in ours:
            found[ours[field.name]] = given
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if given is not default and given != default:
            raise ValueError(
                f"{argument}: {type(value).__name__}({field.name}={given!r}) has no counterpart in flatshard"
                + ("" if default is dataclasses.MISSING else f": leave it out, which means {default!r}")
                + f". What is understood of this class: {name_list(ours) or 'nothing'}"
            )
    return found


@dataclass(frozen=True)
class CPUOffload:
    """An option to keep shards of parameters and gradients, and so the optimizer's state, in CPU memory.

    FSDP1's ``CPUOffload`` and FSDP2's ``CPUOffloadPolicy`` are accepted in its place. Without an accelerator nothing moves.

    Example::

        flatshard.fully_shard(model, policy={Block}, cpu_offload=flatshard.CPUOffload(pin_memory=False))
    """

    offload_params: bool = True
    """Whether anything is offloaded."""
    pin_memory: bool = True
    """Shards and gradients in page-locked memory, so that copies overlap with computation."""

    @classmethod
    def of(cls, value: Any) -> CPUOffload:
        """Internal: return ``value`` as one of ours: None, True or False, ours, or FSDP's.

        Raises:
            TypeError: it is none of these.
            ValueError: it asks for something that has no counterpart here.
        """
        if value is None or isinstance(value, bool):
            return cls(offload_params=bool(value))
        if isinstance(value, cls):
            return value
        kind = type(value).__name__
        if kind in _OFFLOADS:
            known = _OFFLOADS[kind]
            fields = {"offload_params": kind == "CPUOffloadPolicy", **_fields_of(value, "cpu_offload", known)}
            return cls(**{name: bool(given) for name, given in fields.items()})
        raise TypeError(f"cpu_offload must be a flatshard.CPUOffload, a bool, or one of FSDP's, got {value!r}")


_OFFLOADS: dict[str, dict[str, str]] = {
    "CPUOffload": {"offload_params": "offload_params"},  # FSDP1's
    "CPUOffloadPolicy": {"pin_memory": "pin_memory"},
    "OffloadPolicy": {},
}
"""The fields of FSDP's classes that are understood, and our names for them."""


E = TypeVar("E", bound=enum.Enum)


_ZERO = {"zero1": "SHARD_OPTIM", "zero2": "SHARD_GRAD_OP", "zero3": "FULL_SHARD"}
"""Strategies by the stages of ZeRO (https://arxiv.org/abs/1910.02054)."""


def as_enum(kind: type[E], value: Any, argument: str) -> E:
    """Return ``value`` as a member of ``kind``. Names, stages of ZeRO and FSDP1's members stand for it."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and (name := _ZERO.get(value.lower(), value.upper())) in kind.__members__:
        return kind[name]
    if isinstance(value, enum.Enum) and type(value).__name__ == kind.__name__:
        name = value.name.lstrip("_")  # FSDP1 has a _HYBRID_SHARD_ZERO2
        if name in kind.__members__:
            return kind[name]
    members = ", ".join(f"{kind.__name__}.{name}" for name in kind.__members__)
    raise ValueError(f"{argument}={value!r} is not one of {members}")


def check_reshard_after_forward(value: Any, strategy: ShardingStrategy) -> None:
    """Raise if ``value`` is not True, False, None or a number of ranks, or has no meaning with ``strategy``."""
    if not isinstance(value, int | None):
        raise ValueError(
            "reshard_after_forward must be True, False, None (as the strategy says) or a number of ranks to reshard to, got "
            f"{value!r}"
        )
    if value and strategy.placements.parameters is Placement.REPLICATED:
        raise ValueError(
            f"reshard_after_forward={value} has no meaning with {strategy.name}, whose parameters are always whole: use "
            "FULL_SHARD"
        )
    if strategy.joins_axes and value is not None and not isinstance(value, bool):
        raise ValueError(
            f"reshard_after_forward={value}: {strategy.name} reshards to its inner ranks: pass True or False"
        )


def as_reshard_after_forward(value: bool | int | None, world_size: int) -> bool | int | None:
    """Return ``value`` for a unit over ``world_size`` ranks: True for all of them, False for one, else the number."""
    if value is None or isinstance(value, bool):
        return value
    if value < 1 or world_size % value:
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"reshard_after_forward={value} does not divide the {world_size} ranks that the parameters are sharded over: "
            f"pass one of {divisors}, True or False"
        )
    return True if value == world_size and world_size > 1 else False if value == 1 else value
