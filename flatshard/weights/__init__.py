"""Weights of a model in training for others, such as inference engines: versions, whole or not at all, bit for bit.

>>> sender = flatshard.weights.Sender(model, lambda receiver, message: print(receiver, len(message)))  # on each rank

Each rank sends what has changed in its own shards, straight to each receiver; no rank gathers anything. A receiver asks for
what it needs: whole parameters, or regions of them, as of fused and tensor-parallel weights. Then it gets these elements
only. How messages travel is the user's: ``send`` is called with bytes, ``receive`` takes them. They may be lost, doubled,
late and damaged, and either side may start anew: receivers ask again for what has not come.
"""

from flatshard.weights._receiver import Applied, Receiver, Target
from flatshard.weights._sender import Sender

__all__ = ["Applied", "Receiver", "Sender", "Target"]
