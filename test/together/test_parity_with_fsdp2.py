"""The same script under FSDP2 of the installed torch and under ``flatshard.fsdp2``: losses, gradients and parameters.

Values agree bit for bit if both add the same numbers in the same order, as two ranks do; otherwise to the bound of the case.
Each row of the table of deliberate differences in ``flatshard/docs/migration.md`` has a test at the end.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from models import NormBlock
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
import flatshard.fsdp2

THEIRS, OURS = torch.distributed.fsdp, flatshard.fsdp2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
IS_NEW = hasattr(THEIRS.FSDPModule, "finalize_backward")
WIDTH, VOCABULARY = 6, 11


class Net(nn.Module):
    """Two blocks of sizes that no number of ranks divides, between an embedding and a head."""

    def __init__(self, hidden: tuple[int, int] = (7, 9), order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.order = order
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([NormBlock(WIDTH, hidden[0]), NormBlock(WIDTH, hidden[1], bias=False)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.extra = nn.Linear(WIDTH, WIDTH)  # unused in most forwards

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = (self.embed(ids) * scale).to(self.embed.weight.dtype)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(self.norm(x))


Step = Callable[[nn.Module, Any, int], Tensor]


def loss_of(model: nn.Module, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    ids = torch.randint(VOCABULARY, (3, 4), generator=generator)
    scale = torch.rand(1, generator=generator) + 0.5
    return nn.functional.cross_entropy(model(ids, scale).float().flatten(0, 1), ids.flatten())


def one_backward(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = loss_of(model, rank, step)
    loss.backward()
    return loss


def two_forwards(model: nn.Module, rank: int, step: int) -> Tensor:
    """Run two forwards, and one backward through both."""
    losses = torch.stack([loss_of(model, rank, 10 * step + i) for i in range(2)])
    losses.sum().backward()
    return losses


def a_method(model: nn.Module, rank: int, step: int) -> Tensor:
    """Call a registered method beside the forward, with units that are prefetched."""
    model.unshard(async_op=True)
    loss = loss_of(model, rank, step) + model.embedded(torch.tensor([rank, step])).square().mean()
    loss.backward()
    model.reshard()
    return loss


def microbatches(model: nn.Module, rank: int, step: int, sync: str = "each") -> Tensor:
    """Accumulate over microbatches; ``sync`` says which of them reduce."""
    losses = []
    for micro in range(3):
        last = micro == 2
        model.set_is_last_backward(last)
        if sync == "last":
            model.set_requires_gradient_sync(last)
        if sync == "replicas":
            model.set_requires_all_reduce(last)
        losses.append(one_backward(model, rank, 10 * step + micro))
    return torch.stack(losses)


def finalized(model: nn.Module, rank: int, step: int) -> Tensor:
    """Finish the last backward by an explicit call, new in torch 2.15."""
    losses = []
    for micro, sync in enumerate((False, True)):
        model.set_requires_gradient_sync(sync)
        losses.append(one_backward(model, rank, 10 * step + micro))
    model.finalize_backward(async_op=True).wait()
    return torch.stack(losses)


@dataclass(frozen=True)
class Case:
    """A script of one model. Defaults are the simplest values."""

    where: str = "two ranks"
    """A name in ``MESHES``."""
    make: Callable[[], nn.Module] = Net
    before: Callable[[nn.Module, Any], object] = lambda model, mesh: None
    """Change to the model before it is sharded."""
    precision: dict[str, Any] = field(default_factory=dict)
    after: Callable[[nn.Module], object] = lambda model: None
    """Change to the sharded model."""
    step: Step = one_backward
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    needs: bool = True
    """Whether FSDP2 of the installed torch supports it."""
    steps: int = 2
    bound: float = 0.0
    """Maximum error of gradients and parameters, relative to the largest element of their tensor."""


def whole(value: Tensor | None) -> Tensor | None:
    return value.full_tensor() if isinstance(value, DTensor) else value


def values(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]:
    """Return a value of each parameter as a full tensor, under FSDP2 or flatshard."""
    is_theirs = isinstance(model, THEIRS.FSDPModule)
    with contextlib.nullcontext() if is_theirs else flatshard.summon_full_params(model, with_grads=True):
        found = {name: whole(of(param)) for name, param in model.named_parameters()}
        return {name: None if value is None else value.clone() for name, value in found.items()}


class Script:
    """A case under one of the two."""

    def __init__(self, api: Any, case: Case, ctx: Any, mesh: Any) -> None:
        self.case, self.rank, over = case, ctx.rank, mesh
        if case.where == "tensor parallel":
            over, self.rank = mesh["dp"], mesh.get_local_rank("dp")
        torch.manual_seed(0)
        self.model = model = case.make()
        case.before(model, mesh)
        options = {"mesh": over, "mp_policy": api.MixedPrecisionPolicy(**case.precision)}
        options["ignored_params"] = {*model.blocks[0].norm.parameters()}
        for unit in (model.blocks[0].up, *model.blocks, [model.norm, model.head], model):
            api.fully_shard(unit, **options)
        api.register_fsdp_forward_method(model, "embedded")
        case.after(model)
        self.optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])

    def step(self, number: int) -> dict[str, Tensor | None]:
        """Run a step; return all its numbers by name."""
        self.optimizer.zero_grad()
        found: dict[str, Tensor | None] = {"loss": self.case.step(self.model, self.rank, number).detach()}
        found |= {f"gradient of {name}": value for name, value in values(self.model, lambda p: p.grad).items()}
        self.optimizer.step()
        return found | values(self.model, lambda p: p.detach())


def differences(theirs: dict[str, Tensor | None], ours: dict[str, Tensor | None]) -> dict[str, float]:
    """Return each tensor's maximum error, relative to its largest element."""
    assert list(theirs) == list(ours)
    found = {}
    for name, expected in theirs.items():
        got = ours[name]
        assert (got is None) == (expected is None), f"{name}: {got}, under FSDP2 {expected}"
        if got is None or expected is None:
            continue
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), f"{name}: {got.dtype}, {expected.dtype}"
        if not torch.equal(got, expected):
            found[name] = ((got.double() - expected.double()).abs().max() / got.double().abs().max()).item()
    return found


def mark_norms(model: nn.Module, mesh: Any) -> None:
    for module in model.modules():
        for p in module.parameters(recurse=False):
            p.is_norm = isinstance(module, nn.LayerNorm)


def norms_in_their_own(p: nn.Parameter) -> torch.dtype | None:
    return p.dtype if p.is_norm else None


def parallelize(model: nn.Module, mesh: Any) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def divide(model: nn.Module, factor: float) -> None:
    """Set the divisor of gradients. FSDP2 needs an option for it with gloo, which cannot multiply in a reduction."""
    for unit in model.modules():
        if isinstance(unit, THEIRS.FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
        if hasattr(unit, "set_gradient_divide_factor"):
            unit.set_gradient_divide_factor(factor)


def prefetch_by_hand(model: nn.Module) -> None:
    model.set_modules_to_forward_prefetch([*model.blocks])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LAST = functools.partial(microbatches, sync="last")
UNSAID: dict[str, Any] = {"param_dtype": BF16}
WIDE, LOW = UNSAID | {"reduce_dtype": FP32}, UNSAID | {"reduce_dtype": BF16}
OWN = {"before": mark_norms, "needs": IS_NEW}
"""Options for norms that compute in their own dtype."""

CASES = {
    "bf16, reduced in fp32": Case(precision=WIDE),
    "bf16, reduced in bf16": Case(precision=LOW),
    "bf16, reduced in None": Case(precision=UNSAID),
    "fp32, reduced in bf16": Case(precision={"reduce_dtype": BF16}),
    "bf16, norms in fp32": Case(precision=UNSAID | {"param_dtype_override_fn": norms_in_their_own}, **OWN),
    "gathered ahead": Case(after=prefetch_by_hand, step=a_method),
    "two forwards in bf16, of repeated blocks": Case(
        make=functools.partial(Net, order=(0, 0, 1, 0)), step=two_forwards, precision=WIDE
    ),
    "divided by four": Case(after=functools.partial(divide, factor=4.0)),
    "accumulated, each reduced": Case(step=microbatches),
    "accumulated in bf16, reduced in None": Case(step=LAST, precision=UNSAID),
    "finalized by a call": Case(
        step=finalized, precision=WIDE, after=lambda model: model.set_manual_backward_finalization(True), needs=IS_NEW
    ),
    "bf16, on three ranks": Case("three ranks", optimizer=SGD, precision=WIDE, bound=1e-6),
    "replicated in bf16, norms in fp32": Case(
        "replicas", precision=WIDE | {"param_dtype_override_fn": norms_in_their_own}, **OWN
    ),
    "accumulated over the replicas": Case("replicas", step=functools.partial(microbatches, sync="replicas"), steps=1),
    "tensor parallel, accumulated": Case(
        "tensor parallel", make=functools.partial(Net, hidden=(8, 10)), before=parallelize, step=LAST, steps=1
    ),
}
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "two ranks": ((2,), ("dp",)),
    "three ranks": ((3,), ("dp",)),
    "replicas": ((2, 2), ("replicate", "shard")),
    "tensor parallel": ((2, 2), ("dp", "tp")),
}


def compare(ctx: Any, where: str) -> None:
    shape, names = MESHES[where]
    mesh = ctx.device_mesh(shape, names) if len(shape) > 1 else ctx.mesh
    wrong = []
    for name, case in CASES.items():
        if case.where != where or not case.needs:
            continue
        ctx.note(name)
        theirs, ours = (Script(api, case, ctx, mesh) for api in (THEIRS, OURS))
        for step in range(case.steps):
            off = differences(theirs.step(step), ours.step(step))
            if far := {what: by for what, by in off.items() if not by <= case.bound}:
                wrong.append(f"{name}, step {step}: {far}")
                break
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("where", MESHES)
def test_the_same_numbers(pool, where):
    pool.run(compare, where, world_size=math.prod(MESHES[where][0]))


# -- deliberate differences: the table of migration.md -----------------------------------------------------------------


class Scale(nn.Module):
    """A module whose parameters have its inputs as gradients. An input of None leaves its parameter unused."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, a: float | None, b: float | None = None) -> Tensor:
        uses = [(p * torch.tensor(x, dtype=p.dtype)).sum() for p, x in ((self.a, a), (self.b, b)) if x is not None]
        return torch.stack(uses).sum()


def gradients(
    ctx: Any,
    train: Callable[[nn.Module], object],
    after: Callable[[nn.Module], object] = lambda model: None,
    **precision: Any,
) -> list[dict[str, set[float] | None]]:
    """Return the distinct values of each parameter's gradient, under FSDP2 and under flatshard."""
    found = []
    for api in (THEIRS, OURS):
        model = Scale()
        api.fully_shard(model, mesh=ctx.mesh, mp_policy=api.MixedPrecisionPolicy(**precision))
        after(model)
        train(model)
        grads = values(model, lambda p: p.grad)
        found.append({name: None if grad is None else set(grad.tolist()) for name, grad in grads.items()})
    return found


def divided_by_three(ctx) -> None:
    """FSDP2 divides the sum; flatshard scales the average."""
    off = set()
    for each in range(1, 20):
        after = functools.partial(divide, factor=3.0)
        theirs, ours = gradients(ctx, lambda model, g=float(each): model(g, g).backward(), after)
        exact = (torch.tensor(2.0 * each) / 3).item()
        assert theirs["a"] == {exact}
        off |= {abs(got - exact) / exact for got in ours["a"]}
    assert 0 < max(off) <= 2**-22


def tiny_in_fp16(ctx) -> None:
    """FSDP2 halves gradients before the reduction: the smallest number of fp16 becomes 0. Flatshard adds in float32."""
    tiny = 2.0**-24
    theirs, ours = gradients(ctx, lambda model: model(tiny, 1.0).backward(), param_dtype=FP16, reduce_dtype=FP16)
    assert (theirs["a"], ours["a"]) == ({0.0}, {tiny})


def used_by_one_rank(ctx) -> None:
    """FSDP2 needs an option of torch 2.15, and gives zeros to parameters that no rank has used."""

    def unused(model: nn.Module) -> None:
        if isinstance(model, THEIRS.FSDPModule):
            model.set_reduce_scatter_unused_params(True)

    theirs, ours = gradients(ctx, lambda model: model(4.0, 4.0 if ctx.rank else None).backward(), unused)
    assert theirs == ours == {"a": {4.0}, "b": {2.0}}
    theirs, ours = gradients(ctx, lambda model: model(4.0).backward(), unused)
    assert theirs == {"a": {4.0}, "b": {0.0}}
    assert ours == {"a": {4.0}, "b": None}


def added_in_bf16(ctx) -> None:
    """Add 256, 1 and 1: FSDP2 over gloo rounds after each addition, flatshard once."""
    theirs, ours = gradients(ctx, lambda model: model(1.0 if ctx.rank else 256.0).backward(), reduce_dtype=BF16)
    assert ours["a"] == {86.0}
    assert theirs["a"] == {85.5, 86.0}


def test_differences(pool):
    for body in (divided_by_three, tiny_in_fp16, *([used_by_one_rank] if IS_NEW else [])):
        pool.run(body)
    pool.run(added_in_bf16, world_size=3)
