"""``fit``: no step takes more than its budget, and what is predicted is what is counted; nothing cheaper fits."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from live_steps import measured
from on_ranks import ranks
from parity import check_parity
from torch import Tensor, nn
from torch.nn import functional as F

from flatshard import fit, fully_shard, plan
from flatshard.planning import _fit, _timeline

WIDTH, TOKENS = 32, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Looks(Gpt):
    """Its forward asks for values, as transformers' models do."""

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        starts = (positions.diff(dim=1) != 1).cumsum(1)
        if (starts == 0).all():
            return super().forward(tokens)
        return self.head(self.embed(tokens[starts > 0]))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def conv_net() -> nn.Module:
    """Two stages of blocks, each of its own size."""
    stages = [nn.Sequential(Residual(c), Residual(c), nn.Conv2d(c, 2 * c, 3, 2, 1)) for c in (8, 16)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 7)
    )


class Uneven(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mid(self.up(x).tanh()).tanh())


def uneven(count: int = 3) -> nn.Module:
    """Blocks of which some are dear, and some large."""
    return nn.Sequential(*[Uneven((8, 64, 32)[at % 3]) for at in range(count)])


IDS = torch.arange(2 * TOKENS).view(2, TOKENS) % 50
MODELS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "gpt": (Gpt, (IDS,)),
    "values": (Looks, (IDS,)),
    "conv": (conv_net, (torch.ones(3, 3, 16, 16),)),
    "uneven": (uneven, (torch.ones(40, 16),)),
}


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def options(name: str, **changes: Any) -> dict[str, Any]:
    return {"world_size": 4, "optimizer": torch.optim.AdamW, "loss": loss_of, "device": "cpu"} | {
        "example_inputs": MODELS[name][1],
        **changes,
    }


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


@functools.cache
def bounds(name: str) -> tuple[int, int]:
    """The peaks when everything is given up that units have, and nothing."""
    model = on_meta(MODELS[name][0])
    least = plan(model, policy="auto", recompute=True, compare=False, **options(name))
    most = plan(model, policy="auto", strategy="shard_grad_op", compare=False, **options(name))
    return least.total_peak.nbytes, most.total_peak.nbytes


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.1), ("gpt", 1.1), ("values", 0.5), ("conv", 0.3)])
def test_what_is_predicted_is_measured(world, monkeypatch, name: str, share: float):
    """Budgets from nearly the least possible to all that is needed, over the fake group: it receives nothing."""
    made = _fit.StepOptions
    monkeypatch.setattr(_fit, "StepOptions", lambda **given: made(**given | {"receives": False}))
    make, batch = MODELS[name]
    least, most = bounds(name)
    budget = least + int(share * (most - least))
    fitted = fit(on_meta(make), bytes_per_rank=budget, **options(name))
    world(4)
    model = fitted.apply(make())
    peaks = measured(model, torch.optim.AdamW(model.parameters()), batch, loss_of)
    assert max(peaks.values()) <= budget
    assert abs(max(peaks.values()) - fitted.peak.nbytes) <= 0.01 * fitted.peak.nbytes
    assert fitted.margin == budget - fitted.peak.nbytes >= 0
    assert bool(fitted.given_up) == (share < 1)


@pytest.mark.parametrize("name", ["gpt", "conv"])
@ranks(2)
def test_training_is_that_of_one_process(ctx, name: str):
    """And no rank takes more than the budget."""
    make, batch = MODELS[name]
    given = options(name, world_size=2)
    whole = plan(on_meta(make), policy="auto", strategy="shard_grad_op", compare=False, **given)
    budget = 8 * whole.total_peak.nbytes // 10
    fitted = fit(on_meta(make), bytes_per_rank=budget, **given)
    assert fitted.given_up
    check_parity(
        ctx,
        make,
        lambda step, n: torch.randint(50, (n, TOKENS)) if name == "gpt" else torch.randn(n, 3, 16, 16),
        steps=3,
        shard=lambda model, group: fitted.apply(model, process_group=group),
        loss_fn=lambda output, _: loss_of(output),
        oracle="slices",  # batch norm's statistics are those of a rank
    )
    model = fitted.apply(make(), process_group=ctx.group)
    peaks = measured(model, torch.optim.AdamW(model.parameters()), batch, loss_of)
    assert max(peaks.values()) <= budget
    assert abs(max(peaks.values()) - fitted.peak.nbytes) <= max(0.01 * fitted.peak.nbytes, 2**16)


def cost_of(planned: Any, first: Any, rate: float) -> float:
    return planned.sent_nbytes - first.sent_nbytes + (planned.flops - first.flops) / rate


def test_no_cheaper_choice_fits(monkeypatch):
    """Of all choices of what three uneven units give up, each planned, none costs 5 % less."""
    found, run = list[Any](), _fit._Search.run
    monkeypatch.setattr(_fit._Search, "run", lambda self, *given: found.append(self) or run(self, *given))
    model, rate = on_meta(uneven), 50.0
    given = options("uneven", flops_per_byte=rate, policy=Uneven)
    fit(model, bytes_per_rank="1 GiB", **given)
    kinds = _timeline.Keeps(1, False), _timeline.Keeps(2, False), _timeline.Keeps(1, True)
    plans = [found[0].plan(_fit.Setting(), row) for row in itertools.product(kinds, repeat=3)]
    peaks, first = [p.total_peak.nbytes for p in plans], plans[0]
    for share in (0.05, 0.5):
        budget = int(min(peaks) + share * (peaks[0] - min(peaks)))
        fitted = fit(model, bytes_per_rank=budget, **given)
        least = min(cost_of(p, first, rate) for p in plans if p.total_peak.nbytes <= budget)
        assert cost_of(fitted.plan, first, rate) <= 1.05 * least + 1, (share, fitted)
        assert fitted.sent_nbytes + fitted.flops / rate == cost_of(fitted.plan, first, rate)


def test_several_microbatches():
    """Parameters that stay until the step save a gather in each microbatch, and are given up first where that is enough."""
    given = options("uneven", microbatches=3, policy=Uneven)
    free = fit(on_meta(uneven), bytes_per_rank="1 GiB", **given)
    assert {unit.strategy for unit in free.units} == {"SHARD_OPTIM"}
    least = fit(on_meta(uneven), bytes_per_rank=int(0.95 * free.peak.nbytes), **given)
    assert least.given_up
    assert least.plan.sent_nbytes >= free.plan.sent_nbytes


def test_the_page(tmp_path):
    least, most = bounds("gpt")
    fitted = fit(on_meta(Gpt), bytes_per_rank=(least + most) // 2, **options("gpt"))
    assert repr(fitted) == "Fit(Gpt over 4 ranks: peak 524 KiB of 531 KiB, 2 given up)"
    for line in (
        "peak 536,796 bytes (524 KiB), in backward at unit 'blocks.2'; 6.34 KiB (1.2%) below the budget",
        "blocks.0  SHARD_GRAD_OP  yes",
        f"all of it costs in a step: 0 B sent more (242 KiB in all), {fitted.flops:,} operations computed again",
    ):
        assert line in str(fitted).splitlines()
    fitted.plot(tmp_path / "step.svg")
    assert "budget" in (tmp_path / "step.svg").read_text()


def test_what_does_not_fit():
    model, given = on_meta(uneven), options("uneven", example_inputs=(torch.ones(1, 16),), policy=Uneven)
    message = r"does not fit into .* on 4 ranks\. The least possible peak is .* It would fit on (\d+) ranks"
    least = plan(model, recompute=True, compare=False, **given).total_peak.nbytes
    with pytest.raises(ValueError, match=message) as caught:
        fit(model, bytes_per_rank=9 * least // 10, **given)
    needed = int(str(caught.value).rpartition("fit on ")[2].partition(" ")[0])
    assert needed > 4
    assert fit(model, bytes_per_rank=9 * least // 10, **given | {"world_size": needed}).margin >= 0
    with pytest.raises(ValueError, match=r"The least possible peak is .* More ranks are not"):
        fit(model, bytes_per_rank=1000, **given)


class Extends(Gpt):
    """A block that cannot be computed again: it keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__(3)
        for block in self.blocks:
            block.forward = functools.partial(self.extend, block, [])

    @staticmethod
    def extend(block: Block, seen: list[Tensor], x: Tensor) -> Tensor:
        seen.append(x.detach())
        return Block.forward(block, torch.cat(seen, 1))[:, -x.size(1) :]


def test_what_is_not_possible(world):
    given = options("gpt")
    fitted = fit(on_meta(Extends), bytes_per_rank="1 GiB", **given)
    assert "no unit can compute its forward again (CheckpointError" in fitted.notes[0]
    assert "no unit can compute" in str(fitted)
    with pytest.raises(ValueError, match=r"has no module 'blocks\.2': it is not the model that was fitted"):
        fitted.apply(Gpt(2))
    model = Gpt()
    for error, message, changes in (
        (ValueError, "is no size", {"bytes_per_rank": "forty"}),
        (ValueError, "hybrid strategies are not fitted", {"world_size": (2, 4)}),
        (ValueError, "example_inputs are needed", {"example_inputs": None}),
        (NotImplementedError, "'norm, head' is several modules", {"policy": {Block, (model.norm, model.head)}}),
        (NotImplementedError, "has arguments of its own", {"policy": {"blocks.0": {"recompute": True}}}),
    ):
        with pytest.raises(error, match=message):
            fit(model, **{"bytes_per_rank": 10**9} | given | changes)
    world(2)
    with pytest.raises(ValueError, match="is sharded already"):
        fit(fully_shard(Gpt()), bytes_per_rank=10**9, **given)
    assert _fit.parse_bytes("40 GiB") == 40 * 2**30
    assert _fit.parse_bytes("1.5kb") == 1500
