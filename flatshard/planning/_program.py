"""A copy of the module on the meta device, which is sharded and runs steps.

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
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from flatshard._base.optimizers import params_of, unhooked_step
from flatshard._comm.mesh_runtime import MeshRuntime
from flatshard._comm.runtime import Peers, Runtime
from flatshard._comm.streams import Streams
from flatshard._composable.construct.groups import context_over
from flatshard._composable.construct.layout_plan import Loads, plan_flats
from flatshard._composable.extensions import Extension, ForwardFeature, extensions
from flatshard._composable.features.grad_sync import no_sync
from flatshard._composable.features.kept_shards import add_subgroup
from flatshard._composable.fully_shard import Choice, build, install
from flatshard._composable.module_tree import called_modules
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Forward, Unit, unit_of
from flatshard._handle.adapters.tensor_parallel import TensorParallel, local_tensor
from flatshard._handle.tensors.grad_dtype import hand_on
from flatshard._handle.tensors.sharded_parameter import shard_info
from flatshard._handle.unsharded import Pools
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._turns import by_unit, in_turns
from flatshard.planning._attention import attention_as_on
from flatshard.planning._axes import DTensorGroups
from flatshard.planning._optimizer import OptimizerChoice, PlannedOptimizer, planned_optimizer
from flatshard.planning._recording import Books, CountedBuffer, MadeOnce, Recorder, RecordingCollectives
from flatshard.planning._records import Ranks

LossChoice = Callable[[Any], Tensor] | None
"""The loss of what the model returns. None: ``_default_loss``."""

FEW_COPIES = 32
"""Bytes for each element of a parameter. An optimizer that needs more for its largest parameter steps them together."""

META = torch.device("meta")


@dataclass(frozen=True)
class StepOptions:
    """The arguments of ``plan_step`` that describe a step.

    Raises:
        ValueError: two of them contradict each other.
    """

    optimizer: OptimizerChoice
    microbatches: int
    no_sync: bool
    activations: int | Mapping[str, int]
    example_inputs: Any
    device: str
    widens: bool | None
    loss: LossChoice
    receives: bool = False  # whether memory that gloo's reductions receive into is counted, on CPU

    def __post_init__(self) -> None:
        if self.example_inputs is not None and self.activations:
            raise ValueError("plan_step: with example_inputs, activations are recorded: leave out activations")


class Program:
    """A copy of a module, sharded as on one of ``ranks``. ``run`` records a step of it. [Note: The plan is the program]"""

    def __init__(
        self, module: nn.Module, choice: Choice, ranks: Ranks, options: StepOptions, made: MadeOnce | None = None
    ) -> None:
        self.ranks, self.options = ranks, options
        self.parts = ranks.total if choice.strategy.joins_axes else ranks.shards
        self.layout_warnings = choice.check_layouts(self.parts)
        self.numels = _rank_numels(choice, self.parts, options.device)
        memo = _meta_copies(
            tensor
            for each in module.modules()
            for tensor in (*each._parameters.values(), *each._buffers.values(), *vars(each).values())
            if isinstance(tensor, Tensor)
        )
        memo |= {id(config): config for config in choice.configs}
        self.root, self.choice = copy.deepcopy((module, choice), memo)
        self.recorder = Recorder()
        self.dtensor_groups = DTensorGroups(module.parameters())
        self.books = Books(self.recorder, made or MadeOnce(options.device), self.dtensor_groups)
        with self.books:
            self.units = self._sharded()
        self.inputs = self._on_meta(options.example_inputs)  # which a loop over batches keeps through the step
        self.books.track(tensors_in(self.inputs), "others")
        self.flats = [flat for unit in self.units for flat in unit.handle.flats]
        counted = functools.partial(CountedBuffer, self.books)
        for unit in self.units:
            for grads in unit.handle.gradients.flats:
                if grads.input is not None:
                    grads.input.use_buffers(counted)
        for flat in self.flats:
            self.books.track([flat.shard], "shards")
            if not flat.unsharded.is_alias:
                flat.unsharded.use_buffers(counted)
        self.books.track(map(local_tensor, (*self.root.buffers(), *self.choice.ignored_params)), "others")
        copies = zip(module.parameters(), self.root.parameters(), strict=True)
        # The trainable sharded parameters, by the parameters of the original module.
        self.params: dict[nn.Parameter, Any] = {
            p: c for p, c in copies if c.requires_grad and shard_info(c) is not None
        }

    def _sharded(self) -> list[Unit]:
        """Shard the copy as ``fully_shard`` does, on the rank that has most elements. Returns its units."""
        ranks, choice = self.ranks, self.choice
        on_cpu = self.options.device == "cpu"
        widens = on_cpu if self.options.widens is None else self.options.widens

        def runtime(name: str, rank: int, size: int) -> Runtime:
            receives = on_cpu and self.options.receives
            collectives = RecordingCollectives(self.books, name, rank, size, widens, receives)
            if on_cpu:
                return Runtime(Peers(collectives, META, None))
            return Runtime(Peers(collectives, META, Streams(self.recorder, META), host=META))

        rank = self.numels.fullest
        shards = every = runtime("shards", rank, self.parts)
        replicas = runtime("replicas", 0, ranks.replicas) if choice.strategy.is_hybrid else None
        if choice.strategy.joins_axes:
            inner, outer = divmod(rank, ranks.replicas)
            axes = runtime("inner", inner, ranks.shards), runtime("outer", outer, ranks.replicas)
            shards, replicas = MeshRuntime(every, *axes), None
        for size in sorted({size for config in choice.configs if (size := config.subgroup_size) is not None}):
            add_subgroup(shards, runtime("inner", rank % size, size))
        runtimes: dict[Any, tuple[Runtime, Runtime | None]] = {None: (shards, replicas)}
        every_groups: list[Any] = [groups for unit in choice.planned for groups in unit.groups[1:]]
        for own, copies in dict.fromkeys(every_groups):  # each a ``PlannedGroup``
            runtimes[own, copies] = (
                runtime(own.name, shard_of(rank, self.parts, own.ranks), own.ranks),
                None if copies is None else runtime(copies.name, 0, copies.ranks),
            )
        made = build(
            choice, context_over(every, *runtimes.values()), every, runtimes, Pools(), prepare=lambda unit: None
        )
        install(self.root, choice, made, (*extensions(), _Observer(self.books)))
        return list(made.values())

    def run(self) -> None:
        """Run steps, and record the last one."""
        run_once = self._run_once if self.options.example_inputs is not None else _InOrder(self).run_once
        self._step(run_once)
        optimizer = self._optimizer()
        self.states = optimizer.nbytes
        self._end_step()
        if any(unit.handle.has_static_buffers for unit in self.units):  # the second step may allocate more of them
            self._step(run_once)
            self._end_step()
        self.recorder.is_recording = True
        self._step(run_once)
        self._enter("optimizer")
        self._step_optimizer(optimizer)

    def _optimizer(self) -> PlannedOptimizer:
        """Make the optimizer, and count its state from now on."""
        offloaded = {part: flat.kind.is_offloaded for flat in self.flats for part in flat.params}
        self.on_host = {part for part in self.params.values() if offloaded[part]}
        with self.books:  # which computes what is alike once
            planned = planned_optimizer(self.options.optimizer, self.params, self.options.device, self.on_host)
        moves = isinstance(planned.made, OffloadedOptimizer) and self.options.device != "cpu"
        for part, is_offloaded in offloaded.items():
            if state := planned.state_of(part):
                for value in state:
                    self.books.track([value], "optimizer", is_offloaded or (moves and value.dim() > 0))
            else:
                self.books.add("optimizer", planned.nbytes.get(part, 0), is_offloaded)
        return planned

    def _step_optimizer(self, planned: PlannedOptimizer) -> None:
        """Record a step. If it goes parameter by parameter, it takes most memory on the rank with the largest shard."""
        if planned.made is None or len(self.on_host) == len(self.params):
            return
        kept = {part: part.grad for part in self.on_host}
        for part in kept:
            part.grad = None  # so it is not stepped: that takes nothing on the device
        samples = self.books.samples
        now, first = samples[-1].device.activations, len(samples)
        with self.books:
            if isinstance(planned.made, OffloadedOptimizer) and self.options.device != "cpu":
                self._step_in_turns(planned)
            else:
                planned.made.step()
        for part, grad in kept.items():
            part.grad = grad
        stepped = (part for part in params_of(planned.made) if part not in self.on_host)
        largest = max((part.numel() for part in stepped), default=0)
        temporary = max((sample.device.activations - now for sample in samples[first:]), default=0)
        if temporary <= FEW_COPIES * largest:
            more = temporary * max(0, self.numels.largest_part - largest) // max(1, largest)
            for at, sample in enumerate(samples[first:], start=first):
                if sample.device.activations > now:
                    device = replace(sample.device, activations=sample.device.activations + more)
                    samples[at] = sample._replace(device=device)

    def _step_in_turns(self, planned: PlannedOptimizer) -> None:
        """Step an ``OffloadedOptimizer``, with the state of two units on the device: the one that steps and the next."""
        optimizer: Any = planned.made
        units = by_unit(params_of(optimizer))
        sizes = [
            sum(value.nbytes for p in unit if p.grad is not None for value in planned.state_of(p) if value.dim())
            for unit in units
        ]
        for here, later, _ in zip(sizes, [*sizes[1:], 0], in_turns(optimizer.inner, units), strict=False):
            self.books.add("optimizer", here + later, False)
            self.books.look()
            unhooked_step(optimizer.inner)(optimizer.inner)
            self.books.add("optimizer", -here - later, False)

    def _step(self, run_once: Callable[[], None]) -> None:
        """Run the forwards and backwards of a step."""
        last = self.options.microbatches - 1
        with attention_as_on(self.options.device), self.books:
            for number in range(self.options.microbatches):
                self._enter("forward")
                with no_sync(self.root) if self.options.no_sync and number < last else contextlib.nullcontext():
                    run_once()

    def _end_step(self) -> None:
        """Leave the model as after an optimizer's step: with changed parameters and without gradients."""
        increment_version([p for flat in self.flats for p in flat.params if p.grad is not None])
        self.root.zero_grad()

    def _on_meta(self, value: Any) -> Any:
        """Return a deep copy of ``value`` with its tensors on the meta device."""
        tensors = list(tensors_in(value))
        copies = _meta_copies(tensors)
        for tensor in tensors:
            self.books.values.give(copies[id(tensor)], tensor)
        return copy.deepcopy(value, copies)

    def _enter(self, phase: str) -> None:
        self.recorder.phase, self.recorder.unit = phase, ""
        self.books.look()

    def _run_once(self) -> None:
        """Run a forward with the example inputs, and a backward from the loss."""
        inputs = self.inputs
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        args = (args,) if isinstance(args, Tensor) else args
        try:
            output = self.root(*args, **kwargs)
            loss = (self.options.loss or _default_loss)(output)
            del output
            self.recorder.phase = "backward"
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
        except Exception as e:
            e.add_note(
                "plan_step: this was the forward or backward of a copy on the meta device, where tensors have no values. "
                "If the model needs values, change example_inputs so that it does not (GPT-2 of transformers: pass an "
                "attention_mask, too), or leave example_inputs out, and pass activations="
            )
            raise
        if loss is None:
            raise ValueError(
                "plan_step: the forward returned no floating-point tensor that requires grad, so backward cannot run"
            )


_OBSERVED = "flatshard: which unit runs"


class _Observer(Extension):
    """An extension that tells ``Books`` which unit runs, and which tensors are gradients."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def attach(self, unit: Unit, modules: list[nn.Module]) -> ForwardFeature:
        return _ObservedUnit(unit, self.books)


class _ObservedUnit(ForwardFeature):
    def __init__(self, unit: Unit, books: Books) -> None:
        self.unit, self.books = unit, books
        for compute in (compute for flat in unit.handle.flats for compute in flat.unsharded.params):
            if compute.requires_grad:
                # A node of autograd keeps the parameter, and with it this hook: so it doesn't know the unit.
                compute.register_post_accumulate_grad_hook(functools.partial(_arrive, books))  # type: ignore[no-untyped-call]

    def before(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._turn_to()

    def after(self, forward: Forward, output: Any) -> None:
        around = [each.unit.fqn for each in self.unit.context.forwards if each is not forward]
        if around or self.books.recorder.phase == "forward":  # else it was recomputed, and its backward follows
            self.books.recorder.unit = around[-1] if around else ""

    def leaving(self, outputs: list[Tensor]) -> Iterable[Tensor]:
        for node in {t.grad_fn for t in outputs if t.grad_fn is not None}:
            known: Any = node.metadata
            if _OBSERVED not in known:  # by the unit inside that made the tensor
                known[_OBSERVED] = True
                node.register_prehook(self._turn_to)
        return ()

    def _turn_to(self, *grads: Any) -> None:
        self.books.recorder.unit = self.unit.fqn

    def reduced(self, given: Any) -> None:
        for flat in self.unit.handle.flats:
            self.books.track([p.grad for p in flat.params if p.grad is not None], "gradients")


def _arrive(books: Books, param: Tensor) -> None:
    if param.grad is not None:
        books.track([local_tensor(param.grad)], "arriving")
        books.look()


class _InOrder:
    """Runs units with replaced forwards. [Note: Without example inputs]"""

    def __init__(self, program: Program) -> None:
        self.program = program
        given = program.options.activations
        for unit in program.units:
            nbytes = given.get(unit.fqn, 0) if isinstance(given, Mapping) else given if unit.fqn else 0
            for module in called_modules(unit.module):
                module.forward = functools.partial(self._forward, module, nbytes)
                nbytes = 0  # once in each unit

    def run_once(self) -> None:
        """Run a forward and its backward."""
        self.done = {self.program.root, *self.program.choice.ignored}
        output = self.program.root(torch.empty(0, device=META))
        if output.requires_grad:
            self.program.recorder.phase = "backward"
            torch.autograd.backward((output,), (torch.empty_like(output),))

    def _forward(self, module: nn.Module, nbytes: int, x: Tensor) -> Tensor:
        """Compute all of ``module`` except for the units in it. Autograd saves ``nbytes``."""
        return self._visit(module, x, torch.empty(nbytes, dtype=torch.uint8, device=META) if nbytes else None)

    def _visit(self, module: nn.Module, x: Tensor, saved: Tensor | None) -> Tensor:
        for name, param in module._parameters.items():
            if param is not None:
                shown: nn.Parameter = getattr(module, name)  # of full shape
                x = _use(x, shown, saved)
        for child in module._modules.values():
            if child is not None and child not in self.done:
                self.done.add(child)
                x = child(x) if unit_of(child) is not None else self._visit(child, x, saved)
        return x


class _Use(torch.autograd.Function):
    """A node in autograd's graph that stands for what a module computes with one parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, saved: Tensor | None) -> Tensor:
        plain, parallel = local_tensor(param), TensorParallel.of(param)
        empty = functools.partial(torch.empty_strided, plain.shape, plain.stride(), dtype=plain.dtype, device=META)
        ctx.gradient = empty if parallel is None else lambda: parallel.wrap(empty())
        ctx.save_for_backward(saved)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        of_input, of_param = ctx.needs_input_grad[:2]
        return grad if of_input else None, ctx.gradient() if of_param else None, None


_use: Callable[..., Tensor] = _Use.apply


def _default_loss(output: Any) -> Tensor | None:
    """Return ``output.loss``, ``output["loss"]``, the sum of its floating-point tensors that require grad, or None."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    losses = [t.sum() for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
    return functools.reduce(torch.add, losses) if losses else None


def _meta_copies(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Return a meta tensor like each of ``tensors``, by id, for ``copy.deepcopy``."""
    memo: dict[int, Any] = {}
    for tensor in tensors:
        if id(tensor) not in memo:
            if (parallel := TensorParallel.of(tensor)) is not None:
                made = parallel.wrap(torch.empty_like(local_tensor(tensor), device=META))
            elif tensor.layout is torch.strided and tensor.is_contiguous():  # without torch's Python of ``empty_like``
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device=META, requires_grad=tensor.requires_grad)
            else:
                made = torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made.detach(), tensor.requires_grad)
                hand_on(tensor, made)
                made.__dict__.update(tensor.__dict__)
            memo[id(tensor)] = made
    return memo


def shard_of(rank: int, ranks: int, shards: int) -> int:
    """Return the number of the shard on ``rank``, where consecutive ``ranks`` have the same of fewer ``shards``."""
    return min(rank // max(1, ranks // shards), shards - 1)


class RankNumels(NamedTuple):
    """Elements of ranks, without padding."""

    fullest: int  # the first rank with most elements
    most: int  # elements on it
    mean: float  # elements on a rank, on average
    largest_part: int  # of a parameter on the device, on any rank


def _rank_numels(choice: Choice, shards: int, device: str) -> RankNumels:
    """Count the elements of ``shards`` ranks. It lists changes from rank to rank, as there may be a million ranks."""
    changes, on_all, largest = Counter[int]({0: 0}), 0, 0
    loads: Loads = {}
    for unit, flat in ((each, flat) for each in choice.planned for flat in plan_flats(each, shards, loads)):
        layout = flat.layout
        is_offloaded = unit.config.cpu_offload.offload_params and device != "cpu"
        alike = max(1, shards // layout.world_size)  # consecutive ranks with the same shard: see ``shard_of``
        for info in (info for info in layout.params if info.numel):
            for first, end, numel in _ranges(info.start, info.stop, layout.shard_numel):
                largest = max(largest, 0 if is_offloaded else numel)
                if layout.world_size == 1:
                    on_all += numel
                else:
                    changes[first * alike] += numel
                    changes[end * alike] -= numel
    ranks = sorted(changes)
    numels = list(itertools.accumulate(changes[rank] for rank in ranks))
    mean = on_all + sum(n * (end - rank) for n, rank, end in zip(numels, ranks, ranks[1:], strict=False)) / shards
    return RankNumels(ranks[numels.index(max(numels))], on_all + max(numels), mean, largest)


def _ranges(start: int, stop: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first shard, end, elements in each) for elements ``start`` to ``stop``, over shards of ``size`` elements."""
    first, last = start // size, (stop - 1) // size
    for shard, end in ((first, first + 1), (first + 1, last), (max(last, first + 1), last + 1)):
        if shard < end:
            yield shard, end, min(stop, (shard + 1) * size) - max(start, shard * size)
