"""torch.distributed.pipelining: stages whose units are sharded, under schedules that say when to gather and to reduce.

Interleaved, looped, zero-bubble and V schedules have actions ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD``, which torch
carries out for its own FSDP only. ``prepare`` registers flatshard's: a stage is gathered where the schedule says so, stays so
for all microbatches until it is resharded, and its gradients are reduced once per step. ``ScheduleGPipe`` and
``Schedule1F1B`` have no such actions: run their steps inside ``flatshard.no_sync(stage.submod)``, and call
``flatshard.reduce_gradients(stage.submod)`` afterwards.

[Note: Gradients of weights alone]
Zero-bubble schedules compute the gradients of a stage's inputs first, and those of its weights later, with respect to
``stage.submod.parameters()``. Outside of forward these are the sharded parameters, which are in no graph. So during these two
actions ``parameters`` is an attribute of the instance that returns the unsharded parameters; and what torch then stores in
their ``.grad`` is handed to autograd, where flatshard finds gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.schedules import REDUCE_GRAD, RESHARD, UNSHARD

import flatshard


def prepare(schedule: Any, stages: Sequence[Any]) -> None:
    """Have ``schedule`` gather and reduce the units of ``stages``, the ``PipelineStage``s of this rank. Call it once.

    Gradients are averaged over the ranks of the units, and divided by the number of microbatches if the schedule scales
    gradients (``scale_grads=True``, its default). Their backwards outside of the schedule don't reduce gradients any more.

    Raises:
        TypeError: the schedule has no such actions.
        ValueError: a stage has no units.
    """
    if not hasattr(schedule, "register_custom_function"):
        raise TypeError(
            f"{type(schedule).__name__} has no actions to gather and to reduce. Run its steps inside `with "
            "flatshard.no_sync(stage.submod):`, and call flatshard.reduce_gradients(stage.submod) after each"
        )
    prepared = {stage.stage_index: _Stage(stage) for stage in stages}
    for stage in prepared.values():
        flatshard.configure(stage.module, gradient_sync=False)
    for stage in prepared.values():
        stage.split_backward()
    schedule.register_custom_function(UNSHARD, lambda action, _: prepared[action.stage_index].unshard())
    schedule.register_custom_function(RESHARD, lambda action, _: prepared[action.stage_index].reshard())
    schedule.register_custom_function(
        REDUCE_GRAD, lambda action, ctx: prepared[action.stage_index].reduce(ctx.schedule_ref)
    )


class _Stage:
    """One stage of this rank."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self.module: nn.Module = stage.submod
        self._kept = contextlib.ExitStack()  # keep_unsharded, from UNSHARD to RESHARD
        self._unsharded: list[nn.Parameter] = []  # the unsharded parameters: the same objects in every step

    def unshard(self) -> None:
        flatshard.unshard(self.module, recurse=True)
        self._unsharded = list(self.module.parameters())
        self._kept.enter_context(flatshard.keep_unsharded(self.module))

    def reshard(self) -> None:
        self._kept.close()

    def reduce(self, schedule: Any) -> None:
        flatshard.reduce_gradients(self.module)
        if schedule.scale_grads:
            self._stage.scale_grads(schedule._n_microbatches)

    def split_backward(self) -> None:
        """See [Note: Gradients of weights alone]."""
        stage = self._stage
        stage.backward_one_chunk = functools.partial(self._showing, stage.backward_one_chunk)
        stage.backward_weight_one_chunk = functools.partial(self._showing, stage.backward_weight_one_chunk)

    def _showing(self, compute: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with self._shown():
            compute(*args, **kwargs)
        given = [p for p in self._unsharded if p.grad is not None]
        if given:
            grads = [p.grad for p in given]
            for p in given:
                p.grad = None
            torch.autograd.backward(given, grads)

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        self.module.__dict__["parameters"] = lambda: iter(self._unsharded)
        try:
            yield
        finally:
            del self.module.__dict__["parameters"]
