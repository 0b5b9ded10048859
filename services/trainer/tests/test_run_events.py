"""A run's start, stop, resumption and failure arrive as events, without its secrets."""

from __future__ import annotations

import pytest

import grpo_trainer
from grpo_trainer import RunDisplay
from grpo_trainer.errors import WorkerError
from observability.receiver import Receiver

pytestmark = pytest.mark.slow

SECRET = "hunter2"


class Stopping(RunDisplay):
    """A display that stops the run after its first step."""

    def __init__(self, stop):
        self.stop = stop

    def finished_step(self, record):
        self.stop.requested = True


def test_each_start_and_end_of_a_run_is_recorded(local_ray, configure, questions_file, tmp_path):
    with Receiver() as receiver:
        config = configure(
            {
                "run.output": str(tmp_path),
                "data.train": str(questions_file),
                "grpo.num_steps": 2,
                "checkpointing.every_steps": 1,
                "tracing.enabled": True,
                "tracing.endpoint": receiver.endpoint.replace("//", f"//user:{SECRET}@"),
            }
        )
        stop = grpo_trainer.GracefulStop()
        result = grpo_trainer.train(config, stop=stop, display=Stopping(stop))
        too_many = ["data_plane.num_storage_units=10000", "cluster.nodes_timeout_s=0"]
        with pytest.raises(WorkerError, match="Ray has"):
            grpo_trainer.resume(result.folder, too_many)
        events = [event for event in receiver.snapshot().events if event.name.startswith("run_")]
    assert [event.name for event in events] == [
        *("run_started", "run_stopped"),
        *("run_started", "run_failed"),
    ]
    assert {event.attributes["rl.run_id"] for event in events} == {f"demo/{result.folder.name}"}
    started = [event.attributes for event in events if event.name == "run_started"]
    assert [facts.get("dataplane.resumed_from") for facts in started] == [None, 1]
    assert started[0]["dataplane.config"]["grpo.num_steps"] == "2"
    failed = events[3].attributes
    assert failed["error.type"] == "WorkerError"
    assert failed["dataplane.reason"].startswith("cluster.num_cpus: ")
    assert SECRET not in str(events)
