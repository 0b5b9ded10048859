"""ModelExpress's control, trainer and generator clients run unchanged against refit-mx's server."""

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from ports import held_port

mx = pytest.importorskip("modelexpress_rl", reason="needs the package modelexpress")
TIMEOUT_S = 90.0
TRAINER = Path(__file__).with_name("modelexpress_trainer.py")


@pytest.fixture
def control(server):
    with mx.ModelExpressControlClient.connect(
        server_url=server.address, rpc_timeout_seconds=10.0
    ) as client:
        yield client


def create(control, key, slots=("a",), **more):
    return control.create_weight_version(
        model_name="m",
        idempotency_key=key,
        payload_format=mx.WeightPayloadFormat.FULL_TENSOR,
        expected_source_slots=list(slots),
        **more,
    )


def code_of(call):
    with pytest.raises(grpc.RpcError) as refusal:
        call()
    return refusal.value.code()


def test_control_client_creates_and_deletes_a_version(control):
    version = create(control, "k", ("a", "b"))
    assert version.state is mx.WeightVersionState.STAGING
    assert version.expected_source_slots == ("a", "b")
    assert version.layout_signature
    assert control.get_weight_version(version.version_id) == version
    assert create(control, "k", ("a", "b")) == version
    gone = control.delete_weight_version(version.version_id)
    assert gone.state is mx.WeightVersionState.RELEASING


def test_control_client_sees_the_status_codes_of_modelexpress(control):
    version = create(control, "k")
    staging, ready = mx.WeightVersionState.STAGING, mx.WeightVersionState.READY
    assert code_of(lambda: create(control, "k", ("b",))) is grpc.StatusCode.ALREADY_EXISTS
    assert code_of(lambda: control.get_weight_version("x")) is grpc.StatusCode.NOT_FOUND
    uid = version.version_id
    code = code_of(lambda: control.update_weight_version_state(uid, ready))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    control.delete_weight_version(uid)
    code = code_of(lambda: control.update_weight_version_state(uid, staging))
    assert code is grpc.StatusCode.FAILED_PRECONDITION


def test_control_client_creates_versions_in_object_storage_ready(control):
    from modelexpress_rl import ObjectStorageSource, ObjectStorageType

    version = create(
        control,
        "k",
        (),
        uid="v7",
        object_storage=ObjectStorageSource(ObjectStorageType.S3, "s3://bucket/v7"),
        state=mx.WeightVersionState.READY,
    )
    assert version.version_id == "v7"
    assert version.state is mx.WeightVersionState.READY
    assert version.object_storage.uri == "s3://bucket/v7"


def test_p2p_client_publishes_lists_and_withdraws_a_source(server):
    from modelexpress import MxClient, p2p_pb2

    client = MxClient(server.address)
    try:
        identity = p2p_pb2.SourceIdentity(model_name="m", dtype="bfloat16")
        worker = p2p_pb2.WorkerMetadata(
            worker_rank=3, nixl_metadata=b"n", status=p2p_pb2.SOURCE_STATUS_READY, agent_name="g"
        )
        source = client.publish_metadata(identity, worker, "w")
        (listed,) = client.list_sources(identity, p2p_pb2.SOURCE_STATUS_READY).instances
        assert (listed.mx_source_id, listed.worker_id, listed.worker_rank) == (source, "w", 3)
        other = p2p_pb2.SourceIdentity(model_name="m", dtype="float16")
        assert not client.list_sources(other).instances
        got = client.get_metadata(source, "w")
        assert got.found
        assert (got.worker.agent_name, got.worker.nixl_metadata) == ("g", b"n")
        assert got.identity == identity
        assert client.update_status(source, "w", 3, p2p_pb2.SOURCE_STATUS_STALE, source_load=0.5)
        assert not client.list_sources(identity, p2p_pb2.SOURCE_STATUS_READY).instances
        (stale,) = client.list_sources(identity, p2p_pb2.SOURCE_STATUS_STALE).instances
        assert stale.source_load == 0.5
        assert not client.update_status(source, "unknown", 0, p2p_pb2.SOURCE_STATUS_READY)
        assert not client.get_metadata(source, "unknown").found
    finally:
        client.close()


# Trainer and generator


class Client:
    """A process with one of ModelExpress's clients; it reads and prints lines."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=nixl_environment(),
        )
        # Read lines in a thread: NIXL prints to stdout too, and select ignores buffered lines.
        self.lines = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self, first):
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            line = self.lines.get(timeout=max(0.001, deadline - time.monotonic()))
            assert line, f"it ended with {self.process.wait(TIMEOUT_S)}; expected {first!r}"
            if line.startswith(first):
                return line.split()

    def say(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


def nixl_environment():
    environment = dict(os.environ)
    if not Path("/sys/class/infiniband").exists():
        environment.setdefault("UCX_TLS", "tcp,shm,self")
        environment.setdefault("UCX_MODULES", "^ib")
    return environment


GENERATOR = """
import sys
import torch
sys.path.insert(0, {tests!r})
from modelexpress_trainer import SHAPES, weight
from modelexpress_seams import Part, cpu_generator_context, modelexpress_on_cpu
from refit_mx import Box

rank, world, server = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def part_of(name, shape):
    if name == "norm":
        box = Box((0,) * len(shape), tuple(shape))
    else:
        # Columns, which no single row-sharded source holds.
        first, behind = rank * shape[1] // world, (rank + 1) * shape[1] // world
        box = Box((0, first), (shape[0], behind - first))
    return Part(torch.zeros(box.shape, dtype=torch.bfloat16), name, box)

parts = {{name: part_of(name, shape) for name, shape in SHAPES.items()}}
with modelexpress_on_cpu():
    from modelexpress_rl import (
        ModelExpressGeneratorClient, ModelExpressGeneratorConfig, WeightVersionRef
    )
    config = ModelExpressGeneratorConfig(
        engine_context=cpu_generator_context(parts), model_name="m", server_url=server,
        worker_id=f"generator-{{rank}}", registration_ttl_seconds=6, lease_ttl_seconds=6,
        rpc_timeout_seconds=20.0,
    )
    with ModelExpressGeneratorClient.initialize(config) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            version_id, number = line.split()
            staged = client.stage_weight(version=WeightVersionRef(version_id))
            print("staged", flush=True)
            sys.stdin.readline()
            client.apply_weight(staged)
            staged.release()
            for name, part in parts.items():
                want = weight(name, SHAPES[name], int(number))[part.box.slices()]
                assert torch.equal(part.tensor, want), (name, part.tensor, want)
            print("installed", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainers", "generators"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 2)]
)
def test_trainer_and_generator_clients_refit_byte_for_byte(
    server, control, tmp_path, trainers, generators
):
    pytest.importorskip("nixl_cu12", reason="needs the package nixl-cu12")
    started = []
    # The client takes its ports from the environment, so they are found before it starts.
    held = contextlib.ExitStack()
    # NIXL listens on every interface; gloo may pick the same port of another one.
    ports = [[held.enter_context(held_port("0.0.0.0")) for _ in range(2)] for _ in range(trainers)]
    try:
        ranks = [
            Client(
                str(TRAINER),
                f"--rank={rank}",
                f"--world={trainers}",
                f"--rendezvous={tmp_path / 'rendezvous'}",
                f"--server={server.address}",
                f"--ports={','.join(map(str, ports[rank]))}",
            )
            for rank in range(trainers)
        ]
        started += ranks
        program = GENERATOR.format(tests=str(TRAINER.parent))
        takers = [
            Client("-c", program, str(rank), str(generators), server.address)
            for rank in range(generators)
        ]
        started += takers
        slots = [rank.line("slot")[1] for rank in ranks]
        for taker in takers:
            taker.line("ready")
        for number in (1, 2):
            version = create(control, f"step-{number}", slots)
            for rank in ranks:
                rank.say(f"publish {version.version_id} {number}")
            for rank in ranks:
                rank.line("done")
            current = control.get_weight_version(version.version_id)
            assert current.state is mx.WeightVersionState.READY
            for taker in takers:
                taker.say(f"{version.version_id} {number}")
            for taker in takers:
                taker.line("staged")
            for taker in takers:
                taker.say("go")
            for taker in takers:
                taker.line("installed")
            # No leases are held now, so the trainers may release their shards.
            control.delete_weight_version(version.version_id)
            for rank in ranks:
                rank.say(f"release {version.version_id} 0")
            for rank in ranks:
                rank.line("done")
        for each in started:
            each.process.stdin.close()
        for each in started:
            assert each.process.wait(TIMEOUT_S) == 0
    finally:
        for each in started:
            each.process.kill()
            each.process.wait(TIMEOUT_S)
        held.close()
