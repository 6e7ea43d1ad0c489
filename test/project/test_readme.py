"""The README: every example runs, its figures are those of the results, and its tables name what exists."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import flatshard

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def marked(kind: str) -> dict[str, str]:
    """The Python blocks that follow ``<!-- kind: name -->``, by name."""
    return dict(re.findall(rf"<!-- {kind}: ([^\n]*) -->\n```python\n(.*?)```", README, re.DOTALL))


EXAMPLES, RECIPES = marked("example"), marked("recipe")
FOUR_RANKS = {"tensor parallel"}
NEEDS_NO_RANKS = {"plan"}


def test_every_python_block_is_run():
    assert len(re.findall("```python", README)) == len(EXAMPLES) + len(RECIPES) + 1
    assert marked("part of")["quickstart"].strip() in EXAMPLES["quickstart"]  # the one line at the top


@pytest.mark.slow
@pytest.mark.time_limit(240)  # three processes import torch
def test_the_quick_start_as_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(EXAMPLES["quickstart"])
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0 +Block +FULL_SHARD +sharded", done.stdout, re.MULTILINE), done.stdout
    assert "5 units" in done.stdout


def run_example(ctx, code: str, directory: str) -> dict[str, Any]:
    os.chdir(directory)
    found: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), found)
    return found


def run_checkpoint(ctx, directory: str) -> None:
    assert run_example(ctx, EXAMPLES["checkpoint"], directory)["step"] == 1


def test_checkpoint(pool, tmp_path):
    pool.run(run_checkpoint, str(tmp_path), world_size=4)


def the_quick_starts_model() -> dict[str, Any]:
    """``torch``, ``flatshard``, ``Block`` and ``model``, as the recipes find them."""
    start = EXAMPLES["quickstart"].replace("torch.distributed.init_process_group()", "")
    names: dict[str, Any] = {}
    exec(compile(start[: start.index("flatshard.fully_shard(")], "README.md", "exec"), names)
    return names


def run_recipe(ctx, name: str, directory: str) -> None:
    """Runs it, and then trains for a step, if it sharded the model."""
    os.chdir(directory)
    names = the_quick_starts_model()
    model = names["model"]
    plain = {n: p.detach().clone() for n, p in model.named_parameters()}
    exec(compile(RECIPES[name], "README.md", "exec"), names)
    if name in NEEDS_NO_RANKS:
        assert json.loads(Path("plan.json").read_text())["traceEvents"]
        return
    optimizers = [v for v in names.values() if isinstance(v, torch.optim.Optimizer)]
    if not optimizers:
        optimizers = [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])]
    out = names["x"] if "x" in names else model(torch.randn(8, 64))  # skip has run its own forward
    out.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    with flatshard.summon_full_params(model, writeback=False):
        shown = {n: p for n, p in model.named_parameters() if n in plain and type(p) is torch.nn.Parameter}
        changed = {n for n, p in shown.items() if not torch.equal(p, plain[n])}
    expected = set(shown) - frozen
    assert changed == expected or (name == "skip" and changed < expected), expected - changed
    assert changed or name == "lora", "its adapters have names of their own"


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(pool, tmp_path, name: str):
    pool.run(run_recipe, name, str(tmp_path), world_size=1 if name in NEEDS_NO_RANKS else 4)


def see_what_the_loop_sees(ctx) -> None:
    """The section "What your training loop sees", statement by statement."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    flatshard.fully_shard(model, policy={torch.nn.Linear}, process_group=ctx.group)
    assert model[0].weight is weight
    assert weight.ndim == 1
    assert flatshard.full_shape(weight) == (8, 8)

    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * ctx.rank + i)) for i in range(2)]
    with flatshard.no_sync(model):
        model(data[0]).square().sum().backward()
    model(data[1]).square().sum().backward()
    assert weight.grad.shape == weight.shape
    norm = weight.grad.norm()
    whole = flatshard.optim.gradient_statistics(model)
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    with flatshard.summon_full_params(model):
        assert model[0].weight.shape == (8, 8)

    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    for rank in range(ctx.world_size):
        for i in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + i))
            (one(x).square().sum() / ctx.world_size).backward()
    torch.testing.assert_close(norm, one[0].weight.grad.norm())
    torch.testing.assert_close(total, torch.nn.utils.clip_grad_norm_(one.parameters(), 1e9))
    assert whole["0.weight"].max_abs == pytest.approx(one[0].weight.grad.abs().max().item(), rel=1e-5)


def test_what_your_training_loop_sees(pool):
    pool.run(see_what_the_loop_sees, world_size=2)


# -- tables ------------------------------------------------------------------------------------------------------------


def rows_under(title: str) -> list[list[str]]:
    section = README.split(f"\n## {title}\n")[1].split("\n## ")[0] if title else README.split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_figures_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "quick.json").read_text())
    tables = {table["name"]: table for table in results["tables"]}
    floor = {"copied_bytes": "floor", "host_overhead": "floor", "step_time": "floor: plain"}
    rows = rows_under("")
    assert len(rows) == 3
    for (name, last), row in zip(floor.items(), rows, strict=True):
        digits = tables[name]["digits"]
        values = [tables[name]["rows"][who]["fp32"]["value"] for who in ("flatshard", "FSDP2", "FSDP1", last)]
        assert [cell.removesuffix(" µs") for cell in row[1:]] == [f"{value:,.{digits}f}" for value in values]
    ddp = tables["step_time"]["rows"]["DDP"]["fp32"]["value"]
    assert f"DDP: {ddp:.2f}" in rows[2][0]


def test_every_argument_of_fsdp_has_its_place():
    section = README.split("\n## Coming from FSDP1 or FSDP2\n")[1].split("\n## ")[0]
    for function in (FullyShardedDataParallel.__init__, fsdp2_fully_shard):
        for argument in list(inspect.signature(function).parameters):
            assert argument in ("self", "module") or f"`{argument}=`" in section, argument
    for name in vars(FSDPModule):
        assert name.startswith("_") or f"`{name}" in section, name


def test_the_arguments_named_there_are_ours():
    ours = set(inspect.signature(flatshard.fully_shard).parameters) | set(
        inspect.signature(flatshard.configure).parameters
    )
    for row in rows_under("Coming from FSDP1 or FSDP2"):
        for argument in re.findall(r"(\w+)=", row[2]):
            assert argument in ours, argument


def test_links_and_files_exist():
    for path in re.findall(r"\]\(([\w./]+)\)", README) + re.findall(r"`((?:flatshard|test)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
