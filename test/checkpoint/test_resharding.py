"""Checkpoints from and for other systems, bit for bit; and a file from which each rank reads its shard.

The fuzzer's programs restart jobs, which covers other layouts and numbers of ranks.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import layers, same, same_tensors, train
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from flatshard import fully_shard, load_checkpoint, save_checkpoint
from flatshard._base import torch_versions

WHOLE = StateDictOptions(full_state_dict=True)


def ours(ctx, seed: int) -> nn.Module:
    return fully_shard(layers(seed), policy={nn.Linear}, process_group=ctx.group)


def plain(ctx, seed: int) -> nn.Module:
    return layers(seed)


def by_fsdp1(ctx, seed: int) -> nn.Module:
    options = {"process_group": ctx.group, "device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(layers(seed), **options)


def by_fsdp2(ctx, seed: int) -> nn.Module:
    model = layers(seed)
    for module in (*model, model):
        fsdp2(module, mesh=ctx.mesh)
    return model


FLAT, ON_CPU = StateDictOptions(flatten_optimizer_state_dict=True), StateDictOptions(cpu_offload=True)


BY_FSDP1 = pytest.param(
    by_fsdp1,
    marks=pytest.mark.skipif(
        torch_versions.VERSION < (2, 12), reason="FSDP1 fails on some ranks of the world: needs torch 2.12 or later"
    ),
)


@pytest.mark.parametrize("theirs", [plain, BY_FSDP1, by_fsdp2])
@ranks(3)
def test_to_and_from_others(ctx, path: str, theirs: Callable[..., nn.Module]) -> None:
    """torch's helpers treat all alike, and ``load_checkpoint`` also loads checkpoints of other systems."""
    for number, (saves, loads, options) in enumerate(
        ((theirs, ours, None), (ours, theirs, None), (ours, theirs, ON_CPU), (theirs, ours, FLAT))
    ):
        at = f"{path}/{number}"
        ctx.note(f"{saves.__name__} to {loads.__name__}, {options}")
        source, target, other = saves(ctx, 0), loads(ctx, 1), ours(ctx, 2)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (source, target, other)]
        train(source, optimizers[0])
        names = ("model", "optim")
        dcp.save(
            dict(zip(names, get_state_dict(source, optimizers[0], options=options), strict=True)),
            checkpoint_id=at,
            process_group=ctx.group,
        )
        state: dict[str, Any] = dict(zip(names, get_state_dict(target, optimizers[1], options=options), strict=True))
        dcp.load(state, checkpoint_id=at, process_group=ctx.group)
        given = {f"{name}_state_dict": value for name, value in state.items()}
        set_state_dict(target, optimizers[1], **given, options=options)
        expected, optim = get_state_dict(source, optimizers[0], options=WHOLE)
        found, its_optim = get_state_dict(target, optimizers[1], options=WHOLE)
        same_tensors(found, expected)
        same(its_optim, optim)
        train(target, optimizers[1])
        if options is not FLAT:
            load_checkpoint(at, {"model": other, "optim": optimizers[2]}, process_group=ctx.group)
            found, its_optim = get_state_dict(other, optimizers[2], options=WHOLE)
            same_tensors(found, expected)
            same(its_optim, optim)
        if ctx.rank == 0:
            dcp_to_torch_save(at, f"{at}.pt")
            same_tensors(torch.load(f"{at}.pt", weights_only=True)["model"], expected)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks Linux which pages were read")
@ranks(4)
def test_each_rank_reads_its_own_bytes_of_a_file(ctx, path: str) -> None:
    if ctx.rank == 0:
        torch.save({"weight": torch.arange(4_000_000).float().view(2000, 2000)}, path)
    dist.barrier(ctx.group)
    model = fully_shard(nn.Linear(2000, 2000, bias=False), process_group=ctx.group)
    state = torch.load(path, mmap=True, weights_only=True)
    model.load_state_dict(state)
    start, part = 1_000_000 * ctx.rank, 4_000_000
    assert torch.equal(model.weight.detach(), torch.arange(start, start + model.weight.numel()).float())
    mappings = [m for m in Path("/proc/self/smaps").read_text().split("VmFlags:") if path in m]
    resident = sum(int(m.partition("\nRss:")[2].split()[0]) * 1024 for m in mappings)
    assert part * 0.9 < resident < part + 5_000_000, resident  # the kernel maps up to 2 MB around the bytes read


@ranks(2)
def test_a_load_calls_few_functions(ctx, path: str) -> None:
    """For a unit of two parameters with AdamW's state, beyond what any load calls."""
    folder, calls = str(Path(flatshard.__file__).parent), []
    for units in (6, 12):
        model = fully_shard(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(units))), policy={nn.Linear}, process_group=ctx.group
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state, count = {"model": model, "optim": optimizer}, [0]
        save_checkpoint(f"{path}/{units}", state, process_group=ctx.group)
        load_checkpoint(f"{path}/{units}", state, process_group=ctx.group)  # makes records for later ones

        def note(frame: Any, event: str, arg: Any, count: list[int] = count) -> None:
            count[0] += event == "call" and frame.f_code.co_filename.startswith(folder)

        sys.setprofile(note)
        try:
            load_checkpoint(f"{path}/{units}", state, process_group=ctx.group)
        finally:
            sys.setprofile(None)
        calls += count
    assert 0 < (calls[1] - calls[0]) / 6 <= 270, calls
