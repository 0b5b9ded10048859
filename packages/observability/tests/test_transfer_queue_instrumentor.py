"""`TransferQueueInstrumentor` hides its tag from the program, and leaves nothing once removed."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

METHODS = "".join(
    f"async def {name}(self): ...\n    "
    for name in (
        "async_put",
        "async_get_meta",
        "async_get_data",
        "async_clear_samples",
        "async_clear_partition",
        "async_kv_list",
        "async_kv_retrieve_meta",
        "async_set_custom_meta",
    )
)
UNINSTRUMENTED = """
from observability.adapters.transfer_queue import TransferQueueInstrumentor

instrumentor = TransferQueueInstrumentor()
for _ in range(2):
    instrumentor.instrument(skip_dep_check=True)
    instrumentor.uninstrument()
from transfer_queue.client import AsyncTransferQueueClient as Client

original = Client.async_put
assert original.__code__.co_filename.endswith("client.py"), "the client is traced"
instrumentor.instrument(skip_dep_check=True)
assert Client.async_put is not original
instrumentor.uninstrument()
assert Client.async_put is original
"""


STUB = """
import json
from types import SimpleNamespace

def meta():
    origin = "00-" + "1" * 32 + "-" + "2" * 16 + "-01;1;"
    tags = {"uid": "a", "dataplane.origins": json.dumps({origin: ["x"]})}
    return SimpleNamespace(
        global_indexes=[0], partition_ids=["train"], field_schema={"x": {}}, custom_meta=[tags],
        _custom_backend_meta=[{}],
    )

class AsyncTransferQueueClient:
    async def async_get_meta(self, *args, **kwargs):
        return meta()

    async def async_put(self, data, metadata, partition_id): ...
    async def async_get_data(self, metadata): ...
    async def async_clear_samples(self, metadata): ...
    async def async_clear_partition(self, partition_id): ...
    async def async_kv_list(self, partition_id): ...
    async def async_kv_retrieve_meta(self, keys, partition_id):
        return meta()

    async def async_set_custom_meta(self, metadata): ...
    async def async_kv_retrieve_keys(self, rows, partition_id):
        raise TypeError("Not all elements in `global_indexes` are int.")
"""
CLAIMS = """
import asyncio, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from observability.adapters.transfer_queue import TransferQueueInstrumentor

trace.set_tracer_provider(TracerProvider(sampler={"on": ALWAYS_ON, "off": ALWAYS_OFF}[sys.argv[1]]))
TransferQueueInstrumentor().instrument(skip_dep_check=True)
from transfer_queue.client import AsyncTransferQueueClient

client = AsyncTransferQueueClient()
claim = client.async_get_meta(["x"], 1, "train", mode=sys.argv[2], task_name="t")
meta = asyncio.run(claim)
assert meta.custom_meta == [{"uid": "a"}], meta.custom_meta
"""
BLOCKED = """
import asyncio
from opentelemetry import _logs, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from observability.adapters.transfer_queue import TransferQueueInstrumentor

events = InMemoryLogRecordExporter()
_logs.set_logger_provider(LoggerProvider())
_logs.get_logger_provider().add_log_record_processor(SimpleLogRecordProcessor(events))
trace.set_tracer_provider(TracerProvider())
TransferQueueInstrumentor().instrument(skip_dep_check=True)
from transfer_queue.client import AsyncTransferQueueClient

class Client(AsyncTransferQueueClient):
    queries = 0

    async def async_kv_retrieve_keys(self, rows, partition_id):
        self.queries += 1
        await asyncio.Event().wait()  # another consumer's claim is blocked in the controller

async def run(client):
    claimed = await client.async_get_meta(["x"], 1, "train", task_name="t")
    await client.async_get_data(claimed)
    assert client.queries == 1, "a query without an answer is followed by a pause"
    for keys in ("a", ["a"]):
        await client.async_get_data(await client.async_kv_retrieve_meta(keys, "train"))
    by_name = await client.async_kv_retrieve_meta(keys=["a"], partition_id="train")
    await client.async_get_data(by_name)
    assert client.queries == 1

asyncio.run(asyncio.wait_for(run(Client()), 30))
bodies = [each.log_record.body for each in events.get_finished_logs()]
assert bodies == ['["#0"]'] * 2 + ['["a"]'] * 3, bodies
"""


@pytest.mark.slow  # needs the extra transfer-queue
def test_reads_do_not_block_on_the_controller(tmp_path):
    (tmp_path / "transfer_queue").mkdir()
    (tmp_path / "transfer_queue" / "__init__.py").touch()
    (tmp_path / "transfer_queue" / "client.py").write_text(STUB)
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow  # needs the extra transfer-queue
@pytest.mark.parametrize("sampled", ["on", "off"])
@pytest.mark.parametrize("mode", ["fetch", "force_fetch"])
def test_claim_hides_the_origin_and_survives_failed_keys(tmp_path, sampled, mode):
    (tmp_path / "transfer_queue").mkdir()
    (tmp_path / "transfer_queue" / "__init__.py").touch()
    (tmp_path / "transfer_queue" / "client.py").write_text(STUB)
    result = subprocess.run(
        [sys.executable, "-c", CLAIMS, sampled, mode],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow  # needs the extra transfer-queue
def test_uninstrument_before_the_import_leaves_no_spans(tmp_path):
    (tmp_path / "transfer_queue").mkdir()
    (tmp_path / "transfer_queue" / "__init__.py").touch()
    (tmp_path / "transfer_queue" / "client.py").write_text(
        f"class AsyncTransferQueueClient:\n    {METHODS}"
    )
    result = subprocess.run(
        [sys.executable, "-c", UNINSTRUMENTED],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow  # needs the extra transfer-queue
def test_command_checks_the_supported_versions():
    from observability.adapters.transfer_queue import TransferQueueInstrumentor

    # `opentelemetry-instrument` reads them from this extra, and calls of `instrument` the method.
    requirements = metadata.requires("observability")
    [checked] = [Requirement(each) for each in requirements if "instruments" in each]
    [supported] = map(Requirement, TransferQueueInstrumentor().instrumentation_dependencies())
    assert checked.name == supported.name.lower()
    assert checked.specifier == supported.specifier
