"""Run a random program (programs.py) on the ranks, with the same program on plain models in one process as its oracle.

Every rank keeps *twins*: a sharded model and a plain one. The sharded model trains on this rank's slice of each batch. The
plain one runs the forward of every slice in turn, and trains on the mean of their losses. Each statement runs on the sharded
model first, then on the plain one. After each, this rank's shards of parameters and gradients are compared, and full
parameters while they are unsharded. The comparison communicates nothing and touches no state of the library. For models whose
numbers are rounded, see [Note: An oracle that rounds].

The machine implements verbs that a plain model lacks: it records what ``no_sync`` holds for each parameter, what
``summon_full_params`` restores, and when gradients are undefined (from an exception in a backward to ``zero_grad``).

A documented refusal (:data:`REFUSALS`) means that nothing happened. ``_check_refusal`` raises if its condition is not met.
Statements with undefined results are skipped on both sides: ``p.data.mul_()`` while the user keeps parameters unsharded, an
optimizer's step inside ``summon_full_params``, and a backward of a graph that is older than ``p.data = ...``.
"""

import gc
import warnings
from collections import Counter
from typing import Any

import torch
from clean import check_clean
from fuzz import programs
from fuzz.comparisons import all_close
from fuzz.files import Files
from fuzz.parameters import Parameters
from fuzz.programs import ROOT, Program
from fuzz.random_options import CPU
from fuzz.training import Training
from fuzz.twins import Twin
from parity import everybody
from torch import nn

import flatshard


class Machine(Training, Parameters, Files):
    """Run one program on this rank."""

    def main(self) -> tuple[list[str], Counter[str]]:
        """Run all statements, then check that no state is left and that a plain step is right."""
        self.run(self.program.body)
        self.ctx.note(f"seed {self.program.seed}: the end")
        self.losses.clear()
        for twin in self._alive:
            flatshard.recover(twin.model)
            flatshard.reshard(twin.model)
            twin.held.clear()
        self.interrupted = False
        for twin in self._alive:
            check_clean(twin.model)
        for twin in self._alive:
            for unit in twin.partial:
                twin.units[unit].handle.ranks.averaging.reduces_replicas = True
            twin.partial.clear()
            self.do(programs.Configure(twin.number, ROOT, "gradient_sync", True))
            self.do(programs.ZeroGrad(twin.number, True))
            self.do(programs.Forward("last", twin.number, ROOT, 1000, trains_told=False))
            self.do(programs.Backward(("last",)))
            self.do(programs.Step(twin.number))
            self.do(programs.Evaluate(twin.number, ROOT, 1001, "no_grad"))
            self.do(programs.Save(twin.number, ROOT, "full"))
        texts = everybody(self.ctx, "; ".join(self.outcomes))
        assert len(set(texts)) == 1, f"ranks have different refusals: {texts}"
        all_close([(got.cpu(), expected, *more) for got, expected, *more in self.noted])
        return self.outcomes, self.counts

    def _recover(self, s: programs.Recover, twin: Twin, module: None) -> None:
        flatshard.recover(twin.model)
        self.interrupted = False
        for each in self._alive:
            each.held.clear()

    def _reduce(self, s: programs.Reduce, twin: Twin, module: nn.Module) -> bool:
        if self._mixes_gradients():
            return False
        if self.attempt(lambda: flatshard.reduce_gradients(module), twin, module):
            twin.reduce_held(twin.units_of(module))
            self._adopt(twin)
        return True

    def _collect(self, s: programs.Collect, twin: None, module: None) -> None:
        gc.collect()


def run_program(
    ctx: Any, program: Program, halves: Any = None, device: torch.device = CPU
) -> tuple[list[str], Counter[str]]:
    """Run a program; return its refusals, and a count of its statements."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        return Machine(ctx, program, halves, device).main()


def run_seeds(ctx: Any, programs: list[Program]) -> list[Counter[str]]:
    """Run several programs; return the counts of each."""
    halves = ctx.device_mesh((2, 2), ("replicate", "shard")) if ctx.world_size == 4 else None
    return [run_program(ctx, program, halves)[1] for program in programs]
