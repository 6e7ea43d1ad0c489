"""The gradients of one flat parameter in a backward, from autograd to the end of their reduction.

There are two kinds of :class:`Incoming`, of which ``FlatGradients`` chooses one. If there is nothing to reduce or to move,
each gradient becomes ``.grad`` when it arrives: :class:`HandedOver`. Otherwise all gradients are copied to one reduction
input: :class:`Collected`.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING, NoReturn

import torch

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


class Incoming:
    """The gradients of one flat parameter in a backward, whatever becomes of them. Here: nothing to wait for, or to free."""

    def __init__(self, flat: FlatParam, reduction: Reduction) -> None:
        self._flat = flat
        self._reduction = reduction

    @property
    def input(self) -> torch.Tensor | None:
        """The reduction input, or None. It has storage from ``complete`` to ``end``."""
        return None

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come since the last reduction."""
        raise NotImplementedError

    @property
    def leaves_them(self) -> bool:
        """Whether gradients stay where autograd puts them (later ones are added there) until all have come."""
        return False

    def receive(self, index: int) -> None:
        """Take the gradient from compute parameter ``index``. It may be None: a custom autograd function may return None.

        Raises:
            RuntimeError: the gradient is sparse, or has a graph of its own.
        """
        compute = self._flat.unsharded.computes[index]
        grad, compute.grad = compute.grad, None
        if grad is not None:
            if grad.requires_grad or grad.layout is not torch.strided:
                self._refuse(index, grad)
            # One that was frozen since its forward is dropped, as autograd would.
            if self._flat.params[index].requires_grad:
                self.put(index, self._local(index, grad))

    def put(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad``, plain and local, to the gradient of parameter ``index``."""
        raise NotImplementedError

    def hold(self) -> None:
        """End a backward without a reduction: the next backward adds to its gradients."""

    def held(self) -> Held:
        """The gradients that are kept."""
        return []

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
        raise NotImplementedError

    def drop(self) -> None:
        """Drop all gradients and free their memory. ``.grad`` is not changed."""
        raise NotImplementedError

    def leave_memory(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists."""

    def _local(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the plain tensor inside a tensor subclass; of other parameters as it is."""
        wrapping = self._flat.wrappings[index]
        return grad if wrapping is None else wrapping.local_gradient(grad)

    def _refuse(self, index: int, grad: torch.Tensor) -> NoReturn:
        """Raise for a gradient that cannot be reduced in a flat parameter."""
        fqn = self._flat.layout.params[index].fqn
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {fqn!r} has a graph of its own (backward(create_graph=True)), which its sharded .grad "
                "cannot carry. For a gradient penalty take torch.autograd.grad(..., create_graph=True) with respect to "
                "inputs, and call backward() on the penalty"
            )
        raise RuntimeError(
            f"the gradient of {fqn!r} is sparse, which cannot be reduced into a flat gradient: build the module with "
            "sparse=False"
        )


class HandedOver(Incoming):
    """Assigns each gradient to ``.grad`` without a copy. Used on a single rank."""

    def __init__(self, flat: FlatParam, reduction: Reduction) -> None:
        super().__init__(flat, reduction)
        self._given = [False] * len(flat.params)

    @property
    def is_empty(self) -> bool:
        return True not in self._given

    def put(self, index: int, grad: torch.Tensor) -> None:
        param, dtype = self._flat.params[index], self._reduction.dtype
        if grad.dtype is not dtype or grad.device != self._flat.kind.device:
            grad = grad.to(self._flat.kind.device, dtype)
        if (factor := self._reduction.factor) is not None:
            grad = grad * factor
        self._given[index] = True
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def end(self) -> tuple[None, list[bool]]:
        given = self._given
        self.drop()
        return None, given

    def drop(self) -> None:
        self._given = [False] * len(self._flat.params)


class Collected(Incoming):
    """Copies gradients to the reduction input: all at the end or, if nothing is sharded, each when it arrives."""

    def __init__(self, flat: FlatParam, reduction: Reduction, tells_unused: bool) -> None:
        """``tells_unused``: ranks must agree on the parameters that none of them used."""
        super().__init__(flat, reduction)
        self._tells_unused = tells_unused
        self._input: ReductionInput = make_input(flat, reduction.reduce_dtype)
        self._filled: list[bool] | None = None  # for each slot, whether it has a gradient; None: there is no input yet
        self._waiting = False  # gradients are in the compute parameters' `.grad`
        self._any_wrapped = any(w is not None for w in flat.wrappings)
        nbytes = flat.layout.padded_numel * reduction.reduce_dtype.itemsize
        self._is_small = nbytes < SMALL
        self._waits_for_all = self._is_small or not flat.is_whole
        self._sent_dtype = exactly_sent_as(flat.kind.compute_dtype, reduction.reduce_dtype)

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
        if self._waiting or self._flat.unsharded.computes[index].grad is None:
            return
        if self._filled is None and self._waits_for_all:
            self._waiting = True
        else:
            super().receive(index)

    def put(self, index: int, grad: torch.Tensor) -> None:
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
        flat, computes = self._flat, self._flat.unsharded.computes
        self._waiting = False
        if not flat.all_require_grad:  # drop gradients of those frozen since their forward, as autograd would
            for param, compute in zip(flat.params, computes, strict=True):
                if not param.requires_grad:
                    compute.grad = None
        self._ensure_input(dtype)
        grads = list(map(_grad, computes))
        set_gradients_as_they_are(computes, _NONE)
        here = list(map(operator.is_not, grads, _NONE))
        slots, places = self._input.slots, list(range(len(grads)))
        if False in here:
            grads, slots, places = (list(itertools.compress(each, here)) for each in (grads, slots, places))
        if torch.is_grad_enabled() or not all([grad.layout is torch.strided for grad in grads]):
            for index, grad in zip(places, grads, strict=True):
                if grad.requires_grad or grad.layout is not torch.strided:
                    self._refuse(index, grad)
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

    def hold(self) -> None:
        if self._waiting:
            self._copy_to_input(self._reduction.reduce_dtype)

    def held(self) -> Held:
        return [(index, self._input.slots[index]) for index, filled in enumerate(self._filled or ()) if filled]

    # -- reducing ----------------------------------------------------------------------------------------------------

    def complete(self, runtime: Runtime, accumulates: bool) -> None:
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
            unused = complex(-0.0, -0.0) if flat.kind.dtype.is_complex else -0.0
            for slot, was_filled in zip(self._input.slots, filled, strict=True):
                if not was_filled:
                    slot.fill_(unused)
        reduction.unused.begin(no_gradient)
        reduction.prepare(self._input.flat)

    def reduce(self, runtime: Runtime) -> None:
        self._reduction.start(runtime, self._input.flat)

    def free_reduced(self) -> None:
        if self._flat.placement.shards is not None:  # otherwise the input is the result
            self._input.free()

    def end(self) -> tuple[torch.Tensor | None, list[bool]]:
        output, filled = self._reduction.take(), self._filled or []
        self.drop()
        return output, filled if output is not None else []

    def drop(self) -> None:
        if self._waiting:
            self._waiting = False
            set_gradients_as_they_are(self._flat.unsharded.computes, _NONE)
        self._filled = None
        self._input.free()

    def leave_memory(self) -> None:
        self._input.leave()
