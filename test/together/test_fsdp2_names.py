"""FSDP2's names: signatures, methods, dimensions of a mesh. Scripts and their numbers: ``test_parity_with_fsdp2.py``."""

import copy
import inspect
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from models import NormBlock
from on_ranks import ranks
from parity import full_params
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import flatshard
import flatshard.fsdp2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([NormBlock(8, hidden) for hidden in (16, 24)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_signatures():
    theirs = inspect.signature(torch.distributed.fsdp.fully_shard).parameters
    ours = inspect.signature(flatshard.fsdp2.fully_shard).parameters
    assert set(ours) == set(theirs)
    for name, method in flatshard.fsdp2._METHODS.items():
        if hasattr(FSDPModule, name):  # not no_sync; and the oldest torch of the range has fewer
            given, own = (inspect.signature(f).parameters for f in (getattr(FSDPModule, name), method))
            assert list(own)[1:] == list(given)[1:], name


def test_methods(world):
    world(2)
    model = flatshard.fully_shard(Model(), policy={NormBlock})
    assert not hasattr(model, "no_sync")
    flatshard.fsdp2.add_methods(model)
    clone = copy.deepcopy(model)
    assert clone.no_sync.args[0] is clone
    with clone.no_sync():
        pass
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(True)
    with pytest.raises(NotImplementedError, match="keep_unsharded"):
        model.set_reshard_after_backward(False)
    with pytest.raises(NotImplementedError, match=r"layout=flatshard\.layouts\.Rows"):
        flatshard.fsdp2.fully_shard(Model(), shard_placement_fn=lambda p: None)

    class Own(nn.Linear):
        def unshard(self) -> None:
            pass

    with pytest.raises(ValueError, match="Own has unshard of its own"):
        flatshard.fsdp2.fully_shard(Own(2, 2))


DIMS = torch.distributed.fsdp.DataParallelMeshDims


@ranks(4)
def test_dimensions_of_a_mesh(ctx):
    """The same losses and units as with the dimension itself."""
    mesh = ctx.device_mesh((2, 1, 2), ("replicate", "tp", "shard"))
    pair, whole = flatshard.ShardingStrategy.HYBRID_SHARD, flatshard.ShardingStrategy.NO_SHARD
    for dims, ours in (
        (DIMS(shard="shard"), {"device_mesh": mesh["shard"]}),
        (DIMS(shard=("shard",), replicate="replicate"), {"device_mesh": mesh["replicate", "shard"], "strategy": pair}),
        (DIMS(replicate="replicate"), {"device_mesh": mesh["replicate"], "strategy": whole}),
    ):
        models = []
        for shard, given in (
            (flatshard.fully_shard, ours),
            (flatshard.fully_shard, {"mesh": mesh, "dp_mesh_dims": dims}),
            (flatshard.fsdp2.fully_shard, {"mesh": mesh, "dp_mesh_dims": dims}),
        ):
            torch.manual_seed(0)
            models.append(shard(Model(), **given))
            torch.manual_seed(ctx.rank)
            models[-1](torch.randint(11, (2, 3))).square().sum().backward()
        for model in models[1:]:
            assert str(flatshard.describe(model)) == str(flatshard.describe(models[0]))
            for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
                assert torch.equal(p, q)
                assert torch.equal(p.grad, q.grad)
    for dims, message in (
        (DIMS(shard="dp"), r"names 'dp'; the mesh has the dimensions \['replicate', 'tp', 'shard'\]"),
        (DIMS(shard=("replicate", "shard")), "are several dimensions, and flatshard needs one to shard over"),
    ):
        with pytest.raises(ValueError, match=message):
            flatshard.fully_shard(Model(), mesh=mesh, dp_mesh_dims=dims)


def sharded(api: Any, mesh: Any, **precision: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    for unit in (*model.layers, model):
        api.fully_shard(unit, mesh=mesh, mp_policy=api.MixedPrecisionPolicy(**precision))
    return model


def unsharded(model: nn.Module) -> list[Tensor]:
    for module in (*model.layers, model):
        module.unshard()
    shown = [p.detach() for p in model.parameters()]
    for module in (*model.layers, model):
        module.reshard()
    return shown


@ranks(2)
def test_addresses(ctx):
    """The memory stays, and so do addresses, until it is switched off; values are those of the shards."""
    apis = [flatshard.fsdp2, *([torch.distributed.fsdp] if hasattr(FSDPModule, "finalize_backward") else [])]
    for api, dtype in itertools.product(apis, (None, torch.bfloat16)):
        model = sharded(api, ctx.mesh, param_dtype=dtype)
        model.set_keep_unsharded_storage(True)
        first = unsharded(model)
        pointers = [p.data_ptr() for p in first]
        between: list[Tensor] = []
        for step in range(3):
            assert all(p.untyped_storage().nbytes() for p in first)
            model(torch.full((1, 2), step)).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            between.append(torch.randn(1000))  # the allocator has other clients
            assert [p.data_ptr() for p in unsharded(model)] == pointers
        if api is flatshard.fsdp2:
            flatshard.unshard(model, recurse=True)
            values = [p.detach().float().clone() for p in model.parameters()]
            flatshard.reshard(model)
            for whole, value in zip(full_params(model).values(), values, strict=True):
                assert torch.equal(whole.to(dtype or whole.dtype).float(), value)
        model.set_keep_unsharded_storage(False)
        held = sum(p.untyped_storage().nbytes() for p in first)
        assert held == 0 or api is not flatshard.fsdp2  # theirs: at the next reshard
        unsharded(model)
        assert not any(p.untyped_storage().nbytes() for p in first)
