"""Send weights from ranks that train to an inference engine: only what has changed, and nothing is gathered.

    python weights.py        # two ranks that train, and a process with the engine's tensors, on this machine

Queues carry the messages here. Any other means will do, and may lose and double messages: the receiver asks again.
"""

import multiprocessing
import os
import queue
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch needs none here

import torch
import torch.distributed as dist
from torch import nn

import flatshard

RANKS, VERSIONS = 2, 5


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1000))


def train(rank, port, inbox, to_engine):
    """Train as one rank, and publish the weights after each step."""
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = flatshard.fully_shard(build(), policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    sender = flatshard.weights.Sender(model, lambda engine, message: to_engine.put(message), dtype=torch.bfloat16)
    while 0 not in sender.versions.values():  # until the engine has the first version, so that it sees the others come
        answer(sender, inbox, seconds=0.1)
    for step in range(VERSIONS):
        words = torch.randint(1000, (8, 16), generator=torch.Generator().manual_seed(step * RANKS + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        sender.publish()
        is_done = answer(sender, inbox, seconds=0.1)  # in a real job between two steps, or in a thread
    while not is_done:  # until the engine has the newest version
        is_done = answer(sender, inbox, seconds=1)
    values = flatshard.checkpoint.full_state_dict(model, dtype=torch.bfloat16)  # only to compare: gathers on all ranks
    if rank == 0:
        print(f"the model's weights:  sum {total(values)!r}", flush=True)
    to_engine.cancel_join_thread()  # the engine reads no more
    dist.destroy_process_group()


def answer(sender, inbox, seconds):
    """Hand the engine's messages to the sender, for so long. Return whether the engine says that it is done."""
    try:
        while (message := inbox.get(timeout=seconds)) is not None:
            sender.receive(message)
    except queue.Empty:
        return False
    return True


def main():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ["PYTHONWARNINGS"] = (
        "ignore:Failed to initialize NumPy"  # for the process that imports torch for all ranks
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "flatshard.weights"])
    to_engine, inboxes = context.Queue(), [context.Queue() for _ in range(RANKS)]
    ranks = [
        context.Process(target=train, args=(rank, store.port, inbox, to_engine)) for rank, inbox in enumerate(inboxes)
    ]
    for rank in ranks:
        rank.start()

    weights = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in build().state_dict().items()}
    print(f"the engine's weights have {sum(value.nbytes for value in weights.values()):,} bytes", flush=True)
    receiver = flatshard.weights.Receiver(weights, lambda rank, message: inboxes[rank].put(message))
    receiver.poll()  # asks for what is missing: now, and when nothing has come for a while
    nbytes, version = 0, -1
    while version < VERSIONS:
        try:
            message = to_engine.get(timeout=0.5)
            receiver.receive(message)
            nbytes += len(message)
        except queue.Empty:
            receiver.poll()
        applied = receiver.apply()  # between two steps of the engine: the newest complete version, if there is one
        if applied is not None:
            version = applied.version
            print(f"version {version}: {nbytes:>7,} bytes have come", flush=True)
            nbytes = 0
    print(f"the engine's weights: sum {total(weights)!r}", flush=True)
    for inbox in inboxes:
        inbox.put(None)  # the engine is done
    for rank in ranks:
        rank.join()
    return max(rank.exitcode for rank in ranks)


def total(values):
    return sum(value.double().sum().item() for value in values.values())


if __name__ == "__main__":
    raise SystemExit(main())
