"""The values that receivers have: a copy of this rank's shards, in the dtype that is sent.

[Note: Few elements change]
With small learning rates most elements stay the same in the compute dtype, as a step is less than its last bit. So each rank
keeps the values that it has sent, in that dtype, compares its shards with them, and sends the difference. No rank gathers
anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from flatshard._base.names import plain_name
from flatshard._base.old_names import OldMember
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, shard_info
from flatshard.checkpoint._boxes import Part
from flatshard.checkpoint._sharded_value import part_of
from flatshard.checkpoint._state_dict import check_dtype, idle_flats


class PlacedPart(NamedTuple):
    """The place of a rank's shard of a parameter in its flat shard. It consists of plain numbers and names, so it pickles."""

    names: tuple[str, ...]  # all names of the parameter
    start: int  # its first element in the flat shard
    part: Part


Layout = list[list[PlacedPart]]
"""For each flat shard of one rank, the shards of parameters in it, in order."""


class SentParams:
    """The values that a receiver has: a copy of this rank's shards as they are now, in the dtype in which they compute.

    Values that several ranks have (replicas, parameters that nobody shards) are sent by the first of them.
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
