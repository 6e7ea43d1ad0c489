"""torch.distributed.pipelining with sharded stages: losses and weights are those of one process. It needs torch alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Mlp
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import FULL_BACKWARD, REDUCE_GRAD

import flatshard
from flatshard import fully_shard
from flatshard._trace import record_events
from flatshard.integrations.pipelining import prepare

WIDTH, MICROBATCHES, DEPTH = 6, 4, 4
SCHEDULES = {
    "interleaved": (ScheduleInterleaved1F1B, lambda pp: [pp, pp + 2]),
    "zero bubble": (ScheduleInterleavedZeroBubble, lambda pp: [pp, pp + 2]),
    "V": (ScheduleZBVZeroBubble, lambda pp: [pp, 3 - pp]),
}
"""The schedule, and which of four stages a rank of two has."""


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH + 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make_stages(parts: list[nn.Module], indices: list[int], group: Any) -> list[PipelineStage]:
    # A microbatch between two stages. Told, not asked: stages that ask each other for shapes do so with numpy.
    like = torch.empty(2, WIDTH, dtype=torch.double, requires_grad=True)
    return [
        PipelineStage(
            *(part, index, DEPTH, torch.device("cpu")),
            input_args=(like if index else like.detach(),),
            output_args=(like,),
            group=group,
        )
        for part, index in zip(parts, indices, strict=True)
    ]


def run(ctx, name: str) -> None:
    """Two ranks deep, two wide: three steps of Adam."""
    schedule_class, stages_of = SCHEDULES[name]
    mesh = ctx.device_mesh((2, 2), ("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)]).double()
    indices = stages_of(pp)
    parts = [copy.deepcopy(plain[i]) for i in indices]
    for part in parts:
        fully_shard(part, policy={Block}, device_mesh=mesh["dp"])
    stages = make_stages(parts, indices, mesh.get_group("pp"))
    schedule = schedule_class(stages, MICROBATCHES, loss_fn=loss)
    prepare(schedule, stages)
    holder = nn.ModuleList(parts)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, holder)]
    for step in range(3):
        ctx.note(f"step {step}")
        x, y = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        expected = loss(plain(x.flatten(0, 1)), y.flatten(0, 1))
        expected.backward()
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": y[dp], "losses": losses} if DEPTH - 1 in indices else {}
        with record_events() as events:
            schedule.step(*((x[dp],) if 0 in indices else ()), **given)
        assert sum(e.startswith("reduce-scatter") for e in events) == 4, events  # two units a stage
        assert sum(e.startswith("all-gather") for e in events) == 4, events
        if losses:
            mean = torch.stack(losses).mean().detach()
            torch.distributed.all_reduce(mean, group=mesh.get_group("dp"))
            torch.testing.assert_close(mean / 2, expected.detach())
        assert all(unit.state == "sharded" for unit in flatshard.describe(holder).units)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part, index in zip(parts, indices, strict=True):
        with flatshard.summon_full_params(part, writeback=False):
            for (n, p), q in zip(part.named_parameters(), plain[index].parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda m, n=n: f"{n}: {m}")


def run_placed(ctx) -> list[str]:
    """The first reduction is placed before the last backward of the other stage."""
    mesh = ctx.device_mesh((2, 2), ("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(Block(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)]).double()
    indices = [pp, pp + 2]
    parts = [fully_shard(copy.deepcopy(plain[i]), policy={Block}, device_mesh=mesh["dp"]) for i in indices]
    stages = make_stages(parts, indices, mesh.get_group("pp"))
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)
    prepare(schedule, stages)
    for actions in schedule.pipeline_order_with_comms.values():
        reductions = [a for a in actions if a.computation_type == REDUCE_GRAD]
        actions.remove(reductions[0])
        backwards = [i for i, a in enumerate(actions) if a.computation_type == FULL_BACKWARD]
        actions.insert(backwards[-1], reductions[0])
    for step in range(2):
        x, y = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        plain.zero_grad()
        loss(plain(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        for part in parts:
            part.zero_grad()
        with record_events() as events:
            hooks = [part.register_full_backward_hook(lambda *_, to=events: to.append("backward")) for part in parts]
            schedule.step(*((x[dp],) if pp == 0 else ()), **({"target": y[dp]} if pp == 1 else {}))
        for part, index, hook in zip(parts, indices, hooks, strict=True):
            hook.remove()
            with flatshard.summon_full_params(part, writeback=False, with_grads=True):
                for p, q in zip(part.parameters(), plain[index].parameters(), strict=True):
                    torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    return [e for e in events if e.startswith(("backward", "reduce-scatter"))]


def test_reductions_that_a_schedule_places(pool):
    for events in pool.run(run_placed, world_size=4):
        kinds = "".join("B" if e == "backward" else "r" for e in events)
        # A backward's hook runs in it, before its end; two units a stage.
        assert kinds.endswith("BrrBrr"), events
        assert kinds.count("B") == 2 * MICROBATCHES, events


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(pool, name: str):
    pool.run(run, name, world_size=4)


def test_a_schedule_without_such_actions(fake_group):
    part = fully_shard(Block())
    stage = PipelineStage(part, 0, 2, torch.device("cpu"), input_args=(torch.empty(2, WIDTH),))
    with pytest.raises(TypeError, match=r"Schedule1F1B has no actions.*flatshard\.no_sync.*reduce_gradients"):
        prepare(Schedule1F1B(stage, MICROBATCHES, loss_fn=loss), [stage])
