"""Norms, sums and extremes of full tensors, computed from the shards that ranks hold of them.

Everything here takes two steps. Each rank computes one number for its own shard (``Aggregate.local``). Then the ranks that
hold the shards combine their numbers, by one all-reduce for any number of tensors (``Aggregate.over_ranks``). The norm of a
gradient, clipping, ``GradScaler``'s overflow flag, ``gradient_statistics`` and ``segment_reduce`` all use it.

[Note: Different questions]
Each all-reduce carries a fingerprint of what it computes. Ranks may ask for norms of different gradients: if ``.grad`` is
None on one rank only, that rank skips a norm that the others compute. Their all-reduces would match nevertheless, and
silently give wrong numbers. So different fingerprints raise an error. On an accelerator, where the host does not wait for
results, they make the result NaN.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from flatshard._comm.composite_groups import ExpertRanks
from flatshard._comm.progress import SAME_NUMBERS
from flatshard._comm.rank_group import RankGroup

plainly = torch._C.DisableTorchFunctionSubclass
"""``with plainly():`` functions treat tensors of every subclass as plain tensors, and return plain tensors."""

G = TypeVar("G", bound=RankGroup)


class Aggregate(NamedTuple):
    """A number to compute for each full tensor."""

    op: Literal["norm", "sum", "max", "min"]
    ord: float = 2.0
    """The order of the norm, if ``op`` is ``"norm"``: any order of a vector norm; 0 counts the nonzero elements."""

    def of(self, parts: Sequence[torch.Tensor], runtimes: Sequence[RankGroup | None], question: str) -> torch.Tensor:
        """Return the number of each full tensor: 1-D, float64. ``parts``: this rank's shard of each. See ``over_groups``."""
        return self.over_groups(self.local(parts, device_for(parts, runtimes)), runtimes, question)

    def local(self, parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the number of each of ``parts``, on this rank only: 1-D, float64, on ``device``.

        At least single precision is used. Numbers of the same dtype are copied to ``device`` together.
        """
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, part in enumerate(parts):
            kinds.setdefault((part.device, part.dtype), []).append(index)
        numbers = [torch.empty(0, device="cpu")] * len(parts)
        for (_, dtype), indices in kinds.items():
            of_kind = [parts[i] for i in indices]
            if self.op == "norm":
                found = local_norms(
                    of_kind, self.ord, None if dtype.is_complex else torch.promote_types(dtype, torch.float)
                )
            else:
                found = [self._of_part(part) for part in of_kind]
            for index, number in zip(indices, torch.stack(found).to(device, torch.float64).unbind(), strict=True):
                numbers[index] = number
        return torch.stack(numbers) if numbers else torch.empty(0, dtype=torch.float64, device=device)

    def of_pieces(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the number of ``pieces`` of one tensor together, on this rank only: 0-dim, float64. Of no norm."""
        numbers = torch.stack([self._of_part(piece) for piece in pieces])
        return numbers.sum() if self.op == "sum" else numbers.amax() if self.op == "max" else numbers.amin()

    def _of_part(self, part: torch.Tensor) -> torch.Tensor:
        if self.op == "sum":
            return part.sum(dtype=torch.float64)
        if not part.numel():
            return torch.full((), -math.inf if self.op == "max" else math.inf, dtype=torch.float64, device=part.device)
        return (part.amax() if self.op == "max" else part.amin()).double()

    def over_ranks(self, numbers: torch.Tensor, runtime: RankGroup, question: str) -> torch.Tensor:
        """Combine the local ``numbers`` of the ranks of ``runtime``, which hold the shards: one all-reduce.

        Args:
            numbers: floating point, any shape.
            runtime: of the ranks that hold the shards. All of them call this.
            question: a description, the same text on all ranks. [Note: Different questions]

        Returns:
            float64, in the shape and on the device of ``numbers``, equal on all ranks. NaN if any rank has NaN.
        """
        flat = numbers.detach().reshape(-1).to(runtime.device, torch.float64)  # powers may overflow float32
        op = {math.inf: "max", -math.inf: "min", 0: "sum"}.get(self.ord, "norm") if self.op == "norm" else self.op
        if op == "norm":
            flat = checked_all_reduce(flat.pow(self.ord), "sum", runtime, question).pow(1 / self.ord)
        elif op == "sum":
            flat = checked_all_reduce(flat, "sum", runtime, question)
        else:
            flat = flat if op == "max" else -flat
            is_nan = flat.isnan()  # sent besides: not every backend's maximum propagates NaN
            both = torch.cat([torch.where(is_nan, -math.inf, flat), is_nan.double()])
            most, any_nan = checked_all_reduce(both, "max", runtime, question).chunk(2)
            flat = torch.where(any_nan > 0, math.nan, most if op == "max" else -most)
        return flat.reshape(numbers.shape).to(numbers.device)

    def over_groups(self, numbers: torch.Tensor, runtimes: Sequence[RankGroup | None], question: str) -> torch.Tensor:
        """Combine the local ``numbers[i]`` over the ranks of ``runtimes[i]``: one all-reduce for each process group.

        A tensor whose runtime is None is full on every rank, so its number stays as it is.
        """
        rows = list(numbers.unbind())
        for runtime in in_order(runtimes):
            indices = [i for i, each in enumerate(runtimes) if each == runtime]
            combined = self.over_ranks(torch.stack([rows[i] for i in indices]), runtime, question)
            for index, row in zip(indices, combined.unbind(), strict=True):
                rows[index] = row
        return torch.stack(rows) if rows else numbers


def device_for(parts: Sequence[torch.Tensor], runtimes: Iterable[RankGroup | None]) -> torch.device:
    """Return the device to combine numbers of ``parts`` on: the one that ranks communicate on, if they do."""
    devices = [runtime.device for runtime in in_order(runtimes)] + [part.device for part in parts]
    return devices[0] if devices else torch.device("cpu")


def local_norms(parts: Sequence[torch.Tensor], ord: float, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """Call ``torch._foreach_norm`` on shards of one dtype and device, which may be empty."""
    filled = [part for part in parts if part.numel()]  # with many ranks, most shards are empty
    norms = list(torch._foreach_norm(filled, ord, dtype=dtype)) if filled else []
    if len(filled) == len(parts):
        return norms
    empty = torch.full(
        (len(parts) - len(filled),),
        math.inf if ord < 0 else 0.0,
        dtype=(dtype or parts[0].dtype).to_real(),
        device=parts[0].device,
    )
    found, rest = iter(norms), iter(empty.unbind())
    return [next(found if part.numel() else rest) for part in parts]


def total_norm(
    sharded: Mapping[RankGroup, torch.Tensor],
    full: torch.Tensor | None,
    ord: float,
    question: str,
    *,
    average_full: bool = False,
) -> torch.Tensor:
    """Compute the norm of many tensors as if they were one vector: one all-reduce for each process group.

    Args:
        sharded: for each process group, the norm of all shards that this rank holds: 0-dim.
        full: the norm of all tensors that each rank has in full, 0-dim, or None if there are none.
        ord: of the norm, and not 0.
        question: see :meth:`Aggregate.over_ranks`.
        average_full: replace ``full`` by its average over the ranks of the first group, in the same all-reduce.
    """
    totals = [] if full is None else [full]
    together: dict[RankGroup, list[torch.Tensor]] = {}
    for runtime, norm in sharded.items():
        every = runtime.around if isinstance(runtime, ExpertRanks) else runtime
        together.setdefault(every, []).append(norm)
    sharded = {
        r: norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), ord)
        for r, norms in together.items()
    }
    for number, runtime in enumerate(in_order(sharded)):
        norm, norms = sharded[runtime], Aggregate("norm", ord)
        if number == 0 and full is not None and average_full:
            norm, of_copies = norms.over_ranks(torch.stack([norm, full]), runtime, question).to(norm.dtype).unbind()
            totals[0] = of_copies if math.isinf(ord) else of_copies / runtime.world_size ** (1 / ord)
        else:
            norm = norms.over_ranks(norm, runtime, question).to(norm.dtype)
        totals.append(norm)
    result: torch.Tensor = torch.linalg.vector_norm(torch.stack(totals), ord) if len(totals) > 1 else totals[0]
    return result


def in_order(runtimes: Iterable[G | None]) -> list[G]:
    """Return the process groups among ``runtimes``, in an order that is the same on all ranks."""
    return sorted({runtime for runtime in runtimes if runtime is not None}, key=lambda runtime: runtime.number)


def checked_all_reduce(
    values: torch.Tensor, op: Literal["sum", "max"], runtime: RankGroup, question: str
) -> torch.Tensor:
    """Compute the sum or maximum of 1-D ``values`` over the ranks, with a fingerprint. [Note: Different questions]"""
    tag = zlib.crc32(question.encode()) & 0xFFFFF  # 20 bits: the sum of its square is exact for up to 2^13 ranks
    sent = values.new_empty(values.numel() + 2)
    sent[:-2] = values
    sent[-2].fill_(tag)
    sent[-1].fill_(tag * tag if op == "sum" else -tag)
    runtime.all_reduce_now(sent, op, question)
    ranks = runtime.world_size if op == "sum" else 1
    same = (sent[-2] == ranks * tag) & (sent[-1] == ranks * (tag * tag if op == "sum" else -tag))
    if runtime.device.type != "cpu":
        return torch.where(same, sent[:-2], math.nan)
    if not same:
        raise RuntimeError(
            f"rank {runtime.rank} asked for {question}, but another rank asked for something else at the same time. "
            f"{SAME_NUMBERS}. All ranks need the same order, also for gradients that are None on some ranks. For the norm of "
            "all call flatshard.optim.get_total_norm(model) or flatshard.clip_grad_norm_(model, max_norm), for one norm per "
            "parameter flatshard.optim.gradient_statistics(model)"
        )
    return sent[:-2]
