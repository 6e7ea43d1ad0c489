"""Values that change behind a unit's back are what its next forward computes with, wherever it had been gathered by then."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from pairs import all_pairs
from parity import check_same_gradients
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard, summon_full_params
from flatshard._composable.find import units_below
from flatshard.checkpoint import full_state_dict

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
STRATEGIES = (FULL, GRAD_OP, NO_SHARD)


def by_data(teacher: nn.Parameter, student: nn.Parameter) -> None:
    """MoCo, BYOL."""
    teacher.data = teacher.data * 0.5 + student.data * 0.5


def by_data_in_place(teacher: nn.Parameter, student: nn.Parameter) -> None:
    teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


@torch.no_grad()
def by_lerp(teacher: nn.Parameter, student: nn.Parameter) -> None:
    teacher.lerp_(student, 0.5)


@torch.no_grad()
def by_copy(teacher: nn.Parameter, student: nn.Parameter) -> None:
    teacher.copy_(0.5 * teacher + 0.5 * student)


def train_both(ctx: Any, plain: nn.Module, model: nn.Module, params: tuple[Any, Any], steps: int = 4) -> None:
    """Steps of SGD on the whole batch and on this rank's rows; then the parameters are the same."""
    optimizers = [torch.optim.SGD(p, lr=0.5) for p in params]
    for step in range(steps):
        torch.manual_seed(step)
        batch = torch.randn(ctx.world_size, 3, 5, dtype=torch.double)
        for m, x in ((plain, batch.flatten(0, 1)), (model, batch[ctx.rank])):
            m(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check(model, plain)


def check(model: nn.Module, plain: nn.Module) -> None:
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


class Momentum(nn.Module):
    """Updates its teacher from its student inside its forward, before the teacher runs."""

    def __init__(self, update: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.teacher = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)).requires_grad_(False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        y, z = x, x
        for layer in self.student:
            y = layer(y).tanh()
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.update(teacher, student)
        for layer in self.teacher:
            z = layer(z).tanh()
        return (y - z).square().mean()


UPDATES = (by_data, by_data_in_place, by_lerp, by_copy)


@ranks(2, 3)
def test_momentum_encoders(ctx: Any) -> None:
    """What was gathered ahead is gathered again, on ranks too whose part of a parameter is empty.

    In one unit the forward writes to its own unsharded parameters. [Note: Written through .data]
    """
    for update, policy, strategy in all_pairs(UPDATES, ({nn.Linear}, None), STRATEGIES):
        ctx.note(f"{update.__name__}, {strategy}, {'units' if policy else 'one unit'}")
        torch.manual_seed(0)
        plain = Momentum(update).double()
        model = fully_shard(copy.deepcopy(plain), policy=policy, process_group=ctx.group, strategy=strategy)
        train_both(ctx, plain, model, (plain.student.parameters(), model.student.parameters()))


class Own(nn.Module):
    """Updates both of its layers, the trained one too, before they run."""

    def __init__(self, update: Callable[[nn.Parameter, nn.Parameter], None]) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(5, 5), nn.Linear(5, 5).requires_grad_(False)
        self.update = update

    def forward(self, x: Tensor) -> Tensor:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.update(teacher, student)
            self.update(student, teacher)
        return (self.student(x) - self.teacher(x)).square().mean()


@ranks(1, 2)
def test_a_forward_that_changes_its_own_unit_and_its_backward(ctx: Any) -> None:
    """What its own forward wrote back is no change after it: the shard's memory counts no version of its parameters."""
    cases = itertools.product((by_data, by_lerp), (FULL, NO_SHARD), (False, True), (False, True))
    for update, strategy, late, flat in cases:
        ctx.note(f"{update.__name__}, {strategy}{', from meta' * late}{', flat parameters' * flat}")
        torch.manual_seed(0)
        plain = Own(update).double()
        model = copy.deepcopy(plain).to("meta" if late else "cpu")
        fully_shard(model, policy=None, process_group=ctx.group, strategy=strategy)
        if late:
            model.to_empty(device="cpu").load_state_dict(plain.state_dict())
        params = flatshard.flat_parameters(model) if flat else model.student.parameters()
        train_both(ctx, plain, model, (plain.student.parameters(), params), steps=3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


X = torch.linspace(-1, 1, 8).view(2, 4)


@ranks(2)
def test_changes_in_summon_full_params_are_noticed(ctx: Any) -> None:
    expected = net()
    with torch.no_grad():
        expected[0].weight.mul_(3)
    for options in ({}, {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)}):
        for offload in (False, True):
            model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group, **options).eval()
            version = units_below(model)[1].handle.version()
            with torch.no_grad(), flatshard.keep_unsharded(model):
                model(X)
                with summon_full_params(model, offload_to_cpu=offload):
                    model[0].weight.mul_(3)
                assert torch.equal(model(X), expected(X)), (options, offload)
            assert units_below(model)[1].handle.version() != version
    model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group)
    loss = model(X).sum()
    with summon_full_params(model), torch.no_grad():
        model[2].weight.mul_(3)
    with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
        loss.backward()
    loss = model(X).sum()
    with summon_full_params(model):
        assert model[2].weight.shape == (3, 6)  # only looked at
    loss.backward()


@ranks(2)
def test_a_change_after_what_a_backward_gathered_was_kept(ctx: Any) -> None:
    """It is for the next forward then, or a later backward, and no longer the values of a forward before."""
    model = fully_shard(net(), process_group=ctx.group, strategy=ShardingStrategy.SHARD_OPTIM)
    loss = model(X).sum()
    with summon_full_params(model):
        pass  # frees what the forward has left
    loss.backward()
    loss = model(X).sum()
    with torch.no_grad():
        model[2].weight.mul_(3)
    with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
        loss.backward()
    model, x = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group), X.clone().requires_grad_()
    loss = model(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with torch.no_grad():
        model[2].weight.mul_(3)
    with pytest.raises(RuntimeError, match="changed in place between its forward and its backward"):
        (grad.sum() + loss).backward()


@ranks(2)
def test_parameters_assigned_in_summon_full_params(ctx: Any) -> None:
    for options in ({}, {"mixed_precision": BF16}):
        for offload in (False, True):
            model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            held = model[0].weight
            with summon_full_params(model, offload_to_cpu=offload):
                model[0].weight = nn.Parameter(torch.full((6, 4), 0.25))
            assert model[0].weight is held
            assert (full_state_dict(model)["0.weight"] == 0.25).all()
            for other, why in ((nn.Parameter(torch.ones(2, 2)), r"by one of shape \(2, 2\)"), (None, "deleted")):
                with pytest.raises(RuntimeError, match=rf"'0.weight' .*was .*{why}"):  # noqa: SIM117
                    with summon_full_params(model, offload_to_cpu=offload):
                        model[0].weight = other
            with pytest.raises(RuntimeError, match=r"'0.bias' was tied to '2.bias'|'0.bias' .*was replaced"):  # noqa: SIM117
                with summon_full_params(model, offload_to_cpu=offload):
                    model[0].bias = model[2].bias
            assert not any(unit.claims for unit in units_below(model))
            model(X).sum().backward()
            optimizer.step()
            assert (full_state_dict(model)["0.weight"] != 0.25).any()


@ranks(3)
def test_conversions(ctx: Any) -> None:
    """Also where parameters stayed unsharded, or were gathered ahead; to what a module is; after an evaluation."""
    for strategy in STRATEGIES:
        model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group, strategy=strategy)
        loss = model(X).sum()
        model.to(torch.float32).to("cpu")
        loss.backward()
        model.zero_grad()
        model(X)
        model.double()
        with torch.inference_mode():
            assert torch.equal(model(X.double()), net().double()(X.double()))
        model(X.double()).sum().backward()
        flatshard.unshard(model[0])
        with pytest.raises(RuntimeError, match=r"since unshard\(\): call flatshard.reshard\(module\) first"):
            full_state_dict(model)
        model.float()
        assert torch.equal(model(X), net()(X))
    model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group)
    for p in model.parameters():  # a copy has what was assigned before
        p.data = torch.full_like(p.data, 0.5)
    other = copy.deepcopy(model)
    assert all((v == 0.5).all() for v in full_state_dict(other).values())
    assert torch.equal(other(X), model(X))


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    flatshard.unshard(module)
    yield


WHOLE: dict[str, Callable[..., Any]] = {
    "unshard": lambda m: unsharded(m),
    "unshard a unit": lambda m: unsharded(m[0]),
    "keep": lambda m: flatshard.keep_unsharded(m),
    "summon": lambda m: summon_full_params(m, with_grads=True),
    "summon a unit": lambda m: summon_full_params(m[0]),
    "summon copies": lambda m: summon_full_params(m, offload_to_cpu=True),
    "summon to read": lambda m: summon_full_params(m, writeback=False),
    "summon on rank 0": lambda m: summon_full_params(m, writeback=False, rank0_only=True),
}


@ranks(2)
def test_converted_while_whole(ctx: Any) -> None:
    """``module.to(dtype)`` where parameters are shown whole: those that are not, and buffers, have the new dtype, too."""
    strategies = (FULL, ShardingStrategy.SHARD_OPTIM, NO_SHARD)
    after = ("a forward", "state_dict", "reshard", "a forward inside")
    for name, dtype, strategy, used in all_pairs(tuple(WHOLE), (torch.float64, torch.bfloat16), strategies, after):
        ctx.note(f"{name}, {dtype}, {strategy}, {used}")
        plain = nn.Sequential(*net(), nn.BatchNorm1d(3))
        model = fully_shard(copy.deepcopy(plain), policy={nn.Linear}, process_group=ctx.group, strategy=strategy)
        for m in (plain, model):
            m(X).square().sum().backward()
        with WHOLE[name](model):
            model.to(dtype)
            plain.to(dtype)
            if used == "a forward inside" and "rank 0" not in name:
                with torch.no_grad():
                    assert torch.equal(model(X.to(dtype)), plain(X.to(dtype)))
        if used == "state_dict":
            assert {v.dtype for v in model.state_dict().values() if v.is_floating_point()} == {dtype}
        elif used == "reshard":
            flatshard.reshard(model)
        for m in (plain, model):
            m(X.to(dtype)).square().sum().backward()
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
        values = full_state_dict(model)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=0)
        check_same_gradients(model, plain, rtol=1e-6 if dtype is torch.float64 else 1e-2)


@ranks(2)
def test_values_of_a_conversion_and_what_is_not_converted(ctx: Any) -> None:
    """The body's values are kept in the new dtype; half a unit cannot be converted; the compute dtype is the policy's."""
    model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group)
    with torch.no_grad(), summon_full_params(model):
        with summon_full_params(model):
            model.double()
            model[0].weight.div_(3)
        model[2].weight.div_(3)
    expected = net().double()
    values = full_state_dict(model)
    assert torch.equal(values["2.weight"], expected[2].weight / 3)
    assert torch.equal(values["0.weight"], expected[0].weight / 3)
    model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group)
    flatshard.unshard(model[0])
    model[0].weight.data = model[0].weight.data.double()
    with pytest.raises(RuntimeError, match=r"parameters '0.weight' changed dtype or device, but others.*module.to"):
        model(X)
    model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group, mixed_precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    flatshard.unshard(model[0])
    model.float()  # as they are: but what is shown is bfloat16
    flatshard.reshard(model)
    model(X).float().sum().backward()
    before = full_state_dict(model)["0.bias"]
    optimizer.step()
    model(X)
    assert not torch.equal(full_state_dict(model)["0.bias"], before)
    assert model[0].bias.dtype is torch.float32


@ranks(2)
def test_what_summon_full_params_cannot_keep(ctx: Any) -> None:
    """``p.data = ...`` of a whole parameter; forwards and backwards that would communicate on some ranks, or be lost."""
    for writeback in (True, False):
        model = fully_shard(net(), policy={nn.Linear}, process_group=ctx.group)
        before = full_state_dict(model)["0.weight"]
        with summon_full_params(model, writeback=writeback):
            model[0].weight.data = torch.full((6, 4), 0.5)
        after = full_state_dict(model)["0.weight"]
        assert torch.equal(after, torch.full((6, 4), 0.5) if writeback else before)
        model(X).sum().backward()
    with torch.no_grad(), summon_full_params(model, writeback=False, rank0_only=True):
        if ctx.rank == 0:
            assert torch.equal(model(X), net()(X))
        else:
            with pytest.raises(RuntimeError, match=r"a forward of unit '0' inside summon_full_params\(rank0_only=True"):
                model[0](X)
        with pytest.raises(RuntimeError, match=r"unshard of unit '.*' inside summon_full_params\(rank0_only=True\)"):
            flatshard.unshard(model[0])
    torch.testing.assert_close(model(X), net()(X))
    loss = model(X).sum()
    with summon_full_params(model, with_grads=True):
        with pytest.raises(RuntimeError, match=r"runs backward inside summon_full_params\(with_grads=True\)"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"reduce_gradients: called inside summon_full_params\(with_grads=True"):
            flatshard.reduce_gradients(model)


@ranks(1, 2)
def test_converted_to_another_precision(ctx) -> None:
    """The compute dtype stays the policy's, whatever the parameters' own dtype was when they were sharded."""
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy in (FULL, NO_SHARD):
        for before, after in (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16):
            ctx.note(f"{strategy.name}, {before} to {after}")
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(before)
            fully_shard(model, policy={nn.Linear}, strategy=strategy, mixed_precision=bf16, process_group=ctx.group)
            model(torch.ones(2, 3)).sum().backward()
            model.zero_grad()
            model.to(after)
            out = model(torch.ones(2, 3))
            out.sum().backward()
            assert out.dtype is torch.bfloat16
            assert all(p.dtype is after and p.grad.dtype is after for p in model.parameters())


@ranks(2)
def test_to_empty_would_throw_the_values_away(ctx) -> None:
    model = fully_shard(Net(), policy={Block}, process_group=ctx.group)
    around = nn.Sequential(nn.Linear(4, 4), model)
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    message = r"'.*weight' is sharded and has its values, which to_empty.*module.to\(device\)"
    for module in (model, model.blocks[0].linear, around):
        with pytest.raises(RuntimeError, match=message):
            module.to_empty(device="cpu")
    assert all(
        p.data_ptr() == ptr and p.equal(value) for p, (ptr, value) in zip(model.parameters(), before, strict=True)
    )
    model(torch.ones(2, 4)).sum().backward()
    model.double().to("cpu")  # others that move all parameters
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # by assignments of new parameters
    try:
        with pytest.raises(RuntimeError, match="which to_empty"):
            model.to_empty(device="cpu")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    model.float().to("meta")
    with pytest.raises(RuntimeError, match=r"parameter '.*weight' was moved to the meta device after fully_shard"):
        model(torch.ones(2, 4))


@ranks(2)
def test_converted_and_back_between_two_backwards(ctx: Any) -> None:
    """Gradients are converted in place by torch, also those of parameters of which this rank has nothing."""
    model = fully_shard(net(), process_group=ctx.group)
    model(X).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.to(torch.float64).zero_grad()
    model.to(torch.float32)
    model(X).sum().backward()
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad.dtype is torch.float32
        torch.testing.assert_close(torch.as_tensor(param.grad), torch.as_tensor(grad))
