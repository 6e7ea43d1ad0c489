"""A script for FSDP2, as in torch's tutorial, runs with ``flatshard.fsdp2`` in place of ``torch.distributed.fsdp``."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from models import NormBlock
from on_ranks import ranks
from parity import full_params
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

import flatshard
import flatshard.fsdp2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([NormBlock(8) for _ in range(3)])
        self.output = nn.Linear(8, 11)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


STEPS = 3


def batch(step: int, micro: int, rank: int) -> Tensor:
    torch.manual_seed(100 * step + micro)
    return torch.randint(11, (4, 4))[rank : rank + 1]


def script(api: Any, mesh: Any, rank: int, loaded: dict[str, Tensor]) -> tuple[nn.Module, list[float]]:
    """The script. ``api`` is the module that it imports from."""
    fully_shard = api.fully_shard
    with torch.device("meta"):
        model = Model()
    options = {"mesh": mesh, "mp_policy": api.MixedPrecisionPolicy(), "offload_policy": api.OffloadPolicy()}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for here, following in zip(model.layers[:-1], model.layers[1:], strict=True):
        here.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([here])
    api.register_fsdp_forward_method(model, "embedded")
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    if loaded:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, dict(loaded), options=options)  # which changes the dict
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        model.unshard(async_op=True)
        for micro in range(2):
            model.set_is_last_backward(micro == 1)
            model.set_requires_gradient_sync(micro == 1)
            ids = batch(step, micro, rank)
            loss = (
                nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                + model.embedded(ids).square().mean()
            )
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.reshard()
    return model, losses


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@ranks(4)
def test_the_script(ctx, shape: tuple[int, ...]):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = ctx.device_mesh(shape, names)
    torch.manual_seed(7)
    loaded = Model().state_dict()
    ours, losses = script(flatshard.fsdp2, mesh, ctx.rank, loaded)
    theirs, expected = script(torch.distributed.fsdp, mesh, ctx.rank, loaded)
    torch.testing.assert_close(losses, expected)
    values = full_params(ours)
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(values[name], param.full_tensor().detach(), rtol=1e-4, atol=1e-5, msg=name)
    assert type(ours) is Model


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
    model.set_gradient_divide_factor(3.0)
    with pytest.raises(NotImplementedError, match="keep_unsharded"):
        model.set_reshard_after_backward(False)
    with pytest.raises(NotImplementedError, match=r"layout=flatshard\.layouts\.Rows"):
        flatshard.fsdp2.fully_shard(Model(), shard_placement_fn=lambda p: None)
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
        flatshard.fsdp2.add_methods(nn.Linear(2, 2))

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
    pair = flatshard.ShardingStrategy.HYBRID_SHARD
    for dims, ours in (
        (DIMS(shard="shard"), {"device_mesh": mesh["shard"]}),
        (DIMS(shard=("shard",), replicate="replicate"), {"device_mesh": mesh["replicate", "shard"], "strategy": pair}),
        (
            DIMS(replicate="replicate"),
            {"device_mesh": mesh["replicate"], "strategy": flatshard.ShardingStrategy.NO_SHARD},
        ),
    ):
        models = []
        for shard in (
            lambda m, ours=ours: flatshard.fully_shard(m, **ours),
            lambda m, dims=dims: flatshard.fully_shard(m, mesh=mesh, dp_mesh_dims=dims),
            lambda m, dims=dims: flatshard.fsdp2.fully_shard(m, mesh=mesh, dp_mesh_dims=dims),
        ):
            torch.manual_seed(0)
            models.append(shard(Model()))
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
