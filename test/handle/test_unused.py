"""Parameters that some ranks do not use, and of which some hold no element: all ranks agree whether there is a gradient.

The oracle is one process in which every slice of the batch uses what its rank uses.
"""

import contextlib
from typing import Any

import pytest
import torch
from on_ranks import ranks
from parity import check_same_params, step_all, twins
from pool import Context
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard import ShardingStrategy, fully_shard

WIDTH = 4


class Scales(nn.Module):
    """A few numbers each, so that most ranks hold none of most of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(count))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = x * self.scales[index]
        return x


class Net(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.inner = Scales(count)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.inner(x * self.scale, used)


def used_by(rank: int, step: int) -> list[int]:
    """0: by all. 1: by none. 2: by rank 0. 3: by odd ranks. 4: by other ranks in each step. 5: in step 1 only."""
    return [0] + [2] * (rank == 0) + [3] * (rank % 2 == 1) + [4] * (step % 2 == rank % 2) + [5] * (step == 1)


def train(ctx: Context, strategy: str, optimizer: str, accumulate: str = "") -> None:
    where: dict[str, Any] = {"strategy": ShardingStrategy[strategy]}
    if strategy.startswith("HYBRID"):
        where["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    plain, model = twins(ctx, Net, {Scales}, **where)
    if optimizer == "whole":
        made = flatshard.optim.WholeParameterOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        optimizers = [made, torch.optim.Adam(plain.parameters(), lr=0.1)]
    else:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, plain)]
    for step in range(3):
        ctx.note(f"{strategy} {optimizer} {accumulate} step {step}")
        for backward in range(2 if accumulate else 1):
            torch.manual_seed(10 * step + backward)
            xs = torch.randn(ctx.world_size, WIDTH, dtype=torch.double)
            for rank, x in enumerate(xs):
                (plain(x, used_by(rank, step + backward)).square().mean() / ctx.world_size).backward()
            if accumulate == "replicas":
                flatshard.configure(model, all_reduce=bool(backward))
            flatshard.unshard(model, recurse=True)
            holds = accumulate == "no_sync" and not backward
            with flatshard.no_sync(model) if holds else contextlib.nullcontext():
                model(xs[ctx.rank], used_by(ctx.rank, step + backward)).square().mean().backward()
        expected = [n for n, p in plain.named_parameters() if p.grad is not None]
        found = [n for n, p in model.named_parameters() if p.grad is not None]
        assert found == expected, f"gradients of {found}, expected {expected}"
        for name in found:  # communicates, so all ranks must have it
            whole, part = plain.get_parameter(name).grad, model.get_parameter(name).grad
            torch.testing.assert_close(part.norm(), whole.norm(), rtol=1e-9, atol=0)
        flatshard.unshard(model, recurse=True)  # what is gathered here is outdated after the step, on all ranks
        step_all(optimizers)
    flatshard.reshard(model)
    check_same_params(model, plain)
    if optimizer == "adamw":
        ours, theirs = (
            {n: int(o.state[p]["step"]) for n, p in m.named_parameters() if p in o.state}
            for m, o in zip((model, plain), optimizers, strict=True)
        )
        assert ours == theirs


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@ranks(4)
def test_all_ranks_agree_what_was_used(ctx: Context, strategy: str) -> None:
    for optimizer, accumulate in [("adamw", ""), ("whole", ""), ("adamw", "no_sync")]:
        train(ctx, strategy, optimizer, accumulate)
    if strategy == "HYBRID_SHARD":
        train(ctx, strategy, "adamw", "replicas")


@ranks(2)
def test_a_gradient_of_negative_zero_is_a_gradient(ctx: Context) -> None:
    """For the rank that did not use the parameter, too. In small flat parameters, and in large ones."""
    for numel in (64, 2**16):
        model = Scales(0)
        model.scales = nn.ParameterList(torch.ones(numel) for _ in range(3))  # the second is on both ranks
        fully_shard(model, process_group=ctx.group)
        flatshard.unshard(model)
        sum((w * -0.0).sum() for i, w in enumerate(model.scales) if i != 1 or ctx.rank).backward()
        assert all(p.grad is not None for p in model.parameters())


@ranks(3)
def test_many_parameters(ctx: Context) -> None:
    """More than an integer of the machine has bits. What ranks have told each other does not stay in the store."""
    before = lists(ctx)
    torch.manual_seed(0)
    model = fully_shard(Net(70).double(), policy={Scales}, process_group=ctx.group)

    def uses(rank: int, step: int, index: int) -> bool:
        return index % (rank + 2) == step or (step == 3 and rank == 0)  # in the last step rank 0 uses all

    for step in range(4):
        model(torch.rand(WIDTH).double(), [i for i in range(70) if uses(ctx.rank, step, i)]).sum().backward()
        expected = [i for i in range(70) if any(uses(rank, step, i) for rank in range(ctx.world_size))]
        assert [i for i, p in enumerate(model.inner.scales) if p.grad is not None] == expected
        model.zero_grad()
    left = lists(ctx) - before
    assert len(left) <= 1, left  # that of the last reduction


def lists(ctx: Context) -> set[str]:
    store = ctx.group.get_group_store()
    return {key for key in store.list_keys() if "unused" in key}


class NoElements(nn.Module):
    """``scales``: with another parameter, which alone is used in part."""

    def __init__(self, scales: bool = False) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.ones(2)) if scales else None

    def forward(self, x: Tensor, used: bool) -> Tensor:
        if self.scale is None:
            return x + self.nothing.sum() if used else x
        return (x + self.nothing.sum()) * (self.scale if used else 1)


@ranks(2)
def test_a_gradient_of_no_elements_communicates_nothing(ctx: Context) -> None:
    """Ranks don't agree whether there is one. Also in a unit that ranks use in part, and set by hand."""
    scaled = fully_shard(NoElements(scales=True), process_group=ctx.group)
    scaled(torch.ones(2), ctx.rank == 0).sum().backward()
    assert nn.utils.clip_grad_norm_([scaled.nothing], 1.0) == 0
    if ctx.rank == 0:
        scaled.nothing.grad = torch.empty(0)
        assert scaled.nothing.grad.norm() == 0
    model = nn.ModuleList([nn.Linear(2, 2), NoElements()])
    for part in model:
        fully_shard(part, process_group=ctx.group)
    first, empty = model
    empty(first(torch.ones(2)), ctx.rank == 0).sum().backward()
    assert nn.utils.clip_grad_norm_(empty.parameters(), 1.0) == flatshard.clip_grad_norm_(empty, 1.0) == 0
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
