"""Full tensors on one rank or all, a stream and a folder of them, and each rank's shards unchanged."""

import copy
import importlib.util
import io
import itertools
import json
from collections import deque
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from parity import everybody
from saving import (
    CommunicationWatch,
    MemoryWatch,
    by_name,
    check_equal,
    layers,
    make,
    on_four,
    read_safetensors,
    same_tensors,
    shard,
    train,
)
from saving import same as same_optim
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint import (
    _safetensors,
    export_safetensors,
    full_state_dict,
    iter_full_params,
    load_local_state_dict,
    load_optim_state_dict,
    local_state_dict,
    optim_state_dict,
)
from flatshard.layouts import Elements, Rows

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_OPTIM]

WHOLE_ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
CHECK = 1024  # bytes of the ranks' first order check


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert equal tensors in the same order and memory layout."""
    assert list(found) == list(expected)
    same_tensors(found, expected, strides=True)


@ranks(3)
def test_whole_values(ctx) -> None:
    """Get all values at once, or as a stream in the same order on all ranks, possibly of some names."""
    plain = make()
    source, params = plain.state_dict(), {n: p.detach() for n, p in plain.named_parameters()}
    up = {n.removeprefix("up."): v for n, v in source.items() if n.startswith("up.")}
    names = ["head.weight", "ignored", "down.weight", "up.bias"]
    for strategy, policy in itertools.product(STRATEGIES, (None, {nn.Linear})):
        model = shard(ctx, make(), strategy, policy)
        state = full_state_dict(model)
        same(state, source)
        assert state["head.weight"] is state["down.weight"]
        assert type(state) is type(source), "an OrderedDict, by which accelerate knows a model's state"
        assert state._metadata == source._metadata
        addresses = {t.data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()}
        assert not addresses & {t.data_ptr() for t in state.values() if t.numel()}
        same(full_state_dict(model, offload_to_cpu=False, rank0_only=True), source if ctx.rank == 0 else {})
        cast = full_state_dict(model, dtype=torch.float64)
        same(cast, {n: v.double() if v.is_floating_point() else v for n, v in source.items()})
        make(1).load_state_dict(state)
        if policy:
            same(full_state_dict(model.up), up)
        for bucket_bytes in (1, 10**9):
            found = dict(iter_full_params(model, bucket_bytes=bucket_bytes))
            assert everybody(ctx, list(found)) == [list(found)] * 3
            same_tensors(found, params, strides=True)
        some = dict(iter_full_params(model, names=names, dtype=torch.bfloat16))
        same_tensors(some, {n: plain.get_parameter(n).detach().bfloat16() for n in names})
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match=r"full_state_dict: .*Call it outside"):
        full_state_dict(model)
    with pytest.raises(ValueError, match="floating-point dtype or None"):
        full_state_dict(model, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"Model has no parameters 'nothing'"):
        iter_full_params(model, names=["nothing"])


@ranks(2)
def test_peak_memory_of_exports(ctx) -> None:
    """An export needs at most one unit beyond its result. A stream holds one bucket."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    unit, two = flatshard.describe(model).units[1].flats[0].padded_numel * 4, 2 * 64 * 64 * 4
    whole = 6 * 65 * 64 * 4
    here = whole if ctx.rank == 0 else 0
    for export, least, most in (
        (lambda: full_state_dict(model), whole, whole + unit),
        (lambda: full_state_dict(model, rank0_only=True), here, here + unit),
        (lambda: get_model_state_dict(model, options=WHOLE_ON_FIRST), here, here + unit),
        # Two more parameters: the caller's last, and the next.
        (lambda: deque(iter_full_params(model, bucket_bytes=1), 0), unit / 2, unit + two),
        (lambda: deque(iter_full_params(model, bucket_bytes=3 * unit), 0), 3 * unit, 3 * unit + two),
    ):
        with MemoryWatch() as watch:
            found = export()
        assert least <= watch.peak <= most + CHECK
        assert watch.peak > unit / 2  # sees the gathered one
        assert sum(v.nbytes for v in found.values()) == least if isinstance(found, dict) else not found


@ranks(2)
def test_local_state_dict(ctx) -> None:
    source = make(1).state_dict()
    for strategy in STRATEGIES:
        model, other = shard(ctx, make(1), strategy, {nn.Linear}), shard(ctx, make(), strategy)
        model(torch.ones(3, 5))  # left unsharded
        source = {**source, **{n: b.clone() for n, b in model.named_buffers() if n in source}}
        file = io.BytesIO()
        torch.save(local_state_dict(model), file)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        load_local_state_dict(model, loaded)
        check_equal(model, source)
        lacking, damaged = copy.deepcopy(loaded), copy.deepcopy(loaded)
        del lacking["values"]["steps"]
        damaged["values"]["up.weight"] = torch.ones(1)
        cases = [
            (model, {**loaded, "format": 1}, "format 2"),
            (model, lacking, r"nothing has been changed.*\n\tMissing .*'steps'"),
        ]
        if strategy is not ShardingStrategy.NO_SHARD:
            cases.append((other, loaded, "up.weight: it is sharded otherwise than the model"))
            cases.append((model, damaged, "'up.weight' is damaged"))
        for module, state, match in cases:
            with pytest.raises(ValueError, match=match):
                load_local_state_dict(module, state)
        check_equal(model, source)


@ranks(4)
def test_tensor_parallel_modules_and_replicas(ctx, path: str) -> None:
    """Save and load models with tensor parallelism, in replicas, and without either, with optimizer state."""
    plain = layers()
    optimizer = torch.optim.AdamW(plain.parameters())
    train(plain, optimizer)
    source, trained = plain.state_dict(), by_name(plain, optimizer)
    ways = [("tp", strategy) for strategy in STRATEGIES[:2]] + [("replicas", None), ("plain", None)]
    for number, (how, strategy) in enumerate(ways):
        model = on_four(ctx, how, 0, strategy)
        model.load_state_dict(on_four(ctx, how, 2, strategy).state_dict())
        model.load_state_dict(source)
        same(full_state_dict(model), source)
        export_safetensors(model, f"{path}/files {number}", max_file_bytes=100)
        if ctx.rank == 0:
            check(Path(f"{path}/files {number}"), source)
        assert bool(full_state_dict(model, rank0_only=True)) == (ctx.rank == 0)
        optimizer = torch.optim.AdamW(model.parameters())
        load_optim_state_dict(model, optimizer, trained)
        saved = {"model": model.state_dict(), "optim": optim_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=f"{path}/{number}")
        for other in (on_four(ctx, "tp", 1), on_four(ctx, "plain", 1)):
            optimizer = torch.optim.AdamW(other.parameters())
            state = {"model": other.state_dict(), "optim": optim_state_dict(other, optimizer, for_load=True)}
            dcp.load(state, checkpoint_id=f"{path}/{number}")
            same(full_state_dict(other), source)
            load_optim_state_dict(other, optimizer, state["optim"])
            same_optim(optim_state_dict(other, optimizer, full=True), trained)


# -- Files -------------------------------------------------------------------------------------------------------------


def check(path: Path, expected: dict[str, Tensor], count: int | None = None, name: str = "model") -> None:
    """Assert that the files, located by the index if it exists, hold ``expected``. ``count``: their number."""
    files = sorted(p.name for p in path.iterdir())
    if files == [f"{name}.safetensors"]:
        found = read_safetensors(path / files[0])
    else:
        assert files[-1] == f"{name}.safetensors.index.json"
        index = json.loads((path / files.pop()).read_text())
        contents = {file: read_safetensors(path / file) for file in files}
        assert files == [f"{name}-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert index["weight_map"] == {name: file for file, content in contents.items() for name in content}
        found = {name: value for content in contents.values() for name, value in content.items()}
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    same_tensors(found, expected)
    assert count in (None, len(files))


@ranks(3)
def test_files_and_index(ctx, path: str) -> None:
    for number, strategy in enumerate((ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)):
        model = shard(ctx, make(), strategy, {nn.Linear})
        for limit, files in ((10**9, 1), (400, None), (1, len(once()))):
            ctx.note(f"{strategy.name}, {limit}")
            at = Path(path) / f"{number} {limit}"
            export_safetensors(model, at, name="net.fp32", max_file_bytes=limit)
            check(at, once(), files, "net.fp32")
        at = Path(path) / f"{number} cast"
        export_safetensors(model, at, dtype=torch.bfloat16)
        check(at, {n: v.bfloat16() if v.is_floating_point() else v for n, v in once().items()}, 1)


def once() -> dict[str, Tensor]:
    """Return the model's state without tied values after the first."""
    return {n: v for n, v in make().state_dict().items() if n != "head.weight"}


@ranks(2, 3)
def test_each_rank_writes_its_shards(ctx, path: str) -> None:
    """Every byte is written once. Nothing is gathered, and a cast has the rank's shard of one tensor at a time."""
    for dtype, strategy in itertools.product((None, torch.bfloat16), STRATEGIES[:2]):
        plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.BatchNorm1d(64))
        model = fully_shard(plain, policy={nn.Linear}, strategy=strategy, process_group=ctx.group)
        written: list[int] = []

        def write(file: int, buffer: memoryview, at: int, write=disk.write_at, written=written) -> None:
            written.append(len(buffer))
            write(file, buffer, at)

        at = Path(path) / f"{dtype} {strategy.name}"
        with mock.patch.object(disk, "write_at", write), MemoryWatch() as memory, CommunicationWatch() as sent:
            export_safetensors(model, at, dtype=dtype, max_file_bytes=20_000)
        assert not sent.data
        parts = 1 if strategy is ShardingStrategy.NO_SHARD else ctx.world_size
        assert memory.peak <= CHECK + (0 if dtype is None else 64 * 64 * 2 // parts + 64 * 2)
        state = full_state_dict(model, dtype=dtype)
        assert sum(map(sum, everybody(ctx, written))) == sum(value.nbytes for value in state.values())
        assert 1 < len(written) <= 3 * 13, "a shard is a few calls"


STEPS = ("create", "write", "write_at", "flush", "rename")


@ranks(2)
def test_one_rank_that_cannot_write(ctx, path: str) -> None:
    """If one rank cannot write, at whatever step, all raise, and no file is left."""
    model = shard(ctx, make(), policy={nn.Linear})
    for step, rank, number in itertools.product(STEPS, (0, 1), (0, 1)):
        if rank and step in ("create", "write", "rename"):  # only the first rank takes these
            continue
        ctx.note(f"{step} {number} on {rank}")
        outcomes = [mock.DEFAULT] * number + [OSError(28, "No space left on device")] * 9
        failing = mock.Mock(wraps=getattr(disk, step), side_effect=outcomes)
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == rank:
                patch.setattr(disk, step, failing)
            text = rf"^export_safetensors: rank {rank}: OSError: \[Errno 28\] No space left on device"
            with pytest.raises(RuntimeError, match=text):
                export_safetensors(model, path, max_file_bytes=100)
        dist.barrier(ctx.group)
        assert list(Path(path).iterdir()) == []
    dist.barrier(ctx.group)
    elsewhere = f"{path}-{ctx.rank}"
    with pytest.raises(RuntimeError, match=r"rank 1: .*which the first rank has made, is not here: all ranks must see"):
        export_safetensors(model, elsewhere)
    dist.barrier(ctx.group)
    export_safetensors(model, path, max_file_bytes=100)
    before = sorted(p.name for p in Path(path).iterdir())
    for limit in (100, 10**9):  # files of the same names, and others
        with pytest.raises(RuntimeError, match=r"FileExistsError: .* already: give an empty directory"):
            export_safetensors(model, path, max_file_bytes=limit)
        assert sorted(p.name for p in Path(path).iterdir()) == before
    for name in ("", "a/b", ".hidden", "model.safetensors"):
        with pytest.raises(ValueError, match=r"name must be a file's name without a folder and without \.safetensors"):
            export_safetensors(model, f"{path}2", name=name)
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'odd' is torch.complex64, and the format has 'F64', "):
        export_safetensors(model, f"{path}2")


@ranks(2)
def test_what_torchs_writer_would_lose_is_refused(ctx, path: str) -> None:
    """torch's own writer keeps one box per name, so a save of several raises before it writes."""
    for layout in (Elements(), Rows()):
        model = nn.Linear(5, 9)  # each rank has rows and a fraction of one
        fully_shard(model, layout=layout, process_group=ctx.group)
        at = Path(path) / f"{type(layout).__name__} {ctx.rank}"
        writer = dcp.HuggingFaceStorageWriter(str(at), save_distributed=True)
        if isinstance(layout, Elements):
            with pytest.raises(CheckpointException, match=r"'weight': .* several boxes.*export_safetensors"):
                dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
            assert list(at.glob("*")) == []
        elif importlib.util.find_spec("safetensors"):
            dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
        dcp.save(model.state_dict(), checkpoint_id=at, no_dist=True)  # other writers keep all boxes


@ranks(2)
def test_an_export_that_dies(ctx, path: str) -> None:
    """Files of a dead export have hidden names or no index. They are never loaded, and the next export replaces them."""
    model = shard(ctx, make(), policy={nn.Linear})
    for step, text in (("write_at", "has no files"), ("flush_directory", None), ("rename", "and no index")):
        ctx.note(step)
        at = f"{path} {step}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_safetensors._File, "discard", mock.Mock())
            outcomes = [mock.DEFAULT] * 3 + [RuntimeError("died")] * 99 if step == "rename" else RuntimeError("died")
            patch.setattr(disk, step, mock.Mock(wraps=getattr(disk, step), side_effect=outcomes))
            with pytest.raises(RuntimeError, match="died"):
                export_safetensors(model, at, max_file_bytes=100)
        if text is None:  # all names are in place
            flatshard.checkpoint.load_safetensors(model, at, process_group=ctx.group)
            continue
        with pytest.raises(RuntimeError, match=text):
            flatshard.checkpoint.load_safetensors(model, at, process_group=ctx.group)
        if step == "write_at":
            export_safetensors(model, at, max_file_bytes=100)
            if ctx.rank == 0:
                check(Path(at), once())
