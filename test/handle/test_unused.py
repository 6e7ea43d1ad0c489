"""Parameters that some ranks do not use, or hold no element of: all ranks agree whether there is a gradient.

The fuzzer and ``core/test_order`` compare steps with such parameters against one process.
"""

import torch
from on_ranks import ranks
from pool import Context
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard

WIDTH = 4


class Scales(nn.Module):
    """Parameters of a few numbers each: most ranks hold no element of most of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(count))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = x * self.scales[index]
        return x


@ranks(4)
def test_what_an_earlier_backward_used_has_a_gradient(ctx: Context) -> None:
    """The shard group averages the gradient first. A backward that uses another parameter then averages over the replicas."""
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    model = fully_shard(Scales(3), device_mesh=mesh, strategy="HYBRID_SHARD")
    for used in (0, 1):
        flatshard.configure(model, all_reduce=used == 1)
        model(torch.ones(WIDTH), [used]).sum().backward()
    assert [p.grad is not None for p in model.scales] == [True, True, False]


@ranks(2)
def test_a_gradient_of_negative_zero_is_a_gradient(ctx: Context) -> None:
    """It also counts on a rank that did not use the parameter, in small flat parameters and in large ones. None does not."""
    for numel in (64, 2**16):
        model = Scales(0)
        model.scales = nn.ParameterList(torch.ones(numel) for _ in range(3))  # both ranks hold part of the second
        fully_shard(model, process_group=ctx.group)
        flatshard.unshard(model)
        sum((w * -0.0).sum() for i, w in enumerate(model.scales) if i != 1 or ctx.rank).backward()
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        flatshard.unshard(model)
        sum(w.sum() for i, w in enumerate(model.scales) if i != 1).backward()
        assert [p.grad is None for p in model.scales] == [False, True, False]


@ranks(2)
def test_a_gradient_that_rounds_to_negative_zero_is_a_gradient(ctx: Context) -> None:
    """The average of a negative gradient, the smallest number of its dtype, is -0.0. Both ranks hold part of large ones."""
    half, single = torch.float16, torch.float32
    for dtype, reduce_dtype, sizes in ((single, single, (1,)), (half, half, (1, 2, 64)), (half, single, (64,))):
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # a subnormal number
        for numel in sizes:
            model = Scales(0)
            model.scales = nn.ParameterList(torch.ones(n, dtype=dtype) for n in (64, numel, 64))
            precision = flatshard.MixedPrecision(reduce_dtype=reduce_dtype)
            fully_shard(model, process_group=ctx.group, mixed_precision=precision)
            for step in range(2):
                flatshard.unshard(model)
                used = [w for i, w in enumerate(model.scales) if i != 1 or ctx.rank == step]
                sum((w * -smallest).sum() for w in used).backward()
                assert all(p.grad is not None for p in model.scales), (dtype, numel)
                model.zero_grad()


class Net(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = Scales(count)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        return self.inner(x * self.scale, used)


@ranks(3)
def test_many_parameters(ctx: Context) -> None:
    """There are more than a machine integer has bits. The ranks' messages do not stay in the store."""
    before = lists(ctx)
    torch.manual_seed(0)
    model = fully_shard(Net(70).double(), policy={Scales}, process_group=ctx.group)

    def uses(rank: int, step: int, index: int) -> bool:
        return index % (rank + 2) == step or (step == 3 and rank == 0)  # rank 0 uses all in the last step

    for step in range(4):
        model(torch.rand(WIDTH).double(), [i for i in range(70) if uses(ctx.rank, step, i)]).sum().backward()
        expected = [i for i in range(70) if any(uses(rank, step, i) for rank in range(ctx.world_size))]
        assert [i for i, p in enumerate(model.inner.scales) if p.grad is not None] == expected
        model.zero_grad()
    left = lists(ctx) - before
    assert len(left) <= 1, left  # the last reduction's


def lists(ctx: Context) -> set[str]:
    store = ctx.group.get_group_store()
    return {key for key in store.list_keys() if "unused" in key}


class NoElements(nn.Module):
    """A parameter without elements, and with ``scales`` another one, which only some forwards use."""

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
    """Ranks need not agree whether there is one, including in a unit that some ranks use, or with a gradient set by hand."""
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
    before = lists(ctx)
    empty(first(torch.ones(2)), ctx.rank == 0).sum().backward()
    assert lists(ctx) == before
    assert nn.utils.clip_grad_norm_(empty.parameters(), 1.0) == flatshard.clip_grad_norm_(empty, 1.0) == 0
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0
    assert empty.nothing.grad is not None, "on all ranks: an optimizer's step changes what each gathers, by versions"
