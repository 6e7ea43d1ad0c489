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
from torch.optim import Optimizer

from flatshard._composable.state import units_below
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.unfilled import check_has_memory
from flatshard.checkpoint._optim_names import Names, as_list, rekey, steps_only
from flatshard.checkpoint._optim_options import options_of
from flatshard.checkpoint._optim_state_dict import own_optim_state
from flatshard.checkpoint._optim_state_load import stepped_elsewhere, to_load
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import idle_flats
from flatshard.checkpoint._state_dict_hooks import translates

Undo = Callable[[], object]


class Entry:
    """One value of a job's state: here a tensor or a plain value, which the caller gets back as it was read."""

    def __init__(self, key: str, value: Any, strict: bool = True) -> None:
        self.key, self.value, self.strict = key, value, strict
        self.elsewhere: tuple[str, ...] = ()  # how names begin that other ranks load

    def saved(self) -> Any:
        """What is written."""
        return self.value

    def template(self, names: Iterable[str]) -> Any:
        """What is to be read, of what the checkpoint's ``names`` say it has. Tensors on meta are not read yet."""
        return copied(self.saved())

    def check(self, loaded: Any) -> None:
        """Phase 1 ends: ``loaded`` is the template, filled but for what is on meta. Raises if ``install`` would."""

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        """Phase 2: take over what was read. How to undo it is added to ``undos`` first."""

    def places(self) -> Mapping[str, Any]:
        """Phase 3: where what is on meta in the template is to be read to."""
        return {}

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
        self.value.load_state_dict(loaded, **({} if self.strict else self._lenient))

    @property
    def _lenient(self) -> dict[str, Any]:
        return {"strict": False} if isinstance(self.value, nn.Module) else {}

    def result(self, loaded: Any) -> Any:
        return self.value


class InPlace(Stateful):
    """A module whose state dict, ``shown``, is the memory of its parameters and buffers, and nothing else."""

    def __init__(self, key: str, value: nn.Module, strict: bool, shown: dict[str, Any]) -> None:
        super().__init__(key, value, strict)
        self._shown = shown

    def saved(self) -> Any:
        return self._shown

    def template(self, names: Iterable[str]) -> Any:
        return on_meta(self._shown, scalars=True)

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        pass

    def places(self) -> Mapping[str, Any]:
        return self._shown


class Optimized(Stateful):
    """An optimizer: its state by the names of its module's parameters, of which some are sharded."""

    def __init__(self, key: str, value: Optimizer, names: Names, strict: bool) -> None:
        super().__init__(key, value, strict)
        self._names = names
        self._params = [p for group in value.param_groups for p in group["params"]]
        self._load: dict[str, Any] = {}
        self.elsewhere = tuple(f"{key}.state.{fqn}." for fqn in stepped_elsewhere(names, value))

    def saved(self) -> Any:
        return own_optim_state(self._names, self.value)

    def template(self, names: Iterable[str]) -> Any:
        return on_meta(own_optim_state(self._names, self.value, self._wanted(names)))

    def _wanted(self, names: Iterable[str]) -> list[str]:
        """The keys of state that is to be loaded: those in the checkpoint, and, where it may lack some, those that stay."""
        prefix = f"{self.key}."
        saved = [n.removeprefix(prefix) for n in names if n.startswith(prefix)]
        stay = {} if self.strict else self.saved()["state"]
        return saved + [f"state.{n}.{k}" for n, values in stay.items() for k in values]

    def check(self, loaded: Any) -> None:
        (self._load,) = to_load(self._names, as_list(self.value), loaded, self.strict)

    def install(self, loaded: Any, undos: list[Undo]) -> None:
        """Options and counts by the optimizer's own ``load_state_dict``; its tensors keep their memory, or are made."""
        state, groups, params = self.value.state, self.value.param_groups, self._params
        undos.append(lambda: self.value.__dict__.update(state=state, param_groups=groups))
        given = self._load["state"]
        small = {i: {k: v for k, v in own.items() if not _is_on_meta(v)} for i, own in given.items()}
        self.value.load_state_dict({**self._load, "state": small})
        for i, own in given.items():
            taken = self.value.state[params[i]]
            room = {k: _room(params[i], state, k, v) if _is_on_meta(v) else taken.get(k, v) for k, v in own.items()}
            self.value.state[params[i]] = {**taken, **room}

    def places(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.saved()
        return found


class PlainOptimized(Optimized):
    """An optimizer of a module that is not sharded: its own ``state_dict()``, by name."""

    def __init__(self, key: str, value: Optimizer, names: Names, strict: bool) -> None:
        super().__init__(key, value, names, strict)
        self._order = [n.fqn for group in names.groups(value) for n in group]
        if any(map(is_dtensor, self._params)):
            raise NotImplementedError(
                f"{key!r} steps DTensors of a module that flatshard does not shard: save it by "
                "torch.distributed.checkpoint, with get_optimizer_state_dict"
            )

    def saved(self) -> Any:
        result = rekey(self.value.state_dict(), self._order)
        groups = [{"params": g["params"], **dict(options_of(g))} for g in result["param_groups"]]
        return {**result, "param_groups": groups}

    def template(self, names: Iterable[str]) -> Any:
        own, params = self.saved(), dict(zip(self._order, self._params, strict=True))
        state: dict[str, dict[str, Any]] = {}
        for key in self._wanted(names):
            name, _, short = key.removeprefix("state.").rpartition(".")
            if key.startswith("state.") and name in params:
                like = torch.zeros(()) if short == "step" else params[name].detach()
                state.setdefault(name, {})[short] = own["state"].get(name, {}).get(short, like)
        return on_meta({**own, "state": state})

    def check(self, loaded: Any) -> None:
        self._load = rekey(loaded, self._order, to="ids")


def _is_on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _room(param: nn.Parameter, state: Mapping[Any, dict[str, Any]], key: str, value: torch.Tensor) -> torch.Tensor:
    """Where ``value`` is to be read: memory that is there already, or new."""
    known = state.get(param, {}).get(key)
    if isinstance(known, torch.Tensor) and (known.shape, known.dtype) == (value.shape, value.dtype):
        return known
    return torch.empty_like(value, device=param.device)


def entries(state: Mapping[str, Any], strict: bool = True) -> list[Entry]:
    """Those of a job's state.

    Raises:
        TypeError: ``state`` is no dict.
        ValueError: a name has a dot; an optimizer's module is not among them.
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
        if "." in key:
            raise ValueError(f"state names {key!r}: a name with a dot could not be told from what is inside of {key!r}")
        if isinstance(value, Optimizer):
            owner = next((m for m in modules if steps_only(m, value)), None)
            if owner is None:
                raise ValueError(
                    f"optimizer {key!r} steps parameters of no module in the state: add the module, {{'model': model}}"
                )
            flats = idle_flats(owner, "checkpoint") if units_below(owner) else []
            kind = Optimized if flats else PlainOptimized
            found.append(kind(key, value, Names(owner, "checkpoint", flats), strict))
        elif isinstance(value, nn.Module) and _shows_memory(value, shown[id(value)]):
            found.append(InPlace(key, value, strict, shown[id(value)]))
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            found.append(Stateful(key, value, strict))
        else:
            found.append(Entry(key, value, strict))
    return found


def _settled_state(module: nn.Module) -> dict[str, Any]:
    """Its state dict, with sharded parameters also after ``unshard()``, and after a forward that was interrupted."""
    for context in {unit.context for unit in units_below(module)}:
        if context.forwards and not context.is_running:
            context.recover()
    check_has_memory([unit.handle for unit in units_below(module)], "checkpoint")
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
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {k: copied(v, device) for k, v in value.items()}
    return type(value)(copied(v, device) for v in value) if type(value) in (list, tuple) else value


def on_meta(value: Any, scalars: bool = False) -> Any:
    """The same with tensors that have no memory; a copy of those of no dimension, unless ``scalars``."""
    if isinstance(value, ShardedValue):
        return value.on_meta() if value.dim() or scalars else value.detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta") if value.dim() or scalars else value.detach().clone()
    if isinstance(value, Mapping):
        return {k: on_meta(v, scalars) for k, v in value.items()}
    return type(value)(on_meta(v, scalars) for v in value) if type(value) in (list, tuple) else value
