"""Communication hooks: functions of the user that average gradients, instead of a reduce-scatter or all-reduce."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard._base.errors import name_list, why_not_called
from flatshard._base.old_names import old_arguments
from flatshard._comm.collectives import Collectives, Done, Pending, as_real, read_capabilities
from flatshard._comm.progress import Label, Works
from flatshard._comm.runtime import Runtime
from flatshard._composable.find import units_in
from flatshard._composable.state import Unit
from flatshard._handle.unit_ranks import UnitRanks


class CommHookState:
    """The ``state`` of a communication hook that was registered with ``state=None``.

    It has the process group, and the reductions that would run without the hook.

    Example::

        def hook(state, gradient, output):
            gradient.clamp_(-1, 1)
            return state.reduce_scatter(output, gradient)

        flatshard.comm.register_comm_hook(model, None, hook)
    """

    __slots__ = ("_label", "_runtime")

    def __init__(self, runtime: Runtime, label: Label) -> None:
        self._runtime, self._label = runtime, label

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the ranks that the unit is sharded over."""
        return self._runtime.group

    @property
    def rank(self) -> int:
        """The rank of this process in ``process_group``."""
        return self._runtime.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return self._runtime.world_size

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Reduce as the unit itself does.

        ``output`` (S elements) gets this rank's shard of the average of ``input`` (world_size * S elements, of the same
        dtype). It is valid after ``wait()`` of the returned object. ``input`` may be overwritten.
        """
        return self._runtime.reduce_scatter(output, input, self._label)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Replace ``tensor``, the gradients of a ``NO_SHARD`` unit, by its average over the ranks."""
        return self._runtime.all_reduce(tensor, self._label)


class _Hooked:
    """The collectives of one flat parameter. Reductions call the user's hook; all-gathers are the backend's own.

    ``widens`` is False, because a hook gets gradients in the dtype of its output.
    """

    def __init__(self, inner: Collectives, hook: Callable[..., Any]) -> None:
        self._inner, self._hook = inner, hook
        self.exact, below = inner.exact, read_capabilities(inner)
        self.allocate, self.compared, self.out_of_place = below.allocate, below.compared, below.out_of_place

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._inner.all_gather(output, shard)

    # The hook may assign to the .data of its arguments, so it gets new tensors that share the memory.

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        result = output.detach()
        return Works([_pending(self._hook(input.detach(), result))], functools.partial(_take, output, result))

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        result = tensor.detach()
        return Works([_pending(self._hook(result))], functools.partial(_take, tensor, result))


def _hooked(hook: Callable[..., Any], state: object, ranks: UnitRanks) -> Runtime:
    """Return a runtime for ``ranks`` that reduces gradients by calling ``hook``."""
    runtime = ranks.runtime
    state = CommHookState(runtime, ranks.label) if state is None else state
    return Runtime(runtime.peers, _Hooked(runtime.collectives, functools.partial(hook, state)))


def _pending(returned: Pending | None) -> Pending:
    return Done() if returned is None else returned


def _take(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy the hook's ``result`` into ``tensor``, unless it is still in the same memory."""
    if (result.shape, result.dtype, result.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise TypeError(
            f"the communication hook replaced a gradient of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device} "
            f"by one of shape {tuple(result.shape)}, {result.dtype} on {result.device}: a hook that compresses must cast its "
            "result back"
        )
    if result.data_ptr() != tensor.data_ptr():
        tensor.copy_(result)


class CommHookHandle:
    """A handle to remove a hook, as returned by :func:`register_comm_hook`.

    Example::

        handle = flatshard.comm.register_comm_hook(model, None, flatshard.comm.bf16_compress_hook)
        model(batch).sum().backward()
        handle.remove()
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = [weakref.ref(unit) for unit in units]

    def remove(self) -> None:
        """Remove the hook: from now on the units' own collectives reduce their gradients. Idempotent."""
        units, self._units = self._units, []
        for ref in units:
            for grads in () if (unit := ref()) is None else unit.handle.gradients.flats:
                grads.reduce_by(None)


@old_arguments(positional=("recurse",))
def register_comm_hook(
    module: nn.Module, state: object, hook: Callable[..., Any], *, recurse: bool = True
) -> CommHookHandle:
    """Average the gradients of ``module``'s units by calling ``hook``, instead of a reduce-scatter or all-reduce.

    To send gradients in 16 bits you need no hook: pass ``MixedPrecision(reduce_dtype=torch.bfloat16)``.

    The hook runs in backward, once for each flat parameter (a unit's trainable parameters of one dtype), as soon as the
    gradient is complete. All ranks call it in the same order. The signature is that of FSDP1's hooks, which work unchanged:

    - ``hook(state, gradient, output)`` for sharded units: write this rank's shard of the average of ``gradient`` into
      ``output``. ``gradient`` is 1-D with world_size * S elements: this rank's gradients, with padding. ``output`` is 1-D
      with S elements, uninitialised. Rank r's shard is elements r * S to (r + 1) * S.
    - ``hook(state, gradient)`` for ``NO_SHARD`` units: replace ``gradient`` by its average over all ranks, in place.

    Both tensors have the dtype that gradients are reduced in (see :class:`MixedPrecision`), and are on the device that
    computes. The hook must divide by the number of ranks itself. It may overwrite ``gradient``, and may assign to the
    ``.data`` of its arguments, but the result must have the dtype and shape that the argument had. ``gradient``'s memory is
    freed afterwards, so the hook must clone what it wants to keep. It returns None, or an object whose ``wait()`` completes
    the reduction (a ``Work`` or a :class:`Pending`), so that backward can continue meanwhile. On an accelerator the hook
    runs on a side stream, and should leave its collectives and kernels there.

    ``-0.0`` marks the elements of parameters that a rank did not use. Sums and casts of ``-0.0`` keep it. A hook that turns
    ``-0.0`` into ``+0.0`` (a sum that starts from ``+0.0``, or rounding to integers) gives a parameter that no rank used a
    gradient of zero instead of None. An optimizer with weight decay will then change it.

    Under a hybrid strategy the hook replaces the reduction within the shard group. The average over the replicas stays as it
    is. A ``copy.deepcopy`` of the module has the hook as well, with the same state.

    Example::

        flatshard.comm.register_comm_hook(model, None, flatshard.comm.bf16_compress_hook)

    Args:
        module: a sharded module, or one that contains sharded modules.
        state: passed to the hook. None: the hook gets a :class:`CommHookState`, which has the process group and the unit's
            own reductions.
        hook: see above.
        recurse: also the units below ``module``; False: only ``module``'s own unit.

    Returns:
        A handle whose ``remove()`` unregisters the hook.

    Raises:
        ValueError: nothing in ``module`` is sharded; a unit has a hook already; or no unit has anything to reduce (a single
            rank, or no floating-point parameters), so that the hook would never run.
        TypeError: the hook does not take these arguments. Nothing has been changed.
        CollectiveError: raised in backward, if the hook returns something else, or leaves another dtype or shape.
    """
    units = units_in(module, recurse, "register_comm_hook")
    found = [unit.fqn for unit in units if any(g.choose_runtime is not None for g in unit.handle.gradients.flats)]
    if found:
        raise ValueError(
            f"register_comm_hook: units {name_list(found)} have a communication hook already. First call remove() on the "
            "handle that register_comm_hook returned for it"
        )
    if found := [unit.fqn for unit in units if unit.config.strategy.joins_axes]:
        raise ValueError(
            f"register_comm_hook: units {name_list(found)} reduce over two axes of a mesh, one after the other, and a hook "
            "is for one process group: use HYBRID_SHARD, or MixedPrecision(reduce_dtype=...) for 16 bits"
        )
    reduced = [
        unit
        for unit in units
        if any(grads.takes_part for grads in unit.handle.gradients.flats)
        and not (unit.config.strategy.is_hybrid and unit.handle.ranks.holds_all)  # no reduction within a group of one
    ]
    if not reduced:
        world_size = units[0].runtime.world_size
        why = "they are sharded over a single rank" if world_size == 1 else "they have no floating-point parameters"
        raise ValueError(
            f"register_comm_hook: units {name_list(unit.fqn for unit in units)} have no gradients to reduce ({why}), so the "
            "hook would never run: do not register it here"
        )
    for unit in reduced:
        _check_hook(hook, unit)
    for unit in reduced:
        for grads in unit.handle.gradients.flats:
            grads.reduce_by(functools.partial(_hooked, hook, state))
    return CommHookHandle(reduced)


def _check_hook(hook: Any, unit: Unit) -> None:
    arguments = ["state", "gradient"]
    if not unit.config.strategy.is_replicated:
        arguments.append("output")
    if (why := why_not_called(hook, *arguments)) is not None:
        raise TypeError(
            f"register_comm_hook: unit {unit.fqn or '<root>'!r} is {unit.config.strategy.name} and calls "
            f"hook({', '.join(arguments)}), but {hook!r} does not take these arguments: {why}"
        )


def bf16_compress_hook(
    state: CommHookState, gradient: torch.Tensor, output: torch.Tensor | None = None
) -> Pending | None:
    """Cast gradients to bfloat16, average them, and cast back: a communication hook that sends half of float32's bytes.

    >>> flatshard.comm.register_comm_hook(model, None, flatshard.comm.bf16_compress_hook)

    ``MixedPrecision(reduce_dtype=torch.bfloat16)`` does the same without a hook. Gradients of 16 bits are reduced as they
    are. Over gloo the sum is in float32, over NCCL in bfloat16.

    Args:
        state: the unit's process group and reductions.
        gradient: 1-D: this rank's gradients, in the dtype that they are reduced in.
        output: 1-D: gets this rank's shard of the average. None for ``NO_SHARD`` units, where ``gradient`` gets the average.
    """
    return _compress(torch.bfloat16, state, gradient, output)


def fp16_compress_hook(
    state: CommHookState, gradient: torch.Tensor, output: torch.Tensor | None = None
) -> Pending | None:
    """Like :func:`bf16_compress_hook`, with float16.

    It is more exact, but magnitudes of 65,520 and more become infinite, and those below 3e-8 become zero. For ``NO_SHARD``
    units over gloo this holds for sums over the ranks, too. Scale the loss.

    Example::

        flatshard.comm.register_comm_hook(model, None, flatshard.comm.fp16_compress_hook)

    Args:
        state: the unit's process group and reductions.
        gradient: 1-D: this rank's gradients, in the dtype that they are reduced in.
        output: 1-D: gets this rank's shard of the average. None for ``NO_SHARD`` units, where ``gradient`` gets the average.
    """
    return _compress(torch.float16, state, gradient, output)


def _compress(
    dtype: torch.dtype, state: CommHookState, gradient: torch.Tensor, output: torch.Tensor | None
) -> Pending | None:
    gradient = as_real(gradient)
    if gradient.itemsize <= dtype.itemsize:
        return state.all_reduce(gradient) if output is None else state.reduce_scatter(output, gradient)
    narrow = gradient.to(dtype)
    # -0.0 means that this rank did not use the parameter. So an element that the cast rounded to -0.0 is set to +0.0.
    narrow.masked_fill_((narrow == 0) & (gradient != 0), 0.0)
    if output is None:
        return Works([state.all_reduce(narrow)], functools.partial(gradient.copy_, narrow))
    reduced = torch.empty(as_real(output).numel(), dtype=dtype, device=output.device)
    return Works([state.reduce_scatter(reduced, narrow)], functools.partial(as_real(output).copy_, reduced))
