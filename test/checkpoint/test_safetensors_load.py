"""A folder of safetensors files is read into shards: each rank its own bytes, and bad files change nothing on any."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from saving import (
    CommunicationWatch,
    MemoryWatch,
    check_equal,
    layers,
    make,
    on_four,
    shard,
    write_safetensors,
)
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import RankError, export_safetensors, full_state_dict, load_safetensors
from flatshard.layouts import Blocks, Elements, Rows, Whole

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_OPTIM]
LAYOUTS = [Elements(), Rows(max_padding=9.0), Blocks(4, max_padding=9.0), Whole(max_padding=9.0)]


def write(ctx, path: str, tensors: dict[str, Tensor]) -> Path:
    """Write two files and their index on one rank, and return the folder."""
    folder, names = Path(path), list(tensors)
    if ctx.rank == 0:
        files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in files.items():
            write_safetensors(folder / file, {n: tensors[n] for n in own})
        index = {"metadata": {}, "weight_map": {n: file for file, own in files.items() for n in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier(ctx.group)
    return folder


@ranks(2, 3)
def test_every_kind_of_parameter(ctx, path: str) -> None:
    """Tied, frozen, empty, 0-dim, transposed, channels-last and 16-bit ones, and buffers: nothing is sent."""
    expected = make(1).state_dict()
    folder = write(ctx, path, {n: v for n, v in expected.items() if n != "down.weight"})  # it is tied to another
    for strategy in STRATEGIES:
        model = shard(ctx, make(), strategy, {nn.Linear})
        versions = [p._version for p in model.parameters()]
        with CommunicationWatch() as watch:
            load_safetensors(model, folder, process_group=ctx.group)
        assert watch.data == []
        assert all(p._version > before for p, before in zip(model.parameters(), versions, strict=True))
        check_equal(model, expected)


@ranks(2, 3)
def test_layouts_on_meta_and_exports(ctx, path: str) -> None:
    """A rank reads as many bytes as its shards have, in place, whatever the layout."""
    source = fully_shard(layers(1), process_group=ctx.group)
    export_safetensors(source, path, name="net", max_file_bytes=100)
    for layout in LAYOUTS:
        with torch.device("meta"):
            model = layers()
        fully_shard(model, policy={nn.Linear}, layout=layout, process_group=ctx.group)
        model.to_empty(device="cpu")
        model.state_dict()  # adopts the memory
        report = mock.Mock()
        with MemoryWatch() as watch:
            load_safetensors(model, path, name="net", process_group=ctx.group, progress=report)
        own = sum(p.nbytes for p in model.parameters())
        assert own < sum(p.nbytes for p in layers().parameters())
        assert watch.peak == 0
        assert report.mock_calls[-1] == mock.call(own, own) if own else not report.mock_calls
        model(torch.ones(2, 5))
        check_equal(model, layers(1).state_dict())


@ranks(2)
def test_other_dtypes(ctx, path: str) -> None:
    """A cast has one shard of one tensor in the files' dtype, and rounds as torch does."""
    torch.manual_seed(1)
    plain = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    for source, target in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        values = {n: v.to(source) for n, v in plain.state_dict().items()}
        folder = write(ctx, f"{path} {source}", values)
        model = fully_shard(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to(target), process_group=ctx.group)
        report = mock.Mock()
        with MemoryWatch() as watch:
            load_safetensors(model, folder, process_group=ctx.group, progress=report)
        own = sum(p.numel() for p in model.parameters()) * source.itemsize
        assert report.mock_calls[-1] == mock.call(own, own)
        assert 0 < watch.peak <= 64 * 64 * source.itemsize
        check_equal(model, {n: v.to(target) for n, v in values.items()})


@ranks(4)
def test_tensor_parallel_modules_and_replicas(ctx, path: str) -> None:
    expected = layers(3).state_dict()
    folder = write(ctx, path, expected)
    for how in ("tp", "replicas", "plain"):
        model = on_four(ctx, how)
        load_safetensors(model, folder)
        found = full_state_dict(model)
        assert all(torch.equal(found[n], v) for n, v in expected.items())


class Experts(nn.Module):
    """Stacked matrices, of which a file has each apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(3, 10, 4))
        self.down = nn.Parameter(torch.zeros(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.gate_up[:, :5].mT @ self.down.mT


@ranks(2, 3)
def test_other_names_and_stacked_tensors(ctx, path: str) -> None:
    torch.manual_seed(0)
    shapes = {"gate": (5, 4), "up": (5, 4), "down": (4, 5)}
    values = {f"mlp.{e}.{n}.weight": torch.randn(shape) for e in range(3) for n, shape in shapes.items()}
    folder = write(ctx, path, {**values, "inv_freq": torch.ones(3)})

    def rename(name: str) -> str | tuple[str, tuple[int, ...]] | None:
        if name == "inv_freq":
            return None
        _, expert, kind, _ = name.split(".")
        return ("down", (int(expert), 0, 0)) if kind == "down" else ("gate_up", (int(expert), 5 * (kind == "up"), 0))

    for layout in LAYOUTS:
        model = fully_shard(Experts(), layout=layout, process_group=ctx.group)
        load_safetensors(model, folder, rename=rename, process_group=ctx.group)
        of = [[values[f"mlp.{e}.{n}.weight"] for e in range(3)] for n in shapes]
        check_equal(
            model, {"gate_up": torch.cat([torch.stack(of[0]), torch.stack(of[1])], 1), "down": torch.stack(of[2])}
        )
    for wrong, text in (
        (lambda n: (rename(n)[0], (0, 0, 0)) if rename(n) else None, "they have one place"),
        (lambda n: {"mlp.0.up.weight": ("gate_up", (1, 4, 0))}.get(n, rename(n)), r"overlap in 'gate_up' of the model"),
        (lambda n: None if "1.up" in n else rename(n), "has 100 of 120 elements in the checkpoint"),
        (lambda n: (rename(n)[0], (int(n[4]), 0, 4 * ("up" in n))) if rename(n) else None, "has shape"),
    ):
        with pytest.raises(RankError, match=text):
            load_safetensors(model, folder, rename=wrong, process_group=ctx.group)


@ranks(2, 3)
def test_a_tensor_that_holds_several_parameters(ctx, path: str) -> None:
    values = {
        "qkv.weight": torch.randn(12, 4, generator=torch.Generator().manual_seed(0)),
        "qkv.bias": torch.arange(12.0),
    }
    folder = write(ctx, path, values)
    model = fully_shard(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), process_group=ctx.group)
    load_safetensors(
        model, folder, rename=lambda n: [f"{i}.{n.removeprefix('qkv.')}" for i in range(3)], process_group=ctx.group
    )
    of = {n.removeprefix("qkv."): v.chunk(3) for n, v in values.items()}
    check_equal(model, {f"{i}.{n}": of[n][i] for i in range(3) for n in ("weight", "bias")})
    with pytest.raises(RankError, match=r"'qkv\.weight' of shape \(12, 4\) has no equal rows for '0', "):
        load_safetensors(model, folder, rename=lambda n: list("01234"), process_group=ctx.group)


@ranks(2)
def test_names_that_only_one_side_has(ctx, path: str) -> None:
    values = {n: v for n, v in layers(1).state_dict().items() if n != "2.bias"} | {"extra": torch.ones(2)}
    folder = write(ctx, path, values)
    model = fully_shard(layers(), process_group=ctx.group)
    with pytest.raises(RankError, match=r"not in the files: '2\.bias'; in the files only: 'extra'"):
        load_safetensors(model, folder, process_group=ctx.group)
    check_equal(model, layers().state_dict())
    assert load_safetensors(model, folder, strict=False, process_group=ctx.group) == ["2.bias"]
    check_equal(model, {n: values.get(n, v) for n, v in layers().state_dict().items()})


# -- bad files ---------------------------------------------------------------------------------------------------------


def header(**changes: object) -> Callable[[Path], None]:
    return lambda folder: write_safetensors(folder / "model.safetensors", layers(1).state_dict(), **changes)


def entry(dtype: str = "F32", shape: object = (5,), place: object = (348, 368)) -> dict[str, object]:
    return {"2.bias": {"dtype": dtype, "shape": shape, "data_offsets": place}}


def damaged(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write_damaged(folder: Path) -> None:
        header()(folder)
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return write_damaged


def index(**weight_map: object) -> Callable[[Path], None]:
    def write_index(folder: Path) -> None:
        header()(folder)
        full = dict.fromkeys(layers().state_dict(), "model.safetensors") | weight_map
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": full}))

    return write_index


def only(name: str) -> Callable[[Path], None]:
    def write_other(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\x80\x02.")

    return write_other


def two_files(folder: Path) -> None:
    write_safetensors(folder / "model.safetensors", layers(1).state_dict())
    write_safetensors(folder / "other.safetensors", layers(1).state_dict())


def linked(folder: Path) -> None:
    header()(folder)
    os.rename(folder / "model.safetensors", folder.parent / "secret")
    os.symlink(folder.parent / "secret", folder / "model.safetensors")


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut off": (
        damaged(lambda data: data[:-1]),
        r"'2\.bias' ends at byte \d+ of 'model.safetensors', which is cut off",
    ),
    "cut off in the header": (damaged(lambda data: data[:90]), "too few for its header"),
    "empty": (damaged(lambda data: b""), "'model.safetensors' has 0 bytes, too few"),
    "a header of 2^60 bytes": (
        damaged(lambda data: (2**60).to_bytes(8, "little") + data[8:]),
        "too few for its header",
    ),
    "no JSON": (damaged(lambda data: data[:8] + b"?" + data[9:]), "damaged header"),
    "deep JSON": (damaged(lambda data: (10**6).to_bytes(8, "little") + b"[" * 10**6), "damaged header"),
    "one name twice": (damaged(lambda data: data.replace(b'"0.bias"', b'"2.bias"')), r"it has '2\.bias' twice"),
    "a list": (damaged(lambda data: (2).to_bytes(8, "little") + b"[]"), "names no tensors"),
    "another shape": (header(**entry(shape=[1, 5])), r"'2\.bias' has shape \(1, 5\) in the checkpoint, \(5,\) here"),
    "an unknown dtype": (header(**entry("F4")), r"'2\.bias' in 'model.safetensors' is 'F4', and read are 'F64', "),
    "too few bytes": (header(**entry(place=[0, 16])), r"'2\.bias' in .* has 16 bytes, and shape \[5\] in F32"),
    "a negative place": (header(**entry(place=[-20, 0])), r"'2\.bias' in .*which none can have"),
    "a huge shape": (header(**entry(shape=[0, 2**70], place=[0, 0])), r"'2\.bias' in .*which none can have"),
    "no place": (
        header(**{"2.bias": {"dtype": "F32", "shape": [5]}}),
        r"'2\.bias' in .* has no dtype, shape and place",
    ),
    "another kind": (header(**entry("I32")), r"'2\.bias' is torch.int32 in the files, torch.float32 here"),
    "quantised": (header(**entry("F8_E4M3", place=[348, 353])), r"'2\.bias' is torch.float8_e4m3fn in the files"),
    "outside": (index(**{"2.bias": "../model.safetensors"}), r"outside of the folder.*'\.\./model.safetensors'"),
    "absolute": (index(**{"2.bias": "/etc/passwd"}), "outside of the folder.*'/etc/passwd'"),
    "no such file": (index(**{"2.bias": "more.safetensors"}), "'more.safetensors' is missing in the folder"),
    "not in its file": (index(more="model.safetensors"), r"the index .* names 'more', not in the files"),
    "no index": (only("model.safetensors.index.json"), "damaged header or index"),
    "a pickle": (only("pytorch_model.bin"), r"'pytorch_model.bin' are not read: pickles execute code"),
    "GGUF": (only("model.gguf"), "'model.gguf' are not read: .*GGUF is quantised"),
    "two files": (two_files, r"has 'model.safetensors', 'other.safetensors', and no index.*give its name="),
    "common bytes": (
        header(**entry(place=[4, 24])),
        r"'(0\.weight|2\.bias)' and '(0\.weight|2\.bias)' have common bytes in 'model.safetensors'",
    ),
    "a link": (linked, r"'model.safetensors' is a link to '/.*secret', outside of the folder.*copy that file"),
    "no files": (lambda folder: folder.mkdir(parents=True), "is no folder, or has no files"),
    "no folder": (lambda folder: None, "is no folder"),
}


@ranks(2)
def test_bad_files_change_nothing(ctx, path: str) -> None:
    """All ranks raise, with the name, before anything is changed. A gigabyte is not read for a header that asks for it."""
    model = fully_shard(layers(), policy={nn.Linear}, process_group=ctx.group)
    for number, (what, (write_bad, text)) in enumerate(BAD.items()):
        ctx.note(what)
        folder = Path(path) / str(number)
        if ctx.rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_bad(folder)
        dist.barrier(ctx.group)
        with pytest.raises(RankError, match=text):
            load_safetensors(model, folder, process_group=ctx.group)
    check_equal(model, layers().state_dict())


@ranks(2)
def test_what_one_rank_finds_is_raised_on_all(ctx, path: str) -> None:
    """A failure of one rank, and a model without memory. A link into a cache is followed."""
    folder = write(ctx, path, layers(1).state_dict())
    model = fully_shard(layers(), process_group=ctx.group)
    rename = mock.Mock(side_effect=KeyError("odd")) if ctx.rank == 1 else None
    with pytest.raises(RankError, match=r"rank 1: KeyError: 'odd'"):
        load_safetensors(model, folder, rename=rename, process_group=ctx.group)
    with torch.device("meta"):
        bare = layers()
    with pytest.raises(RankError, match=r"are on the meta device.*to_empty"):
        load_safetensors(fully_shard(bare, process_group=ctx.group), folder, process_group=ctx.group)
    cache = Path(f"{path}-cache/snapshots/main")
    if ctx.rank == 0:
        cache.mkdir(parents=True)
        folder.rename(cache.parents[1] / "blobs")
        for file in (cache.parents[1] / "blobs").iterdir():
            os.symlink(file, cache / file.name)
    dist.barrier(ctx.group)
    load_safetensors(model, cache, process_group=ctx.group)
    check_equal(model, layers(1).state_dict())
    with pytest.raises(
        ValueError, match=r"load_safetensors: 'cached::s3://b/m' is a chain.*the store itself, 's3://b/m'"
    ):
        load_safetensors(model, "cached::s3://b/m")


def test_without_ranks(tmp_path):
    """A plain module of one process, and one whose class loads its values itself."""

    class Shifted(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *args):
            state[f"{prefix}weight"] = state[f"{prefix}weight"] + 1
            super()._load_from_state_dict(state, prefix, *args)

    values = nn.Linear(3, 2).state_dict()
    write_safetensors(tmp_path / "model.safetensors", values)
    for kind, shift in ((nn.Linear, 0), (Shifted, 1)):
        model = kind(3, 2)
        load_safetensors(model, tmp_path)
        assert torch.equal(model.weight, values["weight"] + shift)
        assert torch.equal(model.bias, values["bias"])
    assert flatshard.checkpoint.load_safetensors.__module__ == "flatshard.checkpoint"
