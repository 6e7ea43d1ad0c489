"""torchao's classes for training in low precision, sharded: products, losses and weights are those of one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flatshard

pytestmark = [pytest.mark.clients("torchao"), pytest.mark.slow]

WIDTH = 32


def data(step: int) -> torch.Tensor:
    """The same on every rank: what is scaled is a whole batch."""
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


def trained_alike(sharded: nn.Module, plain: nn.Module) -> None:
    assert train(sharded) == pytest.approx(train(plain), rel=1e-6)
    whole = flatshard.checkpoint.full_state_dict(sharded)
    for name, value in plain.state_dict().items():
        assert type(whole[name]) is type(value)
        torch.testing.assert_close(inside(whole[name]), inside(value))


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor in a weight, if there is one."""
    return getattr(tensor, "_data", getattr(tensor, "_tensor", tensor)).detach()


def float8(gathered: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gathered)
    return convert_to_float8_training(model, config=config)


def fit(ctx: Any, gathered: bool) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    plain = float8(gathered)
    assert type(plain[0]).__name__ == "Float8Linear"
    assert (type(plain[0].weight).__name__ == "WeightWithDynamicFloat8CastTensor") is gathered
    sharded = flatshard.fully_shard(copy.deepcopy(plain), policy={type(plain[0])}, process_group=ctx.group)
    assert {compute for _, compute in dtypes(sharded)} == {torch.float32, *([torch.float8_e4m3fn] if gathered else [])}
    precompute_float8_dynamic_scale_for_fsdp(sharded)  # does nothing: flatshard shares the scales
    trained_alike(sharded, plain)


def dtypes(model: nn.Module) -> set[tuple[torch.dtype, torch.dtype]]:
    """Of shards, and of what computes."""
    flats = [flat for unit in flatshard.describe(model).units for flat in unit.flats]
    return {(flat.dtype, flat.compute_dtype) for flat in flats}


@pytest.mark.parametrize("gathered", [False, True])
def test_float8(pair, gathered):
    pair.run(fit, gathered, world_size=2)


def weights(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a weight of the class ``name`` from a plain one."""
    from torchao.prototype.moe_training import config
    from torchao.prototype.moe_training import tensor as experts
    from torchao.prototype.quantized_training import bitnet
    from torchao.prototype.quantized_training import int8_mixed_precision as int8

    emulated = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    module, *options = {
        "BitNetTrainingLinearWeight": (bitnet,),
        "Int8MixedPrecisionTrainingLinearWeight": (int8, int8.Int8MixedPrecisionTrainingConfig()),
        "MXFP8TrainingWeightWrapperTensor": (experts, emulated),
        "Float8TrainingWeightWrapperTensor": (experts, config.Float8TrainingOpConfig()),
    }[name]
    return lambda weight: getattr(module, name)(weight, *options)


def quantised(ctx: Any) -> None:
    from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight

    plain = nn.Linear(WIDTH, WIDTH, bias=False)
    plain.weight = nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(plain.weight.detach()))
    sharded = copy.deepcopy(plain)
    with pytest.raises(ValueError, match=r"'weight' is a Int8Quan.* has 2 tensors inside: .*Freeze it"):
        flatshard.fully_shard(sharded, process_group=ctx.group)
    flatshard.fully_shard(sharded.requires_grad_(False), process_group=ctx.group)
    assert torch.equal(sharded(data(0)), plain(data(0)))


def test_a_quantised_weight_is_frozen(pair):
    pair.run(quantised, world_size=2)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    make = weights(name)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(make(linear.weight.detach()))
    return model


def fit_weights(ctx: Any, name: str) -> None:
    plain, sharded = model_of(name), model_of(name)
    assert type(plain[0].weight).__name__ == name
    flatshard.fully_shard(sharded, policy={nn.Linear}, process_group=ctx.group)
    trained_alike(sharded, plain)


@pytest.mark.parametrize(
    "name", ["BitNetTrainingLinear", "Int8MixedPrecisionTrainingLinear", "MXFP8Training", "Float8Training"]
)
def test_weights_of_other_classes(pair, name):
    ending = "Weight" if name.endswith("Linear") else "WeightWrapperTensor"
    pair.run(fit_weights, f"{name}{ending}", world_size=2)
