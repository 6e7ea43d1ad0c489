"""The core trains without the features: with all of their files gone, and with each one left out."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import torch
from gpt import GPT, Block, GPTConfig

from flatshard import fully_shard

CONFIG = GPTConfig(vocabulary=11, context=5, layers=2, width=8, heads=2)


def batch(step: int) -> torch.Tensor:
    """(4, 5) tokens: two rows for each of two ranks."""
    return torch.randint(CONFIG.vocabulary, (4, CONFIG.context), generator=torch.Generator().manual_seed(step))


def train(model: GPT, rows: slice) -> torch.Tensor:
    """Three steps with these rows of the batches; what the model gives then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        tokens = batch(step)[rows]
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(batch(7)).detach()


def make() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


@functools.cache
def reference() -> torch.Tensor:
    return train(make(), slice(None))


def check(group: torch.distributed.ProcessGroup | None, rank: int) -> None:
    """Sharded training by two ranks is training in one process."""
    model = make()
    fully_shard(model, policy={Block}, process_group=group)
    torch.testing.assert_close(train(model, slice(2 * rank, 2 * rank + 2)), reference())


CORE_ALONE = '''"""The core."""

from flatshard._composable.fully_shard import fully_shard

__all__ = ["fully_shard"]
'''

SCRIPT = """
import os, sys
import torch._dynamo, torch.distributed as dist
from test_core_alone import check

absent = [m for m in sys.modules if m.startswith("flatshard.") and m.removeprefix("flatshard.") not in {core!r}]
assert not absent, absent
other = os.fork()  # a rank that need not import torch again
dist.init_process_group("gloo", init_method="file://{store}", rank=int(other == 0), world_size=2)
check(None, dist.get_rank())
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def core_modules() -> dict[str, str]:
    """Their sources."""
    from test_structure import CORE, SOURCES, package_of

    return {name: source for name, source in SOURCES.items() if package_of(name) in CORE}


def test_the_core_alone(tmp_path):
    """No file of a feature or a product is there, and none is missed."""
    core = core_modules()
    for name, source in {"": CORE_ALONE, **core}.items():
        folder = tmp_path / "flatshard" / name.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(source)
    here = Path(__file__)
    paths = os.pathsep.join(map(str, (tmp_path, here.parent, here.parents[2] / "benchmarks")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = SCRIPT.format(core=list(core), store=tmp_path / "store")
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr


def without_each(ctx) -> None:
    from flatshard._composable import extensions

    everything = list(extensions.extensions())
    try:
        for left_out in everything:
            extensions._extensions[:] = [each for each in everything if each is not left_out]
            check(ctx.group, ctx.rank)
    finally:
        extensions._extensions[:] = everything


def test_each_feature_left_out(pool):
    pool.run(without_each)
