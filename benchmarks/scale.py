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
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from contenders import ONE_CALL, SHARDED, Setting, build, nothing_moves
from suite import OURS, Figure, Table, arguments, fake_world, interleaved, main, progress
from units import Unit, Units, timed_step

RANKS = (8, 4096)
UNITS = (10, 1000)
FULL = [*SHARDED, ONE_CALL]


def stepped(name: str, units: int, group: dist.ProcessGroup | None) -> Callable[[], float]:
    """A timed step of a new model."""
    torch.manual_seed(0)
    step = timed_step(build(name, Units(units), Setting(Unit, group=group)))

    def within() -> float:
        with nothing_moves(name):
            return step()

    return within


def spread(few: list[float], many: list[float], of: Callable[[float, float], float]) -> Figure:
    """``of`` the medians, and the least and the most of its values over the rounds."""
    each = [of(a, b) for a, b in zip(few, many, strict=True)]
    return Figure(of(statistics.median(few), statistics.median(many)), min(each), max(each))


def by_ranks(names: list[str], units: int, rounds: int) -> dict[str, dict[str, Figure]]:
    """Milliseconds of a step at either size, and their ratio."""
    few, many = RANKS
    with fake_world(many):
        groups = {few: dist.new_group(list(range(few)), backend="fake"), many: dist.group.WORLD}
        steps = {f"{name}@{size}": stepped(name, units, group) for name in names for size, group in groups.items()}
        times = interleaved(steps, rounds)
    result = {}
    for name in names:
        a, b = times[f"{name}@{few}"], times[f"{name}@{many}"]
        result[name] = {
            f"ms, {few} ranks": Figure(1e3 * statistics.median(a), 1e3 * min(a), 1e3 * max(a)),
            f"ms, {many:,} ranks": Figure(1e3 * statistics.median(b), 1e3 * min(b), 1e3 * max(b)),
            "ratio": spread(a, b, lambda x, y: y / x),
        }
    return result


def by_units(names: list[str], rounds: int) -> dict[str, dict[str, Figure]]:
    """Microseconds per unit of a step at either number, and the exponent."""
    few, many = UNITS
    with fake_world(RANKS[0]):
        steps = {f"{name}@{units}": stepped(name, units, None) for name in names for units in UNITS}
        times = interleaved(steps, rounds)
    result = {}
    for name in names:
        a, b = times[f"{name}@{few}"], times[f"{name}@{many}"]
        result["floor: plain" if name == "plain" else name] = {
            f"us per unit, {few}": Figure(*(1e6 / few * v for v in (statistics.median(a), min(a), max(a)))),
            f"us per unit, {many:,}": Figure(*(1e6 / many * v for v in (statistics.median(b), min(b), max(b)))),
            "exponent": spread(a, b, lambda x, y: math.log(y / x) / math.log(many / few)),
        }
    return result


def measure(args: argparse.Namespace) -> list[Table]:
    rounds = args.rounds or (11 if args.full else 9)
    names = FULL if args.full else ["flatshard"]
    progress("host time by ranks")
    ranks = by_ranks(names, 30, rounds)
    progress("host time by units")
    units = by_units([*names, "plain"], max(3, rounds // 2))
    left_out = () if args.full else ("Peers: with --full.",)
    return [
        Table(
            "scale_ranks",
            f"host time of forward + backward by ranks (fake group, 30 units); medians of {rounds} rounds",
            "a ratio of 1",
            {**ranks, "floor": {"ratio": Figure(1.0)}},
            {OURS: {"ratio": 1.05}},
            left_out,
        ),
        Table(
            "scale_units",
            f"host time of forward + backward by units (fake group of {RANKS[0]}); medians of {max(3, rounds // 2)} rounds",
            "the plain model, in the same rounds",
            units,
            {OURS: {"exponent": 1.02}},
            left_out,
            digits=3,
        ),
    ]


def parser() -> argparse.ArgumentParser:
    made = arguments(__doc__)
    made.add_argument("--rounds", type=int, default=0, help="default: 9, with --full 11")
    return made


if __name__ == "__main__":
    main(measure, parser())
