"""A replacement for a module's dict of parameters. It detects a forward that runs while its parameters are sharded.

[Note: Forwards outside of the unit's]
``model.generate()``, if it is not registered as a forward, may call ``self.head(x)`` while the head is sharded. ``F.linear``
then gets a 1-D weight: it raises an error about shapes, or computes with it if the sizes happen to fit. A check in every
call of a module would cost 0.9 microseconds, and in every read of a parameter 0.1. But nn.Module reads ``_parameters`` only
for names that are not in the module's own ``__dict__``. So `Registrations` puts unsharded parameters into ``__dict__``, where
a forward finds them faster than in a plain module. Then a read of this dict never comes from a forward whose parameters are
unsharded. Parameters that are registered as None (``bias=False``) are always in ``__dict__``.

[Note: Who reads]
A forward that reads ``self.weight`` while it is sharded is wrong. A script that reads ``model.head.weight.grad`` is right.
Both read the same attribute of the same module, and torch tells a dict of neither. So the dict asks who calls (`Caller`), in
reads and writes while parameters are sharded. No step makes these for each parameter.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from typing import Any, NoReturn, Self

from torch import nn

from flatshard._base.callers import Caller, refuse_other_sharding
from flatshard._base.errors import RESTRUCTURE_BEFORE
from flatshard._base.names import UNIT_KEY
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_parameter import (
    ShardedParameter,
    fillings,
    handle_to_empty,
    is_sharded_parameter,
    own_of,
    show_full,
    show_shards,
)

_COPY = (
    "Make the copy before fully_shard; or shard the module as a unit of its own, and copy it outside of its forward, "
    "backward and summon_full_params"
)
"""The cure where a module is copied without the unit that gathers its parameters."""

Parameters = dict[str, nn.Parameter | None]


class GuardedParameters(Parameters):
    """A module's ``_parameters``. [Note: Forwards outside of the unit's]

    It always stores the sharded parameters. While unsharded parameters are in ``attributes``, reads return those.
    """

    __slots__ = ("attributes", "own", "shards")

    def __init__(self, parameters: Parameters, attributes: dict[str, Any]) -> None:
        super().__init__(parameters)
        # Descriptions of this rank's shards, in a copy of a module without its unit: it has these shards as plain parameters.
        self.shards: dict[str, ShardInfo] = {}
        self.own = frozenset(parameters)  # names that the unit registers: others are ties that came too late
        self.attributes = attributes  # the module's own ``__dict__``
        attributes.update(
            (name, None) for name, param in parameters.items() if param is None and name not in attributes
        )

    def _look(self, name: str) -> nn.Parameter | None:
        shown = self.attributes.get(name)
        return shown if isinstance(shown, nn.Parameter) else super().__getitem__(name)

    def _look_full(self, name: str) -> nn.Parameter | None:
        found = self._look(name)
        return show_full(found, super().values()) if is_sharded_parameter(found) else found

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if is_sharded_parameter(param):
            shown = self.attributes.get(name)
            if isinstance(shown, nn.Parameter):
                return shown
            return self._for_reader(param, Caller())
        if self.shards and param is not None:
            self._check_part(name, param, Caller())
        return param

    # All ways to read must give the same. `dict(self)` and `**self` do because this class has its own iterator.

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]  # dict's own view bypasses `_look`
        if fillings:
            if Caller().lists_own:
                return {name: self._look_full(name) for name in self}.items()
            show_shards()
        # In C, because `zero_grad` calls this: `_shows_own`, without a call.
        if not any(map(operator.is_not, map(self.attributes.get, self.keys()), itertools.repeat(None))):
            return super().items()
        shown = {name: self._look(name) for name in self}.items()
        return _with_own(shown, Caller())  # type: ignore[return-value]

    def values(self) -> ValuesView[nn.Parameter | None]:  # type: ignore[override]
        show_shards()
        return super().values() if self._shows_own() else {name: self._look(name) for name in self}.values()

    def _shows_own(self) -> bool:
        """Return whether modules show what is stored: no parameter is in ``attributes``."""
        # Parameters that are registered as None are in `attributes`, too.
        return not any(map(operator.is_not, map(self.attributes.get, self.keys()), itertools.repeat(None)))

    def get(self, name: str, default: Any = None) -> Any:
        return self._look(name) if name in self else default

    def copy(self) -> Parameters:
        return dict(self.items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def _for_reader(self, param: ShardedParameter, caller: Caller) -> nn.Parameter:
        """Return ``param``, or the full one while it is being filled. [Note: Who reads], [Note: Filled later]

        Raises:
            RuntimeError: a forward of this dict's module reads it. Others may: ``model.head.weight.grad``.
        """
        if not param._flatshard_info.is_full and (forward := caller.forward_of(self)) is not None:
            raise RuntimeError(forward.explain(param))
        _refuse_early(param, caller)
        return show_full(param, super().values())

    def _check_part(self, name: str, param: nn.Parameter, caller: Caller) -> None:
        """Raise if a forward reads a shard from a copy of its module that was made without its unit."""
        info = self.shards.get(name)
        if info is None or param.shape == info.shape or (forward := caller.forward_of(self)) is None:
            return
        raise RuntimeError(
            f"{type(forward.module).__name__}.forward would compute with this rank's shard of {info.fqn!r}, of shape "
            f"{tuple(param.shape)}: it is a copy of a module that was sharded as a part of another one. {_COPY}"
        )

    # `Registrations` writes to the plain dict. So a write here is by the user, and forwards must see the new value.

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        held = super().get(name)
        if is_sharded_parameter(held) and param is not held:
            caller = Caller()
            if isinstance(param, nn.Parameter) and handle_to_empty(held, caller, param):
                return
            refuse_other_sharding(held._flatshard_info.fqn)
            if caller.swaps:
                self._check_swap(name, held)
        elif is_sharded_parameter(param) and any(param is own for own in super().values()) and held is not param:
            _refuse_removal(param, name)
        super().__setitem__(name, param)
        self.attributes.pop(name, None)
        changes.note()

    def _check_swap(self, name: str, held: ShardedParameter) -> None:
        """Raise if ``functional_call`` lends a tensor to a forward, which would keep it as a new value of the parameter."""
        if not isinstance(self.attributes.get(name), nn.Parameter):
            raise RuntimeError(
                f"functional_call would replace parameter {held._flatshard_info.fqn!r}, which is sharded: its unit would "
                "keep the tensor as a new value. Call it while the parameters are full: `with torch.no_grad(), "
                "flatshard.summon_full_params(module): torch.func.functional_call(module, ...)`. If torch.export did it: "
                "export a new model that has the values of flatshard.checkpoint.full_state_dict(module)"
            )

    def __delitem__(self, name: str) -> None:
        held = super().get(name)
        if is_sharded_parameter(held):
            refuse_other_sharding(held._flatshard_info.fqn)
            if not isinstance(self.attributes.get(name), nn.Parameter) and name in self.own:
                _refuse_removal(held, name)
        super().__delitem__(name)
        self.attributes.pop(name, None)
        changes.note()

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        param = self._look(name)
        del self[name]
        return param

    def popitem(self) -> tuple[str, nn.Parameter | None]:
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, param in dict(*args, **kwargs).items():
            self[name] = param

    def __ior__(self, other: Any) -> Self:  # type: ignore[override,misc]  # as dict has it
        self.update(other)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedParameters:
        """Return the dict for a copy of the module. If the copy is sharded, `Registrations` calls ``adopt`` afterwards."""
        infos = {name: p._flatshard_info for name, p in super().items() if is_sharded_parameter(p)}
        shown = [name for name in infos if isinstance(self.attributes.get(name), nn.Parameter)]
        if shown and UNIT_KEY not in self.attributes:  # of a unit, its handle says so
            raise RuntimeError(
                f"cannot copy the module of parameter {infos[shown[0]].fqn!r}, which is sharded as a part of another one, "
                f"while its parameters are unsharded. {_COPY}"
            )
        result = GuardedParameters({}, {})
        memo[id(self)] = result
        for name, param in super().items():
            result[name] = copy.deepcopy(param, memo)
        result.shards = {name: info for name, info in infos.items() if not info.is_full}
        return result

    def adopt(self, attributes: dict[str, Any]) -> None:
        """Adopt the ``__dict__`` of a copied module, which is sharded as the original is."""
        self.attributes, self.shards = attributes, {}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class WatchedParameters(Parameters):
    """A module's ``_parameters`` where unsharded parameters are registered by ``setattr``: a recurrent module's.

    It recognises ``to_empty``, and shows full parameters while they are being filled.
    """

    __slots__ = ()

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        held = super().get(name)
        if isinstance(held, ShardedParameter) and isinstance(param, nn.Parameter) and param is not held:
            if not handle_to_empty(held, Caller(), param):
                super().__setitem__(name, param)
        else:
            super().__setitem__(name, param)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        return show_full(param, super().values()) if fillings and is_sharded_parameter(param) else param

    def items(self) -> ItemsView[str, nn.Parameter | None]:  # type: ignore[override]
        if fillings:
            if Caller().lists_own:
                return {name: self[name] for name in self}.items()
            show_shards()
        return _with_own(super().items(), Caller())  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedParameters:
        result = memo[id(self)] = WatchedParameters()
        for name, param in self.items():
            result[name] = copy.deepcopy(param, memo)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _with_own(shown: ItemsView[str, nn.Parameter | None], caller: Caller) -> Iterable[tuple[str, nn.Parameter | None]]:
    """Return ``shown``. ``module.to()``, ``half()`` and the like also get the user's own parameters, where these have another
    dtype or device than what is shown: there they may have nothing to convert.
    """
    if not caller.converts:
        return shown
    both = [(name, param, own_of(param)) for name, param in shown if param is not None]
    kinds = [(name, own, (own.dtype, own.device) != (p.dtype, p.device)) for name, p, own in both if own is not None]
    return [*shown, *((name, own) for name, own, differs in kinds if differs)]


def _refuse_early(param: ShardedParameter, caller: Caller) -> None:
    """Raise if ``torch.nn.utils`` calls (weight_norm, parametrize, prune, ...).

    ``_refuse_removal`` would refuse it later, but first it computes with the shard: some ranks would crash.
    """
    if (name := caller.restructures) is not None:
        raise RuntimeError(
            f"parameter {param._flatshard_info.fqn!r} is sharded, and {name} would compute with this rank's shard of it: "
            f"{RESTRUCTURE_BEFORE}"
        )


def _refuse_removal(param: ShardedParameter, name: str) -> NoReturn:
    """Raise: ``param`` would leave its module, or be there under a second ``name``. So begins what parametrizes, prunes or
    normalises a weight: it puts other parameters in its place.
    """
    raise RuntimeError(
        f"parameter {param._flatshard_info.fqn!r} is sharded, and {name!r} would be taken out of its module or renamed: "
        f"{RESTRUCTURE_BEFORE}"
    )
