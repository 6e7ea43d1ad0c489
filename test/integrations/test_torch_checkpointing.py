"""Checkpoints of torch_checkpointing, which other numbers of ranks load."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import everybody
from saving import make, on_four, shard
from torch import Tensor, nn

from flatshard.checkpoint import full_state_dict

pytestmark = [pytest.mark.clients("torch_checkpointing", "safetensors"), pytest.mark.time_limit(600)]


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def tools(ctx: Any, state: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Return the rank, the metadata manager, the storage, and a checkpoint of ``state``, for the group of a test."""
    from torch_checkpointing import CheckpointBase, CheckpointItem
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    from torch_checkpointing.types import RankInfo

    from flatshard.integrations.torch_checkpointing import ShardResharder

    class Checkpoint(CheckpointBase):
        def get_items(self) -> dict[str, Any]:
            return {key: CheckpointItem(value=value, resharder=ShardResharder()) for key, value in state.items()}

        def load_state_dict(self, loaded: dict[str, Any]) -> None:
            state.update(loaded)

    def gather(self: Any, data: Any, process_group: Any) -> dict[int, Any]:
        return dict(enumerate(everybody(ctx, data)))

    # Its own gather is of tensors on CUDA.
    manager_class = type("OnCPU", (DefaultMetadataManager,), {"_all_gather_pickled_data": gather})
    rank = RankInfo(ctx.rank, ctx.world_size, ctx.rank, ctx.world_size)
    manager = manager_class(rank, process_group=ctx.group)
    return rank, manager, LocalFileSystemStorageConfig(use_direct_io=False), Checkpoint()


def state_of(model: nn.Module, step: int, rate: float) -> dict[str, Any]:
    more = {"step": step, "rates": [rate, torch.tensor(rate)], "average": model.state_dict()["0.weight"].clone()}
    return {"model": model.state_dict(), "more": more}


def make_model(ctx: Any, how: str, seed: int) -> nn.Module:
    if how != "plain":
        return on_four(ctx, how, seed)
    model = make(seed)
    model.add_module("0", nn.Linear(3, 4, bias=False))
    return shard(ctx, model, policy={nn.Linear})


def save(ctx: Any, path: str, how: str) -> dict[str, Tensor]:
    from torch_checkpointing.builder import make_sync_checkpoint_saver
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig

    model, warned = make_model(ctx, how, 1), Warned()
    logging.getLogger("torch_checkpointing").addHandler(warned)
    rank, manager, storage, checkpoint = tools(ctx, state_of(model, 3, 0.5))
    options = {"rank_info": rank, "storage_config": storage, "checkpoint_metadata_manager": manager}
    # No barrier: its keys are those of all groups of the pool. The gather at the end is one.
    config = SyncCheckpointSaverConfig(writer_config=CheckpointWriterConfig(barrier_config=None))
    saver = make_sync_checkpoint_saver(config, **options)
    saver.save(path, checkpoint)
    saver.close()
    assert not [line for line in warned.lines if "replicated" in line]
    return full_state_dict(model)


def load(ctx: Any, path: str, expected: dict[str, Tensor], how: str = "plain") -> None:
    from torch_checkpointing.checkpoint_loader import CheckpointLoader
    from torch_checkpointing.checkpoint_reader import CheckpointReader

    model = make_model(ctx, how, 0)
    state = state_of(model, 0, 0.0)
    rank, manager, storage, checkpoint = tools(ctx, state)
    loader = CheckpointLoader(CheckpointReader(rank_info=rank, storage_config=storage), metadata_manager=manager)
    loader.load(path, checkpoint, strict=True)
    loader.close()
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, expected[name]), name
    more = state["more"]
    assert (more["step"], more["rates"][0], more["rates"][1]) == (3, 0.5, 0.5)
    average = more["average"]  # a plain tensor, if one rank has all of it
    assert torch.equal(average.full_tensor() if hasattr(average, "full_tensor") else average, expected["0.weight"])


def test_any_number_of_ranks(pool: Any, tmp_path: Path):
    """Two ranks save, one and three load, and no warning takes shards for replicated tensors."""
    path = str(tmp_path / "x")
    expected = pool.run(save, path, "plain", world_size=2)[0]
    for world_size in (1, 2, 3):
        pool.run(load, path, expected, world_size=world_size)


def test_tensor_parallelism_and_replicas(pool: Any, tmp_path: Path):
    for how, other in (("tp", "replicas"), ("replicas", "tp")):
        expected = pool.run(save, str(tmp_path / how), how, world_size=4)[0]
        pool.run(load, str(tmp_path / how), expected, other, world_size=4)


def refused(ctx: Any, path: str) -> None:
    """Load a model of another shape, and one from a checkpoint that lacks a rank: nothing is changed."""
    import flatshard
    from flatshard.integrations.torch_checkpointing import Chunks, _plan

    model = nn.Sequential(nn.Linear(3, 4))
    flatshard.fully_shard(model, process_group=ctx.group)
    value = Chunks.of(model.state_dict()["0.weight"])
    assert not value.chunks or value.is_sharded
    other = Chunks((4, 3), "torch.float32", (((0, 0), (1, 3)),), True)
    with pytest.raises(ValueError, match=r"has 0 of .* elements of 'a.b'|has 3 of"):
        list(_plan(("a", "b"), Chunks((4, 3), "torch.float32", (((0, 0), (2, 3)),), True), {0: other}))
    with pytest.raises(ValueError, match=r"'a.b' is \(4, 3\) in the checkpoint, not \(5, 3\)"):
        list(_plan(("a", "b"), Chunks((5, 3), "torch.float32", (((0, 0), (5, 3)),), True), {0: other}))


def test_what_is_missing(pool: Any, tmp_path: Path):
    pool.run(refused, str(tmp_path), world_size=2)
