"""What other code does with a sharded model: it adds and ties parameters, wraps the model in DDP, forks, writes to ``.data``.

[Note: Added after sharding]
A parameter that is registered in a sharded module later belongs to no unit. Nobody averages its gradients, so each rank would
train it differently. No hook tells that it was added, and a search in each step would cost time. So each unit keeps a list of
the parameters that were not sharded on purpose. Checks of optimizers and replicas then find parameters that are neither
sharded nor in this list.

[Note: Tied after sharding]
No unit gathers the parameter for the new module, which would compute with this rank's shard. If the module had a parameter of
the unit under that name before, the unit notices the assignment itself. For a new name, only torch's global hook for
parameter registrations tells. The hook remembers the module and the name, and the next pass checks them. It does not raise at
once, because a later ``fully_shard`` may take the module over, and because modules outside of the model may hold the
parameter.

[Note: Resized embeddings]
``resize_token_embeddings`` of a model whose embeddings are sharded is refused. This method of transformers' models, and of
models written like them, takes the number of tokens from the first dimension of a weight, and replaces layers by new ones.
From a shard it would take a wrong number, or fail with torch's error about unpacking. And the new layers would be in no unit.

[Note: DistributedDataParallel around units]
DDP would broadcast rank 0's shards to all other ranks, and overwrite theirs. If shards have equal sizes, there would be no
error. Tools wrap a model in DDP without being asked: accelerate's ``prepare``, transformers' ``Trainer``, Lightning's "ddp"
and "auto"; and the module they wrap may contain the one that was given to ``fully_shard``. So flatshard acts when DDP
registers its module. At that point DDP has a set of parameter names to ignore, and has not communicated yet. The names of
sharded parameters are added to this set. DDP replicates the plain layers beside the units as usual. A module without plain
trainable parameters is refused before, in DDP's constructor, as DDP's own error does not say why.

Tools that broadcast without DDP (Lightning's "ddp" does, to validate) ask the module for the names to ignore, as DDP does.
So each module given to ``fully_shard`` has this list. Without the list, torch's last function in Python refuses a broadcast.
Behind it tensors go to C++, where no tensor class can refuse.

[Note: Forked processes]
A forked process, such as a worker of a DataLoader, has a copy of the model, but not the threads of its process group. Its
first collective would wait forever, and the thread that would notice does not exist there either. So the child remembers,
right after the fork, which units it inherited. This costs nothing in the forwards of the parent.

[Note: Written through .data]
At the end of a forward its unit writes back the forward's changes to its own parameters (``p.data.mul_(m)``, as momentum
encoders do). It looks at autograd's version counters for that. But ``.data`` of a plain tensor has a counter of its own, so
such a write cannot be seen, and would be lost when the unit is resharded. A class of its own for unsharded parameters could
note who asks for ``.data``; it would cost half a microsecond for each use of a parameter, as torch then looks for
``__torch_function__``. So ``nn.Parameter`` itself gets the property, at the first ``fully_shard``, and only a read of
``.data`` costs more. A unit of which ``.data`` was read is written back.

Not seen: a write to memory that an earlier forward has stored, a write by code outside of torch, one to a tensor subclass,
and one inside a compiled function.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed.utils as states
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from flatshard._base.errors import name_list
from flatshard._base.names import DDP_IGNORES, UNIT_KEY, plain_name
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.find import all_units
from flatshard._composable.state import Context, Unit, owner_of
from flatshard._handle.tensors.shard import ShardTensor
from flatshard._handle.tensors.sharded_parameter import shard_info

Registration = tuple[Unit, str, nn.Module, str, nn.Parameter]
"""The nearest unit around it, the FQN relative to the searched module, the module it is in, its name there, the parameter."""

# -- parameters that are not sharded -----------------------------------------------------------------------------------


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
    """Yield the parameters in units of ``module`` that are not sharded."""
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
    """Raises in the next forward after a parameter was tied. [Note: Tied after sharding]"""

    def set_up(self) -> None:
        register_module_parameter_registration_hook(_note_tie)


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
    """Replaces the method by a function that raises, on each module that has it: see [Note: Resized embeddings]."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        for each in module.modules():
            if callable(getattr(type(each), _METHOD, None)):
                each.__dict__[_METHOD] = functools.partial(_refuse_resizing, type(each).__name__)


def _refuse_resizing(model: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{_METHOD}: this {model} is sharded, and its embeddings cannot be resized any more. Resize them before fully_shard. "
        "To resize those of a trained model, save it (flatshard.checkpoint.export_safetensors), and load it anew"
    )


# -- DDP ---------------------------------------------------------------------------------------------------------------


class IgnoredByDDP(Extension):
    """Makes DDP ignore sharded parameters. [Note: DistributedDataParallel around units]"""

    def set_up(self) -> None:
        register_module_module_registration_hook(_registered)
        _refuse_nothing_but_shards()
        _refuse_shards_in_broadcasts()

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        named = [*module.__dict__.get(DDP_IGNORES, ()), *sorted(_every_name(_divide(module)[0]))]
        module.__dict__[DDP_IGNORES] = list(dict.fromkeys(named))


def _refuse_nothing_but_shards() -> None:
    """Have DDP's constructor refuse modules without plain trainable parameters."""
    of_torch = DistributedDataParallel.__init__

    @functools.wraps(of_torch)
    def init(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        sharded, left = _divide(module)
        if sharded and not left:
            raise RuntimeError(
                f"DistributedDataParallel: all trainable parameters of this {type(module).__name__} are sharded, such as "
                f"{name_list(sharded, 3)}, and flatshard averages their gradients itself. Do not use "
                "DistributedDataParallel. If a tool adds it, choose its single-device strategy, or do not pass it the model"
            )
        of_torch(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def _refuse_shards_in_broadcasts() -> None:
    """Wrap torch's function that hands tensors to the C++ code of a broadcast, which no tensor class can refuse."""
    of_torch = states._sync_params_and_buffers

    @functools.wraps(of_torch)
    def broadcast(group: Any, module_states: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        for state in module_states:
            if isinstance(state, ShardTensor):
                raise RuntimeError(
                    f"{state._flatshard_info.describe()}, and a broadcast would overwrite it with another rank's shard. To "
                    "start from the values of rank 0 call fully_shard(..., sync_module_states=True). To broadcast other "
                    f"tensors, ignore the names in module.{DDP_IGNORES}"
                )
        of_torch(group, module_states, *args, **kwargs)

    states._sync_params_and_buffers = broadcast  # type: ignore[assignment]


def _every_name(fqns: Collection[str]) -> set[str]:
    """Return each name in the ways in which DDP writes it: a parameter of the root with and without a leading dot."""
    return {*fqns, *(f".{fqn}" for fqn in fqns if "." not in fqn)}


def _registered(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or module is None:
        return
    sharded, _ = _divide(module)
    if not sharded:
        return
    wrapper.parameters_to_ignore |= _every_name(sharded)
    leave_to_others(module)


def _divide(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the FQNs of sharded parameters in ``module``, under all of their names, and of other trainable parameters."""
    registrations = {(holder, name) for unit in all_units() for holder, name, _, _ in unit.handle.registrations.entries}
    sharded, left = [], []
    for prefix, at in module.named_modules(remove_duplicate=False):
        for name, param in at._parameters.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if (at, name) in registrations:
                sharded.append(fqn)
            elif param is not None and param.requires_grad:
                left.append(fqn)
    return sharded, left


# -- forks -------------------------------------------------------------------------------------------------------------

_inherited: weakref.WeakSet[Unit] = weakref.WeakSet()


class Forked(Extension):
    """Makes forwards of inherited units raise in the child process. [Note: Forked processes]"""

    def set_up(self) -> None:
        os.register_at_fork(after_in_child=_note_inherited)


def _note_inherited() -> None:
    """Make units of the parent refuse to run; called by Python in the child process after a fork."""
    if units := all_units():
        _inherited.update(units)
        Context.checks[:] = [_refuse_inherited]


def _refuse_inherited(unit: Unit) -> bool:
    """Raise if ``unit`` was inherited when its pass starts. Return whether to check again in the next pass."""
    runtime = unit.runtime
    if unit in _inherited and runtime.world_size > 1:
        raise RuntimeError(
            f"unit {unit.fqn or '<root>'!r} runs a forward in process {os.getpid()}, which was forked from rank "
            f"{runtime.rank} after fully_shard. A forked process has no process group, so the forward would wait forever. In "
            "a DataLoader worker use a model that is not sharded, or run this one in the training loop"
        )
    return True


# -- .data -------------------------------------------------------------------------------------------------------------

_Tensor: Any = torch.Tensor  # whose `data` a library may replace, too


def _get_data(param: nn.Parameter) -> torch.Tensor:
    if (unit := owner_of(param)) is not None:
        for flat in unit.handle.flats:
            flat.unsharded.assume_changed()
    data: torch.Tensor = _Tensor.data.__get__(param)
    return data


def _set_data(param: nn.Parameter, value: torch.Tensor) -> None:
    _Tensor.data.__set__(param, value)


class DataWrites(Extension):
    """Records reads of ``.data``. [Note: Written through .data]"""

    def set_up(self) -> None:
        nn.Parameter.data = property(_get_data, _set_data)  # type: ignore[assignment]
