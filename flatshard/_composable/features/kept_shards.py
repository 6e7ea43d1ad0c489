"""What units keep from forward to backward, so that backward gathers from nearer than the shards of all ranks.

[Note: The life of a kept shard]
A kept shard has the values of the unit's last forward, so the next all-gather over the whole group drops it. The backward
that uses it drops it too: a second backward of the same graph gathers over the whole group. And it is freed with the last
graph that could use it. All of this follows from the program alone, so all ranks agree on the group that they gather over.

[Note: Shards of a subgroup]
With an int for ``reshard_after_forward``, a unit is resharded to a smaller group after its forward. Each of the group's ``k``
ranks keeps one of ``k`` equal shards of the unsharded buffer, in the compute dtype. Backward's all-gather runs among these
ranks only, which are usually those of one node. On an accelerator this is a different communicator than that of the whole
group's gathers, but the same stream, so the order is the same on all ranks.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flatshard._base import trace
from flatshard._comm.collectives import ALL_GATHER, CollectivesFactory, Done, Pending
from flatshard._comm.mesh_runtime import MeshRuntime
from flatshard._comm.runtime import Runtime
from flatshard._composable.construct.groups import subgroup
from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.handle import Source
from flatshard._handle.tensors.aggregate import plainly


class KeptShards(Source):
    """The kept shards of one unit, from which its handle gathers again. A subclass defines which values are kept."""

    def __init__(self) -> None:
        # The shards, by the records of forwards that may need them: the same dict for all.
        self._by_graph: weakref.WeakKeyDictionary[object, dict[FlatParam, torch.Tensor]] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptShards:
        """Return an object for the copied unit, without shards."""
        return type(self)()

    @property
    def _shards(self) -> dict[FlatParam, torch.Tensor]:
        return next(iter(self._by_graph.values()), {})

    @property
    def kept(self) -> list[torch.Tensor]:
        """The shards that exist now."""
        return list(self._shards.values())

    def keep(self, flats: Sequence[FlatParam], forward_graph: object) -> None:
        """Copy shards of the unsharded buffers. The copies belong to the gather stream as well, which alone reads them."""
        shards = self._shards
        shards.clear()
        shards.update((flat, part.clone()) for flat in flats if (part := self.part(flat)) is not None)
        self._by_graph[forward_graph] = shards

    def gathers(self, flats: Sequence[FlatParam], for_backward: bool) -> Iterator[Pending] | None:
        """Gather from the shards once. Return None if none are of use. [Note: The life of a kept shard]"""
        shards = self._shards
        taken = dict(shards)
        shards.clear()
        if not (taken and for_backward):
            return None
        if trace.sinks:
            trace.event(self.verb(flats[0]), flats[0].ranks.label.unit)
        return (self.gather(flat, taken.get(flat)) for flat in flats)

    def part(self, flat: FlatParam) -> torch.Tensor | None:
        """Return the shard of the unsharded buffer to keep, or None."""
        raise NotImplementedError

    def verb(self, flat: FlatParam) -> str:
        """Return the name of the gather in traces."""
        raise NotImplementedError

    def gather(self, flat: FlatParam, kept: torch.Tensor | None) -> Pending:
        """Gather ``flat`` again from ``kept``, the shard that ``part`` returned."""
        raise NotImplementedError


class KeptCasts(KeptShards):
    """The cast shard of this rank under ``keep_cast_shard``, which backward copies instead of casting again.

    This takes memory, and pays if the shard is on another device (CPU offload), because it is transferred once. Collectives
    that approximate leave another value in the buffer, so then nothing is kept.
    """

    def part(self, flat: FlatParam) -> torch.Tensor | None:
        is_cast, runtime = flat.kind.buffer_dtype is not flat.kind.dtype, flat.ranks.runtime
        return flat.unsharded.own if is_cast and runtime is runtime.exact else None

    def verb(self, flat: FlatParam) -> str:
        return flat.ranks.gather_verb

    def gather(self, flat: FlatParam, kept: torch.Tensor | None) -> Pending:
        return flat.gather(False, True, kept)


# For each runtime of all ranks that a unit is sharded over: those of its subgroups, by size.
_subgroups: weakref.WeakKeyDictionary[Runtime, dict[int, Runtime]] = weakref.WeakKeyDictionary()


class GatherSources(Extension):
    """Makes units keep shards, as ``reshard_after_forward`` (a number of ranks) and ``keep_cast_shard`` say."""

    concerns = operator.attrgetter("config.keeps_shards")

    def attach(self, unit: Unit, modules: list[nn.Module]) -> None:
        set_source(unit)


def add_subgroup(runtime: Runtime, inner: Runtime) -> None:
    """Use ``inner``, of consecutive ranks of ``runtime`` that include this rank, for units that reshard to as many."""
    _subgroups.setdefault(runtime, {}).setdefault(inner.world_size, inner)


def set_source(unit: Unit) -> None:
    """Make ``unit`` keep what its config says, from its next forward on.

    The first unit that reshards to a number of ranks creates their groups. All ranks of the world must call it together then:
    see ``subgroup``.
    """
    config, runtime = unit.config, unit.runtime
    unit.handle.source = KeptCasts() if config.mixed_precision.keep_cast_shard else None
    if config.strategy.joins_axes:
        unit.handle.source = GatheredOutside()
    if (size := config.subgroup_size) is not None:
        if size not in _subgroups.get(runtime, ()):
            add_subgroup(runtime, Runtime.of(subgroup(runtime.group, size, runtime.device), runtime.device))
        unit.handle.source = SubgroupShards(_exact(_subgroups[runtime][size], config.collectives))


def _exact(inner: Runtime, factory: CollectivesFactory | None) -> Runtime:
    """Return ``inner`` with collectives that deliver values bit for bit, as values are gathered for the second time.

    Exception: ``Capabilities.regathers`` (``benchmarks/no_communication.py`` leaves out all communication).
    """
    made = inner.using(factory)
    return made if made.capabilities.regathers else made.exact


class GatheredOutside(Source):
    """The shards of a unit under ``HYBRID_FULL_SHARD``, gathered over the outer axis and kept until parameters change."""

    def __init__(self) -> None:
        self._kept: dict[FlatParam, tuple[int, torch.Tensor]] = {}  # with the version of the parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> GatheredOutside:
        return GatheredOutside()

    @property
    def kept(self) -> list[torch.Tensor]:
        """The shards that exist now."""
        return [part for _, part in self._kept.values()]

    def follow(self, flat: FlatParam) -> None:
        """Keep the values that the forward has written."""
        if (kept := self._kept.get(flat)) is not None and isinstance(runtime := flat.ranks.runtime, MeshRuntime):
            kept[1].copy_(runtime.part(flat.unsharded.gather_output))

    def drop(self) -> None:
        """Drop the shards."""
        self._kept.clear()

    def gathers(self, flats: Sequence[FlatParam], for_backward: bool) -> Iterator[Pending] | None:
        """Gather over the inner axis, and over the outer axis if the parameters have changed."""
        runtime = flats[0].ranks.runtime
        if not isinstance(runtime, MeshRuntime) or runtime.exact is not runtime:
            return None
        return (self._gather(flat, runtime, for_backward) for flat in flats)

    def _gather(self, flat: FlatParam, runtime: MeshRuntime, for_backward: bool) -> Pending:
        unit, version = flat.ranks.label, _version(flat)
        kept = self._kept.get(flat)
        if kept is not None and kept[0] == version:
            if trace.sinks:
                trace.event(f"all-gather over {runtime.inner.world_size}", unit.unit)
            flat.unsharded.allocate(None)
            wire = flat.unsharded.gather_output
            part = runtime.part(wire).copy_(kept[1])
            return runtime.gather_inner(wire, part, unit, for_backward)
        if trace.sinks:
            trace.event(ALL_GATHER, unit.unit)
        self._kept.pop(flat, None)
        return runtime.then(flat.gather(False, for_backward), functools.partial(self._note, flat, runtime, version))

    def _note(self, flat: FlatParam, runtime: MeshRuntime, version: int) -> Pending:
        with torch.inference_mode(False):  # a later forward may write to it
            self._kept[flat] = version, runtime.part(flat.unsharded.gather_output).clone()
        return runtime.issued(Done())


def _version(flat: FlatParam) -> int:
    """Return a number that grows with every change of the parameters, by the same amount on all ranks."""
    with plainly():
        return sum([param._version for param in (*flat.params, flat.shard_param) if param is not None])


class SubgroupShards(KeptShards):
    """The shards of one unit in a smaller group."""

    def __init__(self, runtime: Runtime) -> None:
        """Create the shards for ``runtime``, of the smaller group."""
        super().__init__()
        self.runtime = runtime

    def __deepcopy__(self, memo: dict[int, Any]) -> SubgroupShards:
        return SubgroupShards(self.runtime)

    def part(self, flat: FlatParam) -> torch.Tensor:
        """Return this rank's shard of the unsharded buffer, in the dtype that is sent."""
        return flat.unsharded.gather_output.view(self.runtime.world_size, -1)[self.runtime.rank]

    def verb(self, flat: FlatParam) -> str:
        return f"all-gather over {self.runtime.world_size}"

    def gather(self, flat: FlatParam, kept: torch.Tensor | None) -> Pending:
        assert kept is not None
        flat.unsharded.allocate(None)
        own = self.part(flat).copy_(kept)
        return self.runtime.all_gather(flat.unsharded.gather_output, own, flat.ranks.label, for_backward=True)
