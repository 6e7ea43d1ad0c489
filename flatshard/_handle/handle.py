"""``FlatParamHandle``: the parameters of one unit, which it unshards and reshards.

It usually has a single flat parameter. Parameters of another dtype, and frozen ones beside trainable ones, get one of their
own, so that frozen ones take no gradient memory and no bytes of a reduction.
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._base import trace
from flatshard._base.errors import CollectiveError, OutOfStepError, name_list
from flatshard._comm.collectives import ALL_GATHER, Pending
from flatshard._comm.progress import ComparedFlat, drain
from flatshard._comm.runtime import Runtime
from flatshard._comm.streams import Users
from flatshard._handle.adapters.tensor_subclass import plain_tensors
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout, Groups, Kind, PlannedFlat
from flatshard._handle.lifetime import (
    BY_USER,
    FILLING,
    LENT,
    PARAM_TRANSITIONS,
    REDUCING,
    SHARDED,
    UNSHARDED,
    UNSHARDING,
    UnshardedStamp,
)
from flatshard._handle.registrations import SHARDED_PARAMS, Registrations
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.unit_gradients import UnitGradients
from flatshard._handle.unit_ranks import UnitRanks
from flatshard._handle.user_changes import Conversion, UserChanges, adopt_data

_version = operator.attrgetter("_version")  # read for every parameter in every step, so the loop runs in C


class Source:
    """Values of a unit that a feature has kept nearer than the shards of all ranks, to gather from. A unit has at most one.

    A deep copy is for the copied unit.
    """

    def gathers(self, flats: Sequence[FlatParam], for_backward: bool) -> Iterable[Pending] | None:
        """Return an iterator that starts to gather each of ``flats``, or None to gather from the shards of all ranks.

        Called before each all-gather. ``for_backward``: see ``FlatParamHandle.unshard``.
        """
        raise NotImplementedError

    def keep(self, flats: Sequence[FlatParam], forward_graph: object) -> None:
        """Keep copies for the backward of ``forward_graph``, as long as it lives. ``flats`` are freed right afterwards.

        Called on the stream that the unsharded buffers belong to.
        """

    def follow(self, flat: FlatParam) -> None:
        """Adopt values that a forward has changed, in the unsharded buffer and in the shard."""

    def drop(self) -> None:
        """Forget kept values: the user frees the unit."""


class UnshardedMemory:
    """The buffers that the parameters of one unit are gathered into, and the all-gathers under way."""

    __slots__ = ("flats", "in_flight", "make_room", "users")

    def __init__(self) -> None:
        self.flats: list[FlatParam] = []  # those that are gathered. `FlatParamHandle._index` finds them
        self.in_flight: list[Pending] = []
        self.users: Users | None = None  # on an accelerator: the streams that compute with the unsharded parameters
        self.make_room: Callable[[], None]  # called before an all-gather if the unit is blocked

    @property
    def is_blocked(self) -> bool:
        """Whether another unit is using the static buffer that this one gathers into.

        Local to this rank: it frees a complete unit later if its graph lacks parameters. gathering.py frees those first.
        """
        return any([b.unsharded.is_taken for b in self.flats])

    def unblock(self) -> None:
        """Gather into other memory from now on. No autograd graph of the unit may be alive."""
        # Also flat parameters whose memory is free: another one may bind to it before they are gathered.
        for flat in self.flats:
            flat.unsharded.unbind()

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return sum(b.unsharded.flat.nbytes for b in self.flats)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in this memory."""
        for flat in self.flats:
            for plain in (tensor,) if type(tensor) is torch.Tensor else plain_tensors(tensor):
                if flat.unsharded.holds(plain):
                    return True
        return False

    def gather(self, runtime: Runtime, exactly: bool, for_backward: bool, instead: Iterable[Pending] | None) -> None:
        """Start the all-gathers, or take ``instead``: see ``Source.gathers``. An error frees all of the memory."""
        try:
            others = None if instead is None else iter(instead)
            for flat in self.flats:
                started = flat.gather(exactly, for_backward) if others is None else next(others)
                # At once: a later one may raise.
                self.in_flight.append(started if exactly else runtime.then(started, flat.keep_gathered))
        except BaseException:
            self.abandon()
            runtime.before_free(self.users)  # the memory may have been lent
            self.free()
            raise

    def free(self, seen: bool = False) -> None:
        """Free the memory, after ``Runtime.before_free``. ``seen``: see ``UnshardedBuffer.free``."""
        self.users = None
        for flat in self.flats:
            flat.unsharded.free(seen)

    def abandon(self, out_of_step: bool = False) -> None:
        """Wait for all-gathers whose results are not needed. ``out_of_step``: one has raised ``OutOfStepError``."""
        if not drain(self.in_flight) or out_of_step:  # some may never end, so their memory must not be freed
            for flat in self.flats:
                flat.unsharded.close()  # to graphs for which its memory was lent
                flat.unsharded.place(flat.kind, flat.shard)


class FlatParamHandle:
    """The flat parameters of one unit."""

    def __init__(self, all_ranks: Sequence[UnitRanks]) -> None:
        """Make a handle without flat parameters: see ``shard``.

        ``all_ranks``: the unit's ranks, and those of parameters on other meshes.
        """
        self.all_ranks = all_ranks
        self.ranks = ranks = all_ranks[0]
        self.runtime = ranks.runtime
        self.state = SHARDED
        self.registrations = Registrations()
        self.flats: list[FlatParam] = []
        self.gradients = UnitGradients(ranks)
        self.user_changes = UserChanges(self.flats, self.registrations, self.gradients, ranks.label)
        self.memory = UnshardedMemory()
        # None while the parameters are sharded. Local to this rank, as `state` is, once a backward has completed the unit:
        # it frees it later if its graph lacks parameters. claims.py, [Note: Freeing], says how ranks gather equally often.
        self.stamp: UnshardedStamp | None = None
        self._read_version = -1  # `version` of the values that the unsharded parameters had last, for autograd to read
        self.source: Source | None = None  # set by a feature

    @classmethod
    def shard(cls, flats: Sequence[PlannedFlat], all_ranks: Mapping[Groups | None, UnitRanks]) -> FlatParamHandle:
        """Flatten and shard the parameters of ``flats`` in place.

        ``all_ranks``: the unit's ranks, under None, and those of parameters on other meshes, by ``PlannedFlat.groups``.
        """
        result = cls(list(all_ranks.values()))
        for planned in flats:
            params, options = [p.param for p in planned.params], planned.options
            ranks, kind = all_ranks[planned.groups], Kind.of(params[0].dtype, params[0].device, options, result.runtime)
            made_as = FlatParam if options.encoded_dtype is None else FlatParam.encoded or FlatParam
            flat = made_as(planned.layout, options, params, kind, ranks)
            result.flats.append(flat)
            result.gradients.add(flat)
            for owned, compute in zip(planned.params, flat.unsharded.params, strict=True):
                for module, name in owned.registrations:
                    result.registrations.add(module, name, owned.param, compute)
        result._index()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        """Return a handle for the copied modules, sharded in the same way, with its own memory and without gradients."""
        if self.registrations.shows is not SHARDED_PARAMS:
            raise RuntimeError(
                f"cannot copy unit {self.fqn!r} while its parameters are unsharded: copy outside forward, backward and "
                "summon_full_params, after flatshard.reshard(module)"
            )
        self.check_parameters()
        owned: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name, sharded, _ in self.registrations.entries:
            owned.setdefault(id(sharded), []).append((module, name))
        averaging = replace(self.ranks.averaging)
        all_ranks = {old: old.copied(averaging) for old in self.all_ranks}
        result = FlatParamHandle(list(all_ranks.values()))
        memo[id(self)] = result  # its source and features may refer to it
        result.source = copy.deepcopy(self.source, memo)
        for flat in self.flats:
            params = [copy.deepcopy(p, memo) for p in flat.params]
            new = flat.copy_with(params, all_ranks[flat.ranks])
            memo[id(flat)] = new
            new.copy_features(flat, memo)
            result.flats.append(new)
            result.gradients.add(new)
            for old, param, compute in zip(flat.params, params, new.unsharded.params, strict=True):
                for module, name in owned[id(old)]:
                    result.registrations.add_copied(module, name, param, compute, memo)
        result.gradients.copy_settings(self.gradients)
        result._index()
        return result

    def _index(self) -> None:
        """Collect facts of ``flats`` that every step reads. Called again if their kinds have changed."""
        self._kinds = [b.kind for b in self.flats]
        self.on_meta = [b for b in self.flats if b.kind.is_on_meta]  # have no memory yet. [Note: Filled later]
        self.memory.flats = [b for b in self.flats if not b.unsharded.is_alias and b.layout.shard_numel]
        self._params = [p for b in self.flats for p in b.params]
        shard_params = [b.flat_grad.param for b in self.flats if b.flat_grad is not None]
        self._counted = [*self._params, *shard_params]  # an optimizer that steps the latter changes their versions only
        # The shards are what modules compute with: unshard and reshard do nothing.
        self.never_gathers = not self.memory.flats
        # Whether units share the memory that they gather into. unsharded.py, [Note: Static buffers]
        self.has_static_buffers = self.ranks.pool is not None and not self.never_gathers
        # Whether other ranks hold the same shard of some parameters.
        self.has_replicas = any([p.replicas is not None for p in self.all_ranks])
        self.gradients.accumulators.find()  # here, to save the time in the first step
        for index, ranks in enumerate(self.all_ranks):
            ranks.label.describe_flats = functools.partial(_describe_flats, weakref.ref(self), index)

    @property
    def is_encoded(self) -> bool:
        """Whether some of its parameters travel encoded."""
        return any([b.options.encoded_dtype is not None for b in self.flats])

    def move(self, ranks: UnitRanks, layouts: Sequence[FlatLayout], shards: Sequence[torch.Tensor]) -> None:
        """Shard over ``ranks`` from now on: see ``FlatParam.move``. Nothing is communicated.

        ``layouts``, ``shards``: for each flat parameter, all of which must be on the unit's own ranks.
        """
        self.reshard()
        self.drop_kept()
        self.all_ranks, self.ranks, self.runtime = [ranks], ranks, ranks.runtime
        with torch.inference_mode(False), torch.no_grad():
            for flat, layout, shard in zip(self.flats, layouts, shards, strict=True):
                flat.move(layout, ranks, shard)
            self.gradients.move(ranks)
        self._index()
        self.user_changes = UserChanges(self.flats, self.registrations, self.gradients, ranks.label)

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle({self.fqn or '<root>'!r}, {len(self._params)} parameters in {len(self.flats)} flat parameters, "
            f"{self.state.name})"
        )

    @property
    def fqn(self) -> str:
        """The unit's FQN."""
        return self.ranks.label.unit

    def rename(self, fqn: str, names: Mapping[nn.Module, str]) -> None:
        """Rename the unit, and its parameters by the ``names`` of the modules in which they are registered."""
        for ranks in self.all_ranks:
            ranks.label.unit = fqn
        for flat in self.flats:
            flat.rename(self.registrations.fqns(names))
        for grads in self.gradients.flats:
            grads.prepare_slices()

    def add_registration(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Add another registration (module and name) of a parameter that this handle owns."""
        flat, index = self.user_changes.locate(param)
        self.registrations.add(module, name, param, flat.unsharded.params[index])
        self.user_changes.look_again()

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters count as sharded: a use gathers them. They may be lent."""
        return self.stamp is None

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, by: int, for_backward: bool = False, exactly: bool = False) -> None:
        """Start the all-gather, if the parameters count as sharded. Call ``wait`` before they are read.

        Args:
            by: see ``UnshardedStamp``.
            for_backward: gather for a backward, which needs the values of its forward.
            exactly: gather the shards bit for bit, even if the user's collectives approximate.
        """
        if self.stamp is not None:
            return
        memory = self.memory
        if memory.in_flight:  # left by an interrupted unshard
            memory.abandon()
        if self.on_meta:
            check_has_memory([self], "unshard")
        runtime, version = self.runtime, self.version()
        if self.state is LENT and version != self._read_version:
            for flat in memory.flats:
                flat.unsharded.close()  # to graphs that read the values which the gather replaces
        is_exact = exactly or runtime.capabilities.exact  # also of kept shards: they came from the same collectives
        if memory.flats:
            if self.has_static_buffers and memory.is_blocked:
                self._make_room()
            instead = None if self.source is None else self.source.gathers(memory.flats, for_backward)
            if trace.sinks and instead is None:
                trace.event(self.ranks.gather_verb, self.fqn)
            try:
                if runtime.streams is None and not trace.is_profiling():
                    memory.gather(runtime, is_exact, for_backward, instead)
                else:
                    with trace.labelled(self.ranks.gather_verb, self.fqn, runtime.gathering()):
                        memory.gather(runtime, is_exact, for_backward, instead)
            except Exception as e:
                self.state = PARAM_TRANSITIONS[self.state, "fail"]
                runtime.fail(ALL_GATHER, self.fqn, e)
        self.stamp = UnshardedStamp(version, by, is_exact, for_backward)
        self.state = PARAM_TRANSITIONS[self.state, "unshard"]

    def use(self, by: int, for_backward: bool = False) -> None:
        """Unshard the parameters if they are sharded, and wait until they can be read: see ``unshard``."""
        if self.stamp is None:  # sharded
            self.unshard(by, for_backward)
        else:
            self.set_used_by(by)
        self.wait()

    def _make_room(self) -> None:
        self.memory.make_room()
        if self.memory.is_blocked:
            raise RuntimeError(
                f"unit {self.fqn or '<root>'!r} shares a static buffer with another unit, and this backward needs both at "
                "once: buffers were assigned when they ran forward one after the other. Reshard the other unit first, or "
                "call fully_shard with static_buffers=False and collectives without allocate()"
            )

    def wait(self) -> None:
        """Wait for the all-gather, so that the caller can read the unsharded parameters.

        Raises:
            CollectiveError: the all-gather failed. The parameters are sharded again.
        """
        memory = self.memory
        if self.state is not UNSHARDING:
            if memory.users is not None:
                memory.users.add_current()
            return
        gathers, streams = memory.in_flight, self.runtime.streams
        users = None if streams is None or not gathers else Users(streams, gathers, memory.users)
        try:
            while gathers:  # an interrupt leaves the unfinished ones in the list, and the next `wait` continues
                gathers[0].wait()
                del gathers[0]
        except Exception as e:
            memory.abandon(isinstance(e, OutOfStepError))
            self.runtime.before_free(memory.users)
            memory.free()
            self.state, self.stamp = PARAM_TRANSITIONS[self.state, "fail"], None
            self.runtime.fail(ALL_GATHER, self.fqn, e)
        stamp = self.stamp
        assert stamp is not None
        for flat in self.flats:
            flat.unsharded.open(stamp.version == self._read_version)
        self._read_version = stamp.version
        self.state = PARAM_TRANSITIONS[self.state, "wait"]
        memory.users = users

    def reshard(self, forward_graph: object = None, lends: bool = False, changes_are_seen: bool = False) -> None:
        """Free the unsharded parameters, after an all-gather in flight has ended.

        Args:
            forward_graph: an object that lives as long as the graph of the forward that ends, or None if there is no graph.
                While it lives, shards may be kept for the gather of its backward.
            lends: leave the memory and its values to outputs that alias it, until the next call without this.
            changes_are_seen: ``write_back_if_changed`` has looked for changes. Later ones are dropped.
        """
        if self.state is UNSHARDING:
            try:
                self.wait()
            except OutOfStepError:
                raise
            except CollectiveError as e:  # the gathered values are not needed
                trace.logger.warning("%s (it was prefetched and not needed)", e)
        if self.state is SHARDED or (self.state is LENT and lends):
            return
        memory, verb = self.memory, "lend" if lends else "reshard"
        conversions: list[Conversion] = []
        if self.stamp is not None and self.stamp.by == BY_USER:
            conversions = self.user_changes.conversions()
            for flat in self.flats:
                flat.unsharded.was_changed()  # a next gather has other values: changes so far are not looked for again
        if memory.flats:
            if trace.sinks:
                trace.event(verb, self.fqn)
            if not lends and self.runtime.streams is not None:
                self.runtime.before_free(memory.users)
            if forward_graph is not None and self.source is not None and self.state is UNSHARDED:
                streams = self.runtime.streams
                with self.runtime.on(None if streams is None else streams.gather):
                    self.source.keep(memory.flats, forward_graph)
            if not lends:
                memory.free(changes_are_seen)
        self.state = PARAM_TRANSITIONS[self.state, verb]
        self.stamp = None
        if conversions:
            self.adopt(conversions)

    def drop_kept(self) -> None:
        """Have the next all-gather read the shards of all ranks."""
        if self.source is not None:
            self.source.drop()

    def adopt(self, conversions: Sequence[Conversion]) -> None:
        """Convert the user's parameters, and their gradients, as the user converted unsharded ones. The unit is sharded."""
        self.reshard()
        with torch.no_grad():
            for param, dtype, device in conversions:
                param.data = param.data.to(device, dtype)
                if param.grad is not None:
                    param.grad.data = param.grad.data.to(device, dtype)
        self.check_parameters()

    def is_current(self, pass_id: int | None = None) -> bool:
        """Return whether the unsharded parameters have the values of the shards.

        ``pass_id``: they must also have been gathered for this pass, or by the user.
        """
        stamp = self.stamp
        if stamp is None or stamp.version != self.version():
            return False
        if stamp.by == BY_USER and self.user_changes.conversions():
            return False
        return pass_id is None or stamp.by in (BY_USER, pass_id)

    def has_values_of(self, version: int) -> bool:
        """Return whether a backward, which has gathered the unit, may use it for a forward that saw ``version``.

        Parameters that have stayed unsharded have its values in any case. But the shards must have them, too: autograd raises
        for its own tensors if they were changed.
        """
        stamp = self.stamp
        assert stamp is not None
        return version == (stamp.version if stamp.for_backward else self.version())

    def set_used_by(self, by: int) -> None:
        """Set ``UnshardedStamp.by``. A new user clears ``for_backward``."""
        if self.stamp is not None and self.stamp.by != by:
            self.stamp = self.stamp._replace(by=by, for_backward=False)

    def check_parameters(self) -> None:
        """Adopt what the user did to the parameters since the last call, or raise. [Note: What users change]"""
        user = self.user_changes
        if user.seen_at == changes.count and not self.registrations.unguarded:
            return
        user.adopt_registered()
        if moved := user.find_moved():
            self.reshard()
            if self.gradients.state in (FILLING, REDUCING):  # of a backward that failed
                self.gradients.discard()
            with torch.inference_mode(False), torch.no_grad():
                for flat, indices in moved.items():
                    adopt_data(flat, indices)
        if self._kinds != [b.kind for b in self.flats]:
            self._index()
        user.follow_requires_grad()
        user.mark_seen()

    def version(self) -> int:
        """Return a number that increases with every change of the parameters' values, by the same amount on all ranks."""
        with plainly():  # torch looks for __torch_function__ at every read of a Parameter of another class
            return sum(map(_version, self._counted))

    def use_flat_parameter(self, flat: FlatParam, info: ShardInfo) -> nn.Parameter:
        """Return a single parameter over ``flat``'s shard. It gets the gradient, and its changes count in ``version``."""
        param = self.gradients.flats[self.flats.index(flat)].use_shard_param(info)
        self._index()
        return param

    def note_written_back(self) -> None:
        """Record that the shards were changed to the unsharded values. All ranks must call it."""
        increment_version(self._params)
        if self.stamp is not None:
            self._read_version = version = self.version()
            self.stamp = self.stamp._replace(version=version)

    def sync_unfrozen(self) -> None:
        """Adopt what the user unfroze, and the dtypes that the user chose for gradients, before a backward.

        Parameters that the user froze are left out: a recomputation under activation checkpointing must save the same tensors
        as its forward. Their gradients are dropped.
        """
        if self.user_changes.seen_at != changes.count:
            self.user_changes.follow_requires_grad(unfrozen_only=True)

    def write_back_if_changed(self, keep: bool = True) -> None:
        """Write changes that a forward made to its own parameters (``self.weight.clamp_()`` under no_grad) to the shards.

        Local to this rank: another may have changed none. So this raises no version, and no gather follows from it.
        ``keep``: if False, drop the changes instead.
        """
        for flat in self.flats:
            if flat.unsharded.was_changed() and keep:
                flat.write_back()
                if self.source is not None:
                    self.source.follow(flat)


def _describe_flats(to_handle: weakref.ref[FlatParamHandle], index: int) -> list[ComparedFlat]:
    """Describe the flat parameters on one of ``all_ranks``, for errors about ranks that differ."""
    if (handle := to_handle()) is None:
        return []
    label = handle.all_ranks[index].label
    return [flat.describe() for flat in handle.flats if flat.ranks.label is label]


FILL = (
    "Give them memory by module.to_empty(device=...), and values by init_weights(), load_state_dict() or "
    "flatshard.load_checkpoint(), before the first forward. Or have fully_shard initialise them: param_init_fn=..., or "
    "device_id=... for the modules' reset_parameters()"
)
"""The cure for parameters without values."""


def check_has_memory(handles: Iterable[FlatParamHandle], verb: str) -> None:
    """Raise for parameters on the meta device."""
    left: list[str] = []
    for handle in handles:
        handle.check_parameters()
        left += [info.fqn for flat in handle.on_meta for info in flat.layout.params]
    if left:
        raise RuntimeError(f"{verb}: {name_list(left)} are on the meta device. {FILL}")
