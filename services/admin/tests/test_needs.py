"""Reported claims determine what a task needs, and whether it has a backlog."""

import pytest
import torch
from tensordict import TensorDict
from waiting import until

from dataplane_core import InMemoryDataPlaneClient

TASKS = ["train", "train\0", "t" * 600, "waits", "silent"]


@pytest.fixture
def job(job_of):
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as plane:
        plane.register_partition("train", ["x", "y"], 8, TASKS)
        plane.put_samples(["a"], "train", TensorDict({"x": torch.zeros(1)}, [1]))
        job = job_of(inspector=plane.inspector, poll_s=0.02, stuck_after_s=1.0)
        until(lambda: job.get("partitions")["partitions"])
        yield job


def needs(job):
    return {task["name"]: task["needs"] for task in job.get("partition", id="train")["tasks"]}


def test_needs_follow_the_newest_claim_of_each_task(job, otlp):
    assert needs(job) == dict.fromkeys(TASKS)
    for at_s, fields in enumerate((["x"], ["x", "y"])):
        job.send(
            *(
                otlp.log("claimed", ["a"], at_s=at_s, task=task, fields=fields)
                for task in TASKS[:3]
            ),
            otlp.log("waiting", at_s=at_s, wait="w", task="waits", fields=fields),
            otlp.log("claimed", ["a"], at_s=9, task="silent"),
        )
        assert needs(job) == {**dict.fromkeys(TASKS[:4], fields), "silent": None}
    job.send(otlp.log("claimed", ["b"], at_s=3, task="train"))
    assert needs(job)["train"] == ["x", "y"]


def test_only_the_newest_of_many_claims_are_read(job, otlp, monkeypatch):
    monkeypatch.setattr("dataplane_admin.service.claims._PAGE", 3)
    job.send(
        *(otlp.log("claimed", [f"{at}"], at_s=at, task="train", fields=["x"]) for at in range(9)),
        otlp.log("waiting", at_s=11, wait="w", task="waits", fields=["y"]),
        otlp.log("put", ["b"], at_s=12, fields=["x"]),
    )
    known = needs(job)
    assert (known["train"], known["waits"]) == (["x"], ["y"])


def test_only_tasks_that_claimed_have_a_backlog(job, otlp):
    for task in ("train", "t" * 600):
        job.send(otlp.log("claimed", ["a"], task=task, fields=["x"]))

        def backlogs():
            return {wait["task"] for wait in job.get("why") if wait["kind"] == "backlog"}

        until(lambda: task in backlogs())  # noqa: B023
        assert backlogs() <= {"train", "t" * 600}
