"""Operations allowed on shards of parameters and gradients, by kind: see the table in ``tensors/operations.py``."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks
from parity import full_params, whole_gradients
from torch import Tensor, nn

from flatshard import CPUOffload, ShardingStrategy, configure, fully_shard, recover, summon_full_params
from flatshard.layouts import Rows, Whole
from flatshard.tensors import shard_info

REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(),
    "mean": lambda t: t.mean(),
    "max": lambda t: t.max(),
    "amax": lambda t: t.abs().amax(),
    "any": lambda t: (t > 0.1).any(),
    "all": lambda t: t.isfinite().all(),
    "count": lambda t: (t > 0).count_nonzero(),
    "norm": lambda t: t.norm(),
    "norm 3": lambda t: t.norm(3),
    "power": lambda t: t.pow(2).sum().sqrt(),
    "flat": lambda t: t.flatten().mul(2).view(-1).min(),
    "dot": lambda t: t.flatten().dot(t.flatten()),
    "where": lambda t: t.where(t > 0, 0).sum(),
}
REFUSED: dict[str, Callable[[Tensor], object]] = {
    "norm of columns": lambda t: t.norm(dim=0),
    "mean of rows": lambda t: t.mean(-1, keepdim=True),
    "reshape": lambda t: t.reshape(3, -1),
    "@": lambda t: t @ torch.ones(5, 2),
    "@ on the right": lambda t: torch.ones(2, 3).double() @ t,
    "mv": lambda t: t.mv(torch.ones(5).double()),
    "index": lambda t: t[0],
    "T": lambda t: t.T,
    "permute": lambda t: t.permute(-1, *range(t.dim() - 1)),
    "assignment": lambda t: t.detach().__setitem__(1, 0),
    "cat": lambda t: torch.cat([t.abs(), t.abs()]),
    "not in the table": lambda t: t.cov(),
    "broadcast": lambda t: t.abs() * torch.ones(7, 1, 1),
}


@pytest.mark.parametrize("layout", [None, Whole(max_padding=math.inf)], ids=["elements", "whole"])
@ranks(2, 3)
def test_kinds_of_operations(ctx, layout) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(5, 3).double()
    model = fully_shard(copy.deepcopy(plain), process_group=ctx.group, layout=layout)
    x = torch.randn(4, 5).double()
    for each in (plain, model):
        each(x).square().sum().backward()
    for name, reduction in REDUCTIONS.items():
        ctx.note(name)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            for part, whole in ((p.grad, q.grad), (p, q), (p.detach(), q), (p.data, q)):
                torch.testing.assert_close(reduction(part).detach(), reduction(whole).detach(), rtol=1e-12, atol=1e-12)
    before = [t.detach().clone() for p in model.parameters() for t in (p, p.grad)]
    for name, use in REFUSED.items() if layout is None else ():
        ctx.note(name)
        for part in (model.weight, model.weight.grad, model.weight.detach(), model.weight.data):
            with pytest.raises((RuntimeError, NotImplementedError), match=r"'weight' is sharded: .*summon_full_params"):
                use(part)
    now = [t.detach() for p in model.parameters() for t in (p, p.grad)]
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    for p, ndim in zip(model.parameters(), (2, 1), strict=True):
        for t in (p, p.grad, p.detach(), p.data, p.abs(), p.detach()[:]):
            assert t.ndim == t.dim() == t.ndimension() == ndim
    # The gradient of a global number is this rank's shard of the full gradient.
    for name in ("sum", "norm", "norm 3", "mean", "max", "power"):
        ctx.note(name)
        number = REDUCTIONS[name]
        for each in (plain, model):
            each.zero_grad()
            number(each.weight).backward()
        info = shard_info(model.weight)
        expected = info.shaped(plain.weight.grad.flatten()[info.start : info.stop])
        torch.testing.assert_close(model.weight.grad.as_subclass(Tensor), expected, rtol=1e-12, atol=1e-12)


TERMS: dict[str, Callable[[list[nn.Parameter], Tensor], Tensor]] = {
    "squares": lambda params, of_rank: of_rank * sum(p.pow(2).sum() + p.sum() for p in params),
    "norms": lambda params, of_rank: sum(of_rank * p.norm(3) for p in params),
    "distances": lambda params, of_rank: sum((p - p.detach() / 2).square().mean() for p in params) * of_rank,
    "own coefficients": lambda params, of_rank: sum(
        float(of_rank) * (p - p.detach().clone() / 2).sum() for p in params
    ),
    "largest": lambda params, of_rank: torch.stack([p.max() for p in params]).sum() * of_rank,
}


@ranks(2, 4)
def test_parameters_in_losses(ctx) -> None:
    """Each rank's coefficient applies to the full parameter. Ranks average these gradients as they average units'
    gradients."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).double()
    x = torch.randn(ctx.world_size, 4, 5).double()
    sharded: dict[str, Any] = {"process_group": ctx.group}
    if ctx.world_size == 4:
        mesh = ctx.device_mesh((2, 2), ("replicas", "shards"))
        sharded = {"device_mesh": mesh, "strategy": ShardingStrategy.HYBRID_SHARD}
    whole = {"process_group": ctx.group, "strategy": ShardingStrategy.NO_SHARD}
    for options in (sharded, sharded | {"layout": Whole(9.0)}, whole):
        model = fully_shard(copy.deepcopy(plain), policy={nn.Linear}, **options)
        for (name, term), factor in zip(TERMS.items(), itertools.cycle((None, 1.0)), strict=False):
            ctx.note(f"{options} {name} {factor}")
            configure(model, divide_factor=factor)
            for each, inputs in ((plain, x), (model, x[ctx.rank : ctx.rank + 1])):
                each.zero_grad()
                for own in inputs:
                    out = each(own)
                    loss = out.square().mean() + term(list(each.parameters()), out.mean())
                    (loss if each is model else loss / (factor or ctx.world_size)).backward()
            for fqn, grad in whole_gradients(model).items():
                torch.testing.assert_close(grad, plain.get_parameter(fqn).grad, rtol=1e-9, atol=1e-12)


@ranks(2)
def test_parameters_in_losses_frozen_before_backward(ctx) -> None:
    """Frozen parameters get no gradient, as in torch."""
    plain = nn.Linear(3, 3).double()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = fully_shard(copy.deepcopy(plain), process_group=ctx.group, strategy=strategy)
        loss = model(torch.ones(2, 3).double()).sum() + model.weight.pow(2).sum() + model.bias.norm()
        model.weight.requires_grad_(False)
        loss.backward()
        assert model.weight.grad is None, strategy
        assert model.bias.grad is not None, strategy


FUNCTIONS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "a reduction": torch.sum,
    "of a copy": lambda p: p.clone().sum(),
    "of two": lambda p: nn.functional.mse_loss(p, p.detach().as_subclass(Tensor)),
    "elements": lambda p: torch.square(p).sum() + p.sum(),
}


@ranks(2)
def test_functions_that_take_a_part_for_the_whole(ctx) -> None:
    """Backward refuses such functions. The methods that the error names are right, and so is the next step."""
    plain = nn.Linear(3, 3).double()
    torch.manual_seed(0)
    nn.init.normal_(plain.weight)
    model = fully_shard(copy.deepcopy(plain), process_group=ctx.group)
    q, x = torch.randn(()).double(), torch.ones(2, 3).double()
    for name, function in FUNCTIONS.items():
        ctx.note(name)
        with pytest.raises(RuntimeError, match=r"'weight' is sharded: .*p\.sum\(\).*\(p - q\)\.square\(\)\.mean\(\)"):
            (model(x).sum() + function(model.weight)).backward()
        recover(model)
    for each in (plain, model):
        each.zero_grad()
        p = each.weight
        (each(x).sum() + p.sum() + (p - q).square().mean()).backward()
    assert whole_gradients(model)["weight"].allclose(plain.weight.grad)


@ranks(2)
@torch.no_grad()
def test_where_rows_are_whole_a_part_is_a_matrix(ctx) -> None:
    for arguments in ({"layout": Rows()}, {"strategy": ShardingStrategy.NO_SHARD}):
        model = fully_shard(nn.Linear(4, 4), process_group=ctx.group, **arguments)
        rows = model.weight.shape[0]
        assert model.weight[rows - 1].shape == (4,)
        assert (torch.ones(2, 4) @ model.weight.T).shape == (2, rows)
    model = fully_shard(nn.Linear(4, 4), process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"'bias' is sharded: .*of shape \(4,\)"):
        model.bias[0] = 1  # a different element on each rank
    assert model.bias.T.shape == model.bias.shape  # right for a vector
    with summon_full_params(model):
        model.weight[3] = 0
    with summon_full_params(model):
        assert model.weight.any(1).tolist() == [True, True, True, False]


INITIALISERS: dict[str, dict[str, Any]] = {
    name: {"val": 0.5} if name == "constant_" else {"sparsity": 0.5} if name == "sparse_" else {}
    for name in dir(nn.init)
    if name.endswith("_") and not name.startswith(("_", "trunc_"))
}
WAYS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "parameter": lambda p: p,
    "data": lambda p: p.data,
    "detached": lambda p: p.detach(),
}


@ranks(2)
def test_initialisers(ctx) -> None:
    """Initialisers fill shards as they fill full parameters, or raise on all ranks alike, including where a shard is all or
    nothing."""
    for (name, arguments), layout in itertools.product(INITIALISERS.items(), (None, Rows(), Whole(math.inf))):
        ctx.note(f"{name} {layout}")
        plain = nn.Sequential(nn.Conv1d(2, 2, 2) if name == "dirac_" else nn.Linear(2, 2), nn.Linear(4, 4))
        model = fully_shard(copy.deepcopy(plain), process_group=ctx.group, layout=layout)
        for (way, of), by_name, index in itertools.product(WAYS.items(), (False, True), (0, 1)):
            param, whole = (list(each.parameters())[index] for each in (model, plain))
            initialise = getattr(nn.init, name)
            try:
                torch.manual_seed(3)
                initialise(whole, **arguments)
            except ValueError:  # for a vector
                continue
            told = ""
            try:
                torch.manual_seed(3)
                initialise(tensor=of(param), **arguments) if by_name else initialise(of(param), **arguments)
            except (RuntimeError, ValueError) as e:
                told = str(e)
                assert "is sharded: " in told, (way, by_name, told)
            outcomes: list[Any] = [None] * ctx.world_size
            dist.all_gather_object(outcomes, bool(told), group=ctx.group)
            assert len(set(outcomes)) == 1, (way, by_name, outcomes, told)
            if told:
                assert name not in ("normal_", "uniform_", "constant_", "ones_", "zeros_")
            else:
                fqn = shard_info(param).fqn
                assert full_params(model)[fqn].equal(whole.detach()), (way, by_name)


DRAWS: dict[str, Callable[[nn.Parameter], object]] = {
    "detached": lambda p: p.detach().uniform_(-1, 1),
    "gradient": lambda p: p.grad.normal_(),
    "normal": nn.init.normal_,
    "like data": lambda p: p.data.copy_(torch.rand_like(p.data)),
    "like a gradient": lambda p: p.grad.copy_(torch.randn_like(p.grad)),
}


@ranks(2, 3)
def test_draws_are_those_of_the_whole(ctx) -> None:
    """Ranks with the same seed draw one process's random numbers, wherever a shard begins, and continue with the same
    state."""
    plain = nn.Sequential(nn.Linear(5, 3), nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)).double()
    for options in ({}, {"cpu_offload": CPUOffload()}, {"layout": Rows(max_padding=9.0)}, {"layout": Whole(9.0)}):
        model = fully_shard(copy.deepcopy(plain), policy={nn.Linear}, process_group=ctx.group, **options)
        for name, draw in DRAWS.items():
            ctx.note(f"{name} {options}")
            after = []
            for each in (plain, model):
                torch.manual_seed(3)
                for p in each.parameters():
                    p.grad = torch.zeros_like(p)
                    draw(p)
                after.append(torch.rand(()))
            assert torch.equal(*after)
            for fqn, value in full_params(model).items():
                assert value.equal(plain.get_parameter(fqn).detach())
            for fqn, grad in whole_gradients(model).items():
                assert grad.equal(plain.get_parameter(fqn).grad)


OWNERS: dict[str, Callable[[Tensor], Any]] = {
    "matrices": lambda t: (t @ t.T).trace(),
    "with a tensor of this rank": lambda t: (t * t.clone()).sum().sqrt(),
    "largest of a row's": lambda t: t.amax(-1).clone().mul(t.amax(-1)).max() + 1,
    "without elements": lambda t: (t - t.clone() + 2).max(),
    "of one and another": lambda t: torch.stack([(t * t.clone()).sum(), (t @ t.T).norm()]).sum(),
    "in place": lambda t: torch.zeros(()).double().add_((t @ t.T).norm()),
    "not in the table": lambda t: torch.linalg.svdvals(t).sum(),
}


@ranks(2, 3)
def test_what_only_an_owner_computes(ctx) -> None:
    """An owner's computation sends nothing until all ranks need a number of it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 4, bias=False)).double()
    model = fully_shard(copy.deepcopy(plain), process_group=ctx.group, layout=Whole(max_padding=math.inf))
    for each in (plain, model):
        each(torch.arange(10.0).view(2, 5).double()).square().sum().backward()
    for name, use in OWNERS.items():
        ctx.note(name)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            for part, whole in ((p.grad, q.grad), (p.detach(), q)):
                assert float(use(part)) == pytest.approx(float(use(whole)), rel=1e-12)
            if p.numel():  # like an optimizer: other ranks need not take part
                p.grad.mul_(1 / (p.grad * p.grad.clone()).sum().sqrt())
            q.grad.mul_(1 / q.grad.norm())
    for each in (plain, model):  # as part of a loss
        each.zero_grad()
        sum(torch.ones(()) + (p * p.detach().clone()).sum() for p in each.parameters()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        info = shard_info(p)
        assert info.in_memory_order(p.grad).equal(q.grad.flatten()[info.start : info.stop])
    with pytest.raises(RuntimeError, match=r"is sharded: .*'@' needs the full tensor"):
        model[1].weight @ model[0].weight
    assert type(nn.Parameter(model[0].weight.data)) is nn.Parameter


@ranks(2)
def test_parameters_from_a_vector(ctx) -> None:
    """A vector of full parameters has other elements at the positions of this rank's shards."""
    for layout in (None, Rows(), Whole(math.inf)):
        model = fully_shard(nn.Linear(4, 4), process_group=ctx.group, layout=layout)
        with summon_full_params(model):
            whole = nn.utils.parameters_to_vector(model.parameters()).detach() + 1
        before = [p.detach().clone() for p in model.parameters()]
        for vector in (whole, torch.ones(sum(p.numel() for p in before))):
            with pytest.raises(
                RuntimeError, match=r"'weight' is sharded: .*'vector_to_parameters' needs the full tensor"
            ):
                nn.utils.vector_to_parameters(vector, model.parameters())
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        with summon_full_params(model):
            nn.utils.vector_to_parameters(whole, model.parameters())
        with summon_full_params(model):
            assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), whole)
