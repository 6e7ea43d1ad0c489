"""``fit_to_memory``: steps stay within the budget, measurements match predictions, and nothing is given up in vain."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from live_steps import measured
from on_ranks import ranks
from parity import check_parity, everybody
from torch import Tensor, nn
from torch.nn import functional as F

from flatshard import ShardingStrategy, describe, fit_to_memory, fully_shard, plan_step
from flatshard.optim import OffloadedOptimizer
from flatshard.planning import _arguments, _fit, measure_flops_per_byte
from flatshard.planning._records import Ranks
from flatshard.planning._search import copied_nbytes
from flatshard.planning._step import UNTIL_CHANGE, UNTIL_FORWARD, Configuration, Step, UnitChoice
from flatshard.policies import SplitRoot

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
    """A model whose forward reads values, like transformers' models."""

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
    """Make two stages of blocks, each with a size of its own."""
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
    """Make blocks of which some are expensive, and some large."""
    return nn.Sequential(*[Uneven((8, 64, 32)[at % 3]) for at in range(count)])


IDS = torch.arange(2 * TOKENS).view(2, TOKENS) % 50
MODELS: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "gpt": (Gpt, (IDS,)),
    "values": (Looks, (IDS,)),
    "conv": (conv_net, (torch.ones(3, 3, 16, 16),)),
    "uneven": (uneven, (torch.ones(40, 16),)),
    "residual": (lambda: nn.Sequential(uneven(5), nn.Linear(16, 200)), (torch.ones(40, 16),)),
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
    """Return the peaks if units give up everything and nothing."""
    model = on_meta(MODELS[name][0])
    least = plan_step(model, policy="auto", recompute=True, compare=False, **options(name))
    most = plan_step(model, policy="auto", strategy="shard_grad_op", compare=False, **options(name))
    return least.total_peak.nbytes, most.total_peak.nbytes


@pytest.mark.parametrize(("name", "share"), [("gpt", 0.1), ("gpt", 1.1), ("values", 0.5), ("conv", 0.3)])
def test_what_is_predicted_is_measured(world, monkeypatch, name: str, share: float):
    """Budgets range from nearly the minimum to everything. Ranks are simulated by a fake group, which receives nothing."""
    made = _fit.StepOptions
    monkeypatch.setattr(_fit, "StepOptions", lambda **given: made(**given | {"receives": False}))
    make, batch = MODELS[name]
    least, most = bounds(name)
    budget = least + int(share * (most - least))
    fitted = fit_to_memory(on_meta(make), bytes_per_rank=budget, **options(name))
    world(4)
    model = fitted.apply(make())
    peaks = measured(model, torch.optim.AdamW(model.parameters()), batch, loss_of)
    assert max(peaks.values()) <= budget, (peaks, budget, fitted.peak.nbytes)
    assert abs(max(peaks.values()) - fitted.peak.nbytes) <= 0.01 * fitted.peak.nbytes
    for phase, most in peaks.items():
        predicted = max(sample.device.total for sample in fitted.plan.samples if sample.phase == phase)
        assert abs(most - predicted) <= max(0.01 * predicted, 2**12), phase  # another rank has the largest shard
    assert fitted.margin == budget - fitted.peak.nbytes >= 0
    assert bool(fitted.tradeoffs) == (share < 1)


@pytest.mark.parametrize("name", ["gpt", "conv"])
@ranks(2)
def test_training_is_that_of_one_process(ctx, name: str):
    """No rank takes more than the budget."""
    make, batch = MODELS[name]
    given = options(name, world_size=2)
    whole = plan_step(on_meta(make), policy="auto", strategy="shard_grad_op", compare=False, **given)
    budget = 8 * whole.total_peak.nbytes // 10
    fitted = fit_to_memory(on_meta(make), bytes_per_rank=budget, **given)
    assert fitted.tradeoffs
    check_parity(
        ctx,
        make,
        lambda step, n: torch.randint(50, (n, TOKENS)) if name == "gpt" else torch.randn(n, 3, 16, 16),
        steps=3,
        shard=lambda model, group: fully_shard(model, process_group=group, **fitted.arguments),  # in float64
        loss_fn=lambda output, _: loss_of(output),
        oracle="slices",  # batch norm's statistics are per rank
    )
    model = fitted.apply(make(), process_group=ctx.group)
    peaks = measured(model, torch.optim.AdamW(model.parameters()), batch, loss_of)
    assert max(peaks.values()) <= budget, (peaks, budget, fitted.peak.nbytes)
    assert abs(max(peaks.values()) - fitted.peak.nbytes) <= max(0.01 * fitted.peak.nbytes, 2**16)


def test_several_microbatches():
    """All units stay unsharded until the step, and only the last microbatch reduces, unless the budget is too small."""
    make = MODELS["residual"][0]
    given = options("residual", microbatches=3, policy=Uneven)
    planned = {**given, "compare": False}
    free = fit_to_memory(on_meta(make), bytes_per_rank="1 GiB", **given)
    assert free.no_sync
    assert "microbatches: 3, all but the last under flatshard.no_sync(model)" in str(free)
    most = plan_step(on_meta(make), strategy="shard_optim", no_sync=True, **planned)
    assert (free.peak.nbytes, free.plan.sent_nbytes) == (most.total_peak.nbytes, most.sent_nbytes)
    each_reduced = plan_step(on_meta(make), recompute=True, **planned).total_peak.nbytes
    tight = fit_to_memory(on_meta(make), bytes_per_rank=each_reduced, **given)
    assert not tight.no_sync
    assert "microbatches: 3, each reduced, without no_sync" in str(tight)
    assert any("without no_sync" in each.what for each in tight.tradeoffs)
    again = plan_step(on_meta(make), **planned | tight.arguments)
    assert (again.samples, again.collectives) == (tight.plan.samples, tight.plan.collectives)


def test_a_unit_that_stays_less_long_than_the_outermost_one():
    units = [UnitChoice("a", UNTIL_FORWARD), UnitChoice("b", UNTIL_CHANGE)]
    arguments = Configuration(tuple(units), outermost=UNTIL_CHANGE).arguments(Ranks(1, 2))
    assert arguments["policy"] == {"a": {"strategy": ShardingStrategy.FULL_SHARD}, "b": {}}
    assert arguments["strategy"] is ShardingStrategy.SHARD_OPTIM


def test_the_page(tmp_path):
    least, most = bounds("gpt")
    fitted = fit_to_memory(on_meta(Gpt), bytes_per_rank=(least + most) // 2, **options("gpt"))
    assert repr(fitted) == "MemoryFit(Gpt over 4 ranks: peak 524 KiB of 528 KiB, 1 given up)"
    for line in (
        "peak 536,796 bytes (524 KiB), in backward at unit 'blocks.2'; 3.34 KiB (0.6%) below the budget",
        "blocks.0  SHARD_GRAD_OP  yes",
        f"all of it costs in a step: 0 B sent more (242 KiB in all), {fitted.flops:,} operations computed again",
    ):
        assert line in str(fitted).splitlines()
    free = fit_to_memory(on_meta(Gpt), bytes_per_rank=most, **options("gpt"))
    assert "blocks.0 ... blocks.2 (3)  SHARD_GRAD_OP  no" in str(free)
    fitted.plot(tmp_path / "step.svg")
    picture = (tmp_path / "step.svg").read_text()
    assert "budget" in picture
    assert ">Gpt, SHARD_GRAD_OP over 4 ranks: memory on a rank over a step<" in picture
    fitted.plan.plot(tmp_path / "plan.svg")
    assert picture.count("<polygon") == (tmp_path / "plan.svg").read_text().count("<polygon") > 2
    with pytest.raises(ValueError, match=r"ends in \.svg"):
        fitted.plan.plot(tmp_path / "plan.png")


def test_a_fit_is_applied_to_what_was_fitted(world):
    fitted = fit_to_memory(on_meta(Gpt), bytes_per_rank=bounds("gpt")[1], **options("gpt"))
    world(2)
    cure = r"flatshard.fit_to_memory\(..., world_size=2\)"
    with pytest.raises(ValueError, match=f"fitted for 4 ranks, and there are 2: call {cure}"):
        fitted.apply(Gpt())
    fitted = fit_to_memory(on_meta(Gpt), bytes_per_rank=bounds("gpt")[1], **options("gpt") | {"world_size": 2})
    wider = Gpt()
    wider.head = nn.Linear(wider.head.in_features, 2 * wider.head.out_features)
    with pytest.raises(ValueError, match=r"has [\d,]+ elements, and [\d,]+ were fitted"):
        fitted.apply(wider)
    cast = Gpt()
    cast.head.bfloat16()
    with pytest.raises(
        ValueError, match=r"'head\.weight', 'head\.bias' has torch.bfloat16, and torch.float32 was fitted"
    ):
        fitted.apply(cast)
    on_cuda = dataclasses.replace(fitted, plan=dataclasses.replace(fitted.plan, device="cuda"))
    for model, changes in ((Gpt(), {}), (on_meta(Gpt), {"device_id": "cpu"})):
        with pytest.raises(ValueError, match=r"fitted for device='cuda', and this Gpt would train on 'cpu'"):
            on_cuda.apply(model, **changes)
    for name, value in (("policy", {nn.Linear}), ("strategy", ShardingStrategy.NO_SHARD), ("cpu_offload", True)):
        with pytest.raises(ValueError, match=f"'{name}' would change what was fitted"):
            fitted.apply(Gpt(), **{name: value})
    assert describe(fitted.apply(Gpt(), forward_prefetch=True, sync_module_states=True)).units


def test_what_does_not_fit():
    model, given = on_meta(uneven), options("uneven", example_inputs=(torch.ones(1, 16),), policy=Uneven)
    message = r"does not fit into .* on 4 ranks\. The least possible peak is .* It would fit on (\d+) ranks"
    least = plan_step(model, recompute=True, compare=False, **given).total_peak.nbytes
    with pytest.raises(ValueError, match=message) as caught:
        fit_to_memory(model, bytes_per_rank=9 * least // 10, **given)
    needed = int(str(caught.value).rpartition("fit on ")[2].partition(" ")[0])
    assert needed > 4
    assert fit_to_memory(model, bytes_per_rank=9 * least // 10, **given | {"world_size": needed}).margin >= 0
    with pytest.raises(ValueError, match=r"The least possible peak is .* More ranks are not"):
        fit_to_memory(model, bytes_per_rank=1000, recompute=False, **given)


class Extends(Gpt):
    """A block that cannot be recomputed, as it keeps its inputs."""

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
    fitted = fit_to_memory(on_meta(Extends), bytes_per_rank="1 GiB", **given)
    assert "not possible: computes its forward again (CheckpointError" in fitted.notes[0]
    assert "not possible: computes" in str(fitted)
    with pytest.raises(ValueError, match=r"has no module 'blocks\.2': it is not the model that was fitted"):
        fitted.apply(Gpt(2))
    model = Gpt()
    for error, message, changes in (
        (ValueError, "is no size", {"bytes_per_rank": "forty"}),
        (ValueError, r"must be a number of ranks, or \(replicas", {"world_size": (2, 4, 1)}),
        (ValueError, "example_inputs must be", {"example_inputs": None}),
        (NotImplementedError, "'norm, head' is several modules", {"policy": {Block, (model.norm, model.head)}}),
        (NotImplementedError, "has arguments of its own", {"policy": {"blocks.0": {"recompute": True}}}),
    ):
        with pytest.raises(error, match=message):
            fit_to_memory(model, **{"bytes_per_rank": 10**9} | given | changes)
    world(2)
    with pytest.raises(ValueError, match="is sharded already"):
        fit_to_memory(fully_shard(Gpt()), bytes_per_rank=10**9, **given)
    assert _arguments.parse_bytes("40 GiB") == 40 * 2**30
    assert _arguments.parse_bytes("1.5kb") == 1500


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda: uneven(5), {}),
        (lambda: Gpt(3), {"policy": Block, "example_inputs": (IDS,), "flops_per_byte": 5.0}),
    ],
)
def test_nothing_is_given_up_in_vain(make: Any, changes: dict[str, Any]):
    """Without any one of the changes of units the step does not fit. The peak and costs are those of the plans."""
    given = options("uneven", policy=Uneven, flops_per_byte=50.0) | changes
    model = on_meta(make)
    free = fit_to_memory(model, bytes_per_rank="1 GiB", **given)
    least = plan_step(model, recompute=True, compare=False, **planned_with(given)).total_peak.nbytes
    budget = least + (free.peak.nbytes - least) // 2
    fitted = fit_to_memory(model, bytes_per_rank=budget, **given)
    assert fitted.tradeoffs[-1].peak == fitted.peak.nbytes <= budget
    assert sum(each.sent_nbytes for each in fitted.tradeoffs) == fitted.sent_nbytes
    assert sum(each.flops for each in fitted.tradeoffs) == fitted.flops
    policy = fitted.arguments["policy"]
    units = {name: dict(options) for name, options in getattr(policy, "policy", policy).items()}
    for name, own in units.items():
        for more in ([{"recompute": False}] * bool(own.get("recompute"))) + (
            [{"strategy": "shard_grad_op"}] * ("strategy" not in own)
        ):
            changed: Any = units | {name: own | more}
            changed = SplitRoot(changed) if isinstance(policy, SplitRoot) else changed
            with_more = plan_step(model, compare=False, **planned_with(given | fitted.arguments | {"policy": changed}))
            assert with_more.total_peak.nbytes > budget, (name, more)


def planned_with(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "flops_per_byte"}


def test_a_unit_inside_of_a_unit():
    """Both may compute their forward again."""
    given = options("gpt", policy={Block, nn.LayerNorm})
    model = on_meta(Gpt)
    least = plan_step(model, recompute=True, compare=False, **given).total_peak.nbytes
    fitted = fit_to_memory(model, bytes_per_rank=int(1.05 * least), **given)
    assert [unit.fqn for unit in fitted.units if unit.recompute]


def test_the_limit_for_what_is_gathered_ahead():
    """The limit is the highest that fits: small units are prefetched, large ones are not."""

    def make() -> nn.Module:
        model = nn.Sequential(*[Uneven(width) for width in (16, 200, 100, 16)])
        model[1].requires_grad_(False)  # gradients would take more than prefetched units
        return model

    given = options("uneven", policy=Uneven, example_inputs=(torch.ones(2, 16),), recompute=False)
    given |= {"optimizer": 0, "device": "cuda"}
    planned = {k: v for k, v in given.items() if k not in ("policy", "recompute")} | {"compare": False}
    sizes = sorted(
        {unit.unsharded_nbytes for unit in plan_step(on_meta(make), policy=Uneven, **planned).units if unit.fqn}
    )
    peaks = {
        limit: plan_step(on_meta(make), policy=Uneven, prefetch_limit_bytes=limit, **planned).total_peak.nbytes
        for limit in (0, *sizes)
    }
    assert peaks[0] <= peaks[sizes[0]] < peaks[sizes[-1]], peaks
    budget = (peaks[sizes[0]] + peaks[sizes[-1]]) // 2
    fitted = fit_to_memory(on_meta(make), bytes_per_rank=budget, **given)
    chosen = fitted.arguments["prefetch_limit_bytes"]
    assert chosen == max(limit for limit, peak in peaks.items() if peak <= budget)
    assert "are not gathered ahead" in str(fitted)
    assert "backward_prefetch" not in fitted.arguments


class Constants(Gpt):
    """A model whose forward reads values of constants: a mask of floats, and values written by a view."""

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape, device=tokens.device)
        assert bool(mask.all())
        mask[:, 0] = 0
        assert not bool(mask.all())
        x = self.embed(tokens)
        mask[0].copy_(x[0, :, 0])  # unknown from here on
        with pytest.raises(RuntimeError, match="meta"):
            bool(mask.all())
        with pytest.raises(RuntimeError, match="meta"):
            bool(mask[:, 1].all())
        return self.head(self.norm(x + mask[:, :, None]))


def test_values_of_constants():
    planned = plan_step(on_meta(Constants), policy="auto", compare=False, **options("gpt"))
    assert planned.total_peak.nbytes > 0


def two() -> nn.Module:
    return Gpt(2)


def lowest(given: dict[str, Any], blocks: int = 2) -> int:
    """Return the peak if everything is given up, with all units on the device."""
    nothing = {"backward_prefetch": None, "forward_prefetch": False, "recompute": True, "compare": False}
    return plan_step(on_meta(lambda: Gpt(blocks)), policy=SplitRoot("auto"), **given | nothing).total_peak.nbytes


def test_hybrid_strategies():
    """Units are first freed after forward within their group; at last gradients and state are sharded over all ranks."""
    given = options("gpt", world_size=(2, 4), device="cuda")
    free = fit_to_memory(on_meta(Gpt), bytes_per_rank="1 GiB", **given)
    assert {unit.strategy for unit in free.units} == {"HYBRID_SHARD_ZERO2"}
    less = fit_to_memory(on_meta(Gpt), bytes_per_rank=int(0.7 * free.peak.nbytes), **given)
    names = {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}
    assert {unit.strategy for unit in less.units} <= names
    assert less.plan.world_size == (2, 4)
    assert less.arguments["strategy"].name == "HYBRID_SHARD"
    tight = given | {"example_inputs": (IDS[:1, :1],)}
    budget = 95 * lowest(tight | {"strategy": "hybrid_shard"}, 3) // 100
    least = fit_to_memory(on_meta(Gpt), bytes_per_rank=budget, **tight)
    assert least.arguments["strategy"].name == "HYBRID_FULL_SHARD", least
    assert "over all ranks" in str(least)


def test_parts_on_the_host():
    """Copied bytes are part of the costs."""
    given = options("gpt", example_inputs=(IDS[:1, :1],), device="cuda")
    budget = 102 * lowest(given | {"cpu_offload": True}) // 100
    fitted = fit_to_memory(on_meta(two), bytes_per_rank=budget, cpu_offload=True, **given)
    assert fitted.arguments["cpu_offload"] is True
    assert fitted.plan.total_peak.memory.optimizer == 0
    assert sum(each.copied_nbytes for each in fitted.tradeoffs) > 0
    assert "copied" in str(fitted)


def test_units_are_gathered_ahead_where_those_on_the_host_free_enough():
    """On two ranks, a unit on the host frees more than a prefetched one takes."""
    given = options("gpt", example_inputs=(IDS[:1, :1],), device="cuda", world_size=2)
    fitted = fit_to_memory(on_meta(two), bytes_per_rank=99 * lowest(given) // 100, cpu_offload=True, **given)
    assert [unit.offload for unit in fitted.units] == [False, True]
    assert fitted.arguments.keys() == {"policy"}


def test_as_few_units_on_the_host_as_are_enough():
    """The last ones."""
    widths = (32, 8, 64, 48)
    given = options("uneven", policy=Uneven, device="cuda", example_inputs=(torch.ones(1, 16),))
    model = on_meta(lambda: nn.Sequential(*[Uneven(width) for width in widths]))
    planned = given | {"recompute": True, "compare": False, "backward_prefetch": None, "forward_prefetch": False}
    least, most = (plan_step(model, cpu_offload=there, **planned).total_peak.nbytes for there in (True, False))
    budget = int(least + 0.8 * (most - least))
    fitted = fit_to_memory(model, bytes_per_rank=budget, cpu_offload=True, **given)
    names = [unit.fqn for unit in fitted.units if unit.offload]
    assert names == [unit.fqn for unit in fitted.units][-len(names) :]
    assert 0 < len(names) < len(widths)
    policy: Any = {unit.fqn: {"cpu_offload": unit.fqn in names[1:]} for unit in fitted.units}
    fewer = plan_step(model, **planned | {"policy": SplitRoot(policy)}).total_peak.nbytes
    assert fewer > budget
    assert fitted.copied_nbytes > 0
    assert "recomputes  on the host" in str(fitted)


def test_a_model_that_cannot_be_on_the_host(monkeypatch):
    made = Step.plan

    def plan_step(self: Any, configuration: Any, ranks: Any) -> Any:
        if configuration.hosts():
            raise NotImplementedError
        return made(self, configuration, ranks)

    monkeypatch.setattr(Step, "plan", plan_step)
    with pytest.raises(ValueError, match="The least possible peak is"):
        fit_to_memory(on_meta(two), bytes_per_rank=2**10, cpu_offload=True, **options("gpt", device="cuda"))


def test_optimizer_state_on_the_host(world):
    """Optimizer state moves to the host first, and its copies are counted. Units follow if that is not enough."""
    given = options("gpt", example_inputs=(IDS[:1, :1],), device="cuda", cpu_offload=True, offload_optimizer=True)
    planned = {k: v for k, v in given.items() if not k.endswith(("_offload", "_optimizer"))}
    fitted = fit_to_memory(on_meta(two), bytes_per_rank=85 * lowest(planned) // 100, **given)
    assert fitted.offloads_optimizer
    assert not any(unit.offload for unit in fitted.units)
    assert fitted.copied_nbytes == 2 * fitted.plan.host.optimizer > 0
    assert "fit.optimizer(model.parameters()), with its state on the host" in str(fitted)
    state = functools.partial(OffloadedOptimizer, optimizer_class=torch.optim.AdamW)
    budget = 98 * lowest(planned | {"optimizer": state}) // 100
    both = fit_to_memory(on_meta(two), bytes_per_rank=budget, **given)
    hosts = [unit.fqn for unit in both.units if unit.offload]
    assert hosts == ["blocks.1"]
    rest = both.plan.host.optimizer - sum(each.optimizer_nbytes for each in both.plan.units if each.fqn in hosts)
    assert both.copied_nbytes == 2 * rest + copied_nbytes(both.plan, hosts)
    world(4)
    model = fully_shard(two(), **both.arguments)
    assert isinstance(both.optimizer(model.parameters(), lr=0.5), OffloadedOptimizer)
    none = fit_to_memory(on_meta(two), bytes_per_rank="1 GiB", **given)
    assert type(none.optimizer(model.parameters(), lr=0.5)) is torch.optim.AdamW
    for choice in (None, 8):
        with pytest.raises(ValueError, match="optimizer must be a class or a function"):
            fit_to_memory(on_meta(two), bytes_per_rank="1 GiB", **given | {"optimizer": choice})
    with pytest.raises(TypeError, match="fit_to_memory was given 8, not a class"):
        fit_to_memory(on_meta(two), bytes_per_rank="1 GiB", **planned | {"optimizer": 8}).optimizer(model.parameters())


def test_the_largest_batch():
    """With one more row no choice fits."""
    given = options("gpt")
    budget = 2 * plan_step(on_meta(two), policy="auto", recompute=True, compare=False, **given).total_peak.nbytes
    fitted = fit_to_memory(on_meta(two), bytes_per_rank=budget, largest_batch=True, **given)
    assert fitted.batch is not None
    assert fitted.batch > len(IDS)
    assert f"the largest microbatch: {fitted.batch} rows" in str(fitted)
    with pytest.raises(ValueError, match="does not fit"):
        fit_to_memory(
            on_meta(two),
            bytes_per_rank=budget,
            **given | {"example_inputs": _arguments.repeated((IDS,), fitted.batch + 1)},
        )
    with pytest.raises(ValueError, match="needs example_inputs with a first dimension"):
        fit_to_memory(on_meta(two), bytes_per_rank=budget, largest_batch=True, **given | {"example_inputs": ()})


@pytest.mark.parametrize(
    ("name", "value"),
    [("bytes_per_rank", float("inf")), ("microbatches", 0), ("microbatches", "2"), ("flops_per_byte", float("nan"))]
    + [("device", each) for each in ("tpu", "meta", None, "")],
)
def test_a_wrong_argument_is_named_before_anything_is_run(name: str, value: Any) -> None:
    right: dict[str, Any] = {
        "bytes_per_rank": "1 MiB",
        "world_size": 2,
        "optimizer": 8,
        "example_inputs": torch.ones(1, 2),
    }
    with pytest.raises(ValueError, match=f"fit_to_memory: {name}"):
        fit_to_memory(torch.nn.Linear(2, 2), **right | {name: value})
    if name in ("microbatches", "device"):
        with pytest.raises(ValueError, match=f"plan_step: {name}"):
            plan_step(torch.nn.Linear(2, 2), world_size=2, **{name: value})


@ranks(3)
def test_what_sending_costs_is_measured(ctx):
    """All ranks return one number, which ``fit_to_memory`` takes, and no random numbers are drawn."""
    state = torch.get_rng_state()
    for dtype in (torch.float32, torch.bfloat16):
        speed = measure_flops_per_byte(ctx.group, "cpu", dtype=dtype)
        assert type(speed) is float
        assert 1e-3 < speed < 1e6
        assert len({*everybody(ctx, speed)}) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert fit_to_memory(on_meta(Gpt), bytes_per_rank="1 GiB", **options("gpt", flops_per_byte=speed)).units


def test_one_rank_sends_nothing(world):
    with pytest.raises(RuntimeError, match=r"measure_flops_per_byte needs a process group"):
        measure_flops_per_byte()
    world(1)
    with pytest.raises(ValueError, match=r"one rank, which sends nothing"):
        measure_flops_per_byte()
