"""Prose that is hard to read does not grow: ``benchmarks/prose.py`` counts it, folder by folder."""

import prose

LIMITS: dict[str, tuple[int, ...]] = {
    "benchmarks": (0, 0, 0, 9),
    "flatshard/debug": (0, 0, 0, 2),
    "flatshard/planning": (0, 0, 0, 7),
    "test": (0, 0, 0, 2),
    "test/accelerator": (0, 0, 0, 4),
    "test/checkpoint": (0, 0, 0, 4),
    "test/comm": (0, 0, 0, 2),
    "test/core": (0, 0, 0, 1),
    "test/debug": (0, 0, 0, 1),
    "test/elastic": (0, 0, 0, 1),
    "test/features": (0, 0, 0, 1),
    "test/fuzz": (0, 0, 0, 6),
    "test/integrations": (0, 0, 0, 2),
    "test/optim": (0, 0, 0, 2),
    "test/together": (0, 0, 0, 2),
}
"""Most places of each of ``prose.KINDS``. A folder that is not here has none. These numbers only go down."""


def test_no_folder_has_more_places_that_are_hard_to_read():
    places = prose.search_all()
    for folder, counts in prose.count(places).items():
        limits = LIMITS.get(folder, (0,) * len(counts))
        for kind, number, limit in zip(prose.KINDS, counts, limits, strict=True):
            found = [str(each) for each in places if each.kind == kind and str(each.path.parent).endswith(f"/{folder}")]
            assert number <= limit, f"{folder} has {number} of {kind!r}, at most {limit}:\n" + "\n".join(found)


def test_each_kind_is_found(tmp_path):
    path = tmp_path / "module.py"
    long, text, lines = "word " * 26, "text\n" * 26, "    x = 1\n" * 27
    path.write_text(
        f'"""A file.\n\n[Note: Long]\n{text}"""\n'
        f'def f():\n    """What it is."""\ndef g():\n    """{long}."""\ndef h():\n{lines}'
        f"def i():\n    # a comment\n{lines}# Those of h.\nclass C:\n    pass\n"
    )
    found = [(each.kind, each.text.strip(". ")) for each in prose.search(path)]
    assert sorted(found) == sorted(
        [
            ("riddle", "Those of h"),
            ("long note", "[Note: Long]"),
            ("riddle", "What it is"),
            ("long sentence", long.strip()),
            ("bare function", "h"),
        ]
    )
