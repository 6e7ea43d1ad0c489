"""The parameters that an optimizer steps: their names, and each value of their state, here and in state dicts.

[Note: Values of an optimizer's state]
There are three kinds of values. One that has the shape of its parameter here (an average, a momentum) is sharded as the
parameter is: this rank has a part of it, and a state dict has a sharded value or a whole tensor in its place. One without
dimensions (a step count) is the same on all ranks, and is saved as it is. How one of another shape is sharded, only the
optimizer knows. A value of a flat parameter has one piece for each parameter in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._composable.find import units_below
from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_subclass import is_wrapper
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, shard_info
from flatshard._optimizers import params_of, steps_whole
from flatshard.checkpoint._sharded_value import ShardedValue, check_source, local_source, sharded_value
from flatshard.checkpoint._state_dict import Flat

State = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Named:
    """A parameter that an optimizer steps, alone or as part of a flat parameter."""

    fqn: str
    param: nn.Parameter  # as the module has it
    stepped: nn.Parameter  # as the optimizer has it: the same, or the flat parameter
    place: slice | None = None  # of ``param`` in the flat parameter

    @cached_property
    def info(self) -> ShardInfo | None:
        return shard_info(self.param)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        if self.info is None or self.info.parallel is None:
            return tuple(self.param.shape if self.info is None else self.info.shape)
        return tuple(self.info.parallel.shape)

    def piece(self, value: torch.Tensor) -> torch.Tensor | None:
        """Of ``value``, which lies as ``stepped`` does, what lies as ``param`` does. None: ``value`` lies otherwise."""
        if value.shape != self.stepped.shape:
            return None
        if self.place is None:
            return value
        assert self.info is not None
        return self.info.shaped(value[self.place]) if value.is_contiguous() else None

    def part(self, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a sharded value or a whole tensor: a copy, in the shape of ``param``.

        Raises:
            ValueError: it is of another shape, rank or layout.
        """
        if self.info is None:
            if tuple(value.shape) != self.shape:
                raise ValueError(f"shape {tuple(value.shape)}, the parameter has {self.shape}")
            return value.clone()
        if problem := check_source(self.info, value.dtype, value):
            raise ValueError(problem)
        return local_source(self.info, value).clone()


class Row(NamedTuple):
    """The state of one parameter on this rank."""

    named: Named
    memory: dict[str, Any]  # of what is stepped, as its optimizer has it, or its first step would make it
    values: dict[str, Any]  # of the parameter, as a state dict has it


class Names:
    """The names of ``module``'s parameters, and the flat parameters that they are in.

    They are those of ``module.state_dict()``: ``checkpoint_wrapper`` and the like add something to the names that
    ``named_parameters()`` has. A parameter that is in no state dict has its name there. If a parameter has several names, the
    first is used, and the others are ``aliases``.
    """

    def __init__(self, module: nn.Module, verb: str, flats: list[Flat]) -> None:
        """``verb``: for errors. ``flats``: ``module``'s, of :func:`idle_flats`."""
        self.verb, self.kind, self.flats = verb, type(module).__name__, flats
        self.aliases: dict[str, str] = {}  # every name to the first one of its parameter
        self._names: dict[int, str] = {}
        listed = [(name, id(p)) for name, p in module.named_parameters(remove_duplicate=False)]
        params = {key for _, key in listed}
        saved = [(name, id(value)) for name, value in module.state_dict(keep_vars=True).items() if id(value) in params]
        for name, key in [*saved, *listed]:
            self.aliases[name] = self._names.setdefault(key, name)
        self.params = [self._names[key] for key in dict.fromkeys(key for _, key in listed)]
        self._flats = {id(flat.gradients.shard_param): flat for _, flat in flats}

    def of(self, stepped: nn.Parameter) -> list[Named]:
        """What one parameter of an optimizer holds.

        Raises:
            ValueError: it is none of the module's.
        """
        flat = self._flats.get(id(stepped))
        if flat is None:
            return [Named(self._name(stepped), stepped, stepped)]
        places = [slice(part.start, part.stop) for part in flat.slices]
        return [Named(self._name(p), p, stepped, at) for p, at in zip(flat.params, places, strict=True)]

    def _name(self, param: nn.Parameter) -> str:
        if id(param) not in self._names:
            raise ValueError(
                f"{self.verb}: the optimizer steps a parameter of shape {tuple(param.shape)} that this {self.kind} has not. "
                "Pass the module that its parameters come from; with DTensors, build the optimizer after fully_shard"
            )
        return self._names[id(param)]

    def groups(self, optimizer: Optimizer) -> list[list[Named]]:
        """For each parameter group."""
        return [[named for p in group["params"] for named in self.of(p)] for group in optimizer.param_groups]


def steps_only(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether all that ``optimizer`` steps is ``module``'s: parameters and flat parameters."""
    own = {id(p) for p in module.parameters()}
    own.update(id(flat.gradients.shard_param) for unit in units_below(module) for flat in unit.handle.flats)
    return all(id(param) in own for param in params_of(optimizer))


BY_EACH_RANK = "Save optimizer.state_dict() by each rank, and load it on the same rank of as many"

# -- one value ---------------------------------------------------------------------------------------------------------


def shown(named: Named, key: str, value: Any, raises: bool = True) -> Any:
    """A value of an optimizer's state, as a state dict has it. [Note: Values of an optimizer's state]

    Raises:
        NotImplementedError: it has a shape of its own, or tensors inside, and ``raises``.
    """
    if not isinstance(value, torch.Tensor) or isinstance(value, ShardedValue):
        return value
    if raises and named.info is not None and is_wrapper(value) and not named.info.is_whole:
        raise NotImplementedError(
            f"the optimizer's state {key!r} of {named.fqn!r} is a {type(value).__name__}, with tensors inside that belong to "
            "this rank's elements alone (a scale of a quantised part). flatshard.save_checkpoint saves it, with layouts that "
            f"cut between blocks. {BY_EACH_RANK}"
        )
    piece = named.piece(value)
    if piece is not None:
        return sharded_value(piece.detach(), named.param)
    if raises and value.dim() and named.info is not None:
        raise NotImplementedError(
            f"the optimizer's state {key!r} of {named.fqn!r} has shape {tuple(value.shape)}, the parameter has "
            f"{tuple(named.stepped.shape)} here: how it is sharded is known to the optimizer alone. Save "
            "optimizer.state_dict() by each rank"
        )
    return value


def parts_of_state(param: ShardedParameter, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts in the place of sharded values and whole tensors. Others are taken for parts.

    Raises:
        ValueError: some are of another rank or layout.
    """
    named = Named(param._flatshard_info.fqn, param, param)
    found = dict(state)
    for key, value in state.items():
        is_whole = isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == named.shape
        if isinstance(value, ShardedValue) or (is_whole and value.shape != param.shape):
            try:
                found[key] = named.part(value)
            except ValueError as e:
                raise ValueError(f"the optimizer's state {key!r} of {named.fqn!r}: {e}") from None
    return found


def take_loaded(optimizer: Optimizer) -> None:
    """Put this rank's parts in the place of what was loaded before there were hooks.

    Raises:
        ValueError: it is no part of this rank's. Nothing is changed.
    """
    if not steps_whole(optimizer):
        found = {p: parts_of_state(p, state) for p, state in optimizer.state.items() if isinstance(p, ShardedParameter)}
        for param, parts in found.items():
            optimizer.state[param].update(parts)


# -- by number ---------------------------------------------------------------------------------------------------------


def rekey(state: dict[str, Any], names: Iterable[str], to: str = "names") -> dict[str, Any]:
    """An optimizer's state dict with its parameters named otherwise: by FQN, or by number as torch does.

    Example::

        plain = nn.Linear(2, 3)
        adam = torch.optim.Adam(plain.parameters())
        by_name = flatshard.checkpoint.rekey(adam.state_dict(), ["weight", "bias"])
        by_number = flatshard.checkpoint.rekey(by_name, ["weight", "bias"], to="ids")

    Args:
        state: ``{"state": {key: ...}, "param_groups": [{"params": [key, ...], ...}]}``. Not changed; values are shared.
        names: the FQNs that the numbers 0, 1, ... stand for: those of the plain model's ``named_parameters()``, in the order
            in which its optimizer was given them.
        to: ``"names"`` or ``"ids"``. What is named so already stays as it is.

    Raises:
        ValueError: ``state`` has numbers or names that ``names`` does not.
    """
    if to not in ("names", "ids"):
        raise ValueError(f"rekey: to must be 'names' or 'ids', got {to!r}")
    order = list(names)
    kind: type = int if to == "names" else str
    table: dict[Any, Any] = dict(enumerate(order)) if to == "names" else {name: i for i, name in enumerate(order)}
    keys = [*state["state"], *(key for group in state["param_groups"] for key in group["params"])]
    if unknown := {str(key) for key in keys if isinstance(key, kind) and key not in table}:
        raise ValueError(f"rekey: {name_list(sorted(unknown))} are not among the {len(order)} names given")

    def new(key: Any) -> Any:
        return table[key] if isinstance(key, kind) else key

    return {
        **state,
        "state": {new(key): value for key, value in state["state"].items()},
        "param_groups": [{**g, "params": [new(key) for key in g["params"]]} for g in state["param_groups"]],
    }
