"""Loading state into optimizers: what ``optim_state_dict`` returned, or the state of a run that was not sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.old_names import old_arguments
from flatshard._base.optimizers import (
    Group,
    Optimizers,
    as_list,
    load_into,
    options_of,
    steps_elsewhere,
    steps_whole,
)
from flatshard.checkpoint._barrier import agree
from flatshard.checkpoint._optimizer_hooks import register_hooks
from flatshard.checkpoint._optimizer_names import ParamNames, SteppedParam, count_keys, rekey_optim_state_dict
from flatshard.checkpoint._optimizer_state import State
from flatshard.checkpoint._sharded_value import NO_VALUES, ShardedValue, own_block
from flatshard.checkpoint._state_dict import idle_flats


@old_arguments(optim="optimizers")
def load_optim_state_dict(
    module: nn.Module, optimizers: Optimizers, state: dict[str, Any], *, strict: bool = True
) -> None:
    """Load ``state``, from :func:`optim_state_dict` or an unsharded run, into ``optimizers``.

    Everything is checked before anything is changed, on all ranks: if it does not fit on one rank, none loads. All ranks must
    call this together.

    Example::

        whole = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)
        flatshard.checkpoint.load_optim_state_dict(model, optimizer, whole)

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optimizers: the optimizer to load, or several that were saved together.
        state: see :func:`optim_state_dict_to_load`.
        strict: every parameter of them is in a saved group, and everything saved belongs to them.

    Raises:
        ValueError, RuntimeError: see :func:`optim_state_dict_to_load`. Nothing is changed.
    """
    names, problem = _names(module), None
    loads: list[tuple[Optimizer, dict[str, Any]]] = []
    try:
        loads = to_load(names, optimizers, state, strict)
    except ValueError as e:
        problem = str(e)
    # Even if all values are shards: a rank may have none, or full values of what it alone steps, and could not tell.
    agree({flat.ranks for _, flat in names.flats if not flat.holds_all}, "load_optim_state_dict", problem, ValueError)
    for optimizer, load in loads:
        load_into(optimizer, load)


@old_arguments(optim="optimizer")
def optim_state_dict_to_load(
    module: nn.Module, optimizer: Optimizer, state: dict[str, Any], *, strict: bool = True
) -> dict[str, Any]:
    """Return ``state`` as ``optimizer.load_state_dict`` takes it: by number, with this rank's shards. No communication.

    Example::

        whole = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)
        state = flatshard.checkpoint.optim_state_dict_to_load(model, optimizer, whole)
        optimizer.load_state_dict(state)

    Args:
        module: the sharded module that the optimizer's parameters come from.
        optimizer: the optimizer to load. Its groups may be cut otherwise than those saved, as long as parameters of one group
            were saved with the same options.
        state: by name, with full tensors (each rank loads its shard) or sharded values of this layout; or by number, as
            ``optimizer.state_dict()`` of a plain model has it. Numbers count the parameters as ``optimizer`` got them, or
            as ``module.named_parameters()`` lists them if it steps flat parameters.
        strict: every parameter of ``optimizer`` is in a saved group, and everything saved belongs to it.

    Raises:
        ValueError: names, shapes or dtypes do not fit; the message has all of them. Nothing is changed.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    ((_, load),) = to_load(_names(module), optimizer, state, strict)
    return load


def _names(module: nn.Module) -> ParamNames:
    return ParamNames(module, "load_optim_state_dict", idle_flats(module, "load_optim_state_dict"))


def to_load(
    names: ParamNames, optim: Optimizers, state: dict[str, Any], strict: bool
) -> list[tuple[Optimizer, dict[str, Any]]]:
    """Return what each optimizer's ``load_state_dict`` takes.

    Raises:
        ValueError: ``state`` does not fit; the message has all problems of all optimizers.
    """
    if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
        raise ValueError("load_optim_state_dict takes a dict with 'state' and 'param_groups'")
    optimizers = as_list(optim)
    stepped = [param for optimizer in optimizers for param in names.find_all(optimizer)]
    if any(isinstance(key, int) for group in state["param_groups"] for key in group["params"]):
        state = rekey_optim_state_dict(state, _order(names, stepped, state))
    load = _Load(names, stepped, state, strict)
    if strict:
        load.check_names(stepped)
    loads = [(optimizer, load.build_state(optimizer)) for optimizer in optimizers]
    if load.problems:
        lines = "\n\t".join(load.problems)
        raise ValueError(f"load_optim_state_dict: the state does not fit, and nothing has been changed:\n\t{lines}")
    for optimizer in optimizers:
        register_hooks(optimizer)  # torch's helpers may read what is loaded before there is a step
    return loads


def _order(names: ParamNames, stepped: list[SteppedParam], state: dict[str, Any]) -> list[str]:
    """Return the names that the numbers of a plain run's state stand for."""
    saved = {
        key: name
        for g in state["param_groups"]
        for key, name in zip(g["params"], g.get("param_names", ()), strict=False)
    }
    count = sum(len(g["params"]) for g in state["param_groups"])
    if len(saved) == count:
        return [saved[i] for i in range(count)]
    order = names.params if any(param.place is not None for param in stepped) else [param.fqn for param in stepped]
    if len(order) != count:
        raise ValueError(
            f"load_optim_state_dict: the state numbers {count} parameters, there are {len(order)}. Name them: "
            'flatshard.checkpoint.rekey_optim_state_dict(state, names, to="names")'
        )
    return order


def _own_block(param: SteppedParam, value: Any) -> torch.Tensor | None:
    """Return the value for the experts that this rank's process group has, or None if it is no value of experts."""
    info = param.info
    if info is None or info.parallel is None or not isinstance(value, torch.Tensor) or not value.dim():
        return None
    return own_block(value, info)


class _Load:
    """A state dict by name, to be loaded into optimizers. Everything that does not fit is added to ``problems``."""

    def __init__(self, names: ParamNames, stepped: list[SteppedParam], state: dict[str, Any], strict: bool) -> None:
        self.names, self.strict = names, strict
        self.problems: list[str] = []
        self.values: State = {names.aliases.get(fqn, fqn): values for fqn, values in state["state"].items()}
        self.options: dict[str, Group] = {}
        for group in state["param_groups"]:
            self.options |= dict.fromkeys([names.aliases.get(fqn, fqn) for fqn in group["params"]], options_of(group))
        self.counts = count_keys((param.shape, self.values.get(param.fqn, {})) for param in stepped)

    def check_names(self, stepped: list[SteppedParam]) -> None:
        """Add a problem unless every parameter is in a saved group, and everything saved belongs to one of them."""
        fqns = dict.fromkeys(param.fqn for param in stepped)
        if missing := [fqn for fqn in fqns if fqn not in self.options]:
            self.problems.append(f"missing: {', '.join(map(repr, missing))}")
        if unexpected := [fqn for fqn in dict.fromkeys([*self.options, *self.values]) if fqn not in fqns]:
            self.problems.append(f"unexpected: {', '.join(map(repr, unexpected))}")

    def build_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the argument of ``optimizer.load_state_dict``."""
        state: dict[int, dict[str, Any]] = {}
        groups: list[Group] = []
        number, needs_full = 0, steps_whole(optimizer)
        for given in optimizer.param_groups:
            held = [self.names.find(stepped) for stepped in given["params"]]
            ids = range(number, number + len(held))
            number = ids.stop
            options = self._saved_options([param for params in held for param in params])
            groups.append({**given, **options, "params": list(ids)})  # optimizers.py, [Note: Options of groups]
            for i, stepped, params in zip(ids, given["params"], held, strict=True):
                saved = [param for param in params if param.fqn in self.values]
                if saved and not (needs_full and steps_elsewhere(optimizer, stepped)):
                    shards = {param.fqn: self._shards(param, needs_full) for param in saved}
                    state[i] = self._join(stepped, shards, saved)
        return {"state": state, "param_groups": groups}

    def _saved_options(self, params: list[SteppedParam]) -> Group:
        """Return the options that the parameters of one group were saved with."""
        saved = {param.fqn: self.options[param.fqn] for param in params if param.fqn in self.options}
        first: Group = next(iter(saved.values()), {})
        if odd := [fqn for fqn, options in saved.items() if options is not first and options != first]:
            self.problems.append(
                f"one group here, saved with other options than the first of it: {', '.join(map(repr, odd))}"
            )
        return first

    def _is_elementwise(self, param: SteppedParam, key: str, value: Any) -> bool:
        """Return whether ``value`` has an entry for each element of the parameter."""
        if not isinstance(value, torch.Tensor):
            return False
        return value.dim() > 0 or isinstance(value, ShardedValue) or not (param.shape or key in self.counts)

    def _shards(self, param: SteppedParam, needs_full: bool) -> dict[str, Any]:
        """Return the parameter's state with this rank's shards, or with full values if the optimizer needs them."""
        result: dict[str, Any] = {}
        for key, value in self.values[param.fqn].items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                self.problems.append(f"{param.fqn}: {key}: {NO_VALUES}")
            elif needs_full and (block := _own_block(param, value)) is not None:
                result[key] = block
            elif needs_full and isinstance(value, ShardedValue):
                self.problems.append(
                    f"{param.fqn}: {key}: this rank needs the full value, and got its shard ({value!r}): go through "
                    "torch.distributed.checkpoint.save and load, or give the other run's optim_state_dict(full=True)"
                )
            elif needs_full:
                result[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif self._is_elementwise(param, key, value):
                try:
                    result[key] = param.own_shard(value)
                except ValueError as e:
                    self.problems.append(f"{param.fqn}: {key}: {e}")
            else:
                result[key] = value
        return result

    def _join(self, stepped: nn.Parameter, shards: State, saved: list[SteppedParam]) -> dict[str, Any]:
        """Return the state of what the optimizer steps: one parameter's, or a flat parameter's put together."""
        if saved[0].place is None:
            return shards[saved[0].fqn]
        result: dict[str, Any] = {}
        for key in dict.fromkeys(key for values in shards.values() for key in values):
            having = [param for param in saved if key in shards[param.fqn]]
            first = shards[having[0].fqn][key]
            if self._is_elementwise(having[0], key, self.values[having[0].fqn][key]):
                result[key] = torch.zeros(stepped.shape, dtype=first.dtype, device=first.device)
                for param in having:
                    target = param.piece(result[key])
                    assert target is not None
                    target.copy_(shards[param.fqn][key])
            elif any(shards[param.fqn][key] != first for param in having):
                odd = ", ".join(repr(param.fqn) for param in having)
                self.problems.append(f"one flat parameter here, saved with different {key!r}: {odd}")
            else:
                result[key] = first
        return result
