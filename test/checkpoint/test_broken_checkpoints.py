"""Saves and loads that fail at any point: earlier checkpoints stay, nothing changes, and the error names the cause."""

import contextlib
import datetime
import errno
import functools
import hashlib
import itertools
import logging
import os
import pickle
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pairs
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import FULL, METADATA, Four, bytes_of, expect, four, patched, same, step, values
from on_ranks import ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from flatshard import fully_shard, load_checkpoint, save_checkpoint
from flatshard.checkpoint import (
    FileSystemReader,
    RankError,
    _container,
    _disk,
    _job,
    _metadata,
    _writer,
)

# -- A failing load changes nothing ------------------------------------------------------------------------------------


class Refuses:
    """An object that takes its state and then raises, if ``refuses``."""

    def __init__(self, value: int, refuses: bool) -> None:
        self.value, self.refuses = value, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuses and self.value == 1:
            raise KeyError("not this one")


@ranks(2)
def test_a_load_that_fails_changes_nothing(ctx, path: str) -> None:
    def stepped(model: nn.Module, first: str, rate: float) -> torch.optim.Optimizer:
        groups = [[p for n, p in model.named_parameters() if (n[0] in first) is inside] for inside in (True, False)]
        made = torch.optim.AdamW([{"params": groups[0], "lr": rate}, {"params": groups[1], "lr": 2 * rate}])
        step(model, made)
        return made

    model, other = four(ctx), four(ctx, 3.0)
    save_checkpoint(path, {"m": model, "o": stepped(model, "ab", 0.1), "s": Refuses(1, False)}, process_group=ctx.group)
    for first, pattern in (
        ("ac", "one group here, saved with other options"),
        ("ab", "rank 1: KeyError: 'not this one'"),
    ):
        optimizer, refuses = stepped(other, first, 0.3), Refuses(2, ctx.rank == 1)
        before = values(other, optimizer)
        with expect(pattern):
            load_checkpoint(path, {"m": other, "o": optimizer, "s": refuses}, process_group=ctx.group)
        assert same(values(other, optimizer), before)
        assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.6]
        assert refuses.value == 2
    takes = Refuses(2, False)
    load_checkpoint(path, {"m": other, "o": optimizer, "s": takes}, process_group=ctx.group)
    assert takes.value == 1
    assert not same(values(other, optimizer), before)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]


class Translates(nn.Linear):
    """A module that changes values while loading."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, *args)


class LoadsItself(nn.Linear):
    """A module with a ``load_state_dict`` of its own."""

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(state | {"weight": state["weight"] * 2}, *args, **kwargs)


@pytest.mark.parametrize("kind", [Translates, LoadsItself])
def test_a_module_with_a_say_in_its_loading(tmp_path, kind: type[nn.Linear]):
    saved, module = kind(2, 2), kind(2, 2)
    save_checkpoint(tmp_path / "x", {"m": saved, "s": Refuses(1, False)})
    before = module.weight.detach().clone()
    with expect("not this one"):
        load_checkpoint(tmp_path / "x", {"m": module, "s": Refuses(2, True)})
    assert torch.allclose(module.weight, before * 2)  # restored by loading, which doubles the values
    load_checkpoint(tmp_path / "x", {"m": module})
    assert torch.equal(module.weight, saved.weight * 2)


# -- In the background -------------------------------------------------------------------------------------------------


def test_a_background_save_that_fails_is_known(tmp_path, caplog):
    state = {"m": Four()}
    save = functools.partial(save_checkpoint, state=state, async_op=True)
    with patched(_disk, "write", FULL):
        save(tmp_path / "1")
        with expect("not begun, .* before .* failed in the background: .*No space left on device: '/.*/.1.saving/"):
            save(tmp_path / "2")
        with expect("No space left on device: '/.*__0_0.distcp'"):
            save(tmp_path / "3").result()
        save(tmp_path / "4")
        with expect("not begun, .*save_checkpoint.*/4"):
            load_checkpoint(tmp_path / "x", state)
        save(tmp_path / "5")
        with caplog.at_level(logging.ERROR):
            _job._report()  # at exit
        assert "nobody asked for its result(): save_checkpoint" in caplog.text
    assert list(tmp_path.iterdir()) == []
    saved = save(tmp_path / "6")
    save_checkpoint(tmp_path / "7", state)
    assert saved.done()


@ranks(2)
def test_a_background_save_that_fails_on_one_rank(ctx, path: str) -> None:
    save = functools.partial(save_checkpoint, path, {"m": four(ctx)}, process_group=ctx.group)
    with patched(_disk, "write", FULL, when=ctx.rank == 1):
        save(async_op=True)
        with expect("had failed in the background: .*rank 1: OSError.*No space"):
            save()
        failed = save(async_op=True)
        if ctx.rank == 0:
            assert "rank 1: OSError" in str(failed.exception())
        dist.barrier(ctx.group)
    save()  # one rank knows the error


@ranks(2)
def test_a_background_save_is_the_state_at_the_call(ctx, path: str) -> None:
    """Training continues and other values change during the save, on all ranks."""
    model, create, trained = four(ctx), _disk.create, threading.Event()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    job: dict[str, Any] = {"m": model, "o": optimizer, "seen": {1, 2}, "values": [1], "tensor": torch.ones(3)}
    expected = values(model, optimizer)

    def late(path: Path) -> int:
        assert trained.wait(30)
        return create(path)

    with patched(_disk, "create", late):
        saved = save_checkpoint(path, job, async_op=True, process_group=ctx.group)
        for _ in range(2):
            step(model, optimizer)
        job["seen"].add(3)
        job["values"].append(2)
        job["tensor"].add_(1)
        assert not saved.done()
        trained.set()
        saved.result()
    assert not same(values(model, optimizer), expected)
    found = load_checkpoint(path, job, process_group=ctx.group)
    assert same(values(model, optimizer), expected)
    assert (found["seen"], found["values"], found["tensor"].tolist()) == ({1, 2}, [1], [1.0] * 3)


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    for value in (datetime.timedelta(1), deque([1]), {"at": [datetime.datetime(2020, 1, 1)]}):
        with expect("a load would refuse these, .*'odd.*: .*(timedelta|deque|datetime)"):
            save_checkpoint(tmp_path / "x", {"step": 1, "odd": value})
    for state, message in (
        ({3: 1}, "state has the name 3, which is no string"),
        ({"a.b": 1}, "a name with a dot"),
        ([1], "state must be a dict of what the job consists of, such as .* got a list"),
    ):
        with expect(message):
            save_checkpoint(tmp_path / "x", state)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    with expect("exists and is no checkpoint"):
        save_checkpoint(tmp_path, {"step": 1}, overwrite=True)


def test_a_path_with_a_scheme_is_refused(tmp_path, monkeypatch):
    """Functions that write to no store raise before they write. The cure works: copy a local folder."""
    monkeypatch.chdir(tmp_path)
    state = {"step": 1}
    for path in ("s3://bucket/x", "memory://x", Path("gs://bucket/x"), "file:///x"):
        for verb in (_writer.FileSystemWriter, _writer.FileSystemWriter("x").reset):
            with pytest.raises(ValueError, match=r"is no local path\. Use a local folder, and copy it to the store"):
                verb(path)
    assert list(tmp_path.iterdir()) == []
    save_checkpoint("x", state)
    shutil.copytree("x", "copy")
    assert load_checkpoint("copy", {"step": 0}) == state
    save_checkpoint("./s3:/x", state)  # a folder of that name


# -- Changed files -----------------------------------------------------------------------------------------------------


class Job:
    """A plain model and its optimizer in one process, with a checkpoint of them."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, Four()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer.param_groups[0]["own"] = torch.ones(2)
        self.train()
        self.save()
        self.saved = self.values()

    def train(self) -> None:
        step(self.model, self.optimizer)

    def state(self) -> dict[str, Any]:
        return {"m": self.model, "o": self.optimizer, "step": 1}

    def save(self) -> Any:
        return save_checkpoint(self.path, self.state(), overwrite=True)

    def load(self, **options: Any) -> None:
        load_checkpoint(self.path, self.state(), **options)

    def values(self) -> list[Tensor]:
        return values(self.model, self.optimizer)

    @torch.no_grad()
    def give(self, found: list[Tensor]) -> None:
        own = [*self.model.parameters(), *(v for state in self.optimizer.state.values() for v in state.values())]
        for tensor, value in zip(own, found, strict=True):
            tensor.copy_(value)

    def check_saved(self, expected: list[Tensor] | None = None) -> None:
        self.train()
        self.load()
        assert same(self.values(), self.saved if expected is None else expected)

    def check_refused(self, pattern: str) -> str:
        self.train()
        before = self.values()
        with expect(pattern) as found:
            self.load()
        assert same(self.values(), before)
        return str(found.value)

    @property
    def file(self) -> Path:
        """File of the tensors."""
        (found,) = self.path.glob("*.distcp")
        return found


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path / "job")


def test_what_is_not_in_a_checkpoint(job):
    """Missing entries raise by name. With ``strict=False`` they stay as they are, optimizer state included."""
    other, saved_with = Four(), "it was saved with 'm', 'o', 'step'"
    other.a, other.e = nn.Linear(6, 3), nn.Linear(2, 2)
    for state, pattern in (
        (job.state() | {"extra": torch.ones(2)}, f"'extra'; {saved_with}"),
        ({"net": job.model}, f"'net'; {saved_with}"),
        ({"m": other}, r"'m.a.bias', 'm.e.weight', 'm.e.bias'.*'m.a.weight' has shape \(3, 3\) in the"),
    ):
        with expect(f"not in the checkpoint: {pattern}"):
            load_checkpoint(job.path, state)
    save_checkpoint(job.path, {"m": job.model}, overwrite=True)
    nn.init.zeros_(job.model.a.weight)
    job.check_refused("not in the checkpoint: .*'o")
    job.give([torch.zeros(3, 3)] * 4 + job.saved[4:])
    job.load(strict=False)
    assert same(job.values(), job.saved)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def sealed(change: Callable[[Any], object]) -> Callable[[bytes], bytes]:
    """Return changed metadata with a correct checksum."""

    def of(intact: bytes) -> bytes:
        found = _metadata.read_metadata(intact)
        change(found)
        data = pickle.dumps(found)
        return data + _metadata.seal(data)

    return of


def without_a_place(found: Any) -> None:
    found.storage_data = {i: v for i, v in found.storage_data.items() if i.fqn != "m.a.weight"}


def elsewhere(found: Any) -> None:
    for info in found.storage_data.values():
        info.relative_path = "../elsewhere"


def body(**changes: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        info = next(info for index, info in found.storage_data.items() if index.fqn == "m.a.weight")
        info.flatshard_body = tuple(_metadata.Body(*info.flatshard_body)._replace(**changes))

    return change


DAMAGE: list[tuple[Callable[[bytes], bytes], str]] = [
    (sealed(lambda found: found.state_dict_metadata["m.a.weight"].chunks.clear()), "'m.a.weight' has 0 of 9 elements"),
    (sealed(without_a_place), r"does not say where 'm.a.weight' at \(0, 0\) is"),
    (sealed(body(nbytes=2**45)), "says that an entry lies where none can"),
    (sealed(body(nbytes=36.0)), "says that an entry lies where none can"),
    (sealed(body(start=-8)), "says that an entry lies where none can"),
    (sealed(body(stride=(-3, 1))), "says that an entry lies where none can"),
    (sealed(body(stride=(2**40, 1))), r"has 36 bytes of 'm.a.weight' at \(0, 0\), too few for its shape"),
    (sealed(elsewhere), "names a file outside of its directory"),  # the file exists
    (lambda intact: intact[:100], "cannot be read: pickle data was truncated"),
    (lambda _: pickle.dumps(Evil()), r"checkpoint's metadata names posix\.system"),
]


def test_damage_is_named(job, tmp_path):
    shutil.copy(job.file, tmp_path / "elsewhere")
    metadata = job.path / METADATA
    intact = metadata.read_bytes()
    for change, pattern in DAMAGE:
        metadata.write_bytes(change(intact))
        job.check_refused(pattern)
    metadata.write_bytes(intact)
    os.truncate(job.file, job.file.stat().st_size // 2)
    job.check_refused(r"files of the checkpoint are incomplete: .*distcp' \(\d+ of")
    job.file.unlink()
    job.check_refused(r"files of the checkpoint are incomplete: .*distcp' \(missing\)")
    metadata.unlink()
    job.check_refused(r"is no checkpoint: it has no \.metadata, so a save that did not end")


def test_sums_are_those_of_earlier_checkpoints():
    """Checksums are stable for every size that has its own fastest method, so that old checkpoints stay readable."""
    row, block = _container._COLUMNS * 8, _container.BLOCK
    data = memoryview(random.Random(0).randbytes(block + 3 * row + 5))
    sizes = (0, 1, 7, 8, 12, 255, 256, 257, 264, 2 * row - 1, 2 * row, block - 1, block, len(data))
    found = hashlib.sha256(b"".join(_container.checksums(data[:size]) for size in sizes)).hexdigest()
    assert found == "77dd2487a08cf49547fdb73ce22d6a6a36e264ab21401007e5de0b96bee9d41b"
    assert [_container.checksums(data[:n]).hex() for n in (4, 2**14)] == ["494c28930bb0a35a", "f43d05503bf033b2"]
    entries = [memoryview(bytearray(data[i : i + size])) for i in range(70) for size in sizes[: 10 if i else None]]
    assert _container.checksums_of(entries) == [_container.checksums(entry) for entry in entries]


@pytest.mark.parametrize("is_mapped", [True, False])
def test_large_tensors_are_verified(tmp_path, monkeypatch, is_mapped: bool):
    """Verify several blocks of a tensor at once, and the remainder. Some file systems map no files."""
    if not is_mapped:
        monkeypatch.setattr(_disk.OpenFile, "mapped", lambda *given: None)
    saved = {"a": torch.arange(700_003), "b": torch.arange(256).to(torch.uint8).repeat(2**16 + 4)}
    save_checkpoint(tmp_path / "x", saved)
    (file,) = (tmp_path / "x").glob("*.distcp")
    intact = file.read_bytes()
    target = {n: torch.zeros_like(v) for n, v in saved.items()}
    for name, at in [("a", 5 * 2**20 + 8), ("a", 700_003 * 8 - 1), ("b", 2**24 + 1023)]:
        data = bytearray(intact)
        data[data.index(bytes_of(saved[name])) + at] ^= 1
        file.write_bytes(data)
        with expect(rf"damaged: '{name}' at \(0,\) in '__0_0.distcp' \(its bytes do not have their sum\)$"):
            load_checkpoint(tmp_path / "x", target)
        load_checkpoint(tmp_path / "x", target, verify=False)
    file.write_bytes(intact)
    found = load_checkpoint(tmp_path / "x", target)
    assert all(torch.equal(found[n], v) for n, v in saved.items())


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path):
    saved = {"a": torch.arange(700_003)}
    save_checkpoint(tmp_path / "x", saved)
    (file,) = (tmp_path / "x").glob("*.distcp")
    read = _disk.read

    def late(handle: int, buffer: memoryview, at: int) -> None:
        if at > 2**20:
            os.truncate(file, 2**20)
        read(handle, buffer, at)

    unmapped = patched(_disk.OpenFile, "mapped", lambda *given: None)
    with unmapped, patched(_disk, "read", late), expect("a file of the checkpoint has been cut off while it was read"):
        load_checkpoint(tmp_path / "x", saved)


def test_replaced_while_it_is_read(job, tmp_path):
    """Another job replaces the checkpoint between any two steps of the load."""
    other = Job(tmp_path / "other")
    other.path = job.path
    for owner, name in [
        (FileSystemReader, "check"),
        (FileSystemReader, "read"),
        (_job._Loading, "install"),
        (_job._Loading, "read"),
    ]:
        step = getattr(owner, name)

        def late(self: Any, *args: Any, step: Callable[..., Any] = step) -> Any:
            other.train()
            other.save()
            return step(self, *args)

        with patched(owner, name, late):
            if (owner, name) == (_job._Loading, "read"):
                with expect("some of the state is changed: another save has replaced the checkpoint"):
                    job.load()
            else:
                error = job.check_refused("replaced the checkpoint while it was read: load it again")
                assert "some of the state is changed" not in error
    job.check_saved(other.values())


@ranks(3)
def test_ranks_that_see_different_checkpoints(ctx, path: str) -> None:
    for i in range(2):
        save_checkpoint(f"{path}/{i}", {"x": torch.full((3,), float(i))}, process_group=ctx.group)
    state = {"x": torch.zeros(3)}
    outcome = expect("'rank 1', 'rank 2' found another checkpoint there than rank 0: all must see one file system")
    with patched(_disk, "find", lambda _: Path(path) / str(min(ctx.rank, 1))), outcome:  # simulates disks of two hosts
        load_checkpoint(f"{path}/0", state, process_group=ctx.group)
    assert not state["x"].any()


def mutation(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    at, size = rng.randrange(len(data)), rng.choice([1, 8, 64, 4096])
    end = min(at + size, len(data))
    changed = {
        "flip": data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :],
        "cut": data[:at],
        "zeros": data[:at] + bytes(end - at) + data[end:],
        "moved": data[:at] + data[end:] + data[at:end],
        "twice": data[:end] + data[at:end] + data[end:],
        "random": data[:at] + rng.randbytes(end - at) + data[end:],
    }
    return rng.choice(list(changed.items()))


MUTATIONS = int(os.environ.get("CHECKPOINT_DAMAGE", "150"))


@pytest.mark.time_limit(120 + MUTATIONS // 4)
def test_damaged_files(job):
    """Loads of damaged files raise and change nothing, or are right if no relevant byte was hit."""
    rng = random.Random(int(os.environ.get("CHECKPOINT_SEED", "0")))
    intact = {f: f.read_bytes() for f in (job.file, job.path / METADATA)}
    refused = 0
    for _ in range(MUTATIONS):
        target = rng.choice(list(intact))
        kind, data = mutation(rng, intact[target])
        target.write_bytes(data)
        job.train()
        before, error = job.values(), None
        try:
            job.load()
        except RankError as e:
            error = str(e)
        refused += error is not None
        assert error is None or "checkpoint" in error
        assert same(job.values(), job.saved if error is None else before), (kind, target.name, error)
        assert error or target.name != METADATA or data == intact[target], kind  # every byte of the metadata matters
        target.write_bytes(intact[target])
        job.give(job.saved)  # avoids growing values
    job.check_saved()
    assert 0 < refused < MUTATIONS


def test_damaged_metadata_of_others(job):
    """Metadata of other writers has no checksum, so its contents are checked."""
    model = Four(5.0)
    shutil.rmtree(job.path)
    dcp.save({"m": model.state_dict()}, checkpoint_id=job.path, no_dist=True)
    data = (job.path / METADATA).read_bytes()
    rng = random.Random(1)
    before = values(job.model)
    for _ in range(60):
        at = rng.randrange(len(data))
        changed = rng.choice([data[:at], data + b"x", data.replace(b"m.a.weight", b"m.e.weight")])
        (job.path / METADATA).write_bytes(changed)
        with expect("checkpoint"):
            load_checkpoint(job.path, {"m": job.model})
        assert same(values(job.model), before)
    (job.path / METADATA).write_bytes(data)
    load_checkpoint(job.path, {"m": job.model})
    assert same(values(job.model), values(model))


# -- Saves that die ----------------------------------------------------------------------------------------------------

PIECES = 6 if pairs.thorough else 1  # number of writes for each buffer
STEPS = ("make_directory", "create", "write", "flush", "flush_directory", "rename", "remove")


class Killed(BaseException):
    """Raised when the process is killed: none of its later work happens."""


class Failing:
    """Steps on the disk with a failing one: the process dies there, or the disk raises."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, kill: bool, error: int = errno.EIO, only: str = "") -> None:
        self.count, self.at, self.kill, self.error = 0, at, kill, error
        for name in [only] if only else STEPS:
            patch.setattr(_disk, name, self._failing(name, getattr(_disk, name)))

    def _failing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def write(file: int, buffers: Any) -> None:
            """Write in pieces."""
            for buffer in buffers:
                size = -(-buffer.nbytes // PIECES)
                for i in range(0, buffer.nbytes, size):
                    self._point()
                    function(file, [buffer[i : i + size]])

        def run(*args: Any) -> Any:
            self._point()
            return None if name.startswith("flush") else function(*args)

        return write if name == "write" else run

    def _point(self) -> None:
        self.count += 1
        if self.kill and self.count > self.at:
            raise Killed
        if not self.kill and self.count == self.at + 1:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize(
    "options",
    [{"kill": True}, {"kill": False}, {"kill": False, "error": errno.ENOSPC, "only": "write"}],
    ids=["killed", "fails", "full"],
)
@pytest.mark.time_limit(300)  # a thorough run has hundreds of flushed saves and loads
def test_the_disk_at_every_step(job, caplog, options):
    """The process is killed, or the disk fails or is full, at each step. Every save cleans up after the one before."""
    job.train()
    new = job.values()
    for at in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, at, **options)
            with contextlib.suppress(RankError, Killed):
                job.save()
        assert options["kill"] or job.path.exists()  # put back if it was moved away
        job.train()
        job.load()
        if not job.path.exists():  # the old checkpoint is beside the path, and the next save puts it back
            with expect("exists: choose another path"):
                save_checkpoint(job.path, job.state())
        if same(job.values(), new):  # the new checkpoint was published: start again from the old
            job.give(job.saved)
            job.save()
        else:
            assert same(job.values(), job.saved), at
        job.give(new)
        if failing.count <= at:
            break
    assert failing.count >= (150 if pairs.thorough else 50)
    assert list(job.path.parent.iterdir()) == [job.path]
    assert "only" in options or options["kill"] or "is saved. Left to be cleaned by the next save" in caplog.text


@ranks(2)
def test_published_when_all_is_on_the_disks(ctx, path: str) -> None:
    """Every file of every rank is flushed after its last byte, before anything exists at the path."""
    flush, flushed = _disk.flush, {}

    def late(file: int) -> None:
        time.sleep(0.2 * ctx.rank)
        assert not Path(path).exists()
        flush(file)
        flushed[Path(os.readlink(f"/proc/self/fd/{file}")).name] = os.fstat(file).st_size

    state = {"model": fully_shard(nn.Linear(30, 30), process_group=ctx.group)}  # each rank writes its shard
    with patched(_disk, "flush", late):
        save_checkpoint(path, state, process_group=ctx.group)
    own = [f"__{ctx.rank}_0.distcp", *([METADATA] if ctx.rank == 0 else [])]
    assert flushed == {n + ".tmp" * (n == METADATA): (Path(path) / n).stat().st_size for n in own}


def test_the_disk_begins_before_the_flush(tmp_path, monkeypatch):
    begin = mock.Mock()
    monkeypatch.setattr(os, "posix_fadvise", begin, raising=False)
    monkeypatch.setattr(_disk.sys, "platform", "linux")
    save_checkpoint(tmp_path / "x", {str(i): torch.ones(2**19) for i in range(7)})
    ranges = [call.args[1:3] for call in begin.call_args_list]
    assert len(ranges) == 3
    assert all(start + nbytes == after for (start, nbytes), (after, _) in itertools.pairwise(ranges))


def test_two_jobs_that_save_to_one_path(job, tmp_path):
    other = Job(tmp_path / "other")
    other.path = job.path
    other.train()
    flush = _disk.flush
    began: list[int] = []

    def late(file: int) -> None:
        if not began:
            began.append(1)
            with expect("BlockingIOError: another save to '.*/job' is under way"):
                other.save()
        flush(file)

    job.train()
    expected = job.values()
    with patched(_disk, "flush", late):
        job.save()
    assert began
    job.check_saved(expected)
    other.save()
    job.check_saved(other.values())


def test_overwriting_a_link(job):
    link = job.path.parent / "latest"
    link.symlink_to(job.path.name)
    job.train()
    expected = job.values()
    save_checkpoint(link, job.state(), overwrite=True)
    assert link.is_symlink()
    assert sorted(p.name for p in link.parent.iterdir()) == ["job", "latest"]
    job.check_saved(expected)


def test_new_directories_are_flushed(tmp_path):
    flush = mock.Mock(side_effect=_disk.flush_directory)
    with patched(_disk, "flush_directory", flush):
        save_checkpoint(tmp_path / "a" / "b" / "x", {"step": 1})
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= {call.args[0] for call in flush.call_args_list}


# -- Progress ----------------------------------------------------------------------------------------------------------


def test_a_line_of_long_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_disk, "_EVERY", 0.0)
    state = {"x": {str(i): torch.zeros(2**18) for i in range(4)}}
    saved = save_checkpoint(tmp_path / "x", state)
    assert repr(saved) == f"<Save saved '{tmp_path}/x': 4.00 of 4.00 MiB written by this rank>"
    load_checkpoint(tmp_path / "x", state)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"saving '{tmp_path}/x': 1.00 of 4.00 MiB on rank 0 after 0 s")
    assert [line.split()[0] for line in lines] == ["saving"] * 4 + ["loading"] * 2  # 4 MiB at a time; verified first
    for verify in (True, False):
        at: list[tuple[int, int]] = []
        load_checkpoint(tmp_path / "x", state, progress=lambda *a, to=at: to.append(a), verify=verify)
        assert at == sorted(set(at))
        assert at[-1] == (total := 4 * 2**20 * (1 + verify), total)
    assert capsys.readouterr().err == ""


def test_a_progress_that_raises(tmp_path, caplog):
    """The error is logged once, and does not affect the checkpoint."""
    state = {str(i): torch.ones(2**18) for i in range(9)}
    breaks = mock.Mock(side_effect=[None, BrokenPipeError("gone")])
    save_checkpoint(tmp_path / "x", state, progress=breaks)
    assert "goes on, without progress, which raised" in caplog.text
    found = load_checkpoint(tmp_path / "x", {n: torch.zeros_like(t) for n, t in state.items()})
    assert all(bool(t.all()) for t in found.values())
    assert breaks.call_count == 2


# -- Files by torch's own functions ------------------------------------------------------------------------------------


def test_a_reader_that_is_used_again_looks_again(job):
    reader, state = FileSystemReader(job.path), {"m": job.model.state_dict()}
    dcp.load(state, storage_reader=reader)
    assert same(values(job.model), job.saved[:4])
    data = job.file.read_bytes()
    job.file.write_bytes(data.replace(bytes_of(job.saved[0]), bytes(job.saved[0].nbytes)))
    with pytest.raises(dcp.api.CheckpointException, match=r"files of the checkpoint are damaged: 'm.a.weight'"):
        dcp.load(state, storage_reader=reader)
    assert same(values(job.model), job.saved[:4])


def test_any_dtype(tmp_path):
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.bfloat16):
        path, tensor = tmp_path / str(dtype), torch.arange(300_001).remainder(2).to(dtype)[1:].view(3, -1).t()
        state = {"t": tensor, "none": torch.zeros(0, 2, dtype=dtype), "one": tensor[0, 0], "apart": tensor[::2]}
        save_checkpoint(path, state)
        found = load_checkpoint(path, {n: torch.zeros_like(v) for n, v in state.items()})
        dcp_to_torch_save(path, tmp_path / "x.pt")
        for read in (found, torch.load(tmp_path / "x.pt", weights_only=True)):
            assert {n: bytes_of(v) for n, v in read.items()} == {n: bytes_of(v) for n, v in state.items()}
