"""Jobs whose processes are killed, stopped or added while they train, and the equivalent run in one process."""

import contextlib
import ctypes
import functools
import gc
import mmap
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from models import NormBlock, NormNet
from pool import PRELOAD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard._comm.backends import GlooCollectives
from flatshard._comm.runtime import Runtime
from flatshard.checkpoint import _disk, _writer
from flatshard.elastic import Job, World, _checkpoints, _copies, _reshard
from flatshard.elastic._epochs import Epochs

STEPS = 6
ROWS = 12

POINTS: dict[str, list[tuple[Any, str]]] = {
    "step": [(Runtime, "all_gather"), (Runtime, "reduce_scatter"), (torch.optim.AdamW, "step")],
    "copies": [(_copies.Copies, name) for name in ("take", "_send", "_fill", "commit", "_keep")],
    "saving": [
        (_checkpoints.Checkpoints, "save"),
        (_checkpoints.Checkpoints, "wait"),
        (_writer, "write"),
        (_disk.NewFile, "flush"),
        (_disk.NewDirectory, "publish"),
    ],
    "recovery": [
        (Epochs, "meet"),
        (World, "form"),
        (Epochs, "_propose"),
        (_reshard.Move, "_move_unit"),
        (_reshard, "set_common"),
        (_copies.Copies, "go_back"),
    ],
    "end": [(Epochs, "finish"), (Epochs, "_mark")],
}
"""Phases with their functions: a rank may die before and after each call of one."""


def network(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return NormNet(blocks=2, width=width).double()


def train(model: nn.Module, optimizer: Any, scheduler: Any, step: int, rank: int, size: int) -> None:
    """Train a step."""
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    optimizer.zero_grad()
    (model(x.chunk(size)[rank]) - x.mean()).square().mean().backward()
    optimizer.step()
    scheduler.step()


def parts_of_job(model: nn.Module) -> tuple[Any, Any]:
    matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) > 1]
    vectors = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]  # changes the order of steps
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@dataclass(frozen=True)
class Death:
    """A process that kills or stops itself at point ``number`` of a phase."""

    phase: str
    number: int
    signal: "signal.Signals" = signal.SIGKILL
    is_over: ClassVar[bool] = False  # whether the job is over, so that this process's calls no longer count

    def install(self) -> None:
        if self.phase == "messages":
            self._install_torn()
            return
        left = [self.number]

        def count() -> None:
            left[0] -= 1
            if left[0] == 0 and not Death.is_over:
                os.kill(os.getpid(), self.signal)

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                count()
                result = method(*args, **kwargs)
                count()
                return result

            return run

        for owner, name in POINTS[self.phase]:
            setattr(owner, name, counted(getattr(owner, name)))

    def _install_torn(self) -> None:
        """Die within the largest message of copies number ``number``: memory for its second half is missing."""
        left, messages = [self.number], GlooCollectives.messages

        def torn(collectives: GlooCollectives, sent: Any, received: Any, tag: int, *then: Any, **options: Any) -> Any:
            left[0] -= bool(received) and tag == _copies._TAG
            if received and left[0] == 0:
                left[0], large = -1, max((tensor for tensor, _ in received), key=lambda tensor: tensor.nbytes)
                into = torch.frombuffer(mmap.mmap(-1, large.nbytes), dtype=torch.uint8).fill_(255)
                half = large.nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE
                missing = map(ctypes.c_size_t, (into.data_ptr() + half, len(into) - half, 0))
                assert ctypes.CDLL(None).mprotect(*missing) == 0
                threading.Thread(target=self._end_when_begun, args=(into[:64],), daemon=True).start()
                received = [(into if tensor is large else tensor, rank) for tensor, rank in received]
            return messages(collectives, sent, received, tag, *then, **options)

        GlooCollectives.messages = torn

    def _end_when_begun(self, beginning: torch.Tensor) -> None:
        while (beginning == 255).all():
            time.sleep(0.001)
        os.kill(os.getpid(), self.signal)


@dataclass
class Plan:
    """Description of a job."""

    ranks: int
    deaths: dict[int, Death] = field(default_factory=dict)  # by initial rank
    options: dict[str, Any] = field(default_factory=dict)  # of Job
    strategy: str = "FULL_SHARD"
    width: int = 8
    steps: int = STEPS
    timeout: timedelta = timedelta(seconds=20)
    raises: int | None = None  # the process that raises a user error in step 2
    leaves: int | None = None  # the process that leaves the loop after step 2
    waits: tuple[int, ...] = ()  # steps in which each process waits, the first time, until `Processes.go_on`
    wakes_early: bool = False  # stopped processes wake once they are lost, not once all others have ended
    recipe: str | None = None  # code of a ``main(port, build, train)`` to run instead of this file's job

    @property
    def stopped(self) -> set[int]:
        """Numbers in their world of the processes that stop."""
        return {rank + 1 for rank, death in self.deaths.items() if death.signal == signal.SIGSTOP}


def run_rank(plan: Plan, process: int, port: int, pipe: Any) -> None:
    """Run one process of a job. It sends each step that it begins, with the members, and its outcome at the end."""
    gc.freeze()  # a collection would copy all pages that the processes share
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if plan.recipe is not None:
            names: dict[str, Any] = {"torch": torch, "flatshard": flatshard, "Block": NormBlock}
            exec(compile(plan.recipe, "README.md", "exec"), names)
            made: list[int] = []
            names["main"](port, network, functools.partial(_recipe_step, made))
            pipe.send(("end", made, 0, 0, 0, 0))
            os._exit(0)
        world = World(dist.TCPStore("127.0.0.1", port, is_master=False), plan.ranks, timeout=plan.timeout)
        model = network(plan.width)
        if world.joins:
            model.to("meta")
        strategy, mesh = flatshard.ShardingStrategy[plan.strategy], None
        if strategy.is_hybrid:
            mesh = init_device_mesh("cpu", (world.world_size // 2, 2))
        flatshard.fully_shard(model, policy={NormBlock}, strategy=strategy, device_mesh=mesh)
        optimizer, scheduler = parts_of_job(model)
        job = Job(
            world, model, optimizer, extra=[scheduler], log=lambda text: pipe.send(("said", text)), **plan.options
        )
        death, waits = plan.deaths.get(job.rank) if process < plan.ranks else None, set(plan.waits)
        for step in job.steps(range(plan.steps)):
            if death is not None:  # the first copies exist
                death.install()
                death = None
            with job.attempt():
                pipe.send(("step", step, [member.number for member in world.epochs.members], world.epochs.me.number))
                if plan.raises == process and step == 2:
                    raise ValueError("my own mistake")
                while step in waits:
                    waits -= set(range(pipe.recv() + 1))
                train(model, optimizer, scheduler, step, job.rank, job.world_size)
            if plan.leaves == process and step == 2:
                break
        else:
            Death.is_over = True
            state = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
            made = pickle.dumps([flatshard.checkpoint.full_state_dict(model), scheduler.get_last_lr()])
            pipe.send(("end", made, job.copied_nbytes, state, job.sent_nbytes))
    except BaseException as e:
        pipe.send(("raised", type(e).__name__, str(e)))
    pipe.close()
    os._exit(0)  # no other process waits for this one


def _recipe_step(made: list[int], model: nn.Module, optimizer: Any, step: int, rank: int, size: int) -> None:
    if size == 4 and rank == 0 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 99), step, rank, size)
    made.append(step)


@dataclass
class Outcome:
    """Messages of one process."""

    steps: list[tuple[int, list[int]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    end: tuple[Any, ...] | None = None
    raised: tuple[str, str] | None = None
    number: int = 0  # of the process in its world; the first processes are numbered by rank, from 1

    def take(self, kind: str, *values: Any) -> None:
        if kind == "step":
            self.steps.append((values[0], values[1]))
            self.number = values[2]
        elif kind == "said":
            self.said.append(values[0])
        elif kind == "end":
            self.end = values
        else:
            self.raised = values[0], values[1]


class Processes:
    """The processes of a job, with the store. None outlives the context."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.started: list[Any] = []
        self.outcomes: list[Outcome] = []
        self._pipes: dict[Any, Outcome] = {}

    def start(self) -> None:
        """Start another process."""
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        arguments = (self.plan, len(self.started), self.store.port, theirs)
        process = context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.started.append(process)
        self.outcomes.append(Outcome())
        self._pipes[ours] = self.outcomes[-1]

    def start_late(self) -> None:
        """Start another process, and read until it waits to join."""
        self.start()
        arrived = dist.PrefixStore("flatshard/elastic", self.store)
        self.read(lambda: arrived.check(["1/in/1"]))

    def go_on(self, step: int) -> None:
        """Let processes that wait in ``step`` continue."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the process was killed
                pipe.send(step)

    def kill(self, *numbers: int, by: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes. Those that have ended are skipped: the job may end before a process stops."""
        for process, outcome in zip(self.started, self.outcomes, strict=True):
            if outcome.number in numbers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, by)

    def read(self, until: Callable[[], bool] = lambda: False, seconds: float = 60) -> None:
        """Read messages until all processes have ended or ``until`` returns True, for at most ``seconds``."""
        end = time.monotonic() + seconds
        while self._pipes and not until():
            assert time.monotonic() < end, (self.plan, [(o.steps[-2:], o.said, o.raised) for o in self.outcomes])
            for pipe in wait(list(self._pipes), timeout=0.1):
                try:
                    self._pipes[pipe].take(*pipe.recv())  # type: ignore[index, union-attr]
                except (EOFError, ConnectionResetError):
                    del self._pipes[pipe]  # type: ignore[arg-type]

    def read_step(self, step: int) -> None:
        """Read until each living process has begun the step."""
        self.read(lambda: all(outcome.steps and outcome.steps[-1][0] >= step for outcome in self._pipes.values()))

    def finish(self) -> None:
        """Read until all have ended. Wake stopped processes once the others have ended, or have lost them."""
        stopped = self.plan.stopped

        def is_over() -> bool:
            lost = any("lost process" in text for o in self.outcomes for text in o.said)
            return (self.plan.wakes_early and lost) or all(o.number in stopped for o in self._pipes.values())

        self.read(is_over)
        self.kill(*stopped, by=signal.SIGCONT)
        self.read()


@contextlib.contextmanager
def processes(plan: Plan) -> Iterator[Processes]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "drill"])
    result = Processes(plan)
    try:
        for _ in range(plan.ranks):
            result.start()
        yield result
    finally:
        for process in result.started:
            process.kill()
            process.join(10)


def history(outcome: Outcome) -> list[tuple[int, ...]]:
    """Return the members that completed each step."""
    return [tuple(members) for _, members in sorted(dict(outcome.steps).items())]


def in_one_process(plan: Plan) -> list[Any]:
    """Return the model's values and the learning rates of the run without deaths."""
    model = network(plan.width)
    optimizer, scheduler = parts_of_job(model)
    for step in range(plan.steps):
        train(model, optimizer, scheduler, step, 0, 1)
    return [model.state_dict(), scheduler.get_last_lr()]


def drawn(seed: int, directory: str) -> Plan:
    """Return a job that loses one rank, or two that are not neighbours, at any point. It saves in ``directory``.

    Some ranks stop instead of dying, and wake when the others have continued without them or have ended.
    """
    random_ = random.Random(seed)
    ranks = random_.choice((2, 3, 4))
    strategy = random_.choice(
        ("FULL_SHARD", "FULL_SHARD", "SHARD_OPTIM", "HYBRID_SHARD" if ranks % 2 == 0 else "NO_SHARD")
    )
    victim = random_.randrange(ranks)
    phase = random_.choice(("step", "step", "copies", "copies", "saving", "end"))

    def death(phase: str, points: int) -> Death:
        number = random_.randrange(1, points)
        return Death(phase, number, signal.SIGSTOP if random_.random() < 0.15 else signal.SIGKILL)

    deaths = {victim: death(phase, {"step": 60, "copies": 30, "saving": 12, "end": 4}[phase])}
    if ranks == 4 and random_.random() < 0.6:
        deaths[(victim + 2) % 4 if strategy != "HYBRID_SHARD" else victim ^ 1] = death("recovery", 14)
    stops = any(each.signal == signal.SIGSTOP for each in deaths.values())
    timeout = timedelta(seconds=4 if stops or phase == "saving" else 20)  # a save waits this long for a dead rank
    options: dict[str, Any] = {"every": random_.choice((1, 1, 2))}
    if phase == "saving":
        options.update(checkpoint_dir=directory, save_every=2)
    wakes_early = random_.random() < 0.5
    return Plan(ranks, deaths, options, strategy, timeout=timeout, wakes_early=wakes_early)
