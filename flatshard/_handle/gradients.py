"""One flat parameter's gradients: from autograd into the input of a reduction, and from its output to the user's ``.grad``.

[Note: Two tensors of gradients]
- The *reduction input* (``ReductionInput``): 1-D, ``padded_numel`` elements, laid out as the unsharded buffer. It has memory
  only while a reduction reads it, or while gradients are held. Before that, gradients stay where autograd puts them: in the
  unsharded parameters' ``.grad``. The unit's parameters are freed before the input is allocated, so the two never take memory
  at once. Each gradient is freed as soon as it was copied; those of a small flat parameter are copied in one operation. With
  ``NO_SHARD`` there is nothing to free, and the input becomes the gradients: each is copied when it arrives, unless the flat
  parameter is small.
- The *gradient shard*, the reduction's output: 1-D, ``shard_numel`` elements, new in each backward. The ``.grad`` of each
  sharded parameter *is* a slice of it, so it exists until the user drops the gradients.

A single rank reduces nothing. Unless gradients have to be moved (CPU offload, ``flat_parameters``), there is no input: each
gradient becomes ``.grad`` when it arrives, without a copy.

With mixed precision gradients arrive in the compute dtype, and the copy into the input casts them to the reduce dtype. The
gradient shard is cast to the parameters' own dtype, unless ``keep_low_precision_grads`` is set. Under ``no_sync`` the input
is kept, and the next backward adds to it, in the reduce dtype.

[Note: Sent as it was computed]
A gradient that is computed in bfloat16 and reduced in float32 is a bfloat16 number in a float32. If the collectives can add
in a wider dtype than they send (``Capabilities.widens``), it is sent in bfloat16. The sums are the same bit for bit,
with half of the bytes, and half of the memory for the input. Held gradients (``no_sync``) are sums in the reduce dtype
already, and are sent in it. All ranks must choose the same dtype, including a rank that holds no gradient. So the choice
depends on whether the unit was told to hold gradients, not on whether it holds any (``UnitGradients.accumulates``).

[Note: Negative zero marks an unused parameter]
A parameter that no rank used must end with ``.grad is None``, as in one process: weight decay and momentum would change it
otherwise. A parameter that another rank used must get that rank's gradient here, too. Ranks learn this without further
communication: an unused range is filled with -0.0, and a used one holds ``gradient + 0.0``, which is never -0.0. The average
of -0.0 alone is -0.0, and +0.0 + -0.0 is +0.0 (IEEE 754, round to nearest). So after the reduction a slice is all -0.0 if and
only if no rank used the parameter, or all averages in it are negative and round to zero. Only a rank that did not use a
parameter checks this. The mark does not tell where a rank holds no element, or a dtype rounds gradients to zero: see
reduction.py, [Note: Naming unused parameters]. If a reduction does not keep signed zeros, such a gradient
becomes zero instead of None.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import nn

from flatshard._base.errors import name_list, warn_user
from flatshard._comm.collectives import LendMemory
from flatshard._comm.runtime import Runtime
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import FlatLayout
from flatshard._handle.reduction import Partial, Reduction, Unused
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.grad_dtype import GradDtypes, choose, promoted
from flatshard._handle.tensors.local_numbers import consume
from flatshard._handle.tensors.shard_info import ShardInfo
from flatshard._handle.tensors.sharded_gradient import ShardedGradient, plain_grad
from flatshard._handle.unit_ranks import UnitRanks
from flatshard._handle.unsharded import FlatBuffer

SMALL = 128 * 1024  # bytes of a flat parameter below which overhead per operation costs more than memory traffic

# Read or called for every parameter in every step, so loops run in C.
_grad, _set_plain_grad, _grad_of_plain = plain_grad.__get__, plain_grad.__set__, operator.attrgetter("grad")
_plain_shape: Callable[[torch.Tensor], torch.Size] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_layout, _requires_grad = operator.attrgetter("layout"), operator.attrgetter("requires_grad")
_NONE, _INFO = itertools.repeat(None), itertools.repeat("_flatshard_info")
_SHARDED_GRADIENT = (
    itertools.repeat("__class__"),
    itertools.repeat(ShardedGradient),
)  # as `retype` sets it, without a call
_STRIDED = {torch.strided}
_ZERO = torch.zeros((), device="cpu")  # an addend on any device and of any dtype: to torch a number costs twice as much


_Views = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]
"""A 1-D tensor, each parameter's view of it, and the padding."""


def views_of(flat: torch.Tensor, layout: FlatLayout) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return each parameter's view of ``flat``, in the parameter's shape and stride, and the padding between them."""
    views = [flat.as_strided(info.shape, info.stride, info.start) for info in layout.params]
    return views, [flat[start:stop] for start, stop in layout.gaps()]


class ReductionInput:
    """The input of a reduction. Its memory is a buffer of the pool, lent by gloo's collectives, or one of its own per dtype.

    With ``NO_SHARD`` the memory is new each time: it is all-reduced in place and becomes the gradients.
    """

    def __init__(self, flat: FlatParam, dtype: torch.dtype, numel: int) -> None:
        """Prepare an input of ``numel`` elements for ``flat``. ``dtype``: its usual dtype."""
        self._layout, self._pool = flat.layout, flat.ranks.pool
        self._numel, self._device = numel, flat.kind.compute_device
        self._becomes_grads = flat.holds_all
        self._buffer: FlatBuffer | None = None  # in use
        self._known: dict[FlatBuffer, _Views] = {}  # the buffers used so far, with their views
        self._make_buffer: Callable[[torch.Tensor], FlatBuffer] = FlatBuffer  # for memory of its own
        self._nothing: _Views = torch.empty(0, device=flat.kind.compute_device), [], []
        self.flat, self.views, self.gaps = self._nothing
        if self._pool is None and flat.kind.is_trainable and not flat.holds_all:
            own = self._find_buffer(dtype)
            self._make_views(own)  # here, to save the time in the first step
            own.free()

    def allocate(self, dtype: torch.dtype, lend: LendMemory | None) -> None:
        """Allocate the memory, and zero the padding. ``lend``: of the collectives that reduce it."""
        new = self._new(dtype) if self._becomes_grads else None
        if new is None and self._pool is None and lend is not None:
            new = lend(self._numel, dtype, False)
        if new is not None:
            self.flat = new
            self.views, self.gaps = views_of(self.flat, self._layout)
        else:
            self._buffer = buffer = self._find_buffer(dtype)
            buffer.take(self)
            self.flat, self.views, self.gaps = self._known.get(buffer) or self._make_views(buffer)
        if self.gaps:
            torch._foreach_zero_(self.gaps)

    def _find_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        if self._pool is not None:
            return self._pool.buffer_for_input(self._numel, dtype)
        for buffer in self._known:
            if buffer.flat.dtype is dtype:
                return buffer
        return self._make_buffer(self._new(dtype))

    def _new(self, dtype: torch.dtype) -> torch.Tensor:
        if self._pool is not None:
            return self._pool.allocate(self._numel, dtype)
        return torch.empty(self._numel, dtype=dtype, device=self._device)

    def _make_views(self, buffer: FlatBuffer) -> _Views:
        flat = buffer.flat[: self._numel]
        self._known[buffer] = views = flat, *views_of(flat, self._layout)
        return views

    def use_buffers(self, make: Callable[[torch.Tensor], FlatBuffer]) -> None:
        """Make its own buffers by ``make`` from now on. None of them may be in use."""
        self._make_buffer = make
        if self._pool is None:
            self._known = {make(before.flat): views for before, views in self._known.items()}

    def free(self) -> None:
        """Free the memory. Idempotent."""
        self.flat, self.views, self.gaps = self._nothing
        if self._buffer is not None:
            self._buffer.free()
            self._buffer = None

    def abandon_memory(self) -> None:
        """Stop using the current memory without freeing it: collectives may use it as long as their group exists.

        A buffer of the pool stays in use, so no other unit gets it.
        """
        self.flat, self.views, self.gaps = self._nothing
        self._known.clear()
        self._buffer = None


class Arrival(enum.Enum):
    """The way of computed gradients to their reduction. [Note: Two tensors of gradients]"""

    AS_GRAD = "each becomes `.grad` at once: a single rank reduces nothing"
    ONE_BY_ONE = "each is copied to the input of the reduction"
    TOGETHER = "all stay where autograd puts them, and are copied to the input when the last has arrived"


_TOGETHER = Arrival.TOGETHER


class GradSlices:
    """Cuts gradient shards into the gradients of the sharded parameters: views, unless their dtypes differ."""

    __slots__ = ("_by_rows", "_dtypes", "_empties", "_full", "_infos", "_marked", "_pieces", "_sizes")

    def __init__(self, flat: FlatParam, dtypes: Sequence[torch.dtype]) -> None:
        """Prepare for ``flat`` as it is now. ``dtypes``: of each gradient, or a single one for all."""
        layout, slices, infos = flat.layout, flat.slices, [param._flatshard_info for param in flat.params]
        # Indices of gradients that are sharded: see `mark`. If nothing is sharded here: DTensors, over their own mesh.
        sharded = [i for i, info in enumerate(layout.params) if info.numel and infos[i].runtime is not None]
        self._marked = [index for index in sharded if slices[index].numel]
        self._infos = [infos[index] for index in self._marked]
        self._full = [(info.shape, info.stride, info.start) for info in layout.params] if flat.holds_all else None
        self._dtypes = dtypes if len(set(dtypes)) > 1 else None
        # `split_with_sizes` cuts the shard into slices and the padding between them.
        self._sizes: list[int] = []
        self._pieces: list[tuple[int, int]] = []  # the index of a parameter with elements here, and of its piece
        end = 0
        for index, part in sorted(enumerate(slices), key=lambda each: each[1].start):
            if not part.numel:
                continue
            if part.start > end:
                self._sizes.append(part.start - end)
            self._pieces.append((index, len(self._sizes)))
            self._sizes.append(part.numel)
            end = part.stop
        if layout.shard_numel > end:
            self._sizes.append(layout.shard_numel - end)
        shapes = list(map(_plain_shape, flat.params))
        self._by_rows = [(i, shapes[i], infos[i].stride) for i, _ in self._pieces if infos[i].by_rows]
        # Slices without elements are made once.
        of_each = zip([(0,) if 0 not in shape else shape for shape in shapes], itertools.cycle(dtypes))
        self._empties = [torch.empty(shape, dtype=dtype, device=flat.kind.device) for shape, dtype in of_each]
        marked = [self._empties[index] for index in sharded]
        consume(map(setattr, marked, *_SHARDED_GRADIENT))
        consume(map(setattr, marked, _INFO, [infos[index] for index in sharded]))

    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradient of each parameter in ``shard``, as it is stored in ``.grad``."""
        if self._full is not None:
            grads = [shard.as_strided(shape, stride, start) for shape, stride, start in self._full]
        else:
            grads, pieces = self._empties.copy(), shard.split_with_sizes(self._sizes)
            for index, piece in self._pieces:
                grads[index] = pieces[piece]
            for index, shape, stride in self._by_rows:
                grads[index] = grads[index].as_strided(shape, stride)
        if self._dtypes is not None:  # grad_dtype.py, [Note: The dtype of a gradient]
            grads = [g if g.dtype is dtype else g.to(dtype) for g, dtype in zip(grads, self._dtypes, strict=True)]
        if self._infos:
            marked = [grads[index] for index in self._marked]
            consume(map(setattr, marked, *_SHARDED_GRADIENT))
            consume(map(setattr, marked, _INFO, self._infos))
        return grads


class FlatGradients:
    """The gradients of one :class:`FlatParam`. [Note: Two tensors of gradients]"""

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat
        self.reduction: Reduction | None = None  # from `prepare_reduction` to `set_grads`
        self.partial: Partial | None = None  # the output of earlier reductions that is not averaged over replicas yet
        self.change_ranks(None)

    def reduce_by(self, choose_runtime: Callable[[UnitRanks], Runtime] | None) -> None:
        """Have another runtime of the same ranks reduce the gradients from now on, or their own if None."""
        ranks, self.choose_runtime = self.flat.ranks, choose_runtime
        self.runtime = ranks.runtime if choose_runtime is None else choose_runtime(ranks)

    def change_ranks(self, choose_runtime: Callable[[UnitRanks], Runtime] | None) -> None:
        """Adopt the flat parameter's ranks and layout. No gradients are held or under way."""
        self.reduce_by(choose_runtime)
        self.unused = Unused(self.flat.layout)
        self._prepare()

    def _prepare(self) -> None:
        """Choose dtypes and buffers by the flat parameter as it is now."""
        flat = self.flat
        self._kind = flat.kind
        are_added = any(w is not None and w.adds_gradients for w in flat.wrappings)
        self.dtypes = GradDtypes(flat.options, flat.kind.dtype, flat.owners, are_added)
        if flat.kind.is_trainable:
            self.dtypes.apply_to(flat.unsharded.params)
        dtype, numel = self.dtypes.reduce, flat.layout.padded_numel
        self._is_small = numel * dtype.itemsize < SMALL
        to_reduce = flat.ranks.size > 1 or flat.flat_grad is not None or flat.kind.is_offloaded
        # None if gradients arrive `AS_GRAD`. It has memory from the first copy to `set_grads`.
        self.input = ReductionInput(flat, dtype, numel) if to_reduce else None
        together = Arrival.TOGETHER if self._is_small or not flat.holds_all else Arrival.ONE_BY_ONE
        self.arrival = together if to_reduce else Arrival.AS_GRAD
        # Whether a gradient of each parameter has been moved from autograd, to the input or to `.grad` (`AS_GRAD`). None: not
        # yet. Local to this rank: a parameter without a gradient is marked as unused, and is reduced all the same.
        self._moved: list[bool] | None = None
        self.prepare_slices()

    def prepare_slices(self) -> None:
        """Prepare to cut gradient shards into ``.grad``, by the parameters' names and dtypes as they are now."""
        self._slices = GradSlices(self.flat, self.dtypes.of_each)

    @property
    def is_outdated(self) -> bool:
        """Whether the flat parameter's dtype or device, or the user's choice of a gradient's dtype, has changed."""
        return self._kind is not self.flat.kind or [p.grad_dtype for p in self.flat.owners] != self.dtypes.choices

    def update(self) -> None:
        """Adopt the dtypes and the device of the flat parameter, also for gradients that are held."""
        moved = [] if self.input is None or self._moved is None else zip(self._moved, self.input.views, strict=True)
        for param in self.flat.owners:
            if param.grad is not None and param.grad_dtype not in (None, param.grad.dtype):  # `module.to` casts both
                choose(param, param.grad_dtype)
        self._prepare()
        for index, (has_one, grad) in enumerate(moved):
            if has_one:
                self._put(index, grad.to(self.flat.kind.compute_device))

    def use_shard_param(self, info: ShardInfo) -> nn.Parameter:
        """Give a single parameter over the shard the gradient from now on: see ``FlatParam.use_shard_param``."""
        if self.flat.flat_grad is None:
            choices = self.dtypes.choices
            grad_dtype = choices[0] if len(set(choices)) == 1 else self.dtypes.of_all
            self.flat.use_shard_param(info, grad_dtype)
            self._prepare()
        assert self.flat.flat_grad is not None
        return self.flat.flat_grad.param

    # -- arriving ----------------------------------------------------------------------------------------------------

    @property
    def _stay_with_autograd(self) -> bool:
        """Whether gradients are in the unsharded parameters' ``.grad`` until the last has arrived."""
        return self.arrival is _TOGETHER and self._moved is None

    @property
    def needs_no_receive(self) -> bool:
        """Whether ``receive`` has nothing to do for later gradients, until all have arrived."""
        return self._stay_with_autograd or True not in self.flat.requires_grad

    def receive(self, index: int) -> bool:
        """Copy the gradient of unsharded parameter ``index`` to the input, unless all are copied ``TOGETHER``.

        Returns ``needs_no_receive``. There may be no gradient: a custom autograd function may return None.

        Raises:
            RuntimeError: the gradient is sparse, or has a graph of its own.
        """
        if self.arrival is _TOGETHER and self._moved is None:  # `_stay_with_autograd`, without a call
            return True
        compute = self.flat.unsharded.params[index]
        if compute.grad is not None:
            grad, compute.grad = compute.grad, None
            self._check(index, grad)
            if self.flat.params[index].requires_grad:  # else frozen since its forward: autograd drops the gradient, too
                self._put(index, self._local(index, grad))
        return self.needs_no_receive

    def _check(self, index: int, grad: torch.Tensor) -> None:
        """Raise if ``grad`` cannot be reduced in a flat parameter."""
        fqn = self.flat.layout.params[index].fqn
        is_reduced = self.dtypes.takes_any and self.input is not None
        if is_reduced and promoted((grad.dtype, self.dtypes.reduce)) is not self.dtypes.reduce:
            raise RuntimeError(
                f"the gradient of {fqn!r} is {grad.dtype}, which its reduction in {self.dtypes.reduce} would round. It has "
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
        """Return the gradient of the plain tensor inside a tensor subclass. Other gradients are returned unchanged."""
        wrapping = self.flat.wrappings[index]
        return grad if wrapping is None else wrapping.local_gradient(grad, self.dtypes.reduce)

    def _put(self, index: int, grad: torch.Tensor) -> None:
        """Add ``grad``, plain and local, to the gradient of parameter ``index``."""
        moved = self._allocate(self.dtypes.reduce) if self._moved is None else self._moved
        if self.input is None:
            self._set_grad(self.flat.params[index], grad, self.dtypes.choices[index])
        elif moved[index]:
            self.input.views[index].add_(grad)
        else:
            torch.add(grad, _ZERO, out=self.input.views[index])  # [Note: Negative zero marks an unused parameter]
        moved[index] = True

    def _set_grad(self, param: nn.Parameter, grad: torch.Tensor, dtype: torch.dtype | None) -> None:
        """Set or add to ``.grad``, on a single rank."""
        ranks, averaging = self.flat.ranks, self.flat.ranks.averaging
        if grad.dtype is not dtype or grad.device != self.flat.kind.device:
            grad = grad.to(self.flat.kind.device, dtype)
        if averaging.divide_factor is not None or averaging.size != ranks.size:
            grad = grad * ranks.factor
        if param.grad is None:
            param.grad = grad
        else:
            param.grad.add_(grad)

    def _allocate(self, dtype: torch.dtype) -> list[bool]:
        """Allocate the input in ``dtype``. Returns ``_moved``."""
        if self.input is not None:
            self.input.allocate(dtype, self.runtime.capabilities.lend_memory)
        self._moved = moved = [False] * len(self.flat.params)
        return moved

    def _copy_to_input(self, dtype: torch.dtype) -> None:
        """Move the gradients from autograd's tensors to an input of ``dtype``. Later ones are added when they arrive."""
        flat, computes, input = self.flat, self.flat.unsharded.params, self.input
        assert input is not None
        if not self._all_require_grad():  # drop gradients of those frozen since their forward, as autograd would
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
        if torch.is_grad_enabled() or self.dtypes.takes_any or not set(map(_layout, grads)) <= _STRIDED:
            for index, grad in zip(places, grads, strict=True):
                self._check(index, grad)
        if any(flat.wrappings):
            grads = list(map(self._local, places, grads))
        if self._is_small and grads:
            torch._foreach_copy_(views, grads)
            input.flat.add_(_ZERO)  # [Note: Negative zero marks an unused parameter]
            self._moved = here
            return
        self._moved = [False] * len(here)
        grads.reverse()
        for index in places:
            self._put(index, grads.pop())

    def hold(self) -> None:
        """Copy gradients that are with autograd to the input, to which the next backward adds."""
        if self._stay_with_autograd:
            grads = map(_grad, self.flat.unsharded.params)
            if not all(map(operator.is_, grads, _NONE)):
                self._copy_to_input(self.dtypes.reduce)

    def warn_of_dropped(self) -> None:
        """Warn if the input holds gradients of parameters that are frozen now: they will be dropped."""
        if self.input is None or self._moved is None or self._all_require_grad():
            return
        each = zip(self.flat.layout.params, self.flat.params, self._moved, strict=True)
        if frozen := [info.fqn for info, param, has_one in each if has_one and not param.requires_grad]:
            warn_user(
                f"parameters {name_list(frozen, 3)} were frozen while their gradients were held (no_sync), so these are "
                "dropped. To keep them, call flatshard.reduce_gradients(module) before requires_grad_(False)"
            )

    # -- reducing ----------------------------------------------------------------------------------------------------

    @property
    def takes_part(self) -> bool:
        """Whether the flat parameter takes part in reductions, if a parameter requires grad."""
        return self.flat.kind.is_trainable and self.flat.ranks.size > 1 and self.flat.layout.padded_numel > 0

    @property
    def need_reduction(self) -> bool:
        """Whether a reduction, and not autograd, sets ``.grad``."""
        return self.input is not None and self.flat.layout.padded_numel > 0 and self.are_wanted

    @property
    def are_wanted(self) -> bool:
        """Whether the user trains some of the parameters. Gradients of those frozen since their forward are dropped."""
        return any(p.requires_grad for p in self.flat.owners)

    def _all_require_grad(self) -> bool:
        """Return whether all of the user's parameters require grad now."""
        if self.flat.synced_at == changes.count:
            return False not in self.flat.requires_grad
        return all(map(_requires_grad, self.flat.params))

    def prepare_reduction(self, accumulates: bool) -> None:
        """Fill the input and make the reduction: all gradients have arrived.

        Call this on the stream of the backward: the gradients that are copied and freed here are memory of that stream.
        ``accumulates``: some rank may hold gradients to add to.
        """
        flat = self.flat
        if accumulates and self._moved is not None:
            self.warn_of_dropped()
        if True not in flat.requires_grad:  # frozen since the last backward: held gradients are dropped
            self.partial = None
            return
        if self.input is None:
            return
        if self._moved is None and self.arrival is _TOGETHER:
            narrow = self.runtime.capabilities.widens and not (accumulates or flat.holds_all)
            self._copy_to_input(self.dtypes.sent if narrow else self.dtypes.reduce)  # [Note: Sent as it was computed]
        moved = self._allocate(self.dtypes.reduce) if self._moved is None else self._moved
        no_gradient: list[int] = []
        if False in moved:
            unused = complex(-0.0, -0.0) if flat.kind.dtype.is_complex else -0.0
            names_unused = (
                flat.flat_grad is None
            )  # otherwise ranks need not agree on the parameters that none of them used
            for index, (param, has_one) in enumerate(zip(flat.params, moved, strict=True)):
                if not has_one:
                    self.input.views[index].fill_(unused)
                    if names_unused and param.requires_grad:
                        no_gradient.append(index)
        if no_gradient or self.unused.found:
            self.unused.begin(no_gradient, {self.dtypes.reduce, self.dtypes.of_all, *self.dtypes.of_each})
        dtypes = self.dtypes.reduce, self.dtypes.of_all
        self.reduction = Reduction(flat, self.runtime, self.input.flat, dtypes, self.unused, self.partial)
        self.partial = None

    def free_input(self) -> None:
        """Free the reduction input before ``set_grads``, because the device has already read it."""
        if self.input is not None and not self.flat.holds_all:  # otherwise the input is the result
            self.input.free()

    def discard(self, of_autograd: bool = False) -> None:
        """Drop all received gradients and free their memory. ``.grad`` is not changed.

        ``of_autograd``: also those that are with autograd still. Else ``summon_full_params`` may show others in their place.
        """
        if of_autograd and self._stay_with_autograd:
            consume(map(_set_plain_grad, self.flat.unsharded.params, _NONE))
        self.partial = None
        self._free()

    def _free(self) -> None:
        self._moved, self.reduction = None, None
        if self.input is not None:
            self.input.free()

    # -- the result --------------------------------------------------------------------------------------------------

    def set_grads(self, assign: bool = True) -> Sequence[nn.Parameter] | None:
        """Free the input of the ended reduction, and with ``assign`` set or add to the ``.grad`` of every parameter.

        Returns the parameters that got one, or None if there were no gradients to assign.
        """
        if self._moved is None:
            return None
        has, shard = self._moved, None
        if self.reduction is not None:
            shard, self.partial = self.reduction.take_result(), self.reduction.partial
        self._free()
        if not assign:
            self.partial = None
            return None
        if shard is None:  # they are in `.grad` already, or partial
            return None if self.input is not None else list(itertools.compress(self.flat.params, has)) or None
        if (flat_grad := self.flat.flat_grad) is None:
            return self._assign(shard, has)
        flat_grad.add(shard)
        return (flat_grad.param,)

    def _assign(self, output: torch.Tensor, has: list[bool]) -> Sequence[nn.Parameter]:
        """Set or add to ``.grad`` of each parameter that some rank used, and return these parameters."""
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        flat = self.flat
        params, parts = flat.params, self._slices.cut(output)
        if False not in has and self._all_require_grad():
            with plainly():  # torch looks for __torch_function__ at every access to a Parameter of another class
                there = list(map(_grad, params))
                if all(map(operator.is_, there, _NONE)):
                    consume(map(_set_plain_grad, params, parts))
                    return params
                if set(map(type, there)) == {type(parts[0])}:
                    torch._foreach_add_(there, parts)
                    return params
        given = []
        unused = self.unused
        for index, (param, grad, has_one) in enumerate(zip(params, parts, has, strict=True)):
            # The current `requires_grad` counts, as in autograd: the user may have changed it since the forward.
            if not param.requires_grad:
                continue
            if not (has_one or (index not in unused.found if index in unused.named else _used_elsewhere(grad))):
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
            if is_plain and not flat.holds_all:
                for param in params:
                    param.grad = param.grad
        return given


def _used_elsewhere(grad: torch.Tensor) -> bool:
    """Return whether any rank used the parameter of this slice. [Note: Negative zero marks an unused parameter]"""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    with plainly():
        return not bool(((grad == 0) & torch.signbit(grad)).all())
