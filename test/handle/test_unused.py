"""Parameters that some ranks do not use, and of which some hold no element: all ranks agree whether there is a gradient.

Steps of such, against one process: the fuzzer's, and ``core/test_order``.
"""

import torch
from on_ranks import ranks
from pool import Context
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard

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


@ranks(4)
def test_what_an_earlier_backward_used_has_a_gradient(ctx: Context) -> None:
    """Averaged within the shard group at first, and over the replicas by a backward that uses another parameter."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    model = fully_shard(Scales(3), device_mesh=mesh, strategy="HYBRID_SHARD")
    for used in (0, 1):
        flatshard.configure(model, all_reduce=used == 1)
        model(torch.ones(WIDTH), [used]).sum().backward()
    assert [p.grad is not None for p in model.scales] == [True, True, False]


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


class Net(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = Scales(count)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.inner(x * self.scale, used)


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
