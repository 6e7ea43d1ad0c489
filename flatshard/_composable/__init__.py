"""Many units on a module tree: which modules, in which order, and the hooks. Touches no buffer, calls no collective."""
