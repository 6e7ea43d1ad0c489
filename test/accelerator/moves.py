"""Jobs whose ranks fail on the simulated accelerator: the copies from which they continue are complete."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerator.harness import Cases, Env, mean_square, numbers, sgd

import flatshard
from flatshard import CPUOffload, MixedPrecision
from flatshard import ShardingStrategy as S
from flatshard._comm.process_groups import interrupt
from flatshard.elastic import _copies
from flatshard.elastic._epochs import Epochs, Member
from flatshard.elastic._exchange import Channel
from flatshard.elastic._world import World

cases = Cases()


class HereEpochs(Epochs):
    """Epochs of surviving ranks, which meet in collectives, without a store."""

    def __init__(self, env: Env) -> None:
        self.number, self.has_ended = 0, False
        self.members = [Member(rank, "here", rank, ("", 0)) for rank in range(env.size)]
        self.me, self.everyone = self.members[env.rank], env.group

    def is_called(self) -> bool:
        return False

    def check_alive(self, ranks: Iterable[int]) -> None: ...

    def meet(self, note: Any) -> list[tuple[Member, Any]]:
        return list(zip(self.members, Channel(self.everyone, torch.device("cpu")).objects(note), strict=True))

    def finish(self) -> bool:
        self.has_ended = True
        return True


class Here(World):
    """A world whose ranks fail together, meet, and continue in new groups."""

    def __init__(self, env: Env) -> None:
        self.timeout, self.epochs = timedelta(seconds=20), HereEpochs(env)
        self.form(0, self.epochs.members)

    def form(self, epoch: int, members: list[Member]) -> None:
        self.epochs.number, self.epochs.members = epoch, members
        self.here = dist.new_group(timeout=self.timeout)
        self.copies_group = dist.new_group(backend="gloo", timeout=self.timeout)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.here

    def abort(self) -> None:
        if self.copies_group is not None:
            interrupt(self.copies_group)
        self.copies_group = None

    def fail(self, text: str) -> None:
        self.epochs.has_ended = True

    def hang_up(self) -> None: ...


def lost_connection(*_: Any) -> None:
    raise RuntimeError("gloo: connection lost")


def lose_answer(channel: Any) -> None:
    gather = channel.gather

    def lost(*args: Any) -> None:
        gather(*args)
        lost_connection()

    channel.gather = lost


@cases.add(
    {
        "full": {},
        "optim_mixed": {"strategy": S.SHARD_OPTIM, "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
        "offloaded": {"cpu_offload": CPUOffload()},
    },
    fake=False,
    ranks=4,
    rtol=2e-2,
    atol=2e-3,
)
@mock.patch.object(_copies, "_PIECE", 256)  # bytes: fewer than most shards have
def job(env: Env, **options: Any) -> dict[str, Any]:
    """Fail steps on the device during copies to the host, gathers or reductions; on CPU none fails.

    The host does not wait when copies begin. It keeps three times its shards, and two small send buffers.
    """
    world = Here(env)
    model = env.shard(env.make(), process_group=world.process_group, **options)
    optimizer = sgd(model.parameters())
    made = flatshard.elastic.Job(world, model, optimizer, log=lambda _: None)
    fails, take, kept = {1, 2, 3, 4, 5} if env.is_simulated else set(), made._copies.take, list[int]()

    def take_at_once(*args: Any) -> None:
        from accelerator.machine import lines_of
        from accelerator.sim import sim

        before = len(sim.host_syncs)
        take(*args)
        for why, stack in sim.host_syncs[before:]:
            if any(line.endswith(" take") for line in lines_of(stack)):  # waits of the thread are allowed
                env.problems.append("\n    ".join([f"the host waits: {why}", *lines_of(stack)[:8]]))

    if env.is_simulated and "cpu_offload" not in options:
        made._copies.take = take_at_once  # type: ignore[method-assign]
    for step in made.steps(range(6)):
        with made.attempt():
            failing = fails & {step}
            fails -= failing
            if step == 1 and failing:
                lost_connection()
            hook = model.blocks[1].register_forward_pre_hook(lost_connection) if step == 2 and failing else None
            try:
                optimizer.zero_grad()
                output = model(env.batch(step))
                loss = mean_square(output)
                if step == 4 and failing:
                    output.register_hook(lost_connection)
                kept.append(made.copied_nbytes)
                loss.backward()
            finally:
                if hook is not None:
                    hook.remove()
            if step == 3 and failing:
                lost_connection()
            optimizer.step()
            if step == 4 and 5 in fails and env.rank == 1:  # only this rank does not learn that all have their copies
                lose_answer(made._copies._channel)
            if step == 5 and failing:
                if env.rank == 3:  # like a replacement, this rank receives another rank's copies
                    made._copies.forget()
                lost_connection()
    newest = made._copies.generation
    assert newest is not None
    assert newest.own is not None
    values = [v for p in model.parameters() for v in (p, optimizer.state[p]["momentum_buffer"])]
    assert newest.own.nbytes <= sum(v.nbytes + 15 for v in values)  # each begins at a multiple of 16
    buffers = 2 * 256 if env.is_simulated and "cpu_offload" not in options else 0
    assert max(kept) <= 3 * max(image.nbytes for image in (newest.own, *newest.others)) + buffers
    return numbers(model)
