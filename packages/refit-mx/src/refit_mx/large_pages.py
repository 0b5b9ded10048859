"""Memory in pages of 2 MiB, where the kernel has them.

Who reads another process's memory, as UCX does between processes of one machine, pays for each page
that it touches, and so does who maps it. Private memory comes in large pages once the kernel is
advised so. Of shared memory it has none by itself on most systems
(``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``never``), but from Linux 6.1 on it
makes some of what is there when it is told to; a process sees such a page as one only where its
address and its place in the file are the same modulo 2 MiB.

All of it is for speed alone: where the kernel says no, the memory is as good in small pages.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

LARGE_PAGE_BYTES = 2 << 20
_ADVICE: int = getattr(mmap, "MADV_HUGEPAGE", 0)
"""0 where the system has none."""
_COLLAPSE = 25
"""``MADV_COLLAPSE`` of Linux; `mmap` has no name for it."""
_STEP_BYTES = 64 << 20
"""Collapsed in one call, which holds the interpreter's lock."""
_TRIES = 4


def private_memory(nbytes: int) -> mmap.mmap | None:
    """New memory of this process in large pages; None if it is too small for one, or the system
    has none."""
    if nbytes < LARGE_PAGE_BYTES or not _ADVICE:
        return None
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(_ADVICE)
    return memory


def map_shared(fd: int, nbytes: int, *, prot: int, most_bytes: int) -> mmap.mmap:
    """Map a file from its beginning, so that large pages of it can be seen as such.

    Args:
        fd: of the file.
        nbytes: at least, whole pages.
        prot: as `mmap.mmap` has it.
        most_bytes: of the file; with `LARGE_PAGE_BYTES` more than ``nbytes`` there is room to come
            to lie well.

    Returns:
        ``nbytes`` or more.
    """
    length = nbytes
    for _ in range(_TRIES):
        memory = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=prot)
        beyond = np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE_BYTES
        if nbytes < LARGE_PAGE_BYTES or not beyond:
            return memory
        # The kernel fills a gap from its end, so a mapping that is longer begins as much before.
        longer = nbytes + (length - nbytes + beyond) % LARGE_PAGE_BYTES
        if longer > most_bytes:
            return memory
        memory.close()
        length = longer
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)


def collapse_shared(memory: mmap.mmap, nbytes: int) -> None:
    """Put what `map_shared` has mapped into large pages, before it is first written to.

    Args:
        memory: of zeros, writable.
        nbytes: of it that are used; all of them are there afterwards.
    """
    if nbytes < LARGE_PAGE_BYTES or not _ADVICE:
        return
    first = np.frombuffer(memory, np.uint8)[:nbytes:LARGE_PAGE_BYTES]
    with suppress(OSError):
        # Where shared memory is advised, a byte brings the whole page.
        memory.madvise(_ADVICE)
        for begin in range(0, nbytes, _STEP_BYTES):
            end = min(nbytes, begin + _STEP_BYTES)
            first[begin // LARGE_PAGE_BYTES : -(-end // LARGE_PAGE_BYTES)] = 0
            memory.madvise(_COLLAPSE, begin, end - begin)
