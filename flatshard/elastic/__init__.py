"""A model in training moves to other ranks, in memory: fewer, more, or others.

>>> flatshard.elastic.reshard_over(model, optimizer, process_group=group)

A rank's state is a few contiguous buffers, and any other cut of them is arithmetic on ranges. So nothing goes to a disk, no
rank has more than one unit whole, and what two cuts have in common on a rank is not sent.
"""

from flatshard.elastic._reshard import LostError, reshard_over

__all__ = ["LostError", "reshard_over"]
