"""FSDP2's newest methods (torch 2.15), one script for both: values, order of reductions, addresses, and what raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from on_ranks import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
import flatshard.fsdp2
from flatshard._trace import record_events

has_newest = hasattr(FSDPModule, "finalize_backward")


class Net(nn.Module):
    """Layers of different sizes. ``uses``: whether one parameter is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6 * n) for n in (1, 2, 3))
        self.head = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(6))
        self.uses = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().unflatten(-1, (-1, 6)).mean(-2)
        return self.head(x * self.scale if self.uses else x)


class ReduceScatters(TorchDispatchMode):
    """The elements of each reduce-scatter of torch, to a list."""

    def __init__(self, found: list[Any]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce_scatter" in str(func):
            self.found.append(max(a.numel() for a in args if isinstance(a, Tensor)))
        return func(*args, **(kwargs or {}))


NAMES = {"layers.0": 42, "layers.1": 84, "layers.2": 126, "<root>": 34}


def raises(call: Any) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as e:
        return type(e).__name__
    return "nothing"


class Script:
    """``api``: the module that it imports from."""

    def __init__(self, api: Any, mesh: Any, rank: int) -> None:
        self.api, self.rank = api, rank
        self.theirs = api is torch.distributed.fsdp
        torch.manual_seed(0)
        self.model = Net()
        for layer in self.model.layers:
            api.fully_shard(layer, mesh=mesh)
        api.fully_shard(self.model, mesh=mesh)
        self.events: list[Any] = []

    def backward(self, step: int) -> None:
        torch.manual_seed(10 * step + self.rank)
        loss = self.model(torch.randn(3, 6)).square().mean()
        with ReduceScatters(self.events) if self.theirs else record_events() as events:
            loss.backward()
        self._note([] if self.theirs else events)

    def finalize(self, async_op: bool = False) -> Any:
        with ReduceScatters(self.events) if self.theirs else record_events() as events:
            handle = self.model.finalize_backward(async_op=async_op)
        self._note([] if self.theirs else events)
        self.events.append("finalize")
        return handle

    def _note(self, events: list[str]) -> None:
        self.events += [NAMES[e.partition(" ")[2]] for e in events if e.startswith("reduce-scatter")]

    def gradients(self) -> dict[str, Tensor | None]:
        named = self.model.named_parameters
        if self.theirs:
            return {n: None if p.grad is None else p.grad.full_tensor() for n, p in named()}
        with flatshard.summon_full_params(self.model, writeback=False, with_grads=True):
            return {n: None if p.grad is None else p.grad.clone() for n, p in named()}

    def run(self) -> list[Any]:
        """What both must agree on. They reduce in one order; theirs may do so in the finalization, where ours is done."""
        model, found = self.model, []
        found.append(raises(model.finalize_backward) if not self.theirs else "RuntimeError")
        # Theirs does nothing before the first forward.
        self.backward(0)
        model.zero_grad()
        found.append(raises(model.finalize_backward))
        del self.events[:]  # of backwards that end by themselves
        model.set_manual_backward_finalization(True)
        for step, (syncs, async_op) in enumerate((([True], False), ([False, True], True), ([False, False], True))):
            for micro, sync in enumerate(syncs):
                model.set_requires_gradient_sync(sync)
                self.backward(10 * step + micro)
                found.append(raises(lambda: model.set_manual_backward_finalization(False)) if sync else "RuntimeError")
            model.set_requires_gradient_sync(True)
            handle = self.finalize(async_op)
            if async_op:
                handle.wait()
                handle.wait()
            found.append(self.gradients())
            model.zero_grad()
        # An exception, and a clean-up, which invalidates the handle.
        self.backward(3)
        handle = self.finalize(True)
        model.reset_iter_state()
        found += [raises(handle.wait), self.gradients()]
        self.backward(4)
        self.finalize()
        found.append(self.gradients())
        model.reset_iter_state()
        found.append(self.gradients())
        # A parameter that one rank uses.
        model.set_reduce_scatter_unused_params(True)
        model.uses = self.rank == 0
        self.backward(5)
        self.finalize()
        found.append(self.gradients())
        return [*found, self.events]


@pytest.mark.skipif(not has_newest, reason="this torch's FSDP2 has no such methods")
@ranks(2)
def test_the_same_script(ctx):
    mesh = DeviceMesh.from_group(ctx.group, "cpu")
    ours, theirs = (Script(api, mesh, ctx.rank).run() for api in (flatshard.fsdp2, torch.distributed.fsdp))
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(a, dict):
            assert a == b, (number, a, b)
            continue
        for name in a:
            assert (a[name] is None) == (b[name] is None), (number, name)
            if a[name] is not None:
                torch.testing.assert_close(a[name], b[name], msg=lambda m, at=(number, name): f"{at}: {m}")


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
