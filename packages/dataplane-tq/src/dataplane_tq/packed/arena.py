"""Anonymous shared memory of fixed size.

The memory has no name in the file system: it lives as long as a process has it open or mapped, so
nothing is left behind by processes that are killed. Pages appear when they are first written to.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray


class Arena:
    """A mapping of shared memory. Built by `create` or `attach`.

    Attributes:
        name: for messages.
        fd: the memory's file descriptor, owned by the arena.
        nbytes: its size.
        buffer: uint8 array over the whole memory.
    """

    def __init__(self, name: str, fd: int, nbytes: int) -> None:
        self.name = name
        self.fd = fd
        self.nbytes = nbytes
        self._mapping = mmap.mmap(fd, nbytes)
        self.buffer: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Arena:
        """New memory of ``nbytes`` zeros, shown as ``name`` in /proc."""
        if nbytes <= 0:
            raise ValueError(f"arena {name!r}: {nbytes} bytes; expected at least 1")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # Whoever is given the descriptor could otherwise shrink the file, and touching a
            # mapping beyond the end of its file kills the process.
            fcntl.fcntl(
                fd,
                fcntl.F_ADD_SEALS,
                fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
            )
            return cls(name, fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Arena:
        """Map memory that another process created; takes ownership of ``fd``."""
        try:
            return cls(f"fd {fd}", fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last array that views it."""
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
