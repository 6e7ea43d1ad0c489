"""Parameters whose class encodes them for the gather: float8 elements send a fourth of the bytes."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from encoded import FLOAT8, WIDTH, Linear8, Weight, encoded
from on_ranks import ranks
from parity import check_parity
from recording import Recording
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, ShardingStrategy, fully_shard


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (Linear8(dtype), nn.Tanh())))


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


@ranks(1, 2, 3)
def test_trains_as_in_one_process(ctx: Any) -> None:
    torch.set_default_dtype(torch.float64)
    for options in (
        {},
        {"reshard_after_forward": False},
        {"mixed_precision": MixedPrecision(keep_cast_shard=True)},
        {"strategy": ShardingStrategy.NO_SHARD},
        {"static_buffers": True},
    ):
        ctx.note(str(options))

        replicated = ctx.world_size == 1 or "strategy" in options

        def shard(model: nn.Module, group: Any, options: Any = options, is_cut: bool = not replicated) -> None:
            fully_shard(model, policy={Linear8}, process_group=group, **options)
            kinds = {f.compute_dtype for u in flatshard.describe(model).units for f in u.flats}
            assert (FLOAT8 in kinds) is is_cut

        check_parity(ctx, net, vectors, steps=2, dtype=None, shard=shard, replicated=replicated)


class Counting(Recording):
    """Collectives that record the bytes of gathers."""

    gathered: ClassVar[list[int]] = []

    def note(self, call: str, *tensors: Tensor) -> None:
        if call == "all_gather":
            self.gathered.append(tensors[0].nbytes)


@ranks(2)
def test_one_byte_per_element_and_one_gather_of_scales(ctx: Any) -> None:
    model = fully_shard(net(torch.float32), policy={Linear8}, process_group=ctx.group, collectives=Counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ((weight, bias),) = {
        tuple(f.padded_numel * f.compute_dtype.itemsize for f in u.flats) for u in flatshard.describe(model).units[1:]
    }
    assert WIDTH * WIDTH <= weight < WIDTH * WIDTH + 32
    scales = 3 * 4 * ctx.world_size
    for _ in range(2):
        Counting.gathered.clear()
        model(vectors(0, 2)).sum().backward()
        optimizer.step()
        assert Counting.gathered[0] == scales
        assert sorted(Counting.gathered) == sorted([scales, *[weight, bias] * 6])
    other, x = copy.deepcopy(model), vectors(0, 2)
    Counting.gathered.clear()
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
        model(x)  # C++ may have written to the shards in between
    assert Counting.gathered.count(scales) == 3


@ranks(3)
def test_mixed_precision(ctx: Any) -> None:
    """Elements are encoded without a cast before, as in FSDP2."""
    torch.manual_seed(0)
    plain = Linear8(torch.float32)
    model = fully_shard(copy.deepcopy(plain), process_group=ctx.group, mixed_precision=MixedPrecision(torch.bfloat16))
    x = vectors(0, 2).bfloat16()
    inner = plain.weight.inner
    scale = 448 / inner.abs().max()
    weight = encoded(inner, scale).bfloat16() / scale.bfloat16()
    made = model(x)
    assert torch.equal(made, x @ weight.t() + plain.bias.bfloat16())
    made.sum().backward()
    with flatshard.summon_full_params(model, with_grads=True):
        assert type(model.weight) is Weight
        assert torch.equal(model.weight.inner, inner)
        assert torch.equal(model.weight.grad, (torch.ones_like(made).t() @ x).float())
    full = flatshard.checkpoint.full_state_dict(model)
    assert torch.equal(full["weight"].inner, inner)


@ranks(2)
def test_changes(ctx: Any) -> None:
    torch.manual_seed(0)
    model = fully_shard(net(torch.float32), policy={Linear8}, process_group=ctx.group)
    x = vectors(0, 2)
    model(x).sum().backward()
    torch.set_grad_enabled(False)
    before = model(x)
    model[0](x)  # computes the scales of all, which are outdated when the other units are gathered
    for module in model:
        for p in module.parameters() if isinstance(module, Linear8) else ():
            p.mul_(2)
    assert torch.equal(model[4](x), model[4](x))
    for p in model.parameters():
        p.mul_(0.5)
    assert torch.equal(model(x), before)
    with flatshard.summon_full_params(model):
        model[0].weight.inner.mul_(2)
        model[2].weight.inner.zero_()
    doubled = model(x)
    assert not torch.equal(before, doubled)
    model.half()
    assert not torch.equal(model(x.half()).float(), before)
    model.float()
    torch.testing.assert_close(model(x), doubled, rtol=0.2, atol=0.2)

    def write(module: Any, args: Any) -> None:
        module.weight.data8.zero_()
        torch.autograd.graph.increment_version(module.weight)

    hook = model[0].register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was changed in its unit's forward, where it is encoded in"):
        model(x)
    hook.remove()
    torch.testing.assert_close(model(x), doubled, rtol=0.2, atol=0.2)
    torch.set_grad_enabled(True)
    model(x).sum().backward()
