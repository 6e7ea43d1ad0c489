"""Writes flatshard/api.md: every public name, its signature and its docstring.

    python benchmarks/api_page.py > flatshard/api.md

A test compares the two, and runs every example. A docstring is Google's style: a summary, sections (``Args:``, ``Returns:``,
``Raises:``), and an ``Example::`` or lines that begin with ``>>>``.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

import flatshard
import flatshard.fsdp2

SECTIONS = ("Args", "Returns", "Raises", "Yields")
BEGIN = """\
# flatshard's public names

Written by `python benchmarks/api_page.py > flatshard/api.md` from the docstrings. [README.md](../README.md) is the way in.
Examples that use `model`, `Block` and `optimizer` mean those of its quick start.
"""


def public() -> Iterator[tuple[str, Any]]:
    """(dotted name, object) of every public name, the top level first. A name that is exported twice comes once."""

    def names_of(module: types.ModuleType) -> list[str]:
        own = [n for n, v in vars(module).items() if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]
        return getattr(module, "__all__", own)

    modules: list[tuple[str, types.ModuleType]] = [("flatshard", flatshard), ("flatshard.fsdp2", flatshard.fsdp2)]
    seen: set[int] = set()
    rest: list[tuple[str, types.ModuleType]] = []
    for prefix, module in modules:
        rest += [(f"{prefix}.{n}", o) for n in names_of(module) if isinstance(o := getattr(module, n), types.ModuleType)]
        for name in names_of(module):
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType) and id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}.{name}", value
        if prefix == "flatshard":
            modules += sorted(rest)


def signature(name: str, value: Any) -> str:
    """``name(arguments) -> result``, with one argument a line where they are many."""
    short = name.removeprefix("flatshard.") if isinstance(value, types.FunctionType) else name.removeprefix("flatshard.")
    if isinstance(value, enum.EnumType):
        return f"class flatshard.{short}: " + ", ".join(value.__members__)
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return f"class flatshard.{short}"
    kind = "class " if isinstance(value, type) else ""
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    shown: list[str] = []
    for number, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and not any(p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL) for p in parameters[:number]):
            shown.append("*")
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        text = f"{star}{each.name}"
        if each.annotation is not each.empty:
            text += f": {readable(each.annotation)}"
        if each.default is not each.empty:
            text += f" = {default(each.default)}" if ":" in text else f"={default(each.default)}"
        shown.append(text)
    returns = "" if found.return_annotation is found.empty or kind else f" -> {readable(found.return_annotation)}"
    line = f"{kind}flatshard.{short}({', '.join(shown)}){returns}"
    if len(line) <= 110:
        return line
    return f"{kind}flatshard.{short}(\n" + "".join(f"    {text},\n" for text in shown) + f"){returns}"


def readable(annotation: Any) -> str:
    """A type as a reader writes it: without quotes and module paths."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace('"', "").replace("'", "")
    return re.sub(r"\b(?:torch\.distributed|dist|torch\.nn|collections\.abc|typing|flatshard(?:\.\w+)*)\.(?=[A-Z])", "", text)


def default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, type | types.FunctionType):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


def examples(doc: str) -> list[str]:
    """The code of each ``Example::`` block, and of each run of lines that begin with ``>>>``."""
    found: list[str] = []
    for block in re.findall(r"(?:^|\n)[^\n]*::\n\n((?:    [^\n]*\n|\n)+)", doc + "\n"):
        found.append(textwrap.dedent(block).strip("\n"))
    for block in re.findall(r"(?:^|\n)((?:(?:>>>|\.\.\.) ?[^\n]*\n?)+)", doc):
        found.append("\n".join(line[4:] for line in block.splitlines()))
    return found


def markdown(doc: str) -> str:
    """A docstring as Markdown."""
    lines = doc.splitlines()
    out: list[str] = []
    in_code = in_section = False
    for number, line in enumerate(lines):
        is_prompt = line.startswith((">>>", "..."))
        indented = line.startswith("    ")
        if in_code and not (is_prompt or indented or not line.strip()):
            while out and not out[-1]:
                out.pop()
            out += ["```", ""]
            in_code = False
        if is_prompt:
            if not in_code:
                out += ["", "```python"]
                in_code = True
            out.append(line[4:])
        elif in_code:
            out.append(line[4:])
        elif (head := line.removesuffix(":")) in SECTIONS and line.endswith(":"):
            out += ["", f"**{head}**", ""]
            in_section = True
        elif line.endswith("::"):
            words = prose(line.removesuffix("::")).strip()
            out += ["", *([f"{words}:", ""] if words not in ("Example", "Examples") else []), "```python"]
            in_code, in_section = True, False
            if number + 1 < len(lines) and not lines[number + 1].strip():
                lines[number + 1] = "    "
        elif in_section and indented:
            item = re.match(r"    ([\w, *.`/]+):(?: |$)(.*)", line)
            if item and not line.startswith("     "):
                out.append(f"- `{item[1].replace('`', '')}`: {prose(item[2])}".rstrip())
            elif line.startswith("     ") or (out and out[-1].startswith(("- ", "  "))):
                out.append(f"  {prose(line.strip())}")
            else:
                out.append(prose(line.strip()))
        else:
            in_section = in_section and not line.strip()
            out.append(prose(line))
    if in_code:
        out.append("```")
    text = "\n".join(out)
    text = re.sub(r"```python\n\s*\n", "```python\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def prose(text: str) -> str:
    text = re.sub(r":(?:func|class|meth|attr|mod|exc):`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The methods and properties of a class that are its own and documented."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(member, types.FunctionType | property) and inspect.getdoc(member):
            yield name, member


def page() -> str:
    """The whole page."""
    parts, module = [BEGIN], ""
    for name, value in public():
        if (package := name.rpartition(".")[0]) != module:
            module = package
            doc = (inspect.getdoc(sys.modules[module]) or "").split("\n\n")[0].replace("\n", " ")
            parts.append(f"## {module}\n" + ("" if module == "flatshard" else f"\n{prose(doc)}\n"))
        parts.append(f"### {name.removeprefix('flatshard.')}\n")
        parts.append(f"```python\n{signature(name, value)}\n```\n")
        parts.append(markdown(own_doc(value)) + "\n")
        if isinstance(value, type) and not isinstance(value, enum.EnumType):
            for method, member in members(value):
                shown = "" if isinstance(member, property) else signature(method, member).partition("(")[2]
                call = f"{method}({shown}" if shown else method
                parts.append(f"- `{' '.join(call.split())}`: {prose(' '.join(inspect.getdoc(member).split()))}")
            parts.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def own_doc(value: Any) -> str:
    """The docstring, unless it is inherited from a class that isn't flatshard's."""
    return inspect.cleandoc(value.__doc__ or "")


if __name__ == "__main__":
    sys.stdout.write(page())
