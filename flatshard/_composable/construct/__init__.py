"""What happens once, at ``fully_shard``: arguments and their errors, values for parameters on the meta device."""
