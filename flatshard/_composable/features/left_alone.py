"""Parameters in a sharded module that are not sharded: ignored ones, and those registered after ``fully_shard``.

[Note: Added after sharding]
A parameter that is registered in a sharded module later belongs to no unit. Nobody averages its gradients, so each rank would
train it differently. No hook tells that it was added, and a search in each step would cost time. So each unit keeps a list of
the parameters that were not sharded on purpose. Checks of optimizers and replicas then find those that are neither sharded
nor in this list.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.state import Unit, unit_of
from flatshard._handle.tensors.sharded_parameter import shard_info

Slot = tuple[Unit, str, nn.Module, str, nn.Parameter]
"""The nearest unit around it, the FQN relative to the searched module, the module it is in, its name there, the parameter."""


class LeftAlone(Extension):
    """Adds the parameters that are not sharded at construction to each unit's list ``left_alone``."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> Noted:
        return Noted()

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        for unit, _, holder, name, _ in _plain(module):
            if unit in made and (noted := unit.feature(Noted)) is not None:
                noted.slots.append((holder, name))


class Noted(ForwardFeature):
    """The registrations of parameters in one unit, and in no unit below, that it left alone."""

    def __init__(self) -> None:
        self.slots: list[tuple[nn.Module, str]] = []


def leave_to_others(module: nn.Module) -> None:
    """Note that somebody else (DDP) averages the gradients of the parameters in ``module`` that are not sharded now."""
    for unit, _, holder, name, _ in _plain(module):
        if (noted := unit.feature(Noted)) is not None:
            noted.slots.append((holder, name))


def added_later(module: nn.Module) -> Iterator[tuple[Unit, str, nn.Parameter]]:
    """The parameters registered in units of ``module`` since then: the nearest unit, the FQN in ``module``, the parameter."""
    for unit, fqn, holder, name, param in _plain(module):
        noted = unit.feature(Noted)
        if noted is not None and not any(holder is each and name == other for each, other in noted.slots):
            yield unit, fqn, param


def _plain(module: nn.Module) -> Iterator[Slot]:
    stack: list[tuple[str, nn.Module, Unit | None]] = [("", module, None)]
    seen: set[nn.Module] = set()
    while stack:
        prefix, at, unit = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        unit = unit_of(at) or unit
        if unit is not None:
            for name, param in at._parameters.items():
                if param is not None and shard_info(param) is None:
                    yield unit, f"{prefix}{name}", at, name, param
        stack += [(f"{prefix}{name}.", child, unit) for name, child in at._modules.items() if child is not None]
