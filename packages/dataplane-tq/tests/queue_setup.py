"""Configuration and Ray of tests with a real TransferQueue, and calls to its actors."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager

import ray
import torch
from tensordict import TensorDict

from dataplane_tq import start_local_ray

CONFIG = {
    "enabled": True,
    "impl": "transfer_queue",
    "backend": "packed",
    "storage_capacity": 100_000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 5.0,
    "global_segment_size": 64 << 20,
    "local_buffer_size": 16 << 20,
    "ack_timeout_ms": 20_000,
}


@contextmanager
def local_ray():
    """Run a Ray with four CPUs in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        start_local_ray(
            num_cpus=4,
            include_dashboard=False,
            _temp_dir=folder,
            namespace="dataplane-tq-tests",
            logging_level="ERROR",
            log_to_driver=False,
        )
        yield
        ray.shutdown()


def actor(name):
    """Return an actor of the data plane."""
    return ray.get_actor(name, namespace="transfer_queue")


def ask(name, function):
    """Call a function with an actor's object, in the actor's process."""
    return ray.get(actor(name).__ray_call__.remote(function), timeout=20)


def pid_of(name):
    return ask(name, lambda _: os.getpid())


def batch(count, value=1.0, field="x"):
    return TensorDict({field: torch.full((count, 4), value)}, batch_size=[count])
