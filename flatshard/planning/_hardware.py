"""A model of the hardware: bandwidths, latencies, and the time that collectives and computing take.

[Note: The model of time]
- A collective of S bytes over N ranks is a ring. It takes ``(N - 1) / N * S / bandwidth + latency``, and an all-reduce twice
  as long. Within a node the bandwidth is ``intra``. Across nodes each of the m ranks of a node has a network card, and
  several rings use all cards: the bandwidth is ``min(intra, m * inter)``. A ring has N - 1 steps. (nodes - 1) of them are
  between nodes and take ``latency_inter``; the others take ``latency_intra``. This is NCCL's own tuning model
  (``src/graph/tuning.cc``).
- Collectives of one group run one after the other, in the order in which they are issued. Collectives of different groups
  (replicas, inner groups) run at the same time, each at full bandwidth.
- Work runs on the stream where the program enqueues it, and waits where the program waits.
- Computing takes ``flops / (bandwidths.flops * bandwidths.efficiency)``.
- Not modelled: the host, copies and casts, the optimizer's step, and that communication slows down computing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bandwidths:
    """The hardware, for modelled times. The default is a DGX H100 with one 400 Gb/s network card for each GPU.

    Raises:
        ValueError: a field is not a positive number.
    """

    intra: float = 450e9
    """Bytes per second that a GPU sends to other GPUs of its node. (NVLink 4 has 900 GB/s for both directions together.)"""
    inter: float = 50e9
    """Bytes per second that a GPU sends to other nodes. (400 Gb/s)"""
    gpus_per_node: int = 8
    latency_intra: float = 3.4e-6
    """Seconds per step of a ring within a node. (NCCL's constant for NVLink, Simple protocol.)"""
    latency_inter: float = 14e-6
    """Seconds per step of a ring between nodes. (NCCL's constant for networks, Simple protocol.)"""
    flops: float = 989e12
    """Peak operations per second of a GPU. (H100 SXM, dense, bf16.)"""
    efficiency: float = 0.5
    """The fraction of the peak that computing reaches. 0.5 is typical of a large language model; measure yours."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            what, kinds = ("int", int) if name == "gpus_per_node" else ("number", int | float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"Bandwidths: {name} must be a positive {what}, got {value!r}")

    def seconds(self, kind: str, nbytes: int, ranks: int, ranks_in_node: int) -> float:
        """The time of a collective over ``ranks`` ranks, with ``ranks_in_node`` in each node. [Note: The model of time]"""
        if ranks < 2:
            return 0.0
        nodes = -(-ranks // ranks_in_node)
        bandwidth = self.intra if nodes == 1 else min(self.intra, ranks_in_node * self.inter)
        latency = (ranks - nodes) * self.latency_intra + (nodes - 1) * self.latency_inter
        once = (ranks - 1) / ranks * nbytes / bandwidth + latency
        return 2 * once if kind == "all-reduce" else once
