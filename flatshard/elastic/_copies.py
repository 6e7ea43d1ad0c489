"""Copies of each rank's shards on other ranks, in host memory: they survive the rank.

[Note: One of two generations is complete]
A *generation* is the state between two steps. When a step ends, a thread of each rank sends the rank's live shards to the
next rank, which receives them beside the copy that it has. Then ranks meet in a small all-gather. A rank that passes it knows
that *all* ranks have complete copies of the new generation. Only then does the thread overwrite the rank's copy of its own
shards, and the older copy may go. Live values must not change before: a hook lets the optimizer's step wait for the thread.
So if one surviving rank has passed, the new generation is complete, as ranks that have not passed still have their live
shards unchanged. If none has passed, all still have the older generation.

A rank keeps a copy of its own shards, and two of each rank that it keeps copies for: with ``copies=1`` three times its
shards. Fewer would not do: when the last copy of the new generation comes, each shard of the older one must be on two ranks.
Replicated values, in units or over the replicas of a hybrid strategy, have copies already, and are not sent.

[Note: Copies from an accelerator]
A host copy to send from would be one more copy. So the thread brings shards to the host piece by piece, on a stream of its
own, and sends each piece from a small buffer while the next one comes. The stream waits for all work issued before, and no
other stream waits for it. When all ranks have their copies, the shards are read once more, into the memory of the older copy:
the price of three copies in place of four. The host waits for the thread before an optimizer steps, or when ranks have died:
neither side of a copy may be freed or written to while the device uses it.

[Note: Waits that gloo has forgotten]
When groups end, or a rank dies, gloo forgets the waits for messages that are on their way, until its timeout. So a caller
that waits for the thread checks whether the thread's partners live. When the groups have ended, no message is on its way. A
thread that still waits is abandoned: if it ever returns, it only ends. Its objects live until then, at most for the timeout.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flatshard._base.optimizers import params_of
from flatshard._base.trace import logger
from flatshard._comm.backends import GlooCollectives
from flatshard._comm.collectives import EXCHANGE, Done, Pending
from flatshard._comm.progress import NOBODY, Works
from flatshard._comm.streams import Streams
from flatshard._handle.tensors.aggregate import plainly
from flatshard.elastic import _exchange, _units
from flatshard.elastic._exchange import Channel, as_bytes
from flatshard.elastic._values import Common, Image, Key, Live, Manifest, Trained, aligned

Number = tuple[int, int]
"""A generation: the number of steps before it, and the epoch of its copies. A later one is greater."""

_PIECE = 1 << 22  # bytes of a message at most
_TAG = NOBODY.tag + EXCHANGE
_LOOK = 0.5  # seconds in which a wait ends that gloo has not forgotten


@dataclass
class Generation:
    """The state between two steps, as one rank keeps it."""

    number: Number
    manifest: Manifest
    common: Common
    extra: list[Any]
    others: list[Image]  # copies of other ranks' shards
    own: Image | None = None  # the copy of this rank's shards. None as long as the live values are the generation


@dataclass
class _Under:
    """A generation that is being copied."""

    generation: Generation
    before: Generation | None  # the one before, if its images have the same layout
    number: int  # of this rank's shard
    parts: dict[Key, torch.Tensor]  # the live shards of this rank
    version: int
    is_called: bool  # a process waits for the next epoch, as far as this rank knows
    has_all: bool = False  # this rank has all the copies that it keeps
    is_complete: bool = False  # all ranks have theirs
    thread: _Thread | None = None  # copies


class _Host:
    """Shards in host memory."""

    buffers: Sequence[torch.Tensor] = ()

    def read(self, pieces: list[torch.Tensor], use: Callable[[list[torch.Tensor]], Pending]) -> Pending:
        """Pass ``pieces`` to ``use``, in order. They may change when the returned work has ended."""
        return use(pieces)

    def copying(self) -> AbstractContextManager[object]:
        """Context that copies shards to the host. They are there at its end."""
        return contextlib.nullcontext()


class _Device(_Host):
    """Shards on an accelerator. [Note: Copies from an accelerator]"""

    def __init__(self, device: torch.device) -> None:
        streams = Streams.of(device)
        assert streams is not None
        self._streams, self._module = streams, torch.get_device_module(device)
        self._side = self._module.Stream(device=device)
        self.buffers = [torch.empty(_PIECE, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]

    def await_issued(self) -> None:
        """Let the next reads wait for the work that has been issued."""
        self._side.wait_stream(self._streams.current)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        with self._module.stream(self._side):
            try:
                yield
            finally:
                self._streams.record().wait_on_host()

    def read(self, pieces: list[torch.Tensor], use: Callable[[list[torch.Tensor]], Pending]) -> Pending:
        used: list[Pending] = [Done(), Done()]
        for turn, batch in enumerate(_batches(pieces)):
            used[turn % 2].wait()
            here, end = list[torch.Tensor](), 0
            with self.copying():
                for piece in batch:
                    place = self.buffers[turn % 2][end : end + piece.nbytes].view(piece.dtype)
                    here.append(place.copy_(piece, non_blocking=True))
                    end += aligned(piece.nbytes)
            used[turn % 2] = use(here)
        return Works(used)


def _batches(pieces: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield ``pieces`` in batches that fit into a buffer."""
    batch, nbytes = list[torch.Tensor](), 0
    for piece in pieces:
        if batch and nbytes + piece.nbytes > _PIECE:
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += aligned(piece.nbytes)
    if batch:
        yield batch


def _cut(part: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a shard into messages that fit into a buffer."""
    return torch.split(part, _PIECE // part.itemsize) if part.numel() else ()


class _Thread:
    """A thread that may be abandoned in a wait. [Note: Waits that gloo has forgotten]"""

    def __init__(self, do: Callable[[_Thread], object]) -> None:
        self._do = do
        self._error: BaseException | None = None
        self._acts = threading.Lock()  # held, except while it waits for other ranks
        self._has_ended = self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="flatshard-copies", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._acts:
            try:
                self._do(self)
            except BaseException as e:
                self._error = e
            self._has_ended = True

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Context in which the thread only waits for other ranks."""
        self._acts.release()
        try:
            yield
        finally:
            self._acts.acquire()
            if self._is_abandoned:
                raise SystemExit  # of this thread

    def wait(self, look: Callable[[], object]) -> None:
        """Wait for its end, and raise its error. ``look`` is called from time to time."""
        self._thread.join(_LOOK)
        while self._thread.is_alive():
            look()
            self._thread.join(_LOOK)
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def abandon(self) -> bool:
        """Wait for its end, or leave it in a wait that gloo has forgotten. Return whether it ended. The groups must have."""
        self._thread.join(_LOOK)
        with self._acts:
            self._is_abandoned = not self._has_ended
        return self._has_ended


class _Paused:
    """Messages for which a thread waits as it pauses."""

    def __init__(self, thread: _Thread, pending: Pending) -> None:
        self._thread, self._pending = thread, pending

    def wait(self) -> None:
        with self._thread.pausing():
            self._pending.wait()


class Copies:
    """The copies that one rank keeps, of its own shards and of other ranks'."""

    def __init__(self, job: Trained, extra: Iterable[Any], copies: int) -> None:
        self._job, self._extra, self._count = job, list(extra), copies
        self.generation: Generation | None = None
        self.is_called = False  # a process waited for the next epoch when the kept generation began
        self.sent = 0  # bytes
        self._under: _Under | None = None
        self._spare: list[Image] = []
        self._source = _Host()
        self._stepped: set[int] = set()  # numbers of the optimizers that have stepped in this step
        self._epoch, self._numbers, self._shifts = -1, list[int](), list[int]()

    def use_group(
        self,
        epoch: int,
        group: dist.ProcessGroup,
        hosts: Sequence[str],
        check_alive: Callable[[Iterable[int]], object],
    ) -> None:
        """Use ``group`` for copies. ``hosts``: of its ranks. ``check_alive``: raises if one of the given ranks has died.

        Raises:
            CollectiveError: a rank has died.
        """
        self._epoch, self.is_called = epoch, False
        self._channel = Channel(group, torch.device("cpu"))
        self._collectives = GlooCollectives(group)
        self._numbers = self._channel.objects(_units.place_of(self._job.units)[0])
        self._shifts = shifts(hosts, self._numbers, self._count)
        rank, size = self._channel.rank, self._channel.size
        partners = {(rank + step) % size for shift in self._shifts for step in (shift, -shift)}
        self._look = functools.partial(check_alive, partners)

    def begin_step(self) -> None:
        """Record that a step begins, in which no optimizer has stepped yet."""
        self._stepped.clear()

    def note_stepped(self, number: int) -> None:
        """Record that an optimizer has stepped its gradients."""
        self._stepped.add(number)

    def check_gradients(self) -> None:
        """Raise RuntimeError if there are gradients that the rest of training needs: they are not copied."""
        job = self._job
        _units.check_reduced(job.units, f"{job.verb}, at the end of a step")
        for number, optimizer in enumerate(job.optimizers):
            if number not in self._stepped and any(map(_has_gradient, params_of(optimizer))):
                raise RuntimeError(
                    f"{job.verb}, at the end of a step: {type(optimizer).__name__}, optimizer {number}, has not stepped its "
                    "gradients, and they are not copied or saved: accumulate them inside of one step; or pass copy_every= "
                    "(and save_every=) so that these steps end with a step of the optimizer; or set .grad to None"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of the copies, and of the buffers to send from."""
        kept = [self.generation, None if self._under is None else self._under.generation]
        images = [*self._spare, *(image for g in kept if g is not None for image in (*g.others, g.own))]
        sizes = {id(image): image.nbytes for image in images if image is not None}
        return sum(sizes.values()) + sum(buffer.nbytes for buffer in self._source.buffers)

    def _version(self, parts: dict[Key, torch.Tensor]) -> int:
        """Return a number that changes with the parameters and ``parts``."""
        return sum(unit.handle.version() for unit in self._job.units) + sum(part._version for part in parts.values())

    def take(self, step: int, is_called: bool = False) -> None:
        """Begin to copy the live state after ``step`` steps. ``is_called``: a process waits for the next epoch.

        Raises:
            CollectiveError: a rank has died.
            ValueError: ranks have different optimizer state.
        """
        self.commit()
        live, rank, size = Live(self._job, with_gradients=False), self._channel.rank, self._channel.size
        manifest, before = live.manifest, self.generation
        is_alike = before is not None and alike(before.manifest, manifest)
        if not is_alike:
            self._spare = []
        is_new = not is_alike or before is None or before.number[1] != self._epoch
        if is_new:  # also on ranks that have joined
            kinds = self._channel.objects(manifest.values)
            if odd := [r for r, kind in enumerate(kinds) if kind != kinds[0]]:
                raise ValueError(
                    f"ranks {odd} keep other values than rank 0: optimizers must have state of the same parameters on all"
                )
        sharded = [unit for unit in range(len(manifest.values)) if not manifest.is_replicated(unit)]
        numbers = [self._numbers[(rank - shift) % size] for shift in self._shifts] if sharded else []
        others = self._spare
        if [image.number for image in others] != numbers:  # ranks may have changed places in the same layout
            others = [Image(manifest, number, with_replicated=False) for number in numbers]
        self._spare = []
        number = live.number
        parts = {(v.at, v.name): live.part(v).contiguous() for values in manifest.values for v in values}
        extra = [copy.deepcopy(each.state_dict()) for each in self._extra]
        generation = Generation((step, self._epoch), manifest, live.common(), extra, others)
        if is_new:  # values that other ranks would refuse raise now, before they are needed
            generation.common.to_bytes()
            _exchange.saved(extra, "extra")
        before = before if is_alike else None
        self._under = under = _Under(generation, before, number, parts, self._version(parts), is_called)
        device = next((part.device for part in parts.values() if part.device.type != "cpu"), None)
        if device is not None:
            if not isinstance(self._source, _Device):
                self._source = _Device(device)
            self._source.await_issued()
        under.thread = _Thread(functools.partial(self._copy, under))

    def _copy(self, under: _Under, thread: _Thread) -> None:
        """Send this rank's shards, and receive others'. When all ranks have theirs, overwrite the copy of its own."""
        with self._channel.failing("copy", ""):
            self._send(under, thread).wait()
            under.has_all = True
            with thread.pausing():
                told = self._channel.gather(torch.tensor([under.is_called], device="cpu"))
        under.is_called, under.is_complete = bool(told.any()), True
        self._fill(under)

    def _send(self, under: _Under, thread: _Thread) -> Pending:
        """Begin to send this rank's shards, and to receive others'."""
        rank, size, generation = self._channel.rank, self._channel.size, under.generation
        manifest = generation.manifest
        pieces = [
            piece
            for unit, values in enumerate(manifest.values)
            if self._shifts and not manifest.is_replicated(unit)
            for v in values
            for piece in _cut(under.parts[v.at, v.name])
        ]
        into = [
            (as_bytes(piece), (rank - shift) % size)
            for shift, image in zip(self._shifts, generation.others, strict=False)  # none, if nothing is sharded
            for part in image.parts()
            for piece in _cut(part)
        ]

        def send(pieces: list[torch.Tensor]) -> Pending:
            to = [(as_bytes(piece), (rank + shift) % size) for shift in self._shifts for piece in pieces]
            self.sent += sum(piece.nbytes for piece, _ in to)
            return _Paused(thread, self._collectives.messages(to, [], _TAG))

        receiving = _Paused(thread, self._collectives.messages([], into, _TAG))
        return Works([receiving, self._source.read(pieces, send)])

    def commit(self) -> None:
        """Wait until all ranks have the copies that ``take`` began. [Note: One of two generations is complete]

        Raises:
            CollectiveError: a rank has died.
            ValueError: parameters have changed since ``take``.
        """
        under = self._under
        if under is None:
            return
        assert under.thread is not None
        under.thread.wait(self._look)
        self._check_as_taken(under)
        self._keep(under)

    def _check_as_taken(self, under: _Under) -> None:
        if self._version(under.parts) != under.version:
            raise ValueError(
                f"{self._job.verb}: parameters, or an optimizer's state, changed between the end of a step and the next "
                "step of an optimizer, while they were copied: change them behind the optimizer's step, and pass all "
                "optimizers to the Job"
            )

    def _fill(self, under: _Under) -> None:
        """Copy this rank's shards, over the copy of the older generation if there is one."""
        before = under.before
        with self._source.copying():
            if before is not None and before.own is not None and before.own.number == under.number:
                own = before.own
            else:
                own = Image(under.generation.manifest, under.number, pin=isinstance(self._source, _Device))
            own.fill(under.parts)
            under.generation.own = own

    def _keep(self, under: _Under) -> None:
        """Keep the generation that was being copied."""
        if under.before is not None:
            self._spare = under.before.others
        self.generation, self._under, self.is_called = under.generation, None, under.is_called

    def drain(self) -> None:
        """Wait until no message is on its way: its memory must not be freed before."""
        try:
            self.commit()
        except (RuntimeError, ValueError) as e:
            logger.debug("copies at the end of the job: %s", e)
        self._under = None

    # -- after a death -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop copying, as the groups have ended. A generation that this rank has may turn out to be complete on all ranks.

        Raises:
            ValueError: parameters have changed since ``take``.
        """
        under = self._under
        if under is None:
            return
        assert under.thread is not None
        if not under.thread.abandon():
            logger.debug("copies were on their way when the groups ended")
        if under.has_all:
            self._check_as_taken(under)
        if under.is_complete:
            self._keep(under)
        elif not under.has_all:
            self._under = None

    @property
    def numbers(self) -> tuple[Number | None, Number | None]:
        """Numbers of the kept generation and, if this rank has all its copies, of the pending one."""
        under = self._under
        return (
            None if self.generation is None else self.generation.number,
            None if under is None else under.generation.number,
        )

    def go_back(self, number: Number) -> Generation:
        """Keep generation ``number``, which is complete."""
        if self._under is not None and self._under.generation.number == number:
            self._fill(self._under)
            self._keep(self._under)
        self._under = None
        assert self.generation is not None
        assert self.generation.number == number, (self.generation.number, number)
        self._spare = []
        return self.generation

    def forget(self) -> None:
        """Forget all generations: none is complete."""
        self.generation, self._under, self._spare = None, None, []


def _has_gradient(param: torch.Tensor) -> bool:
    """Return whether this rank's shard of a gradient is not zero, as after ``zero_grad(set_to_none=False)``."""
    with plainly():
        return param.grad is not None and bool(param.grad.any())


def alike(a: Manifest, b: Manifest) -> bool:
    """Return whether images of both have the same layout."""
    return a.values == b.values and a.layouts == b.layouts


def shifts(hosts: Sequence[str], numbers: Sequence[int], copies: int) -> list[int]:
    """Return the distances in ranks over which copies are sent: first the one that sends most to another host.

    ``numbers``: the shard of each rank. Ranks with the same shard are copies of each other, and count as such.
    """
    size, replicas = len(hosts), min(map(numbers.count, numbers))
    of_others = [n for n in range(1, size) if all(numbers[r] != numbers[(r + n) % size] for r in range(size))]

    def stay(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    return sorted(of_others, key=lambda shift: (stay(shift), shift))[: max(0, copies - (replicas - 1))]
