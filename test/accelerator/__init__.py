"""A simulated accelerator, and the tests that train on it. See ``sim.py``."""
