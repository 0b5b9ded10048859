"""A buffer with pending writes is not reused; other buffers are.

These tests use internals: every transition of a buffer, with abandoned reads.
"""

import gc
import threading
import weakref

import pytest
import torch
from transport_processes import soon

from refit_mx import RefitConfigError, ScratchExhaustedError
from refit_mx.memory.arena import PAGE_BYTES, Arena
from refit_mx.receive import scratch as scratch_module
from refit_mx.receive.scratch import ScratchPool
from refit_mx.transports.tcp import TcpTransport

PAGE = PAGE_BYTES


class Abandoning(TcpTransport):
    """TCP with reads that a test declares abandoned; TCP itself never abandons a read."""

    def __init__(self) -> None:
        super().__init__()
        self.writing: set[int] = set()

    def busy(self, scratch: torch.Tensor) -> bool:
        return scratch.data_ptr() in self.writing

    def unregister(self, scratch: torch.Tensor) -> None:
        assert not self.busy(scratch)
        super().unregister(scratch)


def test_double_release_does_not_share_a_buffer():
    pool = ScratchPool(Abandoning(), max_bytes=10 * PAGE)
    scratch = pool.take(PAGE, soon())
    pool.release(scratch)
    pool.release(scratch)
    first, second = pool.take(PAGE, soon()), pool.take(PAGE, soon())
    assert first.memory.data_ptr() != second.memory.data_ptr()


def test_buffer_in_quarantine_is_not_reused():
    transport = Abandoning()
    pool = ScratchPool(transport, max_bytes=2 * PAGE)
    abandoned = pool.take(PAGE, soon())
    address = abandoned.memory.data_ptr()
    transport.writing.add(address)
    pool.release(abandoned)
    assert pool.has_quarantined
    other = pool.take(PAGE, soon())
    assert other.memory.data_ptr() != address
    with pytest.raises(ScratchExhaustedError, match=r"4096 in quarantine \(1 buffers\)"):
        pool.take(PAGE, soon(0.05))
    pool.release(other)
    transport.writing.clear()
    assert not pool.has_quarantined
    taken = {pool.take(PAGE, soon()).memory.data_ptr() for _ in range(2)}
    assert address in taken


def test_blocked_caller_gets_a_buffer_after_its_quarantine():
    transport = Abandoning()
    pool = ScratchPool(transport, max_bytes=PAGE)
    abandoned = pool.take(PAGE, soon())
    address = abandoned.memory.data_ptr()
    transport.writing.add(address)
    pool.release(abandoned)
    ends = threading.Timer(0.1, transport.writing.clear)
    ends.start()
    assert pool.take(PAGE, soon()).memory.data_ptr() == address
    ends.join(20)


def test_request_beyond_the_pool_is_refused_at_once():
    pool = ScratchPool(Abandoning(), max_bytes=PAGE)
    with pytest.raises(ScratchExhaustedError, match="raise scratch_copies"):
        pool.take(PAGE + 1, soon(1000))


def test_idle_buffers_are_freed_before_a_larger_one_is_allocated(monkeypatch):
    transport = Abandoning()
    pool = ScratchPool(transport, max_bytes=4 * PAGE)
    small = [pool.take(2 * PAGE, soon()) for _ in range(2)]
    references = [weakref.ref(scratch) for scratch in small]
    while small:
        pool.release(small.pop())

    def allocate(*arguments, **options):
        assert [reference() for reference in references] == [None, None]
        return Arena(*arguments, **options)

    monkeypatch.setattr(scratch_module, "Arena", allocate)
    assert pool.take(4 * PAGE, soon()).nbytes == 4 * PAGE
    assert not pool._idle


def test_close_never_frees_a_buffer_with_pending_writes():
    transport = Abandoning()
    pool = ScratchPool(transport, max_bytes=4 * PAGE)
    idle, abandoned, used = (pool.take(PAGE, soon()) for _ in range(3))
    transport.writing.add(abandoned.memory.data_ptr())
    gone = weakref.ref(idle)
    retained = weakref.ref(abandoned)
    pool.release(idle)
    pool.release(abandoned)
    pool.close()
    del idle, abandoned
    gc.collect()
    assert gone() is None
    assert retained() in scratch_module._NEVER_FREED
    pool.release(used)
    with pytest.raises(RefitConfigError, match="closed"):
        pool.take(PAGE, soon())
    scratch_module._NEVER_FREED.remove(retained())
