"""What is not sharded in a sharded module: parameters that ``fully_shard`` ignored, and what is put into it later.

[Note: Added after sharding]
A parameter that is registered in a sharded module later belongs to no unit. Nobody averages its gradients, so each rank would
train it differently. No hook tells that it was added, and a search in each step would cost time. So each unit keeps a list of
the parameters that were not sharded on purpose. Checks of optimizers and replicas then find those that are neither sharded
nor in this list.

[Note: Tied after sharding]
No unit gathers the parameter for the new module, which would compute with this rank's part. If the module had a parameter of
the unit under that name before, the unit notices the assignment itself. For a new name, only torch's global hook for
parameter registrations tells. The hook remembers the module and the name, and the next pass checks them. It does not raise at
once, because a later ``fully_shard`` may take the module over, and because modules outside of the model may hold the
parameter.

[Note: Resized embeddings]
``resize_token_embeddings`` of a model whose embeddings are sharded is refused. This method of transformers' models, and of
models written like them, takes the number of tokens from the first dimension of a weight, and puts new layers in the place of
old ones. Of a part it would take a wrong number, or fail with torch's error about unpacking; and the new layers would be on
no unit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flatshard._base.names import UNIT_KEY, plain_name
from flatshard._comm.runtime import Runtime
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.find import all_units
from flatshard._composable.state import Context, Unit, owner_of
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.tensors.sharded_parameter import shard_info

Registration = tuple[Unit, str, nn.Module, str, nn.Parameter]
"""The nearest unit around it, the FQN relative to the searched module, the module it is in, its name there, the parameter."""


class NotSharded(Extension):
    """Records the parameters that are not sharded at construction in each unit's ``Noted.registrations``."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> Noted:
        return Noted()

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        for unit, _, holder, name, _ in _plain(module):
            if unit in made and (noted := unit.feature(Noted)) is not None:
                noted.registrations.append((holder, name))


class Noted(ForwardFeature):
    """The registrations of parameters in one unit, and in no unit below, that are not sharded."""

    def __init__(self) -> None:
        self.registrations: list[tuple[nn.Module, str]] = []


def leave_to_others(module: nn.Module) -> None:
    """Record that somebody else (DDP) averages the gradients of the parameters in ``module`` that are not sharded now."""
    for unit, _, holder, name, _ in _plain(module):
        if (noted := unit.feature(Noted)) is not None:
            noted.registrations.append((holder, name))


def added_later(module: nn.Module) -> Iterator[tuple[Unit, str, nn.Parameter]]:
    """Yield the nearest unit, FQN and value of each parameter that was registered in units of ``module`` since then."""
    for unit, fqn, holder, name, param in _plain(module):
        noted = unit.feature(Noted)
        if noted is not None and not any(holder is each and name == other for each, other in noted.registrations):
            yield unit, fqn, param


def _plain(module: nn.Module) -> Iterator[Registration]:
    stack: list[tuple[str, nn.Module, Unit | None]] = [("", module, None)]
    seen: set[nn.Module] = set()
    in_units: list[tuple[Unit, str, nn.Module]] = []
    while stack:
        prefix, at, unit = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        unit = at.__dict__.get(UNIT_KEY, unit)
        if unit is not None:
            in_units.append((unit, prefix, at))
        stack += [(f"{prefix}{name}.", child, unit) for name, child in at._modules.items() if child is not None]
    params = [at._parameters.items() for _, _, at in in_units]
    for (unit, prefix, at), of_module in zip(in_units, params, strict=True):
        for name, param in of_module:
            if param is not None and shard_info(param) is None:
                yield unit, f"{prefix}{name}", at, name, param


class LateTies(Extension):
    """Raises in the next forward after a parameter was tied."""

    def __init__(self) -> None:
        self._is_watching = False

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        if not self._is_watching:
            register_module_parameter_registration_hook(_note_tie)
            self._is_watching = True


def _note_tie(module: nn.Module, name: str, param: nn.Parameter) -> None:
    info = shard_info(param)
    if info is None:
        return
    held = module._parameters.get(name)
    if held is None or shard_info(held) is not info:  # else a unit registers its own parameters
        Context.checks.append(functools.partial(_check_tie, weakref.ref(module), name))


def _check_tie(to_module: weakref.ref[nn.Module], name: str, unit: Unit) -> bool:
    """Raise if a parameter was tied, when a pass of ``unit`` starts. Return whether to check again in the next pass."""
    module = to_module()
    param = None if module is None else module._parameters.get(name)
    info = None if param is None else shard_info(param)
    units = all_units()
    if info is None or any(m is module and n == name for u in units for m, n, _, _ in u.handle.registrations.entries):
        return False
    inside = {m: fqn for fqn, m in unit.module.named_modules()}
    if module in inside:
        new = plain_name(".".join(part for part in (unit.fqn, inside[module], name) if part))
        raise RuntimeError(
            f"{new!r} was registered after fully_shard, and is the sharded parameter {info.fqn!r}: the two would not be "
            f"tied, because no unit gathers for {new!r}. Tie parameters before fully_shard, or delete {new!r} again"
        )
    owner = None if param is None else owner_of(param)
    elsewhere = owner is not None and owner.module not in inside  # another model's pass will check it
    return elsewhere or any(module in set(u.module.modules()) for u in units)


_METHOD = "resize_token_embeddings"


class ResizedEmbeddings(Extension):
    """Hides the method that resizes embeddings by a function that raises, on each module that has it."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        for each in module.modules():
            if callable(getattr(type(each), _METHOD, None)):
                each.__dict__[_METHOD] = functools.partial(_refuse_resizing, type(each).__name__)


def _refuse_resizing(model: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{_METHOD}: this {model} is sharded, and its embeddings cannot be resized any more. Resize them before fully_shard. "
        "To resize those of a trained model, save it (flatshard.checkpoint.export_safetensors), and load it anew"
    )
