"""Memory that another process of the same machine can map, without a name in any file system.

It lives as long as a process has it open or mapped, so nothing is left behind by processes that are
killed. The kernel lets those map it who may look into its owner's /proc: processes of the same user
that see its PID. They can read it; from Linux 5.1 on only its owner can write to it.
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

from refit_mx.errors import ProtocolError
from refit_mx.large_pages import LARGE_PAGE_BYTES, map_shared
from refit_mx.manifest import SharedMemory

_SHOWN = "/memfd:{} (deleted)"
"""What /proc says that such a memory's descriptor is."""
_SEAL_FUTURE_WRITE = 0x10
"""Mappings that exist may be written to, and no others; `fcntl` has no name for it."""


@cache
def shared_memory_missing() -> str | None:
    """None if processes here can share memory, else why not; it is tried."""
    if not sys.platform.startswith("linux"):
        return f"memory without a name is Linux's; this is {sys.platform}"
    try:
        fd, memory, shared = create(mmap.PAGESIZE)
        try:
            attach(shared, mmap.PAGESIZE).close()
        finally:
            memory.close()
            os.close(fd)
    # Without the call in the C library, forbidden by the kernel, /proc not mounted.
    except (AttributeError, OSError, ProtocolError) as error:
        return f"memory without a name cannot be shared here: {error!r}"
    return None


def create(nbytes: int) -> tuple[int, mmap.mmap, SharedMemory]:
    """New memory of ``nbytes`` zeros.

    Returns:
        Its file descriptor, which has to stay open for as long as others are to map it; the memory,
        to be written to, of at least as many bytes; and what others have to know.
    """
    name = f"refit-mx-{secrets.token_hex(16)}"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # What is never touched takes no memory.
        room = nbytes if nbytes < LARGE_PAGE_BYTES else nbytes + LARGE_PAGE_BYTES
        os.ftruncate(fd, room)
        memory = map_shared(fd, nbytes, prot=mmap.PROT_READ | mmap.PROT_WRITE, most_bytes=room)
        # Touching a mapping beyond the end of its file kills the process.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with suppress(OSError):  # an older kernel
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd, memory, SharedMemory(os.getpid(), fd, name)


def attach(shared: SharedMemory, nbytes: int) -> mmap.mmap:
    """Another process's memory, to be read; ``nbytes`` or more.

    Args:
        shared: of the other process.
        nbytes: that it has to have at least.

    Raises:
        OSError: there is no such memory here, or this process may not map it.
        ProtocolError: it is smaller, or its owner could make it smaller.
    """
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    # Before it is opened: opening may do something where it is a device or a pipe.
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
        return map_shared(fd, nbytes, prot=mmap.PROT_READ, most_bytes=status.st_size)
    finally:
        os.close(fd)


def _check(path: str, shared: SharedMemory) -> None:
    found = os.readlink(path)
    if found != _SHOWN.format(shared.name):
        raise FileNotFoundError(f"{path} is {found!r}; expected the memory {shared.name!r}")
