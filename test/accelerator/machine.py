"""Streams, events and memory of the simulated accelerator, with their checks. See ``sim.py``."""

import bisect
import collections
import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

Key = tuple[int, int]
"""Device and stream."""
Ranges = list[tuple[int, int]]
"""First and end address."""
Clock = dict[Key, int]
"""For each stream, the number of its tasks that are known to be finished."""
Stack = tuple[tuple[CodeType, int], ...]

# -- Stacks ----------------------------------------------------------------------------------------------------------

_REPOSITORY = str(Path(__file__).parents[2])
_OWN = ("machine.py", "operators.py", "sim.py", "sim_ccl.py")
_shown: dict[str, str | None] = {}  # by file; None for files of the simulator, or of torch between it and the program


def _show_file(file: str) -> str | None:
    if file not in _shown:
        path = Path(file)
        own = path.parent == Path(__file__).parent and path.name in _OWN
        hidden = own or any(part in file for part in ("/torch/_ops", "/torch/library", "/torch/utils/_"))
        _shown[file] = None if hidden else file.split("/site-packages/")[-1].removeprefix(_REPOSITORY + "/")
    return _shown[file]


def stack_here() -> Stack:
    """Return the innermost frames outside the simulator."""
    found = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < 9:
        if _show_file(frame.f_code.co_filename) is not None:
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def lines_of(stack: Stack) -> list[str]:
    """Return the frames as text, innermost first."""
    if not stack:
        return ["(autograd's engine)"]
    return [f"{_show_file(code.co_filename)}:{line} {code.co_name}" for code, line in stack]


def _site(stack: Stack) -> str:
    """Return the innermost line of flatshard in the stack."""
    lines = lines_of(stack)
    return next((line for line in lines if line.startswith("flatshard/")), lines[0])


# -- Records -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Access:
    """A kernel's read or write of some bytes."""

    lo: int
    hi: int
    write: bool
    stream: Any  # its key; ("host", 0) for code on the CPU
    number: int  # among the stream's tasks
    name: str
    stack: Stack


@dataclass(slots=True)
class Block:
    """Device memory, or pinned host memory."""

    ptr: int
    size: int
    home: Any  # key of the stream that owns the memory, or "host"
    free: bool = False
    asked: int = 0  # requested bytes
    accesses: list[Access] = field(default_factory=list)
    recorded: bool = False  # by record_stream
    pool: Any = None  # who may reuse the memory: a stream, or a graph on it
    stack: Stack = ()  # of the allocation
    free_stack: Stack = ()


@dataclass
class Race:
    """Two unordered accesses to the same bytes, at least one of them a write."""

    what: str
    first: Access
    second: Access
    block: Block
    freed: Stack = ()

    def site(self) -> tuple[str, ...]:
        """Return a key that equal races share, so that they count once."""
        first, second = self.first, self.second
        return self.what, first.name, _site(first.stack), second.name, _site(second.stack), _site(self.freed)

    def __str__(self) -> str:
        def show(a: Access) -> list[str]:
            head = f"    {a.name} {'writes' if a.write else 'reads'} on stream {a.stream[1]} of device {a.stream[0]}"
            return [head, *(f"        {line}" for line in lines_of(a.stack))]

        lines = [f"RACE: {self.what} ({self.block.asked} bytes of stream {self.block.home})"]
        lines += ["  first:", *show(self.first), "  then, not ordered behind it:", *show(self.second)]
        if self.freed:
            lines += ["  freed at:", *(f"        {line}" for line in lines_of(self.freed))]
        return "\n".join(lines)


class CaptureError(RuntimeError):
    """Error that CUDA would raise while a graph is captured."""


@dataclass(slots=True, eq=False)
class Record:
    """Recording of an event."""

    clock: Clock
    captured: bool = False
    done: bool = False


@dataclass(slots=True, eq=False)
class Task:
    """Entry of a stream: a kernel, the recording of an event, or a wait for one."""

    name: str
    number: int  # among all tasks
    run: Callable[[], Any] | None = None  # a collective returns (whether it is over, what to do then)
    record: Record | None = None
    wait: Record | None = None
    ready: Callable[[], bool] | None = None
    busy: Callable[[], bool] | None = None
    finish: Callable[[], Any] | None = None

    @property
    def can_go_on(self) -> bool:
        if self.busy is not None:
            return self.busy()
        return (self.wait is None or self.wait.done) and (self.ready is None or self.ready())


@dataclass(slots=True, eq=False)
class Graph:
    """Captured kernels in the order of their launches, which is one that streams and events allow."""

    kernels: list[tuple[str, Callable[[], Any], Ranges, Ranges]] = field(default_factory=list)


@dataclass(eq=False)
class Queue:
    """A stream."""

    key: Key
    tasks: collections.deque[Task] = field(default_factory=collections.deque)
    clock: Clock = field(default_factory=dict)
    issued: int = 0

    @property
    def is_side(self) -> bool:
        return self.key[1] != 0


def _merge(into: Clock, other: Clock) -> None:
    get = into.get
    for key, value in other.items():
        if get(key, 0) < value:
            into[key] = value


# -- The device ------------------------------------------------------------------------------------------------------


class Machine:
    """All devices. The shim calls its methods by name for every allocation, stream and event."""

    def __init__(self, shim: ModuleType) -> None:
        self.shim = shim
        self.policy = "late_side"
        self.races: dict[tuple[str, ...], Race] = {}
        self.host_syncs: list[tuple[str, Stack]] = []  # waits of the host
        self.launched: collections.Counter[str] = collections.Counter()  # kernels by name
        self.checked = True  # whether to look for races
        self.allocated = self.peak = 0  # bytes
        self._lock = threading.RLock()
        self._depth = 0
        self._freed_inside: collections.deque[tuple[int, Stack]] = collections.deque()
        self._queues: dict[Key, Queue] = {(d, 0): Queue((d, 0)) for d in range(2)}
        self._stream_ids, self._event_ids = itertools.count(1), itertools.count(1)
        self._events: dict[int, Record] = {}
        self._host: Clock = {}
        self._number = 0
        self._touched = time.monotonic()  # when the host last issued anything
        self._random = random.Random(1)
        self._capturing: set[Key] = set()
        self._graph = Graph()  # of the latest capture
        self._blocks: list[Block] = []  # by address
        self._starts: list[int] = []
        self._pools: dict[Any, list[Block]] = collections.defaultdict(list)
        self._just_freed: dict[Any, list[Block]] = collections.defaultdict(list)

    def __enter__(self) -> None:
        """Exclude other threads. Memory that Python frees inside is freed at the end."""
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        try:
            while self._depth == 1 and self._freed_inside:
                self._free(*self._freed_inside.popleft())
        finally:
            self._depth -= 1
            self._lock.release()

    def _stack(self) -> Stack:
        """Return the innermost frames, which only races show."""
        return stack_here() if self.checked else ()

    # -- streams and events

    def current(self, device: int) -> Key:
        """Return the device's current stream."""
        return device, self.shim.stream_on(device)

    def new_stream(self, device: int, priority: int) -> int:
        number = next(self._stream_ids)
        self._queues[device, number] = Queue((device, number))
        return number

    def _advance(self, q: Queue) -> None:
        """Prepare ``q`` for a new task, which comes after everything that the host has waited for."""
        _merge(q.clock, self._host)
        q.issued += 1
        q.clock[q.key] = q.issued
        self._number += 1
        self._touched = time.monotonic()

    def record(self, event: int, device: int, stream: int) -> int:
        """Record ``event``, or a new one if 0, on a stream. Return the event."""
        with self:
            q = self._queues[device, stream]
            self._advance(q)
            record = Record(dict(q.clock), q.key in self._capturing)
            q.tasks.append(Task("record", self._number, record=record))
            event = event or next(self._event_ids)
            self._events[event] = record
            return event

    def block(self, event: int, device: int, stream: int) -> None:
        """Make a stream wait for an event."""
        with self:
            record, q = self._events.get(event), self._queues[device, stream]
            if record is not None:
                self._capture_wait(q, record)
                _merge(q.clock, record.clock)
                self._advance(q)
                q.tasks.append(Task("wait", self._number, wait=record))

    def query_event(self, event: int) -> bool:
        with self:
            record = self._events.get(event)
            if record is not None and record.done:
                _merge(self._host, record.clock)
            return record is None or record.done

    def query_stream(self, device: int, stream: int) -> bool:
        with self:
            q = self._queues[device, stream]
            if not q.tasks:
                _merge(self._host, q.clock)
            return not q.tasks

    def synchronize_event(self, event: int) -> None:
        with self:
            record = self._events.get(event)
            self.host_syncs.append(("event.synchronize", stack_here()))
            if record is not None:
                self.run_until(lambda: record.done)
                _merge(self._host, record.clock)

    def synchronize_stream(self, device: int, stream: int, why: str = "stream.synchronize") -> None:
        with self:
            self.host_syncs.append((why, stack_here()))
            q = self._queues[device, stream]
            self.run_until(lambda: not q.tasks)
            _merge(self._host, q.clock)

    def synchronize_device(self, device: int) -> None:
        with self:
            self.host_syncs.append(("device.synchronize", stack_here()))
            self._wait_for([q for key, q in self._queues.items() if key[0] == device])

    def given(self) -> Clock:
        """Return the number of tasks of each stream."""
        return {key: q.issued for key, q in self._queues.items()}

    def waits_for_all(self, since: Clock) -> bool:
        """Return whether the current stream comes after all tasks that other streams got after ``since``."""
        clock = self._queues[self.current(0)].clock
        return all(clock.get(key, 0) >= now for key, now in self.given().items() if now > since.get(key, 0))

    def drain(self) -> None:
        """Wait for everything. It does not count as a wait of the program."""
        with self:
            self._wait_for(list(self._queues.values()))

    def _wait_for(self, queues: list[Queue]) -> None:
        self.run_until(lambda: not any(q.tasks for q in queues))
        for q in queues:
            _merge(self._host, q.clock)

    # -- restrictions while CUDA captures a graph, enforced although nothing is captured

    def _capture_wait(self, q: Queue, record: Record) -> None:
        if record.captured and self._capturing and q.key not in self._capturing:
            if not q.is_side:
                raise CaptureError(
                    "cudaErrorStreamCaptureImplicit: the default stream would come to depend on a capturing stream"
                )
            self._capturing.add(q.key)
        elif q.key in self._capturing and not record.captured:
            raise CaptureError(
                "cudaErrorStreamCaptureIsolation: a capturing stream would wait for an event of another stream that was "
                "not recorded in this capture"
            )

    @property
    def is_capturing(self) -> bool:
        """Whether the current stream is captured."""
        return self.current(self.shim.current()[0]) in self._capturing

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture tasks of the current stream inside like ``torch.cuda.graph``. They also run, as by a first replay.

        Memory that is allocated inside is the graph's for good: nothing else reuses it.

        Raises:
            CaptureError: if CUDA would refuse the capture.
        """
        self.drain()
        key = self.current(self.shim.current()[0])
        if not self._queues[key].is_side:
            raise CaptureError("capture needs a stream other than the default one")
        self._capturing, before = {key}, len(self.host_syncs)
        given, self._graph = self.given(), Graph()
        try:
            yield self._graph
            origin = self._queues[key]
            for other in self._capturing - {key}:
                if origin.clock.get(other, 0) < self._queues[other].issued:
                    raise CaptureError(f"cudaErrorStreamCaptureUnjoined: stream {other} was not joined")
            if len(self.host_syncs) > before:
                why, stack = self.host_syncs[before]
                text = "\n".join(lines_of(stack))
                raise CaptureError(f"cudaErrorStreamCaptureUnsupported: the host waits: {why}\n{text}")
            for other, q in self._queues.items():  # a graph would not hold such work, and a replay would skip it
                if other not in self._capturing and q.issued > given.get(other, 0):
                    raise CaptureError(f"stream {other} was used inside the capture, and is not part of it")
        finally:
            self._capturing = set()

    def replay(self, graph: Graph) -> None:
        """Launch the kernels of a graph on the current stream. No version counter of a tensor sees that."""
        key = self.current(self.shim.current()[0])
        for kernel in graph.kernels:
            self.enqueue(key, *kernel)

    # -- running

    def run_until(self, over: Callable[[], bool]) -> None:
        """Run the device, in the policy's order, until ``over``.

        Raises:
            RuntimeError: if streams wait for each other, or for a collective that other ranks do not reach.
        """
        if torch._C._len_torch_dispatch_stack():  # the program's modes do not apply to kernels
            with torch.utils._python_dispatch._disable_current_modes():
                return self.run_until(over)
        since, pause = time.monotonic(), 0.0
        while not over():
            if self.step():
                since, pause = time.monotonic(), 0.0
            else:
                heads = {key: q.tasks[0] for key, q in self._queues.items() if q.tasks}
                if not any(head.busy for head in heads.values()) or time.monotonic() - since > 60:
                    names = {key: (head.name, head.number) for key, head in heads.items()}
                    raise RuntimeError(f"the simulated device's streams wait for each other: {names}")
                pause = min(2 * pause + 0.0001, 0.003)  # another rank may need this core
                time.sleep(pause)

    def start_background(self, patience: float = 0.1) -> None:
        """Run the device in a thread if the host has issued no task for a while: it may wait for another rank."""

        def run() -> None:
            while True:
                time.sleep(patience / 4)
                if time.monotonic() - self._touched > patience:
                    with self:
                        while self.step():
                            pass

        threading.Thread(target=run, daemon=True).start()

    def step(self) -> bool:
        """Run the head of one stream. Return False if none can run."""
        able = [q for q in self._queues.values() if q.tasks and q.tasks[0].can_go_on]
        if not able:
            return False
        q = self._choose(able)
        head = q.tasks[0]
        try:
            with torch.no_grad():
                if head.busy is not None:
                    head.busy = None
                    if head.finish is not None:
                        head.finish()
                elif head.run is not None:
                    under_way = head.run()
                    if under_way is not None:  # a collective: (is it over?, what to do then)
                        head.busy, head.finish = under_way
                        return True
        except Exception as e:
            q.tasks.popleft()
            e.add_note(f"in the kernel {head.name} of the simulated device")
            raise
        if head.record is not None:
            head.record.done = True
        q.tasks.popleft()
        return True

    def _choose(self, able: list[Queue]) -> Queue:
        policy = self.policy
        if policy == "late_side":
            return min(able, key=lambda q: (q.is_side, q.tasks[0].number))
        if policy == "late_main":
            return min(able, key=lambda q: (not q.is_side, q.tasks[0].number))
        return self._random.choice(able)

    # -- memory

    def find(self, ptr: int) -> Block | None:
        """Return the block that holds the address."""
        with self._lock:
            i = bisect.bisect_right(self._starts, ptr) - 1
            if i >= 0 and ptr < self._blocks[i].ptr + self._blocks[i].size:
                return self._blocks[i]
            return None

    def _new_block(self, nbytes: int, home: Any, stack: Stack, pool: Any = None) -> Block:
        size = _round_up(nbytes)
        block = Block(self.shim.raw(size), size, home, asked=nbytes, pool=pool, stack=stack)
        i = bisect.bisect_right(self._starts, block.ptr)
        self._starts.insert(i, block.ptr)
        self._blocks.insert(i, block)
        return block

    def _overwrite(self, q: Queue, block: Block, name: str, stack: Stack) -> None:
        """Overwrite the block as if the stream's next tensor lay there."""
        self._advance(q)
        access = Access(block.ptr, block.ptr + block.size, True, q.key, q.issued, name, stack)
        self._check(q, block, access, block.free_stack)
        block.accesses = [access]
        ptr, size = block.ptr, block.size

        def fill() -> None:
            self.shim.fill(ptr, size, 255)  # NaN

        q.tasks.append(Task(name, self._number, run=fill))
        if q.key in self._capturing:
            self._graph.kernels.append((name, fill, [], [(ptr, ptr + size)]))

    def alloc(self, nbytes: int, device: int, stream: int) -> int:
        with self:
            key, stack = (device, stream), self._stack()
            q, size = self._queues[key], _round_up(nbytes)
            pool = (key, id(self._graph)) if key in self._capturing else key
            for block in self._just_freed.pop(pool, []):
                self._overwrite(q, block, "the next tensor that is allocated", stack)
            fits = [b for b in self._pools[pool] if size <= b.size <= 2 * size]
            if fits:
                block = min(fits, key=lambda b: b.size)
                self._pools[pool].remove(block)
                block.free, block.free_stack, block.stack, block.asked = False, (), stack, nbytes
            else:
                block = self._new_block(nbytes, key, stack, pool)
                self._overwrite(q, block, "allocation", stack)
            self.allocated += block.size
            self.peak = max(self.peak, self.allocated)
            return block.ptr

    def free(self, ptr: int) -> None:
        stack = self._stack()
        with self._lock:
            if self._depth:
                self._freed_inside.append((ptr, stack))
                return
        with self:
            self._free(ptr, stack)

    def _free(self, ptr: int, stack: Stack) -> None:
        block = self.find(ptr)
        if block is None or block.free:
            raise RuntimeError("the simulated device's memory was freed twice")
        block.free, block.free_stack = True, stack
        self.allocated -= block.size
        if not block.recorded:
            self._pools[block.pool].append(block)
            self._just_freed[block.pool].append(block)

    def record_stream(self, ptr: int, device: int, stream: int) -> None:
        """Never reuse the block after its free, which is later than any of the stream's tasks."""
        with self:
            block = self.find(ptr)
            if block is not None and block.home != (device, stream):
                block.recorded = True

    def alloc_pinned(self, nbytes: int) -> int:
        with self:
            block = self._new_block(nbytes, "host", stack_here())
            self.shim.fill(block.ptr, block.size, 255)
            return block.ptr

    def free_pinned(self, ptr: int) -> None:
        """Never reuse the memory: CUDA's host allocator itself waits for copies from and to it."""

    def is_pinned(self, ptr: int) -> bool:
        block = self.find(ptr)
        return block is not None and block.home == "host"

    def is_used(self, ptr: int, nbytes: int) -> bool:
        """Return whether unfinished kernels, as far as the host knows, read or write some of these bytes."""
        block = self.find(ptr)
        found = [] if block is None else block.accesses
        return any(a.lo < ptr + nbytes and ptr < a.hi and not self._host_waited_for(a) for a in found)

    def device_of(self, ptr: int) -> int:
        block = self.find(ptr)
        return 0 if block is None or block.home == "host" else block.home[0]

    def memcpy(self, to: int, source: int, nbytes: int, device: int, stream: int) -> None:
        reads, writes = [(source, source + nbytes)], [(to, to + nbytes)]
        self.enqueue((device, stream), "memcpy", lambda: self.shim.move(to, source, nbytes), reads, writes)

    # -- launching

    def enqueue(
        self,
        key: Key,
        name: str,
        run: Callable[[], Any],
        reads: Ranges,
        writes: Ranges,
        ready: Callable[[], bool] | None = None,
        record: Record | None = None,
    ) -> None:
        """Give a stream a kernel that starts when ``ready``. ``record`` is done when the kernel is over."""
        with self:
            q, stack = self._queues[key], self._stack()
            self._advance(q)
            self.launched[name] += 1
            for lo, hi in reads:
                self.access(q, lo, hi, False, name, stack)
            for lo, hi in writes:
                self.access(q, lo, hi, True, name, stack)
            q.tasks.append(Task(name, self._number, run=run, ready=ready, record=record))
            if key in self._capturing:
                self._graph.kernels.append((name, run, reads, writes))

    def access(self, q: Queue, lo: int, hi: int, write: bool, name: str, stack: Stack) -> None:
        """Record that the latest task of ``q`` reads or writes these bytes."""
        if hi <= lo:
            return
        access = Access(lo, hi, write, q.key, q.issued, name, stack)
        block = self.find(lo)
        if block is None:
            raise RuntimeError(f"{name} would touch memory that is not allocated on the simulated device: {lo:#x}")
        if block.free and block.pool == block.home:  # a graph keeps the memory that was freed in its capture
            free = Access(lo, hi, True, q.key, 0, "free", block.free_stack)
            self._race("use of freed memory", free, access, block, block.free_stack)
        self._check(q, block, access)
        if block.home != "host" and block.home[0] != q.key[0]:
            self._race("a stream of another device", access, access, block)
        if write:
            block.accesses = [a for a in block.accesses if not (lo <= a.lo and a.hi <= hi)]
        if len(block.accesses) > 200:
            block.accesses = [a for a in block.accesses if not self._host_waited_for(a)]
        block.accesses.append(access)

    def _check(self, q: Queue, block: Block, access: Access, freed: Stack = ()) -> None:
        if not self.checked:
            return
        for a in block.accesses:
            if a.stream != q.key and _conflict(a, access) and q.clock.get(a.stream, 0) < a.number:
                what = "no order between two streams"
                if freed:
                    what = "memory freed while another stream may use it"
                elif block.home == "host":
                    what = "host and device"
                self._race(what, a, access, block, freed)

    def host_access(self, ptr: int, nbytes: int, write: bool, name: str) -> None:
        """Record that code on the CPU reads or writes memory now. The device may be using it if it is pinned."""
        with self:
            block = self.find(ptr)
            if block is None or block.home != "host":
                return
            access = Access(ptr, ptr + nbytes, write, ("host", 0), 0, name, stack_here())
            for a in block.accesses:
                if _conflict(a, access) and not self._host_waited_for(a):
                    self._race("the host does not wait for the device", a, access, block)

    def _host_waited_for(self, a: Access) -> bool:
        return self._host.get(a.stream, 0) >= a.number

    def _race(self, what: str, first: Access, second: Access, block: Block, freed: Stack = ()) -> None:
        race = Race(what, first, second, block, freed)
        self.races.setdefault(race.site(), race)

    # -- between two programs

    def reset(self) -> None:
        """Wait for everything, forget all findings, and overwrite free memory: its old values could be right by chance.

        Recorded accesses are dropped as well, so clocks restart: otherwise they would grow with each program.
        """
        self.drain()
        self._host.clear()
        for q in self._queues.values():
            q.clock = {}
        self.races.clear()
        self.host_syncs.clear()
        self.launched.clear()
        self._random = random.Random(1)
        for block in self._blocks:
            block.accesses.clear()
            if block.free:
                self.shim.fill(block.ptr, block.size, 255)

    def abandon(self) -> None:
        """Drop tasks that never ran, for use after an error: for example collectives that other ranks never reach."""
        with self:
            for q in self._queues.values():
                for task in q.tasks:
                    if task.record is not None:
                        task.record.done = True
                q.tasks.clear()
        self.reset()


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def _conflict(a: Access, b: Access) -> bool:
    return (a.write or b.write) and a.lo < b.hi and b.lo < a.hi
