"""``state_dict()`` and ``load_state_dict()`` of sharded models, and the values in the dict."""

import copy
import importlib.util
import multiprocessing
import pickle
import re
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from pairs import all_pairs
from saving import STRATEGIES, CommunicationWatch, check_equal, make, on_four, same, shard, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.utils._pytree import tree_map_only

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import ShardedValue, _sharded_value, full_state_dict


@ranks(1, 3)
def test_saved_and_loaded_whole_and_sharded(ctx) -> None:
    for strategy, policy, assign in all_pairs(STRATEGIES, (None, {nn.Linear}), (False, True)):
        ctx.note(f"{strategy} {policy} {assign}")
        source = make(1).state_dict()  # made again, because torch's `assign` keeps a plain parameter's tensor
        model, other, third = (shard(ctx, make(), strategy, policy) for _ in range(3))
        params = dict(model.named_parameters(remove_duplicate=False))
        with CommunicationWatch() as watch:
            assert not any(model.load_state_dict(source, assign=assign))
            state = model.state_dict()
        assert watch.seen == []
        check_equal(model, source)
        assert all(p is params[n] or n == "ignored" for n, p in model.named_parameters())
        assert list(state) == list(source)
        is_cut = ctx.world_size > 1 and strategy is not ShardingStrategy.NO_SHARD
        for name, whole in source.items():
            value = state[name]
            assert (value.shape, value.dtype, value.requires_grad) == (whole.shape, whole.dtype, False), name
            assert type(value) is (ShardedValue if name in params and name != "ignored" and is_cut else Tensor), name
            if type(value) is ShardedValue:
                assert value.to_local().data_ptr() == params[name].data_ptr()
                assert value.to_local().shape == params[name].shape
        assert type(model.state_dict(keep_vars=True)["scale"]) is flatshard.tensors.ShardedParameter
        assert {n: v.shape for n, v in model.up.state_dict(prefix="x.").items()} == {"x.weight": (7, 5), "x.bias": (7,)}
        assert not any(other.load_state_dict(state, assign=assign))
        check_equal(other, source)
        third.load_state_dict(doubled(state))
        check_equal(third, doubled(source))
        third.load_state_dict(model.state_dict(keep_vars=True))
        check_equal(third, source)
        third(torch.ones(3, 5)).sum().backward()
    model.load_state_dict({n: v.double() for n, v in source.items()})  # cast, as in torch
    check_equal(model, source)


def doubled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: v * 2 if v.is_floating_point() else v for n, v in state.items()}


@ranks(2)
def test_bad_values_change_nothing(ctx) -> None:
    before, source = make().state_dict(), make(1).state_dict()
    model = shard(ctx, make(), policy={nn.Linear})
    other = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(20, 20)), process_group=ctx.group)
    fewer = {n: v for n, v in source.items() if n not in ("up.weight", "turned", "down.weight")}
    sizes = r"up.weight: size mismatch: the checkpoint has shape \(7, 6\), the model has \(7, 5\)\n\tnorm.weight: size"
    wrong_sizes = {**source, "norm.weight": torch.ones(6), "up.weight": torch.ones(7, 6)}
    part, value = model.up.weight.detach().clone(), other.state_dict()["0.weight"]
    cases: list[tuple[str, Any]] = [
        (r"Missing key\(s\).*'turned', 'up.weight', 'down.weight'.*\n\tUnexp.*'z'", {**fewer, "z": torch.ones(1)}),
        (sizes, wrong_sizes),
        ("the checkpoint has torch.complex64, which cannot", {**source, "short": torch.ones(9) * 1j}),
        ("scale: expected a tensor, got a str", {**source, "scale": "2"}),
        ("up.weight: size mismatch.*It has the shape of this rank's part", {**source, "up.weight": part}),
        ("up.weight: it is sharded otherwise than the model", {**source, "up.weight": value}),
    ]
    for pattern, bad in cases:
        for strict in (True, False) if bad is wrong_sizes else (True,):
            with pytest.raises(RuntimeError, match=pattern):
                model.load_state_dict(bad, strict=strict)
            check_equal(model, before)
    kept = {n: v for n, v in source.items() if n != "up.weight"}
    found = model.load_state_dict(kept | {"z": torch.ones(1)}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["up.weight"], ["z"])
    check_equal(model, {**source, "up.weight": before["up.weight"]})
    model.up.load_state_dict({"weight": source["up.weight"], "bias": source["up.bias"]})
    check_equal(model, source)


@ranks(4)
def test_whole_values_are_loaded_on_all_ranks_or_on_none(ctx) -> None:
    """Loading raises if a rank has other values, as with ``full_state_dict(rank0_only=True)``. The error's cure works."""
    for how in ("plain", "replicas"):
        ctx.note(how)
        model, other = on_four(ctx, how), on_four(ctx, how, 1)
        before, whole, state = full_state_dict(model), full_state_dict(other), full_state_dict(other, rank0_only=True)
        for given, is_bad in (
            (state, ctx.rank > 0),
            ({**whole, "0.weight": whole["0.weight"][ctx.rank == 3 :]}, ctx.rank == 3),
        ):
            pattern = (
                r"^Error\(s\) .*nothing has been changed" if is_bad else r"^load_state_dict: .*rank \d: Error\(s\)"
            )
            with pytest.raises(RuntimeError, match=pattern) as e:
                model.load_state_dict(given)
            assert given or "set_model_state_dict(model, state, options=StateDictOptions(full_state" in str(e.value)
            check_equal(model, before)
        optimizers = [torch.optim.AdamW(each.parameters()) for each in (other, model)]
        train(other, optimizers[0])
        trained = flatshard.checkpoint.optim_state_dict(other, optimizers[0], full=True, rank0_only=True)
        with pytest.raises(
            ValueError if ctx.rank else RuntimeError, match="takes a dict with 'state' and 'param_groups'"
        ):
            flatshard.checkpoint.load_optim_state_dict(model, optimizers[1], trained)
        assert not optimizers[1].state
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        check_equal(model, whole)


@ranks(2)
def test_what_is_on_meta_has_no_values(ctx, path: str) -> None:
    """Every function that takes or returns values raises for a model on meta, and nothing changes."""
    model = shard(ctx, make(), policy={nn.Linear})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(3, 5)).sum().backward()
    optimizer.step()
    whole, local = full_state_dict(model), flatshard.checkpoint.local_state_dict(model)
    trained = flatshard.checkpoint.optim_state_dict(model, optimizer, full=True)
    before, moments = copy.deepcopy(whole), copy.deepcopy(trained)
    for name in ("up.weight", "steps"):  # sharded; a buffer
        for assign in (False, True):
            with pytest.raises(
                RuntimeError, match=rf"{name}: it is on the meta device, and has no values: read the file"
            ):
                model.load_state_dict({**whole, name: whole[name].to("meta")}, assign=assign)
    trained["state"]["up.bias"]["step"] = torch.ones((), device="meta")
    for load, bad in (
        (lambda state: flatshard.checkpoint.load_optim_state_dict(model, optimizer, state), trained),
        (optimizer.load_state_dict, tree_map_only(Tensor, lambda t: t.to("meta"), optimizer.state_dict())),
        (
            lambda state: flatshard.checkpoint.load_local_state_dict(model, state),
            tree_map_only(Tensor, lambda t: t.to("meta"), local),
        ),
    ):
        with pytest.raises(ValueError, match="on the meta device, and has no values"):
            load(bad)
    job: dict[str, Any] = {"x": torch.ones(3)}
    flatshard.save_checkpoint(path, job, process_group=ctx.group)
    for verb, text in (
        (flatshard.save_checkpoint, "'x' are on the meta device, and have no values to save"),
        (flatshard.load_checkpoint, r"'x' is on the meta device here: give it memory first"),
    ):
        with pytest.raises(RuntimeError, match=text):
            verb(path, {"x": job["x"].to("meta")}, process_group=ctx.group)
    check_equal(model, before)
    same(flatshard.checkpoint.optim_state_dict(model, optimizer, full=True), moments)


def rename(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Rename entries of an old name."""
    for name in [n for n in state_dict if n.startswith(f"{prefix}old.")]:
        state_dict[name.replace("old", "0")] = state_dict.pop(name)


@ranks(2)
def test_modules_that_translate_what_they_load(ctx) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model[1].register_load_state_dict_pre_hook(rename)
    source = {n: torch.randn_like(v) for n, v in model.state_dict().items()}
    torch.manual_seed(0)
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    old = {n.replace("1.0.", "1.old."): v for n, v in source.items()}
    model.load_state_dict(old)
    check_equal(model, source)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({n: v[:2] for n, v in old.items()})


@ranks(3)
def test_operations_on_values(ctx) -> None:
    source, model = make().state_dict(), shard(ctx, make())
    state = model.state_dict()
    average = {n: v.clone() for n, v in state.items()}
    for name, value in average.items():
        if value.is_floating_point():
            value.lerp_(state[name] * 3, 0.5)
    model.load_state_dict(average)
    check_equal(model, doubled(source))
    value = state["up.weight"]
    assert value.double().dtype is torch.float64
    assert (value + value).to_local().equal(value.to_local() * 2)
    assert torch.full_like(value, 2.0).to_local().eq(2).all()
    value.copy_(torch.ones(7, 5))
    assert value.to_local().eq(1).all()
    copied = copy.deepcopy(state)
    assert type(copied["up.weight"]) is ShardedValue
    assert copied["up.weight"].to_local().data_ptr() != value.to_local().data_ptr() or not value.to_local().numel()
    refused = r"full_state_dict|not supported for tensor subclasses"
    for wrong in (lambda: value.sum(), lambda: value @ value.t(), lambda: value.equal(value.clone()), value.tolist):
        with pytest.raises((NotImplementedError, RuntimeError), match=refused):
            wrong()
    with pytest.raises(ValueError, match=r"one with another layout \(a tensor .*call fully_shard on the copy, too"):
        value.add(torch.ones(7, 5))
    with pytest.raises(RuntimeError, match="full_state_dict"):
        make().load_state_dict(state)
    assert f"elements {value.part.start}:{value.part.stop} here" in repr(value)


@ranks(2)
def test_a_pickled_value_is_one_rank_s_part(ctx) -> None:
    model = shard(ctx, make())
    value = model.state_dict()["up.weight"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sharded_value, "_warned", [])  # warns once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pickle.dumps(value)
            again = pickle.loads(pickle.dumps(value))
    pattern = r"is pickled .* every rank must save .*flatshard.checkpoint.full_state_dict"
    is_part = value.to_local().numel() < value.numel()
    assert [bool(re.search(pattern, str(w.message))) for w in caught] == [True] * is_part
    assert again.to_local().equal(value.to_local())
    model.load_state_dict({**model.state_dict(), "up.weight": again})
    with pytest.raises(RuntimeError, match=r"was unpickled.*flatshard.checkpoint.full_state_dict\(module\)"):
        again.full_tensor()
    with pytest.raises(RuntimeError, match=r"a sharded tensor of shape \(7, 5\)"):
        again.untyped_storage()


@ranks(3)
def test_averages_of_lists(ctx) -> None:
    """Average lists of everything in ``state_dict()``, like timm's ModelEmaV3 and torch's swa_utils."""

    def apply(mine: list[Tensor], theirs: list[Tensor]) -> None:
        torch._foreach_lerp_(mine, theirs, weight=0.25)
        torch._foreach_add_(mine, theirs, alpha=2)
        torch._foreach_addcmul_(mine, torch._foreach_sub(theirs, 1.0), torch._foreach_abs(theirs), value=0.5)
        torch._foreach_sqrt_(torch._foreach_abs(torch._foreach_mul(mine, 1.0)))

    models = [shard(ctx, make(seed), policy={nn.Linear}) for seed in range(2)]
    names = [n for n, v in models[0].state_dict().items() if v.is_floating_point()]
    with CommunicationWatch() as watch:
        for pair in (plain := (make(0), make(1)), models):
            apply(*([state[n] for n in names] for state in (m.state_dict() for m in pair)))
    assert watch.seen == []
    found, expected = full_state_dict(models[0]), plain[0].state_dict()
    torch.testing.assert_close({n: found[n] for n in names}, {n: expected[n] for n in names})
    state, other, cut = models[0].state_dict(), plain[1].state_dict(), ("up.weight", "down.weight")
    torch._foreach_copy_([state[n] for n in cut], [other[n] for n in cut])  # each rank copies its shard of full tensors
    found = full_state_dict(models[0])
    assert all(found[n].equal(other[n]) for n in cut)


@ranks(2)
def test_lists_and_memory_are_refused_by_name(ctx) -> None:
    state = shard(ctx, make(), policy={nn.Linear}).state_dict()
    mine, before = [state["up.weight"], state["down.weight"]], state["up.weight"].to_local().clone()
    for function in (torch._foreach_norm, torch._foreach_max):
        with pytest.raises(NotImplementedError, match=r"of the sharded tensor 'up.weight' .*full_state_dict"):
            function(mine)
    for other in (torch.ones(5, 7), state["up.bias"], torch.ones(state["down.weight"].to_local().shape)):
        with pytest.raises(ValueError, match=r"sharded tensor 'down.weight' .*another layout"):
            torch._foreach_add_(mine, [state["up.weight"], other])
    assert state["up.weight"].to_local().equal(before)  # nothing changed
    # safetensors and transformers' save_pretrained ask every value for its memory.
    value = state["up.weight"]
    text = r"'up.weight' of shape \(7, 5\).*this rank has only.*full_state_dict\(.*export_safetensors\("
    for name in ("untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "tolist"):
        for tried in (value, value.double(), copy.deepcopy(value)):
            with pytest.raises(RuntimeError, match=text):
                getattr(tried, name)()
    with pytest.raises(NotImplementedError, match=r"view.default of the sharded tensor 'up.weight' of shape \(7, 5\)"):
        value.view(-1)


@ranks(1, 2, 3)
def test_saving_takes_no_collective_on_parameters(ctx, path: str) -> None:
    source = make(1).state_dict()
    model, other = shard(ctx, make(1), policy={nn.Linear}), shard(ctx, make(), ShardingStrategy.SHARD_GRAD_OP)
    with CommunicationWatch() as watch:
        later = dcp.async_save(model.state_dict(), checkpoint_id=path, process_group=ctx.group)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        later.result()
        for each in (other, model):
            dcp.load(each.state_dict(), checkpoint_id=path, process_group=ctx.group)
    assert watch.data == []
    assert watch.seen or ctx.world_size == 1  # sees torch's own collectives
    for each in (other, model):  # in place
        check_equal(each, source)
        each.load_state_dict(each.state_dict())
        check_equal(each, source)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="gloo sends torch's plans by NumPy")
@pytest.mark.time_limit(240)  # two more processes import torch
@ranks(2, timeout=200)
def test_asynchronous_saves_of_a_process(ctx, path: str) -> None:
    """``dcp.async_save`` in a process of its own: each rank stages and writes its shards, and later changes stay out."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    source = make(1).state_dict()
    model, other = shard(ctx, make(1), policy={nn.Linear}), shard(ctx, make())
    state, by_process = {"model": model.state_dict()}, AsyncCheckpointerType.PROCESS
    me = multiprocessing.current_process()
    with CommunicationWatch() as watch, mock.patch.dict(me._config, daemon=False):  # a daemon may start no process
        later = dcp.async_save(state, checkpoint_id=path, process_group=ctx.group, async_checkpointer_type=by_process)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        later.result()
    assert watch.data == []
    for name, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        written = sum(chunk.sizes.numel() for chunk in entry.chunks)  # and not each shard as the full tensor
        assert written == entry.size.numel(), name
    dcp.load({"model": other.state_dict()}, checkpoint_id=path, process_group=ctx.group)
    check_equal(other, source)
