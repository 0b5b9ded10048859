"""Requests of bounded size have the same bytes, and every row is told when it is whole."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_processes import random_reads

from refit_mx.reads import ReadTable
from refit_mx.transports.batches import RowsDone, batches, split_reads
from refit_mx.transports.descriptors import descriptors, runs

NBYTES = 1 << 16


def pairs(reads: ReadTable) -> list[tuple[int, int]]:
    """Source and scratch address of every byte, in order."""
    found = []
    for src, dst, run, n1, src1, dst1, n2, src2, dst2 in reads.rows.tolist():
        for j in range(n2):
            for i in range(n1):
                s, d = src + j * src2 + i * src1, dst + j * dst2 + i * dst1
                found += [(s + k, d + k) for k in range(run)]
    return found


def sizes(reads: ReadTable) -> np.ndarray:
    return reads.rows[:, 2] * reads.rows[:, 3] * reads.rows[:, 6]


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.integers(1, 10),
    st.sampled_from([1, 7, 100, 5000, 10**9]),
    st.sampled_from([None, 1, 3, 50]),
)
def test_split_reads_have_the_same_bytes_in_the_same_order(seed, count, most_bytes, most_runs):
    reads = random_reads(NBYTES, count, seed, most_run=300)
    split, origins = split_reads(reads, most_bytes, most_runs)
    assert pairs(split) == pairs(reads)
    assert (sizes(split) <= most_bytes).all()
    if most_runs is not None:
        assert (split.rows[:, 3] * split.rows[:, 6] <= most_runs).all()
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
def test_batches_are_bounded_and_every_row_is_told_once_when_all_its_parts_are_there(
    seed, count, most_bytes, most_reads
):
    reads = random_reads(NBYTES, count, seed, most_run=300)
    split, origins = split_reads(reads, most_bytes)
    made = list(batches(split, most_bytes=most_bytes, most_reads=most_reads, most_runs=200))
    assert np.array_equal(np.concatenate([batch.of(split).rows for batch in made]), split.rows)
    for batch in made:
        assert batch.nbytes == batch.of(split).nbytes <= most_bytes
        assert len(batch.of(split)) <= most_reads
    rows = RowsDone(origins, made)
    random.Random(seed).shuffle(made)
    there = np.zeros(count, np.int64)
    told: list[int] = []
    for batch in made:
        np.add.at(there, origins[batch.first : batch.last], sizes(batch.of(split)))
        first, last = rows.done(batch)
        told += range(first, last)
        assert set(told) == set(np.flatnonzero(there == sizes(reads)).tolist())
    assert sorted(told) == list(range(count))


def test_no_reads_are_no_batches():
    nothing = ReadTable(np.zeros((0, 9), np.int64))
    split, origins = split_reads(nothing, 10)
    made = list(batches(split, most_bytes=10, most_reads=10))
    assert made == []
    RowsDone(origins, made)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 10))
def test_runs_have_the_same_bytes_in_the_same_order(seed, count):
    reads = random_reads(NBYTES, count, seed, most_run=300)
    src, dst, length = runs(reads)
    pieces = zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)
    assert [(s + k, d + k) for s, d, size in pieces for k in range(size)] == pairs(reads)


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
def test_adjacent_pieces_are_joined(rows, expected):
    src, dst, length = runs(ReadTable(np.array(rows, np.int64)))
    assert list(zip(src.tolist(), dst.tolist(), length.tolist(), strict=True)) == expected


def test_descriptors_reach_addresses_above_half_of_the_address_space():
    made = descriptors(np.array([0, 5]), np.array([2, 3]), 2**63 + 1, 7)
    assert made.tolist() == [[2**63 + 1, 2, 7], [2**63 + 6, 3, 7]]
