"""What several clients need: whole state as one process has it, and the layers that a model of transformers names itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import flatshard


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``model`` has units."""
    return any(isinstance(p, flatshard.tensors.ShardedParameter) for p in model.parameters())


def policy_of(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of layers that ``model`` names in ``_no_split_modules``, as models of transformers do.

    With adapters of peft around it, also the class of the base model: ``generate`` calls that one, past the outermost unit.

    Raises:
        ValueError: it names none, or has none of them.
    """
    names = {n for m in model.modules() for n in getattr(m, "_no_split_modules", None) or ()}
    found = {type(m) for m in model.modules() if type(m).__name__ in names}
    if not found:
        raise ValueError(f"{type(model).__name__} does not name its layers (_no_split_modules): pass policy={{Block}}")
    if hasattr(model, "get_base_model"):
        found.add(type(model.get_base_model()))  # type: ignore[operator]
    return found


def whole_optimizer_state(model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` as in one process: by number, with full tensors. All ranks must call it.

    ``rank0_only``: the other ranks get ``{}``.
    """
    state = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True, rank0_only=rank0_only)
    if not state:
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    return flatshard.checkpoint.rekey_optim_state_dict(state, names, to="ids")


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Return ``model.num_parameters`` of transformers, counting full parameters."""
    left_out = {f"{n}.weight" for n, m in model.named_modules() if exclude_embeddings and isinstance(m, nn.Embedding)}
    counted = [p for n, p in model.named_parameters() if n not in left_out and (p.requires_grad or not only_trainable)]
    return sum(flatshard.full_shape(p).numel() for p in counted)


def count_whole(model: nn.Module) -> None:
    """Make ``num_parameters`` of transformers, and ``print_trainable_parameters`` of peft, count full parameters."""
    if hasattr(model, "num_parameters"):
        model.num_parameters = functools.partial(num_parameters, model)  # type: ignore[assignment]
    if hasattr(model, "get_nb_trainable_parameters"):
        model.get_nb_trainable_parameters = functools.partial(_trainable_and_all, model)  # type: ignore[assignment]


def generate_kept(model: nn.Module) -> None:
    """Make ``generate`` of transformers keep ``model`` unsharded: it gathers once, whatever length a rank generates."""
    found = getattr(model, "generate", None)
    if found is not None and getattr(found, "func", None) is not _generate:
        model.generate = functools.partial(_generate, model, found)  # type: ignore[assignment]


def _generate(model: nn.Module, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with flatshard.keep_unsharded(model):
        return generate(*args, **kwargs)


def _trainable_and_all(model: nn.Module) -> tuple[int, int]:
    return num_parameters(model, only_trainable=True), num_parameters(model)


def load_whole(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load ``state`` into ``model``, where tied parameters have one name each, as in safetensors."""
    first = {id(p): name for name, p in model.named_parameters(remove_duplicate=False) if name in state}
    tied = {
        name: state[first[id(p)]]
        for name, p in model.named_parameters(remove_duplicate=False)
        if name not in state and id(p) in first
    }
    model.load_state_dict({**state, **tied})
