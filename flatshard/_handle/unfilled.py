"""Parameters that ``fully_shard`` left on the meta device, from ``module.to_empty(...)`` to their first use.

[Note: Filled later]
``to_empty`` gives a flat parameter the memory of its shard, filled with a byte pattern that no initialiser leaves behind.
From then on an initialiser finds parameters *whole*, so that it draws the numbers that it draws in one process. An
initialiser is code that reads a parameter from its module (``self.weight`` in ``reset_parameters``), lists a module's own
(``named_parameters(recurse=False)``), or draws random numbers for one (``normal_``). What it leaves is cut, and this rank's
part kept, when code comes to another unit or the unit is used: one unit is whole at a time, and nothing is communicated. A
DTensor is shown as a DTensor again, over this rank's whole local tensor. A parameter that has values already is shown with
NaN in the place of other ranks' elements: it can be overwritten, scaled or filled, but not summed. What still shows the
pattern at the first forward was never filled, and is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._errors import name_list
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, home_of, in_memory_order

if TYPE_CHECKING:
    from flatshard._handle.flat_param import FlatParam
    from flatshard._handle.handle import FlatParamHandle

PATTERN = 0xA7
FILL = (
    "Give them memory by module.to_empty(device=...), and values by init_weights(), load_state_dict() or "
    "flatshard.load_checkpoint(), before the first forward. Or have fully_shard initialise them: param_init_fn=..., or "
    "device_id=... for the modules' reset_parameters()"
)
"""The cure for parameters without values."""

_data: Any = torch.Tensor.data


def check_has_memory(handles: Iterable[FlatParamHandle], verb: str) -> None:
    """Raise for parameters on the meta device."""
    if left := [info.fqn for handle in handles for flat in handle.on_meta for info in flat.layout.params]:
        raise RuntimeError(f"{verb}: {name_list(left)} are on the meta device. {FILL}")


def fill_with_pattern(tensor: torch.Tensor) -> None:
    """Mark the whole storage of ``tensor`` as never initialised."""
    _bytes(tensor).fill_(PATTERN)


def shows_pattern(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, plain and not empty, is as ``fill_with_pattern`` left it."""
    return bool((tensor.detach().reshape(-1).view(torch.uint8) == PATTERN).all())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Filling:
    """One flat parameter that is being filled. [Note: Filled later]"""

    def __init__(self, flat: FlatParam) -> None:
        self._flat = flat
        self._whole: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # by index: the memory, and what is shown of it
        fillings.add(self)

    def show(self, param: nn.Parameter) -> nn.Parameter:
        """Show ``param`` whole, until ``cut_all``. Returns ``param``, or a DTensor in its place."""
        flat = self._flat
        index = next(i for i, own in enumerate(flat.params) if own is param)
        if index in self._whole:
            return self._whole[index][1]
        if _shown and _shown[0]._flat.placement.label.unit != flat.placement.label.unit:
            cut_all()
        info, part, own = flat.layout.params[index], flat.slices[index], flat.part_view(index)
        whole = torch.empty_strided(info.shape, info.stride, dtype=flat.kind.dtype, device=flat.kind.device)
        fill_with_pattern(whole)
        if part.numel and not shows_pattern(own):
            if whole.is_floating_point() or whole.is_complex():
                whole.fill_(torch.nan)
            in_memory_order(whole, info.stride)[part.offset : part.offset + part.numel] = own.reshape(-1)
        wrapping, shown = flat.wrappings[index], param
        if wrapping is None:
            self._point(param, whole)
        else:
            shown = nn.Parameter(wrapping.wrap(whole), param.requires_grad)
        self._whole[index] = whole, shown
        if self not in _shown:
            _shown.append(self)
        return shown

    def cut(self) -> None:
        """Keep this rank's part of what is shown whole."""
        flat, shown = self._flat, dict(self._whole)
        self._whole.clear()
        for index, (memory, what) in shown.items():
            param, info, part = flat.params[index], flat.layout.params[index], flat.slices[index]
            if what is param:
                memory = param.detach()
            if memory.shape != info.shape:
                raise RuntimeError(
                    f"parameter {info.fqn!r} of shape {info.shape} was given the shape {tuple(memory.shape)}: resize a "
                    "module before fully_shard"
                )
            if part.numel:
                mine = in_memory_order(memory, info.stride)[part.offset : part.offset + part.numel]
                flat.shard[part.start : part.stop].copy_(mine)
            self._point(param, flat.part_view(index))

    @staticmethod
    def _point(param: nn.Parameter, data: torch.Tensor) -> None:
        _data.__set__(param, data)
        increment_version(param)
        changes.count += 1


fillings: weakref.WeakSet[Filling] = weakref.WeakSet()  # all that exist
_shown: list[Filling] = []  # with parameters that are shown whole: of one unit


def cut_all() -> None:
    """Show this rank's parts again, everywhere."""
    while _shown:
        _shown.pop().cut()


def show_whole(param: ShardedParameter) -> nn.Parameter:
    """What code gets that reads ``param`` from its module: itself, or while it is being filled, the whole."""
    home = home_of(param)
    return param if home is None or home.filling is None else home.filling.show(param)
