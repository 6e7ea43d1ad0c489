"""Names of modules and parameters as state dicts have them."""

from __future__ import annotations

from torch import nn

HIDDEN = "_checkpoint_wrapped_module"
"""The name under which torch's ``checkpoint_wrapper`` has its module. State dicts leave it out."""

UNIT_KEY = "_flatshard_unit"
"""The key of a unit in the ``__dict__`` of its module."""

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""torch's attribute of a module with the names that ``DistributedDataParallel`` and tools like it leave alone."""


def plain_name(name: str) -> str:
    """Return a name from ``named_parameters()`` or ``named_modules()`` without what ``checkpoint_wrapper`` adds."""
    if HIDDEN not in name:
        return name
    return ".".join(part for part in name.split(".") if part != HIDDEN)


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return the name of each module in ``root``, and of ``root`` itself, by ``plain_name``."""
    return {module: plain_name(name) for name, module in root.named_modules()}
