"""Live bytes in a training step, and between steps, relative to the floor.

    python benchmarks/memory.py

A GPT of 12 blocks, the fake group of 8, forward, backward and a step of AdamW (foreach). The bytes of all live storages are
counted exactly after every operation (``LiveBytes`` in ``counting.py``), without Python's garbage collector. The first table
has the peak, the second one the peak until the (last) forward ends. ``4 x reduced`` and ``4 x no_sync`` are four
microbatches: each is reduced (flatshard's default), or only the last.

The floor of the peak has this rank's shards of parameters, gradients and AdamW's two moments (4 P / 8, where P is the
parameters in float32). It has the two largest full units, the current one and the prefetched one, in their compute dtype; and
a plain model's saved activations in that dtype. This is a sum of necessary memory, not all of it at one moment, so a step may
stay below it. The forward's floor is the same without gradients (3 P / 8). The floor between steps is the shards, gradients
and moments alone.

On CPU, flatshard ends a reduction when a sixth of the next unit's gradients have arrived. An accelerator would idle, so there
it ends when all have (``_composable/backward.py``). Over gloo, bfloat16 gradients are sent unchanged and added in float32
(``_handle/reduction.py``); NCCL adds in the dtype that it sends. The accelerator's way is a separate row, counted over the
same fake group. ``shared_memory.py`` counts the memory of several ranks on one host.

In the last table, the embedding, and norm and head, are units of their own (``policies.SplitRoot``). Rows have a tied or an
untied head, or a larger vocabulary. Figures are relative to the floors above.
"""

from __future__ import annotations

import argparse
import functools
import gc
from dataclasses import dataclass, replace

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import Job, Setting, mean_logit
from copied_bytes import CONFIG, RANKS, TOKENS, P, unit_bytes
from counting import LiveBytes
from gpt import GPT, Block, GPTConfig
from suite import OURS, Benchmark, Figure, Table, by_column, fake_world, progress

from flatshard._composable.find import units_below
from flatshard.comm import Collectives, builtin_collectives
from flatshard.policies import SplitRoot

CASES = {
    "fp32": Setting(Block),
    "bf16": Setting(Block, bf16=True),
    "fp32, no prefetch": Setting(Block, prefetch=False),
    "bf16, no prefetch": Setting(Block, bf16=True, prefetch=False),
    "fp32, 4 x reduced": Setting(Block, microbatches=4),
    "fp32, 4 x no_sync": Setting(Block, microbatches=4, reduced=False),
}
TARGETS = {"fp32": 1.10, "bf16": 1.06, "fp32, no prefetch": 1.02, "bf16, no prefetch": 1.02, "fp32, 4 x reduced": 1.12}
LATER = "flatshard, on an accelerator"
NAMES = [OURS, LATER, "FSDP2", "FSDP1"]
SPLIT = "flatshard, SplitRoot"
ROOTS = {
    "tied": CONFIG,
    "not tied": replace(CONFIG, tied=False),
    "4,096 words": replace(CONFIG, vocabulary=4_096, tied=False),
}
STATE = 4 * P / RANKS
"""Bytes of the shards of parameters, gradients and AdamW's moments."""


def as_nccl(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """Return the group's collectives, which add in the dtype that they send."""
    made = builtin_collectives(group, device)
    made.widens = False
    return made


@dataclass(frozen=True)
class Held:
    """Live bytes of a step."""

    peak: int
    """Peak of the step."""
    forward: int
    """Peak until its last forward ends."""
    after: int
    """Bytes after the step, with gradients."""


def held(name: str, setting: Setting, config: GPTConfig = CONFIG) -> Held:
    """Count the bytes of a contender's step. Call it in a fake group."""
    with LiveBytes() as live:
        adamw = functools.partial(torch.optim.AdamW, foreach=True)
        forward = 0

        def loss(logits: torch.Tensor) -> torch.Tensor:
            nonlocal forward
            forward = live.peak
            return mean_logit(logits)

        if name == LATER:
            job = Job(OURS, config, replace(setting, collectives=as_nccl), TOKENS, adamw, loss)
            queues = {unit.context.reductions for unit in units_below(job.model)}
            for queue in queues:
                queue.finishes_early = False
        elif name == SPLIT:
            job = Job(OURS, config, replace(setting, options={"policy": SplitRoot({Block})}), TOKENS, adamw, loss)
        else:
            job = Job(name, config, setting, TOKENS, adamw, loss)
        live.add(job.model.parameters())
        for _ in range(2):
            job.step()
        with live.watch():
            job.step()
        gc.collect()
        if name == LATER:  # models of a group share the queues
            for queue in queues:
                queue.waits_early = True
        return Held(live.peak, forward, live.now())


def activations(bf16: bool, config: GPTConfig) -> int:
    """Return the bytes of a plain model's saved activations."""
    model = GPT(config).to(torch.bfloat16 if bf16 else torch.float32)
    with LiveBytes() as live:
        live.add(model.parameters())
        before = live.now()
        loss = mean_logit(model(TOKENS))
        gc.collect()
        kept = live.now() - before
    del loss
    return kept


def floor(bf16: bool, of_state: float = 1.0, config: GPTConfig = CONFIG) -> float:
    """Return the floor of the peak, with a fraction ``of_state`` of shards, gradients and moments."""
    units = unit_bytes(config)
    state = of_state * 4 * sum(units) / RANKS
    return state + sum(sorted(units)[-2:]) / (2 if bf16 else 1) + activations(bf16, config)


def split_roots() -> Table:
    columns: dict[str, dict[str, Figure]] = {}
    for root, config in ROOTS.items():
        for case in ("fp32", "bf16", "fp32, 4 x no_sync"):
            setting = CASES[case]
            counted = {name: held(name, setting, config) for name in (OURS, SPLIT)}
            least = floor(setting.bf16, config=config)
            columns[f"{root}, {case}"] = {name: Figure(found.peak / least) for name, found in counted.items()}
            if setting.microbatches == 1:
                least = floor(setting.bf16, 0.75, config)
                columns[f"{root}, {case}, forward"] = {
                    name: Figure(found.forward / least) for name, found in counted.items()
                }
    return Table(
        "memory_of_split_roots",
        f"peak of live bytes in a training step, and until its forward ends, over the floor (fake group of {RANKS})",
        "as above; its two largest units are those of the policy {Block}",
        by_column(columns),
        digits=3,
    )


def measure(args: argparse.Namespace) -> list[Table]:
    peaks: dict[str, dict[str, Figure]] = {}
    forwards: dict[str, dict[str, Figure]] = {}
    between: dict[str, dict[str, Figure]] = {}
    floors = {bf16: floor(bf16) for bf16 in (False, True)}
    ends = {bf16: floor(bf16, 0.75) for bf16 in (False, True)}
    with fake_world(RANKS):
        for column, setting in CASES.items():
            progress(f"memory, {column}")
            counted = {name: held(name, setting) for name in NAMES}
            peaks[column] = {name: Figure(found.peak / floors[setting.bf16]) for name, found in counted.items()}
            if setting.microbatches == 1:
                forwards[column] = {name: Figure(found.forward / ends[setting.bf16]) for name, found in counted.items()}
            if column in ("fp32", "bf16"):
                between[column] = {name: Figure(found.after / STATE) for name, found in counted.items()}
        progress("memory, split roots")
        roots = split_roots()
    what = f"GPT of 12 blocks, fake group of {RANKS}"
    return [
        Table(
            "memory",
            f"peak of live bytes in a training step over the floor ({what})",
            "shards, gradients and AdamW's moments, two largest whole units, what a plain forward keeps; counted",
            by_column(peaks),
            {OURS: TARGETS},
            [f"The floor is {floors[False] / 2**20:.2f} MiB in fp32 and {floors[True] / 2**20:.2f} MiB in bf16."],
            digits=3,
        ),
        Table(
            "memory_of_the_forward",
            f"peak of live bytes until the forward of a training step has ended, over the floor ({what})",
            "shards and AdamW's moments, two largest whole units, what a plain forward keeps; counted",
            by_column(forwards),
            notes=[f"The floor is {ends[False] / 2**20:.2f} MiB in fp32 and {ends[True] / 2**20:.2f} MiB in bf16."],
            digits=3,
        ),
        Table(
            "memory_between_steps",
            f"live bytes between steps over shards, gradients and AdamW's moments without padding ({what})",
            "1.0",
            by_column(between),
            {OURS: {"fp32": 1.0, "bf16": 1.0}},
        ),
        roots,
    ]


BENCHMARK = Benchmark(measure, __doc__)

if __name__ == "__main__":
    BENCHMARK.main()
