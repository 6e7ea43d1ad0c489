"""Copies of each rank's parts on other ranks, in host memory: what is left of a rank that dies.

[Note: One of two generations is whole]
A *generation* is the state between two steps. When a step ends, each rank begins to send its parts from where they lie to
the next rank, which receives them beside the copy that it has. They must not change until they have been sent: an
optimizer's step waits for that, in a hook before it. Then ranks meet in a small all-reduce. Who passes it knows that *all*
ranks have complete copies of the new generation. Only then it overwrites what it keeps of its own parts, and lets the older
copy go. So if one rank that is left has passed, the new generation is whole: those that have not passed still have their
own parts unchanged. If none has passed, all still have the older one.

What a rank keeps: a copy of its own parts, and two of each rank that it keeps copies for. With ``copies=1`` these are three
times its parts. From an accelerator four times: its own parts are sent from another copy, which is then kept.
What is replicated, as units or over the replicas of a hybrid strategy, is copied already, and is not sent.

[Note: What is not sent again]
A frozen parameter is sent until both buffers that a rank receives into, one after the other, have it. Then it is not, as
long as it is bit for bit what this rank kept at the last generation. Neither versions nor optimizers are asked: a write by
pointer, and values that were loaded, are seen like any others. To compare is to read two buffers. Trained parameters would
differ, and are not compared. Senders tell which parts they leave out, in one small collective.

[Note: Copies from an accelerator]
Parts go to the host on a stream of their own. It waits for what has been issued, and no other stream waits for it. A thread
waits until they are there, and sends them. So neither the host nor the next step waits, until an optimizer is to step: then
the host waits for the thread, and nothing overwrites what has not been copied. Where ranks have died it does so, too: neither
side of a copy is freed or written to while the device may be at it.

[Note: Gradients between two steps]
A gradient that an optimizer has stepped is done with, whether the user drops it now or at the begin of the next step. One
that none has stepped is part of what training keeps, as under accumulation over several steps. Backward will add to it while
copies are sent, so a generation has a copy of its own. What a rank holds alone (``no_sync``) would be lost with it.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from flatshard._comm.backends import GlooCollectives
from flatshard._comm.collectives import Pending
from flatshard._comm.progress import NOBODY
from flatshard._composable.features.user_hooks import register_gradients_reduced_hook
from flatshard._errors import name_list
from flatshard._runtime import StreamEvent, Streams
from flatshard._trace import logger
from flatshard.elastic import _units
from flatshard.elastic._exchange import Channel, as_bytes
from flatshard.elastic._values import GRAD, PARAM, At, Image, Key, Live, Manifest, Small, Trained

Number = tuple[int, int]
"""Of a generation: the number of steps before it, and the epoch that it was taken in. A later one is greater."""


@dataclass
class Generation:
    """What one rank keeps of the state between two steps."""

    number: Number
    manifest: Manifest
    small: Small
    extra: list[Any]
    others: list[Image]  # copies of the parts of other ranks
    own: Image | None = None  # None as long as it is what is live
    same: frozenset[Key] = frozenset()  # parts that are as in the generation before it, of the same epoch


@dataclass
class _Under:
    """A generation on its way."""

    generation: Generation
    number: int  # of this rank's shard
    parts: dict[Key, torch.Tensor]  # of this rank, where they lie
    version: int
    staged: Image | None  # they are sent from there: [Note: Copies from an accelerator]
    pending: Pending
    is_complete: bool = False  # all copies that this rank is to have are here


class _FromDevice:
    """Copies to the host are under way, and then to other ranks. [Note: Copies from an accelerator]"""

    def __init__(self, copied: StreamEvent, send: Callable[[], Pending]) -> None:
        self._copied, self._send = copied, send
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="flatshard-copies", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._copied.wait_on_host()
            self._send().wait()
        except BaseException as e:
            self._error = e

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Copies:
    """The copies that one rank keeps, of its own parts and of other ranks'."""

    def __init__(self, job: Trained, extra: Iterable[Any], copies: int) -> None:
        self._job, self._extra, self._count = job, list(extra), copies
        self.generation: Generation | None = None
        self.is_called = False  # the first rank knew, at the last `commit`, that somebody waits for the next epoch
        self.sent = 0  # bytes
        self._under: _Under | None = None
        self._spare: list[Image] = []
        self._free: Image | None = None  # to stage the next parts in
        self._side: Any = None  # the stream of copies from an accelerator
        self._clock = 0
        self._reduced_at = [0] * len(job.units)
        self._stepped_at = [0] * len(job.optimizers)
        self._done: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # of what is not sharded: gradients, stepped
        for number, unit in enumerate(job.units):
            register_gradients_reduced_hook(unit.module, functools.partial(self._note_reduced, number))
        self._epoch, self._numbers, self._shifts = -1, list[int](), list[int]()
        self._frozen: list[Key] = []  # the same on all ranks: [Note: What is not sent again]

    def follow(self, epoch: int, group: dist.ProcessGroup, hosts: Sequence[str]) -> None:
        """Send over ``group`` from now on. ``hosts``: of its ranks.

        Raises:
            CollectiveError: a rank has died.
        """
        self._epoch = epoch
        self._channel = Channel(group, torch.device("cpu"))
        self._collectives = GlooCollectives(group)
        self._numbers = self._channel.objects(_units.place_of(self._job.units)[0])
        self._shifts = shifts(hosts, self._numbers, self._count)

    def note_stepped(self, number: int) -> None:
        """An optimizer has stepped its parameters by their gradients. [Note: Gradients between two steps]"""
        self._clock += 1
        self._stepped_at[number] = self._clock
        own = {id(param) for group in self._job.optimizers[number].param_groups for param in group["params"]}
        for param in self._job.others.values():
            if (grad := param.grad) is not None and id(param) in own:
                self._done[id(param)] = weakref.ref(grad), grad._version

    def _note_reduced(self, unit: int, _module: object = None) -> None:
        self._clock += 1
        self._reduced_at[unit] = self._clock

    def note_moved(self, manifest: Manifest) -> None:
        """The gradients that there are came with what has moved."""
        for unit in {value.at.unit for values in manifest.values for value in values if value.name == GRAD}:
            self._note_reduced(unit)

    def held_grads(self) -> dict[At, torch.Tensor]:
        """The gradients that no optimizer has stepped: of the same parameters on all ranks."""
        stepped: dict[int, int] = {}
        for optimizer, when in zip(self._job.optimizers, self._stepped_at, strict=True):
            for group in optimizer.param_groups:
                stepped.update((id(p), when) for p in group["params"] if when > stepped.get(id(p), 0))
        grads = self._job.grads() if max(self._reduced_at) > min(self._stepped_at, default=0) else {}
        return {
            at: grad
            for at, grad in grads.items()
            if self._reduced_at[at.unit] > stepped.get(id(self._job.params[at]), 0)
        }

    def _check_grads(self) -> None:
        """Raise RuntimeError if there are gradients that cannot be kept."""
        job = self._job
        _units.check_reduced(job.units, f"{job.verb}, at the end of a step")
        lost = []
        for name, param in job.others.items():
            ref, version = self._done.get(id(param), (None, 0))
            if (grad := param.grad) is not None and (ref is None or ref() is not grad or version != grad._version):
                lost.append(name)
        if lost:
            raise RuntimeError(
                f"{job.verb}, at the end of a step: {name_list(lost)}, which are not sharded, have gradients that no "
                "optimizer has stepped, and that cannot move: step them, or set .grad to None"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are kept."""
        under = self._under
        aside = (self._free, None if under is None else under.staged)
        kept = [*self._spare, *(image for image in aside if image is not None)]
        for each in (self.generation, None if under is None else under.generation):
            if each is not None:
                kept += [*each.others, *([each.own] if each.own is not None else [])]
        return sum(image.nbytes for image in {id(image): image for image in kept}.values())

    def _version(self, parts: dict[Key, torch.Tensor]) -> int:
        """Changes with parameters and with ``parts``."""
        return sum(unit.handle.version() for unit in self._job.units) + sum(part._version for part in parts.values())

    def take(self, step: int) -> None:
        """Begin to copy what is live: ``step`` steps have been made.

        Raises:
            CollectiveError: a rank has died.
            ValueError: ranks have optimizers' state of other kinds.
        """
        self.commit()
        self._check_grads()
        grads = {at: grad.detach().clone() for at, grad in self.held_grads().items()}
        live, rank, size = Live(self._job, grads), self._channel.rank, self._channel.size
        manifest, before = live.manifest, self.generation
        is_alike = before is not None and alike(before.manifest, manifest)
        if not is_alike:
            self._spare, self._free = [], None
        if not is_alike or before is None or before.number[1] != self._epoch:  # so do ranks that have joined
            frozen = [at for at, param in self._job.params.items() if not param.requires_grad]
            self._frozen = [(at, PARAM) for at in frozen if not manifest.is_replicated(at.unit)]
            kinds = self._channel.objects([manifest.values, manifest.rest, frozen])
            if odd := [r for r, kind in enumerate(kinds) if kind != kinds[0]]:
                raise ValueError(
                    f"ranks {odd} keep other values than rank 0: optimizers must have state of the same parameters on "
                    "all, and the same must be frozen"
                )
        sharded = [unit for unit in range(len(manifest.values)) if not manifest.is_replicated(unit)]
        numbers = [self._numbers[(rank - shift) % size] for shift in self._shifts] if sharded else []
        others = self._spare
        if [image.number for image in others] != numbers:  # ranks may have changed places, and the cut be the same
            others = [Image(manifest, number, with_replicated=False) for number in numbers]
        self._spare = []
        number = live.numbers[0]
        parts = {(v.at, v.name): live.part(number, v).contiguous() for values in manifest.values for v in values}
        extra = [copy.deepcopy(each.state_dict()) for each in self._extra]
        generation = Generation((step, self._epoch), manifest, live.small(), extra, others)
        before = before if is_alike else None
        staged: Image | None = None
        if all(part.device.type == "cpu" for part in parts.values()):
            pending = self._send(generation, before, parts)
        else:
            staged, pending = self._stage(generation, before, parts, number)
        self._under = _Under(generation, number, parts, self._version(parts), staged, pending)

    def _stage(
        self, generation: Generation, before: Generation | None, parts: dict[Key, torch.Tensor], number: int
    ) -> tuple[Image, Pending]:
        """Begin to copy ``parts`` to the host, and then to other ranks. [Note: Copies from an accelerator]"""
        device = next(part.device for part in parts.values() if part.device.type != "cpu")
        streams = Streams.of(device)
        assert streams is not None
        module = torch.get_device_module(device)
        self._side = self._side or module.Stream(device=device)
        staged, self._free = self._free or Image(generation.manifest, number, pin=True), None
        self._side.wait_stream(streams.current)
        with module.stream(self._side):
            staged.fill(parts)
            copied = streams.record()
        on_host = {(v.at, v.name): staged.part(number, v) for unit in generation.manifest.values for v in unit}
        return staged, _FromDevice(copied, lambda: self._send(generation, before, on_host))

    def _send(self, generation: Generation, before: Generation | None, parts: dict[Key, torch.Tensor]) -> Pending:
        """Begin to send ``parts``, which are in host memory, and to receive others'. ``before``: it has the same kinds."""
        rank, size, manifest = self._channel.rank, self._channel.size, generation.manifest
        generation.same = frozenset() if before is None else self._unchanged(before, parts)
        left_out = self._told(generation.same & before.same if before is not None else frozenset())
        to = [
            (as_bytes(part), (rank + shift) % size)
            for shift in self._shifts
            for unit, values in enumerate(manifest.values)
            if not manifest.is_replicated(unit)
            for v in values
            if (v.at, v.name) not in left_out[rank] and (part := parts[v.at, v.name]).numel()
        ]
        into = [
            (as_bytes(part), (rank - shift) % size)
            for shift, image in zip(self._shifts, generation.others, strict=False)  # none, if nothing is sharded
            for part in image.parts(without=left_out[(rank - shift) % size])
        ]
        self.sent += sum(part.nbytes for part, _ in to)
        with self._channel.failing("copy", ""):
            return self._collectives.exchange(to, into, NOBODY)

    def _unchanged(self, before: Generation, parts: dict[Key, torch.Tensor]) -> frozenset[Key]:
        """The frozen parts that are bit for bit as in ``before``. [Note: What is not sent again]"""
        own = before.own
        if own is None or before.number[1] != self._epoch:
            return frozenset()
        kept = {
            (v.at, v.name): own.part(own.number, v) for unit in own.manifest.values for v in unit if v.name == PARAM
        }
        return frozenset(key for key in self._frozen if torch.equal(_as_ints(parts[key]), _as_ints(kept[key])))

    def _told(self, left_out: frozenset[Key]) -> list[frozenset[Key]]:
        """What each rank does not send again, by rank. All have the same frozen parameters."""
        if not (self._frozen and self._shifts):
            return [left_out] * self._channel.size
        every = self._channel.objects([number for number, key in enumerate(self._frozen) if key in left_out])
        return [frozenset(self._frozen[number] for number in numbers) for numbers in every]

    def commit(self, is_called: bool = False) -> None:
        """Wait until all ranks have their copies of what ``take`` has begun. [Note: One of two generations is whole]

        Raises:
            CollectiveError: a rank has died.
            ValueError: parameters have changed since ``take``.
        """
        under = self._under
        if under is None:
            return
        with self._channel.failing("copy", ""):
            under.pending.wait()
            if self._version(under.parts) != under.version:
                raise ValueError(
                    f"{self._job.verb}: parameters, or an optimizer's state, changed between the end of a step and the next "
                    "step of an optimizer, while they were copied: change them behind the optimizer's step, and pass all "
                    "optimizers to the Job"
                )
            under.is_complete = True
            told = torch.tensor([float(is_called)])
            self._collectives.combine(told, "max").wait()
        self.is_called = bool(told)
        self._keep(under)

    def _keep(self, under: _Under) -> None:
        before, now = self.generation, under.generation
        own = None
        if before is not None and alike(before.manifest, now.manifest):
            self._spare = before.others
            if before.own is not None and before.own.number == under.number:
                own, before.own = before.own, None
        if under.staged is not None:
            now.own, self._free = under.staged, own
        else:
            now.own = Image(now.manifest, under.number) if own is None else own
            now.own.fill(under.parts, without=now.same if own is not None else frozenset())
        self.generation, self._under = now, None

    def settle(self) -> None:
        """Wait until nothing is on its way: no memory may go that is sent or received into."""
        if self._under is not None:
            try:
                self._under.pending.wait()
            except RuntimeError as e:
                logger.debug("copies that nobody needs any more: %s", e)
            self._under = None

    # -- after a death -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The groups have ended. What is complete may yet turn out to be whole."""
        if self._under is not None and not self._under.is_complete:
            if self._under.staged is not None:
                self.settle()
            self._under = None

    @property
    def numbers(self) -> tuple[Number | None, Number | None]:
        """Of the generation that is kept, and of one that may be whole: copies are here, and what is live is as it was."""
        under = self._under
        return (
            None if self.generation is None else self.generation.number,
            None if under is None else under.generation.number,
        )

    def go_back(self, number: Number) -> Generation:
        """Keep generation ``number``, which is whole."""
        if self._under is not None and self._under.generation.number == number:
            self._keep(self._under)
        self._under = None
        assert self.generation is not None
        assert self.generation.number == number, (self.generation.number, number)
        self._spare, self._free = [], None
        return self.generation

    def forget(self) -> None:
        """What is kept is not whole."""
        self.generation, self._under, self._spare, self._free = None, None, [], None


def _as_ints(tensor: torch.Tensor) -> torch.Tensor:
    """To compare bits: two zeros differ, and a NaN equals itself."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, torch.uint8))


def alike(a: Manifest, b: Manifest) -> bool:
    """Whether images of both have their parts in the same places."""
    return a.values == b.values and a.layouts == b.layouts


def shifts(hosts: Sequence[str], numbers: Sequence[int], copies: int) -> list[int]:
    """By how many ranks copies are handed on, best first: such that most go to another host. All ranks keep equally many.

    ``numbers``: of the shard that each rank has. Ranks with the same one are copies of each other, and count as such.
    """
    size, replicas = len(hosts), min(map(numbers.count, numbers))
    of_others = [n for n in range(1, size) if all(numbers[r] != numbers[(r + n) % size] for r in range(size))]

    def stay(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    return sorted(of_others, key=lambda shift: (stay(shift), shift))[: max(0, copies - (replicas - 1))]
