"""Changes as patches: elements of a parameter by their numbers in the full tensor, as inference engines take them.

[Note: Patches]
Engines that cut and fuse weights themselves take a parameter's name, row-major numbers of elements, and their values. Each
rank knows these of its own shards, without communication. So each makes one message: for each of its flat shards the changed
elements, as distances (``_gaps.py``) and values, and the places of the shards. Where the messages of all ranks come together,
each parameter's elements become one patch. A number takes 4 bytes in a patch, and about one in a message, so patches are made
where the engine is.

[Note: Whole or nothing]
A message has the places of all shards of its rank, also of unchanged ones. So the messages of a step are complete if each
parameter's elements come once. All messages are read and checked before the first patch is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from flatshard._base.errors import name_list
from flatshard.checkpoint._boxes import Part, memory_dims
from flatshard.checkpoint._container import checksums, memory_of
from flatshard.weights._cells import dtype_name
from flatshard.weights._codec import as_integers
from flatshard.weights._gaps import decode_gaps, differ, encode_gaps, measure_gaps
from flatshard.weights._messages import Bytes, digest_of, message_of, read_message, wrong
from flatshard.weights._sent import PlacedPart, SentParams

_VERB = "decode_patches"
_LENGTH = 8  # bytes: says how many the header has
_GAPS = {1: torch.uint8, 2: torch.int16}


class Patch(NamedTuple):
    """Changed elements of one parameter. The values are new values, not differences.

    Example::

        patch = flatshard.weights.Patch("4.bias", (10,), torch.tensor([0, 7]), torch.tensor([0.5, -1.0]))
        weights = {"4.bias": torch.zeros(10)}
        flatshard.weights.apply_patches(weights, [patch])
        assert weights["4.bias"][7] == -1
    """

    name: str
    """The name of the parameter; of a tied one, its first."""
    shape: tuple[int, ...]
    """The shape of the full parameter."""
    indices: torch.Tensor
    """Ascending row-major numbers of elements in the full parameter: int32, or int64 where that is too small."""
    values: torch.Tensor
    """The elements, 1-D, in the dtype that is sent."""


class PatchSource:
    """Finds the changes in this rank's shards, for engines that take patches. Each rank has one.

    The engine has the values of the moment when the source is made, as by
    :func:`flatshard.integrations.weight_sync.sync_weights`. Beside the model a rank holds a copy of its values in ``dtype``.
    A :class:`Sender` also survives lost messages and restarts, and sends fewer bytes, to receivers that hold full tensors.

    Example::

        source = flatshard.weights.PatchSource(model, dtype=torch.bfloat16)
        optimizer.step()
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, source.encode_changes())  # or send them to the engine by any means
        patches = flatshard.weights.decode_patches(messages)

    Args:
        module: a sharded module, or a module with sharded ones inside.
        dtype: the dtype in which floating-point parameters are sent. Default: their compute dtype.

    Raises:
        ValueError: nothing in ``module`` is sharded, or ``dtype`` is no floating-point dtype.
        RuntimeError: called inside a forward or ``summon_full_params``.
    """

    step: int
    """The number of messages so far."""

    def __init__(self, module: nn.Module, *, dtype: torch.dtype | None = None) -> None:
        self._values = SentParams(module, dtype=dtype)
        self.step = 0

    @torch.no_grad()
    def encode_changes(self) -> bytes:
        """Return this rank's changes since the last call, for :func:`decode_patches`. No communication.

        The changes count as sent. If the message or a patch is lost, bring the engine all weights, and make a new source.

        Raises:
            RuntimeError: called inside a forward or ``summon_full_params``; or parameters have been sharded anew.
        """
        flats = self._values.now("PatchSource.encode_changes")
        described, payload = [], []
        for flat, sent, placed in zip(flats, self._values.copies, self._values.layout, strict=True):
            now = flat.to(sent.dtype)
            gaps, values = find_changes(now, sent)
            data = bytearray().join((_bytes(gaps), _bytes(values)))
            form, sum_of = gaps.itemsize if gaps.numel() else 0, digest_of(checksums(memoryview(data))).hex()
            sizes = [form, gaps.numel(), values.numel()]
            parts = [[each.names[0], each.start, *_plain(each.part)] for each in placed]
            described.append({"dtype": dtype_name(sent.dtype), "parts": parts, "sizes": sizes, "sum": sum_of})
            payload.append(data)
        head = message_of({"kind": "patch", "step": self.step + 1, "flats": described})
        message = b"".join([len(head).to_bytes(_LENGTH, "little"), head, *payload])
        for flat, sent in zip(flats, self._values.copies, strict=True):  # last: an error before has sent nothing
            sent.copy_(flat)
        self.step += 1
        return message


def decode_patches(messages: Iterable[Bytes]) -> list[Patch]:
    """Return the patches of one step, one for each parameter with changes.

    Example::

        source = flatshard.weights.PatchSource(model)
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, source.encode_changes())
        assert flatshard.weights.decode_patches(messages) == []  # nothing has changed

    Args:
        messages: of :meth:`PatchSource.encode_changes`, one of each rank, in any order.

    Raises:
        ValueError: a message is damaged, of another step, missing or there twice. The error has the names of parameters.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, int] = {}  # elements whose places have come
    pieces: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    steps = set[int]()
    for message in messages:
        header, payload = _read(message)
        steps.add(header["step"])
        start = 0
        for each in header["flats"]:
            placed, dtype = _placed(each)
            names = [p.names[0] for p in placed]
            at, values, start = _read_changes(each, payload, start, dtype, names)
            for p, name in zip(placed, names, strict=True):
                if shapes.setdefault(name, p.part.shape) != p.part.shape:
                    raise ValueError(f"{_VERB}: {name!r} has shapes {shapes[name]} and {p.part.shape}")
                found[name] = found.get(name, 0) + p.part.numel
            for p, chosen, local in split_changes(placed, at, values.numel()):
                piece = (full_numbers(p.part, local).to(_index_dtype(p.part.shape)), values[chosen])
                pieces.setdefault(p.names[0], []).append(piece)
    if len(steps) > 1:
        raise ValueError(f"{_VERB}: the messages are of steps {sorted(steps)}: give it those of one step, of all ranks")
    if wrong_count := [name for name, count in found.items() if count != math.prod(shapes[name])]:
        first = wrong_count[0]
        raise ValueError(
            f"{_VERB}: {found[first]} of {math.prod(shapes[first])} elements of {first!r} are in the messages, and so of "
            f"{len(wrong_count)} parameters: give it one message of each rank"
        )
    return [_joined(name, shapes[name], pieces.pop(name)) for name in list(pieces)]


@torch.no_grad()
def apply_patches(weights: Mapping[str, torch.Tensor], patches: Iterable[Patch]) -> None:
    """Write patches into full tensors, in place. Each is checked before the first is written.

    Example::

        weights = {"4.bias": torch.zeros(10)}
        patch = flatshard.weights.Patch("4.bias", (10,), torch.tensor([0, 7]), torch.tensor([0.5, -1.0]))
        flatshard.weights.apply_patches(weights, [patch])

    Args:
        weights: tensors by name, of any strides.
        patches: of :func:`decode_patches`, or of somebody else.

    Raises:
        ValueError: a patch does not fit its weight, which the error names. Nothing is changed.
    """
    patches = list(patches)
    for patch in patches:
        if (why := _why_not(patch, weights.get(patch.name))) is not None:
            raise ValueError(f"apply_patches: {patch.name!r} {why}")
    for patch in patches:
        target = weights[patch.name]
        at = patch.indices.to(target.device, torch.int64)
        as_integers(target).put_(at, as_integers(patch.values.to(target.device)))


def _why_not(patch: Patch, target: torch.Tensor | None) -> str | None:
    """Return why a patch does not fit a tensor, or None."""
    at, values = patch.indices, patch.values
    if target is None:
        return "is none of the weights"
    if tuple(target.shape) != tuple(patch.shape) or target.dtype != values.dtype:
        have, given = (target.dtype, tuple(target.shape)), (values.dtype, tuple(patch.shape))
        return f"is {have[0]} of shape {have[1]}, and the patch is of {given[0]} of shape {given[1]}"
    if at.dim() != 1 or values.dim() != 1 or len(at) != len(values) or at.dtype not in (torch.int32, torch.int64):
        return f"gets {at.dtype} indices of shape {tuple(at.shape)} for values of shape {tuple(values.shape)}"
    if len(at) and not 0 <= int(at.min()) <= int(at.max()) < target.numel():
        return f"gets elements {int(at.min())} to {int(at.max())}, and has {target.numel()}"
    if not (at[1:] > at[:-1]).all():  # those of decode_patches ascend
        ordered = at.sort().values
        if (ordered[1:] == ordered[:-1]).any():
            return "gets an element twice"
    return None


# -- a rank's message --------------------------------------------------------------------------------------------------


def find_changes(now: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gaps of the changed elements and their values. Without gaps, the values are all elements, or none."""
    chosen = differ(now, sent)
    none = torch.empty(0, dtype=torch.uint8, device=now.device)
    if int(chosen.sum()) * (1 + now.itemsize) >= now.nbytes:  # a gap takes a byte, or more
        return none, now
    at = chosen.nonzero().view(-1)
    if not at.numel():
        return none, now[:0]
    gaps = encode_gaps(at)
    if gaps.nbytes + at.numel() * now.itemsize >= now.nbytes:
        return none, now
    return gaps, now[at]


def _bytes(values: torch.Tensor) -> memoryview:
    return memory_of(values.cpu().contiguous())


def _plain(part: Part) -> list[Any]:
    numbers = (part.shape, part.block_shape, part.block_offsets, part.stride)
    return [*map(list, numbers), part.start, part.stop]


def _read(message: Bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the payload of a message."""
    data = memoryview(message)
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    found = read_message(data[_LENGTH:end], _VERB) if end <= len(data) else None
    if found is None or found.header["kind"] != "patch":
        raise ValueError(f"{_VERB}: a message is damaged, or no message of PatchSource.encode_changes")
    return found.header, data[end:]


def _placed(flat: dict[str, Any]) -> tuple[list[PlacedPart], torch.dtype]:
    """Return the places in a flat shard, in order, and its dtype."""
    dtype = vars(torch).get(flat["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise wrong(_VERB, f"there is no dtype {flat['dtype']!r}")
    placed, end = [], 0
    for name, at, shape, block_shape, block_offsets, stride, start, stop in flat["parts"]:
        rows = [shape, block_shape, block_offsets, stride]
        is_inside = len({*map(len, rows)}) == 1 and all(
            0 <= offset <= offset + size <= full
            for offset, size, full in zip(block_offsets, block_shape, shape, strict=True)
        )
        if not is_inside or min(stride, default=0) < 0 or not 0 <= start <= stop <= math.prod(block_shape) or at < end:
            raise wrong(_VERB, f"{name!r} has no place at {at}: {start} to {stop} of {block_shape}")
        part = Part(tuple(shape), tuple(block_shape), tuple(block_offsets), tuple(stride), start, stop)
        placed.append(PlacedPart((name,), at, part))
        end = at + part.numel
    return placed, dtype


def _read_changes(
    flat: dict[str, Any], payload: memoryview, start: int, dtype: torch.dtype, names: list[str]
) -> tuple[torch.Tensor | None, torch.Tensor, int]:
    """Return the changed offsets in a flat shard, or None for all; their values; and the end in the payload."""
    form, words, count = flat["sizes"]
    gaps = _GAPS.get(form, torch.uint8)
    middle = start + words * gaps.itemsize
    end = middle + count * dtype.itemsize
    if min(words, count) < 0 or end > len(payload) or (words > 0) != (form in _GAPS):
        raise ValueError(f"{_VERB}: a message ends after {len(payload)} of {end} bytes, within {name_list(names)}")
    data = memoryview(bytearray(payload[start:end]))  # a tensor's memory is to be writable
    if digest_of(checksums(data)).hex() != flat["sum"]:
        raise ValueError(f"{_VERB}: the changes of {name_list(names)} are damaged")
    if not count:
        return None, torch.empty(0, dtype=dtype, device="cpu"), end
    if not words:
        return None, torch.frombuffer(data, dtype=dtype), end
    encoded = torch.frombuffer(data[: middle - start], dtype=gaps)
    values = torch.frombuffer(bytearray(data[middle - start :]), dtype=dtype)  # aligned
    if measure_gaps(encoded)[0] != count:
        raise wrong(_VERB, f"{name_list(names)} has {count} values for other places")
    return decode_gaps(encoded), values, end


def split_changes(
    placed: list[PlacedPart], at: torch.Tensor | None, count: int
) -> Iterator[tuple[PlacedPart, slice, torch.Tensor]]:
    """Yield each place with changes, the slice of the values, and the elements' numbers in its block.

    Elements without a place are padding, or another tensor-parallel rank sends them.

    Args:
        placed: the places in a flat shard, in order.
        at: the changed offsets in it, or None for all.
        count: the number of values.

    Raises:
        ValueError: all values are to come, and there are fewer.
    """
    if at is None:
        if count and placed and placed[-1].start + placed[-1].part.numel > count:
            raise wrong(_VERB, f"{name_list(p.names[0] for p in placed)} has {count} values, too few for all elements")
        for p in placed if count else ():
            numbers = torch.arange(p.part.start, p.part.stop, dtype=_index_dtype(p.part.shape), device="cpu")
            yield p, slice(p.start, p.start + p.part.numel), numbers
        return
    edges = torch.tensor([edge for p in placed for edge in (p.start, p.start + p.part.numel)], device=at.device)
    bounds = torch.searchsorted(at, edges).tolist()
    for p, begin, end in zip(placed, bounds[::2], bounds[1::2], strict=True):
        if begin < end:
            yield p, slice(begin, end), at[begin:end] - p.start + p.part.start


def full_numbers(part: Part, at: torch.Tensor) -> torch.Tensor:
    """Return row-major numbers in the full tensor of the elements ``at`` of a block, counted in its memory order."""
    dims = memory_dims(part.block_shape, part.stride)
    if part.block_shape == part.shape and dims == tuple(range(len(dims))):
        return at
    numbers = torch.zeros_like(at)
    for dim in reversed(dims):  # from the innermost
        size = part.block_shape[dim]
        numbers += (at % size + part.block_offsets[dim]) * math.prod(part.shape[dim + 1 :])
        at = at // size
    return numbers


def _joined(name: str, shape: tuple[int, ...], pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> Patch:
    indices, values = (torch.cat(each) for each in zip(*pieces, strict=True))
    if not bool((indices[1:] > indices[:-1]).all()):
        indices, order = indices.sort()
        values = values[order]
    return Patch(name, shape, indices, values)


def _index_dtype(shape: tuple[int, ...]) -> torch.dtype:
    return torch.int32 if math.prod(shape) <= 2**31 else torch.int64
