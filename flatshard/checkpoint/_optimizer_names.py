"""The parameters that optimizers step, by the names of their module, and each value of their state.

[Note: Values of an optimizer's state]
A value with the shape of its parameter here (an average, a momentum) is sharded as the parameter is: this rank has a shard,
and a state dict holds a sharded value or a full tensor. A value without dimensions (a step count) is the same on all ranks,
and is saved as it is. How a value of any other shape is sharded is known to the optimizer alone. A value of a flat parameter
has one piece for each parameter inside.

[Note: Quantised state]
A quantised value is a tensor subclass with plain tensors inside: codes, a scale for each block of elements, a table. An entry
of an inner tensor is for a fixed number of elements of the parameter, in memory order, or the tensor is the same for all
parameters; trials with two lengths show which. So a checkpoint has 1-D tensors, of which a rank has a shard if its elements
begin with a block. Ranks that cut between blocks, too, may load them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.errors import name_list
from flatshard._base.optimizers import (
    LENGTH,
    Group,
    first_tensors,
    params_of,
    shorter,
    steps_elsewhere,
    steps_whole,
)
from flatshard._handle.adapters.tensor_subclass import is_wrapper
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard.checkpoint._boxes import memory_dims
from flatshard.checkpoint._sharded_value import (
    ShardedValue,
    block_value,
    blocks_value,
    check_source,
    local_source,
    sharded_value,
)
from flatshard.checkpoint._state_dict import Flat

BY_EACH_RANK = "Save optimizer.state_dict() by each rank, and load it on the same rank of as many"


@dataclass(eq=False)
class SteppedParam:
    """A parameter that an optimizer steps, alone or inside of a flat parameter."""

    fqn: str
    param: nn.Parameter  # as the module has it
    stepped: nn.Parameter  # as the optimizer has it: the same, or the flat parameter
    place: slice | None = None  # of ``param`` in the flat parameter

    @classmethod
    def alone(cls, param: ShardedParameter) -> SteppedParam:
        """Return the entry for a parameter that an optimizer steps itself, without its module at hand."""
        return cls(param._flatshard_info.fqn, param, param)

    @cached_property
    def info(self) -> ShardInfo | None:
        return shard_info(self.param)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unsharded parameter."""
        if self.info is None or self.info.parallel is None:
            return tuple(self.param.shape if self.info is None else self.info.shape)
        return tuple(self.info.parallel.shape)

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is no tensor subclass, and no DTensor."""
        return self.info is None or self.info.wrapping is None

    @property
    def is_full(self) -> bool:
        """Whether this rank has all elements of the parameter, as every other has."""
        return self.info is None or self.info.is_full

    @cached_property
    def _stepped_shape(self) -> torch.Size:
        return self.stepped.shape

    def piece(self, value: torch.Tensor) -> torch.Tensor | None:
        """Return the elements of ``value`` that are for ``param``, or None if it has another shape than ``stepped``."""
        if value.shape != self._stepped_shape:
            return None
        if self.place is None:
            return value
        assert self.info is not None
        return self.info.shaped(value[self.place]) if value.is_contiguous() else None

    def own_shard(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's shard of a sharded value or a full tensor, in the shape of ``param``.

        Raises:
            ValueError: ``value`` has another shape, rank or layout.
        """
        if self.info is None:
            if tuple(value.shape) != self.shape:
                raise ValueError(f"shape {tuple(value.shape)}, the parameter has {self.shape}")
            return value.clone()
        if problem := check_source(self.info, value.dtype, value):
            raise ValueError(problem)
        return local_source(self.info, value).clone()

    def as_owned(self, key: str, value: Any) -> Any:
        """Return a value of the rank that steps the parameter as state dicts hold it: a DTensor's is for its own experts.

        Raises:
            NotImplementedError: the value has another shape than the experts.
        """
        info = self.info
        if info is None or info.parallel is None or not info.parallel.is_sharded:
            return value
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedValue) or not value.dim():
            return value
        if tuple(value.shape) != tuple(info.shape):
            raise NotImplementedError(
                f"the optimizer's state {key!r} of {self.fqn!r} has shape {tuple(value.shape)}, the experts here have "
                f"{tuple(info.shape)}: how it is divided is known to the optimizer alone. {BY_EACH_RANK}"
            )
        return block_value(value, info)

    def as_saved(self, key: str, value: Any, strict: bool = True) -> Any:
        """Return a value of the state as state dicts hold it: [Note: Values of an optimizer's state].

        Raises:
            NotImplementedError: with ``strict``, the value has a shape of its own, or tensors inside.
        """
        if type(value) is torch.Tensor and self.place is None and value.shape == self._stepped_shape:  # most are
            return sharded_value(value.detach(), self.param)
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedValue):
            return value
        if strict and not self.is_full and is_wrapper(value):
            raise NotImplementedError(
                f"the optimizer's state {key!r} of {self.fqn!r} is a {type(value).__name__}, with tensors inside that belong "
                "to this rank's elements alone (a scale of a quantised part). flatshard.save_checkpoint saves it, with "
                f"layouts that cut between blocks. {BY_EACH_RANK}"
            )
        if (piece := self.piece(value)) is not None:
            return sharded_value(piece.detach(), self.param)
        if strict and value.dim() and self.info is not None:
            raise NotImplementedError(
                f"the optimizer's state {key!r} of {self.fqn!r} has shape {tuple(value.shape)}, the parameter has "
                f"{tuple(self._stepped_shape)} here: how it is sharded is known to the optimizer alone. Save "
                "optimizer.state_dict() by each rank"
            )
        return value


class ParamNames:
    """Names of ``module``'s parameters, and the flat parameters that they are in.

    Names are those of ``module.state_dict()``, without what ``checkpoint_wrapper`` and the like add. A parameter that is in
    no state dict has its name in ``named_parameters()``. Of several names the first is used; the others are ``aliases``.
    """

    def __init__(
        self,
        module: nn.Module,
        verb: str,
        flats: list[Flat],
        params: list[tuple[str, nn.Parameter]] | None = None,
        has_plain_names: bool = False,
    ) -> None:
        """
        Args:
            module: the module that optimizers step.
            verb: the caller, for errors.
            flats: ``module``'s, by ``idle_flats``.
            params: its parameters, under all of their names, if the caller has listed them.
            has_plain_names: whether state dicts have the same names.
        """
        self.verb, self.kind, self.flats = verb, type(module).__name__, flats
        self.aliases: dict[str, str] = {}  # each name to the first name of its parameter
        self._names: dict[int, str] = {}
        params = [*module.named_parameters(remove_duplicate=False)] if params is None else params
        listed = [(name, id(p)) for name, p in params]
        saved = listed
        if not has_plain_names:
            known = {key for _, key in listed}
            values = module.state_dict(keep_vars=True).items()
            saved = [(name, id(value)) for name, value in values if id(value) in known]
        for name, key in dict.fromkeys([*saved, *listed]):
            self.aliases[name] = self._names.setdefault(key, name)
        self.params = [self._names[key] for key in dict.fromkeys(key for _, key in listed)]
        self._flats = {id(flat.shard_param): flat for _, flat in flats}
        self._found: dict[int, list[SteppedParam]] = {}  # by the id of what is stepped, which they keep alive

    def find(self, stepped: nn.Parameter) -> list[SteppedParam]:
        """Return the module's parameters in one parameter of an optimizer.

        Raises:
            ValueError: the module has no such parameter.
        """
        if (key := id(stepped)) not in self._found:
            held: list[tuple[nn.Parameter, slice | None]] = [(stepped, None)]
            if (flat := self._flats.get(key)) is not None:
                held = [(p, slice(s.start, s.stop)) for p, s in zip(flat.params, flat.slices, strict=True)]
            self._found[key] = [SteppedParam(self._name(param), param, stepped, place) for param, place in held]
        return self._found[key]

    def find_all(self, optimizer: Optimizer) -> list[SteppedParam]:
        """Return the module's parameters that ``optimizer`` steps, in the order of its groups."""
        return [param for stepped in params_of(optimizer) for param in self.find(stepped)]

    def names_elsewhere(self, optimizer: Optimizer) -> set[str]:
        """Return the names of parameters whose state is on another rank."""
        if not steps_whole(optimizer):
            return set()
        return {param.fqn for param in self.find_all(optimizer) if steps_elsewhere(optimizer, param.stepped)}

    def _name(self, param: nn.Parameter) -> str:
        if id(param) not in self._names:
            raise ValueError(
                f"{self.verb}: the optimizer steps a parameter of shape {tuple(param.shape)} that this {self.kind} has not. "
                "Pass the module that its parameters come from; with DTensors, build the optimizer after fully_shard"
            )
        return self._names[id(param)]


# -- the tensors inside of quantised state ------------------------------------------------------------------------------

Sizes = dict[str, int | None]
"""By the name of an inner tensor: how many elements an entry is for, or None if the tensor is the same for all parameters."""


class Quantised:
    """The quantised values of an optimizer's state. [Note: Quantised state]"""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._is_known = type(optimizer).__module__.startswith("torch.optim")  # nothing is quantised
        self._made: dict[Any, dict[str, torch.Tensor]] = {}
        self._sizes: dict[tuple[str, type], Sizes | None] = {}

    def as_saved(self, param: SteppedParam, group: Group, memory: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the inner tensors of a parameter's state as a checkpoint has them, by the keys of ``memory``.

        Where this rank has no elements of the parameter, a trial shows which values are quantised on other ranks.

        Raises:
            NotImplementedError: it is not known which elements entries are for, or an entry is for elements of several ranks.
        """
        if self._is_known:
            return {}
        values, is_full = memory, param.is_full or steps_whole(self._optimizer)
        if memory and not is_full and not param.param.numel():
            with contextlib.suppress(RuntimeError):  # a class that cannot be tried: nothing is known of its values
                values = self._made_for(group, shorter(math.prod(param.shape)), param.param.dtype)
        found = {}
        for key, value in values.items():
            if is_wrapper(value) and key in memory:
                problem = f"the optimizer's state {key!r} of {param.fqn!r} is a {type(value).__name__}"
                sizes = self._sizes_of(group, key, value)
                found[key] = _shards(param, inner_tensors(value), sizes, problem, is_full)
        return found

    def _made_for(self, group: Group, numel: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        at = id(group), numel, dtype
        if at not in self._made:
            self._made[at] = first_tensors(self._optimizer, group, numel, dtype)
        return self._made[at]

    def _sizes_of(self, group: Group, key: str, value: torch.Tensor) -> Sizes | None:
        """Return how many elements entries are for, or None if two lengths do not show it."""
        at = key, type(value)
        if at not in self._sizes:
            lengths = shorter(value.numel()), shorter(value.numel()) + LENGTH
            made = (self._made_for(group, length, value.dtype).get(key, value) for length in lengths)
            self._sizes[at] = _compare_sizes(*made)
        return self._sizes[at]


def inner_tensors(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside of ``value`` by name: 1-D, sharing memory."""
    names, _ = value.__tensor_flatten__()
    return {name: getattr(value, name).view(-1) for name in names}


def _compare_sizes(short: torch.Tensor, long: torch.Tensor) -> Sizes | None:
    if not is_wrapper(short) or type(short) is not type(long):
        return None
    sizes: Sizes = {}
    for (name, one), other in zip(inner_tensors(short).items(), inner_tensors(long).values(), strict=True):
        per, rest = divmod(short.numel(), len(one))
        if is_wrapper(one) or (len(one) != len(other) and (rest or per * len(other) != long.numel())):
            return None
        sizes[name] = None if len(one) == len(other) else per
    return sizes


def _shards(
    param: SteppedParam, tensors: dict[str, torch.Tensor], sizes: Sizes | None, problem: str, is_full: bool
) -> dict[str, Any]:
    """Return ``tensors`` as a checkpoint has them. ``is_full``: they are for all elements of the parameter."""
    info = param.info
    shape, stride = (param.shape, param.param.stride()) if info is None else (info.shape, info.stride)
    dims = [dim for dim in memory_dims(shape, stride) if shape[dim] > 1]
    if sizes is None or dims != sorted(dims) or param.place is not None or getattr(info, "parallel", None) is not None:
        raise NotImplementedError(
            f"{problem}. It is not known which elements its inner tensors are for. {BY_EACH_RANK}"
        )
    if info is None or is_full:
        return tensors
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        per, numel = sizes[name], info.stop - info.start
        if per is not None and numel and (info.start % per or numel != per * len(tensor)):
            raise NotImplementedError(
                f"{problem}, with one number for {per} elements, and this rank has {info.start}:{info.stop} of them: shard "
                f"with layout=flatshard.layouts.Blocks({per})"
            )
        found[name] = tensor if per is None else blocks_value(tensor[: numel // per], param.param, info, per)
    return found


# -- state that was loaded by number -----------------------------------------------------------------------------------


def count_keys(states: Iterable[tuple[tuple[int, ...], Mapping[str, Any]]]) -> set[str]:
    """Return the keys of counts, which have no dimensions for any parameter: ``states`` are parameters' shapes and state.

    A parameter without dimensions cannot tell a count from an average, but others have the same keys.
    """
    found = {"step"}
    for shape, state in states:
        if shape:
            found |= {k for k, v in state.items() if k not in found and isinstance(v, torch.Tensor) and not v.ndim}
    return found


def needs_own_shards(param: ShardedParameter, state: Mapping[str, Any]) -> bool:
    """Return whether ``own_shards`` may change ``state``, which seldom has other values than this rank's shards."""
    own, info = param.shape, param._flatshard_info
    for value in state.values():
        if type(value) is torch.Tensor:
            if value.shape != own and (value.shape == info.shape or info.wrapping is not None):
                return True
        elif isinstance(value, torch.Tensor):
            return True
    return False


def own_shards(param: ShardedParameter, state: dict[str, Any], counts: set[str]) -> dict[str, Any]:
    """Return ``state`` with this rank's shards in place of sharded values and full tensors. Other values stay.

    ``counts``: see ``count_keys``.

    Raises:
        ValueError: a value is another rank's, or of another layout.
    """
    stepped = SteppedParam.alone(param)
    found = dict(state)
    for key, value in state.items():
        is_full = isinstance(value, torch.Tensor) and tuple(value.shape) == stepped.shape
        if not stepped.shape and key in counts:
            continue
        if isinstance(value, ShardedValue) or (is_full and value.shape != param.shape):
            try:
                found[key] = stepped.own_shard(value)
            except ValueError as e:
                raise ValueError(f"the optimizer's state {key!r} of {stepped.fqn!r}: {e}") from None
    return found


def keep_own_shards(optimizer: Optimizer) -> None:
    """Replace values that plain ``load_state_dict`` put into ``optimizer`` by this rank's shards.

    Raises:
        ValueError: a value is another rank's. Nothing is changed.
    """
    if not steps_whole(optimizer):
        held = [(p, state) for p, state in optimizer.state.items() if isinstance(p, ShardedParameter)]
        if any([needs_own_shards(p, state) for p, state in held]):
            counts = count_keys((full_shape(p), state) for p, state in held)
            found = [own_shards(p, state, counts) for p, state in held]
            for (_, state), shards in zip(held, found, strict=True):
                state.update(shards)


def rekey_optim_state_dict(state: dict[str, Any], names: Iterable[str], to: str = "names") -> dict[str, Any]:
    """Rename the parameters of an optimizer's state dict: by FQN, or by number as torch does.

    Example::

        plain = nn.Linear(2, 3)
        adam = torch.optim.Adam(plain.parameters())
        by_name = flatshard.checkpoint.rekey_optim_state_dict(adam.state_dict(), ["weight", "bias"])
        by_number = flatshard.checkpoint.rekey_optim_state_dict(by_name, ["weight", "bias"], to="ids")

    Args:
        state: ``{"state": {key: ...}, "param_groups": [{"params": [key, ...], ...}]}``. Not changed; values are shared.
        names: the FQNs that the numbers 0, 1, ... stand for: those of the plain model's ``named_parameters()``, in the order
            in which its optimizer was given them.
        to: ``"names"`` or ``"ids"``. Parameters that are named so already keep their names.

    Raises:
        ValueError: ``state`` has numbers or names that ``names`` does not.
    """
    if to not in ("names", "ids"):
        raise ValueError(f"rekey_optim_state_dict: to must be 'names' or 'ids', got {to!r}")
    order = list(names)
    kind: type = int if to == "names" else str
    table: dict[Any, Any] = dict(enumerate(order)) if to == "names" else {name: i for i, name in enumerate(order)}
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    if unknown := {str(key) for key in keys if isinstance(key, kind) and key not in table}:
        raise ValueError(
            f"rekey_optim_state_dict: {name_list(sorted(unknown))} are not among the {len(order)} names given"
        )

    def new(key: Any) -> Any:
        return table[key] if isinstance(key, kind) else key

    return {
        **state,
        "state": {new(key): value for key, value in state["state"].items()},
        "param_groups": [{**g, "params": [new(key) for key in g["params"]]} for g in state["param_groups"]],
    }
