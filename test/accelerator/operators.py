"""Operators on the simulated accelerator: record reads and writes now, and run the same operator on CPU later.

A kernel holds no memory, like a real one. It gets addresses, and the allocator may reuse them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from accelerator.machine import Key, Machine, lines_of, stack_here
from torch.utils._pytree import tree_map

NAME = "simdev"
_RANDOM = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_")
_IN_FLOAT32 = ("native_layer_norm", "native_layer_norm_backward")
"""Operators that keep float32 statistics for 16-bit inputs, as on CUDA. CPU refuses these dtypes."""


def is_sim(value: Any) -> bool:
    """Return whether ``value`` is a tensor on the device."""
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def extent(t: torch.Tensor) -> tuple[int, int]:
    """Return the first and end address of the tensor."""
    if t.numel() == 0:
        return 0, 0
    ptr = t.data_ptr()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if ptr == 0 or t.untyped_storage().nbytes() < (t.storage_offset() + last + 1) * t.itemsize:
        stack = "\n".join(lines_of(stack_here()))
        raise RuntimeError(f"a kernel would use a tensor of shape {tuple(t.shape)} whose storage is freed\n{stack}")
    return ptr, ptr + (last + 1) * t.itemsize


class Late:
    """A kernel's argument: the address of a tensor on the device or the host."""

    def __init__(self, shim: Any, t: torch.Tensor) -> None:
        self._shim = shim
        self._where = t.data_ptr(), list(t.shape), list(t.stride()), t.dtype
        self._conj, self._neg = t.is_conj(), t.is_neg()

    def now(self) -> torch.Tensor:
        """Return a CPU tensor on the same bytes."""
        made = self._shim.from_ptr(*self._where)
        made = torch._conj(made) if self._conj else made
        return torch._neg_view(made) if self._neg else made


def _now(value: Any) -> Any:
    return value.now() if isinstance(value, Late) else value


def _now_in_float32(value: Any) -> Any:
    value = _now(value)
    return value.float() if isinstance(value, torch.Tensor) and value.dtype.itemsize == 2 else value


def _to_meta(value: Any) -> Any:
    if is_sim(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("meta")
    return value


def _map(f: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_map(f, v) for v in value]
    if isinstance(value, dict):
        return {k: _map(f, v) for k, v in value.items()}
    return f(value)


def _identity(value: Any) -> Any:
    """Return a hashable key, equal for arguments with equal meta results."""
    if isinstance(value, torch.Tensor):
        number = value.item() if value.device.type == "cpu" and value.dim() == 0 else None
        return value.device.type, value.shape, value.stride(), value.dtype, value.is_conj(), number
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    if isinstance(value, dict):
        return tuple((k, _identity(v)) for k, v in value.items())
    return type(value), repr(value) if isinstance(value, float) else value


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [t for v in value for t in _tensors_in(v)]
    return [value] if isinstance(value, torch.Tensor) else []


class Operators:
    """The dispatcher's implementations for tensors of the device."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._metas: dict[Any, Any] = {}  # results on the meta device, by operator and arguments

    def register(self, everything: torch.library.Library, aten: torch.library.Library) -> None:
        everything.fallback(self.call, "PrivateUse1")
        aten.impl("_copy_from", self.copy, "PrivateUse1")
        for key in ("Conjugate", "Negative"):  # otherwise torch resolves a conjugated tensor through this same copy
            aten.impl("_copy_from", torch.library.fallthrough_kernel, key)
        aten.impl("_copy_from_and_resize", self.copy_and_resize, "PrivateUse1")
        aten.impl("_local_scalar_dense", self.item, "PrivateUse1")
        aten.impl("record_stream", self.record_stream, "PrivateUse1")

    def late(self, value: Any) -> Any:
        """Return the argument in the form that a kernel gets."""
        if is_sim(value):
            return Late(self.machine.shim, value)
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return value.clone()  # a number, read when the kernel is launched
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        return value

    def stream_of(self, t: torch.Tensor) -> Key:
        """Return the current stream of the tensor's device."""
        return self.machine.current(t.device.index)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator without an implementation of its own for the device."""
        schema = op._schema
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [a.name for a in schema.arguments if a.name in given and a.alias_info and a.alias_info.is_write]
        writes = [t for name in written for t in _tensors_in(given[name])]
        reads = [t for name, value in given.items() if name not in written for t in _tensors_in(value)]
        if odd := [t.device for t in writes if not is_sim(t)]:
            raise RuntimeError(f"{op}: it would write to {odd[0]} from the simulated device")
        sims = [t for t in reads + writes if is_sim(t)]
        device = sims[0].device if sims else given.get("device") or torch.device(NAME)
        if len({t.device for t in sims}) > 1:
            raise RuntimeError(f"{op}: tensors on several devices: { {t.device for t in sims} }")
        index = self.machine.shim.current()[0] if device.index is None else device.index
        key, name = self.machine.current(index), schema.name.split("::")[-1]
        arguments = [*args], kwargs

        if not writes and any(r.alias_info is not None for r in schema.returns):
            return self._view(op, sims[0], *arguments)
        if name in _RANDOM:
            return self._fill(op, key, name, *arguments)
        is_out = any(a.is_out for a in schema.arguments)
        outs = None
        if is_out or not writes:
            try:
                outs = self._on_meta(op, *arguments)
            except (NotImplementedError, RuntimeError):
                if is_out:
                    raise
                return self._wait_and_call(op, key, name, device, *arguments)
        if is_out:
            metas = _tensors_in(outs)
            for target, meta in zip(writes, metas, strict=False):
                if target.shape != meta.shape:
                    target.resize_(meta.shape)
        late_args, late_kwargs = _map(self.late, arguments[0]), _map(self.late, kwargs)
        read = [extent(t) for t in reads if is_sim(t)]
        if writes:

            def change() -> None:
                op(*_map(_now, late_args), **_map(_now, late_kwargs))

            self.machine.enqueue(key, name, change, read, [extent(t) for t in writes])
            results = [given[name] for name in written]
            # Results besides the changed arguments are not supported: few operators have any.
            return None if not schema.returns else results[0] if len(schema.returns) == 1 else tuple(results)

        where = torch.device(NAME, index)
        made = tree_map(
            lambda m: (
                torch.empty_strided(m.shape, m.stride(), dtype=m.dtype, device=where)
                if isinstance(m, torch.Tensor)
                else m
            ),
            outs,
        )
        targets = [self.late(t) for t in _tensors_in([made])]

        ready = _now_in_float32 if name in _IN_FLOAT32 else _now

        def compute() -> None:
            got = op(*_map(ready, late_args), **_map(ready, late_kwargs))
            for target, value in zip(targets, _tensors_in([got]), strict=True):
                target.now().copy_(value)

        self.machine.enqueue(key, name, compute, read, [extent(t) for t in _tensors_in([made])])
        return made

    def _on_meta(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Return the result on the meta device, cached because computing it takes longer than the kernel."""
        key = op, _identity(args), _identity(kwargs)
        if key not in self._metas:
            self._metas[key] = op(*_map(_to_meta, args), **_map(_to_meta, kwargs))
        return self._metas[key]

    def _view(self, op: Any, source: torch.Tensor, args: Any, kwargs: Any) -> Any:
        made = self._on_meta(op, args, kwargs)
        offset = source.storage_offset()
        return tree_map(lambda m: torch.as_strided(source, m.shape, m.stride(), offset + m.storage_offset()), made)

    def _fill(self, op: Any, key: Key, name: str, args: Any, kwargs: Any) -> torch.Tensor:
        """Draw random numbers now, so that they equal those of a run on CPU."""
        target = args[0]
        drawn = torch.empty(target.shape, dtype=target.dtype)
        op(drawn, *_map(_now, _map(self.late, args[1:])), **kwargs)
        to = self.late(target)
        self.machine.enqueue(key, name, functools.partial(_copy, to, drawn), [], [extent(target)])
        return target

    def _wait_and_call(self, op: Any, key: Key, name: str, device: Any, args: Any, kwargs: Any) -> Any:
        """Run now, after a wait, because the result's shape depends on values."""
        for t in _tensors_in(args):
            if is_sim(t):
                self.machine.enqueue(key, name, lambda: None, [extent(t)], [])
        self.machine.synchronize_stream(*key, why=f"{name} (the shape of its result, or a value, is needed)")
        values = op(*_map(_now, _map(self.late, args)), **_map(_now, _map(self.late, kwargs)))
        return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, values)

    # -- copies

    def copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Run ``target.copy_(source)`` like CUDA, with at least one tensor on the device."""
        if target.numel() == 0:
            return target
        if source.numel() != target.numel():
            source = source.expand(target.shape)
        if is_sim(source) and is_sim(target):
            self._copy_within(source, target)
        elif is_sim(target):
            self._copy_in(source, target, non_blocking)
        else:
            self._copy_out(source, target, non_blocking)
        return target

    def _copy_within(self, source: torch.Tensor, target: torch.Tensor) -> None:
        reads, writes = [extent(source)], [extent(target)]
        copying = functools.partial(_copy, self.late(target), self.late(source))
        self.machine.enqueue(self.stream_of(source), "copy_", copying, reads, writes)

    def _copy_in(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        machine, key, name = self.machine, self.stream_of(target), "copy from host"
        to = self.late(target)
        if non_blocking and _is_plain(source, target) and machine.is_pinned(source.data_ptr()):
            pinned = Late(machine.shim, source)  # reads the values at the time of the copy
            machine.enqueue(key, name, functools.partial(_copy, to, pinned), [extent(source)], [extent(target)])
            return
        value = source.detach().clone()
        machine.enqueue(key, name, functools.partial(_copy, to, value), [], [extent(target)])
        if not non_blocking:
            machine.synchronize_stream(*key, why=f"blocking copy of {source.numel()} numbers from the host")

    def _copy_out(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
        machine, key, name = self.machine, self.stream_of(source), "copy to host"
        late, ptr = self.late(source), target.data_ptr()
        if non_blocking and _is_plain(source, target) and machine.is_pinned(ptr):
            if not machine.is_used(ptr, target.nbytes):
                machine.shim.fill(ptr, target.nbytes, 255)  # a read before the copy sees NaN
            pinned = Late(machine.shim, target)
            machine.enqueue(key, name, functools.partial(_copy, pinned, late), [extent(source)], [extent(target)])
            return
        machine.enqueue(key, name, lambda: None, [extent(source)], [])
        machine.synchronize_stream(*key, why=f"blocking copy of {source.numel()} numbers to the host")
        target.copy_(late.now())

    def copy_and_resize(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.resize_(source.shape)
        return self.copy(source, target)

    def item(self, t: torch.Tensor) -> Any:
        key = self.stream_of(t)
        self.machine.enqueue(key, "item", lambda: None, [extent(t)], [])
        self.machine.synchronize_stream(*key, why="item")
        return self.late(t).now().item()

    def record_stream(self, t: torch.Tensor, stream: torch.Stream) -> None:
        if t.untyped_storage().nbytes():
            self.machine.record_stream(t.untyped_storage().data_ptr(), stream.device_index, stream.stream_id)


def _copy(target: Late, source: Any) -> None:
    target.now().copy_(_now(source))


def _is_plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether a copy moves bytes unchanged, which a copy engine can do."""
    return source.dtype is target.dtype and source.is_contiguous() and target.is_contiguous()
