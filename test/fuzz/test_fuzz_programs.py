"""Random programs of flatshard's public verbs, each against the same program on plain models in one process.

``--fuzz-programs N`` runs N programs, ``--fuzz-seed S`` starts at seed S; a failing one prints its lines, and the command
that runs it alone. ``--minimise`` then looks for a shorter one that fails alike. What a program is: fuzz_programs.py; how it
is run and compared: program_machine.py.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fuzz_programs import CHANGES, SAVES, Block, Program, Statement, draw, make_world_size, smaller
from pool import Failure, Pool, RankFailure
from program_machine import run_program

CHUNK = 25
"""Programs per test, as in test_fuzz.py."""
PROGRAM_TIMEOUT = 20.0
MAX_FAILURES = 3
"""Failing programs after which a chunk gives up."""
MINIMISING = 120.0
"""Seconds that a failing program is made shorter for."""


def run_programs(ctx, seeds: list[int]) -> list[str]:
    return [refusal for seed in seeds for refusal in run_program(ctx, draw(seed))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    first, count = metafunc.config.getoption("--fuzz-seed"), metafunc.config.getoption("--fuzz-programs")
    params = []
    for world_size in range(1, 5):
        seeds = [seed for seed in range(first, first + count) if make_world_size(seed) == world_size]
        for start in range(0, len(seeds), CHUNK):
            chunk = seeds[start : start + CHUNK]
            params.append(pytest.param(world_size, chunk, id=f"world{world_size}-seeds{chunk[0]}to{chunk[-1]}"))
    metafunc.parametrize(("world_size", "seeds"), params)


@pytest.mark.time_limit(600)
def test_random_programs_do_as_in_one_process(pool, world_size, seeds, request):
    failures = []
    while seeds and len(failures) < MAX_FAILURES:
        try:
            pool.run(run_programs, seeds, world_size=world_size, timeout=PROGRAM_TIMEOUT)
            break
        except RankFailure as e:
            noted = re.match(r"seed (\d+)", e.failures[0].note)
            if noted is None:
                raise  # not a program's failure: a file does not import, or the pool is broken
            seed = int(noted.group(1))
            command = (
                f"python -m pytest test/fuzz/test_fuzz_programs.py --fuzz-programs 1 --fuzz-seed {seed} --minimise"
            )
            program, error = draw(seed), e
            if request.config.getoption("--minimise"):
                program, error = minimise(lambda p: failure(pool, p), program, e)
            failures.append(f"{command}\n{program}\n{error}")
            seeds = seeds[seeds.index(seed) + 1 :]
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


# -- shorter programs --------------------------------------------------------------------------------------------------


def failure(pool: Pool, program: Program) -> RankFailure | None:
    try:
        pool.run(run_program, program, world_size=program.world_size, timeout=PROGRAM_TIMEOUT)
    except RankFailure as e:
        return e
    return None


def _kind(error: RankFailure) -> tuple[str, str, str]:
    """Of failures that are alike: without numbers and names of parameters."""
    first = error.failures[0]
    text = re.sub(r"\d[-\d.e]*|'\S*'|(blocks|front|head|scale)\S*", "#", first.message)
    return first.kind, first.type_name, text[:60]


def minimise(
    fails: Callable[[Program], RankFailure | None], program: Program, error: RankFailure, seconds: float = MINIMISING
) -> tuple[Program, RankFailure]:
    """Leave out whatever can be, as long as the program fails alike."""
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


# -- the fuzzer itself -------------------------------------------------------------------------------------------------


def _statements(body: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in body:
        yield statement
        if isinstance(statement, Block):
            yield from _statements(statement.body)


def test_a_program_depends_on_its_seed_only():
    for seed in range(20):
        assert draw(seed) == draw(seed)
        assert draw(seed).world_size == make_world_size(seed)
        assert str(draw(seed)).startswith(f"# seed {seed}, ")


def test_the_programs_cover_what_they_are_meant_to():
    programs = [draw(seed) for seed in range(300)]
    statements = [s for program in programs for s in _statements(program.body)]
    kinds = Counter(type(s).__name__ for s in statements)
    every: set[type[Any]] = {c for base in (Statement, Block) for c in base.__subclasses__()} - {Block}
    assert set(kinds) == {c.__name__ for c in every}
    assert min(kinds.values()) > 30, kinds
    assert {s.how for s in statements if hasattr(s, "how")} == set(CHANGES)
    assert {s.kind for s in statements if hasattr(s, "kind")} == set(SAVES)
    bombs = {(b.when, b.place, b.error) for s in statements if (b := getattr(s, "bomb", None))}
    assert len(bombs) == 3 * 2 * 2
    assert {(p.world_size, p.strategy, p.policy) for p in programs} >= {
        (world, strategy, "blocks") for world in range(1, 5) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    }
    assert {p.reshard_after_forward for p in programs} == {None, False, True, 2}


FAILED = Failure(0, "raised", "", "AssertionError", "m0 has no gradient")


def test_minimising_finds_the_shortest():
    program = next(p for p in map(draw, range(100)) if {"Step", "Summon"} <= _kinds(p))

    def fails(p: Program) -> RankFailure | None:
        return RankFailure("", [FAILED]) if {"Step", "Summon"} <= _kinds(p) else None

    shortest, _ = minimise(fails, program, RankFailure("", [FAILED]))
    assert _kinds(shortest) == {"Step", "Summon"}
    assert len(list(_statements(shortest.body))) == 2


def _kinds(program: Program) -> set[str]:
    return {type(s).__name__ for s in _statements(program.body)}
