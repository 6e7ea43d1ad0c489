"""``torch.distributed.checkpoint.state_dict`` on sharded models: right, or an error that names what to call."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import MemoryWatch, Net, make, net, same, shard, step, train
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import (
    ShardedValue,
    _barrier,
    full_state_dict,
    load_optim_state_dict,
    optim_state_dict,
)
from flatshard.tensors import shard_info

Optimizer = torch.optim.Optimizer


def build(ctx, seed: int, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> tuple[Net, Optimizer]:
    model = fully_shard(net(seed), policy={nn.Linear}, process_group=ctx.group, strategy=strategy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def check(model: nn.Module, optimizer: Optimizer, expected: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    whole = full_state_dict(model)
    assert whole.keys() == expected[0].keys()
    assert all(torch.equal(whole[n], v) for n, v in expected[0].items())
    same(optim_state_dict(model, optimizer, full=True), expected[1])


def whole(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return full_state_dict(model), optim_state_dict(model, optimizer, full=True)


@ranks(1, 2, 3)
def test_sharded_state(ctx, path: str) -> None:
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


@ranks(1, 4)
def test_loading_whole_state(ctx) -> None:
    """``broadcast_from_rank0`` takes all ranks of the world."""
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


WHOLE = StateDictOptions(full_state_dict=True)
WHOLE_ON_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)


def check_whole(model: nn.Module, optimizer: Optimizer, source: dict[str, Tensor], trained: dict[str, Any]) -> None:
    """What torch's helpers give of a sharded model is what they give of the plain one."""
    for options in (WHOLE, WHOLE_ON_FIRST):
        receives = options is WHOLE or dist.get_rank() == 0
        state = get_model_state_dict(model, options=options)
        assert state.keys() == (source.keys() if receives else set())
        for name, value in state.items():
            assert type(value) is Tensor, name
            assert (value.dtype, value.shape) == (source[name].dtype, source[name].shape), name
            assert torch.equal(value, source[name]), name
        found = get_optimizer_state_dict(model, optimizer, options=options)
        same(found, trained) if receives else None
        assert bool(found) == receives
        if receives and "head.weight" in state:  # tied: one tensor
            assert state["head.weight"].data_ptr() == state["down.weight"].data_ptr()
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedValue):
            found = value.full_tensor()
            assert type(found) is Tensor
            assert (found.dtype, found.shape, found.stride()) == (value.dtype, value.shape, source[name].stride()), name
            assert torch.equal(found, source[name]), name
            assert torch.equal((value * 2).full_tensor(), source[name] * 2), name
    for name, values in optim_state_dict(model, optimizer)["state"].items():
        for key, value in values.items():
            if isinstance(value, ShardedValue):
                assert torch.equal(value.full_tensor(), trained["state"][name][key]), (name, key)


@ranks(1, 2, 3, 4)
def test_getting_whole_state(ctx) -> None:
    """Uneven, tied, unused, frozen and empty parameters, of several dtypes and strides; buffers."""
    plain = make()
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    train(plain, reference)
    expected = get_model_state_dict(plain), get_optimizer_state_dict(plain, reference)
    assert not expected[1]["state"].keys() & {"empty", "frozen"}  # unused; not trained
    for strategy, policy in ((ShardingStrategy.FULL_SHARD, {nn.Linear}), (ShardingStrategy.NO_SHARD, None)):
        ctx.note(strategy.name)
        model = nn.Sequential()  # the helpers' module may hold the sharded one
        model.inner = shard(ctx, make(1), strategy, policy)
        model.inner.load_state_dict(expected[0])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        load_optim_state_dict(model.inner, optimizer, expected[1])
        check_whole(model.inner, optimizer, *expected)
        found = get_model_state_dict(model, options=WHOLE)
        assert found.keys() == {f"inner.{n}" for n in expected[0]}
        assert all(torch.equal(found[f"inner.{n}"], v) for n, v in expected[0].items())


@ranks(4)
def test_getting_whole_state_of_tensor_parallel_modules_and_replicas(ctx) -> None:
    torch.manual_seed(0)
    plain = net(0)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step(plain, reference)
    expected = get_model_state_dict(plain), get_optimizer_state_dict(plain, reference)
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = net(1)
        parallelize_module(
            model, mesh["tp"], {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        )
        fully_shard(model, device_mesh=mesh["dp"], strategy=strategy)
        model.load_state_dict(expected[0])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        load_optim_state_dict(model, optimizer, expected[1])
        check_whole(model, optimizer, *expected)
    mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
    model = fully_shard(net(1), device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    model.load_state_dict(expected[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_optim_state_dict(model, optimizer, expected[1])
    check_whole(model, optimizer, *expected)


@ranks(2)
def test_ranks_that_do_not_receive_hold_one_unit(ctx) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    unit = flatshard.describe(model).units[1].flats[0].padded_numel * 4
    with MemoryWatch() as watch:
        state = get_model_state_dict(model, options=WHOLE_ON_FIRST)
    size = sum(v.nbytes for v in state.values())
    assert size <= watch.peak <= size + unit + 1024
    assert bool(size) == (ctx.rank == 0)


@ranks(3)
def test_one_rank_alone(ctx) -> None:
    """Who calls alone gets an error that names the others; afterwards all can call together."""
    model, optimizer = build(ctx, 0)
    step(model, optimizer)
    value = model.state_dict()["up.weight"]
    calls = {
        r"get_model_state_dict\(full_state_dict=True\)": lambda: get_model_state_dict(model, options=WHOLE),
        r"optim_state_dict\(full=True\)": lambda: get_optimizer_state_dict(model, optimizer, options=WHOLE_ON_FIRST),
        r"full_state_dict": lambda: full_state_dict(model),
        r"iter_full_params": lambda: list(flatshard.checkpoint.iter_full_params(model)),
        r"full_tensor of 'up.weight'": value.full_tensor,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_barrier, "GIVE_UP_AFTER", 0.05)
        patch.setattr(_barrier, "_GRACE", 0.05)
        for text, call in calls.items():
            if ctx.rank == 1:
                with pytest.raises(
                    RuntimeError,
                    match=rf"^{text}: rank 0, rank 2: did not come within 0.05 s. All ranks must make this call",
                ):
                    call()
        dist.barrier(ctx.group)
    for call in (*calls.values(), *calls.values()):
        call()


@ranks(2)
def test_dcp_to_torch_save(ctx, path: str) -> None:
    model, optimizer = build(ctx, 0)
    step(model, optimizer)
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/a", process_group=ctx.group)
    flatshard.save_checkpoint(f"{path}/b", {"model": model, "optim": optimizer}, process_group=ctx.group)
    expected, trained = whole(model, optimizer)
    if ctx.rank == 0:
        for name in ("a", "b"):
            dcp_to_torch_save(f"{path}/{name}", f"{path}/{name}.pt")
            found = torch.load(f"{path}/{name}.pt", weights_only=True)
            net(1).load_state_dict(found["model"])
            assert all(torch.equal(found["model"][n], v) for n, v in expected.items())
        assert all(
            torch.equal(found["optim"]["state"][n]["exp_avg"], s["exp_avg"]) for n, s in trained["state"].items()
        )


@ranks(1, 2)
def test_what_an_optimizer_hands_out(ctx, path: str) -> None:
    """``optimizer.state_dict()`` says whose part it is, to torch.distributed.checkpoint and in files."""
    model, optimizer = build(ctx, 0)
    step(model, optimizer)
    expected = whole(model, optimizer)
    own = optimizer.state_dict()
    sharded = ctx.world_size > 1
    assert any(isinstance(v, ShardedValue) for s in own["state"].values() for v in s.values()) == sharded
    optimizer.load_state_dict(copy.deepcopy(own))
    check(model, optimizer, expected)
    dcp.save({"optim": optimizer}, checkpoint_id=f"{path}/dcp", process_group=ctx.group)
    other, other_optimizer = build(ctx, 1)
    step(other, other_optimizer)
    step(other, other_optimizer)
    other.load_state_dict(model.state_dict())
    dcp.load({"optim": other_optimizer}, checkpoint_id=f"{path}/dcp", process_group=ctx.group)
    check(other, other_optimizer, expected)
    torch.save(own, f"{path}/{ctx.rank}.pt")
    dist.barrier(ctx.group)
    loaded = torch.load(f"{path}/{ctx.rank}.pt", weights_only=True)
    step(other, other_optimizer)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(loaded))
    check(other, other_optimizer, expected)
    fresh, fresh_optimizer = build(ctx, 0)
    fresh.load_state_dict(model.state_dict())
    fresh_optimizer.load_state_dict(loaded)  # before any step
    check(fresh, fresh_optimizer, expected)
    continued, theirs = copy.deepcopy(expected), None
    step(fresh, fresh_optimizer)
    step(other, other_optimizer)
    check(fresh, fresh_optimizer, whole(other, other_optimizer))
    if not sharded:
        return
    theirs = torch.load(f"{path}/{1 - ctx.rank}.pt", weights_only=True)
    with pytest.raises(ValueError, match=r"the optimizer's state 'exp_avg' of '[a-z.]+': it is sharded otherwise"):
        optimizer.load_state_dict(theirs)
    with pytest.raises(RuntimeError, match=r"full_tensor\(\): it was unpickled, and this rank has only a part of it"):
        next(v for v in theirs["state"][0].values() if isinstance(v, ShardedValue)).full_tensor()
    late, late_optimizer = build(ctx, 0)
    late_optimizer.load_state_dict(theirs)
    with pytest.raises(ValueError, match=r"the optimizer's state 'exp_avg' of '[a-z.]+': it is sharded otherwise"):
        step(late, late_optimizer)
    late, late_optimizer = build(ctx, 0)  # whole state, by number, before any step
    late.load_state_dict(expected[0])
    names = [n for g in expected[1]["param_groups"] for n in g["params"]]
    late_optimizer.load_state_dict(flatshard.checkpoint.rekey(continued[1], names, to="ids"))
    step(late, late_optimizer)
    check(late, late_optimizer, whole(other, other_optimizer))


@ranks(2)
def test_optimizers_that_have_loaded_and_flat_parameters(ctx) -> None:
    """An optimizer that has loaded and not stepped is known to the helpers; flat parameters' state is marked, too."""
    model, optimizer = build(ctx, 0)
    step(model, optimizer)
    expected = whole(model, optimizer)
    fresh, fresh_optimizer = build(ctx, 1)
    load_optim_state_dict(fresh, fresh_optimizer, expected[1])
    same(get_optimizer_state_dict(fresh, fresh_optimizer, options=WHOLE), expected[1])
    flat = fully_shard(net(0), policy={nn.Linear}, process_group=ctx.group)
    flat_optimizer = torch.optim.AdamW(flatshard.flat_parameters(flat), lr=1e-2)
    with pytest.raises(RuntimeError, match=r"knows no flat parameters .*: call flatshard.checkpoint.optim_state_dict"):
        get_optimizer_state_dict(flat, flat_optimizer)
    step(flat, flat_optimizer)
    values = [v for s in flat_optimizer.state_dict()["state"].values() for k, v in s.items() if k != "step"]
    assert all(isinstance(v, ShardedValue) for v in values)
    before = optim_state_dict(flat, flat_optimizer, full=True)
    flat_optimizer.load_state_dict(pickle.loads(pickle.dumps(flat_optimizer.state_dict())))
    same(optim_state_dict(flat, flat_optimizer, full=True), before)


@ranks(2)
def test_an_optimizer_that_gets_sharded_parameters_later(ctx) -> None:
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
    expected = optim_state_dict(model, optimizer, full=True)
    whole_state = get_optimizer_state_dict(model, optimizer)
    whole_state["state"] = {**copy.deepcopy(expected)["state"]}
    set_optimizer_state_dict(model, optimizer, whole_state)
    same(optim_state_dict(model, optimizer, full=True), expected)
