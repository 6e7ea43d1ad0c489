"""Live bytes of memory in a training step, and between steps, over what they have to be.

    python benchmarks/memory.py

A GPT of 12 blocks, the fake group of 8, forward, backward and a step of AdamW (foreach). Bytes are those of all storages
that are live, counted exactly around every operation (``LiveBytes`` in ``counting.py``); Python's collector is off.

The floor of the peak: this rank's shards of parameters, gradients and AdamW's two moments (4 P / 8 in float32), two whole
units (the one in work and the one that is gathered ahead, in the dtype that they compute in; one without prefetch... see
``UNITS``), and what a plain model in that dtype has live beyond its parameters at the most, when each of its gradients is
dropped as soon as it is made. The floor between steps: the shards, gradients and moments alone.
"""

from __future__ import annotations
