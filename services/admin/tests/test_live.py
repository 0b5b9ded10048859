"""The live part: a snapshot that requests read, scans with a budget, and a store that goes away."""

import platform
import threading
import time

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray._private.utils import check_version_info
from tensordict import TensorDict

from dataplane_admin.live import AskedTooLong, Given, Live, NotAttached, OnRay, Scan, TooManyAsk
from dataplane_admin.live.connect import one_line
from dataplane_admin.live.scan import SHARE, Scanner
from dataplane_admin.live.stuck import MOST, find_stuck
from dataplane_admin.live.trend import POLLS, Trends
from dataplane_core import InMemoryDataPlaneClient, PartitionSummary, TaskSummary, UnavailableError

PATIENCE_S = 20.0


def until(condition, live):
    """What ``condition`` gives of a snapshot once it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        found = condition(live.snapshot)
        if found:
            return found
        threading.Event().wait(0.005)
    raise AssertionError(f"not within {PATIENCE_S:g} s; last: {live.snapshot}")


@pytest.fixture
def plane():
    cfg = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with InMemoryDataPlaneClient(cfg) as client:
        yield client


def put(plane, ids, *fields, partition="train"):
    columns = {name: torch.zeros(len(ids), 4) for name in fields}
    plane.put_samples(ids, partition, TensorDict(columns, [len(ids)]))


@pytest.fixture
def look():
    lives = []

    def start(connector, *, ask_s=5.0, stuck_after_s=60.0, poll_s=0.02, **told):
        lives.append(
            Live(connector, poll_s=poll_s, ask_s=ask_s, stuck_after_s=stuck_after_s, **told)
        )
        lives[-1].start()
        return lives[-1]

    yield start
    for live in lives:
        live.close()


def test_a_snapshot_has_what_the_store_has(plane, look):
    plane.register_partition("train", ["a", "b"], 8, ["t"])
    put(plane, [f"s{i}" for i in range(4)], "a")
    put(plane, ["s0"], "b")
    plane.claim_meta("train", "t", ["a"], 2, blocking=False)
    live = look(Given(plane))
    snapshot = until(lambda one: one.scans and one, live)
    [summary] = snapshot.partitions
    assert (summary.present, summary.declared) == (4, 8)
    [window] = snapshot.scans["train"].windows(1)
    assert (window.start, window.count) == (0, 4)
    shares = dict(zip(snapshot.scans["train"].fields, window.written, strict=True))
    assert shares == {"a": 1.0, "b": 0.25}
    assert window.tasks == [[0.5, 0.0, 0.5, 0.0]]
    assert snapshot.scans["train"].ready("t", ["a"]) == 2
    assert snapshot.scans["train"].ready("t", ["a", "b"]) == 0


def test_a_snapshot_never_changes_and_its_revision_grows_with_what_is_shown(plane, look):
    plane.register_partition("train", ["a"], 8, ["t"])
    live = look(Given(plane))
    before = until(lambda one: one.partitions and one.scans and one, live)
    put(plane, ["s0"], "a")
    after = until(lambda one: one.partitions[0].present == 1 and one, live)
    assert before.partitions[0].present == 0
    assert after.revision > before.revision


def test_what_changed_is_scanned_again_and_what_did_not_is_kept(plane, look):
    for name in ("idle", "busy"):
        plane.register_partition(name, ["a"], 8, ["t"])
        put(plane, ["s0"], "a", partition=name)
    live = look(Given(plane))
    first = until(lambda one: len(one.scans) == 2 and one, live)
    put(plane, ["s1"], "a", partition="busy")
    second = until(lambda one: one.scans["busy"].rows == 2 and one, live)
    assert second.scans["idle"] is first.scans["idle"]
    plane.clear_samples(None, "busy")
    assert set(until(lambda one: len(one.scans) == 1 and one, live).scans) == {"idle"}


def test_a_store_that_goes_away_leaves_the_last_snapshot_with_the_reason(plane, look):
    class Leaving(Given):
        gone = False

        def connect(self):
            if self.gone:
                raise UnavailableError("the directory does not answer")
            return super().connect()

    plane.register_partition("train", ["a"], 8, ["t"])
    connector = Leaving(plane, source="the test's store")
    live = look(connector)
    seen = until(lambda one: one.attached and one.partitions and one, live)
    connector.gone = True
    plane.close()
    left = until(lambda one: one.error and one, live)
    assert not left.attached
    assert left.error.startswith("the test's store: ")
    assert left.partitions == seen.partitions
    assert left.at_ns >= seen.at_ns
    with pytest.raises(NotAttached, match="the test's store: "):
        live.ask(lambda store: store.list_partitions())


def test_a_store_that_comes_back_is_read_again(plane, look):
    class Late(Given):
        asked = 0

        def connect(self):
            self.asked += 1
            if self.asked < 3:
                raise UnavailableError("not there yet")
            return super().connect()

    live = look(Late(plane))
    until(lambda one: one.error and "not there yet" in one.error, live)
    until(lambda one: one.attached, live)


def test_a_question_has_a_deadline_and_questions_are_bounded(plane, look):
    live = look(Given(plane), ask_s=0.1)
    until(lambda one: one.attached, live)
    free = threading.Event()
    try:
        for _ in range(4):
            with pytest.raises(AskedTooLong, match=r"within 0\.1 s"):
                live.ask(lambda _: free.wait(PATIENCE_S))
        with pytest.raises(TooManyAsk):
            live.ask(lambda store: store.list_partitions())
    finally:
        free.set()


def test_a_question_raises_what_the_store_raises(plane, look):
    live = look(Given(plane))
    until(lambda one: one.attached, live)
    with pytest.raises(KeyError, match="nothing"):
        live.ask(lambda store: store.list_samples("nothing"))


def test_unclaimed_samples_and_old_claims_are_told_with_ids_and_owner(plane, look):
    plane.register_partition("train", ["a", "b"], 8, ["idle", "slow"])
    put(plane, [f"s{i}" for i in range(4)], "a")
    put(plane, ["s0"], "b")
    plane.claim_meta("train", "slow", ["a"], 3, blocking=False)
    live = look(Given(plane), stuck_after_s=0.05, has_claimed=lambda _, task: task == "idle")
    stuck = until(lambda one: len(one.stuck) == 3 and one.stuck, live)
    idle = next(one for one in stuck if one.task == "idle")
    assert (idle.samples, idle.examples, idle.lacks) == (4, ("s0", "s1", "s2"), {"b": 3})
    held = next(one for one in stuck if one.claim)
    assert (held.task, held.samples, held.examples) == ("slow", 3, ("s0", "s1", "s2"))
    assert held.claim.owner.partition(":")[2].isdecimal()


def test_what_waits_for_a_rank_that_never_asks_stands_still_and_is_not_ready(plane, look):
    plane.register_partition("train", ["a"], 4, ["t"])
    put(plane, ["s0", "s1", "s2", "s3"], "a")
    mine = plane.claim_meta("train", "t", ["a"], 2, dp_rank=0, dp_world=2)
    plane.acknowledge(mine)
    live = look(Given(plane), stuck_after_s=0.05)
    [stuck] = until(lambda one: one.stuck and "train" in one.scans and one.stuck, live)
    assert (stuck.task, stuck.samples, stuck.claim) == ("t", 2, None)
    assert live.snapshot.scans["train"].ready("t", ["a"]) == 0
    [task] = live.snapshot.partitions[0].tasks
    assert (task.unclaimed, task.assigned, task.settled) == (0, 2, 2)


def test_a_task_that_goes_on_is_not_told_of_though_its_queue_is_old(plane, look):
    plane.register_partition("train", ["a"], 1_000, ["t"])
    put(plane, [f"s{i}" for i in range(1_000)], "a")
    live = look(Given(plane), stuck_after_s=0.3)
    until(lambda one: one.trends and one.trends["train"].seconds > 0, live)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        meta = plane.claim_meta("train", "t", ["a"], 2, blocking=False)
        plane.acknowledge(meta)
        threading.Event().wait(0.01)
        assert not [one for one in live.snapshot.stuck if one.claim is None]
    assert live.snapshot.partitions[0].tasks[0].oldest_unclaimed_s > 0.3


def test_a_task_that_reads_by_key_has_no_backlog_and_one_that_claimed_before_has(plane, look):
    plane.register_partition("train", ["a"], 8, ["by_key", "claims"])
    live = look(Given(plane), stuck_after_s=0.1)
    put(plane, ["s0"], "a")
    plane.claim_meta("train", "claims", ["a"], 1, blocking=False)
    until(lambda one: one.trends and one.trends["train"].claiming, live)
    plane.clear_samples(None, "train", force=True)
    until(lambda one: one.attached and not one.partitions, live)
    plane.register_partition("train", ["a"], 8, ["by_key", "claims"])
    put(plane, ["s1"], "a")
    [stuck] = until(lambda one: one.stuck, live)
    assert (stuck.task, stuck.claim) == ("claims", None)
    looked = live.snapshot.partitions[0].tasks
    until(lambda one: one.partitions[0].tasks[0].oldest_unclaimed_s > 0.5, live)
    assert {one.name for one in looked} == {"by_key", "claims"}
    assert {one.task for one in live.snapshot.stuck} == {"claims"}


def test_who_claims_is_asked_of_the_oldest_and_of_no_more_than_are_told(plane):
    for number in range(MOST + 10):
        plane.register_partition(f"p{number}", ["a"], 8, ["by_key", "t"])
        put(plane, ["s0"], "a", partition=f"p{number}")
    summaries = plane.list_partitions()
    trends = Trends()
    for second in range(2):
        told = trends.add(second * 1_000_000_000, summaries)
    asked = []

    def has_claimed(partition, task):
        asked.append((partition, task))
        return task == "t"

    found = find_stuck(plane, summaries, told, {}, 0.0, has_claimed)
    assert [one.task for one in found] == ["t"] * MOST
    assert len(asked) <= 2 * MOST


def test_closing_ends_the_thread(plane):
    live = Live(Given(plane), poll_s=60, ask_s=1, stuck_after_s=60)
    live.start()
    live.close()
    assert "dataplane-admin-live" not in {one.name for one in threading.enumerate()}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:6379"])
def test_no_ray_cluster_is_one_sentence(look, address):
    live = look(OnRay(address, timeout_s=1))
    error = until(lambda one: one.error and "no Ray" in one.error and one, live).error
    assert error.startswith(f"Ray at {address}: no Ray cluster at '{address}': ")
    assert "\n" not in error


def test_a_cluster_of_another_python_says_which_versions_differ():
    theirs = {"ray_version": ray.__version__, "python_version": "3.9.1"}
    with pytest.raises(RuntimeError) as error:
        check_version_info(theirs, "this process")
    told = one_line(error.value)
    assert "Python: 3.9.1" in told
    assert f"Python: {platform.python_version()}" in told
    assert "\n" not in told
    assert len(one_line(RuntimeError("x" * 10_000))) < 1_000


class _Slow:
    """A store of which a page costs a second by the test's clock."""

    def __init__(self, plane):
        self.plane = plane
        self.now = 0.0
        self.pages = 0

    def scan_states(self, partition_id, *, start, limit):
        self.now += 1.0
        self.pages += 1
        return self.plane.scan_states(partition_id, start=start, limit=limit)


def test_scanning_takes_no_more_than_its_share_of_the_time(plane):
    plane.register_partition("train", ["a"], 8, ["t"])
    slow = _Slow(plane)
    scanner = Scanner(clock=lambda: slow.now)
    for number in range(2_000):
        put(plane, [f"s{number}"], "a")
        scanner.scan(slow, plane.list_partitions(), [], lambda: False)
        slow.now += 0.5
    assert 0.5 * SHARE < slow.pages / slow.now < 1.05 * SHARE


def test_what_somebody_looks_at_is_scanned_first(plane):
    for name in ("a", "b", "c"):
        plane.register_partition(name, ["x"], 8, ["t"])
    slow = _Slow(plane)
    scanner = Scanner(clock=lambda: slow.now)
    assert set(scanner.scan(slow, plane.list_partitions(), ["c"], lambda: False)) == {"c"}


@settings(max_examples=50)
@given(data=st.data(), rows=st.integers(0, 300), windows=st.integers(1, 50))
def test_windows_cover_every_sample_once_and_their_shares_are_those_of_the_samples(
    data, rows, windows
):
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    written = generator.integers(0, 2, (rows, 3), dtype=np.uint8)
    states = generator.integers(0, 4, (rows, 2), dtype=np.uint8)
    scan = Scan("p", 1, 0, rows, ("a", "b", "c"), ("t", "u"), written, states)
    found = scan.windows(windows)
    assert len(found) <= windows
    assert sum(one.count for one in found) == rows
    assert [one.start for one in found] == list(np.cumsum([0, *(one.count for one in found)]))[:-1]
    for one in found:
        of = slice(one.start, one.start + one.count)
        assert np.allclose(one.written, written[of].mean(axis=0), atol=1e-4)
        for task, shares in enumerate(one.tasks):
            assert sum(shares) == pytest.approx(1, abs=4e-4)
            assert np.allclose(
                shares, [(states[of, task] == s).mean() for s in range(4)], atol=1e-4
            )


def test_trends_hold_the_last_polls_and_count_no_loss_as_gain():
    trends = Trends()
    for poll in range(POLLS + 30):
        settled = poll % 10  # cleared every tenth poll
        task = TaskSummary(name="t", unclaimed=poll, leased=0, settled=settled, leases=0)
        summary = PartitionSummary(
            partition_id="p",
            declared=0,
            put=2 * poll,
            present=0,
            reserved=0,
            group_size=None,
            fields=(),
            tasks=(task,),
        )
        found = trends.add(poll * 1_000_000_000, [summary])["p"]
    assert (len(found.times_ns), found.seconds) == (POLLS, POLLS - 1)
    assert found.gained_per_s(found.put) == 2
    assert found.slope_per_s(found.tasks["t"].unclaimed) == 1
    assert found.gained_per_s(found.tasks["t"].settled) == pytest.approx(0.9, abs=0.02)
    assert trends.add(0, []) == {}
