"""FSDP2's newest methods (torch 2.15): the end of a backward as a call, and addresses that stay."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from on_ranks import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import flatshard
import flatshard.fsdp2

has_newest = hasattr(FSDPModule, "finalize_backward")


class Net(nn.Module):
    """Layers of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6 * n) for n in (1, 2, 3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().unflatten(-1, (-1, 6)).mean(-2)
        return self.head(x)


@ranks(2)
def test_methods(ctx):
    """Numbers: ``test_parity_with_fsdp2.py``; what is under way, and what is dropped: ``features/test_finalization.py``."""
    torch.manual_seed(0)
    model = Net()
    for unit in (*model.layers, model):
        flatshard.fsdp2.fully_shard(unit, mesh=ctx.mesh)

    def backward() -> None:
        model(torch.randn(3, 6)).square().mean().backward()

    backward()
    model.zero_grad()
    with pytest.raises(RuntimeError):  # this one has ended by itself
        model.finalize_backward()
    model.set_manual_backward_finalization(True)
    backward()
    with pytest.raises(RuntimeError, match="after a backward, before"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="dropped"):
        handle.wait()
    assert all(p.grad is None for p in model.parameters())
    backward()
    assert model.finalize_backward(async_op=False) is None
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_addresses(ctx):
    """The memory stays, and so do addresses, until it is switched off; values are those of the shards."""
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    apis = [flatshard.fsdp2, *([torch.distributed.fsdp] if has_newest else [])]
    for api in apis:
        for dtype in (None, torch.bfloat16):
            ours = api is flatshard.fsdp2
            torch.manual_seed(0)
            model = Net()
            policy = api.MixedPrecisionPolicy(param_dtype=dtype)
            for layer in model.layers:
                api.fully_shard(layer, mesh=mesh, mp_policy=policy)
            api.fully_shard(model, mesh=mesh, mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def unsharded(model=model) -> list[Tensor]:
                for module in (*model.layers, model):
                    module.unshard()
                shown = [p.detach() for p in model.parameters()]
                for module in (*model.layers, model):
                    module.reshard()
                return shown

            model.set_keep_unsharded_storage(True)
            first = unsharded()
            pointers = [p.data_ptr() for p in first]
            between: list[Tensor] = []
            for step in range(3):
                assert all(p.untyped_storage().nbytes() for p in first)
                torch.manual_seed(step)
                model(torch.randn(3, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                between.append(torch.randn(1000))  # the allocator has other clients
                assert [p.data_ptr() for p in unsharded()] == pointers
            if ours:
                flatshard.unshard(model, recurse=True)
                values = [p.detach().float().clone() for p in model.parameters()]
                flatshard.reshard(model)
                with flatshard.summon_full_params(model, writeback=False):
                    for p, value in zip(model.parameters(), values, strict=True):
                        assert torch.equal(p.to(dtype or p.dtype).float(), value)
                assert all(unit.state == "sharded" for unit in flatshard.describe(model).units)
            model.set_keep_unsharded_storage(False)
            if ours:  # theirs: at the next reshard
                assert not any(p.untyped_storage().nbytes() for p in first)
            unsharded()
            assert not any(p.untyped_storage().nbytes() for p in first)
