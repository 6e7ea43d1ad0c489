"""``FlatParamHandle``: one unit's flat parameters, and the operations on them (unshard, reshard, reduce, ...).

The handle combines flat parameters, slots and lifetime. It usually has a single flat parameter. Parameters of another dtype,
and frozen ones beside trainable ones, get one of their own: so they take no gradient memory, and no bytes of a reduction.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge, increment_version

from flatshard import _trace
from flatshard._comm.collectives import Pending, settle
from flatshard._comm.progress import Label, digest
from flatshard._errors import CollectiveError, InternalError, OutOfStepError
from flatshard._handle.adapters.tensor_subclass import plain_tensors
from flatshard._handle.arrivals import Arrivals
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.lifetime import BY_USER, Gathered, GradState, Lifetime, ParamState
from flatshard._handle.placement import Placement
from flatshard._handle.planned import PlannedFlat
from flatshard._handle.pool import BufferPool
from flatshard._handle.slots import SHARDED, Slots
from flatshard._handle.source import Source
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._handle.unfilled import check_has_memory, cut_all
from flatshard._runtime import Runtime

_version = operator.attrgetter("_version")  # read for every parameter in every step, so the loop runs in C


class FlatParamHandle:
    """The flat parameters of one unit."""

    def __init__(
        self,
        fqn: str,
        flats: Sequence[PlannedFlat],
        runtime: Runtime,
        placement: Placement,
        pool: BufferPool | None = None,
    ) -> None:
        """Flatten and shard the parameters of ``flats`` in place.

        Args:
            fqn: the unit's FQN, for errors and traces.
            flats: the unit's parameters, laid out over ``placement.shards``.
            runtime: issues the collectives over the ranks to shard over, or under ``NO_SHARD`` over the replicas.
            placement: which ranks hold what.
            pool: allocates the memory that collectives read and write. pool.py, [Note: Static buffers]
        """
        self.runtime = runtime
        self.arrivals = Arrivals()
        self.slots = Slots()
        self.placement = placement
        params = [p for flat in flats for p in flat.params]
        starts = [(f.layout.shard_numel, [i.start for i in f.layout.params]) for f in flats]
        self.label = self._make_label(fqn, digest([*((p.fqn, tuple(p.param.shape)) for p in params), starts]))
        self.lifetime = Lifetime(self.label)
        self.flats: list[FlatParam] = []
        for planned in flats:
            originals = [p.param for p in planned.params]
            flat = FlatParam(planned.layout, originals, planned.options, runtime, placement, pool, self.label)
            self.flats.append(flat)
            for owned, compute in zip(planned.params, flat.computes, strict=True):
                for module, name in owned.slots:
                    self.slots.add(module, name, owned.param, compute)
        self.all_trainable = all(p.param.requires_grad for p in params)
        self.any_trainable = any(p.param.requires_grad for p in params)
        self.accumulates = False  # some rank may hold gradients of earlier backwards, to add to the next reduction
        self._checked_at = self._synced_at = -1  # `changes.count` at the last `check_parameters`, `sync_requires_grad`
        self._gathers: list[Pending] = []
        self.gathered: Gathered | None = None  # None while the parameters are sharded
        self.on_reduced: Callable[[], None] = lambda: (
            None
        )  # called after reduced gradients were set in or added to `.grad`
        self.source: Source | None = None  # set by a feature
        self.gradient_nodes: list[Node] = []
        self._nodes_stream: Any = None  # the stream that all of them accumulate on; None on CPU
        self._index()

    def _index(self) -> None:
        """Collect from ``flats`` what every step reads, once."""
        self._gradients = [f.gradients for f in self.flats]
        self._gathered = [b for b in self.flats if not b.is_alias and b.layout.padded_numel]
        self._pooled = [b for b in self._gathered if b.pool is not None]
        self._params = [p for b in self.flats for p in b.params]
        self.is_alias = not self._gathered  # this rank always has whole parameters: unshard and reshard do nothing
        self._began_on_meta = [b for b in self.flats if b.is_on_meta]
        self._find_gradient_nodes()  # here, to save the time in the first step

    def __repr__(self) -> str:
        return (
            f"FlatParamHandle({self.fqn or '<root>'!r}, {len(self._params)} parameters in {len(self.flats)} flat parameters, "
            f"{self.lifetime.params.name})"
        )

    @property
    def fqn(self) -> str:
        """The unit's FQN."""
        return self.label.unit

    def _make_label(self, fqn: str, identity: str) -> Label:
        replicas = self.placement.replicas
        progress = self.runtime.progress or (replicas and replicas.progress)
        return progress.make_label(fqn, identity) if progress else Label(fqn, identity=identity)

    def rename(self, fqn: str, names: Mapping[nn.Module, str]) -> None:
        """Rename the unit, and its parameters by the ``names`` of the modules in which they are registered."""
        self.label.unit = fqn
        for flat in self.flats:
            flat.rename(self.slots.fqns(names))

    def add_slot(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Add another registration (module and name) of a parameter that this handle owns."""
        for flat in self.flats:
            for own, compute in zip(flat.params, flat.computes, strict=True):
                if own is param:
                    self.slots.add(module, name, own, compute)
                    self._checked_at = -1
                    return
        raise InternalError(f"unit {self.fqn!r} does not own the parameter registered as {name!r}")

    @property
    def is_sharded(self) -> bool:
        return self.lifetime.params is ParamState.SHARDED

    @property
    def on_meta(self) -> list[FlatParam]:
        """The flat parameters that have no memory yet. [Note: Filled later]"""
        return [b for b in self._began_on_meta if b.is_on_meta]

    @property
    def has_static_buffers(self) -> bool:
        """Whether several units share the memory that they gather into. pool.py, [Note: Static buffers]"""
        return bool(self._pooled)

    @property
    def is_blocked(self) -> bool:
        """Whether another unit is using the memory that this one gathers into. pool.py, [Note: Static buffers]"""
        return bool(self._pooled) and any([b.unsharded.is_taken for b in self._pooled])

    def unblock(self) -> None:
        """Gather into other memory from now on. No autograd graph of the unit may be alive."""
        for flat in self._pooled:
            if flat.unsharded.is_taken:
                flat.unsharded.unbind()

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return sum(b.unsharded.flat.nbytes for b in self._gathered)

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, by: int, again: bool = False, exactly: bool = False) -> None:
        """Start the all-gather, if the parameters are sharded. Call ``wait`` before they are read.

        ``by``: see ``Gathered``. ``again``: for a backward, which needs the values of its forward. ``exactly``: gather the
        shards bit for bit, even if the user's collectives approximate.
        """
        if self.lifetime.params is not ParamState.SHARDED:
            return
        if self._gathers:  # left by an interrupted unshard
            self._settle_gathers()
        if self._began_on_meta:
            check_has_memory([self], "unshard")
        runtime, version = self.runtime.exact if exactly else self.runtime, self.version()
        exact = runtime is runtime.exact  # what a source has kept was gathered over this runtime, too
        if self._gathered:
            if self._pooled and self.is_blocked:
                raise RuntimeError(
                    f"unit {self.fqn or '<root>'!r} needs the static buffer that another unit is using, and that its own "
                    "graph refers to: units that ran forward one after the other now run backward at the same time. Reshard "
                    "the other unit first, or call fully_shard with static_buffers=False and collectives without allocate()"
                )
            instead = None if self.source is None else self.source.gathers(self._gathered, again)
            if _trace.sinks and instead is None:
                _trace.event("cast" if self.placement.shards is None else "all-gather", self.fqn)
            if runtime.streams is None and not _trace.is_profiling():
                self._start_gathers(runtime, version, again, instead)
            else:
                with _trace.labelled("all_gather", self.fqn, runtime.gathering()):
                    self._start_gathers(runtime, version, again, instead)
        self.gathered = Gathered(version, by, exact)
        self.lifetime.move_params("unshard")

    def _start_gathers(self, runtime: Runtime, version: int, again: bool, instead: Iterable[Pending] | None) -> None:
        try:
            if instead is None:
                for flat in self._gathered:
                    self._gathers.append(flat.gather(runtime, version, again))
            else:
                for started in instead:
                    self._gathers.append(started)  # at once: a later one may raise
        except BaseException as e:
            self._settle_gathers()
            for flat in self._gathered:
                flat.free()
            if isinstance(e, Exception):
                runtime.fail("all-gather", self.fqn, e)
            raise

    def wait(self) -> None:
        """Wait for the all-gather, so that the caller can read the unsharded parameters.

        Raises:
            CollectiveError: the all-gather failed. The parameters are sharded again.
        """
        if self.lifetime.params is not ParamState.UNSHARDING:
            return
        gathers = self._gathers
        try:
            while gathers:  # an interrupt leaves the unfinished ones in the list, and the next `wait` continues
                gathers[0].wait()
                del gathers[0]
        except Exception as e:
            self._settle_gathers(isinstance(e, OutOfStepError))
            self._free()
            self.runtime.fail("all-gather", self.fqn, e)
        self.lifetime.move_params("wait")
        if self.gathered is not None and not self.gathered.exact:
            for flat in self._gathered:
                flat.keep_gathered()

    def reshard(self, until: object = None) -> None:
        """Free the unsharded parameters, after an all-gather in flight has ended.

        ``until``: if a backward may gather them ``again``, an object that lives as long as that backward is possible.
        """
        state = self.lifetime.params
        if state is ParamState.SHARDED:
            return
        if state is ParamState.UNSHARDING:
            try:
                self.wait()
            except OutOfStepError:
                raise
            except CollectiveError as e:  # the gathered values are not needed
                _trace.logger.warning("%s (it was prefetched and not needed)", e)
                return
        if until is not None and self.source is not None:
            self.source.keep(self._gathered, until)
        self._free()

    def _settle_gathers(self, out_of_step: bool = False) -> None:
        """Wait for gathers whose result is not needed. ``out_of_step``: one has raised ``OutOfStepError``."""
        if not settle(self._gathers) or out_of_step:  # some may never end, so their memory must not be freed
            for flat in self._gathered:
                flat.unsharded.leave_memory()

    def _free(self) -> None:
        if self._gathers:
            self._settle_gathers()
        if self._gathered:
            if _trace.sinks:
                _trace.event("reshard", self.fqn)
            if self.runtime.streams is not None:
                self.runtime.before_free()
            for flat in self._gathered:
                flat.free()
        self.lifetime.move_params("reshard")
        self.gathered = None

    def is_current(self, pass_id: int | None = None) -> bool:
        """Whether the unsharded parameters have the values of the shards. With ``pass_id``: and are of that pass or the
        user's, because C++ code may have changed the shards since an earlier pass without changing their version.
        """
        gathered = self.gathered
        if gathered is None or gathered.version != self.version():
            return False
        return pass_id is None or gathered.by in (BY_USER, pass_id)

    def take_over(self, by: int) -> None:
        """The unsharded parameters are for ``by`` from now on: see ``Gathered``."""
        if self.gathered is not None:
            self.gathered = self.gathered._replace(by=by)

    def gather_again(self) -> None:
        """Gather the values that the shards have now, if the parameters are unsharded."""
        if (before := self.gathered) is not None:
            self.reshard()
            self.unshard(before.by, exactly=before.exact)
            self.wait()

    def forget_cast(self) -> None:
        """Free the cast shards: no backward will need the values of a forward. See ``FlatOptions.keep_cast``."""
        for flat in self._gathered:
            flat.forget_cast()

    def holds_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory that ``reshard`` would free."""
        for flat in self._gathered:
            for part in (tensor,) if type(tensor) is torch.Tensor else plain_tensors(tensor):
                if flat.unsharded.holds(part):
                    return True
        return False

    def check_parameters(self) -> None:
        """Adopt parameters that the user replaced, froze or unfroze since the last call, or raise. These are changes by
        ``p.data = ...``, ``module.to()``, ``module.weight = nn.Parameter(...)``, ``load_state_dict(..., assign=True)``.
        """
        if self._checked_at == changes.count:
            return
        cut_all()
        for module, name, sharded, new in self.slots.replaced():
            if not isinstance(new, nn.Parameter):
                raise RuntimeError(
                    f"parameter {name!r} of a {type(module).__name__} in unit {self.fqn or '<root>'!r} is no longer "
                    "registered: it was deleted, parametrized or swapped (functional_call) after fully_shard, which must "
                    "come last"
                )
            if (other := shard_info(new)) is not None:
                raise RuntimeError(
                    f"parameter {name!r} of a {type(module).__name__} in unit {self.fqn or '<root>'!r} was replaced by "
                    f"{other.fqn!r}, which is sharded: the two would not be tied. Tie parameters before fully_shard. To copy "
                    "values, register the original parameter again, and copy into it"
                )
            for flat in self.flats:
                flat.check_new(sharded, new)
                if flat.is_on_meta and not new.is_meta and any(own is sharded for own in flat.params):
                    flat.allocate(new.device)
            sharded.data = new.data  # the optimizer refers to `sharded`, so this object is kept
            sharded.requires_grad_(new.requires_grad)
            self.slots.restore(module, name, sharded)
        for flat in self.flats:
            if moved := flat.moved():
                self.reshard()
                if self.lifetime.grads in (GradState.FILLING, GradState.REDUCING):  # of a backward that failed
                    self.discard_gradients()
                with torch.inference_mode(False), torch.no_grad():
                    flat.readopt(moved)
                self._index()
        if self._began_on_meta and self._began_on_meta != self.on_meta:
            self._index()
        self.sync_requires_grad()
        self._checked_at = changes.count if self.slots.are_guarded else -1

    def version(self) -> int:
        """Increases with every change of the parameters' values, by the same amount on all ranks."""
        with plainly():  # torch looks for __torch_function__ at every read of a Parameter of another class
            return sum(map(_version, self._params))

    def increment_version(self) -> None:
        """Record that the shards were written directly, not through the parameters. All ranks call it alike."""
        increment_version(self._params)

    def note_written_back(self) -> None:
        """Record that the shards were changed to what is unsharded. All ranks call it alike."""
        self.increment_version()
        if self.gathered is not None:
            self.gathered = self.gathered._replace(version=self.version())

    def sync_requires_grad(self) -> None:
        """Adopt parameters that the user froze or unfroze."""
        if self._synced_at == changes.count:
            return
        self._synced_at = changes.count
        for flat in self.flats:
            flat.sync_requires_grad()
        self._note_trainable()

    def sync_thawed(self) -> None:
        """Before a backward: follow what the user unfroze.

        Not what the user froze, whose gradient is dropped: a recomputation under activation checkpointing must save what its
        forward saved.
        """
        if self._synced_at != changes.count:
            for flat in self.flats:
                flat.sync_requires_grad(thawed_only=True)
            self._note_trainable()

    def _note_trainable(self) -> None:
        self.any_trainable = any([True in b.requires_grad for b in self.flats])
        self.all_trainable = all([False not in b.requires_grad for b in self.flats])
        if self._nodes_epoch != sum([b.epoch for b in self.flats]):
            self._find_gradient_nodes()

    def write_back_if_changed(self, keep: bool = True) -> None:
        """Write back in-place changes that a forward made to its own parameters (``self.weight.clamp_()`` under no_grad).

        ``keep=False`` ignores the changes instead.
        """
        for flat in self.flats:
            if flat.changed_in_forward() and keep:
                flat.write_back()

    @property
    def is_mixed_precision(self) -> bool:
        """Whether the unsharded parameters differ from the user's in dtype."""
        return any([b.compute_dtype is not b.dtype for b in self.flats])

    # -- gradients ---------------------------------------------------------------------------------------------------

    def receive(self, group: int, index: int, task: int) -> None:
        """Take a parameter's gradient, computed by the autograd graph task ``task``: see ``Incoming.receive``."""
        if self.lifetime.grads is not GradState.FILLING:
            if self.lifetime.grads is GradState.REDUCING:  # the unit's second reduction in one backward
                self.finish_reduce()
            self.lifetime.move_grads("receive")
        self._gradients[group].incoming.receive(index)
        self.arrivals.task = task if all([g.incoming.leaves_them for g in self._gradients]) else -1

    def follow_stream(self) -> None:
        """Make autograd accumulate gradients on the stream of the forward that starts now.

        An AccumulateGrad node accumulates on the stream that it was made on, and that stream joins the others at the end of
        backward. While another stream is captured into a CUDA graph, this would be an error. [Note: CUDA graphs]
        """
        streams = self.runtime.streams
        if streams is not None and streams.current != self._nodes_stream:
            self.gradient_nodes = []  # drop the old nodes, otherwise autograd would return them again
            self._find_gradient_nodes()

    def _find_gradient_nodes(self) -> None:
        # The AccumulateGrad nodes of the trainable parameters. Autograd itself holds only weak references to them.
        leaves = [c for b in self.flats for c in b.computes if c.requires_grad]
        with torch.inference_mode(False):
            self.gradient_nodes = [get_gradient_edge(leaf).node for leaf in leaves]
        if self.runtime.streams is not None:
            now = self.runtime.streams.current
            notes: list[Any] = [node.metadata for node in self.gradient_nodes]
            made_on = [note.setdefault("flatshard stream", now) for note in notes]
            # A live graph may keep nodes of another stream alive.
            self._nodes_stream = now if all([stream == now for stream in made_on]) else None
        self._nodes_epoch = sum([b.epoch for b in self.flats])

    def reduce(self) -> None:
        """Start averaging the gradients over the ranks."""
        self.lifetime.move_grads("reduce")
        if _trace.sinks:
            _trace.event("all-reduce" if self.placement.shards is None else "reduce-scatter", self.fqn)
        self.arrivals.task = -1
        try:
            for flat in self.flats:
                if True in flat.requires_grad:
                    flat.gradients.incoming.complete(self.runtime, self.accumulates)
                else:  # frozen since the last backward: held gradients are dropped
                    flat.gradients.reduction.discard()
                flat.forget_cast()
            if self.runtime.streams is None and not _trace.is_profiling():
                self._start_reductions()
            else:
                with _trace.labelled("reduce_scatter", self.fqn, self.runtime.reducing()):
                    self._start_reductions()
        except BaseException:
            self._settle_reductions()
            raise

    def _start_reductions(self) -> None:
        for flat in self.flats:
            if True in flat.requires_grad:
                flat.gradients.incoming.reduce(self.runtime)

    def advance_reduce(self) -> None:
        """Start the second part of the reduction, over the replicas, while later units compute. Without replicas: nothing."""
        if self.placement.replicas is not None:
            for grads in self._gradients:
                grads.reduction.advance(self.runtime)

    def hold_gradients(self) -> None:
        """End a backward without a reduction: keep its gradients, to which the next backward adds.

        Also called if this rank has no gradients: other ranks may hold some, and the next reduction includes all ranks.
        """
        if self.lifetime.grads is GradState.NONE:
            self.lifetime.move_grads("receive")
        if self.lifetime.grads is GradState.FILLING:
            self.arrivals.task = -1
            for grads in self._gradients:
                grads.incoming.hold()
            self.lifetime.move_grads("hold")

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of earlier backwards have yet to be reduced, or averaged over the replicas."""
        return self.lifetime.grads is GradState.HELD or any([g.reduction.is_partial for g in self._gradients])

    @property
    def wants_reduction(self) -> bool:
        """Whether gradients of earlier backwards are to be reduced now."""
        held = self.lifetime.grads is GradState.HELD
        return held or any([g.reduction.is_partial and g.reduction.reduces_replicas for g in self._gradients])

    @property
    def reduces_replicas(self) -> bool:
        """Whether reductions end in ``.grad``. If not: reduction.py, [Note: Accumulating within the shard group]"""
        return all([g.reduction.reduces_replicas for g in self._gradients])

    def finish_reduce(self, assign: bool = True) -> None:
        """Wait for the reduction, if one is in flight, and set the parameters' ``.grad``.

        Raises:
            CollectiveError: the reduction failed. All gradients of the unit from this backward have been dropped.
        """
        if self.lifetime.grads is not GradState.REDUCING:
            return
        self._wait_for_reductions()
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._finish_gradients(assign)
        else:  # the usual case in backward
            self._finish_gradients(assign)

    def free_reduced(self) -> None:
        """Free the reduction's input as soon as the device has read it. ``finish_reduce`` must follow.

        Raises:
            CollectiveError: see ``finish_reduce``.
        """
        self._wait_for_reductions()
        for grads in self._gradients:
            grads.incoming.free_reduced()

    def _wait_for_reductions(self) -> None:
        try:
            for grads in self._gradients:
                grads.reduction.wait(self.runtime)
        except Exception as e:
            self._settle_reductions(isinstance(e, OutOfStepError))
            raise

    @property
    def gives_late(self) -> bool:
        """Whether ``.grad`` is set at the end of backward: setting it makes the host wait (offload), and no hook reads it."""
        if not any([b.is_offloaded for b in self.flats]):
            return False
        return not any([b.is_watched for b in self.flats]) and not any([g.is_watched for g in self._gradients])

    def _finish_gradients(self, assign: bool) -> None:
        given = False
        for grads in self._gradients:
            if not grads.incoming.is_empty:
                given |= grads.finish(assign)
        self.lifetime.move_grads("finish")
        if given:
            self.on_reduced()

    def discard_gradients(self) -> None:
        """After an exception in backward: drop all gradients that are not in ``.grad`` yet, reduced or not."""
        try:
            self.finish_reduce(assign=False)
        except CollectiveError as e:
            _trace.logger.warning("%s (in a backward that had already failed)", e)
        self.arrivals.task = -1
        for grads in self._gradients:
            grads.discard()
        if self.lifetime.grads is not GradState.NONE:
            self.lifetime.move_grads("discard")

    def _settle_reductions(self, out_of_step: bool = False) -> None:
        ended = all([grads.reduction.settle() for grads in self._gradients])
        for grads in self._gradients:
            if not ended or out_of_step:  # some may never end, so their memory must not be freed
                grads.incoming.leave_memory()
            grads.discard()
        self.lifetime.move_grads("finish")

    @property
    def is_reduced(self) -> bool:
        """Whether this unit has reductions when a parameter requires grad."""
        return any([g.is_reduced for g in self._gradients])

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        """A handle for the copied modules, sharded in the same way, with its own memory and without gradients."""
        self.check_parameters()
        if self.slots.shows is not SHARDED:
            raise RuntimeError(
                f"cannot copy unit {self.fqn!r} while its parameters are unsharded: copy outside forward, backward and "
                "summon_full_params, after flatshard.reshard(module)"
            )
        owned: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name, sharded, _ in self.slots.entries:
            owned.setdefault(id(sharded), []).append((module, name))
        result = copy.copy(self)
        memo[id(self)] = result
        result.label = self._make_label(self.fqn, self.label.identity)
        result.lifetime, result.arrivals, result.slots = Lifetime(result.label), Arrivals(), Slots()
        result.source = copy.deepcopy(self.source, memo)
        result.flats, result._gathers, result.gathered = [], [], None
        for flat in self.flats:
            params = [copy.deepcopy(p, memo) for p in flat.params]
            new = flat.copy_with(params, result.label)
            result.flats.append(new)
            for old, param, compute in zip(flat.params, params, new.computes, strict=True):
                for module, name in owned[id(old)]:
                    result.slots.add_copied(module, name, param, compute, memo)
        result._index()
        return result
