"""A buffer that is still written into is handed to nobody; the others are reused."""

import gc
import threading
import weakref

import pytest
import torch

from refit_mx import scratch as scratch_module
from refit_mx.arena import PAGE_BYTES
from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, ScratchExhaustedError
from refit_mx.scratch import ScratchPool
from refit_mx.transports.tcp import TcpTransport

PAGE = PAGE_BYTES


class Abandoning(TcpTransport):
    """TCP, with reads that a test declares abandoned; TCP itself never leaves any."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: set[int] = set()

    def busy(self, scratch: torch.Tensor) -> bool:
        return scratch.data_ptr() in self.writing

    def unregister(self, scratch: torch.Tensor) -> None:
        assert not self.busy(scratch)
        super().unregister(scratch)


def soon(timeout_s: float = 20.0) -> Deadline:
    return Deadline(timeout_s, "test")


def test_a_buffer_that_was_given_back_is_used_again():
    transport = Abandoning()
    pool = ScratchPool(transport, most_bytes=10 * PAGE)
    with pool.take(5000, soon()) as scratch:
        assert len(scratch.memory) >= 5000
        assert pool.counts().in_use == 2 * PAGE
        address = scratch.memory.data_ptr()
    with pool.take(PAGE, soon()) as scratch:
        assert scratch.memory.data_ptr() == address
    assert pool.counts().idle == 2 * PAGE


def test_giving_back_twice_hands_a_buffer_out_once():
    pool = ScratchPool(Abandoning(), most_bytes=10 * PAGE)
    scratch = pool.take(PAGE, soon())
    pool.give_back(scratch)
    pool.give_back(scratch)
    first, second = pool.take(PAGE, soon()), pool.take(PAGE, soon())
    assert first.memory.data_ptr() != second.memory.data_ptr()


def test_a_buffer_that_may_be_written_into_is_not_handed_out_before_it_is_over():
    transport = Abandoning()
    pool = ScratchPool(transport, most_bytes=2 * PAGE)
    abandoned = pool.take(PAGE, soon())
    address = abandoned.memory.data_ptr()
    transport.writing.add(address)
    pool.quarantine(abandoned)
    assert pool.counts().quarantined == PAGE
    with pool.take(PAGE, soon()) as other:
        assert other.memory.data_ptr() != address
        with pytest.raises(ScratchExhaustedError, match=r"4096 in quarantine \(1 buffers\)"):
            pool.take(PAGE, soon(0.05))
    transport.writing.clear()
    taken = {pool.take(PAGE, soon()).memory.data_ptr() for _ in range(2)}
    assert address in taken
    assert pool.counts().quarantines == 1


def test_who_waits_gets_a_buffer_when_its_quarantine_ends():
    transport = Abandoning()
    pool = ScratchPool(transport, most_bytes=PAGE)
    abandoned = pool.take(PAGE, soon())
    address = abandoned.memory.data_ptr()
    transport.writing.add(address)
    pool.quarantine(abandoned)
    ends = threading.Timer(0.1, transport.writing.clear)
    ends.start()
    assert pool.take(PAGE, soon()).memory.data_ptr() == address
    ends.join(20)


def test_more_than_the_pool_may_have_is_refused_at_once():
    pool = ScratchPool(Abandoning(), most_bytes=PAGE)
    with pytest.raises(ScratchExhaustedError, match="raise its most_bytes"):
        pool.take(PAGE + 1, soon(1000))


def test_idle_buffers_that_are_too_small_make_room_for_a_larger_one():
    transport = Abandoning()
    pool = ScratchPool(transport, most_bytes=4 * PAGE)
    small = [pool.take(2 * PAGE, soon()) for _ in range(2)]
    for scratch in small:
        pool.give_back(scratch)
    with pool.take(4 * PAGE, soon()) as scratch:
        assert len(scratch.memory) == 4 * PAGE
        assert pool.counts().idle == 0


def test_closing_never_frees_what_may_be_written_into():
    transport = Abandoning()
    pool = ScratchPool(transport, most_bytes=4 * PAGE)
    idle, abandoned, used = (pool.take(PAGE, soon()) for _ in range(3))
    transport.writing.add(abandoned.memory.data_ptr())
    gone = weakref.ref(idle._arena)
    kept = weakref.ref(abandoned._arena)
    pool.give_back(idle)
    pool.quarantine(abandoned)
    pool.close()
    del idle, abandoned
    gc.collect()
    assert gone() is None
    assert kept() in scratch_module._NEVER_FREED
    pool.give_back(used)
    with pytest.raises(RefitConfigError, match="closed"):
        pool.take(PAGE, soon())
    scratch_module._NEVER_FREED.remove(kept())
