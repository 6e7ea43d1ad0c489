"""peft: adapters on a sharded base model. First ``get_peft_model``, then ``fully_shard`` with the policy of the base model.

Frozen and trainable parameters share units, and frozen ones have no gradients and no optimizer state. Adapters that are added
to a sharded model would be nobody's to average: the optimizer's first step raises. ``merge_adapter`` multiplies matrices
outside forward: call it inside ``flatshard.summon_full_params(model)``. ``print_trainable_parameters`` counts this rank's
shards, unless ``count_whole(model)``, of ``state.py``, has set ``model.get_nb_trainable_parameters``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict

import flatshard


def adapter_state_dict(model: PeftModel, **how: Any) -> dict[str, torch.Tensor]:
    """Return what peft saves of ``model``: full tensors, by the names of ``model.state_dict()``. All ranks must call it.

    Only these parameters leave their units: no rank holds the base model.

    Args:
        how: ``selected_adapters`` and ``save_embedding_layers``, as of ``PeftModel.save_pretrained``.
    """
    chosen = how.get("selected_adapters") or list(model.peft_config)
    embeddings = how.get("save_embedding_layers", "auto")
    state = model.state_dict()
    needed: set[int] = set()
    for adapter in chosen:  # peft chooses by name, and hands on what it is given
        found = get_peft_model_state_dict(
            model, state_dict=state, adapter_name=adapter, save_embedding_layers=embeddings
        )
        needed.update(id(value) for value in found.values())
    names = {name for name, value in state.items() if id(value) in needed}
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    whole = {n: v.cpu() for n, v in flatshard.checkpoint.iter_full_params(model, names=names & params)}
    return {**whole, **{n: state[n] for n in names - params}}


def save_adapter(model: PeftModel, directory: str | os.PathLike[str], **how: Any) -> None:
    """Save a sharded model like ``model.save_pretrained(directory)``, for plain peft. All ranks must call it; rank 0 writes.

    Args:
        how: arguments of ``PeftModel.save_pretrained``.
    """
    state = adapter_state_dict(model, **how)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(os.fspath(directory), state_dict=state, **how)
