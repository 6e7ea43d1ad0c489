"""The cases of the modules here: on the fake group, and on real ranks where that would not do."""

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
"""Those that ``mutants/tables`` names."""


def on_ranks() -> Iterator[str]:
    """Those that tell, and of the variants that are for ranks only a third of the others."""
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
    """A group that has the device's backend only: what ranks tell each other goes through the device as well."""
    check(simulated_pool, CASES["training-many_steps"], backend="simccl")
    check(simulated_pool, CASES["capture-step-three_warm_ups"], backend="simccl")
