"""``offload_training_state``: moves parameters, gradients and optimizer state to host memory between phases, and back.

[Note: An offloaded unit]
The shard of an offloaded unit is on the host, as with ``cpu_offload=True``, and its parameters are slices of it, so code that
reads or saves them works. A claim on the unit refuses forwards: they would run, but fill the device again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.errors import name_list
from flatshard._base.old_names import OldMember
from flatshard._base.optimizers import Optimizers, as_list
from flatshard._comm.streams import Streams
from flatshard._composable.claims import KEPT, Claim, Need, Reason
from flatshard._composable.features.grad_sync import check_reduced
from flatshard._composable.state import Unit
from flatshard._handle.flat_param import FlatParam
from flatshard.checkpoint._state_dict import idle_flats
from flatshard.optim._host_state import map_plain
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._owned import plain

At = tuple[nn.Parameter, str]
"""A value of an optimizer's state, by its parameter and key."""
_CPU = torch.device("cpu")


class _Away(Claim):
    """The claim on an offloaded unit. [Note: An offloaded unit]"""

    need = Need.BUFFER

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn

    def check_forward(self, grad: bool) -> None:
        """Raise: an offloaded unit has no forward."""
        raise RuntimeError(
            f"a forward of unit {self._fqn or '<root>'!r}, whose parameters are in host memory "
            "(flatshard.optim.offload_training_state): call restore() on what offload_training_state returned, or leave its "
            "`with` block, and then the model"
        )


class OffloadHandle:
    """Everything that :func:`offload_training_state` has moved to the host. A context manager that moves it back at its end.

    Example::

        away = flatshard.optim.offload_training_state(model, optimizer)
        print(away)  # bytes on the host, and bytes that remain on the device
        away.restore()
    """

    def __init__(self, module: nn.Module, flats: list[tuple[Unit, FlatParam]]) -> None:
        self._module = module
        self._flats = [flat for _, flat in flats]
        self._units = {unit: _Away(unit.fqn) for unit, flat in flats if flat.kind.device.type != "cpu"}
        self._grads: list[nn.Parameter] = []  # whose gradients have moved
        self._states: dict[Optimizer, set[At]] = {}  # the values of its state that have moved
        self._read: list[torch.Tensor] = []  # sources of copies that may be running
        self.host_nbytes = 0
        """Bytes that have moved to the host."""
        self.seconds = 0.0
        """Duration of the moves to the host."""

    @property
    def device_nbytes(self) -> int:
        """Bytes of the module and optimizers on accelerators now: buffers, parameters in no unit, static buffers."""
        found: list[torch.Tensor | None] = [*self._module.parameters(), *self._module.buffers()]
        found += [p.grad for p in (*self._owners(), *self._module.parameters())]
        found += [value for optimizer in self._states for _, value in _values(optimizer)]
        there = {id(t): t.nbytes for t in found if t is not None and t.device.type not in ("cpu", "meta")}
        flats = [flat for flat in self._flats if flat.kind.compute_device.type != "cpu"]
        pools = (pool for flat in flats if (pool := flat.ranks.pool) is not None)
        static = {buffer: buffer.flat.nbytes for pool in pools for buffer in pool.buffers}
        gathered = [flat.unsharded.nbytes for flat in flats if flat.ranks.pool is None]
        return sum(there.values()) + sum(static.values()) + sum(gathered)

    def __repr__(self) -> str:
        if not self._units:
            return "OffloadHandle (nothing: the parameters were on the host)"
        if not any(claim in unit.claims for unit, claim in self._units.items()):
            return "OffloadHandle (all is back)"
        return (
            f"OffloadHandle ({len(self._units)} units; {self.host_nbytes:,} bytes on the host, in {self.seconds:.2f} s; "
            f"{self.device_nbytes:,} bytes remain on the device)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    back = OldMember("restore")

    def restore(self) -> None:
        """Move everything back to the device, with changes that were made meanwhile. Idempotent."""
        try:
            for unit, claim in self._units.items():
                if claim in unit.claims:
                    self._rehome(unit, to_host=False)
                    unit.claims.remove(claim)
            for param in self._grads:
                if param.grad is not None:
                    param.grad = self._copied(plain(param.grad), param.device)
            self._grads.clear()
            for optimizer, moved in self._states.items():
                for at, value in _values(optimizer):
                    if at in moved:
                        optimizer.state[at[0]][at[1]] = self._copied(value, at[0].device)
            self._states.clear()
        finally:
            self._wait()

    def _out(self, optimizers: list[Optimizer], gradients: bool) -> None:
        """Move everything to the host."""
        start = time.perf_counter()
        try:
            for unit, claim in self._units.items():
                self._rehome(unit, to_host=True)
                unit.claims.append(claim)
            for param in self._owners() if gradients else ():
                if param.grad is not None and param.grad.device.type != "cpu":
                    param.grad = self._copied(plain(param.grad), _CPU)
                    self._grads.append(param)
            for optimizer in optimizers:
                moved = self._states[optimizer] = set[At]()
                for at, value in _values(optimizer):
                    if at[0].device.type == "cpu" and value.device.type != "cpu":
                        optimizer.state[at[0]][at[1]] = self._copied(value, _CPU)
                        moved.add(at)
        finally:
            self._wait()
        self.seconds = time.perf_counter() - start

    def _owners(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters with the gradients of units: the user's, and those of ``flat_parameters``."""
        for flat in self._flats:
            yield from flat.owners

    def _rehome(self, unit: Unit, to_host: bool) -> None:
        """Move the shards of a unit."""
        handle = unit.handle
        handle.check_parameters()
        unit.release(Reason.ASKED)
        handle.drop_kept()
        with torch.inference_mode(False), torch.no_grad():
            for flat in handle.flats:
                if flat.kind.compute_device.type != "cpu":
                    self._read.append(flat.rehome(_CPU if to_host else flat.kind.compute_device))
                    self.host_nbytes += flat.shard.nbytes if to_host else 0
        handle.check_parameters()

    def _copied(self, value: torch.Tensor, device: torch.device) -> torch.Tensor:
        on_host = device.type == "cpu"

        def copied(source: torch.Tensor) -> torch.Tensor:
            self._read.append(source)
            self.host_nbytes += source.nbytes if on_host else 0
            return torch.empty_like(source, device=device, pin_memory=on_host).copy_(source, non_blocking=True)

        with torch.no_grad():
            return map_plain(value, copied)

    def _wait(self) -> None:
        """Wait for all copies, and free the memory that they read."""
        devices = {tensor.device for tensor in self._read} | {f.kind.compute_device for f in self._flats}
        for device in devices:
            if (streams := Streams.of(device)) is not None:
                streams.record().wait_on_host()
        self._read.clear()
        for device in devices:
            if device.type != "cpu":
                torch.get_device_module(device).empty_cache()


def offload_training_state(module: nn.Module, optimizers: Optimizers = (), *, gradients: bool = True) -> OffloadHandle:
    """Move the training state on the device to host memory until ``restore()``: the device is free, as for generation.

    All shards of ``module``, their gradients, and the state of ``optimizers`` move to pinned memory, and the device's memory
    is released to other processes. Meanwhile parameters on the host may be saved, loaded, changed and exported; a forward
    raises. Module buffers and parameters in no unit remain, and the result counts them. Everything comes back with the same
    bits in the same objects. No communication.

    Without an accelerator, or with ``cpu_offload=True``, nothing moves and forwards run: the result says so.

    Example::

        with flatshard.optim.offload_training_state(model, optimizer) as away:
            print(away)  # the bytes on the host, and those that remain on the device

    Args:
        module: a sharded module, outside of forward and backward. A backward of a forward that ran before raises.
        optimizers: one or several. State of an ``OffloadedOptimizer`` is on the host anyway.
        gradients: whether gradients move. If not, no optimizer can step until ``restore()``.

    Returns:
        A context manager, which moves everything back by ``restore()`` or at the end of its ``with`` block.

    Raises:
        RuntimeError: inside a forward, a backward, ``summon_full_params`` or ``keep_unsharded``; or gradients are held
            (``no_sync``). Nothing has moved.
        ValueError: nothing in ``module`` is sharded, or some of it is offloaded already.
    """
    flats = idle_flats(module, "offload_training_state")
    units = list(dict.fromkeys(unit for unit, _ in flats))
    if any(isinstance(claim, _Away) for unit in units for claim in unit.claims):
        raise ValueError("offload_training_state: some of it is offloaded already: call restore() on that result first")
    if kept := [u.fqn for u in units if any(c is not KEPT for c in u.claims)]:
        raise RuntimeError(
            f"offload_training_state: {name_list(kept, 3)} are kept unsharded (keep_unsharded): leave that block first"
        )
    check_reduced(units, "offload_training_state")
    result = OffloadHandle(module, flats)
    try:
        result._out([o for o in as_list(optimizers) if not isinstance(o, OffloadedOptimizer)], gradients)
    except BaseException:
        result.restore()
        raise
    return result


def _values(optimizer: Optimizer) -> list[tuple[At, torch.Tensor]]:
    """Return the tensors of the optimizer's state."""
    state: Any = optimizer.state
    found = [((param, key), value) for param, values in state.items() for key, value in values.items()]
    return [(at, value) for at, value in found if isinstance(value, torch.Tensor)]
