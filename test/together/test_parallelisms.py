"""Sharded units beside other kinds of parallelism: pipelines, experts, DistributedDataParallel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Gather, Mlp
from on_ranks import ranks
from parity import full_params, step_all
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import flatshard
from flatshard import fully_shard
from flatshard._composable.state import unit_of
from flatshard._trace import record_events

WIDTH = 6


class Block(Mlp):
    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH + 1)


def assert_equal(got: dict[str, Tensor], expected: nn.Module) -> None:
    for name, param in expected.named_parameters():
        torch.testing.assert_close(got[name], param.detach(), rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# -- pipelines ---------------------------------------------------------------------------------------------------------

MICROBATCHES, DEPTH = 4, 4

SCHEDULES = {"GPipe": (ScheduleGPipe, 1), "1F1B": (Schedule1F1B, 1), "interleaved 1F1B": (ScheduleInterleaved1F1B, 2)}
"""The schedule, and how many stages a rank has."""


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize("holds", [False, True], ids=["", "one reduction"])
@pytest.mark.parametrize("name", SCHEDULES)
@ranks(4)
def test_pipelines(ctx, name: str, holds: bool):
    """Two ranks deep, two wide. ``holds``: one reduction at the end, else one a microbatch."""
    schedule_class, per_rank = SCHEDULES[name]
    mesh = ctx.device_mesh((2, 2), ("pp", "dp"))
    pp, dp = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(DEPTH)]).double()
    stages_in_all = 2 * per_rank
    depth = DEPTH // stages_in_all
    indices = range(pp, stages_in_all, 2)
    parts = [copy.deepcopy(plain[i * depth : (i + 1) * depth]) for i in indices]
    for part in parts:
        fully_shard(part, policy={Block}, device_mesh=mesh["dp"])
        if holds:
            flatshard.configure(part, divide_factor=2 * MICROBATCHES)
    group = mesh.get_group("pp")
    # A microbatch between two stages. Told, not asked: stages that ask each other for shapes do so with numpy.
    like = torch.empty(2, WIDTH, dtype=torch.double, requires_grad=True)
    stages = [
        PipelineStage(
            part,
            index,
            stages_in_all,
            torch.device("cpu"),
            input_args=(like if index else like.detach(),),
            output_args=(like,),
            group=group,
        )
        for part, index in zip(parts, indices, strict=True)
    ]
    # Where nothing is held, the schedule itself divides ``.grad`` by the number of microbatches.
    options = {"loss_fn": loss, "scale_grads": not holds}
    schedule = schedule_class(stages if per_rank > 1 else stages[0], MICROBATCHES, **options)
    optimizers = [
        torch.optim.Adam(p, lr=1e-2) for p in (plain.parameters(), [p for m in parts for p in m.parameters()])
    ]
    holder = nn.ModuleList(parts)
    for step in range(2):
        x, y = torch.randn(2, 2, 2 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        loss(plain(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        args = (x[dp],) if pp == 0 else ()
        kwargs: dict[str, Any] = {"target": y[dp]} if pp == 1 else {}
        with record_events() as events:
            if holds:
                with flatshard.no_sync(holder):
                    schedule.step(*args, **kwargs)
                flatshard.reduce_gradients(holder)
            else:
                schedule.step(*args, **kwargs)
        units = [u for u in flatshard.describe(holder).units if u.flats]
        reductions = len([e for e in events if e.startswith("reduce-scatter")])
        assert reductions == len(units) * (1 if holds else MICROBATCHES)
        step_all(optimizers)
    for part, index in zip(parts, indices, strict=True):
        assert_equal(full_params(part), plain[index * depth : (index + 1) * depth])


# -- experts -----------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Every token goes through all experts. ``group``: each of its ranks has one of them."""

    def __init__(self, experts: int, group: Any = None) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(experts))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        if self.group is None:
            y = sum(expert(x) for expert in self.experts)
        else:
            mine = self.experts[0](Gather.apply(x, self.group))
            y = Gather.apply(mine, self.group).sum(0)[self.group.rank()]
        return self.back(torch.tanh(y))


@ranks(4)
def test_experts_on_other_groups(ctx):
    """Experts are sharded over the ranks that hold the same one, the rest over all; each with its own divisor."""
    mesh = ctx.device_mesh((2, 2), ("dp", "ep"))
    ep = mesh["ep"].get_local_rank()
    torch.manual_seed(0)
    plain = Experts(2).double()
    model = Experts(1, mesh.get_group("ep")).double()
    model.front.load_state_dict(plain.front.state_dict())
    model.back.load_state_dict(plain.back.state_dict())
    model.experts[0].load_state_dict(plain.experts[ep].state_dict())
    fully_shard(model.experts[0], device_mesh=mesh["dp"])
    # Its gradient on a rank is the sum over the tokens of two ranks, so the mean over all ranks is a quarter of the sum.
    flatshard.configure(model.experts[0], divide_factor=4)
    with pytest.warns(UserWarning, match=r"'experts\.0\.\S+', .* were sharded by an earlier call.* shard_mesh_fn="):
        fully_shard(model, process_group=ctx.group)
    assert unit_of(model.experts[0]).context is not unit_of(model).context
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        x = torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        plain(x.flatten(0, 1)).square().mean().backward()
        model(x[ctx.rank]).square().mean().backward()
        step_all(optimizers)
    got = full_params(model)
    assert_equal(
        {k: v for k, v in got.items() if "experts" not in k}
        | {f"experts.{ep}.{k.removeprefix('experts.0.')}": v for k, v in got.items() if "experts" in k}
        | {n: p.detach() for n, p in plain.named_parameters() if f"experts.{1 - ep}" in n},
        plain,
    )


# -- DistributedDataParallel -------------------------------------------------------------------------------------------


@ranks(3)
def test_beside_distributed_data_parallel(ctx):
    """A part that DDP replicates, ignored by fully_shard, in the same model."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)).double()
    model = copy.deepcopy(plain)
    model[1] = DistributedDataParallel(model[1], process_group=ctx.group)
    fully_shard(model, policy={Block}, process_group=ctx.group, ignored_states=[model[1]])
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        x = torch.randn(ctx.world_size, 3, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        plain(x.flatten(0, 1)).square().mean().backward()
        model(x[ctx.rank]).square().mean().backward()
        norms = [torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), flatshard.clip_grad_norm_(model, 0.5)]
        torch.testing.assert_close(norms[1], norms[0])
        step_all(optimizers)
    assert_equal({name.replace("1.module.", "1."): p for name, p in full_params(model).items()}, plain)
