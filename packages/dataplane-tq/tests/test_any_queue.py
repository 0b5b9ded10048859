"""`QueueInspector` reads a TransferQueue that another program started.

Imports internals: the name of the controller's actor, and constants of the inspector's reads.
"""

import json
import select
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest
import ray
from directory_calls import stop, until

from dataplane_core import (
    ConfigError,
    PartitionNotFoundError,
    StoreInspector,
    UnavailableError,
    UnknownTaskError,
    UnsupportedError,
)
from dataplane_tq import QueueInspector, TQDataPlaneClient
from dataplane_tq.actor_names import CONTROLLER, NAMESPACE

TIMEOUT_S = 20.0
START_S = 120.0
pytestmark = pytest.mark.slow

# A job that uses nothing of this project, except `join_ray` and, if requested, the packed backend.
# It executes statements from its standard input and prints the value of ``answer`` after each.
JOB = """
import json, sys
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from dataplane_tq import join_ray  # the cluster of these tests listens on loopback only
if "packed" in sys.argv:
    import dataplane_tq.storage.packed_bootstrap
join_ray(sys.argv[1], namespace="job", logging_level="ERROR", log_to_driver=False)

def init(polling_mode=True, **backend):
    backend = backend or {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 1000},
    }
    tq.init(OmegaConf.create({"controller": {"polling_mode": polling_mode}, "backend": backend}))

def put(keys, partition, tags=None, **columns):
    batch = TensorDict(columns, batch_size=[len(keys)])
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=batch, tags=tags)

def claim(fields, count, task, partition="train"):
    meta = tq.get_client().get_meta(
        data_fields=fields, batch_size=count, partition_id=partition, mode="fetch", task_name=task
    )
    return sorted(meta.global_indexes)

names = globals()
for line in sys.stdin:
    names["answer"] = None
    exec(json.loads(line), names)
    print(json.dumps(names["answer"]), flush=True)
"""


class Job:
    """A job in a separate process."""

    def __init__(self, address, *flags):
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, address, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, statement):
        self.process.stdin.write(json.dumps(statement) + "\n")
        self.process.stdin.flush()

    def run(self, statement):
        self.begin(statement)
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if ready else ""
        assert line, f"the job did not finish {statement!r}"
        return json.loads(line)

    def close(self):
        """Kill the job; do nothing the second time."""
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()


@pytest.fixture(scope="module")
def long_claim_timeout():
    """Let a controller wait longer than its 1 s for the samples of a claim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", str(int(START_S)))
        yield


@pytest.fixture(scope="module")
def address(long_claim_timeout, cluster):
    return ray.get_runtime_context().gcs_address


def has_queue():
    return any(each["name"] == CONTROLLER for each in ray.util.list_named_actors(True))


@contextmanager
def started(address, statement="init()", *flags):
    """Start a job with a queue, and an inspector of it; both are stopped afterwards."""
    with ExitStack() as stack:
        stack.callback(until, lambda: not has_queue())
        job = Job(address, *flags)
        stack.callback(job.close)
        job.run(statement)
        inspector = QueueInspector(address, timeout_s=TIMEOUT_S)
        stack.callback(inspector.close)
        yield job, inspector


def summary_of(inspector, name, wanted=lambda summary: True):
    """Wait until a partition is as wanted; it may take several reads, which are rate-limited."""

    def matching():
        return [p for p in inspector.list_partitions() if p.partition_id == name and wanted(p)]

    until(matching)
    return matching()[0]


def test_cluster_without_a_queue_is_refused(address):
    with pytest.raises(UnavailableError, match="no TransferQueue"):
        QueueInspector(address, timeout_s=0.5)


def test_data_plane_of_this_package_is_refused(address):
    plane = {"enabled": True, "impl": "transfer_queue", "transfer_queue_mirror": False}
    store = {"backend": "packed", "storage_capacity": 1, "num_storage_units": 1}
    sizes = {"global_segment_size": 1 << 20, "local_buffer_size": 0}
    poll = {"claim_meta_poll_interval_s": 0.1}
    with (
        TQDataPlaneClient({**plane, **store, **sizes, **poll}),
        pytest.raises(ConfigError, match="attach a client"),
    ):
        QueueInspector(address, timeout_s=TIMEOUT_S)


def test_queue_older_than_its_namespace_is_refused(address):
    @ray.remote(num_cpus=0)
    class Controller: ...

    # Before 0.1.8, the controller is in the namespace of the job.
    controller = Controller.options(name="TransferQueueController").remote()
    try:
        with pytest.raises(UnavailableError, match=r"older than 0\.1\.8 and cannot be read"):
            QueueInspector(address, timeout_s=TIMEOUT_S)
    finally:
        ray.kill(controller)


def test_claim_that_blocks_the_controller_is_shown(address):
    with started(address, "init(polling_mode=False)") as (job, inspector):
        job.run("put(['a', 'b'], 'train', x=torch.zeros(2))")
        job.run("put(['a'], 'train', y=torch.zeros(1))")
        assert summary_of(inspector, "train").tasks == ()
        # TransferQueue answers no other request until this claim has two samples or times out.
        job.begin("claim(['x', 'y'], 2, 'train')")
        summary = summary_of(
            inspector, "train", lambda s: s.tasks and s.tasks[0].blocked_claim_fields is not None
        )
        (task,) = summary.tasks
        assert (task.name, task.blocked_claim_fields, task.unclaimed) == ("train", ("x", "y"), 2)
        job.close()
        with pytest.raises(UnavailableError, match="TransferQueue cannot be read"):
            until(lambda: inspector.list_partitions() is None)


def test_blocked_claims_that_are_repeated_in_turn_are_all_shown(address, monkeypatch, tmp_path):
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0")
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "1")
    seen = tmp_path / "seen"
    claims = f"""
import pathlib
while not pathlib.Path({str(seen)!r}).exists():
    for task in ("train", "critic"):
        try:
            claim(["x", "y"], 2, task)
        except RuntimeError as error:
            assert "TimeoutError" in str(error), error
"""
    tasks = ("train", "critic")

    def required(summary):
        return {task.name: task.blocked_claim_fields for task in summary.tasks}

    with started(address, "init(polling_mode=False)") as (job, inspector):
        job.run("put(['a', 'b'], 'train', x=torch.zeros(2))")
        job.begin(claims)
        both = dict.fromkeys(tasks, ("x", "y"))
        summary_of(inspector, "train", lambda summary: required(summary) == both)
        seen.touch()
        job.run("put(['a', 'b'], 'train', y=torch.zeros(2))")
        job.run("answer = [claim(['x', 'y'], 2, task) for task in ('train', 'critic')]")
        none = dict.fromkeys(tasks)
        summary_of(inspector, "train", lambda summary: required(summary) == none)


def test_ended_request_thread_is_reported(address):
    with started(address) as (job, inspector):
        job.run("put(['a'], 'train', x=torch.zeros(1))")
        summary_of(inspector, "train")
        assert inspector.fault is None
        controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        end = controller.__ray_call__.remote(
            lambda controller: setattr(controller, "_handle_request", lambda *_: sys.exit())
        )
        ray.get(end, timeout=TIMEOUT_S)
        job.begin("put(['b'], 'train', x=torch.zeros(1))")
        until(lambda: inspector.list_partitions() and inspector.fault)
        assert "its request thread ended" in inspector.fault
        assert [each.sample_id for each in inspector.list_samples("train")] == ["a"]


@pytest.mark.long
def test_packed_units_report_their_bytes(address):
    settings = "{'num_storage_units': 2, 'global_segment_size': 16 << 20}"
    backend = f"storage_backend='PackedStorage', PackedStorage={settings}"
    with started(address, f"init({backend})", "packed") as (job, inspector):
        job.run("put(['a', 'b'], 'train', x=torch.zeros(2, 1000))")
        units = inspector.list_storage()
        assert [unit.capacity for unit in units] == [16 << 20] * 2
        assert sum(unit.used for unit in units) >= 8000
        assert summary_of(inspector, "train").nbytes == 8000


# A cluster has one queue, so these tests come after those that start others.
@pytest.fixture(scope="module")
def queue(address):
    """Start a queue whose claims do not wait; each test has its own partition."""
    with started(address) as pair:
        yield pair


def test_any_queue_is_shown(queue):
    job, inspector = queue
    job.run(
        "put(['a', 'b', 'c', 'd'], 'train', [{'uid': i // 2} for i in range(4)], "
        "ids=torch.zeros(4, 3, dtype=torch.int64), text=NonTensorStack(*'wxyz'))"
    )
    job.run("put(['c', 'a'], 'train', reward=torch.ones(2))")
    job.run("claim(['ids', 'reward'], 1, 'score')")
    assert isinstance(inspector, StoreInspector)
    summary = summary_of(inspector, "train", lambda summary: summary.tasks)
    assert (summary.present, summary.declared, summary.put) == (4, 4, 4)
    assert [(field.name, field.kind, field.written, field.nbytes) for field in summary.fields] == [
        ("ids", "torch.int64", 4, 96),
        ("text", "object", 4, None),
        ("reward", "torch.float32", 2, 8),
    ]
    (task,) = summary.tasks
    assert (task.name, task.unclaimed, task.acknowledged) == ("score", 3, 1)
    assert 0 <= task.oldest_unclaimed_s < TIMEOUT_S
    samples = inspector.list_samples("train")
    assert [each.sample_id for each in samples] == ["a", "b", "c", "d"]
    assert [each.tags for each in samples] == [{"uid": i // 2} for i in range(4)]
    assert samples[1].fields == ("ids", "text")
    assert sorted(each.tasks["score"] for each in samples) == ["acknowledged"] + ["unclaimed"] * 3
    assert inspector.read_sample("train", "c").fields == ("ids", "text", "reward")
    assert inspector.read_sample("train", "e") is None
    tagged = inspector.find_samples("train", tag="uid", value=1)
    assert [each.sample_id for each in tagged] == ["c", "d"]
    page = inspector.scan_states("train", start=1, limit=2)
    assert (page.total, page.fields, page.tasks) == (4, ("ids", "text", "reward"), ("score",))
    assert page.written == bytes([1, 1, 0, 1, 1, 1])
    assert sum(inspector.scan_states("train").states) == 3
    counts = inspector.count_samples("train", "score", ["ids", "reward"])
    assert (counts.ready, counts.not_ready, counts.acknowledged) == (1, 2, 1)
    with pytest.raises(PartitionNotFoundError, match="'other'"):
        inspector.list_samples("other")
    with pytest.raises(UnknownTaskError, match="'train' has not claimed"):
        inspector.count_samples("train", "train", [])
    (unit,) = inspector.list_storage()
    assert (unit.max_samples, unit.capacity, unit.free) == (1000, None, None)
    assert unit.samples >= 4
    assert unit.used > 0


def test_search_skips_cleared_samples_only(queue, address, monkeypatch):
    job, _ = queue
    job.run("put([*'abcdef'], 'searched', [{'uid': 1}] * 6, x=torch.zeros(6))")
    monkeypatch.setattr("dataplane_tq.any_queue.inspector._SHARE", 1e-9)  # read only once
    monkeypatch.setattr("dataplane_tq.any_queue.inspector._SEARCH_ROWS", 2)
    with closing(QueueInspector(address, timeout_s=TIMEOUT_S)) as inspector:
        job.run("tq.kv_clear(keys=['a', 'b', 'd'], partition_id='searched')")
        for limit, expected in ((100, ["c", "e", "f"]), (2, ["c", "e"]), (0, [])):
            matching = inspector.find_samples("searched", tag="uid", value=1, limit=limit)
            assert [each.sample_id for each in matching] == expected


def test_search_has_a_deadline(queue, address, monkeypatch):
    job, _ = queue
    job.run("put(['a', 'b'], 'timed', x=torch.zeros(2))")
    monkeypatch.setattr("dataplane_tq.any_queue.inspector._SEARCH_ROWS", 1)
    monkeypatch.setattr("dataplane_tq.any_queue.inspector._GRACE_S", TIMEOUT_S)
    with closing(QueueInspector(address, timeout_s=TIMEOUT_S)) as inspector:
        monkeypatch.setattr(inspector, "_timeout_s", 0.0)
        with pytest.raises(UnavailableError, match="searched 1 of 2 samples within 0 s"):
            inspector.find_samples("timed", tag="uid", value=1)


def test_revision_grows_only_with_changes(queue):
    job, inspector = queue
    job.run("put(['a', 'b'], 'changing', x=torch.zeros(2))")
    first = summary_of(inspector, "changing").revision
    job.run("put(['a'], 'another', x=torch.zeros(1))")
    summary_of(inspector, "another")
    assert summary_of(inspector, "changing").revision == first
    job.run("put(['c'], 'changing', x=torch.zeros(1))")
    second = summary_of(inspector, "changing", lambda s: s.present == 3).revision
    job.run("tq.kv_clear(keys=['a'], partition_id='changing')")
    third = summary_of(inspector, "changing", lambda s: s.present == 2).revision
    job.run("tq.get_client().clear_partition('changing')")
    until(lambda: "changing" not in [each.partition_id for each in inspector.list_partitions()])
    job.run("put(['a', 'b'], 'changing', x=torch.zeros(2))")
    assert first < second < third < summary_of(inspector, "changing").revision


def test_further_task_of_a_small_partition_is_shown(queue):
    job, inspector = queue
    job.run("put(['a', 'b'], 'small', x=torch.zeros(2))")
    for count, task in enumerate(("first", "second", "third"), 1):
        job.run(f"claim(['x'], 3, {task!r}, 'small')")  # too many: claims nothing
        summary = summary_of(inspector, "small", lambda s, count=count: len(s.tasks) == count)
        assert [each.unclaimed for each in summary.tasks] == [2] * count


def test_new_sample_at_a_reused_index_is_young(queue):
    job, inspector = queue
    job.run("put(['a'], 'reused', x=torch.zeros(1))")
    summary_of(inspector, "reused")
    until(lambda: inspector.read_sample("reused", "a").age_s > 1.0)
    old = inspector.read_sample("reused", "a").age_s
    job.run("tq.kv_clear(keys=['a'], partition_id='reused')")
    job.run("put(['b'], 'reused', x=torch.zeros(1))")
    # The inspector knows the index as that of `a` until its next read.
    assert [each.sample_id for each in inspector.list_samples("reused")] in ([], ["b"])
    until(lambda: [each.age_s < old for each in inspector.list_samples("reused")] == [True])


def test_repeated_query_shows_changes(queue):
    job, inspector = queue
    job.run("put(['a'], 'polled', x=torch.zeros(1))")
    job.run("claim(['x'], 1, 'score', 'polled')")
    summary_of(inspector, "polled", lambda summary: summary.tasks)
    job.run("put(['b'], 'polled', x=torch.zeros(1))")
    until(lambda: inspector.count_samples("polled", "score", ["x"]).ready == 1)
    job.run("put(['c'], 'polled', x=torch.zeros(1))")
    until(lambda: inspector.scan_states("polled").total == 3)
    job.run("tq.get_client().clear_partition('polled')")
    with pytest.raises(PartitionNotFoundError, match="'polled'"):
        until(lambda: inspector.count_samples("polled", "score", []) is None)


def test_samples_without_keys_are_named_by_index(queue):
    job, inspector = queue
    batch = "TensorDict({'x': torch.zeros(2)}, batch_size=[2])"
    rows = job.run(f"answer = tq.get_client().put({batch}, partition_id='bare').global_indexes")
    summary_of(inspector, "bare")
    ids = [each.sample_id for each in inspector.list_samples("bare")]
    assert ids == [f"#{row}" for row in rows]
    assert inspector.read_sample("bare", ids[1]).sample_id == ids[1]
    assert inspector.read_sample("bare", "#999") is None


def test_hostile_names_and_tags_are_shown_as_text(queue):
    job, inspector = queue
    job.run(
        r"put(['<b>', 'a\ud800b', ''], '../x', "
        r"[{'<i>': 'y\udfff'}, {'big': 2**70}, {'list': [1]}], x=torch.zeros(3))"
    )
    summary_of(inspector, "../x")
    samples = inspector.list_samples("../x")
    assert [each.sample_id for each in samples] == ["<b>", r"a\ud800b", ""]
    assert [each.tags for each in samples] == [
        {"<i>": r"y\udfff"},
        {"big": str(2**70)},
        {"list": "list"},
    ]
    assert inspector.read_sample("../x", r"a\ud800b").tags == {"big": str(2**70)}
    assert inspector.read_sample("../x", f"#{'9' * 5_000}") is None


def test_failed_read_names_the_error_in_the_controller(queue):
    _, inspector = queue

    def rename(old, new):
        controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
        move = controller.__ray_call__.remote(lambda c: setattr(c, new, c.__dict__.pop(old)))
        ray.get(move, timeout=TIMEOUT_S)

    rename("partitions", "renamed")
    try:
        with pytest.raises(UnavailableError, match=r"^TransferQueue cannot be read: Attr.*'part"):
            until(lambda: inspector.list_partitions() is None)
    finally:
        rename("renamed", "partitions")
    assert inspector.list_partitions() is not None


def test_queue_is_only_read(queue):
    _, inspector = queue
    for change in (
        lambda: inspector.reset_consumption("train", "score", ["a"]),
        lambda: inspector.end_claim("train", "c"),
        lambda: inspector.clear_samples(["a"], "train"),
    ):
        with pytest.raises(UnsupportedError, match="only reads it"):
            change()
    assert inspector.list_claims("train") == inspector.list_assignments("train") == []
    with pytest.raises(UnsupportedError, match="counts no operations"):
        inspector.read_totals()


def test_stopped_reader_is_an_error_at_the_deadline(queue, address):
    inspector = QueueInspector(address, timeout_s=1.0)
    try:
        stop(inspector._process.pid)
        with pytest.raises(UnavailableError, match="no answer within"):
            inspector.list_storage()
        with pytest.raises(UnavailableError, match="was lost"):
            inspector.list_storage()
    finally:
        inspector.close()
