"""Parity with single-process training, the main reference of these tests.

A sharded model, trained by W ranks on equal slices of a batch, must agree with plain PyTorch on the full batch in one
process. Every rank runs both. The reference needs no communication, so any difference is caused by sharding.

**Tolerances.** The two runs add the same numbers in different orders, so they differ by rounding. AdamW can amplify
rounding to any size, as it divides each gradient by its own magnitude. If a gradient cancels to nearly zero (a bias before
a LayerNorm), rounding decides the direction of a step of a full learning rate. A tolerance that is wide enough for that in
float32 would hide real mistakes. Hence:

- Models and inputs are cast to float64 by default. Rounding is then 1e-16, far below AdamW's ``eps`` of 1e-8. So the
  relative tolerance can be 1e-9, a thousand times stricter than the documented 1e-6, without flaky tests.
- In float32, use ``oracle="slices"``: the reference then runs forward and backward for each rank's slice in turn, as the
  ranks do. Only the sum over ranks is then rounded differently. Also give AdamW an ``eps`` that is not small relative
  to the gradients (:func:`adamw_float32`). Then 1e-6 holds.
- Errors are relative to the largest magnitude in the tensor, but at least to :data:`FLOOR` times the largest in the model.
  A tensor of rounding errors only (such as that bias's gradient) has no scale of its own.
"""

import copy
import ctypes
import dataclasses
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatshard import ShardingStrategy, fully_shard, summon_full_params

FLOOR = 1e-2
BATCH_PER_RANK = 2

Optimizer = torch.optim.Optimizer


def adamw(params: Iterable[Tensor], eps: float = 1e-8) -> Optimizer:
    """AdamW with weight decay, which reveals a step on a parameter that should have had none."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, eps=eps)


def adamw_float32(params: Iterable[Tensor]) -> Optimizer:
    """AdamW whose ``eps`` is far above float32's rounding of gradients."""
    return adamw(params, eps=1e-3)


def default_shard(module: nn.Module, group: Any) -> nn.Module:
    """Shard the root as a single unit."""
    return fully_shard(module, process_group=group)


def mean_square(output: Any, inputs: Any) -> Tensor:
    """Return a loss that reaches every floating-point tensor of an output of any structure."""
    terms = [t.double().square().mean() for t in pytree.tree_leaves(output) if _is_float(t) and t.numel()]
    assert terms, "the model's output holds no floating-point tensor"
    return torch.stack(terms).mean()


def check_parity(
    ctx: Any,
    make_model: Callable[[], nn.Module],
    make_input: Callable[[int, int], Any],
    *,
    steps: int = 10,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = adamw,
    shard: Callable[[nn.Module, Any], nn.Module | None] = default_shard,
    loss_fn: Callable[[Any, Any], Tensor] = mean_square,
    rtol: float | None = None,
    dtype: torch.dtype | None = torch.float64,
    oracle: str = "batch",
    train: Callable[[nn.Module, Any, float], Tensor] | None = None,
    replicated: bool | None = None,
    clip: Callable[[nn.Module], Tensor] | None = None,
) -> "ParityRun":
    """Train a model twice, plain and sharded, and assert that losses, gradients, parameters and buffers agree.

    :param make_model: builds the model from torch's global RNG (and no other), so that two calls give the same one.
    :param make_input: ``make_input(step, n)`` makes a global batch of ``n`` from the global RNG: any structure of
        tensors whose dimension 0 is the batch. Each rank trains on an equal slice of it.
    :param shard: ``shard(model, group)`` shards in place; it may return the model, which must be the same object.
    :param loss_fn: ``loss_fn(output, inputs)``, a mean over the batch: the mean over slices must be the mean of means.
    :param rtol: relative tolerance, see :data:`FLOOR`; by default 1e-9 if all floating-point parameters are float64,
        1e-6 otherwise.
    :param dtype: the dtype to cast the model and the inputs to; None leaves a mixed model as it is.
    :param oracle: ``"batch"`` trains the reference on the full batch, ``"slices"`` on the mean of the slices' losses.
    :param train: ``train(model, inputs, scale)`` runs forward, loss and the backward of ``scale * loss``, and returns the
        loss, for steps other than ``loss_fn(model(inputs), inputs).backward()``.
    :param replicated: whether every rank must hold full parameters (NO_SHARD); None accepts either.
    :param clip: clips the gradients of either model, and returns their norm.
    """

    def train_simply(model: nn.Module, inputs: Any, scale: float) -> Tensor:
        loss = loss_fn(model(inputs), inputs)
        (loss * scale).backward()
        return loss.detach()

    train = train or train_simply
    reference, sharded = (_build(make_model, dtype) for _ in range(2))
    start = _values(reference)
    assert all(_same_bits(t, start[n]) for n, t in _values(sharded).items()), (
        "make_model must use torch's global RNG only"
    )
    if rtol is None:
        rtol = 1e-9 if {p.dtype for p in reference.parameters() if _is_float(p)} <= {torch.float64} else 1e-6

    originals = dict(sharded.named_parameters())
    result = shard(sharded, ctx.group)
    assert result is None or result is sharded, "sharding must return the same object"
    optimizers = [optimizer(model.parameters()) for model in (reference, sharded)]
    copies = (1, ctx.world_size) if replicated is None else (ctx.world_size if replicated else 1,)
    run = ParityRun(ctx, reference, sharded, rtol, copies)
    run.check_registration(originals)

    stepped: set[str] = set()
    losses_of_steps: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        batch = make_input(step, BATCH_PER_RANK * ctx.world_size)
        if dtype is not None:
            batch = pytree.tree_map(lambda t: t.to(dtype) if _is_float(t) else t, batch)
        slices = [_slice(batch, rank) for rank in range(ctx.world_size)]
        for each in optimizers:
            each.zero_grad()
        given = [batch] if oracle == "batch" else slices
        losses = [train(reference, part, 1 / len(given)).double() for part in given]
        losses_of_steps.append((train(sharded, slices[ctx.rank], 1.0).double(), torch.stack(losses).mean()))
        expected = {name: p.grad for name, p in reference.named_parameters()}
        got = [name for name, p in sharded.named_parameters() if p.grad is not None]
        wrong = [name for name in got if expected[name] is None]  # with zeros an optimizer would decay the parameter
        assert not wrong, f"step {step}: gradients where the reference has None: {wrong}"
        if step == 0:
            _assert_close(whole_gradients(sharded), expected, rtol, "gradients")
        stepped |= {name for name, grad in expected.items() if grad is not None}
        if clip:
            norms = ({"norm": clip(model).double()} for model in (sharded, reference))
            _assert_close(*norms, rtol, f"step {step}: norms")
        for each in optimizers:
            each.step()

    means = torch.stack([loss for loss, _ in losses_of_steps]) / ctx.world_size
    dist.all_reduce(means, group=ctx.group)  # all at once, as small collectives take most of the time
    for step, (_, expected_loss) in enumerate(losses_of_steps):
        _assert_close({"loss": means[step]}, {"loss": expected_loss}, rtol, f"step {step}: losses")
    run.check_registration(originals)
    run.check_values(start, stepped)
    return run


@dataclasses.dataclass
class ParityRun:
    """Both models during or after a parity check, and comparisons between them. All of these are collective."""

    ctx: Any
    reference: nn.Module
    sharded: nn.Module
    rtol: float
    copies: tuple[int, ...]
    """Number of ranks that may hold an element of a parameter."""

    def check_registration(self, originals: dict[str, nn.Parameter]) -> None:
        """Check that names and parameter objects are unchanged, and that no rank's slice is lost or doubled."""
        now, reference = dict(self.sharded.named_parameters()), dict(self.reference.named_parameters())
        assert list(now) == list(reference)
        assert [n for n, _ in self.sharded.named_modules()] == [n for n, _ in self.reference.named_modules()]
        now = {n: p for n, p in now.items() if not _is_subclass(originals[n])}  # sharding makes new objects of these
        changed = [name for name, p in now.items() if p is not originals[name]]
        assert not changed, f"parameter objects were replaced: {changed}"
        of = {name: (p.dtype, p.requires_grad) for name, p in now.items()}
        wrong = {n: found for n, found in of.items() if found != (reference[n].dtype, reference[n].requires_grad)}
        assert not wrong, f"dtype or requires_grad changed: {wrong}"
        held = torch.tensor([p.numel() for p in now.values()])
        dist.all_reduce(held, group=self.ctx.group)
        numels = {name: (n, reference[name].numel()) for name, n in zip(now, held.tolist(), strict=True)}
        wrong = {name: both for name, both in numels.items() if both[0] not in [both[1] * k for k in self.copies]}
        assert not wrong, f"elements over all ranks, and in the original: {wrong}"

    def check_values(self, start: dict[str, Tensor], stepped: set[str]) -> None:
        """Check full parameters' shapes, dtypes, strides and values; unchanged ones must have the same bits."""
        full = full_params(self.sharded)
        expected = {name: _clone(p) if _is_subclass(p) else p.detach() for name, p in self.reference.named_parameters()}
        _assert_close(full, expected, self.rtol, "parameters", strides=True)
        buffers = dict(self.reference.named_buffers())
        still = [n for n in start if (n not in stepped if n in full else _same_bits(buffers[n], start[n]))]
        now = full | dict(self.sharded.named_buffers())
        assert list(now) == list(start)
        changed = [name for name in still if not _same_bits(now[name], start[name])]
        assert not changed, f"parameters without a gradient, or buffers, changed: {changed}"


def full_params(sharded: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters in their original shapes. Collective."""
    with summon_full_params(sharded, writeback=False):
        return {name: _clone(p) for name, p in sharded.named_parameters()}


def whole_gradients(sharded: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of all gradients in their original shapes. Collective."""
    with summon_full_params(sharded, writeback=False, with_grads=True):
        return {name: None if p.grad is None else p.grad.clone() for name, p in sharded.named_parameters()}


def _values(module: nn.Module) -> dict[str, Tensor]:
    return {name: _clone(t) for name, t in (*module.named_parameters(), *module.named_buffers())}


def _is_subclass(t: Tensor) -> bool:
    return hasattr(type(t), "__tensor_flatten__")


def _clone(t: Tensor) -> Tensor:
    return t.detach() * 1 if _is_subclass(t) else t.detach().clone()  # plain; a clone keeps strides


def _build(make_model: Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    torch.manual_seed(0)
    model = make_model()
    return model if dtype is None else model.to(dtype)


def _slice(batch: Any, rank: int) -> Any:
    size = BATCH_PER_RANK
    return pytree.tree_map(lambda t: t[rank * size : (rank + 1) * size] if isinstance(t, Tensor) else t, batch)


def _is_float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _max(t: Tensor) -> float:
    return t.detach().abs().max().item() if t.numel() else 0.0


def _assert_close(
    got: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float, what: str, strides: bool = False
) -> None:
    """Compare all tensors of two models, relative to the largest magnitudes; report all that differ, not only the first."""
    assert list(got) == list(expected)
    largest = max((_max(t) for t in expected.values() if _is_float(t)), default=0.0)
    wrong = []
    for name, e in expected.items():
        g = got[name]
        if e is None or g is None:
            wrong += [f"{name}: None in one model only"] if (e is None) != (g is None) else []
            continue
        if e.is_complex() and g.is_complex():
            g, e = torch.view_as_real(g), torch.view_as_real(e)
        if (g.shape, g.dtype) != (e.shape, e.dtype):
            wrong.append(f"{name}: {tuple(g.shape)} {g.dtype}, expected {tuple(e.shape)} {e.dtype}")
        elif strides and g.stride() != e.stride() and g.numel() > 1:
            wrong.append(f"{name}: strides {g.stride()}, expected {e.stride()}")
        elif not _is_float(e):
            wrong += [] if torch.equal(g, e) else [f"{name}: {g.flatten()[:4]}..., expected {e.flatten()[:4]}..."]
        elif e.numel():
            error = _max(g.double() - e.double()) / (max(_max(e), FLOOR * largest) or 1.0)
            if not error <= rtol:  # also catches NaN
                index = (g.double() - e.double()).abs().flatten().nan_to_num(torch.inf).argmax().item()
                values = f"{g.flatten()[index].item():.9g} instead of {e.flatten()[index].item():.9g}"
                wrong.append(f"{name} {tuple(e.shape)}: {error:.2g} relative, element {index} is {values}")
    assert not wrong, f"{what} differ (tolerance {rtol:g}):\n  " + "\n  ".join(wrong)


def everybody(ctx, value: object) -> list[Any]:
    """Return every rank's ``value``, which must pickle. ``all_gather_object`` would need numpy."""
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(ctx.world_size)]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group=ctx.group)
    rows = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
    padded = torch.zeros_like(rows[0])
    padded[: mine.numel()] = mine
    dist.all_gather(rows, padded, group=ctx.group)
    return [pickle.loads(ctypes.string_at(row.data_ptr(), int(n))) for row, n in zip(rows, sizes, strict=True)]


def shard_with(policy: Any, strategy: ShardingStrategy, model: nn.Module, group: Any) -> nn.Module:
    return fully_shard(model, policy=policy, strategy=strategy, process_group=group)


def check_same_gradients(sharded: nn.Module, plain: nn.Module, rtol: float = 1e-9) -> None:
    """Compare the gradients of a sharded and a plain model; None must match None."""
    expected = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(whole_gradients(sharded), expected, rtol=rtol, atol=rtol / 1e3)


def check_same_params(sharded: nn.Module, plain: nn.Module, rtol: float = 1e-9) -> None:
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    torch.testing.assert_close(full_params(sharded), expected, rtol=rtol, atol=rtol / 1e3)


def twins(
    ctx: Any, make: Callable[[], nn.Module], policy: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and a sharded copy, for steps that :func:`check_parity` does not make."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    where = {} if "device_mesh" in options else {"process_group": ctx.group}
    return plain, fully_shard(copy.deepcopy(plain), policy=policy, **(where | options))


def by_pointer(param: Tensor) -> Tensor:
    """Return the memory of ``param``. Writes to it bump no version, like writes of an optimizer in C++."""
    return torch.from_dlpack(param.detach()) if param.numel() else param.detach().clone()


def step_all(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def parts(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batches of :func:`twins`: the full one, and this rank's slice."""
    return x, x.chunk(ctx.world_size)[ctx.rank]
