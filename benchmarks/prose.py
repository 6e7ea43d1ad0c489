"""Count docstrings and comments that are hard to read, by folder: places to look at, not verdicts.

python benchmarks/prose.py                      # counts of flatshard, test and benchmarks
python benchmarks/prose.py --list flatshard/optim    # the places of a folder or file, with their texts
python benchmarks/prose.py --table              # the limits of test/project/test_prose.py, as they would be today
"""

import argparse
import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
KINDS = ("riddle", "long sentence", "long note", "bare function")
"""A ``riddle`` is a docstring or comment that opens without a subject or a verb. A ``long sentence`` is the first of a
docstring, with more than 25 words. A ``long note`` at the top of a file has more than 25 lines. A ``bare function`` has more
than 25 lines of code and no comment."""
MAX_WORDS, MAX_LINES = 25, 25
_RIDDLE = re.compile(r"(What|Those|That of|Of|Whose|As|One|Such|Which|Who|How|Where|The same)\b(?! ?[:(])")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_BODY = (ast.Module, ast.stmt, ast.ExceptHandler, ast.match_case)


class Found(NamedTuple):
    """A place that is hard to read."""

    kind: str
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.kind}: {self.text}"


def _definitions(node: ast.AST) -> Iterator[Any]:
    """Walk over the module, its classes and functions: statements only, as expressions are most of a tree."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
        yield node
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, field, ()) if isinstance(node, _WITH_BODY) else ():
            yield from _definitions(child)


def search(path: Path) -> Iterator[Found]:
    """Find the places of one file."""
    source = path.read_text()
    lines = source.splitlines()
    comments = {number for number, line in enumerate(lines, 1) if re.search(r"(^\s*|  )# ", line)}
    for number in sorted(comments):
        text = lines[number - 1].strip()
        opens = number == 1 or not lines[number - 2].lstrip().startswith("#")
        if text.startswith("# ") and opens and _RIDDLE.match(text[2:]):
            yield Found("riddle", path, number, text[2:])
    for node in _definitions(ast.parse(source)):
        docstring, number = ast.get_docstring(node), getattr(node, "lineno", 1)
        if docstring:
            first = re.split(r"(?<=[.:;])\s", " ".join(docstring.split()), maxsplit=1)[0]
            if _RIDDLE.match(first) and not isinstance(node, ast.Module):
                yield Found("riddle", path, number, first)
            if len(first.split()) > MAX_WORDS:
                yield Found("long sentence", path, number, first)
            for note in re.split(r"\n(?=\[Note: )", docstring) if isinstance(node, ast.Module) else ():
                if note.startswith("[Note: ") and note.count("\n") > MAX_LINES:
                    yield Found("long note", path, number, note.partition("\n")[0])
        if isinstance(node, _FUNCTIONS):
            start = (node.body[0].end_lineno or 0) if docstring else node.lineno
            covered = range(start + 1, (node.end_lineno or 0) + 1)
            if len(covered) > MAX_LINES + 1 and comments.isdisjoint(covered):
                yield Found("bare function", path, number, node.name)


def search_all(where: Path = ROOT) -> list[Found]:
    """Find the places of flatshard, test and benchmarks, or of a folder or file in them."""
    paths = [path for folder in ("flatshard", "test", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [found for path in paths if path.is_relative_to(where) for found in search(path)]


def count(places: list[Found]) -> dict[str, tuple[int, ...]]:
    """Count the places of each folder, by ``KINDS``."""
    counted: dict[str, collections.Counter[str]] = {}
    for found in places:
        folder = str(found.path.parent.relative_to(ROOT))
        counted.setdefault(folder, collections.Counter())[found.kind] += 1
    return {folder: tuple(counter[kind] for kind in KINDS) for folder, counter in sorted(counted.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, metavar="PATH", help="list the places of a folder or file")
    parser.add_argument("--table", action="store_true", help="print today's counts as limits")
    given = parser.parse_args()
    places = search_all(given.list.resolve() if given.list else ROOT)
    if given.list:
        print(*places, sep="\n")
        return
    for folder, counts in count(places).items():
        row = ", ".join(map(str, counts))
        print(f'    "{folder}": ({row}),' if given.table else f"{folder:35} {row}")


if __name__ == "__main__":
    main()
