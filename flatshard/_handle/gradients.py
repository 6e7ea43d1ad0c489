"""One flat parameter's gradients, from autograd to the user's ``.grad``.

[Note: The gradient has two homes]
- The *reduction input* (``reduction_input.py``): 1-D, ``padded_numel`` elements, laid out as the unsharded buffer. It takes
  memory only from the time when a backward's gradients are complete to the end of their reduction. Until then the gradients
  stay where autograd puts them, in the compute parameters' ``.grad``. The unit's parameters are freed before the input is
  allocated, so the two never take memory at once. The gradients are copied into their slots one by one, and each is freed
  at once; those of a small flat parameter are copied in one operation. If nothing is sharded (``NO_SHARD``) there is nothing
  to free, and the input becomes the gradients: each gradient is copied when it arrives, unless the flat parameter is small.
  ``incoming.py`` does all of this.
- The *gradient shard*, the reduction's output: 1-D, ``shard_numel`` elements, new in each backward. The ``.grad`` of each
  sharded parameter *is* a slice of it, so it exists until the user drops the gradients.

With mixed precision a gradient arrives in the compute dtype, and is reduced in the reduce dtype (the copy into the slot
casts it if needed). The gradient shard is cast to the parameters' own dtype, unless ``keep_low_precision_grads`` is set.

Under ``no_sync`` the input is kept from one backward to the next, which adds to it: in the reduce dtype, not in the compute
dtype.

[Note: Negative zero marks an unused parameter]
A parameter that no rank used must end with ``.grad is None``, as in one process (weight decay and momentum would change it
otherwise). A parameter that another rank used must get that rank's gradient here, too. Ranks learn which it is without
further communication: an unused slot is filled with -0.0, and a used one holds ``gradient + 0.0``, which is never -0.0. The
average of -0.0 alone is -0.0, and +0.0 + -0.0 is +0.0 (IEEE 754, round to nearest). So after the reduction a slice is all
-0.0 if and only if no rank used the parameter. Only a rank that did not use a parameter checks this. A rank that holds no
element of it cannot check: unused.py, [Note: Counting who did not use a parameter]. If a reduction does not keep signed
zeros, such a gradient becomes zero instead of None.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from flatshard._errors import InternalError
from flatshard._handle.incoming import incoming_of
from flatshard._handle.parts import Parts, info_of_all
from flatshard._handle.reduction import Reduction
from flatshard._handle.reduction_input import views_of
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.sharded_gradient import plain_grad, set_gradients_as_they_are
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, in_memory_order
from flatshard._runtime import Runtime

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam

_grad = plain_grad.__get__  # called for every parameter in every step, so the loop runs in C
_NONE = itertools.repeat(None)


class FlatGradients:
    """The gradients of one :class:`FlatParam`. ``incoming`` collects them; this class assigns the result to ``.grad``."""

    def __init__(self, flat: FlatParam) -> None:
        self.flat = flat
        self.reduction = Reduction(flat)
        self.shard_param: nn.Parameter | None = None  # set by `flat_parameters`: then only it gets a gradient
        self.given: Sequence[nn.Parameter] = ()  # the parameters whose ``.grad`` the last reduction set or added to
        self.is_watched = False  # part of `Home`, the protocol that this class implements for the flat parameter
        self._follow_kind()
        if flat.options.keep_low_precision_grads:
            for param in flat.params:
                param.grad_dtype = self.reduction.dtype

    def _follow_kind(self) -> None:
        """Set what follows from the parameters' dtype and device, and from the existence of ``flat_param``."""
        self.incoming = incoming_of(self.flat, self.reduction, self.shard_param)
        self._parts = Parts(self.flat, self.reduction.dtype)
        self._made_for = self._kind

    @property
    def _kind(self) -> tuple[torch.dtype, torch.device, torch.device]:
        return self.flat.dtype, self.flat.unsharded.flat.device, self.flat.device

    def follow_names(self) -> None:
        """Adopt the new FQNs of the parameters."""
        self._parts = Parts(self.flat, self.reduction.dtype)

    def use_shard_param(self) -> nn.Parameter:
        """From now on a single 1-D parameter over the local shard gets the gradient; the parameters get none."""
        if self.shard_param is None:
            self.shard_param = self._make_shard_param()
            self._follow_kind()
            for param in self.flat.params:
                param.grad = None
        return self.shard_param

    def _make_shard_param(self) -> nn.Parameter:
        param = ShardedParameter.adopt(nn.Parameter(self.flat.shard), info_of_all(self.flat), self)
        if self.flat.options.keep_low_precision_grads:
            param.grad_dtype = self.reduction.dtype
        return param

    filling = None  # part of `Home`: `flat_parameters` refuses parameters on meta

    def allocate(self, device: torch.device) -> None:
        """Part of ``Home``: a flat parameter never is on meta."""
        raise InternalError(f"a flat parameter on meta was given memory on {device}")

    def compute_of(self, param: nn.Parameter) -> nn.Parameter:
        """Part of ``Home``: a flat parameter has no compute parameter."""
        raise RuntimeError(
            "register_hook on a flat parameter (flat_parameters) would never run, because autograd computes no gradient for "
            "it. Use register_post_accumulate_grad_hook, or register the hook on the single parameters"
        )

    def copy_with(self, flat: FlatParam) -> FlatGradients:
        """A new object for the copy ``flat``, without gradients, as ``copy.deepcopy`` of a parameter makes them."""
        result = FlatGradients(flat)
        result.reduction.divide_factor = self.reduction.divide_factor
        result.reduction.reduces_replicas = self.reduction.reduces_replicas
        if self.shard_param is not None:
            result.use_shard_param()
        return result

    def follow_parameters(self) -> None:
        """Adopt a new dtype or device of the parameters, also for gradients that are held."""
        if self._made_for == self._kind:
            return
        held = self.incoming.held()
        self._follow_kind()
        if self.shard_param is not None:
            self.shard_param.data = self.flat.shard
        for index, grad in held:
            self.incoming.put(index, grad.to(self._made_for[1]))

    # -- what the user gets ------------------------------------------------------------------------------------------

    @property
    def is_reduced(self) -> bool:
        """Whether gradients of this flat parameter are reduced when a parameter requires grad."""
        return self.flat.is_trainable and self.reduction.ranks > 1 and self.flat.layout.padded_numel > 0

    def finish(self, assign: bool = True) -> bool:
        """After the reduction: free its input, and (``assign``) set or add to the ``.grad`` of every parameter.

        Returns whether there were gradients to assign; ``given`` then lists the parameters that got one.
        """
        shard, filled = self.incoming.end()
        if not assign:
            self.reduction.discard()
            return False
        if shard is None:
            self.given = list(itertools.compress(self.flat.params, filled))
        elif self.shard_param is None:
            self.given = self._assign(shard, filled)
            return True
        else:
            if self.shard_param.grad is None:
                self.shard_param.grad = shard
            else:
                self.shard_param.grad.add_(shard)
            self.given = (self.shard_param,)
        return bool(self.given)

    def discard(self) -> None:
        """Drop all received gradients and free their memory. ``.grad`` is not changed."""
        self.reduction.discard()
        self.incoming.drop()

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
        unused = self.reduction.unused.found
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

    def local(self) -> list[torch.Tensor | None]:
        """This rank's part of each parameter's gradient, in ``.grad`` or in that of ``flat_param``; None if there is none."""
        if self.shard_param is None:
            return list(map(_grad, self.flat.params))
        grad = self.shard_param.grad
        return [None] * len(self.flat.params) if grad is None else list(self._parts.of(grad))

    # -- whole gradients for the user --------------------------------------------------------------------------------

    def gather(self, runtime: Runtime) -> list[torch.Tensor | None]:
        """Gather whole gradients, in the parameters' shapes. None for a parameter that has no gradient on any rank."""
        flat, layout = self.flat, self.flat.layout
        device = flat.unsharded.flat.device
        present = torch.zeros(layout.world_size, len(flat.params), dtype=torch.uint8, device=device)
        local, here = self.local(), present[flat.placement.rank]
        here.copy_(torch.tensor([grad is not None for grad in local], dtype=torch.uint8))
        self._gather_now(runtime, present.view(-1), here)
        seen: list[int] = present.amax(0).tolist()
        if not any(seen):
            return [None] * len(seen)
        whole = torch.zeros(layout.padded_numel, dtype=self.reduction.dtype, device=device)
        shard = whole.view(layout.world_size, -1)[flat.placement.rank]
        for part, grad in zip(self._parts.of(shard), local, strict=True):
            if grad is not None:
                part.copy_(grad)
        self._gather_now(runtime, whole, shard)
        slots, _ = views_of(whole, layout)
        return [slot if somewhere else None for slot, somewhere in zip(slots, seen, strict=True)]

    def _gather_now(self, runtime: Runtime, output: torch.Tensor, shard: torch.Tensor) -> None:
        if self.flat.layout.world_size > 1:
            try:
                # As bytes: no backend supports every dtype.
                label = self.flat.label
                runtime.exact.all_gather(output.view(torch.uint8), shard.view(torch.uint8), label).wait()
            except Exception as e:
                runtime.fail("all-gather", self.flat.label.unit, e)

    def write_back(self, whole: list[torch.Tensor | None]) -> None:
        """Write this rank's part of whole gradients to ``.grad``: the inverse of ``gather``."""
        flat = self.flat
        if self.shard_param is not None and any(g is not None for g in whole) and self.shard_param.grad is None:
            self.shard_param.grad = torch.zeros_like(flat.shard, dtype=self.reduction.dtype)
        grad = None if self.shard_param is None else self.shard_param.grad
        parts = None if grad is None else self._parts.of(grad)
        for index, (param, grad) in enumerate(zip(flat.params, whole, strict=True)):
            info, part = flat.layout.params[index], flat.slices[index]
            if grad is None:
                param.grad = None
                continue
            wrapping = flat.wrappings[index]
            plain = grad.detach() if wrapping is None else wrapping.local_gradient(grad.detach())
            dense = in_memory_order(plain, info.stride)
            mine = flat.shaped(index, dense[part.offset : part.offset + part.numel])
            if parts is not None:
                parts[index].copy_(mine)
            elif param.grad is None:
                param.grad = mine.to(flat.device, self.reduction.dtype, copy=True)
            else:
                param.grad.copy_(mine)


def _used_elsewhere(grad: torch.Tensor) -> bool:
    """Whether any rank used the parameter of this slice. [Note: Negative zero marks an unused parameter]"""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    return not bool(((grad == 0) & torch.signbit(grad)).all())
