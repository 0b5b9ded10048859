"""verl's training loop, traced by the adapter: without a GPU, so what needs workers is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from observability.receiver import Receiver
from observability.views import steps_of

# As Ray's hook does: the adapter is installed before verl's trainers are imported.
TRAIN = """
import os
import time
from types import SimpleNamespace
from observability.adapters.verl import install

install()
install()  # a worker's hook and a user's call

import torch
from hydra import compose, initialize_config_module
import verl.trainer.ppo.v1.trainer_base as base
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.v1 import get_trainer_cls

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=[
        "trainer.logger=[console]", "trainer.val_before_train=False", "trainer.total_epochs=9",
        "trainer.experiment_name=my-run", "trainer.test_freq=-1", "trainer.save_freq=100",
        "+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN=secret",
        "data.train_batch_size=1", "algorithm.use_kl_in_reward=False",
    ])


def work(self, batch, metrics=None, **kwargs):
    time.sleep(0.01)
    return batch


class Trainer(get_trainer_cls("sync")):
    def __init__(self):
        self.config, self.trainer_mode, self.parameter_sync_step = config, "sync", 1
        self.use_critic, self.use_reference_policy = False, True
        self.steps_per_epoch, self.total_training_steps = 4, int(TOTAL)
        self.global_steps = int(DONE)  # as after a resume
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
        self.checkpoint_manager = SimpleNamespace(
            update_weights=lambda step: None, sleep_replicas=lambda: None
        )
        batch = SimpleNamespace(keys=["a"], tags=[{}], partition_id="train", extra_info={})
        self.replay_buffer = SimpleNamespace(sample=lambda **kwargs: (batch, {}))
        self._init_dump_executor()

    def prepare_step(self): ...
    def _save_checkpoint(self): ...

    def _compute_metrics(self, batch, metrics, *args, **kwargs):
        names = ["token_level_scores", "token_level_rewards", "advantages", "returns", "prompts",
                 "responses", "response_mask"]
        columns = {name: torch.ones(2, 4) for name in names}
        columns["attention_mask"] = torch.ones(2, 8)
        metrics.update(compute_data_metrics(DataProto.from_dict(columns), use_critic=False))

    _compute_reward_colocate = _compute_old_log_prob = _compute_ref_log_prob = work
    _compute_advantage = _balance_batch = work

    def _update_actor(self, batch, metrics):
        if self.global_steps == int(FAILING):
            raise RuntimeError("out of memory")
        return work(self, batch)


base.tq = SimpleNamespace(kv_clear=lambda **kwargs: None)
trainer = Trainer()
try:
    trainer.fit(None)
finally:  # as verl's task runner; then Ray may kill its process
    trainer.logger.finish(exit_code=int(int(FAILING) > 0))
    os._exit(int(FAILING) > 0)
"""

STAGES = ["rollout", "reward", "logprobs", "reference", "advantages", "train"]


@pytest.mark.parametrize(
    ("done", "total", "failing"),
    [(0, 2, -1), (5, 7, -1), (0, 2, 2)],
    ids=["first_run", "resumed", "failed"],
)
def test_fit_has_a_trace_per_step(tmp_path: Path, done: int, total: int, failing: int) -> None:
    with Receiver(tmp_path / "recording") as receiver:
        program = f"DONE, TOTAL, FAILING = {done}, {total}, {failing}\n{TRAIN}"
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        environment.pop("RUN_ID", None)
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        records = receiver.snapshot()
    steps = steps_of(records)
    assert (ran.returncode == 0) == (failing < 0), ran.stdout + ran.stderr
    events = [event for event in records.events if event.name.startswith("run_")]
    assert [event.name for event in events] == [
        "run_started",
        "run_finished" if failing < 0 else "run_failed",
    ]
    assert {event.attributes["rl.run_id"] for event in events} == {"my-run"}
    config = events[0].attributes["dataplane.config"]
    assert config["trainer.experiment_name"] == "my-run"
    assert "secret" not in config.values()
    metrics = (tmp_path / "recording" / "metrics.otlp").read_bytes()
    for name in ("rl.reward.mean", "rl.response.length", "rl.response.truncated"):
        assert name.encode() in metrics
    # verl counts steps from 1, rl.step from 0.
    assert [step.number for step in steps] == [done, done + 1]
    assert {step.run_id for step in steps} == {"my-run"}
    first, last = ([span.name for span in step.children(step.root.span_id)] for step in steps)
    assert steps[0].incomplete == []
    assert first == [*STAGES, "refit"]
    if failing < 0:
        assert steps[1].incomplete == []
        assert last == [*STAGES, "save_checkpoint", "refit"]
    else:
        assert last == STAGES
        assert all("failed: RuntimeError" in reason for reason in steps[1].incomplete)
        assert steps[1].root.outcome == "error"
