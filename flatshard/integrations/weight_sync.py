"""Weights of a sharded model for a copy that generates: verl's and TRL's way, and two that need no full state dict.

verl and TRL walk ``model.state_dict().items()`` and call ``value.full_tensor()`` on every rank: that works as it stands, as
sharded values have it. :func:`sync_weights` gathers unit by unit, which is fewer and larger collectives. With
:class:`EngineWeights` nothing is gathered, and only what has changed is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

import flatshard


def iter_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor) of ``model.state_dict()``, tied parameters by their first name. All ranks must iterate.

    What ``load_weights`` of an inference engine takes. Buffers come last, this rank's own.

    Args:
        dtype: cast floating-point values. None: each in its own dtype.
    """
    yield from flatshard.checkpoint.iter_full_params(model, dtype=dtype)
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name not in params and isinstance(value, torch.Tensor):
            yield name, value.to(dtype) if dtype is not None and value.is_floating_point() else value


def sync_weights(
    model: nn.Module,
    receive: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    *,
    dtype: torch.dtype | None = None,
    on_ranks: Iterable[int] | None = None,
) -> None:
    """Call ``receive`` with the full weights of ``model``, one by one. All ranks must call it.

    Args:
        receive: ``engine.load_weights``, as of vLLM. It may stop early: the rest is gathered all the same, as other ranks do.
        dtype: cast floating-point values. None: each in its own dtype.
        on_ranks: the ranks of the default group that call ``receive``; the others take part in the collectives only. None:
            all.
    """
    weights = iter_weights(model, dtype=dtype)
    try:
        if on_ranks is None or torch.distributed.get_rank() in set(on_ranks):
            receive(weights)
    finally:
        for _ in weights:
            pass


class EngineWeights:
    """Keeps an inference engine (vLLM) at the newest version of a model in training, by its ``load_weights``.

    It takes full tensors only, by the names of the checkpoint, and shards and fuses them itself. So full tensors are kept
    here, once for each process that has an engine, and those that a version has changed are loaded. An engine whose tensors
    are at hand needs no copy: give these to :class:`flatshard.weights.Receiver`.

    Args:
        load_weights: of the engine. It may be called with some of the names, and must not keep the tensors.
        send, name, device: see :class:`flatshard.weights.Receiver`.
    """

    receiver: flatshard.weights.Receiver
    """What messages are given to: ``receiver.receive(message)``, ``receiver.poll()``."""

    def __init__(
        self,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
        send: Callable[[int, bytes], object],
        *,
        name: str | int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.receiver = flatshard.weights.Receiver(None, send, name=name, device=device)
        self._load, self._changed = load_weights, set[str]()

    def update(self) -> int | None:
        """Load the changes of the newest complete version. Call it between two steps of the engine.

        If ``load_weights`` raises, the engine has weights of two versions: stop it, or call this again, which loads all that
        the engine did not get.

        Returns:
            The version that the engine has now. None: it has none yet.
        """
        applied = self.receiver.apply()
        if applied is not None:
            self._changed |= applied.names
        if self._changed:
            weights = self.receiver.weights
            self._load((name, weights[name]) for name in weights if name in self._changed)
            self._changed = set()
        return self.receiver.version
