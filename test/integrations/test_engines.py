"""Changes for vLLM and verl, in their own coordinates, applied by their own code, which runs on CPU.

vLLM's transport needs NCCL, and verl's needs Ray. Here tensors go from hand to hand.
"""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import ranks
from parity import everybody
from torch import Tensor, nn

import flatshard
from flatshard.checkpoint import full_state_dict
from flatshard.weights import Patch, PatchSource, decode_patches
from flatshard.weights._gaps import bits

WIDTH, HALF = 16, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x) + self.k(x) + self.v(x))


class Trained(nn.Module):
    """A model with layers, a tied head, and parameters before and after the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(nn.Sequential(*self.layers)(self.embed(x))))


class Engine(nn.Module):
    """The second of two tensor-parallel ranks of an engine: fused q, k and v, and loaders as of vLLM and SGLang."""

    def __init__(self) -> None:
        super().__init__()
        for layer in range(2):
            self.register_buffer(f"qkv{layer}", torch.zeros(3 * HALF, WIDTH, dtype=torch.bfloat16))
            self.register_buffer(f"bias{layer}", torch.zeros(3 * HALF, dtype=torch.bfloat16))
            self.register_buffer(f"out{layer}", torch.zeros(WIDTH, HALF, dtype=torch.bfloat16))
        for name in ("embed", "norm"):
            self.register_buffer(name, torch.zeros((10, WIDTH) if name == "embed" else (WIDTH,), dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        names = set()
        for name, full in weights:
            names.add(name)
            if name.startswith("layers."):
                _, layer, kind, what = name.split(".")
                if kind == "out":
                    if what == "weight":
                        getattr(self, f"out{layer}").copy_(full[:, HALF:])
                    continue
                fused = getattr(self, f"qkv{layer}" if what == "weight" else f"bias{layer}")
                fused.narrow(0, "qkv".index(kind) * HALF, HALF).copy_(full.narrow(0, HALF, HALF))
            elif name in ("embed.weight", "norm.weight"):
                getattr(self, name.removesuffix(".weight")).copy_(full)
        return names


def make(ctx: Any) -> nn.Module:
    torch.manual_seed(0)
    return flatshard.fully_shard(Trained(), policy={Attention}, process_group=ctx.group)


def change(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.numel():
                p.copy_(torch.where(torch.rand(p.shape, generator=generator) < 0.1, -p, p))


def check_has(engine: Engine, model: nn.Module) -> None:
    expected = Engine()
    expected.load_weights(full_state_dict(model, dtype=torch.bfloat16).items())
    for name, value in expected.state_dict().items():
        assert torch.equal(bits(engine.state_dict()[name].view(-1)), bits(value.view(-1))), name


@pytest.mark.clients("vllm")
@ranks(2)
def test_vllm_takes_patches(ctx) -> None:
    """vLLM's trainer accepts the patches, and its loader applies them to fused and tensor-parallel weights."""
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerWeightTransferEngine
    from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches

    from flatshard.integrations.vllm import checkpoint_weight_patches, sparse_weight_patches

    model, direct, through = make(ctx), Engine(), Engine()
    for engine in (direct, through):
        engine.load_weights(full_state_dict(model, dtype=torch.bfloat16).items())
    source, sent, told = PatchSource(model, dtype=torch.bfloat16), [], []
    group = mock.Mock(device=torch.device("cpu"), broadcast=lambda tensor, src, stream: sent.append(tensor))
    trainer = SparseNCCLTrainerWeightTransferEngine(client=mock.Mock(update_weights=told.append))
    trainer.model_update_group = group
    for step in range(2):
        change(model, step + 10 * ctx.rank)
        messages = everybody(ctx, source.encode_changes())
        load_checkpoint_weight_patches(direct, patches := checkpoint_weight_patches(messages))
        with mock.patch("torch.cuda.current_stream"):  # NCCL's, which there is none of
            trainer.send_weights(sparse_weight_patches(messages))
        # A worker receives the metadata by a call, and then the tensors in pairs.
        info = told.pop()
        tensors = iter(zip(sent[::2], sent[1::2], strict=True))
        wire = [
            type(patches[0])(name, tuple(shape), getattr(torch, dtype), values, indices)
            for name, dtype, shape, (indices, values) in zip(
                info["names"], info["dtype_names"], info["shapes"], tensors, strict=True
            )
        ]
        assert [len(patch.values) for patch in wire] == info["num_updates_list"]
        load_checkpoint_weight_patches(through, wire)
        sent.clear()
        check_has(direct, model)
        check_has(through, model)


@pytest.mark.clients("vllm")
@ranks(2)
def test_a_source_of_vllm(ctx) -> None:
    """A source declares what it yields, in the same order and without communication, pass after pass."""
    from vllm.distributed.weight_transfer.base import WeightSource, layerwise_groups

    from flatshard.integrations.vllm import ModelSource

    model = make(ctx)
    source = ModelSource(model, dtype=torch.bfloat16)
    assert isinstance(source, WeightSource)
    assert source.implements_iter_full()
    names = [meta.name for meta in source.metadata]
    assert names == [name for name, _ in model.named_parameters()]
    assert [name for group in layerwise_groups(names) for name in group] == names
    for _ in range(2):
        expected = full_state_dict(model, dtype=torch.bfloat16)
        for meta, (name, tensor) in zip(source.metadata, source.iter_full(), strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (meta.name, meta.dtype, meta.shape)
            assert torch.equal(tensor, expected[name])
        change(model, ctx.rank)


@pytest.mark.clients("verl")
@ranks(3)
def test_verl_gathers_changes(ctx) -> None:
    """verl's export and gathers find in the shards exactly the elements that have changed."""
    import torch.distributed as dist
    from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0
    from verl.workers.engine.utils import _hf_entry_identity, hf_delta_export, prime_delta_snapshots

    from flatshard.integrations.verl import iter_param_shards

    model, snapshots = make(ctx), {}
    engine = {name: t.clone() for name, t in full_state_dict(model, dtype=torch.bfloat16).items()}
    prime_delta_snapshots(iter_param_shards(model, ctx.group, dtype=torch.bfloat16), snapshots, pin=False)
    for step in range(2):
        change(model, step + 10 * ctx.rank)
        shards = iter_param_shards(model, ctx.group, dtype=torch.bfloat16)
        entries = list(hf_delta_export(shards, snapshots, _hf_entry_identity))
        assert {entry[-1] for entry in entries} == {ctx.group}
        # verl's checkpoint engine does the same, and then needs Ray.
        counts, indices, values = ([entry[i] for entry in entries] for i in (2, 3, 4))
        gathered = gather_slot_entries_to_rank0(
            torch.cat(indices), torch.cat(values), torch.cat(counts), group=ctx.group
        )
        expected = full_state_dict(model, dtype=torch.bfloat16)
        if dist.get_rank(ctx.group) == 0:
            for entry, (at, new) in zip(entries, gathered, strict=True):
                engine[entry[0][0][0]].view(-1)[at.long()] = new
            for name, _ in model.named_parameters():
                assert torch.equal(engine[name], expected[name]), name
    turned = flatshard.fully_shard(Turned(), process_group=ctx.group)
    with pytest.raises(ValueError, match=r"verl: 'weight' has strides"):
        list(iter_param_shards(turned, ctx.group))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.clients("verl", "numpy")
@ranks(2)
def test_verl_loads_flushes(ctx) -> None:
    """verl's loader in SGLang applies flushes, of whatever size, and notices a damaged one."""
    from verl.workers.rollout.sglang_rollout.delta_loader import apply_delta

    from flatshard.integrations.verl import iter_flushes

    model, engine = make(ctx), Engine()
    engine.load_weights(full_state_dict(model, dtype=torch.bfloat16).items())
    source = PatchSource(model, dtype=torch.bfloat16)
    for step, most in enumerate((2**20, 100)):
        change(model, step + 10 * ctx.rank)
        flushes = list(iter_flushes(decode_patches(everybody(ctx, source.encode_changes())), bucket_bytes=most))
        assert (len(flushes) == 1) == (most > 100)
        for flush in flushes:
            apply_delta(engine, flush)
        check_has(engine, model)
    damaged = [(name, tensor.clone()) for name, tensor in flushes[0]]
    damaged[2][1][0] *= 2
    with pytest.raises(RuntimeError, match="checksum"):
        apply_delta(engine, damaged)


@pytest.mark.parametrize("client", [pytest.param(c, marks=pytest.mark.clients(c)) for c in ("vllm", "verl")])
def test_values_that_engines_cannot_take(client: str):
    """NaN stands for an unchanged element in both, so a weight that has become NaN is refused by name."""
    nan = Patch("w", (4,), torch.tensor([1], dtype=torch.int32), torch.tensor([torch.nan]))
    many = nan._replace(indices=nan.indices.long(), values=torch.ones(1))
    count = nan._replace(values=torch.tensor([3]))
    if client == "vllm":
        from flatshard.integrations.vllm import _checked as check
    else:
        from flatshard.integrations.verl import iter_flushes as check
    for patch in (nan, many, count):
        with pytest.raises(ValueError, match=f"{'vLLM' if client == 'vllm' else 'verl'}: 'w'"):
            list(check([patch]))
