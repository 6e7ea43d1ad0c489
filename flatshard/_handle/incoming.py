"""The gradients of one flat parameter in a backward, from autograd to the end of their reduction.

There are two implementations of :class:`Incoming`; :func:`incoming_of` chooses one when the flat parameter is created. If
there is nothing to reduce or to move, each gradient becomes ``.grad`` when it arrives: :class:`HandedOver`. Otherwise all
gradients are copied to one reduction input: :class:`Collected`.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from flatshard._handle.reduction import Reduction, exactly_sent_as
from flatshard._handle.reduction_input import ReductionInput, make_input
from flatshard._handle.tensors.sharded_gradient import plain_grad, set_gradients_as_they_are
from flatshard._runtime import Runtime

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam

SMALL = 128 * 1024  # bytes of a flat parameter below which overhead per operation costs more than memory traffic

# Called for every parameter in every step, so the loops run in C.
_grad = plain_grad.__get__
_NONE = itertools.repeat(None)

Held = list[tuple[int, torch.Tensor]]
"""Gradients that are kept for a later backward: (index of the parameter, gradient in the whole parameter's shape)."""


def waits_for_all(is_whole: bool, nbytes: int) -> bool:
    """Whether gradients stay where autograd puts them until all have come. gradients.py, [Note: The gradient has two homes]

    ``is_whole``: nothing is sharded. ``nbytes``: the size of the reduction input.
    """
    return not is_whole or nbytes < SMALL


class Incoming(Protocol):
    """The gradients of one flat parameter in a backward."""

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come since the last reduction."""

    @property
    def leaves_them(self) -> bool:
        """Whether gradients stay where autograd puts them (later ones are added there) until all have come."""

    def receive(self, index: int) -> None:
        """Take the gradient from compute parameter ``index``. It may be None: a custom autograd function may return None.

        Raises:
            RuntimeError: the gradient is sparse, or has a graph of its own.
        """

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad``, plain and local, to the gradient of parameter ``index``."""

    def hold(self) -> None:
        """End a backward without a reduction: the next backward adds to its gradients."""

    def held(self) -> Held:
        """The gradients that are kept."""

    def complete(self, runtime: Runtime, accumulates: bool) -> None:
        """Prepare the reduction: all gradients have come. ``accumulates``: some rank may hold gradients to add to.

        Call this on the stream of the backward: the gradients that are copied and freed here are memory of that stream.
        """

    def reduce(self, runtime: Runtime) -> None:
        """Start averaging over the ranks, after ``complete``."""

    def free_reduced(self) -> None:
        """Free the reduction input before ``end``, because the device has already read it."""

    def end(self) -> tuple[torch.Tensor | None, list[bool]]:
        """Finish the reduction. Returns the gradient shard, and for each parameter whether it had a gradient on this rank.

        Without a shard (None), these gradients are in ``.grad`` already.
        """

    def drop(self) -> None:
        """Drop all gradients and free their memory. ``.grad`` is not changed."""

    def leave_memory(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists."""

    @property
    def input(self) -> torch.Tensor | None:
        """The reduction input, or None. It has storage from ``complete`` to ``end``."""


def check(flat: FlatParam, index: int, grad: torch.Tensor) -> None:
    """Raise if the gradient cannot be reduced in a flat parameter."""
    if grad.requires_grad:
        raise RuntimeError(
            f"the gradient of {flat.layout.params[index].fqn!r} has a graph of its own "
            "(backward(create_graph=True)), which its sharded .grad cannot carry. For a gradient penalty take "
            "torch.autograd.grad(..., create_graph=True) with respect to inputs, and call backward() on the penalty"
        )
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of {flat.layout.params[index].fqn!r} is sparse, which cannot be reduced into a flat "
            "gradient: build the module with sparse=False"
        )


class HandedOver:
    """Assigns each gradient to ``.grad`` without a copy. Used on a single rank."""

    leaves_them = False
    input = None

    def __init__(self, flat: FlatParam, reduction: Reduction) -> None:
        self._flat = flat
        self._reduction = reduction
        self._given = [False] * len(flat.params)

    @property
    def is_empty(self) -> bool:
        return True not in self._given

    def receive(self, index: int) -> None:
        """See :class:`Incoming`."""
        compute = self._flat.computes[index]
        grad, compute.grad = compute.grad, None
        if grad is not None:
            check(self._flat, index, grad)
            wrapping = self._flat.wrappings[index]
            self.put(index, grad if wrapping is None else wrapping.local_gradient(grad))

    def put(self, index: int, grad: torch.Tensor) -> None:
        """See :class:`Incoming`."""
        param, reduction = self._flat.params[index], self._reduction
        if not param.requires_grad:  # frozen since forward
            return
        if grad.dtype is not reduction.dtype or grad.device != self._flat.device:
            grad = grad.to(self._flat.device, reduction.dtype)
        if reduction.divide_factor is not None:
            grad = grad / reduction.divide_factor
        self._given[index] = True
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def hold(self) -> None:
        """Nothing to do: they are in ``.grad`` already."""

    def held(self) -> Held:
        return []

    def complete(self, runtime: Runtime, accumulates: bool) -> None:
        """Nothing to do."""

    def reduce(self, runtime: Runtime) -> None:
        """Nothing to reduce."""

    def free_reduced(self) -> None:
        """Nothing to free."""

    def end(self) -> tuple[None, list[bool]]:
        """See :class:`Incoming`."""
        given = self._given
        self.drop()
        return None, given

    def drop(self) -> None:
        """See :class:`Incoming`."""
        self._given = [False] * len(self._flat.params)

    def leave_memory(self) -> None:
        """Nothing to do: there is no collective."""


class Collected:
    """Copies gradients to the reduction input: all at the end or, if nothing is sharded, each when it arrives."""

    def __init__(self, flat: FlatParam, reduction: Reduction, tells_unused: bool) -> None:
        """``tells_unused``: ranks must agree on the parameters that none of them used."""
        self._flat = flat
        self._reduction = reduction
        self._tells_unused = tells_unused
        self._input: ReductionInput = make_input(flat, reduction.reduce_dtype)
        self._filled: list[bool] | None = None  # for each slot, whether it has a gradient; None: there is no input yet
        self._waiting = False  # gradients are in the compute parameters' `.grad`
        self._any_wrapped = any(w is not None for w in flat.wrappings)
        nbytes = flat.layout.padded_numel * reduction.reduce_dtype.itemsize
        self._is_small = nbytes < SMALL
        self._waits_for_all = waits_for_all(flat.is_whole, nbytes)
        self._sent_dtype = exactly_sent_as(flat.compute_dtype, reduction.reduce_dtype)

    @property
    def is_empty(self) -> bool:
        return self._filled is None and not self._waiting

    @property
    def leaves_them(self) -> bool:
        return self._waiting or True not in self._flat.requires_grad

    @property
    def input(self) -> torch.Tensor:
        return self._input.flat

    # -- filling -----------------------------------------------------------------------------------------------------

    def receive(self, index: int) -> None:
        """See :class:`Incoming`."""
        if self._waiting:
            return
        flat = self._flat
        compute = flat.computes[index]
        grad = compute.grad
        if grad is None:
            return
        if self._filled is None and self._waits_for_all:
            self._waiting = True
            return
        compute.grad = None
        check(flat, index, grad)
        if flat.params[index].requires_grad:  # else it was frozen since its forward: drop it, as autograd would
            self.put(index, self._local(index, grad))

    def _local(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        wrapping = self._flat.wrappings[index]
        return grad if wrapping is None else wrapping.local_gradient(grad)

    def put(self, index: int, grad: torch.Tensor) -> None:
        """See :class:`Incoming`."""
        filled = self._filled if self._filled is not None else self._ensure_input(self._reduction.reduce_dtype)
        slot = self._input.slots[index]
        if filled[index]:
            slot.add_(grad)
            return
        filled[index] = True
        torch.add(grad, 0.0, out=slot)  # gradients.py, [Note: Negative zero marks an unused parameter]

    def _ensure_input(self, dtype: torch.dtype) -> list[bool]:
        """Allocate the input, with ``dtype``, if there is none."""
        if self._filled is None:
            self._input.allocate(dtype)
            self._filled = [False] * len(self._flat.params)
        return self._filled

    def _copy_to_input(self, dtype: torch.dtype) -> None:
        """Move the gradients from autograd's tensors to an input of ``dtype``. Later ones are added when they arrive."""
        flat, computes = self._flat, self._flat.computes
        self._waiting = False
        if not flat.all_require_grad:
            self._drop_frozen()
        self._ensure_input(dtype)
        grads = list(map(_grad, computes))
        set_gradients_as_they_are(computes, _NONE)
        here = list(map(operator.is_not, grads, _NONE))
        slots, places = self._input.slots, list(range(len(grads)))
        if False in here:
            grads, slots, places = (list(itertools.compress(each, here)) for each in (grads, slots, places))
        if torch.is_grad_enabled() or not all([grad.layout is torch.strided for grad in grads]):
            for index, grad in zip(places, grads, strict=True):
                check(flat, index, grad)
        if self._any_wrapped:
            grads = list(map(self._local, places, grads))
        if self._is_small and grads:
            torch._foreach_copy_(slots, grads)
            self._input.flat.add_(0.0)  # gradients.py, [Note: Negative zero marks an unused parameter]
            self._filled = here
            return
        grads.reverse()
        for index in places:
            self.put(index, grads.pop())

    def _drop_frozen(self) -> None:
        """Drop gradients of parameters that were frozen since their forward, as autograd would."""
        for param, compute in zip(self._flat.params, self._flat.computes, strict=True):
            if not param.requires_grad:
                compute.grad = None

    def hold(self) -> None:
        """See :class:`Incoming`."""
        if self._waiting:
            self._copy_to_input(self._reduction.reduce_dtype)

    def held(self) -> Held:
        """See :class:`Incoming`."""
        return [(index, self._input.slots[index]) for index, filled in enumerate(self._filled or ()) if filled]

    # -- reducing ----------------------------------------------------------------------------------------------------

    def complete(self, runtime: Runtime, accumulates: bool) -> None:
        """See :class:`Incoming`. Slots without a gradient count as unused."""
        flat, reduction = self._flat, self._reduction
        if self._waiting or (self._filled is None and self._waits_for_all):
            widens = getattr(runtime.collectives, "widens", False)
            narrow = widens and not (accumulates or flat.placement.shards is None)
            self._copy_to_input(self._sent_dtype if narrow else reduction.reduce_dtype)
        filled = self._ensure_input(reduction.reduce_dtype)
        no_gradient: list[int] = []
        if False in filled:
            if self._tells_unused:
                no_gradient = [i for i, f in enumerate(filled) if not f and flat.params[i].requires_grad]
            unused = complex(-0.0, -0.0) if flat.dtype.is_complex else -0.0
            for slot, was_filled in zip(self._input.slots, filled, strict=True):
                if not was_filled:
                    slot.fill_(unused)
        reduction.unused.begin(no_gradient)
        reduction.prepare(self._input.flat)

    def reduce(self, runtime: Runtime) -> None:
        """See :class:`Incoming`."""
        self._reduction.start(runtime, self._input.flat)

    def free_reduced(self) -> None:
        """See :class:`Incoming`."""
        if self._flat.placement.shards is not None:  # otherwise the input is the result
            self._input.free()

    def end(self) -> tuple[torch.Tensor | None, list[bool]]:
        """See :class:`Incoming`."""
        output, filled = self._reduction.take(), self._filled or []
        self.drop()
        return output, filled if output is not None else []

    def drop(self) -> None:
        """See :class:`Incoming`."""
        if self._waiting:
            self._waiting = False
            set_gradients_as_they_are(self._flat.computes, _NONE)
        self._filled = None
        self._input.free()

    def leave_memory(self) -> None:
        """See :class:`Incoming`."""
        self._input.leave()


def incoming_of(flat: FlatParam, reduction: Reduction, shard_param: nn.Parameter | None) -> Incoming:
    """Choose the implementation for ``flat``. ``shard_param``: a parameter that gets all gradients instead, or None."""
    if reduction.ranks == 1 and shard_param is None and not flat.is_offloaded:
        return HandedOver(flat, reduction)
    return Collected(flat, reduction, tells_unused=shard_param is None)
