"""``describe``: the units of a sharded module and their flat parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flatshard._base.config import ShardingStrategy, Until
from flatshard._comm.mesh_runtime import MeshRuntime
from flatshard._composable.find import units_below, units_of
from flatshard._composable.state import Unit
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import ParamInfo


@dataclass(frozen=True)
class FlatDescription:
    """A flat parameter: the parameters of a unit that are gathered together. Sizes are numbers of elements.

    Example::

        for flat in flatshard.describe(model).units[0].flats:
            print(flat.fqns, flat.shapes, flat.dtype, flat.padded_numel - flat.numel)
    """

    fqns: tuple[str, ...]  # of its parameters
    shapes: tuple[tuple[int, ...], ...]  # of the full parameters
    dtype: torch.dtype  # of the sharded parameters: the master weights
    compute_dtype: torch.dtype  # of the unsharded parameters
    grad_dtype: torch.dtype  # of ``.grad``; the promoted one if parameters have several
    reduce_dtype: torch.dtype  # in which gradients are reduced
    trainable: bool  # whether its parameters require gradients; all do, or none
    numel: int  # elements of the full parameters
    padded_numel: int  # elements on all ranks, with padding
    shard_numel: int  # elements on this rank, with padding
    world_size: int  # ranks that these elements are sharded over
    kept_numel: int  # gathered elements that this rank keeps until the parameters change
    cuts: tuple[str, ...]  # where each parameter may be cut: "elements", "rows", "blocks of 64", "whole"


@dataclass(frozen=True)
class UnitDescription:
    """A unit of a sharded module.

    Example::

        units = {unit.fqn: unit for unit in flatshard.describe(model).units}
        print(units["0"].module, units["0"].strategy, units["0"].state)
    """

    fqn: str  # "" is the root
    module: str  # class name; "LayerNorm, Linear" for a unit of two modules
    strategy: str  # a name of ``ShardingStrategy``
    state: str  # such as "sharded" or "unsharded"
    flats: tuple[FlatDescription, ...]  # one for each dtype, and for trainable and frozen parameters
    buffer_dtypes: tuple[torch.dtype, ...]  # of floating-point buffers in this unit and in no unit below it
    reshard_after_forward: bool | int | None = None  # None: the strategy's default; an int: to that many ranks


@dataclass(frozen=True)
class Description:
    """All units of a module, in module order. ``str()`` is a table.

    Example::

        description = flatshard.describe(model)
        print(description.numel, "elements in all,", description.shard_nbytes, "bytes here")
    """

    units: tuple[UnitDescription, ...]
    world_size: int  # ranks that parameters are sharded over
    device: torch.device  # where they compute
    verbose: bool = False  # `str()` lists every parameter

    @property
    def numel(self) -> int:
        return sum(f.numel for u in self.units for f in u.flats)

    def _ranks(self, unit: UnitDescription, flat: FlatDescription) -> str:
        """Return how many ranks ``flat`` is sharded over, if not as many as the rest of the module, as text."""
        usual = flat.world_size == self.world_size or ShardingStrategy[unit.strategy].is_replicated
        return "" if usual else f" of {flat.world_size} ranks"

    @property
    def shard_nbytes(self) -> int:
        """Bytes of parameters that this rank holds between steps."""
        return sum(f.shard_numel * f.dtype.itemsize for u in self.units for f in u.flats)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of gathered parameters that this rank keeps between steps.

        These are full parameters under ``SHARD_OPTIM``, and the group's shards of them under ``HYBRID_FULL_SHARD``.
        """
        return sum(f.kept_numel * f.compute_dtype.itemsize for unit in self.units for f in unit.flats)

    def __str__(self) -> str:
        head = ("unit", "module", "strategy", "state", "dtype", "trainable", "params", "numel", "padding", "shard here")
        rows: list[tuple[str, ...]] = [head]
        for unit in self.units:
            name: tuple[str, ...] = (unit.fqn or "<root>", unit.module, _strategy(unit), unit.state)
            for flat in unit.flats:
                rows.append(
                    (
                        *name,
                        _dtypes(unit, flat),
                        "yes" if flat.trainable else "no",
                        f"{len(flat.fqns):,}",
                        f"{flat.numel:,}",
                        f"{flat.padded_numel - flat.numel:,}",
                        f"{flat.shard_numel:,}" + self._ranks(unit, flat),
                    )
                )
                name = ("", "", "", "")
                if self.verbose:
                    for fqn, shape, cut in zip(flat.fqns, flat.shapes, flat.cuts, strict=True):
                        cut = "" if cut == "elements" else cut
                        rows.append(("  " + fqn, "x".join(map(str, shape)) or "scalar", cut, *[""] * 7))
            if not unit.flats:
                rows.append((*name, "-", "-", "0", "0", "0", "0"))
        lines = table(rows, left=6)
        units, flats = (
            counted(len(self.units), "unit"),
            counted(sum(len(u.flats) for u in self.units), "flat parameter"),
        )
        lines.append(
            f"{units}, {flats}, {self.numel:,} elements over {counted(self.world_size, 'rank')} on {self.device.type}; "
            f"{self.shard_nbytes:,} bytes of parameters here between steps"
            + (f", and {self.kept_nbytes:,} of gathered ones" if self.kept_nbytes else "")
        )
        if any("/" in row[4] for row in rows):
            lines.append("dtypes: master/compute/gradient/reduce")
        return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return ``rows`` as aligned columns, the first ``left`` of them to the left, with a line below the first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, or ``8 ranks``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _strategy(unit: UnitDescription) -> str:
    if unit.reshard_after_forward is None:
        return unit.strategy
    return f"{unit.strategy}, reshard_after_forward={unit.reshard_after_forward}"


def _dtypes(unit: UnitDescription, flat: FlatDescription) -> str:
    four = (flat.dtype, flat.compute_dtype, flat.grad_dtype, flat.reduce_dtype)
    if len(set(four)) == 1:
        return str(flat.dtype).removeprefix("torch.")
    text = "/".join(_SHORT.get(d, str(d).removeprefix("torch.")) for d in four)
    if unit.buffer_dtypes and flat is unit.flats[0]:
        text += ", buffers " + "/".join(_SHORT.get(d, str(d)) for d in unit.buffer_dtypes)
    return text


def describe(module: nn.Module, *, verbose: bool = False) -> Description:
    """Describe the units that own ``module``'s parameters: FQNs, sizes, padding, dtypes, strategy, state. No communication.

    Example::

        print(flatshard.describe(model))  # a table
        numel = sum(flat.numel for unit in flatshard.describe(model).units for flat in unit.flats)

    Args:
        module: any module with sharded parameters.
        verbose: the table lists every parameter with its shape, below its unit.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: nothing in ``module`` is sharded.
    """
    units = units_of(module, "describe")
    runtime = units[0].runtime
    return Description(tuple(_describe(u) for u in units), runtime.world_size, runtime.device, verbose)


def _kept_numel(unit: Unit, flat: FlatParam) -> int:
    runtime, numel = flat.ranks.runtime, flat.layout.padded_numel
    if flat.unsharded.is_alias:
        return 0
    if isinstance(runtime, MeshRuntime) and runtime.exact is runtime:
        return numel // runtime.inner.world_size
    return numel if unit.config.strategy.placements.until is Until.CHANGE else 0


def _cut(info: ParamInfo) -> str:
    """Return in words where the parameter may be cut."""
    if info.block == 1:
        return "elements"
    if not info.by_rows:
        return f"blocks of {info.block}"
    row = math.prod(info.shape[1:])
    return "whole" if info.block >= info.numel else "rows" if info.block == row else f"{info.block // row} rows"


def _describe(unit: Unit) -> UnitDescription:
    flats = tuple(
        FlatDescription(
            tuple(info.fqn for info in f.layout.params),
            tuple(info.shape for info in f.layout.params),
            f.kind.dtype,
            f.kind.buffer_dtype,
            grads.dtypes.of_all,
            grads.dtypes.reduce,
            any(p.requires_grad for p in f.params),
            f.layout.numel,
            f.layout.padded_numel,
            f.layout.shard_numel,
            f.layout.world_size,
            _kept_numel(unit, f),
            tuple(map(_cut, f.layout.params)),
        )
        for f, grads in zip(unit.handle.flats, unit.handle.gradients.flats, strict=True)
    )
    below = {m for u in units_below(unit.module) if u is not unit for m in u.module.modules()}
    own = [m for m in unit.module.modules() if m not in below]
    buffers = dict.fromkeys(
        b.dtype for m in own for b in m._buffers.values() if b is not None and b.is_floating_point()
    )
    state = unit.handle.state.name.lower()
    return UnitDescription(
        unit.fqn,
        unit.kind,
        unit.config.strategy.name,
        state,
        flats,
        tuple(buffers),
        unit.config.reshard_after_forward,
    )
