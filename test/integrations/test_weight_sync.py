"""Weights for an inference copy, as verl and TRL fetch them: bit-equal on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Tokens, tiny_gpt2, tiny_llama
from torch import nn

import flatshard

pytestmark = [pytest.mark.clients("transformers"), pytest.mark.time_limit(600)]

MODELS = {"llama": tiny_llama, "tied llama": lambda: tiny_llama(tied=True), "gpt2": tiny_gpt2}


def trained(kind: str, rank: int) -> tuple[nn.Module, nn.Module]:
    """Sharded, after a step; and a plain copy with the same weights, by a whole state dict."""
    from flatshard.integrations.state import policy_of

    model, reference, tokens = MODELS[kind](), MODELS[kind](), Tokens(4).tokens[rank::2]
    flatshard.fully_shard(model, policy=policy_of(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    reference.load_state_dict(flatshard.checkpoint.full_state_dict(model))
    return model, reference


class Engine:
    """Takes weights as vLLM's ``load_weights``: names of the checkpoint, one tensor at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.loaded: set[str] = set()

    def load_weights(self, weights: Any) -> None:
        own = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        for name, value in weights:
            with torch.no_grad():
                own[name].copy_(value)
            self.loaded.add(name)

    def check(self, reference: nn.Module) -> None:
        expected = dict(reference.named_parameters())
        assert expected.keys() <= self.loaded
        for name, value in self.model.named_parameters():
            assert torch.equal(value, expected[name]), name


def by_trl(model: nn.Module, engine: Engine) -> None:
    """The loop of TRL's and verl's FSDP2 branches."""
    for name, value in model.state_dict().items():
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        engine.load_weights([(name, value)])


def by_verl(model: nn.Module, engine: Engine) -> None:
    """verl's generator of tensors."""
    engine.load_weights((n, v.full_tensor() if hasattr(v, "full_tensor") else v) for n, v in model.state_dict().items())


def by_us(model: nn.Module, engine: Engine) -> None:
    from flatshard.integrations.weight_sync import sync_weights

    sync_weights(model, engine.load_weights)


def sync(ctx, kind: str) -> None:
    model, reference = trained(kind, ctx.rank)
    for way in (by_trl, by_verl, by_us):
        ctx.note(f"{kind}: {way.__name__}")
        engine = Engine(MODELS[kind]())
        way(model, engine)
        engine.check(reference)


@pytest.mark.parametrize("kind", MODELS)
def test_bit_equal(pair, kind: str):
    pair.run(sync, kind, world_size=2)


def one_rank(ctx) -> int:
    """Rank 0 has the engine, in bfloat16, which fails after three tensors; ranks stay in step."""
    from flatshard.integrations.weight_sync import sync_weights

    model, _ = trained("llama", ctx.rank)
    found: list[torch.dtype] = []

    def receive(weights: Any) -> None:
        for _, value in weights:
            found.append(value.dtype)
            if len(found) == 3:
                raise ValueError("engine")

    if ctx.rank == 0:
        with pytest.raises(ValueError, match="engine"):
            sync_weights(model, receive, dtype=torch.bfloat16, on_ranks=[0])
    else:
        sync_weights(model, receive, dtype=torch.bfloat16, on_ranks=[0])
    assert set(found) <= {torch.bfloat16}
    tokens = Tokens(2).tokens
    model(input_ids=tokens, labels=tokens).loss.backward()
    return len(found)


def test_on_one_rank(pair):
    assert pair.run(one_rank, world_size=2) == [3, 0]
