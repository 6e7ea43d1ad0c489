"""The state of training: values that are sharded as their parameters, and values that are the same on all ranks.

[Note: Values sharded as parameters]
A parameter, its ``.grad``, and each tensor of its optimizer state that has its local shape are sharded alike: a rank has the
same range of elements of each, in memory order. So one table of ranges says where every value is, for any number of ranks.
Other values, such as step counts, are the same on all ranks. Only the optimizer knows how tensors of other shapes are
sharded: they are refused.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.errors import name_list
from flatshard._base.optimizers import options_of
from flatshard._composable.find import units_of
from flatshard._composable.state import Unit, owner_of
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout, ParamInfo
from flatshard._handle.tensors.aggregate import plainly
from flatshard.elastic import _exchange
from flatshard.elastic._units import place_of

PARAM, GRAD = "", "grad"


class ParamAt(NamedTuple):
    """The place of a parameter in the model, the same on all ranks."""

    unit: int
    flat: int
    param: int


class Value(NamedTuple):
    """A value that is sharded as parameter ``at``: named ``PARAM``, ``GRAD``, or ``(optimizer, key)`` for optimizer state."""

    at: ParamAt
    name: Any
    dtype: torch.dtype


Key = tuple[ParamAt, Any]
"""A value: its parameter, and its name."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The values that all ranks keep, and their layouts: the same on all ranks."""

    size: int  # the number of shards of each unit that is not replicated
    layouts: list[list[FlatLayout]]  # by unit and flat parameter
    values: list[list[Value]]  # by unit

    def to_payload(self) -> Any:
        """Return plain values for other ranks."""
        return self.size, [[dataclasses.astuple(layout) for layout in flats] for flats in self.layouts], self.values

    @classmethod
    def from_payload(cls, payload: Any) -> Self:
        """Return the manifest that another rank wrote."""
        size, layouts, values = payload
        return cls(
            size,
            [[FlatLayout(tuple(ParamInfo(*p) for p in params), *cut) for params, *cut in each] for each in layouts],
            [[Value(ParamAt(*at), name, dtype) for at, name, dtype in each] for each in values],
        )

    def is_replicated(self, unit: int) -> bool:
        """Return whether each rank has the full unit."""
        return all(layout.world_size == 1 for layout in self.layouts[unit])

    def shard_of(self, unit: int, number: int) -> int:
        """Return the shard of ``unit`` on a rank with shard ``number``."""
        return 0 if self.is_replicated(unit) else number

    def span(self, at: ParamAt, number: int) -> tuple[int, int]:
        """Return the range of a parameter's elements in shard ``number`` of its unit, half-open."""
        part = self.layouts[at.unit][at.flat].shard_slices(number)[at.param]
        return part.offset, part.offset + part.numel


class Common(NamedTuple):
    """Copies of the values that are not sharded."""

    buffers: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]  # parameters in no unit
    states: list[dict[ParamAt | str, dict[str, Any]]]  # by optimizer and parameter: what is not sharded of its state
    options: list[list[dict[str, Any]]]  # by optimizer and group

    def to_bytes(self) -> bytes:
        """Return bytes for other ranks.

        Raises:
            TypeError: other ranks would refuse it.
        """
        buffers, others = ({name: value.cpu() for name, value in each.items()} for each in self[:2])
        states = [[(at if isinstance(at, str) else tuple(at), values) for at, values in e.items()] for e in self.states]
        return _exchange.saved((buffers, others, states, self.options), "the optimizers' state and options")

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Return the values that another rank wrote."""
        buffers, others, states, options = _exchange.loaded(data)
        places = [{at if isinstance(at, str) else ParamAt(*at): values for at, values in each} for each in states]
        return cls(buffers, others, places, options)


class Trained:
    """A model and its optimizers, by numbers that are the same on all ranks."""

    def __init__(self, module: nn.Module, optimizers: Optimizer | Iterable[Optimizer], verb: str) -> None:
        """
        Raises:
            TypeError, ValueError: the arguments are no sharded module and its optimizers.
            NotImplementedError: an optimizer steps full parameters, whose state is sharded in another way.
        """
        self.module, self.verb = module, verb
        self.units: list[Unit] = units_of(module, verb)
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"{verb} takes optimizers of torch.optim, got a {type(optimizer).__name__}")
            if getattr(optimizer, "steps_whole_parameters", False):
                raise NotImplementedError(
                    f"{verb}: the state of a WholeParameterOptimizer is on the ranks that own parameters, and does not move: "
                    "go through flatshard.save_checkpoint and load_checkpoint"
                )
        self.params = {
            ParamAt(u, f, i): param
            for u, unit in enumerate(self.units)
            for f, flat in enumerate(unit.handle.flats)
            for i, param in enumerate(flat.params)
        }
        self.others = {n: p for n, p in module.named_parameters() if owner_of(p) is None}  # not sharded
        self.places: dict[int, ParamAt | str] = {id(p): at for at, p in self.params.items()}
        self.places.update((id(p), name) for name, p in self.others.items())
        for number, optimizer in enumerate(self.optimizers):
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if id(param) not in self.places:
                        raise ValueError(
                            f"{verb}: optimizer {number}, {type(optimizer).__name__}, steps a parameter of shape "
                            f"{tuple(param.shape)} that this {type(module).__name__} has not: pass the module that it is of"
                        )

    def check_others(self) -> None:
        """Raise RuntimeError if parameters that are not sharded have no memory."""
        if left := [name for name, param in self.others.items() if param.is_meta]:
            raise RuntimeError(
                f"{self.verb}: {name_list(left)}, which are not sharded, are on meta: give them memory first"
            )

    def flat(self, at: ParamAt) -> FlatParam:
        return self.units[at.unit].handle.flats[at.flat]

    def states(self, number: int) -> Iterator[tuple[ParamAt | str, dict[str, Any]]]:
        """Yield an optimizer's state of each parameter, in the same order on all ranks."""
        state = self.optimizers[number].state
        every: list[tuple[ParamAt | str, nn.Parameter]] = [*self.params.items(), *self.others.items()]
        yield from ((at, state[param]) for at, param in every if param in state)

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_buffers())

    def digest(self) -> str:
        """Return a hash of everything that must match across ranks."""
        found: list[Any] = []
        for unit in self.units:
            flats = [
                ([(i.fqn, i.shape) for i in f.layout.params], str(f.kind.dtype), str(f.options))
                for f in unit.handle.flats
            ]
            layout = unit.config.layout
            found.append((unit.fqn, unit.config.strategy.name, "" if callable(layout) else str(layout), flats))
        found.append([(n, tuple(b.shape), str(b.dtype)) for n, b in self.buffers().items()])
        found.append([(n, tuple(p.shape), str(p.dtype)) for n, p in self.others.items()])
        for optimizer in self.optimizers:
            groups = [[self.places[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            found.append((type(optimizer).__name__, groups))
        return hashlib.blake2b(repr(found).encode(), digest_size=12).hexdigest()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with plainly():
        return tensor.detach().as_subclass(torch.Tensor)


class Live:
    """The live values of a job on this rank."""

    def __init__(self, job: Trained, with_gradients: bool) -> None:
        """
        Raises:
            NotImplementedError: a tensor of an optimizer's state has another shape than its parameter.
        """
        self.job = job
        grads = {at: param.grad for at, param in job.params.items() if param.grad is not None}
        self._grads = grads if with_gradients else {}
        rank, size = place_of(job.units)
        self.number = rank
        layouts = [[flat.layout for flat in unit.handle.flats] for unit in job.units]
        values: list[list[Value]] = [[] for _ in job.units]
        # The order of values follows that of parameters, so it is the same on all ranks.
        for own, param in job.params.items():
            values[own.unit].append(Value(own, PARAM, param.dtype))
            if own in self._grads:
                values[own.unit].append(Value(own, GRAD, self._grads[own].dtype))
        for number in range(len(job.optimizers)):
            for place, state in job.states(number):
                for key, held in state.items():
                    if isinstance(place, ParamAt) and self._lies(place, key, held, number):
                        values[place.unit].append(Value(place, (number, key), held.dtype))
        self.manifest = Manifest(size, layouts, values)

    def _lies(self, at: ParamAt, key: str, value: Any, number: int) -> bool:
        """Return whether a value of an optimizer's state is sharded as its parameter. [Note: Values sharded as parameters]"""
        if not isinstance(value, torch.Tensor):
            return False
        param, info = self.job.params[at], self.job.flat(at).layout.params[at.param]
        if value.shape == param.shape:
            return bool(info.shape) or key != "step"  # a scalar parameter has as many dimensions as a step count
        if value.dim():
            name = type(self.job.optimizers[number]).__name__
            raise NotImplementedError(
                f"{self.job.verb}: the state {key!r} that {name} has of {info.fqn!r} has shape {tuple(value.shape)}, and the "
                f"parameter {tuple(param.shape)} here: how it is cut is known to the optimizer alone"
            )
        return False

    def part(self, value: Value) -> torch.Tensor:
        """Return this rank's shard of a value: 1-D, in memory order."""
        at, name = value.at, value.name
        param, flat = self.job.params[at], self.job.flat(at)
        if name == PARAM:
            part = flat.slices[at.param]
            return _plain(flat.shard[part.start : part.stop])
        held = self._grads[at] if name == GRAD else self.job.optimizers[name[0]].state[param][name[1]]
        return param._flatshard_info.in_memory_order(_plain(held))

    def common(self) -> Common:
        """Return copies of the values that are not sharded."""
        job, sharded = self.job, {(v.at, v.name) for unit in self.manifest.values for v in unit}
        return Common(
            {name: _plain(buffer).clone() for name, buffer in job.buffers().items()},
            {name: _plain(param).clone() for name, param in job.others.items()},
            [
                {
                    at: {key: _copied(value) for key, value in state.items() if (at, (n, key)) not in sharded}
                    for at, state in job.states(n)
                }
                for n in range(len(job.optimizers))
            ],
            [[copy.deepcopy(options_of(group)) for group in optimizer.param_groups] for optimizer in job.optimizers],
        )


def _copied(value: Any) -> Any:
    return value.clone() if type(value) is torch.Tensor else copy.deepcopy(value)


def aligned(nbytes: int) -> int:
    """Round up ``nbytes`` so that a value of any dtype can follow."""
    return -(-nbytes // 16) * 16


class Image:
    """A copy of one rank's shards, in one buffer in host memory."""

    def __init__(self, manifest: Manifest, number: int, with_replicated: bool = True, pin: bool = False) -> None:
        """
        Args:
            manifest: the values and their layouts.
            number: the number of the shard.
            with_replicated: include units that are not sharded.
            pin: use pinned memory, to which an accelerator copies while the host continues.
        """
        self.manifest, self.number = manifest, number
        self._at: dict[Key, tuple[int, int]] = {}
        end = 0
        for unit, values in enumerate(manifest.values):
            own = manifest.shard_of(unit, number)
            for value in values if with_replicated or not manifest.is_replicated(unit) else ():
                start, stop = manifest.span(value.at, own)
                nbytes = (stop - start) * value.dtype.itemsize
                self._at[value.at, value.name] = end, end + nbytes
                end += aligned(nbytes)
        self.buffer = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=pin)

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes

    def part(self, value: Value) -> torch.Tensor:
        """See ``Live``."""
        start, stop = self._at[value.at, value.name]
        return self.buffer[start:stop].view(value.dtype)

    def parts(self) -> list[torch.Tensor]:
        """Return the shards that are not empty, in the order of the manifest."""
        values = [value for unit in self.manifest.values for value in unit if (value.at, value.name) in self._at]
        return [part for value in values if (part := self.part(value)).numel()]

    def fill(self, parts: Mapping[Key, torch.Tensor]) -> None:
        """Copy the shards of one rank, on the accelerator's current stream."""
        for value in (value for values in self.manifest.values for value in values):
            self.part(value).copy_(parts[value.at, value.name], non_blocking=True)


def allocate_buffers(job: Trained) -> None:
    """Give memory to the buffers of a rank that joins. Their values will be overwritten."""
    for module in job.module.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=job.units[0].runtime.device)


def set_common(job: Trained, common: Common) -> None:
    """Set the values that are not sharded. Buffers, parameters and optimizers stay the same objects."""
    allocate_buffers(job)
    with torch.no_grad():
        for name, buffer in job.buffers().items():
            buffer.copy_(common.buffers[name])
        for name, param in job.others.items():
            param.copy_(common.others[name])
    for number, optimizer in enumerate(job.optimizers):
        for given, options in zip(optimizer.param_groups, common.options[number], strict=True):
            for key, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(given.get(key), torch.Tensor):
                    given[key].copy_(value)
                else:
                    given[key] = copy.deepcopy(value)
        for name, param in job.others.items():
            set_state(optimizer, param, common.states[number].get(name), {})


def set_state(
    optimizer: Optimizer, param: nn.Parameter, common: dict[str, Any] | None, sharded: dict[str, torch.Tensor]
) -> None:
    """Set an optimizer's state of a parameter, or remove it if ``common`` is None."""
    if common is None:
        optimizer.state.pop(param, None)
        return
    here = {
        key: value.to(param.device, copy=True)
        if isinstance(value, torch.Tensor) and value.dim()
        else copy.deepcopy(value)
        for key, value in common.items()
    }
    optimizer.state[param] = {**here, **sharded}
