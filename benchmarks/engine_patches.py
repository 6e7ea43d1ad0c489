"""Bytes and time to bring a step's changes to an inference engine, dense and sparse, over gloo on CPU.

    python benchmarks/engine_patches.py  # as in tried.md: --layers 16 --width 3950, by torchrun --nproc-per-node 4

The engine is beside rank 0, in bfloat16. Before each round a share of all elements changes by a few of their last bits, at
random places: 1 %, and all of them. "full_tensor" is the loop of verl and TRL: on all ranks ``value.full_tensor()`` for each
value of ``state_dict()``, and rank 0 copies it. "Sender" and "PatchSource" compare each rank's shards with what was sent, and
send messages to rank 0. There "Sender" writes into tensors, and "PatchSource" makes vLLM's patches and writes these.

Bytes are those of all messages, or of full tensors in bfloat16, over the bytes of the changed elements. vLLM's own transport
sends a patch as int32 numbers and values, which is the row "vLLM's patches". Seconds are until the slowest rank is done, with
the changes found and written. Ranks of one host share memory, so bytes cost nothing: ``links.py`` gives each rank a link.
The floor is the bytes of the changed elements alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

os.environ.setdefault("FLATSHARD_KEEP_MEMORY", "0")  # what one way has freed is for another, perhaps of another rank

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from suite import Benchmark, Figure, Table, by_column, progress, seconds_of_all, spread
from torch import nn
from weight_updates import Update, exchanged, summed

import flatshard

DENSE, SENDER, PATCHES, VLLM = "full_tensor", "weights.Sender", "weights.PatchSource", "vLLM's patches"
SHARES = {"1 %": 0.01, "all": 1.0}


class Patches:
    """An engine updated by patches."""

    def __init__(self, model: nn.Module, engine: dict[str, torch.Tensor]) -> None:
        self._source, self._engine = flatshard.weights.PatchSource(model, dtype=torch.bfloat16), engine
        self.sent = self.as_vllm = 0

    def __call__(self) -> None:
        message = self._source.encode_changes()
        self.sent = len(message)
        messages = [each[0] for each in exchanged([message], to=0)]
        del message
        if dist.get_rank() == 0:
            patches = flatshard.weights.decode_patches(messages.pop(0) for _ in range(dist.get_world_size()))
            flatshard.weights.apply_patches(self._engine, patches)
            self.as_vllm = sum(patch.indices.nbytes + patch.values.nbytes for patch in patches)


def full_tensors(model: nn.Module, engine: dict[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for name, value in model.state_dict().items():
            full = value.full_tensor()
            if dist.get_rank() == 0:
                engine[name].copy_(full)
            del full  # before the next one is gathered

    return run


def change(model: nn.Module, share: float, seed: int) -> int:
    """Change a share of this rank's elements by 1 to 3 %, about two of the last bits in bfloat16.

    Return the bytes of the elements that have changed in bfloat16.
    """
    generator, changed = torch.Generator().manual_seed(seed), 0
    with torch.no_grad():
        for param in model.parameters():
            flat = param.detach().view(-1)
            count = round(share * flat.numel())
            plain = torch.empty(flat.numel()).copy_(flat)
            before = plain.bfloat16()
            if share < 1:
                plain[torch.randint(flat.numel(), (count,), generator=generator)] *= 1.02
            else:
                plain *= 1.02
            param.copy_(plain.view(param.shape))
            changed += 2 * int((plain.bfloat16() != before).sum())
    return changed


def made(layers: int, width: int) -> nn.Module:
    """Make a sharded model without a full one, as ranks of one host have little memory."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    flatshard.fully_shard(model, policy={nn.Linear}).to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        nn.init.normal_(param, generator=torch.Generator().manual_seed(number * 100 + dist.get_rank()))
    return model


def engine_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return full tensors in bfloat16 on rank 0, and nothing on others."""
    full = flatshard.checkpoint.iter_full_params(model, bucket_bytes=1, dtype=torch.bfloat16)
    return {name: tensor for name, tensor in full if dist.get_rank() == 0}


def measure(args: argparse.Namespace) -> list[Table]:
    """Return the bytes and seconds of an update, for each way to send it."""
    model = made(args.layers, args.width)
    engines = [engine_of(model) for _ in range(2)]
    update, patches = Update(model), Patches(model, engines[1])
    ways = {DENSE: full_tensors(model, engines[0]), SENDER: update, PATCHES: patches}
    total, columns = args.layers * args.width**2 * 2, dict[str, dict[str, Figure]]()
    for title, share in SHARES.items():
        walls: dict[str, list[float]] = {name: [] for name in ways}
        nbytes: dict[str, list[float]] = {name: [] for name in (*ways, VLLM)}
        for number in range(args.rounds + 1):
            progress(f"{title} changed, round {number} of {args.rounds}")
            changed = int(summed(change(model, share, number * 100 + dist.get_rank())))
            for name in list(ways)[:: 1 - number % 2 * 2]:  # the order alternates, as the first finds cold caches
                walls[name].append(seconds_of_all(ways[name]))
            if dist.get_rank() == 0:
                assert all(torch.equal(engines[1][n], t) for n, t in engines[0].items())
                assert all(torch.equal(update.receiver.weights[n], t) for n, t in engines[0].items())
            sent = {DENSE: total, SENDER: summed(update.sent), PATCHES: summed(patches.sent), VLLM: patches.as_vllm}
            for name, count in sent.items():
                nbytes[name].append(count / max(changed, 1))
        columns[f"{title}: s"] = {name: spread(each[1:]) for name, each in walls.items()}
        columns[f"{title}: bytes over changed"] = {name: spread(each[1:]) for name, each in nbytes.items()}
        columns[f"{title}: MB"] = {n: Figure(each[-1] * max(changed, 1) / 1e6) for n, each in nbytes.items()}
    return [
        Table(
            "engine_patches",
            f"{total / 1e6:.0f} MB of weights to an engine beside rank 0, bfloat16 of float32, {dist.get_world_size()} gloo "
            f"ranks; medians of {args.rounds} rounds",
            "bytes over changed: 1, where the places of what has changed are known",
            by_column(columns),
            targets={PATCHES: {"1 %: bytes over changed": 1.7}},
        )
    ]


BENCHMARK = Benchmark(measure, __doc__, ranks=2, rounds=(3, 7), sizes={"layers": 4, "width": 1024})

if __name__ == "__main__":
    BENCHMARK.main()
