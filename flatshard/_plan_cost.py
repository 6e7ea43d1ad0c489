"""What a planned unit takes on one rank: each thing that its handle will hold, in bytes. Integers, from the plans alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flatshard._composable.flat_plan import PlannedFlat
from flatshard._composable.state import UnitConfig
from flatshard._config import ShardingStrategy, as_reshard_after_forward
from flatshard._handle.reduction import exactly_sent_as
from flatshard._inspect import FlatDescription


@dataclass(frozen=True, slots=True)
class Ranks:
    """How many ranks shard, and how many hold each shard."""

    shards: int
    replicas: int = 1

    @property
    def total(self) -> int:
        return self.shards * self.replicas


@dataclass(frozen=True, slots=True)
class FlatCost:
    """One flat parameter on one rank. Fields ending in ``_nbytes`` are 0 for what it never has."""

    description: FlatDescription
    numels: tuple[int, ...]  # of its parameters
    shards: int  # ranks that it is cut over
    replicas: int  # ranks that average its gradient shard; 1: none
    offloaded: bool  # shard and gradient are on the host
    shard_nbytes: int
    unsharded_nbytes: int
    cast_nbytes: int  # of the cast shard kept from forward to backward
    input_nbytes: int  # of the reduction
    narrow_nbytes: int  # the same, where no gradients are held: reduction.py, [Note: Sent as it was computed]
    output_nbytes: int  # of the reduction, where that is not its input
    gradient_nbytes: int  # of `.grad`, where the ranks reduce it
    warning: str | None

    @classmethod
    def of(cls, planned: PlannedFlat, config: UnitConfig, ranks: Ranks, device: str) -> FlatCost:
        layout, options = planned.layout, planned.options
        compute = options.compute_dtype or planned.dtype
        reduce = options.reduce_dtype or compute
        grad = reduce if options.keep_low_precision_grads else planned.dtype
        offloaded = options.offload and device != "cpu"
        alias = layout.world_size == 1 and compute is planned.dtype and not offloaded
        replicas = ranks.total if config.strategy is ShardingStrategy.NO_SHARD else ranks.replicas
        reduced = planned.trainable and layout.world_size * replicas > 1
        widens = device == "cpu" and layout.world_size > 1 and config.collectives is None  # gloo
        sent = exactly_sent_as(compute, reduce) if widens else reduce
        described = FlatDescription(
            tuple(info.fqn for info in layout.params),
            tuple(info.shape for info in layout.params),
            planned.dtype,
            compute,
            grad,
            reduce,
            planned.trainable,
            layout.numel,
            layout.padded_numel,
            layout.shard_numel,
            tuple(info.cut for info in layout.params),
        )
        return cls(
            described,
            tuple(info.numel for info in layout.params),
            layout.world_size,
            replicas,
            offloaded,
            layout.shard_numel * planned.dtype.itemsize,
            0 if alias else layout.padded_numel * compute.itemsize,
            layout.shard_numel * compute.itemsize if options.keep_cast and not alias else 0,
            layout.padded_numel * reduce.itemsize if reduced else 0,
            layout.padded_numel * sent.itemsize if reduced else 0,
            layout.shard_numel * reduce.itemsize if reduced and layout.world_size > 1 else 0,
            layout.shard_numel * grad.itemsize if reduced else 0,
            planned.warning,
        )

    @property
    def is_gathered(self) -> bool:
        """Whether unsharding takes memory."""
        return self.unsharded_nbytes > 0

    @property
    def is_reduced(self) -> bool:
        """Whether ranks average its gradients."""
        return self.description.trainable and self.shards * self.replicas > 1

    @property
    def is_cast_for_grad(self) -> bool:
        return self.description.reduce_dtype is not self.description.grad_dtype

    def arriving_nbytes(self, index: int) -> int:
        """Bytes of the gradient that autograd makes of one parameter."""
        return self.numels[index] * self.description.compute_dtype.itemsize

    def local_gradient_nbytes(self, index: int) -> int:
        """Bytes of its ``.grad`` where nothing is reduced."""
        return self.numels[index] * self.description.grad_dtype.itemsize


@dataclass(frozen=True, slots=True)
class UnitCost:
    """One unit on one rank."""

    fqn: str
    module: str  # class name
    config: UnitConfig
    flats: tuple[FlatCost, ...]
    needs: tuple[
        int, ...
    ]  # the units that its forward needs unsharded: itself, and owners of parameters that it shares
    ranks: Ranks

    def holding_nothing(self) -> UnitCost:
        """The same where no backward adds to gradients that are held."""
        return replace(self, flats=tuple(replace(f, input_nbytes=f.narrow_nbytes) for f in self.flats))

    @property
    def name(self) -> str:
        return self.fqn or "<root>"

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that gathering takes."""
        return sum(f.unsharded_nbytes for f in self.flats)

    @property
    def is_alias(self) -> bool:
        """Whether unsharding moves nothing."""
        return not any(f.is_gathered for f in self.flats)

    @property
    def all_trainable(self) -> bool:
        return all(f.description.trainable for f in self.flats)

    @property
    def any_trainable(self) -> bool:
        return any(f.description.trainable for f in self.flats)

    @property
    def inner(self) -> int | None:
        """The ranks that it reshards to after forward, where these are not one or all."""
        value = as_reshard_after_forward(self.config.reshard_after_forward, self.ranks.shards)
        return None if value is None or isinstance(value, bool) else value

    def stays_for_backward(self, outermost: bool) -> bool:
        """See ``UnitConfig.stays_for_backward``."""
        value = as_reshard_after_forward(self.config.reshard_after_forward, self.ranks.shards)
        return not value if value is not None else self.config.stays_for_backward(outermost)
