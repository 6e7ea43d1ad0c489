"""The entries of a job's state: how each kind is saved, and loaded so that a failure changes nothing.

[Note: Nothing is changed by a failed load]
Loading has three phases, and all ranks end one before any begins the next.

1. Check names, shapes, files, sums, and what optimizers will load. Read values that are no tensors. Read the state of objects
   that load a complete state dict into memory of its own.
2. Load what may refuse: objects with a ``load_state_dict`` of their own, and optimizers (their options, and memory for their
   tensors). If one raises on any rank, all that have loaded get back their previous state.
3. Read shards and optimizers' tensors in place. Only the disk can fail here, just after everything was read once.

So a load needs no memory beyond that of training: parameters and optimizer state once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from flatshard._base.optimizers import innermost, load_into, params_of
from flatshard._composable.find import contexts_of, units_of_parameters
from flatshard._composable.hooks import is_running, recover_context
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.handle import check_has_memory
from flatshard.checkpoint._optimizer_load import to_load
from flatshard.checkpoint._optimizer_names import ParamNames, steps_only
from flatshard.checkpoint._optimizer_state import OptimizerState
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import idle_flats
from flatshard.checkpoint._state_dict_hooks import translates

Undo = Callable[[], object]


class Entry:
    """A value of a job's state: in this class a tensor or a plain value, which is read and returned to the caller."""

    def __init__(self, key: str, value: Any, strict: bool = True) -> None:
        self.key, self.value, self.strict = key, value, strict
        self.elsewhere: tuple[str, ...] = ()  # prefixes of names that other ranks load

    def saved(self) -> Any:
        """Return the value to write."""
        return self.value

    def template(self, names: Mapping[str, Any]) -> Any:
        """Return the value to fill with what is read. ``names``: the checkpoint's metadata by name."""
        return copied(self.saved())

    def is_in_place(self, path: tuple[Any, ...]) -> bool:
        """Return whether the template's value at ``path`` is memory that training uses, and so is read in phase 3."""
        return False

    def check(self, loaded: Any) -> None:
        """Raise if ``install`` would, at the end of phase 1. In ``loaded``, only values in place are not read yet."""

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        """Load what was read, in phase 2, after adding to ``undos`` how to undo it."""

    def result(self, loaded: Any) -> Any:
        """Return the caller's value."""
        return loaded


class Stateful(Entry):
    """An object with ``state_dict()`` and ``load_state_dict()``."""

    def saved(self) -> Any:
        return self.value.state_dict()

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        before = copied(self.value.state_dict())
        undos.append(lambda: self.value.load_state_dict(before))
        lenient = not self.strict and isinstance(self.value, nn.Module)
        self.value.load_state_dict(loaded, **({"strict": False} if lenient else {}))

    def result(self, loaded: Any) -> Any:
        return self.value


class InPlace(Stateful):
    """A module whose state dict, ``shown``, is memory of its parameters and buffers, and nothing else."""

    def __init__(self, key: str, value: nn.Module, strict: bool, shown: dict[str, Any]) -> None:
        super().__init__(key, value, strict)
        self._shown = shown
        self._names: Mapping[str, Any] = {}  # the checkpoint's

    def saved(self) -> Any:
        return self._shown

    def template(self, names: Mapping[str, Any]) -> Any:
        self._names = names
        return self._shown

    def is_in_place(self, path: tuple[Any, ...]) -> bool:
        return True

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        pass

    def result(self, loaded: Any) -> Any:
        read = [p for name, p in self.value.named_parameters() if f"{self.key}.{name}" in self._names]
        increment_version(read)  # also of parameters of which this rank has no elements
        return self.value


class OptimizerEntry(Stateful):
    """An optimizer: its state by the names of its module's parameters, of which some may be sharded."""

    def __init__(self, key: str, value: Optimizer, names: ParamNames, strict: bool) -> None:
        super().__init__(key, innermost(value), strict)
        self._given, self._names = value, names
        self._load: dict[str, Any] = {}
        self._memory: dict[
            nn.Parameter, dict[str, torch.Tensor]
        ] = {}  # its tensors, old or new, that are read in place
        self._in_place: set[tuple[Any, ...]] = set()  # their keys in the template
        self.elsewhere = tuple(f"{key}.state.{fqn}." for fqn in names.names_elsewhere(value))

    def saved(self) -> Any:
        return OptimizerState.read(self._names, self.value, inside=True).to_dict()

    def template(self, names: Mapping[str, Any]) -> Any:
        prefix = f"{self.key}."
        wanted = {n.removeprefix(prefix): kind for n, kind in names.items() if n.startswith(prefix)}
        if not self.strict:  # state that the checkpoint lacks stays
            for fqn, values in self.saved()["state"].items():
                for key, value in values.items():
                    inner = [f".{name}" for name in value] if isinstance(value, dict) else [""]
                    wanted |= dict.fromkeys(f"state.{fqn}.{key}{name}" for name in inner)
        state = OptimizerState.read(self._names, self.value, wanted, inside=True)
        for param, memories, values in state.rows:
            for key, value in values.items():
                memory = memories[key]
                if isinstance(memory, torch.Tensor) and memory.dim():
                    self._memory.setdefault(param.stepped, {})[key] = memory
                    self._in_place.add(("state", param.fqn, key))
                else:
                    values[key] = copied(value)
        state.groups = copied(state.groups)
        return state.to_dict()

    def is_in_place(self, path: tuple[Any, ...]) -> bool:
        return path[:3] in self._in_place  # a longer path leads to a tensor inside of a quantised value

    def check(self, loaded: Any) -> None:
        small = {
            fqn: {key: value for key, value in values.items() if ("state", fqn, key) not in self._in_place}
            for fqn, values in loaded["state"].items()
        }
        ((_, self._load),) = to_load(self._names, self.value, {**loaded, "state": small}, self.strict)

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        """Load options and counts by the optimizer's own ``load_state_dict``; its tensors keep their memory, or are new."""
        optimizer, state, groups = self.value, self.value.state, self.value.param_groups
        before = list(groups)

        def undo() -> None:
            groups[:] = before
            optimizer.state, optimizer.param_groups = state, groups

        undos.append(undo)
        load_into(optimizer, self._load)
        for param, memory in self._memory.items():
            self.value.state[param] = {**self.value.state[param], **memory}

    def result(self, loaded: Any) -> Any:
        return self._given


def entries(state: Mapping[str, Any], strict: bool = True) -> list[Entry]:
    """Return an entry for each value of a job's state.

    Raises:
        TypeError: ``state`` is no dict.
        ValueError: a name is no string, or has a dot; an optimizer's module is not in ``state``.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            "state must be a dict of what the job consists of, such as {'model': model, 'optimizer': optimizer, 'step': 1}, "
            f"got a {type(state).__name__}"
        )
    modules = [v for v in state.values() if isinstance(v, nn.Module)]
    # State dicts of modules first: they end interrupted forwards, whose parameters optimizers could not find.
    shown = {id(module): sharded_state(module) for module in modules}
    found: list[Entry] = []
    for key, value in state.items():
        if not isinstance(key, str):
            raise ValueError(f"state has the name {key!r}, which is no string")
        if "." in key:
            raise ValueError(f"state names {key!r}: a name with a dot could be that of a value inside of another")
        if isinstance(value, Optimizer):
            owner = next((m for m in modules if steps_only(m, value)), None)
            if owner is None:
                raise ValueError(
                    f"optimizer {key!r} steps parameters of no module in the state: add the module, {{'model': model}}"
                )
            flats = idle_flats(owner, "checkpoint") if units_of_parameters(owner) else []
            if not flats and any(map(is_dtensor, params_of(value))):
                raise NotImplementedError(
                    f"{key!r} steps DTensors of a module that flatshard does not shard: save it by "
                    "torch.distributed.checkpoint, with get_optimizer_state_dict"
                )
            found.append(OptimizerEntry(key, value, ParamNames(owner, "checkpoint", flats), strict))
        elif isinstance(value, nn.Module) and shows_memory(value, shown[id(value)]):
            found.append(InPlace(key, value, strict, shown[id(value)]))
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            found.append(Stateful(key, value, strict))
        else:
            found.append(Entry(key, value, strict))
    return found


def sharded_state(module: nn.Module) -> dict[str, Any]:
    """Return the state dict with sharded parameters, also after ``unshard()`` and after a forward that was interrupted."""
    units = units_of_parameters(module)
    for context in contexts_of(units):
        if context.forwards and not is_running(context):
            recover_context(context)
    # Units in use stay as they are: inside `summon_full_params` the state dict has their full parameters.
    check_has_memory([unit.handle for unit in units if not unit.claims.in_use], "checkpoint")
    found: dict[str, Any] = module.state_dict()
    return found


def shows_memory(module: nn.Module, state: dict[str, Any]) -> bool:
    """Return whether reading into the tensors of ``state`` loads ``module``."""
    own = {_memory(t) for t in (*module.parameters(), *module.buffers())}
    return not any(map(_loads_itself, module.modules())) and all(
        isinstance(v, torch.Tensor) and (_memory(v) in own or v.numel() == 0) and not v.is_meta for v in state.values()
    )


def _memory(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, ShardedValue):
        tensor = tensor.to_local()
    return None if TensorSubclass.of(tensor) is not None else tensor.untyped_storage().data_ptr() or None


def _loads_itself(module: nn.Module) -> bool:
    """Return whether a module has code or hooks of its own for loading."""
    own = [type(module).load_state_dict, type(module).set_extra_state]
    overrides = any(not f.__module__.startswith("torch.nn.") for f in own)
    return overrides or bool(module._load_state_dict_post_hooks) or translates(module)


def copied(value: Any, device: str | None = None) -> Any:
    """Return a copy of ``value``, with copies of its tensors, on ``device`` if it is given."""
    if type(value) is torch.Tensor:  # the fast path for most
        return value.detach().to(device or value.device, copy=True)
    return tree_map_only(torch.Tensor, lambda t: t.detach().to(device or t.device, copy=True), value)
