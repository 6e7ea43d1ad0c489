"""Random models, sharded in random ways, run random programs of flatshard's public verbs and clients' habits. Each draw is
compared with the same program on plain models in one process.

``--fuzz N`` runs N draws, ``--fuzz-seed S`` starts at seed S; from 1,000 draws on, a table counts what they contain. A
failing draw prints its lines, its ``repr``, and the command that runs it alone. ``--minimise`` searches for a shorter program
with the same failure. The grammar is in ``programs.py``, ``random_models.py`` and ``random_options.py``; ``machine.py`` runs
programs and compares.
"""

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fuzz import files, machine, parameters, programs, random_models, random_options, runner, training
from fuzz.drawing import STORES, draw, make_world_size, smaller
from fuzz.machine import run_seeds
from fuzz.programs import KINDS, PENALTIES, Block, Bomb, Place, Program, Statement, statements
from fuzz.random_models import WAYS
from fuzz.random_options import FIRSTS
from fuzz.training import LONE
from pool import Failure, Pool, RankFailure

import flatshard

CHUNK = 25
"""Draws per test: a test costs more to start than a draw costs to run."""
TIMEOUT = 20.0
MAX_FAILURES = 3
"""Number of failing draws after which a chunk stops."""
MINIMISING = 120.0
"""Seconds spent on shrinking a failing program."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    first, count = metafunc.config.getoption("--fuzz-seed"), metafunc.config.getoption("--fuzz")
    if count >= MANY:
        metafunc.config.pluginmanager.register(Coverage(range(first, first + count)))
    params = []
    for world_size in range(1, 5):
        seeds = [seed for seed in range(first, first + count) if make_world_size(seed) == world_size]
        for start in range(0, len(seeds), CHUNK):
            chunk = seeds[start : start + CHUNK]
            params.append(pytest.param(world_size, chunk, id=f"world{world_size}-seeds{chunk[0]}to{chunk[-1]}"))
    metafunc.parametrize(("world_size", "seeds"), params)


@pytest.mark.time_limit(600)
def test_random_programs_do_as_in_one_process(pool, world_size, seeds, request, record_property):
    failures, counts = [], []
    while seeds and len(failures) < MAX_FAILURES:
        try:
            programs = [draw(seed) for seed in seeds]
            counts += pool.run(run_seeds, programs, world_size=world_size, timeout=TIMEOUT)[0]
            break
        except RankFailure as e:
            noted = re.match(r"seed (\d+)", e.failures[0].note)
            if noted is None:
                raise  # not a program's failure: a file does not import, or the pool is broken
            seed = int(noted.group(1))
            if is_noticed(e):
                seeds = seeds[seeds.index(seed) + 1 :]
                continue
            program, error = draw(seed), e
            if request.config.getoption("--minimise"):
                program, error = minimise(lambda p: failure(pool, p), program, e)
            command = f"python -m pytest test/fuzz --fuzz 1 --fuzz-seed {seed} --minimise"
            failures.append(f"{command}\n{program}\n{program!r}\n{error}")
            seeds = seeds[seeds.index(seed) + 1 :]
    record_property(COUNTED, dict(sum(map(Counter, counts), Counter())))
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


def is_noticed(error: RankFailure) -> bool:
    """Return whether flatshard noticed that a rank lacks a term of the loss: then the program has to end.

    A rank that has gone on meets the others' end in a collective of the machine's own, which only torch explains.
    """
    raised = [f for f in error.failures if f.kind == "raised"]
    by_us = [f for f in raised if "Connection closed by peer" not in f.message or f.type_name != "RuntimeError"]
    return any(LONE in f.note for f in by_us) and all(
        f.type_name in ("OutOfStepError", "CollectiveError") or "rank asked for something else" in f.message
        for f in by_us
    )


# -- coverage ----------------------------------------------------------------------------------------------------------

COUNTED = "statements"
MANY = 1000
"""Number of draws from which on a table counts their contents."""
VALUES = 24
"""Maximum number of values that are listed for a field; beyond it, only their count is."""


class Coverage:
    """A pytest plugin that prints the table."""

    def __init__(self, seeds: range) -> None:
        self._seeds = seeds
        self._counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._counts.update(dict(report.user_properties).get(COUNTED, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"{len(self._seeds)} draws: how many had what")
        for line in coverage(draw(seed) for seed in self._seeds):
            terminalreporter.write_line(line)
        terminalreporter.section("statements that ran in chunks of draws that passed")
        for what in sorted({key.partition(" | ")[0] for key in self._counts}):
            outcomes = [f"{self._counts[f'{what} | {how}']} {how}" for how in ("done", "refused", "left out")]
            terminalreporter.write_line(f"{what}: {', '.join(outcomes)}")


def coverage(programs: Iterable[Program]) -> Iterator[str]:
    """Yield a line for each field: its values, each with the number of draws that have it."""
    found: dict[str, Counter[Any]] = {}
    for program in programs:
        for name, value in {fact for fact in facts(program) if fact[0]}:
            found.setdefault(name, Counter())[value] += 1
    for name, values in sorted(found.items()):
        named = {getattr(value, "__name__", str(value)): count for value, count in values.most_common()}
        if name == "Model tree" or name == "Model decoder":
            named = {value: count for value, count in named.items() if not value.lstrip("-").isdigit()}
        elif len(named) > VALUES and name != "class":
            named = {"different values": len(named)}
        yield f"{name}: {', '.join(f'{value} {count}' for value, count in named.items())}"


def test_a_table_says_how_often_what_was_drawn():
    lines = dict(line.split(": ", 1) for line in coverage(map(draw, range(20))))
    assert re.search(r"\bForward 20\b", lines["class"])
    assert set(re.findall(r"(\w+Store) \d+", lines["Program store"])) <= {*STORES}
    assert lines["Program seed"].startswith("0 1, ")


# -- shorter programs --------------------------------------------------------------------------------------------------


def failure(pool: Pool, program: Program) -> RankFailure | None:
    try:
        pool.run(run_seeds, [program], world_size=program.world_size, timeout=TIMEOUT)
    except RankFailure as e:
        return e
    return None


def _kind(error: RankFailure) -> tuple[str, str, str]:
    """Return a key for failures that are alike, without numbers and names of parameters."""
    first = error.failures[0]
    text = re.sub(r"\d[-\d.e]*|'\S*'|(body|front|head|scale)\S*", "#", first.message)
    return first.kind, first.type_name, text[:60]


def minimise(
    fails: Callable[[Program], RankFailure | None], program: Program, error: RankFailure, seconds: float = MINIMISING
) -> tuple[Program, RankFailure]:
    """Leave out as much as possible while the program still fails alike."""
    end, kind = time.monotonic() + seconds, _kind(error)
    while True:
        for shorter in smaller(program):
            if time.monotonic() > end:
                return program, error
            new = fails(shorter)
            if new is not None and _kind(new) == kind:
                program, error = shorter, new
                break
        else:
            return program, error


FAILED = Failure(0, "raised", "", "AssertionError", "m0 has no gradient")


def test_minimising_finds_the_shortest():
    program = next(p for p in map(draw, range(100)) if {"Step", "Summon"} <= _kinds(p))

    def fails(p: Program) -> RankFailure | None:
        return RankFailure("", [FAILED]) if {"Step", "Summon"} <= _kinds(p) else None

    shortest, _ = minimise(fails, program, RankFailure("", [FAILED]))
    assert _kinds(shortest) == {"Step", "Summon"}
    assert len(list(statements(shortest.body))) == 2
    assert eval(repr(shortest), vars(programs) | {"inf": float("inf")}) == shortest


def _kinds(program: Program) -> set[str]:
    return {type(s).__name__ for s in statements(program.body)}


def test_a_program_depends_on_its_seed_only():
    for seed in range(20):
        assert draw(seed) == draw(seed)
        assert draw(seed).world_size == make_world_size(seed)
        assert str(draw(seed)).startswith(f"# seed {seed}, ")


# -- completeness of the grammar ---------------------------------------------------------------------------------------

CALLERS = (random_models, random_options, runner, training, parameters, files, machine)
CALLING = "".join(Path(module.__file__).read_text() for module in CALLERS)
"""Source of the files that call public verbs."""
OTHERS = {
    *("CollectiveError", "InternalError", "OutOfStepError", "RankError", "ReconfiguredError", "CPUOffload"),
    *("ShardedValue", "ShardedGradient", "ShardedParameter"),
    *("Collectives", "DefaultCollectives", "GlooCollectives", "Pending", "CommHookState"),
    "QuantizedCollectives",  # raises errors of its own: comm/test_quantized.py
    *("sync_buffers", "works_on_shards"),  # not drawn yet: features/test_buffers.py, integrations/test_trainer.py
    *("plan_step", "fit_to_memory"),  # planning/
    *(
        "FileSystemReader",
        "FileSystemWriter",
        "load_safetensors",
        "copy_checkpoint",
        "rekey_optim_state_dict",
        "optim_state_dict_to_load",
    ),  # for torch, plain models and folders of others: checkpoint/
    *("full_shape", "check_whole_parameters"),  # optim/test_whole_optimizer.py
    "offload_training_state",  # nothing moves on CPU: accelerator/offload.py
    *("Job", "World", "LostShardsError", "ExcludedError"),  # loss of ranks: elastic/
}
"""Types, errors, and verbs without an equivalent in one process."""


def test_every_public_verb_is_called():
    packages = [getattr(flatshard, n) for n in ("checkpoint", "comm", "debug", "elastic", "optim", "tensors")]
    names = {name for package in (flatshard, *packages) for name in package.__all__} - OTHERS
    unknown = {name for name in names if not isinstance(getattr(flatshard, name, None), ModuleType)}
    assert not {name for name in unknown if not re.search(rf"\b{name}\b", CALLING)}, "no program calls them"


def facts(what: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values in a program, each with its class and field."""
    if isinstance(what, Place):
        yield name, what.kind
    elif isinstance(what, tuple):
        for each in what:
            yield from facts(each, name)
    elif dataclasses.is_dataclass(what):
        yield from (("class", type(what)), (name, type(what)))
        for field in dataclasses.fields(what):
            yield from facts(getattr(what, field.name), f"{type(what).__name__} {field.name}")
    else:
        yield name, what


def test_all_is_drawn():
    """Every kind of statement and every kind of module is drawn, and at least two values of each field."""
    found: dict[str, set[Any]] = {}
    for name, value in {fact for seed in range(200) for fact in facts(draw(seed))}:
        found.setdefault(name, set()).add(value)
    assert [name for name, values in found.items() if len(values) < 2 and not isinstance(*values, type)] == []
    assert found["class"] >= {*Statement.__subclasses__(), *Block.__subclasses__(), Bomb} - {Block}
    for name, every in (
        ("Model tree", WAYS),
        ("Penalty how", PENALTIES),
        ("Sharding first", FIRSTS),
        ("Program store", STORES),
    ):
        assert found[name] >= {*every}, name
    places = {name: values for name, values in found.items() if name.endswith(" place") and name != "Forward place"}
    assert {name: {*KINDS} - values for name, values in places.items() if values < {*KINDS}} == {}
