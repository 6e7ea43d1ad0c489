"""Five axes at once: pipelines, data, context, experts and tensor parallelism inside of experts."""

import copy
import math
import runpy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Gather
from on_ranks import ranks
from parity import adamw, step_all
from recording import Recording
from scripts import EXAMPLES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatshard
from flatshard import fully_shard
from flatshard.integrations.pipelining import prepare

example = runpy.run_path(str(EXAMPLES["experts"]))
MoE, divide_experts = example["MoE"], example["divide_experts"]

WIDTH, EXPERTS, ROWS = 6, 4, 5


class Copied(torch.autograd.Function):
    """Rows that all ranks of a group have, and whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """The sum of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        dist.all_reduce(rows := rows.clone(), group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class Experts(example["Experts"]):  # type: ignore[misc]
    """Experts whose matrices the ranks of ``tp`` divide."""

    tp: Any = None

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        if self.tp is None:
            return super().forward(rows, counts)
        return Summed.apply(super().forward(Copied.apply(rows, self.tp), counts), self.tp)


class Attention(nn.Module):
    """Tokens that look at the tokens of all ranks of ``cp``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.cp = nn.Linear(width, width), None

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(x).mean(0, keepdim=True)
        return x + (keys if self.cp is None else Gather.apply(keys, self.cp).mean(0))


def make(width: int = WIDTH, count: int = EXPERTS) -> nn.Sequential:
    """Return the model with all experts, for one process."""
    torch.manual_seed(0)
    blocks = [MoE(count, width) for _ in range(2)]
    for block in blocks:
        block.experts.__class__ = Experts
    return nn.Sequential(nn.Linear(width, width), *blocks, nn.Linear(width, 3))


def divide(model: nn.Module, mesh: Any, **options: Any) -> None:
    """Divide experts over ``mesh["ep"]``, and their matrices over ``mesh["tp"]``."""
    for moe in (each for each in model.modules() if isinstance(each, MoE)):
        moe.group, moe.experts.tp = mesh.get_group("ep"), mesh.get_group("tp")
        for name, dim in (("up", 2), ("down", 1)):
            weight = getattr(moe.experts, name).detach()
            cut = distribute_tensor(weight, mesh["ep", "tp"], [Shard(0), Shard(dim)], **options)
            setattr(moe.experts, name, nn.Parameter(cut))


def check_same(model: nn.Module, plain: nn.Module, what: str) -> None:
    """Compare full parameters or gradients with one process."""
    with flatshard.summon_full_params(model, writeback=False, with_grads=True):
        for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            got, want = getattr(q, what), getattr(p, what)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def check_checkpoint(path: str, one: tuple[nn.Module, Any], saved: tuple[nn.Module, Any]) -> None:
    """Save a model and its optimizer, load both in one process, and compare with ``one``, which has trained so."""
    flatshard.save_checkpoint(path, dict(zip(("model", "optimizer"), saved, strict=True)))
    model = make().double()
    optimizer = adamw(model.parameters())
    flatshard.load_checkpoint(path, {"model": model, "optimizer": optimizer})
    for p, q in zip(one[0].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-9, atol=1e-12)
        moments = one[1].state[p]["exp_avg"], optimizer.state[q]["exp_avg"]
        torch.testing.assert_close(moments[1], moments[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1)], ids=str)
@ranks(4)
def test_training_with_tensor_parallelism_inside_experts(ctx, shape: tuple[int, int, int], path: str):
    """Ranks of "tp" have the same data; all others have data of their own."""
    plain = make().double()
    model = copy.deepcopy(plain)
    mesh = ctx.device_mesh(shape, ("dp", "ep", "tp"))
    divide(model, mesh)
    dense, own = mesh["dp", "ep"]._flatten("data"), mesh["dp"]
    fully_shard(
        model,
        policy={MoE},
        device_mesh=dense,
        shard_mesh_fn=lambda fqn, param: own if isinstance(param, DTensor) else None,
    )
    optimizers = [adamw(m.parameters()) for m in (plain, model)]
    for step in range(2):
        x = torch.randn(dense.size(), ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        plain(x.flatten(0, 1)).square().mean().backward()
        model(x[dense.get_local_rank()]).square().mean().backward()
        check_same(model, plain, "grad")
        experts = [[p.grad for n, p in m.named_parameters() if "experts" in n] for m in (plain, model)]
        assert float(nn.utils.get_total_norm(experts[1])) == pytest.approx(float(nn.utils.get_total_norm(experts[0])))
        norms = [float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (plain, model)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-9)
        step_all(optimizers)
    check_same(model, plain, "data")
    check_checkpoint(path, (plain, optimizers[0]), (model, optimizers[1]))


MICROBATCHES = 4


@pytest.mark.parametrize("over", [1, 2])
@ranks(4)
def test_pipelines_train_divided_experts(ctx, over: int):
    """Two stages a rank, which two ranks shard. If ``over`` is 2, they divide the experts between them, too."""
    mesh = ctx.device_mesh((2, 2 // over, over), ("pp", "dp", "ep"))
    dense = mesh["dp", "ep"]._flatten("data")
    pp, data = mesh["pp"].get_local_rank(), dense.get_local_rank()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(MoE(EXPERTS, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]).double()
    own = mesh["dp"]  # of the ranks with the same experts of this stage
    parts, stages = nn.ModuleList(copy.deepcopy(plain[i]) for i in (pp, pp + 2)), []
    like = torch.empty(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    for part, index in zip(parts, (pp, pp + 2), strict=True):
        divide_experts(part, mesh)
        fully_shard(
            part, device_mesh=dense, shard_mesh_fn=lambda fqn, param: own if isinstance(param, DTensor) else None
        )
        given = {"input_args": (like if index else like.detach(),), "output_args": (like,)}
        stages.append(PipelineStage(part, index, 4, torch.device("cpu"), **given, group=mesh.get_group("pp")))
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=lambda y, target: (y - target).square().mean())
    prepare(schedule, stages)
    optimizers = [adamw(m.parameters()) for m in (plain, parts)]
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 2, MICROBATCHES * ROWS, WIDTH, generator=generator).double()
        (plain(x.flatten(0, 1)) - y.flatten(0, 1)).square().mean().backward()
        schedule.step(*((x[data],) if pp == 0 else ()), **({"target": y[data]} if pp == 1 else {}))
        for part, index in zip(parts, (pp, pp + 2), strict=True):
            check_same(part, plain[index], "grad")
        step_all(optimizers)
    for part, index in zip(parts, (pp, pp + 2), strict=True):
        check_same(part, plain[index], "data")


AXES = ("pp", "dp", "cp", "ep", "tp")


class Traffic:
    """The calls, and the bytes that this rank sends, along each axis."""

    def __init__(self, mesh: Any) -> None:
        self.axes = {mesh.get_group(axis).group_name: axis for axis in AXES}
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[str] = Counter()

    def note(self, group: Any, call: str, nbytes: int) -> None:
        """Count a collective of ``group``."""
        axis = self.axes[group.group_name]
        self.calls[axis, call] += 1
        self.sent[axis] += nbytes


@pytest.mark.parametrize(
    "shape", [(2, 2, 2, 4, 2), (1, 8, 1, 8, 1), (4, 4, 2, 8, 4), (4, 8, 4, 8, 4)], ids=lambda s: str(math.prod(s))
)
def test_traffic_of_each_axis(world, monkeypatch, shape: tuple[int, ...]):
    """On 64 to 4,096 simulated ranks: no axis has calls or bytes beyond those that a formula gives."""
    world(math.prod(shape))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    dense, own = mesh["dp", "cp", "ep"]._flatten("dense"), mesh["dp", "cp"]._flatten("own")
    traffic = Traffic(mesh)
    traffic.axes |= {dense.get_group().group_name: "dense", own.get_group().group_name: "own"}

    class Counting(Recording):
        def note(self, call: str, *tensors: Tensor) -> None:
            traffic.note(self.inner.group, call, (self.inner.size - 1) * min(t.nbytes for t in tensors))

    def all_to_all(output: Tensor, rows: Tensor, received: Any = None, sent: Any = None, group: Any = None) -> None:
        size = group.size()
        output.fill_(0 if rows.is_floating_point() else 1)  # a row for each expert from each rank
        traffic.note(group, "all_to_all", rows.nbytes * (size - 1) // size)

    def all_reduce(tensor: Tensor, group: Any = None) -> None:
        traffic.note(group, "all_reduce", 2 * tensor.nbytes * (group.size() - 1) // group.size())

    def all_gather(outputs: list[Tensor], own: Tensor, group: Any = None) -> None:
        for output in outputs:
            output.copy_(own)
        traffic.note(group, "all_gather", own.nbytes * (group.size() - 1))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    width, count, rows = 64, 64, 32
    model = nn.Sequential(Attention(width), *make(width, count)[1:3])
    divide(model, mesh, src_data_rank=None)
    model[0].cp = mesh.get_group("cp")
    sizes: dict[bool, int] = Counter()
    for each in list(model.parameters()):
        sizes[isinstance(each, DTensor)] += each.numel() * each.element_size()
    del each
    fully_shard(
        model,
        policy={Attention, MoE},
        device_mesh=dense,
        shard_mesh_fn=lambda fqn, param: own if isinstance(param, DTensor) else None,
        collectives=Counting,
    )
    model(torch.randn(rows, width)).square().mean().backward()
    data = {"all_gather": 4, "reduce_scatter": 2}  # two gathers and a reduction of each layer
    assert traffic.calls == {
        **{("own", call): number for call, number in data.items()},
        **{("dense", call): number + number // 2 for call, number in data.items()},  # attention is a unit, too
        ("ep", "all_to_all"): 10,  # in each layer: counts, rows there and back, and their gradients
        ("tp", "all_reduce"): 4,  # in each layer: rows, and their gradients
        ("cp", "all_gather"): 1,
        ("cp", "all_reduce"): 1,  # its gradient
    }
    # A shard is sent for each of three collectives to all others. Units of dense parameters are padded.
    assert traffic.sent["own"] == 3 * sizes[True] // (shape[3] * shape[4]) * (own.size() - 1) // own.size()
    least = 3 * sizes[False] * (dense.size() - 1) / dense.size()
    assert least <= traffic.sent["dense"] <= least + 9 * 256 * dense.size()
    tokens, counts = 4 * 2 * rows * width, 8 * count  # bytes: each token has two experts, and as many rows arrive
    assert traffic.sent["ep"] == 2 * (4 * tokens + counts) * (shape[3] - 1) // shape[3]
    assert traffic.sent["tp"] == 4 * 2 * tokens * (shape[4] - 1) // shape[4]
    assert traffic.sent["pp"] == 0
    stage = set(range(math.prod(shape[1:])))
    assert all(set(dist.get_process_group_ranks(g)) <= stage for g in (dense.get_group(), own.get_group()))
