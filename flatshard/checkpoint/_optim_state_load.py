"""Into an optimizer: the state that ``optim_state_dict`` gave, or that of a run that was not sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from flatshard._handle.unit_ranks import UnitRanks
from flatshard._optimizers import (
    Group,
    Optimizers,
    as_list,
    load_into,
    made_by_steps,
    options_of,
    steps_elsewhere,
    steps_whole,
)
from flatshard.checkpoint._barrier import agree
from flatshard.checkpoint._optim_params import (
    Named,
    Names,
    State,
    rekey,
)
from flatshard.checkpoint._optim_state_dict import hook_optimizer
from flatshard.checkpoint._sharded_value import NO_VALUES, ShardedValue
from flatshard.checkpoint._state_dict import idle_flats


def load_optim_state_dict(module: nn.Module, optim: Optimizers, state: dict[str, Any], *, strict: bool = True) -> None:
    """Give ``optim`` the ``state`` that :func:`optim_state_dict` or an unsharded run gave.

    Everything is looked at before anything is changed, where values are whole on all ranks: these call it together. A rank's
    own parts it loads alone.

    Example::

        whole = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)
        flatshard.checkpoint.load_optim_state_dict(model, optimizer, whole)

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optim: the optimizer to load, or several that were saved together.
        state: see :func:`optim_state_dict_to_load`.
        strict: every parameter of ``optim`` is in a saved group, and everything saved belongs to ``optim``.

    Raises:
        ValueError, RuntimeError: see :func:`optim_state_dict_to_load`. Nothing is changed.
    """
    names, problem = _names(module), None
    loads: list[tuple[Optimizer, dict[str, Any]]] = []
    try:
        loads = to_load(names, optim, state, strict)
    except ValueError as e:
        problem = e
    agree(_to_ask(names, state, problem is not None), "load_optim_state_dict", problem)
    for optimizer, load in loads:
        load_into(optimizer, load)


def _to_ask(names: Names, state: dict[str, Any], is_bad: bool) -> set[UnitRanks]:
    """The ranks that load together with this one: if it has whole values of parts, all that have other parts."""
    found = tree_leaves(state.get("state", state) if isinstance(state, dict) else state)
    tensors = [value for value in found if isinstance(value, torch.Tensor) and value.dim()]
    if any(isinstance(t, ShardedValue) for t in tensors) or not (tensors or is_bad):
        return set()
    return {flat.ranks for _, flat in names.flats if not flat.is_whole}


def optim_state_dict_to_load(
    module: nn.Module, optim: Optimizer, state: dict[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    """``state`` as ``optim.load_state_dict`` takes it: by number, with this rank's parts. No communication.

    Example::

        whole = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)
        state = flatshard.checkpoint.optim_state_dict_to_load(model, optimizer, whole)
        optimizer.load_state_dict(state)

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optim: the optimizer to load. Its groups may be cut otherwise than those saved, as long as parameters of one group
            were saved with the same options.
        state: by name, with whole tensors (each rank takes its part) or sharded values of this layout; or by number, as
            ``optimizer.state_dict()`` of a plain model has it: numbers count the parameters as ``optim`` was given them, or,
            where it steps flat parameters, as ``module.named_parameters()`` does.
        strict: every parameter of ``optim`` is in a saved group, and everything saved belongs to ``optim``.

    Raises:
        ValueError: names, shapes or dtypes do not fit; the message has all of them. Nothing is changed.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    ((_, load),) = to_load(_names(module), optim, state, strict)
    return load


def _names(module: nn.Module) -> Names:
    return Names(module, "load_optim_state_dict", idle_flats(module, "load_optim_state_dict"))


def to_load(
    names: Names, optim: Optimizers, state: dict[str, Any], strict: bool
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """``optim_state_dict_to_load`` for each of the optimizers, or an error for all of them."""
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ValueError("load_optim_state_dict takes a dict with 'state' and 'param_groups'")
    optimizers = as_list(optim)
    own = [named for optimizer in optimizers for group in names.groups(optimizer) for named in group]
    if any(isinstance(key, int) for group in state["param_groups"] for key in group["params"]):
        state = rekey(state, _order(names, own, state))
    load = _Load(names, own, state, strict)
    if strict:
        load.check_names(own)
    loads = [(optimizer, load.into(optimizer)) for optimizer in optimizers]
    if load.problems:
        lines = "\n\t".join(load.problems)
        raise ValueError(f"load_optim_state_dict: the state does not fit, and nothing has been changed:\n\t{lines}")
    for optimizer in optimizers:
        hook_optimizer(optimizer)  # torch's helpers may see what is loaded before there is a step
    return loads


def _order(names: Names, own: list[Named], state: dict[str, Any]) -> list[str]:
    """The names that a plain run's numbers stand for."""
    saved = {
        key: name
        for g in state["param_groups"]
        for key, name in zip(g["params"], g.get("param_names", ()), strict=False)
    }
    count = sum(len(g["params"]) for g in state["param_groups"])
    if len(saved) == count:
        return [saved[i] for i in range(count)]
    order = names.params if any(n.place is not None for n in own) else [n.fqn for n in own]
    if len(order) != count:
        raise ValueError(
            f"load_optim_state_dict: the state numbers {count} parameters, there are {len(order)}. Name them: "
            'flatshard.checkpoint.rekey(state, names, to="names")'
        )
    return order


class _Load:
    """A state dict by name on its way into optimizers. What does not fit is added to ``problems``."""

    def __init__(self, names: Names, own: list[Named], state: dict[str, Any], strict: bool) -> None:
        self.names, self.strict = names, strict
        self.problems: list[str] = []
        self.values: State = {names.aliases.get(fqn, fqn): values for fqn, values in state["state"].items()}
        self.options: dict[str, Group] = {}
        for group in state["param_groups"]:
            self.options.update((names.aliases.get(fqn, fqn), options_of(group)) for fqn in group["params"])
        # What has no dimension for others either: parameters of none cannot tell whether it lies as they do.
        self.counts = {"step"}
        for named in own:
            values = self.values.get(named.fqn, {}) if named.shape else {}
            self.counts.update(k for k, v in values.items() if isinstance(v, torch.Tensor) and not v.dim())

    def check_names(self, own: list[Named]) -> None:
        """Every parameter is in a saved group, and everything saved is of one of them."""
        fqns = dict.fromkeys(named.fqn for named in own)
        if missing := [fqn for fqn in fqns if fqn not in self.options]:
            self.problems.append(f"missing: {', '.join(map(repr, missing))}")
        if unexpected := [fqn for fqn in dict.fromkeys([*self.options, *self.values]) if fqn not in fqns]:
            self.problems.append(f"unexpected: {', '.join(map(repr, unexpected))}")

    def into(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.load_state_dict``'s argument."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[Group] = []
        number = 0
        for given in optimizer.param_groups:
            held = [self.names.of(param) for param in given["params"]]
            ids = range(number, number + len(held))
            number = ids.stop
            options = self._options([n for each in held for n in each])
            groups.append({**loaded_options(optimizer, given, options, self.strict), "params": list(ids)})
            for i, param, of_param in zip(ids, given["params"], held, strict=True):
                saved = [n for n in of_param if n.fqn in self.values]
                if saved and not steps_elsewhere(optimizer, param):
                    state[i] = self._joined(
                        param, {n.fqn: self._parts(n, steps_whole(optimizer)) for n in saved}, saved
                    )
        return {"state": state, "param_groups": groups}

    def _options(self, group: list[Named]) -> Group:
        """Those that the parameters of one group were saved with."""
        saved = {named.fqn: self.options[named.fqn] for named in group if named.fqn in self.options}
        first: Group = next(iter(saved.values()), {})
        if odd := [fqn for fqn, options in saved.items() if options != first]:
            self.problems.append(
                f"one group here, saved with other options than the first of it: {', '.join(map(repr, odd))}"
            )
        return first

    def _lies_as(self, named: Named, key: str, value: Any) -> bool:
        """Whether ``value`` is of each element of the parameter."""
        if not isinstance(value, torch.Tensor):
            return False
        return value.dim() > 0 or isinstance(value, ShardedValue) or not (named.shape or key in self.counts)

    def _parts(self, named: Named, is_whole: bool) -> dict[str, Any]:
        """The parameter's state with this rank's parts; ``is_whole``: with all of it."""
        result: dict[str, Any] = {}
        for key, value in self.values[named.fqn].items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                self.problems.append(f"{named.fqn}: {key}: {NO_VALUES}")
            elif is_whole and isinstance(value, ShardedValue):
                self.problems.append(
                    f"{named.fqn}: {key}: this rank needs all of it, and got its part ({value!r}): go through "
                    "torch.distributed.checkpoint.save and load, or give the other run's optim_state_dict(full=True)"
                )
            elif is_whole:
                result[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif self._lies_as(named, key, value):
                try:
                    result[key] = named.part(value)
                except ValueError as e:
                    self.problems.append(f"{named.fqn}: {key}: {e}")
            else:
                result[key] = value
        return result

    def _joined(self, param: nn.Parameter, parts: dict[str, dict[str, Any]], saved: list[Named]) -> dict[str, Any]:
        """The state of what the optimizer steps: one parameter's, or put together for a flat one."""
        if saved[0].place is None:
            return parts[saved[0].fqn]
        result: dict[str, Any] = {}
        for key in dict.fromkeys(key for values in parts.values() for key in values):
            having = [named for named in saved if key in parts[named.fqn]]
            first = parts[having[0].fqn][key]
            if self._lies_as(having[0], key, self.values[having[0].fqn][key]):
                result[key] = torch.zeros(param.shape, dtype=first.dtype, device=first.device)
                for named in having:
                    target = named.piece(result[key])
                    assert target is not None
                    target.copy_(parts[named.fqn][key])
            elif any(parts[named.fqn][key] != first for named in having):
                odd = ", ".join(repr(named.fqn) for named in having)
                self.problems.append(f"one flat parameter here, saved with different {key!r}: {odd}")
            else:
                result[key] = first
        return result


def loaded_options(optimizer: Optimizer, given: Group, saved: Group, strict: bool) -> Group:
    """What a group has besides parameters when ``saved`` has been loaded into it. [Note: Options of groups]"""
    own = {key: value for key, value in given.items() if key != "params"}
    gone = made_by_steps(optimizer, given, own.keys() - saved.keys() - {"param_names"}) if strict and saved else set()
    return {**{key: value for key, value in own.items() if key not in gone}, **saved}


def stepped_elsewhere(names: Names, optimizer: Optimizer) -> set[str]:
    """The names of parameters whose state is on another rank."""
    return {n.fqn for group in names.groups(optimizer) for n in group if steps_elsewhere(optimizer, n.stepped)}
