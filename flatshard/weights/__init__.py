"""Weights of a model in training for other systems, such as inference engines: complete versions, bit for bit.

>>> sender = flatshard.weights.Sender(model, lambda receiver, message: print(receiver, len(message)))  # on each rank

Each rank sends the changes in its own shards straight to each receiver; no rank gathers anything. A receiver asks for full
parameters, or for regions of them, as for fused and tensor-parallel weights, and gets these elements only. The user
transports the messages: ``send`` is called with bytes, ``receive`` takes them. Messages may be lost, doubled, late and
damaged, and either side may restart: receivers ask again for missing data.
"""

from flatshard.weights._receiver import Applied, Receiver, Target
from flatshard.weights._sender import Sender

__all__ = ["Applied", "Receiver", "Sender", "Target"]
