"""Messages of ranks over a process group's store, with every kind of store in torch."""

import pickle
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

import flatshard
from flatshard._comm.payloads import encode
from flatshard._comm.progress import Label
from flatshard._comm.rendezvous import Rendezvous
from flatshard._handle.reduction import Unused
from flatshard.checkpoint._barrier import Barrier


class Scales(nn.Module):
    """Parameters of which each rank holds one, or a shard of one."""

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
    """Parameters unused on all ranks have no gradient, checkpoints are complete, ranks out of step are described."""
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
        ranks[rank].begin([1], [torch.float32])
        ranks[rank].publish(runtime, Label("unit", 8))
    for unused in ranks:
        unused.read_published(types.SimpleNamespace(wait=lambda: None))
        assert unused.found == {1}


def store_of(kind: str, path: str) -> Any:
    if kind == "tcp":
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.FileStore(path, 1) if kind == "file" else dist.HashStore()
    return dist.PrefixStore("a/b", store) if kind == "prefix" else store


@pytest.mark.parametrize("kind", ["tcp", "file", "hash", "prefix"])
def test_keys_are_read_without_a_wait(kind: str, tmp_path: Path) -> None:
    """Removed keys and long values are read, too."""
    store = store_of(kind, str(tmp_path / "store"))
    keys, others = Rendezvous(store, "here/"), Rendezvous(store, "there/")
    began = time.monotonic()
    assert (keys.read("a"), keys.take("a"), keys.count("n"), keys.has("a")) == (None, None, 0, False)
    assert keys.missing(["a", "b"]) == ["a", "b"]
    long = ["x" * 1000] * 3000
    for value in (None, 1, "1", [1, (2, {"a": (3.5, b"4"), 5: torch.int8})], long):
        keys.put("a", value)
        assert (others.read("a"), keys.has("a/2")) == (None, value is long)
        assert keys.read("a") == keys.take("a") == value
        assert keys.missing(["a", "a/0", "a/1", "a/2"]) == ["a", "a/0", "a/1", "a/2"]
    assert keys.propose("b", [1]) == keys.propose("b", [2]) == keys.read("b") == [1]
    assert (keys.add("n", 2), keys.add("n", -1), keys.count("n")) == (2, 1, 1)
    assert time.monotonic() - began < 5
    assert keys.await_all(["b", "n"], 5)
    assert not keys.await_all(["b", "lacks"], 0.05)
    keys.remove("b")
    assert not keys.has("b")


def test_nothing_in_a_store_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    store = dist.HashStore()
    for data in (pickle.dumps(Evil()), b'{"Path": "x"}', b'{"dtype": "Tensor"}', b"[" * 10**5, b'{"a": 1, "b": 2}'):
        store.set("flatshard/barrier/at/1", data)
        with pytest.raises(
            flatshard.RankError, match="save: the store, or another rank, holds data that this version did"
        ):
            Barrier(store, 0, range(2), "save", 5).__enter__()
    assert not (tmp_path / "executed").exists()
    with pytest.raises(TypeError, match="values of type object cannot be sent to other ranks"):
        encode([object()])
