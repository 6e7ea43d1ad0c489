"""Optimizers of full parameters have one process's bits for the same gradients, in any layout."""

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz.random_options import layout_named
from on_ranks import ranks
from pairs import all_pairs, some
from parity import whole_gradients
from recording import sent_bytes
from restarts import Clipping, Counting
from saving import CommunicationWatch, by_name, same
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import fully_shard
from flatshard.checkpoint import full_state_dict, load_optim_state_dict, optim_state_dict
from flatshard.layouts import Rows, Whole
from flatshard.optim import WholeParameterOptimizer, check_whole_parameters, segment_reduce

FREE = 1e9
Muon, Optimizer = torch.optim.Muon, torch.optim.Optimizer


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "counting": (Counting, {}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "muon": (Muon, {"lr": 0.05}),
}


def make(matrices_only: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(9, 14, bias=not matrices_only), nn.Tanh(), nn.Linear(14, 5, bias=not matrices_only)]
    layers += [nn.Linear(5, 11, bias=not matrices_only), nn.Tanh(), nn.Linear(11, 3, bias=False)]
    layers[2].weight = nn.Parameter(layers[2].weight.detach().t().contiguous().t())  # columns are contiguous
    model = nn.Sequential(*layers)
    if not matrices_only:
        model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))  # unused, so without a gradient
    return model


def backward(ctx, model: nn.Module, reference: nn.Module, step: int) -> None:
    """Run the sharded model's backward, and give its full gradients to the reference."""
    torch.manual_seed(100 * step + ctx.rank)
    model(torch.randn(4, 9, dtype=next(model.parameters()).dtype)).square().mean().backward()
    for p, grad in zip(reference.parameters(), whole_gradients(model).values(), strict=True):
        p.grad = grad


def train(ctx, ours: tuple[nn.Module, Optimizer], theirs: tuple[nn.Module, Optimizer], step: int) -> None:
    backward(ctx, ours[0], theirs[0], step)
    for _, optimizer in (theirs, ours):
        optimizer.step()
    ours[1].zero_grad()
    equal(ours[0], theirs[0])


def total(ctx, here: int) -> int:
    """Return the sum over all ranks."""
    found = torch.tensor([here])
    torch.distributed.all_reduce(found, group=ctx.group)
    return int(found)


def equal(model: nn.Module, reference: nn.Module) -> None:
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, reference.state_dict()[name]), name


CASES = [
    (*case, 300, "FULL_SHARD")
    for case in some(all_pairs(list(KINDS), ["", "rows", "blocks", "whole", "mixed"], (1, 2, 3, 4)), 10)
]
CASES += [("counting", "mixed", world_size, limit, "FULL_SHARD") for world_size, limit in ((2, 300), (3, 1))]
CASES += [("adafactor", "", 4, 1, "FULL_SHARD"), ("adafactor", "", 2, 1, "NO_SHARD")]
CASES += [("adafactor", "", 4, 300, "HYBRID_SHARD"), ("adafactor", "", 3, 300, "beside")]
CASES += [("muon", "whole", 3, None, "FULL_SHARD")]  # Muon itself


@pytest.mark.parametrize(("kind", "layout", "world_size", "limit", "strategy"), CASES)
@ranks()
def test_as_one_process_bit_for_bit(ctx, kind: str, layout: str, limit: int | None, strategy: str) -> None:
    """Batches have any size, and each state is on one rank."""
    cls, options = KINDS[kind]
    reference, where = make(kind == "muon"), {"process_group": ctx.group}
    if strategy == "HYBRID_SHARD":
        where = {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}
    where |= {"policy": {nn.Linear} if ctx.world_size % 2 else None, "layout": layout_named(layout or None)}
    model = copy.deepcopy(reference)
    if strategy == "beside":  # an unsharded unit, whose work is balanced with the other's
        fully_shard(model[0], strategy="NO_SHARD", process_group=ctx.group)
    fully_shard(model, strategy="FULL_SHARD" if strategy == "beside" else strategy, **where)
    ref_optimizer = cls(reference.parameters(), **options)
    by_whole = functools.partial(WholeParameterOptimizer, optimizer_class=cls, bucket_bytes=limit)
    optimizer = (by_whole if limit else cls)(model.parameters(), **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, ref_optimizer)]
    for step in range(3):
        train(ctx, (model, optimizer), (reference, ref_optimizer), step)
        for each in schedulers:
            each.step()
    expected = by_name(reference, ref_optimizer)
    same(optim_state_dict(model, optimizer, full=True), expected)
    if strategy == "FULL_SHARD" and limit:
        assert total(ctx, len(optimizer.state)) == len(expected["state"])


@ranks(2)
def test_what_travels(ctx) -> None:
    """Parameters on one rank send nothing. Of the others, two shards are sent to the owner and one back."""
    whole = functools.partial(WholeParameterOptimizer, optimizer_class=torch.optim.Adafactor)
    for layout, kind in ((Whole(FREE), whole), (Whole(FREE), Muon), (None, whole)):
        model = fully_shard(make(True), process_group=ctx.group, layout=layout)
        optimizer = kind(model.parameters())
        model(torch.ones(1, 9)).sum().backward()
        with sent_bytes() as sent, CommunicationWatch() as watch:
            optimizer.step()
        if layout is not None:
            assert watch.seen == []
            continue
        cut = [p for p in model.parameters() if flatshard.tensors.shard_info(p).owner is None]
        away = sum(flatshard.full_shape(p).numel() * p.element_size() for p in cut)
        away -= total(ctx, sum(p.nbytes for p in cut if ctx.rank == optimizer.owner(p)))
        assert total(ctx, sum(sent)) == 3 * away > 0


@ranks(2)
def test_options_that_count_steps(ctx) -> None:
    """Options count each step once, however many batches it has and whoever reads its state."""
    model = fully_shard(make(False), process_group=ctx.group)
    optimizer = WholeParameterOptimizer(model.parameters(), Counting, bucket_bytes=1)
    (group,) = optimizer.param_groups
    for steps in range(1, 4):
        optim_state_dict(model, optimizer, for_load=True)
        assert group.get("step", 0) == steps - 1
        model(torch.ones(1, 9)).sum().backward()
        optimizer.step()
        assert group["step"] == group["history"]["scale"].max() == steps


class Watched(torch.optim.Adafactor):
    """An optimizer that calls back before each step."""

    watch: Callable[[], Any] = staticmethod(bool)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        type(self).watch()
        return super().step(closure)


@ranks(3)
def test_what_is_held_is_bounded(ctx) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 17, bias=False) if i % 2 else nn.Linear(17, 16, bias=False) for i in range(12)]
    model = nn.Sequential(*layers)
    for layer in (*layers, model):  # a unit for each, so that each is cut
        fully_shard(layer, process_group=ctx.group)
    for limit, count in ((5000, 2), (1, 1), (10**6, 4)):
        optimizer = WholeParameterOptimizer(model.parameters(), Watched, bucket_bytes=limit)
        owned = list(optimizer._owned.values())
        assert all(o.is_cut for o in owned)
        assert sum(o.is_mine for o in owned) == 4  # balanced
        held: list[int] = []
        Watched.watch = lambda owned=owned, held=held: held.append(sum(o._whole is not None for o in owned))
        model(torch.randn(3, 17)).sum().backward()
        optimizer.step()
        assert max(held) == min(3 * count, 4), (limit, held)
        assert all(o._whole is o._grad is None for o in owned)


@ranks(2)
def test_after_an_error_the_next_step_works(ctx) -> None:
    """If the optimizer raises on all ranks, no communication remains, and the next step works."""
    model = fully_shard(make(True), process_group=ctx.group)
    optimizer = WholeParameterOptimizer(model.parameters(), Watched, bucket_bytes=1)
    model(torch.randn(3, 9)).sum().backward()
    Watched.watch = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all(o._whole is o._grad is None for o in optimizer._owned.values())
    Watched.watch = staticmethod(bool)
    before = full_state_dict(model)
    optimizer.step()
    after = full_state_dict(model)
    assert not any(torch.equal(before[n], after[n]) for n in before)


class Kept(Optimizer):
    """An optimizer with a float32 rate for parameters of any dtype, even after loading, like timm's NovoGrad."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for of_param in self.state.values():
            of_param["rate"] = of_param["rate"].float()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                rate = self.state[p].setdefault("rate", torch.tensor(group["lr"] / 3, dtype=torch.float32))
                p.sub_(p.grad / p.grad.norm() * rate.mul_(0.9))


@ranks(2)
def test_what_the_class_loads_in_a_way_of_its_own(ctx) -> None:
    model = fully_shard(make(True).double(), process_group=ctx.group)
    params = list(model.parameters())
    plain = [nn.Parameter(torch.ones(flatshard.full_shape(p), dtype=p.dtype)) for p in params]
    theirs, ours = Kept(plain), WholeParameterOptimizer(params, Kept)
    for p, q in zip(params, plain, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    theirs.step()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))  # a state of one process
    assert set(ours.state) == {p for p in params if ours.steps_here(p)}
    ours.step()
    theirs.step()
    whole = optim_state_dict(model, ours, full=True)["state"]
    for values, expected in zip(whole.values(), theirs.state.values(), strict=True):
        assert values["rate"].dtype is torch.float32
        assert values["rate"] == expected["rate"]


@ranks(2)
def test_one_checkpoint_for_optimizers_of_parts_and_of_wholes(ctx, path: str) -> None:
    """An optimizer of full parameters and one of shards load each other's checkpoint; a rank's own state loads, too."""
    model = fully_shard(make(True), process_group=ctx.group)
    whole = WholeParameterOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.ones(1, 9)).sum().backward()
    whole.step()
    expected = optim_state_dict(model, whole, full=True)
    dcp.save({"optim": optim_state_dict(model, whole)}, checkpoint_id=path, process_group=ctx.group)
    parts = torch.optim.AdamW(model.parameters())
    state = {"optim": optim_state_dict(model, parts, for_load=True)}
    dcp.load(state, checkpoint_id=path, process_group=ctx.group)
    load_optim_state_dict(model, parts, state["optim"])
    same(optim_state_dict(model, parts, full=True), expected)
    with pytest.raises(ValueError, match="this rank needs the full value, and got its shard"):
        load_optim_state_dict(model, whole, optim_state_dict(model, parts))
    with pytest.raises(NotImplementedError, match="keeps each on one"):
        get_optimizer_state_dict(model, whole)
    whole.load_state_dict(copy.deepcopy(whole.state_dict()))
    same(optim_state_dict(model, whole, full=True), expected)
    one = WholeParameterOptimizer([next(model.parameters())], torch.optim.AdamW)
    one.step()
    stepped = optim_state_dict(model, one, full=True)
    load_optim_state_dict(model, one, optim_state_dict(model, one))  # one rank has the state, and both must meet
    same(optim_state_dict(model, one, full=True), stepped)


@ranks(2)
def test_groups_closures_and_versions(ctx) -> None:
    """They work with a plain parameter in the optimizer."""
    reference = make(True)
    model = fully_shard(copy.deepcopy(reference), process_group=ctx.group)
    alone = [nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    Adafactor = torch.optim.Adafactor

    def build(params: list[nn.Parameter], kind: Callable[..., Optimizer]) -> Optimizer:
        built = kind([{"params": params[:1], "lr": 0.1}, {"params": params[1:2]}], weight_decay=0.1)
        built.add_param_group({"params": params[2:], "lr": 0.3})
        return built

    theirs = build([*reference.parameters(), alone[0]], Adafactor)
    ours = build([*model.parameters(), alone[1]], functools.partial(WholeParameterOptimizer, optimizer_class=Adafactor))
    assert [g["lr"] for g in ours.param_groups] == [0.1, 0.01, 0.3]
    assert ours.param_groups[0]["beta2_decay"] == -0.8
    backward(ctx, model, reference, 0)
    for p in alone:
        p.grad = torch.full((3, 3), 0.5)
    versions = [p._version for p in model.parameters()]
    assert ours.step(lambda: 7) == 7
    theirs.step()
    equal(model, reference)
    assert torch.equal(*alone)
    assert alone[1].grad is not None
    assert all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
    assert "WholeParameterOptimizer of Adafactor (5 parameters, " in repr(ours)


@ranks(2)
def test_what_would_train_something_else_raises(ctx) -> None:
    layouts = {"cut": None, "rows": Rows(max_padding=FREE), "whole": Whole(FREE)}
    model, by_rows, whole = (fully_shard(make(True), process_group=ctx.group, layout=o) for o in layouts.values())
    params, Adafactor = list(model.parameters()), torch.optim.Adafactor
    with flatshard.summon_full_params(model), pytest.raises(ValueError, match="outside of a forward, unshard"):
        WholeParameterOptimizer(list(model.parameters()), Adafactor)
    late = Adafactor([nn.Parameter(torch.ones(2))])
    late.step()
    late.add_param_group({"params": params})
    for optimizer, match in (
        (Adafactor(params), "Adafactor looks at whole parameters, but ranks have parts of '0.weight'"),
        *((late, "Adafactor looks at whole parameters"),) * 2,  # also when it is checked again
        (Muon(by_rows.parameters()), "Muon looks at .* Use flatshard.optim.WholeParameterOptimizer"),
        (Adafactor(whole.parameters()), "Adafactor cannot step parameters without elements"),
    ):
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
    check_whole_parameters([*whole.parameters(), nn.Parameter(torch.ones(2))])
    on_one = fully_shard(make(True), process_group=ctx.group, strategy="NO_SHARD")
    flat = Adafactor(flatshard.flat_parameters(on_one))
    with pytest.raises(
        RuntimeError, match=r"the flat parameter of .* has several in one: build it on model.parameters\(\)"
    ):
        flat.step()
    Adafactor(on_one.parameters()).step()  # the error's cure
    with pytest.raises(ValueError, match=r"not flat_parameters\(\)"):
        WholeParameterOptimizer(flatshard.flat_parameters(whole), Adafactor)


@ranks(2)
def test_what_couples_parameters_raises(ctx) -> None:
    model = fully_shard(make(True), process_group=ctx.group)
    optimizer = WholeParameterOptimizer(model.parameters(), Clipping, lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Clipping steps a parameter differently .* such as '.*weight'"):
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@ranks(4)
def test_tensor_parallel_matrices_are_refused(ctx) -> None:
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, device_mesh=mesh["dp"], layout=Whole(FREE))
    with pytest.raises(NotImplementedError, match=r"'0.weight', which is sharded over a tensor-parallel mesh as well"):
        WholeParameterOptimizer(model.parameters(), torch.optim.Adafactor)
    with pytest.raises(RuntimeError, match=r"no rank has the whole of '0.weight', '0.bias', '1.weight'"):
        check_whole_parameters(model.parameters())
    WholeParameterOptimizer(model[2].parameters(), torch.optim.Adafactor)


# -- segments ----------------------------------------------------------------------------------------------------------


@ranks(3)
def test_segment_reduce(ctx) -> None:
    torch.manual_seed(3)
    values = [torch.randn(5, 7), torch.randn(40), torch.tensor(2.0), torch.empty(0, 3), torch.randn(3, 3)]
    values[1][3] = math.nan
    model: Any = nn.Module()
    model.items, model.forward = nn.ParameterList(v.clone() for v in values), lambda: None
    fully_shard(model, process_group=ctx.group, layout=layout_named("mixed"))
    beside = nn.Parameter(torch.tensor([3.0, 4.0]))
    params, wholes = [*model.parameters(), beside], [*values, beside.detach()]
    parts = [p.detach() for p in params]
    for op, expected in {
        "norm": [w.norm() for w in wholes],
        "sum": [w.sum() for w in wholes],
        "mean": [w.mean() for w in wholes],
        "max": [w.max() if w.numel() else torch.tensor(-torch.inf) for w in wholes],
        "min": [w.min() if w.numel() else torch.tensor(torch.inf) for w in wholes],
    }.items():
        for dtype in (torch.float32, torch.float64):
            found = segment_reduce([p.to(dtype) for p in parts], params, op)
            assert found.dtype is dtype
            torch.testing.assert_close(found.float(), torch.stack(expected), equal_nan=True)
    inf_norm = segment_reduce(parts, params, "norm", ord=math.inf)
    torch.testing.assert_close(inf_norm[0], wholes[0].abs().max())
    assert segment_reduce([], []).shape == (0,)
    other = params[0] if params[0].shape != (5, 7) else params[1]
    with pytest.raises(ValueError, match=r"a tensor of shape \(5, 7\) for 'items.[01]', of which this rank has"):
        segment_reduce([torch.ones(5, 7)], [other])
