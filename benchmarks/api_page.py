"""Write flatshard/docs/api: a page for each public module, every name with its signature and docstring.

    python benchmarks/api_page.py

A test compares the pages with this output, and runs every example. Docstrings have Google's style: a summary, sections
(``Args:``, ``Returns:``, ``Raises:``, ``Attributes:``), and ``Example::`` or lines that begin with ``>>>``. The string below
a class's field documents it, or the comment beside it.
"""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import datetime
import enum
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch

import flatshard

FOLDER = Path(flatshard.__file__).parent / "docs" / "api"
INDEX = """\
# API

Every public name, by module. `python benchmarks/api_page.py` writes these pages from the docstrings. The
[changelog](../changelog.md) has old names.

**Examples.** A test runs each of them, on four ranks. `Block`, `model` and `optimizer` are those of the
[quick start](../../../README.md#quick-start). Where an example calls `fully_shard`, `plan_step` or `fit_to_memory`, `model`
is not sharded yet. In all others it is, and has been trained for a step. `batch` is this rank's input, of shape (8, 64).
`dist` is `torch.distributed`; `nn`, `math`, `functools` and `copy` are imported, too.

**Results.** Classes that functions only return come last on their page. They are importable for annotations, and not in the
module's `__all__`.
"""
"""Beginning of the first page."""
TOP = "The functions and classes that most scripts need. The first ten do most of the work."
"""In place of the package's docstring, which ``help`` shows as one screen."""
ITEMS = ("Args", "Raises", "Attributes")
"""Sections that list names."""
PROSE = ("Returns", "Yields")
"""Sections of text."""
INTERNAL = "Internal:"
"""Prefix of the docstrings of members that are not public."""


# -- public names ------------------------------------------------------------------------------------------------------


def modules() -> dict[str, types.ModuleType]:
    """Return the public modules by name."""
    inner = {name: getattr(flatshard, name) for name in flatshard.__all__}
    found = {f"flatshard.{n}": m for n, m in inner.items() if isinstance(m, types.ModuleType)}
    last = {name: found.pop(name) for name in ("flatshard.fsdp2", "flatshard.env")}
    return {"flatshard": flatshard, **found, **last}


def public() -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, object) of every name on the page, the top level first: exported ones, and results."""
    yield from exported()
    yield from results().items()


@functools.cache
def results() -> dict[str, type]:
    """Return the classes that public functions and fields of public classes only return, by dotted name.

    Raises:
        AssertionError: no public module has it, so it cannot be named in an annotation.
    """
    waiting, found = [value for _, value in exported()], dict[str, type]()
    seen = set(map(id, waiting))
    for value in waiting:
        for annotation, names in _given_back(value):
            for word in re.findall(r"\w+", annotation):
                kind = names.get(word)
                if not isinstance(kind, type) or not kind.__module__.startswith("flatshard") or id(kind) in seen:
                    continue
                seen.add(id(kind))
                waiting.append(kind)
                where = [name for name, module in modules().items() if vars(module).get(kind.__name__) is kind]
                assert where, f"{value.__qualname__} returns {kind.__qualname__}, which no public module has"
                found[f"{where[0]}.{kind.__name__}"] = kind
    return found


def _given_back(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the annotations of what a function returns, or of what a class has, each with the names in it."""
    if isinstance(value, type):
        for field in fields(value):
            yield field.annotation, _names(value)
    for each in [member for _, member in members(value)] if isinstance(value, type) else [value]:
        function = each.fget if isinstance(each, property) else each
        if isinstance(function, types.FunctionType):
            yield str(inspect.signature(function).return_annotation), _names(function)


def exported() -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, object) of every exported name, the top level first. Names that are exported twice appear once."""
    seen: set[int] = set()
    for prefix, module in modules().items():
        for name in module.__all__:
            value = getattr(module, name)
            if not isinstance(value, types.ModuleType) and id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}.{name}", value


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class's own methods and properties that have docstrings of their own."""
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        doc = getattr(member, "__doc__", None)
        function = member.fget if isinstance(member, property) else member
        if not isinstance(function, types.FunctionType) or not doc or doc.startswith(INTERNAL):
            continue
        if isinstance(member, property) and inspect.signature(function).return_annotation is inspect.Signature.empty:
            continue  # torch's, with a check
        if any(getattr(getattr(base, name, None), "__doc__", None) == doc for base in kind.__mro__[1:]):
            continue  # the overridden method has the same docstring
        yield name, member


@dataclasses.dataclass
class Field:
    """A field of a dataclass, a named tuple or a protocol, or a member of an enum."""

    name: str
    annotation: str
    doc: str


def fields(kind: type) -> list[Field]:
    """Return the fields of ``kind``, each with the string below it, or else with the comment beside it."""
    is_record = dataclasses.is_dataclass(kind) or issubclass(kind, tuple | enum.Enum)
    found: list[Field] = []
    for each in reversed(_own(kind)) if is_record else [kind]:
        found += [f for f in _fields_in_source(each) if f.name not in _hidden(kind) and not f.name.startswith("_")]
    return [f for f in found if is_record or f.doc]


def _hidden(kind: Any) -> set[str]:
    """Return fields of a dataclass that its ``repr`` leaves out, as only the code needs them."""
    return {f.name for f in dataclasses.fields(kind) if not f.repr} if dataclasses.is_dataclass(kind) else set()


def _own(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if each.__module__.startswith("flatshard")]


def _fields_in_source(kind: type) -> Iterator[Field]:
    is_record = dataclasses.is_dataclass(kind) or issubclass(kind, tuple)
    lines = inspect.getsource(kind).splitlines()
    (node,) = ast.parse(textwrap.dedent("\n".join(lines))).body
    assert isinstance(node, ast.ClassDef)
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            target, annotation = statement.target, ast.unparse(statement.annotation)
        elif isinstance(statement, ast.Assign) and not is_record:  # else an old name
            target, annotation = statement.targets[0], ""
        else:
            continue
        if not isinstance(target, ast.Name):
            continue
        doc = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            doc = inspect.cleandoc(after.value.value)
        elif is_record and (comment := re.search(r"  # (?!type:)(.*)", lines[(statement.end_lineno or 1) - 1])):
            doc = comment[1]
        yield Field(target.id, annotation, doc)


# -- signatures --------------------------------------------------------------------------------------------------------


def signature(name: str, value: Any, width: int = 110) -> str:
    """Return ``name(arguments) -> result``, with a line for each argument if there are many."""
    if isinstance(value, property):
        return f"{name}: {type_text(inspect.signature(value.fget).return_annotation, _names(value.fget))}"
    kind = "class " if isinstance(value, type) else ""
    if isinstance(value, type) and not _is_made_by_users(value):
        return kind + name
    found, names = inspect.signature(value), _names(value)
    doc = inspect.getdoc(value) or ""
    shown: list[str] = []
    starred = False
    for each in found.parameters.values():
        is_variable = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        is_documented = re.search(rf"^\s*\*{{0,2}}{each.name}:", doc, re.MULTILINE)
        is_refused = is_variable and not is_documented and "." in name and not kind  # it exists to raise
        if each.name in ("self", "cls", *_hidden(value)) or is_refused:
            continue
        is_empty = str(each.annotation) == "NoReturn"  # it exists to say that arguments have names
        if is_empty or (each.kind is each.KEYWORD_ONLY and not starred):
            shown.append("*")
        if is_empty:
            starred = True
            continue
        starred = starred or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name
        if each.annotation is not each.empty:
            text += f": {type_text(each.annotation, names)}"
        if each.default is not each.empty:
            text += f" = {default(each.default)}" if ":" in text else f"={default(each.default)}"
        shown.append(text)
    returns = (
        "" if kind or found.return_annotation is found.empty else f" -> {type_text(found.return_annotation, names)}"
    )
    if returns and _is_context_manager(value):
        returns = " -> AbstractContextManager[None]"
    line = f"{kind}{name}({', '.join(shown)}){returns}"
    if len(line) <= width:
        return line
    if kind and fields(value) and any(each.default is each.empty for each in found.parameters.values()):
        return kind + name  # a result, whose fields are listed
    return f"{kind}{name}(\n" + "".join(f"    {text},\n" for text in shown) + f"){returns}"


def _is_context_manager(function: Any) -> bool:
    """Return whether ``contextlib.contextmanager`` is among its decorators."""
    while function is not None:
        if getattr(function, "__code__", None) and function.__code__.co_filename == contextlib.__file__:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_made_by_users(kind: type) -> bool:
    """Return whether users make objects of the class: no enum, error or protocol, and with public arguments."""
    if issubclass(kind, enum.Enum | BaseException) or getattr(kind, "_is_protocol", False):
        return False
    if not any("__init__" in vars(each) or "__new__" in vars(each) for each in _own(kind)):
        return False
    visible, names = {id(value) for _, value in public()}, _names(kind)
    for each in inspect.signature(kind).parameters.values():
        for word in re.findall(r"\w+", str(each.annotation)) if each.name not in _hidden(kind) else ():
            meant = names.get(word)
            if isinstance(meant, type) and meant.__module__.startswith("flatshard") and id(meant) not in visible:
                return False
    return True


def _names(value: Any) -> dict[str, Any]:
    """Return the objects that names in ``value``'s annotations refer to."""
    value = inspect.unwrap(value)
    if isinstance(value, types.FunctionType):
        return value.__globals__
    return vars(sys.modules[value.__module__]) if hasattr(value, "__module__") else {}


def type_text(annotation: Any, names: dict[str, Any]) -> str:
    """Return a type as a reader writes it, without quotes, module paths and names of internal types."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if not isinstance(annotation, str):
        return _object_text(annotation, names)

    class Expand(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return self.visit(_expression(node.value)) if isinstance(node.value, str) else node

        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            return node if ast.unparse(node.value) == "Literal" else self.generic_visit(node)

        def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
            path = ast.unparse(node)
            return node if path.startswith(("torch.", "nn.")) else ast.Name(path.rpartition(".")[2])

        def visit_Name(self, node: ast.Name) -> ast.AST:
            meant = names.get(node.id)
            if isinstance(meant, typing.TypeVar):
                meant = meant.__bound__
            if isinstance(meant, str):
                return self.visit(_expression(meant))
            if meant is torch.optim.Optimizer:
                return _expression("torch.optim.Optimizer")
            if meant is None or isinstance(meant, type) or meant is Any or typing.get_origin(meant) is None:
                return ast.Name("unchanged") if node.id == "_Unchanged" else node
            return _expression(_object_text(meant, names))

    text = ast.unparse(Expand().visit(_expression(annotation)))
    parts = [part for part in text.split(" | ") if part != "unchanged"]
    return " | ".join(dict.fromkeys(parts)) if "[" not in text or len(parts) < text.count(" | ") + 1 else text


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _object_text(value: Any, names: dict[str, Any]) -> str:
    """Return the text of an evaluated type."""
    if value is None or value is type(None):
        return "None"
    if value is Any:
        return "Any"
    if isinstance(value, str | typing.ForwardRef):
        return type_text(value, names)
    if isinstance(value, list):
        return f"[{', '.join(_object_text(each, names) for each in value)}]"
    origin, arguments = typing.get_origin(value), typing.get_args(value)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_object_text(each, names) for each in arguments)
    if origin is typing.Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin is not None:
        inside = ", ".join(_object_text(each, names) for each in arguments)
        return f"{_class_text(origin)}[{inside}]"
    return "..." if value is ... else _class_text(value)


def _class_text(kind: type) -> str:
    """Return the name that the page uses for a class: ``nn.Module``, ``torch.Tensor``, ``Callable``."""
    name = getattr(kind, "__qualname__", repr(kind))
    module = getattr(kind, "__module__", "")
    if kind is collections.abc.Callable:
        return "Callable"
    if module.startswith("torch.nn"):
        public_name = not name.startswith("_") and name in vars(torch.nn)
        return f"nn.{name}" if public_name else f"{module.removeprefix('torch.')}.{name}"
    if module.startswith("torch.optim"):
        return f"torch.optim.{name}"
    return f"torch.{name}" if module == "torch" else name


def default(value: Any) -> str:
    """Return a default as source text."""
    if isinstance(value, enum.Enum):
        return value.name.lower() if type(value).__name__.startswith("_") else str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(default, value))}{',' * (len(value) == 1)})"
    if isinstance(value, type | types.FunctionType):
        return _class_text(value) if isinstance(value, type) else value.__qualname__
    if isinstance(value, datetime.timedelta):
        return repr(value).removeprefix("datetime.")
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}"
    return repr(value)


# -- docstrings --------------------------------------------------------------------------------------------------------


def markdown(doc: str) -> str:
    """Convert a docstring to Markdown, without its indentation."""
    lines = doc.splitlines()
    out: list[str] = []
    at = 0

    def indented_block() -> list[str]:
        """Return the lines from ``at`` on that are indented or empty."""
        nonlocal at
        begin = at
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith("    ")):
            at += 1
        return textwrap.dedent("\n".join(lines[begin:at])).strip("\n").splitlines()

    while at < len(lines):
        line = lines[at]
        at += 1
        if (head := line.removesuffix(":")) in ITEMS and line.endswith(":"):
            out += ["", f"**{head}**", "", *_items(indented_block()), ""]
        elif head in PROSE and line.endswith(":"):
            out += ["", f"**{head}**", "", *markdown("\n".join(indented_block())).splitlines(), ""]
        elif line.endswith("::") and at < len(lines) and not lines[at].strip():
            words = line.removesuffix("::").strip()
            out += ["", *([] if words == "Example" else [f"{prose(words)}:", ""])]
            out += ["```python", *_spaced(indented_block()), "```", ""]
        elif line.startswith(">>>"):
            code = [line]
            while at < len(lines) and lines[at].startswith((">>>", "...")):
                code.append(lines[at])
                at += 1
            out += ["", "```python", *_spaced([each[4:] for each in code]), "```", ""]
        else:
            out.append(prose(line))
    return _tidy("\n".join(out)).strip("\n")


def _tidy(text: str) -> str:
    """Collapse adjacent empty lines, except in code."""
    parts = re.split(r"(^ *```python\n.*?^ *```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if number % 2 else re.sub(r"\n{3,}", "\n\n", part) for number, part in enumerate(parts))


def _spaced(code: list[str]) -> list[str]:
    """Put two empty lines around functions and classes, as the formatter wants on a page; ``help`` shows one."""
    out: list[str] = []
    statements = ast.parse("\n".join(code)).body
    begins = [min([s.lineno, *(d.lineno for d in getattr(s, "decorator_list", ()))]) for s in statements]
    is_long = [isinstance(s, ast.FunctionDef | ast.ClassDef) for s in statements]
    apart = {begins[i] for i in range(1, len(begins)) if is_long[i] or is_long[i - 1]}
    for number, line in enumerate(code, 1):
        if number in apart:
            while out and not out[-1].strip():
                out.pop()
            out += ["", ""]
        out.append(line)
    return out


def _items(lines: list[str]) -> Iterator[str]:
    """Convert ``name: text``, with further lines indented below it, to a list."""
    texts: list[tuple[str, list[str]]] = []
    for line in lines:
        if item := re.match(r"([\w*][\w, *.`=]*):(?: (.*))?$", line):
            texts.append((item[1].replace("`", ""), [item[2] or ""]))
        elif texts:
            texts[-1][1].append(line)
        else:
            texts.append(("", [line]))
    for name, (first, *rest) in texts:
        yield from _item(name, f"{first}\n{textwrap.dedent(chr(10).join(rest))}")


def _item(name: str, doc: str) -> Iterator[str]:
    first, *rest = markdown(doc.strip("\n")).splitlines() or [""]
    yield f"- `{name}`: {first}" if name and first else f"- `{name}`" if name else f"- {first}"
    yield from (f"  {line}".rstrip() for line in rest)


def prose(text: str) -> str:
    """Convert a paragraph: roles and double backticks become code."""
    text = re.sub(r":(?:func|class|meth|attr|mod|exc):`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def docs_of(value: Any) -> str:
    """Return the docstring of a class, followed by that of its ``__init__``."""
    own = inspect.cleandoc(value.__doc__ or "")
    init = vars(value).get("__init__") if isinstance(value, type) and not dataclasses.is_dataclass(value) else None
    if isinstance(init, types.FunctionType) and init.__doc__:
        own += "\n\n" + inspect.cleandoc(init.__doc__)
    return own


def examples(value: Any) -> list[str]:
    """Return the code of each example of a public name, in order."""
    return re.findall(r"^```python\n(.*?)^```", markdown(docs_of(value)), re.DOTALL | re.MULTILINE)


# -- the pages ---------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """Return the text of each file in the folder, by its name."""
    of_module: dict[str, list[tuple[str, Any]]] = {name: [] for name in modules()}
    for name, value in public():
        of_module[name.rpartition(".")[0]].append((name, value))
    index = [INDEX]
    texts: dict[str, str] = {}
    for module, found in of_module.items():
        file = f"{_short(module)}.md"
        about = markdown(inspect.getdoc(modules()[module]) or "") if module != "flatshard" else TOP
        if module == "flatshard":
            found.sort(key=lambda each: _place_in_help(_short(each[0])))
        names = [name for name, _ in found]
        index += [f"## [{module}]({file})\n", about.split("\n\n")[0] + "\n", _links(names, file) + "\n"]
        parts = [f"# {module}\n", about + "\n", "On this page: " + _links(names) + "\n"]
        parts.append(_also(module, names))
        parts += [_entry(name, value) for name, value in found]
        texts[file] = _tidy("\n".join(parts)).rstrip() + "\n"
    return {"index.md": _tidy("\n".join(index)).rstrip() + "\n", **texts}


def _place_in_help(name: str) -> int:
    """Return a name's place among those that the package's docstring describes, or their number if it is not among them."""
    described = re.findall(r"^ {4}(\w+) {2,}\w", inspect.getdoc(flatshard) or "", re.MULTILINE)
    return described.index(name) if name in described else len(described)


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _links(names: list[str], file: str = "") -> str:
    """Return links to the entries of ``names``, on the page ``file`` or on this one."""
    return ", ".join(f"[{_short(name)}]({file}#{_anchor(_short(name))})" for name in names)


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _also(module: str, shown: list[str]) -> str:
    """Return a sentence on names of ``module`` that the page of the top level has."""
    here = [n for n in modules()[module].__all__ if f"{module}.{n}" not in shown]
    here = [n for n in here if not isinstance(getattr(modules()[module], n), types.ModuleType)]
    return f"Also here: {_links(here, 'flatshard.md')}.\n" if here else ""


def write(folder: Path = FOLDER) -> None:
    """Write all pages, and remove those of modules that are gone."""
    folder.mkdir(exist_ok=True)
    texts = pages()
    for path in folder.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text)


def _entry(name: str, value: Any) -> str:
    parts = [f"## {_short(name)}\n", f"```python\n{signature(name, value)}\n```\n", markdown(docs_of(value)), ""]
    if name in results():
        parts += ["A result: not in `__all__`.\n"]
    if isinstance(value, type) and issubclass(value, BaseException | torch.Tensor):
        parts += [f"Base class: `{_class_text(value.__bases__[0])}`.\n"]
    if isinstance(value, type):
        if found := fields(value):
            parts += ["**Fields**\n" if not issubclass(value, enum.Enum) else "**Members**\n"]
            parts += [line for each in found for line in _item(_field(each, value), each.doc)]
            parts.append("")
        if found := list(members(value)):
            parts += ["**Methods and properties**\n"]
            for method, member in found:
                call = " ".join(signature(method, member, 1000).split())
                parts += _item(call, inspect.cleandoc(member.__doc__ or ""))
            parts.append("")
    return "\n".join(parts)


def _field(field: Field, kind: type) -> str:
    return f"{field.name}: {type_text(field.annotation, _names(kind))}" if field.annotation else field.name


if __name__ == "__main__":
    write()
