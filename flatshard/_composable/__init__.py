"""Many units on a module tree: the choice of units, their order and their hooks. Has no buffers and no collectives."""
