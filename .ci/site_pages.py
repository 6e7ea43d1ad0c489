"""Give the site of .mkdocs.yml the files outside of flatshard/docs that pages link to: README.md, its pictures, maps.

Links stay as they are in the files, where they are right for readers of the repository. Links to source files become text.
"""

import re
from pathlib import Path
from posixpath import dirname, normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "flatshard/docs"
OUTSIDE = {
    "README.md": "README.md",
    "flatshard/README.md": "inside.md",
    "test/README.md": "tests.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/tried.md": "tried.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".ci/site.css": "site.css",
    **{f"benchmarks/{path.name}": path.name for path in sorted((ROOT / "benchmarks").glob("*.svg"))},
}
"""Places in the site by those in the repository."""


def on_config(config: MkDocsConfig) -> None:
    """Expand each folder in nav to its pages, the index and the main module first."""
    for entry in config.nav:
        for title, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, str) and value.endswith("/"):
                names = [path.name for path in (ROOT / DOCS / value).glob("*.md")]
                names.sort(key=lambda name: (name != "index.md", name != "flatshard.md", name))
                entry[title] = [value + name for name in names]


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, place in OUTSIDE.items():
        made = File.generated(config, place, abs_src_path=str(ROOT / path))
        if place == "README.md":  # MkDocs would call it index.html
            made.dest_uri = "start.html"
        files.append(made)


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files outside of the folder to their pages, and put the main API page first among what is found."""
    if page.file.src_uri == "api/flatshard.md":
        page.meta["search"] = {"boost": 2}
    here = {place: path for path, place in OUTSIDE.items()}.get(page.file.src_uri, f"{DOCS}/{page.file.src_uri}")

    def link(found: re.Match[str]) -> str:
        mark, words, file, anchor = (each or "" for each in found.groups())
        target = normpath(f"{dirname(here)}/{file}".lstrip("/"))
        place = OUTSIDE.get(target) or (target.removeprefix(f"{DOCS}/") if target.startswith(f"{DOCS}/") else None)
        if place is None:
            return words if (ROOT / target).exists() else found[0]
        return f"{mark}[{words}]({relpath(place, dirname(page.file.src_uri) or '.')}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if number % 2 else re.sub(r"(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)", link, part)
        for number, part in enumerate(parts)
    )
