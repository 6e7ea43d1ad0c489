"""The core trains without the features: with all of their files gone, and with each one left out."""

import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from gpt import GPT, Block, GPTConfig
from test_structure import CORE, PACKAGE, TREES, package_of

from flatshard import fully_shard
from flatshard._composable import extensions

CONFIG = GPTConfig(vocabulary=11, context=5, layers=2, width=8, heads=2)


def batch(rank: int, world_size: int, step: int) -> torch.Tensor:
    """(2, 5) tokens of one rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CONFIG.vocabulary, (2 * world_size, CONFIG.context), generator=generator)[2 * rank :][:2]


def train(model: torch.nn.Module, rank: int, world_size: int) -> None:
    """Three steps, of the ranks' part of the batch; ``world_size`` 1: of all of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens = batch(rank, world_size, step) if world_size > 1 else torch.cat([batch(r, 2, step) for r in range(2)])
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(group: torch.distributed.ProcessGroup | None, rank: int, world_size: int, shard=fully_shard) -> None:
    """Sharded training is training in one process."""
    model = make()
    shard(model, policy={Block}, process_group=group)
    train(model, rank, world_size)
    torch.testing.assert_close(model(batch(0, 2, 7)).detach(), reference())


def make() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


@functools.cache
def reference() -> torch.Tensor:
    """What the model gives that one process has trained."""
    model = make()
    train(model, 0, 1)
    return model(batch(0, 2, 7)).detach()


# -- all of them -------------------------------------------------------------------------------------------------------

CORE_ALONE = (
    '"""The core."""\n\nfrom flatshard._composable.fully_shard import fully_shard\n\n__all__ = ["fully_shard"]\n'
)

SCRIPT = """
import os, sys
import torch._dynamo, torch.distributed as dist
import flatshard
from alone import check

absent = [m for m in sys.modules if m.startswith("flatshard.") and m.removeprefix("flatshard.") not in {core!r}]
assert not absent, absent
other = os.fork()  # a rank that need not import torch again
dist.init_process_group("gloo", init_method="file://{store}", rank=int(other == 0), world_size=2)
check(None, dist.get_rank(), 2, flatshard.fully_shard)
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def core_modules() -> set[str]:
    return {name for name in TREES if package_of(name) in CORE}


def test_the_core_alone(tmp_path):
    """No file of a feature or a product is there, and none is missed."""
    kept = core_modules()
    for name in kept:
        file = PACKAGE / (name.replace(".", "/") + ".py")
        file = file if file.exists() else PACKAGE / name.replace(".", "/") / "__init__.py"
        to = tmp_path / "flatshard" / file.relative_to(PACKAGE)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    (tmp_path / "flatshard" / "__init__.py").write_text(CORE_ALONE)
    here = Path(__file__)
    # The body of this file, without what imports the tests' own rules.
    body = here.read_text().partition("# -- all of them")[0]
    lines = [line for line in body.splitlines() if not line.startswith("from test_structure")]
    text = "\n".join(lines).replace("from flatshard import fully_shard", "fully_shard = None")
    (tmp_path / "alone.py").write_text(text.replace("from flatshard._composable import extensions", ""))
    paths = os.pathsep.join([str(tmp_path), str(here.parents[2] / "benchmarks")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = SCRIPT.format(core=sorted(kept), store=tmp_path / "store")
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


# What features are about. Identifiers only: docstrings may say where a fact is used.
OF_FEATURES = (
    *("inner_shard", "anchor", "skip", "pass_by", "ran_inside", "summon", "keep_unsharded", "no_sync", "escape"),
    *("not_sharded", "late_tie", "layerdrop", "layer_drop", "callback", "quantized", "functorch", "dynamo"),
)


def identifiers(tree: ast.AST) -> set[str]:
    fields = ("id", "attr", "arg", "name", "asname")
    return {name for node in ast.walk(tree) for f in fields if isinstance(name := getattr(node, f, None), str)}


def test_the_core_names_no_feature():
    core = [name for name in core_modules() if name.startswith(("_composable", "_handle", "_runtime"))]
    found = {(name, i) for name in core for i in identifiers(TREES[name])}
    assert {(name, i) for name, i in found if any(word in i.lower() for word in OF_FEATURES)} == {
        ("_composable.backward", "callback"),  # of autograd's engine
        ("_composable.backward", "queue_callback"),
    }


# -- each of them ------------------------------------------------------------------------------------------------------


def without_each(ctx) -> None:
    everything = list(extensions.extensions())
    try:
        for left_out in everything:
            extensions._extensions[:] = [each for each in everything if each is not left_out]
            check(ctx.group, ctx.rank, ctx.world_size)
    finally:
        extensions._extensions[:] = everything


def test_each_feature_left_out(pool):
    pool.run(without_each)
