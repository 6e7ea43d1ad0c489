"""Ranks gather, reduce and free alike, although each has facts of its own: its data, its references, its garbage."""

from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import ranks
from parity import check_same_gradients, parts, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import ShardingStrategy
from flatshard._composable.state import unit_of
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.lifetime import LENT, SHARDED


class Shows(nn.Module):
    """A module that can return its parameter, and pass its input by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, shows: bool = False, passes: bool = False) -> Any:
        if passes:
            return x * 2
        return (x @ self.weight, self.weight) if shows else x @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shows, self.head = Shows(), nn.Linear(4, 4)

    def forward(self, x: Tensor, shows: bool = False, first_passes: bool | None = None) -> Any:
        if shows:
            return self.shows(x, shows)
        if first_passes is not None:
            x = x + self.shows(x, passes=first_passes).detach()
        return self.head(self.shows(x))


def has_memory(module: nn.Module) -> bool:
    """Return whether the unsharded parameters of a unit have memory."""
    unit = unit_of(module)
    assert unit is not None
    return any(flat.unsharded.nbytes for flat in unit.handle.flats)


def train(ctx: Any, plain: nn.Module, model: nn.Module, **arguments: bool) -> None:
    for _ in range(2):
        for m, x in zip(
            (plain, model), parts(ctx, torch.randn(2 * ctx.world_size, 4, dtype=torch.double)), strict=True
        ):
            m(x, **arguments).square().mean().backward()
    check_same_gradients(model, plain)


@ranks(2)
def test_one_rank_keeps_an_output_that_is_a_parameter(ctx):
    plain, model = twins(ctx, Model, {Shows})
    kept = model(torch.ones(1, 4, dtype=torch.double), shows=True)
    if ctx.rank == 1:
        del kept
    train(ctx, plain, model)
    with torch.no_grad():
        for param in (*plain.parameters(), *model.parameters()):
            param.mul_(0.5)
            param.grad = None
    output = model(torch.ones(1, 4, dtype=torch.double))
    assert not has_memory(model.shows)  # the graph of what was kept is of no use now
    del output
    train(ctx, plain, model)


@ranks(2)
def test_an_output_requires_grad_on_one_rank(ctx):
    """The unit is used again in the same pass, where all ranks or none gather."""
    plain, model = twins(ctx, Model, {Shows}, strategy=ShardingStrategy.SHARD_GRAD_OP)
    for m, x in zip((plain, model), parts(ctx, torch.randn(2 * ctx.world_size, 4, dtype=torch.double)), strict=True):
        if m is model:
            m(x, first_passes=ctx.rank == 0).square().mean().backward()
        else:
            first, second = x.chunk(2)
            x = torch.cat([first * 3, second + m.shows(second).detach()])
            m(x).square().mean().backward()
    check_same_gradients(model, plain)


class Expert(nn.Module):
    """A module that needs less of its parameters for some data: no tokens, or no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, needs: str = "all") -> tuple[Tensor, ...]:
        if needs == "bias":
            return self.bias.expand(len(x), 4), x
        out = x @ self.weight if needs == "weight" else x @ self.weight + self.bias
        return (out, self.bias) if needs == "all, and shows one" else (out,)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.head = nn.Linear(4, 4), Expert(), nn.Linear(4, 4)

    def forward(self, x: Tensor, needs: str, calls: list[str]) -> Tensor:
        x = self.first(x)
        for call in calls:
            again = call == "recomputed"
            shown = checkpoint(self.expert, x, needs, use_reentrant=True) if again else self.expert(x, needs)
            x = sum(shown)
        return self.head(x)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize(
    ("needs", "calls"),
    [("bias", "direct, direct"), ("all, and shows one", "direct, direct"), ("weight", "recomputed, recomputed")]
    + [("weight", "recomputed, direct"), ("weight", "direct, recomputed")],
)
@ranks(2, timeout=20)
def test_one_rank_needs_less_of_a_unit(ctx, strategy: ShardingStrategy, needs: str, calls: str):
    """An output that is a view of a parameter keeps the memory, and so does a graph that lacks a parameter. Other ranks free
    the unit, and gather it again.
    """
    plain, model = twins(ctx, Experts, {Expert, nn.Linear}, strategy=strategy)
    for rank_1_needs in ("all", needs, needs):
        x = torch.randn(2 * ctx.world_size, 4, dtype=torch.double)
        for rank, part in enumerate(x.chunk(ctx.world_size)):
            (
                plain(part, rank_1_needs if rank else "all", calls.split(", ")).square().mean() / ctx.world_size
            ).backward()
        own = x.chunk(ctx.world_size)[ctx.rank]
        model(own, rank_1_needs if ctx.rank else "all", calls.split(", ")).square().mean().backward()
        assert not has_memory(model.expert)
        check_same_gradients(model, plain)


@ranks(2)
def test_an_output_that_is_a_parameter_outlives_its_forward(ctx):
    plain, model = twins(ctx, Expert, None)
    x = torch.ones(1, 4, dtype=torch.double)
    with torch.no_grad():
        shown = model(x, "bias")[0]
        assert unit_of(model).handle.is_sharded
        assert has_memory(model)
        torch.testing.assert_close(shown[0], plain.bias)
        model(x)
        assert not has_memory(model)


class Hides(nn.Module):
    """Returns a function, in which no tensor is found. Some of its parameters may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, all_of_it: bool) -> Any:
        y = self.first(x)
        if all_of_it:
            y = self.second(y)
        return lambda: y


@pytest.mark.filterwarnings("ignore:unit")
@ranks(2)
def test_what_was_lent_is_freed_when_the_backward_ends(ctx):
    model = nn.ModuleList([Hides(), nn.Linear(4, 4)])
    flatshard.fully_shard(model[0], process_group=ctx.group)
    for all_of_it in (False, True, False, True):
        model[1](model[0](torch.ones(2, 4), all_of_it)()).square().mean().backward()
        assert not has_memory(model[0])


class Partly(nn.Module):
    """A module that leaves out one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@ranks(2)
def test_a_unit_that_lacks_a_parameter_in_each_step_is_freed_when_it_is_left(ctx):
    """Its forward watches its inputs from the second step on."""
    model = flatshard.fully_shard(nn.Sequential(nn.Linear(4, 4), Partly()), policy={Partly}, process_group=ctx.group)
    seen: list[bool] = []
    model[0].register_forward_hook(
        lambda m, args, y: y.register_hook(lambda grad: seen.append(has_memory(model[1]))) and None
    )
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert seen == [True, False]


class Aside(nn.Module):
    """A module with a unit inside that no gradient comes to. Some ranks leave out a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, uses_bias: bool) -> Tensor:
        y = x * self.scale + (self.bias if uses_bias else 0)
        self.told = self.inner(y)
        return y


@ranks(2, timeout=20)
def test_a_rank_that_waits_for_more_gathers_ahead_like_others(ctx):
    model = nn.ModuleList([Aside(), nn.Linear(4, 4)])
    for module in (model[0].inner, *model):
        flatshard.fully_shard(module, process_group=ctx.group, backward_prefetch="BACKWARD_POST")
    for _ in range(3):
        model[1](model[0](torch.ones(2, 4), ctx.rank == 0)).square().mean().backward()
        assert all(p.grad is not None for p in (model[0].scale, model[0].bias))
        assert flatshard.clip_grad_norm_(model, 1.0) > 0


class Bypassed(nn.Linear):
    """Some forwards use no parameter, and some ranks leave out the bias."""

    def forward(self, x: Tensor, bypass: Tensor | None, uses_bias: bool) -> Tensor:
        self.shown = [self.weight, self.bias]
        return nn.functional.linear(x, self.weight, self.bias if uses_bias else None) if bypass is None else x * bypass


@ranks(2, timeout=20)
def test_a_forward_without_parameters_is_reached_last(ctx):
    """With ``inputs=`` a backward does not tell beforehand that it gets there. A rank that lacks the bias keeps the unit."""
    model = flatshard.fully_shard(Bypassed(4, 4), process_group=ctx.group)
    for chooses in (False, True):
        x, bypass = torch.ones(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
        loss = model(model(x, bypass, True), None, ctx.rank == 0).sum()
        flatshard.reshard(model)
        loss.backward(inputs=[x, *vars(model).pop("shown")] if chooses else None)
        assert flatshard.clip_grad_norm_(model, 1.0) > 0
        assert not has_memory(model)


@ranks(2)
def test_a_gather_that_does_not_start_takes_lent_memory_back(ctx):
    model = flatshard.fully_shard(Expert(), process_group=ctx.group)
    handle = unit_of(model).handle
    with torch.no_grad():
        shown = model(torch.ones(1, 4), "bias")[0]
    assert handle.state is LENT
    refusal = RuntimeError("out of memory")
    with mock.patch.object(FlatParam, "gather", side_effect=refusal), pytest.raises(flatshard.CollectiveError):
        flatshard.unshard(model)
    assert handle.state is SHARDED
    assert not has_memory(model)
    del shown


@ranks(2)
def test_gradients_of_inputs_do_not_tell_what_a_unit_lacks(ctx):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    assert all(unit_of(linear).last_gradient_frees for linear in model)
