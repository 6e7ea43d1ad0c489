"""torchao's classes for low-precision training, sharded: products, losses and weights are one process's."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from on_ranks import ranks
from parity import full_params
from torch import nn

import flatshard
from flatshard.layouts import Blocks, Whole
from flatshard.optim import OffloadedOptimizer, WholeParameterOptimizer

pytestmark = [pytest.mark.clients("torchao"), pytest.mark.slow]

WIDTH = 32


def data(step: int) -> torch.Tensor:
    """Return the same batch on every rank, as scales depend on the full batch."""
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        loss = (model(data(step)) - data(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor inside a weight, or the weight if it is plain."""
    return getattr(tensor, "_data", getattr(tensor, "_tensor", tensor)).detach()


def model_of(name: str) -> nn.Module:
    """Make a model whose linear layers, or their weights, are of torchao's class ``name``."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.prototype.moe_training import config
    from torchao.prototype.moe_training import tensor as experts
    from torchao.prototype.quantized_training import bitnet
    from torchao.prototype.quantized_training import int8_mixed_precision as int8

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    if name in ("Float8Linear", GATHERED):
        how = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=name == GATHERED)
        return convert_to_float8_training(model, config=how)
    emulated = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    module, *options = {
        "BitNetTrainingLinearWeight": (bitnet,),
        "Int8MixedPrecisionTrainingLinearWeight": (int8, int8.Int8MixedPrecisionTrainingConfig()),
        "MXFP8TrainingWeightWrapperTensor": (experts, emulated),
        "Float8TrainingWeightWrapperTensor": (experts, config.Float8TrainingOpConfig()),
    }[name]
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(getattr(module, name)(linear.weight.detach(), *options))
    return model


GATHERED = "WeightWithDynamicFloat8CastTensor"
"""Weight class of a ``Float8Linear`` that gathers one byte for each element."""
NAMES = ["Float8Linear", GATHERED, "BitNetTrainingLinearWeight", "Int8MixedPrecisionTrainingLinearWeight"]
NAMES += ["MXFP8TrainingWeightWrapperTensor", "Float8TrainingWeightWrapperTensor"]


@pytest.mark.parametrize("name", NAMES)
@ranks(2, pool="pair")
def test_as_one_process(ctx, name: str):
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    plain, sharded = model_of(name), model_of(name)
    assert name in (type(plain[0]).__name__, type(plain[0].weight).__name__)
    flatshard.fully_shard(sharded, policy={type(plain[0])}, process_group=ctx.group)
    flats = [flat for unit in flatshard.describe(sharded).units for flat in unit.flats]
    assert (torch.float8_e4m3fn in {flat.compute_dtype for flat in flats}) is (name == GATHERED)
    precompute_float8_dynamic_scale_for_fsdp(sharded)  # does nothing, as flatshard shares the scales
    assert train(sharded) == pytest.approx(train(plain), rel=1e-6)
    whole = flatshard.checkpoint.full_state_dict(sharded)
    for key, value in plain.state_dict().items():
        assert type(whole[key]) is type(value)
        torch.testing.assert_close(inside(whole[key]), inside(value))


@ranks(2, pool="pair")
def test_a_quantised_weight_is_frozen(ctx):
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    plain.weight = nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(plain.weight.detach()))
    sharded = copy.deepcopy(plain)
    with pytest.raises(ValueError, match=r"'weight' is a Int8Quan.* has 2 tensors inside: .*Freeze it"):
        flatshard.fully_shard(sharded, process_group=ctx.group)
    flatshard.fully_shard(sharded.requires_grad_(False), process_group=ctx.group)
    assert torch.equal(sharded(data(0)), plain(data(0)))


# -- quantised state -----------------------------------------------------------------------------------------------------


def step_by(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Step with the same gradients on all ranks as in one process."""
    for i, p in enumerate(model.parameters()):
        info, shape = flatshard.tensors.shard_info(p), flatshard.full_shape(p)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(10 * number + i)).flatten()
        p.grad = (grad if info is None else grad[info.start : info.stop]).view(p.shape)
    optimizer.step()


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 192), nn.Linear(192, 11))


@pytest.mark.parametrize(("name", "block"), [("AdamW8bit", 256), ("AdamW4bit", 128), ("AdamWFp8", 256)])
@ranks(2, 3)
def test_quantised_state(ctx, name: str, block: int, path: str):
    """State has one process's bits in the layouts that the error names, also from a checkpoint. Other layouts are refused."""
    import torchao.optim

    kind, sizes = getattr(torchao.optim, name), {"policy": {nn.Linear}, "process_group": ctx.group}
    plain, model = linears(), flatshard.fully_shard(linears(), **sizes)
    with pytest.raises(
        RuntimeError, match=rf"'exp_avg' of '\d.weight' .*layout=.*Blocks\({block}\); or use .*WholePara"
    ):
        step_by(model, kind(model.parameters()), 0)
    one_process = kind(plain.parameters(), lr=0.1)
    torch.compiler.set_stance("force_eager")  # compilation takes longer than everything else
    for number in range(4):
        step_by(plain, one_process, number)
    expected = dict(plain.named_parameters())
    makes: list[tuple[Any, Any]] = [
        (kind, Blocks(block, 9)),
        (partial(OffloadedOptimizer, optimizer_class=kind), Whole(9)),
    ]
    makes += [(partial(WholeParameterOptimizer, optimizer_class=kind), None)]
    jobs = []
    for make, layout in makes:
        model = flatshard.fully_shard(linears(), layout=layout, **sizes)
        jobs.append({"model": model, "optimizer": make(model.parameters(), lr=0.1)})
    for number in range(2):
        step_by(*jobs[0].values(), number)
    for first, then in ((0, 1), (1, 2), (2, 0)):
        flatshard.save_checkpoint(path, jobs[first], overwrite=True, process_group=ctx.group)
        flatshard.load_checkpoint(path, jobs[then], process_group=ctx.group)
    for job in jobs:
        for number in range(2, 4):
            step_by(*job.values(), number)
        found = full_params(job["model"])
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    torch.compiler.set_stance("default")
