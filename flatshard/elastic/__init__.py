"""A rank dies, and training goes on: a model in training moves to other ranks, in memory.

>>> flatshard.elastic.reshard_over(model, optimizer, process_group=dist.group.WORLD)

Three parts, each on the one before.

*Moving* (``reshard_over``). A rank's state is a few contiguous buffers, and any other cut of them is arithmetic on ranges.
Each rank finds by the two cuts what it sends and receives, unit by unit. Nothing goes to a disk, no rank has more than one
unit whole, and what two cuts have in common on a rank is not sent. Modules, parameters and optimizers stay the same
objects.

*Copies*. When a step ends, each rank sends its parts to the next rank (on another host, where there is one), while the next
step computes. An optimizer's step waits until all ranks have their copies, and only then older ones go: of two generations
one is always whole. A rank keeps three times its parts in host memory for one copy, also with an accelerator.

*Going on* (``World``, ``Job``). A dead rank ends gloo's connections, so the others fail in their next collective. They end
the connections of all their groups, which reaches all at once, and meet at the store of the launcher. A rank that did not
come is dead if its port is closed; one that is stopped or cut off is out when it has not come for ``patience`` seconds. One
compare-and-set at the store decides who is in the next epoch, so no two groups train on. Those make new groups, move the
newest whole generation from their own copies and those of the dead to the new cut, copy it, and go on at its step. Until
all have copied it, they keep the older copies: a death during a recovery is one more death, and begins it anew. A process
that joins waits for the same meeting, which ranks hold between two steps.

Why there is no public ``Copies``: a copy is of use only to ranks that agree on who is left and which generation is whole,
which ``World`` is for. When to take one, when it is whole and when to go back to it are moments of the loop, which is
``Job``'s.

What is survived: the death of any rank, rank 0 included, and of ``copies`` neighbours at once, at any time after the first
copies; and of more, if there is a checkpoint. What is not: the store (it belongs into the launcher); a death before the first
step has begun; a process that is stopped, while others wait for it in a group that somebody gave a longer timeout than
``patience``. An error of one's own ends the job on all ranks, also outside of ``attempt``. What has been tried: gloo on CPU,
and a simulated accelerator. What has not: NCCL, several hosts.
"""

from flatshard.elastic._epochs import OutError
from flatshard.elastic._job import Job
from flatshard.elastic._reshard import LostError, reshard_over
from flatshard.elastic._world import World

__all__ = ["Job", "LostError", "OutError", "World", "reshard_over"]
