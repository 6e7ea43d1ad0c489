"""Which parameters an optimizer holds, by name: single ones, and those of each flat parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._composable.state import Unit, units_below
from flatshard._errors import name_list
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.tensors.sharded_parameter import ShardInfo, shard_info
from flatshard.checkpoint._state_dict import Flat

Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True)
class Named:
    """A parameter that an optimizer steps, alone or as part of a flat parameter."""

    fqn: str
    param: nn.Parameter  # as the module has it
    stepped: nn.Parameter  # as the optimizer has it: the same, or the flat parameter
    flat: FlatParam | None = None  # with ``index``: where it is sharded
    index: int = 0

    @cached_property
    def info(self) -> ShardInfo | None:
        return shard_info(self.param)

    @property
    def is_flat(self) -> bool:
        return self.stepped is not self.param

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        if self.info is None:
            return tuple(self.param.shape)
        return self.info.shape if self.info.parallel is None else tuple(self.info.parallel.shape)

    def piece(self, value: torch.Tensor) -> torch.Tensor | None:
        """Of ``value``, which lies as ``stepped`` does, what lies as ``param`` does. None: ``value`` lies otherwise."""
        if value.shape != self.stepped.shape or (self.is_flat and not value.is_contiguous()):
            return None
        if not self.is_flat:
            return value
        assert self.flat is not None
        part = self.flat.slices[self.index]
        return self.flat.shaped(self.index, value[part.start : part.stop])


def steps_only(module: nn.Module, optimizer: Optimizer) -> bool:
    """Whether all that ``optimizer`` steps is ``module``'s: parameters and flat parameters."""
    own = {id(p) for p in module.parameters()}
    own.update(id(flat.gradients.shard_param) for unit in units_below(module) for flat in unit.handle.flats)
    return all(id(p) in own for group in optimizer.param_groups for p in group["params"])


class Names:
    """The names of ``module``'s parameters, and where they are sharded.

    Those of ``module.state_dict()``, as ``checkpoint_wrapper`` and the like add to those of ``named_parameters()``. These are
    used for what is in no state dict. Of several names of a parameter the first is used, and the others are ``aliases``.
    """

    def __init__(self, module: nn.Module, verb: str, flats: Sequence[Flat]) -> None:
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
        self._places: dict[int, tuple[FlatParam, int]] = {}
        self._flats: dict[int, FlatParam] = {}
        for _, flat in flats:
            self._places.update((id(p), (flat, i)) for i, p in enumerate(flat.params))
            if flat.gradients.shard_param is not None:
                self._flats[id(flat.gradients.shard_param)] = flat

    def of(self, stepped: nn.Parameter) -> list[Named]:
        """What one parameter of an optimizer holds.

        Raises:
            ValueError: it is none of the module's.
        """
        flat = self._flats.get(id(stepped))
        if flat is not None:
            return [Named(self._name(p), p, stepped, flat, i) for i, p in enumerate(flat.params)]
        place = self._places.get(id(stepped))
        name = self._name(stepped)
        return [Named(name, stepped, stepped) if place is None else Named(name, stepped, stepped, *place)]

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

    def unit_flats(self, named: Iterable[Named]) -> Iterator[tuple[Unit, FlatParam, list[Named | None]]]:
        """``named`` by where they are sharded: for each flat parameter, one entry a parameter."""
        by_place = {(id(n.flat), n.index): n for n in named if n.flat is not None}
        for unit, flat in self.flats:
            entries = [by_place.get((id(flat), i)) for i in range(len(flat.params))]
            if any(e is not None for e in entries):
                yield unit, flat, entries


def steps_whole(optimizer: Optimizer) -> bool:
    """Whether its state is on the ranks that own the parameters: ``WholeParameterOptimizer``."""
    return getattr(optimizer, "steps_whole_parameters", False)


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """One optimizer, or several: those that have the state, where others hold them as ``optimizer`` (accelerate's)."""
    result = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for i, optimizer in enumerate(result):
        while "state" not in vars(optimizer) and isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = result[i] = inner
    return result


def rekey(state: dict[str, Any], names: Iterable[str], to: str = "names") -> dict[str, Any]:
    """An optimizer's state dict with its parameters named otherwise: by FQN, or by number as torch does.

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
