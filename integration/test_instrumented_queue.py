"""``opentelemetry-instrument`` traces a program that uses TransferQueue, and its Ray workers.

Imports internals: the program extends the deadline of the instrumentor's query for keys, because a
loaded machine may need longer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from integration.environments import UV
from integration.instrumented import instrumented_environment

from observability.receiver import Receiver
from observability.records import Records, Span

INSTRUMENT = Path(sys.executable).parent / "opentelemetry-instrument"
TIMEOUT_S = 120.0
OLDER = ("0.1.9", "0.1.10")
"""Older versions of TransferQueue that the instrumentor supports."""
BACKENDS = {
    "SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 64},
    "PackedStorage": {"num_storage_units": 1, "global_segment_size": 1 << 24},
}
JOB = """
import json, sys
import ray, torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from dataplane_tq import start_local_ray  # a Ray that listens on loopback only
from observability.adapters import transfer_queue_keys

transfer_queue_keys._QUERY_S = 10.0
storage_backend, storage, version = sys.argv[1:]
assert version in ("installed", tq.__version__), tq.__version__
if storage_backend == "PackedStorage":
    import dataplane_tq.storage.packed_bootstrap
start_local_ray(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
backend = {"storage_backend": storage_backend, storage_backend: json.loads(storage)}
tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": backend}))

def batch(rows, **columns):
    return TensorDict(columns, batch_size=[rows])

@ray.remote(num_cpus=0)
def rollout():
    tq.init()
    tags = [{"uid": name} for name in "abc"]
    fields = batch(3, ids=torch.zeros(3, 8, dtype=torch.int64))
    tq.kv_batch_put(keys=["a", "b", "c"], partition_id="train", fields=fields, tags=tags)

ray.get(rollout.remote())
client = tq.get_client()
for _ in range(20):  # a consumer that polls
    assert client.get_meta(["ids"], 8, "train", task_name="train").size == 0
meta = client.get_meta(["ids"], 3, "train", task_name="train")
assert [sorted(tags) for tags in meta.custom_meta] == [["uid"]] * 3, meta.custom_meta
assert client.get_data(meta)["ids"].shape[0] == 3
# Like a trainer that adds fields, to a claimed meta and to keys.
tags = [{"uid": name} for name in "abc"]
meta = client.put(batch(3, values=torch.zeros(3, 1)), metadata=meta)
assert meta.custom_meta == tags, meta.custom_meta
fields = batch(3, rewards=torch.zeros(3, 1))
assert tq.kv_batch_put(keys=["a", "b", "c"], partition_id="train", fields=fields).tags == tags
tq.kv_put(key="a", partition_id="train", tag={"uid": "a"})
for fields in ("ids", ["ids", "values", "rewards"]):
    tq.kv_batch_get(keys=["a", "b", "c"], partition_id="train", select_fields=fields)
listed = tq.kv_list("train")["train"]
assert listed == {name: {"uid": name} for name in "abc"}, listed
client.put(batch(2, ids=torch.zeros(2, 8, dtype=torch.int64)), partition_id="bare")
tq.kv_clear(keys=["a"], partition_id="train")
try:
    client.get_data(meta)
except Exception as error:
    print("raised", type(error).__name__)
"""


@pytest.fixture(
    scope="module",
    params=[
        ("SimpleStorage", "installed"),
        ("PackedStorage", "installed"),
        *(pytest.param(("SimpleStorage", old), marks=pytest.mark.long) for old in OLDER),
    ],
    ids=":".join,
)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Run the job with ``opentelemetry-instrument``, and return its records."""
    backend, version = request.param
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(JOB)
    if version != "installed":
        install = [UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        package = f"transferqueue=={version}"
        subprocess.run([*install, "--target", folder, package], check=True, timeout=TIMEOUT_S)
    program = ["job.py"] if backend == "SimpleStorage" else ["-m", "job"]
    arguments = [backend, json.dumps(BACKENDS[backend]), version]
    with Receiver() as receiver, tempfile.TemporaryDirectory(prefix="it-") as short:
        environment = instrumented_environment(receiver.endpoint, short)
        done = subprocess.run(
            [INSTRUMENT, "--logs_exporter", "otlp", sys.executable, *program, *arguments],
            env={**environment, "PYTHONPATH": str(folder)},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("raised "), done.stdout
        return receiver.snapshot()


def spans_named(records: Records, name: str) -> list[Span]:
    named = [span for span in records.spans if span.name == name]
    return sorted(named, key=lambda span: span.start_ns)


def test_operations_are_spans(recorded: Records) -> None:
    names = [span.name for span in recorded.spans]
    for name in ("send train", "receive train", "get train", "send bare", "settle train"):
        assert name in names
    assert names.count("receive train") == 1  # polls without samples have no span
    put, *_ = spans_named(recorded, "send train")
    assert put.attributes["messaging.batch.message_count"] == 3
    assert put.attributes["dataplane.bytes"] == 3 * 8 * 8
    assert put.attributes["dataplane.fields"] == ["ids"]


def test_claims_and_reads_link_to_the_puts_of_their_fields(recorded: Records) -> None:
    puts = spans_named(recorded, "send train")
    fields = [put.attributes["dataplane.fields"] for put in puts]
    assert fields == [["ids"], ["values"], ["rewards"]]
    gets = spans_named(recorded, "get train")[1:3]
    ids = [put.span_id for put in puts]
    assert [[link.span_id for link in get.links] for get in gets] == [ids[:1], ids]
    (claim,) = spans_named(recorded, "receive train")
    assert puts[0].process.pid != claim.process.pid
    assert [link.span_id for link in claim.links] == ids[:1]
    assert claim.attributes["messaging.consumer.group.name"] == "train"


def test_failed_operation_is_an_error(recorded: Records) -> None:
    outcomes = [span.outcome for span in spans_named(recorded, "get train")]
    assert outcomes == ["unset"] * 3 + ["error"]


def test_events_name_the_samples(recorded: Records) -> None:
    events = {event.name: event.sample_ids for event in recorded.events if event.sample_ids}
    assert events["claimed"] == ("a", "b", "c")
    assert events["cleared"] == ("a",)
    bare = [
        event.sample_ids
        for event in recorded.events
        if event.attributes.get("dataplane.partition") == "bare"
    ]
    assert all(name.startswith("#") for name in bare[0])
