"""Spans of bytes in a file, which threads read to their places or sum in the page cache.

[Note: Summed in the page cache]
Verifying reads all bytes and keeps none. So sums are computed in the system's cache of the file, of which some MiB at a time
are mapped into memory. That takes half the time of copying them. First ``MADV_POPULATE_READ`` has the system read these MiB
into its cache. It raises if the file system maps no files, the system is not Linux 5.14 or later, or the disk fails; then the
bytes are read instead. If a file were cut off between that call and the sum, within a millisecond, the system would end the
process (SIGBUS). That does not happen to a checkpoint: it is never written again after its rename, and a removed file stays
for processes that have it open.

Loaded bytes are copied by the system: copying from a mapping is no faster, and a read reports a failing disk as an error.

[Note: Read twice]
A load that fails changes nothing, so all bytes are verified before the first is replaced. Reading them once would need a log
of the replaced values. Measured relative to reading in place, 145 MiB on each of two ranks: sum in the page cache, then read,
1.5; read in place and sum there, with a log 3.3 and a shard more memory, without 1.9; read and sum in a buffer of 1 MiB and
copy, 2.5. Bytes that the system has just copied are not in the core's cache, so summing them costs the same, and writing a
byte costs twice as much as reading one.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from flatshard._base.environment import local_world_size
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._container import BLOCK, checksums

SHARE = 16 * BLOCK  # bytes for one thread at a time, and the most that a span may have
_GAP = 4096  # bytes between two spans that are read in one call: more than there are around a tensor
_POPULATE_READ = 22  # MADV_POPULATE_READ, which Python does not name


class FileSpan(NamedTuple):
    """Bytes of a file, to read or to verify."""

    start: int
    nbytes: int
    place: memoryview | None  # to read them to, or None to verify them
    sums: bytes = b""  # expected, of each block
    entry: Any = None  # of the checkpoint


_start = operator.attrgetter("start")


def read_spans(file: int, spans: Iterable[FileSpan], count: Callable[[int], object]) -> list[FileSpan]:
    """Read the spans with a place, and return the other spans that do not have their sums.

    ``count`` is called with the number of bytes of each finished share.
    """
    shares: list[list[FileSpan]] = []
    room = 0
    for span in sorted(spans, key=_start):
        if room <= 0:
            shares.append([])
            room = SHARE
        shares[-1].append(span)
        room -= span.nbytes
    wrong: list[FileSpan] = []
    read = functools.partial(_read_share, file)
    with contextlib.ExitStack() as stack:
        threads = min(own_cores(), len(shares))
        done = stack.enter_context(ThreadPoolExecutor(threads)).map(read, shares) if threads > 1 else map(read, shares)
        for share, found in zip(shares, done, strict=True):
            count(sum(span.nbytes for span in share))
            wrong += found
    return wrong


def own_cores() -> int:
    """Return the number of threads for this rank: its share of the cores, as memory and most disks are faster than one."""
    return min(8, max(1, (os.cpu_count() or 1) // (local_world_size() or 1)))


def _read_share(file: int, share: list[FileSpan]) -> list[FileSpan]:
    wrong: list[FileSpan] = []
    for run in _runs(share):
        first = run[0].start
        if run[0].place is not None:
            _fill(file, run)
            continue
        seen = _seen(file, first, run[-1].start + run[-1].nbytes - first)
        wrong += [s for s in run if checksums(seen[s.start - first : s.start - first + s.nbytes]) != s.sums]
    return wrong


def _runs(share: list[FileSpan]) -> Iterator[list[FileSpan]]:
    """Split a share into runs of spans that are adjacent in the file, except for the bytes around tensors."""
    run: list[FileSpan] = []
    end = 0
    for span in share:
        if run and not 0 <= span.start - end <= _GAP:
            yield run
            run = []
        run.append(span)
        end = span.start + span.nbytes
    yield run


def _fill(file: int, run: list[FileSpan]) -> None:
    """Read a run in one call. The bytes between spans go to a buffer that is dropped."""
    buffers: list[memoryview] = []
    end = run[0].start
    for span in run:
        assert span.place is not None
        if span.start > end:
            buffers.append(memoryview(bytearray(span.start - end)))
        buffers.append(span.place)
        end = span.start + span.nbytes
    disk.read(file, buffers, run[0].start)


def _seen(file: int, start: int, nbytes: int) -> memoryview:
    """Return bytes to verify: mapped, or read. [Note: Summed in the page cache]"""
    if nbytes >= BLOCK:
        skip = start % mmap.ALLOCATIONGRANULARITY
        with contextlib.suppress(OSError, ValueError):  # ValueError: Python's, where the file ends before
            # Writable, as torch wants it, though not to the file.
            mapped = mmap.mmap(file, skip + nbytes, access=mmap.ACCESS_COPY, offset=start - skip)
            mapped.madvise(_POPULATE_READ)
            return memoryview(mapped)[skip:]
    memory = memoryview(bytearray(nbytes))
    disk.read(file, [memory], start)
    return memory
