"""A run that fails while it starts or stops leaves nothing behind, and starts nothing else.

Imports internals: parts of a run are replaced by parts that fail.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.actors.telemetry import TelemetrySettings
from grpo_trainer.errors import WorkerError
from grpo_trainer.run import processes

TRACED = TelemetrySettings("run", None)


def test_a_traced_run_that_cannot_join_ray_starts_no_cluster(configure, monkeypatch):
    started = []

    def refuse(*args, **kwargs):
        raise ConnectionError("no such cluster")

    monkeypatch.setattr(processes, "join_ray", refuse)
    monkeypatch.setattr(ray, "init", lambda *args, **kwargs: started.append(kwargs))
    config = configure({"cluster.address": "auto"})
    with pytest.raises(WorkerError, match="Ray cannot be started: no such cluster"):
        processes.RunActors(config, model="m", tokenizer=None, telemetry=TRACED)
    assert started == []


def test_interrupt_while_actors_stop_closes_the_data_plane(configure, monkeypatch):
    closed = []

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    plane = SimpleNamespace(close=lambda: closed.append("data plane"))
    monkeypatch.setattr(processes, "_start_ray", lambda cluster: False)
    monkeypatch.setattr(processes, "wait_for_resources", lambda config, timeout_s: None)
    monkeypatch.setattr(processes, "build_data_plane_client", lambda *args, **kwargs: plane)
    monkeypatch.setattr(processes.RunActors, "_start_rollouts", interrupt)
    monkeypatch.setattr(ActorCalls, "stop", interrupt)
    with pytest.raises(KeyboardInterrupt):
        processes.RunActors(configure(), model="m", tokenizer=None)
    assert closed == ["data plane"]
