"""One flat parameter without its gradients: the local shard, the user's parameters on it, the buffer it is gathered into.

[Note: The tensors of a unit]
- ``shard``: this rank's part. 1-D, ``shard_numel`` elements in the master dtype. It exists as long as the unit.
- ``params``: the user's own parameters. Their ``.data`` are slices of ``shard``.
- ``unsharded``: the gathered values of all ranks: see ``UnshardedBuffer``.
- ``gradients``: from autograd's to the user's ``.grad``: see ``FlatParam`` and ``FlatGradients``.

With a single shard (``NO_SHARD``, world size 1) and a single dtype the unsharded buffer *is* ``shard``, and nothing is
gathered or copied.

[Note: The cast is the copy]
With mixed precision the unsharded buffer has the compute dtype. The shard is copied to its place in the buffer in any case,
and this copy casts it. The all-gather then runs in place, on the smaller elements.

[Note: Stepping between forward and backward]
Autograd's check for in-place changes doesn't see changes of the shards (see ``UnshardedBuffer``). So flatshard checks for
them itself: ``FlatParamHandle.version``.
"""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn

from flatshard._comm.collectives import Done, Pending
from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_parallel import TensorParallel, is_copy
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, wrapping_of
from flatshard._handle.layout import FlatLayout
from flatshard._handle.planned import FlatOptions, Kind
from flatshard._handle.tensors.aggregate import plainly
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.part import warn_of_memory_format
from flatshard._handle.tensors.shard_info import ShardInfo, in_memory_order
from flatshard._handle.tensors.sharded_parameter import Filling, ShardedParameter
from flatshard._handle.unit_ranks import UnitRanks
from flatshard._handle.unsharded import UnshardedBuffer, as_sent

_requires_grad = operator.attrgetter("requires_grad")  # read for every parameter in every step, so the loop runs in C


_SAMPLES = 16
"""The most elements of a parameter that ranks compare."""


class Given(NamedTuple):
    """What the user gave to a parameter: see ``FlatShard.given``."""

    param: nn.Parameter
    dtype: torch.dtype
    device: torch.device


class FlatShard:
    """The values of one flat parameter. Its parameters have one dtype and device, and initially one ``requires_grad``."""

    def __init__(
        self,
        layout: FlatLayout,
        options: FlatOptions,
        params: Sequence[nn.Parameter],
        kind: Kind,
        ranks: UnitRanks,
        shard: torch.Tensor | None = None,
    ) -> None:
        """Make each of ``params`` its part of a new shard, in place. ``shard``: its values; None: ``params`` are whole."""
        self.layout = layout
        self.options = options
        self.kind = kind
        self.ranks = ranks
        self.is_whole = ranks.is_whole
        self.slices = layout.shard_slices(ranks.rank)
        self.wrappings = tuple(map(wrapping_of, params))  # None for a plain parameter
        # Some of the values that it was cut from, as 1-D float64, or their hash once it is known. See `start`.
        self._start: torch.Tensor | bytes | None = self._sample(params) if shard is None else None
        self.shard = self.cut(params) if shard is None else self.shard_for(self.layout).copy_(shard)
        self.unsharded = self._make_buffer(params)
        self.is_watched = False
        self.filling: Filling | None = None
        self.params = cast(tuple[ShardedParameter, ...], tuple(params))  # what `_adopt` makes of them
        for index, param in enumerate(params):
            self._adopt(index, param)
        # The `requires_grad` of each parameter when the unsharded parameters were last synchronised with it.
        self.requires_grad = [p.requires_grad for p in params]
        self._synced_at = -1  # `changes.count` at that time
        self._sampled_at = self._count_changes()
        if kind.device.type == "cpu":  # else the host would wait
            self.start()
        self._approximate: torch.Tensor | None = None  # this rank's part as an approximate all-gather delivered it

    def copy_with(self, params: Sequence[nn.Parameter], ranks: UnitRanks) -> Self:
        """The same layout and values in new memory, for ``params``, plain copies of ``self.params``. No gradients."""
        result = type(self)(self.layout, self.options, params, self.kind, ranks, self.shard)
        result.unsharded.use_buffers_of(self.unsharded)
        return result

    def fill_by(self, filling: Filling | None) -> None:
        """``filling`` gives the parameters memory and values. None: they have them."""
        self.filling = filling

    def follow_copy(self, original: FlatShard, memo: dict[int, Any]) -> None:
        """This is the copy of ``original`` in a deep copy of its module: copy what features have attached."""
        self.filling = copy.deepcopy(original.filling, memo)

    # -- construction ------------------------------------------------------------------------------------------------

    def _make_buffer(self, params: Sequence[nn.Parameter]) -> UnshardedBuffer:
        return UnshardedBuffer(self.layout, self.kind, self.ranks, self.shard, params, self.wrappings)

    def cut(self, whole: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's part of whole parameters, on any device: a new tensor like the shard."""
        shard = self.shard_for(self.layout)
        for info, part, param, wrapping in zip(self.layout.params, self.slices, whole, self.wrappings, strict=True):
            if part.numel:
                plain = param.detach() if wrapping is None else wrapping.unwrap(param)
                elements = in_memory_order(plain, info.stride)
                shard[part.start : part.stop].copy_(elements[part.offset : part.offset + part.numel])
        return shard

    def _sample(self, full: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return some elements of each full parameter, 1-D in float64, or None on meta. Ranks compare them."""
        if any(param.is_meta for param in full):
            return None
        found = []
        for info, param, wrapping in zip(self.layout.params, full, self.wrappings, strict=True):
            plain = param.detach() if wrapping is None else wrapping.unwrap(param)
            elements = in_memory_order(plain, info.stride)[:: max(1, info.numel // _SAMPLES)][:_SAMPLES]
            found.append((torch.view_as_real(elements).flatten() if elements.is_complex() else elements).double())
        return torch.cat(found)

    def _count_changes(self) -> int:
        with plainly():
            return sum([param._version for param in self.params])

    def start(self) -> bytes | None:
        """Return a hash of the values that it was cut from, or None if they have changed since or are not known."""
        if self._count_changes() != self._sampled_at:
            return None
        if isinstance(self._start, torch.Tensor):
            self._start = hashlib.blake2b(repr(self._start.tolist()).encode()).digest()
        return self._start

    def part_view(self, index: int) -> torch.Tensor:
        """Parameter ``index``'s part of the local shard, in the shape of the user's parameter."""
        part = self.slices[index]
        return self.shaped(index, self.shard[part.start : part.stop])

    def shaped(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """Reshape 1-D ``part`` (parameter ``index``'s part, in memory order) to the shape of the user's parameter."""
        info = self.layout.params[index]
        if self.is_whole:
            return part.as_strided(info.shape, info.stride)
        return part.as_strided(info.shape_of(self.slices[index]), info.stride) if info.by_rows else part

    def _adopt(self, index: int, param: nn.Parameter) -> None:
        info, part, wrapping = self.layout.params[index], self.slices[index], self.wrappings[index]
        grad, param.grad = param.grad, None
        param.data = self.part_view(index)
        end = part.offset + part.numel
        runtime = self.ranks.norms
        if wrapping is not None:
            in_parts = self.ranks.shards if isinstance(wrapping, TensorParallel) else runtime
            runtime = wrapping.norm_runtime(in_parts, self.kind.compute_device)
        world = self.layout.world_size
        beside = next((w for w in self.wrappings if isinstance(w, TensorParallel)), None)
        copied = is_copy(wrapping if isinstance(wrapping, TensorParallel) else None, beside)
        holders = self.layout.holders(index)
        owner = None if len(holders) > 1 else holders[0] if holders else 0
        never_cut = info.by_rows and info.block >= info.numel and wrapping is None
        shard_info = ShardInfo(
            info.fqn, info.shape, info.stride, part.offset, end, world, info.by_rows, owner, runtime, self.ranks.average_now,
            wrapping, copied, never_cut=never_cut,
        )  # fmt: skip
        adopted = ShardedParameter.adopt(param, shard_info, self)
        self._describe(adopted, self.unsharded.params[index], shard_info)
        if grad is not None:  # a backward ran before sharding: keep its result, sharded like the parameter
            mine = in_memory_order(grad.detach(), info.stride)[part.offset : end].clone()
            adopted.grad = self.shaped(index, mine)

    @staticmethod
    def _describe(param: ShardedParameter, compute: nn.Parameter, info: ShardInfo) -> None:
        # A unsharded parameter usually shares its `__dict__` with the user's parameter. That of a tensor subclass may not.
        for owner in (param, compute):
            owner.__dict__["_flatshard_info"] = info

    def rename(self, fqns: Mapping[int, str]) -> None:
        """Give the parameters the FQNs that ``fqns`` has by their ids."""
        infos = zip(self.params, self.layout.params, strict=True)
        self.layout = self.layout.renamed([fqns.get(id(param), info.fqn) for param, info in infos])
        for param, compute, info in zip(self.params, self.unsharded.params, self.layout.params, strict=True):
            self._describe(param, compute, replace(param._flatshard_info, fqn=info.fqn))
        self.unsharded.rename(self.layout)

    # -- what follows ------------------------------------------------------------------------------------------------

    @property
    def is_trainable(self) -> bool:
        """Whether parameters of this dtype can require grad."""
        return self.kind.dtype.is_floating_point or self.kind.dtype.is_complex

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameters have no memory yet. [Note: Filled later]"""
        return self.kind.device.type == "meta" and self.kind.compute_device.type != "meta"

    def index_of(self, param: nn.Parameter) -> int | None:
        """The index of ``param``. None if it is not one of ``params``."""
        return next((i for i, own in enumerate(self.params) if own is param), None)

    def compute_of(self, param: nn.Parameter) -> nn.Parameter:
        """The unsharded parameter of ``param``: the tensor that autograd sees.

        Raises:
            RuntimeError: ``param`` is the parameter over the whole shard, see ``FlatGradients.use_shard_param``.
        """
        index = self.index_of(param)
        if index is None:
            raise RuntimeError(
                "register_hook on a flat parameter (flat_parameters) would never run, because autograd computes no gradient "
                "for it. Use register_post_accumulate_grad_hook, or register the hook on the single parameters"
            )
        return self.unsharded.params[index]

    # -- what the user may have changed ------------------------------------------------------------------------------

    def sync_requires_grad(self, unfrozen_only: bool) -> bool:
        """Copy ``requires_grad`` from the user's parameters to the unsharded parameters; ``unfrozen_only``: only True.

        Returns whether any has changed.
        """
        if self._synced_at == changes.count:
            return False
        now = list(map(_requires_grad, self.params))
        if unfrozen_only:
            now = list(map(operator.or_, now, self.requires_grad))
        else:
            self._synced_at = changes.count
        if now == self.requires_grad:
            return False
        for compute, requires_grad in zip(self.unsharded.params, now, strict=True):
            compute.requires_grad_(requires_grad)
        self.requires_grad = now
        return True

    @property
    def all_require_grad(self) -> bool:
        """Whether all of the user's parameters require grad now."""
        if self._synced_at == changes.count:
            return False not in self.requires_grad
        return all(map(_requires_grad, self.params))

    def moved(self) -> list[int]:
        """Indices of parameters that are not their slice of the shard any more (``p.data = ...``, ``module.to(...)``)."""
        kind, start, size = self.kind, self.shard.data_ptr(), self.shard.itemsize
        return [
            index
            for index, (param, part) in enumerate(zip(self.params, self.slices, strict=True))
            if param.dtype is not kind.dtype
            or param.device != kind.device
            or param.numel() != part.numel
            or (part.numel and start and param.data_ptr() != start + part.start * size)  # no addresses on meta
        ]

    def given(self, copies: Mapping[int, nn.Parameter] | None = None) -> list[Given]:
        """What the user gave to parameters while modules showed them whole: another dtype or device, as ``module.to()`` does.
        It gives that to the user's own, too, if these differ from what is shown.

        ``copies``: what modules showed, in the parameters' own dtypes, by their ids. None: the unsharded parameters.
        """
        flat, found = self.unsharded.flat, list[Given]()
        dtype, device = (flat.dtype, flat.device) if copies is None else (self.kind.dtype, None)
        for param, compute, wrapping in zip(self.params, self.unsharded.params, self.wrappings, strict=True):
            shown = compute if copies is None else copies[id(param)]
            new = param.dtype if shown.dtype is dtype else shown.dtype
            to = param.device if device in (None, shown.device) else shown.device
            if not isinstance(wrapping, TensorSubclass) and (new, to) != (self.kind.dtype, self.kind.device):
                found.append(Given(param, new, to))
        return found

    def check_new(self, index: int, new: torch.Tensor) -> None:
        """Raise if ``new``, with which the user replaced parameter ``index``, has no values, or not the shape of its part."""
        info, expected = self.layout.params[index], self.part_view(index).shape
        if new.is_meta and not self.params[index].is_meta:
            raise RuntimeError(
                f"parameter {info.fqn!r} was moved to the meta device after fully_shard, and has no values any more. "
                "Build the model anew, shard it, and load a checkpoint"
            )
        if new.shape != expected:
            raise RuntimeError(
                f"parameter {info.fqn!r} was replaced by a tensor of shape {tuple(new.shape)}; this rank's part has shape "
                f"{tuple(expected)} (of a parameter of shape {info.shape}). A sharded parameter cannot be resized: resize "
                "the module before fully_shard, or change values inside `with flatshard.summon_full_params(module):`"
            )

    def readopt(self, indices: Sequence[int]) -> None:
        """Adopt parameters whose data the user replaced: copy the values, or adopt the new dtype or device.

        Raises:
            RuntimeError: the new data has another shape, or only some parameters have a new dtype or device.
        """
        for i in indices:
            self.check_new(i, self.params[i])
        kinds = {(p.dtype, p.device) for p in self.params}
        if len(kinds) > 1:
            odd = [self.layout.params[i].fqn for i in indices]
            raise RuntimeError(
                f"parameters {name_list(odd)} changed dtype or device, but others of the same unit did not: {kinds}. "
                "Convert the whole unit, e.g. module.to(...)"
            )
        values = {i: self.params[i].data for i in indices}
        (kind,) = kinds
        if kind != (self.kind.dtype, self.kind.device):
            self.convert(*kind)
        for i, value in values.items():
            if value.dim() > 3 and value.stride() != self.part_view(i).stride():
                warn_of_memory_format(self.layout.params[i].fqn)
            self.part_view(i).copy_(value)
            self.params[i].data = self.part_view(i)

    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Rebuild the memory for a new dtype or device, without values: ``module.half()``, ``module.cuda()``.

        Offsets stay the same, so a smaller dtype may have a smaller alignment than [Note: Alignment] says.
        """
        self.kind = self.kind.converted(dtype, device, self.options)
        self.shard = self.shard_for(self.layout)
        self.unsharded.place(self.kind, self.shard)

    def rehome(self, home: torch.device) -> torch.Tensor:
        """Have the shard live on ``home`` from now on, with its values: the host, as under offload, or the compute device.

        Returns the memory that it had, which a copy on the current stream reads.
        """
        before, self.options = self.shard, replace(self.options, offload=home != self.kind.compute_device)
        self.kind = replace(self.kind, home=home)
        self.convert(self.kind.dtype, home)
        self.shard.copy_(before, non_blocking=True)
        for index, param in enumerate(self.params):
            param.data = self.part_view(index)
        return before

    def shard_for(self, layout: FlatLayout) -> torch.Tensor:
        """New memory for this rank's shard by another ``layout``: zeros."""
        kind, pinned = self.kind, self.options.pin_memory and self.kind.is_offloaded
        return torch.zeros(layout.shard_numel, dtype=kind.dtype, device=kind.device, pin_memory=pinned)

    def move(self, layout: FlatLayout, ranks: UnitRanks, shard: torch.Tensor) -> None:
        """Be cut by ``layout`` over ``ranks`` from now on, with the values of ``shard``, its part here.

        The parameters stay the same objects, sharded and unsharded. They must have no gradients, and no graph may be alive.
        """
        self.layout, self.ranks, self.is_whole = layout, ranks, ranks.is_whole
        self.slices = layout.shard_slices(ranks.rank)
        self.shard, self._start = shard, None  # the values are those of other ranks
        self.unsharded.move(layout, ranks, self.kind, shard)
        for index, param in enumerate(self.params):
            self._adopt(index, param)

    def watch(self) -> None:
        """See ``Home``."""
        self.is_watched = True

    # -- gathering ---------------------------------------------------------------------------------------------------

    def gather(self, exactly: bool, again: bool, kept: torch.Tensor | None = None) -> Pending:
        """Fill the unsharded buffer from all ranks' shards. ``exactly``, ``again``: see ``FlatParamHandle.unshard``.

        ``kept``: what ``unsharded.own`` was after an earlier gather, to be used in place of the shard.
        """
        runtime, shard, target = self.ranks.runtime, self.shard, self.unsharded
        if exactly and not runtime.collectives.exact:
            runtime = runtime.exact
        if kept is not None:
            shard = kept
        elif self.options.offload:
            shard = self.on_compute_device()
        if self.is_whole:
            target.allocate(shard)
            return runtime.issued(Done())
        if runtime.capabilities.gathers_late and (take := target.later()) is not None:
            return runtime.all_gather(target.wire, shard, self.ranks.label, again, take)
        fits = kept is None and self.kind.dtype is self.kind.compute_dtype
        as_it_is = fits and runtime.capabilities.out_of_place
        target.allocate(None if as_it_is else shard)
        sent, wire = shard if as_it_is else target.own, target.wire
        return runtime.all_gather(wire, sent if wire is target.flat else as_sent(sent), self.ranks.label, again)

    def on_compute_device(self) -> torch.Tensor:
        """The shard on the compute device. It is not cast first: a cast on the CPU blocks, and gives pageable memory."""
        kind = self.kind
        if kind.device == kind.compute_device and not kind.is_offloaded:
            return self.shard
        moved = self.shard.to(kind.compute_device, non_blocking=True, copy=True)
        self.ranks.runtime.reads_host()
        return moved

    def leave_memory(self) -> None:
        """Stop using the memory of the unsharded buffer, without freeing it. See ``ReductionInput.leave``."""
        self.unsharded.place(self.kind, self.shard)

    def keep_gathered(self) -> Pending:
        """Called after an approximate all-gather: remember its result, so that ``write_back`` finds real changes only."""
        self._approximate = self.unsharded.own.clone()
        return self.ranks.runtime.issued(Done())

    def free(self) -> None:
        """Free the unsharded buffer."""
        self._approximate = None
        self.unsharded.free()

    def write_back(self, own: torch.Tensor | None = None) -> None:
        """Copy this rank's part of the unsharded values into the shard, where it was changed.

        Unchanged elements keep the shard's own value, of which the buffer may have a rounded (mixed precision) or
        approximated (quantised collectives) copy. ``own``: this rank's part of a copy of them; None: of the buffer.
        """
        if own is None:
            if self.unsharded.is_alias:
                return
            own = self.unsharded.own
        made = self._approximate  # the values before any change
        if made is None or made.dtype is not own.dtype:
            if own.dtype is self.kind.dtype:
                self.shard.copy_(own)
                return
            made = self.shard.to(own)
        own = own.to(made.device)
        same = ((own == made) | (own.isnan() & made.isnan())).to(self.shard.device)
        self.shard.copy_(torch.where(same, self.shard, own.to(self.shard)))
        if made is self._approximate:
            made.copy_(own)  # later changes are found relative to this
