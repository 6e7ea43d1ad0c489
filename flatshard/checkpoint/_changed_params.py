"""Changed weights for another system, such as an inference server. Each rank sends those of its own shards.

[Note: Few elements change]
With small learning rates most elements stay the same in the compute dtype, as a step is less than its last bit. So each rank
keeps the values that it has sent, in that dtype, compares its shards with them, and sends the difference. No rank gathers
anything. An element costs its value and a byte or two for its position. If most elements differ, the shard is sent in full.

>>> since = SentParams(model)  # now the server has these weights, too: from a checkpoint, or by iter_full_params
>>> ...  # steps
>>> for changed in iter_changed_params(since):
...     send(changed)
>>> # The server has each sender's ``since.layout``:
>>> apply_changed_params(server_model.state_dict(), layout, changed)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from flatshard._base.names import plain_name
from flatshard._base.old_names import OldMember, old_arguments
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, shard_info
from flatshard.checkpoint._boxes import Part, memory_dims
from flatshard.checkpoint._gaps import decode_gaps, differ, encode_gaps
from flatshard.checkpoint._sharded_value import part_of
from flatshard.checkpoint._state_dict import check_dtype, idle_flats


class PlacedPart(NamedTuple):
    """The place of a rank's shard of a parameter in its flat shard. It consists of plain numbers and names, so it pickles."""

    names: tuple[str, ...]  # all names of the parameter
    start: int  # its first element in the flat shard
    part: Part


Layout = list[list[PlacedPart]]
"""For each flat shard of one rank, the shards of parameters in it, in order."""


class ChangedParams(NamedTuple):
    """Elements of one flat shard of the sending rank.

    Example::

        sent = flatshard.checkpoint.SentParams(model)
        optimizer.step()
        for changed in flatshard.checkpoint.iter_changed_params(sent):
            print(changed.flat, changed.values.shape, changed.nbytes)
    """

    flat: int  # index of the flat shard in ``SentParams.layout``
    gaps: torch.Tensor | None  # uint8 or int16: positions, as distances between elements; None for all elements
    values: torch.Tensor  # 1-D, in the dtype of ``SentParams``

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.values.nbytes + (0 if self.gaps is None else self.gaps.nbytes)


class SentParams:
    """The values that a receiver has: a copy of this rank's shards as they are now, in the dtype in which they compute.

    Values that several ranks have (replicas, parameters that nobody shards) are sent by the first of them.

    Example::

        sent = flatshard.checkpoint.SentParams(model, dtype=torch.bfloat16)  # now the receiver gets all, and sent.layout
        optimizer.step()
        nbytes = sum(changed.nbytes for changed in flatshard.checkpoint.iter_changed_params(sent))
        assert nbytes <= sent.nbytes
    """

    plan = OldMember("layout")
    layout: Layout
    """Layout of this rank's flat shards, which the receiver needs once."""
    copies: list[torch.Tensor]
    """For each flat shard of ``layout``, its values as they were sent, 1-D."""

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        """
        Args:
            module: a sharded module, or one that holds sharded ones.
            dtype: in which floating-point parameters are sent. Default: the dtype in which they compute.

        Raises:
            ValueError: nothing in ``module`` is sharded, or ``dtype`` is no floating-point dtype.
            RuntimeError: called inside a forward or ``summon_full_params``.
        """
        check_dtype(dtype, "SentParams")
        self._module = module
        values = list(_own_values(module, "SentParams"))
        self.layout = _layout(module, values)
        self.copies = []
        for source in values:
            given = dtype if dtype is not None and source.flat.dtype.is_floating_point else source.dtype
            self.copies.append(source.flat.to(given, copy=True))

    @property
    def nbytes(self) -> int:
        """Bytes of all values, as sending everything would take."""
        return sum(t.nbytes for t in self.copies)

    def now(self, verb: str) -> list[torch.Tensor]:
        """Internal: return this rank's values, to compare with ``copies``: 1-D, in the master dtype.

        Raises:
            RuntimeError: the parameters have another layout by now; or called inside a forward or ``summon_full_params``.
        """
        values = list(_own_values(self._module, verb))
        if _layout(self._module, values) != self.layout:
            raise RuntimeError(
                f"{verb}: the parameters of this {type(self._module).__name__} have been sharded anew (redistribute), or "
                "changed names: make a new one from the module as it is, and give receivers its layout"
            )
        return [source.flat for source in values]

    def __iter__(self) -> Iterator[ChangedParams]:
        """See :func:`iter_changed_params`."""
        for number, (flat, sent) in enumerate(zip(self.now("iter_changed_params"), self.copies, strict=True)):
            changed = _difference(number, flat.to(sent.dtype), sent)
            if changed is not None:
                yield changed
                if changed.gaps is None:
                    sent.copy_(changed.values)
                else:
                    sent[decode_gaps(changed.gaps)] = changed.values


def iter_changed_params(since: SentParams) -> Iterator[ChangedParams]:
    """Iterate over the elements of this rank's parameters that have changed since the receiver got them.

    Bits are compared in the dtype that is sent. No communication; any rank may call it without the others. One flat shard is
    compared at a time, and counts as sent when the next one is asked for. A shard without changes is left out.

    Example::

        sent = flatshard.checkpoint.SentParams(model)
        optimizer.step()
        messages = list(flatshard.checkpoint.iter_changed_params(sent))  # from each rank to the receiver

    Args:
        since: the values that the receiver has. They are updated.

    Raises:
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    return iter(since)


def _difference(number: int, now: torch.Tensor, sent: torch.Tensor) -> ChangedParams | None:
    at = differ(now, sent).nonzero().view(-1)
    if not at.numel():
        return None
    gaps = encode_gaps(at)
    if gaps.nbytes + at.numel() * now.itemsize >= now.nbytes:
        return ChangedParams(number, None, now.clone())
    return ChangedParams(number, gaps, now[at])


@old_arguments(plan="layout")
@torch.no_grad()
def apply_changed_params(weights: Mapping[str, torch.Tensor], layout: Layout, changed: ChangedParams) -> None:
    """Put ``changed`` into ``weights``, in place.

    Example::

        weights = flatshard.checkpoint.full_state_dict(model)  # the receiver's
        sent = flatshard.checkpoint.SentParams(model)
        optimizer.step()
        for changed in flatshard.checkpoint.iter_changed_params(sent):
            flatshard.checkpoint.apply_changed_params(weights, sent.layout, changed)  # this rank's elements are new

    Args:
        weights: full tensors by name, as ``state_dict()`` of the plain model has them. A tied parameter may be there under
            any of its names.
        layout: the sender's ``SentParams.layout``.
        changed: the elements that it sent. They may be on another device.

    Raises:
        ValueError: a parameter is in ``weights`` under none of its names, or has another shape. Nothing is changed.
    """
    placed = layout[changed.flat]
    targets = [[weights[n] for n in p.names if n in weights] for p in placed]
    for each, found in zip(placed, targets, strict=True):
        if not found or any(tuple(t.shape) != each.part.shape for t in found):
            have = ", ".join(str(tuple(t.shape)) for t in found) or "nothing"
            raise ValueError(
                f"apply_changed_params: {each.names[0]!r} is sent as {each.part.shape}, the weights have {have}"
            )
    offsets = None if changed.gaps is None else decode_gaps(changed.gaps)
    if offsets is not None:
        ends = torch.tensor([p.start + p.part.numel for p in placed], device=offsets.device)
        starts = torch.tensor([p.start for p in placed], device=offsets.device)
        first, last = (torch.searchsorted(offsets, edges).tolist() for edges in (starts, ends))
    for i, (each, found) in enumerate(zip(placed, targets, strict=True)):
        if offsets is None:
            values = changed.values[each.start : each.start + each.part.numel]
            at = torch.arange(each.part.start, each.part.stop, device=values.device)
        else:
            values = changed.values[first[i] : last[i]]
            at = offsets[first[i] : last[i]] - each.start + each.part.start
        for target in found if len(at) else ():
            _put(target, each.part, at.to(target.device), values.to(target.device, target.dtype))


def _put(target: torch.Tensor, part: Part, at: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to the elements ``at`` of the part's block, counted in its memory order."""
    if target.stride() == part.stride and tuple(target.shape) == part.block_shape:
        target.as_strided((target.numel(),), (1,))[at] = values
        return
    index: dict[int, torch.Tensor] = {}
    for dim in reversed(memory_dims(part.block_shape, part.stride)):  # from the innermost
        at, index[dim] = at // part.block_shape[dim], at % part.block_shape[dim] + part.block_offsets[dim]
    target[tuple(index[d] for d in range(target.dim())) or ...] = values if target.dim() else values[0]


# -- this rank's values ------------------------------------------------------------------------------------------------


class _OwnValues(NamedTuple):
    """A flat shard that this rank sends."""

    flat: torch.Tensor  # 1-D, in the master dtype
    dtype: torch.dtype  # of computation
    params: Sequence[tuple[nn.Parameter, int]]  # with the first element of each in ``flat``


def _own_values(module: nn.Module, verb: str) -> Iterator[_OwnValues]:
    flats = idle_flats(module, verb)
    for _, buffers in flats:
        if buffers.ranks.is_first_replica:
            params = [(p, at.start) for p, at in zip(buffers.params, buffers.slices, strict=True) if at.numel]
            # Not the encoded dtype, whose codes depend on all values: [Note: Scales of encoded parameters].
            dtype = buffers.options.compute_dtype or buffers.kind.dtype
            yield _OwnValues(buffers.shard, dtype, params)
    if all(unit.handle.ranks.is_rank0 for unit, _ in flats):
        for param in module.parameters():
            if not isinstance(param, ShardedParameter):
                yield _OwnValues(param.detach().reshape(-1), param.dtype, [(param, 0)])


def _layout(module: nn.Module, values: Iterable[_OwnValues]) -> Layout:
    names: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(plain_name(name))
    return [list(_placed(source, names)) for source in values]


def _placed(source: _OwnValues, names: Mapping[int, list[str]]) -> Iterator[PlacedPart]:
    for param, start in source.params:
        part = full_part(param) if (info := shard_info(param)) is None else part_of(info)
        if id(param) in names and not part.is_copy:
            yield PlacedPart(tuple(names[id(param)]), start, part)


def full_part(param: nn.Parameter) -> Part:
    """Return the part of a parameter that nobody shards: all of it, in row-major order."""
    shape = tuple(param.shape)
    return Part.of_whole(shape, torch.empty(shape, device="meta").stride(), 0, param.numel())
