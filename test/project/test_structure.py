"""The rules that keep the package readable in an afternoon, checked on its syntax trees.

Imports go down only. Each fact has one writer. Files and functions fit on a few screens. Every public function says what
it does, and every note that is cited is there to read. A rule with exceptions lists them here, with their reasons.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import flatshard

PACKAGE = Path(flatshard.__file__).parent

PACKAGES = [
    ["_errors", "_names", "_torch", "_config", "_trace", "_host_memory", "_frames", "layouts"],
    ["_comm"],
    ["_runtime", "_mesh_runtime"],
    ["_handle", "_handle.adapters", "_handle.tensors"],
    ["_composable", "_composable.construct"],
    ["_composable.features", "_comm.monitor"],
    ["_quantized", "_shared_memory", "_fake_group"],
    ["optim", "checkpoint", "debug", "comm", "policies", "tensors"],
    ["planning", "elastic", "weights"],
    ["_extensions"],
    [""],
    ["integrations"],  # on the public names
]
"""From the bottom up: a module imports from its own row and those before it. A module that is not named itself belongs to
the longest package that its name begins with; "" is the top one."""

CORE = [package for row in PACKAGES[:5] for package in row]
"""Packages, or modules beside packages, that know no feature and no product."""

TYPE_CHECKING_IMPORTS = {"checkpoint": {"checkpoint._reader", "checkpoint._writer"}}
"""Imports that only a type checker sees: here public names that are imported when they are asked for."""

INNER_IMPORTS = {
    ("checkpoint", "flatshard.checkpoint"),  # as the next
    ("checkpoint._job", "flatshard.checkpoint"),  # a third of a second of `import flatshard`
    ("checkpoint._saving", "flatshard.checkpoint"),
    ("_composable.features.transforms", "torch._dynamo"),  # two seconds of `import flatshard`
    ("_composable.features.transforms", "torch._C._dynamo.eval_frame"),
    ("_handle.adapters.tensor_parallel", "torch.distributed.tensor"),  # half a second of `import flatshard`
    ("checkpoint._sharded_value", "torch.distributed.tensor._utils"),  # as above
    ("checkpoint._sharded_value", "torch.distributed.checkpoint.metadata"),  # another half
    ("checkpoint._sharded_value", "torch.distributed.checkpoint.planner"),
    ("planning._recording", "torch.utils.flop_counter"),  # an eighth: it imports triton, where that is installed
    ("integrations.trainer", "flatshard.integrations.peft"),  # peft may be absent
}
"""(module, what it imports inside a function)."""

MAX_FILE_LINES = 600  # a thought that is split over two files is worse than a long file
MAX_FUNCTION_LINES = 80


def _name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or "_"


SOURCES = {_name_of(p): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
NODES = {name: list(ast.walk(tree)) for name, tree in TREES.items()}


def outside(*names: str) -> Iterator[tuple[str, ast.AST]]:
    """Every syntax node of every module but ``names``, with the module's name."""
    for name, nodes in NODES.items():
        if name not in names:
            yield from ((name, node) for node in nodes)


def show(name: str, node: ast.AST) -> str:
    return f"{name}:{getattr(node, 'lineno', '?')}: {ast.unparse(node)}"


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute chain on a name, with '' where the chain starts at anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def written(node: ast.AST) -> list[ast.expr]:
    """The targets that a statement assigns to, adds to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


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
    """Which of our modules ``from module import names`` needs, as named in ``LAYERS``."""
    if module.partition(".")[0] != "flatshard":
        return set()
    short = module.removeprefix("flatshard").removeprefix(".")
    inner = {f"{short}.{n}".removeprefix(".") for n in names}
    return {n for n in inner if n in TREES} or {short or "_"}


def type_checking_only(tree: ast.AST) -> set[ast.stmt]:
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and dotted(n.test) == "TYPE_CHECKING"]
    return {s for block in guarded for s in block.body}


def package_of(name: str) -> str:
    """The package of ``PACKAGES`` that a module belongs to."""
    known = {package for row in PACKAGES for package in row}
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def needed(name: str, type_checking: bool = False) -> set[str]:
    """Our modules that ``name`` imports when it runs; or for a type checker only."""
    hidden = type_checking_only(TREES[name])
    chosen = [i for i in imports(TREES[name]) if (i[0] in hidden) == type_checking]
    return {m for _, module, names in chosen for m in imported_modules(module, names)} - {name}


def test_imports_go_down():
    """So the core imports no feature and no product."""
    row = {package: number for number, packages in enumerate(PACKAGES) for package in packages}
    up = {(n, m) for n in TREES for m in needed(n) if row[package_of(m)] > row[package_of(n)]}
    assert not up


def test_products_do_nothing_when_they_are_imported():
    """The core imports none of them, so what does not call them pays nothing in its steps."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AnnAssign, ast.Assign)
    for name in (name for name in TREES if package_of(name) in ("planning", "elastic", "weights")):
        for node in TREES[name].body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert is_text or isinstance(node, allowed), (name, node.lineno)
            for target in getattr(node, "targets", ()):
                assert isinstance(target, ast.Name | ast.Tuple), (name, node.lineno)


def test_no_files_know_each_other():
    """No ring of imports, also of those that only a type checker sees."""
    direct = {name: needed(name) | needed(name, type_checking=True) for name in TREES}
    reached = {name: set(modules) for name, modules in direct.items()}
    for middle in reached:
        for modules in reached.values():
            if middle in modules:
                modules |= reached[middle]
    assert not {name: {m for m in found if name in reached[m]} for name, found in reached.items() if name in found}


def test_imports_for_the_type_checker_are_listed():
    found = {name: needed(name, type_checking=True) for name in TREES}
    assert {name: modules for name, modules in found.items() if modules} == TYPE_CHECKING_IMPORTS


def test_imports_inside_functions_are_listed():
    found = set()
    for name, tree in TREES.items():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                found |= {(name, module) for _, module, _ in imports(function)}
    assert found == INNER_IMPORTS


def test_nothing_imports_the_fsdp_of_torch():
    """This project re-does it, and it is on its way out upstream. Its policies are known by their shape."""
    for name in TREES:
        banned = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed._tools")
        for statement, module, names in imports(TREES[name]):
            full = [module, *(f"{module}.{n}" for n in names)]
            assert not any(f.startswith(banned) for f in full), show(name, statement)


def test_nothing_imports_beyond_torch_and_the_standard_library():
    ours = {n: tree for n, tree in TREES.items() if package_of(n) != "integrations"}
    found = {module.partition(".")[0] for tree in ours.values() for _, module, _ in imports(tree)}
    assert found - set(sys.stdlib_module_names) <= {"flatshard", "torch", "typing_extensions"}


def test_integrations_use_public_names():
    for name in [n for n in TREES if package_of(n) == "integrations"]:
        for statement, module, names in imports(TREES[name]):
            public = [part for n in names or [""] for part in f"{module}.{n}".split(".")]
            ours = module.partition(".")[0] == "flatshard"
            assert not (ours and any(p.startswith("_") for p in public)), show(name, statement)


# -- one writer per fact -----------------------------------------------------------------------------------------------


def test_only_lifetime_assigns_a_state():
    for name, node in outside("_handle.lifetime"):
        for target in written(node):
            assert ".lifetime." not in dotted(target), show(name, node)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None and not isinstance(value, ast.Compare):
            assert not dotted(value).startswith(("ParamState.", "GradState.")), show(name, node)


FRAME_WORDS = {"_getframe", "_current_frames", "f_back", "f_code", "f_locals", "f_globals", "__code__"} | {
    *("currentframe", "getouterframes", "extract_stack", "walk_stack", "tb_frame", "gi_frame", "cr_frame")
}
WORDS_OF = {
    ("_handle.pool",): {"resize_"},  # of a storage
    # By rows, in blocks or whole: nobody else rounds up or cuts shards.
    ("_composable.construct.layout_plan", "layouts.packing"): {
        "PARAM_ALIGNMENT",
        "SHARD_ALIGNMENT",
        "round_up",
        "pack",
    },
    ("_config", "env"): {"environ", "getenv", "putenv"},  # the report shows it
    ("_torch", "env"): {"__version__"},
    ("_frames",): FRAME_WORDS,
}


def test_words_of_few_modules():
    for modules, words in WORDS_OF.items():
        for name, node in outside(*modules):
            said = {getattr(node, "attr", ""), getattr(node, "id", "")} | {
                a.name for a in getattr(node, "names", ()) if isinstance(a, ast.alias)
            }
            assert said.isdisjoint(words), show(name, node)


WRITING_METHODS = {"pop", "update", "setdefault", "clear", "popitem", "__setitem__", "__delitem__"}
CHANGING_METHODS = {*WRITING_METHODS, "append", "appendleft", "popleft", "extend", "insert", "remove", "add", "discard"}


def test_only_slots_registers_parameters():
    for name, node in outside("_handle.registrations"):
        for target in written(node):
            if isinstance(target, ast.Subscript):
                assert not dotted(target.value).endswith("._parameters"), show(name, node)
        if isinstance(node, ast.Call):
            called = dotted(node.func) or getattr(node.func, "attr", "")
            assert called not in ("setattr", "delattr"), show(name, node)
            assert called.rpartition(".")[2] != "register_parameter", show(name, node)
            owner, _, method = called.rpartition(".")
            assert not (owner.endswith("._parameters") and method in WRITING_METHODS), show(name, node)


DISTRIBUTED_QUERIES = {
    *("ProcessGroup", "GroupMember.NON_GROUP_MEMBER", "is_available", "is_backend_available", "is_initialized"),
    *("get_process_group_ranks", "get_rank", "get_world_size", "get_backend_config"),
    "distributed_c10d._get_default_group",
}
"""What may be asked of torch.distributed without communicating, and the types to annotate with."""

DISTRIBUTED_MODULES = ("device_mesh", "tensor", "checkpoint", "pipelining.schedules")
"""Types, arithmetic on them, names of actions; and checkpoints, whose plans torch's own functions exchange."""


def test_only_backends_communicates():
    communicating = ("_comm.backends", "_fake_group", "_comm.monitor.messages", "elastic._world")
    for name, node in outside(*communicating, "_composable.construct.groups"):
        if isinstance(node, ast.Attribute):
            for prefix in ("dist.", "torch.distributed."):
                if dotted(node).startswith(prefix):
                    query = dotted(node).removeprefix(prefix)
                    assert any(q == query or q.startswith(f"{query}.") for q in DISTRIBUTED_QUERIES), show(name, node)
            assert dotted(node.value).rpartition(".")[2] not in ("group", "process_group"), show(name, node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            assert f"{node.module}.".startswith(tuple(f"torch.distributed.{m}." for m in DISTRIBUTED_MODULES)), (
                node.module
            )


COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce", "all_reduce_now", "broadcast_now", "exchange"}


MADE_OF_OTHERS = (
    *("_mesh_runtime", "_runtime", "_comm.backends", "_composable.construct.groups", "_quantized", "_fake_group"),
    "_composable.features.comm_hooks",
)
"""Modules in which collectives are made of others."""


def test_only_handles_start_collectives_and_construction_broadcasts():
    """``_composable`` decides when; ``_handle`` and the runtime do. Only new modules are broadcast from above."""
    found = {
        (name, node.func.attr)
        for name, node in outside(*MADE_OF_OTHERS)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVES
    }
    above = {(name, verb) for name, verb in found if not name.startswith("_handle.")}
    assert above == {
        ("_composable.construct.materialize", "broadcast_now"),
        ("_composable.features.filled_later", "broadcast_now"),  # as materialize, later
        ("_composable.features.filled_later", "all_reduce_now"),
        ("_composable.features.buffers", "all_reduce_now"),  # buffers belong to no handle
        ("_composable.features.buffers", "broadcast_now"),
        ("_composable.features.encoded_gathers", "all_gather"),  # scales, before a handle gathers
        ("_composable.features.kept_shards", "all_gather"),  # for a handle, in place of its own
        ("_composable.features.whole_parameters", "all_gather"),  # whole values, for those who read them
        ("checkpoint._gathering", "all_gather"),
        ("checkpoint._gathering", "all_reduce_now"),
        ("_comm.monitor.order_check", "all_gather"),
        ("debug._replicas", "all_gather"),
        ("optim._owned", "exchange"),
        ("elastic._exchange", "exchange"),  # between ranks that share no handle yet
        ("elastic._reshard", "exchange"),
        ("elastic._exchange", "all_gather"),
    }


def test_only_hooks_registers_hooks():
    features = {n for n in TREES if n.startswith(("_composable.features.", "integrations."))}
    # Those of a copy on meta; and hooks of no forward.
    others = ("planning._program", "checkpoint._state_dict_hooks", "checkpoint._optim_state_dict", "optim._hooks")
    others = (*others, "elastic._job")
    for name, node in outside("_composable.hooks", *features, *others):
        if name == "_handle.tensors.sharded_parameter" and (
            dotted(getattr(node, "value", node)) == "" or getattr(node, "attr", "") == "_backward_hooks"
        ):
            continue  # super().register_hook: what a user may call on a parameter includes this. And a tensor's hooks
        if isinstance(node, ast.Attribute):
            assert not re.fullmatch(r"_?register_\w*hook\w*", node.attr), show(name, node)
            writes_hooks = re.fullmatch(r"_(forward|backward)_(pre_)?hooks", node.attr)
            assert not (writes_hooks and isinstance(node.ctx, ast.Store | ast.Del)), show(name, node)


def test_only_torch_asks_for_a_version():
    """Nor do tests and benchmarks, neither by its number nor by ``hasattr(torch, ...)``."""
    trees = {**TREES, **{path.name: tree for path, tree in TESTS.items()}, **BENCHMARKS}
    for name, node in ((name, node) for name, tree in trees.items() for node in ast.walk(tree)):
        if isinstance(node, ast.Compare) and not all(isinstance(op, ast.Eq) for op in node.ops):  # a record of what ran
            assert not any(getattr(part, "attr", "") == "__version__" for part in ast.walk(node)), show(name, node)
        if isinstance(node, ast.Call) and node.args:
            asked, of_torch = dotted(node.func), dotted(node.args[0]).partition(".")[0] in ("torch", "dist", "nn")
            optional = asked == "getattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant)
            assert not (of_torch and (asked == "hasattr" or optional)), show(name, node)


def attributes_of_the_core() -> dict[str, set[str]]:
    """The modules of the core's classes that have an attribute, by its name. Not what tensors have, too."""
    owners, of_tensors = dict[str, set[str]](), set(dir(torch.Tensor))
    for name in [n for n in TREES if package_of(n) in CORE]:
        for node in NODES[name]:
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
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CHANGING_METHODS:
                    target, stores = node.func.value, True
                if stores and isinstance(target, ast.Attribute):
                    base = dotted(target.value)
                    if (base == "self" and function.name in ("__init__", "_reset")) or function.name == "__deepcopy__":
                        continue
                    yield target.attr, name, base != "self"


MANY_WRITERS = {
    "checks",  # what features ask before a unit's parameters are used: each adds its own
    "claims",  # each is added and removed by who has it
    "gradients",  # `discard` is a method of ours
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


ASKS_WHO_CALLS = {
    "_composable.features.forward_method",  # and the next three: whether a forward is still running
    "_composable.features.keep",
    "_composable.features.skip",
    "_composable.state",
    "_composable.features.transforms",  # below which code dynamo does not look
    "_errors",
    "_comm.monitor.watch",  # for errors
    "_handle.tensors.guard",  # who reads a module's parameters, and who replaces them: see the note there
    "_handle.tensors.sharded_parameter",
    "checkpoint._standard_helpers",  # torch's helpers, by their variables
    "checkpoint._state_dict_hooks",
    "planning._recording",  # whose memory an allocation is
}
"""Modules that ask ``_frames``. No more may come."""


def test_who_asks_for_frames_is_listed():
    asks = {
        name
        for name, tree in TREES.items()
        for _, module, names in imports(tree)
        if name != "_frames" and "_frames" in imported_modules(module, names)
    }
    assert asks == ASKS_WHO_CALLS


INSTALLED_AT_IMPORT = {
    ("_", "_extensions.plug_in"),  # our own features into our own core
    ("_", "_value.__module__"),  # of our public functions
    ("_trace", "sinks.append"),  # the logger, where the environment asks for it
    ("_handle.tensors.sharded_parameter", "locals().update"),  # methods of our class
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


def at_import(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Each statement that runs when a module is imported, also in an ``if`` or a loop, and in a class."""
    for statement in statements:
        yield statement
        if not isinstance(statement, ast.FunctionDef) and "__main__" not in ast.unparse(
            getattr(statement, "test", statement)
        ):
            for block in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(statement, block, []))


def test_nothing_is_replaced_at_import():
    """In what other modules own: attributes, entries, registrations."""
    found = set()
    for name, tree in TREES.items():
        own = {target.id for statement in tree.body for target in written(statement) if isinstance(target, ast.Name)}
        for statement in at_import(tree.body):
            if isinstance(statement, ast.Expr) and isinstance(call := statement.value, ast.Call):
                found.add((name, ast.unparse(call.func)))
            for each in [getattr(statement, "value", None), *getattr(statement, "decorator_list", [])]:
                called = ast.unparse(each.func if isinstance(each, ast.Call) else each) if each is not None else ""
                if re.search(r"(^|[._])(register|install|patch)(_\w+)?$", called):
                    found.add((name, called))
            for target in written(statement):
                if isinstance(target, ast.Attribute | ast.Subscript) and dotted(target.value) not in own:
                    found.add((name, ast.unparse(target)))
    assert found == INSTALLED_AT_IMPORT


# -- what a layer must not know ----------------------------------------------------------------------------------------

TREE_WORDS = {"modules", "named_modules", "children", "named_children", "get_submodule", "_modules", "named_parameters"}


def test_a_handle_knows_no_hooks_and_no_module_tree():
    """Only ``slots`` looks at a module, by its parameters. Others may name the type, and hand modules on."""
    for name in [n for n in TREES if n.startswith("_handle.")]:
        for node in ast.walk(TREES[name]):
            word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name != "_handle.tensors.sharded_parameter":  # hooking a parameter is part of what the user sees of it
                assert "hook" not in word, show(name, node)
            known = name == "_handle.tensors.guard" and ast.unparse(node).startswith("nn.Module.")  # who reads a dict
            assert known or word not in TREE_WORDS, show(name, node)
            if name != "_handle.registrations":
                assert word not in ("_parameters", "_buffers"), show(name, node)


def test_layout_knows_no_torch():
    found = {module for _, module, _ in imports(TREES["_handle.layout"])}
    assert not any(m.startswith("torch") for m in found)


# -- private API of torch ----------------------------------------------------------------------------------------------


def private_torch_api() -> set[tuple[str, str]]:
    """(module, API): attribute chains from torch, or from what is imported from torch, with a ``_private`` part.

    Not the ``_foreach`` functions: their underscore is history, every optimizer is built on them.
    """
    found = set()
    for name, tree in TREES.items():
        from_torch = {"torch", "dist"}
        for statement, module, names in imports(tree):
            if module.partition(".")[0] == "torch" and isinstance(statement, ast.ImportFrom):
                from_torch |= {a.asname or a.name for a in statement.names}
                found |= {(name, f"{module}.{n}") for n in names if "._" in f".{module}.{n}"}
        inner = {n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute)}  # of a longer chain
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node not in inner:
                chain = dotted(node)
                if chain.partition(".")[0] in from_torch and re.search(r"\._(?!foreach_[a-z_]+$)[a-z]", chain):
                    found.add((name, chain))
    return found


def test_each_private_api_of_torch_is_used_in_one_file():
    apis = [api for _, api in private_torch_api()]
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
    imported = {n for _, module, names in imports(TREES["_"]) for n in names if not n.startswith("_")}
    assert imported == set(flatshard.__all__)


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


IMPORT_TESTS = {
    ("test_core_alone.py", "test_structure"),  # the packages as they are listed there
}


BENCHMARKS = {path.name: ast.parse(path.read_text()) for path in sorted((PACKAGE.parent / "benchmarks").glob("*.py"))}
TESTS = {path: ast.parse(path.read_text()) for path in sorted(Path(__file__).parents[1].rglob("*.py"))}


def test_no_tests_import_from_other_tests():
    """What two files of tests need is in a module beside them: see test/README.md."""
    found = set()
    for path, tree in TESTS.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
                modules = {part for name in names for part in name.split(".")}
                found |= {(path.name, m) for m in modules if m.startswith("test_")}
    assert found <= IMPORT_TESTS


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
