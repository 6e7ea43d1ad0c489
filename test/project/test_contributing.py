"""The files in ``.github``: they name what exists, run what CI runs, and ask for the report."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_rules_name_what_exists():
    text = (GITHUB / "CONTRIBUTING.md").read_text()
    linked = [GITHUB / path for path in re.findall(r"\]\(([^)#]+)", text)]
    named = [ROOT / path for path in re.findall(r"\b(?:flatshard|test|benchmarks)/[\w/.]*\w", text)]
    named += [ROOT / ".ci" / name for name in re.findall(r"\.ci/(\w+)", text)]
    assert len(linked) == 2
    assert len(named) > 10
    assert not [str(path) for path in [*linked, *named] if not path.exists()]


def test_the_workflow_runs_what_developers_run():
    commands = re.findall(r"- run: (.*)", (GITHUB / "workflows" / "ci.yml").read_text())
    assert commands == ["bash .ci/run"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_each_form_asks_for_the_report(form: Path):
    text = form.read_text()
    assert re.search(r"^name: .+\ndescription: .+\nbody:\n", text)
    assert "label: Output of `python -m flatshard.env`" in text
