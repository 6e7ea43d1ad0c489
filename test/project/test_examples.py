"""The scripts of ``flatshard/examples``, without their downloads and without a device. See also ``integrations``."""

import json
import re

import pytest
from scripts import EXAMPLES, PACKAGE, run_main, run_python, run_script

SLOW = [pytest.mark.slow, pytest.mark.time_limit(240)]  # processes of their own import torch


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"^step .* loss ([\d.]+)", line))]


def test_a_user_can_copy_each_script():
    """Each is short, uses public names, and says at its top how to run it."""
    for name, path in EXAMPLES.items():
        text = path.read_text()
        assert len(text.splitlines()) < 120, name
        assert f"    python {name}.py" in text.split('"""')[1], name
        assert not re.search(r"flatshard[\w.]*\._[a-z]|from flatshard[\w.]* import _", text), name


def test_training_resumes_on_more_ranks(two_ranks, pool, tmp_path):
    lines, _ = two_ranks.run(run_main, "train", str(tmp_path), steps=60)
    first = losses(lines)
    assert len(first) == 3
    assert first == sorted(first, reverse=True)
    lines, *_ = pool.run(run_main, "train", str(tmp_path), steps=80, world_size=4)
    assert lines[0] == "resumed after step 60"
    assert losses(lines)[0] < first[-1]


@pytest.mark.parametrize("name", [pytest.param("train", marks=SLOW)])
def test_the_first_run_prints_no_warnings(tmp_path, name: str):
    assert losses(run_script(name, "--folder", str(tmp_path), "--steps", "20"))


def test_a_mixture_of_experts_learns(pool):
    lines, *_ = pool.run(run_main, "experts", world_size=4)
    first, last = losses(lines)
    assert last < 0.6 * first


def test_the_ported_script_resumes_from_the_one_for_fsdp2(two_ranks, pool, tmp_path):
    """Both print the same losses: at once, and from the other's file on another number of ranks."""
    before, _ = two_ranks.run(run_main, "port_fsdp2", "before", str(tmp_path / "before"), steps=20)
    after, _ = two_ranks.run(run_main, "port_fsdp2", "after", str(tmp_path / "after"), steps=40)
    resumed, *_ = pool.run(run_main, "port_fsdp2", "after", str(tmp_path / "before"), steps=40, world_size=4)
    assert resumed[0] == "resumed after step 20, on 4 ranks"
    assert len(losses(after)) == 4
    assert [*losses(before), *losses(resumed)] == pytest.approx(losses(after), abs=2e-4)


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_a_rank_dies_and_training_goes_on():
    lines = run_script("elastic")
    events = [line for line in lines if not losses([line])]
    assert [line.split("process")[0] for line in events if line.startswith("elastic:")] == [
        "elastic: lost ",
        "elastic: added ",
    ]
    assert any(line.endswith("kills itself") for line in events)
    found = losses(lines)
    assert found[-1] < found[0]
    assert lines[-1].endswith("2 ranks")


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_an_engine_gets_the_weights():
    lines = run_script("weights")
    (all_bytes,) = [
        int(line.split()[-2].replace(",", "")) for line in lines if line.startswith("the engine's weights have")
    ]
    last = next(line for line in reversed(lines) if line.startswith("version 5:"))
    assert int(last.split()[2].replace(",", "")) < all_bytes
    ours, theirs = [line.split("sum ")[1] for line in lines if "sum" in line]
    assert ours == theirs


def test_a_gpt_is_planned_without_ranks():
    (text,) = ["\n".join(run_main(None, "fit_1b"))]
    assert re.search(r"^1,0\d\d,\d{3},\d{3} parameters", text)
    assert "GPT, FULL_SHARD over 8 ranks" in text
    assert "GPT over 8 ranks: fits into 8 GiB" in text


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_the_notebook_runs():
    """Its code cells, one after the other, in a process of their own."""
    cells = json.loads((PACKAGE / "examples" / "notebook.ipynb").read_text())["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum(len(each.splitlines()) for each in code) < 120
    lines = run_python("-c", "\n".join(code))
    before, after, right = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+); (\d+)% right", lines[-1]).groups()
    assert float(after) < float(before)
    assert int(right) > 50
