"""Steps inside a captured graph: the cases of ``capture.py``."""

from __future__ import annotations

import pytest
from accelerator.capture import cases
from accelerator.harness import check
from pool import Pool


@pytest.mark.parametrize("name", cases.on_ranks)
def test_ranks(simulated_pool: Pool, name: str) -> None:
    check(simulated_pool, cases[name])


@pytest.mark.parametrize("name", cases.on_the_fake_group)
def test_fake_group(simulated_process: Pool, name: str) -> None:
    check(simulated_process, cases[name])
