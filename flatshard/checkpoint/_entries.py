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
from flatshard._composable.state import unit_of
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard._handle.adapters.tensor_subclass import is_wrapper
from flatshard._handle.handle import check_has_memory
from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard.checkpoint._optimizer_load import to_load
from flatshard.checkpoint._optimizer_names import ParamNames
from flatshard.checkpoint._optimizer_state import OptimizerState
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import check_idle
from flatshard.checkpoint._state_dict_hooks import has_plain_names, translates

Undo = Callable[[], object]
ValuePath = tuple[Any, ...]
"""The keys that lead to a value in nested dicts and lists."""


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

    @property
    def in_place(self) -> dict[str, torch.Tensor]:
        """Memory that training uses, which the template leaves out and phase 3 fills, by names in the checkpoint."""
        return {}

    def flat(self, loaded: Any) -> tuple[dict[str, Any], dict[str, ValuePath]]:
        """Return the values of the template by names in the checkpoint, and the paths to those that are no tensors."""
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        return flatten_state_dict({self.key: loaded})

    def check(self, loaded: Any) -> None:
        """Raise if ``install`` would, at the end of phase 1."""

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
    """A module whose state dict is memory of its parameters and buffers, and nothing else."""

    def __init__(self, key: str, state: ModuleState, strict: bool) -> None:
        super().__init__(key, state.module, strict)
        self._state = state
        self._names: Mapping[str, Any] = {}  # the checkpoint's

    def saved(self) -> Any:
        return self._state.values

    def template(self, names: Mapping[str, Any]) -> Any:
        self._names = names
        return {}

    @property
    def in_place(self) -> dict[str, torch.Tensor]:
        return {f"{self.key}.{name}": value for name, value in self._state.values.items()}

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        pass

    def result(self, loaded: Any) -> Any:
        read = {id(p): p for name, p in self._state.params if f"{self.key}.{name}" in self._names}
        increment_version([*read.values()])  # also of parameters of which this rank has no elements
        return self.value


class OptimizerEntry(Stateful):
    """An optimizer: its state by the names of its module's parameters, of which some may be sharded."""

    def __init__(self, key: str, value: Optimizer, names: ParamNames, strict: bool) -> None:
        super().__init__(key, innermost(value), strict)
        self._given, self._names = value, names
        self._load: dict[str, Any] = {}
        self._memory: list[tuple[nn.Parameter, dict[str, torch.Tensor]]] = []  # tensors, old or new, read in place
        self._in_place: dict[str, torch.Tensor] = {}  # the same, or those inside of them, as the checkpoint has them
        self.elsewhere = tuple(f"{key}.state.{fqn}." for fqn in names.names_elsewhere(value))

    def saved(self) -> Any:
        return OptimizerState.read(self._names, self.value, inside=True).to_dict()

    def template(self, names: Mapping[str, Any]) -> Any:
        prefix = f"{self.key}."
        wanted = {n[len(prefix) :]: kind for n, kind in names.items() if n.startswith(prefix)}
        if not self.strict:  # state that the checkpoint lacks stays
            for fqn, values in self.saved()["state"].items():
                for key, value in values.items():
                    inner = [f".{name}" for name in value] if isinstance(value, dict) else [""]
                    wanted |= dict.fromkeys(f"state.{fqn}.{key}{name}" for name in inner)
        state = OptimizerState.read(self._names, self.value, wanted, inside=True)
        found = state.to_dict()
        for param, memory, _ in state.rows:
            large: dict[str, torch.Tensor] = {}
            for key, value in found["state"].get(param.fqn, {}).items():
                if isinstance(kept := memory[key], torch.Tensor) and kept.ndim:
                    large[key], name = kept, f"{prefix}state.{param.fqn}.{key}"
                    inside = {f"{name}.{each}": tensor for each, tensor in value.items()} if type(value) is dict else {}
                    self._in_place.update(inside or {name: value})
            if large:
                self._memory.append((param.stepped, large))
                left = found["state"][param.fqn].items()
                found["state"][param.fqn] = {key: value for key, value in left if key not in large}
        small = {fqn: {key: copied(v) for key, v in values.items()} for fqn, values in found["state"].items()}
        return {"state": small, "param_groups": copied(state.groups)}

    def flat(self, loaded: Any) -> tuple[dict[str, Any], dict[str, ValuePath]]:
        tensors, others = dict[str, Any](), dict[str, dict[str, Any]]()
        for fqn, values in loaded["state"].items():
            for key, value in values.items():
                if type(value) is torch.Tensor:  # most are counts of steps
                    tensors[f"{self.key}.state.{fqn}.{key}"] = value
                else:
                    others.setdefault(fqn, {})[key] = value
        found, paths = super().flat({**loaded, "state": others})
        return tensors | found, paths

    @property
    def in_place(self) -> dict[str, torch.Tensor]:
        return self._in_place

    def check(self, loaded: Any) -> None:
        ((_, self._load),) = to_load(self._names, self.value, loaded, self.strict)

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        """Load options and counts by the optimizer's own ``load_state_dict``; its tensors keep their memory, or are new."""
        optimizer, state, groups = self.value, self.value.state, self.value.param_groups
        before = list(groups)

        def undo() -> None:
            groups[:] = before
            optimizer.state, optimizer.param_groups = state, groups

        undos.append(undo)
        load_into(optimizer, self._load)
        for param, memory in self._memory:
            self.value.state[param].update(memory)

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
    states = {id(module): ModuleState(module) for module in modules}
    found: list[Entry] = []
    for key, value in state.items():
        if not isinstance(key, str):
            raise ValueError(f"state has the name {key!r}, which is no string")
        if "." in key:
            raise ValueError(f"state names {key!r}: a name with a dot could be that of a value inside of another")
        if isinstance(value, Optimizer):
            owner = next((s for s in states.values() if s.has_parameters_of(value)), None)
            if owner is None:
                raise ValueError(
                    f"optimizer {key!r} steps parameters of no module in the state: add the module, {{'model': model}}"
                )
            flats = check_idle(owner.units, "checkpoint")
            if not flats and any(map(is_dtensor, params_of(value))):
                raise NotImplementedError(
                    f"{key!r} steps DTensors of a module that flatshard does not shard: save it by "
                    "torch.distributed.checkpoint, with get_optimizer_state_dict"
                )
            names = ParamNames(owner.module, "checkpoint", flats, owner.params, owner.has_plain_names)
            found.append(OptimizerEntry(key, value, names, strict))
        elif isinstance(value, nn.Module) and states[id(value)].shows_memory:
            found.append(InPlace(key, states[id(value)], strict))
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            found.append(Stateful(key, value, strict))
        else:
            found.append(Entry(key, value, strict))
    return found


class ModuleState:
    """The state dict of a module, with sharded parameters, and the names of its parameters.

    They are also found after ``unshard()`` and after a forward that was interrupted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.units = module, units_of_parameters(module)
        for context in contexts_of(self.units):
            if context.forwards and not is_running(context):
                recover_context(context)
        # Units in use stay as they are: inside `summon_full_params` the state dict has their full parameters.
        check_has_memory([unit.handle for unit in self.units if not unit.claims.in_use], "checkpoint")
        self.values: dict[str, Any] = module.state_dict()
        self._modules: list[tuple[str, nn.Module]] = []  # under all of their names
        _add_modules(module, "", self._modules)
        self.params = [
            (prefix + name, param)
            for prefix, each in self._modules
            for name, param in each._parameters.items()
            if param is not None
        ]

    @property
    def shows_memory(self) -> bool:
        """Whether reading into the tensors of the state dict loads the module."""
        if any(map(_class_loads_itself, {type(m) for _, m in self._modules})):
            return False
        if any([m._load_state_dict_post_hooks or translates(m) for _, m in self._modules]):
            return False
        buffers = [each for _, m in self._modules for each in m._buffers.values() if each is not None]
        own = {_memory(t) for t in (*[param for _, param in self.params], *buffers)}
        return all(
            [
                isinstance(v, torch.Tensor) and (_memory(v) in own or v.numel() == 0) and not v.is_meta
                for v in self.values.values()
            ]
        )

    def has_parameters_of(self, optimizer: Optimizer) -> bool:
        """Return whether ``optimizer`` steps nothing but parameters and flat parameters of the module."""
        left = {id(param) for param in params_of(optimizer)} - {id(param) for _, param in self.params}
        inside = [unit for _, m in self._modules if (unit := unit_of(m)) is not None] if left else []
        return left <= {id(flat.shard_param) for unit in inside for flat in unit.handle.flats}

    @property
    def has_plain_names(self) -> bool:
        """Whether the state dict has the parameters under the names of modules, as no hook or class changes names."""
        return all(map(has_plain_names, [m for _, m in self._modules]))


def _add_modules(module: nn.Module, prefix: str, found: list[tuple[str, nn.Module]]) -> None:
    found.append((prefix, module))
    for name, child in module._modules.items():
        if child is not None:
            _add_modules(child, f"{prefix}{name}.", found)


def _memory(tensor: torch.Tensor) -> Any:
    if type(tensor) is ShardedValue:
        tensor = tensor.to_local()
    is_plain = type(tensor) in (torch.Tensor, ShardedParameter)
    return None if not is_plain and is_wrapper(tensor) else tensor.untyped_storage().data_ptr() or None


def _class_loads_itself(kind: type[nn.Module]) -> bool:
    """Return whether a class of modules has code of its own for loading."""
    return any(not f.__module__.startswith("torch.nn.") for f in (kind.load_state_dict, kind.set_extra_state))


def copied(value: Any, device: str | None = None) -> Any:
    """Return a copy of ``value``, with copies of its tensors, on ``device`` if it is given."""
    if type(value) is torch.Tensor:  # the fast path for most
        return value.detach().to(device or value.device, copy=True)
    return tree_map_only(torch.Tensor, lambda t: t.detach().to(device or t.device, copy=True), value)
