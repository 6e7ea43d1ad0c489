"""``Job``: the training loop of ranks that may die and join."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from flatshard._base.errors import CollectiveError, name_list
from flatshard._base.old_names import old_arguments
from flatshard._composable.features.summon import recover
from flatshard._composable.find import units_of_parameters
from flatshard.checkpoint import RankError, load_checkpoint
from flatshard.checkpoint._location import locate
from flatshard.elastic import _exchange, _units, _values
from flatshard.elastic._checkpoints import Checkpoints
from flatshard.elastic._copies import Copies, Generation, Number
from flatshard.elastic._epochs import Member
from flatshard.elastic._exchange import Channel
from flatshard.elastic._reshard import Held, LostShardsError, Move, vacate
from flatshard.elastic._world import World, is_of_communication

T = TypeVar("T")

_VERB = "elastic.Job"


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Note(NamedTuple):
    """The state of a rank when ranks meet."""

    kept: tuple[Number | None, Number | None]  # the kept generation, and the pending one
    at: int  # completed steps
    reason: str | None  # the error on this rank, if any
    shards: int  # the number of shards of each unit when the job began

    @classmethod
    def read(cls, told: Any) -> Self | None:
        """Return the note of another rank, or None if it joins."""
        return None if told is None else cls(*told)


class Job:
    """A training loop that continues when ranks die, and that processes may join.

    A step runs inside ``with job.attempt():``. If a rank dies, the step ends with an error on the others, which ``attempt``
    suppresses. They meet, shard the model over the ranks that are left, return to the newest complete state, and ``steps``
    yields its step again. So at most one completed step is repeated. Processes join between two steps. An error that does not
    come from communication is no death: it is raised, and ends the job on all ranks. To end the loop early, call :meth:`stop`
    on all ranks in the same step.

    The state between two steps is: parameters, optimizer state, buffers, and ``extra``. Gradients are not. A step at
    whose end an optimizer has gradients and has not stepped raises: accumulate inside of a step, or pass the number of steps
    that do it together as ``copy_every``. Each rank keeps its own ``extra`` and buffers; a dead rank's are lost, and a rank
    that joins gets the first rank's. So derive data and random numbers from step, rank and world size, and ask for these anew
    in each attempt.

    A hybrid strategy continues over the smallest number of shards that divides the number of ranks and is not less than at
    first; all other ranks are replicas. Replicas count as copies, so with ``copies=1`` two of them send nothing.

    All process groups end when ranks change, your own included: make these anew in the step, or use the default one.

    Example::

        def loop(world, scheduler, train):
            job = flatshard.elastic.Job(world, model, optimizer, extra=[scheduler])
            for step in job.steps(range(1000)):
                with job.attempt():
                    train(step, job.rank, job.world_size)  # this rank's part of the batch of this step

    Args:
        world: the ranks.
        module: a model that ``fully_shard`` sharded over all ranks. For several models, such as one and its moving average: a
            ``torch.nn.ModuleList``.
        optimizers: all that step it.
        extra: other objects that return to an earlier state with the model: schedulers, samplers, counters. They have
            ``state_dict`` and ``load_state_dict``, with states of tensors and plain values: nothing in them is executed.
        copies: the number of ranks that keep copies of each rank's shards: so many ranks may die at once. After a death
            copies are made anew while the next step runs, and a death before their end counts as one at the same time. Each
            rank keeps ``1 + 2 * copies`` times its shards in host memory beside the model, with parameters on an accelerator
            8 MiB more, and a recovery up to ``2 + copies`` times more.
        copy_every: the number of steps between two generations of copies. A death loses as many steps.
        checkpoint_dir: a directory that all ranks see, or a URL. Every ``save_every`` steps the state is saved to
            ``step-<number>`` in it while training continues, and the newest two are kept. The job begins at the newest, and
            returns to it if some shard of the model is on no rank. Pass the same ``steps`` each time. A save during which a
            rank dies is given up after the timeout of ``world``, and no other begins before. A save that fails is skipped
            with a line to ``log``; but if the first one cannot begin, the job ends: its state cannot be saved.
        save_every: see ``checkpoint_dir``.
        log: called on the first rank with a line of text when ranks died or joined, or a save was skipped.

    Raises:
        TypeError, ValueError, NotImplementedError: the model or an optimizer cannot move: see :func:`redistribute`.
    """

    @old_arguments(
        model="module",
        every="copy_every",
        checkpoints="checkpoint_dir",
        say="log",
        positional=("extra", "copies", "every", "checkpoints", "save_every", "say"),
    )
    def __init__(
        self,
        world: World,
        module: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer],
        *,
        extra: Iterable[Any] = (),
        copies: int = 1,
        copy_every: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        log: Callable[[str], object] = _print,
    ) -> None:
        for name, count in (("copies", copies), ("copy_every", copy_every), ("save_every", save_every)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{_VERB}: {name} must be an int of at least 1, got {count!r}")
        self._world, self._every, self._log, self._extra = world, copy_every, log, list(extra)
        self._job = job = _values.Trained(module, optimizers, _VERB)
        _units.check_movable(job.units, _VERB)
        job.check_others()
        _check_extra(self._extra)
        self._copies = Copies(job, self._extra, copies)
        for number, optimizer in enumerate(job.optimizers):
            optimizer.register_step_pre_hook(lambda *_: self._copies.commit())
            optimizer.register_step_post_hook(lambda *_, number=number: self._copies.note_stepped(number))
        self._checkpoints = (
            None if checkpoint_dir is None else Checkpoints(locate(checkpoint_dir, _VERB), save_every, self._tell_first)
        )
        self._shards = _units.place_of(job.units)[1]
        self._at = 0  # completed steps
        self._attempts = 0  # at this step, in this epoch
        self._has_begun = self._stops = False
        self._failed: str | None = None  # the error that ended the last attempt
        self._last_failure: int | None = None  # the completed steps when the same ranks failed before

    @property
    def rank(self) -> int:
        """The rank of this process among those that are left."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that are left."""
        return self._world.world_size

    @property
    def copied_nbytes(self) -> int:
        """Bytes of the copies that this rank keeps in host memory now."""
        return self._copies.nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes of copies that this rank has sent."""
        return self._copies.sent

    # -- the loop ------------------------------------------------------------------------------------------------------

    def steps(self, steps: Sequence[T]) -> Iterator[T]:
        """Yield ``steps``, such as ``range(1000)``, and some of them again. A rank that joins begins in the middle.

        Raises:
            TypeError, ValueError: ``steps`` is no sequence, the model is not sharded over all ranks, or a rank that joins
                could not read the state of ``extra`` or of an optimizer.
            LostShardsError: some shard of the model is on no rank, and there is no checkpoint.
            ExcludedError: the other ranks continued without this one, or had made the last step when it came.
            RuntimeError: a rank ended with an error of its own; the same step failed twice without a death; the body of the
                loop was not inside ``with job.attempt():``; or the store is gone.
        """
        if not (hasattr(steps, "__len__") and hasattr(steps, "__getitem__")):
            raise TypeError(
                f"{_VERB}.steps returns to earlier steps: pass a sequence such as range(1000), got {steps!r}"
            )
        if self._has_begun or self._world.epochs.has_ended:
            raise RuntimeError(
                f"{_VERB}.steps is iterated once in a World, whose job ends with it: pass all steps at once"
            )
        if not self._world.joins and (
            odd := [u.fqn for u in self._job.units if u.handle.flats and u.handle.ranks.size != self._world.world_size]
        ):
            raise ValueError(
                f"{_VERB}: units {name_list(odd, 3)} are not sharded over all {self._world.world_size} ranks"
            )
        self._has_begun = True
        return self._steps(steps)

    def _steps(self, steps: Sequence[T]) -> Iterator[T]:
        if self._world.joins or not self._try(self._begin):
            self._regroup()
        while True:
            while self._failed is not None or (self._copies.is_called and self._at % self._every == 0):
                if self._failed is None:  # somebody waits to join
                    self._try(self._copies.commit)
                self._regroup()
            if self._at < len(steps) and not self._stops:
                self._attempts = 0
                try:
                    yield steps[self._at]
                except GeneratorExit:
                    self._leave()
                    raise
                if not self._attempts:
                    raise self._ended(f"{_VERB}: the body of the loop must be inside `with job.attempt():`")
            elif self._try(self._copies.commit) and self._world.epochs.finish():
                if self._checkpoints is not None:
                    self._checkpoints.wait()
                return
            elif self._failed is None:
                self._failed = "another rank ended before its last step was made"

    def stop(self) -> None:
        """End the loop after this step. All ranks call it in the same step."""
        self._stops = True

    def _leave(self) -> None:
        """End the job on this rank: the loop was left by ``break``, or by an error."""
        if not self._world.epochs.has_ended:
            self._copies.drain()
            self._world.epochs.leave(self._at)

    def _ended(self, text: str) -> RuntimeError:
        """End the job on all ranks. Return the error to raise."""
        self._world.fail(text)
        return RuntimeError(text)

    def attempt(self) -> Self:
        """Return the context of a step. The death of another rank ends it, and the step comes again."""
        return self

    def __enter__(self) -> Self:
        self._attempts += 1
        self._copies.begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is None:
            self._at += 1
            if self._checkpoints is None or self._try(self._save):  # first: one that fails comes again with its step
                self._try(self._copy)
            return False
        if isinstance(error, GeneratorExit) or not _may_be_death(error):
            self._world.fail(f"{type(error).__name__}: {error}")
            return False
        self._fail(error)
        return True

    def _try(self, do: Callable[[], object]) -> bool:
        """Call ``do``. Return False if a rank has died; raise other errors, and end the job on all ranks."""
        try:
            do()
        except Exception as e:
            if isinstance(e, LostShardsError):  # all raise it
                self._world.epochs.record_failure(str(e))
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
        try:
            self._copies.stop()
        except Exception as e:
            self._world.fail(f"{type(e).__name__}: {e}")
            raise

    def _copy(self) -> None:
        self._world.hang_up()
        if self._at % self._every == 0:
            self._copies.check_gradients()
            self._copies.take(self._at, self._world.rank == 0 and self._world.epochs.is_called())
        else:  # no optimizer may have stepped
            self._copies.commit()

    def _save(self) -> None:
        assert self._checkpoints is not None
        if self._at % self._checkpoints.every == 0:
            self._copies.check_gradients()
        self._checkpoints.save(self._at, self._state(), self._world.timeout)

    def _state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        state: dict[str, Any] = {"model": self._job.module, "steps": self._at}
        state.update((f"optimizer{n}", optimizer) for n, optimizer in enumerate(self._job.optimizers))
        state.update((f"extra{n}", each) for n, each in enumerate(self._extra))
        return state

    # -- another epoch -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the job on its first ranks: load the newest checkpoint, and make the first copies."""
        for unit in self._job.units:
            unit.context.check(unit)
        if self._checkpoints is not None:
            self._load(Channel(self._world.process_group, torch.device("cpu")))
        self._first_copies()
        self._copies.commit()  # there is nothing to go back to

    def _load(self, channel: Channel) -> bool:
        """Load the newest checkpoint. Return whether there is one."""
        assert self._checkpoints is not None
        newest: str | None = channel.objects(self._checkpoints.newest() if channel.rank == 0 else None)[0]
        if newest is not None:
            loaded = load_checkpoint(newest, self._state(), timeout=self._world.timeout)
            self._at = loaded["steps"]
            self._tell_first(f"loaded {newest}")
        return newest is not None

    def _first_copies(self) -> None:
        world = self._world
        assert world.copies_group is not None
        hosts = [member.host for member in world.epochs.members]
        self._copies.use_group(world.epochs.number, world.copies_group, hosts, world.epochs.check_alive)
        self._copies.take(self._at)

    def _regroup(self) -> None:
        """Continue over the ranks that are left and the processes that join."""
        began, before, step = time.monotonic(), self._world.epochs.members, self._at
        while True:
            reason, self._failed = self._failed, None
            self._stops = False
            if not self._world.joins:
                self._world.abort()
                self._copies.stop()
                recover(self._job.module)
            decided = self._world.agree(_Note(self._copies.numbers, self._at, reason, self._shards))
            members, notes = [member for member, _ in decided], [_Note.read(told) for _, told in decided]
            self._check_progress(members, notes)
            epoch = self._world.epochs.number + 1
            if self._try(lambda: self._move(epoch, members, notes)):  # noqa: B023  (called at once)
                break
        self._tell(before, step, time.monotonic() - began)

    def _check_progress(self, members: list[Member], notes: list[_Note | None]) -> None:
        """Raise if the same ranks have failed at the same step before: on all of them, as all have the same notes."""
        came = [note for note in notes if note is not None]
        failed = [f"rank {rank}: {note.reason}" for rank, note in enumerate(came) if note.reason is not None]
        if not failed or members != self._world.epochs.members:
            self._last_failure = None
            return
        at = max(note.at for note in came)
        if self._last_failure == at:
            raise self._ended(f"{_VERB}: step {at} failed twice, and no rank had died: {'; '.join(failed)}")
        self._last_failure = at

    def _tell_first(self, text: str) -> None:
        if self._world.rank == 0:
            self._log(f"elastic: {text}")

    def _tell(self, before: list[Member], step: int, seconds: float) -> None:
        now = self._world.epochs.members
        lost, new = [m for m in before if m not in now], [m for m in now if m not in before]
        told = [f"lost {', '.join(map(str, lost))}"] * bool(lost) + [f"added {', '.join(map(str, new))}"] * bool(new)
        done = f"; {step - self._at} completed step(s) lost" if step > self._at else ""
        self._tell_first(
            f"{' and '.join(told) or 'met again'} after {seconds:.1f} s; continuing at step {self._at} over "
            f"{len(now)} rank(s){done}"
        )

    def _move(self, epoch: int, members: list[Member], notes: list[_Note | None]) -> None:
        """Form the groups of an epoch, and move the newest complete state to its ranks."""
        world, job = self._world, self._job
        world.form(epoch, members)
        self._shards = next((note.shards for note in notes if note is not None), self._shards)
        destination = self._destination()
        kept: list[Number] = [note.kept[0] for note in notes if note is not None and note.kept[0] is not None]
        newest = max(kept, default=None)
        generation: Generation | None = None
        if newest is not None and newest in self._copies.numbers:
            generation = self._copies.go_back(newest)
        channel = Channel(world.process_group, torch.device("cpu"))
        held = None
        if generation is not None:
            shards = [] if generation.own is None else [generation.own, *generation.others]
            held = Held(generation.manifest, generation.common, shards)
        try:
            move = Move(job, channel, destination, held)
        except LostShardsError as lost:
            if self._checkpoints is None:
                raise
            self._go_back_to_checkpoint(channel, destination, str(lost))
        else:
            assert newest is not None  # otherwise nobody had any part
            move.run()
            first = next(rank for rank, note in enumerate(notes) if note is not None and newest in note.kept)
            tells = generation if channel.rank == first else None
            given = channel.objects(None if tells is None else _exchange.saved(tells.extra, "extra"))
            states = _exchange.loaded(given[first]) if generation is None else generation.extra
            for each, state in zip(self._extra, states, strict=True):
                each.load_state_dict(copy.deepcopy(state))
            self._at = newest[0]
        for param in job.others.values():
            param.grad = None
        self._first_copies()  # while the next step runs: the older copies are kept until then

    def _destination(self) -> _units.Destination:
        """Return the destination of the units: all ranks."""
        units, size = self._job.units, self._world.world_size
        if not units[0].config.strategy.is_hybrid:
            return _units.destination_over(units, self._world.process_group, None)
        shards = next(n for n in range(min(self._shards, size), size + 1) if size % n == 0)
        device = units[0].runtime.device.type
        ranks = torch.arange(size, device="cpu").view(-1, shards)
        mesh = DeviceMesh(device, ranks, mesh_dim_names=("replicas", "shards"))
        return _units.destination_over(units, None, mesh)

    def _go_back_to_checkpoint(self, channel: Channel, destination: _units.Destination, lost: str) -> None:
        assert self._checkpoints is not None
        self._copies.forget()
        vacate(self._job, channel, destination)
        if not self._load(channel):
            raise LostShardsError(f"{lost}. There is no checkpoint in {self._checkpoints.directory} to return to")
        self._tell_first(lost)


def _check_extra(extra: Iterable[Any]) -> None:
    for each in extra:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(
                f"{_VERB}: extra takes what has state_dict and load_state_dict, got a {type(each).__name__}"
            )
        if isinstance(each, nn.Module) and units_of_parameters(each):
            raise ValueError(
                f"{_VERB}: extra has a {type(each).__name__} whose parameters are sharded: they must move with the model's. "
                "Pass both as one model, torch.nn.ModuleList([model, other])"
            )


def _may_be_death(error: BaseException) -> bool:
    """Return whether ``error`` ends an attempt, or is the user's own."""
    return isinstance(error, CollectiveError | RankError) or (
        isinstance(error, Exception) and is_of_communication(error)
    )
