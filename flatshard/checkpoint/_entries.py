"""What a job's state is made of: how each kind of it is saved, and loaded so that a failure changes nothing.

[Note: Nothing is changed by a failed load]
Loading has three phases, and all ranks have ended one before any begins the next.

1. All is checked that can be: names, shapes, files, sums; what optimizers will be given. Values that are no tensors are read,
   and what belongs to objects that only take a state dict as a whole is read beside.
2. What may refuse, takes over: objects with a ``load_state_dict`` of their own, optimizers (their options, and room for their
   tensors). If one raises, on any rank, those that were asked are given back what they had.
3. Shards and optimizers' tensors are read into their places. Nothing but the disk can fail here, just after all of it was
   read once.

So a load needs no memory beside that of training: parameters and optimizer state once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from flatshard._composable.find import contexts_of, units_of_parameters
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.handle import check_has_memory
from flatshard._optimizers import innermost, load_into, params_of
from flatshard.checkpoint._optimizer_load import to_load
from flatshard.checkpoint._optimizer_names import ParamNames, steps_only
from flatshard.checkpoint._optimizer_state import OptimizerState
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import idle_flats
from flatshard.checkpoint._state_dict_hooks import translates

Undo = Callable[[], object]


class Entry:
    """One value of a job's state: here a tensor or a plain value, which the caller gets back as it was read."""

    def __init__(self, key: str, value: Any, strict: bool = True) -> None:
        self.key, self.value, self.strict = key, value, strict
        self.elsewhere: tuple[str, ...] = ()  # what other ranks load: the beginnings of its names

    def saved(self) -> Any:
        """What is written."""
        return self.value

    def sized(self, names: Iterable[str]) -> list[str]:
        """Return the ``names`` for which ``template`` takes as much memory as the checkpoint says."""
        return []

    def template(self, names: Mapping[str, Any]) -> Any:
        """What is to be filled with what is read. ``names``: what the checkpoint has, by name."""
        return copied(self.saved())

    def is_in_place(self, way: tuple[Any, ...]) -> bool:
        """Whether a value of the template is memory that training uses: it is read in phase 3."""
        return False

    def check(self, loaded: Any) -> None:
        """Phase 1 ends: ``loaded`` is the template, filled but for what is in place. Raises if ``install`` would."""

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        """Phase 2: take over what was read. How to undo it is added to ``undos`` first."""

    def result(self, loaded: Any) -> Any:
        """What the caller gets."""
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
    """A module whose state dict, ``shown``, is the memory of its parameters and buffers, and nothing else."""

    def __init__(self, key: str, value: nn.Module, strict: bool, shown: dict[str, Any]) -> None:
        super().__init__(key, value, strict)
        self._shown = shown
        self._names: Mapping[str, Any] = {}  # what the checkpoint has

    def saved(self) -> Any:
        return self._shown

    def template(self, names: Mapping[str, Any]) -> Any:
        self._names = names
        return self._shown

    def is_in_place(self, way: tuple[Any, ...]) -> bool:
        return True

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        pass

    def result(self, loaded: Any) -> Any:
        read = [p for name, p in self.value.named_parameters() if f"{self.key}.{name}" in self._names]
        increment_version(read)  # a rank that has no elements of one must see the change, too
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

    def sized(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name.startswith(f"{self.key}.param_groups.")]

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

    def is_in_place(self, way: tuple[Any, ...]) -> bool:
        return way[:3] in self._in_place  # of a quantised value, the tensors inside

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
    """Those of a job's state.

    Raises:
        TypeError: ``state`` is no dict.
        ValueError: a name is no string, or has a dot; an optimizer's module is not among them.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            "state must be a dict of what the job consists of, such as {'model': model, 'optimizer': optimizer, 'step': 1}, "
            f"got a {type(state).__name__}"
        )
    modules = [v for v in state.values() if isinstance(v, nn.Module)]
    shown = {id(module): _settled_state(module) for module in modules}
    found: list[Entry] = []
    for key, value in state.items():
        if not isinstance(key, str):
            raise ValueError(f"state has the name {key!r}, which is no string")
        if "." in key:
            raise ValueError(f"state names {key!r}: a name with a dot could not be told from what is inside of {key!r}")
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
        elif isinstance(value, nn.Module) and _shows_memory(value, shown[id(value)]):
            found.append(InPlace(key, value, strict, shown[id(value)]))
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            found.append(Stateful(key, value, strict))
        else:
            found.append(Entry(key, value, strict))
    return found


def _settled_state(module: nn.Module) -> dict[str, Any]:
    """Its state dict, with sharded parameters also after ``unshard()``, and after a forward that was interrupted."""
    units = units_of_parameters(module)
    for context in contexts_of(units):
        if context.forwards and not context.is_running:
            context.recover()
    check_has_memory([unit.handle for unit in units], "checkpoint")
    found: dict[str, Any] = module.state_dict()
    return found


def _shows_memory(module: nn.Module, state: dict[str, Any]) -> bool:
    own = {_memory(t) for t in (*module.parameters(), *module.buffers())}
    return not any(map(_has_a_say, module.modules())) and all(
        isinstance(v, torch.Tensor) and (_memory(v) in own or v.numel() == 0) and not v.is_meta for v in state.values()
    )


def _memory(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, ShardedValue):
        tensor = tensor.to_local()
    return None if TensorSubclass.of(tensor) is not None else tensor.untyped_storage().data_ptr() or None


def _has_a_say(module: nn.Module) -> bool:
    """Whether a module has a say in how it is loaded, beyond torch's own."""
    own = [type(module).load_state_dict, type(module).set_extra_state]
    overrides = any(not f.__module__.startswith("torch.nn.") for f in own)
    return overrides or bool(module._load_state_dict_post_hooks) or translates(module)


def copied(value: Any, device: str | None = None) -> Any:
    """The same, of tensors that nobody else changes."""
    if type(value) is torch.Tensor:  # most are
        return value.detach().to(device or value.device, copy=True)
    return tree_map_only(torch.Tensor, lambda t: t.detach().to(device or t.device, copy=True), value)
