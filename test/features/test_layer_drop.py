"""Models that leave out layers at random, as Hugging Face's do: told to run them, or warned about."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard


def is_fsdp_managed_module(module: nn.Module) -> bool:
    """As in transformers.integrations.fsdp."""
    return getattr(module, "_is_fsdp_managed_module", False)


class SpeechEncoder(nn.Module):
    """As Wav2Vec2Encoder."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(layerdrop=rate)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        synced_gpus = is_fsdp_managed_module(self)
        for layer in self.layers:
            skipped = self.training and bool(torch.rand([]) < self.config.layerdrop)
            if not skipped or synced_gpus:
                x = torch.tanh(layer(x))
        return x


class BartEncoder(nn.Module):
    """It looks for nothing."""

    def __init__(self, rate: float, skips: bool = False) -> None:
        super().__init__()
        self.layerdrop = rate
        self.config = SimpleNamespace(encoder_layerdrop=rate, decoder_layerdrop=0.5)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not bool(torch.rand([]) < self.layerdrop):
                x = torch.tanh(layer(x))
            elif self.skips:
                x = flatshard.skip(layer, x)
        return x


class ConfiguredDecoder(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(encoder_layerdrop=0.5, decoder_layerdrop=rate)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Around(nn.Module):
    """What has the same config, and no layers of its own."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.config, self.encoder = encoder.config, encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def shard(ctx, encoder: nn.Module, policy: set[type[nn.Module]] | None) -> tuple[nn.Module, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(Around(encoder), policy=policy, process_group=ctx.group)
    return model, [str(w.message) for w in caught if "layerdrop" in str(w.message)]


def drop(ctx) -> None:
    for encoder, warns in (
        (SpeechEncoder(0.5), False),
        (BartEncoder(0.5, skips=True), True),
        (BartEncoder(0.0), False),
        (ConfiguredDecoder(0.5), True),
        (ConfiguredDecoder(0.0), False),
    ):
        torch.manual_seed(0)
        model, told = shard(ctx, encoder, {nn.Linear})
        assert len(told) == warns, (type(encoder).__name__, told)
        if warns:
            assert "'encoder' may leave out layers at random" in told[0]
            assert "Set layerdrop to 0" in told[0]
        torch.manual_seed(ctx.rank)
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(3):  # ranks draw different layers
            model(x).sum().backward()
    by_hand = BartEncoder(0.5, skips=True)
    for layer in by_hand.layers:
        fully_shard(layer, process_group=ctx.group)
    assert len(shard(ctx, by_hand, None)[1]) == 1
    for encoder in (SpeechEncoder(0.5), BartEncoder(0.5)):
        model, told = shard(ctx, encoder, None)  # no layer is a unit, so any may be left out
        assert told == []
        torch.manual_seed(ctx.rank)
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def test_layers_dropped_at_random(pool):
    pool.run(drop)
