"""diffusers loads the output of ``export_safetensors``, and its folders are read into shards."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks

import flatshard

pytestmark = [pytest.mark.clients("diffusers", "safetensors"), pytest.mark.time_limit(600)]


@ranks(2)
def test_folders_in_both_directions(ctx, path: str) -> None:
    """The export is one file, or several with an index, beside a ``config.json``."""
    import diffusers

    sizes = {"sample_size": 8, "block_out_channels": (32,), "layers_per_block": 1}
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(**sizes, **blocks)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    flatshard.fully_shard(model, process_group=ctx.group)
    for number, limit in enumerate((10**9, 10**5)):
        folder = Path(path) / str(number)
        flatshard.checkpoint.export_safetensors(model, folder, name="diffusion_pytorch_model", max_file_bytes=limit)
        if ctx.rank == 0:
            model.save_config(folder)
            assert (len(list(folder.glob("*.safetensors"))) > 1) == bool(number)
            found = diffusers.UNet2DModel.from_pretrained(folder).state_dict()
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, expected[name]) for name, value in found.items())
        dist.barrier(ctx.group)
        with torch.device("meta"):
            other = diffusers.UNet2DModel(**sizes, **blocks)
        flatshard.fully_shard(other, process_group=ctx.group)
        other.to_empty(device="cpu")
        flatshard.checkpoint.load_safetensors(other, folder, process_group=ctx.group)
        found = flatshard.checkpoint.full_state_dict(other)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
