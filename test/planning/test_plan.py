"""``plan_step``: predictions equal the numbers that are counted when the same model is built and trained."""

import functools
import gc
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from encoded import Linear8
from live_steps import measured
from models import SMALL_WIDTH, WIDTH
from models import NormBlock as Block
from models import NormNet as Net
from no_communication import NoCommunication
from on_ranks import ranks
from planned_steps import LOW, check, choices, plan_without_receiving
from recording import sent_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, MixedPrecision, ShardingStrategy, fully_shard, plan_step
from flatshard._base.torch_versions import VERSION
from flatshard.layouts import Blocks, Layout, Rows, Whole
from flatshard.planning._recording import Books, MadeOnce, Recorder
from flatshard.planning._search import copied_nbytes

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
OPTIM, JOINED = ShardingStrategy.SHARD_OPTIM, ShardingStrategy.HYBRID_FULL_SHARD
STRATEGIES = (FULL, GRAD_OP, NO_SHARD, OPTIM)
BF16 = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)
PURE = MixedPrecision(torch.bfloat16)
KEPT = MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32, keep_cast_shard=True)


class Mixed(Block):
    """A block with two dtypes in a unit, and nested units."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.inside = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(super().forward(x) + self.low(x.to(self.low.weight.dtype)).to(x.dtype))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Mixed(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Backwards(Net):
    """A model that runs blocks in another order than registered: one twice, one never, and one in a checkpoint."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for number in (3, 1, 0) if self.reentrant else (3, 1, 0, 1):
            x = self.blocks[number](x)
        x = checkpoint(self.blocks[2], x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Backwards):
    """A model whose backward runs an inner backward."""

    reentrant = True


def freeze_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.requires_grad_(False)


def adapters(model: nn.Module) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.norm.requires_grad_(True)


def freeze_front(model: nn.Module) -> None:
    for part in (model.front, model.blocks[0], model.blocks[1]):
        part.requires_grad_(False)


def freeze_last(model: nn.Module) -> None:
    model.blocks[4].requires_grad_(False)


def of_weights(layout: Layout) -> Callable[[str, Tensor], Layout | None]:
    return lambda name, param: layout if name.endswith("weight") else None


def of_kinds(module: nn.Module) -> Any:
    """Return options for each kind of module, as a policy."""
    if isinstance(module, nn.LayerNorm):
        return {"strategy": NO_SHARD, "backward_prefetch": None}
    return isinstance(module, Block) and {"reshard_after_forward": False, "layout": Rows()}


X, TOKENS = torch.ones(2, 3), torch.tensor([[1, 2], [3, 4]])
NARROW = functools.partial(Net, width=SMALL_WIDTH)
PREFETCHES = (None, *BackwardPrefetch)
HYBRID = [strategy for strategy in ShardingStrategy if strategy.is_hybrid]
RESHARDED = (FULL, GRAD_OP)  # other units stay unsharded until their shards change
BLOCK = 4 * sum(p.numel() for p in Block(WIDTH).parameters())
LAYOUTS: tuple[Layout, ...] = (Rows(), Rows(4, max_padding=2), Blocks(64, max_padding=5), Whole(max_padding=99))
POLICIES = ({Mixed}, {Mixed, Block}, {Mixed, Block, nn.Embedding, nn.Linear}, None)
HALF_AND_WHOLE = {"strategy": STRATEGIES, "mixed_precision": (None, BF16)}
PREFETCHED = {"strategy": STRATEGIES, "backward_prefetch": PREFETCHES}
RECORDED = {"make": (functools.partial(Backwards, 5),), "example_inputs": ({"x": X},), "freeze": (freeze_last,)}
LIMITS, PRECISIONS = (None, BLOCK // 2, 2 * BLOCK), (None, BF16, PURE, LOW, KEPT)
HELD = {"no_sync": (True, False), "microbatches": (3,), "mixed_precision": (None, KEPT)}
STEPS: dict[str, list[dict[str, Any]]] = {
    "precision": choices(6, size=(1, 3, 64), mixed_precision=PRECISIONS, strategy=STRATEGIES, make=(Net, NARROW)),
    "prefetch": choices(5, **PREFETCHED, forward_prefetch=(True, False), prefetch_limit_bytes=LIMITS),
    "resharded": choices(
        6, strategy=RESHARDED, reshard_after_forward=(True, False, 1, 2, 4), mixed_precision=(None, BF16)
    ),
    "kept": choices(2, strategy=(NO_SHARD, OPTIM), reshard_after_forward=(False,), mixed_precision=(None, BF16)),
    "layouts": choices(5, layout=[*LAYOUTS, *map(of_weights, LAYOUTS)], size=(2, 3, 16)),
    "static buffers": choices(2, static_buffers=(True,), mixed_precision=(None, BF16)),
    "accumulation": choices(8, strategy=STRATEGIES, size=(1, 8), make=(Net, NARROW), **HELD),
    "frozen": choices(5, **PREFETCHED, freeze=(freeze_blocks, adapters, freeze_front)),
    "nested units, shared parameters, dtypes": choices(5, make=(Deep,), x=(TOKENS,), policy=POLICIES, **HALF_AND_WHOLE),
    "overrides of a policy": [{"policy": CustomPolicy(of_kinds)}],
    "hybrid": choices(5, strategy=HYBRID, size=((1, 4), (2, 2), (4, 1), (3, 8)), mixed_precision=(None, BF16)),
    "hybrid, accumulation": [{"strategy": JOINED, "size": (2, 4), "microbatches": 3}],
    "recorded in another order": choices(6, **RECORDED, **PREFETCHED, mixed_precision=(None, BF16)),
    "reentrant checkpoints": choices(2, make=(Reentrant,), example_inputs=(X,), strategy=STRATEGIES),
}


@pytest.mark.parametrize(
    "options", [pytest.param(row, id=f"{name}-{i}") for name, rows in STEPS.items() for i, row in enumerate(rows)]
)
def test_a_step_is_as_planned(world, options, monkeypatch):
    plan_without_receiving(monkeypatch)
    check(world, **options)


@ranks(2, 3)
def test_a_step_of_real_ranks_is_as_planned(ctx):
    """Over gloo, reductions also hold other ranks' shards, including in recomputed units."""
    batch = (torch.randn(8, 3),)

    def loss_of(output: Tensor) -> Tensor:
        return output.square().mean()

    for options in ({}, {"recompute": True}, {"strategy": GRAD_OP, "recompute": True}):
        model = Net(width=64)
        planned = plan_step(
            model, policy=Block, world_size=ctx.world_size, optimizer=torch.optim.SGD, device="cpu", compare=False,
            example_inputs=batch, loss=loss_of, **options,
        )  # fmt: skip
        fully_shard(model, policy=Block, process_group=ctx.group, **options)
        with sent_bytes():  # all data is sent as messages
            peaks = measured(model, torch.optim.SGD(model.parameters()), batch, loss_of)
        for phase in ("forward", "backward"):
            predicted = max(sample.device.total for sample in planned.samples if sample.phase == phase)
            assert abs(peaks[phase] - predicted) <= 0.001 * predicted, (options, phase, peaks[phase], predicted)


def test_bytes_over_each_axis(world):
    """Across groups, there is one gather in a step and a reduction in each backward, of a rank's shard within its group."""
    options = {"strategy": JOINED, "microbatches": 3}
    outer, inner = shape = (512, 8)
    planned = plan_step(Net(), policy=Block, world_size=shape, device="cpu", compare=False, **options)
    wholes = [sum(f.padded_numel * 4 for f in unit.flats) for unit in planned.units]
    sent = Counter[tuple[str, str]]()
    for c in planned.collectives:
        sent[c.kind, c.group] += c.sent_nbytes
    across, within = (sum(n * (k - 1) // k for n in wholes) for k in (outer, inner))
    again = within - wholes[0] * (inner - 1) // inner  # the root stays unsharded for its backward
    assert sent == {
        ("all-gather", "outer"): across // inner,
        ("reduce-scatter", "outer"): 3 * across // inner,
        ("reduce-scatter", "inner"): 3 * within,
        ("all-gather", "inner"): 3 * (within + again),
    }
    assert sum(sent.values()) == planned.sent_nbytes
    assert planned.between_steps.shards == sum(wholes) // (outer * inner)
    assert planned.between_steps.unsharded == sum(wholes) // inner


# -- Operations on the meta device ------------------------------------------------------------------------------------


class Observed(nn.Linear):
    pass


def test_nothing_is_left_of_the_copy_that_ran():
    plan_step(Observed(4, 4), world_size=2, example_inputs=torch.ones(5, 4), compare=False)
    gc.collect()
    assert not any(type(each) is Observed for each in gc.get_objects())


def test_operations_are_recorded():
    """The module stays unchanged."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 2))
    before = [p.clone() for p in model.parameters()]
    planned = plan_step(model, policy=nn.Linear, world_size=2, example_inputs=torch.ones(5, 8))
    assert planned.flops == 2 * 5 * (8 * 16 * 2 + 16 * 4 * 3 + 4 * 2 * 3)
    assert f"{planned.flops:,} floating-point operations" in str(planned)
    assert planned.samples[-1].device.activations == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not model._forward_pre_hooks
    assert "forward" not in vars(model[0])
    assert all(p.grad is None for p in model.parameters())


def test_widening():
    """NCCL can send gradients in their own dtype, which takes memory for one more input."""
    largest, sizes = 0, {}
    for widens, device in ((False, "cuda"), (True, "cuda"), (True, "cpu")):
        options = {"mixed_precision": BF16, "compare": False, "device": device}
        planned = plan_step(Net(), policy=Block, world_size=8, widens=widens if device == "cuda" else None, **options)
        sizes[widens, device] = sum(c.nbytes for c in planned.collectives if c.kind == "reduce-scatter")
        largest = planned.units[1].flats[0]
        most = max(s.device.reductions for s in planned.samples)
        assert device == "cpu" or most == 2 * 2 * largest.padded_numel + 4 * largest.shard_numel
    assert sizes[True, "cuda"] == sizes[True, "cpu"] == sizes[False, "cuda"] // 2


# -- Text, and arguments ----------------------------------------------------------------------------------------------


def test_the_table():
    alone = plan_step(Net(), policy=Block, world_size=1)
    assert alone.device == "cuda"  # accelerator/planning.py counts steps of accelerators, on the simulated one
    assert "Net, FULL_SHARD over 1 rank:" in str(alone)
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]), nn.Linear(4096, 10))
    planned = plan_step(
        model,
        policy=lambda module, recurse, nonwrapped_numel: recurse or nonwrapped_numel == 4096 * 4097,
        world_size=16,
        optimizer=torch.optim.AdamW,
        mixed_precision=BF16,
        activations=2**27,
    )
    lines = [" ".join(line.split()) for line in str(planned).splitlines()]
    for line in (
        "Sequential, FULL_SHARD over 16 ranks: 67,166,218 elements",
        "<root> Sequential 40,970 1,014 10.2 KiB 10.2 KiB 20.5 KiB 82 KiB 174 KiB 2 231 KiB",
        "0.0 ... 0.3 (4) Linear 16,781,312 0 4 MiB 4 MiB 8 MiB 32 MiB 68 MiB 3 120 MiB",
        "all 67,166,218 1,014 16 MiB 16 MiB 32 MiB 128 MiB 272 MiB 14 480 MiB",
        "activations 0 B 544 MiB",
        "all 48 MiB 656 MiB",
        "the peak is in backward, at unit 0.3",
        "SHARD_GRAD_OP 16 ranks 48 MiB 720 MiB 10 360 MiB",
        "HYBRID_SHARD 2 x 8 ranks 96.1 MiB 704 MiB 19 480 MiB",
        "- activations: as passed to plan",
    ):
        assert line in lines


def test_a_million_ranks():
    """Neither time nor memory depends on the number of ranks: no list has an item for each."""
    model = nn.Sequential(*[nn.Linear(64, 64, device="meta") for _ in range(2)])
    tracemalloc.start()
    try:
        planned = plan_step(model, policy={nn.Linear}, world_size=2**20, optimizer=8, device="cpu", compare=False)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert planned.world_size.shards == 2**20
    assert most < 2**22


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_inputs_are_kept_as_in_a_loop():
    """Other memory that autograd has not saved ends with the forward."""
    x, most = torch.ones(1000, 4), Counter[str]()
    for sample in plan_step(Adds(), world_size=2, example_inputs=x, compare=False).samples:
        most[sample.phase] = max(most[sample.phase], sample.device.activations)
        assert sample.device.others == x.nbytes
    assert most["forward"] >= x.nbytes
    assert most["backward"] < x.nbytes


def test_convolutions_return_the_format_of_a_device():
    """Images are channels-last, slices of such, contiguous, or have one channel; a weight may be channels-last, too."""
    plain, weight, one = torch.ones(2, 6, 5, 5), torch.ones(4, 3, 3, 3), torch.ones(4, 1, 3, 3)
    last, turned = (t.contiguous(memory_format=torch.channels_last) for t in (plain, weight))
    images = (last[:, :3], weight), (last[:, :3].clone(), weight), (plain[:, :3], weight), (plain[:, :3], turned)
    for image, by in (*images, (plain[:, :1], one), (last[:, :1], one), (plain[:, :3, 0], weight[..., 0])):
        ones, zeros = [1] * (by.dim() - 2), [0] * (by.dim() - 2)
        with Books(Recorder(), MadeOnce("cpu")):
            copies = (torch.empty_strided(t.shape, t.stride(), device="meta") for t in (image, by))
            found = torch.convolution(*copies, None, ones, zeros, ones, False, zeros, 1)
        assert found.stride() == torch.convolution(image, by, None, ones, zeros, ones, False, zeros, 1).stride()


def test_norms_and_groups_of_matrices_are_those_of_a_cpu():
    """Group norm is for images that are contiguous, transposed or channels-last; matrices are float32, which meta refuses."""
    last, turned = torch.ones(2, 4, 3, 3).to(memory_format=torch.channels_last), torch.ones(2, 6, 4).transpose(1, 2)
    ends = torch.tensor([2, 8], dtype=torch.int32)

    def strides(image: Tensor, whole: Tensor, groups: Tensor) -> list[Any]:
        x = image.requires_grad_()
        normed = torch.nn.functional.group_norm(x, 2)
        (grad,) = torch.autograd.grad(normed, x, normed.new_empty(normed.shape))
        products = [torch._grouped_mm(*pair, e) for pair, e in (((whole, groups), ends), ((groups, groups), None))]
        products.append(torch._grouped_mm(whole.t(), whole, ends))
        return [(t.shape, t.stride()) for t in (normed, grad, *products)]

    for image in (last.contiguous(), turned, *([last] if VERSION > (2, 13) else [])):  # 2.13: see the package's note
        given = image, torch.ones(8, 8), torch.ones(2, 8, 8)
        expected = strides(*[t.clone() for t in given])
        with Books(Recorder(), MadeOnce("cpu")):
            assert strides(*[torch.empty_strided(t.shape, t.stride(), device="meta") for t in given]) == expected
    with Books(Recorder(), MadeOnce("cuda")):  # group norm is contiguous on cuda
        assert torch.nn.functional.group_norm(last.to("meta"), 2).is_contiguous()


def test_what_operations_write():
    """Each call allocates an output that is too small, and computes numbers on the CPU."""
    with Books(Recorder(), MadeOnce("cpu")):
        for _ in range(2):
            out, count = torch.empty(0, device="meta"), torch.zeros(())
            assert torch.add(torch.empty(3, device="meta"), 1, out=out).shape == (3,)
            assert count.add_(1).item() == 1


def test_optimizers_that_look_at_shapes():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    cure = r"WholeParameterOptimizer .* number of bytes of state per element: optimizer=8"
    kinds = [functools.partial(torch.optim.Adafactor, lr=0.1), torch.optim.Muon(model.parameters(), lr=0.1)]
    whole = plan_step(model, policy=nn.Linear, world_size=4, optimizer=torch.optim.Muon, layout=Whole(max_padding=99))
    assert whole.between_steps.optimizer == 4 * 64 * 64
    for kind in kinds:
        for layout in (None, Rows(max_padding=99)):
            with pytest.raises(ValueError, match=r"^plan_step: (Muon|Adafactor) .*" + cure):
                plan_step(model, policy=nn.Linear, world_size=4, optimizer=kind, layout=layout)


def test_offloaded_shards_are_on_the_host():
    model = Net()
    device, host = (plan_step(model, policy=Block, world_size=8, optimizer=8, cpu_offload=c) for c in (False, True))
    assert host.between_steps.total == 0
    assert host.host == device.between_steps
    assert host.host_peak.memory.gradients == sum(u.gradient_nbytes for u in host.units)
    assert host.peak.nbytes < device.peak.nbytes


OPTIMIZERS: list[tuple[Any, int, int]] = [
    (None, 0, 0),
    (6, 6, 0),
    (torch.optim.AdamW, 8, 4),
    (functools.partial(torch.optim.SGD, momentum=0.9), 4, 0),
    (functools.partial(torch.optim.AdamW, amsgrad=True), 12, 4),
]


def test_state_of_optimizers():
    model = nn.Linear(64, 64)
    for optimizer, bytes_each, scalars in OPTIMIZERS:
        planned = plan_step(model, world_size=1, optimizer=optimizer)
        assert planned.between_steps.optimizer == bytes_each * (64 * 64 + 64) + 2 * scalars
        if callable(optimizer):
            made = optimizer([{"params": [model.weight]}, {"params": [model.bias], "lr": 1.0}])
            assert plan_step(model, world_size=1, optimizer=made).between_steps == planned.between_steps
            assert not made.state


def test_errors(world):
    model, adapted = nn.Linear(4, 4), nn.Sequential(nn.Linear(2, 2))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    silent = CustomPolicy(lambda m: isinstance(m, nn.Linear) and {"collectives": NoCommunication()})
    for error, message, arguments in (
        (ValueError, "is for hybrid strategies", {"world_size": (2, 4)}),
        (ValueError, "8 ranks a node do not divide 12 ranks", {"world_size": 12, "strategy": HYBRID[0]}),
        (ValueError, "reshard_after_forward=3 does not divide the 8 ranks", {"reshard_after_forward": 3}),
        (ValueError, "has no meaning with SHARD_OPTIM", {"strategy": OPTIM, "reshard_after_forward": 2}),
        (ValueError, "activations has 'block', which is not a unit", {"activations": {"block": 1}}),
        (ValueError, "leave out activations", {"activations": 1, "example_inputs": torch.ones(1, 4)}),
        (TypeError, "optimizer must be an optimizer on the model's parameters", {"optimizer": "adam"}),
        (ValueError, "that the plan does not shard", {"optimizer": other}),
        (TypeError, "fully_shard takes an nn.Module", {"module": 3}),
        (NotImplementedError, "'weight' is a Weight, and tensor subclasses other than DTensors", {"module": Linear8()}),
        (NotImplementedError, "the policy overrides collectives", {"module": adapted, "policy": silent}),
    ):
        with pytest.raises(error, match=message):
            plan_step(arguments.pop("module", model), **{"world_size": 8, **arguments})
    world(2)
    with pytest.raises(ValueError, match=r"is sharded already\. describe\(\) shows its units"):
        plan_step(fully_shard(model), world_size=8)


def test_a_unit_of_no_elements_has_no_memory():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0, bias=False))
    planned = plan_step(model, world_size=2, policy={nn.Linear})
    assert plan_step(nn.Sequential(model[0]), world_size=2, policy={nn.Linear}).peak.memory == planned.peak.memory


def test_what_cannot_be_recorded():
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * x.sum().item()

    for x in (torch.ones(2, 4), torch.ones(4, 2).t()):
        with pytest.raises(RuntimeError) as caught:
            plan_step(Reads(4, 4), world_size=2, example_inputs=(x,))
        assert "leave example_inputs out" in caught.value.__notes__[0]


def test_optimizer_state_on_the_host():
    """The device holds the state of two units while they are stepped."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3 * 64))
    adamw, away = torch.optim.AdamW, flatshard.optim.OffloadedOptimizer
    state = 2 * 4 * 64 * 65 // 2
    for choice in (
        functools.partial(away, optimizer_class=adamw),
        lambda params: away(params, adamw, lr=0.1),
        away(model.parameters(), adamw, weight_decay=0.1),
    ):
        planned = plan_step(model, policy={nn.Linear}, world_size=2, optimizer=choice, compare=False)
        assert planned.host.optimizer == 5 * state
        assert planned.between_steps.optimizer == 3 * 2 * 4  # step counts
        assert max(sample.device.optimizer for sample in planned.samples) == 4 * state + 3 * 2 * 4
    on_cpu = plan_step(model, policy={nn.Linear}, world_size=2, optimizer=choice, compare=False, device="cpu")
    assert on_cpu.between_steps.optimizer > 5 * state
    with pytest.raises(ValueError, match="Adafactor looks at whole parameters"):
        plan_step(model, world_size=2, optimizer=functools.partial(away, optimizer_class=torch.optim.Adafactor))


def test_a_step_on_the_host_takes_nothing_on_the_device():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64))
    policy = {"0": {}, "1": {"cpu_offload": True}}
    planned = plan_step(model, policy=policy, world_size=2, optimizer=torch.optim.AdamW, compare=False)
    taken = [sample.device.activations for sample in planned.samples if sample.phase == "optimizer"]
    assert 0 < max(taken) <= 2 * 4 * 8 * 8


def test_a_part_on_the_host_is_copied_as_it_is_kept():
    """Shards and gradients are copied in float32, and cast on the device."""
    model, mixed = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]), MixedPrecision(torch.bfloat16)
    planned = plan_step(model, policy={nn.Linear}, world_size=2, mixed_precision=mixed, cpu_offload=True, compare=False)
    unit = next(unit for unit in planned.units if unit.fqn == "1")
    assert unit.gradient_nbytes == unit.shard_nbytes >= 4 * 64 * 65 // 2
    assert copied_nbytes(planned, ["1"]) == 3 * unit.shard_nbytes  # gathered twice
