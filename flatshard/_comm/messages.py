"""How ranks find each other without collectives: by their process group's store."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_initialized() else None


def membership(group: dist.ProcessGroup | None) -> tuple[int, int, Any]:
    """This process's rank in ``group``, the group's size, and the group's store."""
    return (0, 1, None) if group is None else (group.rank(), group.size(), group.get_group_store())
