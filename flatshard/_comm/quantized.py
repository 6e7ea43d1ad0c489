"""Collectives that send block-wise int8 instead of floating-point numbers, for slow networks.

As in ZeRO++ (Wang et al. 2023, arXiv:2306.10209), the all-gather sends quantised weights (its qwZ). Gradients are quantised
once, sent all-to-all and summed in full precision (its qgZ, on one level).

[Note: Block-wise int8]
Each ``block`` of consecutive elements shares a float32 scale: the largest magnitude in the block, divided by 127. An
element is sent as the nearest integer multiple of the scale. So the error of an element is at most 1/254 of its block's
largest magnitude. On the wire a row (the message of one rank to another) is the scales of its blocks, then the codes,
padded to a multiple of 16 bytes.

A block that contains an infinity or NaN arrives as NaN, so that a loss scaler sees it. Rounding never gives the code
-128; in gradients it stands for -0.0, so that parameters that no rank used keep ``.grad is None``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flatshard._comm.backends import BuiltinCollectives, builtin_collectives
from flatshard._comm.collectives import Collectives, Pending, as_real
from flatshard._comm.progress import Works

_WIDE = (torch.float32, torch.float64)  # dtypes for arithmetic; narrower numbers are widened first
_COMPRESSED = (*_WIDE, torch.float16, torch.bfloat16)
_NEGATIVE_ZERO = -128  # the code of -0.0


@dataclass(frozen=True)
class QuantizedCollectives:
    """Send parameters and gradients as int8, with a float32 scale per ``block`` elements: a quarter of the bytes of fp32.

    >>> flatshard.fully_shard(model, policy={Block}, collectives=flatshard.comm.QuantizedCollectives())

    The algorithm is that of ZeRO++ (arXiv:2306.10209). Each collective changes normally
    distributed values by 0.7% (relative root mean square; ``block=256``). Rounding is to nearest, so runs are reproducible,
    and all ranks get the same parameters. The optimizer's parameters stay exact, as do ``summon_full_params`` and the
    initial broadcast. ``unshard`` gives the approximated values that forward uses. If a module changes its own parameters
    in forward, the changed elements are written back as it computed them, from approximated values.

    float64, float32, float16, bfloat16 and complex gradients are quantised. Other dtypes, and complex parameters, are sent
    unchanged. During a collective, encoded and received bytes take up to half the memory of a float32 buffer, and
    16-bit gradients are widened to float32.

    Args:
        block: elements that share a scale. A smaller block is more exact and sends more: 4 / ``block`` bytes per element.
        all_gather: whether parameters are quantised.
        reduce: whether gradients are quantised. Under ``NO_SHARD`` they are quantised twice: an all-reduce reduces them in
            parts, and then gathers the parts.

    Raises:
        ValueError: ``block`` is not positive, or both ``all_gather`` and ``reduce`` are False.
    """

    block: int = 256
    all_gather: bool = True
    reduce: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"QuantizedCollectives: block must be a positive number of elements, got {self.block!r}")
        if not (self.all_gather or self.reduce):
            raise ValueError("QuantizedCollectives(all_gather=False, reduce=False) quantises nothing: do not pass it")

    def __call__(self, group: dist.ProcessGroup, device: torch.device) -> Collectives:
        """Make the collectives of one process group and device. :func:`fully_shard` calls this."""
        return _Quantized(builtin_collectives(group, device), self)


class _Quantized:
    def __init__(self, inner: BuiltinCollectives, choice: QuantizedCollectives) -> None:
        self._inner = inner
        self._choice = choice
        self._block = choice.block
        self.exact = not choice.all_gather
        self.compared = inner.compared
        # Otherwise a shard is encoded from its place in the output.
        self.out_of_place = inner.out_of_place and not choice.all_gather
        # Otherwise 8 bits per element are sent, whatever the input's dtype.
        self.widens = inner.widens and not choice.reduce

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        if not self._choice.all_gather or output.dtype not in _COMPRESSED:
            return self._inner.all_gather(output, shard)
        rows = output.view(self._inner.size, -1)
        wire = self._new_wire(rows)
        own = self._inner.rank
        # Encoding destroys this rank's row. It is decoded like the others, so that all ranks have the same values.
        _encode(_widened(rows[own : own + 1]), wire[own : own + 1], self._block)
        pending = self._inner.all_gather(wire.view(-1), wire[own])
        return Works([pending], lambda: _decode(wire, rows, self._block))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        if not self._choice.reduce or not _is_compressed(input):
            return self._inner.reduce_scatter(output, input)
        return self._reduce(as_real(output), as_real(input))

    def _reduce(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        rows = _widened(input.view(self._inner.size, -1))
        sent = self._new_wire(rows)
        _encode(rows, sent, self._block, keeps_negative_zero=True)
        received = torch.empty_like(sent)
        pending = self._inner.all_to_all(received.view(-1), sent.view(-1))

        def average() -> None:
            unused = _decode_gradients(received, rows, self._block).all(0)
            mean = rows.sum(0).div_(self._inner.size)
            output.copy_(mean.masked_fill_(unused & (mean == 0), -0.0))

        return Works([pending], average)

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        if not self._choice.reduce or not _is_compressed(tensor):
            return self._inner.all_reduce(tensor)
        size, real = self._inner.size, as_real(tensor)
        part = -(-real.numel() // size)
        whole = torch.zeros(size * part, dtype=real.dtype, device=real.device)
        whole[: real.numel()].copy_(real)
        mine = torch.empty(1, part, dtype=torch.float32 if real.dtype not in _WIDE else real.dtype, device=real.device)
        # Waits at once, so that the second half is issued in the same place on all ranks: [Note: Order of collectives]
        self._reduce(mine.view(-1), whole).wait()
        wire = self._new_wire(mine)
        _encode(mine, wire, self._block, keeps_negative_zero=True)
        received = wire.new_empty(size, wire.shape[1])
        pending = self._inner.all_to_all(received.view(-1), wire.expand(size, -1).contiguous().view(-1))

        def decode() -> None:
            rows = whole.view(size, -1)
            unused = _decode_gradients(received, rows, self._block)
            rows.masked_fill_(unused & (rows == 0), -0.0)
            real.copy_(whole[: real.numel()])

        return Works([pending], decode)

    def _new_wire(self, rows: torch.Tensor) -> torch.Tensor:
        """Return an empty buffer for the encoded ``rows``, one row per rank. [Note: Block-wise int8]"""
        numel = rows.shape[1]
        nbytes = 4 * -(-numel // self._block) + numel
        return torch.empty(rows.shape[0], -(-nbytes // 16) * 16, dtype=torch.uint8, device=rows.device)


def _is_compressed(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _COMPRESSED or tensor.is_complex()


def _widened(rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows``, or a float32 copy if their dtype is too narrow for arithmetic."""
    return rows if rows.dtype in _WIDE else rows.float()


def _parts(wire: torch.Tensor, numel: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the scales (one per block) and the codes in ``wire``, for rows of ``numel`` elements."""
    end = 4 * -(-numel // block)
    return wire[:, :end].view(torch.float32), wire[:, end : end + numel].view(torch.int8)


def _blocks(rows: torch.Tensor, scales: torch.Tensor, block: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (values, scales) of shapes (rows, blocks, elements), (rows, blocks, 1): full blocks, then a short last one."""
    full = rows.shape[1] // block
    if full:
        yield rows[:, : full * block].view(-1, full, block), scales[:, :full].unsqueeze(2)
    if full < scales.shape[1]:
        yield rows[:, full * block :].unsqueeze(1), scales[:, full:].unsqueeze(2)


def _encode(rows: torch.Tensor, wire: torch.Tensor, block: int, keeps_negative_zero: bool = False) -> None:
    """Write the codes and scales of ``rows`` (of a wide dtype) to ``wire``. Destroys ``rows``."""
    scales, codes = _parts(wire, rows.shape[1], block)
    bits = rows.view(torch.int32 if rows.dtype is torch.float32 else torch.int64)
    negative_zeros = bits == torch.iinfo(bits.dtype).min if keeps_negative_zero else None
    tiny = torch.finfo(torch.float32).tiny  # the scale of a block of zeros: its inverse is finite
    for values, scale in _blocks(rows, scales, block):
        largest = torch.maximum(values.amax(2, keepdim=True), -values.amin(2, keepdim=True))
        scale.copy_(largest.div_(127).clamp_min_(tiny))
        values.mul_(scale.reciprocal())
    rows.round_()
    if negative_zeros is not None:
        rows.masked_fill_(negative_zeros, _NEGATIVE_ZERO)
    codes.copy_(rows)


def _decode(wire: torch.Tensor, rows: torch.Tensor, block: int) -> None:
    """Decode ``wire`` into ``rows``."""
    scales, codes = _parts(wire, rows.shape[1], block)
    rows.copy_(codes)
    for values, scale in _blocks(rows, scales, block):
        values.mul_(scale)


def _decode_gradients(wire: torch.Tensor, rows: torch.Tensor, block: int) -> torch.Tensor:
    """Decode into ``rows``, with 0.0 for -0.0. Returns a mask of the -0.0 (and, on some processors, of NaNs)."""
    scales, codes = _parts(wire, rows.shape[1], block)
    negative_zeros = codes == _NEGATIVE_ZERO
    rows.copy_(codes).masked_fill_(negative_zeros, 0.0)
    for values, scale in _blocks(rows, scales, block):
        values.mul_(scale)  # 0.0 * NaN is NaN
    return negative_zeros
