"""Checkpoints are copied between disks and stores, completely or not at all."""

import contextlib
import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import expect, four, patched, same, step, values
from on_ranks import ranks

from flatshard import load_checkpoint, save_checkpoint
from flatshard.checkpoint import _store, copy_checkpoint
from flatshard.checkpoint._location import locate

pytest.importorskip("fsspec")
from object_store import ObjectStore


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(_store, "_WAITS", (0.0,))
    monkeypatch.setattr(ObjectStore, "fault", None)


def saved(path: str) -> int:
    found = load_checkpoint(path, {"x": torch.zeros(1000), "step": 0})
    assert found["x"].unique().tolist() == [found["step"]]
    return found["step"]


def test_from_anywhere_to_anywhere(tmp_path):
    """A disk, two stores, and back. What is there is replaced only if told."""
    save_checkpoint(tmp_path / "a", {"x": torch.ones(1000), "step": 1})
    save_checkpoint(tmp_path / "b", {"x": torch.full((1000,), 2.0), "step": 2})
    ways = [tmp_path / "a", f"objects://{tmp_path}/c", f"memory://{tmp_path}/d", tmp_path / "e"]
    seen = []
    for source, target in itertools.pairwise(ways):
        copy_checkpoint(source, target, progress=lambda done, total: seen.append((done, total)))
        assert saved(target) == 1
        with expect("exists: choose another path, or pass overwrite=True"):
            copy_checkpoint(tmp_path / "b", target)
        assert saved(target) == 1
    assert seen[-1][0] == seen[-1][1] >= 4000
    for target in ways[1:]:
        copy_checkpoint(tmp_path / "b", target, overwrite=True)
        assert saved(target) == 2
    with expect("not found"):
        copy_checkpoint(tmp_path / "nothing", tmp_path / "f")
    os.remove(next((tmp_path / "a").glob("*.distcp")))
    with expect("files of the checkpoint are missing: __0_0.distcp"):
        copy_checkpoint(tmp_path / "a", tmp_path / "f")
    assert not (tmp_path / "f").exists()


class Killed(BaseException):
    """Raised when the process is killed: none of its later requests happens."""


@pytest.mark.parametrize("how", ["killed", "down", "once"])
def test_an_upload_at_every_request(tmp_path, monkeypatch, how):
    """The store has the old or the new state, and another call uploads what the disk has."""
    monkeypatch.setattr(_store, "PART", 2048)
    target = f"objects://{tmp_path}/x"
    save_checkpoint(tmp_path / "new", {"x": torch.full((1000,), 2.0), "step": 2})
    for at in itertools.count():
        save_checkpoint(target, {"x": torch.ones(1000), "step": 1}, overwrite=True)
        count = itertools.count()

        def fault(kind: str, path: str, at: int = at, count=count) -> None:
            number = next(count)
            if number >= at and how == "killed":
                raise Killed
            if number == at or (number > at and how == "down"):
                raise ConnectionResetError("lost")

        outcome = contextlib.nullcontext() if how == "once" else contextlib.suppress(Killed, RuntimeError)
        with patched(ObjectStore, "fault", staticmethod(fault)), outcome:
            copy_checkpoint(tmp_path / "new", target, overwrite=True)
        ended = next(count) <= at
        assert saved(target) in ((2,) if how == "once" or ended else (1, 2))
        copy_checkpoint(tmp_path / "new", target, overwrite=True)
        assert saved(target) == 2
        if ended:
            break
    assert at > 5


@ranks(3)
def test_ranks_copy_files_of_more_ranks(ctx, path: str) -> None:
    """A rank copies some of the files. If one fails, all raise, and nothing is left."""
    model = four(ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    state = {"m": model, "o": optimizer}
    save_checkpoint(f"{path}/a", state, process_group=ctx.group)
    expected = values(model, optimizer)
    url = f"objects://{path}/b"

    def fault(kind: str, path: str) -> None:
        if kind == "complete":
            raise ConnectionResetError("lost")

    with (
        patched(ObjectStore, "fault", staticmethod(fault), ctx.rank == 1),
        patched(_store, "_WAITS", (0.0,)),
        expect("rank 1: .*ConnectionResetError: lost"),
    ):
        copy_checkpoint(f"{path}/a", url, process_group=ctx.group)
    dist.barrier(ctx.group)
    assert not locate(url, "test").names()  # ranks 0 and 2 had written files
    ObjectStore.requests.clear()
    copy_checkpoint(f"{path}/a", url, process_group=ctx.group)
    written = {Path(at).name for kind, at, _ in ObjectStore.requests if kind == "complete"}
    assert written == {f"__{ctx.rank}_0.distcp"}
    step(model, optimizer)
    load_checkpoint(url, state, process_group=ctx.group)
    assert same(values(model, optimizer), expected)
