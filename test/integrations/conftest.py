"""Tests with real client libraries: ``pytestmark = pytest.mark.clients("accelerate", ...)`` names those that a file needs.

Where one of them is absent its tests skip. So a file of tests imports them inside its bodies only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
from pool import Pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("clients"):
        absent = [name for name in marker.args if importlib.util.find_spec(name) is None]
        if absent:
            pytest.skip(f"not installed: {', '.join(absent)}; pip install -e '.[clients]' installs all clients")


def _prepare_rank() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    """Two ranks whose default group has these two: the clients train on the default group."""
    p = Pool(2, prepare=_prepare_rank)
    yield p
    p.close()
