"""Old public names: each warns, gives the new thing, and is in the changelog."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import api_page
import pytest

import flatshard
from flatshard._base import old_names

MODULES = api_page.modules()  # imports all that declare old names
CHANGELOG = (Path(flatshard.__file__).parent / "docs" / "changelog.md").read_text()
ATTRIBUTES = [(module, *names) for module, renamed in old_names.ATTRIBUTES.items() for names in renamed.items()]
ARGUMENTS = [(each, *names) for each in old_names.ARGUMENTS for names in each.renamed.items()]
NEEDS_A_NAME = [(each, name) for each in old_names.ARGUMENTS for name in each.positional]


def told(old: str, new: str) -> pytest.WarningsRecorder:
    return pytest.warns(DeprecationWarning, match=rf"{re.escape(old)} is now {re.escape(new)}.*0\.3 removes the old")


@pytest.mark.parametrize(("module", "old", "new"), ATTRIBUTES)
def test_an_attribute(module: str, old: str, new: str):
    with told(f"{module}.{old}", f"{module}.{new}") as found:
        value = getattr(sys.modules[module], old)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert value is getattr(sys.modules[module], new)
    assert old not in dir(sys.modules[module])
    assert f"`{module}.{old}`" in CHANGELOG
    assert f"`{new}`" in CHANGELOG


@pytest.mark.parametrize(
    ("module", "old"), [(module, old) for module in old_names.GONE for old in old_names.GONE[module]]
)
def test_an_attribute_that_nothing_replaces(module: str, old: str):
    home, instead = old_names.GONE[module][old]
    with told(f"{module}.{old}", instead) as found:
        value = getattr(sys.modules[module], old)
    assert [each.filename for each in found] == [__file__]
    assert value is getattr(sys.modules[home], old)
    assert f"`{module}.{old}`" in CHANGELOG
    assert f"`{instead}`" in CHANGELOG


@pytest.mark.parametrize(("arguments", "old", "new"), ARGUMENTS, ids=lambda value: getattr(value, "name", value))
def test_an_argument(arguments: old_names.OldArguments, old: str, new: str):
    value = {"wait": False, "patience": 3}.get(old, "given")
    with told(f"{arguments.name}: argument {old}=", f"{new}=") as found:
        args, kwargs = arguments.translate(("first",), {old: value})
    assert len(found) == 1
    assert args == ("first",)
    assert kwargs == {new: arguments.converted.get(old, lambda given: given)(value)}
    with pytest.raises(TypeError, match=f"multiple values for argument '{new}'"):
        arguments.translate((), {old: value, new: value})
    assert f"`{old}=`" in CHANGELOG
    assert f"`{new}=" in CHANGELOG


@pytest.mark.parametrize(("arguments", "old"), NEEDS_A_NAME, ids=lambda value: getattr(value, "name", value))
def test_an_argument_that_needs_a_name_now(arguments: old_names.OldArguments, old: str):
    before = list(range(arguments.positional_count + arguments.positional.index(old)))
    new = arguments.renamed.get(old, old)
    with told("an argument without a name", f"{new}=") as found:
        args, kwargs = arguments.translate((*before, "given"), {"other": 1})
    assert len(found) == 1
    assert args == tuple(before[: arguments.positional_count])
    assert kwargs[new] == "given"
    assert kwargs["other"] == 1
    assert len(args) + len(kwargs) == len(before) + 2


@pytest.mark.parametrize("member", old_names.MEMBERS, ids=lambda member: member.name)
def test_a_member(member: old_names.OldMember):
    old, new = f"{member.owner.__name__}.{member.name}", f"{member.owner.__name__}.{member.new}"
    with told(old, new) as found:
        assert member.__get__(SimpleNamespace(**{member.new: "value"}), member.owner) == "value"
    assert len(found) == 1
    assert f"`{old}`" in CHANGELOG
    assert f"`{member.new}`" in CHANGELOG


def test_each_kind_from_the_users_side():
    """The warning is about the user's line, and more arguments than a function has are refused as ever."""

    class Thing:
        @old_names.old_arguments(positional=("old", "also"), old="new", converted={"old": lambda value: not value})
        def __init__(self, first: int, *, new: bool = True, also: int = 0) -> None:
            self.got = (first, new, also)

        before = old_names.OldMember("got")

    del old_names.ARGUMENTS[-1], old_names.MEMBERS[-1]
    uses: list[Any] = [lambda: Thing(1, old=True), lambda: Thing(1, True, also=0), lambda: Thing(1, new=False)]
    for use, count in zip(uses, (1, 1, 0), strict=True):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            assert use().got == (1, False, 0)
        assert [each.filename for each in found] == [__file__] * count
    with told("Thing.before", "Thing.got") as found:
        assert Thing(1).before == (1, True, 0)
    assert found[0].filename == __file__
    with (
        pytest.raises(TypeError, match="takes 2 positional arguments but 3"),
        pytest.warns(DeprecationWarning, match="is now new="),
    ):
        Thing(1, True, 2, 3)


def test_one_line_warns_once(tmp_path):
    """``from package import name`` asks the package for it twice."""
    script = "\n".join(f"from {module} import {old}" for module, old, _ in ATTRIBUTES)
    (tmp_path / "script.py").write_text(script)
    root = Path(flatshard.__file__).parents[1]
    command = [sys.executable, "-W", "default::DeprecationWarning", str(tmp_path / "script.py")]
    done = subprocess.run(command, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"script\.py:(\d+): DeprecationWarning: flatshard", done.stderr)
    assert list(map(int, lines)) == [number + 1 for number in range(len(ATTRIBUTES))]


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("full_state_dict", r": it is flatshard\.checkpoint\.full_state_dict$"),
        ("MixedPrecisionPolicy", r": it is flatshard\.fsdp2\.MixedPrecisionPolicy$"),  # if that is imported, as here
        ("FullyShardedDataParallel", r": flatshard\.fsdp2 has .*migration\.md"),
        ("nothing", "'nothing'$"),
    ],
)
def test_a_name_of_another_module(name: str, cure: str):
    with pytest.raises(AttributeError, match=f"module 'flatshard' has no attribute .*{cure}"):
        getattr(flatshard, name)
    assert not hasattr(flatshard, name)
