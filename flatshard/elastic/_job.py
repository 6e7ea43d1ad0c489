"""``Job``: the training loop of ranks of which some may die, and others join."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._composable.features.summon import recover
from flatshard._errors import CollectiveError, name_list
from flatshard.checkpoint import MeetingError
from flatshard.elastic import _units, _values
from flatshard.elastic._copies import Copies, Generation, Number
from flatshard.elastic._exchange import Channel
from flatshard.elastic._reshard import LostError, Move
from flatshard.elastic._world import Member, World, is_of_communication

_VERB = "elastic.Job"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Job:
    """A training loop that goes on when ranks die, and that others may join.

    All that a step does is inside ``with job.attempt():``. If a rank dies, the step ends with an error on the others, which
    ``attempt`` takes. They meet, shard the model over those who are left, go back to the newest state of which every part is
    left, and ``steps`` yields its step again. So at most one completed step is lost. A process that joins is taken in between
    two steps. An error that does not come of communication is raised, here and then on all ranks: it is no death.

    Between two steps are kept: parameters, the optimizers' state, buffers, and ``extra``. Gradients are not: a step begins
    with ``zero_grad()``, or ends with it. Of ``extra`` and of buffers each rank goes on with its own; a rank that joins gets
    those of the first rank.

    Example::

        def loop(world, scheduler, train):
            job = flatshard.elastic.Job(world, model, optimizer, extra=[scheduler])
            for step in job.steps(range(1000)):
                with job.attempt():
                    train(step, job.rank, job.world_size)  # this rank's part of the batch of this step

    Args:
        world: the ranks.
        model: sharded by ``fully_shard`` over all ranks, on CPU; with a strategy that is not hybrid.
        optimizers: all that step it.
        extra: what else goes back with the model, anything with ``state_dict`` and ``load_state_dict``: schedulers, samplers,
            counters.
        copies: how many ranks keep copies of each rank's parts: so many may die at once. Each rank keeps ``1 + 2 * copies``
            times its parts in host memory beside the model, and a recovery up to ``2 + copies`` times more.
        every: take copies after so many steps. A death loses as many.
        say: is called with a line of text when ranks were lost or have joined, on the first rank.

    Raises:
        TypeError, ValueError, NotImplementedError: the model or an optimizer cannot move: see :func:`reshard_over`.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer],
        extra: Iterable[Any] = (),
        copies: int = 1,
        every: int = 1,
        say: Callable[[str], object] = _say,
    ) -> None:
        for name, count in (("copies", copies), ("every", every)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{_VERB}: {name} must be an int of at least 1, got {count!r}")
        self._world, self._every, self._say, self._extra = world, every, say, list(extra)
        self._job = _values.Trained(model, optimizers, _VERB)
        units = self._job.units
        _units.check_movable(units, _VERB)
        if hybrid := [unit.fqn for unit in units if unit.config.strategy.is_hybrid]:
            raise ValueError(
                f"{_VERB}: units {name_list(hybrid, 3)} are sharded over a mesh, whose shape does not follow from the number "
                "of ranks: use a strategy that is not hybrid, or reshard_over"
            )
        if any(flat.kind.device.type not in ("cpu", "meta") for unit in units for flat in unit.handle.flats):
            raise NotImplementedError(f"{_VERB} has not been tried with parameters on an accelerator: use reshard_over")
        self._copies = Copies(self._job, self._extra, copies)
        for optimizer in self._job.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._commit())
        self._at = 0  # steps made
        self._attempts = 0  # at this step, in this epoch
        self._failed: str | None = None  # what ended the last attempt
        self._last_failure: tuple[int, str] | None = None  # at which step, when nobody had died

    @property
    def rank(self) -> int:
        """Of this process, among those that are left."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """How many ranks are left."""
        return self._world.size

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the copies that this rank keeps in host memory now."""
        return self._copies.nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes of copies that this rank has sent."""
        return self._copies.sent

    # -- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, steps: Sequence[Any]) -> Iterator[Any]:
        """Yield each of ``steps``, such as ``range(1000)``, and some of them again. A rank that joins begins in the middle.

        Raises:
            LostError: no rank has some part of the model.
            OutError: the other ranks have gone on without this one.
            RuntimeError: a rank ended with an error of its own; or the same step failed twice, and nobody had died; or the
                body of the loop was not inside ``with job.attempt():``.
        """
        if self._world.joins:
            decided = self._world.join()
            if decided is None:
                return
            self._regroup(decided)
        else:
            self._begin()
        while True:
            while self._failed is not None or self._copies.is_called:
                if self._failed is None:
                    self._try(self._pause)
                self._regroup()
            if self._at < len(steps):
                self._attempts = 0
                yield steps[self._at]
                if not self._attempts:
                    raise RuntimeError(f"{_VERB}: the body of the loop must be inside `with job.attempt():`")
            elif self._try(self._copies.commit) and self._world.finish():
                return
            elif self._failed is None:
                self._failed = "another rank ended before its last step was made"

    def attempt(self) -> Self:
        """The context of all that a step does. A death of another rank ends it, and the step comes again."""
        return self

    def __enter__(self) -> Self:
        self._attempts += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None:
            self._at += 1
            if self._at % self._every == 0:
                self._try(lambda: self._copies.take(self._at))
            return False
        if isinstance(error, GeneratorExit) or not _may_be_death(error):
            self._world.fail(f"{type(error).__name__}: {error}")
            return False
        self._fail(error)
        return True

    def _try(self, do: Callable[[], object]) -> bool:
        """Whether it could be done. A death is noted; any other error is raised, and told to the others."""
        try:
            do()
        except Exception as e:
            if isinstance(e, LostError):  # all raise it
                raise
            if not _may_be_death(e):
                self._world.fail(f"{type(e).__name__}: {e}")
                raise
            self._fail(e)
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        self._failed = f"{type(error).__name__}: {error}"
        self._world.abort()  # so that the others notice, and nothing writes to the copies
        self._copies.stop()

    def _commit(self) -> None:
        self._copies.commit(self._world.rank == 0 and self._world.called())

    def _pause(self) -> None:
        """Somebody waits to join: what is live becomes a generation."""
        if self._at % self._every:
            self._copies.take(self._at)
        self._copies.commit()

    # -- another epoch -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """The first ranks: they have their values, and copy them before the first step."""
        for unit in self._job.units:
            unit.context.check(unit)
        if not self._try(self._first_copies):
            self._regroup()

    def _first_copies(self) -> None:
        world = self._world
        assert world.copies_group is not None
        self._copies.follow(world.epoch, world.copies_group, [member.host for member in world.members])
        self._copies.take(self._at)
        self._copies.commit()

    def _regroup(self, decided: list[tuple[Member, Any]] | None = None) -> None:
        """Go on over those who are left and those who join. ``decided``: who they are; None: find out."""
        began, before, step = time.monotonic(), self._world.members, self._at
        while True:
            reason, self._failed = self._failed, None
            if decided is None:
                self._world.abort()
                self._copies.stop()
                recover(self._job.module)
                decided = self._world.meet((self._copies.numbers, self._at))
            members, notes = [member for member, _ in decided], [note for _, note in decided]
            if reason is not None and members == self._world.members:
                if self._last_failure == (self._at, reason):
                    raise RuntimeError(f"{_VERB}: step {self._at} failed twice, and no rank had died: {reason}")
                self._last_failure = self._at, reason
            decided = None
            epoch = self._world.epoch + 1
            if self._try(lambda: self._move(epoch, members, notes)):  # noqa: B023  (called at once)
                break
        if self._world.rank == 0:
            self._tell(before, step, time.monotonic() - began)

    def _tell(self, before: list[Member], step: int, seconds: float) -> None:
        now = self._world.members
        lost, new = [m for m in before if m not in now], [m for m in now if m not in before]
        told = [f"lost {', '.join(map(str, lost))}"] * bool(lost) + [f"took in {', '.join(map(str, new))}"] * bool(new)
        done = f"; {step - self._at} completed step(s) lost" if step > self._at else ""
        self._say(
            f"elastic: {' and '.join(told) or 'met again'} after {seconds:.1f} s; going on at step {self._at} over "
            f"{len(now)} rank(s){done}"
        )

    def _move(self, epoch: int, members: list[Member], notes: list[Any]) -> None:
        """Form the groups of an epoch, and move the newest state that is whole to its ranks."""
        world = self._world
        world.form(epoch, members)
        kept: list[Number] = [note[0][0] for note in notes if note is not None and note[0][0] is not None]
        newest = max(kept, default=None)
        generation: Generation | None = None
        if newest is not None and newest in self._copies.numbers:
            generation = self._copies.go_back(newest)
        job = self._job
        channel = Channel(world.group, torch.device("cpu"))
        home = _units.home_over(job.units, world.group, None)
        holders = [] if generation is None or generation.own is None else [generation.own, *generation.others]
        manifest, small = (None, None) if generation is None else (generation.manifest, generation.small)
        Move(job, channel, home, manifest, holders, small, joins=generation is None).run()
        first = next(rank for rank, note in enumerate(notes) if note is not None and newest in note[0])
        given = channel.objects(None if generation is None or channel.rank != first else generation.extra)
        for each, state in zip(self._extra, given[first] if generation is None else generation.extra, strict=True):
            each.load_state_dict(copy.deepcopy(state))
        assert newest is not None  # otherwise nobody had any part
        self._at = newest[0]
        self._first_copies()


def _may_be_death(error: BaseException) -> bool:
    """Whether ``error`` ends an attempt. False: it is the user's own."""
    return isinstance(error, CollectiveError | MeetingError) or (
        isinstance(error, Exception) and is_of_communication(error)
    )
