"""Copies of each rank's parts on other ranks, in host memory: what is left of a rank that dies.

[Note: One of two generations is whole]
A *generation* is the state between two steps. When a step ends, each rank begins to send its parts from where they lie to
the next rank, which receives them beside the copy that it has. They must not change until they have been sent: an
optimizer's step waits for that, in a hook before it. Then ranks meet in a small all-reduce. Who passes it knows that *all*
ranks have complete copies of the new generation. Only then it overwrites what it keeps of its own parts, and lets the older
copy go. So if one rank that is left has passed, the new generation is whole: those that have not passed still have their
own parts unchanged. If none has passed, all still have the older one.

What a rank keeps: a copy of its own parts, and two of each rank that it keeps copies for. With ``copies=1`` these are three
times its parts. Units that are replicated are copies already, and are not sent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from flatshard._comm.backends import GlooCollectives
from flatshard._comm.collectives import Pending
from flatshard._errors import name_list
from flatshard.elastic._exchange import Channel, as_bytes
from flatshard.elastic._values import Image, Live, Manifest, Small, Trained

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


@dataclass
class _Under:
    """A generation on its way."""

    generation: Generation
    live: Live
    version: int
    pending: Pending
    sent: list[torch.Tensor] = field(default_factory=list)  # alive until they have been sent
    is_complete: bool = False  # all copies that this rank is to have are here


class Copies:
    """The copies that one rank keeps, of its own parts and of other ranks'."""

    def __init__(self, job: Trained, extra: Iterable[Any], copies: int) -> None:
        self._job, self._extra, self._count = job, list(extra), copies
        self.generation: Generation | None = None
        self.is_called = False  # the first rank knew, at the last `commit`, that somebody waits for the next epoch
        self.sent = 0  # bytes
        self._under: _Under | None = None
        self._spare: list[Image] = []
        self._epoch, self._shifts = -1, list[int]()

    def follow(self, epoch: int, group: dist.ProcessGroup, hosts: Sequence[str]) -> None:
        """Send over ``group`` from now on. ``hosts``: of its ranks."""
        self._epoch = epoch
        self._channel = Channel(group, torch.device("cpu"))
        self._collectives = GlooCollectives(group)
        self._shifts = shifts(hosts)[: self._count]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that are kept."""
        kept = [*self._spare]
        for each in (self.generation, None if self._under is None else self._under.generation):
            if each is not None:
                kept += [*each.others, *([each.own] if each.own is not None else [])]
        return sum(image.nbytes for image in {id(image): image for image in kept}.values())

    def _version(self) -> int:
        return sum(unit.handle.version() for unit in self._job.units)

    def take(self, step: int) -> None:
        """Begin to copy what is live: ``step`` steps have been made.

        Raises:
            CollectiveError: a rank has died.
            ValueError: ranks have optimizers' state of other kinds.
        """
        self.commit()
        live, rank, size = Live(self._job, grads=False), self._channel.rank, self._channel.size
        manifest, before = live.manifest, self.generation
        if before is None or not alike(before.manifest, manifest):
            self._spare = []
            kinds = self._channel.objects([manifest.values, manifest.rest])
            if odd := [r for r, kind in enumerate(kinds) if kind != kinds[0]]:
                raise ValueError(
                    f"ranks {odd} keep other values than rank 0: optimizers must have state of the same parameters on all"
                )
        sharded = [unit for unit in range(len(manifest.values)) if not manifest.is_replicated(unit)]
        numbers = [(rank - shift) % size for shift in self._shifts] if sharded else []
        others = self._spare or [Image(manifest, number, with_replicated=False) for number in numbers]
        self._spare = []
        values = [value for unit in sharded for value in manifest.values[unit]]
        parts = [part.contiguous() for value in values if (part := live.part(live.numbers[0], value)).numel()]
        extra = [copy.deepcopy(each.state_dict()) for each in self._extra]
        generation = Generation((step, self._epoch), manifest, live.small(), extra, others)
        to = [(as_bytes(part), (rank + shift) % size) for shift in self._shifts for part in parts]
        into = [(as_bytes(part), image.number) for image in others for part in image.parts()]
        self.sent += sum(part.nbytes for part, _ in to)
        with self._channel.failing("copy", ""):
            pending = self._collectives.exchange(to, into)
        self._under = _Under(generation, live, self._version(), pending, parts)

    def commit(self, is_called: bool = False) -> None:
        """Wait until all ranks have their copies of what ``take`` has begun. [Note: One of two generations is whole]

        Raises:
            CollectiveError: a rank has died.
            RuntimeError: parameters have changed since ``take``.
        """
        under = self._under
        if under is None:
            return
        with self._channel.failing("copy", ""):
            under.pending.wait()
            if self._version() != under.version:
                names = name_list([unit.fqn for unit in self._job.units], 3)
                raise ValueError(
                    f"parameters of some of the units {names} changed between the end of a step and the optimizer's next "
                    "step, while they were copied: change them in the step, behind the optimizer's"
                )
            under.is_complete = True
            told = torch.tensor([float(is_called)])
            self._collectives.combine(told, "max").wait()
        self.is_called = bool(told)
        self._keep(under)

    def _keep(self, under: _Under) -> None:
        before, now = self.generation, under.generation
        reuses = before is not None and before.own is not None and alike(before.manifest, now.manifest)
        own = before.own if before is not None and reuses else Image(now.manifest, under.live.numbers[0])
        assert own is not None
        own.fill(under.live)
        if before is not None and reuses:
            self._spare, before.own = before.others, None
        now.own = own
        self.generation, self._under = now, None

    # -- after a death -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The groups have ended. What is complete may yet turn out to be whole."""
        if self._under is not None and not self._under.is_complete:
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
        self._spare = []
        return self.generation


def alike(a: Manifest, b: Manifest) -> bool:
    """Whether images of both have their parts in the same places."""
    return a.values == b.values and a.layouts == b.layouts


def shifts(hosts: Sequence[str]) -> list[int]:
    """By how many ranks copies are handed on, best first: such that most go to another host. All ranks keep equally many."""
    size = len(hosts)

    def stay(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    return sorted(range(1, size), key=lambda shift: (stay(shift), shift))
