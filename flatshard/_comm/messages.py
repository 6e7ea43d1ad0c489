"""Where ranks find each other without collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def default_group() -> dist.ProcessGroup | None:
    """That of all ranks, if there is any."""
    return dist.group.WORLD if dist.is_initialized() else None


def membership(group: dist.ProcessGroup | None) -> tuple[int, int, Any]:
    """This process's rank in ``group``, its size, and the store by which its ranks find each other without collectives."""
    return (0, 1, None) if group is None else (group.rank(), group.size(), group.get_group_store())
