"""``torch.distributed.checkpoint.state_dict`` on sharded models: right values, or an error that names the call to use."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import layers, make, on_four, same, same_tensors, shard, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._base import torch_versions
from flatshard.checkpoint import (
    ShardedValue,
    _barrier,
    full_state_dict,
    load_optim_state_dict,
    optim_state_dict,
    rekey_optim_state_dict,
)

Optimizer = torch.optim.Optimizer


def build(ctx, seed: int) -> tuple[nn.Module, Optimizer]:
    model = fully_shard(layers(seed), policy={nn.Linear}, process_group=ctx.group)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def check(model: nn.Module, optimizer: Optimizer, expected: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    same_tensors(full_state_dict(model), expected[0])
    same(optim_state_dict(model, optimizer, full=True), expected[1])


def whole(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return full_state_dict(model), optim_state_dict(model, optimizer, full=True)


@ranks(4)
def test_loading_whole_state(ctx) -> None:
    """``broadcast_from_rank0`` needs all ranks of the world."""
    model, optimizer = build(ctx, 0)
    train(model, optimizer)
    expected = whole(model, optimizer)
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        state, optim = copy.deepcopy(expected)
        if broadcast and ctx.rank:
            state, optim = {}, {}
        other, other_optimizer = build(ctx, 1)
        set_model_state_dict(other, state, options=options)
        set_optimizer_state_dict(other, other_optimizer, optim, options=options)
        check(other, other_optimizer, expected)


WHOLE, WHOLE_ON_FIRST = (StateDictOptions(full_state_dict=True, cpu_offload=on_first) for on_first in (False, True))


def check_whole(model: nn.Module, source: dict[str, Tensor], trained: dict[str, Any]) -> None:
    """Assert that torch's helpers return the plain model's results for a sharded model with these values."""
    model.load_state_dict(source)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    load_optim_state_dict(model, optimizer, trained)
    for options in (WHOLE, WHOLE_ON_FIRST):
        receives = options is WHOLE or dist.get_rank() == 0
        state = get_model_state_dict(model, options=options)
        same_tensors(state, source if receives else {})
        found = get_optimizer_state_dict(model, optimizer, options=options)
        same(found, trained) if receives else None
        assert bool(found) == receives
        if receives and "head.weight" in state:  # tied: one tensor
            assert state["head.weight"].data_ptr() == state["down.weight"].data_ptr()
    sharded = {n: v for n, v in model.state_dict().items() if isinstance(v, ShardedValue)}
    keeps_strides = torch_versions.VERSION >= (2, 12)  # `full_tensor` of a DTensor
    full = {n: v.full_tensor() for n, v in sharded.items()}
    same_tensors(full, {n: source[n] for n in sharded}, strides=keeps_strides)
    same_tensors({n: (v * 2).full_tensor() for n, v in sharded.items()}, {n: source[n] * 2 for n in sharded})
    for name, values in optim_state_dict(model, optimizer)["state"].items():
        for key, value in values.items():
            if isinstance(value, ShardedValue):
                assert torch.equal(value.full_tensor(), trained["state"][name][key]), (name, key)


def trained(plain: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the helpers' results for the model after training."""
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    train(plain, reference)
    return get_model_state_dict(plain), get_optimizer_state_dict(plain, reference)


@ranks(4)
def test_getting_whole_state(ctx) -> None:
    """Uneven, tied, unused, frozen and empty parameters, of several dtypes and strides; buffers; tensor parallelism."""
    expected = trained(make())
    assert not expected[1]["state"].keys() & {"empty", "frozen"}  # unused; not trained
    for strategy, policy in ((ShardingStrategy.FULL_SHARD, {nn.Linear}), (ShardingStrategy.NO_SHARD, None)):
        ctx.note(strategy.name)
        model = nn.Sequential()  # the helpers' module may contain the sharded one
        model.inner = shard(ctx, make(1), strategy, policy)
        check_whole(model.inner, *expected)
        same_tensors(get_model_state_dict(model, options=WHOLE), {f"inner.{n}": v for n, v in expected[0].items()})
    expected = trained(layers())
    for how, strategy in (("tp", "FULL_SHARD"), ("tp", "NO_SHARD"), ("replicas", "HYBRID_SHARD")):
        check_whole(on_four(ctx, how, 1, ShardingStrategy[strategy]), *expected)


@ranks(3)
def test_one_rank_alone(ctx) -> None:
    """A rank that calls alone gets an error that names the others; afterwards all can call together."""
    model, optimizer = build(ctx, 0)
    train(model, optimizer)
    value = model.state_dict()["0.weight"]
    calls = {
        r"get_model_state_dict\(full_state_dict=True\)": lambda: get_model_state_dict(model, options=WHOLE),
        r"optim_state_dict\(full=True\)": lambda: get_optimizer_state_dict(model, optimizer, options=WHOLE_ON_FIRST),
        r"full_state_dict": lambda: full_state_dict(model),
        r"iter_full_params": lambda: list(flatshard.checkpoint.iter_full_params(model)),
        r"full_tensor of '0.weight'": value.full_tensor,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_barrier, "GIVE_UP_AFTER", 0.05)
        patch.setattr(_barrier, "_GRACE", 0.05)
        for text, call in calls.items():
            if ctx.rank == 1:
                with pytest.raises(RuntimeError, match=f"^{text}: rank 0, rank 2: did not come within 0.05 s"):
                    call()
        dist.barrier(ctx.group)
    for call in (*calls.values(), *calls.values()):
        call()


@ranks(1, 2)
def test_what_an_optimizer_hands_out(ctx, path: str) -> None:
    """``optimizer.state_dict()`` marks its values as shards, for torch.distributed.checkpoint and for files."""
    model, optimizer = build(ctx, 0)
    train(model, optimizer)
    expected = whole(model, optimizer)
    own, names = optimizer.state_dict(), [n for g in expected[1]["param_groups"] for n in g["params"]]
    sharded = ctx.world_size > 1
    assert any(isinstance(v, ShardedValue) for s in own["state"].values() for v in s.values()) == sharded
    optimizer.load_state_dict(copy.deepcopy(own))
    check(model, optimizer, expected)
    dcp.save({"optim": optimizer}, checkpoint_id=f"{path}/dcp", process_group=ctx.group)
    torch.save(own, f"{path}/{ctx.rank}.pt")
    dist.barrier(ctx.group)
    mine = torch.load(f"{path}/{ctx.rank}.pt", weights_only=True)
    by_number = rekey_optim_state_dict(copy.deepcopy(expected[1]), names, to="ids")
    after = []
    for load, steps in (
        (lambda o: dcp.load({"optim": o}, checkpoint_id=f"{path}/dcp", process_group=ctx.group), 2),
        (lambda o: o.load_state_dict(copy.deepcopy(mine)), 2),
        (lambda o: o.load_state_dict(mine), 0),  # before any step
        (lambda o: o.load_state_dict(by_number), 0),  # full values
    ):
        other, other_optimizer = build(ctx, 1)
        for _ in range(steps):
            train(other, other_optimizer)
        other.load_state_dict(model.state_dict())
        load(other_optimizer)
        check(other, other_optimizer, expected)
        train(other, other_optimizer)
        after.append(whole(other, other_optimizer))
        check(other, other_optimizer, after[0])
    if sharded:
        theirs = torch.load(f"{path}/{1 - ctx.rank}.pt", weights_only=True)
        late, late_optimizer = build(ctx, 0)
        late_optimizer.load_state_dict(theirs)
        for refused in (lambda: optimizer.load_state_dict(theirs), lambda: train(late, late_optimizer)):
            with pytest.raises(ValueError, match=r"'exp_avg' of '[0-9a-z.]+': it is sharded otherwise"):
                refused()


@ranks(2)
def test_optimizers_that_have_loaded_and_flat_parameters(ctx) -> None:
    """An optimizer that loaded without a step is known to the helpers; flat parameters' state is marked, too."""
    model, optimizer = build(ctx, 0)
    train(model, optimizer)
    expected = whole(model, optimizer)[1]
    fresh, fresh_optimizer = build(ctx, 1)
    load_optim_state_dict(fresh, fresh_optimizer, expected)
    same(get_optimizer_state_dict(fresh, fresh_optimizer, options=WHOLE), expected)
    flat_optimizer = torch.optim.AdamW(flatshard.flat_parameters(fresh), lr=1e-2)
    with pytest.raises(RuntimeError, match=r"knows no flat parameters .*: call flatshard.checkpoint.optim_state_dict"):
        get_optimizer_state_dict(fresh, flat_optimizer)
    train(fresh, flat_optimizer)
    values = [v for s in flat_optimizer.state_dict()["state"].values() for k, v in s.items() if k != "step"]
    assert all(isinstance(v, ShardedValue) for v in values)
    before = optim_state_dict(fresh, flat_optimizer, full=True)
    flat_optimizer.load_state_dict(pickle.loads(pickle.dumps(flat_optimizer.state_dict())))
    same(optim_state_dict(fresh, flat_optimizer, full=True), before)


@ranks(2)
def test_an_optimizer_that_gets_sharded_parameters_later(ctx) -> None:
    """The optimizer steps plain parameters first."""
    fully_shard(nn.Linear(1, 1), process_group=ctx.group)  # optimizers are noticed from here on
    model, plain = nn.Sequential(layers()), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([plain], lr=1e-2)
    plain.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    fully_shard(model[0], policy={nn.Linear}, process_group=ctx.group)
    model.register_parameter("plain", plain)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model[0], optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    averages = {name: values["exp_avg"] for name, values in state["state"].items()}
    assert {n for n, v in averages.items() if isinstance(v, ShardedValue)} == averages.keys() - {"plain"}
    expected = optim_state_dict(model, optimizer, full=True)
    set_optimizer_state_dict(model, optimizer, {**state, "state": copy.deepcopy(expected)["state"]})
    same(optim_state_dict(model, optimizer, full=True), expected)
