"""How long things take: a model of bandwidths and latencies.

[Note: The model of time]
- A collective of S bytes over N ranks is a ring: ``(N - 1) / N * S / bandwidth + latency``, an all-reduce twice that. The
  bandwidth of a ring within a node is ``intra``. Across nodes each of the m ranks in a node has a network card, and rings
  run side by side through all of them: ``min(intra, m * inter)``. The latency is that of N - 1 steps, of which (nodes - 1)
  are between nodes, each taking ``latency_inter``, and the others ``latency_intra``: as NCCL's own tuning model has it
  (``src/graph/tuning.cc``).
- Collectives of one group run one after the other, in the order in which they are issued, as those of one communicator do.
  Those of different groups (replicas, the ranks resharded to) run beside them, at full bandwidth.
- Work runs on the streams that the program enqueues it on, and waits where the program waits.
- Computing takes ``flops / (bandwidths.flops * bandwidths.efficiency)``. Not modelled are the host, copies and casts, the
  optimizer's step, and that communication slows down what computes beside it.
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
    """Bytes a second that a GPU sends to others of its node: NVLink 4 has 900 GB/s in both directions together."""
    inter: float = 50e9
    """Bytes a second of a GPU's share of the network between nodes: 400 Gb/s."""
    gpus_per_node: int = 8
    latency_intra: float = 3.4e-6
    """Seconds of a step of a ring within a node: NCCL's constant for NVLink (Simple protocol)."""
    latency_inter: float = 14e-6
    """Seconds of a step between nodes: NCCL's constant for networks (Simple protocol)."""
    flops: float = 989e12
    """Of a GPU a second, at the peak: H100 SXM, dense, bf16."""
    efficiency: float = 0.5
    """The part of it that is reached while computing. 0.5 is a large language model's; measure your own."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            whole = name != "gpus_per_node" or isinstance(value, int)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not whole:
                kind = "number" if name != "gpus_per_node" else "int"
                raise ValueError(f"Bandwidths: {name} must be a positive {kind}, got {value!r}")

    def seconds(self, kind: str, nbytes: int, ranks: int, ranks_in_node: int) -> float:
        """Of a collective over ``ranks`` ranks, ``ranks_in_node`` of which share a node. [Note: The model of time]"""
        if ranks < 2:
            return 0.0
        nodes = -(-ranks // ranks_in_node)
        bandwidth = self.intra if nodes == 1 else min(self.intra, ranks_in_node * self.inter)
        latency = (ranks - nodes) * self.latency_intra + (nodes - 1) * self.latency_inter
        once = (ranks - 1) / ranks * nbytes / bandwidth + latency
        return 2 * once if kind == "all-reduce" else once

    def seconds_of(self, collective: Collective, world_size: int) -> float:
        """The same, of a collective of a step over ``world_size`` ranks. Those sharded over are consecutive."""
        per_node = self.gpus_per_node
        if collective.group == "replicas":  # each n-th rank, where n share what is replicated; all under NO_SHARD
            per_node = max(1, per_node // (world_size // collective.ranks))
        return self.seconds(collective.kind, collective.nbytes, collective.ranks, min(collective.ranks, per_node))

    def compute_seconds(self, flops: int) -> float:
        """Of computing."""
        return flops / (self.flops * self.efficiency)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step."""

    kind: str  # "all-gather", "reduce-scatter" or "all-reduce"
    unit: str  # FQN
    phase: str  # "forward" or "backward"
    nbytes: int  # of the whole: an all-gather's output, a reduce-scatter's input, an all-reduce's tensor
    ranks: int
    group: str  # "shards", "inner" (the ranks that a unit reshards to) or "replicas"

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends by a ring algorithm, rounded up."""
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * self.nbytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs for a while."""

    kind: str  # "compute", "wait", or of a collective
    unit: str
    phase: str
    start: float  # seconds from the step's begin
    stop: float

    @property
    def seconds(self) -> float:
        return self.stop - self.start


@dataclass(frozen=True)
class Timeline:
    """When what runs in a step."""

    spans: tuple[Span, ...]
    step_seconds: float

    def _seconds(self, *kinds: str) -> float:
        return sum(s.seconds for s in self.spans if s.kind in kinds)

    @property
    def compute_seconds(self) -> float:
        return self._seconds("compute")

    @property
    def communication_seconds(self) -> float:
        """Of all collectives, one after the other."""
        return self._seconds("all-gather", "reduce-scatter", "all-reduce")

    @property
    def exposed_seconds(self) -> float:
        """In which nothing computes, as it waits for communication."""
        return self._seconds("wait")

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that runs beside computing. None: there is no communication, or no computing known."""
        if not self.communication_seconds or not self.compute_seconds:
            return None
        return max(0.0, 1 - self.exposed_seconds / self.communication_seconds)
