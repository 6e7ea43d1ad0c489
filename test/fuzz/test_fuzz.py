"""Random models, sharded in random ways, under random programs of flatshard's public verbs and clients' habits: one grammar,
each draw against the same program on plain models in one process.

``--fuzz N`` runs N draws, ``--fuzz-seed S`` starts at seed S; a failing one prints its lines, its ``repr``, and the command
that runs it alone. ``--minimise`` then looks for a shorter one that fails alike. What is drawn: ``fuzz_programs.py``,
``fuzz_models.py``, ``fuzz_options.py``; how it is run and compared: ``program_machine.py``. The last test prints how often
everything that can be drawn was.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from fuzz_models import CONTAINERS, FORMS, LEAVES, TOP
from fuzz_options import POLICIES, STARTS, STRATEGIES, Sharding
from fuzz_programs import (
    ASKED,
    CHANGES,
    KINDS,
    LOADS,
    MOVES,
    OPTIONS,
    SAVES,
    Block,
    Program,
    Statement,
    draw,
    make_world_size,
    smaller,
    statements,
)
from pool import Failure, Pool, RankFailure
from program_machine import run_seeds

import flatshard

CHUNK = 25
"""Draws per test: a test's overhead is larger than a draw's."""
TIMEOUT = 20.0
MAX_FAILURES = 3
"""Failing draws after which a chunk gives up."""
MINIMISING = 120.0
"""Seconds that a failing program is made shorter for."""

OPEN: set[int] = set()
"""Draws that fail, and are left out of longer runs; ``--fuzz 1 --fuzz-seed N`` shows one."""

ran: Counter[str] = Counter()
"""What the machine did, in this process."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" not in metafunc.fixturenames:
        return
    first, count = metafunc.config.getoption("--fuzz-seed"), metafunc.config.getoption("--fuzz")
    params = []
    for world_size in range(1, 5):
        wanted = [seed for seed in range(first, first + count) if seed not in OPEN or count == 1]
        seeds = [seed for seed in wanted if make_world_size(seed) == world_size]
        for start in range(0, len(seeds), CHUNK):
            chunk = seeds[start : start + CHUNK]
            params.append(pytest.param(world_size, chunk, id=f"world{world_size}-seeds{chunk[0]}to{chunk[-1]}"))
    metafunc.parametrize(("world_size", "seeds"), params)


@pytest.mark.time_limit(600)
def test_random_programs_do_as_in_one_process(pool, world_size, seeds, request):
    failures = []
    while seeds and len(failures) < MAX_FAILURES:
        try:
            counts = pool.run(run_seeds, [draw(seed) for seed in seeds], world_size=world_size, timeout=TIMEOUT)
            ran.update(counts[0])
            break
        except RankFailure as e:
            noted = re.match(r"seed (\d+)", e.failures[0].note)
            if noted is None:
                raise  # not a program's failure: a file does not import, or the pool is broken
            seed = int(noted.group(1))
            program, error = draw(seed), e
            if request.config.getoption("--minimise"):
                program, error = minimise(lambda p: failure(pool, p), program, e)
            command = f"python -m pytest test/fuzz --fuzz 1 --fuzz-seed {seed} --minimise"
            failures.append(f"{command}\n{program}\n{program!r}\n{error}")
            seeds = seeds[seeds.index(seed) + 1 :]
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)


# -- shorter programs --------------------------------------------------------------------------------------------------


def failure(pool: Pool, program: Program) -> RankFailure | None:
    try:
        pool.run(run_seeds, [program], world_size=program.world_size, timeout=TIMEOUT)
    except RankFailure as e:
        return e
    return None


def _kind(error: RankFailure) -> tuple[str, str, str]:
    """Of failures that are alike: without numbers and names of parameters."""
    first = error.failures[0]
    text = re.sub(r"\d[-\d.e]*|'\S*'|(body|front|head|scale)\S*", "#", first.message)
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


FAILED = Failure(0, "raised", "", "AssertionError", "m0 has no gradient")


def test_minimising_finds_the_shortest():
    program = next(p for p in map(draw, range(100)) if {"Step", "Summon"} <= _kinds(p))

    def fails(p: Program) -> RankFailure | None:
        return RankFailure("", [FAILED]) if {"Step", "Summon"} <= _kinds(p) else None

    shortest, _ = minimise(fails, program, RankFailure("", [FAILED]))
    assert _kinds(shortest) == {"Step", "Summon"}
    assert len(list(statements(shortest.body))) == 2
    assert eval(repr(shortest), vars(__import__("fuzz_programs")) | {"inf": float("inf")}) == shortest


def _kinds(program: Program) -> set[str]:
    return {type(s).__name__ for s in statements(program.body)}


def test_a_program_depends_on_its_seed_only():
    for seed in range(20):
        assert draw(seed) == draw(seed)
        assert draw(seed).world_size == make_world_size(seed)
        assert str(draw(seed)).startswith(f"# seed {seed}, ")


# -- what is drawn -----------------------------------------------------------------------------------------------------

VERBS = {name: f"ask {name}" for name in ASKED} | {
    "fully_shard": "sharding strategy FULL_SHARD",
    "configure": "configure",
    "recover": "recover",
    "reduce_gradients": "reduce",
    "reshard": "reshard",
    "unshard": "unshard",
    "summon_full_params": "summon",
    "keep_unsharded": "keep",
    "no_sync": "nosync",
    "skip": "forward left_out",
    "register_forward_method": "forward method",
    "clip_grad_norm_": "clip flatshard",
    "save_checkpoint": "restart job",
    "load_checkpoint": "restart job",
    "Reader": "restart dcp",
    "Writer": "restart dcp",
    "flat_parameters": "optimizer flat",
    "WholeParameterOptimizer": "optimizer whole",
    "OffloadedOptimizer": "optimizer offloaded",
    "CustomPolicy": "sharding policy custom",
    "BackwardPrefetch": "sharding backward_prefetch",
    "CPUOffload": "sharding cpu_offload",
    "MixedPrecision": "sharding param_dtype",
    "builtin_collectives": "sharding collectives",
    "register_comm_hook": "sharding hook",
    "bf16_compress_hook": "hook bf16",
    "fp16_compress_hook": "hook fp16",
    "full_state_dict": "save full",
    "iter_full_params": "save stream",
    "export_safetensors": "save files",
    "local_state_dict": "save local",
    "load_local_state_dict": "load local",
    "load_optim_state_dict": "load optim",
    "apply_changed_params": "ask iter_changed_params",
    "SentParams": "ask iter_changed_params",
    "register_gradients_reduced_hook": "backward hook",
    "reshard_over": "reshardover",
}
"""The row of each public name that a program calls."""
OTHERS = {
    *("CollectiveError", "InternalError", "OutOfStepError", "MeetingError", "ShardingStrategy"),
    *("ChangedParams", "ShardedValue", "GradientStatistics", "ShardInfo", "ShardedGradient", "ShardedParameter"),
    *("Description", "FlatDescription", "UnitDescription", "Collectives", "DefaultCollectives", "GlooCollectives"),
    *("Pending", "CommHookHandle", "CommHookState"),
    "QuantizedCollectives",  # with an error of their own: comm/test_quantized.py
    *("sync_buffers", "steps_parts"),  # not drawn yet: features/test_buffers.py, integrations/test_trainer.py
    *("step_in_backward", "BackwardSteps"),  # not drawn yet: optim/test_offload.py
    *("fit", "Fit"),  # plans, which are drawn: planning/test_fit.py
    *("Job", "World", "LostError", "OutError"),  # ranks that die: elastic/
    *("offload", "Offloaded"),  # on CPU it moves nothing: accelerator/offload.py
}
"""Types, errors, and what has no equal in one process."""


def rows_of(program: Program) -> Counter[str]:
    """What a program has, by name."""
    found: Counter[str] = Counter()
    model, text = program.model, repr(program.model.tree)
    found.update(f"module {name}" for name in LEAVES + CONTAINERS + TOP + FORMS if f"'{name}'" in text)
    found.update([f"front {model.front}", f"output {model.output}", f"optimizer {program.optimizer}"])
    found.update(f"model {name}" for name in ("ties", "float32") if getattr(model, name))
    found.update([f"world {program.world_size}", f"restarted over {program.elsewhere} ranks"])
    found[f"optimizer first {program.optimizer_first}"] += 1
    found[f"models {program.models}"] += 1
    for sharding in program.shardings:
        found.update(f"sharding {f.name}" for f in FIELDS if getattr(sharding, f.name) != f.default)
        found[f"sharding policy {sharding.policy[0]}"] += 1
        for name in ("strategy", "start", "mesh", "layout", "reshard_after_forward"):
            found[f"sharding {name} {getattr(sharding, name)}"] += 1
        found[f"hook {sharding.hook}"] += 1
    for s in statements(program.body):
        verb = type(s).__name__.lower()
        details = [
            getattr(s, name, None) for name in ("kind", "option", "what", "how", "whose", "guard", "raises", "to")
        ]
        found.update([verb, *(f"{verb} {detail}" for detail in details if isinstance(detail, str))])
        if hasattr(s, "place"):
            found[f"{verb} on {s.place.kind}"] += 1
        if isinstance(bomb := getattr(s, "bomb", None), object) and bomb:
            found[f"bomb {bomb.error} {bomb.when} {bomb.where}"] += 1
        flags = ("left_out", "method", "retain", "hook", "is_eval", "inf", "scheduled", "mode")
        found.update(f"{verb} {name}" for name in flags if getattr(s, name, None))
        found.update(f"summon {name}" for name, _ in getattr(s, "options", ()))
    return found


FIELDS = dataclasses.fields(Sharding)


def wanted() -> list[str]:
    """Every row."""
    rows = [f"module {name}" for name in LEAVES + CONTAINERS + TOP + FORMS]
    rows += [f"sharding {field.name}" for field in FIELDS]
    rows += [f"sharding policy {p}" for p in dict.fromkeys(POLICIES)]
    rows += [f"sharding strategy {s}" for s in dict.fromkeys(STRATEGIES)] + [f"sharding start {s}" for s in STARTS]
    rows += [f"sharding mesh {m}" for m in ((1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2))]
    rows += [f"sharding layout {name}" for name in ("rows", "pairs", "blocks", "whole", "mixed")]
    rows += [f"sharding reshard_after_forward {value}" for value in (None, True, False, 2)]
    rows += [f"front {f}" for f in ("none", "embedding", "frozen", "tied")] + ["model ties", "model float32"]
    rows += [f"output {o}" for o in ("tensor", "tuple", "dict")] + [f"world {n}" for n in range(1, 5)]
    rows += [f"optimizer {o}" for o in ("sgd", "adamw", "flat", "whole", "offloaded", "first True", "first False")]
    rows += [f"restarted over {r} ranks" for r in ("same", "alone", "half")] + ["models 1", "models 2"]
    classes: set[type[Any]] = {c for base in (Statement, Block) for c in base.__subclasses__()} - {Block}
    for each in sorted(classes, key=lambda c: c.__name__):
        verb, names = each.__name__.lower(), {field.name for field in dataclasses.fields(each)}
        kinds = ("root",) if verb == "forward" else KINDS
        rows += [verb, *([f"{verb} on {kind}" for kind in kinds] if "place" in names else [])]
    rows += (
        [f"ask {what}" for what in ASKED] + [f"save {kind}" for kind in SAVES] + [f"change {how}" for how in CHANGES]
    )
    rows += [f"load {kind}" for kind in LOADS]
    rows += [f"configure {option}" for option in OPTIONS] + [f"restart {how}" for how in ("job", "dcp", "full")]
    rows += [f"reshardover {to}" for to in MOVES]
    rows += [f"evaluate {guard}" for guard in ("no_grad", "inference_mode", "is_eval")]
    rows += [f"clip {whose}" for whose in ("torch", "flatshard")] + ["scaled inf", "restart scheduled"]
    rows += [f"forward {name}" for name in ("left_out", "method", "mode")] + ["backward retain", "backward hook"]
    errors = ("ValueError", "KeyboardInterrupt")
    rows += [
        f"bomb {e} {w} {at}" for e in errors for w in ("forward", "backward", "hook") for at in ("before", "after")
    ]
    rows += [f"{block} {e}" for e in errors for block in ("nosync", "keep", "summon")]
    rows += [f"summon {o}" for o in ("writeback", "rank0_only", "offload_to_cpu", "with_grads", "recurse")]
    return list(dict.fromkeys([*rows, *VERBS.values()]))


def test_all_is_drawn_and_every_public_verb_is():
    packages = [
        flatshard,
        *(getattr(flatshard, n) for n in ("checkpoint", "comm", "debug", "elastic", "optim", "tensors")),
    ]
    names = {name for package in packages for name in package.__all__} - set(VERBS) - OTHERS
    unknown = {name for name in names if not isinstance(getattr(flatshard, name, None), type(pytest))}
    assert not unknown, f"a program should call them: {unknown}"
    drawn = sum((rows_of(draw(seed)) for seed in range(200)), Counter())
    print(f"{'drawn in 200 programs':<50}{'times':>6}")
    print("\n".join(f"{row:<50}{drawn[row]:>6}" for row in wanted()))
    assert [row for row in wanted() if not drawn[row]] == []


def test_all_was_done(request):
    """By the programs above, in this process: what was drawn may have had nothing to act on."""
    done: Counter[str] = Counter()
    for key, count in ran.items():
        verb, kind, outcome = key.split(" | ")
        done[verb.split(" ")[0] + f" on {kind}", outcome] += count
        done[verb, outcome] += count
    rows = sorted({row for row, _ in done})
    print(f"{'verb':<50}{'done':>8}{'refused':>8}{'left out':>9}")
    print("\n".join(f"{r:<50}{done[r, 'done']:>8}{done[r, 'refused']:>8}{done[r, 'left out']:>9}" for r in rows))
    if sum(done.values()) and request.config.getoption("--fuzz") >= 200:
        verbs = {each.__name__.lower() for base in (Statement, Block) for each in base.__subclasses__()} - {"block"}
        never = {"forward on inner", "evaluate on inner"}  # without their unit's forward they have parts
        tried = [r for r in rows if done[r, "left out"] >= 20 and r not in never]
        missing = [r for r in tried if not done[r, "done"] + done[r, "refused"]]
        missing += sorted(v for v in verbs if not any(done[r, "done"] for r in rows if r.split(" ")[0] == v))
        assert missing == []
