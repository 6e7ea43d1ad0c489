"""``simccl``: a process group for the simulated accelerator that behaves like NCCL.

Collectives are kernels on the current stream, or on the group's own with ``async_op``. They run late, in the order of
their calls, and accept only NCCL's dtypes. A different collective, size or dtype on another rank raises, where NCCL
would hang or mix data. The bytes travel through shared memory. Gloo handles CPU tensors if the group has it
(``cpu:gloo,simdev:simccl``).
"""

import mmap
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerator.machine import Record
from accelerator.operators import NAME, extent, is_sim
from accelerator.sim import operators, sim

DTYPES = {
    getattr(torch, name) for name in ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
}
DTYPES |= {getattr(torch, name) for name in ["int64", "int32", "int8", "uint8", "bool"]}

order: list[tuple[str, int, str]] = []
"""Collectives that this rank has issued: the group, its size, and the collective with its length and dtype."""

Under_Way = tuple[Callable[[], bool], Callable[[], Any]]


class Work(torch._C._distributed_c10d.Work):
    """Handle whose wait makes the current stream wait, never the host."""

    def __init__(self, event: int = 0, device: int = 0, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Keep ``tensors`` alive until the wait, like NCCL."""
        super().__init__()
        self.event = event
        self.device = device
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        if self.event:
            sim.block(self.event, *sim.current(self.device))
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return not self.event or sim.query_event(self.event)

    def get_future(self) -> Any:
        made: Any = torch.futures.Future()
        made.set_result(None)
        return made

    getFuture = get_future


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


class Table:
    """Shared memory of a group's ranks on one machine, which holds each rank's input to a collective, with its name.

    Each rank has two slots. A rank that reaches collective n has finished n - 1, which all ranks had reached. So all
    ranks have finished n - 2, whose slot is reused.
    """

    SLOT = 1 << 26
    _HEAD = struct.Struct("qq112s")  # aligned: the collective's number, the length in bytes, its name

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._rank, self._size, self._number = rank, size, 0
        if rank == 0:
            with tempfile.NamedTemporaryFile(prefix="flatshard-simccl-") as file:
                file.truncate(2 * size * self.SLOT)  # uses no memory before it is written to
                self._map(file)
                store.set("path", file.name)
                store.wait([f"open {other}" for other in range(1, size)])  # then all have it, and its name may go
        else:
            with open(store.get("path"), "r+b") as file:
                self._map(file)
            store.set(f"open {rank}", "")

    def _map(self, file: Any) -> None:
        self._memory = mmap.mmap(file.fileno(), 2 * self._size * self.SLOT)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _at(self, rank: int) -> int:
        return (2 * rank + self._number % 2) * self.SLOT

    def post(self, what: str, t: torch.Tensor) -> None:
        """Publish ``t`` for the next collective."""
        self._number += 1
        at, body = self._at(self._rank), self._at(self._rank) + self._HEAD.size
        if t.nbytes > self.SLOT - self._HEAD.size:
            raise RuntimeError(f"simccl: {what}: {t.nbytes} bytes of each rank are too many for the simulator")
        self._bytes[body : body + t.nbytes].copy_(_bytes(t))
        self._HEAD.pack_into(self._memory, at, 0, t.nbytes, what.encode())
        struct.pack_into("q", self._memory, at, self._number)  # last

    def is_full(self) -> bool:
        """Return whether all ranks have reached this rank's collective."""
        return all(struct.unpack_from("q", self._memory, self._at(r))[0] == self._number for r in range(self._size))

    def read(self, rank: int) -> tuple[str, torch.Tensor]:
        """Return the collective's name and the bytes that a rank published."""
        at, body = self._at(rank), self._at(rank) + self._HEAD.size
        _, nbytes, name = self._HEAD.unpack_from(self._memory, at)
        return name.rstrip(b"\0").decode(), self._bytes[body : body + nbytes].clone()


class SimCCL(dist.ProcessGroup):
    """A process group of the simulated accelerator."""

    supports_coalescing = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._table = Table(dist.PrefixStore("table", store), rank, size)
        self._cpu = dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout)
        self._last: Record | None = None  # done when its last collective is over
        self._own: dict[Any, int] = {}  # the group's own streams

    def get_group_store(self) -> Any:
        return self._store

    def _get_backend(self, device: Any) -> Any:
        return self._cpu if torch.device(device).type == "cpu" and self._has_gloo else self

    @property
    def _has_gloo(self) -> bool:
        return "gloo" in str(dist.get_backend_config(self))

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return "simccl"

    def _on_cpu(self, t: torch.Tensor) -> Any:
        """Return the group that handles CPU tensors if ``t`` is one, else None."""
        return self._cpu if t.device.type == "cpu" and self._has_gloo else None

    @staticmethod
    def _check(name: str, tensors: list[torch.Tensor]) -> None:
        for t in tensors:
            if not is_sim(t):
                raise RuntimeError(
                    f"simccl: {name}: tensors must be on the device, got {t.device}: No backend type associated with device "
                    f"type {t.device.type}"
                )
            if t.dtype not in DTYPES:
                raise RuntimeError(f"simccl: {name}: Unconvertible NCCL type {t.dtype}")
            if not t.is_contiguous():
                raise RuntimeError(f"simccl: {name}: Tensors must be contiguous")

    def _own_stream(self, *key: Any, device: int) -> int:
        if key not in self._own:
            self._own[key] = sim.new_stream(device, -1)
        return self._own[key]

    def _launch(
        self,
        name: str,
        opts: Any,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        begin: Callable[[str], Under_Way],
    ) -> Work:
        self._check(name, reads + writes)
        device = writes[0].device.index
        key, asynchronous = sim.current(device), bool(getattr(opts, "asyncOp", False))
        if asynchronous:
            key = device, self._own_stream(device, device=device)
            sim.block(sim.record(0, *sim.current(device)), *key)
        what = f"{name}({sum(t.numel() for t in writes)} x {str(writes[0].dtype).removeprefix('torch.')})"
        order.append((self.group_name, self._size, what))
        # NCCL keeps the order within a communicator without help of streams, so their clocks do not show it.
        before, self._last = self._last, Record({})
        ranges = [extent(t) for t in reads], [extent(t) for t in writes]
        sim.enqueue(
            key, name, lambda: begin(what), *ranges, ready=lambda: before is None or before.done, record=self._last
        )
        return Work(sim.record(0, *key), device, reads + writes) if asynchronous else Work()

    def _exchange(self, source: torch.Tensor, then: Callable[[list[torch.Tensor]], Any]) -> Callable[[str], Under_Way]:
        """Return a kernel that passes all ranks' ``source`` to ``then``, without blocking any rank."""
        late = operators.late(source)

        def begin(what: str) -> Under_Way:
            mine = late.now().clone().view(-1)
            self._table.post(what, mine)

            def finish() -> None:
                parts = []
                for rank in range(self._size):
                    theirs, part = self._table.read(rank)
                    if theirs != what:
                        raise RuntimeError(
                            f"simccl: group {self.group_name}: rank {self._rank} of it is in {what}, rank {rank} in {theirs}"
                        )
                    parts.append(part.view(mine.dtype))
                then(parts)

            return self._table.is_full, finish

        return begin

    # -- Collectives ---------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        if cpu := self._on_cpu(input):
            return cpu._allgather_base(output, input, opts or dist.AllgatherOptions())
        if output.numel() != input.numel() * self._size or output.dtype is not input.dtype:
            raise RuntimeError(
                f"simccl: all_gather of {input.numel()} {input.dtype} into {output.numel()} {output.dtype}"
            )
        (lo, hi), (out_lo, out_hi) = extent(input), extent(output)
        if lo < out_hi and out_lo < hi and lo != out_lo + self._rank * input.nbytes:
            raise RuntimeError("simccl: all_gather: input and output overlap, and it is not in place")
        to = operators.late(output)
        begin = self._exchange(input, lambda parts: to.now().view(-1).copy_(torch.cat(parts)))
        return self._launch("all_gather", opts, [input], [output], begin)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        if cpu := self._on_cpu(input):
            return cpu._reduce_scatter_base(output, input, opts or dist.ReduceScatterOptions())
        if output.numel() * self._size != input.numel() or output.dtype is not input.dtype:
            raise RuntimeError(
                f"simccl: reduce_scatter of {input.numel()} {input.dtype} into {output.numel()} {output.dtype}"
            )
        to, op = operators.late(output), opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def add(parts: list[torch.Tensor]) -> None:
            to.now().view(-1).copy_(_reduce([p.view(self._size, -1)[self._rank] for p in parts], op))

        return self._launch("reduce_scatter", opts, [input], [output], self._exchange(input, add))

    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if cpu := self._on_cpu(tensor):
            return cpu.allreduce(tensors, opts or dist.AllreduceOptions())
        to, op = operators.late(tensor), opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        begin = self._exchange(tensor, lambda parts: to.now().view(-1).copy_(_reduce(parts, op)))
        return self._launch("all_reduce", opts, [tensor], [tensor], begin)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        (tensor,) = tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        if opts is None or isinstance(opts, int):
            root, opts = opts or 0, dist.BroadcastOptions()
            opts.rootRank, opts.rootTensor = root, 0
        if cpu := self._on_cpu(tensor):
            return cpu.broadcast(tensors, opts)
        to, root = operators.late(tensor), opts.rootRank
        begin = self._exchange(tensor, lambda parts: to.now().view(-1).copy_(parts[root]))
        return self._launch("broadcast", opts, [tensor], [tensor], begin)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        (parts,), (input,) = outputs, inputs
        if cpu := self._on_cpu(input):
            return cpu.allgather(outputs, inputs, opts or dist.AllgatherOptions())
        late = [operators.late(p) for p in parts]

        def hand_out(values: list[torch.Tensor]) -> None:
            for to, value in zip(late, values, strict=True):
                to.now().view(-1).copy_(value)

        return self._launch("all_gather of a list", opts, [input], parts, self._exchange(input, hand_out))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather objects, which are on the CPU."""
        return self._cpu.gather(outputs, inputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, out_splits: Any = None, in_splits: Any = None, opts: Any = None
    ) -> Any:
        if cpu := self._on_cpu(input):
            return cpu.alltoall_base(output, input, out_splits or [], in_splits or [], opts or dist.AllToAllOptions())
        if out_splits or in_splits:
            raise NotImplementedError("simccl: all_to_all of unequal parts")
        to = operators.late(output)

        def pick(parts: list[torch.Tensor]) -> None:
            to.now().view(-1).copy_(torch.cat([p.view(self._size, -1)[self._rank] for p in parts]))

        return self._launch("all_to_all", opts, [input], [output], self._exchange(input, pick))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Any:
        sim.drain()
        self._cpu.barrier().wait()
        return Work()

    # -- Messages ------------------------------------------------------------------------------------------------------

    def _message(self, name: str, peer: int, t: torch.Tensor, begin: Callable[[], Under_Way]) -> Work:
        """Send or receive on a separate stream, because messages of a batch do not wait for each other."""
        self._check(name, [t])
        device = t.device.index
        key = device, self._own_stream(name, peer, device, device=device)
        sim.block(sim.record(0, *sim.current(device)), *key)
        sends = name == "send"
        sim.enqueue(key, name, begin, [extent(t)] if sends else [], [] if sends else [extent(t)])
        return Work(sim.record(0, *key), device, [t])

    @staticmethod
    def _waited(work: Any, then: Callable[[], Any]) -> Under_Way:
        """Wait in a thread: Gloo's messages end only if a thread waits for them."""
        over = threading.Event()

        def wait() -> None:
            work.wait()
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        return over.is_set, then

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if cpu := self._on_cpu(tensor):
            return cpu.send(tensors, dst, tag)
        late = operators.late(tensor)

        def begin() -> Under_Way:
            mine = _bytes(late.now().clone().view(-1))
            return self._waited(self._cpu.send([mine], dst, tag), lambda: mine)

        return self._message("send", dst, tensor, begin)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        if cpu := self._on_cpu(tensor):
            return cpu.recv(tensors, src, tag)
        late = operators.late(tensor)

        def begin() -> Under_Way:
            came = late.now().clone().view(-1)
            return self._waited(self._cpu.recv([_bytes(came)], src, tag), lambda: late.now().view(-1).copy_(came))

        return self._message("recv", src, tensor, begin)


def _reduce(parts: list[torch.Tensor], op: Any) -> torch.Tensor:
    """Reduce in rank order, 16-bit numbers in fp32 with rounding at the end (NCCL rounds more often)."""
    name = next(n for n in ("AVG", "SUM", "MAX", "MIN") if op == getattr(dist.ReduceOp, n))
    first = parts[0]
    total = first.float() if first.dtype.itemsize < 4 and first.is_floating_point() else first.clone()
    for part in parts[1:]:
        if name in ("AVG", "SUM"):
            total = total + part
        else:
            total = (torch.maximum if name == "MAX" else torch.minimum)(total, part.to(total.dtype))
    if name == "AVG":
        total = total / len(parts) if total.is_floating_point() else total // len(parts)
    return total.to(first.dtype)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> SimCCL:
    return SimCCL(store, rank, size, timeout)


dist.Backend.register_backend("simccl", _create, devices=[NAME])
if NAME not in dist.Backend.backend_capability["fake"]:
    dist.Backend.backend_capability["fake"].append(NAME)
