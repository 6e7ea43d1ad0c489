"""A checkpoint written under one version of torch is read under another: since 2.15 its metadata has one field more."""

import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties

from flatshard.checkpoint import Reader, Writer, load_checkpoint, save_checkpoint

FIELDS = 5  # of a tensor's properties, as every torch of the range reads them


@dataclass
class Torch:
    """How another version of torch pickles a tensor's properties."""

    more: int  # fields than FIELDS

    def install(self, patch: pytest.MonkeyPatch) -> None:
        here, taken = TensorProperties.__getstate__, TensorProperties.__setstate__

        def get(properties: TensorProperties) -> tuple[Any, ...]:
            return (*here(properties)[:FIELDS], *((4, 1),) * self.more)

        def put(properties: TensorProperties, state: tuple[Any, ...]) -> None:
            assert len(state) in {FIELDS, FIELDS + self.more}, (
                f"too many values to unpack (expected {FIELDS + self.more})"
            )
            taken(properties, state[:FIELDS])

        patch.setattr(TensorProperties, "__getstate__", get)
        patch.setattr(TensorProperties, "__setstate__", put)


OLD, NEW, NEWER = Torch(0), Torch(1), Torch(2)


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    return {"model": model, "transposed": torch.randn(3, 4).T}


def by_torch(path: str, job: dict[str, Any], **options: Any) -> None:
    dcp.save({**job, "model": job["model"].state_dict()}, checkpoint_id=path, **options)


def dcp_load(path: str, job: dict[str, Any], **options: Any) -> dict[str, Any]:
    into = {**job, "model": job["model"].state_dict()}
    dcp.load(into, checkpoint_id=path, **options)
    return {**into, "model": job["model"]}


WRITERS = {
    "save_checkpoint": lambda path, job: save_checkpoint(path, job),
    "Writer": lambda path, job: by_torch(path, job, storage_writer=Writer(path)),
    "dcp.save": by_torch,
}
READERS = {
    "load_checkpoint": lambda path, job: load_checkpoint(path, job),
    "Reader": lambda path, job: dcp_load(path, job, storage_reader=Reader(path)),
    "dcp.load": dcp_load,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_read_under_another_torch(tmp_path, writer, reader):
    if (writer, reader) == ("dcp.save", "dcp.load"):
        pytest.skip("torch's own")
    for i, (saved_by, loaded_by) in enumerate([(OLD, NEW), (NEW, OLD), (NEWER, OLD), (NEWER, NEW)]):
        path, job, other = str(tmp_path / str(i)), state(1), state(2)
        with pytest.MonkeyPatch.context() as patch:
            saved_by.install(patch)
            WRITERS[writer](path, job)
        with pytest.MonkeyPatch.context() as patch:
            loaded_by.install(patch)
            got = READERS[reader](path, other)
        assert torch.equal(got["transposed"], job["transposed"])
        for name, value in job["model"].state_dict().items():
            assert torch.equal(other["model"].state_dict()[name], value), name


def test_what_is_written_is_the_same_under_each(tmp_path):
    """And properties that are alike are there once, whatever their tensors' strides: it takes time to read them."""
    written = []
    for torch_ in (OLD, NEW):
        with pytest.MonkeyPatch.context() as patch:
            torch_.install(patch)
            path = tmp_path / f"{torch_.more}"
            save_checkpoint(path, state(1))
            data = (path / ".metadata").read_bytes()
        written.append(data)
        properties = [e.properties for e in pickle.load(io.BytesIO(data)).state_dict_metadata.values()]
        assert len(properties) == FIELDS
        assert len({id(p) for p in properties}) == 1
    assert len(written[0]) == len(written[1])
