"""One flat parameter: the local shard, the user's parameters on it, the buffer that it is gathered into, its gradients.

[Note: The tensors of a unit]
- ``shard``: this rank's part. 1-D, ``shard_numel`` elements in the master dtype. It exists as long as the unit.
- ``params``: the user's own parameters. Their ``.data`` are slices of ``shard``.
- ``unsharded``: the gathered values of all ranks: see ``UnshardedBuffer``.
- ``gradients``: from autograd's to the user's ``.grad``: see ``FlatGradients``.

With a single shard (``NO_SHARD``, world size 1) and a single dtype the unsharded buffer *is* ``shard``, and nothing is
gathered or copied.

[Note: The cast is the copy]
With mixed precision the unsharded buffer has the compute dtype. The shard is copied to its place in the buffer in any case,
and this copy casts it. The all-gather then runs in place, on the smaller elements. ``keep_cast`` keeps the cast shard from
the forward's gather to the backward's, which copies it instead of casting again. This takes memory, and pays if the shard is
on another device (CPU offload), because it is transferred once.

[Note: Stepping between forward and backward]
Autograd's check for in-place changes doesn't see changes of the shards (see ``UnshardedBuffer``). So flatshard checks for
them itself: ``FlatParamHandle.version``.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import Label
from flatshard._errors import name_list
from flatshard._handle.adapters.tensor_parallel import TensorParallel, is_copy
from flatshard._handle.adapters.tensor_subclass import wrapping_of
from flatshard._handle.gradients import FlatGradients
from flatshard._handle.layout import FlatLayout
from flatshard._handle.placement import Placement
from flatshard._handle.pool import BufferPool
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, ShardInfo, in_memory_order
from flatshard._handle.unfilled import Filling, fill_with_pattern
from flatshard._handle.unsharded import UnshardedBuffer
from flatshard._runtime import Runtime

# Read for every parameter in every step, so the loops run in C.
_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_dtype = operator.attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class FlatOptions:
    """The user's options for one flat parameter."""

    compute_dtype: torch.dtype | None = None  # None: that of the parameters
    reduce_dtype: torch.dtype | None = None  # for the reduction of gradients; None: the compute dtype
    keep_low_precision_grads: bool = False  # ``.grad`` has the dtype of the reduction
    keep_cast: bool = False  # [Note: The cast is the copy]
    offload: bool = False  # the shard and its gradient are on the CPU
    pin_memory: bool = True  # they are in page-locked memory, under offload


class FlatParam:
    """One flat parameter. Its parameters have one dtype and device, and initially one ``requires_grad``."""

    def __init__(
        self,
        layout: FlatLayout,
        originals: Sequence[nn.Parameter],
        options: FlatOptions,
        runtime: Runtime,
        placement: Placement,
        pool: BufferPool | None,
        label: Label,
    ) -> None:
        """Shard ``originals`` in place: each of them becomes its part of the new local shard.

        ``runtime``: of the unit's collectives. ``pool``: allocates the unsharded buffer and the reduction's memory; None:
        allocated here. ``label``: the unit, for collectives and errors.
        """
        self.layout = layout
        self.placement = placement
        self.options = options
        self.pool = pool
        self.label = label
        self.dtype = originals[0].dtype  # of the shard
        self._host = runtime.host
        at = originals[0].device
        # Parameters on meta that are filled later compute on the runtime's device. [Note: Filled later]
        self._compute_device = runtime.device if at.type == "meta" else at
        self.device = self._wanted_device if at == self._compute_device else at  # of the shard
        self.filling: Filling | None = None  # while they have memory and no values: see _handle/unfilled.py
        self._cast: torch.Tensor | None = None  # [Note: The cast is the copy]
        self._cast_version = -1  # `FlatParamHandle.version` of its values
        self._gathered: torch.Tensor | None = None  # this rank's part as an approximate all-gather delivered it
        self._follow_kind()
        self.slices = layout.shard_slices(placement.rank)
        self.wrappings = tuple(map(wrapping_of, originals))  # None for a plain parameter
        self.shard = self._new_shard()
        self._fill_shard(originals)
        self.unsharded = self._make_unsharded(originals, pool)
        self.computes = self.unsharded.computes
        self.params = tuple(originals)
        self.is_watched = False  # see `Home`
        self._place()
        for index, param in enumerate(originals):
            self._adopt(index, param)
        self._record_addresses()
        # The `requires_grad` of each parameter when the compute parameters were last synchronised with it.
        self.requires_grad = [p.requires_grad for p in self.params]
        self._synced_at = -1  # `changes.count` at that time
        self.epoch = 0  # increases when the compute parameters need new AccumulateGrad nodes
        self._compute_version = 0
        self.gradients = FlatGradients(self)

    def _follow_kind(self) -> None:
        """Set what follows from the parameters' dtype and device."""
        self.compute_dtype = self.options.compute_dtype or self.dtype  # of the unsharded parameters
        self.is_offloaded = self.options.offload and self.device == self._host  # the shard is not on the compute device
        same = self.compute_dtype is self.dtype and self._compute_device == self.device and not self.is_offloaded
        self.is_alias = self.placement.shards is None and same  # the unsharded buffer is the shard

    @property
    def _wanted_device(self) -> torch.device:
        return self._host if self.options.offload and self._host else self._compute_device

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameters have no memory yet. [Note: Filled later]"""
        return self.device.type == "meta" and self._compute_device.type != "meta"

    def _make_unsharded(self, params: Sequence[nn.Parameter], pool: BufferPool | None) -> UnshardedBuffer:
        return UnshardedBuffer(self.layout, self.placement.rank, params, self.wrappings, self._compute_device, pool)

    def _new_shard(self) -> torch.Tensor:
        pinned = self.options.pin_memory and self.is_offloaded
        return torch.zeros(self.layout.shard_numel, dtype=self.dtype, device=self.device, pin_memory=pinned)

    # -- construction ------------------------------------------------------------------------------------------------

    def _fill_shard(self, originals: Sequence[torch.Tensor]) -> None:
        for info, part, param, wrapping in zip(self.layout.params, self.slices, originals, self.wrappings, strict=True):
            if part.numel:
                plain = param.detach() if wrapping is None else wrapping.unwrap(param)
                whole = in_memory_order(plain, info.stride)
                self.shard[part.start : part.stop].copy_(whole[part.offset : part.offset + part.numel])

    def _place(self) -> None:
        self.unsharded.place(self.compute_dtype, self._compute_device, self.shard if self.is_alias else None)

    def part_view(self, index: int) -> torch.Tensor:
        """Parameter ``index``'s part of the local shard, in the shape of the user's parameter."""
        part = self.slices[index]
        return self.shaped(index, self.shard[part.start : part.stop])

    def shaped(self, index: int, part: torch.Tensor) -> torch.Tensor:
        """Reshape 1-D ``part`` (parameter ``index``'s part, in memory order) to the shape of the user's parameter."""
        info = self.layout.params[index]
        if self.placement.shards is None:
            return part.as_strided(info.shape, info.stride)
        return part.as_strided(info.shape_of(self.slices[index]), info.stride) if info.by_rows else part

    def _adopt(self, index: int, param: nn.Parameter) -> None:
        info, part = self.layout.params[index], self.slices[index]
        grad, param.grad = param.grad, None
        param.data = self.part_view(index)
        end = part.offset + part.numel
        wrapping, runtime = self.wrappings[index], self.placement.shards
        if wrapping is not None:
            runtime = wrapping.norm_runtime(runtime, self._compute_device)
        world = self.layout.world_size
        beside = next((w for w in self.wrappings if isinstance(w, TensorParallel)), None)
        copied = is_copy(wrapping if isinstance(wrapping, TensorParallel) else None, beside)
        holders = self.layout.holders(index)
        owner = None if len(holders) > 1 else holders[0] if holders else 0
        shard_info = ShardInfo(
            info.fqn, info.shape, info.stride, part.offset, end, world, info.by_rows, owner, runtime, wrapping, copied
        )
        ShardedParameter.adopt(param, shard_info, self)
        self._describe(index, shard_info)
        if grad is not None:  # a backward ran before sharding: keep its result, sharded like the parameter
            mine = in_memory_order(grad.detach(), info.stride)[part.offset : end].clone()
            param.grad = self.shaped(index, mine)

    def _describe(self, index: int, info: ShardInfo) -> None:
        # A compute parameter usually shares its `__dict__` with the user's parameter. That of a tensor subclass may not.
        for owner in (self.params[index], self.computes[index]):
            owner.__dict__["_flatshard_info"] = info

    def compute_of(self, param: nn.Parameter) -> nn.Parameter:
        """The compute parameter of ``param``, one of ``params``: the tensor that autograd sees."""
        return next(c for p, c in zip(self.params, self.computes, strict=True) if p is param)

    def copy_with(self, params: Sequence[nn.Parameter], label: Label) -> FlatParam:
        """The same layout and values in new memory, for ``params``, plain copies of ``self.params``."""
        result = copy.copy(self)
        result.label = label
        result.shard = self._new_shard().copy_(self.shard)
        result.unsharded = result._make_unsharded(params, self.pool)
        result.computes = result.unsharded.computes
        result.params = tuple(params)
        result.is_watched = False
        result.filling = self.filling and Filling(result)
        result._cast = result._gathered = None
        result._compute_version = 0  # the version of the new compute parameters
        result._place()
        for index, param in enumerate(params):
            result._adopt(index, param)
        result._record_addresses()
        result.requires_grad = [p.requires_grad for p in params]
        result.gradients = self.gradients.copy_with(result)
        return result

    def rename(self, fqns: Mapping[int, str]) -> None:
        """Give the parameters the FQNs that ``fqns`` has by their ids."""
        infos = zip(self.params, self.layout.params, strict=True)
        self.layout = self.layout.renamed([fqns.get(id(param), info.fqn) for param, info in infos])
        for index, (param, info) in enumerate(zip(self.params, self.layout.params, strict=True)):
            assert isinstance(param, ShardedParameter)
            self._describe(index, replace(param._flatshard_info, fqn=info.fqn))
        self.gradients.follow_names()

    def _record_addresses(self) -> None:
        """Record the addresses of the parameters' data, for ``moved``."""
        self._addresses = [p.data_ptr() for p in self.params]
        self._empty = [p for p in self.params if not p.numel()]

    # -- what the user may have changed ------------------------------------------------------------------------------

    def changed_in_forward(self) -> bool:
        """Whether the module changed its own (unsharded) parameters in place since the last gather or check.

        ``p.data = ...``, ``p.detach().mul_()``, and ``p.mul_()`` under ``no_grad`` are seen. ``p.data.mul_()`` is not: the
        ``.data`` of a plain tensor has its own version counter, and the compute parameters are plain. Comparing values
        instead would read each unit once more in every forward.
        """
        version: int = sum(map(_version, self.computes))
        changed = version != self._compute_version
        self._compute_version = version
        return self.unsharded.take_back_moved() or changed

    def sync_requires_grad(self, thawed_only: bool = False) -> None:
        """Copy ``requires_grad`` from the user's parameters to the compute parameters; ``thawed_only``: only True."""
        if self._synced_at == changes.count:
            return
        now = list(map(_requires_grad, self.params))
        if thawed_only:
            now = list(map(operator.or_, now, self.requires_grad))
        else:
            self._synced_at = changes.count
        if now != self.requires_grad:
            for compute, requires_grad in zip(self.computes, now, strict=True):
                compute.requires_grad_(requires_grad)
            self.requires_grad = now
            self.epoch += 1

    @property
    def is_whole(self) -> bool:
        """Whether the shard is all of the flat parameter."""
        return self.placement.shards is None

    @property
    def is_trainable(self) -> bool:
        """Whether parameters of this dtype can require grad."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def all_require_grad(self) -> bool:
        """Whether all of the user's parameters require grad now."""
        if self._synced_at == changes.count:
            return False not in self.requires_grad
        return all(map(_requires_grad, self.params))

    def moved(self) -> list[int]:
        """Indices of parameters that are not their slice of the shard any more (``p.data = ...``, ``module.to(...)``)."""
        addresses = list(map(torch.Tensor.data_ptr, self.params))
        # An empty part has no address to compare, but all ranks must notice that the module was converted.
        converted = any(map(operator.ne, map(_dtype, self._empty), itertools.repeat(self.dtype)))
        if addresses == self._addresses and not converted and self.params[0].device == self.device:
            return []
        return [
            i
            for i, (p, now, then) in enumerate(zip(self.params, addresses, self._addresses, strict=True))
            if now != then or p.dtype is not self.dtype or p.device != self.device
        ]

    def check_new(self, param: nn.Parameter, new: torch.Tensor) -> None:
        """Raise if ``param`` is one of ``params``, and ``new`` has no values, or differs from its part in shape."""
        for i in [i for i, own in enumerate(self.params) if own is param]:
            info = self.layout.params[i]
            if new.is_meta and not param.is_meta:
                raise RuntimeError(
                    f"parameter {info.fqn!r} was moved to the meta device after fully_shard, and has no values any more. "
                    "Build the model anew, shard it, and load a checkpoint"
                )
            if new.shape == self.part_view(i).shape:
                continue
            raise RuntimeError(
                f"parameter {info.fqn!r} was replaced by a tensor of shape {tuple(new.shape)}; this rank's part has shape "
                f"{tuple(self.part_view(i).shape)} (of a parameter of shape {info.shape}). A sharded parameter cannot be "
                "resized: resize the module before fully_shard, or change values inside "
                "`with flatshard.summon_full_params(module):`"
            )

    def readopt(self, indices: Sequence[int]) -> None:
        """Adopt parameters whose data the user replaced: copy the values, or adopt the new dtype or device.

        Raises:
            RuntimeError: the new data has another shape, or only some parameters have a new dtype or device.
        """
        infos = self.layout.params
        for i in indices:
            self.check_new(self.params[i], self.params[i])
        kinds = {(p.dtype, p.device) for p in self.params}
        if len(kinds) > 1:
            odd = [infos[i].fqn for i in indices]
            raise RuntimeError(
                f"parameters {name_list(odd)} changed dtype or device, but others of the same unit did not: {kinds}. "
                "Convert the whole unit, e.g. module.to(...)"
            )
        (kind,) = kinds
        if kind == (self.dtype, self.device):
            for i in indices:
                values = self.params[i].data
                self.part_view(i).copy_(values)
                self.params[i].data = self.part_view(i)
        else:
            self._convert(*kind)
        self._record_addresses()
        self.gradients.follow_parameters()

    def _convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Rebuild the memory for a new dtype or device: ``module.half()``, ``module.cuda()``.

        Offsets stay the same, so a smaller dtype may have a smaller alignment than [Note: Alignment] says.
        """
        self.epoch += 1
        values = [p.data for p in self.params]
        self.dtype, self.device = dtype, device
        if not self.options.offload:
            self._compute_device = device
        before, self._cast = self.shard, None
        self._follow_kind()
        self.shard = self._new_shard().copy_(before)
        self._place()
        for i, param in enumerate(self.params):
            self.part_view(i).copy_(values[i])
            param.data = self.part_view(i)

    def allocate(self, device: torch.device) -> None:
        """Give parameters on meta their memory, to be filled. [Note: Filled later]

        Raises:
            RuntimeError: ``device`` is not where the shard belongs.
        """
        if device != self._wanted_device:
            raise RuntimeError(
                f"parameter {self.layout.params[0].fqn!r} belongs on {self._wanted_device}, and is given memory on {device}: "
                f"call module.to_empty(device={str(self._wanted_device)!r})"
            )
        self.device = device
        self._follow_kind()
        self.shard = self._new_shard()
        fill_with_pattern(self.shard)
        self._place()
        for index, param in enumerate(self.params):
            real = nn.Parameter(self.part_view(index), param.requires_grad)
            if param.grad_dtype is not real.grad_dtype:
                real.grad_dtype = param.grad_dtype
            torch._C._swap_tensor_impl(param, real)  # `param.data = ...` cannot leave the meta device
        self._record_addresses()
        self.gradients.follow_parameters()
        self.filling = Filling(self)
        self.epoch += 1
        changes.count += 1

    # -- gathering ---------------------------------------------------------------------------------------------------

    def gather(self, runtime: Runtime, version: int, again: bool) -> Pending:
        """Fill the unsharded buffer from all ranks' shards. ``again``: these have not changed since the last gather, unless
        their ``version`` has.
        """
        shard = self.shard
        if self.options.keep_cast:
            if self._cast is None or not again or version != self._cast_version:
                self._cast = None  # frees the old one before the new one is allocated
                self._cast, self._cast_version = self._on_compute_device(runtime).to(self.compute_dtype), version
            shard = self._cast
        elif self.options.offload:
            shard = self._on_compute_device(runtime)
        return self._gather_into(self.unsharded, shard, runtime, again)

    def _on_compute_device(self, runtime: Runtime) -> torch.Tensor:
        """The shard on the compute device. It is not cast first: a cast on the CPU blocks, and gives pageable memory."""
        if self.device == self._compute_device and not self.is_offloaded:
            return self.shard
        moved = self.shard.to(self._compute_device, non_blocking=True, copy=True)
        runtime.reads_host()
        return moved

    def _gather_into(
        self, target: UnshardedBuffer, shard: torch.Tensor, runtime: Runtime, again: bool = False
    ) -> Pending:
        from_elsewhere = getattr(runtime.collectives, "out_of_place", False) and self.placement.shards is not None
        sent = target.as_sent(shard) if from_elsewhere else None
        if sent is not None:
            target.allocate(None)
            return runtime.all_gather(target.wire, sent, self.label, again)
        target.allocate(shard)
        if self.placement.shards is None:
            return runtime.issued(Done())
        return runtime.all_gather(target.wire, target.own_wire, self.label, again)

    def gather_full_precision(self, runtime: Runtime) -> UnshardedBuffer:
        """The unsharded values in the parameters' own dtype, in a new buffer."""
        full = self._make_unsharded(self.params, None)
        full.place(self.dtype, self._compute_device, None)
        self._gather_into(full, self._on_compute_device(runtime), runtime.exact).wait()
        return full

    def keep_gathered(self) -> None:
        """Called after an approximate all-gather: remember its result, so that ``write_back`` finds real changes only."""
        self._gathered = self.unsharded.own.clone()

    def free(self) -> None:
        """Free the unsharded buffer."""
        self._gathered = None
        self.unsharded.free()

    def forget_cast(self) -> None:
        """Free the cast shard: the parameters may change before the next gather."""
        self._cast = None

    def write_back(self) -> None:
        """Copy this rank's part of the unsharded buffer into the shard, where it was changed.

        Unchanged elements keep the shard's own value, of which the buffer may have a rounded (mixed precision) or
        approximated (quantised collectives) copy.
        """
        if self.is_alias:
            return
        own = self.unsharded.own
        if self.compute_dtype is self.dtype and self._gathered is None:
            self.shard.copy_(own)
            return
        made = self.shard.to(own) if self._gathered is None else self._gathered  # the values before any change
        same = ((own == made) | (own.isnan() & made.isnan())).to(self.shard.device)
        self.shard.copy_(torch.where(same, self.shard, own.to(self.shard)))
        if self._gathered is not None:
            self._gathered.copy_(own)  # later changes are found relative to this

    def write_shard(self, shard: torch.Tensor) -> None:
        """Overwrite the shard with ``shard``, ``(shard_numel,)``, through the parameters, so that their versions increase."""
        for index, (part, param) in enumerate(zip(self.slices, self.params, strict=True)):
            param.copy_(self.shaped(index, shard[part.start : part.stop]))

    def write_back_from(self, whole: Sequence[torch.Tensor]) -> None:
        """Copy this rank's part of whole parameters, on any device, into the shard.

        If ``whole`` are copies of values from an approximate all-gather, only the changed elements are copied.
        """
        before = self.shard.clone() if self._gathered is not None and self.compute_dtype is self.dtype else None
        self._fill_shard(whole)
        if before is not None:
            assert self._gathered is not None
            same = (self.shard == self._gathered) | (self.shard.isnan() & self._gathered.isnan())
            self.shard.copy_(torch.where(same, before, self.shard))

    @property
    def resident_nbytes(self) -> int:
        """Bytes of parameter storage allocated now: the shard, and the unsharded buffer if it has its own storage."""
        return self.shard.untyped_storage().nbytes() + self.unsharded.nbytes
