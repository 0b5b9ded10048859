"""The bytes of a version are never handed out for overwriting before it is released."""

import threading

import pytest
import torch

from refit_mx.arena import PAGE_BYTES, Arena, DoubleArena
from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, RefitTimeoutError


def soon(timeout_s: float = 20.0) -> Deadline:
    return Deadline(timeout_s, "test")


def fill(arenas: DoubleArena, version_id: str, value: int, nbytes: int = 100) -> torch.Tensor:
    with arenas.take(nbytes, deadline=soon()) as lease:
        lease.memory.fill_(value)
        lease.hold(version_id)
        return lease.memory


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1])
def test_an_arena_begins_at_a_page_and_has_whole_pages(nbytes):
    arena = Arena(nbytes)
    assert arena.address % PAGE_BYTES == 0
    assert arena.nbytes >= max(1, nbytes)
    assert arena.nbytes % PAGE_BYTES == 0
    assert arena.address == arena.memory.data_ptr()


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="-1 bytes"):
        Arena(-1)


def test_two_versions_do_not_share_memory_and_a_third_waits_for_a_release():
    arenas = DoubleArena()
    first, second = fill(arenas, "v1", 1), fill(arenas, "v2", 2)
    assert bool((first == 1).all())
    assert bool((second == 2).all())
    assert set(arenas.versions) == {"v1", "v2"}
    with pytest.raises(RefitTimeoutError, match=r"'v1' and version 'v2'"):
        arenas.take(100, deadline=soon(0.05))
    assert arenas.release("v1")
    third = fill(arenas, "v3", 3)
    assert third.data_ptr() == first.data_ptr()
    assert bool((second == 2).all())


def test_who_waits_gets_the_arena_as_soon_as_its_version_is_released():
    arenas = DoubleArena()
    fill(arenas, "v1", 1)
    fill(arenas, "v2", 2)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(fill(arenas, "v3", 3).data_ptr()))
    waiting.start()
    expected = arenas.arena_of("v2").address
    arenas.release("v2")
    waiting.join(20)
    assert got == [expected]
    assert arenas.versions == ("v1", "v3")


def test_an_arena_that_is_being_filled_is_given_to_nobody_else():
    arenas = DoubleArena()
    fill(arenas, "v1", 1)
    with (
        arenas.take(100, deadline=soon()),
        pytest.raises(RefitTimeoutError, match="one that is being filled"),
    ):
        arenas.take(100, deadline=soon(0.05))


def test_a_publish_that_fails_leaves_the_arena_free():
    arenas = DoubleArena()
    fill(arenas, "v1", 1)
    with pytest.raises(ZeroDivisionError), arenas.take(100, deadline=soon()):
        raise ZeroDivisionError
    assert arenas.versions == ("v1",)
    fill(arenas, "v2", 2)


def test_a_lease_that_ended_holds_nothing():
    arenas = DoubleArena()
    lease = arenas.take(100, deadline=soon())
    lease.abandon()
    with pytest.raises(RefitConfigError, match="has ended"):
        lease.hold("v1")
    assert arenas.versions == ()


def test_one_version_cannot_be_held_twice():
    arenas = DoubleArena()
    fill(arenas, "v1", 1)
    with arenas.take(100, deadline=soon()) as lease, pytest.raises(RefitConfigError, match="v1"):
        lease.hold("v1")


def test_releasing_an_unknown_version_changes_nothing():
    arenas = DoubleArena()
    fill(arenas, "v1", 1)
    assert not arenas.release("v2")
    assert arenas.versions == ("v1",)
    with pytest.raises(KeyError):
        arenas.arena_of("v2")


def test_a_larger_version_gets_a_new_arena_and_the_old_one_is_given_up_first():
    told: list[tuple[str, int]] = []
    arenas = DoubleArena(
        on_new=lambda arena: told.append(("new", arena.nbytes)),
        on_old=lambda arena: told.append(("old", arena.nbytes)),
    )
    fill(arenas, "v1", 1)
    fill(arenas, "v2", 2)
    arenas.release("v1")
    assert len(fill(arenas, "v3", 3, nbytes=3 * PAGE_BYTES)) == 3 * PAGE_BYTES
    assert told == [
        ("new", PAGE_BYTES),
        ("new", PAGE_BYTES),
        ("old", PAGE_BYTES),
        ("new", 3 * PAGE_BYTES),
    ]
    arenas.close()
    assert sorted(told[4:]) == [("old", PAGE_BYTES), ("old", 3 * PAGE_BYTES)]


def test_of_two_free_arenas_one_that_is_large_enough_is_taken():
    arenas = DoubleArena()
    fill(arenas, "v1", 1, nbytes=PAGE_BYTES)
    large = fill(arenas, "v2", 2, nbytes=4 * PAGE_BYTES)
    arenas.release("v1")
    arenas.release("v2")
    assert fill(arenas, "v3", 3, nbytes=4 * PAGE_BYTES).data_ptr() == large.data_ptr()


def test_an_arena_that_cannot_be_registered_leaves_a_free_slot():
    failures = [OSError("no room")]

    def refuse(arena: Arena) -> None:
        if failures:
            raise failures.pop()

    arenas = DoubleArena(on_new=refuse)
    with pytest.raises(OSError, match="no room"):
        arenas.take(100, deadline=soon())
    fill(arenas, "v1", 1)
    fill(arenas, "v2", 2)


def test_closing_wakes_who_waits():
    arenas = DoubleArena()
    fill(arenas, "v1", 1)
    fill(arenas, "v2", 2)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            arenas.take(100, deadline=soon())
        except RefitConfigError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    arenas.close()
    waiting.join(20)
    assert "closed" in str(raised[0])
