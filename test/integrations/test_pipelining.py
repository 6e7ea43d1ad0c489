"""torch.distributed.pipelining with sharded stages: losses and weights are one process's. It needs no library but torch."""

import copy
from typing import Any

import pytest
import torch
from models import Mlp
from on_ranks import ranks
from parity import check_same_gradients, check_same_params, step_all
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import FULL_BACKWARD, REDUCE_GRAD

import flatshard
from flatshard import fully_shard
from flatshard._base.trace import record_events
from flatshard.integrations.pipelining import prepare

WIDTH, MICROBATCHES, DEPTH = 6, 4, 4
SCHEDULES = {
    "interleaved": (ScheduleInterleaved1F1B, lambda pp: [pp, pp + 2]),
    "V": (ScheduleZBVZeroBubble, lambda pp: [pp, 3 - pp]),
}
"""Schedules, and which of four stages each of two ranks has."""


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH + 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pipeline:
    """A pipeline of two stages with two ranks each, and its model in one process."""

    def __init__(self, ctx, schedule_class: Any, stages_of: Any) -> None:
        mesh = ctx.device_mesh((2, 2), ("pp", "dp"))
        pp, self.dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        self.group = mesh.get_group("dp")
        self.indices = stages_of(pp)
        torch.manual_seed(0)
        self.plain = nn.Sequential(*[nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)]).double()
        self.parts = nn.ModuleList(copy.deepcopy(self.plain[i]) for i in self.indices)
        for part in self.parts:
            fully_shard(part, policy={Block}, device_mesh=mesh["dp"])
        # Shape of microbatches between stages. It is given, as stages that infer shapes exchange them with numpy.
        like, cpu = torch.empty(2, WIDTH, dtype=torch.double, requires_grad=True), torch.device("cpu")
        stages = []
        for part, index in zip(self.parts, self.indices, strict=True):
            given = {"input_args": (like if index else like.detach(),), "output_args": (like,)}
            stages.append(PipelineStage(part, index, DEPTH, cpu, **given, group=mesh.get_group("pp")))
        self.schedule = schedule_class(stages, MICROBATCHES, loss_fn=loss)
        prepare(self.schedule, stages)

    def step(self, number: int, notes: Any = ()) -> tuple[Tensor, list[Tensor], list[str]]:
        """Run a step; return one process's loss, the losses of this rank's microbatches if it has the last stage, and the
        events.

        Backwards of the modules ``notes`` are recorded, too.
        """
        x, y = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(number)).double()
        expected = loss(self.plain(x.flatten(0, 1)), y.flatten(0, 1))
        expected.backward()
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": y[self.dp], "losses": losses} if DEPTH - 1 in self.indices else {}
        with record_events() as events:
            hooks = [p.register_full_backward_hook(lambda *_, to=events: to.append("backward")) for p in notes]
            self.schedule.step(*((x[self.dp],) if 0 in self.indices else ()), **given)
        for hook in hooks:
            hook.remove()
        return expected.detach(), losses, events

    def each(self) -> Any:
        return zip(self.parts, (self.plain[i] for i in self.indices), strict=True)


@pytest.mark.parametrize("name", SCHEDULES)
@ranks(4)
def test_schedules(ctx, name: str):
    """Train three steps of Adam."""
    pipeline = Pipeline(ctx, *SCHEDULES[name])
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (pipeline.plain, pipeline.parts)]
    for step in range(3):
        ctx.note(f"step {step}")
        expected, losses, events = pipeline.step(step)
        assert sum(e.startswith("reduce-scatter") for e in events) == 4, events  # two units in each stage
        assert sum(e.startswith("all-gather") for e in events) == 4, events
        if losses:
            mean = torch.stack(losses).mean().detach()
            torch.distributed.all_reduce(mean, group=pipeline.group)
            torch.testing.assert_close(mean / 2, expected)
        assert all(unit.state == "sharded" for unit in flatshard.describe(pipeline.parts).units)
        step_all(optimizers)
    for part, plain in pipeline.each():
        check_same_params(part, plain)


@ranks(4)
def test_reductions_that_a_schedule_places(ctx):
    """The first reduction is scheduled before the last backward of the other stage."""
    pipeline = Pipeline(ctx, *SCHEDULES["interleaved"])
    for actions in pipeline.schedule.pipeline_order_with_comms.values():
        reductions = [a for a in actions if a.computation_type == REDUCE_GRAD]
        actions.remove(reductions[0])
        backwards = [i for i, a in enumerate(actions) if a.computation_type == FULL_BACKWARD]
        actions.insert(backwards[-1], reductions[0])
    for step in range(2):
        for model in (pipeline.plain, pipeline.parts):
            model.zero_grad()
        _, _, events = pipeline.step(step, pipeline.parts)
        for part, plain in pipeline.each():
            check_same_gradients(part, plain)
    kinds = "".join(e[0] for e in events if e.startswith(("backward", "reduce-scatter")))
    # A backward's hook runs before the backward's end; each stage has two units.
    assert kinds.endswith("brrbrr"), events
    assert kinds.count("b") == 2 * MICROBATCHES, events


def test_a_schedule_without_such_actions(fake_group):
    part = fully_shard(Block())
    stage = PipelineStage(part, 0, 2, torch.device("cpu"), input_args=(torch.empty(2, WIDTH),))
    with pytest.raises(TypeError, match=r"Schedule1F1B has no actions.*flatshard\.no_sync.*reduce_gradients"):
        prepare(Schedule1F1B(stage, MICROBATCHES, loss_fn=loss), [stage])
