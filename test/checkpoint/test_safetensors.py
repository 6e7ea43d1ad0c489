"""A folder for Hugging Face: what is in the files, who writes them, and what happens when one cannot."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import layers, make, on_four, read_safetensors, same_tensors, shard
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import _safetensors, export_safetensors
from flatshard.layouts import Elements, Rows


def read_folder(path: Path) -> tuple[dict[str, Tensor], int]:
    """By the index, where there is one; and how many files there are."""
    files = sorted(p.name for p in path.iterdir())
    if files == ["model.safetensors"]:
        return read_safetensors(path / files[0]), 1
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert set(files) == {*index["weight_map"].values(), "model.safetensors.index.json"}
    found: dict[str, Tensor] = {}
    for file in files[:-1]:
        assert file.endswith(f"-of-{len(files) - 1:05d}.safetensors")
        content = read_safetensors(path / file)
        assert {n for n, f in index["weight_map"].items() if f == file} == content.keys()
        found |= content
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    return found, len(files) - 1


def check(path: Path, expected: dict[str, Tensor], files: int | None = None) -> None:
    found, count = read_folder(path)
    assert files in (None, count)
    same_tensors(found, expected)


@ranks(3)
def test_files_and_index(ctx, path: str) -> None:
    for number, strategy in enumerate((ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)):
        model = shard(ctx, make(), strategy, {nn.Linear})
        for limit, files in ((10**9, 1), (400, None), (1, len(once()))):
            ctx.note(f"{strategy.name}, {limit}")
            at = Path(path) / f"{number} {limit}"
            export_safetensors(model, at, max_file_bytes=limit, bucket_bytes=1)
            check(at, once(), files)
        at = Path(path) / f"{number} cast"
        export_safetensors(model, at, dtype=torch.bfloat16)
        check(at, {n: v.bfloat16() if v.is_floating_point() else v for n, v in once().items()}, 1)


def once() -> dict[str, Tensor]:
    """Without what is tied to another, which comes first."""
    return {n: v for n, v in make().state_dict().items() if n != "head.weight"}


@ranks(4)
def test_tensor_parallel_modules_and_replicas(ctx, path: str) -> None:
    for how in ("tp", "replicas"):
        export_safetensors(on_four(ctx, how), f"{path}/{how}", max_file_bytes=100)
        if ctx.rank == 0:
            check(Path(path) / how, layers().state_dict())


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@ranks(2)
def test_one_rank_that_cannot_write(ctx, path: str) -> None:
    """Where one rank cannot write, all raise, and no file is left."""
    model = shard(ctx, make(), policy={nn.Linear})
    no_space = r"^export_safetensors: rank 1: OSError: \[Errno 28\] No space left on device$"
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(_safetensors._File, "put", full)
        with pytest.raises(RuntimeError, match=no_space):
            export_safetensors(model, path, max_file_bytes=100)
    dist.barrier(ctx.group)
    assert list(Path(path).iterdir()) == []
    dist.barrier(ctx.group)
    export_safetensors(model, path, max_file_bytes=100)
    before = sorted(p.name for p in Path(path).iterdir())
    with pytest.raises(RuntimeError, match=r"FileExistsError: .* already: give an empty directory"):
        export_safetensors(model, path)
    assert sorted(p.name for p in Path(path).iterdir()) == before
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'odd' is torch.complex64, and the format has 'F64', "):
        export_safetensors(model, f"{path}2")


@ranks(2)
def test_what_torchs_writer_would_lose_is_refused(ctx, path: str) -> None:
    """torch's own writer keeps one box of each name: before it writes anything, it is refused what has several."""
    for layout in (Elements(), Rows()):
        model = nn.Linear(5, 9)  # each rank has rows, and a part of one
        fully_shard(model, layout=layout, process_group=ctx.group)
        at = Path(path) / f"{type(layout).__name__} {ctx.rank}"
        writer = dcp.HuggingFaceStorageWriter(str(at), save_distributed=True)
        if isinstance(layout, Elements):
            with pytest.raises(CheckpointException, match=r"'weight': .* several boxes.*export_safetensors"):
                dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
            assert list(at.glob("*")) == []
        elif importlib.util.find_spec("safetensors"):
            dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
        dcp.save(model.state_dict(), checkpoint_id=at, no_dist=True)  # others keep all of them


def test_the_library_reads_it(world, tmp_path):
    torchs = pytest.importorskip("safetensors.torch")
    world(1)
    export_safetensors(fully_shard(make()), tmp_path, max_file_bytes=400)
    same_tensors({n: v for path in tmp_path.glob("*.safetensors") for n, v in torchs.load_file(path).items()}, once())
