"""``state_dict()`` and ``load_state_dict()`` of sharded models, and what is in the dict."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import ranks
from saving import STRATEGIES, CommunicationWatch, check_equal, make, shard
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint import ShardedValue, _sharded_value, full_state_dict


@ranks(1, 2, 3)
def test_names_shapes_and_memory(ctx) -> None:
    plain = make().state_dict()
    for strategy in STRATEGIES:
        for policy in (None, {nn.Linear}):
            model = shard(ctx, make(), strategy, policy)
            with CommunicationWatch() as watch:
                state = model.state_dict()
            assert watch.seen == []
            assert list(state) == list(plain)
            sharded = ctx.world_size > 1 and strategy is not ShardingStrategy.NO_SHARD
            for name, whole in plain.items():
                value = state[name]
                assert (value.shape, value.dtype, value.requires_grad) == (whole.shape, whole.dtype, False), name
                is_param = name in dict(model.named_parameters(remove_duplicate=False)) and name != "ignored"
                assert type(value) is (ShardedValue if is_param and sharded else Tensor), name
                if type(value) is ShardedValue:
                    param = model.get_parameter(name)
                    assert value.to_local().data_ptr() == param.data_ptr()
                    assert value.to_local().shape == param.shape
                else:
                    assert torch.equal(value, whole)
            assert type(model.state_dict(keep_vars=True)["scale"]) is flatshard.tensors.ShardedParameter
            assert list(model.up.state_dict()) == ["weight", "bias"]
            assert model.up.state_dict(prefix="x.")["x.weight"].shape == (7, 5)
            check_equal(model, plain)


@ranks(1, 2, 3)
def test_loading_whole_and_sharded_values(ctx) -> None:
    for strategy in STRATEGIES:
        for assign in (False, True):
            source = make(1).state_dict()  # anew, as torch's `assign` keeps a plain parameter's tensor
            model = shard(ctx, make(), strategy, {nn.Linear})
            params = dict(model.named_parameters())
            with CommunicationWatch() as watch:
                assert not any(model.load_state_dict(source, assign=assign))
                state = model.state_dict()
            assert watch.seen == []
            check_equal(model, source)
            assert all(p is params[n] or n == "ignored" for n, p in model.named_parameters())
            other = shard(ctx, make(), strategy, {nn.Linear})
            assert not any(other.load_state_dict(state, assign=assign))
            check_equal(other, source)
            other = shard(ctx, make(), strategy, {nn.Linear})
            other.load_state_dict({n: v * 2 if v.is_floating_point() else v for n, v in state.items()})
            check_equal(other, {n: v * 2 if v.is_floating_point() else v for n, v in source.items()})
            other.load_state_dict(model.state_dict(keep_vars=True))
            check_equal(other, source)
            other(torch.ones(3, 5)).sum().backward()
    scaled = {n: v.double() for n, v in source.items()}
    model.load_state_dict(scaled)  # cast, as torch does
    check_equal(model, source)


@ranks(1, 2)
def test_bad_values_change_nothing(ctx) -> None:
    before, source = make().state_dict(), make(1).state_dict()
    model = shard(ctx, make(), policy={nn.Linear})

    def refuse(pattern: str, change: dict, drop: tuple[str, ...] = (), strict: bool = True) -> None:
        bad = {n: v for n, v in {**source, **change}.items() if n not in drop}
        with pytest.raises(RuntimeError, match=pattern):
            model.load_state_dict(bad, strict=strict)
        check_equal(model, before)

    refuse(
        r"nothing has been changed:\n\tMissing key\(s\).*'turned', 'up.weight', 'down.weight'.*\n\tUnexpected.*'x.y', 'z'",
        {"x.y": torch.ones(1), "z": torch.ones(1)},
        ("up.weight", "turned", "down.weight"),
    )
    for strict in (True, False):
        refuse(
            r"up.weight: size mismatch: the checkpoint has shape \(7, 6\), the model has \(7, 5\)\n\tnorm.weight: size",
            {"norm.weight": torch.ones(6), "up.weight": torch.ones(7, 6)},
            strict=strict,
        )
    refuse(
        "short: the checkpoint has torch.complex64, which cannot become torch.bfloat16", {"short": torch.ones(9) * 1j}
    )
    refuse("scale: expected a tensor, got a str", {"scale": "2"})
    if ctx.world_size > 1:
        part = model.up.weight.detach().clone()
        refuse("up.weight: size mismatch.*It has the shape of this rank's part", {"up.weight": part})
        other = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(20, 20)), process_group=ctx.group)
        value = other.state_dict()["0.weight"]
        refuse("up.weight: it is sharded otherwise than the model: ShardedValue", {"up.weight": value})
    kept = {n: v for n, v in source.items() if n != "up.weight"}
    found = model.load_state_dict(kept | {"z": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["up.weight"]
    assert found.unexpected_keys == ["z"]
    check_equal(model, {**source, "up.weight": before["up.weight"]})
    model.up.load_state_dict({"weight": source["up.weight"], "bias": source["up.bias"]})
    check_equal(model, source)


class Translating(nn.Module):
    """Loads a name of old."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module, state_dict, prefix, *args) -> None:
        for name in [n for n in state_dict if n.startswith(f"{prefix}old.")]:
            state_dict[f"{prefix}inner.{name.removeprefix(f'{prefix}old.')}"] = state_dict.pop(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@ranks(2)
def test_modules_that_translate_what_they_load(ctx) -> None:
    model = nn.Sequential(nn.Linear(3, 3), Translating())
    source = {n: torch.randn_like(v) for n, v in model.state_dict().items()}
    torch.manual_seed(0)
    fully_shard(model, policy={nn.Linear}, process_group=ctx.group)
    model.load_state_dict({n.replace("inner", "old"): v for n, v in source.items()})
    check_equal(model, source)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({n.replace("inner", "old"): v[:2] for n, v in source.items()})


@ranks(2, 3)
def test_operations_on_values(ctx) -> None:
    source = make().state_dict()
    model = shard(ctx, make())
    state = model.state_dict()
    average = {n: v.clone() for n, v in state.items()}
    for name, value in average.items():
        if value.is_floating_point():
            value.lerp_(state[name] * 3, 0.5)
    model.load_state_dict(average)
    check_equal(model, {n: v.lerp(v * 3, 0.5) if v.is_floating_point() else v for n, v in source.items()})
    value = state["up.weight"]
    assert value.double().dtype is torch.float64
    assert (value + value).to_local().equal(value.to_local() * 2)
    assert torch.full_like(value, 2.0).to_local().eq(2).all()
    value.copy_(torch.ones(7, 5))
    assert value.to_local().eq(1).all()
    copied = copy.deepcopy(state)
    assert type(copied["up.weight"]) is ShardedValue
    assert copied["up.weight"].to_local().data_ptr() != value.to_local().data_ptr() or not value.to_local().numel()
    for wrong in (
        lambda: value.sum(),
        lambda: value @ value.t(),
        lambda: torch.equal(value, value.clone()),
        lambda: value.tolist(),
    ):
        with pytest.raises(
            (NotImplementedError, RuntimeError), match=r"full_state_dict|not supported for tensor subclasses"
        ):
            wrong()
    with pytest.raises(ValueError, match="one with another layout"):
        value.add(torch.ones(7, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sharded_value, "_warned", [])  # warns once
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = pickle.loads(pickle.dumps(value))
    pattern = r"is pickled .* every rank must save .*flatshard.checkpoint.full_state_dict"
    is_part = value.to_local().numel() < value.numel()
    assert [bool(re.search(pattern, str(w.message))) for w in caught] == [True] * is_part
    assert again.to_local().equal(value.to_local())
    model.load_state_dict({**model.state_dict(), "up.weight": again})
    with pytest.raises(RuntimeError, match=r"was unpickled.*flatshard.checkpoint.full_state_dict\(module\)"):
        again.full_tensor()
    with pytest.raises(RuntimeError, match="full_state_dict"):
        make().load_state_dict(state)
    assert f"elements {value._part.start}:{value._part.stop} here" in repr(value)


@ranks(2, 3)
def test_averages_of_lists(ctx) -> None:
    """As averages of weights do with lists of everything in ``state_dict()``: timm's ModelEmaV3, torch's swa_utils."""
    g = torch.Generator().manual_seed(0)
    plain = make().state_dict().items()
    whole, other = ({n: torch.randn(v.shape, generator=g).to(v.dtype) for n, v in plain} for _ in range(2))
    model, source = shard(ctx, make(), policy={nn.Linear}), shard(ctx, make(), policy={nn.Linear})
    model.load_state_dict(whole)
    source.load_state_dict(other)
    names = [n for n, v in model.state_dict().items() if v.is_floating_point()]

    def apply(mine: list[Tensor], theirs: list[Tensor]) -> None:
        torch._foreach_lerp_(mine, theirs, weight=0.25)
        torch._foreach_mul_(mine, 0.5)
        torch._foreach_add_(mine, theirs, alpha=2)
        torch._foreach_maximum_(mine, [-t for t in theirs])
        torch._foreach_addcmul_(mine, torch._foreach_sub(theirs, 1.0), torch._foreach_abs(theirs), value=0.5)
        torch._foreach_sqrt_(torch._foreach_abs(torch._foreach_clone(mine)))

    state, states = model.state_dict(), source.state_dict()
    with CommunicationWatch() as watch:
        apply([state[n] for n in names], [states[n] for n in names])
    assert watch.seen == []
    models = make(), make()  # with the same tied parameters
    models[0].load_state_dict(whole)
    models[1].load_state_dict(other)
    expected, others = (m.state_dict() for m in models)
    apply([expected[n] for n in names], [others[n] for n in names])
    full = full_state_dict(model)
    for n in names:
        torch.testing.assert_close(full[n], expected[n], msg=lambda m, n=n: f"{n}: {m}")
    mine = [state["up.weight"], state["down.weight"]]
    torch._foreach_copy_(mine, [other["up.weight"], other["down.weight"]])  # each rank takes its part of a whole tensor
    full = full_state_dict(model)
    assert full["up.weight"].equal(other["up.weight"])
    assert full["down.weight"].equal(other["down.weight"])
    torch._foreach_zero_(mine)
    assert all(v.to_local().eq(0).all() for v in mine)
    results = torch._foreach_add(mine, 1.0)
    assert [(type(r), r.shape) for r in results] == [(ShardedValue, v.shape) for v in mine]


@ranks(2, 3)
def test_lists_that_are_refused(ctx) -> None:
    state = shard(ctx, make(), policy={nn.Linear}).state_dict()
    mine, before = [state["up.weight"], state["down.weight"]], state["up.weight"].to_local().clone()
    for function in (torch._foreach_norm, torch._foreach_max):
        with pytest.raises(NotImplementedError, match=r"of the sharded tensor 'up.weight' .*full_state_dict"):
            function(mine)
    for other in (torch.ones(5, 7), state["up.bias"], torch.ones(state["down.weight"].to_local().shape)):
        with pytest.raises(ValueError, match=r"sharded tensor 'down.weight' .*another layout"):
            torch._foreach_add_(mine, [state["up.weight"], other])
    assert state["up.weight"].to_local().equal(before)  # nothing was changed


@ranks(2)
def test_memory_of_values_is_refused_by_name(ctx) -> None:
    """As safetensors and transformers' save_pretrained do: they ask every value for its memory."""
    value = shard(ctx, make(), ShardingStrategy.FULL_SHARD, {nn.Linear}).state_dict()["up.weight"]
    text = r"'up.weight' of shape \(7, 5\).*this rank has only.*full_state_dict\(.*export_safetensors\("
    for name in ("untyped_storage", "storage", "numpy", "__array__", "__dlpack__", "tolist"):
        for tried in (value, value.double(), copy.deepcopy(value)):
            with pytest.raises(RuntimeError, match=text):
                getattr(tried, name)()
    with warnings.catch_warnings(action="ignore"):
        nameless = pickle.loads(pickle.dumps(value))
    with pytest.raises(RuntimeError, match=r"a sharded tensor of shape \(7, 5\)"):
        nameless.untyped_storage()
    with pytest.raises(NotImplementedError, match=r"view.default of the sharded tensor 'up.weight' of shape \(7, 5\)"):
        value.view(-1)


def address(value: Tensor) -> int:
    return (value.to_local() if isinstance(value, ShardedValue) else value).data_ptr()


@ranks(1, 2)
def test_replaced_parameters_and_copies(ctx) -> None:
    """What the user changed by hand is what is saved; a copy has hooks of its own."""
    model = shard(ctx, make(), policy={nn.Linear})
    model.up.weight.data = model.up.weight.data * 2
    model.down.weight = nn.Parameter(model.down.weight.detach() * 3)
    state = model.state_dict()
    assert address(state["up.weight"]) == model.up.weight.data_ptr()
    assert address(state["head.weight"]) == model.head.weight.data_ptr()
    source = make().state_dict()
    source["up.weight"] *= 2
    source["down.weight"] = source["head.weight"] = source["down.weight"] * 3
    check_equal(model, source)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert address(copied.state_dict()["up.weight"]) == copied.up.weight.data_ptr()
    copied.load_state_dict(copied.state_dict())
    check_equal(copied, source)
    model.load_state_dict(copied.state_dict())
    check_equal(model, source)


@ranks(1, 2, 3)
def test_saving_takes_no_collective_on_parameters(ctx, path: str) -> None:
    source = make(1).state_dict()
    model = shard(ctx, make(1), policy={nn.Linear})
    with CommunicationWatch() as watch:
        dcp.save(model.state_dict(), checkpoint_id=f"{path}/a", process_group=ctx.group)
    other = shard(ctx, make(), ShardingStrategy.SHARD_GRAD_OP)
    with watch:
        state = other.state_dict()
        dcp.load(state, checkpoint_id=f"{path}/a", process_group=ctx.group)
    assert watch.data == []
    assert watch.seen or ctx.world_size == 1  # it does see torch's own
    check_equal(other, source)  # in place
    other.load_state_dict(state)
    check_equal(other, source)
    later = dcp.async_save(model.state_dict(), checkpoint_id=f"{path}/b", process_group=ctx.group)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    later.result()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{path}/b", process_group=ctx.group)
    check_equal(model, source)
