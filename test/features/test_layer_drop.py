"""Models that drop layers at random, like Hugging Face's: ranks drop different layers, and train as one process does."""

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block
from on_ranks import ranks
from parity import check_same_params, step_all
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import OutOfStepError, fully_shard


class SpeechEncoder(nn.Module):
    """Like Wav2Vec2Encoder, checks whether FSDP wraps the model, and then runs layers that it should drop."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(layerdrop=rate)
        self.front = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.front(x)
        synced_gpus = getattr(self, "_is_fsdp_managed_module", False)
        for layer in self.layers:
            skipped = self.training and bool(torch.rand([]) < self.config.layerdrop)
            if not skipped or synced_gpus:
                x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        return {"last_hidden_state": self.norm(x)}


class BartEncoder(nn.Module):
    """Passes inputs to its layers by keyword. Layers have units inside."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layerdrop = rate
        self.layers = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and bool(torch.rand([]) < self.layerdrop)):
                x = layer(input=x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=False)
        return x


class TwoLists(nn.Module):
    """Like Flaubert, keeps layers to drop in several lists."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layerdrop = rate
        self.attentions = nn.ModuleList(Block() for _ in range(4))
        self.ffns = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for attention, ffn in zip(self.attentions, self.ffns, strict=True):
            if bool(torch.rand([]) >= self.layerdrop):
                x = ffn(attention(x))
            elif getattr(self, "skips", False):
                x = flatshard.skip(ffn, flatshard.skip(attention, x))
        return x


class Around(nn.Module):
    """A model with its encoder's config and no layers to drop."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.config, self.encoder = getattr(encoder, "config", None), encoder
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output = self.encoder(x)
        return self.head(output if isinstance(output, Tensor) else output["last_hidden_state"])


def make(kind: Callable[[float], nn.Module], rate: float = 0.5, checkpointed: bool | None = None) -> nn.Module:
    """Return a model. ``checkpointed`` is the layers' ``use_reentrant``, or None for no checkpoints."""
    torch.manual_seed(0)
    model = Around(kind(rate)).double()
    model.encoder.checkpointed = checkpointed
    return model


def shard(ctx, model: nn.Module, policy: Any = frozenset({Block, nn.Sequential}), group: Any = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(model, policy=set(policy), process_group=group or ctx.group)
    return [str(w.message) for w in caught if "layerdrop" in str(w.message)]


def train(ctx, reference: nn.Module, model: nn.Module, steps: int = 2) -> None:
    """Train with layers dropped per rank. Losses and parameters equal those of one process that drops the same layers."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(steps):
        torch.manual_seed(100 + step)
        batch = torch.randn(ctx.world_size, 3, 4).double()
        losses = []
        for rank, x in enumerate(batch):
            torch.manual_seed(10 * step + rank)
            losses.append(reference(x).square().mean())
            (losses[-1] / ctx.world_size).backward()
        torch.manual_seed(10 * step + ctx.rank)
        loss = model(batch[ctx.rank]).square().mean()
        loss.backward()
        torch.testing.assert_close(loss, losses[ctx.rank], rtol=1e-12, atol=1e-14)
        step_all(optimizers)
    check_same_params(model, reference)


@pytest.mark.parametrize("kind", [SpeechEncoder, BartEncoder])
@ranks(3)
def test_each_rank_drops_its_own_layers(ctx, kind: Any):
    reference, model = make(kind), make(kind)
    assert shard(ctx, model, {Block, nn.Sequential, nn.LayerNorm}) == []  # the norm behind the list is a unit
    train(ctx, reference, model, steps=3)
    train(ctx, copy.deepcopy(reference), copy.deepcopy(model))
    reference.eval(), model.eval()  # drops nothing
    train(ctx, reference, model, steps=1)
    with torch.no_grad():
        model.train()(torch.ones(2, 4).double())


@ranks(2)
def test_checkpoints_that_do_not_fit(ctx):
    """Every rank raises, whether it drops a layer or not, and each cure works."""
    units, reentrant = {Block, nn.Sequential}, "'encoder.layers.0' is in a reentrant .* Use use_reentrant=False"
    inside = "'encoder.layers.3.1' has several units .* Make the layer one unit, or set layerdrop to 0"
    for kind, checkpointed, what, cure, policy in (
        (SpeechEncoder, True, reentrant, {"checkpointed": False}, units),
        (BartEncoder, False, inside, {}, {nn.Sequential}),
        (BartEncoder, False, inside, {"rate": 0.0}, units),
    ):
        model = make(kind, 1e-12, checkpointed)  # no rank drops a layer
        shard(ctx, model)
        with pytest.raises(RuntimeError, match=what):
            model(torch.ones(2, 4).double()).sum().backward()
        reference, model = (make(kind, **({"checkpointed": checkpointed} | cure)) for _ in range(2))
        shard(ctx, model, policy)
        train(ctx, reference, model)


@ranks(2)
def test_wherever_fully_shard_is_called(ctx):
    """The list of layers is registered once, whichever call shards it. A failing forward leaves no state."""
    reference, model = make(SpeechEncoder), make(SpeechEncoder)
    for module in (*model.encoder.layers, model.encoder, model):
        fully_shard(module, process_group=ctx.group)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 5).double())
    train(ctx, reference, model)
    whole = make(SpeechEncoder)
    fully_shard(whole, process_group=ctx.group)  # no layer is a unit, so any may be left out
    train(ctx, make(SpeechEncoder), whole)


def run_passes(model: nn.Module) -> None:
    for _ in range(4):
        model(torch.ones(2, 4).double()).sum().backward()


@ranks(2)
def test_a_warning_where_layers_are_in_several_lists(ctx):
    """Ambiguous lists are warned about, and each cure works."""
    for rate, skips in ((0.0, False), (0.5, True)):
        reference, model = make(TwoLists, rate), make(TwoLists, rate)
        assert bool(shard(ctx, model)) == skips
        model.encoder.skips = skips
        train(ctx, reference, model)
    model = make(TwoLists)
    (told,) = shard(ctx, model, group=dist.new_group(list(range(ctx.world_size))))  # unusable after this test
    assert "'encoder' may leave out layers at random" in told
    assert "Set layerdrop to 0, or call flatshard.skip(layer, x)" in told
    torch.manual_seed(ctx.rank)
    with pytest.raises(OutOfStepError, match="layerdrop"):
        run_passes(model)
