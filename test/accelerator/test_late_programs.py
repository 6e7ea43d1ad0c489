"""The fuzzer's programs on the simulated device give the numbers of one process, without races."""

import dataclasses
from typing import Any

import pytest
import torch
from accelerator.harness import POLICIES
from fuzz.drawing import draw
from fuzz.machine import run_program
from fuzz.programs import Program
from pairs import some
from pool import Pool


def on_the_device(program: Program) -> Program:
    """Replace ``to_empty``, because the simulator's groups also have a CPU backend, whose device it would choose."""
    starts = ["as it is" if s.start == "to_empty" else s.start for s in program.shardings]
    first, second = (dataclasses.replace(s, start=at) for s, at in zip(program.shardings, starts, strict=True))
    return dataclasses.replace(program, shardings=(first, second))


SEEDS = (103, 110, 113, 121, 122, 123, 131, 137, 138, 141, 151, 155, 161, 163, 167, 170, 173, 174, 181, 310005, 310386)
"""Programs of several ranks without a fused GRU or a compiler, which the simulator lacks."""
PROGRAMS = [on_the_device(draw(seed, additions=False)) for seed in SEEDS]


def run_late(ctx: Any, programs: list[Program]) -> None:
    from accelerator.sim import sim

    halves = ctx.device_mesh((2, 2), ("replicate", "shard"), "simdev") if ctx.world_size == 4 else None
    for program in programs:
        sim.reset()
        sim.policy = POLICIES[program.seed % 3]
        try:
            run_program(ctx, program, halves, torch.device("simdev", 0))
            sim.drain()
        except BaseException:
            sim.abandon()
            raise
        assert not sim.races, "\n".join([str(program), *map(str, sim.races.values())])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_late_programs(simulated_pool: Pool, world_size: int) -> None:
    programs = [p for p in PROGRAMS if p.world_size == world_size]
    simulated_pool.run(run_late, some(programs, 1, turn=1), world_size=world_size)
