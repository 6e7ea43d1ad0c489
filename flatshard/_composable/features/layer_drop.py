"""Models that leave out layers at random (LayerDrop), on each rank different ones. The ranks would wait for each other.

[Note: Layers that are dropped]
Some Hugging Face models (those for speech) run a dropped layer and ignore its result, if they are sharded by FSDP. They
check the attribute ``_is_fsdp_managed_module`` of the module that holds the layers. FSDP1 and FSDP2 set it, and so does
flatshard. Others (BART and similar) do not check, and leave the layer out; flatshard warns about these. A forward that checks
has the name of the check function in its code.
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
    """Makes models run the layers that they would leave out, if these layers are units; or warns."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        world_size = max([unit.context.runtime.world_size for unit in made], default=1)
        if world_size > 1 and (dropped := tell_droppers(module)) is not None:
            warnings.warn(dropped, stacklevel=3)


def tell_droppers(root: nn.Module) -> str | None:
    """Mark the modules in ``root`` that leave out layers with units. Returns a warning about those that do not check."""
    left = []
    for fqn, module in root.named_modules():
        if _drops(module) and any(unit_of(m) is not None for layers in _stacks(module) for m in layers.modules()):
            module._is_fsdp_managed_module = True
            module._fsdp_use_orig_params = True  # torch.compile expects this beside the other
            if not _looks(module):
                left.append(plain_name(fqn))
    if not left:
        return None
    return (
        f"{name_list(left)} may leave out layers at random (layerdrop), different ones on each rank, and these layers are "
        "units: ranks would then end with an OutOfStepError. Set layerdrop to 0, or call flatshard.skip(layer, x) on a rank "
        "that leaves out a layer"
    )


def _drops(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    kind = type(module).__name__.lower()
    places = [(module, "layerdrop"), (config, "layerdrop")]
    places += [(config, f"{part}_layerdrop") for part in ("encoder", "decoder") if part in kind]
    for place, name in places:
        rate = getattr(place, name, None)
        if isinstance(rate, int | float):  # the first one found is the one that the model uses
            return rate > 0
    return False


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    return (child for child in module.children() if isinstance(child, nn.ModuleList))


def _looks(module: nn.Module) -> bool:
    """Whether the module's forward checks for FSDP. [Note: Layers that are dropped]"""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _LOOKS in code.co_names
