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

    def seconds_of(self, collective: Collective, world_size: int) -> float:
        """The time of a recorded collective of a job with ``world_size`` ranks. Ranks of a shard group are consecutive."""
        per_node = self.gpus_per_node
        if collective.group == "replicas":  # each n-th rank, where n is the size of the shard group
            per_node = max(1, per_node // (world_size // collective.ranks))
        return self.seconds(collective.kind, collective.nbytes, collective.ranks, min(collective.ranks, per_node))


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step."""

    kind: str  # "all-gather", "reduce-scatter" or "all-reduce"
    unit: str  # FQN
    phase: str  # "forward" or "backward"
    nbytes: int  # of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    ranks: int
    group: str  # "shards", "inner" (the smaller group that a unit reshards to) or "replicas"

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends by a ring algorithm, rounded up."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * self.nbytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that takes time: computing, waiting, or a collective."""

    kind: str  # "compute", "wait", or the kind of collective
    unit: str
    phase: str
    start: float  # seconds since the beginning of the step
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """What runs at which time of a step."""

    spans: tuple[Span, ...]
    step_seconds: float

    def _seconds(self, *kinds: str) -> float:
        return sum(s.seconds for s in self.spans if s.kind in kinds)

    @property
    def compute_seconds(self) -> float:
        return self._seconds("compute")

    @property
    def communication_seconds(self) -> float:
        """The sum of the times of all collectives."""
        return self._seconds("all-gather", "reduce-scatter", "all-reduce")

    @property
    def exposed_seconds(self) -> float:
        """The time in which nothing is computed, because computing waits for communication."""
        return self._seconds("wait")

    @property
    def hidden_share(self) -> float | None:
        """The fraction of communication that runs during computing. None: no communication, or computing is not known."""
        if not self.communication_seconds or not self.compute_seconds:
            return None
        return max(0.0, 1 - self.exposed_seconds / self.communication_seconds)
