"""A pool of ranks that lives as long as the pytest session. Its backend is gloo by default.

Starting four Python processes that import torch costs seconds; a test body costs milliseconds. So the ranks start once, as
forks of a process that has imported torch. Every distributed test is a module-level function ``body(ctx, ...)`` that they
run::

    def body(ctx, factor):
        t = torch.full((), float(ctx.rank))
        dist.all_reduce(t, group=ctx.group)
        return t.item() * factor

    def test_sum(pool):
        assert pool.run(body, 2, world_size=3) == [6.0, 6.0, 6.0]

A shared pool gives these guarantees:

- A failing rank fails the test with its own traceback (:class:`RankFailure`), even if its peers wait in a collective that
  never completes. They get ``GRACE`` seconds, then all ranks are killed.
- A hanging rank fails the test at the timeout, with the rank's number and the Python stacks of all its threads. faulthandler
  writes them at SIGABRT, so they are available even if the rank hangs in C++.
- After a failure, groups may be out of step, and so may they after a body that made groups on some ranks only. The pool then
  makes new groups, and new processes if that fails.
- Ranks never outlive pytest: they are daemons, and a thread of each watches for the parent's death.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import math
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

MAX_WORLD_SIZE = 4
START_TIMEOUT = 120.0
RENEW_TIMEOUT = 20.0
PRELOAD = (
    *("torch", "torch.distributed", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "torch.optim", "pytest", "expecttest", "flatshard"),
)
"""Modules imported by the process whose forks are ranks."""
COMPILER = ("torch._inductor.pattern_matcher", "torch._inductor.debug", "torch._dynamo.testing")
"""Modules that ranks import to compile, each of which takes a second."""
GRACE = 5.0
"""Seconds for the other ranks to answer after a rank has failed."""


@dataclasses.dataclass
class Context:
    """A rank, as a test body sees it."""

    rank: int
    world_size: int
    group: Any
    """The process group of ranks ``0..world_size-1``; the default group always spans all ranks of the pool."""
    alone: Any = None
    """A process group of this rank only."""
    _send: Callable[[tuple[str, Any]], None] = dataclasses.field(repr=False, default=lambda message: None)
    _meshes: dict[Any, Any] = dataclasses.field(repr=False, default_factory=dict)
    _folder: Path | None = None

    @functools.cached_property
    def mesh(self) -> Any:
        """Return a one-dimensional CPU device mesh over :attr:`group`."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, "cpu", mesh_dim_names=("dp",))

    def device_mesh(self, shape: tuple[int, ...], names: tuple[str, ...], device: str = "cpu") -> Any:
        """Return a device mesh over all ranks of the pool, all of which must call this. Later bodies get the same one.

        The process groups of a mesh live as long as the default group, each with threads of its own.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        everyone = dist.get_world_size()
        assert math.prod(shape) == self.world_size == everyone, f"{shape}: all {everyone} ranks must ask for the mesh"
        if (device, shape, names) not in self._meshes:
            self._meshes[device, shape, names] = init_device_mesh(device, shape, mesh_dim_names=names)
        return self._meshes[device, shape, names]

    def group_over(self, kind: str) -> Any:
        """Return a group with the ranks of :attr:`group` over another store, a class of ``torch.distributed``.

        Later bodies get the same one. A ``HashStore`` is for one rank.
        """
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        if (kind, self.world_size) not in self._meshes:
            name, groups, default = f"{kind} of {self.world_size}", c10d._world.pg_map, dist.group.WORLD
            backend, store = groups[default]
            match kind:
                case "PrefixStore":
                    new: Any = dist.PrefixStore("inner", dist.PrefixStore("outer", store))
                case "HashStore":
                    assert self.world_size == 1, "a HashStore serves a single process"
                    new = dist.HashStore()
                case "FileStore":
                    if self.rank == 0:
                        store.set(name, tempfile.mkstemp(dir=self._folder)[1])
                    new = dist.FileStore(store.get(name).decode(), self.world_size)
            groups[default] = backend, new
            try:  # under a name that torch does not count, as other ranks of the pool make no such group
                with mock.patch.object(c10d, "_process_group_name", return_value=name):
                    group = dist.new_group(list(range(self.world_size)), use_local_synchronization=True)
            finally:
                groups[default] = backend, store
            self._meshes[kind, self.world_size] = group
        return self._meshes[kind, self.world_size]

    def note(self, text: str) -> None:
        """Record the rank's next action: the last note is shown if the rank then fails, hangs or dies."""
        self._send(("note", text))


@dataclasses.dataclass
class Failure:
    """A rank's failure: an exception, no answer in time, or death."""

    rank: int
    kind: str
    """``"raised"``, ``"hung"``, ``"died"`` or ``"blocked"`` (stopped because another rank had failed)."""
    text: str
    """The remote traceback, or the stacks of all threads of a rank that had to be stopped."""
    type_name: str = ""
    message: str = ""
    note: str = ""


class RankFailure(AssertionError):
    """Failure of at least one rank. The message has every rank's account, the most informative first."""

    def __init__(self, what: str, failures: list[Failure]) -> None:
        order = ("died", "raised", "hung", "blocked")  # a peer's death raises on other ranks
        self.failures = sorted(failures, key=lambda f: (order.index(f.kind), f.rank))
        alike: dict[tuple[str, str, str], list[Failure]] = {}  # an error that many ranks share is shown once
        for f in self.failures:
            alike.setdefault((f.kind, f.text, f.note), []).append(f)
        super().__init__("\n".join([what, *map(self._section, alike.values())]))

    @staticmethod
    def _section(alike: list[Failure]) -> str:
        f = alike[0]
        title = f"{_name_ranks(f.rank for f in alike)} {f.kind}"
        if f.kind == "raised":
            title += f" {f.type_name}: {f.message}"
        note = f"last note: {f.note}\n" if f.note else ""
        return f"---- {title}\n{note}{f.text.rstrip()}"

    def of(self, kind: str) -> list[int]:
        """Return the ranks that failed in this way."""
        return [f.rank for f in self.failures if f.kind == kind]


# -- The rank's side ---------------------------------------------------------------------------------------------------


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _send_objects_without_numpy() -> None:
    """Send objects without numpy, which is no dependency. torch uses it for plans of ``torch.distributed.checkpoint``."""
    import ctypes
    import importlib.util

    import torch.distributed.distributed_c10d as c10d

    def to_object(tensor: Any, size: Any, *_: Any) -> Any:
        tensor = tensor.cpu()
        return pickle.loads(ctypes.string_at(tensor.data_ptr(), int(size)))

    if importlib.util.find_spec("numpy") is None:
        c10d._tensor_to_object = to_object


def _make_groups(rank: int, size: int, port: int, prefix: str, backend: str | None) -> dict[int, Any]:
    """Return groups by world size k, each of ranks 0..k-1, with a group of this rank only under 0.

    The default group has all ranks. If ``backend`` is None there are no groups, as bodies make their own.
    """
    if backend is None:
        return dict.fromkeys(range(size + 1))
    import datetime

    import torch.distributed as dist

    timeout = datetime.timedelta(minutes=5)
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    groups = {k: dist.new_group(list(range(k)), timeout=timeout) for k in range(1, size)}
    groups[size] = dist.group.WORLD
    groups[0] = [dist.new_group([k], timeout=timeout) for k in range(size)][rank]
    return groups


def _yield_to_others() -> None:
    """Let a rank that is woken by another one run until it waits, as it may hold the lock of a connection.

    gloo's thread does not block on such a lock. It spins for as long as the lock's holder has no core.
    """
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # threads inherit it


def _share_gloo_device() -> None:
    """Let all gloo groups of this process share one device.

    Each device has a thread that wakes up a hundred times per second. A rank has dozens of groups, each with a device of its
    own by default: in a run of all tests their threads took a quarter of the time. The thread of the shared device yields to
    a lock's holder: see :func:`_yield_to_others`.
    """
    from torch.distributed import ProcessGroupGloo

    def make_device() -> None:
        if sys.platform == "linux":
            os.nice(10)  # applies to this thread and the threads that it starts
        devices.append(ProcessGroupGloo.create_default_device())

    devices: list[Any] = []
    thread = threading.Thread(target=make_device)
    thread.start()
    thread.join()
    make = ProcessGroupGloo.__init__

    def make_with_device(self: Any, store: Any, rank: int, size: int, timeout: Any, **more: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = devices, 2, timeout
        for name, value in more.items():  # torch 2.15: enable_reconfigure
            setattr(options, name, value)
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_with_device


def _count_groups() -> int:
    """Return the number of groups that this rank has made, from which torch makes the next one's name.

    If ranks differ, a later group's constructor waits forever, or connects ranks of different groups.
    """
    import torch.distributed.distributed_c10d as c10d

    return c10d._world.group_count


def _run_body(ctx: Context, payload: bytes) -> tuple[str, Any]:
    import torch

    try:
        fn, args, kwargs = pickle.loads(payload)
        torch.manual_seed(0)
        random.seed(0)
        return "ok", pickle.dumps(fn(ctx, *args, **kwargs))
    except BaseException as e:  # pytest's outcomes are no Exceptions
        kind = "skip" if type(e).__name__ == "Skipped" else "raised"
        return kind, (type(e).__qualname__, str(e), traceback.format_exc())
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def _forget_meshes() -> None:
    """Clear DTensor's caches, which would return results on old meshes for equal meshes of new groups.

    This equals ``torch.distributed.tensor.debug._clear_sharding_prop_cache``, whose import needs numpy.
    """
    if "torch.distributed.tensor" in sys.modules:  # otherwise there are none, and the import takes a second
        import torch
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


def _collect_and_freeze() -> None:
    """Free objects left by a body. The collector skips the rest from now on, such as imported modules."""
    gc.collect()
    gc.freeze()


def _rank_main(
    rank: int,
    size: int,
    port: int,
    conn: Connection,
    stacks: str,
    backend: str | None,
    prepare: Callable[[], None] | None,
) -> None:
    """Serve requests until the parent closes the connection or dies."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and stops the ranks
    _yield_to_others()
    if not os.environ.get("POOL_CORES"):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(os.open(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), all_threads=True)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _send_objects_without_numpy()
    if backend is not None:
        _share_gloo_device()
    if prepare is not None:
        prepare()
    groups: dict[int, Any] = {}
    meshes: dict[Any, Any] = {}
    _collect_and_freeze()

    def send(message: tuple[str, Any]) -> None:
        conn.send_bytes(pickle.dumps(message))

    while True:
        try:
            command, argument = pickle.loads(conn.recv_bytes())
        except EOFError:
            os._exit(0)  # a clean exit would wait for groups that are out of step
        if command == "groups":
            if dist.is_initialized():
                dist.destroy_process_group()
                _forget_meshes()
            meshes = {}
            groups = _make_groups(rank, size, port, argument, backend)
            send(("ok", None))
        else:
            world_size, payload = argument
            ctx = Context(rank, world_size, groups[world_size], groups[0], send, meshes, Path(stacks).parent)
            made = _count_groups()
            answer = _run_body(ctx, payload)
            if world_size < size and _count_groups() != made:
                send(("uneven", None))
            _collect_and_freeze()
            send(answer)


# -- pytest's side ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Rank:
    process: Any
    conn: Connection
    stacks: Path
    note: str = ""


def _environment() -> Any:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return mock.patch.dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=loopback)  # OMP reads it at import


def share_start() -> None:
    """Start a process that imports torch, and let the pools of this process and its forks start from it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOAD, *COMPILER])
    with _environment():
        forkserver.ensure_running()
    # Forks are not its parent, and could not check whether it is alive.
    os.register_at_fork(after_in_child=lambda: setattr(forkserver._forkserver, "ensure_running", lambda: None))


class Pool:
    """Ranks that start at first use and run test bodies; see the module's docstring."""

    def __init__(
        self,
        size: int = MAX_WORLD_SIZE,
        backend: str | None = "gloo",
        prepare: Callable[[], None] | None = None,
        preload: tuple[str, ...] = (),
        timeout: float = 60.0,
    ) -> None:
        """``prepare``: a module-level function that ranks call first. ``backend`` None: bodies make their own groups.

        ``preload``: modules that ranks have from the start, if they are installed and this is the session's first pool.
        ``timeout``: of a run, if it has none of its own.
        """
        self.size = size
        self._backend = backend
        self._prepare = prepare
        self._preload = preload
        self._timeout = timeout
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._groups_made = 0
        self._in_step = False
        self._dir = Path(tempfile.mkdtemp(prefix="flatshard-pool-"))
        atexit.register(self.close)

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Run ``fn(ctx, *args, **kwargs)`` on ranks ``0..world_size-1`` and return their results in rank order.

        ``fn`` must be importable: a module-level function (or a ``functools.partial`` of one). Results must pickle.
        The timeout counts from the last :meth:`Context.note`, if the body makes any, and does not include starting.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size must be 1..{self.size}, got {world_size}")
        try:
            payload = pickle.dumps((fn, args, kwargs))
        except Exception as e:
            raise TypeError(f"a body and its arguments must pickle, module-level functions do: {fn!r}: {e}") from e
        name = getattr(fn, "__name__", repr(fn))
        with self._stop_ranks_on_error():
            self._get_ready()
            for rank in range(world_size):
                self._post(rank, ("run", (world_size, payload)))
            timeout = timeout or self._timeout
            answers = self._collect(range(world_size), timeout)
            failures = self._failures(answers, range(world_size))
        if not failures:
            skips = [value[1] for kind, value in answers.values() if kind == "skip"]
            if skips:
                import pytest

                pytest.skip(skips[0])
            return [pickle.loads(answers[rank][1]) for rank in range(world_size)]
        self._in_step = False
        if any(f.kind != "raised" for f in failures):
            self._stop_ranks()
        hung = [f.rank for f in failures if f.kind == "hung"]
        if hung:
            what = f"{name}: no answer from {_name_ranks(hung)} within {timeout:g} s, {_name_ranks(answers)} answered"
        else:
            what = f"{name} failed on {_name_ranks(f.rank for f in failures if f.kind != 'blocked')} of {world_size}"
        raise RankFailure(what, failures)

    def close(self) -> None:
        """End all ranks and remove the pool's files. The next use starts it again."""
        self._stop_ranks()
        self._store = None
        shutil.rmtree(self._dir, ignore_errors=True)

    # -- starting and stopping

    def _get_ready(self) -> None:
        """Ensure live ranks whose groups are in step, by new groups or new processes if needed."""
        if self._ranks and all(r.process.is_alive() for r in self._ranks):
            if not self._in_step:
                self._make_groups(RENEW_TIMEOUT)
            if self._in_step:
                return
        self._stop_ranks()
        self._start()
        answers = self._make_groups(START_TIMEOUT)
        if not self._in_step:
            raise RankFailure("the pool of ranks did not start", self._failures(answers, range(self.size)))

    def _start(self) -> None:
        import torch.distributed as dist

        self._dir.mkdir(exist_ok=True)
        if self._store is None:  # the system picks a free port, so sessions don't race for one
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        start = multiprocessing.get_context("forkserver")
        with _environment():
            start.set_forkserver_preload([*PRELOAD, *self._preload])
            for rank in range(self.size):
                here, there = start.Pipe()
                stacks = self._dir / f"stacks-{rank}"
                process = start.Process(
                    target=_rank_main,
                    args=(rank, self.size, self._store.port, there, str(stacks), self._backend, self._prepare),
                    name=f"flatshard-rank-{rank}",
                    daemon=True,
                )
                process.start()
                there.close()
                self._ranks.append(_Rank(process, here, stacks))

    def _make_groups(self, timeout: float) -> dict[int, tuple[str, Any]]:
        self._groups_made += 1
        for rank in range(self.size):
            self._post(rank, ("groups", f"groups-{self._groups_made}"))
        answers = self._collect(range(self.size), timeout)
        self._in_step = len(answers) == self.size and all(kind == "ok" for kind, _ in answers.values())
        return answers

    def _stop_ranks(self) -> None:
        for r in self._ranks:
            r.conn.close()
            if r.process.is_alive():
                r.process.kill()
        for r in self._ranks:
            r.process.join()
        self._ranks, self._in_step = [], False

    @contextlib.contextmanager
    def _stop_ranks_on_error(self):
        """Stop the ranks after an exception, such as a test's alarm, which leaves unread answers."""
        try:
            yield
        except BaseException:
            self._stop_ranks()
            raise

    # -- talking to the ranks

    def _post(self, rank: int, message: tuple[str, Any]) -> None:
        self._ranks[rank].note = ""
        with contextlib.suppress(BrokenPipeError):  # a dead rank is noticed when its answer is awaited
            self._ranks[rank].conn.send_bytes(pickle.dumps(message))

    def _collect(self, ranks: range, timeout: float) -> dict[int, tuple[str, Any]]:
        """Return answers by rank, without the ranks that did not answer in time."""
        answers: dict[int, tuple[str, Any]] = {}
        waiting = {self._ranks[rank].conn: rank for rank in ranks}
        deadline, failed = time.monotonic() + timeout, False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for conn in ready:
                assert isinstance(conn, Connection)
                rank = waiting[conn]
                try:
                    kind, value = pickle.loads(conn.recv_bytes())
                except (EOFError, ConnectionResetError):
                    kind, value = "died", None
                if kind == "uneven":
                    self._in_step = False
                    continue
                if kind == "note":
                    self._ranks[rank].note = value
                    if not failed:
                        deadline = time.monotonic() + timeout
                    continue
                del waiting[conn]
                answers[rank] = kind, value
                if kind in ("raised", "died"):
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _failures(self, answers: dict[int, tuple[str, Any]], ranks: range) -> list[Failure]:
        """Return the failure of every rank that failed. Ranks without an answer are stopped for their stacks."""
        failures = []
        one_failed = any(kind in ("raised", "died") for kind, _ in answers.values())
        for rank in set(ranks) - answers.keys():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank].process.pid, signal.SIGABRT)  # faulthandler writes the stacks
        for rank in ranks:
            r = self._ranks[rank]
            kind, value = answers.get(rank, ("blocked" if one_failed else "hung", None))
            if kind == "raised":
                type_name, message, text = value
                failures.append(Failure(rank, kind, text, type_name, message, r.note))
            elif kind not in ("ok", "skip"):
                r.process.join(5)
                if r.process.is_alive():
                    r.process.kill()
                    r.process.join()
                text = r.stacks.read_text() if r.stacks.exists() else ""
                text = f"exit code {r.process.exitcode}\n{text}" if kind == "died" else text
                failures.append(Failure(rank, kind, text, note=r.note))
        return failures


def _name_ranks(ranks: Any) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' if ',' in names else ''} {names}" if names else "no rank"
