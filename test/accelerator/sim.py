"""``simdev``: a simulated accelerator that runs late, reordered and checked work. Two devices on CPU memory.

Importing this module registers it with torch permanently, so do it in a separate process (``harness.py`` has a pool).
Tensors may then be on ``torch.device("simdev")``, ``torch.simdev`` corresponds to ``torch.cuda``, and ``sim`` is the
machine.

Each stream has a queue of kernels. They run when the host waits (``.item()``, a blocking copy, ``synchronize``), in an
order that streams and events allow. ``sim.policy`` selects the order:

- ``late_side``: the default stream first, side streams only when another stream waits for them;
- ``late_main``: side streams first;
- ``random``: any.

The allocator is the worst allowed caching allocator. Freed memory belongs to the stream of its allocation, and that
stream's next allocation may reuse it immediately: its kernels then overwrite it with NaN. Pinned memory is written and
read when the copy runs. So a missing wait gives NaN or old numbers.

Every access is checked with vector clocks, like torch.cuda._sanitizer: under any policy, ``sim.races`` lists unordered
pairs of accesses to the same bytes, with both stacks. ``sim.host_syncs`` lists waits of the host. ``sim.capture()``
enforces the rules of CUDA graphs.

An operator computes on CPU, on the same bytes. Limits: no time, no occupancy; the replay of a graph runs one kernel after the
other; results have the meta device's dtypes; host memory is checked only if it is pinned, in copies and in operators inside a
``HostWatch``.
"""

import atexit
import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from accelerator import build
from accelerator.machine import CaptureError, Machine
from accelerator.operators import NAME, Operators, is_sim

__all__ = ["NAME", "CaptureError", "HostWatch", "operators", "shim", "sim"]

shim = build.load()
sim = Machine(shim)
operators = Operators(sim)


class Stream(torch.Stream):
    """``torch.simdev.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


class Event(torch.Event):
    """``torch.simdev.Event``."""

    def __new__(cls, enable_timing: bool = False, **kwargs: Any) -> Any:
        return super().__new__(cls, device=NAME, enable_timing=enable_timing)


class device:
    """``with torch.simdev.device(i)``."""

    def __init__(self, index: Any) -> None:
        self.index = index if isinstance(index, int) else torch.device(index).index

    def __enter__(self) -> None:
        self.before = current_device()
        if self.index is not None and self.index >= 0:
            shim.set_device(self.index)

    def __exit__(self, *_: Any) -> None:
        shim.set_device(self.before)


def current_device() -> int:
    return int(shim.current()[0])


def _index(d: Any) -> int:
    if d is None:
        return current_device()
    index = d if isinstance(d, int) else torch.device(d).index
    return current_device() if index is None else index


@contextlib.contextmanager
def stream(s: Any) -> Iterator[None]:
    """``with torch.simdev.stream(s)``."""
    if s is None:
        yield
        return
    device_before = current_device()
    before = torch.accelerator.current_stream(torch.device(NAME, s.device_index))
    torch.accelerator.set_stream(s)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        shim.set_device(device_before)


def _make_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        Stream=Stream,
        Event=Event,
        stream=stream,
        device=device,
        sim=sim,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: 2,
        current_device=current_device,
        set_device=lambda d: shim.set_device(_index(d)),
        current_stream=lambda d=None: torch.accelerator.current_stream(torch.device(NAME, _index(d))),
        default_stream=lambda d=None: Stream(stream_id=0, device_index=_index(d), device_type=20),
        set_stream=torch.accelerator.set_stream,
        synchronize=lambda d=None: sim.synchronize_device(_index(d)),
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda d=None: torch.get_rng_state(),
        set_rng_state=lambda state, d=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        memory_allocated=lambda d=None: sim.allocated,
        max_memory_allocated=lambda d=None: sim.peak,
        reset_peak_memory_stats=lambda d=None: setattr(sim, "peak", sim.allocated),
        empty_cache=lambda: None,
        is_current_stream_capturing=lambda: sim.is_capturing,
    )
    return module


def _allow_setting_data() -> None:
    """Allow ``p.data = ...`` between the device and the CPU: torch allows it for CUDA only."""
    importlib.import_module("torch._dynamo")  # reads the attributes replaced here
    data, compatible = torch._C.TensorBase.data, torch._has_compatible_shallow_copy_type

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        if is_sim(self) == is_sim(value):
            data.__set__(self, value)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                shim.set_data(self, value)

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    if (known := sys.modules.get("flatshard._handle.tensors.sharded_parameter")) is not None:
        known._plain_data = torch.Tensor.data  # type: ignore[attr-defined]  # as if it were imported from now on
    torch._has_compatible_shallow_copy_type = lambda a, b: is_sim(a) or is_sim(b) or compatible(a, b)


_libraries: list[torch.library.Library] = []  # registrations end with these objects


def _install() -> None:
    shim.install(sim)
    torch.utils.rename_privateuse1_backend(NAME)
    module = _make_module()
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _libraries[:] = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    operators.register(*_libraries)
    _allow_setting_data()
    atexit.register(lambda: setattr(sim, "checked", False))


_install()


@functools.cache
def _watched(func: Any) -> tuple[str, tuple[bool, ...]]:
    """Return the operator's name and, per argument, whether it is written to; no arguments if no host values are read."""
    schema = func._schema
    if func.is_view or schema.name in ("aten::_copy_from", "aten::_to_copy", "aten::copy_", "aten::empty_like"):
        return schema.name, ()
    return schema.name, tuple(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


class HostWatch(torch.utils._python_dispatch.TorchDispatchMode):
    """Reports unordered accesses by code on the CPU and by the device as races."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a wrapper around each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, writes = _watched(func)
        if name == "aten::copy_":
            writes = (True, False) if args[0].device.type == args[1].device.type else ()
        for value, write in zip(args, writes, strict=False):
            for t in value if isinstance(value, list | tuple) else [value]:
                if isinstance(t, torch.Tensor) and t.layout is torch.strided:
                    self._look_at(t, write, name)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _look_at(t: torch.Tensor, write: bool, name: str) -> None:
        if t.device.type == "cpu" and t.numel():
            sim.host_access(t.data_ptr(), t.numel() * t.itemsize, write, name)
