"""Weights for an inference copy, as verl and TRL fetch them: bit-equal on every rank."""

from __future__ import annotations

import contextlib
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


def whole(value: Any) -> Any:
    """As TRL's and verl's FSDP2 branches do."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def sync(ctx, kind: str) -> None:
    from flatshard.integrations.weight_sync import sync_weights

    model, reference = trained(kind, ctx.rank)
    expected = dict(reference.named_parameters())
    for way, load in {
        "TRL's loop": lambda to: [to([(name, whole(value))]) for name, value in model.state_dict().items()],
        "verl's generator": lambda to: to((name, whole(value)) for name, value in model.state_dict().items()),
        "ours": lambda to: sync_weights(model, to),
    }.items():
        ctx.note(f"{kind}: {way}")
        engine = Engine(MODELS[kind]())
        load(engine.load_weights)
        assert expected.keys() <= engine.loaded
        for name, value in engine.model.named_parameters():
            assert torch.equal(value, expected[name]), name


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

    with pytest.raises(ValueError, match="engine") if ctx.rank == 0 else contextlib.nullcontext():
        sync_weights(model, receive, dtype=torch.bfloat16, on_ranks=[0])
    assert set(found) <= {torch.bfloat16}
    tokens = Tokens(2).tokens
    model(input_ids=tokens, labels=tokens).loss.backward()
    return len(found)


def test_on_one_rank(pair):
    assert pair.run(one_rank, world_size=2) == [3, 0]
