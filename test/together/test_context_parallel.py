"""Context parallelism: ranks have parts of each sequence, and parameters are sharded over all of these ranks."""

from typing import Any

import pytest
import torch
from models import Gather
from on_ranks import ranks
from parity import adamw, check_same_params, step_all
from torch import Tensor, nn

from flatshard import ShardingStrategy, fully_shard

WIDTH, LENGTH, SEQUENCES = 8, 6, 4


class Attention(nn.Module):
    """Causal attention of this rank's positions to those of all ranks of ``group``, whose keys and values it gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        start = 0
        if self.group is not None:
            k, v = (torch.cat([*Gather.apply(each.contiguous(), self.group)], 1) for each in (k, v))
            start = self.group.rank() * x.shape[1]
        positions = torch.arange(start, start + x.shape[1]).unsqueeze(1)
        mask = positions >= torch.arange(k.shape[1])
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), Attention(), nn.Linear(WIDTH, 1)).double()


def clip_and_step(plain: nn.Module, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Clip and step both, and check that norms and parameters are the same."""
    norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (plain, model)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)
    step_all(optimizers)
    check_same_params(model, plain)


def options_of(kind: str, mesh: Any) -> dict[str, Any]:
    """Return arguments that shard over both dimensions, or replicate over one of them."""
    if kind == "all ranks":
        return {}
    if kind == "flattened":
        return {"device_mesh": mesh["dp", "cp"]._flatten("dp_cp")}
    return {"device_mesh": mesh["dp", "cp"], "strategy": ShardingStrategy.HYBRID_SHARD}


@pytest.mark.parametrize("kind", ["all ranks", "flattened", "replicated over dp"])
@ranks(4)
def test_sequences_are_cut(ctx, kind: str):
    mesh = ctx.device_mesh((2, 2), ("dp", "cp"))
    plain, model = make(), make()
    for block in model[1:3]:
        block.group = mesh.get_group("cp")
    fully_shard(model, policy={Attention}, **options_of(kind, mesh))
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    row, column = (mesh[name].get_local_rank() for name in ("dp", "cp"))
    for step in range(2):
        x = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        mine = x.chunk(2, 0)[row].chunk(2, 1)[column]
        whole, loss = plain(x).square().mean(), model(mine).square().mean()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total / 4, whole.detach())
        whole.backward()
        loss.backward()
        clip_and_step(plain, model, optimizers)


class Placed(Attention):
    """Attention that reads the places of its tokens, as torch deals them out in another order."""

    places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        own = seen = self.places
        if self.group is not None:
            k, v = (torch.cat([*Gather.apply(each.contiguous(), self.group)], 1) for each in (k, v))
            seen = torch.cat([*Gather.apply(own, self.group)])
        scores = (q @ k.mT * WIDTH**-0.5).masked_fill(own.unsqueeze(1) < seen, -torch.inf)
        return x + self.out(scores.softmax(-1) @ v)


@ranks(4)
def test_sequences_are_cut_by_torch(ctx):
    """``context_parallel`` gives each rank the head and the tail of sequences. Its ring attention needs CUDA."""
    pytest.importorskip("numpy")
    from torch.distributed.tensor.experimental import context_parallel

    mesh, length = ctx.device_mesh((2, 2), ("dp", "cp")), 8
    plain, model = make(), make()
    for m in (plain, model):
        for block in m[1:3]:
            block.__class__, block.places = Placed, torch.arange(length)
    for block in model[1:3]:
        block.group = mesh.get_group("cp")
    fully_shard(model, policy={Placed}, device_mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for step in range(2):
        x = torch.randn(SEQUENCES, length, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        mine, places = x.chunk(2, 0)[mesh["dp"].get_local_rank()].clone(), torch.arange(length)
        plain(x).square().mean().backward()
        # It cuts the buffers in place, and restores them in the end.
        with context_parallel(mesh["cp"], buffers=[mine, places], buffer_seq_dims=[1, 0]):
            assert mine.shape[1] == len(places) == length // 2
            for block in model[1:3]:
                block.places = places
            model(mine).square().mean().backward()
        clip_and_step(plain, model, optimizers)
    q = torch.zeros(1, 1, length, WIDTH)
    with context_parallel(mesh["cp"], buffers=[q], buffer_seq_dims=[2]), pytest.raises(NotImplementedError):
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


@ranks(4)
def test_a_mesh_of_two_dimensions_is_noticed(ctx):
    """FSDP2 takes it for (replicate, shard)."""
    mesh = ctx.device_mesh((2, 2), ("dp", "cp"))["dp", "cp"]
    message = r"has 2 dimensions \('dp', 'cp'\): .*device_mesh\._flatten\(\), to shard over all of its ranks"
    for name in ("device_mesh", "mesh"):
        with pytest.raises(ValueError, match=message):
            fully_shard(make(), policy={Attention}, **{name: mesh})
