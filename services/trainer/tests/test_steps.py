"""Steps of real runs equal a reference in Python, given each rollout's result."""

from __future__ import annotations

import math
import statistics
from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch

import grpo_trainer
from column_io import read_columns, write_columns
from dataplane_core import MissingDataError, build_data_plane_client
from grpo_trainer.errors import DynamicSamplingError

pytestmark = pytest.mark.slow

GROUP, PROMPTS = 8, 4
NEVER = "z"  # no response equals it: the tokenizer lacks this character
TEMPERATURE = 1.2
COLUMNS = [
    "input_ids",
    "input_lengths",
    "token_mask",
    "sample_mask",
    "advantages",
    "generation_logprobs",
    "prev_logprobs",
    "reference_policy_logprobs",
]
Sample = namedtuple("Sample", "id reward truncated")
Step = namedtuple("Step", "batches validation trained columns cleared record rollouts")


class Watch(grpo_trainer.RunDisplay):
    """Observer of a run's steps: the driver's calls, and the data plane by a separate client.

    Args:
        config: the run's configuration.
        spoil: positions in each rank's shard of samples whose log-probabilities by the generator
            become NaN.
        stop_after: the step after which the run is asked to stop.
    """

    def __init__(self, config, spoil=(), stop_after=None):
        self.plane = config.data_plane
        self.spoil, self.stop_after = spoil, stop_after
        self.stop = grpo_trainer.GracefulStop()
        self.client = None
        self.steps = []
        self.clear()

    def clear(self):
        self.batches, self.validation, self.rollouts = [], [], []
        self.trained, self.columns, self.cleared = [], None, []

    def __call__(self, name, direction, what):
        if self.client is None and name == "rollout actor":
            self.client = build_data_plane_client(self.plane, bootstrap=False)
        if name == "rollout actor" and direction == "received":
            meta, carry, metrics, _ = what
            rows = [meta.sample_ids, carry["total_reward"].tolist()]
            if meta.partition_id == "val":
                self.validation += rows[1]
                return
            rows.append(carry["truncated"].tolist())
            self.batches.append([Sample(*row) for row in zip(*rows, strict=True)])
            self.rollouts.append(metrics)
        if direction == "sent" and self.spoil and what[0][1:] == ("prev_logprobs",):
            meta = what[0][0].subset(self.spoil)
            column = read_columns(self.client, meta, ["generation_logprobs"])["generation_logprobs"]
            write_columns(self.client, meta, {"generation_logprobs": column * math.nan})
        if direction == "sent" and "rows_per_step" in what[1]:
            # Every column of the step is written, and none is cleared yet.
            [meta] = what[0]
            self.trained = meta.sample_ids
            self.columns = read_columns(self.client, meta, COLUMNS)
            self.cleared = self.missing()

    def missing(self):
        """Return ids of the step's samples that the data plane no longer has."""
        ids = [sample.id for batch in self.batches for sample in batch]
        try:
            self.client.get_samples(ids, "train", [])
        except MissingDataError as error:
            return sorted(error.sample_ids)
        return []

    def finished_step(self, record):
        assert len(self.missing()) == record["generated"]  # nothing of a step stays
        seen = (self.batches, self.validation, self.trained, self.columns, self.cleared)
        self.steps.append(Step(*seen, record, self.rollouts))
        self.stop.requested = len(self.steps) == self.stop_after
        self.clear()


@pytest.fixture
def run(local_ray, configure, model_folder, write_prompts, tmp_path):
    def run(pairs, changes, raises=None, **options):
        config = configure(
            {
                "run.output": str(tmp_path),
                "data.train": str(write_prompts(pairs)),
                "data.validation": str(write_prompts(pairs[:3])),
                "data.shuffle": False,
                "policy.model": {
                    "kind": "pretrained",
                    "name": str(model_folder),
                    "use_chat_template": False,
                },
                "policy.generation.temperature": TEMPERATURE,
                "policy.generation.max_new_tokens": 8,
                "grpo.num_generations_per_prompt": GROUP,
                "grpo.normalize_advantages": False,
                "validation": {"every_steps": 2, "batch_size": 2},
                "checkpointing.every_steps": 0,
                **changes,
            }
        )
        watch = Watch(config, **options)
        with raises or nullcontext():
            grpo_trainer.train(config, display=watch, observer=watch, stop=watch.stop)
        for step in watch.steps:
            check(config, step)
        return watch.steps

    return run


def comparable(config, group):
    """Return the samples of a group whose rewards are compared."""
    if config.grpo.statistics_include_filtered or not config.grpo.overlong_filtering:
        return group
    return [sample for sample in group if not sample.truncated]


def is_kept(config, group):
    return len({sample.reward for sample in comparable(config, group)}) > 1


def advantage(config, sample, group):
    counted = comparable(config, group)
    if len(counted) < 2:
        return 0.0
    others = [other.reward for other in counted if other is not sample]
    above = config.grpo.reward_scale * (sample.reward - statistics.fmean(others))
    if not config.grpo.normalize_advantages:
        return above
    spread = statistics.stdev(config.grpo.reward_scale * other.reward for other in counted)
    return above / (spread + 1e-4)


def check(config, step):
    """Compare a step with the expected fate of its samples."""
    samples = [sample for batch in step.batches for sample in batch]
    groups = [samples[i : i + GROUP] for i in range(0, len(samples), GROUP)]
    if config.grpo.dynamic_sampling.enabled:
        groups = [group for group in groups if is_kept(config, group)]
    groups_per_step = config.policy.global_batch_size // GROUP  # the groups of an optimizer step
    if len(groups) < PROMPTS:  # complete optimizer steps, or one smaller one
        groups = groups[: len(groups) // groups_per_step * groups_per_step or len(groups)]
    groups = groups[:PROMPTS]
    kept = [sample for group in groups for sample in group]
    assert step.trained == [sample.id for sample in kept]
    record = step.record
    assert (record["samples"], record["groups"]) == (len(kept), len(groups))
    assert (record["generated"], record["batches"]) == (len(samples), len(step.batches))
    rewards = [sample.reward for sample in samples]
    assert record["reward"] == pytest.approx(statistics.fmean(rewards))
    assert record["reward_std"] == pytest.approx(statistics.stdev(rewards))
    components = [value for name, value in record.items() if name.startswith("reward/")]
    assert sum(components) == pytest.approx(record["reward"])
    for name in ("mean_gen_tokens_per_sample", "truncation_rate", "avg_turns_per_sample"):
        mean = statistics.fmean(rollout[name] for rollout in step.rollouts)
        assert record[name] == pytest.approx(mean)
    longest = max(rollout["max_gen_tokens_per_sample"] for rollout in step.rollouts)
    assert record["max_gen_tokens_per_sample"] == longest
    assert record["tokens_per_s"] > 0
    if not kept:
        assert "loss" not in record
        return
    assert step.cleared == sorted({sample.id for sample in samples} - set(step.trained))
    assert math.isfinite(record["loss"])
    columns = step.columns
    expected = [advantage(config, sample, group) for group in groups for sample in group]
    torch.testing.assert_close(columns["advantages"], torch.tensor(expected), atol=1e-6, rtol=1e-5)
    tokens = columns["token_mask"] > 0
    gap = (
        (columns["prev_logprobs"] - columns["generation_logprobs"]).abs().where(tokens, 0).double()
    )
    error = gap.sum(1) / tokens.sum(1)
    mask = torch.ones(len(kept))
    if config.grpo.overlong_filtering:
        mask[torch.tensor([sample.truncated for sample in kept])] = 0
    if (limit := config.grpo.max_logprob_error) is not None:
        mask[~(error <= limit)] = 0
        assert record["logprob_masked"] == (~(error <= limit)).sum()
    assert columns["sample_mask"].tolist() == mask.tolist()
    finite = gap[tokens][gap[tokens].isfinite()]
    assert finite.max() < 1e-4  # the generator has the weights of the policy
    assert record["rollout_logprob_diff_mean"] == pytest.approx(float(finite.mean()))
    assert record["rollout_logprob_diff_max"] == pytest.approx(float(finite.max()))
    assert record["logprob_error"] == pytest.approx(float(error[error.isfinite()].max()))


def test_filtered_samples_neither_count_nor_train(run, questions):
    """The second step has only equal rewards, and nothing to train on."""
    answers = [NEVER if i % 2 else answer for i, answer in enumerate(questions.values())]
    first, second = run(
        [*zip(questions, answers, strict=True), *((prompt, NEVER) for prompt in questions)],
        {
            "grpo.num_steps": 2,
            "grpo.dynamic_sampling": {"enabled": True, "max_batches": 1, "when_short": "proceed"},
            "grpo.overlong_filtering": True,
            "grpo.statistics_include_filtered": False,
            "grpo.reward_scale": 10.0,
            "grpo.max_logprob_error": 1e-7,
            "policy.global_batch_size": 16,
        },
        spoil=[3],
    )
    assert any(sample.truncated for sample in first.batches[0])
    assert first.trained
    assert not second.trained


def test_dynamic_sampling_fills_a_step_or_ends_the_run(run, questions):
    """The prompts of nine batches have answers; after those, no group is kept."""
    answers = [*list(questions.values())[:3], NEVER]
    short = r"\d+ of 32 samples are in groups with unequal rewards after 9 batches"
    steps = run(
        9 * list(zip(questions, answers, strict=True)) + 80 * [("min(3,0)=", NEVER)],
        {
            "grpo.num_steps": 9,
            "grpo.dynamic_sampling": {"enabled": True, "max_batches": 9, "when_short": "raise"},
            "grpo.normalize_advantages": True,
            "grpo.overlong_filtering": True,
        },
        raises=pytest.raises(DynamicSamplingError, match=short),
    )
    assert steps
    for step in steps:
        assert len(step.batches) > 1
        assert len(step.trained) == GROUP * PROMPTS


def test_plain_steps_have_exact_columns_metrics_and_validation(run, questions, network, tmp_path):
    steps = run(
        list(questions.items()),
        {
            "grpo.num_steps": 5,
            "policy.optimizer.learning_rate": 0.01,
            "policy.optimizer.warmup_steps": 2,
            "policy.optimizer.final_lr_fraction": 0.5,
        },
        stop_after=4,
    )
    rates = [step.record["learning_rate"] for step in steps]
    assert rates == pytest.approx([0.005, 0.009, 0.008, 0.007])
    assert [len(step.validation) for step in steps] == [0, 3, 0, 3]
    for step in steps[1::2]:
        assert step.record["validation_reward"] == pytest.approx(statistics.fmean(step.validation))
        passed = statistics.fmean(reward == 1 for reward in step.validation)
        assert step.record["validation_pass_rate"] == pytest.approx(passed)
    assert not list(tmp_path.rglob("checkpoints"))  # not even where the run is stopped
    for step in steps:
        columns = step.columns
        ids, mask = columns["input_ids"], columns["token_mask"][:, 1:].bool()
        with torch.no_grad():
            logits = network(input_ids=ids).logits / TEMPERATURE  # right-padded: nothing changes
        initial = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0][mask]
        reference, policy = (
            columns[name][:, 1:][mask] for name in ("reference_policy_logprobs", "prev_logprobs")
        )
        torch.testing.assert_close(reference, initial, atol=1e-4, rtol=0)
        assert (step is steps[0]) == ((policy - initial).abs().max() < 1e-4)  # it learns
