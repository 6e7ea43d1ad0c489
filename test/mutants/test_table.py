"""Every mutant of ``tables/`` still changes the package, and its tests exist. ``run.py`` tells which of them tests notice."""

import re

from mutants import run

MUTANTS = run.read_tables()


def test_every_mutant_applies():
    assert len(MUTANTS) >= 150
    gone = []
    for mutant in MUTANTS:
        assert mutant.tests
        try:
            mutant.apply((run.ROOT / mutant.file).read_text())
        except (OSError, ValueError) as e:
            gone.append(str(e))
    assert not gone, "\n".join(gone)
    assert len({mutant.key for mutant in MUTANTS}) == len(MUTANTS)


def test_every_mutant_is_in_the_table_of_its_folder():
    for path in run.TABLES.glob("*.txt"):
        folder = "flatshard" + ("" if path.stem == "flatshard" else f"/{path.stem.replace('.', '/')}")
        for mutant in run.read_table(path.read_text()):
            assert mutant.file.rpartition("/")[0] == folder, f"{path.name} has {mutant}"


def test_a_row_is_found_in_its_function_only():
    source = "def f():\n    return 1\n\n\nclass C:\n    @property\n    def f(self):\n        return 1\n"
    assert run.Mutant("", "C.f", "return 1", "return 2", ()).apply(source) == source[:-2] + "2\n"
    assert run.Mutant("", "f", "return 1", "return 2", ()).apply(source) == source.replace("1", "2", 1)


def test_every_named_test_exists():
    """If a test is gone, ``run.py --only FILE`` finds another one that notices its mutants."""
    gone = set()
    for name in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, test = re.sub(r"\[.*|\*", "", name).partition(":")
        path = run.ROOT / "test" / f"{file}.py"
        if not path.exists() or (test and f"def test_{test}(" not in path.read_text()):
            gone.add(name)
    assert not gone
