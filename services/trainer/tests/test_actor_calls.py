"""Calls to actors end at their deadline, even if a process of Ray does not answer.

Imports internals: the deadline of a run is minutes.
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import ray
from integration.temporary_ray import temporary_ray

from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.errors import WorkerError

pytestmark = pytest.mark.slow

LARGE = b"1" * 1_000_000
"""Argument that is too large for the call itself, and goes through the object store."""


class Echo:
    def echo(self, value):
        return value


@pytest.fixture
def calls():
    with temporary_ray(num_cpus=1, object_store_memory=80 << 20):
        calls = ActorCalls(timeout_s=2.0)
        calls.actors["echo"] = ray.remote(Echo).options(num_cpus=0.1).remote()
        ray.get(calls.actors["echo"].echo.remote(b""), timeout=180)
        yield calls
        calls.stop()


@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_call_ends_at_its_deadline_while_ray_is_stopped(calls, part):
    [process] = [each for each in psutil.Process().children(recursive=True) if each.name() == part]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        outcome = "answered"
        try:
            assert calls.call("echo", "echo", LARGE) == LARGE
        except WorkerError as error:
            outcome = str(error)
        calls.stop()
        assert time.monotonic() - started < 20
    finally:
        os.kill(process.pid, signal.SIGCONT)
    if part == "raylet":
        assert outcome.startswith(("echo: no answer from echo in 2 s", "echo: Ray did not answer"))
