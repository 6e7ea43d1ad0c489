"""``torch.distributed.checkpoint.state_dict`` on sharded models: right, or an error that names what to call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saving import Net, net, same, step
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import ShardedValue
from flatshard.tensors import shard_info

Optimizer = torch.optim.Optimizer


def build(ctx, seed: int, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> tuple[Net, Optimizer]:
    model = fully_shard(net(seed), policy={nn.Linear}, process_group=ctx.group, strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def check(model: nn.Module, optimizer: Optimizer, expected: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    whole = flatshard.checkpoint.full_state_dict(model)
    assert whole.keys() == expected[0].keys()
    assert all(torch.equal(whole[n], v) for n, v in expected[0].items())
    same(flatshard.checkpoint.optim_state_dict(model, optimizer, full=True), expected[1])


def whole(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return flatshard.checkpoint.full_state_dict(model), flatshard.checkpoint.optim_state_dict(
        model, optimizer, full=True
    )


def use(ctx, path: str) -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model, optimizer = build(ctx, 0, strategy)
        step(model, optimizer)
        expected = whole(model, optimizer)
        for number, options in enumerate(
            (None, StateDictOptions(cpu_offload=True), StateDictOptions(flatten_optimizer_state_dict=True))
        ):
            ctx.note(f"{strategy.name}, {options}")
            at = f"{path}/{strategy.name}{number}"
            state, optim = get_state_dict(model, optimizer, options=options)
            if strategy is ShardingStrategy.FULL_SHARD and ctx.world_size > 1:
                assert all(isinstance(state[n], ShardedValue) for n, _ in model.named_parameters())
            dcp.save({"model": state, "optim": optim}, checkpoint_id=at, process_group=ctx.group)
            other, other_optimizer = build(ctx, 1)
            state, optim = get_state_dict(other, other_optimizer, options=options)  # which steps
            loaded = {"model": state, "optim": optim}
            dcp.load(loaded, checkpoint_id=at, process_group=ctx.group)
            set_state_dict(
                other,
                other_optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optim"],
                options=options,
            )
            check(other, other_optimizer, expected)
            step(other, other_optimizer)
        frozen, frozen_optimizer = build(ctx, 0)
        frozen.up.weight.requires_grad_(False)
        found = get_model_state_dict(frozen, options=StateDictOptions(ignore_frozen_params=True))
        assert found.keys() == expected[0].keys() - {"up.weight"}
        assert get_optimizer_state_dict(frozen, frozen_optimizer)["state"].keys() == expected[1]["state"].keys() - {
            "up.weight"
        }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sharded_state(pool, world_size, tmp_path):
    pool.run(use, str(tmp_path), world_size=world_size)


def load_whole(ctx) -> None:
    model, optimizer = build(ctx, 0)
    step(model, optimizer)
    expected = whole(model, optimizer)
    for broadcast in (False, True) if ctx.world_size == 4 else (False,):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        state, optim = copy.deepcopy(expected)
        if broadcast and ctx.rank:
            state, optim = {}, {}
        other, other_optimizer = build(ctx, 1)
        set_model_state_dict(other, state, options=options)
        set_optimizer_state_dict(other, other_optimizer, optim, options=options)
        check(other, other_optimizer, expected)


@pytest.mark.parametrize("world_size", [1, 4])
def test_loading_whole_state(pool, world_size):
    """``broadcast_from_rank0`` takes all ranks of the world."""
    pool.run(load_whole, world_size=world_size)


def refuse(ctx) -> None:
    model, optimizer = build(ctx, 0)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    with pytest.raises(RuntimeError, match=r"gathers nothing .* call flatshard.checkpoint.full_state_dict\(module"):
        get_model_state_dict(model, options=full)
    with pytest.raises(RuntimeError, match=r"call flatshard.checkpoint.optim_state_dict\(module, optimizer, full=True"):
        get_optimizer_state_dict(model, optimizer, options=full)
    flat = torch.optim.AdamW(flatshard.flat_parameters(model))
    with pytest.raises(RuntimeError, match=r"knows no flat parameters .*: call flatshard.checkpoint.optim_state_dict"):
        get_optimizer_state_dict(model, flat)
    model, optimizer = build(ctx, 0)
    step(model, optimizer)
    own = optimizer.state_dict()  # this rank's, for anybody else
    assert not any(isinstance(v, ShardedValue) for s in own["state"].values() for v in s.values())
    expected = whole(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(own))
    check(model, optimizer, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_the_helpers_cannot_do(pool, world_size):
    pool.run(refuse, world_size=world_size)


def added_later(ctx) -> None:
    """An optimizer that stepped plain parameters first, or the same ones before they were sharded."""
    fully_shard(nn.Linear(1, 1), process_group=ctx.group)  # from here on, optimizers are noticed
    model = nn.Sequential(net(0))
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([plain], lr=1e-2)
    plain.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    fully_shard(model[0], policy={nn.Linear}, process_group=ctx.group)
    model.register_parameter("plain", plain)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    step(model[0], optimizer)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    for name, param in model.named_parameters():
        if shard_info(param) is not None:
            assert isinstance(state[name]["exp_avg"], ShardedValue), name
    expected = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)
    whole_state = get_optimizer_state_dict(model, optimizer)
    whole_state["state"] = {**copy.deepcopy(expected)["state"]}
    set_optimizer_state_dict(model, optimizer, whole_state)
    same(flatshard.checkpoint.optim_state_dict(model, optimizer, full=True), expected)


def test_an_optimizer_that_gets_sharded_parameters_later(pool):
    pool.run(added_later)
