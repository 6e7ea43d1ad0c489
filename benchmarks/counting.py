"""Counts that do not depend on the machine: bytes copied, collectives and their payload, and live bytes of memory.

Benchmarks and tests (``test/core/test_counts.py``) use them.

[Copied bytes] An operation reads the bytes of its tensor arguments and writes those of its results. Views and allocations
move nothing. An argument that is only written (``copy_``, ``zero_``, ``out=``) is not read. Tensors without dimensions are
numbers, here and among live bytes. Operations of the process group (``c10d``) do not count, and :class:`Wire` replaces
flatshard's collectives, which copy over the fake group. FSDP2's ``all_gather_copy_in`` takes and returns the buffer of the
all-gather, of which it fills this rank's shard: it counts with its inputs, read and written. A kernel's internal traffic is
not visible.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import checkout  # noqa: F401
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from flatshard._comm.collectives import Done

_ONLY_WRITTEN = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
_COPY_IN = "fsdp::all_gather_copy_in"


def nbytes(value: Any) -> int:
    """Return the bytes of all tensors in ``value``."""
    return sum(t.numel() * t.itemsize for t in pytree.tree_leaves(value) if isinstance(t, Tensor))


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages behind tensors by address, each counted once. Freed storages have no address."""
    found = [t.untyped_storage() for t in tensors]
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


class CopiedBytes(TorchDispatchMode):
    """Bytes that operations read and write, by the operation's name (see above), and the number of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.by_operation: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.by_operation.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations += 1
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name.startswith(("empty", "new_empty", "c10d::")):
            return result
        arguments = func._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        if name == _COPY_IN:
            self.by_operation[name] += 2 * nbytes(given["all_gather_inputs"])
            return result
        changed = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        unread = [a.name for a in changed if a.is_out or name in _ONLY_WRITTEN]
        read = sum(nbytes(value) for key, value in given.items() if key not in unread and not _is_number(value))
        written = nbytes([given[a.name] for a in changed if a.name in given]) if changed else nbytes(result)
        self.by_operation[name] += read + written
        return result


class Wire:
    """Collectives for flatshard that move nothing, and record (kind, bytes in full)."""

    exact = True

    def __init__(self, out_of_place: bool = False, widens: bool = False) -> None:
        self.sent: list[tuple[str, int]] = []
        self.out_of_place, self.widens = out_of_place, widens

    def factory(self, group: object, device: object) -> Wire:
        """Return this object, as ``fully_shard(collectives=...)`` requires."""
        return self

    def _note(self, kind: str, tensor: Tensor) -> Done:
        self.sent.append((kind, tensor.nbytes))
        return Done()

    def all_gather(self, output: Tensor, shard: Tensor) -> Done:
        return self._note("all-gather", output)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Done:
        return self._note("reduce-scatter", input)

    def all_reduce(self, tensor: Tensor) -> Done:
        return self._note("all-reduce", tensor)


class Sent(TorchDispatchMode):
    """A record of (kind, bytes in full) of the process group's collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            if "gather" in name:
                self.sent.append(("all-gather", nbytes(args[0])))
            elif "reduce_scatter" in name:
                self.sent.append(("reduce-scatter", nbytes(args[1])))
            elif "reduce" in name:
                self.sent.append(("all-reduce", nbytes(args[0])))
            else:
                self.sent.append((name, nbytes(args[0])))
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Live bytes of the storages that operations used while this was active: now, and at the peak.

    The count is exact. A weak reference to each storage's C++ implementation counts it once, with its present size as it may
    be resized, until it is freed. The total is updated after every operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.watching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
        if self.watching:
            self.peak = max(self.peak, self.now())
        return result

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Track the storages behind these tensors, too."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor):  # a DTensor has no storage of its own
                names, _ = tensor.__tensor_flatten__()
                self.add(t for t in (getattr(tensor, name) for name in names) if isinstance(t, Tensor))
                continue
            if tensor.device.type == "meta" or not tensor.dim():
                continue
            storage = tensor.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None or known.expired():
                self._known[storage._cdata] = StorageWeakRef(storage)

    def now(self) -> int:
        """Return the live bytes."""
        total, gone = 0, []
        revive = torch.UntypedStorage._new_with_weak_ptr
        for key, reference in self._known.items():
            storage = revive(reference.cdata)
            if storage is None:
                gone.append(key)
            else:
                total += storage.nbytes()
        for key in gone:
            del self._known[key]
        return total

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record ``peak`` inside. Python's garbage collector is off, so objects that only it would free count as live."""
        gc.collect()
        gc.disable()
        self.peak, self.watching = self.now(), True
        try:
            yield
        finally:
            self.watching = False
            gc.enable()
