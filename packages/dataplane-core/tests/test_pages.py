"""Buffers are reused, but never while something refers to them.

Imports internals: tensors do not show which memory is reused.
"""

import gc

import numpy as np
import pytest
import torch

from dataplane_core import pages

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_idle():
    gc.collect()
    pages._idle.clear()
    yield
    pages._idle.clear()


def test_a_buffer_is_used_again_once_nothing_refers_to_it():
    tensor = torch.from_numpy(pages.empty(3 * MIB)).view(torch.int64)
    address = tensor.data_ptr()
    part = tensor[5:9]
    del tensor
    other = pages.empty(3 * MIB)
    assert pages.idle_bytes() == 0
    part.fill_(7)
    other.fill(0)
    assert part.tolist() == [7] * 4
    del part
    assert pages.idle_bytes() == 4 * MIB
    assert pages.empty(3 * MIB + 4096).ctypes.data == address


@pytest.mark.parametrize("nbytes", [0, 1, MIB - 1, MIB, 2 * MIB + 1, 100 * MIB + 5])
def test_buffer_has_the_requested_size_and_is_writable(nbytes):
    buffer = pages.empty(nbytes)
    assert (buffer.shape, buffer.dtype) == ((nbytes,), np.uint8)
    buffer[-1:] = 1


def test_no_more_than_the_limit_is_kept(monkeypatch):
    monkeypatch.setattr(pages, "MAX_IDLE_BYTES", 8 * MIB)
    buffers = [pages.empty(size * MIB) for size in (2, 4, 2, 20, 4)]
    while buffers:
        buffers.pop()
        assert pages.idle_bytes() <= 8 * MIB
    assert pages.idle_bytes() > 0
