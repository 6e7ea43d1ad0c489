"""Checkpoints written under one version of torch are read under another: metadata since 2.15 has one field more."""

import contextlib
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties

from flatshard.checkpoint import FileSystemReader, FileSystemWriter, load_checkpoint, save_checkpoint

FIELDS = 5  # of a tensor's properties, read by every supported torch


@contextlib.contextmanager
def another_torch(more: int) -> Iterator[None]:
    """Simulate a torch that pickles ``more`` fields than ``FIELDS`` of a tensor's properties, and reads no others."""
    here, taken = TensorProperties.__getstate__, TensorProperties.__setstate__

    def get(properties: TensorProperties) -> tuple[Any, ...]:
        return (*here(properties)[:FIELDS], *((4, 1),) * more)

    def put(properties: TensorProperties, state: tuple[Any, ...]) -> None:
        assert len(state) in {FIELDS, FIELDS + more}, f"too many values to unpack (expected {FIELDS + more})"
        taken(properties, state[:FIELDS])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", get)
        patch.setattr(TensorProperties, "__setstate__", put)
        yield


def state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    return {"model": model.state_dict(), "turned": torch.randn(3, 4).T, "short": torch.randn(3).bfloat16()}


WRITERS = {
    "save_checkpoint": save_checkpoint,
    "Writer": lambda path, job: dcp.save(job, storage_writer=FileSystemWriter(path)),
    "dcp.save": lambda path, job: dcp.save(job, checkpoint_id=path),
}
READERS = {
    "load_checkpoint": load_checkpoint,
    "Reader": lambda path, job: dcp.load(job, storage_reader=FileSystemReader(path)),
    "dcp.load": lambda path, job: dcp.load(job, checkpoint_id=path),
}


@pytest.mark.parametrize(("writer", "reader"), list(zip(WRITERS, [*READERS][1:] + [*READERS][:1], strict=True)))
def test_read_under_another_torch(tmp_path, writer, reader):
    for saved_by, loaded_by in ((0, 1), (1, 0), (2, 0), (2, 1)):
        path, job = str(tmp_path / f"{saved_by}{loaded_by}"), state()
        model = {name: torch.zeros_like(value) for name, value in job["model"].items()}
        into = {
            "model": model,
            "turned": torch.zeros(4, 3),
            "short": torch.zeros(3),
        }  # of another memory order and dtype
        with another_torch(saved_by):
            WRITERS[writer](path, job)
        with another_torch(loaded_by):
            found = READERS[reader](path, into) or into
        torch.testing.assert_close(found, {**job, "short": job["short"].float()}, rtol=0, atol=0)


def test_what_is_written_is_the_same_under_each(tmp_path):
    """Equal properties are stored once, whatever their tensors' strides, because reading them takes time."""
    written = []
    for more in range(2):
        with another_torch(more):
            save_checkpoint(tmp_path / f"{more}", state())
            written.append((tmp_path / f"{more}" / ".metadata").read_bytes())
        properties = [e.properties for e in pickle.load(io.BytesIO(written[-1])).state_dict_metadata.values()]
        assert len(properties) == 6
        assert len({id(p) for p in properties}) == 2
    assert len(written[0]) == len(written[1])
