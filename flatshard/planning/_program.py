"""Shards a copy of the module on the meta device, and runs steps of it.

[Note: The plan is the program]
The copy is sharded by the functions of ``fully_shard``, over a :class:`Runtime` whose collectives only record their calls. So
no process group is needed, and the number of ranks can be any. Then the copy runs steps with the hooks, autograd's engine and
storages of real training. Everything that they issue, allocate and free is recorded. So planning has no rules of its own.

[Note: Without example inputs]
The forward of each unit is replaced. Modules run one after the other, each once, in the order in which they are registered. A
module uses its own parameters before its children run. Each use of a parameter is a node in autograd's graph (``_Use``),
whose backward makes a gradient. The tensor that is passed from one node to the next has no elements.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatshard._composable.context import Context
from flatshard._composable.extensions import Extension, ForwardFeature, extensions
from flatshard._composable.features import inner_shards
from flatshard._composable.features.grad_sync import no_sync
from flatshard._composable.flat_plan import plan_flats
from flatshard._composable.forward import Forward
from flatshard._composable.fully_shard import Choice, build, install
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Unit, UnitConfig, called_modules, unit_of
from flatshard._runtime import Runtime, Streams
from flatshard.planning._clock import Clock, RecordingCollectives
from flatshard.planning._hardware import Bandwidths
from flatshard.planning._memory import Books, Memory

META = torch.device("meta")


class Ranks(NamedTuple):
    """The number of ranks that parameters are sharded over, and the number of replicas of each shard."""

    shards: int
    replicas: int = 1

    @property
    def total(self) -> int:
        return self.shards * self.replicas


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What a step computes, if there are no example inputs."""

    tokens: int  # positions that each rank computes in a microbatch
    activations: int | Mapping[str, int]  # bytes that autograd saves for each unit but the outermost, or by FQN

    def flops(self, module: nn.Module, param: Tensor) -> int:
        """Operations of a forward for one parameter."""
        looked_up = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        return 0 if looked_up or param.ndim < 2 else 2 * param.numel() * self.tokens

    def saved(self, unit: Unit) -> int:
        given = self.activations
        return given.get(unit.fqn, 0) if isinstance(given, Mapping) else given if unit.fqn else 0


class Program:
    """A copy of a module, sharded as on one of ``ranks``. [Note: The plan is the program]"""

    def __init__(
        self, module: nn.Module, choice: Choice, ranks: Ranks, device: str, hardware: Bandwidths, widens: bool
    ) -> None:
        self.ranks = ranks
        self.numels, self.layout_warnings = _rank_numels(choice, ranks.shards)
        rank = max(range(ranks.shards), key=self.numels.__getitem__)  # the fullest
        self.memo: dict[int, Any] = {}
        self.others = list(_put_on_meta(module, self.memo))
        self.memo |= {id(config): config for config in (choice.config, *choice.configs.values())}
        self.root, self.choice = copy.deepcopy((module, choice), self.memo)
        self.clock = Clock(hardware, ranks.total)
        self.books = Books(self.clock)
        self.clock.on_issue = self.books.look

        def runtime(name: str, rank: int, size: int) -> Runtime:
            collectives = RecordingCollectives(self.clock, name, rank, size, widens)
            if device == "cpu":
                return Runtime(collectives, META, None, None)
            return Runtime(collectives, META, Streams(self.clock, META), host=META)

        context = Context.of(runtime("shards", rank, ranks.shards))
        for size in inner_shards.sizes(self.choice.all_configs):
            inner_shards.add_subgroup(context.runtime, runtime("inner", rank % size, size))
        replicas = runtime("replicas", 0, ranks.replicas) if choice.config.strategy.is_hybrid else None
        with self.books:
            made = build(self.choice, context, replicas, prepare=lambda unit: None)
            install(self.root, self.choice, made, (*extensions(), _Observer(self.books)))
        self.units = list(made.values())
        self.flats = [flat for unit in self.units for flat in unit.handle.flats]
        for flat in self.flats:
            self.books.track([flat.shard], "shards", flat.is_offloaded)
        self.books.track((b for b in self.root.buffers()), "others")
        self.books.track(self.choice.ignored_params, "others")

    @property
    def params(self) -> dict[nn.Parameter, nn.Parameter]:
        """The trainable sharded parameters, by the parameters of the original module."""
        known = {id(p): p for p in self.others if isinstance(p, nn.Parameter)}
        mine = {id(p) for flat in self.flats for p in flat.params}
        copies = ((known[key], self.memo[key]) for key in known)
        return {param: its_copy for param, its_copy in copies if id(its_copy) in mine and its_copy.requires_grad}

    def run(
        self, passes: int, holds: bool, inputs: Any | Assumed, optimize: Callable[[], dict[nn.Parameter, int]]
    ) -> None:
        """Run steps, and record the last one.

        Args:
            passes: the number of forwards and backwards in a step.
            holds: run all but the last of them under ``no_sync``.
            inputs: example inputs, or what to assume without them.
            optimize: makes an optimizer, runs a step, and returns the bytes of its state for each parameter.
        """
        run_once: Callable[[], None]
        if isinstance(inputs, Assumed):
            run_once = _InOrder(self, inputs).run_once
        else:
            run_once = functools.partial(self._run_once, inputs)

        def step() -> None:
            with self.books:
                for number in range(passes):
                    with no_sync(self.root) if holds and number < passes - 1 else contextlib.nullcontext():
                        run_once()

        step()
        self.states = optimize()
        for flat in self.flats:
            nbytes = sum(self.states.get(p, 0) for p in flat.params)
            self.books.add("optimizer", flat.is_offloaded, nbytes)
        self._drop_gradients()
        if any(unit.handle.has_static_buffers for unit in self.units):  # the second step may allocate more of them
            step()
            self._drop_gradients()
        self.clock.begin()
        self.books.open()
        self.between: Memory
        self.host_between: Memory
        self.between, self.host_between = self.books.look()
        step()
        self.step_seconds = self.clock.now
        self.clock.phase, self.clock.unit = "optimizer", ""
        self.books.close()

    def _drop_gradients(self) -> None:
        for param in self.root.parameters():
            param.grad = None

    def _run_once(self, inputs: Any) -> None:
        """Run a forward with example inputs, and a backward from the sum of its outputs."""
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        self.clock.phase, self.clock.unit = "forward", ""
        output = self.root(*on_meta(args), **on_meta(kwargs))
        losses = [t.sum() for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
        if not losses:
            raise ValueError(
                "plan: the forward returned no floating-point tensor that requires grad, so backward cannot run"
            )
        loss = functools.reduce(torch.add, losses)
        del output, losses
        self.clock.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]


class _Observer(Extension):
    """Tells ``Books`` which unit runs, and which tensors are gradients."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.running: list[str] = []  # units in their forward, outermost first

    def attach(self, unit: Unit, modules: list[nn.Module]) -> ForwardFeature:
        for flat in unit.handle.flats:
            for compute in flat.computes:
                if compute.requires_grad:
                    compute.register_post_accumulate_grad_hook(self._arrive)  # type: ignore[no-untyped-call]
        return _ObservedUnit(unit, self)

    def _arrive(self, param: Tensor) -> None:
        if param.grad is not None:
            self.books.track([param.grad], "arriving")
            self.books.look()


class _ObservedUnit(ForwardFeature):
    def __init__(self, unit: Unit, observer: _Observer) -> None:
        self.unit = unit
        self.observer = observer
        self.clock = observer.books.clock

    def _turn_to(self, *grads: Any) -> None:
        self.clock.unit = self.unit.fqn

    def before(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.observer.running.append(self.unit.fqn)
        self._turn_to()

    def after(self, forward: Forward, output: Any) -> None:
        running = self.observer.running
        del running[running.index(self.unit.fqn) :]
        self.clock.unit = running[-1] if running else ""

    def leaving(self, outputs: list[Tensor]) -> Iterable[Tensor]:
        for node in {t.grad_fn for t in outputs if t.grad_fn is not None}:
            node.register_prehook(self._turn_to)
        return ()

    def reduced(self) -> None:
        for flat in self.unit.handle.flats:
            grads = [p.grad for p in flat.params if p.grad is not None]
            self.observer.books.track(grads, "gradients", flat.is_offloaded)


class _InOrder:
    """Runs units with replaced forwards. [Note: Without example inputs]"""

    def __init__(self, program: Program, assumed: Assumed) -> None:
        self.program = program
        self.assumed = assumed
        for unit in program.units:
            for module in called_modules(unit.module):
                module.forward = functools.partial(self._forward, unit, module)

    def run_once(self) -> None:
        """Run a forward and its backward."""
        self.done = {self.program.root, *self.program.choice.ignored}
        clock = self.program.clock
        clock.phase, clock.unit = "forward", ""
        output = self.program.root(torch.empty(0, device=META))
        if output.requires_grad:
            clock.phase = "backward"
            torch.autograd.backward((output,), (torch.empty_like(output),))

    def _forward(self, unit: Unit, module: nn.Module, x: Tensor) -> Tensor:
        nbytes = self.assumed.saved(unit) if module is called_modules(unit.module)[0] else 0
        saved = torch.empty(nbytes, dtype=torch.uint8, device=META) if nbytes else None
        return self._visit(module, x, saved)

    def _visit(self, module: nn.Module, x: Tensor, saved: Tensor | None) -> Tensor:
        for name, param in module._parameters.items():
            if param is not None:
                shown: nn.Parameter = getattr(module, name)  # of full shape
                x = _Use.apply(x, shown, saved, self.assumed.flops(module, shown), self.program.clock)  # type: ignore[no-untyped-call]
        for child in module._modules.values():
            if child is not None and child not in self.done:
                self.done.add(child)
                x = child(x) if unit_of(child) is not None else self._visit(child, x, saved)
        return x


class _Use(torch.autograd.Function):
    """A node in autograd's graph that stands for what a module computes with one parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, saved: Tensor | None, flops: int, clock: Clock) -> Tensor:
        clock.compute(flops)
        ctx.gradient = functools.partial(
            torch.empty_strided, param.shape, param.stride(), dtype=param.dtype, device=META
        )
        ctx.flops, ctx.clock = flops, clock
        ctx.save_for_backward(saved)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        of_input, of_param = ctx.needs_input_grad[:2]
        ctx.clock.compute(ctx.flops * (of_input + of_param))
        return grad if of_input else None, ctx.gradient() if of_param else None, None, None, None


def with_config(choice: Choice, change: Callable[[UnitConfig], UnitConfig]) -> Choice:
    """``choice`` with the configuration of every unit changed."""
    configs = {module: change(config) for module, config in choice.configs.items()}
    return dataclasses.replace(choice, config=change(choice.config), configs=configs)


def on_meta(value: Any) -> Any:
    """``value`` with its tensors on the meta device. Containers and dataclasses keep their types."""
    if isinstance(value, Tensor):
        return torch.empty_like(value, device=META, requires_grad=value.requires_grad)
    if not any(True for _ in tensors_in(value)):
        return value
    if isinstance(value, tuple):
        items = map(on_meta, value)
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    result = copy.copy(value)
    if isinstance(value, dict):
        for key, item in value.items():
            result[key] = on_meta(item)
    elif isinstance(value, list):
        result[:] = map(on_meta, value)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            object.__setattr__(result, field.name, on_meta(getattr(value, field.name)))  # it may be frozen
    return result


def _put_on_meta(root: nn.Module, memo: dict[int, Any]) -> Iterator[Tensor]:
    """Put a meta tensor into ``memo``, for ``copy.deepcopy``, for each tensor of ``root``. Yields the tensors of ``root``."""
    for module in root.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                made = torch.empty_like(tensor.detach(), device=META)
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, tensor.requires_grad)
                    made.__dict__.update(tensor.__dict__)
                memo[id(tensor)] = made
                yield tensor


def _rank_numels(choice: Choice, shards: int) -> tuple[list[int], list[str]]:
    """The elements that each rank has, without padding; and warnings about layouts that are not as requested."""
    steps = [0] * (shards + 1)  # the difference of each rank to the rank before
    loads = [0] * shards
    warnings = []
    for unit in choice.planned:
        for flat in plan_flats(unit, choice.config_of(unit), shards, loads):
            if flat.warning is not None:
                warnings.append(flat.warning)
            layout = flat.layout
            if layout.world_size == 1:
                steps[0] += layout.numel
                continue
            size = layout.shard_numel
            for info in layout.params:
                first, last = info.start // size, (info.stop - 1) // size
                parts = [(first, first + 1, min(info.stop, (first + 1) * size) - info.start)]
                if last > first:
                    parts += [(first + 1, last, size), (last, last + 1, info.stop - last * size)]
                for start, stop, numel in parts if info.numel else ():
                    steps[start] += numel
                    steps[stop] -= numel
    totals, total = [], 0
    for step in steps[:-1]:
        total += step
        totals.append(total)
    return totals, warnings
