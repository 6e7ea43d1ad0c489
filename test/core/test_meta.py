"""From a module without values to a sharded one: the meta device, ``sync_module_states``, ``device_id``, device meshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from clean import resident_nbytes
from models import NormBlock
from on_ranks import ranks
from parity import adamw, check_same_params, full_params, step_all
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._composable.construct.materialize import shows_pattern
from flatshard._composable.find import units_below

WIDTH = 13


class Rotary(nn.Module):
    """A buffer that is in no state dict."""

    def __init__(self, resets: bool = True) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.resets = resets
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.calls.zero_()
        if self.resets or (not self.inv_freq.is_meta and not _is_pattern(self.inv_freq)):
            self.inv_freq.copy_(torch.arange(1.0, WIDTH + 1).reciprocal())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq


def _is_pattern(t: Tensor) -> bool:
    return shows_pattern(t)


class Block(NormBlock):
    def __init__(self) -> None:
        super().__init__(WIDTH, 29, bias=False)


class Lm(nn.Module):
    """Embedding and head are tied; BatchNorm has an int64 buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.rotary = Rotary()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.rotary(self.embed(ids)))))


def tokens(n: int) -> Tensor:
    return torch.randint(11, (n,))


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def same_everywhere(ctx: Any, tensors: dict[str, Tensor]) -> None:
    """Collective: all ranks have bitwise the same."""
    for name, tensor in tensors.items():
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
        theirs = mine.clone()
        dist.broadcast(theirs, 0, group=ctx.group)
        assert torch.equal(mine, theirs), name


# -- The meta device ---------------------------------------------------------------------------------------------------


def init_by_to_empty(module: nn.Module) -> None:
    """As FSDP1 needed it."""
    module.to_empty(device="cpu", recurse=False)
    module.reset_parameters()


def init_only(module: nn.Module) -> None:
    """For one module, and with values of its own."""
    for param in module.parameters(recurse=False):
        nn.init.normal_(param, std=0.02)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(1)


def init_by_data(module: nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.data.fill_(0.125)
    for buffer in module.buffers(recurse=False):
        buffer.data.fill_(1)


@pytest.mark.parametrize("init", [None, init_by_to_empty, init_only, init_by_data], ids=lambda f: f and f.__name__)
@ranks(1, 3)
def test_materialises(ctx, init: Callable[[nn.Module], None] | None):
    for strategy, policy in (
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.NO_SHARD, {Block, Rotary}),
        (ShardingStrategy.FULL_SHARD, {Block, nn.Embedding, nn.Linear}),
    ):
        ctx.note(f"{strategy.name}, policy {policy}")
        torch.manual_seed(100 + ctx.rank)  # ranks whose generators differ end equal all the same
        model = on_meta(Lm)
        model.embed.weight.lr_scale = 0.5
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        optimizer = adamw(model.parameters())
        options = {"strategy": strategy, "param_init_fn": init, "device_id": "cpu"}
        fully_shard(model, policy=policy, process_group=ctx.group, **options)
        assert all(p is params[name] for name, p in model.named_parameters())
        assert list(dict(model.named_buffers())) == list(buffers)
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.lr_scale == 0.5
        assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
        whole = full_params(model)
        same_everywhere(ctx, whole)
        same_everywhere(ctx, dict(model.named_buffers()))
        plain = Lm()
        assert {n: (p.shape, p.dtype) for n, p in whole.items()} == {
            n: (p.shape, p.dtype) for n, p in plain.named_parameters()
        }
        if init is None or init is init_by_to_empty:
            assert torch.equal(whole["blocks.0.norm.weight"], torch.ones(WIDTH))
            assert torch.equal(model.rotary.inv_freq, plain.rotary.inv_freq)
            assert whole["blocks.0.up.weight"].std() > 0.05
            assert not torch.equal(whole["blocks.0.up.weight"], whole["blocks.1.up.weight"])
        elif init is init_only:
            assert 0 < whole["embed.weight"].std() < 0.04
        else:
            assert all((p == 0.125).all() for p in whole.values())
        model(tokens(3)).square().mean().backward()
        optimizer.step()  # built before the parameters had values
        after = full_params(model)
        assert not any(torch.equal(after[name], whole[name]) for name in whole)


@ranks(4)
def test_one_unit_is_whole_at_a_time(ctx):
    """The most elements that parameters had memory for, over and above the shards, at any initialisation."""
    blocks = 6
    peak = 0
    model = on_meta(lambda: nn.Sequential(*(Block() for _ in range(blocks))))
    params = list(model.parameters())
    one_block = sum(p.numel() for p in model[0].parameters())

    def init(module: nn.Module) -> None:
        nonlocal peak
        whole = [p for p in params if not p.is_meta and not isinstance(p, flatshard.tensors.ShardedParameter)]
        peak = max(peak, sum(p.untyped_storage().nbytes() // p.itemsize for p in whole))
        module.reset_parameters()

    fully_shard(model, policy={Block}, process_group=ctx.group, param_init_fn=init)
    assert 0 < peak <= one_block
    handles = [u.handle for u in units_below(model)]
    shards = sum(resident_nbytes(b) for h in handles for b in h.flats)
    assert shards <= 4 * (blocks * one_block / ctx.world_size + blocks * (32 + 16))


class Forgets(nn.Module):
    """Its reset_parameters leaves one parameter out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Mask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def only_allocate(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


@ranks(2)
def test_rank_0_has_nothing_to_send(ctx):
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 3), NoReset()))
    with pytest.raises(RuntimeError, match=r"'1.scale' are on the meta device and their modules cannot") as e:
        fully_shard(model, process_group=ctx.group, sync_module_states=True)
    assert not hasattr(e.value, "__notes__")  # nothing has been changed


@pytest.mark.parametrize("allocates", [True, False])  # what rank 0 sends needs no initialiser
@ranks(3)
def test_meta_on_all_ranks_but_0(ctx, allocates: bool):
    """FSDP1's way to load a large model once a node: values on rank 0, memory on the others, then a broadcast."""
    torch.manual_seed(0)
    real = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), NoReset())
    expected = {n: t.clone() for n, t in real.state_dict().items()}
    model = real if ctx.rank == 0 else on_meta(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), NoReset()))
    init = None if ctx.rank == 0 or not allocates else only_allocate
    fully_shard(model, process_group=ctx.group, policy={nn.Linear}, param_init_fn=init, sync_module_states=True)
    for name, value in full_params(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=0)


@ranks(1, 2)
def test_what_was_not_initialised_is_named(ctx):
    cases: list[tuple[Callable[[], nn.Module], str]] = [
        (Forgets, "'1.bias' (were|are) on the meta device"),
        (NoReset, "'1.scale' (were|are) on the meta device"),
        (Mask, "'1.mask' (were|are) on the meta device"),
        (functools.partial(Rotary, False), "'1.inv_freq' (were|are) on the meta device"),
    ]
    for make, message in cases:
        for policy in (None, {make if isinstance(make, type) else Rotary}):
            ctx.note(f"{message}, policy {policy}")
            with pytest.raises(RuntimeError, match=message):
                fully_shard(
                    on_meta(lambda make=make: nn.Sequential(nn.Linear(3, 3), make())),
                    policy=policy,
                    process_group=ctx.group,
                    device_id="cpu",
                )
    for bad in (42, nn.Linear, lambda: None):
        for model in (on_meta(lambda: nn.Linear(3, 3)), nn.Linear(3, 3)):
            with pytest.raises(
                TypeError, match=r"param_init_fn=.*it must be None or a function that takes a module"
            ) as e:
                fully_shard(model, process_group=ctx.group, param_init_fn=bad)
            assert not hasattr(e.value, "__notes__")  # nothing has been changed
            fully_shard(model, process_group=ctx.group)
    with pytest.raises(RuntimeError, match=r"'weight', 'bias' were .*param_init_fn was called"):
        fully_shard(on_meta(lambda: nn.Linear(3, 3)), process_group=ctx.group, param_init_fn=lambda module: None)
    with pytest.raises(RuntimeError, match=r"'weight', 'bias' were .*param_init_fn was called"):
        fully_shard(on_meta(lambda: nn.Linear(3, 3)), process_group=ctx.group, param_init_fn=only_allocate)
    assert not torch.are_deterministic_algorithms_enabled()  # a mode that is on for the call only


@ranks(2)
def test_partly_on_meta(ctx):
    for policy in (None, {Block}):
        torch.manual_seed(0)
        model = nn.Sequential(Block(), on_meta(Block), Block())
        model[2].up.weight = nn.Parameter(torch.empty_like(model[2].up.weight, device="meta"))
        before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.is_meta}
        calls = []

        def init(module: nn.Module, model: nn.Module = model, calls: list[str] = calls) -> None:
            calls.append(next(n for n, m in model.named_modules() if m is module))
            if module is model[2].up:  # one of two: the other one's value is not to be touched
                nn.init.zeros_(module.weight)
            else:
                module.reset_parameters()

        fully_shard(model, policy=policy, process_group=ctx.group, param_init_fn=init)
        assert calls == ["1.norm", "1.up", "1.down", "2.up"]
        after = full_params(model)
        for name, value in before.items():
            assert torch.equal(after[name], value), name
        assert torch.equal(after["2.up.weight"], torch.zeros(29, WIDTH))
        same_everywhere(ctx, after)


@ranks(2)
def test_manual_nesting_on_meta(ctx):
    """Inner modules first, each on meta until its own call."""
    torch.manual_seed(ctx.rank)
    model = on_meta(Lm)
    params = dict(model.named_parameters())
    for block in model.blocks:
        fully_shard(block, process_group=ctx.group, device_id="cpu")
        assert not any(p.is_meta for p in block.parameters())
        assert model.embed.weight.is_meta
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        module.reset_parameters()

    fully_shard(model, process_group=ctx.group, param_init_fn=init)
    assert seen == ["Embedding", "Rotary", "BatchNorm1d", "Linear"]  # C12: not the blocks
    assert all(p is params[name] for name, p in model.named_parameters())
    same_everywhere(ctx, full_params(model))
    model(tokens(3)).sum().backward()


# -- sync_module_states and device_id ----------------------------------------------------------------------------------


class Assorted(nn.Module):
    """Parameters and buffers of many dtypes, shapes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.low = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.codes = nn.Parameter(torch.randint(-9, 9, (5, 3)), requires_grad=False)
        self.flags = nn.Parameter(torch.rand(9) > 0.5, requires_grad=False)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.randn(()))
        self.nothing = nn.Parameter(torch.randn(0))
        for name, buffer in {
            "b_float": torch.randn(4),
            "b_bool": torch.rand(3, 3) > 0.5,
            "b_flag": torch.rand(()) > 0.5,
            "b_int": torch.randint(9, (5,)),
            "b_short": torch.randint(9, (5,), dtype=torch.int16),
            "b_byte": torch.randint(9, (5,), dtype=torch.uint8),
            "b_half": torch.randn(5, dtype=torch.float16),
            "b_complex": torch.randn(4, dtype=torch.complex128),
            "b_transposed": torch.randn(4, 3).t(),
            "b_sliced": torch.randn(9)[::2],
            "b_empty": torch.randn(0, 3),
        }.items():
            self.register_buffer(name, buffer, persistent="b_i" not in name)
        self.register_buffer("b_shared", self.b_float)
        self.register_buffer("b_none", None)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.scalar


@ranks(1, 2, 3)
def test_sync_module_states(ctx):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for policy in (None, {nn.Conv2d}):
            torch.manual_seed(5)
            expected = {n: t.detach().clone() for n, t in [*Assorted().named_parameters(), *Assorted().named_buffers()]}
            torch.manual_seed(5 + ctx.rank)
            model = nn.Sequential(Assorted())
            strides = {n: t.stride() for n, t in [*model.named_parameters(), *model.named_buffers()]}
            buffers = dict(model.named_buffers(remove_duplicate=False))
            fully_shard(model, policy=policy, process_group=ctx.group, strategy=strategy, sync_module_states=True)
            torch.manual_seed(5)
            reference = nn.Sequential(Assorted())
            assert dict(model.named_buffers(remove_duplicate=False)).keys() == buffers.keys()
            assert all(b is buffers[n] for n, b in model.named_buffers(remove_duplicate=False))
            got = full_params(model)
            for name, value in reference.named_parameters():
                assert torch.equal(got[name], value), name
                assert got[name].stride() == strides[name]
            for name, value in reference.named_buffers():
                assert torch.equal(buffers[name], value), name
                assert buffers[name].stride() == strides[name]
            assert expected.keys() == {n.removeprefix("0.") for n in strides}


@ranks(2)
def test_each_rank_keeps_its_own_values_otherwise(ctx):
    torch.manual_seed(ctx.rank)
    model = nn.BatchNorm1d(50)
    model.weight.data.fill_(ctx.rank)
    model.running_mean.fill_(ctx.rank)
    fully_shard(model, process_group=ctx.group)
    assert (model.weight == ctx.rank).all()
    assert (model.running_mean == ctx.rank).all()
    ignored = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.no_grad():
        for param in ignored.parameters():
            param.fill_(ctx.rank)
    fully_shard(ignored, process_group=ctx.group, ignored_states=[ignored[1]], sync_module_states=True)
    assert (ignored[1].weight == ctx.rank).all()
    assert all((p == 0).all() for p in ignored[0].parameters())


@ranks(2)
def test_device_id(ctx):
    for device in ("cpu", torch.device("cpu")):
        torch.manual_seed(0)
        model = Lm()
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        fully_shard(model, policy={Block}, process_group=ctx.group, device_id=device)
        assert all(p is params[n] for n, p in model.named_parameters())
        assert all(b is buffers[n] for n, b in model.named_buffers())
        assert all(torch.equal(p, before[n]) for n, p in full_params(model).items())
    model = fully_shard(on_meta(Lm), policy={Block}, process_group=ctx.group, device_id="cpu")
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}


# -- Device meshes -----------------------------------------------------------------------------------------------------


@ranks(4)
def test_device_meshes(ctx):
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Block(), Block()).double()

    one = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    transposed = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes: list[tuple[DeviceMesh, list[int]]] = [
        (one, [0, 1, 2, 3]),
        (two["dp"], [0, 1] if ctx.rank < 2 else [2, 3]),
        (transposed["dp"], [ctx.rank % 2, ctx.rank % 2 + 2]),
        (ctx.mesh, [0, 1, 2, 3]),
    ]
    for mesh, members in meshes:
        # Each group trains a model of its own: groups that mixed would show.
        model, plain = make(members[0]), make(members[0])
        fully_shard(model, policy={Block}, device_mesh=mesh, sync_module_states=True)
        assert flatshard.describe(model).world_size == len(members)
        held = torch.tensor([p.numel() for p in model.parameters()])
        dist.all_reduce(held, group=mesh.get_group())
        assert held.tolist() == [p.numel() for p in plain.parameters()]
        optimizers = [adamw(m.parameters()) for m in (model, plain)]
        for step in range(2):
            torch.manual_seed(step + 10 * members[0])
            x = torch.randn(2 * len(members), WIDTH, dtype=torch.float64)
            at = members.index(ctx.rank)
            model(x[2 * at : 2 * at + 2]).square().mean().backward()
            plain(x).square().mean().backward()
            step_all(optimizers)
        check_same_params(model, plain)
    with pytest.raises(ValueError, match=r"2 dimensions .*mesh\['dp'\]"):
        fully_shard(make(0), device_mesh=two)


@ranks(4)
def test_meta_within_a_mesh_dimension(ctx):
    """Values are those of each group's first rank, not of rank 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["dp"]
    model = on_meta(lambda: nn.Linear(WIDTH, WIDTH))
    fully_shard(
        model, device_mesh=mesh, param_init_fn=lambda m: [nn.init.constant_(p, ctx.rank) for p in m.parameters()]
    )
    first = ctx.rank // 2 * 2
    assert all((p == first).all() for p in full_params(model).values())
