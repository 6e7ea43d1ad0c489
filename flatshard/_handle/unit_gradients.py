"""The gradients of one unit, those of all its flat parameters together: from autograd, through a reduction, to ``.grad``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from flatshard import _trace
from flatshard._comm.streams import Streams
from flatshard._errors import CollectiveError, OutOfStepError
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.lifetime import WITHHELD, GradState, Lifetime
from flatshard._handle.tensors.direct import watch
from flatshard._handle.unit_ranks import UnitRanks


class Accumulators(NamedTuple):
    """The AccumulateGrad nodes of a unit's trainable parameters. Autograd itself has only weak references to them."""

    nodes: list[Node]
    streams: frozenset[Any]  # that they accumulate on; empty on CPU
    are_all: bool  # all parameters of the unit are trainable


WithGradients = Sequence[Sequence[nn.Parameter] | None]
"""Of each flat parameter, the parameters that have got gradients."""

P = ParamSpec("P")
R = TypeVar("R")


def _at_home(method: Callable[Concatenate[UnitGradients, P], R]) -> Callable[Concatenate[UnitGradients, P], R]:
    """The method runs on the stream that works on the unit's gradients: see ``UnitGradients.home``."""

    @functools.wraps(method)
    def run(self: UnitGradients, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.home is None:
            return method(self, *args, **kwargs)
        with self._ranks.runtime.on(self.home):
            return method(self, *args, **kwargs)

    return run


_IN_FLIGHT = GradState.REDUCING, GradState.DEFERRED


class UnitGradients:
    """The gradients of the flat parameters ``flats``. lifetime.py has the states that they go through."""

    def __init__(self, flats: list[FlatParam], ranks: UnitRanks, lifetime: Lifetime) -> None:
        self._flats = flats
        self._ranks = ranks
        self._lifetime = lifetime
        self.reduces = True  # backwards reduce the gradients. False: they hold them
        self._outside: list[bool] = []  # `reduces` outside of each `no_sync` under way, the outermost first
        self.accumulates = False  # some rank may hold gradients of earlier backwards, to add to the next reduction
        self.defers = False  # what a backward has reduced becomes `.grad` when the user says so
        # Called after reduced gradients were set in or added to `.grad`.
        self.on_reduced: Callable[[WithGradients], None]
        self.accumulators: Accumulators
        # The stream that works on the gradients, from the first of them to the end of the reduction: all that is allocated
        # for them belongs to it. None: there are no gradients; and on CPU.
        self.home: Any = None

    def follow(self, ranks: UnitRanks) -> None:
        """The unit is on other ranks from now on."""
        self._ranks = ranks

    # -- what the user has said ----------------------------------------------------------------------------------------

    def set_sync(self, reduces: bool) -> None:
        """Set whether backwards reduce the gradients from now on."""
        self.reduces = reduces
        self.accumulates |= not reduces

    def set_deferral(self, defers: bool) -> None:
        """Set whether what backwards reduce from now on becomes ``.grad`` when the user says so."""
        self.defers = defers

    def begin_holding(self) -> None:
        """Have backwards hold the gradients until ``end_holding``."""
        self._outside.append(self.reduces)
        self.set_sync(False)

    def end_holding(self) -> None:
        """As it was before the last ``begin_holding``."""
        self.set_sync(self._outside.pop())

    def follow_copy(self, other: UnitGradients) -> None:
        """Adopt what the user has said about ``other``, of which this is a copy. The copy is in no ``no_sync``."""
        self.reduces = (*other._outside, other.reduces)[0]
        self.accumulates, self.defers = other.accumulates, other.defers

    # -- arriving ------------------------------------------------------------------------------------------------------

    def receive(self, group: int, index: int) -> bool:
        """Take a parameter's gradient: see ``FlatGradients.receive``.

        Returns whether it and all others of the running graph task stay where autograd puts them until all have come.
        """
        if self._lifetime.grads is not GradState.FILLING:
            if self._lifetime.grads in _IN_FLIGHT:  # the unit's second reduction in one backward
                self.finish()
            self._lifetime.move_grads("receive")
        if (streams := self._ranks.runtime.streams) is None:
            self._flats[group].gradients.receive(index)
        else:
            here = streams.current
            self._find_home(streams)
            streams.let_wait(self.home, here)
            with streams.on(self.home):
                self._flats[group].gradients.receive(index)
            streams.let_wait(here, self.home)  # autograd's gradient, which may be freed now, belongs to it
        return all([flat.gradients.stays_away for flat in self._flats])

    def follow_stream(self) -> None:
        """Make autograd accumulate gradients on the stream of the forward that starts now.

        An AccumulateGrad node accumulates on the stream that it was made on, and that stream joins the others at the end of
        backward. While another stream is captured into a CUDA graph, this would be an error. [Note: CUDA graphs]
        """
        if self.accumulators.streams != {self._ranks.runtime.current_stream}:
            self.accumulators.nodes.clear()  # drop the old nodes, otherwise autograd would return them again
            self.find_accumulators()

    def find_accumulators(self) -> None:
        """Called when unsharded parameters were made, frozen or unfrozen."""
        leaves = [c for b in self._flats for c in b.unsharded.params if c.requires_grad]
        with torch.inference_mode(False):
            nodes = [get_gradient_edge(leaf).node for leaf in leaves]
            # First none: a node that lives on would check gradients by the shape that it was made for.
            self._watched: list[Any] = []
            self._watched = [watch(p) for b in self._flats for p in b.params if p.requires_grad]
        now, streams = self._ranks.runtime.current_stream, frozenset[Any]()
        if now is not None:
            notes: list[Any] = [node.metadata for node in nodes]
            # A live graph may keep nodes of another stream alive.
            streams = frozenset([note.setdefault("flatshard stream", now) for note in notes])
        self.accumulators = Accumulators(nodes, streams, len(nodes) == sum([len(b.params) for b in self._flats]))

    # -- streams: [Note: Memory follows the streams] -----------------------------------------------------------------

    def _find_home(self, streams: Streams) -> None:
        current = streams.current
        if self.home is None or (streams.is_captured(current) and not streams.is_captured(self.home)):
            self.home = current

    def _leave_home(self) -> None:
        """Called when there are no gradients any more."""
        if self._lifetime.grads is GradState.NONE:
            self.home = None

    def come_home(self) -> None:
        """Make the stream that works on the gradients wait for the current one, outside of a backward."""
        if self.home is not None and (streams := self._ranks.runtime.streams) is not None:
            streams.let_wait(self.home, streams.current)

    def _wait_for_others(self) -> None:
        """Before gradients are read that autograd may have accumulated on other streams."""
        if (streams := self._ranks.runtime.streams) is not None:
            for other in self.accumulators.streams - {self.home}:
                streams.let_wait(self.home, other)

    def _let_others_wait(self) -> None:
        """After these gradients, memory of the other streams, have been freed."""
        if (streams := self._ranks.runtime.streams) is not None:
            for other in self.accumulators.streams - {self.home}:
                streams.let_wait(other, self.home)

    def reduce(self) -> None:
        """Start averaging the gradients over the ranks."""
        if (streams := self._ranks.runtime.streams) is None:
            self._reduce()
            return
        self._find_home(streams)
        with streams.on(self.home):
            self._reduce()

    def _reduce(self) -> None:
        self._lifetime.move_grads("reduce")
        if _trace.sinks:
            _trace.event(self._ranks.reduce_verb, self._ranks.label.unit)
        try:
            if self.home is not None:
                self._wait_for_others()
            for flat in self._flats:
                if True in flat.requires_grad:
                    flat.gradients.complete(self.accumulates)
                else:  # frozen since the last backward: held gradients are dropped
                    flat.gradients.drop_partial()
            self.accumulates = not self.reduces
            if self.home is not None:
                self._let_others_wait()
            if self._ranks.runtime.streams is None and not _trace.is_profiling():
                self._start()
            else:
                with _trace.labelled("reduce_scatter", self._ranks.label.unit, self._ranks.runtime.reducing()):
                    self._start()
        except BaseException:
            self._settle()
            raise

    def _start(self) -> None:
        for flat in self._flats:
            if (reduction := flat.gradients.reduction) is not None:
                reduction.start()

    @_at_home
    def advance(self) -> None:
        """Start the second part of the reduction, over the replicas, while later units compute."""
        for flat in self._flats:
            if (reduction := flat.gradients.reduction) is not None and flat.ranks.replicas is not None:
                reduction.advance()

    @_at_home
    def hold(self) -> None:
        """End a backward without a reduction: keep its gradients, to which the next backward adds.

        Also called if this rank has no gradients: other ranks may hold some, and the next reduction includes all ranks.
        """
        if not any([flat.gradients.are_wanted for flat in self._flats]):
            self.discard()
        elif self._lifetime.grads in (GradState.NONE, GradState.PARTIAL):
            self._lifetime.move_grads("receive")
        if self._lifetime.grads is GradState.FILLING:
            if self.home is not None:
                self._wait_for_others()
            for flat in self._flats:
                flat.gradients.hold()
            if self.home is not None:
                self._let_others_wait()
            self._lifetime.move_grads("hold")

    @property
    def is_unreduced(self) -> bool:
        """Whether gradients of earlier backwards have yet to be reduced, or averaged over the replicas."""
        return self._lifetime.grads in (GradState.HELD, GradState.PARTIAL)

    @property
    def withholds(self) -> bool:
        """Whether gradients of earlier backwards are not in ``.grad`` yet. Those of a single rank are, also when held."""
        return self._lifetime.grads in WITHHELD and any([flat.gradients.comes_late for flat in self._flats])

    @property
    def is_deferred(self) -> bool:
        """Whether a reduction has been started whose result becomes ``.grad`` when the user says so."""
        return self._lifetime.grads is GradState.DEFERRED

    def defer(self) -> None:
        """Leave the reduction in flight to a ``finish`` when the user says so."""
        self._lifetime.move_grads("defer")

    def check_not_deferred(self, what: str) -> None:
        """Raise if ``what`` would change what a reduction in flight, or its result, is for."""
        if self.is_deferred:
            raise RuntimeError(
                f"unit {self._ranks.label.unit or '<root>'!r}: {what} after a backward, before its gradients have become "
                ".grad: first call flatshard.reduce_gradients(module), or wait() on what it returned"
            )

    @property
    def wants_reduction(self) -> bool:
        """Whether gradients of earlier backwards are to be reduced now."""
        state, averaging = self._lifetime.grads, self._ranks.averaging
        return state is GradState.HELD or (state is GradState.PARTIAL and averaging.reduces_replicas)

    @_at_home
    def finish(self, assign: bool = True) -> None:
        """Wait for the reduction, if one is in flight, and set the parameters' ``.grad``.

        Raises:
            CollectiveError: the reduction failed. All gradients of the unit from this backward have been dropped.
        """
        if self._lifetime.grads not in _IN_FLIGHT:
            return
        self._wait()
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._finish(assign)
        else:  # the usual case in backward
            self._finish(assign)

    @_at_home
    def free_reduced(self) -> None:
        """Free the reduction's input as soon as the device has read it. ``finish`` must follow.

        Raises:
            CollectiveError: see ``finish``.
        """
        self._wait()
        for flat in self._flats:
            flat.gradients.free_reduced()

    def _wait(self) -> None:
        try:
            for flat in self._flats:
                if (reduction := flat.gradients.reduction) is not None:
                    reduction.wait()
        except Exception as e:
            self._settle(isinstance(e, OutOfStepError))
            raise

    @property
    def gives_late(self) -> bool:
        """Whether ``.grad`` is set at the end of backward: setting it makes the host wait (offload), and no hook reads it."""
        if not any([b.kind.is_offloaded for b in self._flats]):
            return False
        return not any([b.is_watched for b in self._flats])

    def _finish(self, assign: bool) -> None:
        given, is_any, in_part = list[Sequence[nn.Parameter] | None](), False, False
        for flat in self._flats:
            params = flat.gradients.finish(assign)
            given.append(params)
            is_any |= params is not None
            in_part |= flat.gradients.partial is not None
        self._lifetime.move_grads("finish in part" if in_part else "finish")
        if self.home is not None:
            self._leave_home()
        if is_any:
            self.on_reduced(given)

    @_at_home
    def discard(self) -> None:
        """After an exception in backward: drop all gradients that are not in ``.grad`` yet, reduced or not."""
        try:
            self.finish(assign=False)
        except CollectiveError as e:
            _trace.logger.warning("%s (in a backward that had already failed)", e)
        for flat in self._flats:
            flat.gradients.discard()
        if self._lifetime.grads is not GradState.NONE:
            self._lifetime.move_grads("discard")
        if self.home is not None:
            self._leave_home()

    def _settle(self, out_of_step: bool = False) -> None:
        ended = all([r.settle() for flat in self._flats if (r := flat.gradients.reduction) is not None])
        for flat in self._flats:
            if not ended or out_of_step:  # some may never end, so their memory must not be freed
                flat.gradients.leave_memory()
            flat.gradients.discard()
        self._lifetime.move_grads("finish")
        if self.home is not None:
            self._leave_home()
