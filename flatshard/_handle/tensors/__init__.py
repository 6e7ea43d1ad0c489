"""What the user sees of a flat parameter: sharded parameters and gradients, and numbers that are partial."""
