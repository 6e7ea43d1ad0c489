"""The README and the pages of ``flatshard/docs``: examples run, figures are those of the results, tables name what exists.

Recipes for clients are run in ``integrations``, and the API pages' examples in ``test_api_page``.
"""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import picture
import pytest
import torch
from parity import everybody
from suite import fake_world
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import flatshard
import flatshard.fsdp2
from flatshard import ShardingStrategy
from flatshard._handle.tensors.operations import OperationKind

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
INSIDE = (ROOT / "flatshard" / "README.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
DOCS = ROOT / "flatshard" / "docs"
BESIDE = [ROOT / path for path in ("README.md", "flatshard/README.md", "benchmarks/README.md", "benchmarks/tried.md")]
FILES = {path: path.read_text() for path in [*BESIDE, *sorted(DOCS.rglob("*.md"))]}
PAGES = {
    path: text
    for path, text in FILES.items()
    if path.parent in (ROOT, DOCS) and path.name != "changelog.md"  # it has old names
}
"""Pages whose examples are run here."""
MIGRATION, TROUBLESHOOTING = PAGES[DOCS / "migration.md"], PAGES[DOCS / "troubleshooting.md"]


def marked(kind: str, language: str = "python") -> dict[str, str]:
    """The blocks that follow ``<!-- kind: name -->`` on any page, by name."""
    found = re.findall(rf"<!-- {kind}: ([^\n]*) -->\n```{language}\n(.*?)```", "\n".join(PAGES.values()), re.DOTALL)
    names = [name for name, _ in found]
    assert len(set(names)) == len(names), names
    return dict(found)


def after(diff: str) -> str:
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


EXAMPLES = marked("example")
RECIPES = marked("recipe") | {name: after(diff) for name, diff in marked("diff", "diff").items()}
OUTPUTS = marked("output", "")


def test_every_python_block_is_run():
    in_migration = 2  # code of a user's own model
    blocks = sum(text.count("```python") for text in PAGES.values())
    assert blocks == len(EXAMPLES) + len(marked("recipe")) + in_migration
    assert MIGRATION.count("```python") == in_migration
    (call,) = re.findall(r"in one call: `(.*)`\.", README)
    assert f"\n{call}\n" in EXAMPLES["quickstart"]


def test_the_table_of_strategies_is_that_of_the_code():
    moves = {
        "FORWARD": "forward, backward | forward, backward",
        "BACKWARD": "forward | backward",
        "CHANGE": "forward, if the shards have changed | (never)",
    }
    rows = []
    for strategy in ShardingStrategy:
        row = strategy.placements
        moved = moves[row.until.name]
        if strategy.is_replicated:
            moved = "(only cast, to another compute dtype) | backward, what was cast"
        elif row.over_outer and row.over_outer.name == "SHARDED":
            moved = moved.replace(" |", "; over the outer axis once, if the shards have changed |", 1)
        outer = "" if row.over_outer is None else f" {row.over_outer.value}"
        rows.append(f"| `{strategy.name}` | {row.over_inner.value} | {moved} |{outer} |")
    assert "\n".join(["|---|---|---|---|---|", *rows]) in INSIDE


def test_the_table_of_what_may_be_done_with_a_part_is_that_of_the_code():
    shown = re.findall(r"^\| ([A-Z_]+) \| `[^|]+` \| (.+) \|$", INSIDE, re.MULTILINE)
    assert shown == [(kind.name, kind.value) for kind in OperationKind]


@pytest.mark.slow
@pytest.mark.time_limit(240)  # three processes import torch
def test_the_quick_start_as_a_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(EXAMPLES["quickstart"])
    torchrun, *arguments = shlex.split(README.partition("and run it on two ranks by `")[2].partition("`")[0])
    assert torchrun == ".venv/bin/torchrun"
    arguments = [str(script) if argument == "train.py" else argument for argument in arguments]
    run = [str(Path(sys.executable).with_name("torchrun")), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    check_output("quickstart", done.stdout)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses == sorted(losses, reverse=True)


def check_output(name: str, printed: str) -> None:
    """The page's lines are in ``printed``, in this order, and more between them."""
    shown = iter(printed.splitlines())
    for line in OUTPUTS[name].splitlines():
        if line.startswith("step"):  # rounding differs between machines
            line = re.escape(line[:-3]) + r"\d\d\d"
        assert line == "..." or any(re.fullmatch(line, each) or line == each for each in shown), (line, printed)


def the_quick_starts_model() -> dict[str, Any]:
    """``torch``, ``flatshard``, ``Block`` and ``model``, as the recipes find them."""
    start = EXAMPLES["quickstart"].replace("torch.distributed.init_process_group()", "")
    names: dict[str, Any] = {}
    exec(compile(start[: start.index("flatshard.fully_shard(")], "README.md", "exec"), names)
    return names


def check_engine(ctx, names: dict[str, Any], mail: list[tuple[str, int, bytes]]) -> None:
    """Rank 0 has the engine."""
    for _ in range(6):
        every = everybody(ctx, [each for each in mail if ctx.rank == 0 or each[0] == "receiver"])
        mail.clear()
        for kind, to, message in [each for sent in every for each in sent]:
            if to == ctx.rank:
                names[kind].receive(message)
        names["receiver"].poll()
    applied = names["receiver"].apply()
    whole = flatshard.checkpoint.full_state_dict(names["model"], dtype=torch.bfloat16)
    if ctx.rank == 0:
        assert (applied.version, names["sender"].version) == (1, 1)
        assert torch.equal(names["weights"]["4.weight"], whole["4.weight"])


def check_adapter(names: dict[str, Any]) -> None:
    """The file has the adapter alone, loads into a plain model, and is merged as the page says."""
    model, lora = names["model"], names["LoRA"]
    saved = torch.load("adapter.pt")
    assert {n.rpartition(".")[0] for n in saved} == {
        f"{i}.{way}.{part}" for i in range(4) for way in ("up", "down") for part in ("up", "down")
    }
    full = flatshard.checkpoint.full_state_dict(model)
    assert all(torch.equal(full[n], value) for n, value in saved.items())
    assert all(bool(value.any()) for value in saved.values()), "a step has changed what began with zeros"
    x = torch.ones(2, 64)
    before = model(x)
    adapters = [m for m in model.modules() if isinstance(m, lora)]
    with torch.no_grad(), flatshard.summon_full_params(model):
        for each in adapters:
            each.base.weight += each.up.weight @ each.down.weight
            each.up.weight.zero_()
    torch.testing.assert_close(model(x), before)


def run_recipe(ctx, name: str, directory: str) -> None:
    """Runs it, and then trains for a step, if it sharded the model."""
    os.chdir(directory)
    names = the_quick_starts_model()
    before = {n: p.detach().clone() for n, p in names["model"].named_parameters()}
    mail: list[tuple[str, int, bytes]] = []
    names["to_engine"] = lambda engine, message: mail.append(("receiver", engine, message))
    names["to_rank"] = lambda rank, message: mail.append(("sender", rank, message))
    exec(compile(RECIPES[name], "README.md", "exec"), names)
    if name == "A rank dies":
        assert callable(names["main"])  # elastic/test_job.py runs it
        return
    model = names["model"]
    plain = {n: before[n] for n, _ in model.named_parameters() if n in before}
    if name == "Plan":
        assert names["plan"].total_peak.nbytes > names["plan"].between_steps.total > 0
        return
    if name == "checkpoint":
        assert names["step"] == 1
        assert {n: tuple(t.shape) for n, t in names["whole"].items()} == {n: tuple(p.shape) for n, p in plain.items()}
    if name == "describe" and ctx.rank == 0:
        check_output(name, str(names["shown"]))
    if name == "from FSDP2":
        assert tuple(names["weight"].shape) == (10, 64)
    if name == "pretrained":
        values = flatshard.checkpoint.full_state_dict(model)
        assert all(torch.equal(value, before[n]) for n, value in values.items())
    if name == "Weights for an engine":
        check_engine(ctx, names, mail)
    if name == "LoRA":
        check_adapter(names)
    if name == "buffers":
        assert all(torch.equal(mean, model[1].running_mean) for mean in everybody(ctx, model[1].running_mean))
    if name == "export":
        torch.testing.assert_close(names["program"].module()(torch.ones(8, 64)), model(torch.ones(8, 64)))
    if name == "server":
        assert [answer.shape for answer in names["answers"]] == [(1, 10)] * 32
    optimizers = [v for v in names.values() if isinstance(v, torch.optim.Optimizer)]
    if not optimizers:
        optimizers = [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])]
    out = names["y"] if name == "Skip" else model(torch.randn(8, 64))  # its own forward has run
    out.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    with flatshard.summon_full_params(model, writeback=False):
        shown = {n: p for n, p in model.named_parameters() if n in plain and type(p) is torch.nn.Parameter}
        changed = {n for n, p in shown.items() if not torch.equal(p, plain[n])}
    expected = set(shown) - frozen
    assert changed == expected or (name == "Skip" and changed < expected), expected - changed
    assert changed or name == "LoRA", "its adapters have names of their own"


NEED_FOUR = ("tensor parallel", "experts", "context parallel")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(pool, two_ranks, tmp_path, name: str):
    where = pool if name in NEED_FOUR else two_ranks
    where.run(run_recipe, name, str(tmp_path), world_size=1 if name == "Plan" else where.size)


# -- tables ------------------------------------------------------------------------------------------------------------


def rows_under(title: str, page: str) -> list[list[str]]:
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


@pytest.mark.parametrize(
    ("results", "section", "page"),
    [
        ("quick.json", "In short", BENCHMARKS),
        ("torch-2.15/quick.json", "In short", BENCHMARKS),
        ("torch-2.15/quick.json", "Comparison", README),
    ],
    ids=["torch-2.13", "torch-2.15", "readme"],
)
def test_the_figures_are_those_of_the_results(results: str, section: str, page: str):
    """The first row is exact; the others are the least and the most, over FSDP2's. In the README all are exact."""
    path = ROOT / "benchmarks" / "results" / results
    # Host time was measured again, without the imitation of other ranks.
    files = [json.loads(each.read_text()) for each in (path, path.with_name("host_overhead.json"))]
    tables = [table for each in files for table in each["tables"]]
    figures = {
        t["name"]: {who: row["fp32"]["value"] for who, row in t["rows"].items() if "fp32" in row} for t in tables
    }
    for name, row in zip(("copied_bytes", "host_overhead", "step_time"), rows_under(section, page), strict=True):
        of = figures[name] | {"floor": figures[name].get("floor", figures[name].get("floor: plain"))}
        base = 1.0 if name == "copied_bytes" else of["FSDP2"]
        ddp = re.findall(r"DDP: ([\d.-]+)", row[0])
        for cell, who in zip(
            [*row[1:], *ddp], ("flatshard", "FSDP2", "FSDP1", "floor", "DDP"), strict=name == "step_time"
        ):
            least, _, most = cell.partition("-")
            assert float(least) <= round(of[who] / base, 2) <= float(most or least), (name, who)


@pytest.mark.parametrize(("column", "function"), [(0, FullyShardedDataParallel.__init__), (1, fsdp2_fully_shard)])
def test_the_migration_table_has_all_arguments_of_fsdp_and_no_others(column: int, function):
    rows = rows_under("Arguments", MIGRATION)
    named = {name for row in rows for name in re.findall(r"`(\w+)=`", row[column])}
    assert named == set(inspect.signature(function).parameters) - {"self", "module"}


def test_the_migration_page_names_what_exists():
    for line in MIGRATION.splitlines():
        if not line.startswith("| ") or line.startswith("| FSDP1"):
            continue
        for name in re.findall(r"`((?:checkpoint\.|comm\.)?[a-z_]+)(?:\(\w|`)", line.split("|")[3]):
            found: Any = flatshard
            for part in name.split("."):
                found = getattr(found, part)
    for name, argument in re.findall(r"`(fully_shard|configure)\((?:model, )?([^`]*)\)`", MIGRATION):
        ours = inspect.signature(getattr(flatshard, name)).parameters
        assert set(re.findall(r"(\w+)=", argument)) <= set(ours), argument


def anchors(page: str) -> set[str]:
    """Names by which a page's headings are linked to, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_links_and_files_exist(path: Path):
    page = FILES[path]
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    for file, _, anchor in [each.partition("#") for each in re.findall(r"\]\(([^()\s]+)\)", text)]:
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), file
        assert not anchor or anchor in anchors(target.read_text()), f"{file}#{anchor}"
    for file in re.findall(r"`((?:flatshard|test|benchmarks)/[\w/.]+)`", page):
        assert (ROOT / file).exists(), file


def test_the_index_has_every_page():
    linked = set(re.findall(r"\]\((\w+(?:/index)?\.md)\)", FILES[DOCS / "index.md"]))
    pages = {str(path.relative_to(DOCS)) for path in [*DOCS.glob("*.md"), *DOCS.glob("*/index.md")]}
    assert linked == pages - {"index.md"}
    for folder in DOCS.glob("*/index.md"):
        linked = set(re.findall(r"\]\((\w+\.md)\)", FILES[folder]))
        assert linked == {path.name for path in folder.parent.glob("*.md")} - {"index.md"}


def test_each_question_of_the_index_is_answered_in_one_click():
    """Links of questions end at a section, whose anchor ``test_links_and_files_exist`` looks up."""
    questions = FILES[DOCS / "index.md"].partition("## All pages")[0].partition("\n## ")[2]
    links = re.findall(r"\[([^]]+)\]\(([^)]+)\)", questions)
    assert len(links) >= 35
    assert [words for words, target in links if "#" not in target] == []
    assert len(links) == sum(line.startswith("- [") for line in questions.splitlines()), "a line for each"


def test_the_messages_are_those_of_the_code():
    """Messages in the tables are quoted from the code, except for torch's, which begin with its name."""
    said = []
    for path in sorted((ROOT / "flatshard").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    sections = "At the start", "In a step", "In checkpoints"
    cells = [row[0] for title in sections for row in rows_under(title, TROUBLESHOOTING)]
    for path in sorted((DOCS / "integrations").glob("*.md")):
        if "\n| message |" in FILES[path]:
            cells += [row[0] for row in rows_under("Refused", FILES[path])]
    messages = [each for cell in cells if not cell.startswith("torch") for each in re.findall(r"`([^`]* [^`]*)`", cell)]
    assert len(messages) > 35
    assert [each for each in messages if not any(each in text for text in said)] == []


def test_the_environment_variables_are_those_of_the_code():
    shown = {re.sub(r"[`=01]", "", row[0]) for row in rows_under("Environment variables", TROUBLESHOOTING)}
    assert shown == set(
        re.findall(r"environ\.get\(\"(FLATSHARD_\w+)", (ROOT / "flatshard/_base/environment.py").read_text())
    )


def test_the_versions_are_those_that_are_installed_and_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11 or newer" in README
    assert "torch>=2.11,<2.16" in project["dependencies"]
    assert "torch 2.11 to 2.15" in README


def test_the_pictures_are_what_their_script_draws():
    """To draw them again: ``python benchmarks/picture.py``. The peaks in the second depend little on torch."""
    assert (ROOT / "benchmarks" / "idea.svg").read_text() == picture.idea()
    shown = re.search(r"flatshard, at most ([\d.]+)<", (ROOT / "benchmarks" / "memory.svg").read_text())
    with fake_world(8):
        counted = max(map(max, picture.history("flatshard"))) / 2**20
    assert float(shown[1]) == pytest.approx(counted, rel=0.03)
