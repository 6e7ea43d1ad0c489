"""``plan_step`` of units on several groups of ranks: experts, tensor parallelism, and collectives by the axis of a mesh."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import Wire
from live_steps import measured
from models import NormBlock, NormNet
from on_ranks import ranks
from planned_steps import check, choices, plan_without_receiving
from recording import sent_bytes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from flatshard import MixedPrecision, ShardingStrategy, fully_shard, plan_step
from flatshard.layouts import Rows

FULL, GRAD_OP, OPTIM = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.SHARD_OPTIM
HYBRID, BF16 = ShardingStrategy.HYBRID_SHARD, MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)


class Experts(nn.Module):
    """All of its experts compute with all rows."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(count, width, width))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.to_local() if isinstance(self.weights, DTensor) else self.weights
        return (x @ weights).relu().sum(0)


class Mixture(NormBlock):
    """A block with experts beside its layers."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = Experts(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts(x)


class Mixtures(NormNet):
    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__(blocks, width)
        self.blocks = nn.ModuleList(Mixture(width) for _ in range(blocks))


def chosen(ranks: Any) -> Callable[[str, Tensor], Any]:
    return lambda fqn, param: ranks if "experts" in fqn else None


ROWS = choices(
    6,
    strategy=(FULL, GRAD_OP, OPTIM),
    policy=({Mixture}, {Mixture, Experts}, None),
    mixed_precision=(None, BF16),
    layout=(None, Rows(max_padding=99)),
    microbatches=(1, 2),
)
ROWS += [{"size": (2, 8), "experts": 4, "strategy": HYBRID}]


@pytest.mark.parametrize("options", ROWS, ids=range(len(ROWS)))
def test_experts_are_as_planned(world, options, monkeypatch):
    """The plan is told the number of ranks. The model is sharded over a mesh of as many."""
    plan_without_receiving(monkeypatch)
    check(world, Mixtures, **{"size": 32, "experts": 4, **options})


class Sends(TorchDispatchMode):
    """A record of (size of the group, kind, bytes) of DTensors' collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace == "_c10d_functional" and func._schema.name.endswith("all_reduce"):
            self.sent["tp", "all-reduce"] += args[0].nbytes
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(2, 2, 2, 4, 2), (4, 16, 2, 8, 4)], ids=str)
def test_collectives_of_each_axis(world, shape):
    """The ranks are 64 or 4,096. A plan counts what a stage sends along each axis."""
    world(math.prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "cp", "ep", "tp"))
    dense, own = mesh["dp", "cp", "ep"]._flatten("dense"), mesh["dp", "cp"]._flatten("own")
    tp = mesh["tp"].size()
    stage = nn.Sequential(*[Mixture(32) for _ in range(3)])
    for block in stage:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        weights = distribute_tensor(
            torch.randn(2 * mesh["ep"].size(), 32, 32 * tp), mesh["ep", "tp"], [Shard(0), Shard(2)]
        )
        block.experts.weights = nn.Parameter(weights)
    x, on_own = torch.randn(7, 32), chosen(own)
    planned = plan_step(
        stage, policy={Mixture}, world_size=dense.size(), shard_mesh_fn=on_own, example_inputs=(x,), device="cpu"
    )
    counted, sends = Counter[Any](), Sends()

    class Named(Wire):
        def __init__(self, group: Any, device: Any) -> None:
            super().__init__(widens=True)
            self.name = {dense.size(): "shards", own.size(): "own"}[group.size()]

        def _note(self, kind: str, tensor: Tensor) -> Any:
            counted[self.name, kind] += tensor.nbytes
            return super()._note(kind, tensor)

    fully_shard(stage, policy={Mixture}, device_mesh=dense, shard_mesh_fn=on_own, collectives=Named)
    for _ in range(2):  # the first step also compares the order of ranks
        stage.zero_grad()
        counted.clear()
        sends.sent.clear()
        with sends:
            stage(x).sum().backward()
    of_plan = Counter[Any]()
    for each in planned.collectives:
        of_plan[each.group, each.kind] += each.nbytes
    assert of_plan == counted + sends.sent
    assert {each.group for each in planned.collectives} == {"shards", "own", "tp"}
    text = str(planned)
    for group, size in (("shards", dense.size()), ("own", own.size()), ("tp", tp)):
        assert any(line.split()[:2] == [group, f"{size:,}"] for line in text.splitlines()), (group, text)
    assert "not known, and not counted" not in text
    without = plan_step(NormNet(), world_size=2, compare=False)
    assert "group of ranks" not in str(without)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


@ranks(4)
def test_peaks_of_real_ranks(ctx):
    """Experts and layers are DTensors, with meshes over gloo."""
    mesh = ctx.device_mesh((2, 2), ("dp", "ep"))
    batch, policy = (torch.randn(40, 3),), {Mixture}
    for axis in ("experts", "layers"):
        model = Mixtures(3, 64)
        for block in model.blocks:
            if axis == "experts":
                weights = distribute_tensor(torch.randn(10, 64, 64), mesh["ep"], [Shard(0)])
                block.experts.weights = nn.Parameter(weights)
            else:
                parallelize_module(block, mesh["ep"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        options: Any = {"shard_mesh_fn": chosen(mesh["dp"])} if axis == "experts" else {}
        every = 4 if axis == "experts" else 2
        planned = plan_step(
            model, policy=policy, world_size=every, optimizer=torch.optim.SGD, device="cpu", compare=False,
            example_inputs=batch, loss=square, **options,
        )  # fmt: skip
        fully_shard(model, policy=policy, device_mesh=None if axis == "experts" else mesh["dp"], **options)
        with sent_bytes():
            peaks = measured(model, torch.optim.SGD(model.parameters()), batch, square)
        for phase in ("forward", "backward"):
            predicted = max(sample.device.total for sample in planned.samples if sample.phase == phase)
            # gloo's threads may hold the tensor of a DTensor's all-reduce a little longer.
            sent = max((c.nbytes for c in planned.collectives if c.group == "ep"), default=0)
            assert abs(peaks[phase] - predicted) <= 0.001 * predicted + sent, (axis, phase, peaks[phase], predicted)


def test_errors():
    for error, message, returned, options in (
        (TypeError, r"FULL_SHARD as a number, or a 1-D mesh, or None; for .blocks.0.experts", (1, 2), {}),
        (TypeError, r"as \(replicas, ranks to shard over\), or a 2-D mesh", 4, {"strategy": HYBRID}),
        (TypeError, "it returned 'dp'", "dp", {}),
        (ValueError, "on 3 ranks, which do not divide the 8 ranks of the plan", 3, {}),
        (ValueError, "which shards nothing", 4, {"strategy": "no_shard"}),
        (ValueError, "not with ShardingStrategy.HYBRID_FULL_SHARD", (2, 2), {"strategy": "hybrid_full_shard"}),
        (ValueError, "whose reshard_after_forward=2 is for one group", 4, {"reshard_after_forward": 2}),
    ):
        with pytest.raises(error, match=message):
            plan_step(Mixtures(), policy={Mixture}, world_size=8, shard_mesh_fn=chosen(returned), **options)
    mesh = plan_step(Mixtures(), world_size=8, shard_mesh_fn=lambda fqn, param: 8, compare=False)
    assert {each.group for each in mesh.collectives} == {"shards"}
