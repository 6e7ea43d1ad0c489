"""Recording of one rank's step: collectives and operations (``Recorder``), and memory (``Books``).

[Note: What is counted]
Tensors on the meta device have no memory, but their storages have a size, are resized and are freed like real ones. ``Books``
sees every operation, and so every new storage. The file that called the operation gives the category: files of reductions
(``_OF_REDUCTIONS``) and collectives: "reductions"; kept shards and other files of the handle: "unsharded"; any other file:
"activations". A storage changes its category when it becomes a gradient of autograd ("arriving"), or ``.grad`` ("gradients").

[Note: Operations computed once]
The result of an operation on meta follows from the shapes, strides and dtypes of its tensors and from its other arguments.
Models repeat their blocks, and many operations on meta run in Python. So an operation runs once for the same arguments: the
second time a tensor like the first result is made, or the tensor that the operation would write is returned. Views always
run, and so does any other operation that returns memory that it was given.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard._base import frames
from flatshard._comm import mesh_runtime
from flatshard._comm.backends import BuiltinCollectives
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import Label
from flatshard._composable.features import kept_shards
from flatshard._handle import gradients, reduction, unsharded
from flatshard._handle.unsharded import FlatBuffer
from flatshard.planning._axes import DTensorGroups
from flatshard.planning._on_meta import computed
from flatshard.planning._records import CATEGORIES, Memory, MemoryPair, PlannedCollective, Sample
from flatshard.planning._values import Values


class Recorder:
    """The place in a step, and the collectives issued so far.

    It has the functions of ``torch.cuda`` that ``Streams`` uses: ``Stream``, ``current_stream`` and ``stream``. Time does not
    pass: what is in memory depends on the order of the program only.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self.phase, self.unit = "forward", ""
        self.collectives: list[PlannedCollective] = []
        self.flops: Counter[str] = Counter()  # by the unit that runs
        self.main = self.current = RecordedStream(self)

    def Stream(self, device: torch.device, priority: int) -> RecordedStream:
        return RecordedStream(self)

    def current_stream(self, device: int | None) -> RecordedStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class RecordedStream:
    """A stand-in for a stream, an event or a collective, whose work is done at once."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def wait_stream(self, other: RecordedStream) -> None:
        """Do nothing: what is issued is done at once."""

    wait_event = wait_stream

    def record_event(self) -> RecordedStream:
        return RecordedStream(self._recorder)

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: what is issued is done at once."""


class _LiveStorage(NamedTuple):
    """A storage that exists."""

    ref: weakref.ref[torch.UntypedStorage]
    category: str
    on_host: bool
    nbytes: int


class Books(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the memory and floating-point operations of all operations. [Note: What is counted]"""

    def __init__(self, recorder: Recorder, made: MadeOnce, dtensor_groups: DTensorGroups | None = None) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder, self._flops_of = recorder, flop_registry
        self.samples: list[Sample] = []
        # Bytes by category: on the device, and on the host.
        self._nbytes = (dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0))
        self._storages: dict[int, _LiveStorage] = {}  # by id
        self._has_changed, self._looked_at = True, ("", "")  # since ``look`` was last called, and where that was
        self._made, self._dtensor_groups = made, dtensor_groups or DTensorGroups(())
        self.values = Values()

    def track(self, tensors: Iterable[torch.Tensor], category: str, on_host: bool = False) -> None:
        """Count the storages of ``tensors`` in ``category`` from now on. Storages on the host stay there."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)
            known = self._storages.get(key)
            self._end(key)
            ref = weakref.ref(storage, functools.partial(self._end, key))
            at = on_host or (known is not None and known.on_host)
            live = _LiveStorage(ref, category, at, storage.nbytes())
            self._storages[key] = live
            self.add(category, live.nbytes, live.on_host)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the present size of a storage that ``track`` knows."""
        key = id(storage)
        if (live := self._storages.get(key)) is None:  # of no elements: it never has memory
            return
        self._storages[key] = live._replace(nbytes=storage.nbytes())
        self.add(live.category, storage.nbytes() - live.nbytes, live.on_host)

    def add(self, category: str, nbytes: int, on_host: bool) -> None:
        """Count that many bytes more."""
        self._nbytes[on_host][category] += nbytes
        self._has_changed = True

    def _end(self, key: int, ended: object = None) -> None:
        if (live := self._storages.pop(key, None)) is not None:
            self.add(live.category, -live.nbytes, live.on_host)

    def look(self) -> None:
        """Record what is in memory now, if the step is recorded."""
        recorder = self.recorder
        if not recorder.is_recording:
            return
        at = recorder.phase, recorder.unit
        if not (self._has_changed or at != self._looked_at):
            return
        self._has_changed, self._looked_at = False, at
        sample = Sample(*at, *self.now())
        if not self.samples or self.samples[-1] != sample:
            self.samples.append(sample)

    def now(self) -> MemoryPair:
        """Return the memory on the device and on the host."""
        device, host = self._nbytes
        return Memory(**device), Memory(**host)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps `__torch_dispatch__`, and imports torch._dynamo, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(hasattr(each, "_local_tensor") for each in types):
            return NotImplemented  # a DTensor computes with its local tensors, which come here
        if func is _LOCAL_SCALAR and _category(frames.of_caller(1)) != "activations":
            return True  # the answer to "did no rank use this parameter?": all ranks do what this one does
        result = self.values.call(func, args, kwargs, functools.partial(self._made, func, args, kwargs))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if id(storage) not in self._storages and storage.nbytes():
                    on_host = bool(kwargs.get("pin_memory"))  # under CPU offload
                    self.track([tensor], "gradients" if on_host else _category(frames.of_caller(1)), on_host)
        if self.recorder.is_recording:
            if (formula := self._flops_of.get(func._overloadpacket)) is not None:
                self.recorder.flops[self.recorder.unit] += int(formula(*args, **kwargs, out_val=result))
            if (sent := self._dtensor_groups.collective(func, args, result)) is not None:
                kind, nbytes, (name, ranks) = sent
                self.recorder.collectives.append(
                    PlannedCollective(kind, self.recorder.unit, self.recorder.phase, nbytes, ranks, name)
                )
            self.look()
        return result


class CountedBuffer(FlatBuffer):
    """A buffer that tells ``books`` when it is resized."""

    __slots__ = ("books",)

    def __init__(self, books: Books, flat: torch.Tensor) -> None:
        super().__init__(flat)
        self.books = books
        books.resized(self._storage)

    def take(self, user: object) -> None:
        """Allocate the memory, for ``user``."""
        super().take(user)
        self.books.resized(self._storage)

    def free(self) -> None:
        """Free the memory."""
        super().free()
        self.books.resized(self._storage)


class MadeOnce:
    """The operations that have run on meta, and their results by arguments. [Note: Operations computed once]"""

    def __init__(self, device: str) -> None:
        self._on_cpu = device == "cpu"
        self._results: dict[Any, Any] = {}  # how to make the results, by the operation and its arguments

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``."""
        makes, is_foreach = _kind(func)
        if makes is None or not (makes or _written(args, kwargs).is_meta):
            return _each_once(func, args) if is_foreach and not kwargs else func(*args, **kwargs)
        try:
            key = func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ()
            known = self._results.get(key)
        except TypeError:  # an argument is not hashable
            return computed(func, args, kwargs, self._on_cpu)
        if known is not None:
            return _like(known) if makes else _written(args, kwargs)
        result = computed(func, args, kwargs, self._on_cpu)
        described = _described(result, args, kwargs) if makes else ()
        is_as_before = makes or _signature(tuple(kwargs.items())) == key[2]  # else it has resized ``out``
        if described is not None and is_as_before:
            self._results[key] = described
        return result


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensor that an operation writes and returns."""
    return kwargs["out"] if "out" in kwargs else args[0]


def _each_once(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of ``func``, an operation on each element of lists, and run it only for elements that differ."""
    size = len(args[0])
    lists = [at for at, arg in enumerate(args) if isinstance(arg, list | tuple) and len(arg) == size]
    different: dict[Any, int] = {}
    try:
        keys = [_signature([args[at][number] for at in lists]) for number in range(size)]
    except TypeError:
        return func(*args)
    for number, key in enumerate(keys):
        different.setdefault(key, number)
    if len(different) == size:
        return func(*args)
    few = [[arg[n] for n in different.values()] if at in lists else arg for at, arg in enumerate(args)]
    made = func(*few)
    if made is None:
        return None
    described = [_described(each, few, {}) for each in made]
    if None in described:
        return func(*args)
    by_key = dict(zip(different, described, strict=True))
    return [_like(by_key[key]) for key in keys]


@functools.cache
def _kind(func: Any) -> tuple[bool | None, bool]:
    """Return whether the operation makes tensors, and whether it works on each element of lists.

    The first is False if it writes one tensor and returns it, and None for any other operation.
    """
    schema = func._schema
    if schema.name.startswith("aten::_foreach_"):
        return None, True
    if func.is_view or torch.Tag.inplace_view in func.tags or torch.Tag.data_dependent_output in func.tags:
        return None, False
    aliases = [a.alias_info is not None for a in (*schema.arguments, *schema.returns)]
    if not any(aliases):
        return True, False
    writes_one = len(schema.returns) == 1 and aliases[-1] and sum(aliases) == 2
    in_place = aliases[0] and schema.name.endswith("_") and not schema.name.endswith("__")
    return False if writes_one and (in_place or schema.arguments[-1].name == "out") else None, False


_LOCAL_SCALAR = torch.ops.aten._local_scalar_dense.default
_PLAIN = torch.Tensor, torch.nn.Parameter


def _signature(value: Any) -> Any:
    """Return the key of everything that determines an operation's result on meta.

    Raises:
        TypeError: there is no such key.
    """
    if isinstance(value, torch.Tensor):
        is_plain = type(value) in _PLAIN or type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not is_plain or value.layout is not torch.strided:
            raise TypeError
        if not value.is_meta:
            if value.dim() or not value.is_floating_point():
                raise TypeError
            return value.dtype, value.device  # no shape follows from a number
        return value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg()
    if isinstance(value, list | tuple):
        return tuple([_signature(each) for each in value])
    return type(value), value


def _described(result: Any, args: Any, kwargs: Any) -> Any:
    """Return how to make tensors and numbers like ``result``, or None if not all tensors are plain and new."""
    given = [t for v in (*args, *kwargs.values()) for t in (v if isinstance(v, list | tuple) else (v,))]
    return _described_new(result, {id(t.untyped_storage()) for t in given if isinstance(t, torch.Tensor)})


def _described_new(result: Any, given: set[int]) -> Any:
    """Return how to make ``result``, as ``_described``. ``given`` has the ids of the arguments' storages."""
    if isinstance(result, list | tuple):
        numbers = int, float
        parts = [
            () if each is None else (each,) if isinstance(each, numbers) else _described_new(each, given)
            for each in result
        ]
        own = [id(t.untyped_storage()) for t in result if isinstance(t, torch.Tensor)]
        return None if None in parts or len(set(own)) < len(own) else (type(result), parts)
    if type(result) is not torch.Tensor or result.layout is not torch.strided or result.device.type != "meta":
        return None
    if result.is_conj() or result.is_neg():
        return None
    made = result.shape, result.stride(), result.dtype
    storage = result.untyped_storage()
    is_new = id(storage) not in given
    return made if is_new and _like(made).untyped_storage().nbytes() == storage.nbytes() else None


def _like(described: Any) -> Any:
    if not described:
        return None
    if isinstance(described[0], type):
        kind, parts = described
        return kind(map(_like, parts))
    if len(described) == 1:
        return described[0]
    shape, stride, dtype = described
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


_HANDLE = str(Path(reduction.__file__).parent)
_BUFFERS = unsharded.__file__
_OF_REDUCTIONS = (gradients.__file__, reduction.__file__, mesh_runtime.__file__, __file__)


def _category(frame: Any) -> str:
    """Return the category of storages made by an operation that ``frame`` called. [Note: What is counted]"""
    paths = map(frames.file_of, frames.outward(frame))
    path = next(path for path in paths if path != _BUFFERS)  # pools allocate for their callers
    if path in _OF_REDUCTIONS:
        return "reductions"
    return "unsharded" if path.startswith(_HANDLE) or path == kept_shards.__file__ else "activations"


class _Received:
    """A reduction over gloo, which receives into memory of its own until it is waited for."""

    def __init__(self, pending: Pending, received: torch.Tensor) -> None:
        self._pending = pending
        self._received: torch.Tensor | None = received

    def wait(self) -> None:
        """Wait for the sums, and free the memory."""
        self._pending.wait()
        self._received = None


class RecordingCollectives(BuiltinCollectives):
    """The collectives of one rank of a group that does not exist. They send nothing, and record each call."""

    out_of_place = True
    group_name = ""  # ``group`` is this object

    def __init__(self, books: Books, name: str, rank: int, size: int, widens: bool, receives: bool = False) -> None:
        """``name``: see ``PlannedCollective.group``. ``receives``: a reduction receives into memory of its own."""
        self._books, self._recorder = books, books.recorder
        self._name = name
        self.rank, self.size = rank, size
        self.widens, self.receives = widens, receives

    @property
    def group(self) -> Any:
        """A stand-in for the process group. Nothing calls its methods."""
        return self

    def _issue(self, kind: str, tensor: torch.Tensor, group: str, label: Label | None) -> Pending:
        recorder = self._recorder
        if not recorder.is_recording:
            return Done()
        assert label is not None
        recorder.collectives.append(
            PlannedCollective(kind, label.unit, recorder.phase, tensor.nbytes, self.size, group)
        )
        self._books.look()
        return RecordedStream(recorder)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, label: Label | None = None) -> Pending:
        return self._issue("all-gather", output, self._name, label)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, label: Label | None = None) -> Pending:
        if input.dtype is not output.dtype and self._recorder.current is not self._recorder.main:
            torch.empty_like(input)  # what ``DefaultCollectives`` receives into, and frees when the stream is done
        if not self.receives:
            return self._issue("reduce-scatter", input, self._name, label)
        # Shards of all other ranks are one tensor here: thousands of tensors would take thousands of operations.
        received = input.new_empty((self.size - 1) * output.numel())
        return _Received(self._issue("reduce-scatter", input, self._name, label), received)

    def all_reduce(self, tensor: torch.Tensor, label: Label | None = None) -> Pending:
        return self._issue("all-reduce", tensor, "replicas" if self._name == "shards" else self._name, label)

    def combine(self, numbers: torch.Tensor, op: Literal["sum", "max"]) -> Pending:
        """See :class:`BuiltinCollectives`."""
        return Done()
