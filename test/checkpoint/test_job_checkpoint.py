"""save_checkpoint and load_checkpoint: a whole job, resumed by any number of ranks; what goes wrong does so on all ranks."""

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from saving import make
from torch import Tensor, nn

from flatshard import ShardingStrategy, fully_shard, load_checkpoint, save_checkpoint
from flatshard.checkpoint import MeetingError, Writer, full_state_dict, optim_state_dict
from flatshard.checkpoint._disk import METADATA

FULL = ShardingStrategy.FULL_SHARD


class Job:
    """A model with what trains it."""

    def __init__(self, group: Any, seed: int = 0, strategy: ShardingStrategy = FULL) -> None:
        self.group, self.model = group, make(seed).double()
        self.model.frozen.data = self.model.frozen.data.bfloat16()
        fully_shard(self.model, policy={nn.Linear}, process_group=group, strategy=strategy)
        params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0}], lr=0.01
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(self.step)).double()
            self.model(x).square().mean().backward()  # the same rows on all ranks
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step}

    def save(self, path: Path, **options: Any) -> Any:
        return save_checkpoint(path, self.state(), process_group=self.group, **options)

    def load(self, path: Path, **options: Any) -> None:
        self.step = load_checkpoint(path, self.state(), process_group=self.group, **options)["step"]

    def values(self) -> dict[str, Tensor]:
        """Everything in whole."""
        optim = optim_state_dict(self.model, self.optimizer, full=True)
        return {
            **full_state_dict(self.model),
            **{f"{n}.{k}": v for n, s in optim["state"].items() for k, v in s.items()},
        }


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0.0) -> None:
    assert {n: v.dtype for n, v in got.items()} == {n: v.dtype for n, v in expected.items()}
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol / 1e3)


# -- Saved and resumed ------------------------------------------------------------------------------------------------


Values = dict[str, Tensor]


def save(ctx, path: str, strategy: ShardingStrategy) -> tuple[Values, Values]:
    """What is saved, and what comes of two more steps."""
    job = Job(ctx.group, strategy=strategy)
    job.train(3)
    job.save(Path(path))
    saved = job.values()
    job.train(2)
    return saved, job.values()


def resume(ctx, path: str, saved: Values, then: Values, strategy: ShardingStrategy) -> None:
    """By another number of ranks, sharded otherwise: the same values, and the same two steps."""
    job = Job(ctx.group, 1, strategy)
    places = {n: p.data_ptr() for n, p in job.model.named_parameters()}
    job.load(Path(path))
    assert {n: p.data_ptr() for n, p in job.model.named_parameters()} == places
    assert job.step == job.scheduler.last_epoch == 3
    assert_same(job.values(), saved)
    job.train(2)
    assert_same(job.values(), then, rtol=1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [((FULL, 4), (FULL, 3)), ((ShardingStrategy.NO_SHARD, 3), (ShardingStrategy.SHARD_GRAD_OP, 2))],
    ids=str,
)
def test_resumed_by_another_number_of_ranks(pool, tmp_path, before, after):
    path = str(tmp_path / "checkpoint")
    expected = pool.run(save, path, before[0], world_size=before[1])[0]
    pool.run(resume, path, *expected, after[0], world_size=after[1])


@ranks(3)
def test_of_what_is_not_sharded_rank_0s_is_saved(ctx: Any, path: str) -> None:
    """Not one tensor of one rank, the next of another."""
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    fully_shard(model, process_group=ctx.group)
    for buffer in model.buffers():
        buffer.fill_(ctx.rank)
    state = {"model": model, "numbers": [torch.full((n,), ctx.rank) for n in range(1, 6)], "own": ctx.rank}
    save_checkpoint(path, state, process_group=ctx.group)
    for buffer in model.buffers():
        buffer.fill_(9)
    loaded = load_checkpoint(path, state, process_group=ctx.group)
    found = dict(model.named_buffers()) | {f"number {n}": number for n, number in enumerate(loaded["numbers"])}
    assert not [name for name, value in found.items() if value.any()]
    assert loaded["own"] == 0


# -- What goes wrong: on all ranks, and nothing is changed ------------------------------------------------------------


@contextlib.contextmanager
def unchanged(job: Job, pattern: str):
    """An error on all ranks, and the job as it was: it trains on."""
    before = job.values()
    with expect(pattern):
        yield
    assert_same(job.values(), before)
    job.train(1)


def expect(pattern: str) -> Any:
    return pytest.raises(MeetingError, match=pattern)


@ranks(3)
def test_failed_saves(ctx, path: str) -> None:
    at, other = Path(path) / "checkpoint", Path(path) / "other"
    job = Job(ctx.group)
    job.train(1)
    job.save(at)
    saved = job.values()
    other.mkdir(exist_ok=True)
    with unchanged(job, r"save_checkpoint.*FileExistsError: .*checkpoint' exists: .*overwrite=True"):
        job.save(at)
    for state, to, pattern in (
        (job.state(), other, r"exists and is no checkpoint"),
        ({"optimizer": job.optimizer}, at, r"optimizer 'optimizer' steps parameters of no module"),
        ({"a.b": 1}, at, r"a name with a dot"),
    ):
        with expect(pattern):
            save_checkpoint(to, state, overwrite=True, process_group=ctx.group)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(Writer, "write", mock.Mock(side_effect=OSError(28, "No space left")))
        for wait in (True, False):
            with unchanged(job, r"rank 1: OSError: .*No space left"):
                job.save(at, overwrite=True, wait=wait).result()
    job.load(at)
    assert_same(job.values(), saved)
    job.save(at, overwrite=True)
    dist.barrier(ctx.group)
    assert sorted(p.name for p in Path(path).iterdir()) == ["checkpoint", "other"]  # nothing is left of the attempts


@ranks(3)
def test_what_is_not_in_a_checkpoint_stays(ctx, path: str) -> None:
    """An optimizer's state included."""
    job = Job(ctx.group)
    job.train(2)
    save_checkpoint(path, {"model": job.model}, process_group=ctx.group)
    saved = job.values()
    with torch.no_grad():
        for param in job.model.parameters():
            param.zero_()
    state = {"model": job.model, "optimizer": job.optimizer, "step": 5}
    with expect(r"not in the checkpoint: .*'optimizer"):
        load_checkpoint(path, state, process_group=ctx.group)
    assert load_checkpoint(path, state, strict=False, process_group=ctx.group)["step"] == 5
    assert_same(job.values(), saved)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@ranks(2)
def test_damaged_checkpoints(ctx, path: str) -> None:
    at, job = Path(path), Job(ctx.group)
    job.train(1)
    job.save(at)
    metadata, largest = (at / METADATA).read_bytes(), max(at.glob("*.distcp"), key=lambda f: f.stat().st_size)
    data = largest.read_bytes()
    other = make().double()
    other.up, other.added = nn.Linear(6, 7).double(), nn.Linear(2, 2)
    fully_shard(other, process_group=ctx.group)
    lacks, extra = r"not in the checkpoint: ", {"extra": torch.ones(2)}
    changed = rf"{lacks}'model.added.weight', 'model.added.bias'.*'model.up.weight' has shape \(7, 5\) in the"
    for state, change, pattern in (
        (job.state() | extra, bool, rf"{lacks}'extra'; it was saved with 'model'"),
        ({"net": job.model}, bool, rf"{lacks}'net'; it was saved with 'model', 'optimizer', 'scheduler', 'step'"),
        ({"model": other}, bool, changed),
        ({}, lambda: os.truncate(largest, len(data) // 2), r"the checkpoint are incomplete: .*distcp' \(\d+ of"),
        ({}, largest.unlink, r"files of the checkpoint are incomplete: .*distcp' \(missing\)"),
        (job.state() | extra, lambda: largest.write_bytes(data), lacks),
        ({}, lambda: (at / METADATA).write_bytes(metadata[:100]), r"cannot be read: pickle data was truncated"),
        ({}, lambda: (at / METADATA).write_bytes(pickle.dumps(Evil())), r"checkpoint's metadata names posix\.system"),
        ({}, (at / METADATA).unlink, r"is no checkpoint: it has no \.metadata, so a save that did not end"),
    ):
        dist.barrier(ctx.group)
        if ctx.rank == 0:
            change()
        dist.barrier(ctx.group)
        with unchanged(job, pattern):
            load_checkpoint(at, state or job.state(), process_group=ctx.group)
