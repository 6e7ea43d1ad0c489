"""Tests with real client libraries. ``pytestmark = pytest.mark.clients("accelerate", ...)`` names those that a file needs.

If one of them is not installed, the file's tests are skipped. So such files import them inside functions only.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool import Pool


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("clients"):
        absent = [name for name in marker.args if importlib.util.find_spec(name) is None]
        if absent:
            pytest.skip(f"not installed: {', '.join(absent)}; pip install -e '.[clients]' installs all clients")
        import vision  # noqa: F401


# Set before any pool starts: ranks inherit the environment in which their libraries were imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

# For PRELOAD: Python 3.11 imports it with the path of a fresh interpreter.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
)

TIMEOUT = 240.0  # seconds since a body's last note; its first imports of libraries are slow on a busy machine
PRELOAD = (
    "vision",
    "accelerate",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
)


@pytest.fixture(scope="session")
def pair() -> Iterator[Pool]:
    """Two ranks that form the default group, on which clients train."""
    with contextlib.closing(Pool(2, preload=PRELOAD, timeout=TIMEOUT)) as p:
        yield p
