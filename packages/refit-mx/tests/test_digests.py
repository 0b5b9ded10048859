"""Digests notice what moved; they do not depend on how bytes lie."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_processes import pattern, random_reads, reference_bytes

from refit_mx.byte_spans import CHUNK_BYTES, ByteSpans, check_reads, chunks
from refit_mx.digests import block_digests, digest_of_reads
from refit_mx.manifest import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.reads import ReadTable


def table(*rows: tuple[int, ...]) -> ReadTable:
    return ReadTable(np.array(rows, np.int64).reshape(-1, 9))


@pytest.mark.parametrize("nbytes", [0, 1, 4096, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 5])
def test_block_digests_are_those_of_the_blocks(nbytes):
    memory = pattern(nbytes + 77, 1)
    data = memory.numpy().tobytes()[77:]
    expected = b"".join(
        xxhash.xxh3_128_digest(data[at : at + BLOCK_BYTES]) for at in range(0, nbytes, BLOCK_BYTES)
    )
    assert block_digests(memory, 77, nbytes) == expected


def test_a_shard_outside_the_memory_is_refused():
    memory = torch.zeros(10, dtype=torch.uint8)
    for offset, nbytes in [(-1, 5), (0, 11), (10, 1), (0, -1)]:
        with pytest.raises(ValueError, match="not inside the memory"):
            block_digests(memory, offset, nbytes)


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_digests_of_reads_are_those_of_the_bytes_in_order(seed, count):
    memory = pattern(1 << 16, seed)
    reads = random_reads(1 << 16, count, seed)
    for side in ("source", "scratch"):
        expected = b"".join(
            xxhash.xxh3_128_digest(row) for row in reference_bytes(memory, reads, side)
        )
        assert digest_of_reads(memory, reads, side=side) == expected


def test_source_and_scratch_have_equal_digests_when_the_bytes_are_equal():
    source, scratch = pattern(6000, 3), pattern(6000, 4)
    reads = table((100, 7, 10, 20, 50, 11, 3, 1200, 250), (0, 3000, 90, 1, 0, 0, 1, 0, 0))
    for (at, run, n1, s1, n2, s2), (to, d1, d2) in zip(
        reads.rows[:, [0, 2, 3, 4, 6, 7]].tolist(),
        reads.rows[:, [1, 5, 8]].tolist(),
        strict=True,
    ):
        for j in range(n2):
            for i in range(n1):
                a, b = at + j * s2 + i * s1, to + j * d2 + i * d1
                scratch[b : b + run] = source[a : a + run]
    there = digest_of_reads(source, reads, side="source")
    assert there == digest_of_reads(scratch, reads, side="scratch")
    scratch[7 + 11] ^= 1
    assert there != digest_of_reads(scratch, reads, side="scratch")


def test_two_rows_swapped_within_a_page_are_noticed():
    memory = pattern(4096, 5)
    reads = table((0, 0, 4096, 1, 0, 0, 1, 0, 0))
    strided = table((0, 0, 64, 32, 128, 128, 1, 0, 0))
    before = digest_of_reads(memory, reads, side="scratch")
    strided_before = digest_of_reads(memory, strided, side="scratch")
    blocks = block_digests(memory, 0, 4096)
    first = memory[0:64].clone()
    memory[0:64] = memory[128:192]
    memory[128:192] = first
    assert digest_of_reads(memory, reads, side="scratch") != before
    assert digest_of_reads(memory, strided, side="scratch") != strided_before
    assert block_digests(memory, 0, 4096) != blocks


@given(st.integers(0, 4095), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at, flip):
    memory = pattern(4096, 6)
    reads = table((0, 0, 16, 128, 32, 16, 2, 16, 2048))
    before = digest_of_reads(memory, reads, side="source")
    assert len(before) == DIGEST_BYTES
    memory[at] ^= flip
    assert digest_of_reads(memory, reads, side="source") != before


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
def test_reads_outside_the_memory_are_refused_also_where_products_overflow(row):
    with pytest.raises(ValueError, match=r"read 1 of 2 .* not inside the source of 100 bytes"):
        check_reads(table((0, 0, 100, 1, 0, 0, 1, 0, 0), row), 100, "source")


def test_reads_of_the_same_bytes_again_are_answered():
    memory = pattern(1 << 20, 8)
    reads = table((5, 0, 1 << 15, 4, 0, 0, 3, 0, 0), (5, 0, 3, 4, 0, 0, 3, 0, 0))
    expected = b"".join(
        xxhash.xxh3_128_digest(row) for row in reference_bytes(memory, reads, "source")
    )
    assert digest_of_reads(memory, reads, side="source") == expected


def test_reads_that_just_fit_are_accepted():
    check_reads(table((0, 0, 10, 5, 20, 0, 1, 0, 0), (90, 0, 10, 1, 0, 0, 1, 0, 0)), 100, "source")
    check_reads(table(), 0, "source")


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([1 << 12, 3 << 20]))
def test_both_sides_cut_the_same_chunks_and_store_brings_every_byte_to_its_place(
    seed, count, nbytes
):
    source, scratch = pattern(nbytes, seed), pattern(nbytes, seed + 1)
    reads = random_reads(nbytes, count, seed, most_run=nbytes)
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
