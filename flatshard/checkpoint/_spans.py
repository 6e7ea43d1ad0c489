"""Spans of a file's bytes, read to their places or summed where they are, by threads.

[Note: Summed where it lies]
To verify bytes, all are read and none is kept. So the sum is taken where the system has them already, in its cache of the
file: some MiB of it at a time are mapped into memory. That takes half the time of copying them out. First the system is
asked to read these MiB into its cache (``MADV_POPULATE_READ``). That raises where it is not possible: the file system maps
no files, the system is another or older (Linux before 5.14), a disk fails. Then the bytes are read instead. If a file was
cut off between that call and the sum, a millisecond, the system would end the process (SIGBUS). Nobody cuts one off: a
checkpoint is renamed whole and never written again. One that is replaced is removed, and a removed file stays for those who
have it open.

What is loaded is copied by the system, to its place: copying from a mapping is no faster, and a disk that fails is an error.

[Note: Looked at twice]
A load that fails changes nothing, so all bytes are verified before the first is replaced. To look at them once, what was
replaced would have to be kept. Measured over one reading into place, 145 MiB for each of two ranks at once: to sum where it
lies, and then read, 1.5; to read into place, sum there, and copy what was there to a log before, 3.3, with a shard more
memory, and 1.9 without the log; to read into a buffer of 1 MiB, sum it there and copy it on, 2.5, without a log as well.
What the system has just copied is not in the core's cache, so a sum there costs what it costs where the file lies; and each
byte that is written costs twice a byte that is read.
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

from flatshard._config import local_world_size
from flatshard.checkpoint import _disk as disk
from flatshard.checkpoint._container import BLOCK, checksums

SHARE = 16 * BLOCK  # bytes for one thread at a time: the most that a span may have
_GAP = 4096  # bytes between two spans that are read at once: more than is around a tensor's
_POPULATE_READ = 22  # MADV_POPULATE_READ, which Python does not name


class FileSpan(NamedTuple):
    """Bytes of a file, and what is to be done with them."""

    start: int
    nbytes: int
    place: memoryview | None  # to which they are read. None: they are summed
    sums: bytes = b""  # of each block, as they should be
    entry: Any = None  # of the checkpoint, that they are of


_start = operator.attrgetter("start")


def read_spans(file: int, spans: Iterable[FileSpan], count: Callable[[int], object]) -> list[FileSpan]:
    """Read all that have a place; returns those of the others that do not have their sums.

    ``count`` is told of bytes as they are done.
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
    """How many threads work for this rank: memory and most disks are faster than one core, and it has its share of these."""
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
    """What of a share lies side by side in the file, but for what is around a tensor's bytes."""
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
    """In one call, with what lies between read beside."""
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
    """Bytes to be looked at. [Note: Summed where it lies]"""
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
