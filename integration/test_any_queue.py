"""The admin service with a job of another program, which calls ``transfer_queue.init``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from integration.admin_service import ADMIN, Admin, serving
from integration.environments import UV
from integration.waiting import wait_until

TIMEOUT_S = 120.0
JOB = """
import sys, time
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from dataplane_tq import join_ray  # the cluster of the test listens on loopback only

address, folder, version, mode = sys.argv[1:]
join_ray(
    address,
    namespace="job",
    logging_level="ERROR",
    log_to_driver=False,
    runtime_env={"env_vars": {"PYTHONPATH": folder} if folder else {}},  # of another TransferQueue
)
assert not folder or tq.__version__ == version and tq.__file__.startswith(folder), tq.__version__
storage = {"num_data_storage_units": 1, "total_storage_size": 64}
backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
tq.init(OmegaConf.create({"controller": {"polling_mode": mode == "polling"}, "backend": backend}))

def put(names, **columns):
    batch = TensorDict(columns, batch_size=[len(names)])
    tq.kv_batch_put(keys=names, partition_id="train", fields=batch)

ids = [f"prompt{i // 4}-{i % 4}" for i in range(16)]
put(ids, input_ids=torch.zeros(16, 8, dtype=torch.int64))
put(ids[:10], advantages=torch.zeros(10, 8))
claim = tq.get_client().get_meta
while mode == "polling":
    assert not claim(["input_ids", "advantages"], 12, "train", task_name="critic").size
    print("waiting", flush=True)
    time.sleep(0.1)
claim(["input_ids", "advantages"], 8, "train", task_name="update_actor")
print("waiting", flush=True)
while True:
    try:
        claim(["input_ids", "advantages"], 8, "train", task_name="update_actor")
    except RuntimeError:
        pass  # TransferQueue's time-out; the job claims again
"""


@pytest.fixture
def admin(tmp_path: Path, unforked_workers: None, cluster: None) -> Iterator[Admin]:
    """Run the service, which inspects the cluster."""
    address = ray.get_runtime_context().gcs_address
    options = ["--ray-address", address, "--poll-s", "0.2", "--stuck-after-s", "1"]
    with serving(tmp_path, *options) as admin:
        yield admin


@pytest.fixture
def ask(admin: Admin) -> Callable[..., Any]:
    """Return a function that calls the command and returns its JSON."""

    def ask(*command: str) -> Any:
        answer = subprocess.run(
            [ADMIN, *command, "--url", admin.url, "--json"], capture_output=True, check=True
        )
        return json.loads(answer.stdout)

    return ask


def windows(matrix: Any) -> list[Any]:
    """Return the shares of each window of a matrix, by field and by task."""
    return [
        (
            dict(zip(matrix["fields"], each["written"], strict=True)),
            dict(zip(matrix["tasks"], each["tasks"], strict=True)),
        )
        for each in matrix["windows"]
    ]


@contextmanager
def running(
    version: str, folder: Path, *, wait_s: float = 1, mode: str = "blocking"
) -> Iterator[None]:
    """Run the job with a version of TransferQueue during the block.

    Args:
        version: such as "0.1.7", or "installed".
        folder: folder to install it in.
        wait_s: seconds after which the controller ends a claim that waits.
        mode: ``blocking``, or ``polling`` for claims that return at once.
    """
    path = "" if version == "installed" else str(folder / "transfer_queue")
    if path:
        install = [UV, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        package = f"transferqueue=={version}"
        subprocess.run([*install, "--target", path, package], check=True, timeout=TIMEOUT_S)
    address = ray.get_runtime_context().gcs_address
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, address, path, version, mode],
        # Ray sends the controller's class with the module's constants of this process.
        env={
            **os.environ,
            **({"PYTHONPATH": path} if path else {}),
            "TQ_CONTROLLER_GET_METADATA_TIMEOUT": str(wait_s),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "waiting\n"
        yield
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize(
    "version",
    ["installed", *(pytest.param(f"0.1.{each}", marks=pytest.mark.long) for each in (8, 9, 10))],
)
def test_blocked_job_on_any_transfer_queue_is_explained(
    version: str, admin: Admin, ask: Callable[..., Any], tmp_path: Path
) -> None:
    # In 0.1.8 and 0.1.9, a claim that times out ends the controller's thread.
    with running(version, tmp_path, wait_s=600 if version in ("0.1.8", "0.1.9") else 1):
        # Before the service has seen a poll of the claim, it knows only that nothing is claimed.
        reason = "blocked claim"
        (wait,) = wait_until(
            lambda: [each for each in ask("why") if reason in each["sentence"]], TIMEOUT_S
        )
        assert wait["task"] == "update_actor"
        assert "its blocked claim requires input_ids, advantages" in wait["sentence"]
        assert "8 of 16 samples of partition 'train' are unclaimed" in wait["sentence"]
        assert {name: lack["count"] for name, lack in wait["lacks"].items()} == {"advantages": 6}
        assert wait["blocking"] == ["prompt2-2", "prompt2-3", "prompt3-0"]
        answer = ask("partitions")
        (partition,) = answer["partitions"]
        (task,) = partition["tasks"]
        assert (task["unclaimed"], task["ready"], task["acknowledged"]) == (8, 2, 8)
        (unit,) = answer["storage"]
        assert (unit["samples"], unit["max_samples"]) == (16, 64)
        unclaimed, acknowledged = [1, 0, 0, 0], [0, 0, 0, 1]
        expected = [  # shares of four samples each
            ({"input_ids": 1, "advantages": 1}, {"update_actor": acknowledged}),
            ({"input_ids": 1, "advantages": 1}, {"update_actor": acknowledged}),
            ({"input_ids": 1, "advantages": 0.5}, {"update_actor": unclaimed}),
            ({"input_ids": 1, "advantages": 0}, {"update_actor": unclaimed}),
        ]
        # The service scans the samples less often than it reads the numbers.
        admin.until(
            lambda: windows(admin.ask("partition/matrix", id="train", windows=4)) == expected
        )
    wait_until(lambda: not ask("partitions")["live"]["attached"], TIMEOUT_S)


def test_polling_task_that_never_got_a_sample_is_explained(
    ask: Callable[..., Any], tmp_path: Path
) -> None:
    with running("installed", tmp_path, mode="polling"):
        (wait,) = wait_until(lambda: ask("why"), TIMEOUT_S)
        assert wait["task"] == "critic"
        assert {name: lack["count"] for name, lack in wait["lacks"].items()} == {"advantages": 6}


@pytest.mark.long
@pytest.mark.parametrize("version", ["0.1.8", "0.1.9"])
def test_claim_that_ends_the_controller_is_reported(
    version: str, ask: Callable[..., Any], tmp_path: Path
) -> None:
    with running(version, tmp_path):
        live = wait_until(
            lambda: (
                (answer := ask("partitions")["live"])["attached"] and answer["error"] and answer
            ),
            TIMEOUT_S,
        )
        assert "TransferQueue's controller no longer answers" in live["error"]
        fault = ask("why")[0]
        assert (fault["kind"], fault["sentence"]) == ("fault", live["error"])
        assert [each["present"] for each in ask("partitions")["partitions"]] == [16]
    wait_until(lambda: not ask("partitions")["live"]["attached"], TIMEOUT_S)


@pytest.mark.long
def test_too_old_transfer_queue_is_named(ask: Callable[..., Any], tmp_path: Path) -> None:
    with running("0.1.7", tmp_path):
        wait_until(lambda: "older than 0.1.8" in str(ask("partitions")["live"]["error"]), TIMEOUT_S)
