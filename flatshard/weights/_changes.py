"""Changes as tensors, for who transports and applies them: old functions, in whose place :class:`Sender` came."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from flatshard._base.old_names import old_arguments
from flatshard.weights._gaps import decode_gaps
from flatshard.weights._patches import find_changes, full_numbers, split_changes
from flatshard.weights._sent import Layout, SentParams


class ChangedParams(NamedTuple):
    """Elements of one flat shard of the sending rank."""

    flat: int  # index of the flat shard in ``SentParams.layout``
    gaps: torch.Tensor | None  # uint8 or int16: positions, as distances between elements; None for all elements
    values: torch.Tensor  # 1-D, in the dtype of ``SentParams``

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.values.nbytes + (0 if self.gaps is None else self.gaps.nbytes)


def iter_changed_params(since: SentParams) -> Iterator[ChangedParams]:
    """Iterate over the elements of this rank's parameters that have changed since the receiver got them.

    Bits are compared in the dtype that is sent. No communication; any rank may call it without the others. One flat shard is
    compared at a time, and counts as sent when the next one is asked for. A shard without changes is left out.

    Args:
        since: the values that the receiver has. They are updated.

    Raises:
        RuntimeError: called inside a forward or ``summon_full_params``.
    """
    for number, (flat, sent) in enumerate(zip(since.now("iter_changed_params"), since.copies, strict=True)):
        gaps, values = find_changes(flat.to(sent.dtype), sent)
        if values.numel():
            changed = ChangedParams(number, gaps if gaps.numel() else None, values.clone())
            yield changed
            if changed.gaps is None:
                sent.copy_(changed.values)
            else:
                sent[decode_gaps(changed.gaps)] = changed.values


@old_arguments(plan="layout")
@torch.no_grad()
def apply_changed_params(weights: Mapping[str, torch.Tensor], layout: Layout, changed: ChangedParams) -> None:
    """Put ``changed`` into ``weights``, in place.

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
    found_of = dict(zip(placed, targets, strict=True))
    offsets = None if changed.gaps is None else decode_gaps(changed.gaps)
    for each, chosen, local in split_changes(placed, offsets, changed.values.numel()):
        at, values = full_numbers(each.part, local), changed.values[chosen]
        for target in found_of[each]:
            target.put_(at.to(target.device, torch.int64), values.to(target.device, target.dtype))
