"""Collectives that do not communicate, to measure how much of a step is communication."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import checkout  # noqa: F401
import torch
import torch.distributed as dist

from flatshard._comm.backends import BuiltinCollectives, builtin_collectives
from flatshard._comm.collectives import Collectives, Done, Pending


@dataclass(frozen=True)
class NoCommunication:
    """Skip all-gathers, reductions or both, for timing only: results are garbage. It warns when it is used.

    >>> flatshard.fully_shard(model, policy={Block}, collectives=NoCommunication())

    A step's time minus its time with this is the cost of communication that compute does not hide. An all-gather fills its
    output with this rank's shard, as these numbers are finite, and arithmetic on denormals and NaN may be slower. A reduction
    returns this rank's shard of its own gradients. Each is a local copy. The initial broadcast and ``summon_full_params``
    still communicate. FSDP1 has the environment variables ``FSDP_USE_FAKE_ALL_GATHER`` and ``FSDP_USE_FAKE_REDUCE`` for this.

    Args:
        all_gather: leave out the all-gathers of parameters.
        reduce: leave out the reductions of gradients.

    Raises:
        ValueError: neither is left out.
    """

    all_gather: bool = True
    reduce: bool = True

    def __post_init__(self) -> None:
        if not (self.all_gather or self.reduce):
            raise ValueError("NoCommunication(all_gather=False, reduce=False) leaves out nothing: do not pass it")

    def __call__(self, group: dist.ProcessGroup, device: torch.device) -> Collectives:
        """Return the collectives for a process group and a device; ``fully_shard`` calls this."""
        left_out = [what for what, out in (("all-gathers", self.all_gather), ("reductions", self.reduce)) if out]
        warnings.warn(
            f"NoCommunication: {' and '.join(left_out)} are left out. The parameters and gradients of this model "
            "are GARBAGE: use it for timing only",
            RuntimeWarning,
            stacklevel=2,
        )
        return _NoCommunication(builtin_collectives(group, device), self)


class _NoCommunication:
    def __init__(self, inner: BuiltinCollectives, choice: NoCommunication) -> None:
        self._inner = inner
        self._choice = choice
        self.exact = not choice.all_gather
        self.compared = ()  # a comparison would communicate
        self.regathers = True  # also in the smaller groups of `reshard_after_forward=int`
        self.out_of_place, self.widens = inner.out_of_place, inner.widens

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        if not self._choice.all_gather:
            return self._inner.all_gather(output, shard)
        rows, rank = output.view(self._inner.size, -1), self._inner.rank
        for row in (rows[:rank], rows[rank + 1 :]):
            row.copy_(shard)
        if rows[rank].data_ptr() != shard.data_ptr():
            rows[rank].copy_(shard)
        return Done()

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        if not self._choice.reduce:
            return self._inner.reduce_scatter(output, input)
        output.copy_(input.view(self._inner.size, -1)[self._inner.rank])
        return Done()

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        return Done() if self._choice.reduce else self._inner.all_reduce(tensor)
