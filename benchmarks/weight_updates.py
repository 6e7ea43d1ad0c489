"""Time to bring the weights of a model in training to an inference engine, compared with a full gather, over gloo on CPU.

    python benchmarks/weight_updates.py

The engine is beside rank 0, in bfloat16. Every round trains a step of AdamW; then each contender updates the engine. "full
gather" runs ``iter_full_params`` on all ranks, and rank 0 copies each tensor. "flatshard.weights" finds changes on each rank,
sends them to rank 0, and writes them there. The number of changes depends on the learning rate: columns range from
reinforcement learning's to pretraining's. Ranks of one host share memory, so bytes cost nothing; with ``links.py`` each rank
has a network link of limited bandwidth.

Seconds are until the slowest rank is done. CPU is the sum over all ranks. Bytes are those that ranks send to the engine, with
headers, relative to all weights, and to the elements that changed. The latter is the floor, if their positions were known.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from contenders import Job, Setting
from gpt import Block, GPTConfig
from suite import Benchmark, Figure, Table, by_column, over, progress, seconds_of_all, spread
from torch import Tensor

import flatshard
from flatshard.checkpoint._container import memory_of

RATES = (1e-6, 1e-5, 1e-4)
GATHER, OURS = "full gather", "flatshard.weights"


class Update:
    """An engine updated by messages to rank 0, all of a rank's in one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._out: list[bytes] = []
        self._asked: list[tuple[int, bytes]] = []
        self.sent = 0
        self.sender = flatshard.weights.Sender(model, self._send, dtype=torch.bfloat16)
        self.receiver = flatshard.weights.Receiver(None, lambda rank, message: self._asked.append((rank, message)))
        for _ in range(2):
            self._ask()
            self._bring()
        self.receiver.apply()

    def _send(self, name: object, message: bytes) -> None:
        self._out.append(message)

    def _ask(self) -> None:
        """Send rank 0's requests to all ranks."""
        if dist.get_rank() == 0:
            self.receiver.poll()
        questions = exchanged([b"%d " % rank + message for rank, message in self._asked])
        self._asked.clear()
        for question in questions[0]:
            rank, _, message = bytes(question).partition(b" ")
            if int(rank) == dist.get_rank():
                self.sender.receive(message)

    def _bring(self) -> None:
        """Send all ranks' messages to rank 0."""
        self.sent = sum(map(len, self._out))
        for messages in exchanged(self._out, to=0):
            for message in messages:
                self.receiver.receive(message)
        self._out.clear()

    def __call__(self) -> None:
        self.sender.publish()
        self._bring()
        if dist.get_rank() == 0:
            applied = self.receiver.apply()
            assert applied is not None
            assert applied.version == self.sender.version


def exchanged(messages: list[bytes], to: int | None = None) -> list[list[memoryview]]:
    """Return each rank's messages, on rank ``to``, or on all ranks if it is None."""
    lengths = torch.tensor([len(message) for message in messages], dtype=torch.int64)
    counts = gathered(torch.tensor([len(lengths)]))
    tables = gathered(padded(lengths, int(max(counts))))
    sizes = [int(table.sum()) for table in tables]
    mine = torch.frombuffer(bytearray().join(messages) or bytearray(1), dtype=torch.uint8)[: int(lengths.sum())]
    if to is None:
        rows = gathered(padded(mine, max(sizes)))
    else:
        rows = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        rows[dist.get_rank()] = mine
        if dist.get_rank() == to:
            for rank in [rank for rank in range(len(rows)) if rank != to and sizes[rank]]:
                dist.recv(rows[rank], rank)
        else:
            if sizes[dist.get_rank()]:
                dist.send(mine, to)
            return []
    return [
        [memory_of(part) for part in row[:size].split(table[: int(count)].tolist())]
        for row, size, table, count in zip(rows, sizes, tables, counts, strict=True)
    ]


def gathered(row: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return rows


def padded(row: Tensor, size: int) -> Tensor:
    return torch.cat([row, row.new_zeros(size - len(row))])


def full_gather(model: torch.nn.Module, engine: dict[str, Tensor]) -> Callable[[], None]:
    def run() -> None:
        for name, tensor in flatshard.checkpoint.iter_full_params(model, dtype=torch.bfloat16):
            if dist.get_rank() == 0:
                engine[name].copy_(tensor)

    return run


def summed(value: float) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def measure(args: argparse.Namespace) -> list[Table]:
    columns: dict[str, dict[str, Figure]] = {}
    for rate in RATES:
        torch.manual_seed(0)
        tokens = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
        config = GPTConfig(256, 64, args.layers, args.width, heads=8)
        job = Job("flatshard", config, Setting(Block), tokens, lambda params: torch.optim.AdamW(params, lr=rate))  # noqa: B023
        engine = dict(flatshard.checkpoint.iter_full_params(job.model, dtype=torch.bfloat16))
        ways = {GATHER: full_gather(job.model, engine), OURS: (update := Update(job.model))}
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        over_changed, over_all = [], []
        total = sum(t.nbytes for t in engine.values())
        for number in range(args.rounds + 1):
            progress(f"learning rate {rate:g}, round {number} of {args.rounds}")
            job.step()
            before = {n: t.clone() for n, t in engine.items()}
            for name in list(ways)[:: 1 - number % 2 * 2]:
                cpu = time.process_time()
                wall = seconds_of_all(ways[name])
                spent[name].append((wall, summed(time.process_time() - cpu)))
            changed = sum(int((t != before[n]).sum()) * t.itemsize for n, t in engine.items())
            if dist.get_rank() == 0:
                assert all(torch.equal(update.receiver.weights[n], t) for n, t in engine.items())
            over_all.append(summed(update.sent) / total)
            over_changed.append(over_all[-1] * total / max(changed, 1))
        for name, times in spent.items():
            walls, cpus = ([each[i] for each in times[1:]] for i in (0, 1))
            base = [[each[i] for each in spent[GATHER][1:]] for i in (0, 1)]
            columns.setdefault(f"lr {rate:g}: s", {})[name] = spread(walls)
            columns.setdefault(f"lr {rate:g}: over the gather", {})[name] = over(walls, base[0])
            columns.setdefault(f"lr {rate:g}: CPU over it", {})[name] = over(cpus, base[1])
        columns[f"lr {rate:g}: bytes over all"] = {GATHER: Figure(1.0), OURS: spread(over_all[1:])}
        columns[f"lr {rate:g}: over changed"] = {OURS: spread(over_changed[1:])}
    rows = by_column({name: column for name, column in columns.items() if column})
    return [
        Table(
            "weight_updates",
            f"weights of a GPT of {args.layers} blocks of width {args.width} to an engine beside rank 0, bfloat16 of "
            f"float32, {dist.get_world_size()} gloo ranks; medians of {args.rounds} rounds",
            "bytes over changed: 1, where the places of what has changed are known",
            rows,
            targets={OURS: {f"lr {rate:g}: over changed": 1.6 for rate in RATES}},
            digits=3,
        )
    ]


BENCHMARK = Benchmark(measure, __doc__, ranks=4, rounds=(5, 11), sizes={"layers": 4, "width": 512})

if __name__ == "__main__":
    BENCHMARK.main()
