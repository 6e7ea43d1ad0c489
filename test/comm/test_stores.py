"""What ranks tell each other by a process group's store, with every kind of store that torch has."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import flatshard
from flatshard._comm.progress import Label
from flatshard._handle.reduction import Unused


class Scales(nn.Module):
    """Parameters of which each rank holds one, or a part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(2) for _ in range(4))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = x * self.scales[index]
        return x


def over_a_store(ctx: Any, kind: str, path: str) -> None:
    if kind == "tcp":
        if ctx.rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            Path(path + ".new").write_text(str(server.port))
            Path(path + ".new").rename(path)
        while not Path(path).exists():
            pass
        store: Any = (
            server if ctx.rank == 0 else dist.TCPStore("127.0.0.1", int(Path(path).read_text()), 2, is_master=False)
        )
    else:
        store = dist.FileStore(path, 2)
    if kind == "prefix":
        store = dist.PrefixStore("a/b", store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=2)
    model = flatshard.fully_shard(Scales())
    for step in range(2):
        model(torch.ones(2), [[0], [1]][ctx.rank] if step else [0]).sum().backward()
        assert [p.grad is not None for p in model.scales] == [True, bool(step), False, False]
        model.zero_grad()
    flatshard.save_checkpoint(path + ".saved", {"model": model})
    flatshard.load_checkpoint(path + ".saved", {"model": model})
    ahead = [flatshard.fully_shard(nn.Linear(2, 2)) for _ in range(2)]
    with pytest.raises(flatshard.OutOfStepError, match="run different units"):
        ahead[ctx.rank](torch.ones(2))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["tcp", "file", "prefix"])
def test_a_job_over_each_store(kind: str, tmp_path: Path) -> None:
    """Parameters that no rank used have no gradient on any; checkpoints are whole; ranks out of step are described."""
    bare = Pool(2, backend=None)
    try:
        bare.run(over_a_store, kind, str(tmp_path / "store"), world_size=2)
    finally:
        bare.close()


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_equal_words_of_two_ranks_are_two(kind: str, tmp_path: Path) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 2)
    layout = types.SimpleNamespace(params=[0, 1], world_size=2, padded_numel=2, holders=lambda i: [i])
    ranks = []
    for rank in range(2):
        runtime: Any = types.SimpleNamespace(
            rank=rank, world_size=2, number=0, store=lambda: store, progress=types.SimpleNamespace(counts={})
        )
        ranks.append(Unused(layout))  # type: ignore[arg-type]
        ranks[rank].begin([1])
        ranks[rank].tell(runtime, Label("unit", 8))
    for unused in ranks:
        unused.ask(types.SimpleNamespace(wait=lambda: None))
        assert unused.found == {1}
