"""What a fuzz case chooses besides its model and policy, and the oracle of cases that round on the way.

[Note: An oracle that rounds]
With mixed precision or compressed gradients no tolerance is both safe and sharp after a few steps. So the reference does
what the ranks do: for one rank's slice after the other it runs a copy of the model in the compute dtype, sums up a rank's
microbatches in the reduce dtype, rounds what is sent, and averages. What is left is the order of additions, and one
rounding more or less: a few units in the last place of the coarsest dtype, relative to the largest gradient of any rank.
A missing 1/N, a lost microbatch or a swapped parameter is off by tens of percent.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import flatshard
from flatshard import MixedPrecision

HOOKS: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "bf16": (flatshard.comm.bf16_compress_hook, torch.bfloat16),
    "fp16": (flatshard.comm.fp16_compress_hook, torch.float16),
}
LOW = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Options:
    """Plain values, with defaults that choose nothing."""

    backwards: tuple[str, ...] = ("sync", "sync")
    """How each backward of a step that has several treats gradients: ``"sync"`` reduces, ``"hold"`` runs under no_sync,
    ``"flag"`` is the same by configure(gradient_sync=...), ``"partial"`` reduces within the shard group only. The last is
    ``"sync"``."""
    hold_body_only: bool = False
    mesh: tuple[int, int] | None = None
    """(replicate, shard) of a hybrid strategy."""
    unit_strategies: tuple[str, ...] = ()
    """Strategies of the manually nested units, in turn; none: the case's own."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    keep_cast_shard: bool = False
    cast_forward_inputs: bool = False
    output_dtype: torch.dtype | None = None
    """Of the root; where units inside are not made by the same call."""
    ignore_norms: bool = False
    full_precision_in_eval: bool = False
    divide_factor: float | None = None
    hook: str | None = None
    offload: bool = False
    reshard_after_forward: bool | int | None = None
    prefetch_limit_bytes: int | None = None
    layout: str | None = None
    """See :func:`layout_named`."""
    forward_before_step: bool = False
    """Whether the sharded model runs a forward between its last backward and the optimizer's step, for no backward."""
    clip: tuple[str, float] | None = None
    """Whose ``clip_grad_norm_``, and p of the norm."""

    @property
    def mixed(self) -> bool:
        return self.param_dtype is not None or self.reduce_dtype is not None

    @property
    def rounds(self) -> bool:
        return self.mixed or self.hook is not None

    def mixed_precision(self, is_root: bool) -> MixedPrecision | None:
        if not self.mixed:
            return None
        return MixedPrecision(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            keep_low_precision_grads=self.keep_low_precision_grads,
            keep_cast_shard=self.keep_cast_shard,
            cast_forward_inputs=self.cast_forward_inputs,
            output_dtype=self.output_dtype if is_root else None,
            module_classes_to_ignore=(nn.LayerNorm,) if self.ignore_norms else (),
            full_precision_in_eval=self.full_precision_in_eval,
        )

    @contextlib.contextmanager
    def around_backward(self, model: nn.Module, index: int) -> Iterator[None]:
        """The ``index``-th backward of a step of the sharded model runs inside."""
        how = self.backwards[index]
        module = model.body if self.hold_body_only and has_units(model.body) else model
        with contextlib.ExitStack() as stack:
            if how == "hold":
                stack.enter_context(flatshard.no_sync(module))
            elif how == "flag":
                flatshard.configure(module, gradient_sync=False)
                stack.callback(flatshard.configure, module, gradient_sync=True)
            elif how == "partial":
                flatshard.configure(model, all_reduce=False)
                stack.callback(flatshard.configure, model, all_reduce=True)
            yield

    def groups(self, ctx: Any, halves: DeviceMesh | None) -> dict[str, Any]:
        """Where to shard, as arguments of ``fully_shard``. ``halves``: a mesh (2, 2), where all four ranks run."""
        if self.mesh is None:
            return {"process_group": ctx.group}
        if self.mesh == (2, 2):
            return {"device_mesh": halves}
        replicate, shard = self.mesh
        return {"process_group": (ctx.group if shard > 1 else ctx.alone, ctx.group if replicate > 1 else ctx.alone)}

    def clip_gradients(self, model: nn.Module) -> Tensor:
        """Clip, and return the norm."""
        assert self.clip is not None
        kind, p = self.clip
        if kind == "flatshard" and has_units(model):
            return flatshard.clip_grad_norm_(model, 0.05, p)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, p)


def layout_named(name: str | None) -> Any:
    """A layout without a limit to padding. ``"mixed"``: each parameter one of them, by its name."""
    layouts = {
        None: None,
        "rows": flatshard.layouts.Rows(max_padding=1e9),
        "pairs": flatshard.layouts.Rows(multiple=2, max_padding=1e9),
        "blocks": flatshard.layouts.Blocks(3, max_padding=1e9),
        "whole": flatshard.layouts.Whole(max_padding=1e9),
    }
    if name == "mixed":
        return lambda fqn, param: random.Random(fqn).choice(list(layouts.values()))
    return layouts[name]


def has_units(module: nn.Module) -> bool:
    return any("_flatshard_unit" in m.__dict__ for m in module.modules())


def draw_options(
    seed: int, world_size: int, strategy: str, policy: str, training: str, adaptive: bool, empty: bool
) -> Options:
    """A third of the cases choose nothing new. ``adaptive``: the optimizer divides by its state, so it wants one dtype.

    ``empty``: there are parameters without elements, of whose maximum torch's norms know nothing.
    """
    rng = random.Random(f"options {seed}")
    if rng.random() < 0.3:
        return Options()
    found: dict[str, Any] = {}
    hybrid = strategy.startswith("HYBRID")
    if hybrid:
        found["mesh"] = rng.choice([(1, world_size), (world_size, 1)] + [(2, 2)] * 2 * (world_size == 4))
    if policy == "manual" and rng.random() < 0.4:
        own = ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"] if hybrid else ["FULL_SHARD", "SHARD_GRAD_OP"]
        found["unit_strategies"] = tuple(rng.choice([*own, "NO_SHARD"]) for _ in range(3))
    no_shard = strategy == "NO_SHARD" or "NO_SHARD" in found.get("unit_strategies", ())
    if rng.random() < 0.4:
        found["param_dtype"] = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32, None])
        found["reduce_dtype"] = rng.choice([torch.float32, torch.float32, torch.bfloat16, None])
        found["keep_low_precision_grads"] = not adaptive and rng.random() < 0.3
        found["keep_cast_shard"] = rng.random() < 0.3
        found["cast_forward_inputs"] = rng.random() < 0.3
        if policy in ("manual", "none") and rng.random() < 0.4:
            found["output_dtype"] = rng.choice([torch.float32, torch.float64])
        found["ignore_norms"] = rng.random() < 0.3
        found["full_precision_in_eval"] = rng.random() < 0.3
    if world_size > 1 and not hybrid and rng.random() < 0.2:
        found["hook"] = rng.choice(list(HOOKS))
    rounds = "param_dtype" in found or "hook" in found
    if training in ("accumulate", "retain_graph"):
        kinds = ["sync", "hold", "hold", "flag"]
        if hybrid and found["mesh"][0] > 1 and not no_shard and not rounds:
            kinds += ["partial", "partial"]
        found["backwards"] = (*(rng.choice(kinds) for _ in range(rng.randint(1, 3))), "sync")
        found["hold_body_only"] = not rounds and rng.random() < 0.3
    if rng.random() < 0.2:
        found["divide_factor"] = rng.choice([1.0, 3.0, 2.0 * world_size])
    found["offload"] = rng.random() < 0.2
    if rng.random() < 0.4:
        smaller = 2 if found.get("mesh", (1, world_size)) == (1, 4) else True
        found["reshard_after_forward"] = rng.choice([False, *[True, smaller, smaller] * (not no_shard)])
    if rng.random() < 0.2:
        found["prefetch_limit_bytes"] = rng.choice([0, 500])
    if rng.random() < 0.3 and not found.get("keep_low_precision_grads"):
        found["clip"] = rng.choice(["torch", "flatshard"]), rng.choice([2.0, 2.0, 1.0, *[float("inf")] * (not empty)])
    found["forward_before_step"] = rng.random() < 0.2
    found["layout"] = rng.choice([None, None, "rows", "pairs", "blocks", "whole", "mixed"])
    return Options(**found)


class Rounded:
    """See [Note: An oracle that rounds]; ``parity.RoundedOracle`` says what it is for."""

    def __init__(
        self,
        options: Options,
        world_size: int,
        backwards: Callable[[nn.Module, Tensor, Callable[[int], Any]], Tensor],
    ) -> None:
        """``backwards(model, inputs, around)`` runs a step's backwards, each inside ``around(index)``."""
        self._options = options
        self._backwards = backwards
        self._replicate, self._shard = options.mesh or (1, world_size)
        dtypes = {options.param_dtype, options.reduce_dtype, HOOKS[options.hook][1] if options.hook else None}
        low = bool(dtypes & set(LOW))
        self.rtol = 2**-6 if low else 1e-4
        self.loss_rtol = 2**-7 if options.param_dtype in LOW else 1e-4
        self.scales: dict[str, float] = {}

    def train(self, model: nn.Module, parts: list[Tensor], factor: float) -> list[Tensor]:
        """See ``parity.RoundedOracle``."""
        losses, self.scales = [], {}
        norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)] if self._options.ignore_norms else []
        self._left_alone = {p for m in norms for p in m.parameters()}
        self._names = dict(model.named_parameters())
        sent: list[list[dict[str, Tensor]]] = []  # by rank and by reduction
        for part in parts:
            rank_losses, grads = self._train_rank(model, part)
            losses.append(rank_losses)
            sent.append(self._accumulate(grads))
        for reductions in zip(*sent, strict=True):
            for name in {name: None for grads in reductions for name in grads}:
                self._add(self._names[name], self._average(name, [g.get(name) for g in reductions], factor))
        return losses

    def _train_rank(self, model: nn.Module, inputs: Tensor) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """The loss, and the gradients of each backward."""
        copied = self._lowered(model)
        if self._options.param_dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._options.param_dtype)
        found: list[dict[str, Tensor]] = []

        @contextlib.contextmanager
        def around(index: int) -> Iterator[None]:
            yield
            found.append({n: p.grad for n, p in copied.named_parameters() if p.grad is not None})
            copied.zero_grad()

        return self._backwards(copied, inputs, around).double(), found

    def _lowered(self, model: nn.Module) -> nn.Module:
        """A copy in the compute dtype."""
        for module in model.modules():
            if hasattr(module, "seen"):
                module.seen = None  # of the last step's graph
        copied = copy.deepcopy(model)
        copied.zero_grad()
        dtype = self._options.param_dtype
        for module in copied.modules() if dtype is not None else ():
            if self._options.ignore_norms and isinstance(module, nn.LayerNorm):
                own = module.weight.dtype
                module.register_forward_pre_hook(lambda m, args, own=own: (args[0].to(own),))
                module.register_forward_hook(lambda m, args, out: out.to(dtype))
                continue
            for param in module.parameters(recurse=False):
                if param.is_floating_point():
                    param.data = param.data.to(dtype)
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
        return copied

    def _accumulate(self, backwards: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """What one rank sends, by reduction: backwards that hold are added up, in the reduce dtype."""
        options, result, held = self._options, [], {}
        for index, grads in enumerate(backwards):
            for name, grad in grads.items():
                own = grad if self._names[name] in self._left_alone else grad.to(options.reduce_dtype or grad.dtype)
                held[name] = held[name] + own if name in held else own
            if len(backwards) == 1 or options.backwards[index] == "sync":
                result.append(held)
                held = {}
        assert not held
        return result

    def _average(self, name: str, grads: list[Tensor | None], factor: float) -> Tensor:
        given = next(g for g in grads if g is not None)
        every = [torch.zeros_like(given) if g is None else g for g in grads]
        self.scales[name] = max([self.scales.get(name, 0.0), *(g.abs().max().item() for g in every if g.numel())])
        if self._options.hook is not None and given.itemsize > 2:
            wire = HOOKS[self._options.hook][1]
            every = [g.to(wire) for g in every]
        total = sum(g.double() for g in every) / len(every)
        return (total.to(every[0].dtype).to(given.dtype).double() * (len(every) / factor)).to(given.dtype)

    def _add(self, param: nn.Parameter, grad: Tensor) -> None:
        if self._options.keep_low_precision_grads and param not in self._left_alone:
            param.grad_dtype = grad.dtype
        grad = grad.to(param.grad_dtype or param.dtype)
        param.grad = grad if param.grad is None else param.grad.add_(grad)


def make_halves(world_size: int) -> DeviceMesh | None:
    """A mesh (2, 2) over all ranks of the pool, which must all ask for it."""
    if world_size != 4:
        return None
    assert dist.get_world_size() == 4
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
