"""The cases of the modules here, on real ranks and on the fake group."""

from __future__ import annotations

import pytest
from accelerator import capture, kinds, planning, tools, training
from accelerator.harness import check
from pairs import some
from pool import Pool

MODULES = {"training": training, "kinds": kinds, "tools": tools, "capture": capture, "planning": planning}
CASES = {f"{module}-{name}": case for module, each in MODULES.items() for name, case in each.cases.items()}
ON_RANKS = [f"{module}-{name}" for module, each in MODULES.items() for name in each.cases.on_ranks]
ON_THE_FAKE_GROUP = [f"{module}-{name}" for module, each in MODULES.items() for name in each.cases.on_the_fake_group]


@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks(simulated_pool: Pool, name: str) -> None:
    check(simulated_pool, CASES[name])


@pytest.mark.parametrize("name", ON_THE_FAKE_GROUP)
def test_fake_group(simulated_process: Pool, name: str) -> None:
    check(simulated_process, CASES[name])


@pytest.mark.parametrize("name", some((name for name in CASES if name.startswith("training-many_steps")), 1))
def test_without_gloo(simulated_pool: Pool, name: str) -> None:
    """A group that has the device's backend only: what ranks tell each other goes through the device as well."""
    check(simulated_pool, CASES[name], backend="simccl")
