"""FSDP2's names: signatures, methods, and mesh dimensions. ``test_parity_with_fsdp2.py`` compares scripts' numbers."""

import copy
import inspect

import pytest
import torch
import torch.distributed.fsdp
from models import NormBlock, NormNet
from on_ranks import ranks
from parity import full_params
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule

import flatshard
import flatshard.fsdp2


def test_signatures():
    theirs = inspect.signature(torch.distributed.fsdp.fully_shard).parameters
    ours = inspect.signature(flatshard.fsdp2.fully_shard).parameters
    assert set(ours) == set(theirs)
    for name, method in flatshard.fsdp2._METHODS.items():
        if hasattr(FSDPModule, name):  # torch has no no_sync, and its oldest supported version has fewer methods
            given, own = (inspect.signature(f).parameters for f in (getattr(FSDPModule, name), method))
            assert list(own)[1:] == list(given)[1:], name


def test_methods(world):
    world(2)
    model = flatshard.fully_shard(NormNet(2, 8), policy={NormBlock})
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
        flatshard.fsdp2.fully_shard(NormNet(2, 8), shard_placement_fn=lambda p: None)

    class Own(nn.Linear):
        def unshard(self) -> None:
            pass

    with pytest.raises(ValueError, match="Own has unshard of its own"):
        flatshard.fsdp2.fully_shard(Own(2, 2))


def test_units_are_instances_of_fsdp_module(world):
    """The branches of scripts that ask for it run for units, alone, in a list or in a wrapper, and for no other module."""
    world(2)
    model = NormNet(2, 8)
    blocks = [module for module in model.modules() if isinstance(module, NormBlock)]
    wrapped = checkpoint_wrapper(blocks[0])
    assert not any(isinstance(module, flatshard.fsdp2.FSDPModule) for module in model.modules())
    flatshard.fsdp2.fully_shard(wrapped)
    flatshard.fully_shard(model, policy={NormBlock})
    found = [module for module in model.modules() if isinstance(module, flatshard.fsdp2.FSDPModule)]
    assert found == [model, *blocks]
    assert isinstance(wrapped, flatshard.fsdp2.FSDPModule)
    assert isinstance(copy.deepcopy(model), flatshard.fsdp2.FSDPModule)
    assert type(model) is NormNet
    assert not isinstance(model.state_dict(), flatshard.fsdp2.FSDPModule)
    head_and_norm = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    flatshard.fsdp2.fully_shard(list(head_and_norm))
    assert [isinstance(each, flatshard.fsdp2.FSDPModule) for each in (*head_and_norm, head_and_norm)] == [
        True,
        True,
        False,
    ]


DIMS = torch.distributed.fsdp.DataParallelMeshDims


@ranks(4)
def test_dimensions_of_a_mesh(ctx):
    """A mesh with ``dp_mesh_dims`` gives the same losses and units as its submesh."""
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
            models.append(shard(NormNet(2, 8), **given))
            torch.manual_seed(ctx.rank)
            models[-1](torch.randn(2, 3)).square().sum().backward()
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
            flatshard.fully_shard(NormNet(2, 8), mesh=mesh, dp_mesh_dims=dims)


@ranks(2)
def test_addresses(ctx):
    """Memory and addresses stay until the option is switched off; values follow the shards."""

    def unsharded() -> list[Tensor]:
        flatshard.unshard(model, recurse=True)
        shown = [p.detach() for p in model.parameters()]
        flatshard.reshard(model)
        return shown

    for dtype in (None, torch.bfloat16):
        model = NormNet(1, 8)
        for unit in (*model.blocks, model):
            flatshard.fsdp2.fully_shard(
                unit, mesh=ctx.mesh, mp_policy=flatshard.fsdp2.MixedPrecisionPolicy(param_dtype=dtype)
            )
        model.set_keep_unsharded_storage(True)
        first = unsharded()
        pointers = [p.data_ptr() for p in first]
        between: list[Tensor] = []
        for step in range(3):
            assert all(p.untyped_storage().nbytes() for p in first)
            model(torch.full((1, 3), step, dtype=torch.float)).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
            between.append(torch.randn(1000))  # other allocations from the same allocator
            assert [p.data_ptr() for p in unsharded()] == pointers
        for param, value in zip(first, full_params(model).values(), strict=True):
            assert torch.equal(param, value.to(param.dtype))
        model.set_keep_unsharded_storage(False)
        assert not any(p.untyped_storage().nbytes() for p in first)
        unsharded()
        assert not any(p.untyped_storage().nbytes() for p in first)
