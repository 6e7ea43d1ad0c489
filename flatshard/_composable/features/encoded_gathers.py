"""Flat parameters that travel encoded: float8 bytes and a scale for each parameter, as their class says.

[Note: Scales of encoded parameters]
A scale is for a full tensor, of which each rank has a shard. So before a gather that is to bring new values, ranks share
the largest magnitudes in their shards: by one small all-gather for all encoded parameters of a model. It is an all-gather,
and not a reduction, since ranks have the same order only among gathers. The gathers of other units after that use what it
brought, each once. A backward, which gathers the values of its forward again, uses its scales, too.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from flatshard._comm.collectives import Pending
from flatshard._comm.progress import make_label
from flatshard._comm.runtime import Runtime
from flatshard._composable.extensions import Extension
from flatshard._composable.find import units_below
from flatshard._composable.state import Unit
from flatshard._handle.adapters.encoding import encode, scale_of
from flatshard._handle.adapters.tensor_subclass import TensorSubclass, swap_inside
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.layout import Kind
from flatshard._handle.unsharded import UnshardedBuffer


class EncodedBuffer(UnshardedBuffer):
    """The encoded values of all ranks, from which the class of each parameter builds the tensor that modules see."""

    def __init__(self, flat: EncodedFlatParam, originals: Sequence[nn.Parameter]) -> None:
        """``flat``: whose values they are. ``originals``: see ``UnshardedBuffer``."""
        self._of = flat
        ranks = flat.ranks
        super().__init__(flat.layout, ranks.rank, flat.kind, ranks.pool, flat.shard, originals, flat.wrappings)

    def place(self, kind: Kind, shard: torch.Tensor) -> None:
        """See ``UnshardedBuffer``."""
        infos = self._layout.params
        self.scales = torch.ones(len(infos), device=kind.compute_device)
        # Autograd may save these views, and they are written in place.
        # unsharded.py, [Note: .data does not share a version counter]
        self._each = self.scales.data.unbind()
        self._encoded = [self.scales[:0]] * len(infos)  # each parameter's range of the buffer
        super().place(kind, shard)
        self.allocates_late = False  # shards are encoded into the storage

    def _make_param(self, index: int, param: nn.Parameter, device: torch.device) -> nn.Parameter:
        data = torch.empty(self._layout.params[index].shape, dtype=self._of.kind.buffer_dtype, device=device)
        compute = nn.Parameter(self._decoded(index, data, torch.ones((), device=device)), param.requires_grad)
        for name, value in param.__dict__.items():
            compute.__dict__.setdefault(name, value)
        return compute

    def _point(self, index: int, compute: nn.Parameter, plain: torch.Tensor) -> None:
        self._encoded[index] = plain
        swap_inside(compute, self._decoded(index, plain, self._each[index]))

    def _decoded(self, index: int, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        flat = self._of
        asked, _, metadata = encode(self._wrapping(index), data.new_empty(0, dtype=flat.kind.dtype), scale)
        made: torch.Tensor = asked.fsdp_post_all_gather((data,), metadata, flat.decoded_dtype)[0]
        return made

    def _wrapping(self, index: int) -> TensorSubclass:
        wrapping = self._wrappings[index]
        assert isinstance(wrapping, TensorSubclass)
        return wrapping

    def allocate(self, shard: torch.Tensor | None) -> None:
        """See ``UnshardedBuffer``. ``shard`` is this rank's shard, or an encoded copy of it."""
        if shard is not None and shard.dtype is not self.flat.dtype:
            super().allocate(None)
            self.encode(shard, self.own)
        else:
            super().allocate(shard)

    def encode(self, shard: torch.Tensor, output: torch.Tensor) -> None:
        """Encode ``shard`` into ``output``, and set the scales of the parameters that modules see."""
        flat = self._of
        for index, (part, compute) in enumerate(zip(flat.slices, self.params, strict=True)):
            mine = slice(part.start, part.stop)
            asked, sent, metadata = encode(self._wrapping(index), shard[mine], self._each[index])
            output[mine].copy_(sent)
            asked.fsdp_post_all_gather((self._encoded[index],), metadata, flat.decoded_dtype, out=compute)


class EncodedFlatParam(FlatParam):
    """A flat parameter whose shards are encoded before they are gathered: adapters/encoding.py."""

    unsharded: EncodedBuffer

    def _make_buffer(self, params: Sequence[nn.Parameter]) -> UnshardedBuffer:
        self.share(Scales(self.ranks.runtime))
        self.scaled_at = -1  # `version` when scales were last shared; -1: they have been used
        return EncodedBuffer(self, params)

    def share(self, scales: Scales) -> None:
        """Get the scales from ``scales``, together with other flat parameters."""
        self.scales = scales
        scales.join(self)

    def copy_features(self, original: FlatParam, memo: dict[int, Any]) -> None:
        """See ``FlatParam``. The flat parameters of a copied model share their scales."""
        super().copy_features(original, memo)
        assert isinstance(original, EncodedFlatParam)
        self.share(copy.deepcopy(original.scales, memo))

    @property
    def decoded_dtype(self) -> torch.dtype:
        """The dtype of the parameters that modules see."""
        return self.options.compute_dtype or self.kind.dtype

    @property
    def version(self) -> int:
        """Increases with every change of the values."""
        shard_param = self.shard_param
        return sum([p._version for p in self.params]) + (0 if shard_param is None else shard_param._version)

    def gather(self, exactly: bool, for_backward: bool, kept: torch.Tensor | None = None) -> Pending:
        """See ``FlatParam``. [Note: Scales of encoded parameters]"""
        if kept is None and not for_backward:
            if self.scaled_at != self.version:
                self.scales.share()
            self.scaled_at = -1
        return super().gather(exactly, for_backward, kept)

    def largest(self) -> torch.Tensor:
        """Return the largest magnitude in this rank's shard of each parameter."""
        dtype = torch.float64 if self.kind.dtype is torch.float64 else torch.float32
        here = [self.shard[part.start : part.stop] for part in self.slices if part.numel]
        found, nothing = iter(torch._foreach_norm(here, math.inf) if here else ()), self.shard.new_zeros(())
        return torch.stack([next(found) if part.numel else nothing for part in self.slices]).to(dtype)

    def write_back(self, own: torch.Tensor | None = None) -> None:
        """See ``FlatParam``. Values that a forward has changed cannot be written back from what was encoded.

        Raises:
            RuntimeError: a forward has changed some.
        """
        if own is not None:
            super().write_back(own)
            return
        encoded = torch.zeros_like(self.unsharded.own)
        self.unsharded.encode(self.on_compute_device(), encoded)
        for part, info in zip(self.slices, self.layout.params, strict=True):
            mine = slice(part.start, part.stop)
            if not torch.equal(encoded[mine].view(torch.uint8), self.unsharded.own[mine].view(torch.uint8)):
                raise RuntimeError(
                    f"parameter {info.fqn!r} was changed in its unit's forward, where it is encoded in {encoded.dtype}: its "
                    "own values cannot follow. Change it inside `with flatshard.summon_full_params(module):`"
                )


class Scales:
    """The scales of all encoded flat parameters of a model that the same ranks share. [Note: Scales of encoded parameters]"""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._flats: list[EncodedFlatParam] = []
        self._label = make_label(runtime.progress, "<scales of encoded parameters>", "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Scales:
        """Return an empty set of scales, which the copied flat parameters join."""
        return Scales(self._runtime)

    def join(self, flat: EncodedFlatParam) -> None:
        """Add ``flat`` to those that share scales. All ranks call it in the same order."""
        self._flats.append(flat)

    def share(self) -> None:
        """Set the scales of all flat parameters, from the largest magnitudes on all ranks."""
        flats, ranks, rank = self._flats, self._runtime.world_size, self._runtime.rank
        with torch.no_grad():
            sizes = [len(flat.slices) for flat in flats]
            pool, device = flats[0].ranks.pool, flats[0].kind.compute_device
            own = torch.cat([flat.largest().to(device) for flat in flats])
            numel = ranks * sum(sizes)
            found = own.new_empty(numel) if pool is None else pool.allocate(numel, own.dtype)
            of_ranks = found.view(ranks, -1)
            of_ranks[rank].copy_(own)
            self._runtime.exact.all_gather(found, of_ranks[rank], self._label).wait()
            for flat, largest in zip(flats, torch.split(of_ranks.amax(0), sizes), strict=True):
                flat.unsharded.scales.copy_(scale_of(largest, flat.kind.buffer_dtype))
                flat.scaled_at = flat.version


class EncodedGathers(Extension):
    """Makes all units of a model share the scales of their encoded parameters in one collective.

    It joins the units of one call, and those that earlier calls have made in its module.
    """

    concerns = operator.attrgetter("handle.is_encoded")

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        joined: dict[Runtime, Scales] = {}
        for unit in units_below(module):
            for flat in unit.handle.flats:
                if isinstance(flat, EncodedFlatParam):
                    runtime = flat.ranks.runtime
                    if runtime not in joined:
                        joined[runtime] = Scales(runtime)
                    flat.share(joined[runtime])
