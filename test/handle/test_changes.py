"""The next forward of a unit computes with values that the user changed, whenever the unit was gathered."""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clean import check_clean
from on_ranks import ranks
from pairs import all_pairs, some
from parity import check_same_gradients, step_all
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard, summon_full_params
from flatshard.checkpoint import full_state_dict

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
STRATEGIES = (FULL, GRAD_OP, NO_SHARD)


def by_data(teacher: nn.Parameter, student: nn.Parameter) -> None:
    """Update the teacher as MoCo and BYOL do."""
    teacher.data = teacher.data * 0.5 + student.data * 0.5


def by_data_in_place(teacher: nn.Parameter, student: nn.Parameter) -> None:
    teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


@torch.no_grad()
def by_lerp(teacher: nn.Parameter, student: nn.Parameter) -> None:
    teacher.lerp_(student, 0.5)


UPDATES = (by_data, by_data_in_place, by_lerp)


class Momentum(nn.Module):
    """Update the teacher from the student between their forwards. If ``mutual``, first update the student from the
    teacher."""

    def __init__(self, update: Callable[[nn.Parameter, nn.Parameter], None], mutual: bool) -> None:
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.teacher = nn.ModuleList(nn.Linear(5, 5) for _ in range(2)).requires_grad_(False)
        self.update, self.mutual = update, mutual

    def forward(self, x: Tensor) -> Tensor:
        pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
        for teacher, student in pairs if self.mutual else ():
            self.update(student, teacher)
        y, z = x, x
        for layer in self.student:
            y = layer(y).tanh()
        for teacher, student in pairs:
            self.update(teacher, student)
        for layer in self.teacher:
            z = layer(z).tanh()
        return (y - z).square().mean()


@ranks(3, 1)
def test_momentum_encoders(ctx: Any) -> None:
    """Units that were prefetched before a change are gathered again, including on ranks whose shard of the parameter is
    empty.

    With one unit, the forward writes to its own unsharded parameters, including trainable ones. Writing them back afterwards
    counts as no change, as the shard's memory counts no version of its parameters. See [Note: Written through .data].
    """
    updates = list(itertools.product(UPDATES, ({nn.Linear}, None)))
    for (update, policy), strategy, start in all_pairs(updates, STRATEGIES, ("as it is", "meta", "flat")):
        ctx.note(f"{update.__name__}, {strategy}, {'units' if policy else 'one unit'}, {start}")
        torch.manual_seed(0)
        plain = Momentum(update, mutual=policy is None).double()
        model = copy.deepcopy(plain).to("meta" if start == "meta" else "cpu")
        fully_shard(model, policy=policy, process_group=ctx.group, strategy=strategy)
        if start == "meta":
            model.to_empty(device="cpu").load_state_dict(plain.state_dict())
        params = flatshard.flat_parameters(model) if start == "flat" else model.student.parameters()
        optimizers = [torch.optim.SGD(p, lr=0.5) for p in (plain.student.parameters(), params)]
        for step in range(3):
            torch.manual_seed(step)
            batch = torch.randn(ctx.world_size, 3, 5, dtype=torch.double)
            for m, x in ((plain, batch.flatten(0, 1)), (model, batch[ctx.rank])):
                m(x).backward()
            step_all(optimizers)
        for name, value in full_state_dict(model).items():  # summon_full_params would write changes back itself
            torch.testing.assert_close(value, plain.state_dict()[name], msg=lambda m, n=name: f"{n}: {m}")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


X = torch.linspace(-1, 1, 8).view(2, 4)
CHANGED = pytest.raises(RuntimeError, match="changed in place between its forward and its backward")


def sharded(ctx: Any, **options: Any) -> nn.Module:
    return fully_shard(net(), **{"policy": {nn.Linear}, "process_group": ctx.group} | options)


@ranks(2)
def test_changes_in_summon_full_params_are_noticed(ctx: Any) -> None:
    expected = net()
    with torch.no_grad():
        expected[0].weight.mul_(3)
    full_in_eval = MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)
    for options, offload in itertools.product(({}, {"mixed_precision": full_in_eval}), (False, True)):
        model = sharded(ctx, **options).eval()
        with torch.no_grad(), flatshard.keep_unsharded(model):
            model(X)
            with summon_full_params(model, offload_to_cpu=offload):
                model[0].weight.mul_(3)
            assert torch.equal(model(X), expected(X)), (options, offload)
    model = sharded(ctx)
    loss = model(X).sum()
    with summon_full_params(model), torch.no_grad():
        model[2].weight.mul_(3)
    with CHANGED:
        loss.backward()
    loss = model(X).sum()
    with summon_full_params(model):
        assert model[2].weight.shape == (3, 6)  # read only
    loss.backward()


@ranks(2)
def test_a_change_after_what_a_backward_gathered_was_kept(ctx: Any) -> None:
    """A change then counts for the next forward or a later backward, and the kept values are no longer an earlier
    forward's."""
    model = sharded(ctx, policy=None, strategy=ShardingStrategy.SHARD_OPTIM)
    loss = model(X).sum()
    with summon_full_params(model):
        pass  # frees what the forward kept unsharded
    loss.backward()
    loss = model(X).sum()
    with torch.no_grad():
        model[2].weight.mul_(3)
    with CHANGED:
        loss.backward()
    model, x = sharded(ctx), X.clone().requires_grad_()
    loss = model(x).sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with torch.no_grad():
        model[2].weight.mul_(3)
    with CHANGED:
        (grad.sum() + loss).backward()


@ranks(2)
def test_parameters_assigned_in_summon_full_params(ctx: Any) -> None:
    for options, offload in itertools.product(({}, {"mixed_precision": BF16}), (False, True)):
        model = sharded(ctx, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = model[0].weight
        with summon_full_params(model, offload_to_cpu=offload):
            model[0].weight = nn.Parameter(torch.full((6, 4), 0.25))
        assert model[0].weight is held
        assert (full_state_dict(model)["0.weight"] == 0.25).all()
        for name, other, why in (
            ("weight", nn.Parameter(torch.ones(2, 2)), r"'0.weight' .*was .*by one of shape \(2, 2\)"),
            ("weight", None, "'0.weight' .*was .*deleted"),
            ("bias", model[2].bias, r"'0.bias' was tied to '2.bias'|'0.bias' .*was replaced"),
        ):
            with pytest.raises(RuntimeError, match=why):  # noqa: SIM117
                with summon_full_params(model, offload_to_cpu=offload):
                    setattr(model[0], name, model[2].bias if name == "bias" else other)
        check_clean(model)
        model(X).sum().backward()
        optimizer.step()
        assert (full_state_dict(model)["0.weight"] != 0.25).any()


WHOLE: dict[str, Callable[..., Any]] = {
    "unshard": lambda m: contextlib.nullcontext(flatshard.unshard(m, recurse=True)),
    "unshard a unit": lambda m: contextlib.nullcontext(flatshard.unshard(m[0])),
    "keep": lambda m: flatshard.keep_unsharded(m),
    "summon": lambda m: summon_full_params(m, with_grads=True),
    "summon a unit": lambda m: summon_full_params(m[0]),
    "summon copies": lambda m: summon_full_params(m, offload_to_cpu=True),
    "summon to read": lambda m: summon_full_params(m, writeback=False),
    "summon on rank 0": lambda m: summon_full_params(m, writeback=False, rank0_only=True),
}


IN_USE: dict[str, tuple[Callable[..., object], bool]] = {
    "a forward": (lambda m: m(X), True),
    "state_dict": (lambda m: m.state_dict(), False),
    "deepcopy": (copy.deepcopy, True),
    "flat_parameters": (flatshard.flat_parameters, True),
    "reshard": (flatshard.reshard, True),
    "unshard": (flatshard.unshard, False),
    "full_state_dict": (full_state_dict, True),
    "save_checkpoint": (lambda m, **where: flatshard.save_checkpoint(state={"model": m}, **where), False),
    "keep_unsharded": (lambda m: contextlib.ExitStack().enter_context(flatshard.keep_unsharded(m)), False),
    "to": (lambda m: m.to(torch.float64), False),
}
"""What looks for changes of sharded parameters, and whether it is refused while these are in use."""


@ranks(2)
def test_changes_of_shards_do_not_free_what_is_in_use(ctx: Any, tmp_path: Path) -> None:
    """A body that holds full parameters keeps them when shards that it refers to change, too."""
    for (name, (look, is_refused)), inside in itertools.product(IN_USE.items(), ("summon", "forward")):
        ctx.note(f"{name} inside {inside}")
        model = fully_shard(net(), process_group=ctx.group)
        weight = model[0].weight

        if name == "save_checkpoint":
            look = functools.partial(look, path=tmp_path / inside, process_group=ctx.group)

        def body(*_: object, weight=weight, look=look, is_refused=is_refused, model=model) -> None:
            model[2].bias.fill_(7)
            weight.data = weight.data + 3
            with pytest.raises(RuntimeError) if is_refused else contextlib.nullcontext():
                look(model)
            assert model[2].bias.untyped_storage().nbytes()
            assert (model[2].bias == 7).all()

        with torch.no_grad():
            if inside == "summon":
                with summon_full_params(model):
                    body()
            elif name not in ("a forward", "to"):  # a conversion in a forward is for this forward
                model[2].register_forward_hook(body)
                model(X)


@ranks(2)
def test_converted_while_whole(ctx: Any) -> None:
    """``module.to(dtype)`` in summon_full_params also converts buffers and parameters that stay sharded."""
    strategies = (FULL, ShardingStrategy.SHARD_OPTIM, NO_SHARD)
    after = ("a forward", "state_dict", "reshard", "a forward inside")
    cases = all_pairs(tuple(WHOLE), (torch.float64, torch.bfloat16), strategies, after)
    for name, dtype, strategy, used in some(cases, 17):
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
def test_converted_while_shown_in_another_dtype(ctx: Any) -> None:
    """The unsharded parameters may have the new dtype already."""
    plain = nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 3))
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.float32)
    for name, dtype in some(itertools.product(WHOLE, dtypes), 13):
        ctx.note(f"{name}, {dtype}")
        model = fully_shard(
            copy.deepcopy(plain), policy={nn.Linear, nn.LSTM}, mixed_precision=BF16, process_group=ctx.group
        )
        with WHOLE[name](model):
            model.to(dtype)
        flatshard.reshard(model)
        assert {p.dtype for p in model.parameters()} == {dtype}
        for key, value in full_state_dict(model).items():
            assert torch.equal(value, plain.state_dict()[key].to(dtype)), key
        assert model(X.to(dtype))[0].dtype is torch.bfloat16


@ranks(2)
def test_values_and_dtypes_of_a_conversion(ctx: Any) -> None:
    """Values written in the body are kept in the new dtype, except on meta. The policy's compute dtype stays."""
    model, expected = sharded(ctx), net().double()
    with torch.no_grad(), summon_full_params(model):
        with summon_full_params(model):
            model.double()
            model[0].weight.div_(3)
        model[2].weight.div_(3)
    values = full_state_dict(model)
    assert all(torch.equal(values[f"{i}.weight"], expected[i].weight / 3) for i in (0, 2))
    model = sharded(ctx, mixed_precision=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        out = model(X)
        out.sum().backward()
        assert out.dtype is torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
        optimizer.zero_grad()
    flatshard.unshard(model[0])
    model.float()  # no change of the shards, but bfloat16 is unsharded
    flatshard.reshard(model)
    model(X).sum().backward()
    before = full_state_dict(model)["0.bias"]
    optimizer.step()
    model(X)
    assert not torch.equal(full_state_dict(model)["0.bias"], before)
    assert model[0].bias.dtype is torch.float32
    model.to("meta")
    with pytest.raises(RuntimeError, match=r"parameter '.*weight' was moved to the meta device after fully_shard"):
        model(X)


@ranks(2)
def test_what_summon_full_params_cannot_keep(ctx: Any) -> None:
    """Forwards and backwards are refused if they would communicate on some ranks only, or lose gradients."""
    model = sharded(ctx)
    with torch.no_grad(), summon_full_params(model, writeback=False, rank0_only=True):
        if ctx.rank == 0:
            assert torch.equal(model(X), net()(X))
        for verb in (flatshard.unshard, *([lambda m: m(X)] if ctx.rank else [])):
            with pytest.raises(RuntimeError, match=r"of unit '0' inside summon_full_params\(rank0_only=True"):
                verb(model[0])
    loss = model(X).sum()
    with summon_full_params(model, with_grads=True):
        for verb in (loss.backward, lambda: flatshard.reduce_gradients(model)):
            with pytest.raises(RuntimeError, match=r"inside summon_full_params\(with_grads=True"):
                verb()


@ranks(2)
def test_converted_before_an_inference(ctx):
    """The buffers of gradients are made anew in ``inference_mode``, and used outside of it."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), policy={nn.Linear}, process_group=ctx.group)
    x = torch.ones(2, 3, dtype=torch.float64)
    model.double()
    with torch.inference_mode():
        model(x)
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
