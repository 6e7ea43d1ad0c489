"""How long a walked step takes, by a model of the hardware: bandwidths and latencies, one compute stream, ordered channels.

[Note: The model of time]
- A collective of S bytes over N ranks is a ring: ``(N - 1) / N * S / bandwidth + latency``, an all-reduce twice that. The
  bandwidth of a ring within a node is ``intra``. Across nodes each of the m ranks in a node has a network card, and rings
  run side by side through all of them: ``min(intra, m * inter)``. The latency is that of N - 1 steps, of which (nodes - 1)
  are between nodes, each taking ``latency_inter``, and the others ``latency_intra``: as NCCL's own tuning model has it
  (``src/graph/tuning.cc``).
- Collectives of one group run one after the other, in the order in which they are issued, as those of one communicator do.
  Those of different groups (replicas, the ranks resharded to) run beside them, at full bandwidth.
- An all-gather starts when the unit that was freed last is freed (``_runtime.py``, [Note: Memory follows the streams]) and a
  reduction when the gradients are there. The compute stream waits where the hooks wait.
- Computing takes ``flops / (bandwidths.flops * bandwidths.efficiency)``. Not modelled are the host, copies and casts, the
  optimizer's step, and that communication slows down what computes beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatshard._plan_actions import Action, Collective, Verb


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

    def seconds_of(self, collective: Collective, shards: int) -> float:
        """The same, of a collective of a step sharded over groups of ``shards`` consecutive ranks."""
        per_node = self.gpus_per_node
        if collective.group == "replicas":  # every `shards`-th rank
            per_node = max(1, per_node // shards)
        return self.seconds(collective.kind, collective.nbytes, collective.ranks, min(collective.ranks, per_node))

    def compute_seconds(self, flops: int) -> float:
        """Of computing."""
        return flops / (self.flops * self.efficiency)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs for a while."""

    kind: str  # "compute", "wait", or of a collective
    unit: str
    phase: str
    start: float  # seconds from the step's begin
    stop: float


@dataclass(frozen=True)
class Timeline:
    """When what runs."""

    spans: tuple[Span, ...]
    starts: tuple[float, ...]  # of each action, on the compute stream
    step_seconds: float
    compute_seconds: float
    communication_seconds: float  # of all collectives, one after the other
    exposed_seconds: float  # in which nothing computes, as it waits for communication

    @property
    def hidden_share(self) -> float | None:
        """The part of communication that runs beside computing. None: there is no communication, or no computing known."""
        if not self.communication_seconds or not self.compute_seconds:
            return None
        return max(0.0, 1 - self.exposed_seconds / self.communication_seconds)


def run_through(actions: Sequence[Action], names: Sequence[str], bandwidths: Bandwidths, shards: int) -> Timeline:
    """Run ``actions`` through the model. ``names``: of the units."""
    now = freed = compute = communication = exposed = 0.0
    free_at: dict[str, float] = {}  # when a group's channel is free
    ends: list[float] = []
    spans: list[Span] = []
    starts: list[float] = []
    for action in actions:
        starts.append(now)
        name = names[action.unit]
        if action.verb is Verb.COMPUTE:
            seconds = bandwidths.compute_seconds(action.flops)
            if seconds:
                spans.append(Span("compute", name, action.phase, now, now + seconds))
            now += seconds
            compute += seconds
        elif action.verb is Verb.COLLECTIVE:
            assert action.collective is not None
            wanted = action.collective
            ready = freed if wanted.kind == "all-gather" else now
            if action.after >= 0:
                ready = max(ready, ends[action.after])
            start = max(ready, free_at.get(wanted.group, 0.0))
            seconds = bandwidths.seconds_of(wanted, shards)
            communication += seconds
            ends.append(start + seconds)
            free_at[wanted.group] = start + seconds
            spans.append(Span(wanted.kind, name, action.phase, start, start + seconds))
        elif action.verb is Verb.WAIT:
            if ends[action.after] > now:
                spans.append(Span("wait", name, action.phase, now, ends[action.after]))
                exposed += ends[action.after] - now
                now = ends[action.after]
        else:  # a unit is freed, or a pass begins
            freed = max(freed, now)
    return Timeline(tuple(spans), tuple(starts), now, compute, communication, exposed)
