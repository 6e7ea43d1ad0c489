"""torchft: hybrid sharding whose replicas may die and come back.

Each replica group is a job of its own: ``fully_shard`` over its ranks, with a process group that knows of no other. torchft's
``Manager`` knows which groups are there, averages over them, and gives a group that comes back the state of another. When a
rank dies, its group's launcher ends the group and starts it again, as torchrun does; the others continue without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torchft import Manager

from flatshard.checkpoint import load_local_state_dict, local_state_dict
from flatshard.tensors import shard_info

State = dict[str, Any]


def average_gradients(manager: Manager, parameters: Iterable[nn.Parameter]) -> None:
    """Average ``.grad`` over the replica groups, in place. Call it between backward and the optimizer's step.

    If a group has died, nothing is raised: ``manager.should_commit()``, which torchft's ``Optimizer`` asks in ``step``, says
    that the gradients are not to be used.

    Args:
        manager: torchft's, in this rank's replica group.
        parameters: those that the optimizer steps, as ``flatshard.flat_parameters(model)``. All groups must have the same.

    Raises:
        ValueError: parameters of single units. They may have no gradient in one group, and one in another.
    """
    parameters = list(parameters)
    for param in parameters:
        if (info := shard_info(param)) is not None and not hasattr(param, "fqns"):
            raise ValueError(
                f"average_gradients: {info.fqn!r} is a single parameter, which another replica group may not have used. "
                "Build the optimizer on flatshard.flat_parameters(model), and pass these"
            )
    works = [manager.allreduce(param.grad) for param in parameters if param.grad is not None]
    for work in works:
        work.wait()


def state_functions(
    model: nn.Module, optimizer: torch.optim.Optimizer, extra: Mapping[str, Any] | None = None
) -> dict[str, Callable[..., Any]]:
    """Return the arguments ``state_dict`` and ``load_state_dict`` for torchft's ``Manager``.

    A rank of a group that comes back gets its shards from the rank of the same number in another group, so all groups have
    as many ranks.

    Args:
        model: sharded by ``fully_shard``.
        optimizer: on ``flatshard.flat_parameters(model)``.
        extra: anything with ``state_dict`` and ``load_state_dict``, by name: schedulers, samplers.
    """
    others = dict(extra or {})

    def state_dict() -> State:
        more = {name: each.state_dict() for name, each in others.items()}
        return {"model": local_state_dict(model), "optimizer": optimizer.state_dict(), "extra": more}

    def load_state_dict(state: State) -> None:
        load_local_state_dict(model, state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for name, each in others.items():
            each.load_state_dict(state["extra"][name])

    return {"state_dict": state_dict, "load_state_dict": load_state_dict}
