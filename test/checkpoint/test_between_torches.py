"""A checkpoint written under one version of torch is read under another: since 2.15 its metadata has one field more."""

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

from flatshard.checkpoint import Reader, Writer, load_checkpoint, save_checkpoint

FIELDS = 5  # of a tensor's properties, as every torch of the range reads them


@contextlib.contextmanager
def another_torch(more: int) -> Iterator[None]:
    """Which pickles so many fields ``more`` than ``FIELDS`` of a tensor's properties, and reads no others."""
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


def state(seed: int, is_saved: bool = True) -> dict[str, Any]:
    """What is saved; and what it is loaded to, of another memory order and dtype."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    turned, short = torch.randn(3, 4).T, torch.randn(3).bfloat16()
    return {
        "model": model,
        "turned": turned if is_saved else torch.zeros(4, 3),
        "short": short if is_saved else short.float(),
    }


def by_torch(path: str, job: dict[str, Any], **options: Any) -> None:
    dcp.save({**job, "model": job["model"].state_dict()}, checkpoint_id=path, **options)


def dcp_load(path: str, job: dict[str, Any], **options: Any) -> dict[str, Any]:
    into = {**job, "model": job["model"].state_dict()}
    dcp.load(into, checkpoint_id=path, **options)
    return {**into, "model": job["model"]}


WRITERS = {
    "save_checkpoint": save_checkpoint,
    "Writer": lambda path, job: by_torch(path, job, storage_writer=Writer(path)),
    "dcp.save": by_torch,
}
READERS = {
    "load_checkpoint": load_checkpoint,
    "Reader": lambda path, job: dcp_load(path, job, storage_reader=Reader(path)),
    "dcp.load": dcp_load,
}


@pytest.mark.parametrize(("writer", "reader"), list(zip(WRITERS, [*READERS][1:] + [*READERS][:1], strict=True)))
def test_read_under_another_torch(tmp_path, writer, reader):
    for saved_by, loaded_by in ((0, 1), (1, 0), (2, 0), (2, 1)):
        path, job, other = str(tmp_path / f"{saved_by}{loaded_by}"), state(1), state(2, is_saved=False)
        with another_torch(saved_by):
            WRITERS[writer](path, job)
        with another_torch(loaded_by):
            got = READERS[reader](path, other)
        assert torch.equal(got["turned"], job["turned"])
        assert torch.equal(got["short"], job["short"].float())
        torch.testing.assert_close(other["model"].state_dict(), job["model"].state_dict(), rtol=0, atol=0)


def test_what_is_written_is_the_same_under_each(tmp_path):
    """And properties that are alike are there once, whatever their tensors' strides: it takes time to read them."""
    written = []
    for more in range(2):
        with another_torch(more):
            save_checkpoint(tmp_path / f"{more}", state(1))
            written.append((tmp_path / f"{more}" / ".metadata").read_bytes())
        properties = [e.properties for e in pickle.load(io.BytesIO(written[-1])).state_dict_metadata.values()]
        assert len(properties) == 6
        assert len({id(p) for p in properties}) == 2
    assert len(written[0]) == len(written[1])
