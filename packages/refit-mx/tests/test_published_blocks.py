"""A source sees for itself whether its memory still holds what it published."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from transport_processes import manifest, pattern

from refit_mx.arena import Arena
from refit_mx.deadline import Deadline
from refit_mx.digests import block_digests
from refit_mx.errors import DigestMismatchError
from refit_mx.manifest import BLOCK_BYTES
from refit_mx.published_blocks import PublishedBlocks
from refit_mx.reads import ReadTable
from refit_mx.source_client import SourceClient
from refit_mx.source_server import SourceServer

SIZES = [3 * BLOCK_BYTES // 2, 0, 100, BLOCK_BYTES]
OFFSETS = [0, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES]
NBYTES = 4 * BLOCK_BYTES


def soon() -> Deadline:
    return Deadline(30, "test")


def reads(*rows: tuple[int, ...]) -> ReadTable:
    return ReadTable(np.array(rows, np.int64).reshape(-1, 9))


def run(src: int, nbytes: int) -> tuple[int, ...]:
    return (src, 0, nbytes, 1, 0, 0, 1, 0, 0)


@pytest.fixture
def memory() -> torch.Tensor:
    return pattern(NBYTES, 1)


@pytest.fixture
def blocks(memory) -> PublishedBlocks:
    pairs = zip(OFFSETS, SIZES, strict=True)
    digests = b"".join(block_digests(memory, offset, size) for offset, size in pairs)
    return PublishedBlocks(OFFSETS, SIZES, digests)


def test_memory_that_is_as_it_was_published_has_no_changed_block(memory, blocks):
    pairs = zip(OFFSETS, SIZES, strict=True)
    assert blocks.changed(memory, reads(*[run(*each) for each in pairs if each[1]])) is None
    assert blocks.changed(memory, reads()) is None


@pytest.mark.parametrize(
    ("byte", "block"),
    [
        (0, (0, BLOCK_BYTES)),
        (BLOCK_BYTES - 1, (0, BLOCK_BYTES)),
        (BLOCK_BYTES, (BLOCK_BYTES, SIZES[0])),
        (OFFSETS[2] + 99, (OFFSETS[2], OFFSETS[2] + 100)),
        (NBYTES - 1, (OFFSETS[3], NBYTES)),
    ],
)
def test_a_changed_bit_is_found_by_every_read_that_reaches_into_its_block(
    memory, blocks, byte, block
):
    memory[byte] ^= 16
    begin, end = block
    whole = reads(*[run(o, n) for o, n in zip(OFFSETS, SIZES, strict=True) if n])
    strided = (begin, 0, 1, 2, end - begin - 1, 1, 1, 0, 0)
    for table in (whole, reads(run(begin, 1)), reads(run(end - 1, 1)), reads(strided)):
        assert blocks.changed(memory, table) == block


def test_a_changed_bit_in_a_block_that_is_not_read_is_nobodys_business(memory, blocks):
    memory[BLOCK_BYTES] ^= 1
    memory[OFFSETS[2] + 100] ^= 1  # between two shards
    assert blocks.changed(memory, reads(run(0, BLOCK_BYTES), run(OFFSETS[3], 5))) is None
    assert blocks.changed(memory, reads(run(OFFSETS[2], 100))) is None


def test_digests_of_other_shards_are_refused():
    with pytest.raises(ValueError, match="16 bytes of digests for 2 blocks; expected 32"):
        PublishedBlocks([0], [BLOCK_BYTES + 1], bytes(16))


def test_a_source_vouches_for_no_range_of_a_block_that_has_changed():
    arena = Arena(NBYTES)
    arena.memory[:] = pattern(NBYTES, 1)
    blocks = PublishedBlocks([0], [NBYTES], block_digests(arena.memory, 0, NBYTES))
    with SourceServer(incarnation="life-1") as server:
        server.serve_version("v1", arena.memory, blocks)
        source = manifest(server, arena)
        with contextlib.closing(SourceClient(source)) as client:
            part = reads(run(10, 20))
            assert client.digests(part, version_id="v1", deadline=soon())
            arena.memory[900] ^= 1
            with pytest.raises(DigestMismatchError, match="not as it published it") as changed:
                client.digests(part, version_id="v1", deadline=soon())
            assert changed.value.worker_ids == (source.worker_id,)
            elsewhere = reads(run(BLOCK_BYTES, 20))
            assert client.digests(elsewhere, version_id="v1", deadline=soon())
