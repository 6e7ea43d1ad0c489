"""The cases of the modules here, on real ranks and on the fake group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from accelerator import capture, kinds, offload, planning, tools, training
from accelerator.harness import POLICIES, check
from pool import Pool

MODULES = {
    "training": training,
    "kinds": kinds,
    "tools": tools,
    "capture": capture,
    "planning": planning,
    "offload": offload,
}
CASES = {f"{module}-{name}": case for module, each in MODULES.items() for name, case in each.cases.items()}
TABLE = Path(__file__).parents[1].joinpath("mutants", "table.txt").read_text()


def telling(test: str) -> list[str]:
    """Cases that ``mutants/table.txt`` names: no selection leaves them out."""
    return re.findall(rf"accelerator/test_cases:{test}\[([^]]*)\]", TABLE)


def selected(test: str, selection: str) -> list[str]:
    chosen = [f"{module}-{name}" for module, each in MODULES.items() for name in getattr(each.cases, selection)]
    return list(dict.fromkeys([*chosen, *telling(test)]))


ON_RANKS, ON_THE_FAKE_GROUP = selected("ranks", "on_ranks"), selected("fake_group", "on_the_fake_group")


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks(simulated_pool: Pool, name: str) -> None:
    check(simulated_pool, CASES[name])


@pytest.mark.parametrize("name", ON_THE_FAKE_GROUP)
def test_fake_group(simulated_process: Pool, name: str) -> None:
    """Those that are to notice mutants run under all policies, as one does not show every mutant."""
    check(simulated_process, CASES[name], POLICIES if name in telling("fake_group") else ())


def test_without_gloo(simulated_pool: Pool) -> None:
    """A group that has the device's backend only: what ranks tell each other goes through the device as well."""
    check(simulated_pool, CASES["training-many_steps-full"], backend="simccl")
