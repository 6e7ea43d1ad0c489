"""Checkpoints in stores: the promises of a disk, without its rename, and with requests that fail."""

import contextlib
import datetime
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import METADATA, Four, expect, four, patched, same, step, values
from on_ranks import ranks
from parity import everybody
from saving import MemoryWatch, on_four, read_safetensors, same_tensors
from torch import nn

import flatshard
from flatshard import fully_shard, load_checkpoint, save_checkpoint
from flatshard.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    RankError,
    _store,
    export_safetensors,
    load_safetensors,
)
from flatshard.checkpoint._location import locate

pytest.importorskip("fsspec")
from object_store import ObjectStore

LOST = ConnectionResetError("lost")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_store, "_WAITS", (0.0, 0.0, 0.0))
    monkeypatch.setattr(ObjectStore, "fault", None)
    ObjectStore.requests.clear()


def state_of(value: float) -> dict[str, Any]:
    torch.manual_seed(int(value))
    model = Four(value)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "step": value}


def exported(path: Any) -> None:
    export_safetensors(Four(), path)


def saved_value(path: str) -> float:
    """Load, and return which state is saved there."""
    state = state_of(0.0)
    found = load_checkpoint(path, state)["step"]
    expected = state_of(found)
    assert same(
        values(state["model"], state["optimizer"]),
        values(expected["model"], expected["optimizer"]),
    )
    return found


# -- what works --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["memory", "objects", "file"])
def test_a_store_is_like_a_disk(tmp_path, scheme):
    """A checkpoint is saved, replaced if told, read by torch's reader, listed and removed."""
    root = f"{scheme}://{tmp_path}"
    path = f"{root}/a"
    with expect("not found"):
        load_checkpoint(path, {"step": 0})
    save_checkpoint(path, state_of(1.0))
    assert saved_value(path) == 1.0
    with expect("exists: choose another path, or pass overwrite=True"):
        save_checkpoint(path, state_of(2.0))
    assert saved_value(path) == 1.0
    save_checkpoint(path, state_of(2.0), overwrite=True)
    assert saved_value(path) == 2.0
    plain = {"model": Four(0.0).state_dict()}
    dcp.load(plain, storage_reader=FileSystemReader(path), no_dist=True)
    assert same(list(plain["model"].values()), values(state_of(2.0)["model"]))
    at = locate(root, "test")
    at.child("b").remove()  # is not there
    save_checkpoint(f"{root}/b", {"step": 1})
    assert sorted(at.checkpoints()) == ["a", "b"]
    if scheme == "file":
        (tmp_path / ".a.removed" / "of a process that died").mkdir(parents=True)
    at.child("a").remove()
    assert list(at.checkpoints()) == ["b"]
    with expect("not found"):
        load_checkpoint(path, {"step": 0})


def test_torchs_reader_reads_it(tmp_path):
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    save_checkpoint(Path("memory://torch/x"), state_of(3.0))  # `Path` leaves one slash
    plain = {"model": Four(0.0).state_dict()}
    dcp.load(plain, storage_reader=FsspecReader("memory://torch/x"), no_dist=True)
    assert same(list(plain["model"].values()), values(state_of(3.0)["model"]))


def test_files_of_a_replaced_save_are_removed(tmp_path):
    path = f"objects://{tmp_path}/x"
    for value in (1.0, 2.0):
        save_checkpoint(path, state_of(value), overwrite=True)
        (folder,) = (p for p in (tmp_path / "x").iterdir() if p.name != METADATA)
        assert [p.name for p in folder.iterdir()] == ["__0_0.distcp"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "data").write_text("of the user")
    with expect("exists and is no checkpoint: it is not replaced"):
        save_checkpoint(f"objects://{tmp_path}/other", state_of(1.0), overwrite=True)


def test_only_ranges_are_read(tmp_path, monkeypatch):
    """A load reads the bytes that it needs, and a little ahead, with few requests."""
    monkeypatch.setattr(_store, "_AHEAD", 2**16)
    path = f"objects://{tmp_path}/x"
    small = {str(i): torch.full((64,), float(i)) for i in range(50)}
    save_checkpoint(path, {"large": torch.zeros(2**20), "small": small})
    ObjectStore.requests.clear()
    loaded = load_checkpoint(path, {"small": {name: torch.zeros(64) for name in small}})["small"]
    assert all(map(torch.equal, loaded.values(), small.values()))
    reads = [nbytes for kind, at, nbytes in ObjectStore.requests if kind == "read" and METADATA not in at]
    assert sum(reads) <= 4 * 2**16
    assert len(reads) <= 4  # verified, and read


def test_without_the_library(monkeypatch):
    with (
        pytest.raises(
            ImportError, match=r"save_checkpoint: 's3://b/x' is in a store.*pip install 'flatshard\[stores\]'"
        ),
        patched(sys, "modules", {**sys.modules, "fsspec.core": None}),
    ):
        save_checkpoint("s3://b/x", {"step": 1})
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        load_checkpoint("nowhere://b/x", {"step": 1})


@pytest.mark.parametrize("verb", [save_checkpoint, load_checkpoint, FileSystemReader, FileSystemWriter, exported])
def test_chains_of_urls_are_refused(tmp_path, monkeypatch, verb):
    """A chain is no local path either, and no folder of its name is made."""
    monkeypatch.chdir(tmp_path)
    for chain in ("simplecache::memory://x", "zip://a/b::memory://x", Path("filecache::memory://x")):
        with pytest.raises(ValueError, match=r"is a chain of URLs. Name the store itself, 'memory:/+x'"):
            verb(chain, **({"state": {"step": 1}} if verb in (save_checkpoint, load_checkpoint) else {}))
    assert not list(tmp_path.iterdir())


# -- requests that fail ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Raised when the process is killed: none of its later requests happens."""


class Faults:
    """Requests with a failing one: once, from it on, or the process dies there."""

    def __init__(self, at: int, how: str) -> None:
        self.count, self.at, self.how = 0, at, how

    def __call__(self, kind: str, path: str) -> None:
        self.count += 1
        if self.count > self.at and self.how == "killed":
            raise Killed
        if self.count > self.at and (self.how == "down" or self.count == self.at + 1):
            raise LOST


@pytest.mark.parametrize("how", ["killed", "down", "once"])
def test_a_save_at_every_request(tmp_path, monkeypatch, how):
    """A request fails once, all fail from then on, or the process is killed: a load finds the old or the new state."""
    monkeypatch.setattr(_store, "PART", 512)
    path = f"objects://{tmp_path}/x"
    new = state_of(2.0)
    for at in itertools.count():
        save_checkpoint(path, state_of(1.0), overwrite=True)
        faults = Faults(at, how)
        outcome = contextlib.nullcontext() if how == "once" else contextlib.suppress(Killed, RuntimeError)
        with patched(ObjectStore, "fault", staticmethod(faults)), outcome:
            save_checkpoint(path, new, overwrite=True)
        assert saved_value(path) in ((2.0,) if how == "once" or faults.count <= at else (1.0, 2.0))
        if faults.count <= at:
            break
    assert at > 10
    assert len(list((tmp_path / "x").iterdir())) == 2  # the metadata, and the folder of the last save


def test_a_load_at_every_request(tmp_path, monkeypatch):
    """A lost connection is cured by another request, short reads are continued, and a store that is down is named."""
    path = f"objects://{tmp_path}/x"
    save_checkpoint(path, state_of(1.0))
    for at in itertools.count():
        faults = Faults(at, "once")
        with patched(ObjectStore, "fault", staticmethod(faults)):
            assert saved_value(path) == 1.0
        if faults.count <= at:
            break
    with patched(ObjectStore, "fault", staticmethod(lambda kind, path: 1000 if METADATA not in path else None)):
        assert saved_value(path) == 1.0
    state = state_of(5.0)
    before = values(state["model"], state["optimizer"])
    down = staticmethod(Faults(6, "down"))
    with (
        patched(ObjectStore, "fault", down),
        expect("distcp: failed 4 times, the last time by ConnectionResetError: lost"),
    ):
        load_checkpoint(path, state)
    assert same(values(state["model"], state["optimizer"]), before)


def test_how_long_it_waits(tmp_path, monkeypatch, caplog):
    monkeypatch.undo()
    sleep = mock.Mock()
    with patched(_store.time, "sleep", sleep), patched(ObjectStore, "fault", staticmethod(Faults(0, "down"))):
        with pytest.raises(OSError, match="failed 4 times"):
            locate(f"objects://{tmp_path}/x", "test").begin(False)
        assert [call.args[0] for call in sleep.call_args_list] == [1, 2, 4]
        assert "begins again in 4 s, after ConnectionResetError: lost" in caplog.text
    sleep.reset_mock()
    denied = staticmethod(mock.Mock(side_effect=PermissionError("denied")))
    with patched(_store.time, "sleep", sleep), patched(ObjectStore, "fault", denied), expect("PermissionError: denied"):
        save_checkpoint(f"objects://{tmp_path}/x", {"step": 1})
    assert not sleep.called


def test_damage_is_named(tmp_path):
    path = f"objects://{tmp_path}/x"
    save_checkpoint(path, state_of(1.0))
    (file,) = (tmp_path / "x").glob("save-*/*.distcp")
    data = bytearray(file.read_bytes())
    data[::8] = bytes(len(data[::8]))
    file.write_bytes(data)
    with expect("files of the checkpoint are damaged: '.* do not have their sum"):
        load_checkpoint(path, state_of(0.0))
    file.write_bytes(data[:-100])
    with expect("files of the checkpoint are incomplete: 'save-"):
        load_checkpoint(path, state_of(0.0))
    with pytest.raises(ValueError, match="names a file outside of its directory"):
        locate(path, "test").folder().version("../secret")
    (tmp_path / "x" / METADATA).unlink()
    with expect("is no checkpoint: it has no .metadata, so a save that did not end wrote it"):
        load_checkpoint(path, state_of(0.0))


def test_a_file_that_is_cut_off(tmp_path):
    """No read waits for bytes that the store does not have."""
    path = f"objects://{tmp_path}/x"
    save_checkpoint(path, state_of(1.0))
    empty = staticmethod(lambda kind, at: 0 if at.endswith("distcp") else None)
    with patched(ObjectStore, "fault", empty), expect("distcp has been cut off while it was read"):
        load_checkpoint(path, state_of(0.0))


def test_removed_by_its_metadata(tmp_path):
    """A removal that fails at any request leaves a checkpoint, or none."""
    path = f"objects://{tmp_path}/x"
    for at in range(4):
        save_checkpoint(path, state_of(1.0), overwrite=True)
        with patched(ObjectStore, "fault", staticmethod(Faults(at, "killed"))), contextlib.suppress(Killed):
            locate(path, "test").remove()
        if (tmp_path / "x" / METADATA).exists():
            assert saved_value(path) == 1.0
    assert not (tmp_path / "x").exists()


def test_a_save_that_dies_first(tmp_path):
    """Files of a dead save are no checkpoint, and the next save needs no overwrite=True."""
    path = f"objects://{tmp_path}/x"
    with patched(ObjectStore, "fault", staticmethod(Faults(4, "killed"))), contextlib.suppress(Killed):
        save_checkpoint(path, state_of(1.0))
    assert (tmp_path / "x" / ".saving").exists()
    save_checkpoint(path, state_of(2.0))
    assert saved_value(path) == 2.0


def test_two_saves_to_one_path(tmp_path):
    """The save that began last is kept, and the other one fails."""
    path = f"objects://{tmp_path}/x"
    began: list[int] = []

    def late(kind: str, at: str) -> None:
        if kind == "complete" and not began:
            began.append(1)
            save_checkpoint(path, state_of(2.0), overwrite=True)

    with patched(ObjectStore, "fault", staticmethod(late)), expect("another save to '.*/x' has begun: two jobs"):
        save_checkpoint(path, state_of(1.0))
    assert saved_value(path) == 2.0


def test_progress_is_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(_store, "PART", 512)
    path, seen = f"objects://{tmp_path}/x", []
    began: list[int] = []

    def once(kind: str, at: str) -> None:
        if kind == "part" and not began:
            began.append(1)
            raise LOST

    with patched(ObjectStore, "fault", staticmethod(once)):
        save_checkpoint(path, {"x": torch.zeros(1000)}, progress=lambda done, total: seen.append((done, total)))
    assert began
    gc.collect()  # no finalizer uploads what was given up
    assert seen[-1] == (4000, 4000)
    assert len([r for r in ObjectStore.requests if r[0] == "complete"]) == 1
    assert [r for r in ObjectStore.requests if r[0] == "discard"]


def test_a_stream_that_cannot_be_marked_closed(monkeypatch, caplog):
    """Streams of some stores have a ``closed`` of their own, and what they hold is given up all the same."""
    from fsspec.implementations.memory import MemoryFile

    attempts: list[int] = []

    def write(self: Any, data: Any, write: Any = MemoryFile.write) -> int:
        attempts.append(len(data))
        if len(attempts) == 2:
            raise LOST
        return write(self, data)

    monkeypatch.setattr(MemoryFile, "write", write)
    path = "memory://closed/x"
    save_checkpoint(path, state_of(1.0))
    assert f"after {type(LOST).__name__}: {LOST}" in caplog.text
    assert attempts.count(attempts[0]) > 1
    assert saved_value(path) == 1.0
    (folder,) = (name for name in locate(path, "test").names() if name != METADATA)
    assert locate(f"{path}/{folder}", "test").names() == ["__0_0.distcp"]


# -- memory, and saves in the background -------------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
def test_parts_bound_the_memory(tmp_path, monkeypatch, async_op):
    """A save holds two parts at most beside the state, and in the background one copy of it."""
    monkeypatch.setattr(_store, "PART", 2**18)
    state = {"x": {str(i): torch.ones(2**20) for i in range(4)}}
    upload = mock.Mock()  # keeps no part, as a server elsewhere
    sized = lambda self, final=False: upload(len(self.buffer.getbuffer()))  # noqa: E731
    monkeypatch.setattr("object_store.Upload._upload_chunk", sized)
    save_checkpoint(tmp_path / "first", {"x": torch.ones(2)})  # imports
    tracemalloc.start()
    try:
        with MemoryWatch() as watch:
            save_checkpoint(f"objects://{tmp_path}/x", state, async_op=async_op).result()
        assert tracemalloc.get_traced_memory()[1] <= 3 * 2**18 + 2**20
    finally:
        tracemalloc.stop()
    assert watch.peak <= 2**24 * async_op + 2**19  # and sums of blocks
    sizes = [call.args[0] for call in upload.call_args_list]
    assert sum(sizes) >= 2**24
    assert max(sizes) < 2 * 2**18


@ranks(2)
def test_one_copy_of_the_shards(ctx, path: str) -> None:
    """Saves in the background hold one copy of a rank's shards together: each waits for the one before."""
    model = fully_shard(nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)]), process_group=ctx.group)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    own = 3 * sum(p.nbytes for p in model.parameters())
    for scheme in ("file", "objects"):
        with MemoryWatch() as watch:
            saves = [
                save_checkpoint(
                    f"{scheme}://{path}/{scheme}{i}",
                    {"model": model, "optimizer": optimizer},
                    async_op=True,
                    process_group=ctx.group,
                )
                for i in range(3)
            ]
            [save.result() for save in saves]
        assert own <= watch.peak <= own * 1.1


def test_a_save_in_the_background(tmp_path):
    """It has the state at the call, in one copy. The next save waits for it. An error is raised by its result."""
    path, state = f"objects://{tmp_path}", {"x": torch.zeros(1000)}
    goes_on, order = threading.Event(), []

    def slow(kind: str, at: str) -> None:
        if kind == "complete":
            assert goes_on.wait(20)
            order.append(Path(at).parts[-3])

    with patched(ObjectStore, "fault", staticmethod(slow)):
        first = save_checkpoint(f"{path}/1", state, async_op=True)
        state["x"].fill_(1)
        assert not first.done()
        threading.Timer(0.2, goes_on.set).start()
        second = save_checkpoint(f"{path}/2", state, async_op=True)
        assert first.done()
        second.result()
    assert order == ["1", "2"]
    for name in (1, 2):
        assert load_checkpoint(f"{path}/{name}", {"x": torch.zeros(1000)})["x"].unique().tolist() == [name - 1]
    with patched(ObjectStore, "fault", staticmethod(Faults(4, "down"))):
        failed = save_checkpoint(f"{path}/3", state, async_op=True)
        with expect("failed 4 times"):
            failed.result()


AT_THE_END = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import torch
import flatshard
from object_store import ObjectStore

def fault(kind, path):
    if kind == "complete":
        time.sleep(0.5)
        ThreadPoolExecutor(1).submit(int).result()

ObjectStore.fault = fault
flatshard.save_checkpoint(sys.argv[1], {"x": torch.ones(3)}, async_op=True)
"""


def test_a_save_when_the_process_ends(tmp_path):
    """The process waits for it while libraries of stores can still give work to threads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    path = f"objects://{tmp_path}/x"
    subprocess.run([sys.executable, "-c", AT_THE_END, path], env=environment, check=True, timeout=60)
    assert load_checkpoint(path, {"x": torch.zeros(3)})["x"].tolist() == [1, 1, 1]


# -- several ranks -----------------------------------------------------------------------------------------------------


@ranks(3)
def test_ranks_upload_in_parallel(ctx, path: str) -> None:
    """Three ranks save in parallel, and load together or alone. If a rank's store fails, all raise."""
    url = f"objects://{path}/x"
    model = four(ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    ObjectStore.requests.clear()
    save_checkpoint(url, {"m": model, "o": optimizer}, process_group=ctx.group)
    written = {Path(at).name for kind, at, _ in ObjectStore.requests if kind == "complete"}
    assert written == {f"__{ctx.rank}_0.distcp"}
    expected = values(model, optimizer)
    step(model, optimizer)
    load_checkpoint(url, {"m": model, "o": optimizer}, process_group=ctx.group)
    assert same(values(model, optimizer), expected)
    full = flatshard.checkpoint.full_state_dict(model)
    if ctx.rank == 0:  # a job of one process reads what three have written
        plain, alone = Four(0.0), dist.new_group([0], use_local_synchronization=True)
        load_checkpoint(url, {"m": plain}, process_group=alone)
        assert same(values(plain), list(full.values()))
    for failing in (0, 2):
        down = staticmethod(Faults(1, "down")) if ctx.rank == failing else None
        with (
            patched(_store, "_WAITS", (0.0,)),
            patched(ObjectStore, "fault", down),
            expect("failed 2 times"),
        ):
            save_checkpoint(url, {"m": model, "o": optimizer}, overwrite=True, process_group=ctx.group)
        dist.barrier(ctx.group)
        nn.init.zeros_(next(model.parameters()))
        load_checkpoint(url, {"m": model, "o": optimizer}, process_group=ctx.group)
        assert same(values(model, optimizer), expected)


@ranks(2)
def test_slow_parts_are_waited_for(ctx, path: str) -> None:
    """A rank whose upload takes longer than ranks wait for each other is alive."""

    def slow(kind: str, at: str) -> None:
        if kind == "complete" and ctx.rank == 1:
            time.sleep(1.5)

    state = {"model": fully_shard(nn.Linear(30, 30), process_group=ctx.group)}
    with patched(ObjectStore, "fault", staticmethod(slow)):
        save_checkpoint(f"objects://{path}/x", state, process_group=ctx.group, timeout=datetime.timedelta(seconds=1))


def read_exported(folder: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """Return what the files have, which are those that their index names."""
    index = json.loads((folder / f"{name}.safetensors.index.json").read_text())["weight_map"]
    assert {p.name for p in folder.glob("*.safetensors")} == set(index.values())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index.values())):
        values = read_safetensors(folder / file)
        assert all(index[key] == file for key in values)
        found |= values
    return found


@ranks(4)
def test_an_export_to_a_store(ctx, path: str) -> None:
    """Each rank uploads other files, and every byte is written once. A cast, replicas and tensor parallelism work."""
    for how, strategy in (("plain", None), ("replicas", None), ("tp", flatshard.ShardingStrategy.FULL_SHARD)):
        model = on_four(ctx, how, 1, strategy)
        model.register_buffer("count", torch.full((3,), float(ctx.rank)))  # rank 0's is exported
        expected = flatshard.checkpoint.full_state_dict(model, dtype=torch.bfloat16)
        expected["count"].zero_()
        url = f"objects://{path}/{how}"
        ObjectStore.requests.clear()
        export_safetensors(model, url, dtype=torch.bfloat16, max_file_bytes=20)
        uploads = everybody(ctx, [Path(at).name for kind, at, _ in ObjectStore.requests if kind == "complete"])
        same_tensors(read_exported(Path(path, how)), expected)
        files = sorted(p.name for p in Path(path, how).glob("*.safetensors"))
        if how == "tp":  # files without tensor-parallel parameters come from all ranks of its mesh
            assert sorted({name for names in uploads for name in names}) == files
        else:
            assert sorted(name for names in uploads for name in names) == files
            assert all(uploads)
        with expect("already: give an empty directory"):
            export_safetensors(model, url, dtype=torch.bfloat16, max_file_bytes=20)
        assert sorted(p.name for p in Path(path, how).glob("*.safetensors")) == files
    export_safetensors(model, f"objects://{path}/one")  # one file, and no index
    assert [p.name for p in Path(path, "one").iterdir()] == ["model.safetensors"]
    group = dist.new_group([ctx.rank], use_local_synchronization=True)
    alone = fully_shard(nn.Linear(9, 3), process_group=group)
    expected = flatshard.checkpoint.full_state_dict(alone)
    export_safetensors(alone, "memory://exported", max_file_bytes=20)
    torch.nn.init.zeros_(alone.weight)
    load_safetensors(alone, "memory://exported", process_group=group)
    same_tensors(flatshard.checkpoint.full_state_dict(alone), expected)


@ranks(2)
def test_an_export_whose_upload_fails(ctx, path: str) -> None:
    """All ranks raise, and there is no index and no file. A request that fails once is made again."""
    model = fully_shard(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), policy={nn.Linear}, process_group=ctx.group
    )
    expected = flatshard.checkpoint.full_state_dict(model)
    folder, url = Path(path, "x"), f"objects://{path}/x"
    for rank, kind, at in (
        (0, "complete", 0),
        (0, "complete", 1),
        (1, "complete", 0),
        (1, "complete", 1),
        (0, "write", 0),
    ):
        count = itertools.count()

        def down(each: str, _: str, kind: str = kind, at: int = at, count: Any = count) -> None:
            if each == kind and next(count) >= at:  # the only write is that of the index
                raise LOST

        fault = staticmethod(down) if ctx.rank == rank else None
        with (
            patched(_store, "_WAITS", (0.0,)),
            patched(ObjectStore, "fault", fault),
            expect(f"rank {rank}: OSError: .*failed 2 times, the last time by ConnectionResetError: lost"),
        ):
            export_safetensors(model, url, max_file_bytes=200)
        dist.barrier(ctx.group)
        assert not folder.exists()
        dist.barrier(ctx.group)
    once = staticmethod(Faults(3 + ctx.rank, "once"))
    with patched(_store, "_WAITS", (0.0,)), patched(ObjectStore, "fault", once):
        export_safetensors(model, url, max_file_bytes=200)
    same_tensors(read_exported(folder), expected)


@ranks(2)
def test_safetensors_in_a_store(ctx, path: str) -> None:
    """A rank reads the ranges of its shards. A store that is down changes nothing on any rank."""
    layers = [nn.Linear(64, 64) for _ in range(6)]
    model = fully_shard(nn.Sequential(*layers), policy={nn.Linear}, process_group=ctx.group)
    expected = flatshard.checkpoint.full_state_dict(model)
    export_safetensors(model, path, max_file_bytes=40_000)
    url = f"objects://{path}"

    def zero() -> None:
        for p in model.parameters():
            nn.init.zeros_(p)

    def check(expected: Any) -> None:
        found = flatshard.checkpoint.full_state_dict(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    with patched(_store, "_AHEAD", 1024):
        zero()
        ObjectStore.requests.clear()
        load_safetensors(model, url, process_group=ctx.group)
        check(expected)
        own = sum(p.nbytes for p in model.parameters())
        # A header's request asks for more bytes than these files have.
        read = [nbytes for kind, at, nbytes in ObjectStore.requests if kind == "read" and nbytes < 2**15]
        assert own <= sum(read) <= 1.5 * own + 20_000, "and headers"
        for at in range(0, 40, 5):
            zero()
            with patched(_store, "_WAITS", (0.0,)), patched(ObjectStore, "fault", staticmethod(Faults(at, "once"))):
                load_safetensors(model, url, process_group=ctx.group)
            check(expected)
        zero()
        down = staticmethod(Faults(4, "down")) if ctx.rank == 1 else None
        with patched(_store, "_WAITS", (0.0,)), patched(ObjectStore, "fault", down), expect("rank 1: .*failed 2 times"):
            load_safetensors(model, url, process_group=ctx.group)
        check({name: torch.zeros_like(value) for name, value in expected.items()})
    for wrong in (f"{url}/nothing", f"objects://{path}-nothing"):
        with pytest.raises(RankError, match="is no folder, or has no files"):
            load_safetensors(model, wrong, process_group=ctx.group)
