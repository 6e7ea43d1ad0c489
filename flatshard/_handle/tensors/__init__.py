"""The tensors that the user sees: sharded parameters and gradients, and numbers that only cover this rank's shard."""
