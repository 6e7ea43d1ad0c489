"""The memory of one flat parameter's gradients, from autograd's gradients to the user's ``.grad``.

[Note: The gradient has two homes]
- ``input``, the reduction's input: 1-D, ``padded_numel`` elements, laid out as the unsharded buffer. A permanent tensor
  with permanent views (one for each dtype: reduction.py, [Note: Sent as it was computed]), whose storage exists only from
  when a backward's gradients are complete to the end of the reduction. Until then they stay where autograd puts them, in
  the compute parameters' ``.grad``: the unit's parameters are freed first, so the two never take memory at once. They are
  copied into their slots one by one, and dropped at once; those of a small flat parameter together in one operation. Where
  nothing is sharded (``NO_SHARD``) there is nothing to free, and the input becomes the gradients: there each is copied as
  it comes, unless they are small.
- the *gradient shard*, the reduction's output: 1-D, ``shard_numel`` elements, new for each backward. The ``.grad`` of
  each sharded parameter *is* a slice of it, so it lives until the user drops the gradients.

With mixed precision a gradient comes in the compute dtype, the reduction has the reduce dtype (the copy into the slot casts,
if need be), and the gradient shard is cast to the parameters' own dtype, unless asked to be kept as it is.

``hold`` keeps the input from one backward to the next, which adds to it: in the reduce dtype, not in the compute dtype.

[Note: Negative zero marks an unused parameter]
A parameter that no rank used must end with ``.grad is None``, as in one process (weight decay and momentum would move
it otherwise); a parameter that another rank used must get that rank's gradient here too. A rank learns which without
any further communication: an unused slot is filled with -0.0, a used one holds ``gradient + 0.0``, which is never -0.0.
Averages of -0.0 alone are -0.0, and +0.0 + -0.0 is +0.0 (IEEE 754, round to nearest), so a slice is all -0.0 after the
reduction if and only if nobody used it. Only a rank with a locally unused parameter looks. One that holds no element of it
asks elsewhere: unused.py, [Note: Counting who did not use a parameter]. A reduction that does not keep signed zeros makes
such a gradient zero instead of None.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import nn

from flatshard._handle.adapters.tensor_subclass import wrapping_of
from flatshard._handle.buffers import FlatBuffers
from flatshard._handle.parts import Parts, info_of_all
from flatshard._handle.pool import BufferPool, Slot
from flatshard._handle.reduction import Reduction, exactly_sent_as
from flatshard._handle.tensors.partial import plainly
from flatshard._handle.tensors.sharded_gradient import plain_grad, set_gradients_as_they_are
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, in_memory_order
from flatshard._runtime import Runtime

SMALL = 128 * 1024  # bytes of a flat parameter below which an operation's overhead matters more than its traffic

# Read of every parameter in every step: the loops are left to C.
_grad = plain_grad.__get__
_NONE = itertools.repeat(None)


def waits_for_all(is_whole: bool, nbytes: int) -> bool:
    """Whether gradients stay where autograd puts them, until all have come. [Note: The gradient has two homes]

    ``is_whole``: nothing is sharded; ``nbytes``: of the reduction's input.
    """
    return not is_whole or nbytes < SMALL


class FlatGradients:
    """The gradients of one :class:`FlatBuffers`."""

    def __init__(self, buffers: FlatBuffers, replicas: Runtime | None) -> None:
        self.buffers = buffers
        self.reduction = Reduction(buffers, replicas)
        # Nothing to reduce: hand gradients over as they are ("world size 1 copies nothing").
        self._local = self.reduction.ranks == 1
        self._filled = [False] * len(buffers.params)
        self.any_filled = False
        self._batching = False  # gradients are still in the compute parameters' .grad
        self._wrappings = [wrapping_of(compute) for compute in buffers.computes]
        self._any_wrapped = any(self._wrappings)
        self.given: Sequence[nn.Parameter] = ()  # the parameters whose ``.grad`` was set or added to last
        self.is_watched = False  # see `Home`, which this is for the flat parameter
        self.flat_param: nn.Parameter | None = None  # set by `flat_parameters`: then it alone gets a gradient
        self._allocate_views()
        if buffers.options.keep_low_precision_grads:
            for param in buffers.params:
                param.grad_dtype = self.reduction.dtype

    def _allocate_views(self) -> None:
        """Build the permanent reduction input and its views (none where a fresh one is needed for each backward)."""
        buffers, layout = self.buffers, self.buffers.layout
        device = buffers.unsharded.flat.device
        self._made_for = (buffers.dtype, device)
        trainable = buffers.dtype.is_floating_point or buffers.dtype.is_complex
        # With their views; of one in a pool, which moves, by its address besides.
        self._inputs: dict[tuple[torch.dtype, int], tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = {}
        self._slot: Slot | None = None  # of the pool, where the input lies now
        self._input = self._no_input = torch.empty(0, dtype=self.reduction.reduce_dtype, device=device)
        if trainable and not buffers.is_whole:
            self._use_input(self.reduction.reduce_dtype)
        # Whether each gradient goes straight into `.grad`: nothing is to be reduced, or to be copied elsewhere.
        self._hands_over = self._local and self.flat_param is None and not buffers.is_offloaded
        self._nbytes = layout.padded_numel * self.reduction.reduce_dtype.itemsize
        self._waits = waits_for_all(buffers.is_whole, self._nbytes)
        self._sent_dtype = exactly_sent_as(buffers.compute_dtype, self.reduction.reduce_dtype)
        self._parts = Parts(buffers, self.reduction.dtype)

    def _use_input(self, dtype: torch.dtype) -> None:
        """Have the permanent input of ``dtype``, without storage."""
        if (dtype, 0) not in self._inputs:
            flat = torch.empty(self.buffers.layout.padded_numel, dtype=dtype, device=self._no_input.device)
            self._inputs[dtype, 0] = flat, *self._views_of(flat)
            flat.untyped_storage().resize_(0)
        self._input, self._slots, self._gaps = self._inputs[dtype, 0]

    def _use_slot(self, pool: BufferPool, dtype: torch.dtype) -> None:
        """Have an input of ``dtype`` in memory of the pool."""
        numel = self.buffers.layout.padded_numel
        self._slot = slot = pool.take_input(numel, dtype, self)
        key = dtype, slot.flat.data_ptr()
        if key not in self._inputs:
            self._inputs[key] = slot.flat[:numel], *self._views_of(slot.flat)
        self._input, self._slots, self._gaps = self._inputs[key]

    def _views_of(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        layout = self.buffers.layout
        slots = [flat.as_strided(info.shape, info.stride, info.start) for info in layout.params]
        return slots, [flat[start:stop] for start, stop in layout.gaps()]

    def follow_names(self) -> None:
        """The parameters have been renamed."""
        self._parts = Parts(self.buffers, self.reduction.dtype)

    def use_flat_param(self) -> nn.Parameter:
        """From now on a single 1-D parameter over the local shard gets the gradient, and the others get none."""
        if self.flat_param is None:
            self.flat_param = self._make_flat_param()
            self._hands_over = False
            for param in self.buffers.params:
                param.grad = None
        return self.flat_param

    def _make_flat_param(self) -> nn.Parameter:
        buffers = self.buffers
        flat = ShardedParameter.adopt(nn.Parameter(buffers.shard), info_of_all(buffers), self)
        if buffers.options.keep_low_precision_grads:
            flat.grad_dtype = self.reduction.dtype
        return flat

    def compute_of(self, param: nn.Parameter) -> nn.Parameter:
        """See ``Home``, which this is for the flat parameter: it has none."""
        raise RuntimeError(
            "register_hook on a flat parameter (flat_parameters) would never run, as autograd has no gradient of it. Use "
            "register_post_accumulate_grad_hook, or register it on the single parameters"
        )

    def copy_with(self, buffers: FlatBuffers) -> FlatGradients:
        """The same for copied buffers. No gradients are copied, as ``copy.deepcopy`` of a parameter copies none."""
        result = FlatGradients(buffers, self.reduction.replicas)
        result.reduction.divide_factor = self.reduction.divide_factor
        result.reduction.reduces_replicas = self.reduction.reduces_replicas
        if self.flat_param is not None:
            result.use_flat_param()
        return result

    # -- filling -----------------------------------------------------------------------------------------------------

    @property
    def leaves_them(self) -> bool:
        """Whether gradients stay where autograd puts them (which adds to what is there), until all have come."""
        return self._batching or True not in self.buffers.requires_grad

    def receive(self, index: int) -> None:
        """Take the gradient that autograd left in compute parameter ``index`` (None: a custom function withheld it).

        Raises:
            RuntimeError: the gradient is sparse, or has a graph of its own.
        """
        compute = self.buffers.computes[index]
        grad = compute.grad
        if grad is None:
            return
        if self._hands_over:
            compute.grad = None
            self._check(index, grad)
            grad = self._localize(index, grad)
            self._hand_over(index, grad)
            return
        if not self.any_filled:
            self._begin()
        if self._batching:
            return
        compute.grad = None
        self._check(index, grad)
        if self.buffers.params[index].requires_grad:  # else frozen since its forward: autograd would drop it
            self._put(index, self._localize(index, grad))

    def _localize(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        wrapping = self._wrappings[index]
        return grad if wrapping is None else wrapping.local_gradient(grad)

    def _put(self, index: int, grad: torch.Tensor) -> None:
        if self._filled[index]:
            self._slots[index].add_(grad)
            return
        self._filled[index] = True
        torch.add(grad, 0.0, out=self._slots[index])  # [Note: Negative zero marks an unused parameter]

    def _check(self, index: int, grad: torch.Tensor) -> None:
        """Refuse what cannot be reduced into a flat gradient."""
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {self.buffers.layout.params[index].fqn!r} has a graph of its own "
                "(backward(create_graph=True)), which its sharded .grad cannot carry. For a gradient penalty take "
                "torch.autograd.grad(..., create_graph=True) with respect to inputs, and call backward() on the penalty"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {self.buffers.layout.params[index].fqn!r} is sparse, which cannot be reduced into a flat "
                "gradient: build the module with sparse=False"
            )

    def _hand_over(self, index: int, grad: torch.Tensor) -> None:
        self.any_filled = True
        if grad.dtype is not self.reduction.dtype or grad.device != self.buffers.device:
            grad = grad.to(self.buffers.device, self.reduction.dtype)
        if self.reduction.divide_factor is not None:
            grad = grad / self.reduction.divide_factor
        param = self.buffers.params[index]
        if not param.requires_grad:  # frozen since forward
            return
        self._filled[index] = True
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def _place_batch(self, dtype: torch.dtype) -> None:
        """Copy the gradients to their slots in an input of ``dtype``, from now on each as it comes."""
        computes = self.buffers.computes
        self._batching = False
        if not self.buffers.all_require_grad:
            self._drop_of_frozen()
        self._allocate_input(dtype)
        grads = list(map(_grad, computes))
        set_gradients_as_they_are(computes, _NONE)
        here = list(map(operator.is_not, grads, _NONE))
        slots, places = self._slots, list(range(len(grads)))
        if False in here:
            grads, slots, places = (list(itertools.compress(each, here)) for each in (grads, slots, places))
        if torch.is_grad_enabled() or not all([grad.layout is torch.strided for grad in grads]):
            for index, grad in zip(places, grads, strict=True):
                self._check(index, grad)
        if self._any_wrapped:
            grads = list(map(self._localize, places, grads))
        if self._nbytes < SMALL and grads:
            torch._foreach_copy_(slots, grads)
            self._input.add_(0.0)  # [Note: Negative zero marks an unused parameter]
            self._filled = here
            return
        grads.reverse()
        for index in places:
            self._put(index, grads.pop())

    def _drop_of_frozen(self) -> None:
        """Drop gradients of parameters that the user has frozen since their forward, as autograd would."""
        for param, compute in zip(self.buffers.params, self.buffers.computes, strict=True):
            if not param.requires_grad:
                compute.grad = None

    def _begin(self) -> None:
        self.any_filled = True
        self._batching = self._waits
        if not self._batching:
            self._allocate_input(self.reduction.reduce_dtype)

    def _allocate_input(self, dtype: torch.dtype) -> None:
        buffers = self.buffers
        if buffers.is_whole:  # all-reduced in place, it becomes the gradients themselves: a new one each time
            self._input = self.reduction.allocate(buffers.layout.padded_numel, dtype, self._input.device)
            self._slots, self._gaps = self._views_of(self._input)
        elif buffers.pool is not None:
            self._use_slot(buffers.pool, dtype)
        else:
            if self._input.dtype is not dtype:
                self._use_input(dtype)
            self._input.untyped_storage().resize_(buffers.layout.padded_numel * dtype.itemsize)
        if self._gaps:
            torch._foreach_zero_(self._gaps)

    def hold(self) -> None:
        """A backward is over, and another will add to its gradients before they are reduced."""
        if self._batching:
            self._place_batch(self.reduction.reduce_dtype)

    def follow_parameters(self) -> None:
        """The parameters have another dtype or device now: so do gradients that are held, and those to come."""
        buffers, held = self.buffers, self._input
        if self._made_for == (buffers.dtype, buffers.unsharded.flat.device):
            return
        self._allocate_views()
        if self.flat_param is not None:
            self.flat_param.data = buffers.shard
        if self.any_filled and held.numel() and not self._batching:
            if buffers.is_whole:
                self._input = held.to(self._input)
                self._slots, self._gaps = self._views_of(self._input)
            else:
                self._allocate_input(self.reduction.reduce_dtype)
                self._input.copy_(held)

    # -- reducing ----------------------------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """Whether there is anything to reduce, once a parameter requires grad."""
        trainable = self.buffers.dtype.is_floating_point or self.buffers.dtype.is_complex
        return trainable and not self._local and self.buffers.layout.padded_numel > 0

    def complete_input(self, runtime: Runtime, accumulates: bool) -> None:
        """Have all gradients in the reduction's input. Slots that took none count as unused.

        On the stream that backward computes on: the gradients that are copied and dropped here are its memory.
        ``accumulates``: some rank may add to gradients that it holds.
        """
        if self._hands_over:
            return
        if not self.any_filled:
            self._begin()
        if self._batching:
            widens = getattr(runtime.collectives, "widens", False)
            narrow = widens and not (accumulates or self.buffers.is_whole)
            self._place_batch(self._sent_dtype if narrow else self.reduction.reduce_dtype)
        no_gradient: list[int] = []
        if False in self._filled:
            if self.flat_param is None:
                params = self.buffers.params
                no_gradient = [i for i, f in enumerate(self._filled) if not f and params[i].requires_grad]
            unused = complex(-0.0, -0.0) if self.buffers.dtype.is_complex else -0.0
            for slot, filled in zip(self._slots, self._filled, strict=True):
                if not filled:
                    slot.fill_(unused)
        self.reduction.unused.begin(no_gradient)
        self.reduction.prepare(self._input)

    def reduce(self, runtime: Runtime) -> None:
        """Start averaging the input over the ranks. After ``complete_input``."""
        if not self._hands_over:
            self.reduction.start(runtime, self._input)

    def free_reduced(self) -> None:
        """The device has reduced the input: free it, ahead of ``finish``."""
        if self._slot is not None:
            self._slot.free()
            self._slot = None
        elif not self.buffers.is_whole and self.buffers.pool is None:
            self._input.untyped_storage().resize_(0)

    def finish(self, assign: bool = True) -> bool:
        """After the reduction: free its input, and (``assign``) set or add to the ``.grad`` of every parameter.

        Returns whether there were gradients to assign; ``given`` then lists the parameters that got one.
        """
        output, filled = self.reduction.take(), self._filled
        self._free_input()
        if not assign:
            self.reduction.discard()
            return False
        if output is None:
            if not (self._local and True in filled):
                return False
            self.given = [p for p, was_filled in zip(self.buffers.params, filled, strict=True) if was_filled]
            return True
        if self.flat_param is not None:
            if self.flat_param.grad is None:
                self.flat_param.grad = output
            else:
                self.flat_param.grad.add_(output)
            self.given = (self.flat_param,)
        else:
            self.given = self._assign(output, filled)
        return True

    def leave_memory(self) -> None:
        """Take another input from now on: collectives may use this one for as long as their group lives."""
        if self.buffers.is_whole:  # it is a new one each time
            return
        if self._slot is not None:
            assert self.buffers.pool is not None
            self.buffers.pool.leave(self._slot)
            self._slot = None
        self._inputs.clear()
        if self._input is not self._no_input:
            self._use_input(self._input.dtype)

    def discard(self) -> None:
        """Forget what was received, and free the memory. ``.grad`` is not touched."""
        self.reduction.discard()
        self._free_input()

    def _free_input(self) -> None:
        if self._batching:
            self._batching = False
            set_gradients_as_they_are(self.buffers.computes, _NONE)
        self._filled = [False] * len(self._filled)
        self.any_filled = False
        if self.buffers.is_whole:
            self._input, self._slots, self._gaps = self._no_input, [], []
        else:
            self.free_reduced()

    def _assign(self, output: torch.Tensor, filled: list[bool]) -> Sequence[nn.Parameter]:
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        buffers = self.buffers
        params, parts = buffers.params, self._parts.of(output, as_gradients=True)
        if False not in filled and buffers.all_require_grad:
            with plainly():  # torch looks for __torch_function__ at every access to a Parameter of another class
                there = list(map(_grad, params))
                if all(map(operator.is_, there, _NONE)):
                    set_gradients_as_they_are(params, parts)
                    return params
                if set(map(type, there)) == {type(parts[0])}:
                    torch._foreach_add_(there, parts)
                    return params
        given = []
        unused = self.reduction.unused.found
        for index, (param, grad, was_filled) in enumerate(zip(params, parts, filled, strict=True)):
            # `requires_grad` may have changed since forward: as in autograd, what it is now counts.
            if not param.requires_grad:
                continue
            if not (was_filled or (_used_elsewhere(grad) if grad.numel() else index not in unused)):
                continue
            given.append(param)
            if param.grad is None:
                param.grad = grad
            elif grad.numel():
                added.append((param.grad, grad))
        if added:
            held, new = zip(*added, strict=True)
            torch._foreach_add_(held, new)
            is_plain = torch.Tensor in set(map(type, held))  # autograd's, of a loss on the shard itself
            if is_plain and not buffers.is_whole:
                for param in params:
                    param.grad = param.grad
        return given

    def local(self) -> list[torch.Tensor | None]:
        """This rank's part of each parameter's gradient, wherever the user finds it; None where there is none."""
        if self.flat_param is None:
            return list(map(_grad, self.buffers.params))
        flat = self.flat_param.grad
        return [None] * len(self.buffers.params) if flat is None else list(self._parts.of(flat))

    # -- whole gradients for the user --------------------------------------------------------------------------------

    def gather(self, runtime: Runtime) -> list[torch.Tensor | None]:
        """Whole gradients in the parameters' shapes; None for a parameter that has none on any rank."""
        buffers, layout = self.buffers, self.buffers.layout
        device = buffers.unsharded.flat.device
        present = torch.zeros(layout.world_size, len(buffers.params), dtype=torch.uint8, device=device)
        local, here = self.local(), present[buffers.rank]
        here.copy_(torch.tensor([grad is not None for grad in local], dtype=torch.uint8))
        self._gather_now(runtime, present.view(-1), here)
        seen: list[int] = present.amax(0).tolist()
        if not any(seen):
            return [None] * len(seen)
        whole = torch.zeros(layout.padded_numel, dtype=self.reduction.dtype, device=device)
        shard = whole.view(layout.world_size, -1)[buffers.rank]
        for part, grad in zip(self._parts.of(shard), local, strict=True):
            if grad is not None:
                part.copy_(grad)
        self._gather_now(runtime, whole, shard)
        slots, _ = self._views_of(whole)
        return [slot if somewhere else None for slot, somewhere in zip(slots, seen, strict=True)]

    def _gather_now(self, runtime: Runtime, output: torch.Tensor, shard: torch.Tensor) -> None:
        if self.buffers.layout.world_size > 1:
            try:
                # As bytes: no backend knows every dtype.
                label = self.buffers.label
                runtime.exact.all_gather(output.view(torch.uint8), shard.view(torch.uint8), label).wait()
            except Exception as e:
                runtime.fail("all-gather", self.buffers.label.unit, e)

    def write_back(self, whole: list[torch.Tensor | None]) -> None:
        """Keep this rank's part of whole gradients: the inverse of ``gather``."""
        buffers = self.buffers
        if self.flat_param is not None and any(g is not None for g in whole) and self.flat_param.grad is None:
            self.flat_param.grad = torch.zeros_like(buffers.shard, dtype=self.reduction.dtype)
        flat = None if self.flat_param is None else self.flat_param.grad
        parts = None if flat is None else self._parts.of(flat)
        for index, (param, grad) in enumerate(zip(buffers.params, whole, strict=True)):
            info, part = buffers.layout.params[index], buffers.slices[index]
            if grad is None:
                param.grad = None
                continue
            dense = in_memory_order(self._localize(index, grad.detach()), info.stride)
            mine = buffers.shaped(index, dense[part.offset : part.offset + part.numel])
            if parts is not None:
                parts[index].copy_(mine)
            elif param.grad is None:
                param.grad = mine.to(buffers.device, self.reduction.dtype, copy=True)
            else:
                param.grad.copy_(mine)


def _used_elsewhere(grad: torch.Tensor) -> bool:
    """Whether any rank put a gradient into this slice. [Note: Negative zero marks an unused parameter]"""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    return not bool(((grad == 0) & torch.signbit(grad)).all())
