"""Process groups that are made of others: of some ranks of a group, and of all ranks of a mesh."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from flatshard import _torch
from flatshard._comm.backends import alive, builtin_collectives, timeout_of

_Made = dict[tuple[str, tuple[int, ...]], weakref.ref[dist.ProcessGroup]]

# By id of the default group, which keeps them alive: the groups made here, by backend and ranks.
_made: dict[int, tuple[weakref.ref[dist.ProcessGroup], _Made]] = {}


def _made_before() -> tuple[dist.ProcessGroup, _Made]:
    """The default group, and the groups made since it exists."""
    world = dist.group.WORLD
    assert world is not None
    found = _made.get(id(world))
    made = found[1] if found is not None and found[0]() is world else {}
    _made[id(world)] = weakref.ref(world), made
    return world, made


def subgroup(group: dist.ProcessGroup, size: int, device: torch.device) -> dist.ProcessGroup:
    """A process group of the ``size`` consecutive ranks of ``group`` that contain this rank.

    Every rank of the world must call it at the same time, each with its own ``group``, because creating a group is
    collective over the world. The result is cached.
    """
    ranks, known = dist.get_process_group_ranks(group), dist.get_world_size()
    rows = [[size, *ranks]]
    if len(ranks) < known:
        mine = torch.full((1 + known,), -1, dtype=torch.int64, device=device)
        mine[: 1 + len(ranks)] = torch.tensor(rows[0], device=device)
        every = [torch.empty_like(mine) for _ in range(known)]
        dist.all_gather(every, mine)
        rows = [[r for r in row if r >= 0] for row in torch.stack(every).tolist()]
    (world, made), backend = _made_before(), str(dist.get_backend_config(group))
    for step, *others in sorted(map(tuple, rows)):
        for start in range(0, len(others), step):
            part = tuple(others[start : start + step])
            if (backend, part) not in made:
                new = dist.new_group(part, timeout=timeout_of(group, device), backend=backend)
                made[backend, part] = weakref.ref(new if isinstance(new, dist.ProcessGroup) else world)  # am I in it?
    at = ranks.index(dist.get_rank()) // size * size
    return alive(made[backend, tuple(ranks[at : at + size])])


def joined(inner: dist.ProcessGroup, outer: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """The process group of all ranks of a mesh, inner rank by inner rank: they call it together, nobody else need.

    ``inner``, ``outer``: those of this rank. The result is cached, and has the timeout of ``inner``.

    Before torch 2.15, ranks that are a part of the world must be in equally many groups: by this number torch names the new
    group, and where names differ, ranks wait for each other in vain.
    """
    if 1 in (dist.get_world_size(inner), dist.get_world_size(outer)):
        return inner if dist.get_world_size(outer) == 1 else outer
    size, rank = dist.get_world_size(outer), dist.get_rank(outer)
    rows = torch.tensor(dist.get_process_group_ranks(inner), device=device).repeat(size, 1)
    if builtin_collectives(outer, device).imitates:  # it sends nothing
        first = torch.tensor(dist.get_process_group_ranks(outer), device=device)
        rows += (first - first[rank]).unsqueeze(1)
    else:
        dist.all_gather_into_tensor(rows.view(-1), rows[rank].clone(), group=outer)
    ranks, backend = rows.t().flatten().tolist(), str(dist.get_backend_config(inner))
    timeout = timeout_of(inner, device)
    (_, made), key = _made_before(), (f"{backend}, {timeout}", tuple(ranks))
    if ranks != sorted(ranks) and not _torch.UNSORTED:
        raise NotImplementedError(
            "HYBRID_FULL_SHARD needs torch 2.12 or later, as this one sorts the ranks of a new group. Use HYBRID_SHARD"
        )
    if key not in made:
        is_part = len(ranks) < dist.get_world_size()  # the other ranks of the world don't call this
        new = dist.new_group(ranks, timeout, backend, use_local_synchronization=is_part, **_torch.UNSORTED)
        assert isinstance(new, dist.ProcessGroup)
        made[key] = weakref.ref(new)
    return alive(made[key])
