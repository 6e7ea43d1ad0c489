"""One flat parameter's gradients, from autograd to the user's ``.grad``.

[Note: The gradient has two homes]
- The *reduction input* (``ReductionInput``): 1-D, ``padded_numel`` elements, laid out as the unsharded buffer. It takes
  memory only from the time when a backward's gradients are complete to the end of their reduction. Until then the gradients
  stay where autograd puts them, in the unsharded parameters' ``.grad``. The unit's parameters are freed before the input is
  allocated, so the two never take memory at once. The gradients are copied into their places one by one, and each is freed
  at once; those of a small flat parameter are copied in one operation. If nothing is sharded (``NO_SHARD``) there is nothing
  to free, and the input becomes the gradients: each gradient is copied when it arrives, unless the flat parameter is small.
- The *gradient shard*, the reduction's output: 1-D, ``shard_numel`` elements, new in each backward. The ``.grad`` of each
  sharded parameter *is* a slice of it, so it exists until the user drops the gradients.

On a single rank there is nothing to reduce. Unless gradients have to be moved (CPU offload, ``flat_parameters``), there is no
input: each gradient becomes ``.grad`` when it arrives, without a copy.

With mixed precision a gradient arrives in the compute dtype, and is reduced in the reduce dtype (the copy into the buffer
casts it if needed). The gradient shard is cast to the parameters' own dtype, unless ``keep_low_precision_grads`` is set.

Under ``no_sync`` the input is kept from one backward to the next, which adds to it: in the reduce dtype, not in the compute
dtype.

[Note: Sent as it was computed]
A gradient that is computed in bfloat16 and reduced in float32 is a bfloat16 number in a float32. If the collectives can add
in a wider dtype than they send (``Capabilities.widens``), it is sent in bfloat16. The sums are the same bit for bit,
with half of the bytes, and half of the memory for the input. Gradients that have been held (``no_sync``) are sums in the
reduce dtype already, and are sent in that dtype. All ranks must choose the same dtype, including a rank that holds no
gradient. So the choice depends on whether the unit was told to hold gradients, not on whether it holds any
(``UnitGradients.accumulates``).

[Note: Negative zero marks an unused parameter]
A parameter that no rank used must end with ``.grad is None``, as in one process (weight decay and momentum would change it
otherwise). A parameter that another rank used must get that rank's gradient here, too. Ranks learn which it is without
further communication: an unused place is filled with -0.0, and a used one holds ``gradient + 0.0``, which is never -0.0. The
average of -0.0 alone is -0.0, and +0.0 + -0.0 is +0.0 (IEEE 754, round to nearest). So after the reduction a slice is all
-0.0 if and only if no rank used the parameter. Only a rank that did not use a parameter checks this. A rank that holds no
element of it cannot check: unused.py, [Note: Naming what a rank did not use]. If a reduction does not keep signed
zeros, such a gradient becomes zero instead of None.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn

from flatshard._handle.flat_shard import FlatShard
from flatshard._handle.pool import FlatBuffer
from flatshard._handle.reduction import Partial, Reduction, ReductionInput
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.flat_member import FlatMember
from flatshard._handle.tensors.grad_dtype import choose, has_chosen, promoted
from flatshard._handle.tensors.partial import consume
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_gradient import mark, mark_all, plain_grad, set_gradients_as_they_are
from flatshard._handle.tensors.sharded_parameter import ShardedParameter
from flatshard._handle.unit_ranks import UnitRanks
from flatshard._handle.unused import Unused
from flatshard._runtime import Runtime

SMALL = 128 * 1024  # bytes of a flat parameter below which overhead per operation costs more than memory traffic

# Read or called for every parameter in every step, so loops run in C.
_grad, _grad_of_plain, _layout = plain_grad.__get__, operator.attrgetter("grad"), operator.attrgetter("layout")
_NONE = itertools.repeat(None)
_STRIDED = {torch.strided}
_ZERO = torch.zeros((), device="cpu")  # an addend on any device and of any dtype: to torch a number costs twice as much


@functools.cache
def exactly_sent_as(compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
    """The narrowest dtype that holds gradients exactly if they are computed in ``compute`` and reduced in ``reduce``."""
    wide = reduce in (torch.float32, torch.float64)
    narrow = compute in (torch.bfloat16, torch.float16, torch.float32) and compute.itemsize < reduce.itemsize
    return compute if wide and narrow else reduce


class FlatGradients:
    """The gradients of one :class:`FlatParam`. [Note: The gradient has two homes]"""

    def __init__(self, flat: FlatShard) -> None:
        self.flat = flat
        self.reduce_by(None)
        self.reduction: Reduction | None = None  # from `complete` to `finish`
        self.unused = Unused(flat.layout)
        self.partial: Partial | None = None  # what earlier reductions have held
        self.shard_param: ShardedParameter | None = None  # set by `flat_parameters`: then only it gets a gradient
        self._cleared: set[int] = set()  # parameters whose parts of its gradient were cleared since the last backward
        self._begin()

    def reduce_by(self, choose_runtime: Callable[[UnitRanks], Runtime] | None) -> None:
        """Have another runtime of the same ranks reduce the gradients from now on. None: their own."""
        ranks, self.choose_runtime = self.flat.ranks, choose_runtime
        self.runtime = ranks.runtime if choose_runtime is None else choose_runtime(ranks)

    def _begin(self) -> None:
        """Choose how gradients travel, by the flat parameter as it is now."""
        flat, kind = self.flat, self.flat.kind
        self._follow_choices()
        dtype = self.reduce_dtype
        to_reduce = flat.ranks.size > 1 or self.shard_param is not None or kind.is_offloaded
        self._input = ReductionInput(flat, dtype) if to_reduce else None  # None: each gradient becomes `.grad` at once
        self._is_small = flat.layout.padded_numel * dtype.itemsize < SMALL
        self._waits_for_all = to_reduce and (self._is_small or not flat.is_whole)
        # For each parameter, whether it has a gradient in the input (in `.grad`, if there is no input). None: none has one.
        self._filled: list[bool] | None = None
        self.follow_names()

    def _follow_choices(self) -> None:
        """Set the dtypes of gradients on their way. [Note: The dtype of a gradient]"""
        flat, options, own = self.flat, self.flat.options, self.flat.kind.dtype
        computed = options.compute_dtype or own  # also if it was encoded
        unset = computed if options.reduce_as_computed else own
        owners = self.owners
        if options.keep_low_precision_grads:
            for param in owners:
                if not has_chosen(param):
                    choose(param, options.reduce_dtype or unset)
        self._choices = choices = [param.grad_dtype for param in owners]
        others = [None if choice is own else choice for choice in choices]
        self.reduce_dtype = options.reduce_dtype or promoted([other or unset for other in others])  # of the sums
        self._takes_any = options.reduce_dtype is None and None in choices
        arriving = [promoted((computed, other or computed)) for other in others]
        # What arrives in any dtype, or was added up before, is not known to fit into a narrower one.
        known = None not in choices and not any(w is not None and w.adds_gradients for w in flat.wrappings)
        self._sent_dtype = exactly_sent_as(promoted(arriving), self.reduce_dtype) if known else self.reduce_dtype
        self.dtypes = [choice or self.reduce_dtype for choice in choices]  # of each ``.grad``
        self.dtype = promoted(self.dtypes)  # of all of them together
        if flat.is_trainable:
            of_each = zip(flat.unsharded.params, itertools.cycle(choices), itertools.cycle(arriving))
            for compute, choice, dtype in of_each:
                arrives = None if choice is None else compute.dtype if dtype is computed else dtype
                if compute.grad_dtype is not arrives:
                    compute.grad_dtype = arrives

    @property
    def owners(self) -> Sequence[nn.Parameter]:
        """The user's parameters that get the gradients."""
        return self.flat.params if self.shard_param is None else (self.shard_param,)

    def follow_names(self) -> None:
        """Adopt the FQNs of the parameters, and make their parts anew."""
        one = len(set(self.dtypes)) == 1
        self._parts = _Parts(self.flat, self.dtype) if one else _CastParts(self.flat, self.dtypes)

    @property
    def is_chosen_anew(self) -> bool:
        """Whether the user has chosen another dtype since the last ``follow_parameters``. [Note: The dtype of a gradient]"""
        return [param.grad_dtype for param in self.owners] != self._choices

    def follow_parameters(self) -> None:
        """Adopt a new dtype or device of the parameters, also for gradients that are held."""
        views, filled = [] if self._input is None else self._input.views, self._filled or ()
        if self.shard_param is not None:
            self.shard_param.data = self.flat.shard
        for param in self.owners:
            if param.grad is not None and param.grad_dtype not in (None, param.grad.dtype):  # `module.to` casts both
                choose(param, param.grad_dtype)
        self._begin()
        for index, grad in enumerate(views):
            if filled[index]:
                self._put(index, grad.to(self.flat.kind.compute_device))

    def follow_ranks(self) -> None:
        """Adopt other ranks, and another layout. No gradients are held or under way."""
        self.reduce_by(self.choose_runtime)
        self.unused = Unused(self.flat.layout)
        self._begin()

    def use_shard_param(self, info: ShardInfo) -> nn.Parameter:
        """From now on a single 1-D parameter over the local shard, ``info``, gets the gradient; the parameters get none."""
        if self.shard_param is None:
            flat = self.flat
            self.shard_param = ShardedParameter.adopt(nn.Parameter(flat.shard.data), info, flat)
            choice = self._choices[0] if len(set(self._choices)) == 1 else self.dtype
            if choice is not flat.kind.dtype:
                self.shard_param.grad_dtype = choice
            self._begin()
            for param in flat.params:
                grad, param.grad = param.grad, None
                param.__class__ = FlatMember
                if grad is not None:
                    param.grad = grad
        return self.shard_param

    def part(self, index: int) -> torch.Tensor | None:
        """The part of parameter ``index`` in ``shard_param.grad``: a view. [Note: A part of a flat gradient]"""
        assert self.shard_param is not None
        flat, grad = self.flat, self.shard_param.grad
        if grad is None:
            return None
        with torch.no_grad(), plainly():
            place = flat.slices[index]
            view = flat.shaped(index, grad[place.start : place.stop])
        mark(view, flat.params[index]._flatshard_info)
        return view

    def set_part(self, index: int, grad: torch.Tensor | None) -> None:
        """Set that part. None: clear it, and ``shard_param.grad`` if it was the last one.

        Raises:
            RuntimeError: ``grad`` has another shape.
        """
        assert self.shard_param is not None
        param, held = self.flat.params[index], self.part(index)
        if grad is None:
            self._cleared.add(index)
            if len(self._cleared) == len(self.flat.params):
                self.shard_param.grad = None
            elif held is not None:
                held.zero_()
            return
        if grad.shape != param.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} for {param._flatshard_info.fqn!r}, of which this rank has a part "
                f"of shape {tuple(param.shape)}"
            )
        if held is None:
            self.shard_param.grad = torch.zeros_like(self.flat.shard, dtype=self.dtype)
        self._cleared.discard(index)
        target = self.part(index)
        assert target is not None
        with torch.no_grad():
            target.copy_(grad)

    @property
    def input(self) -> torch.Tensor | None:
        """The reduction input, or None. It has storage from ``complete`` to ``finish``."""
        return None if self._input is None else self._input.flat

    # -- arriving ----------------------------------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        """Whether gradients are in the unsharded parameters' ``.grad``, until all have come."""
        return self._waits_for_all and self._filled is None

    @property
    def stays_away(self) -> bool:
        """Whether gradients stay where autograd puts them (later ones are added there) until all have come."""
        return self._is_waiting or True not in self.flat.requires_grad

    def receive(self, index: int) -> None:
        """Take the gradient from unsharded parameter ``index``. It may be None: a custom autograd function may return None.

        Raises:
            RuntimeError: the gradient is sparse, or has a graph of its own.
        """
        compute = self.flat.unsharded.params[index]
        if compute.grad is None or self._is_waiting:
            return
        grad, compute.grad = compute.grad, None
        self._check(index, grad)
        if self.flat.params[index].requires_grad:  # one that was frozen since its forward is dropped, as autograd would
            self._put(index, self._local(index, grad))

    def _check(self, index: int, grad: torch.Tensor) -> None:
        """Raise if ``grad`` cannot be reduced in a flat parameter."""
        fqn = self.flat.layout.params[index].fqn
        is_reduced = self._takes_any and self._input is not None
        if is_reduced and promoted((grad.dtype, self.reduce_dtype)) is not self.reduce_dtype:
            raise RuntimeError(
                f"the gradient of {fqn!r} is {grad.dtype}, which its reduction in {self.reduce_dtype} would round. It has "
                f"grad_dtype=None, which lets any dtype in, but ranks must agree on one: set p.grad_dtype = {grad.dtype} "
                "on the parameter, or pass MixedPrecision(reduce_dtype=...) to fully_shard"
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {fqn!r} has a graph of its own (backward(create_graph=True)), which its sharded .grad "
                "cannot carry. For a gradient penalty take torch.autograd.grad(..., create_graph=True) with respect to "
                "inputs, and call backward() on the penalty"
            )
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {fqn!r} is sparse, which cannot be reduced into a flat gradient: build the module with "
                "sparse=False"
            )

    def _local(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of the plain tensor inside a tensor subclass; of other parameters as it is."""
        wrapping = self.flat.wrappings[index]
        return grad if wrapping is None else wrapping.local_gradient(grad, self.reduce_dtype)

    def _put(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad``, plain and local, to the gradient of parameter ``index``."""
        filled = self._filled if self._filled is not None else self._make_room(self.reduce_dtype)
        if self._input is None:
            self._hand_over(self.flat.params[index], grad, self._choices[index])
        elif filled[index]:
            self._input.views[index].add_(grad)
        else:
            torch.add(grad, _ZERO, out=self._input.views[index])  # [Note: Negative zero marks an unused parameter]
        filled[index] = True

    def _hand_over(self, param: nn.Parameter, grad: torch.Tensor, dtype: torch.dtype | None) -> None:
        factor = self.flat.ranks.factor
        if grad.dtype is not dtype or grad.device != self.flat.kind.device:
            grad = grad.to(self.flat.kind.device, dtype)
        if factor is not None:
            grad = grad * factor
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def _make_room(self, dtype: torch.dtype) -> list[bool]:
        """Allocate the input, with ``dtype``."""
        if self._input is not None:
            self._input.allocate(dtype, self.runtime.capabilities.lend_memory)
        self._filled = [False] * len(self.flat.params)
        return self._filled

    def _copy_to_input(self, dtype: torch.dtype) -> None:
        """Move the gradients from autograd's tensors to an input of ``dtype``. Later ones are added when they arrive."""
        flat, computes, input = self.flat, self.flat.unsharded.params, self._input
        assert input is not None
        if not flat.all_require_grad:  # drop gradients of those frozen since their forward, as autograd would
            for param, compute in zip(flat.params, computes, strict=True):
                if not param.requires_grad:
                    compute.grad = None
        input.allocate(dtype, self.runtime.capabilities.lend_memory)
        grads = list(map(_grad_of_plain, computes))
        consume(map(setattr, computes, itertools.repeat("grad"), _NONE))
        here = list(map(operator.is_not, grads, _NONE))
        views, places = input.views, list(range(len(grads)))
        if False in here:
            grads, views, places = (list(itertools.compress(each, here)) for each in (grads, views, places))
        if torch.is_grad_enabled() or self._takes_any or not set(map(_layout, grads)) <= _STRIDED:
            for index, grad in zip(places, grads, strict=True):
                self._check(index, grad)
        if any(flat.wrappings):
            grads = list(map(self._local, places, grads))
        if self._is_small and grads:
            torch._foreach_copy_(views, grads)
            input.flat.add_(_ZERO)  # [Note: Negative zero marks an unused parameter]
            self._filled = here
            return
        self._filled = [False] * len(here)
        grads.reverse()
        for index in places:
            self._put(index, grads.pop())

    def hold(self) -> None:
        """End a backward without a reduction: the next backward adds to its gradients."""
        if self._is_waiting:
            grads = map(_grad, self.flat.unsharded.params)
            if not all(map(operator.is_, grads, _NONE)):
                self._copy_to_input(self.reduce_dtype)

    # -- reducing ----------------------------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """Whether gradients of this flat parameter are reduced when a parameter requires grad."""
        return self.flat.is_trainable and self.flat.ranks.size > 1 and self.flat.layout.padded_numel > 0

    @property
    def comes_late(self) -> bool:
        """Whether gradients become ``.grad`` when a reduction ends. False: when autograd has computed them."""
        return self._input is not None and self.flat.layout.padded_numel > 0 and self.are_wanted

    @property
    def are_wanted(self) -> bool:
        """Whether the user trains some of the parameters. Gradients of those frozen since their forward are dropped."""
        return any(p.requires_grad for p in self.owners)

    def complete(self, accumulates: bool) -> None:
        """Make the reduction: all gradients have come. ``accumulates``: some rank may hold gradients to add to.

        Call this on the stream of the backward: the gradients that are copied and freed here are memory of that stream.
        """
        flat = self.flat
        if self._input is None:
            return
        if self._is_waiting:
            narrow = self.runtime.capabilities.widens and not (accumulates or flat.is_whole)
            self._copy_to_input(self._sent_dtype if narrow else self.reduce_dtype)  # [Note: Sent as it was computed]
        filled = self._filled if self._filled is not None else self._make_room(self.reduce_dtype)
        no_gradient: list[int] = []
        if False in filled:
            if self.shard_param is None:  # otherwise ranks need not agree on the parameters that none of them used
                no_gradient = [i for i, f in enumerate(filled) if not f and flat.params[i].requires_grad]
            unused = complex(-0.0, -0.0) if flat.kind.dtype.is_complex else -0.0
            for view, was_filled in zip(self._input.views, filled, strict=True):
                if not was_filled:
                    view.fill_(unused)
        self.unused.begin(no_gradient)
        dtypes = self.reduce_dtype, self.dtype
        self.reduction = Reduction(flat, self.runtime, self._input.flat, dtypes, self.unused, self.partial)
        self.partial = None

    def use_buffers(self, make: Callable[[torch.Tensor], FlatBuffer]) -> None:
        """See ``ReductionInput.use_buffers``."""
        if self._input is not None:
            self._input.use_buffers(make)

    def drop_partial(self) -> None:
        """Drop what earlier reductions have left partial."""
        self.partial = None

    def free_reduced(self) -> None:
        """Free the reduction input before ``finish``, because the device has already read it."""
        if self._input is not None and not self.flat.is_whole:  # otherwise the input is the result
            self._input.free()

    def leave_memory(self) -> None:
        """See ``ReductionInput.leave``."""
        if self._input is not None:
            self._input.leave()

    def discard(self) -> None:
        """Drop all received gradients and free their memory. ``.grad`` is not changed."""
        if self._is_waiting:
            set_gradients_as_they_are(self.flat.unsharded.params, _NONE)
        self.partial = None
        self._drop()

    def _drop(self) -> None:
        self._filled = self.reduction = None
        if self._input is not None:
            self._input.free()

    # -- the result --------------------------------------------------------------------------------------------------

    def local(self) -> list[torch.Tensor | None]:
        """This rank's part of each parameter's gradient, in ``.grad`` or in ``shard_param.grad``; None if there is none."""
        if self.shard_param is None:
            return list(map(_grad, self.flat.params))
        grad = self.shard_param.grad
        with plainly():
            return [None] * len(self.flat.params) if grad is None else list(self._parts.of(grad))

    def finish(self, assign: bool = True) -> Sequence[nn.Parameter] | None:
        """After the reduction: free its input, and (``assign``) set or add to the ``.grad`` of every parameter.

        Returns the parameters that got one. None: there were no gradients to assign.
        """
        filled = self._filled
        if filled is None:
            return None
        shard = None
        if self.reduction is not None:
            shard, self.partial = self.reduction.take(), self.reduction.partial
        self._drop()
        if not assign:
            self.partial = None
            return None
        if shard is None:  # handed over already, or held
            return None if self._input is not None else list(itertools.compress(self.flat.params, filled)) or None
        if self.shard_param is None:
            return self._assign(shard, filled)
        self._cleared.clear()
        if self.shard_param.grad is None:
            self.shard_param.grad = shard
        else:
            self.shard_param.grad.add_(shard)
        return (self.shard_param,)

    def _assign(self, output: torch.Tensor, filled: list[bool]) -> Sequence[nn.Parameter]:
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        flat = self.flat
        params, parts = flat.params, self._parts.of(output, as_gradients=True)
        if False not in filled and flat.all_require_grad:
            with plainly():  # torch looks for __torch_function__ at every access to a Parameter of another class
                there = list(map(_grad, params))
                if all(map(operator.is_, there, _NONE)):
                    set_gradients_as_they_are(params, parts)
                    return params
                if set(map(type, there)) == {type(parts[0])}:
                    torch._foreach_add_(there, parts)
                    return params
        given = []
        unused = self.unused.found
        for index, (param, grad, was_filled) in enumerate(zip(params, parts, filled, strict=True)):
            # As in autograd, the current `requires_grad` counts: the user may have changed it since forward.
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
            is_plain = torch.Tensor in set(map(type, held))  # from autograd, for a loss on the shard itself
            if is_plain and not flat.is_whole:
                for param in params:
                    param.grad = param.grad
        return given


def _used_elsewhere(grad: torch.Tensor) -> bool:
    """Whether any rank used the parameter of this slice. [Note: Negative zero marks an unused parameter]"""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    with plainly():
        return not bool(((grad == 0) & torch.signbit(grad)).all())


class _Parts:
    """Cuts a gradient shard into the parts of the parameters. Made for one dtype and one device of the gradients."""

    __slots__ = ("_by_rows", "_empties", "_flat", "_infos", "_marked", "_pieces", "_sizes")

    def __init__(self, flat: FlatShard, dtype: torch.dtype) -> None:
        self._flat = flat
        self._sizes: list[int] = []  # of the pieces that the shard is split into: parts, and the padding between them
        # (index of a parameter with elements on this rank, index of its piece)
        self._pieces: list[tuple[int, int]] = []
        end = 0
        for index, part in sorted(enumerate(flat.slices), key=lambda each: each[1].start):
            if not part.numel:
                continue
            if part.start > end:
                self._sizes.append(part.start - end)
            self._pieces.append((index, len(self._sizes)))
            self._sizes.append(part.numel)
            end = part.stop
        if flat.layout.shard_numel > end:
            self._sizes.append(flat.layout.shard_numel - end)
        self._by_rows = [index for index, _ in self._pieces if flat.layout.params[index].by_rows]
        infos = [param._flatshard_info for param in flat.params]
        # The parts that become sharded gradients. If nothing is sharded here: those of DTensors, over their own mesh.
        self._marked = [index for index, _ in self._pieces if infos[index].runtime is not None]
        self._infos = [infos[index] for index in self._marked]
        # Parts without elements are created once. `of` fills in the others for each gradient.
        empty = torch.empty(0, dtype=dtype, device=flat.kind.device)
        self._empties = [empty.new_empty(p.shape if not p.numel() else (0,)) for p in flat.params]
        for part_of, info in zip(self._empties, infos, strict=True):
            mark(part_of, info)

    def of(self, shard: torch.Tensor, as_gradients: bool = False) -> list[torch.Tensor]:
        """The part of each parameter in ``shard`` (``shard_numel`` elements): views, in the shapes of the user's parameters.

        ``as_gradients``: return them as they are stored in ``.grad``, see ``ShardedGradient``.
        """
        layout = self._flat.layout
        if self._flat.is_whole:
            parts = [shard.as_strided(info.shape, info.stride, info.start) for info in layout.params]
        else:
            parts, split = self._empties.copy(), shard.split_with_sizes(self._sizes)
            for index, piece in self._pieces:
                parts[index] = split[piece]
            for index in self._by_rows:
                parts[index] = self._flat.shaped(index, parts[index])
        if as_gradients and self._infos:
            mark_all([parts[index] for index in self._marked], self._infos)
        return parts


class _CastParts(_Parts):
    """The same for gradients of several dtypes. [Note: The dtype of a gradient]"""

    __slots__ = ("_dtypes",)

    def __init__(self, flat: FlatShard, dtypes: Sequence[torch.dtype]) -> None:
        """``dtypes``: of each parameter's gradient."""
        self._dtypes = dtypes
        super().__init__(flat, promoted(dtypes))
        self._empties = list(map(self._cast, self._empties, dtypes))

    @staticmethod
    def _cast(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return part if part.dtype is dtype else part.to(dtype)

    def of(self, shard: torch.Tensor, as_gradients: bool = False) -> list[torch.Tensor]:
        """See ``_Parts``. What is stored in ``.grad`` is cast; other parts are views."""
        parts = super().of(shard, as_gradients)
        return list(map(self._cast, parts, self._dtypes)) if as_gradients else parts
