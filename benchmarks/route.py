"""Follow a training step through the files of a package: calls, files, and how often a reader changes file.

    OMP_NUM_THREADS=1 python benchmarks/route.py                   # flatshard
    OMP_NUM_THREADS=1 python benchmarks/route.py --package fsdp2   # FSDP2 of the installed torch
    OMP_NUM_THREADS=1 python benchmarks/route.py --show forward    # the route itself, function by function

Two ranks train a Sequential of three blocks. The fifth step is recorded: the first ones make things for later, and in the
first four ranks compare the order of their reductions. Counted are Python calls into the package on the main thread. A unit's
forward or backward lasts from its hook to the next unit's. The route ends at a backend's collectives, so they are gloo's own:
payloads in shared memory (``_comm/shared_memory/``) are another page. FSDP2's collectives are those of ``torch.distributed``,
which is not counted. So a unit's figures are also given without ``_comm/``.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkout  # noqa: F401
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import flatshard

ENTRIES = {
    "flatshard": ("UnitHooks.pre_forward", "pre_backward"),
    "fsdp2": ("FSDPState._pre_forward", "FSDPState._pre_backward"),
}
"""The hooks with which a unit's forward and backward begin."""
STEPS = 5
PHASES = ("construct", "forward", "backward", "optimizer", "state_dict")


class Call(NamedTuple):
    """A call into the package."""

    file: str
    function: str


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def shard(model: nn.Module, package: str) -> None:
    if package == "flatshard":
        flatshard.fully_shard(model, policy={Block})
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.children():
            fully_shard(block)
        fully_shard(model)


def root_of(package: str) -> str:
    if package == "flatshard":
        return str(Path(flatshard.__file__).parent)
    import torch.distributed.fsdp._fully_shard as fsdp2

    return str(Path(fsdp2.__file__).parent)


def record(package: str) -> dict[str, list[Call]]:
    """Return the calls of each phase."""
    root, calls = root_of(package), {phase: list[Call]() for phase in PHASES}

    def recorded(phase: str, do: Callable[[], Any]) -> Any:
        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(root):
                calls[phase].append(Call(os.path.relpath(frame.f_code.co_filename, root), frame.f_code.co_qualname))

        calls[phase].clear()
        sys.setprofile(note)
        try:
            return do()
        finally:
            sys.setprofile(None)

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    recorded("construct", lambda: shard(model, package))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 32)
    for _ in range(STEPS):
        loss = recorded("forward", lambda: model(x).square().mean())
        recorded("backward", loss.backward)
        recorded("optimizer", optimizer.step)
        optimizer.zero_grad()
    recorded("state_dict", model.state_dict)
    return calls


def figures(calls: list[Call]) -> tuple[int, int, int]:
    """Return the numbers of calls, of files, and of changes of file."""
    changes = sum(a.file != b.file for a, b in itertools.pairwise(calls))
    return len(calls), len({call.file for call in calls}), changes


def measure(calls: dict[str, list[Call]], package: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the figures of each phase, and the medians of a unit's forward and backward."""
    for phase, entries in calls.items():
        yield phase, figures(entries)
        above = [call for call in entries if not call.file.startswith("_comm/")]
        for entry, (note, counted) in itertools.product(
            ENTRIES[package], {"": entries, ", without _comm": above}.items()
        ):
            starts = [i for i, call in enumerate(counted) if call.function == entry]
            units = [figures(counted[a:b]) for a, b in itertools.pairwise([*starts, len(counted)])]
            if units:
                calls_, files, changes = (int(statistics.median(each)) for each in zip(*units, strict=True))
                yield f"{phase}, a unit{note}", (calls_, files, changes)


def _run(rank: int, store: str, package: str, show: str | None) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    calls = record(package)
    if rank == 0 and show:
        file = ""
        for call in calls[show]:
            if call.file != file:
                file = call.file
                print(file)
            print(f"    {call.function}")
    elif rank == 0:
        print(f"{package}, torch {torch.__version__}: calls, files, changes of file")
        for name, numbers in measure(calls, package):
            print(f'    "{name}": {numbers},')
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=list(ENTRIES), default="flatshard")
    parser.add_argument("--show", choices=PHASES)
    given = parser.parse_args()
    os.environ["FLATSHARD_SHARED_MEMORY"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_run, (f"{folder}/store", given.package, given.show), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
