"""Training that continues when ranks die: a model in training moves to other ranks, in memory.

>>> flatshard.elastic.redistribute(model, optimizer, process_group=dist.group.WORLD)

*Moving* (``redistribute``). Each rank derives from the old layout and the new one what it sends and receives, unit by unit.
Nothing goes to a disk, no rank has more than one full unit, and elements that stay on a rank are not sent. Modules,
parameters and optimizers stay the same objects.

*Copies*. When a step ends, each rank sends its shards to the next rank (on another host, if there is one), while the next
step computes. An optimizer's step waits until all ranks have their copies, and only then are older ones overwritten: one of
two generations is always complete.

*Continuing* (``World``, ``Job``). A dead rank ends gloo's connections, so the others fail in their next collective, and meet
at the store of the launcher. One compare-and-set at the store decides who continues, so no two groups train. These ranks make
new groups, move the newest complete generation to the new layout, copy it, and continue at its step. Until all have copied
it, they keep the older copies: a death during a recovery is one more death. A process that joins waits for the same meeting,
which ranks hold between two steps.

There is no public ``Copies``: a copy is of use only to ranks that agree on who is left and which generation is complete, and
on the moments of the loop at which to copy and to return to a copy. ``World`` and ``Job`` are that agreement.
"""

from typing import TYPE_CHECKING

from flatshard._base import old_names
from flatshard.elastic._epochs import ExcludedError
from flatshard.elastic._job import Job
from flatshard.elastic._reshard import LostShardsError, redistribute
from flatshard.elastic._world import World

if not TYPE_CHECKING:
    __getattr__ = old_names.attributes(
        __name__,
        old={
            "LostError": "LostShardsError",
            "OutError": "ExcludedError",
            "reshard_over": "redistribute",
        },
    )

__all__ = ["ExcludedError", "Job", "LostShardsError", "World", "redistribute"]
