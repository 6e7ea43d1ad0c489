"""``plan``: what ``fully_shard`` would build, and what a step would cost, before there is a process group or a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from flatshard._composable import validate
from flatshard._composable.fully_shard import choose, unit_config
from flatshard._composable.policy import Policy
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, as_enum
from flatshard._layouts import LayoutChoice
from flatshard._plan_build import build, check_parameters, check_plannable
from flatshard._plan_cost import Ranks
from flatshard._plan_data import Numbers
from flatshard._plan_optimizer import OptimizerChoice
from flatshard._plan_plot import as_svg
from flatshard._plan_text import as_text
from flatshard._plan_time import Bandwidths
from flatshard._plan_walked import StepChoice, Walked, compare


@dataclass(frozen=True)
class Plan(Numbers):
    """What :func:`plan` found. ``print(plan(...))`` shows it as tables; sizes are bytes on one rank, the fullest."""

    def __str__(self) -> str:
        return as_text(self)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write an SVG: memory by category over a step, what computes and communicates when, and strategies side by side."""
        Path(path).write_text(as_svg(self), encoding="utf-8")


def plan(
    module: nn.Module,
    *,
    policy: Policy = None,
    world_size: int | tuple[int, int],
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | Any = None,
    cpu_offload: CPUOffload | Any = None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = True,
    prefetch_limit_bytes: int | None = None,
    reshard_after_forward: bool | int | None = None,
    layout: LayoutChoice = None,
    optimizer: OptimizerChoice = None,
    microbatches: int = 1,
    no_sync: bool = False,
    tokens: int = 0,
    activations: int | Mapping[str, int] = 0,
    example_inputs: Any = None,
    bandwidths: Bandwidths | None = None,
    device: str = "cuda",
) -> Plan:
    """What :func:`fully_shard` would build of ``module``, and what a step would take, without a process group or memory.

    Units, sizes and layouts come from the functions that ``fully_shard`` itself uses; a step is walked through by the
    rules of its hooks. So bytes and collectives are exact, and the peak is that of all that flatshard holds, as long as
    modules run in the order in which they are registered. Times are a model: ``_plan_time.py`` says which.

    Example::

        with torch.device("meta"):
            model = GPT(...)
        plan = flatshard.plan(model, policy={Block}, world_size=64, optimizer=torch.optim.AdamW, tokens=8192)
        print(plan)
        plan.plot("plan.svg")

    What is planned is a step from the second on. Without ``example_inputs``, modules are taken to run one after the other,
    each once, in the order in which they are registered, and every trainable parameter to get a gradient. Gradients are
    dropped (``zero_grad()``) before a forward. Not counted: what a forward computes and autograd does not save, an
    optimizer's own temporary memory in ``step()``, a communicator's buffers, the allocator's fragmentation.

    Args:
        module: the module, whole, on any device; meta takes no memory. It is not changed.
        policy, mixed_precision, cpu_offload, ignored_states, backward_prefetch, forward_prefetch, prefetch_limit_bytes,
            reshard_after_forward, layout: as for :func:`fully_shard`.
        world_size: the number of ranks; for hybrid strategies also (replicas, ranks to shard over), as a 2-D mesh has them.
            Default there: shard within a node of ``bandwidths.gpus_per_node``.
        strategy: as for :func:`fully_shard`. The others over as many ranks are compared with it, in ``Plan.strategies``.
        optimizer: for the bytes of its state: a class or function that makes one of a list of parameters
            (``torch.optim.AdamW``, ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``), or one made of ``module``'s
            parameters, or a number of bytes for each element on a rank. It takes a step on stand-ins on the meta device.
            None: no state.
        microbatches: forwards and backwards in a step.
        no_sync: all but the last of them run under :func:`no_sync`. Else each is reduced.
        example_inputs: of ``module``'s forward: a tuple of arguments or a dict of keyword arguments, of which only shapes and
            dtypes count. A copy on the meta device runs forward, and backward from the sum of its outputs. So the order of
            units, the gradients, what autograd saves and the floating-point operations are recorded, not assumed.
        tokens: without them: positions that each rank computes in a microbatch. Takes a forward for 2 operations for each
            token and element of matrices, embeddings left out, and backward for twice that. 0: computing takes no time.
        activations: without them: bytes that autograd saves for each unit but the outermost, or by FQN.
        bandwidths: the hardware, for times.
        device: the type of device to train on. On ``"cpu"`` there is nothing to offload.

    Raises:
        TypeError, ValueError: an argument is wrong; the message says which and what to do. Or something is sharded already.
        NotImplementedError: what is not modelled: tensor subclasses (DTensors), other collectives for single units, reentrant
            checkpoints.
    """
    bandwidths = Bandwidths() if bandwidths is None else bandwidths
    strategy = as_enum(ShardingStrategy, strategy, "strategy")
    ranks = _ranks(world_size, strategy, bandwidths)
    config = unit_config(
        strategy=strategy,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        collectives=None,
        prefetch_limit_bytes=prefetch_limit_bytes,
        reshard_after_forward=reshard_after_forward,
        layout=layout,
    )
    check_plannable(module)
    validate.check_module(module)
    step = StepChoice(optimizer, microbatches, no_sync, tokens, activations, example_inputs, bandwidths)
    choice = choose(module, policy, config, ignored_states, ranks.shards)
    check_parameters(choice.planned)
    if any(c.collectives is not None for c in choice.configs.values()):
        raise NotImplementedError(
            "plan: the policy overrides collectives for a unit; only the built-in ones are planned"
        )
    walked = Walked(module, choice, build(choice, ranks, device), step)
    numbers = walked.report(compare(walked))
    return Plan(**{f.name: getattr(numbers, f.name) for f in fields(numbers)})


def _ranks(world_size: Any, strategy: ShardingStrategy, bandwidths: Bandwidths) -> Ranks:
    """``world_size`` as ranks to shard over and replicas."""
    sizes = world_size if isinstance(world_size, tuple) else (world_size,)
    if not sizes or len(sizes) > 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(
            "plan: world_size must be a number of ranks of at least 1, or for hybrid strategies (replicas, ranks to shard "
            f"over), got {world_size!r}"
        )
    if len(sizes) == 2:
        if not strategy.is_hybrid:
            raise ValueError(
                f"plan: world_size={world_size} is (replicas, ranks to shard over), which hybrid strategies take, but "
                f"strategy is {strategy}: pass the number of ranks, or strategy=ShardingStrategy.HYBRID_SHARD"
            )
        return Ranks(sizes[1], sizes[0])
    (total,) = sizes
    if not strategy.is_hybrid:
        return Ranks(total)
    if total % bandwidths.gpus_per_node:
        raise ValueError(
            f"plan: {strategy} shards within a node, but {bandwidths.gpus_per_node} GPUs a node do not divide {total} ranks: "
            "pass world_size=(replicas, ranks to shard over), or bandwidths=Bandwidths(gpus_per_node=...)"
        )
    return Ranks(bandwidths.gpus_per_node, total // bandwidths.gpus_per_node)
