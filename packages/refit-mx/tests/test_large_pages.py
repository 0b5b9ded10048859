"""Arenas lie in pages of 2 MiB where the kernel has them, and are as good where it has none."""

import mmap
import os
import platform
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_mx import large_pages
from refit_mx.arena import Arena
from refit_mx.large_pages import LARGE_PAGE_BYTES, map_shared
from refit_mx.shared_memory import attach

NBYTES = 3 * LARGE_PAGE_BYTES + 5 * mmap.PAGESIZE


def _kernel() -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return tuple(map(int, found.groups())) if found else (0, 0)


needs_large_pages = pytest.mark.skipif(
    _kernel() < (6, 1) or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs Linux 6.1, which puts shared memory into large pages when it is told to",
)


def mapped_in_large_pages(name: str) -> list[int]:
    """Bytes of each mapping of a memory."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = name in line
        elif inside and line.startswith("ShmemPmdMapped:"):
            found.append(int(line.split()[1]) << 10)
    return found


@needs_large_pages
def test_a_shared_arena_is_seen_in_large_pages_by_its_owner_and_by_who_maps_it():
    arena = Arena(NBYTES, shared=True)
    arena.memory.fill_(3)
    other = attach(arena.shared, arena.nbytes)
    assert (np.frombuffer(other, np.uint8, arena.nbytes) == 3).all()
    assert mapped_in_large_pages(arena.shared.name) == [3 * LARGE_PAGE_BYTES] * 2


def test_a_shared_arena_in_small_pages_is_as_good(monkeypatch):
    # As older kernels answer: there is no such advice.
    monkeypatch.setattr(large_pages, "_COLLAPSE", 1 << 20)
    arena = Arena(NBYTES, shared=True)
    assert arena.nbytes == NBYTES
    arena.memory[-1] = 7
    there = np.frombuffer(attach(arena.shared, arena.nbytes), np.uint8, arena.nbytes)
    assert there[-1] == 7
    assert not there[:-1].any()


@settings(deadline=None, max_examples=50)
@given(
    pages=st.integers(1, 3 * LARGE_PAGE_BYTES // mmap.PAGESIZE),
    room=st.integers(0, LARGE_PAGE_BYTES // mmap.PAGESIZE),
)
def test_a_mapping_begins_with_the_file_and_ends_within_it(pages, room):
    nbytes = pages * mmap.PAGESIZE
    most_bytes = nbytes + room * mmap.PAGESIZE
    fd = os.memfd_create("refit-mx-test")
    os.ftruncate(fd, most_bytes)
    os.pwrite(fd, b"first", 0)
    os.pwrite(fd, b"last", nbytes - 4)
    memory = map_shared(fd, nbytes, prot=mmap.PROT_READ, most_bytes=most_bytes)
    assert nbytes <= len(memory) <= most_bytes
    assert (memory[:5], memory[nbytes - 4 : nbytes]) == (b"first", b"last")
    memory.close()
    os.close(fd)
