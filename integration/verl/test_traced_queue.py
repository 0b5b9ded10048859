"""``opentelemetry-instrument`` traces the queue of verl's agent loop and replay buffer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from integration.instrumented import instrumented_environment

from observability.receiver import Receiver

ROOT = Path(__file__).parents[2]
INSTRUMENT = Path(sys.executable).parent / "opentelemetry-instrument"
JOB = """
import ray
import torch
import transfer_queue as tq
from dataplane_tq import start_local_ray  # a Ray that listens on loopback only
from hydra import compose, initialize_config_module
from integration.verl import test_replay_buffer as doubles
from opentelemetry.trace import get_tracer_provider
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

start_local_ray(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=doubles.BACKENDS["SimpleStorage"])
tq.init(config.transfer_queue)
doubles.dispatch(["u1"])
worker = ray.remote(doubles.Worker).remote()
ray.get(worker.roll_out.remote(["u1"]))
# Ray ends the worker without a flush.
ray.get(worker.__ray_call__.remote(lambda _: get_tracer_provider().force_flush()))
# Filtering reads the finished groups.
filtering = {"filter_groups_metric": "acc", "refill_fn": lambda _: None}
buffer = ReplayBufferAsync("separate_async", config.trainer, 2, "drop", {}, **filtering)
batch, _ = buffer.sample(3, "train", batch_size=1)
# verl's trainer adds fields, and then uses the batch that the put returns.
size = len(batch.keys)
fields = TensorDict({"old_log_probs": torch.zeros(size, 1)}, batch_size=[size])
updated = tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=fields)
assert updated.tags == batch.tags, (updated.tags, batch.tags)
for name in ("responses", "old_log_probs"):
    tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=[name])
"""


def test_gets_link_to_the_puts_of_their_fields() -> None:
    with Receiver() as receiver, tempfile.TemporaryDirectory(prefix="it-") as short:
        environment = instrumented_environment(receiver.endpoint, short)
        done = subprocess.run(
            [INSTRUMENT, sys.executable, "-c", JOB],
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        records = receiver.snapshot()
    spans = {span.span_id: span for span in records.spans}
    gets = [span for span in records.spans if span.name == "get train"]
    gets.sort(key=lambda span: span.start_ns)
    linked = [[spans[link.span_id] for link in get.links] for get in gets]
    filtering, responses, old_log_probs = linked
    assert filtering == responses
    assert [put.name for put in responses] == ["send train"] * 2  # one for each trajectory
    assert all("responses" in put.attributes["dataplane.fields"] for put in responses)
    assert {put.process.pid for put in responses}.isdisjoint({gets[0].process.pid})
    assert [put.attributes["dataplane.fields"] for put in old_log_probs] == [["old_log_probs"]]
