"""Each warning that ``fully_shard`` gives points to the line that called it."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.layouts import Whole

Case = Iterator[tuple[nn.Module, dict[str, Any]]]


def no_match() -> Case:
    yield nn.Sequential(nn.Linear(4, 4)), {"policy": {nn.Conv2d}}


def padding() -> Case:
    odd = nn.Sequential(nn.Linear(101, 103, bias=False), nn.Linear(103, 107, bias=False))
    yield odd, {"layout": Whole(max_padding=0.01)}


def old_parameters() -> Case:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["tp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield model, {"device_mesh": mesh["dp"]}
    del optimizer


def experts() -> Case:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], device_mesh=mesh["dp"])
    yield model, {}


def dropped_layers() -> Case:
    model = nn.Module()
    model.layerdrop = 0.5
    model.attentions, model.ffns = (nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(2))
    model.forward = lambda x: x
    yield model, {"policy": {nn.Linear}}


CASES = {
    no_match: "matched no submodule",
    padding: "cut anywhere",
    old_parameters: "in the place of tensor subclasses",
    experts: "sharded by an earlier call",
    dropped_layers: "may leave out layers at random",
}


@pytest.mark.parametrize("fsdp_names", [{}, {"sharding_strategy": ShardingStrategy.FULL_SHARD}], ids=["", "fsdp"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_warning_points_to_the_call(world, case: Callable[[], Case], fsdp_names):
    world(4)
    for model, arguments in case():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(model, **arguments, **fsdp_names)
        (warning,) = caught
        assert CASES[case] in str(warning.message)
        assert warning.filename == __file__


def test_a_warning_of_a_plan_points_to_the_call():
    with pytest.warns(UserWarning, match="matched no submodule") as caught:
        flatshard.plan_step(nn.Sequential(nn.Linear(4, 4)), policy={nn.Conv2d}, world_size=2)
    assert {warning.filename for warning in caught} == {__file__}
