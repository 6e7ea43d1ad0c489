"""Communication hooks: what a user puts in the place of a gradient's reduction, and two ready-made ones."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flatshard._comm.collectives import Collectives, Done, Pending, Works, as_real
from flatshard._comm.handed_on import hand_on
from flatshard._comm.progress import here
from flatshard._composable.state import Unit, units_below
from flatshard._config import ShardingStrategy
from flatshard._errors import name_list
from flatshard._runtime import Runtime


class CommHookState:
    """The ``state`` of a communication hook that was registered with ``state=None``: what it takes the place of."""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that the unit is sharded over."""
        return self._runtime.group

    @property
    def rank(self) -> int:
        """This process's rank in ``process_group``."""
        return self._runtime.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        return self._runtime.world_size

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """The unit's own reduction: ``output`` (S elements) becomes this rank's part of the average of ``input``
        (world_size * S elements, the same dtype), once the result has been waited for. ``input`` may be overwritten.
        """
        return self._runtime.reduce_scatter(output, input, here.label)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """The same for a unit under ``NO_SHARD``: ``tensor`` becomes its average, once the result has been waited for."""
        return self._runtime.all_reduce(tensor, here.label)


class _Hooked:
    """The collectives of one unit, with a user's hook in the place of the reductions.

    It never ``widens``: a hook gets gradients in the dtype of its output.
    """

    def __init__(self, runtime: Runtime, state: object, hook: Callable[..., Any]) -> None:
        self.before = runtime
        self._inner: Collectives = runtime.collectives
        self._hook = functools.partial(hook, CommHookState(runtime) if state is None else state)
        self.exact = self._inner.exact
        hand_on(self, self._inner)

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        return self._inner.all_gather(output, shard)

    # The hook may point the .data of its arguments elsewhere: it gets other tensors in the same memory.

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        result = output.detach()
        return Works([_pending(self._hook(input.detach(), result))], functools.partial(_take, output, result))

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        result = tensor.detach()
        return Works([_pending(self._hook(result))], functools.partial(_take, tensor, result))


def _pending(returned: Any) -> Pending:
    if returned is None:
        return Done()
    if not callable(getattr(returned, "wait", None)):
        raise TypeError(
            f"the communication hook returned a {type(returned).__name__}: it must return None, or something with a wait()"
        )
    pending: Pending = returned
    return pending


def _take(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Make ``tensor`` what a hook made of ``result``, the same memory before."""
    if (result.shape, result.dtype, result.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise TypeError(
            f"the communication hook left a gradient of shape {tuple(result.shape)}, {result.dtype} on {result.device} in "
            f"place of one of shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}: a hook that compresses must "
            "cast back"
        )
    if result.data_ptr() != tensor.data_ptr():
        tensor.copy_(result)


class CommHookHandle:
    """A registered communication hook. ``remove()`` takes it away again."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = [weakref.ref(unit) for unit in units]

    def remove(self) -> None:
        """Reduce the units' gradients by their collectives again. Idempotent."""
        units, self._units = self._units, []
        for ref in units:
            if (unit := ref()) is not None and isinstance(hooked := unit.handle.runtime.collectives, _Hooked):
                unit.handle.runtime = hooked.before


def register_comm_hook(
    module: nn.Module, state: object, hook: Callable[..., Any], recurse: bool = True
) -> CommHookHandle:
    """Have ``hook`` average the gradients of ``module``'s units in the place of their reduce-scatter or all-reduce.

    The hook runs in backward, once for each flat parameter (a unit's trainable parameters of one dtype), as soon as its
    gradient is complete; on all ranks in the same order. Its signature is that of FSDP1's hooks, which work unchanged:

    - ``hook(state, gradient, output)`` for FULL_SHARD and SHARD_GRAD_OP: put this rank's part of the average of ``gradient``
      into ``output``. ``gradient``: 1-D, world_size * S elements, the local gradients as laid out, with padding;
      ``output``: 1-D, S elements, uninitialised; rank r's part is elements r * S to (r + 1) * S.
    - ``hook(state, gradient)`` for NO_SHARD: make ``gradient`` its average over all ranks, in place.

    Both have the parameters' dtype and device. The hook must divide by the number of ranks itself, may overwrite
    ``gradient`` and may point the ``.data`` of its arguments elsewhere on the way, but must leave the result in the dtype
    and shape it found. It must clone what it keeps: ``gradient``'s memory is freed. It returns None, or something with
    ``wait()`` that finishes the job (a ``Work``, a :class:`Pending`), so that backward goes on meanwhile. On an
    accelerator it runs with a side stream current, where its collectives and kernels belong.

    ``-0.0`` marks the elements of parameters that a rank did not use. A hook whose averages of ``-0.0`` alone are not
    ``-0.0`` (a sum that starts from ``+0.0``; rounding to integers) gives a parameter that no rank used a gradient of zero in
    place of None, and an optimizer will then decay it. Sums and casts keep it.

    Under a hybrid strategy it takes the place of the reduction within the shard group; the average over the replicas is as
    ever. A ``copy.deepcopy`` of the module has the hook too, with the same state.

    Example::

        flatshard.comm.register_comm_hook(model, None, flatshard.comm.bf16_compress_hook)

    Args:
        module: a sharded module, or one that holds sharded ones.
        state: passed to the hook as it is. None: a :class:`CommHookState`, which knows the process group and reduces.
        hook: see above.
        recurse: also the units below ``module``; False: only ``module``'s own unit.

    Returns:
        a handle whose ``remove()`` unregisters the hook.

    Raises:
        ValueError: nothing in ``module`` is sharded; a unit has a hook already; or no unit has anything to reduce (a single
            rank, or no floating-point parameters), so that the hook would never run.
        TypeError: the hook cannot be called as above. Nothing has been changed. (At the first backward it comes as a
            :class:`CollectiveError` if the hook leaves another dtype or shape, or returns something else.)
    """
    units = units_below(module, recurse)
    if not units:
        raise ValueError(
            f"register_comm_hook: nothing in this {type(module).__name__} is sharded"
            f"{'' if recurse else ' as a unit of its own'}; call fully_shard first"
        )
    found = [unit.fqn for unit in units if isinstance(unit.handle.runtime.collectives, _Hooked)]
    if found:
        raise ValueError(
            f"register_comm_hook: units {name_list(found)} have a communication hook already. Call remove() on what its "
            "registration returned first"
        )
    reduced = [unit for unit in units if unit.handle.is_reduced and not _is_only_replicated(unit)]
    if not reduced:
        world_size = units[0].context.runtime.world_size
        why = "they are sharded over a single rank" if world_size == 1 else "they have no floating-point parameters"
        raise ValueError(
            f"register_comm_hook: units {name_list(unit.fqn for unit in units)} have no gradients to reduce ({why}), so the "
            "hook would never run: leave it out here"
        )
    for unit in reduced:
        _check_hook(hook, state, unit)
    for unit in reduced:
        runtime = unit.handle.runtime
        unit.handle.runtime = runtime.replacing(_Hooked(runtime, state, hook))
    return CommHookHandle(reduced)


def _is_only_replicated(unit: Unit) -> bool:
    """Whether a hybrid strategy leaves the unit whole, so that there is no reduction within its shard group."""
    return unit.config.strategy.is_hybrid and unit.context.runtime.world_size == 1


def _check_hook(hook: Any, state: object, unit: Unit) -> None:
    arguments = ["state", "gradient"]
    if unit.config.strategy is not ShardingStrategy.NO_SHARD:
        arguments.append("output")
    wanted = f"hook({', '.join(arguments)})"
    if not callable(hook):
        raise TypeError(f"register_comm_hook: {hook!r} is not callable: pass a function {wanted}")
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError as e:
        raise TypeError(
            f"register_comm_hook: unit {unit.fqn or '<root>'!r} is {unit.config.strategy.name} and calls {wanted}, but "
            f"{hook!r} cannot be called so: {e}"
        ) from None
    except ValueError:  # a callable that tells no signature
        pass
    if hook in (bf16_compress_hook, fp16_compress_hook) and not isinstance(state, CommHookState | None):
        raise TypeError(
            f"register_comm_hook: flatshard.comm.{hook.__name__} takes state=None (it reduces by the unit's own "
            f"collectives), got a {type(state).__name__}"
        )


def bf16_compress_hook(
    state: CommHookState, gradient: torch.Tensor, output: torch.Tensor | None = None
) -> Pending | None:
    """A communication hook that casts gradients to bfloat16, averages them, and casts back: half of float32's bytes.

    >>> flatshard.comm.register_comm_hook(model, None, flatshard.comm.bf16_compress_hook)

    Gradients of 16 bits are reduced as they are. Over gloo the sum is in float32, over NCCL in bfloat16. It keeps the
    ``-0.0`` of unused parameters. See :func:`register_comm_hook` for the arguments.
    """
    return _compress(torch.bfloat16, state, gradient, output)


def fp16_compress_hook(
    state: CommHookState, gradient: torch.Tensor, output: torch.Tensor | None = None
) -> Pending | None:
    """The same as :func:`bf16_compress_hook` with float16: more exact, but magnitudes from 65,520 on become infinite (under
    NO_SHARD over gloo, already those of sums over ranks), and those below 3e-8 become zero. Scale the loss.
    """
    return _compress(torch.float16, state, gradient, output)


def _compress(
    dtype: torch.dtype, state: CommHookState, gradient: torch.Tensor, output: torch.Tensor | None
) -> Pending | None:
    gradient = as_real(gradient)
    if gradient.itemsize <= dtype.itemsize:
        return state.all_reduce(gradient) if output is None else state.reduce_scatter(output, gradient)
    narrow = gradient.to(dtype)
    # A used parameter's gradient must not look unused for being small: what became -0.0 only now is made +0.0.
    narrow.masked_fill_((narrow == 0) & (gradient != 0), 0.0)
    if output is None:
        return Works([state.all_reduce(narrow)], functools.partial(gradient.copy_, narrow))
    reduced = torch.empty(as_real(output).numel(), dtype=dtype, device=output.device)
    return Works([state.reduce_scatter(reduced, narrow)], functools.partial(as_real(output).copy_, reduced))
