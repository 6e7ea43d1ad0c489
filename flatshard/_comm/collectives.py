"""The interface of collectives, by which a user replaces them. What flatshard has itself is in ``_comm/backends.py``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from flatshard import _trace
from flatshard._errors import OutOfStepError


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Make the result readable: by the host on CPU, by the current stream on an accelerator. Called once, and
        once more if an interrupt ended the call.

        Raises:
            Exception: the collective failed. Nobody reads what it wrote.
        """


class Done:
    """A collective that had nothing to wait for."""

    __slots__ = ()

    def wait(self) -> None: ...


def settle(pending: list[Pending]) -> bool:
    """Wait for collectives, and ignore their errors, so that their memory can be freed. Empties the list.

    An interrupt leaves those in the list that are still under way.

    Returns:
        Whether all have ended. No: ranks are out of step, so some may never do, and memory is not to be freed.
    """
    ended = True
    while pending:
        try:
            pending[0].wait()
        except OutOfStepError:
            ended = False
        except Exception as e:
            _trace.logger.debug("a collective that nobody needs any more has failed: %s", e)
        del pending[0]
    return ended


class Works:
    """Async works of a CPU backend, or other pending collectives; then what is left to compute from what they brought.

    ``describe`` tells what the work of an index was for, when it fails. After an interrupt ``wait`` goes on where it was.
    """

    __slots__ = ("_describe", "_done", "_then", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        then: Callable[[], object] | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        self._works = list(works)
        self._done = 0  # works waited for: gloo would wait for another message
        self._then = then
        self._describe = describe

    def wait(self) -> None:
        while self._done < len(self._works):
            work = self._works[self._done]
            try:
                work.wait()
            except Exception as e:
                if self._describe is not None:
                    e.add_note(self._describe(self._done))
                    self._describe = None
                # The error's traceback holds us, and the caller frees the memory: let go of what could still write there.
                self._works, self._done = [work], 0
                raise
            except BaseException:  # an interrupt, which comes when the work's own wait has returned
                if getattr(work, "is_completed", bool)():
                    self._done += 1
                raise
            self._done += 1
        if self._then is not None:
            self._then()
            self._then = None


class Collectives(Protocol):
    """How the units of one :func:`fully_shard` call communicate: write a class like this to replace it.

    ``fully_shard(..., collectives=factory)`` takes a factory ``(group, device) -> Collectives``, which may be the class
    itself. It is called once per process group, device and factory (so give the same factory to several calls), on every
    rank in the same order, before anything is changed. Hold the group weakly or wrap :func:`builtin_collectives`, which
    does: a model in a reference cycle must not keep a destroyed group alive.

    All tensors are 1-D and contiguous, on the device; the group has ``N`` ranks. Dtypes are those of the parameters;
    where a backend may not know a dtype, ``all_gather`` gets bytes (``uint8``). Every rank makes the same calls in the
    same order within ``all_gather``, and within ``reduce_scatter`` and ``all_reduce`` together, but a gather may come before
    a reduction on one rank and after it on another. On an accelerator a call runs with a side stream current: enqueue the
    work there, or have ``wait`` order that stream behind it.

    What raises, at the call or in ``wait``, comes to the user as :class:`CollectiveError` with the unit's name.

    They may also have a method ``allocate(numel, dtype, device)`` that returns a 1-D tensor: then it makes all memory that
    they read and write in training, for symmetric memory, registered buffers or a pool of NCCL's own. Buffers for gathered
    parameters and for inputs of reductions are made once and used in turn, as by ``fully_shard(static_buffers=True)``; the
    outputs of reductions, which become ``.grad``, are new each time. All ranks ask for the same sizes in the same order.

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
        """Whether ``all_gather`` hands every shard over bit for bit.

        False: what must be exact (``summon_full_params``) goes through the backend's own collectives instead, and of
        parameters that a forward changes in place only the changed elements are written back.
        """

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill ``output`` (N * S elements) with every rank's ``shard`` (S), in rank order.

        ``shard`` is its place in ``output``, where this rank's values are already. All ranks must end with the same
        ``output``, also where it is not exact: then this rank's place is to be overwritten too.
        """

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Make ``output`` (S elements) this rank's part of the average over the ranks of ``input`` (N * S).

        ``input`` may be overwritten. Averages of ``-0.0`` alone should be ``-0.0``: it marks parameters that a rank did
        not use, and one that no rank used gets a gradient of zero in place of None where that is lost.
        """

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Make ``tensor`` its average over the ranks, the same on all of them. ``-0.0`` as above."""


CollectivesFactory = Callable[[dist.ProcessGroup, torch.device], Collectives]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """1-D and real. For gloo, which knows no complex numbers, and for arithmetic that keeps -0.0: complex does not."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def make_collectives(factory: CollectivesFactory, group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """What ``factory`` makes, once it has been seen to be usable.

    Raises:
        TypeError: it is not: the message says what is missing.
    """
    made = factory(group, device)
    who = f"collectives: {_name(factory)} made a {type(made).__name__}"
    if isinstance(made, type):
        raise TypeError(f"collectives: {_name(factory)} made the class {made.__name__} in place of an instance of it")
    for method, arguments in _METHODS.items():
        call = getattr(made, method, None)
        if not callable(call):
            raise TypeError(f"{who}, which has no {method}({', '.join(arguments)}): see flatshard.comm.Collectives")
        try:
            inspect.signature(call).bind(*arguments)
        except TypeError as e:
            raise TypeError(f"{who}, whose {method} cannot be called with ({', '.join(arguments)}): {e}") from None
        except ValueError:  # a callable that tells no signature
            continue
    exact = getattr(made, "exact", None)
    if not isinstance(exact, bool):
        raise TypeError(
            f"{who} with exact={exact!r}: it must be True or False, whether its all_gather hands every shard over bit for "
            "bit. Set it in the class"
        )
    return made


_METHODS = {
    "all_gather": ("output", "shard"),
    "reduce_scatter": ("output", "input"),
    "all_reduce": ("tensor",),
}


def check_factory(factory: Any, gathers: bool) -> None:
    """``factory`` can be called as one, and kept. ``gathers``: whether the unit has all-gathers (not under NO_SHARD).

    Raises:
        TypeError: it cannot.
        ValueError: it is one of our own and would do nothing.
    """
    if not isinstance(factory, type) and all(callable(getattr(factory, m, None)) for m in _METHODS):
        raise TypeError(
            f"collectives={factory!r} are collectives, made for one process group: pass what makes them, such as their "
            "class, a callable (group, device) -> Collectives"
        )
    if not callable(factory):
        raise TypeError(f"collectives={factory!r} is not a callable (group, device) -> Collectives")
    try:
        hash(factory)
    except TypeError:
        raise TypeError(
            f"collectives={factory!r} must be hashable, as what it makes is kept for the next call with the same factory: "
            "pass a function, a class or a frozen dataclass"
        ) from None
    if not gathers and getattr(factory, "reduce", None) is False:
        raise ValueError(
            f"collectives={factory!r} would do nothing for a unit under NO_SHARD, which gathers no parameters: pass "
            "reduce=True, or leave it out"
        )


def _name(factory: Any) -> str:
    return getattr(factory, "__qualname__", None) or repr(factory)
