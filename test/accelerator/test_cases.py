"""Cases of the modules in this folder: on the fake group, and on real ranks if the fake group is not enough."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerator import capture, moves, offload, planning, tools, training
from accelerator.harness import check
from pairs import some
from pool import Pool

MODULES = {
    "training": training,
    "tools": tools,
    "capture": capture,
    "planning": planning,
    "offload": offload,
    "moves": moves,
}
CASES = {f"{module}-{name}": case for module, each in MODULES.items() for name, case in each.cases.items()}
TABLES = "".join(path.read_text() for path in sorted((Path(__file__).parents[1] / "mutants/tables").glob("*.txt")))
TELLING = re.findall(r"accelerator/test_cases:ranks\[([^]]*)\]", TABLES)
"""Names of cases in ``mutants/tables``."""


def on_ranks() -> Iterator[str]:
    """Yield the names in ``TELLING``, and a third of the other variants that need ranks."""
    yield from TELLING
    others = [name for name, case in CASES.items() if not case.fake and name not in TELLING]
    for _, variants in itertools.groupby(others, key=lambda name: name.split("-")[:2]):
        names = list(variants)
        yield from some(names, -(-len(names) // 3))


@pytest.mark.parametrize("name", dict.fromkeys(on_ranks()))
def test_ranks(simulated_pool: Pool, name: str) -> None:
    check(simulated_pool, CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fake])
def test_fake_group(simulated_process: Pool, name: str) -> None:
    check(simulated_process, CASES[name])


def test_without_gloo(simulated_pool: Pool) -> None:
    """Run on a group with the device's backend only, so ranks also exchange objects through the device."""
    check(simulated_pool, CASES["training-many_steps"], backend="simccl")
    check(simulated_pool, CASES["capture-step-three_warm_ups"], backend="simccl")
