"""Experts on a subset of the ranks and dense parameters on all: in one unit by ``shard_mesh_fn``, or in separate units."""

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from models import Gather
from on_ranks import ranks
from pairs import some
from parity import adamw, step_all
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._comm.composite_groups import ExpertRanks
from flatshard._comm.runtime import Runtime
from flatshard._handle.adapters.tensor_parallel import common_runtime

WIDTH, EXPERTS = 6, 4
FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD


class Experts(nn.Module):
    """Experts divided over the ranks of ``group``. Every token passes through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        local = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        if self.group is None:
            return torch.einsum("bi,eij->bj", x, local)
        mine = torch.einsum("rbi,eij->rbj", Gather.apply(x, self.group), local)
        return Gather.apply(mine, self.group).sum(0)[self.group.rank()]


class Moe(nn.Module):
    """A dense module with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.front, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.experts(self.front(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Moe() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_expert(name: str) -> bool:
    return "experts" in name


def build(mesh: Any, as_dtensor: bool) -> tuple[Model, Model]:
    """Return the plain model with all experts, and one with this rank's. The mesh dimension "ep" divides the experts."""
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    for block in model.blocks:
        block.experts.group = mesh.get_group("ep")
        whole = distribute_tensor(block.experts.weight.detach(), mesh["ep"], [Shard(0)])
        block.experts.weight = nn.Parameter(whole if as_dtensor else whole.to_local())
    return plain, model


def shard(ctx: Any, mesh: Any, model: nn.Module, strategy: ShardingStrategy, **options: Any) -> nn.Module:
    own, rest = mesh["dp"], {"process_group": ctx.group}
    if strategy is HYBRID:  # experts are replicated over "dp", and each is on one rank of "one"
        own, rest = mesh["dp", "one"], {"device_mesh": mesh["dp", "ep"]}
    return fully_shard(
        model,
        policy={Moe},
        strategy=strategy,
        shard_mesh_fn=lambda fqn, param: own if is_expert(fqn) else None,
        **rest,
        **options,
    )


def assert_like(mesh: Any, model: nn.Module, plain: nn.Module, what: str) -> None:
    """Compare weights or gradients with the plain model's; only this rank's experts count."""
    with flatshard.summon_full_params(model, writeback=False, with_grads=True):
        for (name, param), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            got, want = getattr(param, what), getattr(expected, what)
            got = got.to_local() if isinstance(got, DTensor) else got
            want = want.chunk(mesh["ep"].size())[mesh["ep"].get_local_rank()] if is_expert(name) else want
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def meshes(ctx: Any, strategy: ShardingStrategy) -> Any:
    shape, names = ((2, 1, 2), ("dp", "one", "ep")) if strategy is HYBRID else ((2, 2), ("dp", "ep"))
    return ctx.device_mesh(shape, names)


def batch(seed: int) -> Tensor:
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(
    ("strategy", "as_dtensor", "held"),
    some(itertools.product((FULL, GRAD_OP, HYBRID), (False, True), (False, True)), 4),
    ids=str,
)
@ranks(4)
def test_experts_in_the_unit_of_the_rest(ctx, strategy: ShardingStrategy, as_dtensor: bool, held: bool):
    mesh = meshes(ctx, strategy)
    plain, model = build(mesh, as_dtensor)
    shard(ctx, mesh, model, strategy)
    assert [len(unit.flats) for unit in flatshard.describe(model).units] == [1, 2, 2]
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(2):
        for micro in range(1 + held):
            x = batch(2 * step + micro)
            plain(x.flatten(0, 1)).square().mean().backward()
            with flatshard.no_sync(model) if held and not micro else contextlib.nullcontext():
                model(x[ctx.rank]).square().mean().backward()
        assert_like(mesh, model, plain, "grad")
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-9, atol=0)
        assert_like(mesh, model, plain, "grad")
        total = flatshard.optim.get_total_norm(model).double()
        torch.testing.assert_close(total, torch.tensor(0.1).double(), rtol=1e-4, atol=0)
        step_all(optimizers)
    assert_like(mesh, model, plain, "data")


@ranks(4)
def test_features_over_two_meshes(ctx, path: str):
    """Units with DTensors support checkpoints, copies, hooks, statistics and ``describe``."""
    mesh = meshes(ctx, FULL)
    plain, model = build(mesh, True)
    shard(ctx, mesh, model, FULL)
    flats = [flat for unit in flatshard.describe(model).units for flat in unit.flats]
    assert [flat.world_size for flat in flats] == [4, 4, 2, 4, 2]
    assert [is_expert(flat.fqns[0]) for flat in flats] == [False, False, True, False, True]
    assert str(flatshard.describe(model)).count(" of 2 ranks") == 2
    copied = copy.deepcopy(model, {id(block.experts.group): block.experts.group for block in model.blocks})
    flatshard.comm.register_comm_hook(model, None, lambda state, *tensors: state.reduce_scatter(*reversed(tensors)))
    x = batch(1)
    plain(x.flatten(0, 1)).square().mean().backward()
    for each in (model, copied):
        each(x[ctx.rank]).square().mean().backward()
        assert_like(mesh, each, plain, "grad")
    statistics = flatshard.optim.gradient_statistics(model)
    for name, param in plain.named_parameters():
        assert statistics[name].norm == pytest.approx(float(param.grad.norm()))
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (plain, model)]
    for optimizer in optimizers:
        optimizer.step()
    saved = flatshard.checkpoint.full_state_dict(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(saved[name], param.detach(), rtol=1e-9, atol=1e-12)
    whole = flatshard.checkpoint.optim_state_dict(model, optimizers[1], full=True)
    assert whole["state"]["blocks.1.experts.weight"]["exp_avg"].shape == (EXPERTS, WIDTH, WIDTH)
    flatshard.save_checkpoint(path, {"model": model, "optimizer": optimizers[1]})
    _, other = build(mesh, True)
    shard(ctx, mesh, other, GRAD_OP)
    loaded = torch.optim.Adam(other.parameters(), lr=1e-2)
    flatshard.load_checkpoint(path, {"model": other, "optimizer": loaded})
    for model, x_of, optimizer in ((plain, x.flatten(0, 1), optimizers[0]), (other, x[ctx.rank], loaded)):
        optimizer.zero_grad()
        model(x_of).square().mean().backward()
        optimizer.step()
    assert_like(mesh, other, plain, "data")


@ranks(4)
def test_what_is_refused(ctx, path: str):
    mesh = meshes(ctx, FULL)
    _, model = build(mesh, True)
    name = r"'blocks\.0\.experts\.weight'"
    with pytest.raises(ValueError, match=f"{name} is a DTensor over ranks .* first call fully_shard"):
        fully_shard(model, policy={Moe}, process_group=ctx.group)
    _, model = build(mesh, False)
    for options, message in (
        ({"reshard_after_forward": 2}, f"{name} .* reshard_after_forward=2 .* pass True or False"),
        ({"strategy": ShardingStrategy.NO_SHARD}, f"{name} .* use FULL_SHARD"),
        ({"shard_mesh_fn": lambda fqn, param: mesh}, r"'head\.weight': device_mesh has 2 dimensions"),
        ({"shard_mesh_fn": lambda fqn, param: 2}, r"'head\.weight': device_mesh must be a DeviceMesh"),
        ({"shard_placement_fn": None}, r"shard_mesh_fn="),
    ):
        options = {"shard_mesh_fn": lambda fqn, param: mesh["dp"] if is_expert(fqn) else None} | options
        with pytest.raises((TypeError, ValueError), match=message):
            fully_shard(model, policy={Moe}, process_group=ctx.group, **options)
        assert all(type(p) is nn.Parameter for p in model.parameters())
    shard(ctx, mesh, model, FULL)
    with pytest.raises(ValueError, match=r"reshard_after_forward=2 is for one group of ranks"):
        flatshard.configure(model.blocks[0], reshard_after_forward=2)
    lost = r"experts\.weight'.*ranks \[0, 2\] and \[1, 3\] have different values of this name"
    with pytest.raises(RuntimeError, match=lost):
        flatshard.save_checkpoint(path, {"model": model})
    with pytest.raises(ValueError, match=lost):
        flatshard.checkpoint.full_state_dict(model)


@ranks(4)
def test_each_expert_on_one_rank(ctx):
    """Gradients are divided by the user's factor even over a single rank; the first rank broadcasts weights."""
    mesh = ctx.device_mesh((1, 4), ("dp", "ep"))
    plain, model = build(mesh, False)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.mul_(0 if ctx.rank and not is_expert(name) else 1)
    shard(ctx, mesh, model, FULL, sync_module_states=True)
    flatshard.configure(model, divide_factor=8)
    x = batch(1)
    (plain(x.flatten(0, 1)).square().mean() / 2).backward()
    model(x[ctx.rank]).square().mean().backward()
    assert_like(mesh, model, plain, "grad")
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(flatshard.clip_grad_norm_(model, 0.1), expected)


@ranks(4)
def test_runtimes_that_are_added_up_together(ctx):
    """Experts in a unit of their own and experts of ``shard_mesh_fn`` over the same ranks are reduced over different
    ranks."""
    mesh = meshes(ctx, FULL)
    everyone, runtime, other = (
        Runtime.of(group, torch.device("cpu")) for group in (ctx.group, mesh.get_group("dp"), mesh.get_group("ep"))
    )
    among = ExpertRanks.within(runtime, everyone)
    assert among == ExpertRanks.within(runtime, everyone)
    assert among != runtime
    assert runtime == runtime.using(lambda *place: flatshard.comm.builtin_collectives(*place))
    _, counts = common_runtime([runtime, other, None])
    assert counts == [other.rank == 0, runtime.rank == 0, runtime.rank == other.rank == 0]


@ranks(4)
def test_experts_on_other_groups(ctx):
    """Experts are sharded over the ranks that hold the same ones, and the rest over all; each has its own divisor."""
    mesh = meshes(ctx, FULL)
    plain, model = build(mesh, False)
    fully_shard(model.blocks[0].experts, device_mesh=mesh["dp"])
    # A rank's gradient is the sum over the tokens of two ranks, so the mean over all ranks is a quarter of the sum.
    flatshard.configure(model.blocks[0].experts, divide_factor=4)
    with pytest.warns(UserWarning, match=r"'blocks\.0\.experts\.\S+' .*sharded by an earlier call.* shard_mesh_fn="):
        shard(ctx, mesh, model, FULL)
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for step in range(2):
        x = batch(step)
        plain(x.flatten(0, 1)).square().mean().backward()
        model(x[ctx.rank]).square().mean().backward()
        step_all(optimizers)
    assert_like(mesh, model, plain, "data")
