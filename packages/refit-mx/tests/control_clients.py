"""Helpers for tests of the control plane's client."""

import contextlib
import time

from refit_mx import ControlUnavailableError, RefitTimeoutError
from refit_mx.control import Shard, WorkerRole

TIMEOUT_S = 60.0
TRAINER = WorkerRole.TRAINER


def shard(version_id, slot="a", worker="w", digest="d"):
    return Shard(version_id, slot, worker, 3, 2**40, digest, "127.0.0.1:1")


def publish(client, key="k", worker="w", slots=("a",)):
    client.register_worker(worker, TRAINER, "m", ttl_s=60)
    version = client.create_version("m", slots, idempotency_key=key)
    for slot in slots:
        version = client.create_shard(shard(version.version_id, slot, worker))
    return version.version_id


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s"
        time.sleep(0.02)


def can_read(client, uid):
    with contextlib.suppress(ControlUnavailableError, RefitTimeoutError):
        return client.get_version(uid)
