"""``flatshard.__version__``: the version in ``pyproject.toml``."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path


def _read() -> str:
    """Return the version of the source tree around this file, or else of the package that is installed.

    The metadata of an editable install is as old as the install, and a source tree on ``sys.path`` has none.
    """
    try:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        if project["name"] == "flatshard":
            return str(project["version"])
    except (OSError, KeyError, ValueError):  # no source tree
        pass
    try:
        return importlib.metadata.version("flatshard")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


__version__ = _read()
