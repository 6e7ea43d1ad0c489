"""Expert parallelism by all-to-all, as in ``examples/experts.py``, compared with one process that has all experts."""

import contextlib
import copy
import functools
import itertools
import math
import re
import runpy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from pairs import some
from recording import Recording
from scripts import EXAMPLES, PACKAGE
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard
from flatshard.layouts import Rows, Whole
from flatshard.optim import WholeParameterOptimizer

example = runpy.run_path(str(EXAMPLES["experts"]))
MoE, Experts, divide_experts = example["MoE"], example["Experts"], example["divide_experts"]

WIDTH, EXPERTS, ROWS = 6, 4, 5
FULL, GRAD_OP, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.HYBRID_SHARD

Optimizer = torch.optim.Optimizer


def make_plain() -> nn.Sequential:
    """Return the model with all experts, for one process."""
    torch.manual_seed(0)
    blocks = [MoE(EXPERTS, WIDTH) for _ in range(2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, 3)).double()


def expert_mesh(ctx: Any, over: int, strategy: ShardingStrategy = FULL) -> Any:
    """Return a mesh of all ranks whose dimension "ep" has ``over`` of them."""
    size = ctx.world_size // over
    if strategy is HYBRID:  # experts are replicated over "dp", and each is on one rank of "one"
        return ctx.device_mesh((size, 1, over), ("dp", "one", "ep"))
    return ctx.device_mesh((size, over), ("dp", "ep"))


def shard_experts(
    plain: nn.Module, mesh: Any, strategy: ShardingStrategy = FULL, policy: Any = frozenset({MoE}), **options: Any
) -> Any:
    """Return a copy of ``plain`` with its experts divided over ``mesh["ep"]``, and all parameters sharded."""
    model = copy.deepcopy(plain)
    divide_experts(model, mesh)
    own = mesh["dp"]
    if strategy is HYBRID:
        own, options = mesh["dp", "one"], {"device_mesh": mesh["dp", "ep"], **options}
    options = {"shard_mesh_fn": lambda fqn, param: own if isinstance(param, DTensor) else None, **options}
    return fully_shard(model, policy=policy, strategy=strategy, **options)


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check_same(model: nn.Module, plain: nn.Module, what: str, rtol: float = 1e-9) -> None:
    """Compare full parameters or gradients, and biases."""
    with flatshard.summon_full_params(model, writeback=False, with_grads=True):
        for (name, param), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            got, want = full(getattr(param, what)), getattr(expected, what)
            assert (got is None) is (want is None), f"{what} of {name}: {got}, and {want} in one process"
            if want is not None:
                atol = rtol * max(1e-3, float(want.abs().max()))
                torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    for moe, other in zip(*[[m for m in each.modules() if isinstance(m, MoE)] for each in (model, plain)], strict=True):
        torch.testing.assert_close(moe.bias, other.bias)


def batch(ctx: Any, seed: int) -> Tensor:
    """Return the rows of all ranks."""
    return torch.randn(ctx.world_size, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def balance(model: nn.Module) -> None:
    """Change the biases of experts by their load on all ranks."""
    for moe in (each for each in model.modules() if isinstance(each, MoE)):
        if moe.group is not None:
            torch.distributed.all_reduce(moe.load)
        moe.bias += 1e-2 * (moe.load.mean() - moe.load).sign()
        moe.load.zero_()


def adamw(params: Any, **options: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, **options)


def train(
    ctx: Any,
    plain: nn.Module,
    model: nn.Module,
    optimizer: Callable[[Any], Optimizer] = adamw,
    *,
    steps: int = 2,
    prepare: Callable[[nn.Module, int], None] | None = None,
) -> list[Optimizer]:
    """Train both for some steps of two microbatches, compare all, and return the optimizers.

    ``prepare(model, number)`` is called before each microbatch.
    """
    optimizers = [optimizer(m.parameters()) for m in (plain, model)]
    for step in range(steps):
        for micro in range(2):
            for m in (plain, model) if prepare is not None else ():
                prepare(m, micro)
            x = batch(ctx, 2 * step + micro)
            plain(x.flatten(0, 1)).square().mean().backward()
            with flatshard.no_sync(model) if not micro else contextlib.nullcontext():
                model(x[ctx.rank]).square().mean().backward()
        check_same_after(plain, model, optimizers)
    return optimizers


def check_same_after(plain: nn.Module, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Clip and step both, and compare gradients, norms and parameters."""
    for m in (plain, model):
        balance(m)
    check_same(model, plain, "grad")
    norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (plain, model)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)
    check_same(model, plain, "grad")
    for each in optimizers:
        each.step()
        each.zero_grad()
    check_same(model, plain, "data")


@pytest.mark.parametrize(
    ("over", "strategy"), some(itertools.product((1, 2, 4), (FULL, GRAD_OP, HYBRID)), 5, turn=1), ids=str
)
@ranks(4)
def test_training(ctx, over: int, strategy: ShardingStrategy):
    plain = make_plain()
    train(ctx, plain, shard_experts(plain, expert_mesh(ctx, over, strategy), strategy))


@pytest.mark.parametrize("over", [1, 2])
@ranks(2, pool="two_ranks")
def test_training_on_two_ranks(ctx, over: int):
    plain = make_plain()
    train(ctx, plain, shard_experts(plain, expert_mesh(ctx, over)))


OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {"layout": Rows()},
    "whole": {"layout": Whole()},
    "offload": {"cpu_offload": True},
    "static buffers": {"static_buffers": True},
    "synchronised": {"sync_module_states": True},
    "recompute": {"recompute": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@ranks(4)
def test_options(ctx, option: str):
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, 2), **OPTIONS[option])
    train(ctx, plain, model)


@ranks(4)
def test_a_policy_names_the_experts_and_their_mesh(ctx):
    plain, mesh = make_plain(), expert_mesh(ctx, 2)
    experts = {"shard_mesh_fn": lambda fqn, param: mesh["dp"]}
    policy = {"1": {}, "1.experts": experts, "2": {}, "2.experts": experts}
    model = shard_experts(plain, mesh, policy=policy, shard_mesh_fn=None)
    sizes = {unit.fqn: [flat.world_size for flat in unit.flats] for unit in flatshard.describe(model).units}
    assert sizes == {"": [4], "1": [4], "1.experts": [2], "2": [4], "2.experts": [2]}
    train(ctx, plain, model)


@ranks(4)
def test_experts_from_the_meta_device(ctx):
    plain, mesh = make_plain(), expert_mesh(ctx, 2)
    with torch.device("meta"):
        model = shard_experts(make_plain(), mesh)
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    for moe in model[1:3]:
        moe.load.zero_()  # it is not in the state
    train(ctx, plain, model)


def in_groups(params: Any) -> Optimizer:
    """Experts have a learning rate and a weight decay of their own."""
    params = list(params)
    experts = [p for p in params if len(flatshard.full_shape(p)) == 3]
    rest = [p for p in params if len(flatshard.full_shape(p)) != 3]
    return torch.optim.AdamW([{"params": experts, "lr": 3e-2, "weight_decay": 0.0}, {"params": rest}], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "fused": functools.partial(adamw, fused=True),
    "foreach": functools.partial(adamw, foreach=True),
    "in groups": in_groups,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(4)
def test_optimizers(ctx, name: str):
    plain = make_plain()
    train(ctx, plain, shard_experts(plain, expert_mesh(ctx, 2)), OPTIMIZERS[name])


class MuonOfStacks(Optimizer):
    """Muon that steps each matrix of a stack by itself, as training scripts with stacked experts have it."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.9, together: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "together": together})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters. ``together`` divides by the norm of the stack, in place of a matrix."""
        for group in self.param_groups:
            for p in (each for each in group["params"] if each.grad is not None):
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                update = buffer.mul_(group["momentum"]).add_(p.grad)
                update = update / (update.norm() if group["together"] else update.norm(dim=(-2, -1), keepdim=True))
                for _ in range(5):
                    update = 1.5 * update - 0.5 * update @ update.mT @ update
                p.sub_(update, alpha=group["lr"])


def by_muon(model: nn.Module, is_sharded: bool = True) -> list[Optimizer]:
    """Return optimizers of matrices, of experts, and of all else."""
    dims = {p: len(flatshard.full_shape(p)) for p in model.parameters()}
    matrices, experts, rest = ([p for p in dims if dims[p] in wanted] for wanted in ((2,), (3,), (0, 1)))
    if is_sharded:
        steps_matrices: Any = WholeParameterOptimizer(matrices, torch.optim.Muon, lr=0.02, weight_decay=0.1)
        return [steps_matrices, WholeParameterOptimizer(experts, MuonOfStacks), adamw(rest)]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), MuonOfStacks(experts), adamw(rest)]


def train_by(ctx: Any, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], steps: range) -> None:
    """Train models, of which the first is plain, and compare the others with it."""
    plain, *others = models
    for step in steps:
        x = batch(ctx, step)
        plain(x.flatten(0, 1)).square().mean().backward()
        for model in others:
            model(x[ctx.rank]).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        for model in others:
            check_same(model, plain, "data")


@pytest.mark.parametrize(
    ("over", "strategy", "options"),
    [(2, FULL, {}), (4, FULL, {}), (1, GRAD_OP, {}), (2, HYBRID, {}), (2, FULL, {"layout": Whole(math.inf)})],
    ids=str,
)
@ranks(4)
def test_muon_steps_each_expert(ctx, over: int, strategy: ShardingStrategy, options: dict[str, Any]):
    """Each stack is stepped by a single one of the ranks that share it."""
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, over, strategy), strategy, **options)
    optimizers = by_muon(model)
    experts = model[1].experts.up
    steps_here = torch.tensor(int(optimizers[1].steps_here(experts)))
    torch.distributed.all_reduce(steps_here)
    assert int(steps_here) == (4 if strategy is HYBRID else over)
    train_by(ctx, [plain, model], [*by_muon(plain, False), *optimizers], range(2))


@ranks(4)
def test_muon_of_experts_of_their_own(ctx):
    """Each rank has matrices of its own as plain parameters, in units on ``mesh["dp"]``."""
    mesh = expert_mesh(ctx, 2)
    torch.manual_seed(0)
    layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False).double() for name in ("rest", "0", "1")})
    model = nn.Sequential(copy.deepcopy(layers["rest"]), copy.deepcopy(layers[str(mesh["ep"].get_local_rank())]))
    fully_shard(model[1], device_mesh=mesh["dp"])
    fully_shard(model)
    plain = nn.Sequential(layers["rest"], layers[str(mesh["ep"].get_local_rank())])
    mine = WholeParameterOptimizer(model.parameters(), torch.optim.Muon, lr=0.02)
    theirs = torch.optim.Muon(plain.parameters(), lr=0.02)
    for step in range(2):
        x = batch(ctx, step)
        model(x[ctx.rank]).square().mean().backward()
        with flatshard.summon_full_params(model, writeback=False, with_grads=True):
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                p.grad = q.grad.clone()
        for each in (mine, theirs):
            each.step()
            each.zero_grad()
        with flatshard.summon_full_params(model, writeback=False):
            assert all(map(torch.equal, plain.parameters(), model.parameters()))


@ranks(4)
def test_optimizers_that_see_all_experts_are_refused(ctx):
    """No rank has all experts, and some have all of their matrices."""
    model = shard_experts(make_plain(), expert_mesh(ctx, 2))
    model(batch(ctx, 0)[ctx.rank]).square().mean().backward()
    experts = [model[1].experts.up]
    for kind, options in ((torch.optim.Adafactor, {}), (MuonOfStacks, {"together": True})):
        with pytest.raises(RuntimeError, match=r"more than one matrix: .* such as '1\.experts\.up'.*such as AdamW"):
            WholeParameterOptimizer(experts, kind, **options).step()
    with pytest.raises(RuntimeError, match=r"no rank has the whole of '1\.experts\.up'"):
        torch.optim.Adafactor(experts).step()


@pytest.mark.parametrize("kind", [1, 4, "plain"], ids=str)
@ranks(4)
def test_a_checkpoint_of_muon_fits_any_division_of_experts(ctx, path: str, kind: int | str):
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, 2))
    optimizers = by_muon(plain, False), by_muon(model)
    train_by(ctx, [plain, model], [*optimizers[0], *optimizers[1]], range(2))
    flatshard.save_checkpoint(path, {"model": model, **dict(zip("abc", optimizers[1], strict=True))})
    full = flatshard.checkpoint.optim_state_dict(model, optimizers[1][1], full=True)
    names = [name for name, _ in plain.named_parameters() if "experts" in name]
    for name, param in zip(names, optimizers[0][1].param_groups[0]["params"], strict=True):
        want = optimizers[0][1].state[param]["momentum_buffer"]
        torch.testing.assert_close(full["state"][name]["momentum_buffer"], want, rtol=1e-9, atol=1e-12)
    other = make_plain() if kind == "plain" else shard_experts(make_plain(), expert_mesh(ctx, kind))
    loaded = by_muon(other, kind != "plain")
    flatshard.load_checkpoint(path, {"model": other, **dict(zip("abc", loaded, strict=True))})
    back = shard_experts(make_plain(), expert_mesh(ctx, 2))
    back.load_state_dict(model.state_dict())
    again = by_muon(back)
    flatshard.load_checkpoint(path, {"model": back, "a": again[0], "c": again[2]})
    flatshard.checkpoint.load_optim_state_dict(back, again[1], full)
    if kind == "plain":
        for moment, param in zip(loaded[1].state.values(), optimizers[0][1].param_groups[0]["params"], strict=True):
            want = optimizers[0][1].state[param]["momentum_buffer"]
            torch.testing.assert_close(moment["momentum_buffer"], want, rtol=1e-9, atol=1e-12)
        other, loaded = back, again
    every = [*optimizers[0], *loaded, *(again if loaded is not again else ())]
    train_by(ctx, [plain, other, *([back] if back is not other else [])], every, range(50, 52))


@ranks(4)
def test_norms_over_both_meshes(ctx):
    """The norm of all gradients, of the experts alone, and of one gradient."""
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, 2))
    x = batch(ctx, 0)
    plain(x.flatten(0, 1)).square().mean().backward()
    model(x[ctx.rank]).square().mean().backward()
    for norm in (1.0, 2.0, math.inf):
        totals = [nn.utils.get_total_norm([p.grad for p in m.parameters()], norm) for m in (plain, model)]
        totals.append(flatshard.optim.get_total_norm(model, norm))
        assert [float(each) for each in totals] == pytest.approx([float(totals[0])] * 3)
        want, got = ([p.grad for n, p in m.named_parameters() if "experts" in n] for m in (plain, model))
        assert float(nn.utils.get_total_norm(got, norm)) == pytest.approx(float(nn.utils.get_total_norm(want, norm)))
    statistics = flatshard.optim.gradient_statistics(model)
    for (name, param), mine in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert statistics[name].norm == pytest.approx(float(param.grad.norm()))
        assert float(mine.grad.norm()) == pytest.approx(float(param.grad.norm()))
        assert float(mine.norm()) == pytest.approx(float(param.norm()))
    norms = [nn.utils.clip_grad_norm_(plain.parameters(), 0.01), flatshard.clip_grad_norm_(model, 0.01)]
    torch.testing.assert_close(norms[1].double(), norms[0])
    check_same(model, plain, "grad")


@ranks(4)
def test_an_infinite_gradient_of_one_expert(ctx):
    """``GradScaler`` skips the step on all ranks."""
    plain = make_plain().float()
    model = shard_experts(plain, expert_mesh(ctx, 2))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(3):
        x = batch(ctx, step).float()
        inputs = x.flatten(0, 1), x[ctx.rank]
        for m, rows, scaler in zip((plain, model), inputs, scalers, strict=True):
            scaler.scale(m(rows).square().mean()).backward()
        if step == 1:
            plain[1].experts.up.grad.fill_(math.inf)
            if ctx.rank % 2:
                model[1].experts.up.grad.fill_(math.inf)
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert [each.get_scale() for each in scalers] == [2.0 if step else 4.0] * 2
        check_same(model, plain, "data", rtol=1e-5)


class Checkpointed(nn.Module):
    """A module whose forward is computed again in backward, by torch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Tensor:
        return checkpoint(self.inner, *args, use_reentrant=False)


@pytest.mark.parametrize("around", ["dispatch", "experts"])
@ranks(4)
def test_checkpointing_around_dispatch(ctx, around: str):
    plain, mesh = make_plain(), expert_mesh(ctx, 2)
    if around == "dispatch":
        plain[1], plain[2] = Checkpointed(plain[1]), Checkpointed(plain[2])
    else:
        plain[1].experts, plain[2].experts = Checkpointed(plain[1].experts), Checkpointed(plain[2].experts)
    train(ctx, plain, shard_experts(plain, mesh))


@pytest.mark.parametrize("kind", ["tied", "frozen", "half frozen", "the rest frozen"])
@ranks(4)
def test_tied_and_frozen_experts(ctx, kind: str):
    plain = make_plain()
    if kind == "tied":
        plain[2].experts = plain[1].experts
    for name, param in plain.named_parameters():
        frozen = {"frozen": "1.experts", "half frozen": "up", "the rest frozen": "experts", "tied": "-"}[kind] in name
        param.requires_grad_(not frozen if kind != "the rest frozen" else frozen)
    model = shard_experts(plain, expert_mesh(ctx, 2))
    train(ctx, plain, model)
    assert (model[1].experts is model[2].experts) is (kind == "tied")


def prefer(micros: tuple[tuple[int, int], ...], model: nn.Module, micro: int) -> None:
    """Send all tokens of a microbatch to two experts."""
    for moe in (each for each in model.modules() if isinstance(each, MoE)):
        moe.bias.zero_()
        moe.bias[list(micros[micro])] = 10.0


@pytest.mark.parametrize("micros", [((0, 1), (0, 1)), ((2, 3), (0, 1)), ((0, 2), (2, 3))], ids=str)
@ranks(4)
def test_experts_without_tokens(ctx, micros: Any):
    """The gradient of an expert without tokens is zero: in both microbatches, in one of them, on each rank."""
    plain = make_plain()
    train(ctx, plain, shard_experts(plain, expert_mesh(ctx, 2)), prepare=functools.partial(prefer, micros))


@pytest.mark.parametrize(
    "empty", [((1,), (1,)), ((1, 2, 3), ()), ((), (0, 1, 2, 3)), ((0, 1, 2, 3), (0, 1, 2, 3))], ids=str
)
@ranks(4)
def test_ranks_without_rows(ctx, empty: tuple[tuple[int, ...], ...]):
    """These ranks have none in the first and in the second microbatch."""
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, 2))
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for step in range(2):
        for micro, without in enumerate(empty):
            rows = [x[: 0 if r in without else ROWS] for r, x in enumerate(batch(ctx, 2 * step + micro))]
            plain(torch.cat(rows)).square().sum().backward()
            with contextlib.nullcontext() if micro else flatshard.no_sync(model):
                (4 * model(rows[ctx.rank]).square().sum()).backward()
        check_same_after(plain, model, optimizers)


@pytest.mark.parametrize(("over", "reduce"), [(1, None), (2, torch.float32), (4, None)], ids=str)
@ranks(4)
def test_mixed_precision(ctx, over: int, reduce: torch.dtype | None):
    plain = make_plain().float()
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = shard_experts(plain, expert_mesh(ctx, over), mixed_precision=precision)
    for step in range(2):
        copied = copy.deepcopy(plain).bfloat16()
        for rows in (batches := batch(ctx, step).bfloat16()):
            (copied(rows).square().mean() / 4).backward()
        for p, q in zip(plain.parameters(), copied.parameters(), strict=True):
            p.grad = q.grad.float()
        model(batches[ctx.rank]).square().mean().backward()
        check_same(model, plain, "grad", rtol=5e-2)
        for m in (plain, model):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()


def loaded(ctx: Any, path: str, kind: int | str) -> tuple[nn.Module, Optimizer]:
    """Return a model with other initial values that has loaded the checkpoint at ``path``, and its optimizer.

    ``kind`` is the number of ranks that divide experts, "sharded" for sharding alone, or "plain".
    """
    model = make_plain()
    with torch.no_grad():
        for each in (*model.parameters(), *model.buffers()):
            each.fill_(7)
    if kind == "sharded":
        fully_shard(model, policy={MoE})
    elif kind != "plain":
        model = shard_experts(model, expert_mesh(ctx, kind))
    optimizer = adamw(model.parameters())
    flatshard.load_checkpoint(path, {"model": model, "optimizer": optimizer})
    for moe in model[1:3]:
        moe.load.zero_()
    return model, optimizer


@pytest.mark.parametrize("kind", [1, 4, "sharded", "plain"], ids=str)
@ranks(4)
def test_a_checkpoint_fits_any_division_of_experts(ctx, path: str, kind: int | str):
    """Saved with experts divided over two ranks, it loads over one and four, without division, and in one process."""
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, 2))
    optimizers = train(ctx, plain, model)
    flatshard.save_checkpoint(path, {"model": model, "optimizer": optimizers[1]})
    other, optimizer = loaded(ctx, path, kind)
    again = f"{path} again"
    flatshard.save_checkpoint(again, {"model": other, "optimizer": optimizer})
    back, last = loaded(ctx, again, 2)
    optimizers += optimizer, last
    for step in range(50, 52):
        x = batch(ctx, step)
        for m in (plain, other, back):
            m(
                x.flatten(0, 1) if m is plain or (m is other and kind == "plain") else x[ctx.rank]
            ).square().mean().backward()
        for each in (optimizers[0], optimizer, last):
            each.step()
            each.zero_grad()
        check_same(back, plain, "data")
        if kind == "plain":
            for got, want in zip(other.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
        else:
            check_same(other, plain, "data")


def by_fsdp2(ctx: Any) -> nn.Module:
    """Return the model without expert parallelism, sharded by FSDP2."""
    model = make_plain()
    for module in (model[1], model[2], model):
        fsdp2(module, mesh=ctx.mesh)
    return model


@ranks(4)
def test_checkpoints_to_and_from_fsdp2(ctx, path: str):
    plain = make_plain()
    model = shard_experts(plain, expert_mesh(ctx, 2))
    optimizers = train(ctx, plain, model)
    flatshard.save_checkpoint(f"{path}/ours", {"model": model, "optimizer": optimizers[1]})
    theirs = by_fsdp2(ctx)
    states = dict(zip(("model", "optimizer"), get_state_dict(theirs, adamw(theirs.parameters())), strict=True))
    dcp.load(states, checkpoint_id=f"{path}/ours")
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(states["model"][name]), param.detach(), rtol=1e-9, atol=1e-12)
        moments = [state["exp_avg"] for state in (states["optimizer"]["state"][name], optimizers[0].state[param])]
        torch.testing.assert_close(full(moments[0]), moments[1], rtol=1e-9, atol=1e-12)
    dcp.save(states, checkpoint_id=f"{path}/theirs")
    back, _ = loaded(ctx, f"{path}/theirs", 4)
    check_same(back, plain, "data")


@ranks(4)
def test_experts_are_not_moved(ctx):
    model = shard_experts(make_plain(), expert_mesh(ctx, 2))
    message = (
        r"redistribute: .*; other ranks than '<root>' have '1\.experts\.up', .* through flatshard\.save_checkpoint"
    )
    with pytest.raises(ValueError, match=message):
        flatshard.elastic.redistribute(model, process_group=ctx.group)


def count_bytes(ctx: Any, over: int) -> list[int]:
    """Return the KB that rank 0 sends in a step: over all ranks, over "dp" and over "ep"."""
    torch.manual_seed(0)
    mesh, sent, size = expert_mesh(ctx, over), [0, 0, 0], ctx.world_size

    class Counting(Recording):
        def note(self, call: str, *tensors: Tensor) -> None:
            axis = 0 if self.inner.size == size else 1
            sent[axis] += (self.inner.size - 1) * min(t.nbytes for t in tensors)

    model = nn.Sequential(nn.Linear(64, 64), *[MoE(16, 64) for _ in range(2)], nn.Linear(64, 4))
    model = shard_experts(model, mesh, collectives=Counting)
    apply = example["AllToAll"].apply

    def counted(rows: Tensor, there: list[int], here: list[int], group: Any) -> Tensor:
        others = sum(there) - there[group.rank()] + sum(here) - here[group.rank()]  # its backward sends what came
        sent[2] += others * rows.shape[1] * rows.element_size()
        return apply(rows, there, here, group)

    example["AllToAll"].apply = counted
    try:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(ctx.rank))
        model(x).square().mean().backward()
    finally:
        example["AllToAll"].apply = apply
    return [round(each / 1000) for each in sent]


@ranks(4)
def test_bytes_of_each_axis(ctx):
    """The table of ``docs/parallelism.md``. How many tokens leave a rank depends on their routes."""
    text = (PACKAGE / "docs" / "parallelism.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert [int(over) for over, *_ in rows] == [1, 2, 4]
    for over, *shown in rows:
        expected = [int(each.replace(",", "")) for each in shown]
        assert count_bytes(ctx, int(over)) == [*expected[:2], pytest.approx(expected[2], rel=0.15)]
