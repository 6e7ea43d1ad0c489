"""Strategies, precision, accumulation, prefetch, offload, order of computation: the cases of ``training.py``."""

from __future__ import annotations

import pytest
from accelerator.harness import check
from accelerator.training import cases
from pairs import some
from pool import Pool


@pytest.mark.parametrize("name", cases.on_ranks)
def test_ranks(simulated_pool: Pool, name: str) -> None:
    check(simulated_pool, cases[name])


@pytest.mark.parametrize("name", cases.on_the_fake_group)
def test_fake_group(simulated_process: Pool, name: str) -> None:
    check(simulated_process, cases[name])


@pytest.mark.parametrize("name", some((name for name in cases if name.startswith("many_steps")), 1))
def test_without_gloo(simulated_pool: Pool, name: str) -> None:
    """A group that has the device's backend only: what ranks tell each other goes through the device as well."""
    check(simulated_pool, cases[name], backend="simccl")
