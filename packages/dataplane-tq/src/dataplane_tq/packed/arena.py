"""Anonymous shared memory of fixed size.

The memory has no name in the file system. It exists as long as a process has it open or mapped, so
killed processes leave nothing behind. Pages are allocated on the first write.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray


class Arena:
    """Mapping of shared memory; `create` or `attach` builds one.

    Attributes:
        name: name for messages.
        fd: the memory's file descriptor, owned by the arena.
        nbytes: size of the memory.
        buffer: uint8 array over all of the memory.
    """

    def __init__(self, name: str, fd: int, nbytes: int) -> None:
        self.name = name
        self.fd = fd
        self.nbytes = nbytes
        self._mapping = mmap.mmap(fd, nbytes)
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Arena:
        """Create memory of ``nbytes`` zeros, listed as ``name`` in /proc."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # Without the seals a client could shrink the file, and access to a mapping beyond the
            # end of its file kills the process.
            fcntl.fcntl(
                fd,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            return cls(name, fd, nbytes)
        except BaseException:  # also an interrupt must not leak the descriptor
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Arena:
        """Map memory that another process created; takes ownership of ``fd``."""
        try:
            return cls(f"fd {fd}", fd, nbytes)
        except BaseException:  # also an interrupt must not leak the descriptor
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last array that views it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        self.buffer = np.empty(0, np.uint8)
        del self._mapping

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
