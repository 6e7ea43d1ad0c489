"""A receiver's side: the data that have come, the missing data, and the newest complete version.

[Note: All or nothing]
Data are kept beside the weights, in any order. A version is complete when each cell of each sender has a base, in the weights
or beside them, and all changes from the base to that version have come. Only then are the weights written, all in one call,
which the engine makes between two of its steps. So the weights are always one version of the full model. After an error
inside of that call they are no version, and the receiver asks for everything again.

[Note: One rule for missing data]
The receiver tells a sender its version of each cell, and the later messages that it has. The answer follows from that: at the
beginning, after a restart of the senders, or with some cells newer than others after losses. The next question makes up for a
lost question or answer.
"""

from __future__ import annotations

import itertools
import math
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from flatshard.weights import _cells, _codec
from flatshard.weights._messages import Bytes, channel_of, message_of, read_message, wrong
from flatshard.weights._sender import Name

_VERB = "Receiver.receive"
_SLACK = 2**20  # bytes that may be kept beyond those of all weights


class Target(NamedTuple):
    """A receiver's tensor for a region of a parameter.

    Example::

        qkv = torch.empty(3 * 32, 64)  # fused, of the second of two tensor-parallel ranks
        targets = [
            flatshard.weights.Target(f"attention.{name}.weight", part, start=(32, 0))
            for name, part in zip(["q", "k", "v"], qkv.split(32))
        ]
    """

    name: str
    """The name of the parameter at the sender."""
    tensor: torch.Tensor
    """A tensor of the region's shape, in the dtype that is sent. It may have any strides, and is written in place."""
    start: tuple[int, ...] | None = None
    """The begin of the region in the parameter. Default: its first element."""


class AppliedVersion(NamedTuple):
    """The result of :meth:`Receiver.apply`.

    Example::

        sender = flatshard.weights.Sender(model, lambda name, message: receiver.receive(message))
        receiver = flatshard.weights.Receiver(None, lambda rank, message: sender.receive(message))
        receiver.poll()
        if (applied := receiver.apply()) is not None:  # here each rank would need a receiver that asks all of them
            print(applied.version, sorted(applied.names))
    """

    version: int
    """The version of the weights now."""
    names: frozenset[str]
    """The parameters of which elements have come: all that have changed, and perhaps others."""


class _Update:
    """The messages of one sender that lead to a version from the one before."""

    def __init__(self) -> None:
        self.messages: dict[int, memoryview] = {}  # by index
        self.count: int | None = None  # known when the last has come

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.messages.values()))

    @property
    def is_complete(self) -> bool:
        return len(self.messages) == self.count


class _Source:
    """A sender, as the receiver knows it. Places of its cells are known when all senders have answered."""

    def __init__(self, asked: list[_cells.Asked], cells: list[_cells.Cell], nonce: int) -> None:
        """
        Raises:
            ValueError: ``cells`` are no cells of ``asked``.
        """
        self.nonce = nonce  # the question that was answered with this
        self.asked, self.cells = asked, cells
        numels = [_cells.numel_of(cell, asked, _cells.CELL) for cell in cells]
        self.kinds = [(numel, asked[cell[0].asked].kind) for numel, cell in zip(numels, cells, strict=True)]
        self.whole_nbytes = sum(numel * dtype.itemsize for numel, dtype in self.kinds)
        self.places: list[_cells.Places] = []
        self.written = [-1] * len(cells)  # the version of each cell in the weights, or -1
        self.fresh: dict[int, tuple[int, memoryview]] = {}  # newer cells beside them: version, section
        self.updates: dict[int, _Update] = {}  # by version

    @property
    def bases(self) -> list[int]:
        """The version of each cell, beside the weights or in them."""
        return [self.fresh[cell][0] if cell in self.fresh else base for cell, base in enumerate(self.written)]

    @property
    def newest(self) -> int:
        """The newest version without missing data, or -1."""
        version = min(self.bases)
        while version >= 0 and version + 1 in self.updates and self.updates[version + 1].is_complete:
            version += 1
        return version

    def write(self, version: int) -> set[str]:
        """Bring the weights to ``version``. Return the names of the parameters that were written."""
        bases, names = self.bases, set[str]()
        for _, data in self.fresh.values():
            for section in _codec.sections(data, self.kinds):
                names |= self._put(section)
        for number in sorted(v for v in self.updates if v <= version):
            for _, payload in sorted(self.updates[number].messages.items()):
                for section in _codec.sections(payload, self.kinds):
                    if bases[section.cell] < number:
                        names |= self._put(section)
        self.written, self.fresh = [version] * len(bases), {}
        self.drop_old()
        return names

    def _put(self, section: _codec.Section) -> set[str]:
        names, every = set(), section.read()
        for number, chosen, view, at in self.places[section.cell].parts(section.at()):
            values = every[chosen].to(view.device)
            if section.is_half:
                before = view.reshape(-1) if at is None else _codec.as_integers(view).take(at).view(view.dtype)
                values = _codec.nearest(before, values)
            if at is None:
                view.copy_(values.view(view.shape))
            else:
                _codec.as_integers(view).put_(at, _codec.as_integers(values))
            names.add(self.asked[number].name)
        return names

    def lose(self) -> None:
        """Forget all data."""
        self.written, self.fresh, self.updates = [-1] * len(self.written), {}, {}

    def drop_old(self) -> None:
        """Drop the updates that no cell needs."""
        first = min(self.bases, default=-1)
        self.updates = {version: update for version, update in self.updates.items() if version > first}

    @property
    def nbytes(self) -> int:
        return sum(len(data) for _, data in self.fresh.values()) + sum(u.nbytes for u in self.updates.values())


class Receiver:
    """Keeps weights at a version of a model in training: complete versions only, bit for bit.

    Beside its weights it holds the data that have come, at most as many bytes.

    Example::

        weights = {"4.weight": torch.empty(10, 64), "4.bias": torch.empty(10)}
        asked = []
        receiver = flatshard.weights.Receiver(weights, lambda rank, message: asked.append((rank, message)))
        receiver.poll()  # and in the loop of messages: receiver.receive(message)
        assert receiver.apply() is None  # between two steps of the engine; nothing has come here

    Args:
        weights: tensors by the names of the sender's parameters; or a list of :class:`Target` where names or shapes differ,
            as of fused or tensor-parallel weights. Only their elements are sent. They are the receiver's: nobody else may
            change them. None: all parameters, in tensors of the receiver's own.
        send: called with a sender's rank and a message for it, ``bytes`` to transport by any means. Messages may be lost,
            doubled and late.
        name: the name of this receiver, unique among all.
        device: the device of the receiver's own tensors.

    Raises:
        ValueError: nothing is asked for, or a target has not as many dimensions as its ``start``.
    """

    version: int | None
    """The version of the weights, or None: before the first, and after a failure of :meth:`apply`."""
    damaged: int
    """The number of messages that arrived damaged. They count as lost."""
    weights: dict[str, torch.Tensor]
    """The tensors by parameter names: of several for one parameter, the last."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | Iterable[Target] | None,
        send: Callable[[int, bytes], object],
        *,
        name: Name = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.version, self.damaged, self.name = None, 0, name
        self._send, self._device = send, device
        self._lock = threading.RLock()
        if isinstance(weights, Mapping):
            weights = [Target(name, tensor) for name, tensor in weights.items()]
        self._targets = None if weights is None else [_detached(target) for target in weights]
        self.weights = {} if self._targets is None else {t.name: t.tensor for t in self._targets}
        self._layout = None if self._targets is None else [_asked(target) for target in self._targets]
        if self._layout == []:
            raise ValueError("Receiver: no weights are asked for. None asks for all parameters of the sender")
        self._channel = channel_of(self._layout)
        self._life = uuid.uuid4().hex[:12]  # another one after a restart: what answers another's questions says nothing
        self._nonce = 0  # of the last question
        self._run: str | None = None
        self._run_since = -1  # the question that was answered when this run was first heard of
        self._ranks: list[int] | None = None  # that send
        self._sources: dict[int, _Source] = {}
        self._refused: str | None = None

    @property
    def held_nbytes(self) -> int:
        """The bytes of data that are not in the weights yet."""
        return sum(source.nbytes for source in self._sources.values())

    def __repr__(self) -> str:
        """Return the state of each sender, to find out why no newer version is complete."""
        with self._lock:
            found = [f"Receiver({self.name!r}, version={self.version}"]
            for rank in self._known():
                source = self._sources.get(rank)
                if source is None:
                    found.append(f"rank {rank} has not answered")
                elif absent := source.bases.count(-1):
                    found.append(f"rank {rank}: {absent} of {len(source.cells)} cells have not come")
                else:
                    later = [str(version) for version in sorted(source.updates) if version > source.newest]
                    found.append(f"rank {rank}: up to {source.newest}" + f", parts of {', '.join(later)}" * bool(later))
            return "; ".join(found) + ")"

    # -- messages ------------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Ask each sender for missing data: at the beginning, and whenever nothing has come for some time.

        Rank 0 names the other senders, and the next call asks them.
        """
        with self._lock:
            self._nonce += 1
            questions = [(rank, self._state(rank, asks=True)) for rank in self._known()]
        for rank, message in questions:
            self._send(rank, message)

    def receive(self, message: Bytes) -> None:
        """Take a message of a sender, in any order and however often. Any thread may call it. The weights do not change.

        Raises:
            ValueError: it is no message of a sender; or the senders lack parameters that are asked for.
        """
        found = read_message(message, _VERB)
        if found is None:
            self.damaged += 1
            return
        head, kind = found.header, found.header["kind"]
        if kind == "state":
            raise ValueError("Receiver.receive got what a receiver has sent: give it to Sender.receive")
        with self._lock:
            if head["channel"] != self._channel:
                return
            source = self._sources.get(head["source"]) if head["run"] == self._run else None
            if kind in ("hello", "plan"):
                self._take_answer(head)
            elif source is not None and source.cells:
                (self._take_update if kind == "update" else self._take_cells)(source, head, found.payload)

    def _known(self) -> list[int]:
        """Return the ranks that are known to have data for this receiver."""
        if self._ranks is None:
            return [0]
        return [rank for rank in self._ranks if rank not in self._sources or self._sources[rank].cells]

    def _state(self, rank: int, asks: bool) -> bytes:
        """Return the message from which a sender derives the missing data. [Note: One rule for missing data]"""
        source = self._sources.get(rank)
        head = {"kind": "state", "name": self.name, "channel": self._channel, "run": self._run}
        state: dict[str, Any] = {**head, "nonce": [self._life, self._nonce], "asks": asks, "held": {}}
        if source is None:
            state["layout"] = self._layout
        else:
            state["held"] = {version: list(update.messages) for version, update in source.updates.items()}
            state |= {"bases": source.bases, "applied": min(source.written, default=-1)}
        return message_of(state)

    def _take_answer(self, head: dict[str, Any]) -> None:
        """Take a plan, or the answer of a sender that does not know this receiver.

        A run that answers a newer question than the present one did is alive: a dead one cannot have answered it.
        """
        (life, nonce), rank = head["nonce"], head["source"]
        if life != self._life or nonce > self._nonce:  # another's question, or none
            return
        given = self._source(head, nonce) if "cells" in head else None
        if head["run"] != self._run and nonce > self._run_since:
            self._run, self._run_since, self._refused = head["run"], nonce, None
            self._ranks, self._sources = None, {}
        if head["run"] != self._run:
            return
        if "refused" in head:
            self._refused = head["refused"]
            raise ValueError(f"Receiver: {self._refused}")
        if head["kind"] == "hello":
            if rank in self._sources and nonce > self._sources[rank].nonce:
                del self._sources[rank]
            return
        if self._ranks not in (None, head["ranks"]):
            raise wrong(_VERB, f"ranks {head['ranks']} send, and not {self._ranks}")
        self._ranks = head["ranks"]
        if given is not None and rank not in self._sources and rank in head["ranks"]:
            self._sources[rank] = given
            if all(each in self._sources for each in head["ranks"]):
                self._complete(head["names"])

    def _source(self, head: dict[str, Any], nonce: int) -> _Source:
        """Return the sender with the cells that it lists.

        Raises:
            ValueError: no sender lists them. _messages.py, [Note: What anybody may send]
        """
        asked = [_cells.Asked(name, tuple(start), tuple(shape), dtype) for name, start, shape, dtype in head["asked"]]
        try:
            if self._layout is not None and asked != self._layout:
                raise ValueError("it is not of what was asked for")
            if any(len(each.start) != len(each.shape) or min(each.shape, default=0) < 0 for each in asked):
                raise ValueError("it has shapes that no tensor has")
            if min(head["ranks"], default=0) < 0:
                raise ValueError("it has ranks that are none")
            cells = [[_cells.Region(n, tuple(at), tuple(sizes)) for n, at, sizes in cell] for cell in head["cells"]]
            return _Source(asked, cells, nonce)
        except ValueError as e:
            raise wrong(_VERB, str(e)) from None

    def _complete(self, names: str) -> None:
        """Allocate memory when all senders have answered: each element must come from one."""
        asked = self._agreed()
        found = [0] * len(asked)
        for source in self._sources.values():
            for number, _, sizes in itertools.chain.from_iterable(source.cells):
                found[number] += math.prod(sizes)
        for each, count in zip(asked, found, strict=True):
            if count == math.prod(each.shape) or (self._targets is None and not count):
                continue
            if self._targets is None:
                raise self._incoherent(f"{count} of {math.prod(each.shape)} elements of {each.name!r}")
            had = f"{count} of {math.prod(each.shape)} elements" if count else "no element"
            there = f". Its module has {names}" if names and not count else ""
            self._refused = f"the senders have {had} of what is asked for of {each.name!r}{there}"
            raise ValueError(f"Receiver: {self._refused}")
        tensors = self._tensors(asked)
        for source in self._sources.values():
            source.places = [_cells.Places(cell, tensors) for cell in source.cells]

    def _agreed(self) -> list[_cells.Asked]:
        """Return the regions on which all senders agree. Only senders with elements know their dtypes."""
        first, *others = (source.asked.copy() for source in self._sources.values())
        for other in others:
            for number, (one, two) in enumerate(itertools.zip_longest(first, other)):
                dtypes = {each.dtype for each in (one, two) if each is not None and each.dtype}
                if one is None or two is None or one[:3] != two[:3] or len(dtypes) > 1:
                    raise self._incoherent(f"{one} and {two}")
                first[number] = one._replace(dtype=one.dtype or two.dtype)
        return first

    def _incoherent(self, what: str) -> ValueError:
        """Forget all senders, as their models differ. They are asked again: any of them may be wrong."""
        self._sources = {}
        return wrong(_VERB, f"senders have {what}")

    def _tensors(self, asked: list[_cells.Asked]) -> list[torch.Tensor]:
        if self._targets is not None:
            return [target.tensor for target in self._targets]
        nothing = torch.empty(0, device="cpu")  # in place of what no sender has an element of
        for each in asked:
            tensor = self.weights.get(each.name, nothing)
            if each.dtype and (tuple(tensor.shape) != each.shape or tensor.dtype != each.kind):
                self.weights[each.name] = torch.empty(each.shape, dtype=each.kind, device=self._device)
        return [self.weights.get(each.name, nothing) for each in asked]

    def _take_update(self, source: _Source, head: dict[str, Any], payload: memoryview) -> None:
        version, index = head["version"], head["index"]
        update = source.updates.get(version, _Update())
        if version <= min(source.bases) or index in update.messages:
            return
        self._sections(source, payload)  # before it is kept
        if not self._has_room(len(payload), version):
            return
        source.updates[version] = update
        update.messages[index] = payload
        if head["last"]:
            update.count = index + 1

    def _take_cells(self, source: _Source, head: dict[str, Any], payload: memoryview) -> None:
        bases = source.bases
        for section in self._sections(source, payload):
            if head["version"] > bases[section.cell] and self._has_room(len(section.data), -1):
                source.fresh[section.cell] = head["version"], section.data
        source.drop_old()

    def _sections(self, source: _Source, payload: memoryview) -> list[_codec.Section]:
        try:
            return list(_codec.sections(payload, source.kinds))
        except ValueError as e:
            raise wrong(_VERB, str(e)) from None

    def _has_room(self, nbytes: int, version: int) -> bool:
        """Return whether ``nbytes`` more may be kept. Later versions are dropped for them, and asked for again."""
        most = sum(source.whole_nbytes for source in self._sources.values()) + _SLACK
        while self.held_nbytes + nbytes > most:
            later = [(v, source) for source in self._sources.values() for v in source.updates if v > version]
            if not later:
                return False
            last, source = max(later, key=lambda each: each[0])
            del source.updates[last]
        return True

    # -- the weights ---------------------------------------------------------------------------------------------------

    def apply(self) -> AppliedVersion | None:
        """Write the newest complete version into the weights, and confirm it. Call it while nobody reads the weights.

        Returns:
            The changes, or None if no newer version is complete: ``print(receiver)`` names the ranks with missing data.

        Raises:
            ValueError: the senders lack parameters that are asked for.
        """
        with self._lock, torch.no_grad():
            if self._refused is not None:
                raise ValueError(f"Receiver: {self._refused}")
            version = self._newest_complete()
            if version is None:
                return None
            self.version = None
            try:
                names = {name for source in self._sources.values() for name in source.write(version)}
            except BaseException:  # the weights are no version now. [Note: All or nothing]
                for source in self._sources.values():
                    source.lose()
                raise
            self.version = version
            receipts = [(rank, self._state(rank, asks=False)) for rank in self._known()]
        for rank, message in receipts:
            self._send(rank, message)
        return AppliedVersion(version, frozenset(names))

    def _newest_complete(self) -> int | None:
        """Return the newest complete version, or None if the weights have it. [Note: All or nothing]"""
        if self._ranks is None or any(rank not in self._sources for rank in self._ranks):
            return None
        sources = [source for source in self._sources.values() if source.cells]
        version = min((source.newest for source in sources), default=-1)
        if version < max((max(source.bases) for source in sources), default=0) or all(
            base == version for source in sources for base in source.written
        ):
            return None
        return version


def _detached(target: Target) -> Target:
    tensor = target.tensor.detach()
    start = (0,) * tensor.dim() if target.start is None else tuple(target.start)
    if len(start) != tensor.dim():
        raise ValueError(
            f"Receiver: the target of {target.name!r} has shape {tuple(tensor.shape)}, and its start {start}: one number for "
            "each dimension. The tensor must be a view of the parameter's dimensions"
        )
    return Target(target.name, tensor, start)


def _asked(target: Target) -> _cells.Asked:
    assert target.start is not None
    return _cells.Asked(target.name, target.start, tuple(target.tensor.shape), _cells.dtype_name(target.tensor.dtype))
