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

from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_parallel import common_runtime
from flatshard._handle.incoming import Collected, HandedOver, Incoming
from flatshard._handle.reduction import Averaging, Reduction
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.sharded_gradient import mark, mark_all, plain_grad, set_gradients_as_they_are
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, ShardInfo

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam

_grad = plain_grad.__get__  # called for every parameter in every step, so the loop runs in C
_NONE = itertools.repeat(None)


class FlatGradients:
    """The gradients of one :class:`FlatParam`. ``incoming`` collects them; this class assigns the result to ``.grad``."""

    incoming: Incoming

    def __init__(self, flat: FlatParam, averaging: Averaging) -> None:
        self.flat = flat
        self.runtime = flat.placement.runtime  # a feature may replace its collectives
        self.reduction = Reduction(flat, averaging)
        self.shard_param: nn.Parameter | None = None  # set by `flat_parameters`: then only it gets a gradient
        self.given: Sequence[nn.Parameter] = ()  # the parameters whose ``.grad`` the last reduction set or added to
        self._begin()
        if flat.options.keep_low_precision_grads:
            for param in flat.params:
                param.grad_dtype = self.reduction.dtype

    def _begin(self) -> None:
        """Choose how gradients travel, by the flat parameter as it is now."""
        if self.flat.placement.ranks == 1 and self.shard_param is None and not self.flat.kind.is_offloaded:
            self.incoming = HandedOver(self.flat, self.reduction)
        else:
            self.incoming = Collected(self.flat, self.reduction, tells_unused=self.shard_param is None)
        self.follow_names()

    def follow_names(self) -> None:
        """Adopt the FQNs of the parameters."""
        self._parts = _Parts(self.flat, self.reduction.dtype)

    def follow_parameters(self) -> None:
        """Adopt a new dtype or device of the parameters, also for gradients that are held."""
        held = self.incoming.held()
        self._begin()
        if self.shard_param is not None:
            self.shard_param.data = self.flat.shard
        for index, grad in held:
            self.incoming.put(index, grad.to(self.flat.kind.compute_device))

    def use_shard_param(self) -> nn.Parameter:
        """From now on a single 1-D parameter over the local shard gets the gradient; the parameters get none."""
        if self.shard_param is None:
            flat = self.flat
            self.shard_param = ShardedParameter.adopt(nn.Parameter(flat.shard), _info_of_all(flat), flat)
            if flat.options.keep_low_precision_grads:
                self.shard_param.grad_dtype = self.reduction.dtype
            self._begin()
            for param in flat.params:
                param.grad = None
        return self.shard_param

    @property
    def is_reduced(self) -> bool:
        """Whether gradients of this flat parameter are reduced when a parameter requires grad."""
        return self.flat.is_trainable and self.flat.placement.ranks > 1 and self.flat.layout.padded_numel > 0

    def local(self) -> list[torch.Tensor | None]:
        """This rank's part of each parameter's gradient, in ``.grad`` or in ``shard_param.grad``; None if there is none."""
        if self.shard_param is None:
            return list(map(_grad, self.flat.params))
        grad = self.shard_param.grad
        return [None] * len(self.flat.params) if grad is None else list(self._parts.of(grad))

    def discard(self) -> None:
        """Drop all received gradients and free their memory. ``.grad`` is not changed."""
        self.reduction.discard()
        self.incoming.drop()

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
            return bool(self.given)
        if self.shard_param is None:
            self.given = self._assign(shard, filled)
            return True
        if self.shard_param.grad is None:
            self.shard_param.grad = shard
        else:
            self.shard_param.grad.add_(shard)
        self.given = (self.shard_param,)
        return True

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


def _used_elsewhere(grad: torch.Tensor) -> bool:
    """Whether any rank used the parameter of this slice. [Note: Negative zero marks an unused parameter]"""
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    return not bool(((grad == 0) & torch.signbit(grad)).all())


class _Parts:
    """Cuts a gradient shard into the parts of the parameters. Made for one dtype and one device of the gradients."""

    __slots__ = ("_by_rows", "_empties", "_flat", "_infos", "_marked", "_pieces", "_sizes")

    def __init__(self, flat: FlatParam, dtype: torch.dtype) -> None:
        self._flat = flat
        self._sizes: list[int] = []  # of the pieces that the shard is split into: parts, and the padding between them
        self._pieces: list[
            tuple[int, int]
        ] = []  # (index of a parameter with elements on this rank, index of its piece)
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
        # Parts without elements never change, so they are created once. `of` fills in the others for each gradient.
        empty = torch.empty(0, dtype=dtype, device=flat.kind.device)
        self._empties = [empty.new_empty(p.shape if not p.numel() else (0,)) for p in flat.params]
        for part_of, info in zip(self._empties, infos, strict=True):
            if info.runtime is not None:
                mark(part_of, info)

    def of(self, shard: torch.Tensor, as_gradients: bool = False) -> list[torch.Tensor]:
        """The part of each parameter in ``shard`` (``shard_numel`` elements): views, in the shapes of the user's parameters.

        ``as_gradients``: return them as they are stored in ``.grad``, see ``ShardedGradient``.
        """
        layout = self._flat.layout
        if self._flat.placement.shards is None:
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


def _info_of_all(flat: FlatParam) -> ShardInfo:
    """The ``ShardInfo`` of a single parameter that covers the whole shard (``flat_parameters``)."""
    layout = flat.layout
    runtime, counted = common_runtime([param._flatshard_info.runtime for param in flat.params])
    others = [s for s, mine in zip(flat.slices, counted, strict=True) if s.numel and not mine]
    start = flat.placement.rank * layout.shard_numel
    return ShardInfo(
        f"the flat parameter of {name_list((p.fqn for p in layout.params), 3)}",
        (layout.padded_numel,),
        (1,),
        start,
        start + layout.shard_numel,
        layout.world_size,
        runtime=runtime,
        elsewhere=tuple(sorted((s.start, s.stop) for s in others)),
    )
