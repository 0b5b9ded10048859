"""The documented consumer loop processes every sample although a consumer is killed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
import ray
import torch
from tensordict import TensorDict

from dataplane_core import ClaimTimeoutError
from dataplane_tq import TQDataPlaneClient

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[3] / "docs"
TIMEOUT_S = 30.0
LEASE_S = 2.0
SAMPLES = 9
LOOPS = {
    "quickstart": ("train", "train", ["advantages"]),
    "recipes/consumer-with-leases": ("train", "score", ["input_ids"]),
}
"""Partition, task and fields of the loop on each page."""


def loop_of(page: str) -> str:
    """Return the source of a page's function `consume`, with its imports."""
    text = (DOCS / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "def consume(" in block]
    function = re.search(r"^def consume\(.*?(?=^\S|\Z)", block, re.MULTILINE | re.DOTALL)
    assert function is not None
    return f"from dataplane_core import LeaseLostError\n\n\n{function[0]}"


class Consumer:
    """Ray actor that runs a page's loop; it hangs at batch number ``stops_at``."""

    def __init__(self, config):
        self.client = TQDataPlaneClient(config, bootstrap=False)

    def pid(self):
        return os.getpid()

    def run(self, source, field, stops_at=None):
        names, processed, batches = {}, [], []
        exec(compile(source, "page", "exec"), names)

        def work(batch):
            batches.append(len(batch[field]))
            if len(batches) == stops_at:
                threading.Event().wait()
            processed.extend(batch[field].tolist())
            return TensorDict({"score": 2 * batch[field]}, batch.batch_size)

        names["consume"](self.client, work)
        self.client.close()
        return processed


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the state did not come"
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    "page",
    [
        "recipes/consumer-with-leases",
        pytest.param("quickstart", marks=pytest.mark.long),
    ],
)
def test_documented_loop_processes_all_after_a_kill(owner, config, page):
    partition, task, fields = LOOPS[page]
    [field] = fields
    ids = [f"s{i}" for i in range(SAMPLES)]
    columns = {name: torch.arange(float(SAMPLES)) for name in {*fields, "input_ids"}}
    owner.register_partition(partition, [*columns, "score"], SAMPLES, [task])
    owner.put_samples(ids, partition, TensorDict(columns, [SAMPLES]))
    start = ray.remote(Consumer).options(num_cpus=0.1, max_concurrency=2).remote
    leasing = {**config, "claim_lease_s": LEASE_S}
    victim, survivor = start(leasing), start(leasing)
    source = loop_of(page)
    victim.run.remote(source, field, stops_at=2)
    pid = ray.get(victim.pid.remote(), timeout=TIMEOUT_S)

    def holds_second_batch():
        counts = owner.inspector.count_samples(partition, task, fields)
        return counts.acknowledged == counts.leased == 2

    until(holds_second_batch)
    os.kill(pid, signal.SIGKILL)
    [held] = owner.inspector.list_claims(partition)
    assert held.owner.endswith(f":{pid}")
    # Declare one more sample, so that this claim is blocked and takes no ready sample.
    owner.register_partition(partition, [*columns, "score"], SAMPLES + 1, [task])
    with pytest.raises(ClaimTimeoutError, match=re.escape(held.owner)) as caught:
        owner.claim_meta(partition, task, fields, SAMPLES, timeout_s=0.01)
    assert caught.value.holders == {held.owner: 2}
    owner.register_partition(partition, [*columns, "score"], SAMPLES, [task])
    processed = ray.get(survivor.run.remote(source, field), timeout=TIMEOUT_S)
    assert owner.check_consumption_status(partition, [task])
    # Each sample once, except for the batch that the victim had acknowledged.
    assert len(processed) == len(set(processed)) == SAMPLES - 2
    owner.clear_samples(None, partition)
