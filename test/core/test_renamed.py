"""FSDP1's and FSDP2's names of ``fully_shard``'s arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from models import Block, Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import flatshard
from flatshard import fully_shard
from flatshard._composable.construct.renamed import OTHER_VALUES, SAME_VALUES
from flatshard._composable.state import unit_of


def test_every_name_of_fsdp_is_known():
    ours = set(inspect.signature(fully_shard).parameters)
    for function in (FullyShardedDataParallel.__init__, fsdp2):
        for name in list(inspect.signature(function).parameters)[1:]:
            assert name in ours or name in SAME_VALUES or name in OTHER_VALUES or name in ("module", "dp_mesh_dims"), (
                name
            )
    assert set(SAME_VALUES.values()) <= ours
    assert not ours & {*SAME_VALUES, *OTHER_VALUES}


def test_names_are_accepted(world):
    world(2)
    mesh = init_device_mesh("cpu", (2,))
    model = Net()
    ignored = model.head.weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model.blocks[0], mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        ignored_params={ignored},
        forward_prefetch=False,
    )
    config = unit_of(model.blocks[0]).config
    assert config.mixed_precision.param_dtype is torch.bfloat16
    assert config.cpu_offload.offload_params
    outer = unit_of(model).config
    assert outer.strategy is flatshard.ShardingStrategy.SHARD_GRAD_OP
    assert not outer.forward_prefetch
    assert unit_of(model.blocks[1]) is not None
    assert model.head.weight is ignored
    assert type(ignored) is nn.Parameter


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"polcy": {Block}}, r"no argument 'polcy': did you mean 'policy'\?"),
        ({"mesh_": None}, r"no argument 'mesh_': did you mean 'mesh'\?"),
        ({"zzz": 1}, r"no argument 'zzz'$"),
        ({"auto_wrap_policy": {Block}, "policy": {Block}}, "'policy' and 'auto_wrap_policy' are two names of 'policy'"),
        ({"ignored_modules": [], "ignored_params": []}, "'ignored_modules' and 'ignored_params' are two names of"),
        ({"shard_placement_fn": None}, r"no argument 'shard_placement_fn': .*layouts\.Rows\(\)"),
        ({"dp_mesh_dims": 1}, r"dp_mesh_dims must be a torch\.distributed\.fsdp\.DataParallelMeshDims, got 1"),
        ({"use_orig_params": True}, "no argument 'use_orig_params': omit it"),
    ],
)
def test_names_are_refused(world, arguments, error):
    world(2)
    model = Net()
    with pytest.raises(TypeError, match=error):
        fully_shard(model, **arguments)
    assert unit_of(model) is None
    assert not any(m._forward_pre_hooks for m in model.modules())
