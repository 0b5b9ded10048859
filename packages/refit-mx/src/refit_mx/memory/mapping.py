"""Anonymous memory that another process on the same machine can map.

It exists while a process has it open or mapped, so killed processes leave nothing behind. A process
may map it if it may read its owner's /proc, that is, if it has the same user and sees the owner's
PID. Such a process can only read it; on Linux before 5.1 it can also write to it.

Large pages of 2 MiB make it fast: mapping another process's memory, or reading it as UCX does,
costs time for each page touched. Private memory gets large pages if the process advises the kernel.
Shared memory gets none on most systems (``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is
``never``), but Linux 6.1 and later can convert existing memory on request. A process uses such a
page as a large one only if its address and its offset in the file are equal modulo 2 MiB. If the
kernel refuses, small pages work as well.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import sys
from contextlib import suppress
from functools import cache

import numpy as np

from refit_mx.errors import ProtocolError
from refit_mx.manifest.format import SharedMemory

_LINK = "/memfd:{} (deleted)"
"""Target of the link in /proc for the memory's descriptor."""
_SEAL_FUTURE_WRITE = 0x10
"""Seal that keeps writable mappings but allows no new ones; `fcntl` has no name for it."""


@cache
def shared_memory_missing() -> str | None:
    """Return why processes here cannot share memory; None if they can. Determined by trying."""
    if not sys.platform.startswith("linux"):
        return f"memory can be shared only on Linux; this is {sys.platform}"
    try:
        fd, memory, shared = create(mmap.PAGESIZE)
        try:
            attach(shared, mmap.PAGESIZE).close()
        finally:
            memory.close()
            os.close(fd)
    # The C library lacks the call, the kernel forbids it, or /proc is not mounted.
    except (AttributeError, OSError, ProtocolError) as error:
        return f"memory cannot be shared here: {error!r}"
    return None


def create(nbytes: int) -> tuple[int, mmap.mmap, SharedMemory]:
    """Create shared memory of ``nbytes`` zeros.

    Returns:
        Its file descriptor, which must stay open while others may map it; the writable memory, of
        at least ``nbytes``; and the description for other processes.
    """
    name = f"refit-mx-{secrets.token_hex(16)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Untouched pages use no memory.
        size = nbytes if nbytes < LARGE_PAGE_BYTES else nbytes + LARGE_PAGE_BYTES
        os.ftruncate(fd, size)
        memory = map_shared(fd, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE, max_bytes=size)
        # Access beyond the end of a mapped file kills the process.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with suppress(OSError):  # an older kernel
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    except BaseException:  # close it also on an interrupt
        os.close(fd)
        raise
    return fd, memory, SharedMemory(os.getpid(), fd, name)


def attach(shared: SharedMemory, nbytes: int) -> mmap.mmap:
    """Map another process's memory for reading; return ``nbytes`` or more.

    Raises:
        OSError: there is no such memory here, or this process may not map it.
        ProtocolError: it is smaller, or its owner could shrink it.
    """
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    # Checked before opening too, since opening a device or a pipe may have effects.
    _check(path, shared)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(f"/proc/self/fd/{fd}", shared)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
            raise ProtocolError(
                f"memory {shared.name!r}: {status.st_size} bytes; expected {nbytes} or more"
            )
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError(f"memory {shared.name!r} may shrink; expected it to be sealed")
        return map_shared(fd, nbytes, prot=mmap.PROT_READ, max_bytes=status.st_size)
    finally:
        os.close(fd)


def _check(path: str, shared: SharedMemory) -> None:
    target = os.readlink(path)
    if target != _LINK.format(shared.name):
        raise FileNotFoundError(f"{path} is {target!r}; expected the memory {shared.name!r}")


LARGE_PAGE_BYTES = 2 << 20
_ADVICE: int = getattr(mmap, "MADV_HUGEPAGE", 0)
"""``MADV_HUGEPAGE``; 0 if the system lacks it."""
_COLLAPSE = 25
"""``MADV_COLLAPSE`` on Linux; `mmap` has no name for it."""
_STEP_BYTES = 64 << 20
"""Bytes to collapse in one call, which holds the interpreter's lock."""
_TRIES = 4


def private_memory(nbytes: int) -> mmap.mmap | None:
    """Allocate private memory in large pages; return None if it is small or they are missing."""
    if nbytes < LARGE_PAGE_BYTES or not _ADVICE:
        return None
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(_ADVICE)
    return memory


def map_shared(fd: int, nbytes: int, *, prot: int, max_bytes: int) -> mmap.mmap:
    """Map ``nbytes`` or more of a file from its start, at an address that allows large pages.

    If the file's size ``max_bytes`` is `LARGE_PAGE_BYTES` more than ``nbytes``, there is space to
    align the mapping.
    """
    length = nbytes
    for _ in range(_TRIES):
        memory = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=prot)
        beyond = np.frombuffer(memory, np.uint8).ctypes.data % LARGE_PAGE_BYTES
        if nbytes < LARGE_PAGE_BYTES or not beyond:
            return memory
        # The kernel fills a gap from its end: a mapping longer by n bytes starts n bytes earlier.
        longer = nbytes + (length - nbytes + beyond) % LARGE_PAGE_BYTES
        if longer > max_bytes:
            return memory
        memory.close()
        length = longer
    return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)


def collapse_shared(memory: mmap.mmap, nbytes: int) -> None:
    """Convert a mapping of zeros from `map_shared` to large pages, before it is first written to.

    Its first ``nbytes`` are used; all of them are allocated afterwards.
    """
    if nbytes < LARGE_PAGE_BYTES or not _ADVICE:
        return
    first = np.frombuffer(memory, np.uint8)[:nbytes:LARGE_PAGE_BYTES]
    with suppress(OSError):
        # With advice for shared memory, touching one byte allocates its complete large page.
        memory.madvise(_ADVICE)
        for begin in range(0, nbytes, _STEP_BYTES):
            end = min(nbytes, begin + _STEP_BYTES)
            first[begin // LARGE_PAGE_BYTES : -(-end // LARGE_PAGE_BYTES)] = 0
            memory.madvise(_COLLAPSE, begin, end - begin)
