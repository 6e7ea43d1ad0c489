"""A flat parameter: the local shard, the user's parameters on it, and the buffer that it is gathered into.

[Note: The tensors of a unit]
- ``shard``: this rank's shard, 1-D, ``shard_numel`` elements in the master dtype. It exists as long as the unit.
- ``params``: the user's own parameters. Their ``.data`` are slices of ``shard``.
- ``unsharded``: the gathered values of all ranks: see ``UnshardedBuffer``.

Gradients are apart: ``FlatGradients`` has those of one flat parameter, ``UnitGradients`` those of a unit.

With a single shard (``NO_SHARD``, world size 1) and a single dtype the unsharded buffer *is* ``shard``. Nothing is gathered
or copied.

[Note: The cast is the copy]
With mixed precision the unsharded buffer has the compute dtype. The shard is copied to its place in the buffer in any case,
and that copy casts it. The all-gather then runs in place, on the smaller elements.

[Note: Stepping between forward and backward]
Autograd's check for in-place changes doesn't see changes of the shards (see ``UnshardedBuffer``). So flatshard checks for
them itself: ``FlatParamHandle.version``.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import nn

from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import ComparedFlat
from flatshard._handle.adapters.tensor_parallel import TensorParallel, is_copy
from flatshard._handle.adapters.tensor_subclass import wrapping_of
from flatshard._handle.layout import FlatLayout, FlatOptions, Kind, ParamInfo, part_shape
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.flat_member import FlatGrad, FlatMember
from flatshard._handle.tensors.shard_info import ShardInfo, elements_of, in_memory_order
from flatshard._handle.tensors.sharded_gradient import plain_grad
from flatshard._handle.tensors.sharded_parameter import Filling, ShardedParameter
from flatshard._handle.unit_ranks import UnitRanks
from flatshard._handle.unsharded import UnshardedBuffer, as_sent

_requires_grad = operator.attrgetter("requires_grad")  # read for every parameter in every step, so the loop runs in C


class InitialValues:
    """Samples of the values that a flat parameter was sharded from, as long as they have not changed. Ranks compare them."""

    MAX_SAMPLES: ClassVar[int] = 16  # of each parameter

    def __init__(self, samples: torch.Tensor | None, params: Sequence[nn.Parameter]) -> None:
        """Keep ``samples``, 1-D in float64, or None if the values are unknown."""
        self._samples, self._params = samples, params
        self._version = self._count_changes()
        self._hash: bytes | None = None

    @classmethod
    def sample(cls, full: Iterable[torch.Tensor], infos: Sequence[ParamInfo]) -> torch.Tensor | None:
        """Return some elements of each full parameter, or None on meta. ``full``: the parameters' elements, 1-D."""
        found = []
        for info, elements in zip(infos, full, strict=True):
            if elements.is_meta:
                return None
            some = elements[:: max(1, info.numel // cls.MAX_SAMPLES)][: cls.MAX_SAMPLES]
            found.append((torch.view_as_real(some).flatten() if some.is_complex() else some).double())
        return torch.cat(found)

    def _count_changes(self) -> int:
        with plainly():
            return sum([param._version for param in self._params])

    def hash(self) -> bytes | None:
        """Return a hash of the samples, or None if the values have changed since or are unknown."""
        if self._count_changes() != self._version:
            return None
        if self._hash is None and self._samples is not None:
            self._hash = hashlib.blake2b(repr(self._samples.tolist()).encode()).digest()
            self._samples = None
        return self._hash


class FlatParam:
    """A flat parameter. Its parameters have one dtype and device, and initially one ``requires_grad``."""

    encoded: ClassVar[type[FlatParam] | None] = None
    """The class of those that are gathered in ``FlatOptions.encoded_dtype``, or None. A feature sets it."""

    def __init__(
        self,
        layout: FlatLayout,
        options: FlatOptions,
        params: Sequence[nn.Parameter],
        kind: Kind,
        ranks: UnitRanks,
        shard: torch.Tensor | None = None,
    ) -> None:
        """Make each of ``params`` a slice of a new shard, in place.

        ``shard``: the values, if ``params`` are copies of sharded parameters. Otherwise they are full, and are sharded.
        """
        self.layout = layout
        self.options = options
        self.kind = kind
        self.ranks = ranks
        self.holds_all = ranks.holds_all
        self.slices = layout.shard_slices(ranks.rank)
        self.wrappings = tuple(map(wrapping_of, params))  # None for a plain parameter
        samples = InitialValues.sample(self._elements(params), layout.params) if shard is None else None
        self.shard = self.cut(params) if shard is None else self.shard_for(self.layout).copy_(shard)
        self.unsharded = self._make_buffer(params)
        self.is_watched = False  # see `watch`
        self.filling: Filling | None = None
        self.flat_grad: FlatGrad | None = None  # set by `use_shard_param`
        self.params = cast(tuple[ShardedParameter, ...], tuple(params))  # `_adopt_params` changes their class
        self._adopt_params()
        # The `requires_grad` of each parameter when the unsharded parameters were last synchronised with it.
        self.requires_grad = [p.requires_grad for p in params]
        self.synced_at = -1  # `changes.count` at that time
        self.initial_values = InitialValues(samples, self.params)
        if kind.device.type == "cpu":  # on an accelerator the host would wait
            self.initial_values.hash()

    def copy_with(self, params: Sequence[nn.Parameter], ranks: UnitRanks) -> Self:
        """Return a flat parameter with this one's layout, values and shard parameter, in new memory, without gradients.

        ``params``: plain copies of ``self.params``.
        """
        result = type(self)(self.layout, self.options, params, self.kind, ranks, self.shard)
        result.unsharded.use_buffers_of(self.unsharded)
        if self.shard_param is not None:
            result.use_shard_param(self.shard_param._flatshard_info, self.shard_param.grad_dtype)
        return result

    def fill_by(self, filling: Filling | None) -> None:
        """Have ``filling`` give the parameters memory and values, or None if they have them."""
        self.filling = filling

    def copy_features(self, original: FlatParam, memo: dict[int, Any]) -> None:
        """Copy from ``original``, in a deep copy of its module, everything that features have attached."""
        self.filling = copy.deepcopy(original.filling, memo)

    # -- construction ------------------------------------------------------------------------------------------------

    def _make_buffer(self, params: Sequence[nn.Parameter]) -> UnshardedBuffer:
        ranks = self.ranks
        return UnshardedBuffer(self.layout, ranks.rank, self.kind, ranks.pool, self.shard, params, self.wrappings)

    def cut(self, full: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return this rank's shard of full parameters, on any device: a new tensor like ``shard``."""
        shard = self.shard_for(self.layout)
        here = [index for index, part in enumerate(self.slices) if part.numel]
        for index, elements in zip(here, self._elements(full, here), strict=True):
            part = self.slices[index]
            shard[part.start : part.stop].copy_(elements[part.offset : part.offset + part.numel])
        return shard

    def _elements(self, full: Sequence[torch.Tensor], indices: Iterable[int] | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements of each full parameter, or of those at ``indices``, in memory order."""
        each = range(len(full)) if indices is None else indices
        return elements_of([(full[i], self.wrappings[i], self.layout.params[i].stride) for i in each])

    def shard_view(self, index: int) -> torch.Tensor:
        """Return parameter ``index``'s slice of the shard, in the shape of the user's parameter."""
        part = self.slices[index]
        return self.shaped(index, self.shard[part.start : part.stop])

    def shaped(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """Reshape 1-D ``part``, a slice for parameter ``index`` in memory order, to the shape of the user's parameter."""
        info = self.layout.params[index]
        if self.holds_all:
            return part.as_strided(info.shape, info.stride)
        return part.as_strided(part_shape(info.shape, part.numel(), True), info.stride) if info.by_rows else part

    def _adopt_params(self) -> None:
        """Make each of ``params`` a sharded parameter: its slice of the shard, described by a ``ShardInfo``."""
        views = [self.shard_view(index) for index in range(len(self.params))]
        infos = self._shard_infos()
        grads: list[torch.Tensor | None] = []
        for param, view, info in zip(self.params, views, infos, strict=True):
            grad, param.grad = param.grad, None
            param.data = view
            if grad is not None:  # a backward ran before sharding: keep its result, sharded like the parameter
                grad = in_memory_order(grad.detach(), info.stride)[info.start : info.stop].clone()
            grads.append(grad)
        for param, info in zip(self.params, infos, strict=True):
            ShardedParameter.adopt(param, info, self)
        for index, (param, info, grad) in enumerate(zip(self.params, infos, grads, strict=True)):
            _describe(param, self.unsharded.params[index], info)
            if grad is not None:
                param.grad = self.shaped(index, grad)

    def _shard_infos(self) -> list[ShardInfo]:
        """Return a description of this rank's slice of each parameter."""
        layout, ranks = self.layout, self.ranks
        holders = [layout.holders(index) for index in range(len(layout.params))]
        beside = next((w for w in self.wrappings if isinstance(w, TensorParallel)), None)
        infos = []
        for info, part, wrapping, held_by in zip(layout.params, self.slices, self.wrappings, holders, strict=True):
            runtime, copied = ranks.norms, False
            parallel = wrapping if isinstance(wrapping, TensorParallel) else None
            if wrapping is not None:
                in_parts = runtime if parallel is None else ranks.shards
                runtime = wrapping.norm_runtime(in_parts, self.kind.compute_device)
            if beside is not None:
                copied = is_copy(parallel, beside)
            end = part.offset + part.numel
            owner = None if len(held_by) > 1 else held_by[0] if held_by else 0
            never_cut = info.by_rows and info.block >= info.numel and wrapping is None
            shard_info = ShardInfo(
                info.fqn, info.shape, info.stride, part.offset, end, layout.world_size, info.by_rows, owner, runtime,
                ranks.average_now, wrapping, copied, never_cut=never_cut,
            )  # fmt: skip
            infos.append(shard_info)
        return infos

    def describe(self) -> ComparedFlat:
        """Return the dtype, layout and first values, which must be the same on all ranks."""
        params = ((info.fqn, info.shape) for info in self.layout.params)
        return ComparedFlat(str(self.kind.buffer_dtype), self.layout.shard_numel, params, self.initial_values.hash)

    def rename(self, fqns: Mapping[int, str]) -> None:
        """Give the parameters new FQNs. ``fqns``: by the parameters' ids."""
        infos = zip(self.params, self.layout.params, strict=True)
        self.layout = self.layout.renamed([fqns.get(id(param), info.fqn) for param, info in infos])
        for param, compute, info in zip(self.params, self.unsharded.params, self.layout.params, strict=True):
            _describe(param, compute, replace(param._flatshard_info, fqn=info.fqn))
        self.unsharded.rename(self.layout)

    # -- the parameter over the shard: `flat_parameters` ---------------------------------------------------------------

    @property
    def shard_param(self) -> ShardedParameter | None:
        """The single parameter over the shard that gets the gradient, or None if the user's parameters get it."""
        return None if self.flat_grad is None else self.flat_grad.param

    @property
    def owners(self) -> Sequence[nn.Parameter]:
        """The user's parameters that get the gradients."""
        return self.params if self.flat_grad is None else (self.flat_grad.param,)

    def use_shard_param(self, info: ShardInfo, grad_dtype: torch.dtype | None) -> nn.Parameter:
        """Give a single 1-D parameter over the shard the gradient from now on. The user's parameters have slices of it.

        ``info``: describes the parameter. ``grad_dtype``: of its gradient.
        """
        if self.flat_grad is not None:
            return self.flat_grad.param
        param = ShardedParameter.adopt(nn.Parameter(self.shard.data), info, self)
        if grad_dtype is not self.kind.dtype:
            param.grad_dtype = grad_dtype
        self.flat_grad = FlatGrad(param, self.params, self.slices)
        for member in self.params:
            grad, member.grad = member.grad, None
            member.__class__ = FlatMember
            if grad is not None:
                member.grad = grad
        return param

    def local_grads(self) -> list[torch.Tensor | None]:
        """Return this rank's slice of each parameter's gradient, or None where there is none."""
        return list(map(plain_grad.__get__, self.params)) if self.flat_grad is None else self.flat_grad.slices()

    # -- what users do to parameters ----------------------------------------------------------------------------------

    def index_of(self, param: nn.Parameter) -> int | None:
        """Return the index of ``param``, or None if it is not one of ``params``."""
        return next((i for i, own in enumerate(self.params) if own is param), None)

    def compute_of(self, param: nn.Parameter) -> nn.Parameter:
        """Return the unsharded parameter of ``param``: the tensor that autograd sees.

        Raises:
            RuntimeError: ``param`` is the parameter over the shard, see ``use_shard_param``.
        """
        index = self.index_of(param)
        if index is None:
            raise RuntimeError(
                "register_hook on a flat parameter (flat_parameters) would never run, because autograd computes no gradient "
                "for it. Use register_post_accumulate_grad_hook, or register the hook on the single parameters"
            )
        return self.unsharded.params[index]

    def sync_requires_grad(self, unfrozen_only: bool) -> bool:
        """Copy ``requires_grad`` from the user's parameters to the unsharded parameters, and return whether any changed.

        ``unfrozen_only``: copy only True.
        """
        if self.synced_at == changes.count:
            return False
        now = list(map(_requires_grad, self.params))
        if unfrozen_only:
            now = list(map(operator.or_, now, self.requires_grad))
        else:
            self.synced_at = changes.count
        if now == self.requires_grad:
            return False
        for compute, requires_grad in zip(self.unsharded.params, now, strict=True):
            compute.requires_grad_(requires_grad)
        self.requires_grad = now
        return True

    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make new memory without values for another dtype or device: ``module.half()``, ``module.cuda()``.

        Offsets stay the same, so a smaller dtype may have a smaller alignment than layout_plan.py, [Note: Alignment] says.
        """
        self.kind = self.kind.converted(dtype, device, self.options)
        self.shard = self.shard_for(self.layout)
        self.unsharded.place(self.kind, self.shard)
        if self.flat_grad is not None:
            self.flat_grad.param.data = self.shard

    def rehome(self, home: torch.device) -> torch.Tensor:
        """Move the shard to ``home``, the host or the compute device, where it stays.

        Returns the memory that it had, from which a copy on the current stream reads.
        """
        before, self.options = self.shard, replace(self.options, offload=home != self.kind.compute_device)
        self.kind = replace(self.kind, home=home)
        self.convert(self.kind.dtype, home)
        self.shard.copy_(before, non_blocking=True)
        for index, param in enumerate(self.params):
            param.data = self.shard_view(index)
        return before

    def shard_for(self, layout: FlatLayout) -> torch.Tensor:
        """Return zeros for this rank's shard in ``layout``."""
        kind, pinned = self.kind, self.options.pin_memory and self.kind.is_offloaded
        return torch.zeros(layout.shard_numel, dtype=kind.dtype, device=kind.device, pin_memory=pinned)

    def move(self, layout: FlatLayout, ranks: UnitRanks, shard: torch.Tensor) -> None:
        """Shard over ``ranks`` by ``layout`` from now on, with the values of ``shard``, this rank's.

        The parameters stay the same objects, sharded and unsharded. They must have no gradients, and no graph may be alive.
        """
        self.layout, self.ranks, self.holds_all = layout, ranks, ranks.holds_all
        self.slices = layout.shard_slices(ranks.rank)
        self.shard = shard
        self.unsharded.move(layout, ranks.rank, self.kind, ranks.pool, shard)
        self._adopt_params()
        self.initial_values = InitialValues(None, self.params)  # the values are those of other ranks

    def watch(self) -> None:
        """Record that a callback waits for gradients to be set: a post-accumulate-grad hook, for one."""
        self.is_watched = True

    # -- gathering ---------------------------------------------------------------------------------------------------

    def gather(self, exactly: bool, for_backward: bool, kept: torch.Tensor | None = None) -> Pending:
        """Start to fill the unsharded buffer from all ranks' shards.

        ``exactly``, ``for_backward``: see ``FlatParamHandle.unshard``. ``kept``: a copy of ``unsharded.own`` after an earlier
        gather, used in place of the shard.
        """
        runtime, shard, target = self.ranks.runtime, self.shard, self.unsharded
        if exactly and not runtime.capabilities.exact:
            runtime = runtime.exact
        if kept is not None:
            shard = kept
        elif self.options.offload:
            shard = self.on_compute_device()
        if self.holds_all:
            target.allocate(shard)
            return runtime.issued(Done())
        if runtime.capabilities.gathers_late and target.allocates_late:
            return runtime.all_gather(target.gather_output, shard, self.ranks.label, for_backward, target.ensure_memory)
        fits = kept is None and self.kind.dtype is self.kind.buffer_dtype
        as_it_is = fits and runtime.capabilities.out_of_place
        target.allocate(None if as_it_is else shard)
        sent, wire = shard if as_it_is else target.own, target.gather_output
        return runtime.all_gather(wire, sent if wire is target.flat else as_sent(sent), self.ranks.label, for_backward)

    def on_compute_device(self) -> torch.Tensor:
        """Return the shard on the compute device, in its own dtype: a cast on the CPU blocks, and gives pageable memory."""
        kind = self.kind
        if kind.device == kind.compute_device and not kind.is_offloaded:
            return self.shard
        moved = self.shard.to(kind.compute_device, non_blocking=True, copy=True)
        self.ranks.runtime.reads_host()
        return moved

    def keep_gathered(self) -> Pending:
        """Copy the result of an approximate all-gather, so that ``write_back`` finds only real changes."""
        self.unsharded.keep_own()
        return self.ranks.runtime.issued(Done())

    def write_back(self, own: torch.Tensor | None = None) -> None:
        """Copy changed elements of the unsharded values into this rank's shard.

        Unchanged elements keep the shard's own value: the buffer may have a rounded (mixed precision) or approximated
        (quantised collectives) copy of it. ``own``: this rank's shard of a copy of the values; by default, of the buffer.
        """
        if own is None:
            if self.unsharded.is_alias:
                return
            own = self.unsharded.own
        made = self.unsharded.kept_own  # the values before any change
        if made is None or made.dtype is not own.dtype:
            if own.dtype is self.kind.dtype:
                self.shard.copy_(own)
                return
            made = self.shard.to(own)
        own = own.to(made.device)
        same = ((own == made) | (own.isnan() & made.isnan())).to(self.shard.device)
        self.shard.copy_(torch.where(same, self.shard, own.to(self.shard)))
        if made is self.unsharded.kept_own:
            made.copy_(own)  # later changes are found relative to this


def _describe(param: ShardedParameter, compute: nn.Parameter, info: ShardInfo) -> None:
    # An unsharded parameter shares its `__dict__` with the user's parameter, unless it is a tensor subclass.
    for owner in (param, compute):
        owner.__dict__["_flatshard_info"] = info
