"""Random options of the fuzzer: the arguments of ``fully_shard`` as plain values, and the rounding that they cause.

[Note: An oracle that rounds]
With mixed precision or compressed gradients no tolerance is both safe and sharp after a few steps. So the reference computes
as the ranks do: for each rank's slice, it runs a copy of the model in the compute dtype and adds up the microbatches in the
reduce dtype. Then it rounds to the dtype that is sent, and averages. After each backward and step it continues from the
sharded model's values. What remains is the order of additions, and one rounding more or less: a few units in the last place
of the coarsest dtype, relative to the largest gradient of any rank. A missing 1/N, a lost microbatch or a swapped parameter
is off by tens of percent.
"""

import copy
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from fuzz.random_models import CLASSES, Model, nestable
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

import flatshard
from flatshard import MixedPrecision

HOOKS: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "bf16": (flatshard.comm.bf16_compress_hook, torch.bfloat16),
    "fp16": (flatshard.comm.fp16_compress_hook, torch.float16),
}
LOW = (torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP", "NO_SHARD")
STRATEGIES += ("SHARD_OPTIM", "SHARD_OPTIM", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_OPTIM")
STRATEGIES += ("HYBRID_FULL_SHARD",)
POLICIES = ("none", "class", "set", "wrap", "custom", "size", "manual", "manual", "groups", "groups", "lists")
STARTS = ("as it is", "meta", "to_empty", "sync")
FIRSTS = ("forward", "state_dict", "describe", "reshard", "save_checkpoint", "optimizer", "gradients", "torch's")
AS_THEY_ARE = (
    "cpu_offload",
    "forward_prefetch",
    "prefetch_limit_bytes",
    "reshard_after_forward",
    "static_buffers",
    "recompute",
)


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Ranks that a model is sharded over."""

    group: Any
    rank: int
    size: int
    alone: Any
    """A process group of this rank only."""
    halves: DeviceMesh | None = None
    """A mesh (2, 2) over all ranks, if there are four."""
    device: torch.device = CPU

    @property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("dp",))


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Options of ``fully_shard`` as plain values. Defaults leave them out."""

    policy: tuple[Any, ...] = ("none",)
    """``"manual"`` shards inner modules first, ``"lists"`` shards lists of two modules, and ``"groups"`` has tuples."""
    strategy: str = "FULL_SHARD"
    mesh: tuple[int, int] | None = None
    """(replicate, shard) of a hybrid strategy."""
    as_mesh: bool = False
    """Whether to pass ranks as a device mesh even where a process group is enough."""
    unit_strategies: tuple[str, ...] = ()
    """Strategies of the manually nested units, in turn; if empty, the model's own."""
    start: str = "as it is"
    """Origin of the values, one of :data:`STARTS`. ``"init"`` is ``"to_empty"`` with modules filled by the user's code."""
    first: str = "forward"
    """The first verb after an ``"init"``, before any forward: one of :data:`FIRSTS`."""
    device_id: bool = False
    ignored: int | None = None
    """Index of a module without submodules that is frozen and not sharded."""
    backward_prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = True
    prefetch_limit_bytes: int | None = None
    reshard_after_forward: bool | int | None = None
    layout: str | None = None
    """See :func:`layout_named`."""
    collectives: bool = False
    shard_mesh_fn: bool = False
    static_buffers: bool = False
    cpu_offload: bool = False
    old_names: bool = False
    """Whether arguments have FSDP1's names."""
    divide_factor: float | None = None
    hook: str | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    keep_cast_shard: bool = False
    cast_forward_inputs: bool = False
    output_dtype: torch.dtype | None = None
    """Output dtype of the root, if a separate call makes the inner units."""
    ignore_norms: bool = False
    full_precision_in_eval: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default)

    @property
    def mixed(self) -> bool:
        return self.param_dtype is not None or self.reduce_dtype is not None

    @property
    def rounds(self) -> bool:
        return self.mixed or self.hook is not None

    def mixed_precision(self, is_root: bool) -> MixedPrecision | None:
        if not self.mixed:
            return None
        names = {field.name for field in dataclasses.fields(MixedPrecision)}
        given = {name: value for name, value in vars(self).items() if name in names}
        given["output_dtype"] = self.output_dtype if is_root else None
        given["module_classes_to_ignore"] = (nn.LayerNorm,) if self.ignore_norms else ()
        return MixedPrecision(**given)

    def _where(self, ranks: Ranks) -> dict[str, Any]:
        if self.mesh is None:
            return {"device_mesh": ranks.mesh} if self.as_mesh else {"process_group": ranks.group}
        if self.mesh == (2, 2):
            return {"device_mesh": ranks.halves}
        groups = [ranks.group if n > 1 else ranks.alone for n in reversed(self.mesh)]
        return {"process_group": tuple(groups)}

    def over(self, ranks: Ranks) -> tuple["Sharding", dict[str, Any]]:
        """Return this sharding over other ranks, and the arguments that pass these to a verb."""
        fits = self.mesh is None or self.mesh[0] * self.mesh[1] == ranks.size
        new = self if fits else dataclasses.replace(self, mesh=(1, ranks.size))
        return new, new._where(ranks)

    def ignore(self, model: nn.Module) -> list[nn.Module]:
        """Freeze the module that is not sharded, and return it."""
        leaves = [m for m in nestable(model) if not [*m.children()] and [*m.parameters()]]
        found = [] if self.ignored is None or not leaves else [leaves[self.ignored % len(leaves)]]
        for module in found:
            module.requires_grad_(False)
        return found

    def shard(self, model: nn.Module, ranks: Ranks, values: nn.Module) -> None:
        """Shard ``model``, which then has the values of ``values``, wherever it was."""
        ignored = self.ignore(model)
        like = dict(zip(model.modules(), values.modules(), strict=True))

        def fill(module: nn.Module) -> None:
            for mine, theirs in (
                (module._parameters, like[module]._parameters),
                (module._buffers, like[module]._buffers),
            ):
                for name, value in mine.items():
                    if value is not None:
                        value.data.copy_(theirs[name].data)

        options = {
            **{name: getattr(self, name) for name in AS_THEY_ARE},
            "strategy": flatshard.ShardingStrategy[self.strategy],
            "ignored_states": ignored or None,
            "device_id": ranks.device if self.device_id or (self.start == "meta" and ranks.device is not CPU) else None,
            "param_init_fn": fill if self.start == "meta" else None,
            "sync_module_states": self.start == "sync",
            "backward_prefetch": self.backward_prefetch and flatshard.BackwardPrefetch[self.backward_prefetch],
            "layout": layout_named(self.layout),
            "collectives": flatshard.comm.builtin_collectives if self.collectives else None,
            "shard_mesh_fn": (lambda fqn, param: ranks.mesh if len(fqn) % 2 else None) if self.shard_mesh_fn else None,
        }

        def shard_one(module: Any, policy: Any = None, strategy: str | None = None) -> Any:
            given = {**options, "policy": policy, "mixed_precision": self.mixed_precision(module is model)}
            given |= {} if strategy is None else {"strategy": flatshard.ShardingStrategy[strategy]}
            is_replicated = given["strategy"] is flatshard.ShardingStrategy.NO_SHARD
            given |= {"process_group": ranks.group} if is_replicated else self._where(ranks)
            if module is not model and ignored:
                modules = [m for each in (module if isinstance(module, list) else [module]) for m in each.modules()]
                given["ignored_states"] = [m for m in ignored if m in modules] or None
            if self.old_names:
                given |= {"auto_wrap_policy": given.pop("policy"), "sharding_strategy": given.pop("strategy")}
                given["limit_all_gathers"] = True
            return flatshard.fully_shard(module, **given)

        self._shard_units(model, shard_one, [m for m in nestable(model) if m not in ignored])
        if self.start in ("to_empty", "init"):
            model.to_empty(device="cpu")
        if self.start == "to_empty":
            model.load_state_dict(values.state_dict())
        elif self.start == "init":
            with torch.no_grad():
                for module, of in like.items():
                    for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                        value.copy_(getattr(of, name))
        for module in values.modules() if self.mixed and self.buffer_dtype else ():
            module._buffers.update(
                {n: b.to(self.buffer_dtype) for n, b in module._buffers.items() if b.is_floating_point()}
            )
        if self.hook is not None:
            flatshard.comm.register_comm_hook(model, None, HOOKS[self.hook][0])
        if self.divide_factor is not None:
            flatshard.configure(model, divide_factor=self.divide_factor)
        flatshard.register_forward_method(model, "encode")

    def _shard_units(self, model: nn.Module, shard_one: Callable[..., Any], candidates: list[nn.Module]) -> None:
        kind, *rest = self.policy
        match kind:
            case "manual":
                chosen = {i % len(candidates) for i in rest} if candidates else set()
                strategies = itertools.cycle(self.unit_strategies or (self.strategy,))
                for i in sorted(chosen, reverse=True):  # named_modules() lists parents first
                    assert shard_one(candidates[i], strategy=next(strategies)) is candidates[i]
                assert shard_one(model) is model
            case "groups" | "lists":  # pairs of adjacent modules
                pairs: list[tuple[nn.Module, nn.Module]] = []
                for i, j in itertools.pairwise(i % len(candidates) for i in rest if candidates):
                    pair, taken = (candidates[i], candidates[j]), {m for others in pairs for m in others}
                    if i != j and pair[0] not in pair[1].modules() and pair[1] not in pair[0].modules():
                        pairs += [] if taken & {*pair} else [pair]
                if kind == "lists":
                    inside = [m for pair in pairs for m in pair]
                    nested = {m for m in inside for n in inside if n is not m and m in n.modules()}
                    for pair in pairs:
                        if not nested & {*pair}:
                            shard_one(list(pair))
                shard_one(model, pairs if kind == "groups" and pairs else None)
            case _:
                classes = {CLASSES[name] for name in rest} if kind in ("class", "set", "wrap", "custom") else set()
                policies: dict[str, Any] = {
                    "none": None,
                    "class": next(iter(classes), None),
                    "set": classes,
                    "wrap": ModuleWrapPolicy(classes) if classes else None,
                    "custom": CustomPolicy(lambda module: type(module) in classes),
                    "size": SizePolicy(rest[0] if kind == "size" else 0),
                }
                shard_one(model, policies[kind])


@dataclasses.dataclass
class SizePolicy:
    """Wraps modules with at least so many parameters that no inner unit owns, except containers that are never called."""

    least: int

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if recurse:
            return True
        return nonwrapped_numel >= self.least and not isinstance(module, nn.ParameterList)


def layout_named(name: str | None) -> Any:
    """Return a layout without a limit to padding. ``"mixed"`` chooses one for each parameter, by its name."""
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


def draw_rounding(rng: random.Random, optimizer: str) -> dict[str, Any]:
    """Draw options that round, shared by all shardings of a program. ``"adamw"`` divides by its state, so it needs one
    dtype."""
    found: dict[str, Any] = {}
    if rng.random() < 0.75:
        found["param_dtype"] = rng.choice([torch.bfloat16, torch.bfloat16, torch.float32, None])
        found["reduce_dtype"] = rng.choice([torch.float32, torch.float32, torch.bfloat16, None])
        found["keep_low_precision_grads"] = optimizer == "sgd" and rng.random() < 0.3
        found["keep_cast_shard"] = rng.random() < 0.3
        found["cast_forward_inputs"] = rng.random() < 0.3
        found["buffer_dtype"] = rng.choice([None, None, torch.float32])
        found["ignore_norms"] = rng.random() < 0.3
        found["full_precision_in_eval"] = rng.random() < 0.3
    if rng.random() < 0.4:
        found["hook"] = rng.choice(list(HOOKS))
    return found


def draw_sharding(rng: random.Random, size: int, model: Model, rounding: dict[str, Any]) -> Sharding:
    """Draw a sharding over ``size`` ranks."""
    found: dict[str, Any] = dict(rounding)
    kind = rng.choice(POLICIES)
    names = sorted({type(m).__name__ for m in model.build().modules()} & set(CLASSES) | {"Linear"})
    found["policy"] = (kind,)
    if kind == "class":
        found["policy"] += (rng.choice(names),)
    elif kind in ("set", "wrap", "custom"):
        found["policy"] += tuple(sorted(rng.sample(names, rng.randint(1, len(names)))))
    elif kind == "size":
        found["policy"] += (rng.choice([1, 5, 20, 100]),)
    elif kind in ("manual", "groups", "lists"):
        found["policy"] += tuple(rng.randrange(100) for _ in range(rng.randint(1, 6)))
    found["backward_prefetch"] = rng.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None])
    found["forward_prefetch"] = rng.random() < 0.7
    strategy = found["strategy"] = rng.choice(STRATEGIES)
    hybrid = strategy.startswith("HYBRID")
    if hybrid:
        found["mesh"] = rng.choice([(1, size), (size, 1)] + [(2, 2)] * 2 * (size == 4))
    if kind == "manual" and rng.random() < 0.4:
        own = ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM"]
        if hybrid:
            joins = strategy == "HYBRID_FULL_SHARD"  # its group differs from the others'
            own = [s for s in STRATEGIES if s.startswith("HYBRID") and (s == "HYBRID_FULL_SHARD") == joins]
        found["unit_strategies"] = tuple(rng.choice([*own, "NO_SHARD"]) for _ in range(3))
    strategies = {strategy, *found.get("unit_strategies", ())}
    no_shard = "NO_SHARD" in strategies
    stays_unsharded = no_shard or not strategies.isdisjoint(("SHARD_OPTIM", "HYBRID_SHARD_OPTIM"))
    if "param_dtype" in found and kind in ("manual", "none") and rng.random() < 0.4:
        found["output_dtype"] = rng.choice([torch.float32, torch.float64])
    if size == 1 or hybrid:
        found.pop("hook", None)
    if rng.random() < 0.3:
        return Sharding(**found)
    found["as_mesh"] = not hybrid and rng.random() < 0.3
    if rng.random() < 0.2:
        found["divide_factor"] = rng.choice([1.0, 3.0, 2.0 * size])
    for name in ("cpu_offload", "old_names", "device_id"):
        found[name] = rng.random() < 0.2
    if rng.random() < 0.4:
        smaller = 2 if found.get("mesh", (1, size)) == (1, 4) and strategy != "HYBRID_FULL_SHARD" else True
        found["reshard_after_forward"] = rng.choice([False, *[True, smaller, smaller] * (not stays_unsharded)])
    if rng.random() < 0.2:
        found["prefetch_limit_bytes"] = rng.choice([0, 500])
    if rng.random() < 0.15:
        found["ignored"] = rng.randrange(20)
    found["start"] = rng.choice(["as it is", *STARTS])
    if found.get("ignored") is not None and found["start"] in ("meta", "to_empty"):
        found["start"] = "as it is"  # modules that are not sharded are not filled
    if "param_dtype" in found:
        found["ignored"] = None  # it would keep its own dtype, unlike the outputs of the others
    found["device_id"] &= found["start"] != "to_empty"
    if model.has("gru", "change") and found["start"] in ("meta", "to_empty"):
        found["start"] = "as it is"  # RNNs hold weak references to parameters; a change in the first forward is refused
    found["layout"] = rng.choice([None, None, "rows", "pairs", "blocks", "whole", "mixed"])
    found["collectives"] = "hook" not in found and rng.random() < 0.15
    found["static_buffers"] = rng.random() < 0.06
    whole_mesh = not (hybrid or no_shard or found["collectives"]) and found.get("reshard_after_forward") != 2
    found["shard_mesh_fn"] = whole_mesh and rng.random() < 0.2
    found["recompute"] = rng.random() < 0.15 and not model.has("change", "drop", "skip")
    return Sharding(**found)


# ---------------------------------------------------------------------------------------------------------------------
# [Note: An oracle that rounds]
# ---------------------------------------------------------------------------------------------------------------------


class Rounding:
    """The ranks' arithmetic, in one process."""

    def __init__(self, sharding: Sharding, model: nn.Module) -> None:
        self._sharding = sharding
        dtypes = {sharding.param_dtype, sharding.reduce_dtype, HOOKS[sharding.hook][1] if sharding.hook else None}
        self.rtol = 2**-6 if dtypes & set(LOW) else 1e-4
        self.loss_rtol = 2**-7 if sharding.param_dtype in LOW else 1e-4
        self.scales: dict[str, float] = {}
        """The largest magnitude of each gradient on any rank; rounding errors are relative to it."""
        norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)] if sharding.ignore_norms else []
        left_alone = {p for m in norms for p in m.parameters()}
        self._left_alone = {name for name, p in model.named_parameters() if p in left_alone}

    def lowered(self, model: nn.Module) -> nn.Module:
        """Return a copy in the compute dtype."""
        copied = copy.deepcopy(model)
        copied.zero_grad()
        dtype = self._sharding.param_dtype
        for module in copied.modules() if dtype is not None else ():
            if self._sharding.ignore_norms and isinstance(module, nn.LayerNorm):
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

    def input(self, x: Tensor) -> Tensor:
        dtype = self._sharding.param_dtype
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    def kept(self, name: str, grad: Tensor) -> Tensor:
        """Cast a gradient to the dtype in which its rank accumulates it."""
        return grad if name in self._left_alone else grad.to(self._sharding.reduce_dtype or grad.dtype)

    def average(self, name: str, grads: list[Tensor | None], factor: float, param: nn.Parameter) -> Tensor:
        """Average the ranks' gradients."""
        given = next(g for g in grads if g is not None)
        every = [torch.zeros_like(given) if g is None else g for g in grads]
        self.scales[name] = max([self.scales.get(name, 0.0), *(g.abs().max().item() for g in every if g.numel())])
        if self._sharding.hook is not None and given.itemsize > 2:
            wire = HOOKS[self._sharding.hook][1]
            every = [g.to(wire) for g in every]
        total = sum(g.double() for g in every) / len(every)
        result = (total.to(every[0].dtype).to(given.dtype).double() * (len(every) / factor)).to(given.dtype)
        if self._sharding.keep_low_precision_grads and name not in self._left_alone:
            param.grad_dtype = result.dtype
        return result.to(param.grad_dtype or param.dtype)
