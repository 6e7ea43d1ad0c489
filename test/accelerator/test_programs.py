"""Programs of the fuzzer on the simulated device: the numbers of one process, and no race."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerator.harness import POLICIES
from fuzz_programs import Program, draw
from pool import Pool
from program_machine import run_program


def can_run(program: Program) -> bool:
    """The simulator has no fused GRU and no compiler. Its groups are CPU's as well, so ``to_empty`` would be for that."""
    return not program.model.has("gru", "compiled") and all(s.start != "to_empty" for s in program.shardings)


PROGRAMS = [program for program in map(draw, range(60)) if can_run(program)]


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


@pytest.mark.parametrize("chunk", range(5))
@pytest.mark.parametrize("world_size", [2, 3, 4, 1])
def test_programs(simulated_pool: Pool, world_size: int, chunk: int) -> None:
    programs = [p for p in PROGRAMS if p.world_size == world_size]
    simulated_pool.run(run_late, programs[chunk::5], world_size=world_size)
