"""The pages of public names: they are what their script writes, say what a user needs, and each example runs."""

import copy
import functools
import inspect
import math
import os
import re
from pathlib import Path
from typing import Any

import api_page
import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatshard

README = (Path(__file__).parents[2] / "README.md").read_text()
PACKAGE = Path(flatshard.__file__).parent
PUBLIC = dict(api_page.public())
WITH_EXAMPLES = PUBLIC | {name: module for name, module in api_page.modules().items() if api_page.examples(module)}
NEEDS_NO_RANKS = {
    name for name in WITH_EXAMPLES if re.match(r"flatshard\.(plan_step|fit_to_memory|planning(?!\.measure))", name)
}


def test_the_pages_are_what_their_script_writes():
    """To write them again: ``python benchmarks/api_page.py``."""
    files = {path.name: path.read_text() for path in (PACKAGE / "docs" / "api").glob("*.md")}
    written = api_page.pages()
    assert set(files) == set(written), "run: python benchmarks/api_page.py"
    assert [name for name in written if files[name] != written[name]] == [], "run: python benchmarks/api_page.py"


def test_each_module_says_what_is_public():
    for name, module in api_page.modules().items():
        assert sorted(module.__all__) == module.__all__, name
        assert not [each for each in module.__all__ if not hasattr(module, each)], name
        assert inspect.getdoc(module), name


def test_each_argument_and_field_is_documented():
    for name, value in PUBLIC.items():
        sections = re.findall(r"^[A-Z][a-z]+(?=:$)", api_page.docs_of(value), re.MULTILINE)
        assert len(set(sections)) == len(sections), f"{name}: {sections}"
        fields = {field.name: field.doc for field in api_page.fields(value)} if isinstance(value, type) else {}
        shown, text = api_page.signature(name, value), api_page.docs_of(value)
        arguments = inspect.signature(value).parameters if "(" in shown else ()
        shown_too = [each for each in arguments if re.search(rf"\b{each}\b", shown)]
        missing = [
            each for each in {*fields, *shown_too} if not fields.get(each) and not re.search(rf"\b{each}\b", text)
        ]
        assert not missing, f"{name}: {missing}"


def the_quick_starts_names(is_sharded: bool) -> dict[str, Any]:
    """Names that examples find: see the first page."""
    start = README.partition("<!-- example: quickstart -->\n```python\n")[2].partition("flatshard.fully_shard(")[0]
    start = start.replace("torch.distributed.init_process_group()", "")
    names: dict[str, Any] = {"nn": nn, "dist": dist, "math": math, "functools": functools, "copy": copy}
    exec(compile(start, "README.md", "exec"), names)
    model, names["batch"] = names["model"], torch.randn(8, 64)
    if is_sharded:
        flatshard.fully_shard(model, policy={names["Block"]})
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    if is_sharded:
        train(names)
    return names


def train(names: dict[str, Any]) -> None:
    names["model"](names["batch"]).square().mean().backward()
    names["optimizer"].step()


def run_examples(ctx: Any, name: str, directory: str) -> None:
    """Run the examples, each with a new model, and train for a step the model that one has sharded."""
    os.chdir(directory)
    for code in api_page.examples(WITH_EXAMPLES[name]):
        shards = re.search(r"\bfully_shard\(", code)
        names = the_quick_starts_names(not shards and name not in NEEDS_NO_RANKS)
        exec(compile(code, name, "exec"), names)
        if shards:
            names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
            train(names)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_example(request, tmp_path, monkeypatch, name: str):
    """Examples of every public name, and of the modules that have one."""
    assert api_page.examples(WITH_EXAMPLES[name]), f"{name} has no example"
    if name in NEEDS_NO_RANKS:
        monkeypatch.chdir(tmp_path)
        run_examples(None, name, str(tmp_path))
    else:
        request.getfixturevalue("two_ranks").run(run_examples, name, str(tmp_path))
