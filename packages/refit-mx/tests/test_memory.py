"""Arenas use pages of 2 MiB if the kernel has them, and work without.

These tests use internals: a refit shows neither the kernel's mappings nor CUDA's refusals.
"""

import errno
import mmap
import os
import platform
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_mx.memory import mapping as large_pages
from refit_mx.memory.arena import Arena, DoubleArena
from refit_mx.memory.cuda import registration_obstacle
from refit_mx.memory.mapping import LARGE_PAGE_BYTES, attach, map_shared

TIMEOUT_S = 20.0
NBYTES = 3 * LARGE_PAGE_BYTES + 5 * mmap.PAGESIZE


def _kernel() -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return tuple(map(int, match.groups())) if match else (0, 0)


needs_large_pages = pytest.mark.skipif(
    _kernel() < (6, 1) or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="needs Linux 6.1, which puts shared memory into large pages on request",
)


def mapped_in_large_pages(name: str) -> list[int]:
    """Return the bytes in large pages of each mapping of a memory."""
    sizes, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = name in line
        elif inside and line.startswith("ShmemPmdMapped:"):
            sizes.append(int(line.split()[1]) << 10)
    return sizes


def arena_in_large_pages() -> tuple[bool, int | None]:
    """Return whether both mappings of a new arena are in large pages.

    Also return the kernel's error number when large pages are requested again, or None.
    """
    arena = Arena(NBYTES, shared=True)
    arena.memory.fill_(3)
    other = attach(arena.shared, arena.nbytes)
    assert (np.frombuffer(other, np.uint8, arena.nbytes) == 3).all()
    sizes = mapped_in_large_pages(arena.shared.name)
    try:
        other.madvise(large_pages._COLLAPSE, 0, 3 * LARGE_PAGE_BYTES)
    except OSError as error:
        return sizes == [3 * LARGE_PAGE_BYTES] * 2, error.errno
    return sizes == [3 * LARGE_PAGE_BYTES] * 2, None


@needs_large_pages
def test_shared_arena_uses_large_pages():
    deadline = time.monotonic() + TIMEOUT_S
    refused = False
    while time.monotonic() < deadline:
        large, error = arena_in_large_pages()
        if large:
            return
        # The kernel has none free while other processes compete for memory.
        refused |= error in (errno.EAGAIN, errno.EBUSY, errno.ENOMEM)
    if refused:
        pytest.skip("needs free memory in pages of 2 MiB, which the kernel refused")
    pytest.fail("no arena is in large pages")


def test_shared_arena_works_in_small_pages(monkeypatch):
    # Older kernels reject this advice value.
    monkeypatch.setattr(large_pages, "_COLLAPSE", 1 << 20)
    arena = Arena(NBYTES, shared=True)
    assert arena.nbytes == NBYTES
    arena.memory[-1] = 7
    attached = np.frombuffer(attach(arena.shared, arena.nbytes), np.uint8, arena.nbytes)
    assert attached[-1] == 7
    assert not attached[:-1].any()


@settings(deadline=None, max_examples=50)
@given(
    pages=st.integers(1, 3 * LARGE_PAGE_BYTES // mmap.PAGESIZE),
    spare_pages=st.integers(0, LARGE_PAGE_BYTES // mmap.PAGESIZE),
)
def test_mapping_begins_with_the_file_and_ends_within_it(pages, spare_pages):
    nbytes = pages * mmap.PAGESIZE
    max_bytes = nbytes + spare_pages * mmap.PAGESIZE
    fd = os.memfd_create("refit-mx-test")
    os.ftruncate(fd, max_bytes)
    os.pwrite(fd, b"first", 0)
    os.pwrite(fd, b"last", nbytes - 4)
    memory = map_shared(fd, nbytes, prot=mmap.PROT_READ, max_bytes=max_bytes)
    assert nbytes <= len(memory) <= max_bytes
    assert (memory[:5], memory[nbytes - 4 : nbytes]) == (b"first", b"last")
    memory.close()
    os.close(fd)


def test_arena_after_a_failed_registration_is_free():
    failures = [OSError("no memory")]

    def refuse(arena: Arena) -> None:
        if failures:
            raise failures.pop()

    arenas = DoubleArena(on_new=refuse)
    with pytest.raises(OSError, match="no memory"):
        arenas.take(100)
    for version in ("v1", "v2"):
        arenas.hold(arenas.take(100), version)


# CUDA's memory, as far as it can be tested without a GPU


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ("", False),
        ("expandable_segments:False", False),
        ("max_split_size_mb:128", False),
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments:True", True),
    ],
)
def test_expandable_segments_are_refused_by_their_setting(name, settings, refused):
    why = registration_obstacle(GPU, {name: settings})
    assert (why is not None) == refused
    if why is not None:
        assert why.startswith(f"{name} has expandable_segments:True")
    assert registration_obstacle(torch.device("cpu"), {name: settings}) is None
