"""The job that trains: as a command at a small size, and part by part."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import train_gpt

import flatshard

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2"]


def verify(ctx, strategy: str) -> tuple[bool, list[str]]:
    """Return the output of ``--verify 4``."""
    options = train_gpt.parse_options(["--verify", "4", "--strategy", strategy, *SMALL])
    ranks = train_gpt.Ranks(ctx.rank, ctx.world_size, torch.device("cpu"))
    launched = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ctx.world_size))  # hybrid strategies ask for it
    with launched, contextlib.redirect_stdout(io.StringIO()) as said:
        agreed = train_gpt.verify(options, train_gpt.load_corpus(), ranks)
    return agreed, said.getvalue().splitlines()


@pytest.mark.parametrize("strategy", [each.name.lower() for each in flatshard.ShardingStrategy])
def test_two_ranks_train_as_one_process(two_ranks, strategy: str):
    (agreed, lines), _ = two_ranks.run(verify, strategy)
    assert agreed
    assert lines[-1].startswith("equal: largest relative difference ")
    assert len([line for line in lines if re.match(r" +\d  ", line)]) == 4


@pytest.mark.slow
@pytest.mark.time_limit(240)  # three processes import torch
def test_an_interrupt_ends_all_ranks_at_once():
    """Interrupt as Ctrl-C does on a terminal: no warning, no traceback, and no message of torchrun."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    # Other tests may keep a rank from its core for so long that the others would say that they wait for it.
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLATSHARD_WATCH_SECONDS": "0"}
    command = [sys.executable, str(ROOT / "benchmarks" / "train_gpt.py"), "--ranks", "2", "--log-every", "1", *SMALL]
    with subprocess.Popen(
        [*command, "--steps", "1000000"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert next(process.stdout) == "starting 2 processes: each imports torch ...\n"
        shown = next(line for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert "step       1/1000000" in shown
    assert rest.endswith("\nstopped\n"), rest[-300:]
    assert not re.search("Warning|Traceback|torch/distributed", errors), errors
    assert process.returncode == 128 + signal.SIGINT


def test_help_has_the_examples(capsys, tmp_path, monkeypatch):
    (tmp_path / "run" / "step-50").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        train_gpt.parse_options(["--help"])
    shown = capsys.readouterr().out
    assert "examples, in an activated environment:\n" in shown
    assert "python benchmarks/train_gpt.py --ranks 2 --verify" in shown
    for command in re.findall(r"train_gpt\.py (.*)", shown):
        train_gpt.parse_options(command.split())


def test_the_command_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    command = readme.partition("<!-- command: main job -->\n```bash\n")[2].partition("\n```")[0]
    options = command.split("benchmarks/train_gpt.py ")[1].split()
    assert train_gpt.parse_options(options).ranks == 2
    section = readme.partition("## Two commands")[2].partition("\n## ")[0]
    mentioned = set(re.findall(r"`(--[^`]*)`", section)) - {"--help"}
    assert "--verify" in mentioned
    for option in mentioned:
        train_gpt.parse_options(option.split())
