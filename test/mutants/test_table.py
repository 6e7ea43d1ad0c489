"""Every mutant of ``table.txt`` still changes the package, and its tests are there. ``run.py`` tells which are noticed."""

import re

from mutants import run


def test_every_mutant_applies():
    mutants = run.read_table(run.TABLE.read_text())
    assert len(mutants) >= 150
    gone = []
    for mutant in mutants:
        assert mutant.tests
        try:
            mutant.apply((run.ROOT / mutant.file).read_text())
        except ValueError as e:
            gone.append(str(e))
    assert not gone, "\n".join(gone)
    places = [(mutant.file, mutant.old, mutant.new) for mutant in mutants]
    assert len(set(places)) == len(places)


def test_every_named_test_is_there():
    """Of one that is gone: name the test that notices its mutants now. ``run.py --only FILE`` tells."""
    gone = set()
    for name in {test for mutant in run.read_table(run.TABLE.read_text()) for test in mutant.tests}:
        file, _, test = re.sub(r"\[.*|\*", "", name).partition(":")
        path = run.ROOT / "test" / f"{file}.py"
        if not path.exists() or (test and f"def test_{test}(" not in path.read_text()):
            gone.add(name)
    assert not gone
