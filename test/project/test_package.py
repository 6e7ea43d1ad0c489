"""flatshard as a package: what an archive and a wheel contain, and what a bug report says."""

import importlib.metadata
import inspect
import os
import pydoc
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import flatshard

ROOT = Path(__file__).parents[2]


def test_the_report(monkeypatch, capsys):
    monkeypatch.setenv("FLATSHARD_TRACE", "0")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    runpy.run_module("flatshard.env", run_name="__main__", alter_sys=True)
    facts = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert facts["torch"].startswith(torch.__version__)
    assert facts["FLATSHARD_TRACE"] == "0"
    assert "gloo" in facts["backends"]
    assert set(facts) >= {"flatshard", "python", "cores", "devices"}
    assert "SECRET_TOKEN" not in facts


def test_the_trace_is_shown_wherever_there_is_no_logging():
    script = (
        "import logging, sys, torch, flatshard; from torch import nn\n"
        "from torch.testing._internal.distributed import fake_pg\n"
        "if len(sys.argv) > 1: logging.basicConfig(level='INFO', format='LOGGED %(message)s')\n"
        "torch.distributed.init_process_group('fake', store=fake_pg.FakeStore(), rank=1, world_size=2)\n"
        "flatshard.fully_shard(nn.Linear(2, 2))(torch.ones(2))"
    )
    for arguments, start in ([], "flatshard, rank 1: "), (["log"], "LOGGED "):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT, env=os.environ | {"FLATSHARD_TRACE": "1"}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert f"{start}all-gather <root>\n" in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_an_archive_contains(kind, tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "source"  # with files that must stay outside
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in [*files, "pyproject.toml"]:
        if name.startswith(("flatshard/", "benchmarks/", "test/project/")) or name in (
            "pyproject.toml",
            "README.md",
            "LICENSE",
        ):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    build = f"from setuptools.build_meta import build_{kind}; print(build_{kind}({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    archive = tmp_path / done.stdout.splitlines()[-1]
    if kind == "wheel":
        with zipfile.ZipFile(archive) as opened:
            names = opened.namelist()
            metadata = opened.read(next(n for n in names if n.endswith("/METADATA"))).decode()
        assert "License-Expression: BSD-3-Clause" in metadata
        assert "License-File: LICENSE" in metadata
        assert "Description-Content-Type: text/markdown" in metadata
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
        assert "Requires-Dist: torch" in metadata
        assert "Classifier: Typing :: Typed" in metadata
        assert metadata.endswith((ROOT / "README.md").read_text())
        assert {name.split("/")[0].partition("-")[0] for name in names} == {"flatshard"}, "no tests and no benchmarks"
    else:
        with tarfile.open(archive) as opened:
            names = [name.partition("/")[2] for name in opened.getnames()]
    wanted = [name for name in files if name.startswith("flatshard/") and (ROOT / name).exists()]
    assert sorted(set(wanted) - set(names)) == []
    assert {
        "flatshard/py.typed",
        "flatshard/README.md",
        "flatshard/docs/migration.md",
        "flatshard/examples/train.py",
    } <= set(names)


def test_the_version_is_that_of_the_project():
    assert flatshard.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    alone = {"__file__": "/nowhere/flatshard/_base/version.py", "__name__": "version"}
    exec((ROOT / "flatshard/_base/version.py").read_text(), alone)
    try:
        assert alone["__version__"] == importlib.metadata.version("flatshard")
    except importlib.metadata.PackageNotFoundError:
        assert alone["__version__"] == "unknown"


def test_the_help_begins_with_one_screen_that_tells_what_to_type():
    """It says what the package is, and names ten functions and classes, which have a line each."""
    shown = pydoc.plain(pydoc.render_doc(flatshard))
    screen = shown.partition("\nPACKAGE CONTENTS")[0]
    assert "flatshard - Sharded data parallelism for PyTorch in one call" in screen
    assert len(screen.splitlines()) <= 30
    names = re.findall(r"^ {8}(\w+) {2,}\w", screen, re.MULTILINE)
    assert len(names) == 10
    assert all(callable(getattr(flatshard, name)) for name in names)
    modules = {name for name in re.findall(r"``(\w+)``", screen) if inspect.ismodule(getattr(flatshard, name, None))}
    assert modules == {name for name in flatshard.__all__ if inspect.ismodule(getattr(flatshard, name))} - {"env"}
    assert "_old_names" not in shown


def test_products_are_imported_on_first_use():
    script = (
        "import sys, flatshard\n"
        "later = ('debug', 'elastic', 'env', 'fsdp2', 'integrations', 'planning', 'weights')\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'flatshard' and set(m.split('.')) & set(later)]\n"
        "assert set(dir(flatshard)) == {*flatshard.__all__, '__version__'}, 'what completion offers'\n"
        "for name in flatshard.__all__:\n"
        "    found = getattr(flatshard, name)\n"
        "    assert not callable(found) or found.__module__ == 'flatshard' or isinstance(found, type), name\n"
        "assert all(getattr(flatshard, name) is sys.modules['flatshard.' + name] for name in later)\n"
        "assert not hasattr(flatshard, 'nothing')\n"
        "help(flatshard.fit_to_memory)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "Help on function fit_to_memory in module flatshard" in done.stdout
