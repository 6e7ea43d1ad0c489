"""Files and folders in the place of a checkpoint: the error says of which kind they are and which call reads them, and that
call reads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import METADATA, Four, expect
from on_ranks import ranks
from saving import write_safetensors
from torch import nn

from flatshard import fully_shard, load_checkpoint, save_checkpoint
from flatshard.checkpoint import full_state_dict, load_safetensors


def torch_file(path: Path, **options: Any) -> Path:
    torch.save(Four(2.0).state_dict(), path, **options)
    return path


def safetensors_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, Four(2.0).state_dict())
    return path


def written(path: Path, content: bytes = b"x") -> Path:
    path.write_bytes(content)
    return path


def checkpoint(path: Path) -> Path:
    save_checkpoint(path, {"m": Four()})
    return path


OTHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file of torch.save": (
        lambda at: torch_file(at / "old.pt"),
        r"/old.pt' is a file of torch.save, .*module.load_state_dict\(torch.load\(file, map_location='cpu', mmap=True\)\)"
        r".*load_optim_state_dict\(module, optimizer, state\)",
    ),
    "an old one, under any name": (
        lambda at: torch_file(at / "old", _use_new_zipfile_serialization=False),
        r"/old' is a file of torch.save, .*torch.load\(file, map_location='cpu'\)\)",
    ),
    "a folder of transformers' pickles": (
        lambda at: torch_file(at / "pytorch_model.bin").parent,
        r"has 'pytorch_model.bin', of torch.save, .*torch.load\(file",
    ),
    "several": (
        lambda at: [torch_file(at / f"pytorch_model-{i}.bin").parent for i in range(2)].pop(),
        r"has 'pytorch_model-0.bin', 'pytorch_model-1.bin', of torch.save.*Of several files make one dict",
    ),
    "a file of safetensors": (
        lambda at: safetensors_file(at / "f" / "model.safetensors"),
        r"is a file of safetensors, .*load_safetensors\(module, '.*/f', name='model'\)",
    ),
    "a folder of them": (
        lambda at: safetensors_file(at / "f" / "model.safetensors").parent,
        r"/f' is a folder of safetensors, .*load_safetensors\(module, folder\), .*load_pretrained\(module, folder\)",
    ),
    "a GGUF file": (lambda at: written(at / "x.gguf", b"GGUF\3"), "is a GGUF file, which is not read"),
    "any file": (lambda at: written(at / "x"), "is a file, and a checkpoint is a folder"),
    "a file of a checkpoint": (
        lambda at: checkpoint(at / "x") / METADATA,
        r"is a file of a checkpoint: give its folder, '.*/x'",
    ),
    "a folder of checkpoints": (
        lambda at: torch_file(checkpoint(at / "step-1").parent / "best.pt").parent,
        "is no checkpoint, but has some in it: give the path of one, 'step-1'",
    ),
    "nothing": (lambda at: at / "x", "/x' not found"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_it_is_is_told(tmp_path, what: str):
    make, told = OTHERS[what]
    with expect(told):
        load_checkpoint(make(tmp_path), {"m": Four()})


@ranks(2)
def test_the_calls_that_are_named_read_it(ctx, path: str) -> None:
    if ctx.rank == 0:
        safetensors_file(Path(path) / "f" / "model.safetensors")
        torch_file(Path(path) / "old.pt")
    torch.distributed.barrier(ctx.group)
    for read in (
        lambda model: model.load_state_dict(torch.load(f"{path}/old.pt", map_location="cpu", mmap=True)),
        lambda model: load_safetensors(model, f"{path}/f", name="model", process_group=ctx.group),
    ):
        model = fully_shard(Four(1.0), policy={nn.Linear}, process_group=ctx.group)
        read(model)
        assert all(bool((value == 2.0).all()) for value in full_state_dict(model).values())
