"""One unit's gradients, of all its flat parameters together: from autograd, through a reduction, to ``.grad``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from flatshard._base import trace
from flatshard._base.errors import CollectiveError, InternalError, OutOfStepError
from flatshard._comm.runtime import Runtime
from flatshard._comm.streams import Streams
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.gradients import FlatGradients
from flatshard._handle.lifetime import (
    DEFERRED,
    FILLING,
    GRAD_TRANSITIONS,
    HELD,
    NONE,
    PARTIAL,
    REDUCING,
    WITHHELD,
)
from flatshard._handle.tensors.direct import watch_all
from flatshard._handle.unit_ranks import UnitRanks


class Accumulators:
    """The AccumulateGrad nodes of a unit's trainable parameters. Autograd itself has only weak references to them."""

    __slots__ = ("_flats", "_runtime", "_watched", "are_all", "nodes", "streams")

    def __init__(self, flats: Sequence[FlatGradients], runtime: Runtime) -> None:
        """``flats``: the gradients of the unit's flat parameters, also later ones. Call ``find`` when they are complete."""
        self._flats, self._runtime = flats, runtime
        self.nodes: list[Node] = []
        self.streams = frozenset[Any]()  # that they accumulate on; empty on CPU
        self.are_all = False  # all parameters of the unit are trainable
        self._watched: list[Any] = []  # the nodes of sharded parameters: direct.py

    def find(self) -> None:
        """Find the nodes again: unsharded parameters were made, frozen or unfrozen."""
        flats = [grads.flat for grads in self._flats]
        params = [p for b in flats for p in b.params]
        leaves = [c for b in flats for c in b.unsharded.params if c.requires_grad]
        with torch.inference_mode(False):
            self.nodes = [get_gradient_edge(leaf).node for leaf in leaves]
            # Drop the old ones first: a node that lives on would check gradients by the shape that it was made for.
            self._watched = []
            self._watched = watch_all([p for p in params if p.requires_grad])
        if (now := self._runtime.current_stream) is not None:
            notes: list[Any] = [node.metadata for node in self.nodes]
            # A live graph may keep nodes of another stream alive.
            self.streams = frozenset([note.setdefault("flatshard stream", now) for note in notes])
        self.are_all = len(self.nodes) == len(params)

    def follow_stream(self) -> None:
        """Make autograd accumulate gradients on the stream of the forward that starts now.

        An AccumulateGrad node accumulates on the stream that it was made on, and that stream joins the others at the end of
        backward. While another stream is captured into a CUDA graph, this would be an error. streams.py, [Note: CUDA graphs]
        """
        if self.streams != {self._runtime.current_stream}:
            self.nodes.clear()  # drop the old nodes, otherwise autograd would return them again
            self.find()


WithGradients = Sequence[Sequence[nn.Parameter] | None]
"""The parameters of each flat parameter that have got gradients."""

P = ParamSpec("P")
R = TypeVar("R")


def _on_its_stream(method: Callable[Concatenate[UnitGradients, P], R]) -> Callable[Concatenate[UnitGradients, P], R]:
    """Run the method on the stream that works on the unit's gradients: see ``GradientStream``."""

    @functools.wraps(method)
    def run(self: UnitGradients, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.stream.current is None:
            return method(self, *args, **kwargs)
        with self._ranks.runtime.on(self.stream.current):
            return method(self, *args, **kwargs)

    return run


class GradientStream:
    """The stream that works on a unit's gradients, from the first of them to the end of the reduction.

    All memory that is allocated for them belongs to it. streams.py, [Note: Memory follows the streams]
    """

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: Any = None  # None without gradients, and on CPU

    def choose(self, streams: Streams, now: Any) -> None:
        """Choose the current stream if there are no gradients yet, or if it is the first that is being captured."""
        chosen = self.current
        if chosen is None or (chosen != now and streams.is_captured(now) and not streams.is_captured(chosen)):
            self.current = now

    def release(self) -> None:
        """Forget the stream: there are no gradients any more."""
        self.current = None

    def wait_for_current(self, runtime: Runtime) -> None:
        """Make the stream wait for the current one, outside of a backward."""
        if self.current is not None and (streams := runtime.streams) is not None:
            streams.let_wait(self.current, streams.current)

    def wait_for(self, others: frozenset[Any], runtime: Runtime) -> None:
        """Make the stream wait for ``others``, on which autograd may have accumulated gradients that it will read."""
        if self.current is not None and (streams := runtime.streams) is not None:
            for other in others - {self.current}:
                streams.let_wait(self.current, other)

    def let_wait(self, others: frozenset[Any], runtime: Runtime) -> None:
        """Make ``others`` wait for the stream, which has freed gradients in their memory."""
        if self.current is not None and (streams := runtime.streams) is not None:
            for other in others - {self.current}:
                streams.let_wait(other, self.current)


_IN_FLIGHT = REDUCING, DEFERRED


class UnitGradients:
    """The gradients of a unit's flat parameters. lifetime.py has the states that they go through."""

    def __init__(self, ranks: UnitRanks) -> None:
        self.flats: list[FlatGradients] = []
        self._ranks = ranks
        self.state = NONE  # Local to this rank until the unit is reduced or held: others may have no gradients, or some
        self.reduces = True  # whether backwards reduce the gradients, instead of holding them
        self._outside: list[bool] = []  # `reduces` outside of each `no_sync` under way, the outermost first
        self.accumulates = False  # some rank may hold gradients of earlier backwards, to add to the next reduction
        self.defers = False  # reduced gradients become `.grad` when the user says so
        # Called after reduced gradients were set in or added to `.grad`.
        self.on_reduced: Callable[[WithGradients], None]
        self.accumulators = Accumulators(self.flats, ranks.runtime)
        self.stream = GradientStream()

    def add(self, flat: FlatParam) -> None:
        """Add another flat parameter of the unit."""
        self.flats.append(FlatGradients(flat))

    def move(self, ranks: UnitRanks) -> None:
        """Adopt other ranks, over which the flat parameters have been sharded. There are no gradients."""
        self._ranks, self.accumulators = ranks, Accumulators(self.flats, ranks.runtime)
        for grads in self.flats:
            grads.change_ranks(grads.choose_runtime)

    def _transition(self, verb: str) -> None:
        state = GRAD_TRANSITIONS.get((self.state, verb))
        if state is None:
            raise InternalError(
                f"cannot {verb} the gradients of unit {self._ranks.label.unit!r} while {self.state.name}"
            )
        self.state = state

    # -- settings of the user ------------------------------------------------------------------------------------------

    def set_sync(self, reduces: bool) -> None:
        """Set whether backwards reduce the gradients from now on."""
        self.reduces = reduces
        self.accumulates |= not reduces

    def set_deferral(self, defers: bool) -> None:
        """Set whether gradients that backwards reduce from now on become ``.grad`` when the user says so."""
        self.defers = defers

    def begin_holding(self) -> None:
        """Have backwards hold the gradients until ``end_holding``."""
        self._outside.append(self.reduces)
        self.set_sync(False)

    def end_holding(self) -> None:
        """Restore the setting from before the last ``begin_holding``."""
        self.set_sync(self._outside.pop())

    def copy_settings(self, other: UnitGradients) -> None:
        """Adopt the settings of ``other``, of which this is a copy. The copy is in no ``no_sync``."""
        self.reduces = (*other._outside, other.reduces)[0]
        self.accumulates, self.defers = other.accumulates, other.defers
        for grads, original in zip(self.flats, other.flats, strict=True):
            grads.reduce_by(original.choose_runtime)

    # -- arriving ------------------------------------------------------------------------------------------------------

    def receive(self, group: int, index: int) -> bool:
        """Receive a parameter's gradient: see ``FlatGradients.receive``.

        Returns whether it and all others of the running graph task stay where autograd puts them until all have arrived.
        """
        if self.state is not FILLING:
            if self.state in _IN_FLIGHT:  # the unit's second reduction in one backward
                self.finish()
            self._transition("receive")
        if (streams := self._ranks.runtime.streams) is None:
            no_more = self.flats[group].receive(index)
        else:
            here = streams.current
            self.stream.choose(streams, here)
            streams.let_wait(self.stream.current, here)
            with streams.on(self.stream.current, here):
                no_more = self.flats[group].receive(index)
            streams.let_wait(here, self.stream.current)  # autograd's gradient, which may be freed now, belongs to it
        return no_more and (len(self.flats) == 1 or all([grads.needs_no_receive for grads in self.flats]))

    # -- reducing -----------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Start averaging the gradients over the ranks."""
        if (streams := self._ranks.runtime.streams) is None:
            self._reduce()
            return
        here = streams.current
        self.stream.choose(streams, here)
        with streams.on(self.stream.current, here):
            self._reduce()

    def _reduce(self) -> None:
        self._transition("reduce")
        if trace.sinks:
            trace.event(self._ranks.reduce_verb, self._ranks.label.unit)
        try:
            if self.stream.current is not None:
                self.stream.wait_for(self.accumulators.streams, self._ranks.runtime)
            for grads in self.flats:
                grads.prepare_reduction(self.accumulates)
            self.accumulates = not self.reduces
            if self.stream.current is not None:
                self.stream.let_wait(self.accumulators.streams, self._ranks.runtime)
            if self._ranks.runtime.streams is None and not trace.is_profiling():
                self._start_reductions()
            else:
                with trace.labelled(self._ranks.reduce_verb, self._ranks.label.unit, self._ranks.runtime.reducing()):
                    self._start_reductions()
        except BaseException:
            self._abandon()
            raise

    def _start_reductions(self) -> None:
        for grads in self.flats:
            if (reduction := grads.reduction) is not None:
                reduction.start()

    @_on_its_stream
    def advance(self) -> None:
        """Start the second part of the reduction, over the replicas, while later units compute."""
        for grads in self.flats:
            if (reduction := grads.reduction) is not None and grads.flat.ranks.replicas is not None:
                reduction.advance()

    @_on_its_stream
    def hold(self) -> None:
        """End a backward without a reduction: keep its gradients, to which the next backward adds.

        Also called if this rank has no gradients: other ranks may hold some, and the next reduction includes all ranks.
        """
        if not any([grads.are_wanted for grads in self.flats]):
            for grads in self.flats:
                grads.warn_of_dropped()
            self.discard()
        elif self.state in (NONE, PARTIAL):
            self._transition("receive")
        if self.state is FILLING:
            self.stream.wait_for(self.accumulators.streams, self._ranks.runtime)
            for grads in self.flats:
                grads.hold()
            self.stream.let_wait(self.accumulators.streams, self._ranks.runtime)
            self._transition("hold")

    @property
    def is_unreduced(self) -> bool:
        """Whether gradients of earlier backwards have yet to be reduced, or averaged over the replicas."""
        return self.state in (HELD, PARTIAL)

    @property
    def withholds(self) -> bool:
        """Whether gradients of earlier backwards are not in ``.grad`` yet. Those of a single rank are, also when held."""
        return self.state in WITHHELD and any([grads.need_reduction for grads in self.flats])

    @property
    def is_deferred(self) -> bool:
        """Whether a reduction has been started, and its result becomes ``.grad`` when the user says so."""
        return self.state is DEFERRED

    def defer(self) -> None:
        """Leave the reduction in flight to a ``finish`` when the user says so."""
        self._transition("defer")

    def check_not_deferred(self, what: str) -> None:
        """Raise if a reduction is in flight, or its result waits: ``what`` would change the parameters that it is for."""
        if self.is_deferred:
            raise RuntimeError(
                f"unit {self._ranks.label.unit or '<root>'!r}: {what} after a backward, before its gradients have become "
                ".grad: first call flatshard.reduce_gradients(module), or wait() on what it returned"
            )

    @property
    def wants_reduction(self) -> bool:
        """Whether gradients of earlier backwards are to be reduced now."""
        state, averaging = self.state, self._ranks.averaging
        return state is HELD or (state is PARTIAL and averaging.reduces_replicas)

    @_on_its_stream
    def finish(self, assign: bool = True) -> None:
        """Wait for the reduction, if one is in flight, and set the parameters' ``.grad``.

        Raises:
            CollectiveError: the reduction failed. All gradients of the unit from this backward have been dropped.
        """
        if self.state not in _IN_FLIGHT:
            return
        self._wait_for_reductions()
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._set_grads(assign)
        else:  # the usual case in backward
            self._set_grads(assign)

    @_on_its_stream
    def free_inputs(self) -> None:
        """Free the reduction's input as soon as the device has read it. ``finish`` must follow.

        Raises:
            CollectiveError: see ``finish``.
        """
        self._wait_for_reductions()
        for grads in self.flats:
            grads.free_input()

    def _wait_for_reductions(self) -> None:
        try:
            for grads in self.flats:
                if (reduction := grads.reduction) is not None:
                    reduction.wait()
        except Exception as e:
            self._abandon(isinstance(e, OutOfStepError))
            raise

    @property
    def sets_grads_late(self) -> bool:
        """Whether ``.grad`` is set at the end of backward: setting it makes the host wait (offload), and no hook reads it."""
        flats = [grads.flat for grads in self.flats]
        return any([b.kind.is_offloaded for b in flats]) and not any([b.is_watched for b in flats])

    def _set_grads(self, assign: bool) -> None:
        given: list[Sequence[nn.Parameter] | None] = []  # `list[...]()` takes 4,000 instructions
        is_any = in_part = False
        for grads in self.flats:
            params = grads.set_grads(assign)
            given.append(params)
            is_any |= params is not None
            in_part |= grads.partial is not None
        self._transition("finish in part" if in_part else "finish")
        if not in_part and self.stream.current is not None:
            self.stream.release()
        if is_any:
            self.on_reduced(given)

    @_on_its_stream
    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet, reduced or not, after an exception in backward."""
        came = self.state in (FILLING, REDUCING)
        try:
            self.finish(assign=False)
        except CollectiveError as e:
            trace.logger.warning("%s (in a backward that had already failed)", e)
        for grads in self.flats:
            grads.discard(of_autograd=came)
        if self.state is not NONE:
            self._transition("discard")
        self.stream.release()

    def _abandon(self, out_of_step: bool = False) -> None:
        """Drop a reduction that has failed. ``out_of_step``: with ``OutOfStepError``."""
        ended = all([r.abandon() for grads in self.flats if (r := grads.reduction) is not None])
        for grads in self.flats:
            if grads.input is not None and (not ended or out_of_step):
                grads.input.abandon_memory()  # some may never end, so their memory must not be freed
            grads.discard(of_autograd=True)
        self._transition("finish")
        self.stream.release()
