"""Every mutant of ``table.txt`` still changes the package. ``run.py`` tells which are noticed; it takes long."""

from __future__ import annotations

from mutants import run


def test_every_mutant_applies():
    mutants = run.read_table(run.TABLE.read_text())
    assert len(mutants) >= 150
    for mutant in mutants:
        assert mutant.tests
        mutant.apply((run.ROOT / mutant.file).read_text())  # raises
    places = [(mutant.file, mutant.old, mutant.new) for mutant in mutants]
    assert len(set(places)) == len(places)
