"""Bounded requests read the same bytes, and every row is reported when it is complete.

These tests use internals: index arithmetic of reads, against a reference byte by byte.
"""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_processes import random_reads

from refit_mx.transports.base import ReadTable
from refit_mx.transports.batches import RowsDone, batches, split_reads
from refit_mx.transports.nixl_lane import descriptors, runs

NBYTES = 1 << 16


def pairs(reads: ReadTable) -> list[tuple[int, int]]:
    """Return source and scratch address of every byte, in order."""
    addresses = []
    for src, dst, run, n1, src1, dst1, n2, src2, dst2 in reads.rows.tolist():
        for j in range(n2):
            for i in range(n1):
                s, d = src + j * src2 + i * src1, dst + j * dst2 + i * dst1
                addresses += [(s + k, d + k) for k in range(run)]
    return addresses


def sizes(reads: ReadTable) -> np.ndarray:
    return reads.rows[:, 2] * reads.rows[:, 3] * reads.rows[:, 6]


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 10),
    st.sampled_from([1, 7, 100, 5000, 10**9]),
    st.sampled_from([None, 1, 3, 50]),
)
def test_split_reads_have_the_same_bytes_in_the_same_order(seed, count, max_bytes, max_runs):
    reads = random_reads(NBYTES, count, seed, max_run=300)
    split, origins = split_reads(reads, max_bytes, max_runs)
    assert pairs(split) == pairs(reads)
    assert (sizes(split) <= max_bytes).all()
    if max_runs is not None:
        assert (split.rows[:, 3] * split.rows[:, 6] <= max_runs).all()
    assert len(origins) == len(split)
    for row in range(count):
        part = ReadTable(split.rows[origins == row])
        assert part.nbytes == sizes(reads)[row]


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 30),
    st.integers(1, 5000),
    st.integers(1, 5),
)
def test_batches_are_bounded_and_report_each_complete_row_once(seed, count, max_bytes, max_reads):
    reads = random_reads(NBYTES, count, seed, max_run=300)
    split, origins = split_reads(reads, max_bytes)
    parts = list(batches(split, max_bytes=max_bytes, max_reads=max_reads, max_runs=200))
    assert np.array_equal(
        np.concatenate([batch.rows_of(split).rows for batch in parts]), split.rows
    )
    for batch in parts:
        assert batch.nbytes == batch.rows_of(split).nbytes <= max_bytes
        assert len(batch.rows_of(split)) <= max_reads
    rows = RowsDone(origins, parts)
    random.Random(seed).shuffle(parts)
    received_bytes = np.zeros(count, np.int64)
    reported: list[int] = []
    for batch in parts:
        np.add.at(received_bytes, origins[batch.first : batch.stop], sizes(batch.rows_of(split)))
        first, last = rows.done(batch)
        reported += range(first, last)
        assert set(reported) == set(np.flatnonzero(received_bytes == sizes(reads)).tolist())
    assert sorted(reported) == list(range(count))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 10))
def test_runs_have_the_same_bytes_in_the_same_order(seed, count):
    reads = random_reads(NBYTES, count, seed, max_run=300)
    src, dst, length = runs(reads)
    moves = zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)
    assert [(s + k, d + k) for s, d, size in moves for k in range(size)] == pairs(reads)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0, 0, 8, 4, 8, 8, 2, 32, 32]], [(0, 0, 64)]),
        ([[0, 0, 8, 4, 8, 8, 2, 40, 32]], [(0, 0, 32), (40, 32, 32)]),
        ([[0, 0, 8, 1, 0, 0, 2, 8, 8]], [(0, 0, 16)]),
        ([[0, 0, 8, 2, 16, 8, 1, 0, 0]], [(0, 0, 8), (16, 8, 8)]),
        ([[0, 0, 8, 1, 0, 0, 1, 0, 0], [8, 8, 4, 1, 0, 0, 1, 0, 0]], [(0, 0, 12)]),
        ([[0, 0, 8, 1, 0, 0, 1, 0, 0], [8, 9, 4, 1, 0, 0, 1, 0, 0]], [(0, 0, 8), (8, 9, 4)]),
    ],
)
def test_adjacent_runs_are_joined(rows, expected):
    src, dst, length = runs(ReadTable(np.array(rows, np.int64)))
    assert list(zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)) == expected


def test_descriptors_hold_addresses_of_64_bits():
    table = descriptors(np.array([0, 5]), np.array([2, 3]), 2**63 + 1, 7)
    assert table.tolist() == [[2**63 + 1, 2, 7], [2**63 + 6, 3, 7]]
