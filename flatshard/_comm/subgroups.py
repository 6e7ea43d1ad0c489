"""Process groups of consecutive ranks of a group: for ``reshard_after_forward=k``."""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from flatshard import _trace
from flatshard._comm.backends import alive

_Subgroups = dict[tuple[str, tuple[int, ...]], weakref.ref[dist.ProcessGroup]]

# By id of the default group: the groups made by `subgroup`, by backend and ranks. The keys are the same on all ranks.
_subgroups: dict[int, tuple[weakref.ref[dist.ProcessGroup], _Subgroups]] = {}


def subgroup(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """A process group of the ``size`` consecutive ranks of ``group`` that contain this rank.

    Every rank of the world must call it at the same time, each with its own ``group``, because creating a group is
    collective over the world. The result is cached, and kept alive by the default group.
    """
    world = dist.group.WORLD
    assert world is not None
    ranks, known = dist.get_process_group_ranks(group), dist.get_world_size()
    rows = [[size, *ranks]]
    if len(ranks) < known:
        mine = torch.full((1 + known,), -1, dtype=torch.int64, device=device)
        mine[: 1 + len(ranks)] = torch.tensor(rows[0], device=device)
        every = [torch.empty_like(mine) for _ in range(known)]
        dist.all_gather(every, mine)
        rows = [[r for r in row if r >= 0] for row in torch.stack(every).tolist()]
    found = _subgroups.get(id(world))
    made = found[1] if found is not None and found[0]() is world else {}
    _subgroups[id(world)] = weakref.ref(world), made
    backend = str(dist.get_backend_config(group))
    for step, *others in sorted(map(tuple, rows)):
        for start in range(0, len(others), step):
            part = tuple(others[start : start + step])
            if (backend, part) not in made:
                new = dist.new_group(part, timeout=_timeout(group, device), backend=backend)
                made[backend, part] = weakref.ref(new if isinstance(new, dist.ProcessGroup) else world)  # am I in it?
    at = ranks.index(dist.get_rank()) // size * size
    return alive(made[backend, tuple(ranks[at : at + size])])


def _timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of ``group``. None if its backend does not tell: a process group written in Python may not."""
    try:
        options = getattr(group._get_backend(device), "options", None)
    except RuntimeError as e:
        _trace.logger.debug("the timeout of %s is not known: %s", group, e)
        return None
    return getattr(options, "_timeout", None)
