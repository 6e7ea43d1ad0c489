"""torch.distributed.pipelining: stages whose units are sharded, under schedules that say when to gather and to reduce.

Interleaved, looped, zero-bubble and V schedules have actions ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD``, which torch
carries out for its own FSDP only. ``prepare`` registers flatshard's: a stage is gathered where the schedule says so, stays so
for all microbatches until it is resharded, and its gradients are reduced once per step. The action starts the reductions,
which go on while other stages compute, and the rank's last such action of a step waits for all of them. ``ScheduleGPipe`` and
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
    """Make ``schedule`` gather and reduce the units of ``stages``, the ``PipelineStage``s of this rank. Call it once.

    Gradients are averaged over the ranks of the units, and divided by the number of microbatches if the schedule scales
    gradients (``scale_grads=True``, its default). Their backwards outside of the schedule don't reduce gradients any more.
    If a schedule of yours leaves out ``REDUCE_GRAD`` of a stage, call ``flatshard.reduce_gradients(stage.submod)`` after it.

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
    started: dict[int, Any] = {}  # in this step; or in one that failed, whose entries are replaced before they are used

    def reduce(action: Any, context: Any) -> None:
        schedule = context.schedule_ref
        planned = [each for each in schedule.pipeline_order_with_comms[schedule.rank] if _reduces(each)]
        stage = prepared[action.stage_index]
        started[action.stage_index] = flatshard.reduce_gradients(stage.module, async_op=True)
        if action == planned[-1]:
            for each in planned:
                started.pop(each.stage_index).wait()
                prepared[each.stage_index].scale(schedule)

    schedule.register_custom_function(REDUCE_GRAD, reduce)


def _reduces(action: Any) -> bool:
    return action is not None and action.computation_type == REDUCE_GRAD


class _Stage:
    """A stage of this rank."""

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

    def scale(self, schedule: Any) -> None:
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
