"""The result of ``fit_to_memory``: a page that ``print`` shows, a picture, and the arguments of ``fully_shard``."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from flatshard._base.errors import name_list
from flatshard._base.names import plain_name
from flatshard._base.old_names import OldMember
from flatshard._composable.construct.groups import as_device
from flatshard._composable.fully_shard import fully_shard
from flatshard._composable.unit_config import UnitConfig
from flatshard.debug._describe import table
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.planning._optimizer import OptimizerChoice
from flatshard.planning._picture import draw, in_bytes
from flatshard.planning._records import CATEGORIES, Peak
from flatshard.planning._report import StepPlan

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class UnitFit:
    """The choice for one unit.

    Example::

        fit = flatshard.fit_to_memory(model, bytes_per_rank="1 MiB", world_size=4, optimizer=8, example_inputs=(batch,))
        print([unit.fqn for unit in fit.units if unit.recompute])
    """

    fqn: str  # of the module
    strategy: str  # a name of ``ShardingStrategy``: how long its parameters stay gathered
    recompute: bool  # whether it computes its forward again in backward
    offload: bool = False  # whether its parameters, gradients and optimizer state are on the host


class Tradeoff(NamedTuple):
    """A thing that was given up.

    Example::

        fit = flatshard.fit_to_memory(model, bytes_per_rank="1 MiB", world_size=4, optimizer=8, example_inputs=(batch,))
        for each in fit.tradeoffs:
            print(each.unit, each.what, each.peak, each.sent_nbytes, each.flops)
    """

    unit: str  # the FQN, or those of several; "": of all units
    what: str  # in words
    peak: int  # bytes, with this and everything before it
    sent_nbytes: int  # what it costs: bytes sent by a rank in a step
    copied_nbytes: int  # what it costs: bytes copied between a rank's host and device in a step
    flops: int  # what it costs: operations computed again by a rank in a step


class Baseline(NamedTuple):
    """A step in which nothing is given up.

    Example::

        fit = flatshard.fit_to_memory(model, bytes_per_rank="1 MiB", world_size=4, optimizer=8, example_inputs=(batch,))
        print(fit.baseline.nbytes)
    """

    nbytes: int  # at its peak
    sent_nbytes: int  # by a rank, in a step
    flops: int  # floating-point operations in a step


@dataclass(frozen=True, repr=False)
class MemoryFit:
    """The result of :func:`fit_to_memory`. ``print`` shows it as a page.

    Example::

        fit = flatshard.fit_to_memory(model, bytes_per_rank="1 MiB", world_size=4, optimizer=8, example_inputs=(batch,))
        print(fit.peak.nbytes, fit.margin)
        print(fit.arguments["policy"])  # flatshard.fully_shard(model, **fit.arguments) does it
    """

    budget: int  # bytes on a rank
    plan: StepPlan
    """The plan of what was chosen: its memory, collectives and operations."""
    baseline: Baseline  # the same step, if nothing were given up
    units: tuple[UnitFit, ...]  # without the outermost one, in module order
    tradeoffs: tuple[Tradeoff, ...]  # in this order
    arguments: dict[str, Any]
    """The arguments of :func:`fully_shard`, with recomputation: ``fully_shard(model, **fit.arguments)``."""
    found: str  # where the units come from
    notes: tuple[str, ...]  # what was not possible
    batch: int | None = None  # rows of the largest microbatch, if it was asked for
    makes_optimizer: OptimizerChoice = None  # the argument ``optimizer`` of ``fit_to_memory``
    microbatches: int = 1  # the argument ``microbatches`` of ``fit_to_memory``
    no_sync: bool = False  # whether all microbatches but the last run under :func:`no_sync`
    offloads_optimizer: bool = False  # whether optimizer state is on the host: ``optimizer()`` makes one that does it

    given_up = OldMember("tradeoffs")
    unlimited = OldMember("baseline")

    @property
    def peak(self) -> Peak:
        """The predicted peak, and where in the step it is."""
        return self.plan.total_peak

    @property
    def margin(self) -> int:
        """Bytes between the peak and the budget."""
        return self.budget - self.peak.nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends in a step because of what was given up."""
        return self.plan.sent_nbytes - self.baseline.sent_nbytes

    @property
    def flops(self) -> int:
        """Operations that a rank computes again in a step."""
        return (self.plan.flops or 0) - self.baseline.flops

    @property
    def copied_nbytes(self) -> int:
        """Bytes that are copied between a rank's host and device in a step."""
        return sum(each.copied_nbytes for each in self.tradeoffs)

    def apply(self, module: M, **arguments: Any) -> M:
        """Call ``fully_shard(module, **fit.arguments)``, with ``arguments`` beside, such as ``process_group=``.

        Raises:
            ValueError: ``module`` is not the model that was fitted: its units, elements, dtypes or device differ. Or there
                are other ranks, or ``arguments`` change what was fitted.
        """
        usual = {
            name: each.default for name, each in inspect.signature(fully_shard).parameters.items()
        } | self.arguments
        planned = {"policy", "ignored_states", *(each.name for each in dataclasses.fields(UnitConfig))}
        changed = [name for name, value in arguments.items() if name in planned and value != usual[name]]
        if changed:
            raise ValueError(
                f"fit.apply: {name_list(changed)} would change what was fitted: give it to flatshard.fit_to_memory, or call "
                "fully_shard(module, **fit.arguments | {...})"
            )
        names = {plain_name(name) for name, _ in module.named_modules()}
        if missing := [unit.fqn for unit in self.units if unit.fqn not in names]:
            raise ValueError(
                f"fit.apply: this {type(module).__name__} has no module {name_list(missing, 3)}: it is not the model "
                "that was fitted"
            )
        numel = sum(p.numel() for p in module.parameters())
        if numel != self.plan.numel and not self.arguments.get("ignored_states"):
            raise ValueError(
                f"fit.apply: this {type(module).__name__} has {numel:,} elements, and {self.plan.numel:,} were fitted: "
                "call flatshard.fit_to_memory with this model"
            )
        dtypes = {fqn: flat.dtype for unit in self.plan.units for flat in unit.flats for fqn in flat.fqns}
        params = {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
        if cast := [name for name, dtype in dtypes.items() if name in params and params[name].dtype is not dtype]:
            raise ValueError(
                f"fit.apply: in this {type(module).__name__} {name_list(cast, 3)} has {params[cast[0]].dtype}, and "
                f"{dtypes[cast[0]]} was fitted: cast the model first, or call flatshard.fit_to_memory with this model"
            )
        moved = as_device(arguments.get("device_id"))
        kinds = {p.device.type for p in params.values()} - {"meta"} if moved is None else {moved.type}
        if others := sorted(kinds - {self.plan.device}):
            raise ValueError(
                f"fit.apply: fitted for device={self.plan.device!r}, and this {type(module).__name__} would train on "
                f"{others[0]!r}: move it, pass device_id=, or call flatshard.fit_to_memory(..., device={others[0]!r})"
            )
        mesh = arguments.get("device_mesh")
        found = mesh.size() if mesh is not None else dist.get_world_size(arguments.get("process_group"))
        if found != self.plan.world_size.total:
            raise ValueError(
                f"fit.apply: fitted for {self.plan.world_size}, and there are {found}: call "
                f"flatshard.fit_to_memory(..., world_size={found})"
            )
        return fully_shard(module, **self.arguments | arguments)

    def optimizer(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """Make the fitted optimizer of ``params``, as an ``OffloadedOptimizer`` if its state is on the host.

        Raises:
            TypeError: ``fit_to_memory`` was given no class or function that makes one.
        """
        make: Any = self.makes_optimizer
        if not callable(make):
            raise TypeError(
                f"fit.optimizer: fit_to_memory was given {make!r}, not a class or a function that makes an optimizer"
            )
        return OffloadedOptimizer(params, make, **options) if self.offloads_optimizer else make(params, **options)

    def __repr__(self) -> str:
        return (
            f"MemoryFit({self.plan.module} over {self.plan.world_size}: peak {in_bytes(self.peak.nbytes)} of "
            f"{in_bytes(self.budget)}, {len(self.tradeoffs)} given up)"
        )

    def __str__(self) -> str:
        peak, ranks = self.peak, self.plan.world_size
        share = f"{self.margin / self.budget:.1%}"
        lines = [
            f"{self.plan.module} over {ranks}: fits into {in_bytes(self.budget)}",
            f"peak {peak.nbytes:,} bytes ({in_bytes(peak.nbytes)}), in {peak.phase} at unit {peak.unit or '<root>'!r}; "
            f"{in_bytes(self.margin)} ({share}) below the budget",
            *([] if self.batch is None else [f"the largest microbatch: {self.batch} rows"]),
            f"without a budget the peak would be {in_bytes(self.baseline.nbytes)}",
            "",
            f"units: {len(self.units)} of {self.found}, and the rest of the model",
            *table(_unit_rows(self.units), left=4),
            *(["", self._accumulation] * (self.microbatches > 1)),
            *(
                ["", "optimizer: fit.optimizer(model.parameters()), with its state on the host"]
                * self.offloads_optimizer
            ),
            "",
            "given up, in this order" if self.tradeoffs else "nothing has to be given up",
            *(table(_given_rows(self.tradeoffs), left=2) if self.tradeoffs else ()),
            "",
            f"all of it costs in a step: {in_bytes(self.sent_nbytes)} sent more ({in_bytes(self.plan.sent_nbytes)} in all), "
            + (f"{in_bytes(self.copied_nbytes)} copied, " if self.copied_nbytes else "")
            + f"{self.flops:,} operations computed again",
            "",
            "memory at the peak",
            *table([["", "bytes"], *([c, in_bytes(n)] for c in CATEGORIES if (n := getattr(peak.memory, c)))]),
            *(["", *(f"- {note}" for note in self.notes)] if self.notes else ()),
        ]
        return "\n".join(lines)

    @property
    def _accumulation(self) -> str:
        under = "all but the last under flatshard.no_sync(model)" if self.no_sync else "each reduced, without no_sync"
        return f"microbatches: {self.microbatches}, {under}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw what is in memory over the step, by category, as an SVG, with the budget as a line.

        Raises:
            ValueError: ``path`` does not end in ``.svg``.
        """
        strategies = ", ".join(dict.fromkeys(unit.strategy for unit in self.units)) or self.plan.strategy
        draw(path, self.plan.samples, f"{self.plan.module}, {strategies} over {self.plan.world_size}", self.budget)


def _runs(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"


def names_in_short(names: Sequence[str], units: Sequence[str]) -> str:
    """Return a short text for ``names``: the first and the last, if they are in a row in ``units``."""
    first = units.index(names[0])
    return _runs(names) if tuple(units[first : first + len(names)]) == tuple(names) else name_list(names, 3)


def _unit_rows(units: Sequence[UnitFit]) -> list[list[str]]:
    hosts = any(unit.offload for unit in units)
    rows = [["unit", "strategy", "recomputes", *["on the host"][: int(hosts)], ""]]
    for kept, group in itertools.groupby(units, key=lambda unit: (unit.strategy, unit.recompute, unit.offload)):
        says = ["yes" if each else "no" for each in kept[1 : 2 + hosts]]
        rows.append([_runs([unit.fqn for unit in group]), kept[0], *says, ""])
    return [row[:-1] for row in rows]


def _given_rows(given: Sequence[Tradeoff]) -> list[list[str]]:
    copies = any(each.copied_nbytes for each in given)
    rows = [["what", "of", "peak after it", "sent more", *["copied"][: int(copies)], "computed again"]]
    for each in given:
        copied = [in_bytes(each.copied_nbytes)] if copies else []
        rows.append(
            [each.what, each.unit or "all", in_bytes(each.peak), in_bytes(each.sent_nbytes), *copied, f"{each.flops:,}"]
        )
    return rows
