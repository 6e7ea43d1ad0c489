"""How the host time of a step grows with ranks and with units, over the fake group: forward and backward.

    python benchmarks/scale.py

By ranks: 30 units of 12 small parameters; the same model over the fake group of 8 and of 4,096, interleaved in one process
(the smaller group is a part of the larger one). The ratio should be 1: no host time that grows with ranks is anyone's due.
Peers' collectives fill nothing here (``nothing_moves`` in ``contenders.py``): the fake group's own all-gather would fill its
output rank by rank, which is nobody's fault. FSDP1 gathers into a list of one view a rank on CPU; ``one call`` is as on GPUs.

By units: 10 and 1,000 units over the fake group of 8. The exponent is log(time at 1,000 / time at 10) / log(100), and that of
the plain model, the floor, is computed from the same rounds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from contenders import ONE_CALL, SHARDED, Setting, build, nothing_moves
from suite import OURS, Benchmark, Figure, Table, fake_world, interleaved, over, progress, spread
from units import Unit, Units, timed_step

RANKS = (8, 4096)
UNITS = (10, 1000)


def stepped(name: str, units: int, group: dist.ProcessGroup | None) -> Callable[[], float]:
    """A timed step of a new model."""
    torch.manual_seed(0)
    step = timed_step(build(name, Units(units), Setting(Unit, group=group)))

    def within() -> float:
        with nothing_moves(name):
            return step()

    return within


def by_ranks(names: list[str], rounds: int) -> dict[str, dict[str, Figure]]:
    """Milliseconds of a step at either size, and their ratio."""
    few, many = RANKS
    with fake_world(many):
        groups = {few: dist.new_group(list(range(few)), backend="fake"), many: dist.group.WORLD}
        steps = {f"{name}@{size}": stepped(name, 30, group) for name in names for size, group in groups.items()}
        times = interleaved(steps, rounds)
    return {
        name: {
            **{f"ms, {size:,} ranks": spread(1e3 * value for value in times[f"{name}@{size}"]) for size in RANKS},
            "ratio": over(times[f"{name}@{many}"], times[f"{name}@{few}"]),
        }
        for name in names
    }


def by_units(names: list[str], rounds: int) -> dict[str, dict[str, Figure]]:
    """Microseconds per unit of a step at either number, and the exponent."""
    few, many = UNITS
    with fake_world(RANKS[0]):
        steps = {f"{name}@{units}": stepped(name, units, None) for name in names for units in UNITS}
        times = interleaved(steps, rounds)
    rows = {}
    for name in names:
        of = {units: times[f"{name}@{units}"] for units in UNITS}
        exponents = (math.log(b / a) / math.log(many / few) for a, b in zip(of[few], of[many], strict=True))
        per_unit = {f"us per unit, {n:,}": spread(1e6 / n * value for value in of[n]) for n in UNITS}
        rows["floor: plain" if name == "plain" else name] = {**per_unit, "exponent": spread(exponents)}
    return rows


def measure(args: argparse.Namespace) -> list[Table]:
    names = [*SHARDED, ONE_CALL] if args.full else ["flatshard"]
    fewer = max(3, args.rounds // 2)
    progress("host time by ranks")
    ranks = by_ranks(names, args.rounds)
    progress("host time by units")
    units = by_units([*names, "plain"], fewer)
    left_out = () if args.full else ("Peers: with --full.",)
    what = "host time of forward + backward by"
    return [
        Table(
            "scale_ranks",
            f"{what} ranks (fake group, 30 units); medians of {args.rounds} rounds",
            "a ratio of 1",
            {**ranks, "floor": {"ratio": Figure(1.0)}},
            {OURS: {"ratio": 1.05}},
            left_out,
        ),
        Table(
            "scale_units",
            f"{what} units (fake group of {RANKS[0]}); medians of {fewer} rounds",
            "the plain model, in the same rounds",
            units,
            {OURS: {"exponent": 1.02}},
            left_out,
            digits=3,
        ),
    ]


BENCHMARK = Benchmark(measure, __doc__, rounds=(9, 11))

if __name__ == "__main__":
    BENCHMARK.main()
