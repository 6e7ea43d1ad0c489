"""Payloads in shared memory: gloo's bits, whichever ranks share memory, and no segment left however ranks end.

The other files of this folder test behaviour that depends on messages only: the order check, the watch, interrupts, the
fence. ``FLATSHARD_SHARED_MEMORY=0`` runs them with no payload in shared memory.
"""

import contextlib
import datetime
import errno
import functools
import gc
import mmap
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block
from on_ranks import ranks
from parity import check_parity
from recording import FULL, NO_SHARD, Net, make_input, sent_bytes
from torch import Tensor, nn

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard._base import environment
from flatshard._comm.backends import GlooCollectives
from flatshard._comm.collectives import Done, gathers_late
from flatshard._comm.progress import Label, Works
from flatshard._comm.shared_memory import mailboxes
from flatshard._comm.shared_memory import segment as segments
from flatshard._comm.shared_memory.mailboxes import CHUNK_BYTES, Inbox, Outbox
from flatshard._comm.shared_memory.payloads import SharedMemory
from flatshard._comm.shared_memory.segment import FIRST_BYTES, Mapping, PeerSegment, Segment
from flatshard._composable.find import units_below
from flatshard._handle.unsharded import FlatBuffer, UnshardedBuffer

NUMEL = 1037
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
HEADER = 24  # bytes, if gloo carries it


@contextlib.contextmanager
def sharing(least: int = 1) -> Iterator[None]:
    """Put payloads of at least ``least`` bytes into shared memory, or none if 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "SHARED_MEMORY", least)
        yield


def in_memory(group: Any) -> tuple[GlooCollectives, SharedMemory]:
    collectives = GlooCollectives(group)
    return collectives, collectives._share_memory()


def new_group(size: int) -> Any:
    return dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=20))


def results(collectives: GlooCollectives, size: int, rank: int, seed: int) -> dict[str, Tensor]:
    """Return the results of every collective on every dtype, all in flight at once."""
    issued: list[tuple[str, Tensor, Any]] = []
    for dtype in (*FLOATS, torch.uint8, torch.int64):
        torch.manual_seed(seed * size + rank)
        values = (torch.randn(size, NUMEL) * 100).to(dtype)
        shard = values[rank].clone()
        if dtype.is_complex:
            shard = shard.view(torch.uint8)  # the form in which flatshard sends it
        output = shard.new_empty(size * shard.numel())
        issued.append((f"gather {dtype}", output, collectives.all_gather(output, shard)))
        shard.zero_()  # the caller may write to it again
        output = torch.empty(size * NUMEL, dtype=dtype)
        issued.append((f"all-to-all {dtype}", output, collectives.all_to_all(output, values.flatten())))
        if dtype in FLOATS:
            for wide in {dtype, torch.float32 if dtype.itemsize == 2 else dtype}:
                output = torch.empty(NUMEL, dtype=wide)
                pending = collectives.reduce_scatter(output, values.flatten())
                issued.append((f"reduce-scatter {dtype} in {wide}", output, pending))
    random.Random(f"{seed}, {rank}").shuffle(issued)  # ranks wait in any order
    for _, _, pending in issued:
        pending.wait()
    return {what: torch.view_as_real(result) if result.is_complex() else result for what, result, _ in issued}


def check_bits(ctx, group: Any) -> None:
    collectives = GlooCollectives(group)
    for seed in range(3):
        with sharing(0):
            expected = results(collectives, ctx.world_size, ctx.rank, seed)
        for what, result in results(collectives, ctx.world_size, ctx.rank, seed).items():
            assert torch.equal(result, expected[what]), what


@pytest.mark.parametrize("ordered", [True, False])
@ranks(2, 3, 4)
def test_the_bits_are_those_of_gloo(ctx, ordered: bool) -> None:
    with sharing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailboxes, "are_ordered", ordered)
        group = new_group(ctx.world_size)
        check_bits(ctx, group)
        _, memory = in_memory(group)
        assert len(memory.handshake.peers) == len(memory.handshake.readers) == ctx.world_size - 1
        nbytes = memory.handshake.own.nbytes
        check_bits(ctx, group)
        assert memory.handshake.own.nbytes <= 2 * nbytes  # memory is reused


@pytest.mark.parametrize("ordered", [True, False])
@ranks(3)
def test_gloo_carries_no_payload(ctx, ordered: bool) -> None:
    """It carries nothing between ranks that keep step, and headers if their order in memory is not sure."""
    output, shard = torch.empty(ctx.world_size * NUMEL), torch.ones(NUMEL)
    with sharing(4 * NUMEL), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailboxes, "are_ordered", ordered)
        patch.setattr(mailboxes, "_SPIN", 30.0)
        collectives = GlooCollectives(new_group(3))
        collectives.all_gather(output, shard).wait()  # runs the handshake
        with sent_bytes() as sent, sharing(4 * NUMEL):
            collectives.all_gather(output, shard).wait()
            collectives.reduce_scatter(shard, output).wait()
        assert sent == ([] if ordered else 2 * (ctx.world_size - 1) * [HEADER])
        with sent_bytes() as sent, sharing(4 * NUMEL):  # smaller payloads are sent as messages
            collectives.all_gather(output[: 3 * (NUMEL - 1)], shard[1:]).wait()
        assert sent == (ctx.world_size - 1) * [4 * (NUMEL - 1)]


# -- Ranks that cannot share memory ------------------------------------------------------------------------------------


def fill(patch: pytest.MonkeyPatch) -> None:
    """Refuse memory for payloads from now on, but not for the message that reports it."""
    real = Segment.allocate

    def take(self: Any, nbytes: int) -> Any:
        if nbytes not in (0, CHUNK_BYTES):
            raise OSError(errno.ENOSPC, "no space")
        return real(self, nbytes)

    patch.setattr(Segment, "allocate", take)


@pytest.mark.parametrize("refused", ["one pair", "one rank", "two hosts", "all", "no memory", "no room"])
@ranks(4)
def test_ranks_that_share_no_memory_get_the_same_bits(ctx, refused: str) -> None:
    every = {(reader, sender) for reader in range(4) for sender in range(4) if reader != sender}
    pairs = {
        "one pair": {(1, 2)},
        "one rank": {pair for pair in every if 3 in pair},
        "two hosts": {(a, b) for a, b in every if a // 2 != b // 2},
        "all": every,
    }.get(refused, set())
    pids = torch.zeros(4, dtype=torch.int64)
    dist.all_gather_into_tensor(pids, torch.tensor([os.getpid()]))
    real = PeerSegment.__init__

    def init(self: Any, address: Any) -> None:
        if any((ctx.rank, sender) in pairs for sender, pid in enumerate(pids.tolist()) if pid == address[1]):
            raise PermissionError("another host")
        real(self, address)

    with sharing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerSegment, "__init__", init)
        if refused == "no memory" and ctx.rank == 2:
            patch.delattr(os, "memfd_create")
        is_full = refused == "no room" and ctx.rank != 1
        if is_full:
            fill(patch)
        group = new_group(4)
        check_bits(ctx, group)
        _, memory = in_memory(group)
        expected = {sender for reader, sender in every - pairs if reader == ctx.rank}
        assert {*memory.handshake.peers} == expected - ({2} if refused == "no memory" else set())
        assert bool(memory._messages) is is_full  # payloads without room are sent by gloo
    dist.barrier()


@ranks(2)
def test_who_has_no_room_does_not_wait_for_its_readers(ctx) -> None:
    shard = torch.full((FIRST_BYTES,), float(ctx.rank))
    outputs = [torch.empty(2 * FIRST_BYTES) for _ in range(2)]
    with sharing(), pytest.MonkeyPatch.context() as patch:
        collectives, memory = in_memory(new_group(2))
        collectives.all_gather(torch.empty(2 * NUMEL), torch.ones(NUMEL)).wait()  # runs the handshake
        fill(patch)
        pending = []
        for number, output in enumerate(outputs, 1):
            pending.append(collectives.all_gather(output, shard))
            assert [memory.handshake.own.is_read(block) for block, _ in memory._messages] == number * [False]
        dist.barrier(ctx.group)
        for each in pending:
            each.wait()
    for output in outputs:
        assert torch.equal(output.view(2, -1), torch.arange(2.0).view(2, 1).expand(2, FIRST_BYTES))


@pytest.mark.parametrize("ordered", [True, False])
@ranks(2)
def test_messages_do_not_overtake_those_that_wait_for_ranks_to_meet(ctx, ordered: bool) -> None:
    """Rank 1 issues all before rank 0 issues the first, and waits for it. The second is as small as a header."""
    with sharing(4 * NUMEL), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailboxes, "are_ordered", ordered)
        collectives, issued = GlooCollectives(new_group(2)), []
        if ctx.rank == 0:
            dist.barrier(ctx.group)
        for value, numel in enumerate((NUMEL, 6, NUMEL)):
            output, shard = torch.empty(2 * numel), torch.full((numel,), float(2 * value + ctx.rank))
            issued.append((output, collectives.all_gather(output, shard)))
            if ctx.rank == 0 == value:
                issued[0][1].wait()
        if ctx.rank == 1:
            dist.barrier(ctx.group)
        for _, pending in issued[::-1]:
            pending.wait()
        assert [output.view(2, -1)[:, -1].tolist() for output, _ in issued] == [[0, 1], [2, 3], [4, 5]]


@ranks(3)
def test_headers_find_their_collectives(ctx) -> None:
    """Ranks issue in one order for each tag, and wait in any. They sleep, are woken, and fill many chunks of headers."""
    labels = [Label(f"unit {number}", 4 * number) for number in range(1, 4)]
    with sharing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailboxes, "_SPIN", 0.0 if ctx.rank else 1e-4)
        collectives, order = GlooCollectives(new_group(3)), random.Random(ctx.rank)
        for start in range(0, 200, 10):
            issued = []
            for label in order.sample(labels, 3):
                for value in range(start, start + 10):
                    output, shard = torch.empty(9), torch.full((3,), float(label.tag + 100 * value + 10**5 * ctx.rank))
                    issued.append((label.tag + 100 * value, output, collectives.all_gather(output, shard, label)))
            order.shuffle(issued)
            for value, output, pending in issued:
                pending.wait()
                assert output.view(3, -1)[:, 1].tolist() == [value + 10**5 * rank for rank in range(3)]
        assert not any(inbox.headers for inbox in in_memory(collectives.group)[1].handshake.inboxes.values())


def make_mailbox() -> tuple[Outbox, Inbox]:
    """Return the mailbox of rank 0 of two, as its ranks see it."""
    segment = Segment(2)
    return Outbox(segment, [1]), Inbox(PeerSegment(segment.address), 0, 1, 2)


@pytest.mark.parametrize("when", ["asks", "sleeps"])
def test_a_header_outlives_its_sender(when: str) -> None:
    """A rank sends its last header and ends before it can wake its reader, which would wait for its connection."""
    outbox, inbox = make_mailbox()

    def end(number: int) -> None:
        outbox.put(4, number, 64, 128, 0, 8, lambda *_: Done())
        raise RuntimeError("connection closed")

    def send(number: int) -> Any:
        return Works([], functools.partial(end, number)) if when == "sleeps" else end(number)

    assert inbox.wait((4, 1), lambda *_: send(1)) == (64, 128, 8)
    with pytest.raises(RuntimeError, match="connection closed"):
        inbox.wait((4, 3), lambda *_: send(2))


def test_a_chunk_that_is_marked_is_not_read_again(monkeypatch) -> None:
    """An interrupt hits a reader when it has marked a chunk of headers as read."""
    outbox, inbox = make_mailbox()
    for number in range(1, 100):
        outbox.put(4, number, 64, 128, 0, 8, lambda *_: Done())
    real = Mapping.mark

    def mark(self: Any, place: int) -> None:
        real(self, place)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "mark", mark)
        with pytest.raises(KeyboardInterrupt):
            inbox.find((4, 99))
    for number in range(100, 300):  # the chunk is used again
        outbox.put(4, number, 64, 128, 0, 8, lambda *_: Done())
    assert all(inbox.find((4, number)) == (64, 128, 8) for number in range(1, 300))


@ranks(2)
def test_ranks_meet_whatever_else_they_wait_for(ctx) -> None:
    """Each rank waits for a different group first."""
    with sharing():
        shard, groups = torch.ones(NUMEL), [new_group(2), new_group(2)]
        pending = [GlooCollectives(group).all_gather(torch.empty(2 * NUMEL), shard) for group in groups]
        pending[ctx.rank].wait()
        dist.barrier(ctx.group)
        pending[1 - ctx.rank].wait()


@ranks(2)
def test_a_rank_issues_its_first_collective_long_before_it_waits(ctx) -> None:
    """The timeout is that of a wait: nobody waits while rank 1 is late."""
    with sharing():
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
        output = torch.empty(2 * NUMEL)
        if ctx.rank == 1:
            time.sleep(3)
        pending = GlooCollectives(group).all_gather(output, torch.full((NUMEL,), float(ctx.rank)))
        dist.barrier(ctx.group)
        pending.wait()
        assert output.view(2, -1)[:, 0].tolist() == [0, 1]
        group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
        began = time.monotonic()
        if ctx.rank == 0:
            pending = GlooCollectives(group).all_gather(output, torch.ones(NUMEL))
            with pytest.raises(RuntimeError, match="timeout") as e:
                pending.wait()
            assert e.value.__notes__ == ["while receiving from rank 1 of the group"]
            assert time.monotonic() - began < 20
        dist.barrier(ctx.group)


@ranks(2)
def test_another_file_in_its_place_is_not_read(ctx) -> None:
    """On another host, a process with the same number may have a file with the same number."""
    with sharing():
        segment = Segment(2)
        token, pid, fd, inode = segment.address
        assert PeerSegment(segment.address).mapping.token == segment.token
        reader, writer = os.pipe()
        text = os.memfd_create("text")
        os.write(text, b"no segment")
        for wrong in (
            [token, pid, text, os.fstat(text).st_ino],  # its size is none of a segment
            [token + 1, pid, fd, inode],  # another segment
            [token, pid, fd, inode + 1],  # another file
            [token, pid, reader, os.fstat(reader).st_ino],  # reading it would block
            [token, pid, 10**6, inode],
            [0, 0, 0, 0],
        ):
            with pytest.raises(OSError):
                PeerSegment(wrong)
        for each in (reader, writer, text):
            os.close(each)


# -- Memory that stays -------------------------------------------------------------------------------------------------


def mapped_segments() -> int:
    return len(set(re.findall(r"\S+ \S+ (\S+ \S+) +/memfd:flatshard", Path("/proc/self/maps").read_text())))


@ranks(2)
def test_memory_is_used_again_and_freed_with_the_group(ctx) -> None:
    gc.collect()
    before = mapped_segments()
    shard, output = torch.full((4096,), float(ctx.rank)), torch.empty(2 * 4096)
    with sharing():
        group = new_group(2)
        collectives, memory = in_memory(group)
        collectives.all_gather(output, shard).wait()
        segment = memory.handshake.own
        assert segment is not None
        for _ in range(100):
            collectives.all_gather(output.zero_(), shard).wait()
            assert output.view(2, -1)[:, 0].tolist() == [0, 1]
        dist.barrier(group)
        assert segment.nbytes <= 2 * FIRST_BYTES
        pending = [collectives.all_gather(torch.empty(2 * 4096), shard) for _ in range(400)]  # the segment grows
        for each in pending:
            each.wait()
        dist.barrier(group)
        segment.allocate(1)
        assert len(segment._blocks) == 2  # the other has headers
        assert mapped_segments() == before + 2
        pending.clear()
        dist.destroy_process_group(group)
        del group, collectives, memory, segment, each
        gc.collect()
        assert mapped_segments() == before


def test_a_segment_that_could_not_be_mapped_grows_later(monkeypatch) -> None:
    """A mapping takes a file descriptor, of which a process may have too few."""
    segment = Segment(2)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "Mapping", lambda fd: os.open("/nowhere", os.O_RDONLY))
        with pytest.raises(OSError):
            segment.lend(FIRST_BYTES, torch.float32)
    assert segment.lend(FIRST_BYTES, torch.float32).fill_(1).sum() == FIRST_BYTES


@ranks(2)
def test_memory_that_has_grown_and_cannot_be_mapped_raises(ctx) -> None:
    """A file descriptor may be missing for payloads, or for the headers that say where they are."""
    with sharing(), pytest.MonkeyPatch.context() as patch:
        for numel, count in ((1, 100), (FIRST_BYTES, 1)):
            collectives, shard = GlooCollectives(new_group(2)), torch.ones(numel)
            collectives.all_gather(torch.empty(2), torch.ones(1)).wait()  # runs the handshake
            pending = [collectives.all_gather(torch.empty(2 * numel), shard) for _ in range(count)]
            dist.barrier(ctx.group)
            with patch.context() as refused:
                refused.setattr(PeerSegment, "map_until", lambda self, stop: os.open("/nowhere", os.O_RDONLY))
                with pytest.raises(RuntimeError, match=f"memory of rank {1 - ctx.rank} .*FLATSHARD_SHARED_MEMORY=0"):
                    pending[-1].wait()
            for each in pending:
                each.wait()


@ranks(2)
def test_a_rank_that_waits_long_takes_no_processor_time(ctx) -> None:
    with sharing():
        collectives, output, shard = GlooCollectives(new_group(2)), torch.empty(2 * NUMEL), torch.ones(NUMEL)
        collectives.all_gather(output, shard).wait()  # runs the handshake
        dist.barrier(ctx.group)
        began = time.thread_time()
        if ctx.rank == 1:
            time.sleep(1)
        collectives.all_gather(output, shard).wait()
        assert time.thread_time() - began < 0.1


@ranks(2)
def test_a_forked_process_lets_go(ctx) -> None:
    with sharing():
        collectives, memory = in_memory(new_group(2))
        collectives.all_gather(torch.empty(2 * NUMEL), torch.ones(NUMEL)).wait()
        here = mapped_segments()
        _, _, fd, _ = memory.handshake.own.address
        del memory
        if (child := os.fork()) == 0:
            with contextlib.suppress(OSError):
                os.fstat(fd)
                os._exit(1)  # it is still open
            os._exit(0 if mapped_segments() <= here - 2 else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        collectives.all_gather(torch.empty(2 * NUMEL), torch.ones(NUMEL)).wait()


@ranks(3)
def test_inputs_of_reductions_are_read_where_they_lie(ctx) -> None:
    with sharing():
        collectives, memory = in_memory(ctx.group)
        collectives.all_gather(torch.empty(3 * NUMEL), torch.ones(NUMEL)).wait()
        dist.barrier(ctx.group)
        for numel in (NUMEL, 2 * NUMEL):
            lent, output = collectives._lend_memory(3 * numel, torch.float32, False), torch.empty(numel)
            beside = collectives._lend_memory(3 * numel, torch.float32, False)
            assert beside.data_ptr() != lent.data_ptr()  # a tensor still uses it, although it will not be read
            lent.copy_(torch.arange(3 * numel) + ctx.rank)
            segment, address = memory.handshake.own, lent.data_ptr()
            in_use = len(segment._blocks)
            pending = collectives.reduce_scatter(output, lent)
            assert len(segment._blocks) == in_use  # no other memory is used
            again = collectives.reduce_scatter(torch.empty(numel), lent)
            assert len(segment._blocks) == in_use + 1  # the first is still being read
            if ctx.rank == 0:
                del lent
                # The memory is not reused until the others have read it.
                other = collectives._lend_memory(3 * numel, torch.float32, False)
                assert other.data_ptr() != address
            dist.barrier(ctx.group)
            pending.wait()
            again.wait()
            assert torch.equal(output, torch.arange(3 * numel).view(3, -1)[ctx.rank] + 1.0)
            dist.barrier(ctx.group)
            lent = other = beside = None
            segment.allocate(1)
            assert len(segment._blocks) == 2  # the other has headers


@ranks(2)
def test_gradients_are_copied_to_where_they_are_read(ctx) -> None:
    lent, real = list[Any](), GlooCollectives._lend_memory

    def lend(self: Any, numel: int, dtype: torch.dtype, to_all: bool) -> Tensor | None:
        found = real(self, numel, dtype, to_all)
        lent.extend([] if to_all else [found])
        return found

    with sharing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlooCollectives, "_lend_memory", lend)
        model = fully_shard(Net(blocks=3), policy={Block}, process_group=new_group(2))
        model(make_input(0, 2)).sum().backward()
        lent.clear()
        model(make_input(0, 2)).sum().backward()
    assert len(lent) == len(flatshard.describe(model).units)
    assert all(each.abs().sum() > 0 for each in lent)


@ranks(2)
def test_units_ahead_take_no_memory(ctx) -> None:
    ahead, taken, gathers, real = list[int](), list[Any](), list[Any](), (FlatBuffer.take, GlooCollectives.all_gather)

    def look(*_: Any) -> None:
        handles = [unit.handle for unit in units_below(model)]
        ahead.extend(flat.unsharded.nbytes for h in handles if h.state.name == "UNSHARDING" for flat in h.flats)

    @gathers_late
    def gather(*args: Any, ensure_output: Any = None) -> Any:
        gathers.extend([] if ensure_output is None else [ensure_output])
        return real[1](*args, ensure_output=ensure_output)

    with sharing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatBuffer, "take", lambda *args: (taken.append(args[1]), real[0](*args)))
        patch.setattr(GlooCollectives, "all_gather", gather)
        model = fully_shard(Net(blocks=4), policy={Block}, process_group=ctx.group)
        for module in model.modules():
            if isinstance(module, Block):
                module.register_full_backward_pre_hook(look)
                module.register_forward_pre_hook(look)
        for _ in range(2):
            del ahead[:], taken[:], gathers[:]
            model(make_input(0, 2)).sum().backward()
    assert {*ahead} == {0}
    assert len([each for each in taken if isinstance(each, UnshardedBuffer)]) == len(gathers) > 4


def held(segment: Any) -> int:
    return os.fstat(segment._fd).st_blocks * 512


def test_memory_that_no_pass_uses_any_more_is_given_back(monkeypatch) -> None:
    monkeypatch.setattr(segments, "_KEPT", 0)

    def send(nbytes: int) -> Any:
        block = segment.allocate(nbytes)
        segment.await_readers(block, [1])
        return block

    def read(block: Any) -> None:
        segment.mapping.map[block.start + 1] = 1

    segment, shard, input, pages = Segment(2), 16 * mmap.PAGESIZE, 32 * mmap.PAGESIZE, list[int]()
    for lends in (False, True, False):  # a forward, a backward, a forward
        sent = send(shard)
        lent = segment.lend(input // 4, torch.float32).fill_(1) if lends else None
        pages.append(held(segment) // mmap.PAGESIZE)
        del lent
        read(sent)
        segment.release_unused()
        pages.append(held(segment) // mmap.PAGESIZE)
    assert pages == [17, 1, 49, 17, 17, 17]
    sent, lent, late = send(shard), segment.lend(input // 4, torch.float32).fill_(1), send(input)
    read(sent)
    segment.release_unused()
    assert held(segment) == segment.nbytes == 81 * mmap.PAGESIZE  # everything above the shard is in use
    assert lent.sum() == input // 4
    read(late)
    segment.allocate(1)
    assert held(segment) == 50 * mmap.PAGESIZE  # read after the rest
    again = segment.lend(input // 4, torch.float32).fill_(2)
    segment.allocate(1)
    assert again.sum() == 2 * input // 4
    del lent, again
    segment.release_unused()
    segment.release_unused()
    assert held(segment) == mmap.PAGESIZE


@ranks(2)
def test_memory_of_reductions_is_given_back_when_a_backward_has_ended(ctx) -> None:
    with sharing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_KEPT", 0)
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(6)])
        fully_shard(model, policy={nn.Linear}, process_group=new_group(2))
        _, memory = in_memory(next(iter(units_below(model))).context.runtime.group)
        for layer in model:  # keeps ranks in step, so that at most three shards are in flight in a forward
            layer.register_forward_pre_hook(lambda *_: dist.barrier(ctx.group))
        for _ in range(4):
            model(torch.ones(2, 128)).sum().backward()
            dist.barrier(ctx.group)
            memory.handshake.own.allocate(1)  # releases blocks read after the end of backward
        shard = 128 * 128 // 2 * 4
        most = torch.tensor(memory.handshake.own.nbytes)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=ctx.group)  # a late rank reads payloads at once
        assert most > 4 * shard
        assert held(memory.handshake.own) < 3 * shard + 3 * mmap.PAGESIZE


# -- Training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [FULL, NO_SHARD, ShardingStrategy.HYBRID_FULL_SHARD])
@ranks(4)
def test_training_is_that_of_one_process(ctx, strategy: ShardingStrategy) -> None:
    where: dict[str, Any] = {"process_group": ctx.group}
    if strategy.is_hybrid:
        where = {"device_mesh": ctx.device_mesh((2, 2), ("replicate", "shard"))}

    def shard(model: nn.Module, group: Any) -> None:
        fully_shard(model, policy={Block}, strategy=strategy, **where)

    with sharing():
        check_parity(ctx, functools.partial(Net, blocks=3), make_input, steps=3, shard=shard)


@ranks(2)
def test_payloads_of_different_sizes_raise(ctx) -> None:
    numel = 4 + ctx.rank
    with sharing():
        collectives = GlooCollectives(ctx.group)
        with pytest.raises(
            RuntimeError, match=rf"rank {1 - ctx.rank} of the group sent {16 + 4 * (1 - ctx.rank)} bytes"
        ):
            collectives.all_gather(torch.empty(2 * numel), torch.ones(numel)).wait()
