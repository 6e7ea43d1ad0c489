"""The rules that keep the package readable in an afternoon, checked on its syntax trees.

Imports go down only. Each fact has one writer. Files and functions fit on a few screens. Every public function says what
it does, and every note that is cited is there to read. A rule with exceptions lists them here, with their reasons.
"""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import flatshard

PACKAGE = Path(flatshard.__file__).parent

PACKAGES = [
    ["_base", "layouts"],
    ["_comm"],
    ["_handle", "_handle.adapters", "_handle.tensors"],
    ["_composable", "_composable.construct"],
    ["_composable.features", "_comm.monitor"],
    ["_base.optimizers"],
    ["optim", "checkpoint", "debug", "comm", "policies", "tensors"],
    ["planning", "elastic", "weights"],
    ["_extensions"],
    [""],
    ["integrations"],  # on the public names
]
"""From the bottom up: a module imports from its own row and those before it. A module that is not named itself belongs to
the longest package that its name begins with; "" is the top one."""

CORE = [package for row in PACKAGES[:4] for package in row]
"""Packages, or modules beside packages, that know no feature and no product."""

INNER_IMPORTS = {
    ("checkpoint._entries", "torch.distributed.checkpoint._nested_dict"),  # as the next line
    ("checkpoint._job", "flatshard.checkpoint"),  # a third of a second of `import flatshard`
    ("_composable.features.transforms", "torch._dynamo"),  # two seconds of `import flatshard`
    ("_composable.features.transforms", "torch._C._dynamo.eval_frame"),
    ("_handle.adapters.tensor_parallel", "torch.distributed.tensor"),  # half a second of `import flatshard`
    ("checkpoint._sharded_value", "torch.distributed.tensor._utils"),  # as above
    ("checkpoint._sharded_value", "torch.distributed.checkpoint.metadata"),  # another half
    ("checkpoint._sharded_value", "torch.distributed.checkpoint.planner"),
    ("checkpoint._store", "fsspec.core"),  # fsspec may be absent
    ("planning._recording", "torch.utils.flop_counter"),  # an eighth: it imports triton, where that is installed
    ("integrations.trainer", "flatshard.integrations.peft"),  # peft may be absent
}
"""(module, what it imports inside a function)."""

MAX_FILE_LINES = 600  # a thought that is split over two files is worse than a long file
MAX_FUNCTION_LINES = 80


def _name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or "_"


SOURCES = {_name_of(p): p.read_text() for p in sorted(PACKAGE.rglob("*.py")) if p.parent.name != "examples"}
"""By module: the package. The examples in it are users' code."""
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
TESTS = {path: ast.parse(path.read_text()) for path in sorted(Path(__file__).parents[1].rglob("*.py"))}


class _WithoutText(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node


@functools.cache
def code(source: str) -> list[str]:
    """The lines of a module, a statement each, without comments; texts are empty."""
    return ast.unparse(_WithoutText().visit(ast.parse(source))).splitlines()


CODE = {name: code(source) for name, source in SOURCES.items()}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute chain on a name, with '' where the chain starts at anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


# -- imports -----------------------------------------------------------------------------------------------------------


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, list[str]]]:
    """(statement, module, names) of each import; no names for ``import x``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import: {ast.unparse(node)}"
            yield node, node.module or "", [alias.name for alias in node.names]


def imported_modules(module: str, names: list[str]) -> set[str]:
    """Return the modules of ours that ``from module import names`` needs, by name in ``TREES``."""
    if module.partition(".")[0] != "flatshard":
        return set()
    short = module.removeprefix("flatshard").removeprefix(".")
    inner = {f"{short}.{n}".removeprefix(".") for n in names}
    return {n for n in inner if n in TREES} or {short or "_"}


def package_of(name: str) -> str:
    """The package of ``PACKAGES`` that a module belongs to."""
    known = {package for row in PACKAGES for package in row}
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def needed(name: str) -> set[str]:
    """Our modules that ``name`` imports, be it for a type checker only."""
    return {m for _, module, names in imports(TREES[name]) for m in imported_modules(module, names)} - {name}


def test_imports_go_down():
    """So the core imports no feature and no product."""
    row = {package: number for number, packages in enumerate(PACKAGES) for package in packages}
    up = {(n, m) for n in TREES for m in needed(n) if row[package_of(m)] > row[package_of(n)]}
    assert not up


def test_communication_knows_nothing_above_it():
    """Nor does the monitor, which is plugged in: a label describes its unit to it."""
    packages = {package for row in PACKAGES[:2] for package in row} | {"_comm.monitor"}
    found = {(name, module) for name in TREES if package_of(name) in packages for module in needed(name)}
    assert not {(name, module) for name, module in found if package_of(module) not in packages}


def test_no_files_know_each_other():
    """No ring of imports."""
    graphlib.TopologicalSorter({n: needed(n) for n in TREES}).prepare()


def test_imports_inside_functions_are_listed():
    found = set()
    for name, tree in TREES.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                found |= {(name, module) for _, module, _ in imports(function)}
    assert found == INNER_IMPORTS


def test_nothing_imports_beyond_torch_and_the_standard_library():
    ours = {n: tree for n, tree in TREES.items() if package_of(n) != "integrations"}
    found = {module.partition(".")[0] for tree in ours.values() for _, module, _ in imports(tree)}
    assert found - set(sys.stdlib_module_names) <= {"flatshard", "torch", "typing_extensions", "fsspec"}


# -- what few modules may do -------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """No line of code matches ``pattern``, but in the modules ``but``; ``of``: in modules whose names begin so."""

    pattern: str
    but: str = ""
    of: str = ""


AN_IMPORT = r"^\s*(from|import) "
FRAMES = (
    "_getframe|_current_frames|f_back|f_code|f_locals|f_globals|__code__|"
    "currentframe|getouterframes|extract_stack|walk_stack|tb_frame|gi_frame|cr_frame"
)
# Names of torch.distributed that communicate nothing, and the types to annotate with.
QUERIES = (
    "ProcessGroup|GroupMember.NON_GROUP_MEMBER|is_available|is_backend_available|is_initialized|get_process_group_ranks|"
    "get_rank|get_world_size|get_backend_config|distributed_c10d._get_default_group"
)
# Types, arithmetic on them, names of actions; and checkpoints, whose plans torch's own functions exchange.
QUIET_MODULES = r"device_mesh|tensor|checkpoint|pipelining\.schedules"
COMMUNICATING = (
    "_comm.backends _comm.fake_group _comm.process_groups elastic._world elastic._epochs _composable.construct.groups"
)
HOOKING = (
    "_composable.hooks _composable.autograd_hooks planning._program optim._hooks elastic._job _handle.tensors.direct"
)
HOOKING += " checkpoint._state_dict_hooks checkpoint._optimizer_hooks "
HOOKING += " ".join(name for name in TREES if name.startswith(("_composable.features.", "integrations.")))
OF_PARAMETERS = (
    "_handle.tensors.sharded_parameter _handle.tensors.direct"  # hooking one is part of what the user sees of it
)
OF_FEATURES = (
    "inner_shard|anchor|skip|pass_by|ran_inside|summon|keep_unsharded|no_sync|escape|"
    "not_sharded|late_tie|layerdrop|layer_drop|callback|quantized|functorch|dynamo"
)
TREE_WORDS = r"\b((named_)?(modules|children)|get_submodule|_modules|named_parameters)\b"
# Whether a forward is still running; code that dynamo skips; what a rank waits for; whose memory an allocation is; where a
# warning points.
READING_FRAMES = """
_composable.features.forward_method _composable.features.keep _composable.features.skip _composable.features.transforms
_composable.hooks _comm.monitor.watch planning._recording _base.callers _base.errors
"""
# For errors, and where torch tells nobody what it wants: see the note in _base/callers.py. No more may come.
ASKING_WHO_CALLS = """
_handle.tensors.guard _handle.tensors.shard _handle.tensors.sharded_parameter
checkpoint._standard_helpers checkpoint._state_dict_hooks
"""
# `_composable` decides when collectives start; handles and the runtime start them, and modules that make them of others.
STARTING = """
_comm.mesh_runtime _comm.runtime _comm.composite_groups _comm.backends _composable.construct.groups _comm.quantized
_comm.fake_group _composable.features.comm_hooks checkpoint._gathering elastic._exchange
"""
# Scales, before a handle gathers; for a handle, in place of its own; whole values, for those who read them; to time it.
GATHERING = """
_composable.features.encoded_gathers _composable.features.kept_shards _composable.features.full_parameters
_comm.monitor.monitor debug._replicas planning._measure
"""
# New modules, also later; buffers, which belong to no handle.
BROADCASTING = "_composable.construct.materialize _composable.features.filled_later _composable.features.buffers"
# The states of a unit: their tables, and who makes the transitions.
MOVING = "_handle.lifetime _handle.handle _handle.unit_gradients"
RULES = [
    # This project re-does torch's FSDP, which is on its way out upstream. Its policies are known by their shape.
    Rule(AN_IMPORT + r".*\btorch\.distributed(\.| import (.*, )?)(fsdp|_composable|_tools)"),
    Rule(AN_IMPORT + r"flatshard\b.*[ .]_", of="integrations"),
    # Products define, and do nothing: the core imports none of them, so what does not call them pays nothing in its steps.
    Rule(
        r"^((if(?! not TYPE_CHECKING:)|for|while|with|try|match|assert|del|raise)\b|[\w.]+\(|\w+[.\[]\S* \S?= )",
        of="planning|elastic|weights",
    ),
    Rule(r"\b(PARAM|GRAD)_TRANSITIONS\b| = (Param|Grad)State\.\w+$", MOVING),
    Rule(r"\b(handle|gradients)\.state \S?= "),
    Rule(r"\bhandle\.reshard\(", "_composable.state"),  # `Unit.release`, for a reason: claims.py, [Note: Freeing]
    Rule(r"\bresize_\b", "_handle.unsharded"),  # of a storage
    # By rows, in blocks or whole: nobody else rounds up or cuts shards.
    Rule(
        r"\b(PARAM_ALIGNMENT|SHARD_ALIGNMENT|LITTLE_PADDING|round_up|pack)\b",
        "_composable.construct.layout_plan layouts.packing",
    ),
    Rule(r"\b(environ|getenv|putenv)\b", "_base.environment env"),  # the report shows it
    Rule(r"\b__version__\b", "_base.torch_versions _base.version env _"),
    Rule(rf"\b({FRAMES})\b", "_base.frames"),
    Rule(r"\bpickle\.loads?\(|\bUnpickler\(", of="elastic|weights"),  # what comes over a network is not executed
    Rule(AN_IMPORT + r".*\bframes\b", READING_FRAMES),
    Rule(AN_IMPORT + r".*\bcallers\b", ASKING_WHO_CALLS),
    Rule(r"\.(reduce_scatter|all_reduce)\(", STARTING, of=r"(?!_handle\.)"),
    Rule(r"\.all_gather\(", f"{STARTING} {GATHERING}", of=r"(?!_handle\.)"),
    Rule(r"\.(broadcast_now|all_reduce_now)\(", f"{STARTING} {BROADCASTING} planning._measure", of=r"(?!_handle\.)"),
    Rule(r"\.exchange\(", f"{STARTING} optim._owned elastic._reshard", of=r"(?!_handle\.)"),
    Rule(r"\._parameters\[[^=]*\] \S?= |\bdel .*\._parameters\[|\bregister_parameter\(", "_handle.registrations"),
    Rule(r"\._parameters\.(pop|update|setdefault|clear|popitem|__setitem__|__delitem__)\("),
    Rule(
        r"(?<![\w.])(setattr|delattr)\(", "_handle.registrations _composable.outputs"
    ),  # the latter: of user's dataclasses
    Rule(rf"^(?!{AN_IMPORT}).*(?<![\w.])(dist|torch\.distributed)\.(?!({QUERIES})(?![\w.]))", COMMUNICATING),
    Rule(rf"^\s*from torch\.distributed(?!\.({QUIET_MODULES})\b)"),
    Rule(r"\b(process_)?group\.\w", COMMUNICATING),
    Rule(r"\bsuper\(\)\._?register_\w*hook|\._backward_hooks( \S?= |$)", f"{HOOKING} {OF_PARAMETERS}"),
    Rule(r"(?<!\bsuper\(\))\._?register_\w*hook|\._(forward|forward_pre|backward_pre)_hooks( \S?= |$)", HOOKING),
    # The core names no feature. The exception has callbacks of autograd's engine.
    Rule(rf"(?i){OF_FEATURES}", "_composable.backward", of=r"_composable(?!\.features)|_handle|_comm\.(mesh_)?runtime"),
    # A handle looks at a module by its parameters only. Others may name the type, and hand modules on.
    Rule(rf"^(?!{AN_IMPORT}).*hook", OF_PARAMETERS, of=r"_handle\."),
    Rule(r"\b_(parameters|buffers)\b", "_handle.registrations", of=r"_handle\."),
    Rule(TREE_WORDS, of=r"_handle\."),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern[:40])
def test_what_few_modules_may_do(rule: Rule):
    those = {name: lines for name, lines in CODE.items() if re.match(rule.of, name) and name not in rule.but.split()}
    assert not [f"{name}: {line}" for name, lines in those.items() for line in lines if re.search(rule.pattern, line)]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.but], ids=lambda rule: rule.pattern[:40])
def test_a_rule_with_exceptions_is_alive(rule: Rule):
    """A pattern that matches nothing anywhere, such as a module's old name, would hold nothing."""
    assert {*rule.but.split()} <= {*CODE, "_"}
    assert any(re.search(rule.pattern, line) for name in rule.but.split() for line in CODE.get(name, []))


def test_only_torch_asks_for_a_version():
    """Nor do tests and benchmarks, neither by its number nor by ``hasattr(torch, ...)``."""
    of_torch = r"\((torch|dist|nn)\b[\w.]*"
    asks = r"__version__.* (<|>|!=|in |is )|((<|>|!=).*|'' (not )?in \S*)__version__"
    asks += rf"|hasattr{of_torch}|getattr{of_torch}, '', "
    files = [path for folder in ("flatshard", "test", "benchmarks") for path in (PACKAGE.parent / folder).rglob("*.py")]
    lines = [(path, line) for path in files for line in code(path.read_text())]
    assert not [f"{path}: {line}" for path, line in lines if re.search(asks, line)]


# -- one writer per fact -----------------------------------------------------------------------------------------------


CHANGING_METHODS = (
    r"pop|popitem|popleft|append|appendleft|extend|insert|add|remove|discard|clear|update|setdefault|__(set|del)item__"
)


def attributes_of_the_core() -> dict[str, set[str]]:
    """The modules of the core's classes that have an attribute, by its name. Not what tensors have, too."""
    owners, of_tensors = dict[str, set[str]](), set(dir(torch.Tensor))
    for name in [n for n in TREES if package_of(n) in CORE]:
        for node in ast.walk(TREES[name]):
            for each in ast.walk(node) if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and dotted(each.value) == "self":
                    owners.setdefault(each.attr, set()).add(name)
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    owners.setdefault(each.target.id, set()).add(name)
    return {attribute: names for attribute, names in owners.items() if attribute not in of_tensors}


def writers() -> Iterator[tuple[str, str, bool]]:
    """(attribute, module, whether it is another's) for each attribute that a function assigns, or whose list, set or dict it
    changes. Constructors declare.
    """
    for name in [n for n in TREES if package_of(n) in (*CORE, "_composable.features", "_comm.monitor")]:
        for function in functions(TREES[name]):
            for node in ast.walk(function):
                target = node.value if isinstance(node, ast.Subscript) else node
                stores = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
                if isinstance(node, ast.Call) and re.fullmatch(CHANGING_METHODS, getattr(node.func, "attr", "")):
                    target, stores = node.func.value, True
                if stores and isinstance(target, ast.Attribute):
                    base = dotted(target.value)
                    if (base == "self" and function.name in ("__init__", "_reset")) or function.name == "__deepcopy__":
                        continue
                    yield target.attr, name, base != "self"


MANY_WRITERS = {
    "checks",  # what features ask before a unit's parameters are used: each adds its own
    "claims",  # each is added and removed by who has it
    "registrations",  # so is `add`; and while units are planned it is a list
}


def test_no_two_files_write_one_attribute():
    owners, found, foreign = attributes_of_the_core(), dict[str, set[str]](), set[str]()
    for attribute, name, is_foreign in writers():
        if is_foreign or name in owners.get(attribute, ()):
            found.setdefault(attribute, set()).add(name)
        if is_foreign and name not in owners.get(attribute, ()):
            foreign.add(attribute)
    several = {a for a, names in found.items() if len(names) > 1 and a in foreign and a in owners}
    assert several == MANY_WRITERS


INSTALLED_AT_IMPORT = {
    ("_", "_extensions.plug_in"),  # our own features into our own core
    ("_", "_show_here"),  # names of our public functions
    ("_base.trace", "sinks.append"),  # the logger, where the environment asks for it
    ("_handle.tensors.sharded_parameter", "locals"),  # methods of our class
    ("_handle.tensors.sharded_gradient", "HANDLERS[torch._foreach_norm]"),  # a table of our own
    ("_handle.tensors.sharded_gradient", "HANDLERS[UNSCALE]"),
    ("_handle.tensors.sharded_gradient", "HANDLERS[torch._foreach_max]"),
    # Types of ours are added to lists of torch. Nothing else's behaviour changes.
    ("_handle.tensors.sharded_gradient", "_foreach_utils._foreach_supported_types.append"),
    ("_handle.tensors.sharded_parameter", "_torch_optimizer._foreach_supported_types.append"),
    ("checkpoint._sharded_value", "torch.serialization.add_safe_globals"),
    ("integrations.lightning", "StrategyRegistry.register"),  # for who imports it
}
"""(module, what it replaces, or calls) when it is imported."""


def at_import(lines: list[str]) -> Iterator[str]:
    """Each line that runs when a module is imported, also in an ``if`` or a loop, and in a class."""
    later = 1000
    for line in lines:
        depth = len(line) - len(line.lstrip())
        if line and depth <= later:
            yield line.strip()
            later = depth if re.match(r"\s*(async def|def|if __name__) ", line) else 1000


def test_nothing_is_replaced_at_import():
    """In what other modules own: attributes, entries, registrations."""
    found = set()
    for name, lines in CODE.items():
        own = set(re.findall(r"^(\w+)(?:: .*)? = ", "\n".join(lines), re.MULTILINE))
        for line in at_import(lines):
            called = re.match(
                r"([\w.]+)\(.*\)$|(?:@|.* = )((?:[\w.]*[._])?(?:register|install|patch)(?:_\w+)?)\b", line
            )
            target = re.match(r"(?:del )?(([\w.]+)(?:\.\w+|\[[^=]*\]))(?:: .*)?( \S?= |$)", line)
            found |= {(name, called[1] or called[2])} if called else set()
            found |= {(name, target[1])} if target and target[2] not in own else set()
    assert found == INSTALLED_AT_IMPORT


# -- private API of torch ----------------------------------------------------------------------------------------------


def test_each_private_api_of_torch_is_used_in_one_file():
    """Attribute chains from torch, or from what is imported from torch, with a ``_private`` part.

    Not the ``_foreach`` functions: their underscore is history, every optimizer is built on them.
    """
    apis: list[str] = []
    for name, tree in TREES.items():
        from_torch, found = {"torch", "dist"}, set[str]()
        for statement, module, names in imports(tree):
            if module.partition(".")[0] == "torch" and isinstance(statement, ast.ImportFrom):
                from_torch |= {alias.asname or alias.name for alias in statement.names}
                found |= {f"{module}.{n}" for n in names if "._" in f".{module}.{n}"}
        lines = "\n".join(line for line in CODE[name] if not re.match(AN_IMPORT, line))
        chains = re.findall(rf"(?<![\w.])(?:{'|'.join(from_torch)})(?:\.\w+)+", lines)
        apis += found | {chain for chain in chains if re.search(r"\._(?!foreach_[a-z_]+$)[a-z]", chain)}
    assert len(apis) == len(set(apis)), sorted({a for a in apis if apis.count(a) > 1})


# -- size and prose ----------------------------------------------------------------------------------------------------


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_files_read_in_a_sitting_and_functions_fit_on_a_screen_or_two():
    """Docstrings of functions are not counted: arguments deserve prose. Files begin with what they are for."""
    for name, tree in TREES.items():
        assert ast.get_docstring(tree), name
        assert (lines := SOURCES[name].count("\n")) <= MAX_FILE_LINES, f"{name} has {lines} lines"
        for function in functions(tree):
            start = function.lineno if ast.get_docstring(function) is None else function.body[0].end_lineno
            lines = function.end_lineno - start + 1
            assert lines <= MAX_FUNCTION_LINES, f"{name}.{function.name} has {lines} lines"


def test_all_is_complete():
    """Without names that are imported under another, or as themselves: for annotations, see docs/api."""
    nodes = [node for node, module, _ in imports(TREES["_"]) if module.startswith("flatshard")]
    aliases = [alias for node in nodes for alias in node.names if alias.asname is None]
    assert {alias.name for alias in aliases if not alias.name.startswith("_")} == set(flatshard.__all__)


NOTE = re.compile(r"\[Note: ([^\]]+)\]")


def test_every_note_that_is_cited_is_defined_once():
    """A note is defined where its title stands alone on a line of a docstring, and cited everywhere else."""
    lines = [line for source in SOURCES.values() for line in source.splitlines()]
    found = [(title, line.strip() == f"[Note: {title}]") for line in lines for title in NOTE.findall(line)]
    defined = [title for title, is_definition in found if is_definition]
    assert sorted(set(defined)) == sorted(defined)
    assert {title for title, _ in found} == set(defined)


def test_no_two_classes_have_one_name():
    """A name has one meaning in the whole package."""
    names = [node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert not {name for name in names if names.count(name) > 1}


def test_no_tests_import_from_other_tests():
    """Shared code of two files of tests is in a module beside them: see test/README.md."""
    lines = [(path.name, line) for path in TESTS for line in code(path.read_text()) if re.match(AN_IMPORT, line)]
    found = {(name, module) for name, line in lines for module in re.findall(r"\btest_\w+", line)}
    assert found <= {("test_core_alone.py", "test_structure")}  # the packages as they are listed here


def test_no_two_files_of_tests_have_the_same_helper():
    """A function or a class that is there twice, under whatever name, belongs into a module of its own."""
    where: dict[str, set[str]] = {}
    for path, tree in TESTS.items():
        for node in tree.body:
            helper = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("test_")
            if helper and (node.end_lineno or 0) - node.lineno > 2:
                anonymous = ast.unparse(node).replace(node.name, "_")
                where.setdefault(anonymous, set()).add(f"{path.name}: {node.name}")
    assert not [places for places in where.values() if len(places) > 1]


def test_no_line_speaks_of_unfinished_business():
    for name, source in SOURCES.items():
        assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", source), name


MAKES_TENSORS = re.compile(
    r"torch\.(tensor|as_tensor|empty|empty_strided|zeros|ones|full|arange|linspace|eye|rand|randn|randint|randperm)"
)


def test_each_new_tensor_says_its_device():
    """Not the default one, which users set by ``torch.set_default_device``."""
    found = [
        f"{name}:{call.lineno}"
        for name, tree in TREES.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and MAKES_TENSORS.fullmatch(dotted(call.func))
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert not found


def test_the_page_about_the_inside_names_what_exists():
    """``Class.member``, ``module.function`` and ``_function`` of flatshard/README.md."""
    page = (PACKAGE / "README.md").read_text()
    members = dict[str, set[str]]()
    for tree in TREES.values():
        for node in [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]:
            own = {getattr(each, "name", None) or dotted(getattr(each, "target", each)) for each in node.body}
            slots = {
                each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute) and dotted(each.value) == "self"
            }
            members.setdefault(node.name, set()).update(filter(None, own | slots))
    named = re.findall(r"`([A-Z]\w*[a-z]\w*)\.(\w+)", page)
    assert len(named) > 10
    assert not [f"{cls}.{member}" for cls, member in named if member not in members.get(cls, ())]
    code = "\n".join(SOURCES.values())
    functions = {*re.findall(r"`(_[a-z]\w+)`", page), *re.findall(r"`[a-z_]+\.(\w+)`", page)} - {"py"}
    assert not [name for name in functions if not re.search(rf"\b{name}\b", code)]
