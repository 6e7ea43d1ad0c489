"""The job that trains: as a command at a small size, and part by part."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import pytest
import torch
import train_gpt
from corpus import load_corpus
from expecttest import assert_expected_inline
from progress import Progress, clock, loss_curve, mean_around, ticks
from ranks import Ranks

ROOT = Path(__file__).parents[2]
SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--batch", "2"]


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "RANK"}
# Other tests may keep a rank from its core for so long that the others would say that they wait for it.
ENVIRONMENT |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FLATSHARD_WATCH_SECONDS": "0"}
COMMAND = [sys.executable, str(ROOT / "benchmarks" / "train_gpt.py")]


def job(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=220)


@pytest.mark.slow
@pytest.mark.time_limit(240)  # three processes import torch
def test_two_ranks_train_as_one_process():
    done = job("--ranks", "2", "--verify", "4", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warning either
    lines = done.stdout.splitlines()
    assert lines[0] == "starting 2 processes: each imports torch ..."
    assert lines[-1].startswith("equal: largest relative difference ")
    assert len([line for line in lines if re.match(r" +\d  ", line)]) == 4


@pytest.mark.slow
@pytest.mark.time_limit(240)  # three processes import torch
def test_an_interrupt_ends_all_ranks_at_once():
    """As Ctrl-C does on a terminal. No traceback, and no words of torchrun's."""
    arguments = ["--ranks", "2", "--steps", "1000000", "--log-every", "1", *SMALL]
    with subprocess.Popen(
        [*COMMAND, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        shown = next(line for line in process.stdout if line.startswith("step"))
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert "step       1/1000000" in shown
    assert rest.endswith("\nstopped\n"), rest[-300:]
    assert "Traceback" not in errors
    assert "torch/distributed" not in errors
    assert process.returncode == 128 + signal.SIGINT


FAILING = """
import os, sys

assert sys.argv[1:] == ["--some", "option"]
assert os.environ["RANK"] == "0", "this rank fails"
"""


@pytest.mark.slow
def test_a_rank_that_fails(tmp_path):
    """Of a script that imports nothing. What is no checkpoint to resume from, the tests of checkpoints say."""
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    path = [str(ROOT / "benchmarks"), str(ROOT)]
    code = (
        f"import sys; sys.path[:0] = {path}; from ranks import start; start(2, {str(script)!r}, ['--some', 'option'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "this rank fails" in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith("rank 1 ended with exit code 1"), done.stderr


def test_help_has_the_examples(capsys, tmp_path, monkeypatch):
    (tmp_path / "run" / "step-50").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        train_gpt.parse_options(["--help"])
    assert caught.value.code == 0
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verify", "--precision", "bf16"], "use it with --precision fp32"),
        (["--width", "10"], r"width (10) must be divisible by heads (4)"),
        (["--plot", "loss.png"], "loss.png does not end in .svg"),
        (["--plot", "nowhere/loss.svg"], "nowhere/loss.svg: there is no such directory"),
        (["--resume", "nowhere/step-1"], "nowhere/step-1: there is no such directory"),
        (["--steps", "0"], "'0' is not a whole number of at least 1"),
        (["--ranks", "two"], "'two' is not a whole number of at least 1"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_are_refused(capsys, options: list[str], message: str):
    with pytest.raises(SystemExit):
        train_gpt.parse_options(options)
    assert message in capsys.readouterr().err


def train(ctx, directory: str) -> str:
    arguments = [*SMALL, "--steps", "6", "--log-every", "3", "--plot", f"{directory}/loss.svg"]
    ranks = Ranks(ctx.rank, ctx.world_size, torch.device("cpu"))
    out = io.StringIO()
    few = mock.patch.multiple(train_gpt, SAMPLE_BYTES=3, VALIDATION_WINDOWS=4)
    with contextlib.redirect_stdout(out), few:
        assert train_gpt.train(train_gpt.parse_options(arguments), load_corpus(100_000), ranks)
    return out.getvalue()


def test_what_it_prints(pool, tmp_path):
    shown, *others = pool.run(train, str(tmp_path), world_size=4)
    assert others == [""] * 3
    assert re.search(r"^step 1/6  loss 5\.\d+  lr .* tokens/s", shown, re.MULTILINE)
    assert re.search(r"^step 3/6  .* tokens/s  \d+:\d\d left$", shown, re.MULTILINE)
    assert re.search(r"^total +\d+\.\d+ +\d+\.\d+ +2[5-9]%$", shown, re.MULTILINE)  # a quarter, and padding
    end = shown.partition("\nfinished\n")[2]
    assert re.fullmatch(
        r"  validation loss  5\.\d+ -> 5\.\d+\n"
        r"  steps            6, 768 tokens, [\d,]+ tokens/s\n"
        r"  memory           0\.\d MiB a rank; one process: 0\.\d\n"
        r"  time             \d+:\d\d in steps, \d+:\d\d in all\n"
        rf"  loss curve       {re.escape(str(tmp_path))}/loss\.svg\n",
        end,
    ), end
    assert ">step<" in (tmp_path / "loss.svg").read_text()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What four steps of one second print, with a line every second one."""
    now = [0.0]
    monkeypatch.setattr("progress.time.perf_counter", lambda: now[0])
    progress = Progress(1, 4, 1000, out)
    for step in range(1, 5):
        now[0] += 1.0
        progress.step(step, 5.0 - step)
        if step % 2 == 0:
            progress.line(step, 4.5 - step, "lr 1e-3")
    return out.getvalue()


def test_progress_in_a_log(monkeypatch):
    assert_expected_inline(
        watch(io.StringIO(), monkeypatch),
        """\
step 2/4  loss 2.500  lr 1e-3      1,000 tokens/s  0:02 left
step 4/4  loss 0.500  lr 1e-3      1,000 tokens/s
""",
    )


def test_progress_on_a_terminal(monkeypatch):
    shown = watch(Terminal(), monkeypatch).replace("\r\x1b[K", "<clear>\n")
    assert_expected_inline(
        re.sub(" +$", "", shown, flags=re.MULTILINE).replace("  <clear>", "<clear>"),
        """\
<clear>
[#####...............] step 1/4  loss 4.000<clear>
[##########..........] step 2/4  loss 3.000  1,000 tokens/s  0:02 left<clear>
step 2/4  loss 2.500  lr 1e-3      1,000 tokens/s  0:02 left
<clear>
[###############.....] step 3/4  loss 2.000  1,000 tokens/s  0:01 left<clear>
[####################] step 4/4  loss 1.000  1,000 tokens/s<clear>
step 4/4  loss 0.500  lr 1e-3      1,000 tokens/s
""",
    )


def test_a_sample_cannot_change_the_terminal():
    assert train_gpt.printable("é\n\tdef\x1b[2J\x00\x07") == "é\n\tdef\ufffd[2J\ufffd\ufffd"


def test_clock():
    assert [clock(s) for s in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]


def test_a_loss_curve():
    root = ElementTree.fromstring(loss_curve(5, [3.0, 2.0, 1.0], "a & b"))
    lines = [e.attrib["points"].split() for e in root if e.tag.endswith("polyline")]
    assert [len(line) for line in lines] == [3, 3]
    assert lines[0] == ["56.0,44.0", "380.0,194.0", "704.0,344.0"]
    texts = [e.text for e in root if e.tag.endswith("text")]
    assert {"a & b", "5", "6", "7", "1.0", "1.5", "3.0"} <= set(texts)
    assert loss_curve(1, [1.0], "one step")


def test_the_mean_of_a_curve_does_not_lag():
    straight = [float(i) for i in range(20)]
    assert mean_around(straight, 3) == pytest.approx(straight)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1.31, 5.54, [1, 2, 3, 4, 5, 6]), (1, 3, [1, 1.5, 2, 2.5, 3]), (2, 2, [2, 2.1])]
)
def test_ticks_are_round_numbers(low, high, expected):
    assert ticks(low, high, 6) == pytest.approx(expected)
