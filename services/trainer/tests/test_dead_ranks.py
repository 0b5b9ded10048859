"""A run with ``when_rank_dies: proceed`` continues without a dead rank and trains all samples.

``integration/test_traced_step.py`` tests the default: the run ends.
"""

from __future__ import annotations

import json
import threading

import psutil
import pytest
import torch
from safetensors.torch import load_file

import grpo_trainer
from grpo_trainer import RunDisplay
from observability.receiver import Receiver

pytestmark = pytest.mark.slow

RANKS, PROMPTS, GROUP, STEPS = 3, 6, 4, 2
SAMPLES = PROMPTS * GROUP


@pytest.fixture(scope="module")
def rank_config(local_ray, configure, model_folder, tmp_path_factory):
    """Function that configures a run of three ranks; takes dotted keys to change."""
    model = {"kind": "pretrained", "name": str(model_folder), "use_chat_template": False}
    return lambda changes=(): configure(
        {
            "run.output": str(tmp_path_factory.mktemp("runs")),
            "policy.model": model,
            "policy.data_parallel": RANKS,
            "policy.when_rank_dies": "proceed",
            "policy.global_batch_size": SAMPLES // 2,
            "policy.optimizer.learning_rate": 0.01,
            "policy.optimizer.warmup_steps": 0,
            "grpo.num_steps": STEPS,
            "grpo.num_prompts_per_step": PROMPTS,
            "grpo.num_generations_per_prompt": GROUP,
            "grpo.kl_coefficient": 0.1,
            "checkpointing": {"every_steps": STEPS, "keep_last": 1, "journal": False},
            "validation.every_steps": 0,
            **dict(changes),
        }
    )


class Killer(RunDisplay):
    """Display that kills one of the ranks in the last step."""

    def __init__(self, method="", number=0, delay_s=0.0):
        self.method, self.number, self.delay_s = method, number, delay_s
        self.records, self.notices = [], []

    def notice(self, text):
        self.notices.append(text)

    def finished_step(self, record):
        self.records.append(record)

    def phase(self, name):
        if name == self.method and len(self.records) == STEPS - 1:
            self.method = ""
            ranks = [
                process
                for process in psutil.Process().children(recursive=True)
                if process.cmdline() and "PolicyWorker" in process.cmdline()[0]
            ]
            assert len(ranks) == RANKS
            victim = sorted(ranks, key=lambda process: process.pid)[self.number]
            threading.Timer(self.delay_s, victim.kill).start()


def weights(result):
    return load_file(result.folder / f"checkpoints/step-{STEPS:06d}/model/model.safetensors")


def load_state(result):
    [path] = result.folder.glob("checkpoints/*/state.json")
    return json.loads(path.read_text())["state"]


@pytest.fixture(scope="module")
def baseline(rank_config):
    return grpo_trainer.train(rank_config())


@pytest.mark.parametrize(
    ("phase", "number", "delay_s"),
    [
        pytest.param("refit", 0, 0.0, marks=pytest.mark.long),
        pytest.param("logprobs", 2, 0.05, marks=pytest.mark.long),
        ("train", 0, 0.0),
        pytest.param("train", 1, 0.1, marks=pytest.mark.long),
    ],
)
def test_a_lost_rank_does_not_change_the_weights(rank_config, baseline, phase, number, delay_s):
    killer = Killer(phase, number, delay_s)
    with Receiver() as receiver:
        tracing = {"tracing.enabled": True, "tracing.endpoint": receiver.endpoint}
        result = grpo_trainer.train(rank_config(tracing), display=killer)
        events = receiver.snapshot().events
    left = [event.attributes for event in events if event.name == "policy_rank_left"]
    last, expected = result.history[-1], baseline.history[-1]
    if killer.notices[-1].startswith("continuing without policy worker"):
        assert last["policy_ranks"] == RANKS - 1
        [dead] = left
        assert dead["rl.step"] == STEPS - 1
        assert f"policy worker {dead['dataplane.rank']} died" in dead["dataplane.reason"]
    else:  # the step had ended before the kill
        assert delay_s > 0
        assert left == []
    assert last["samples"] == SAMPLES
    for name in ("loss", "grad_norm", "tokens", "kl"):
        assert last[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)
    trained, same = weights(result), weights(baseline)
    for name, tensor in trained.items():
        torch.testing.assert_close(tensor, same[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("phase", "delay_s"),
    [("refit", 0.0), pytest.param("train", 0.1, marks=pytest.mark.long)],
)
def test_async_run_that_lost_a_rank_trains_each_prompt_once(rank_config, phase, delay_s):
    changes = {
        "grpo.mode": "async",
        "grpo.asynchronous.prompts_per_rollout": 1,
        "grpo.asynchronous.prompts_per_claim": 1,
    }
    killer = Killer(phase, 1, delay_s)
    result = grpo_trainer.train(rank_config(changes), display=killer)
    assert any(each.startswith("continuing without") for each in killer.notices)
    assert result.history[-1]["policy_ranks"] == RANKS - 1
    assert [record["samples"] for record in result.history] == [SAMPLES] * STEPS
    # As many prompts were taken as were trained or dropped, and none is pending. So no prompt is
    # missing, and none was trained twice.
    dropped = sum(record["stale_groups"] for record in result.history)
    state = load_state(result)
    assert state["pending_prompts"] == []
    assert state["prompts_position"] == STEPS * PROMPTS + dropped
