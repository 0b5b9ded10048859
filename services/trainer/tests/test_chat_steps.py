"""A run of two-turn conversations with a chat template, on two ranks.

In the second optimizer step of the run's second step, one rank's gradient is NaN.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil

import pytest
import torch
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

import grpo_trainer
from column_io import write_columns
from dataplane_core import build_data_plane_client
from grpo_trainer.errors import ConfigurationError, GradientError
from observability.receiver import Receiver

pytestmark = pytest.mark.slow

# It contains the time, as templates of real models contain the date.
TEMPLATE = (
    "{{ strftime_now('%f') }}{% for m in messages %}{% if m.role == 'user' %}({{ m.content }})="
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
FIRST, SECOND = "1+1=", "2+2="
RANKS, SAMPLES, ROWS_PER_STEP = 2, 16, 4


def curves_in(frames):
    """Return the metrics of steps in a recording, by name and step."""
    points = {}
    while frames:
        size = int.from_bytes(frames[:4], "little")
        request = ExportMetricsServiceRequest.FromString(frames[4 : 4 + size])
        frames = frames[4 + size :]
        for resource in request.resource_metrics:
            for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
                for point in metric.gauge.data_points:
                    steps = [
                        pair.value.int_value for pair in point.attributes if pair.key == "rl.step"
                    ]
                    points |= {(metric.name, step): point.as_double for step in steps}
    return points


class ObservedRun(grpo_trainer.RunDisplay):
    """Run with its conversations, the shards that it trained on, and its outcome."""

    def __init__(self, config, recording):
        self.client, self.done = None, 0
        self.texts, self.shards = [], {}
        with Receiver(recording) as receiver:
            tracing = config.tracing.model_copy(
                update={"enabled": True, "endpoint": receiver.endpoint}
            )
            with pytest.raises(GradientError) as raised:
                grpo_trainer.train(
                    config.model_copy(update={"tracing": tracing}), display=self, observer=self
                )
            self.message = str(raised.value)
            events = receiver.snapshot().events
        self.recorded = [event.sample_ids for event in events if event.name == "trained"]
        self.curves = curves_in((recording / "metrics.otlp").read_bytes())
        self.client.close()

    def started(self, folder, config, done_steps):
        self.folder = folder
        self.client = build_data_plane_client(config.data_plane, bootstrap=False)

    def finished_step(self, record):
        self.done = record["step"]

    def __call__(self, name, direction, what):
        if name == "rollout actor" and direction == "received":
            columns = self.client.get_samples(
                what[0].sample_ids, "train", ["input_ids", "token_mask"]
            )
            self.texts += zip(
                columns["input_ids"].unbind(), columns["token_mask"].unbind(), strict=True
            )
        if direction == "sent" and "rows_per_step" in what[1]:
            [shard] = what[0]
            self.shards[self.done, name] = shard.sample_ids
            if self.done and name == "policy worker 1":
                spoilt = shard.subset(range(ROWS_PER_STEP, shard.size))
                nan = torch.full((spoilt.size,), math.nan)
                write_columns(self.client, spoilt, {"advantages": nan})


@pytest.fixture(scope="module")
def chat_model(model_folder, tokenizer, tmp_path_factory):
    """Model on disk with a chat template, and a function that replaces the template."""
    folder = shutil.copytree(model_folder, tmp_path_factory.mktemp("chat") / "model")

    def set_template(template):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        tokenizer.chat_template = None

    set_template(TEMPLATE)
    set_template.folder = folder
    return set_template


@pytest.fixture(scope="module")
def run(local_ray, configure, chat_model, tmp_path_factory):
    data = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    data.write_text(
        f'{{"prompt": "{FIRST}", "answer": "2", '
        f'"follow_ups": [{{"prompt": "{SECOND}", "answer": "4"}}]}}'
    )
    model = {"kind": "pretrained", "name": str(chat_model.folder), "use_chat_template": True}
    return ObservedRun(
        configure(
            {
                "run.output": str(tmp_path_factory.mktemp("runs")),
                "policy.model": model,
                "policy.data_parallel": RANKS,
                "policy.global_batch_size": RANKS * ROWS_PER_STEP,
                "policy.micro_batch_size": ROWS_PER_STEP,
                "policy.generation.max_new_tokens": 8,
                "grpo.num_steps": 3,
                "grpo.kl_coefficient": 0,
                "data.train": str(data),
                "validation.every_steps": 0,
                "checkpointing.every_steps": 1,
            }
        ),
        tmp_path_factory.mktemp("recording"),
    )


def test_a_conversation_equals_the_rendered_template(run, tokenizer):
    ended = 0
    assert len(run.texts) == 2 * SAMPLES
    for ids, mask in run.texts:
        pairs = itertools.groupby(
            zip(ids.tolist(), mask.tolist(), strict=True), key=lambda pair: pair[1]
        )
        turns = [
            (bool(said), tokenizer.decode([token for token, _ in turn])) for said, turn in pairs
        ]
        assert [said for said, _ in turns] == [False, True, False, True]
        (_, question), (_, response), (_, turn), _ = turns
        assert re.fullmatch(rf"\d{{6}}\({re.escape(FIRST)}\)=", question)
        has_end = response.endswith("<eos>")
        ended += has_end
        assert response.count("<eos>") == has_end
        said = turn.removeprefix("" if has_end else "<eos>")
        assert said in {f"(ok;{SECOND})=", f"(no;{SECOND})="}
    assert 0 < ended < 2 * SAMPLES


def test_all_ranks_see_a_nan_gradient_of_one_rank(run):
    assert run.message.startswith("step 2: the gradient's norm is nan; ")
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step-000001"]


def test_the_step_of_a_nan_gradient_has_metrics(run):
    # The OpenTelemetry SDK drops values that are not finite.
    assert ("rl.grad_norm", 0) in run.curves
    assert ("rl.grad_norm", 1) not in run.curves
    assert run.curves["rl.reward.mean", 1] >= 0
    assert run.curves["rl.logprob_gap.mean", 1] >= 0
    # Its samples were not all trained.
    assert run.curves["rl.samples", 1] == run.curves["rl.samples", 0] == SAMPLES


def test_only_samples_of_completed_steps_are_recorded_as_trained(run):
    expected = [ids if step == 0 else ids[:ROWS_PER_STEP] for (step, _), ids in run.shards.items()]
    assert len(expected) == 2 * RANKS
    assert sorted(map(sorted, run.recorded)) == sorted(map(sorted, expected))


def test_a_resume_accepts_the_same_template_on_another_day(run, chat_model, accepted):
    accepted(lambda display: grpo_trainer.resume(run.folder, display=display))
    chat_model(TEMPLATE.replace("})=", "})?"))
    named = rf"^policy.model: {chat_model.folder}: found a tokenizer and chat template of digest "
    with pytest.raises(ConfigurationError, match=named):
        grpo_trainer.resume(run.folder)
