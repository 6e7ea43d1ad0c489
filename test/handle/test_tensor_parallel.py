"""Tensor parallelism with sharding on 2-D meshes, compared with one process.

``parallelize_module`` parallelises a model over one mesh dimension, and ``fully_shard`` shards it over the other. The plain
model in one process trains on the full batch.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpointed import WIDTH, Block, Net, make, parallelize
from on_ranks import ranks
from pairs import all_pairs, some
from parity import full_params, step_all
from recording import same_everywhere
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import ShardingStrategy, full_shape, fully_shard
from flatshard.layouts import Blocks, Rows, Whole
from flatshard.optim import get_total_norm, gradient_statistics
from flatshard.tensors import ShardedParameter

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD


def whole_of(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def check_same(model: nn.Module, plain: nn.Module, rtol: float = 1e-9) -> None:
    """Compare full parameters and gradients."""
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=rtol / 1e3)
    with flatshard.summon_full_params(model, writeback=False, with_grads=True):
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            close(whole_of(p), q.detach(), msg=lambda m, n=name: f"{n}: {m}")
            assert (p.grad is None) is (q.grad is None), name
            if p.grad is not None:
                close(whole_of(p.grad), q.grad, msg=lambda m, n=name: f"gradient of {n}: {m}")


def batch(step: int) -> Tensor:
    return torch.randn(2, 2, 4, WIDTH, generator=torch.Generator().manual_seed(step)).double()


def backward(plain: nn.Module, model: nn.Module, x: Tensor, mine: int) -> None:
    """Run backward for the plain model on all rows, and for the sharded model on this rank's."""
    plain(x.flatten(0, 1)).square().mean().backward()
    output = model(x[mine])
    (output.full_tensor() if isinstance(output, DTensor) else output).square().mean().backward()


def net() -> Net:
    model = make()
    model.blocks = model.blocks[:2]
    return model


def two_dimensions(ctx, sequence: bool = False, **options: Any) -> tuple[Net, Net, int]:
    """Return (plain, sharded, this rank's index in the data-parallel mesh)."""
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    plain, model = net(), net()
    parallelize(model, mesh["tp"], sequence)
    fully_shard(model, policy={Block}, device_mesh=mesh["dp"], **options)
    return plain, model, mesh["dp"].get_local_rank()


def placements(model: nn.Module) -> dict[str, Any]:
    return {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.parametrize(("sequence", "strategy"), some(all_pairs((True, False), (FULL, GRAD_OP, NO_SHARD)), 3))
@ranks(4)
def test_parity(ctx, sequence: bool, strategy: ShardingStrategy) -> None:
    plain, model, mine = two_dimensions(ctx, sequence, strategy=strategy)
    placed = net()
    parallelize(placed, ctx.device_mesh((2, 2), ("dp", "tp"))["tp"], sequence)
    assert {n: full_shape(p) for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert all(type(p) is ShardedParameter for p in model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        for m in (plain, model):
            m.blocks[0].inner.up.requires_grad_(step != 1)
        if step == 2:
            with flatshard.no_sync(model):
                backward(plain, model, batch(5), mine)
        backward(plain, model, batch(step), mine)
        for name, each in gradient_statistics(model).items():
            grad = plain.get_parameter(name).grad
            numbers = [float(n) for n in (grad.norm(), grad.abs().max(), grad.mean(), grad.numel())]
            assert [each.norm, each.max_abs, each.mean, each.numel] == pytest.approx(numbers), name
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        clip = torch.nn.utils.clip_grad_norm_ if step % 2 else flatshard.clip_grad_norm_
        norm = clip(model.parameters() if step % 2 else model, 0.3)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        check_same(model, plain)
        step_all(optimizers)
    with flatshard.summon_full_params(model):
        assert placements(model) == placements(placed)


def change(ctx) -> None:
    """Copy, convert, and write to a model."""
    plain, model, mine = two_dimensions(ctx)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    backward(plain, copied, batch(0), mine)
    check_same(copied, plain)
    for m in (plain, copied):
        m.zero_grad()
    backward(plain.float(), copied.float(), batch(0).float(), mine)
    check_same(copied, plain, rtol=1e-4)
    for offload in (False, True):
        with torch.no_grad(), flatshard.summon_full_params(copied, offload_to_cpu=offload):
            for param in (*plain.parameters(), *copied.parameters()):
                param.mul_(2).add_(0.5)
        check_same(copied, plain, rtol=1e-4)


def train_flat(ctx) -> None:
    """Train flat parameters of DTensors and plain parameters. Elements that tensor-parallel ranks share count once."""
    plain, model, mine = two_dimensions(ctx)
    flats = flatshard.flat_parameters(model)
    optimizers = [torch.optim.SGD(p, lr=0.1) for p in (plain.parameters(), flats)]
    norm, clip = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grad_norm_
    for step in range(2):
        backward(plain, model, batch(step), mine)
        grads = [p.grad for p in flats]
        for order in (2.0, 1.0, torch.inf):
            expected = norm([p.grad for p in plain.parameters()], order)
            found = [norm(grads, order, foreach=step == 0), torch.stack([g.norm(order) for g in grads]).norm(order)]
            for each in (*found, get_total_norm(model, order)):
                torch.testing.assert_close(each, expected)
        torch.testing.assert_close(clip(flats, 0.1), clip(plain.parameters(), 0.1))
        step_all(optimizers)
    check_same(model, plain)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * x).sum().full_tensor() + self.plain.sum() * 257


def add_in_the_reduce_dtype(ctx) -> None:
    """Add 256 and 1 of two tensor-parallel ranks: in bfloat16 their sum is 256."""
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    bf16 = torch.bfloat16
    for reduce, expected, strategy in (
        (torch.float32, 257.0, FULL),
        (torch.float32, 257.0, NO_SHARD),
        (bf16, 256.0, FULL),
    ):
        model = Scale()
        model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh["tp"], [Replicate()]))
        policy = flatshard.MixedPrecision(bf16, reduce_dtype=reduce)
        fully_shard(model, device_mesh=mesh["dp"], mixed_precision=policy, strategy=strategy)
        mine = torch.full((1, 3), 1.0 if ctx.rank % 2 else 256.0, dtype=bf16)
        model(DTensor.from_local(mine, mesh["tp"], [Shard(0)])).backward()
        assert set(model.scale.grad.tolist()) <= {expected}
        assert set(model.plain.grad.tolist()) <= {256.0}  # added in bfloat16


def draw(model: nn.Module) -> None:
    for module in (model[0], model[2]):
        module.reset_parameters()


def initialise_on_meta(ctx) -> None:
    """Ranks of one coordinate get the first one's values from ``fully_shard``. In a later initialisation they must draw
    alike."""
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    for options in ({"device_id": "cpu"}, {}, {"strategy": NO_SHARD}):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.manual_seed(ctx.rank)
        fully_shard(model, device_mesh=mesh["dp"], policy={nn.Linear}, **options)
        if "device_id" not in options:
            model.to_empty(device="cpu")
            draw(model)
            message = r"^'2.bias' are replicated.*different values: call torch.manual_seed"
            with pytest.raises(RuntimeError, match=message):
                model(torch.ones(2, WIDTH))
            torch.manual_seed(0)
            draw(model)
        for name, value in full_params(model).items():
            value = whole_of(value)
            assert value.shape == {"0.weight": (8, WIDTH), "2.weight": (WIDTH, 8)}.get(name, value.shape)
            assert same_everywhere(ctx.group, value.flatten())
        model(torch.randn(2, WIDTH)).sum().backward()


def fill_later(ctx) -> None:
    """Parallelise and shard on meta, allocate memory, and fill: initialisers see DTensors."""
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    ways: list[dict[str, Any]] = [{}, {"strategy": NO_SHARD}, {"layout": Whole(9.0)}]
    ways += [{"layout": Rows(max_padding=9.0)}, {"layout": Blocks(6, 9.0)}]
    for options in some(ways, 3):
        plain = net()
        with torch.device("meta"):
            model = net()
        parallelize(model, mesh["tp"], False)
        placed = placements(model)
        fully_shard(model, policy={Block}, device_mesh=mesh["dp"], **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.to_empty(device="cpu")
        model.blocks[0].inner.up.reset_parameters()  # then start again
        with torch.no_grad():
            for fqn, value in plain.named_parameters():
                mine = model.get_parameter(fqn)
                assert (mine.placements if isinstance(mine, DTensor) else None) == placed.get(fqn)
                mine.copy_(distribute_tensor(value, mine.device_mesh, mine.placements) if fqn in placed else value)
        own = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        for step in range(2):
            backward(plain, model, batch(step), mesh["dp"].get_local_rank())
            step_all([own, optimizer])
        check_same(model, plain)


def scale_gradients(ctx) -> None:
    """Check that an overflow on one tensor-parallel rank skips the step on all."""
    for flat in (False, True):
        _, model, mine = two_dimensions(ctx)
        params = flatshard.flat_parameters(model) if flat else list(model.parameters())
        optimizer, scaler = torch.optim.SGD(params, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for overflow in (False, True):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(model(batch(0)[mine]).square().mean()).backward()
            if overflow and ctx.rank == 3:
                next(p for p in params if p.grad is not None and p.numel()).grad.as_subclass(Tensor)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            changed = not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert changed is not overflow
            assert scaler.get_scale() == (4.0 if overflow else 8.0)


def refuse(ctx) -> None:
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    model = net()
    parallelize(model, mesh["tp"], False)
    with pytest.raises(
        ValueError, match=r"'blocks.0.inner.up.weight' is a DTensor over ranks .*device_mesh=mesh\['dp'\]"
    ):
        fully_shard(model, process_group=ctx.group)
    with pytest.raises(ValueError, match=r"is a DTensor over ranks"):
        fully_shard(model, device_mesh=mesh["tp"])
    partial = DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Partial()], run_check=False)
    model.blocks[1].extra = nn.Parameter(partial)
    message = r"'blocks.1.extra' is a DTensor placed as .*only Shard\(dim\) and Replicate\(\)"
    with pytest.raises(ValueError, match=message):
        fully_shard(model, device_mesh=mesh["dp"])
    del model.blocks[1].extra
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="in the place of tensor subclasses.*build it after fully_shard"):
        fully_shard(model, device_mesh=mesh["dp"])
    del optimizer


FEATURES: list[Callable[[Any], None]] = [change, train_flat, add_in_the_reduce_dtype, fill_later]
FEATURES += [initialise_on_meta, scale_gradients, refuse]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.__name__)
def test_features(pool, feature: Callable[[Any], None]):
    pool.run(feature, world_size=4)
