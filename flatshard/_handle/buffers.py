"""The memory of one flat parameter's values: the local shard and the unsharded buffer. The only file that resizes a
storage.

[Note: The tensors of a unit]
- ``shard``: this rank's part. 1-D, ``shard_numel`` elements. Lives as long as the unit.
- ``params``: the user's own parameters, whose ``.data`` are slices of ``shard``.
- ``unsharded``: all of it. 1-D, ``padded_numel`` elements. One permanent tensor whose *storage* is resized between zero
  and full. It is the all-gather's output, and the parameters' memory at once: no copy-in, no copy-out.
- ``computes``: one permanent leaf per parameter, in its original shape and stride, aliasing its range of ``unsharded``.
  Autograd sees these.

With a single shard (``NO_SHARD``, world size 1) ``unsharded`` *is* ``shard``, and nothing is ever gathered or copied.

[Note: .data does not share a version counter]
``compute.data = view`` aliases memory without sharing the buffer's version counter, while ``nn.Parameter(view)`` would
share it. So refilling the buffer for backward is invisible to autograd's check for in-place changes, as it must be; and
the storage (not another one: autograd may have saved a view such as ``weight.t()``) is refilled with the same values.

[Note: Stepping between forward and backward]
That check is then ours to make: see ``version``.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from flatshard._errors import name_list
from flatshard._handle.layout import FlatLayout
from flatshard._handle.sharded_parameter import ShardedParameter, ShardInfo

# What every gloo and NCCL build can send as it is. Anything else travels as bytes.
_WIRE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64)


# Read of every parameter in every step: the loops are left to C.
_version = operator.attrgetter("_version")
_requires_grad = operator.attrgetter("requires_grad")
_dtype = operator.attrgetter("dtype")


class FlatBuffers:
    """The values of one flat parameter: parameters of one dtype and device, all trainable or all frozen at first."""

    def __init__(self, layout: FlatLayout, originals: Sequence[nn.Parameter], rank: int) -> None:
        """Shard ``originals`` in place: afterwards each holds its part of the new local shard, on the same device."""
        self.layout = layout
        self.is_alias = layout.world_size == 1  # the shard is the whole: nothing to gather, nothing to free
        self.rank = rank
        self.dtype = originals[0].dtype
        self.device = originals[0].device
        self.slices = layout.shard_slices(rank)
        self.shard = torch.zeros(layout.shard_numel, dtype=self.dtype, device=self.device)
        self._fill_shard(originals)
        self.computes = tuple(self._make_compute(p) for p in originals)
        self.params = tuple(originals)
        self._allocate_views()
        for index, param in enumerate(originals):
            self._adopt(index, param)
        self._note_addresses()
        # ``requires_grad`` as last brought in line between a parameter and its compute parameter.
        self.requires_grad = [p.requires_grad for p in self.params]
        # This rank's part of the unsharded buffer as gathered, where that is not exactly the shard: see `keep_gathered`.
        self._gathered: torch.Tensor | None = None
        self.epoch = 0  # grows when the compute parameters change in a way that autograd's nodes depend on
        self._compute_version = 0

    # -- construction ------------------------------------------------------------------------------------------------

    def _fill_shard(self, originals: Sequence[torch.Tensor]) -> None:
        for info, part, param in zip(self.layout.params, self.slices, originals, strict=True):
            if part.numel:
                whole = in_memory_order(param.detach(), info.stride)
                self.shard[part.start : part.stop].copy_(whole[part.offset : part.offset + part.numel])

    @staticmethod
    def _make_compute(param: nn.Parameter) -> nn.Parameter:
        compute = nn.Parameter(torch.empty(0, dtype=param.dtype, device=param.device), param.requires_grad)
        compute.__dict__ = param.__dict__  # attributes set on the user's parameter are seen on both, now and later
        return compute

    def _allocate_views(self) -> None:
        """Build every permanent view once; then free the unsharded buffer's storage."""
        self.unsharded = (
            self.shard if self.is_alias else torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.device)
        )
        for info, compute in zip(self.layout.params, self.computes, strict=True):
            compute.data = self.unsharded.as_strided(info.shape, info.stride, info.start)
        self._own = self.unsharded[self.rank * self.layout.shard_numel :][: self.layout.shard_numel]
        as_wire = self.dtype not in _WIRE_DTYPES
        self.unsharded_wire = self.unsharded.view(torch.uint8) if as_wire else self.unsharded
        self.shard_wire = self.shard.view(torch.uint8) if as_wire else self.shard
        self._storage = self.unsharded.untyped_storage()
        self._nbytes = self._storage.nbytes()
        if not self.is_alias:
            self._storage.resize_(0)

    def _part_view(self, index: int) -> torch.Tensor:
        """Parameter ``index``'s part of the local shard, in the shape that the user's parameter has."""
        info, part = self.layout.params[index], self.slices[index]
        if self.is_alias:
            return self.shard.as_strided(info.shape, info.stride, info.start)
        return self.shard[part.start : part.stop]

    def _adopt(self, index: int, param: nn.Parameter) -> None:
        info, part = self.layout.params[index], self.slices[index]
        grad, param.grad = param.grad, None
        param.data = self._part_view(index)
        if grad is not None:  # a backward ran before sharding: keep its result, sharded like the parameter
            whole = in_memory_order(grad.detach(), info.stride)
            mine = whole[part.offset : part.offset + part.numel].clone()
            param.grad = mine.as_strided(info.shape, info.stride) if self.is_alias else mine
        ShardedParameter.adopt(
            param,
            ShardInfo(info.fqn, info.shape, info.stride, part.offset, part.offset + part.numel, self.layout.world_size),
        )

    def copy_with(self, params: Sequence[nn.Parameter]) -> FlatBuffers:
        """The same layout and values in memory of its own, for ``params``: plain copies of ``self.params``."""
        result = copy.copy(self)
        result.shard = self.shard.clone()
        result._gathered = None
        result.computes = tuple(self._make_compute(p) for p in params)
        result.params = tuple(params)
        result._allocate_views()
        for index, param in enumerate(params):
            result._adopt(index, param)
        result._note_addresses()
        result.requires_grad = [p.requires_grad for p in params]
        return result

    def rename(self, old: str, new: str) -> None:
        """Put ``new`` in the place of ``old`` at the beginning of every parameter's name."""
        self.layout = self.layout.renamed(old, new)
        for param, info in zip(self.params, self.layout.params, strict=True):
            assert isinstance(param, ShardedParameter)
            param._flatshard_info = replace(param._flatshard_info, fqn=info.fqn)

    def _note_addresses(self) -> None:
        """Where the parameters' data is now: see ``moved``."""
        self._addresses = [p.data_ptr() for p in self.params]
        self._empty = [p for p in self.params if not p.numel()]

    # -- what the user may have changed ------------------------------------------------------------------------------

    def version(self) -> int:
        """Grows with every in-place change that autograd knows of (``optimizer.step()``; not ``p.data.add_()``)."""
        return sum(map(_version, self.params))

    def changed_in_forward(self) -> bool:
        """Whether the module changed its own (unsharded) parameters in place since they were last refilled."""
        version: int = sum(map(_version, self.computes))
        changed = version != self._compute_version
        self._compute_version = version
        return changed

    def sync_requires_grad(self) -> bool:
        """Give the compute parameters the ``requires_grad`` of the user's. Returns whether any requires grad."""
        now = list(map(_requires_grad, self.params))
        if now != self.requires_grad:
            for param, compute in zip(self.params, self.computes, strict=True):
                compute.requires_grad_(param.requires_grad)
            self.requires_grad = now
            self.epoch += 1
        return True in now

    def moved(self) -> list[int]:
        """Parameters whose data is no longer their slice of the shard (``p.data = ...``, ``module.to(...)``)."""
        addresses = list(map(torch.Tensor.data_ptr, self.params))
        # Of an empty part the address says nothing, but all ranks must notice that the module was converted.
        converted = any(map(operator.ne, map(_dtype, self._empty), itertools.repeat(self.dtype)))
        if addresses == self._addresses and not converted and self.params[0].device == self.device:
            return []
        return [
            i
            for i, (p, now, then) in enumerate(zip(self.params, addresses, self._addresses, strict=True))
            if now != then or p.dtype is not self.dtype or p.device != self.device
        ]

    def readopt(self, indices: Sequence[int]) -> None:
        """Take over parameters whose data the user replaced: copy values in, or follow a new dtype or device.

        Raises:
            RuntimeError: a replaced tensor has another number of elements, or only some changed dtype or device.
        """
        infos = self.layout.params
        for i in indices:
            if self.params[i].shape != self._part_view(i).shape:
                raise RuntimeError(
                    f"parameter {infos[i].fqn!r} was replaced by a tensor of shape {tuple(self.params[i].shape)}; this "
                    f"rank's part has shape {tuple(self._part_view(i).shape)} (of {infos[i].shape} in whole). A sharded "
                    "parameter cannot be resized: resize the module before fully_shard, or change values inside "
                    "`with flatshard.summon_full_params(module):`"
                )
        kinds = {(p.dtype, p.device) for p in self.params}
        if len(kinds) > 1:
            odd = [infos[i].fqn for i in indices]
            raise RuntimeError(
                f"parameters {name_list(odd)} changed dtype or device, others of the same unit did not: {kinds}. "
                "Convert the whole unit, e.g. module.to(...)"
            )
        (kind,) = kinds
        if kind == (self.dtype, self.device):
            for i in indices:
                values = self.params[i].data
                self._part_view(i).copy_(values)
                self.params[i].data = self._part_view(i)
        else:
            self._convert(*kind)
        self._note_addresses()

    def _convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """``module.half()``, ``module.cuda()``: rebuild the buffers around the converted values.

        Offsets stay as planned, so a smaller dtype may be aligned to fewer bytes than [Note: Alignment] asks for.
        """
        self.epoch += 1
        values = [p.data for p in self.params]
        self.dtype, self.device = dtype, device
        self.shard = self.shard.to(device=device, dtype=dtype)
        for compute in self.computes:
            compute.data = torch.empty(0, dtype=dtype, device=device)
        self._allocate_views()
        for i, param in enumerate(self.params):
            self._part_view(i).copy_(values[i])
            param.data = self._part_view(i)

    # -- gathering ---------------------------------------------------------------------------------------------------

    def allocate(self) -> None:
        """Give the unsharded buffer storage, and put this rank's shard in its place there."""
        self._storage.resize_(self._nbytes)
        self._own.copy_(self.shard)

    def keep_gathered(self) -> None:
        """The all-gather that just ended approximates: until ``free``, what it brought is not a change to write back."""
        self._gathered = self._own.clone()

    def free(self) -> None:
        """Take the unsharded buffer's storage away. Views stay valid and empty until the next ``allocate``."""
        self._gathered = None
        if not self.is_alias:
            self._storage.resize_(0)

    def contains(self, address: int) -> bool:
        """Whether ``address`` is in the unsharded buffer."""
        return 0 <= address - self._storage.data_ptr() < self._storage.nbytes()

    def write_back(self) -> None:
        """Copy this rank's part of the unsharded buffer into the shard."""
        if not self.is_alias:
            before = self._before_write_back()
            self.shard.copy_(self._own)
            self._keep_unchanged(before)
            if self._gathered is not None:
                self._gathered.copy_(self._own)  # the next change is to be seen against this

    def write_back_from(self, whole: Sequence[torch.Tensor]) -> None:
        """Copy this rank's part of whole parameters, on any device, into the shard."""
        before = self._before_write_back()
        self._fill_shard(whole)
        self._keep_unchanged(before)

    def _before_write_back(self) -> torch.Tensor | None:
        return None if self._gathered is None else self.shard.clone()

    def _keep_unchanged(self, before: torch.Tensor | None) -> None:
        """Undo the write-back where it brought only what an approximate all-gather had made of the shard."""
        if before is not None:
            assert self._gathered is not None
            same = (self.shard == self._gathered) | (self.shard.isnan() & self._gathered.isnan())
            self.shard.copy_(torch.where(same, before, self.shard))

    @property
    def resident_nbytes(self) -> int:
        """Bytes of parameter storage held now: the shard, and the unsharded buffer where it has storage of its own."""
        own = self.shard.untyped_storage().nbytes()
        return own if self.is_alias else own + self._storage.nbytes()


def in_memory_order(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``tensor``'s elements as 1-D, in the order of a dense ``stride``; a view where ``tensor`` has that stride."""
    if tuple(tensor.stride()) != stride:
        dense = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = dense.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
