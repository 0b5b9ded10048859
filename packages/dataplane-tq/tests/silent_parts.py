"""Times every operation of a client while one part of the data plane is silent; writes JSON.

Run it as root in a separate network namespace: there a firewall rule drops a part's packets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray
import torch
from tensordict import TensorDict

from dataplane_tq import TQDataPlaneClient, start_local_ray

ACK_S = 2.0
TIMEOUT_S = 30.0
CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "storage_capacity": 100,
    "num_storage_units": 1,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 4 << 20,
    "local_buffer_size": 1 << 20,
    "ack_timeout_ms": int(ACK_S * 1000),
}
RULES = """
add table inet silent
add chain inet silent both { type filter hook input priority 0; }
"""
PROCESSES = {
    "directory": "ray::DirectoryActor",
    "unit": "ray::UnitActor",
    "controller": "ray::TransferQueueController",
    "simple unit": "ray::SimpleStorageUnit",
    "gcs": "gcs_server",
    "raylet": "raylet",
    "master": "mooncake_master",
    "segment": "ray::MooncakeSegment",
    "worker": "datasystem_work",  # the kernel keeps 15 characters of a name
}
SEGMENT_BYTES = {"mooncake_cpu": 16 << 20, "yuanrong": 64 << 20}


def process_of(part):
    """Find a part's process in this network namespace; a daemon is no child of this process."""
    here = os.readlink("/proc/self/ns/net")
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, OSError):
            is_here = os.readlink(f"/proc/{process.pid}/ns/net") == here
            if is_here and process.name().startswith(PROCESSES[part]):
                return process
    raise LookupError(part)


@contextmanager
def stopped(part):
    process = process_of(part)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # closing the owner killed it
            os.kill(process.pid, signal.SIGCONT)


@contextmanager
def dropped(part):
    listening = process_of(part).net_connections("tcp")
    ports = {each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN}
    rules = RULES + "\n".join(
        f"add rule inet silent both tcp {side} {port} drop"
        for port in ports
        for side in ("sport", "dport")
    )
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    try:
        yield
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "silent"], check=True)


def batch():
    return TensorDict({"x": torch.ones(1, 4)}, batch_size=[1])


def operations(config, client):
    """Return operations by name; they all start at once, so each opens its own connection."""
    ready = client.claim_meta("p", "held", ["x"], 1)
    closing = TQDataPlaneClient(config, bootstrap=False)
    return {
        "register": lambda: client.register_partition("q", ["x"], 1, ["t"]),
        "put": lambda: client.put_samples(["c"], "p", batch()),
        "get": lambda: client.get_samples(["a"], "p", ["x"]),
        "claim": lambda: client.claim_meta("p", "t", ["x"], 1, blocking=False),
        "blocking claim": lambda: client.claim_meta("p", "u", ["x"], 4, timeout_s=0.5),
        "acknowledge": lambda: client.acknowledge(ready),
        "count": lambda: client.inspector.count_samples("p", "t", ["x"]),
        "list": client.inspector.list_partitions,
        "clear": lambda: client.clear_samples(["b"], "p"),
        "attach": lambda: TQDataPlaneClient(config, bootstrap=False).close(),
        "close": closing.close,
    }


def timed(name, operation, results):
    started = time.monotonic()
    try:
        operation()
        outcome = "done"
    except Exception as error:  # noqa: BLE001  # the test checks its type
        outcome = f"{type(error).__name__}: {error}".splitlines()[0]
    results[name] = (time.monotonic() - started, outcome)


def silence(name):
    """Return duration and outcome of each operation during the silence ``backend/part/how``."""
    backend, part, how = name.split("/")
    config = {**CONFIG, "backend": backend, "claim_lease_s": 60.0}
    if backend == "packed":
        config["packed_transport"] = "tcp"  # shared memory works without the unit
    config["global_segment_size"] = SEGMENT_BYTES.get(backend, config["global_segment_size"])
    owner = TQDataPlaneClient(config)
    owner.register_partition("p", ["x"], 4, ["t", "u", "held"])
    for sample_id in ("a", "b"):
        owner.put_samples([sample_id], "p", batch())
    results = {}
    todo = operations(config, owner)
    with {"stopped": stopped, "dropped": dropped}[how](part):
        threads = [
            threading.Thread(target=timed, args=(*item, results), daemon=True)
            for item in todo.items()
        ]
        until = time.monotonic() + TIMEOUT_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        for missing in todo.keys() - results.keys():
            results[missing] = (TIMEOUT_S, "nothing")
        timed("close the owner", owner.close, results)
    return results


def main(result, *silences):
    with tempfile.TemporaryDirectory(prefix="silent-") as folder:
        start_local_ray(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            logging_level="ERROR",
            log_to_driver=False,
        )
        Path(result).write_text(json.dumps({name: silence(name) for name in silences}))
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
