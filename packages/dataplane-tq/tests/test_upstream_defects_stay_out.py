"""The client keeps its promises where TransferQueue 0.1.11 does something else.

By the numbers of `test_upstream_behaviour.py`, which shows what TransferQueue does itself. A
promise that a test elsewhere shows is in `KEPT_BY` only.
"""

from __future__ import annotations

import ast
import gc
import os
import signal
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import ray
import torch
from tensordict import TensorDict

from dataplane_core import (
    CapacityExceeded,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
    testing,
)
from dataplane_tq import TQDataPlaneClient, topology

pytestmark = pytest.mark.slow

HERE = Path(__file__)

KEPT_BY = {
    1: [
        "test_faults.py::test_a_killed_part_ends_every_operation_with_a_typed_error_within_seconds",
        "test_client.py::test_a_stopped_controller_ends_puts_at_their_deadline_and_reads_go_on",
        f"{HERE.name}::test_a_clear_that_a_stopped_unit_does_not_answer_says_so",
        f"{HERE.name}::test_what_a_clear_left_in_a_stopped_unit_is_freed_by_a_later_one",
    ],
    2: [
        "DataPlaneClientContract::"
        "test_a_blocked_claim_wakes_when_another_client_completes_the_batch",
        "test_directory.py::test_a_claim_past_its_deadline_says_what_is_missing",
    ],
    3: [
        "test_client.py::test_a_read_never_returns_another_samples_row_while_the_store_churns",
        f"{HERE.name}::test_what_a_read_has_begun_to_fetch_is_not_replaced_by_other_rows",
    ],
    4: ["DataPlaneClientContract::test_a_change_of_dtype_is_refused_and_stores_nothing"],
    5: [f"{HERE.name}::test_a_lost_notification_hides_no_sample"],
    6: [
        "DataPlaneClientContract::test_an_unknown_id_among_known_ones_is_an_error_that_names_it",
        "DataPlaneClientContract::test_a_field_missing_on_one_row_is_an_error_that_names_both",
    ],
    7: [
        "DataPlaneClientContract::"
        "test_duplicate_ids_in_one_put_are_refused_before_anything_is_stored",
    ],
    8: [
        "DataPlaneClientContract::test_tags_alone_make_no_sample_ready",
        f"{HERE.name}::test_a_put_that_failed_keeps_no_consumption_from_completing",
        f"{HERE.name}::test_a_put_that_failed_keeps_no_memory",
        f"{HERE.name}::test_consumption_completes_once_tagged_samples_have_their_fields",
    ],
    9: [
        "test_faults.py::test_capacity_is_exact_and_a_waiting_put_goes_on_when_room_is_made",
        f"{HERE.name}::test_all_room_can_be_used_whatever_was_cleared",
    ],
    10: [
        "DataPlaneClientContract::test_a_claim_hands_out_each_sample_once",
        "DataPlaneClientContract::"
        "test_a_blocking_claim_returns_the_remainder_once_nothing_more_can_come",
        "DataPlaneClientContract::test_a_put_after_a_claim_does_not_make_a_sample_claimable_again",
        "LeaseContract::test_an_expired_claim_is_handed_out_again_and_its_holder_is_refused",
        "test_directory.py::test_what_a_killed_holder_had_claimed_is_handed_out_again",
    ],
    11: [
        f"{HERE.name}::test_groups_stay_whole_when_row_numbers_are_used_again",
        f"{HERE.name}::test_a_rank_that_claims_again_gets_other_samples_of_its_partition",
    ],
    12: [
        "DataPlaneClientContract::test_dense_rows_keep_dtype_shape_and_bits",
        "DataPlaneClientContract::test_python_values_come_back_per_row",
        f"{HERE.name}::test_what_cannot_come_back_is_refused_by_name",
    ],
    13: [
        "test_packed_catalogue.py::test_clearing_all_rows_but_one_frees_nearly_all_bytes",
        "test_client.py::test_a_forgotten_partition_is_gone_from_the_controller",
        f"{HERE.name}::test_rows_are_freed_one_by_one",
        f"{HERE.name}::test_the_controller_does_not_grow_with_the_steps_of_a_run",
    ],
    14: [f"{HERE.name}::test_full_collections_of_the_directory_pass_over_what_it_started_with"],
    15: [
        "test_directory.py::test_a_wrong_token_or_an_endless_frame_gets_no_answer",
        "test_packed_unit.py::test_a_wrong_token_is_refused",
        "test_client.py::test_values_that_cannot_be_stored_without_pickle_are_refused_by_name",
    ],
    16: ["DataPlaneClientContract::test_concurrent_claimers_share_no_sample_and_miss_none"],
    17: [f"{HERE.name}::test_registering_a_live_partition_changes_none_of_its_values"],
}
"""Defect to the tests that show our side of it: of a file beside this one, or of the contract.

15 holds for what this package listens on itself. TransferQueue's own sockets stay as they are, and
the documentation says so.
"""


def test_every_defect_has_a_test_of_ours_that_exists():
    assert sorted(KEPT_BY) == list(range(1, 18))
    applied = {
        base.id
        for node in ast.parse((HERE.parent / "test_contract.py").read_text()).body
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    for test in (test for tests in KEPT_BY.values() for test in tests):
        place, name = test.split("::")
        if place.endswith(".py"):
            tree = ast.parse((HERE.parent / place).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        else:
            assert place in applied
            assert callable(getattr(getattr(testing, place), name))


PATIENCE_S = 20.0

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing to clear:RuntimeWarning")

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "packed",
    "storage_capacity": 8,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 0,
    "ack_timeout_ms": 20_000,
}


@pytest.fixture(scope="module", params=["packed", "simple"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def owner(cluster, backend):
    with TQDataPlaneClient({**CONFIG, "backend": backend}) as client:
        yield client


@pytest.fixture(scope="module")
def peer(owner):
    with TQDataPlaneClient(CONFIG, bootstrap=False) as client:
        yield client


@pytest.fixture
def hasty(owner):
    """A client that waits for nothing longer than two seconds."""
    with TQDataPlaneClient({**CONFIG, "ack_timeout_ms": 2000}, bootstrap=False) as client:
        yield client


@pytest.fixture
def register(owner):
    """Registers partitions of eight samples and the task 'train', and forgets them afterwards."""
    names = []

    def register(**options):
        names.append(f"p-{uuid.uuid4().hex[:8]}")
        owner.register_partition(names[-1], ["x"], 8, ["train"], **options)
        return names[-1]

    yield register
    for name in names:
        owner.clear_samples(None, name, force=True)


@pytest.fixture
def partition(register):
    return register()


def batch(count, value=1.0, field="x"):
    return TensorDict({field: torch.full((count, 4), value)}, batch_size=[count])


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the state did not come"
        Event().wait(0.01)


def actor(name):
    return ray.get_actor(name, namespace=topology.NAMESPACE)


def ask(name, function):
    """Run a function on an actor's object, in the actor's process."""
    return ray.get(actor(name).__ray_call__.remote(function), timeout=PATIENCE_S)


def known_to_transfer_queue(client, partition):
    engine = client._engine
    return engine.run("list", engine.client.async_kv_list, partition).get(partition, {})


UNITS = ["TransferQueueStorageUnit#0", "TransferQueueStorageUnit#1"]


def bytes_held(client, backend, field):
    """Memory behind the values of a field, which only one test uses; of all for ``packed``."""
    if backend == "packed":
        return sum(unit.used for unit in client.list_storage())

    def held(unit):
        values = unit.storage_data.field_data.get(field, {}).values()
        storages = [value.untyped_storage() for value in values]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return sum(ask(name, held) for name in UNITS)


@pytest.fixture
def clear_beside_a_stopped_unit(owner, hasty, backend, stop_process):
    """Puts three samples and clears two of them while a unit is stopped; the clear's error."""

    def clear(partition, field):
        owner.put_samples(["a", "b", "c"], partition, batch(3, field=field))
        pid = ask(UNITS[0], lambda unit: os.getpid())
        stop_process(pid)
        try:
            with pytest.raises(DeadlineExceededError) as caught:
                hasty.clear_samples(["a", "b"], partition)
        finally:
            os.kill(pid, signal.SIGCONT)
        return str(caught.value)

    return clear


# A clear of packed rows needs no unit.
only_simple = pytest.mark.parametrize("backend", ["simple"], indirect=True, scope="module")


@only_simple
def test_a_clear_that_a_stopped_unit_does_not_answer_says_so(
    owner, partition, clear_beside_a_stopped_unit
):
    assert "clear_samples" in clear_beside_a_stopped_unit(partition, "x")
    owner.clear_samples(["c"], partition)
    assert known_to_transfer_queue(owner, partition) == {}


@only_simple
def test_what_a_clear_left_in_a_stopped_unit_is_freed_by_a_later_one(
    owner, partition, backend, clear_beside_a_stopped_unit
):
    clear_beside_a_stopped_unit(partition, "stopped")
    owner.clear_samples(["c"], partition)
    assert bytes_held(owner, backend, "stopped") == 0


def test_what_a_read_has_begun_to_fetch_is_not_replaced_by_other_rows(
    owner, peer, register, monkeypatch
):
    mine, other = register(), register()
    resolved, go_on = Event(), Event()
    read = peer._store.read

    def late_read(*arguments):
        resolved.set()
        assert go_on.wait(PATIENCE_S)
        return read(*arguments)

    monkeypatch.setattr(peer._store, "read", late_read)
    owner.put_samples(["a", "b"], mine, batch(2, 0.0))
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(peer.get_samples, ["a", "b"], mine, ["x"])
        try:
            assert resolved.wait(PATIENCE_S)
            clearing = pool.submit(owner.clear_samples, ["a", "b"], mine)
            until(lambda: peer.count_samples(mine, "train", ["x"]).cleared == 2)
            peer.put_samples([f"s{i}" for i in range(8)], other, batch(8, 1.0))
            assert not clearing.done()
        finally:
            go_on.set()
        assert torch.equal(reading.result(PATIENCE_S)["x"], torch.zeros(2, 4))
        clearing.result(PATIENCE_S)


def lose_notifications(client, monkeypatch):
    async def lose(request):
        return None

    manager = client._engine.client.storage_manager
    monkeypatch.setattr(manager, "_notify_and_wait", lose)


def test_a_lost_notification_hides_no_sample(owner, peer, partition, backend, monkeypatch):
    with monkeypatch.context() as patch:
        lose_notifications(peer, patch)
        if backend == "simple":
            with pytest.raises(UnavailableError, match="did not acknowledge fields"):
                peer.put_samples(["a", "b"], partition, batch(2))
            assert owner.count_samples(partition, "train", ["x"]).put == 0
            patch.undo()
        peer.put_samples(["a", "b"], partition, batch(2))
    assert owner.get_samples(["a", "b"], partition, ["x"]).batch_size == (2,)
    assert owner.claim_meta(partition, "train", ["x"], 2, timeout_s=PATIENCE_S).size == 2
    owner.clear_samples(["a", "b"], partition)
    assert known_to_transfer_queue(owner, partition) == {}


def refuse_to_store(client, backend, monkeypatch):
    """Puts fail in their last step before they become visible."""

    def refuse(*arguments):
        raise UnavailableError("not now")

    async def refuse_notification(*arguments):
        raise RuntimeError("not now")

    if backend == "packed":
        monkeypatch.setattr(client._store._units, "write", refuse)
    else:
        manager = client._engine.client.storage_manager
        monkeypatch.setattr(manager, "notify_data_update", refuse_notification)


@pytest.mark.parametrize("why", ["capacity", "store"])
def test_a_put_that_failed_keeps_no_consumption_from_completing(
    owner, hasty, partition, backend, monkeypatch, why
):
    if why == "capacity":
        with pytest.raises(CapacityExceeded, match="9 new samples, 0 of 8 held"):
            hasty.put_samples([f"s{i}" for i in range(9)], partition, batch(9))
    else:
        refuse_to_store(hasty, backend, monkeypatch)
        with pytest.raises(UnavailableError, match="not now"):
            hasty.put_samples(["s0", "s1"], partition, batch(2))
    owner.put_samples(["s1", "s2"], partition, batch(2))
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).size == 2
    assert owner.check_consumption_status(partition, ["train"])
    owner.clear_samples(["s1", "s2"], partition)
    assert known_to_transfer_queue(owner, partition) == {}


def test_a_put_that_failed_keeps_no_memory(owner, hasty, partition, backend, monkeypatch):
    owner.put_samples(["a"], partition, batch(1))
    refuse_to_store(hasty, backend, monkeypatch)
    with pytest.raises(UnavailableError, match="not now"):
        hasty.put_samples(["b", "c"], partition, batch(2, field="refused"))
    owner.clear_samples(["a"], partition)
    assert known_to_transfer_queue(owner, partition) == {}
    assert bytes_held(owner, backend, "refused") == 0


def test_consumption_completes_once_tagged_samples_have_their_fields(owner, partition):
    owner.put_samples(["a"], partition, tags=[{"reward": 1}])
    owner.put_samples(["b"], partition, batch(1))
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).sample_ids == ["b"]
    assert not owner.check_consumption_status(partition, ["train"])
    owner.put_samples(["a"], partition, batch(1))
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).sample_ids == ["a"]
    assert owner.check_consumption_status(partition, ["train"])


@pytest.mark.parametrize("cleared", [slice(0, 4), slice(0, 8, 2), slice(1, 8, 2)], ids=str)
def test_all_room_can_be_used_whatever_was_cleared(owner, register, cleared):
    mine, between = register(), register()
    ids = [f"s{i}" for i in range(8)]
    owner.put_samples(ids, mine, batch(8))
    owner.clear_samples(ids[cleared], mine)
    # A row number that goes to another partition changes which unit the later ones belong to.
    owner.put_samples(["t0"], between, batch(1))
    owner.put_samples(["t1", "t2", "t3"], mine, batch(3))
    assert owner.get_samples(["t3"], mine, ["x"]).batch_size == (1,)


def test_groups_stay_whole_when_row_numbers_are_used_again(owner, register):
    partition = register(grpo_group_size=2)
    owner.put_samples(["a_g0", "a_g1", "b_g0", "b_g1"], partition, batch(4))
    owner.clear_samples(["a_g1", "b_g0"], partition)
    owner.put_samples(["c_g0", "c_g1"], partition, batch(2))
    claimed = owner.claim_meta(partition, "train", ["x"], 8, blocking=False)
    assert sorted(claimed.sample_ids) == ["c_g0", "c_g1"]


def test_a_rank_that_claims_again_gets_other_samples_of_its_partition(owner, register):
    mine, other = register(), register()
    owner.put_samples(["a", "b", "c", "d"], mine, batch(4))
    owner.put_samples(["e", "f"], other, batch(2))

    def claim(partition):
        meta = owner.claim_meta(partition, "train", ["x"], 2, dp_rank=0, blocking=False)
        return meta.sample_ids

    assert sorted(claim(mine) + claim(mine)) == ["a", "b", "c", "d"]
    assert sorted(claim(other)) == ["e", "f"]


class Opinion:
    """A class that the storage units cannot import."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (TensorDict({"y": torch.ones(1)}, batch_size=[1]), "'o'.*nested TensorDict"),
        ([Opinion()], "'o'.*Opinion"),
    ],
    ids=["nested", "class"],
)
def test_what_cannot_come_back_is_refused_by_name(owner, partition, value, named):
    fields = TensorDict({"o": value, "x": torch.ones(1)}, batch_size=[1])
    with pytest.raises(InvalidRequestError, match=named):
        owner.put_samples(["a"], partition, fields)
    assert owner.count_samples(partition, "train", ["x"]).put == 0


def test_rows_are_freed_one_by_one(owner, partition, backend):
    ids = [f"s{i}" for i in range(8)]
    owner.put_samples(ids, partition, TensorDict({"rows": torch.ones(8, 1024)}, batch_size=[8]))
    whole = bytes_held(owner, backend, "rows")
    owner.clear_samples(ids[1:], partition)
    assert owner.get_samples(["s0"], partition, ["rows"])["rows"].sum() == 1024
    left = bytes_held(owner, backend, "rows")
    # A unit of TransferQueue keeps what one put sent it in one buffer, and so do ours on `simple`.
    assert left <= whole / 8 if backend == "packed" else left > whole / 8


def test_the_controller_does_not_grow_with_the_steps_of_a_run(owner):
    def footprint(controller):
        return (
            sorted(controller.partitions),
            controller.index_manager.global_index_counter,
            len(controller.index_manager.reusable_indexes),
        )

    def step(number):
        name = f"step-{number}"
        owner.register_partition(name, ["x"], 8, ["train"])
        owner.put_samples([f"s{i}" for i in range(8)], name, batch(8))
        owner.claim_meta(name, "train", ["x"], 8)
        owner.clear_samples(["s0", "s1"], name)
        owner.clear_samples(None, name)

    step(0)
    before = ask(topology.CONTROLLER, footprint)
    for number in range(1, 6):
        step(number)
    assert ask(topology.CONTROLLER, footprint) == before


def test_full_collections_of_the_directory_pass_over_what_it_started_with(owner):
    assert ask(topology.DIRECTORY, lambda directory: gc.get_freeze_count()) > 10_000


def test_registering_a_live_partition_changes_none_of_its_values(owner, partition):
    values = torch.tensor([7, 1 << 40])
    owner.put_samples(["a", "b"], partition, TensorDict({"x": values}, batch_size=[2]))
    owner.register_partition(partition, ["x"], 8, ["train"])
    until(lambda: sorted(known_to_transfer_queue(owner, partition)) == ["a", "b"])
    assert torch.equal(owner.get_samples(["a", "b"], partition, ["x"])["x"], values)
    assert owner.claim_meta(partition, "train", ["x"], 8, blocking=False).size == 2
