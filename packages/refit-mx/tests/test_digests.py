"""Digests notice moved bytes, and do not depend on the layout of the memory.

These tests use internals: index arithmetic of reads, with products that overflow.
"""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_processes import pattern, random_reads, reference_bytes

from refit_mx.manifest.byte_spans import CHUNK_BYTES, ByteSpans, check_reads, chunks
from refit_mx.manifest.digests import digest_of_reads
from refit_mx.transports.base import ReadTable


def table(*rows: tuple[int, ...]) -> ReadTable:
    return ReadTable(np.array(rows, np.int64).reshape(-1, 9))


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_digests_of_reads_are_those_of_the_bytes_in_order(seed, count):
    memory = pattern(1 << 16, seed)
    reads = random_reads(1 << 16, count, seed)
    for side in ("source", "scratch"):
        expected = b"".join(
            xxhash.xxh3_128_digest(row) for row in reference_bytes(memory, reads, side)
        )
        assert digest_of_reads(memory, reads, side=side) == expected


@pytest.mark.parametrize(
    "row",
    [
        (1, 0, 100, 1, 0, 0, 1, 0, 0),
        (0, 0, 10, 11, 10, 10, 1, 0, 0),
        (0, 0, 1, 2, 2**62, 1, 3, 2**62, 1),
        (0, 0, 2**62, 4, 0, 0, 1, 0, 0),
        (0, 0, 2**32, 2**32, 0, 0, 1, 0, 0),
        (2**63 - 1, 0, 2**63 - 1, 1, 0, 0, 1, 0, 0),
        (-1, 0, 1, 1, 0, 0, 1, 0, 0),
        (50, 0, 1, 2, -50, 0, 1, 0, 0),
        (0, 0, 0, 1, 0, 0, 1, 0, 0),
        (0, 0, 1, 0, 0, 0, 1, 0, 0),
        (0, 0, 1, 1, 0, 0, -1, 0, 0),
        (0, 0, 50, 3, 0, 50, 1, 0, 0),
    ],
)
def test_reads_outside_the_memory_are_refused(row):
    with pytest.raises(ValueError, match=r"read 1 of 2 .* not inside the source of 100 bytes"):
        check_reads(table((0, 0, 100, 1, 0, 0, 1, 0, 0), row), 100, "source")


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([1 << 12, 3 << 20]))
def test_chunks_copy_every_byte_to_its_place(seed, count, nbytes):
    source, scratch = pattern(nbytes, seed), pattern(nbytes, seed + 1)
    reads = random_reads(nbytes, count, seed, max_run=nbytes)
    expected = scratch.clone()
    for row, data in zip(
        reads.rows.tolist(), reference_bytes(source, reads, "source"), strict=True
    ):
        _, dst, run, n1, _, dst1, n2, _, dst2 = row
        for k in range(n1 * n2):
            at = dst + k // n1 * dst2 + k % n1 * dst1
            part = bytearray(data[k * run : (k + 1) * run])
            expected[at : at + run] = torch.frombuffer(part, dtype=torch.uint8)
    sender, receiver = ByteSpans(source), ByteSpans(scratch)
    for sent, taken in zip(chunks(reads, "source"), chunks(reads, "scratch"), strict=True):
        wire = b"".join(sender.buffers(sent, load=True))
        assert len(wire) <= CHUNK_BYTES
        for buffer in receiver.buffers(taken, load=False):
            buffer[:], wire = wire[: len(buffer)], wire[len(buffer) :]
        assert not wire
        receiver.store(taken)
    assert torch.equal(scratch, expected)
