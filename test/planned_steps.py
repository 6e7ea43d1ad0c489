"""A step of a plan compared with the numbers that are counted when the same model is built and trained."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Wire, storages
from models import NormBlock as Block
from models import NormNet as Net
from pairs import all_pairs, some
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
from flatshard import MixedPrecision, describe, fully_shard, plan_step
from flatshard._composable import autograd_hooks
from flatshard._composable.find import units_below
from flatshard._handle.unit_gradients import UnitGradients
from flatshard.planning import Memory, _plan

LOW = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)


class Counted(TorchDispatchMode):
    """A mode that records a model's memory, with its optimizer's, at the operation where ``Memory.held`` is highest."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.flats = [(g.flat, g, u) for u in units_below(model) for g in u.handle.gradients.flats]
        self.handles = [u.handle for u in units_below(model)]
        self.optimizer = optimizer
        self.peak = 0
        self.of: Memory | None = None

    def held(self, *more: Tensor) -> Memory:
        shards = storages(b.shard for b, _, _ in self.flats)
        gradients = storages(p.grad for b, _, _ in self.flats for p in b.params if p.grad is not None)
        unsharded = storages(b.unsharded.flat for b, _, _ in self.flats if not b.unsharded.is_alias)
        unsharded |= storages(t for h in self.handles if h.source is not None for t in h.source.kept)
        reducing = [
            t for _, g, _ in self.flats for t in (g.input and g.input.flat, g.reduction and g.reduction._output)
        ]
        reductions = storages(t for t in reducing if t is not None)
        arriving = storages(c.grad for b, _, _ in self.flats for c in b.unsharded.params if c.grad is not None)
        for at in gradients:
            reductions.pop(at, None)
        known = shards | gradients | unsharded | reductions | arriving
        arriving |= {at: n for at, n in storages(more).items() if at not in known}
        states = [] if self.optimizer is None else self.optimizer.state.values()
        state = sum(t.numel() * t.itemsize for s in states for t in s.values() if isinstance(t, Tensor))
        sizes = [sum(d.values()) for d in (shards, gradients, unsharded, reductions, arriving)]
        return Memory(sizes[0], sizes[1], state, sizes[2], sizes[3], sizes[4])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        files = ("gradients.py", "reduction.py", "unsharded.py", "kept_shards.py")
        more = pytree.tree_leaves((args, kwargs, result)) if _caller() in files else []
        self.look(*(t for t in more if isinstance(t, Tensor) and t.dim()))  # in transit: gradients, inner shards
        return result

    def look(self, *more: Tensor) -> None:
        held = self.held(*more)
        if held.held > self.peak:
            self.peak, self.of = held.held, held


def _caller() -> str:
    """Return the file of this package that called an operation."""
    frame = sys._getframe(2)
    packages = ("_handle", "_composable", "features")
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent.name not in packages:
        frame = frame.f_back
    return Path(frame.f_code.co_filename).name


def check(
    world: Callable[[int], None],
    make: Callable[[], nn.Module] = Net,
    size: int | tuple[int, int] = 8,
    policy: Any = Block,
    microbatches: int = 1,
    no_sync: bool = False,
    x: Tensor | None = None,
    freeze: Callable[[nn.Module], None] = lambda model: None,
    example_inputs: Any = None,
    experts: int | None = None,
    **options: Any,
) -> None:
    """Plan, build, train, count and compare: all numbers are equal to the byte.

    Parameters that are called "experts" are sharded over so many ranks: a column of the mesh of all, or of each replica.
    """
    x = torch.ones(2, 3) if x is None else x
    # AdamW needs gradients in the parameters' dtype.
    optimizer_class = torch.optim.SGD if options.get("mixed_precision") is LOW else torch.optim.AdamW
    with torch.device("meta"):
        on_meta = make()
    freeze(on_meta)
    shape = size if isinstance(size, tuple) else (1, size)
    among: dict[str, Any] = {}
    if experts is not None:
        chosen = experts if isinstance(size, int) else (size[0], experts)
        among = {"shard_mesh_fn": lambda fqn, param: chosen if "experts" in fqn else None}
    predicted = plan_step(
        on_meta,
        policy=policy,
        world_size=size,
        optimizer=optimizer_class,
        microbatches=microbatches,
        no_sync=no_sync,
        example_inputs=example_inputs,
        compare=False,
        device="cpu",
        **among,
        **options,
    )
    world(math.prod(size) if isinstance(size, tuple) else size)
    model = make()
    freeze(model)
    mesh = init_device_mesh("cpu", size) if isinstance(size, tuple) else None
    wire = Wire(widens=True)  # as for gloo
    if experts is not None:
        names = ("replicas", "dp", "ep")
        every = init_device_mesh("cpu", (shape[0], experts, shape[1] // experts), mesh_dim_names=names)
        column = every["dp"] if isinstance(size, int) else every["replicas", "dp"]
        among = {"shard_mesh_fn": lambda fqn, param: column if "experts" in fqn else None}
    fully_shard(model, policy=policy, device_mesh=mesh, collectives=wire.factory, **among, **options)
    shown = [
        [(u.fqn, u.module, u.strategy, u.flats) for u in units] for units in (predicted.units, describe(model).units)
    ]
    assert shown[0] == shown[1]
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        for number in range(microbatches):
            with flatshard.no_sync(model) if no_sync and number < microbatches - 1 else torch.enable_grad():
                model(x).sum().backward()

    for _ in range(3):
        step()
        optimizer.step()
        optimizer.zero_grad()
    del wire.sent[:]
    counted = Counted(model, optimizer)
    between = counted.held()

    def look_first(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def look_and_go_on(self: Any, *args: Any) -> Any:
            counted.look()  # autograd has made a gradient without an operation
            return method(self, *args)

        patch.setattr(owner, name, look_and_go_on)

    with pytest.MonkeyPatch.context() as patch, counted:
        for owner, name in (
            (UnitGradients, "receive"),
            (autograd_hooks, "finish_previous"),
            (autograd_hooks, "may_get_more"),  # asked when all gradients of a unit have come
        ):
            look_first(owner, name)
        step()
        counted.look()
    planned = [(c.kind, c.nbytes) for c in predicted.collectives]
    assert wire.sent == planned
    assert between.shards == predicted.between_steps.shards == describe(model).shard_nbytes
    pools = {id(f.ranks.pool): f.ranks.pool for u in units_below(model) for f in u.handle.flats}
    if options.get("static_buffers"):  # allocated once, and kept between steps
        kept = predicted.between_steps.unsharded + predicted.between_steps.reductions
        assert kept == sum(pool.nbytes for pool in pools.values())
        return
    state = predicted.between_steps.optimizer - between.optimizer  # the fullest rank has more than this one
    assert state == 0 if options.get("layout") is None else state >= 0
    grads = sum(u.gradient_nbytes for u in predicted.units) - counted.held().gradients
    assert grads >= 0
    counted.peak += state
    # If this rank has only padding of a unit, it drops the gradient shard at once.
    most = 0 if options.get("layout") is None else grads
    if isinstance(size, tuple) and options["strategy"].joins_axes:  # between the two halves of a reduction
        most = max(f.padded_numel * f.reduce_dtype.itemsize for u in predicted.units for f in u.flats) // size[1]
    assert 0 <= predicted.peak.nbytes - counted.peak <= most, (counted.of, predicted.peak)


def choices(count: int, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return arguments of :func:`check` that cover some pairs of these values."""
    return [dict(zip(values, row, strict=True)) for row in some(all_pairs(*values.values()), count)]


def plan_without_receiving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for ranks that a fake group simulates, which receives nothing."""

    class NotReceiving(_plan.StepOptions):
        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "receives", False)

    monkeypatch.setattr(_plan, "StepOptions", NotReceiving)
