"""The allocator, compared with a model of one flag per byte.

Imports internals: a client sees only the free bytes.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane_tq.directory.allocator import ALIGNMENT, Allocator

CAPACITY = 1000


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.allocator = Allocator(CAPACITY)
        self.used = [False] * CAPACITY

    def fits(self, nbytes):
        return next(
            (
                at
                for at in range(0, CAPACITY - nbytes + 1, ALIGNMENT)
                if not any(self.used[at : at + nbytes])
            ),
            None,
        )

    @rule(nbytes=st.integers(1, CAPACITY + 1) | st.integers(1, 100))
    def allocate(self, nbytes):
        offset = self.allocator.allocate(nbytes)
        assert offset == self.fits(nbytes)
        if offset is not None:
            self.used[offset : offset + nbytes] = [True] * nbytes

    @precondition(lambda self: any(self.used))
    @rule(data=st.data())
    def free(self, data):
        bytes_used = [at for at in range(CAPACITY) if self.used[at]]
        ranges = []
        for _ in range(data.draw(st.integers(1, 6))):
            start = data.draw(st.sampled_from(bytes_used))
            stop = start
            while stop < CAPACITY and self.used[stop] and data.draw(st.integers(0, 30)):
                self.used[stop] = False
                stop += 1
            ranges.append((start, stop))
        self.allocator.free(ranges)

    @rule(start=st.integers(-1, CAPACITY), size=st.integers(1, 200))
    def free_what_is_not_allocated(self, start, size):
        stop = start + size
        if start >= 0 and stop <= CAPACITY and all(self.used[start:stop]):
            return
        with pytest.raises(ValueError, match="free"):
            self.allocator.free([(start, stop)])

    @invariant()
    def counts_agree(self):
        assert self.allocator.free_bytes == self.used.count(False)
        largest = self.allocator.largest_free
        assert largest == 0 or self.fits(largest) is not None
        assert largest == CAPACITY or self.fits(largest + 1) is None


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.parametrize("ranges", [[(0, 10), (5, 15)], [(8, 4)], [(0, 200)], [(0, 4), (0, 4)]])
def test_refused_free_changes_nothing(ranges):
    allocator = Allocator(128)
    allocator.allocate(100)
    with pytest.raises(ValueError, match="free"):
        allocator.free([(20, 30), *ranges])
    assert allocator.free_bytes == 28
    allocator.free([(50, 100), (0, 50)])
    assert allocator.largest_free == 128


def test_empty_allocations_use_no_memory():
    allocator = Allocator(0)
    assert allocator.allocate(0) == 0
    assert allocator.allocate(1) is None
    assert allocator.largest_free == 0
    allocator.free([])
