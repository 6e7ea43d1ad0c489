"""Names of modules and parameters as state dicts have them."""

from __future__ import annotations

HIDDEN = "_checkpoint_wrapped_module"
"""What torch's ``checkpoint_wrapper`` calls the module inside of it. Its state dicts, and those around it, leave that out."""

UNIT_KEY = "_flatshard_unit"
"""Where a unit is in the ``__dict__`` of its module."""

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""torch's attribute of a module: the names that ``DistributedDataParallel`` and tools like it leave alone."""


def plain_name(name: str) -> str:
    """``name``, as of ``named_parameters()`` or ``named_modules()``, without what ``checkpoint_wrapper`` adds."""
    if HIDDEN not in name:
        return name
    return ".".join(part for part in name.split(".") if part != HIDDEN)
