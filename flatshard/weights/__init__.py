"""Weights of a model in training for other systems, such as inference engines: complete versions, bit for bit.

>>> sender = flatshard.weights.Sender(model, lambda receiver, message: print(receiver, len(message)))  # on each rank

Each rank sends the changes in its own shards straight to each receiver; no rank gathers anything. A receiver asks for full
parameters, or for regions of them, as for fused and tensor-parallel weights, and gets these elements only. The user
transports the messages: ``send`` is called with bytes, ``receive`` takes them. Messages may be lost, doubled, late and
damaged, and either side may restart: receivers ask again for missing data.

For engines that take elements by their numbers in the full parameter, a :class:`PatchSource` makes a message of each rank's
changes, and :func:`decode_patches` makes patches of all ranks' messages.
"""

from typing import TYPE_CHECKING

from flatshard._base import old_names
from flatshard.weights._patches import Patch, PatchSource, apply_patches, decode_patches
from flatshard.weights._receiver import AppliedVersion as AppliedVersion
from flatshard.weights._receiver import Receiver, Target
from flatshard.weights._sender import Sender

if not TYPE_CHECKING:
    __getattr__ = old_names.attributes(__name__, old={"Applied": "AppliedVersion"})

__all__ = ["Patch", "PatchSource", "Receiver", "Sender", "Target", "apply_patches", "decode_patches"]
