"""The page of public names: it is what its script writes, nothing in it is missing, and each example runs on four ranks."""

from __future__ import annotations

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

ROOT = Path(__file__).parents[2]
PUBLIC = dict(api_page.public())


def test_the_page_is_what_its_script_writes():
    """To write it again: ``python benchmarks/api_page.py > flatshard/api.md``."""
    assert api_page.stored() == api_page.page(), "python benchmarks/api_page.py > flatshard/api.md"


def texts_of(value: Any) -> dict[str, str]:
    """The docstring of a public name, and those of its members."""
    texts = {"": api_page.docs_of(value)}
    if isinstance(value, type):
        texts |= {name: member.__doc__ or "" for name, member in api_page.members(value)}
        texts |= {field.name: field.doc for field in api_page.fields(value)}
    return texts


PRIVATE = re.compile(r"\[Note:|\b_?\w+\.py\b|\bflatshard(\.\w+)*\._|(?<![\w.])_[a-z]\w*\.")


def test_no_docstring_sends_a_user_into_the_code():
    """``help`` of a public name refers to no file, no note and no private module of the package."""
    texts = {f"{name}.{part}": text for name, value in PUBLIC.items() for part, text in texts_of(value).items()}
    texts |= {name: inspect.getdoc(module) or "" for name, module in api_page.modules().items()}
    own = {path.name for path in Path(flatshard.__file__).parent.rglob("*.py")}
    found = {name: found for name, text in texts.items() for found in PRIVATE.findall(text) if found}
    found |= {name: file for name, text in texts.items() for file in re.findall(r"\w+\.py\b", text) if file in own}
    assert not found


def test_signatures_have_readable_types():
    for name, value in PUBLIC.items():
        shown = api_page.signature(name, value)
        assert not re.search(r"""["]|<|\bflatshard\.\w+\._|\bUNCHANGED\b|\b_[A-Z](?!atchNorm\b)|ForwardRef|typing\.""", shown), shown


@pytest.mark.parametrize("name", PUBLIC)
def test_each_argument_is_documented(name: str):
    """In the docstring or, for a field, below it."""
    value = PUBLIC[name]
    shown = api_page.signature(name, value)
    if "(" not in shown:
        return
    text = "\n".join([api_page.docs_of(value), *(f"{f.name} {f.doc}" for f in api_page.fields(value) if f.doc)] if isinstance(value, type) else [api_page.docs_of(value)])
    arguments = [p for p in inspect.signature(value).parameters if re.search(rf"\b{p}\b", shown)]
    assert not [each for each in arguments if not re.search(rf"\b{each}\b", text)]


def the_quick_starts_names(is_sharded: bool) -> dict[str, Any]:
    """What examples find: see the top of the page."""
    start = (ROOT / "README.md").read_text().partition("<!-- example: quickstart -->\n```python\n")[2]
    start = start.replace("torch.distributed.init_process_group()", "")
    names: dict[str, Any] = {"nn": nn, "dist": dist, "math": math, "functools": functools, "copy": copy}
    exec(compile(start.partition("flatshard.fully_shard(")[0], "README.md", "exec"), names)
    model, names["batch"] = names["model"], torch.randn(8, 64)
    if is_sharded:
        flatshard.fully_shard(model, policy={names["Block"]})
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    if is_sharded:
        model(names["batch"]).square().mean().backward()
        names["optimizer"].step()
    return names


def run_example(ctx, name: str, directory: str) -> None:
    os.chdir(directory)
    code = "\n".join(api_page.examples(dict(api_page.public())[name]))
    names = the_quick_starts_names(not re.search(r"\b(fully_shard|plan)\(", code))
    exec(compile(code, name, "exec"), names)


@pytest.mark.parametrize("name", PUBLIC)
def test_example(pool, tmp_path, name: str):
    assert api_page.examples(PUBLIC[name]), f"{name} has no example"
    pool.run(run_example, name, str(tmp_path), world_size=4)
