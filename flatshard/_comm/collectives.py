"""The interface of collectives, which users can implement, and what some can do beyond it.

The built-in implementations are in ``_comm/backends.py``. Optional abilities are read once per runtime: nobody else asks a
class for its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.distributed as dist

GATHER, REDUCE, EXCHANGE, NUMBERS = 0, 1, 2, 3
"""Kinds of collectives, added to a unit's tag. All ranks have the same order only within a kind: see ``GlooCollectives``.
``NUMBERS`` are a few numbers of several units, such as a norm. Their label names the question, and has the tag 0."""

KINDS = 4
"""The number of kinds. Tags of units are multiples of it."""

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
"""The names of a unit's collectives, in events, errors and ranges of a profiler."""


class Pending(Protocol):
    """A collective that has been issued.

    Example::

        class Average:
            def __init__(self, work, output, world_size):
                self.work, self.output, self.world_size = work, output, world_size

            def wait(self):
                self.work.wait()
                self.output.div_(self.world_size)

        def hook(state, gradient, output):
            work = dist.reduce_scatter_tensor(output, gradient, group=state.process_group, async_op=True)
            return Average(work, output, state.world_size)  # backward continues meanwhile

        flatshard.comm.register_comm_hook(model, None, hook)
    """

    def wait(self) -> object:
        """Make the result readable: by the host on CPU, by the current stream on an accelerator.

        It is called once, and once more after an interrupt.

        Raises:
            Exception: the collective failed. Its output is not read.
        """


class Done:
    """A :class:`Pending` that is already complete."""

    __slots__ = ()

    def wait(self) -> None: ...


@runtime_checkable
class Collectives(Protocol):
    """The collectives of the units of one :func:`fully_shard` call. Write a class with these methods to replace them.

    ``fully_shard(..., collectives=factory)`` takes a factory ``(group, device) -> Collectives``, which may be the class
    itself. It is called once per process group, device and factory (so give the same factory to several calls). All ranks
    call it in the same order, before anything is changed. Hold the group weakly, or wrap :func:`builtin_collectives`, which
    holds it weakly: a model in a reference cycle must not keep a destroyed group alive.

    All tensors are 1-D and contiguous, on the device; the group has ``N`` ranks. Dtypes are those of the parameters;
    if a backend may not support a dtype, ``all_gather`` gets bytes (``uint8``). All ranks call ``all_gather`` in the same
    order. All ranks call ``reduce_scatter`` and ``all_reduce``, taken together, in the same order. But a gather may come
    before a reduction on one rank and after it on another. On an accelerator a side stream is current during the call:
    enqueue the work on it, or make ``wait`` order it behind the work.

    An exception from the call or from ``wait`` reaches the user as a :class:`CollectiveError` with the unit's name.

    A method ``allocate(numel, dtype, device)`` that returns a 1-D tensor is optional. If there is one, it allocates all
    memory that the collectives read and write in training: use it for symmetric memory, registered buffers or an NCCL
    memory pool. Buffers for gathered parameters and for inputs of reductions are then allocated once and used in turn, as
    with ``fully_shard(static_buffers=True)``; the outputs of reductions, which become ``.grad``, are new each time. All
    ranks ask for the same sizes in the same order.

    Example::

        class Counting:
            exact = True

            def __init__(self, group, device):
                self.inner, self.gathered = flatshard.comm.builtin_collectives(group, device), 0

            def all_gather(self, output, shard):
                self.gathered += output.nbytes
                return self.inner.all_gather(output, shard)

            def reduce_scatter(self, output, input):
                return self.inner.reduce_scatter(output, input)

            def all_reduce(self, tensor):
                return self.inner.all_reduce(tensor)

        flatshard.fully_shard(model, policy={Block}, collectives=Counting)
    """

    @property
    def exact(self) -> bool:
        """Whether ``all_gather`` delivers every shard bit for bit.

        If False, values that must be exact (``summon_full_params``) use the backend's own collectives instead. If a forward
        changes parameters in place, only the changed elements are written back.
        """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill ``output`` (N * S elements) with every rank's ``shard`` (S), in rank order.

        ``shard`` is a view of this rank's place in ``output``, which already has its values. All ranks must end with the
        same ``output``. So a collective that is not exact must overwrite this rank's shard, too.
        """

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Make ``output`` (S elements) this rank's shard of the average of ``input`` (N * S) over the ranks.

        ``input`` may be overwritten. The average of ``-0.0`` on all ranks should be ``-0.0``, which marks parameters that a
        rank did not use. If the sign is lost, a parameter that no rank used gets a gradient of zero instead of None.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Replace ``tensor`` by its average over the ranks, the same on all of them. For ``-0.0`` see above."""


Addressed = Sequence[tuple[torch.Tensor, int]]
"""Tensors, each with its destination or source: a rank of the group."""

CollectivesFactory = Callable[[dist.ProcessGroup, torch.device], Collectives]

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Returns a 1-D tensor of so many elements."""

LendMemory = Callable[[int, torch.dtype, bool], torch.Tensor | None]
"""Returns memory for so many elements, or None if there is none to lend: see ``GlooCollectives._lend_memory``."""

EnsureMemory = Callable[[], object]
"""Allocates the memory of a tensor unless it has some."""

_Method = TypeVar("_Method", bound=Callable[..., object])


@dataclass(frozen=True)
class Capabilities:
    """Abilities of :class:`Collectives` beyond the three methods. The defaults are those of a class with nothing else."""

    exact: bool
    """Whether ``all_gather`` delivers every shard bit for bit."""
    out_of_place: bool = False
    """Whether ``all_gather`` also accepts a shard outside of ``output``, and copies it there: this saves a copy."""
    widens: bool = False
    """Whether ``reduce_scatter`` also accepts an input of a narrower dtype than the output's, and adds in the output's."""
    compared: tuple[int, ...] = (GATHER, REDUCE)
    """Kinds of collectives that all ranks issue in the same order: see ``OrderCheck``."""
    allocate: Allocate | None = None
    """Allocates all memory that the collectives read and write in training."""
    lend_memory: LendMemory | None = None
    """Lends memory for the input of a reduction."""
    gathers_late: bool = False
    """Whether ``all_gather`` has a fourth argument, ``ensure_output``: see :func:`gathers_late`."""
    regathers: bool = False
    """Whether inexact collectives also repeat gathers within the smaller groups of ``reshard_after_forward=int``."""


def gathers_late(all_gather: _Method) -> _Method:
    """Mark an ``all_gather`` with a fourth argument, ``ensure_output``, which allocates the memory of ``output``.

    With it, ``output`` has no memory before the call, and ``shard`` may have another dtype. The method is marked, not the
    class: a user's subclass may override it without the argument.
    """
    all_gather.__dict__["gathers_late"] = True
    return all_gather


def read_capabilities(collectives: Collectives) -> Capabilities:
    """Read the optional attributes of ``collectives``. :class:`Collectives` and ``builtin_collectives`` document them."""
    return Capabilities(
        exact=collectives.exact,
        out_of_place=getattr(collectives, "out_of_place", False),
        widens=getattr(collectives, "widens", False),
        compared=getattr(collectives, "compared", (GATHER, REDUCE)),
        allocate=getattr(collectives, "allocate", None),
        lend_memory=getattr(collectives, "_lend_memory", None),
        gathers_late=getattr(collectives.all_gather, "gathers_late", False),
        regathers=getattr(collectives, "regathers", False),
    )


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as 1-D real numbers: gloo supports no complex numbers, and complex arithmetic loses -0.0."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
