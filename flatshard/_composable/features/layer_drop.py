"""Models that leave out layers at random (LayerDrop): ranks that draw different layers would wait for each other.

[Note: Layers that are dropped]
Some models of Hugging Face's, those for speech, run a dropped layer all the same and ignore its result, where they see FSDP
around: by ``_is_fsdp_managed_module`` of the module that holds the layers, which FSDP1 and FSDP2 set, and so do we. Others
(BART and the like) don't look, and leave it out. A forward that looks has the function's name in its code.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator

from torch import nn

from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit, unit_of
from flatshard._errors import name_list
from flatshard._names import plain_name

_LOOKS = "is_fsdp_managed_module"


class LayerDrop(Extension):
    """Tells models that drop layers which are units, or warns."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        world_size = max([unit.context.runtime.world_size for unit in made], default=1)
        if world_size > 1 and (dropped := tell_droppers(module)) is not None:
            warnings.warn(dropped, stacklevel=3)


def tell_droppers(root: nn.Module) -> str | None:
    """Tell modules of ``root`` that drop layers which are units, or hold some, to run them. What to warn of, if anything."""
    left = []
    for fqn, module in root.named_modules():
        if _drops(module) and any(unit_of(m) is not None for layers in _stacks(module) for m in layers.modules()):
            module._is_fsdp_managed_module = True
            module._fsdp_use_orig_params = True  # torch.compile asks for it beside the other
            if not _looks(module):
                left.append(plain_name(fqn))
    if not left:
        return None
    return (
        f"{name_list(left)} may leave out layers at random (layerdrop), on each rank others, and these layers are units: "
        "ranks would then end with an OutOfStepError. Set layerdrop to 0, or have a rank that leaves out a layer call "
        "flatshard.skip(layer, x) in its place"
    )


def _drops(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    kind = type(module).__name__.lower()
    places = [(module, "layerdrop"), (config, "layerdrop")]
    places += [(config, f"{part}_layerdrop") for part in ("encoder", "decoder") if part in kind]
    for place, name in places:
        rate = getattr(place, name, None)
        if isinstance(rate, int | float):  # the first is the one that counts
            return rate > 0
    return False


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    return (child for child in module.children() if isinstance(child, nn.ModuleList))


def _looks(module: nn.Module) -> bool:
    """[Note: Layers that are dropped]"""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _LOOKS in code.co_names
