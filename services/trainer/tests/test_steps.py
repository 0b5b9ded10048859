"""Steps on a real Ray: what is dropped, masked and written, and that nothing stays behind.

The tests share one set of processes; the last ones kill some of it.
"""

from __future__ import annotations

import math
import shutil
import signal
import tempfile

import psutil
import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core import MissingDataError
from grpo_trainer.actor_calls import ActorCalls
from grpo_trainer.errors import DynamicSamplingError, GradientError, WorkerError
from grpo_trainer.loss import token_logprobs
from grpo_trainer.policy import Policy
from grpo_trainer.prompts import Prompt, PromptRecord, PromptStream
from grpo_trainer.run_actors import ENVIRONMENT, GENERATION, ROLLOUT, RunActors
from grpo_trainer.step import GRPOStep, StepReport, trainable

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


class Watch:
    """Sees what passes between the driver and the actors of a step."""

    def __init__(self):
        self.client = None
        self.clear()

    def clear(self):
        self.rollouts = []
        self.trained = None

    def __call__(self, name, direction, what):
        if name == ROLLOUT and direction == "received":
            meta, carry, *_ = what
            self.rollouts.append((meta, carry))
        if direction == "sent" and "rows_per_step" in what[1]:
            # Every column of the step is written, and none is cleared yet.
            [meta] = what[0]
            self.trained = meta.sample_ids
            self.columns = self.client.get_samples(meta.sample_ids, meta.partition_id, COLUMNS)
            self.gone = self.missing(self.generated, "train")

    @property
    def generated(self):
        return [name for meta, _ in self.rollouts for name in meta.sample_ids]

    def missing(self, sample_ids, partition):
        try:
            self.client.get_samples(sample_ids, partition, [])
        except MissingDataError as error:
            return error.sample_ids
        return []

    def of_ids(self, key):
        return {
            name: value
            for meta, carry in self.rollouts
            for name, value in zip(meta.sample_ids, carry[key].tolist(), strict=True)
        }


class Run:
    def __init__(self, configure, model_folder, tokenizer, texts, temp_dir):
        self.texts = texts
        self.base = {
            "cluster.temp_dir": temp_dir,
            "policy.model": {
                "kind": "pretrained",
                "name": str(model_folder),
                "use_chat_template": False,
            },
            "policy.generation.temperature": TEMPERATURE,
            "policy.generation.max_new_tokens": 8,
            "grpo.num_generations_per_prompt": 8,
            "policy.global_batch_size": 8,
        }
        self.configure = configure
        self.tokenizer = tokenizer
        self.watch = Watch()
        self.actors = RunActors(
            configure(self.base), model=str(model_folder), tokenizer=tokenizer, observer=self.watch
        )
        self.watch.client = self.actors.data_plane
        self.steps = 0

    def prompts(self, answers):
        return [
            Prompt(
                record=PromptRecord(prompt=text, answer=answer),
                token_ids=self.tokenizer(text)["input_ids"],
            )
            for text, answer in zip(self.texts, answers, strict=True)
        ]

    def stepper(self, answers, changes=()):
        config = self.configure({**self.base, **dict(changes)})
        calls, workers = self.actors.calls, self.actors.policy_workers
        self.watch.clear()
        return GRPOStep(
            config,
            calls=calls,
            data_plane=self.actors.data_plane,
            policy=Policy(calls, workers, config.policy),
            weight_sync=self.actors.weight_sync,
            prompts=PromptStream(self.prompts(answers), seed=1, shuffle=False),
            run_id="test",
        )

    def step(self, answers, changes=()):
        report = StepReport()
        self.steps += 1
        self.stepper(answers, changes).run(self.steps, report)
        return report.metrics


@pytest.fixture(scope="module")
def run(configure, model_folder, tokenizer, questions):
    temp_dir = tempfile.mkdtemp(prefix="gt-")
    terminated = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: terminated.append(number))
    run = Run(configure, model_folder, tokenizer, list(questions), temp_dir)
    run.terminated = terminated
    yield run
    run.actors.close()
    run.actors.close()
    assert not ray.is_initialized()
    signal.raise_signal(signal.SIGTERM)  # neither Ray's start nor its end took it away
    assert len(terminated) == 2
    signal.signal(signal.SIGTERM, before)
    shutil.rmtree(temp_dir)


def test_a_started_ray_leaves_sigterm_to_the_process(run):
    signal.raise_signal(signal.SIGTERM)
    assert run.terminated == [signal.SIGTERM]


@pytest.fixture(scope="module")
def likely(questions):
    return list(questions.values())


SAMPLING = {"grpo.dynamic_sampling": {"enabled": True, "max_batches": 1, "when_short": "proceed"}}
TEMPERATURE = 1.2
NEVER = "z"  # not among the tokenizer's characters


def whole_groups(kept, **sizes):
    """The most samples that are whole groups and whole optimiser steps, or one of less than one."""
    size, group, ranks = sizes["global_batch_size"], sizes["group_size"], sizes["data_parallel"]
    counts = range(0, kept + 1, group)
    whole = [count for count in counts if count % size == 0]
    return max(whole) or max(
        count for count in counts if count <= size and count % math.lcm(group, ranks) == 0
    )


@given(st.integers(0, 300), st.integers(1, 12), st.integers(2, 16), st.integers(1, 4))
def test_a_short_step_trains_on_whole_groups_only(kept, per_rank, group, ranks):
    sizes = {
        "global_batch_size": per_rank * ranks,
        "group_size": group,
        "data_parallel": ranks,
    }
    found = trainable(kept, **sizes)
    assert found == whole_groups(kept, **sizes)
    assert found % group == found % ranks == 0
    assert found <= kept


def test_a_short_step_is_made_of_whole_optimiser_steps_or_is_a_smaller_one():
    sizes = {"global_batch_size": 128, "group_size": 16, "data_parallel": 2}
    found = {kept: trainable(kept, **sizes) for kept in (0, 16, 112, 128, 144, 272)}
    assert found == {0: 0, 16: 16, 112: 112, 128: 128, 144: 128, 272: 256}


def test_dynamic_sampling_drops_and_clears_groups_of_equal_rewards(run, likely):
    metrics = run.step([likely[0], NEVER, likely[2], NEVER], SAMPLING)
    rewards = run.watch.of_ids("total_reward")
    groups = [run.watch.generated[i : i + 8] for i in range(0, 32, 8)]
    equal = [name for g in groups if len({rewards[n] for n in g}) == 1 for name in g]
    assert 16 <= len(equal) < 32
    assert sorted(run.watch.gone) == sorted(equal)
    assert sorted([*run.watch.trained, *equal]) == sorted(run.watch.generated)
    assert metrics["samples"] == len(run.watch.trained)
    assert metrics["generated"] == 32
    assert sorted(run.watch.missing(run.watch.generated, "train")) == sorted(run.watch.generated)


def test_a_group_of_filtered_samples_is_dropped_if_not_counted(run, likely):
    changes = {
        **SAMPLING,
        "grpo.overlong_filtering": True,
        "grpo.statistics_include_filtered": False,
    }
    run.step(likely, changes)
    rewards, truncated = run.watch.of_ids("total_reward"), run.watch.of_ids("truncated")
    groups = [run.watch.generated[i : i + 8] for i in range(0, 32, 8)]
    different = [
        name
        for group in groups
        if len({rewards[other] for other in group if not truncated[other]}) > 1
        for name in group
    ]
    assert run.watch.trained == (different or None)
    assert any(truncated.values())


def test_dynamic_sampling_fills_up_and_clears_the_surplus(run, likely):
    sampling = {"grpo.dynamic_sampling": {**SAMPLING["grpo.dynamic_sampling"], "max_batches": 9}}
    metrics = run.step([*likely[:3], NEVER], sampling)
    assert metrics["batches"] > 1
    assert metrics["samples"] == len(run.watch.trained) == 32
    assert len(run.watch.gone) == metrics["generated"] - 32 > 0
    assert len(run.watch.missing(run.watch.generated, "train")) == metrics["generated"]


def test_a_step_in_which_all_groups_are_equal_trains_on_nothing(run):
    metrics = run.step([NEVER] * 4, SAMPLING)
    assert metrics["samples"] == 0
    assert run.watch.trained is None
    assert len(run.watch.missing(run.watch.generated, "train")) == 32


def test_too_few_groups_end_the_run_if_so_configured(run):
    sampling = {**SAMPLING["grpo.dynamic_sampling"], "max_batches": 2, "when_short": "raise"}
    stepper = run.stepper([NEVER] * 4, {"grpo.dynamic_sampling": sampling})
    with pytest.raises(DynamicSamplingError, match=r"0 of 32 samples .* after 2 batches"):
        stepper.run(0, StepReport())
    assert len(run.watch.missing(run.watch.generated, "train")) == 64


def test_the_groups_of_a_short_step_are_those_that_are_trained(run, likely):
    """Two of three groups make the one whole optimiser step."""
    changes = {**SAMPLING, "policy.global_batch_size": 16}
    for _ in range(9):
        metrics = run.step([*likely[:3], NEVER], changes)
        assert metrics["groups"] == metrics["samples"] / 8 == len(run.watch.trained) / 8
        rewards = run.watch.of_ids("total_reward")
        groups = [run.watch.generated[i : i + 8] for i in range(0, 32, 8)]
        kept = [name for g in groups if len({rewards[n] for n in g}) > 1 for name in g]
        if len(kept) == 24:
            assert run.watch.trained == kept[:16]
            return
    pytest.fail("never three groups with different rewards")


def test_a_step_tells_what_all_its_rollouts_were_like(run, likely):
    sampling = {"grpo.dynamic_sampling": {**SAMPLING["grpo.dynamic_sampling"], "max_batches": 2}}
    metrics = run.step([likely[0], NEVER, NEVER, NEVER], sampling)
    assert metrics["batches"] == 2
    each = [meta.extra_info["rollout_metrics"] for meta, _ in run.watch.rollouts]
    for name in ("mean_gen_tokens_per_sample", "truncation_rate", "avg_turns_per_sample"):
        assert metrics[name] == pytest.approx(sum(told[name] for told in each) / 2)
    longest = max(told["max_gen_tokens_per_sample"] for told in each)
    assert metrics["max_gen_tokens_per_sample"] == longest
    assert metrics["tokens_per_s"] > 0


def test_the_reward_is_told_as_it_was_given_and_scaled_in_advantages_only(run, likely):
    changes = {"grpo.reward_scale": 10.0, "grpo.normalize_advantages": False}
    metrics = run.step(likely, changes)
    rewards = run.watch.of_ids("total_reward")
    given_rewards = torch.tensor([rewards[name] for name in run.watch.trained])
    assert metrics["reward"] == pytest.approx(float(given_rewards.mean()))
    assert metrics["reward_std"] == pytest.approx(float(given_rewards.std()))
    groups = given_rewards.reshape(-1, 8)
    above = groups - (groups.sum(1, keepdim=True) - groups) / 7
    torch.testing.assert_close(run.watch.columns["advantages"], 10 * above.reshape(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.75])
def test_a_sample_that_the_policy_scores_too_differently_is_left_out(run, likely, bad):
    stepper = run.stepper(likely, {"grpo.max_logprob_error": 0.5})
    score = stepper._policy.compute_logprobs

    def one_is_off(meta, column):
        errors = score(meta, column)
        return [bad if place == 3 else error for place, error in enumerate(errors)]

    stepper._policy.compute_logprobs = one_is_off
    report = StepReport()
    stepper.run(0, report)
    expected = [0.0 if place == 3 else 1.0 for place in range(32)]
    assert run.watch.columns["sample_mask"].tolist() == expected
    assert report.metrics["logprob_masked"] == 1
    assert math.isfinite(report.metrics["logprob_error"])


def weights_of(worker):
    return {name: tensor.clone() for name, tensor in worker._model.state_dict().items()}


def add_to_gradients(worker, what):
    """Adds ``what`` to every gradient from now on; None puts an end to it."""
    if what is None:
        worker.added.remove()
    else:
        first = next(worker._model.parameters())
        worker.added = first.register_hook(lambda gradient: gradient + what)


@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_the_run_before_any_weight_takes_it_over(
    run, likely, what
):
    worker = run.actors.calls.handle(run.actors.policy_workers[0])
    before = ray.get(worker.__ray_call__.remote(weights_of))
    ray.get(worker.__ray_call__.remote(add_to_gradients, what))
    try:
        with pytest.raises(GradientError, match=r"^step 5: the gradient's norm is (nan|inf); "):
            run.stepper(likely).run(4, StepReport())
    finally:
        ray.get(worker.__ray_call__.remote(add_to_gradients, None))
    after = ray.get(worker.__ray_call__.remote(weights_of))
    assert all(torch.equal(after[name], before[name]) for name in before)
    run.actors.data_plane.clear_samples(run.watch.generated, "train")
    run.step(likely)
    trained = ray.get(worker.__ray_call__.remote(weights_of))
    assert all(tensor.isfinite().all() for tensor in trained.values())


@pytest.mark.parametrize("filtering", [False, True])
def test_overlong_filtering_masks_exactly_the_truncated_samples(run, likely, filtering):
    run.step(likely, {"grpo.overlong_filtering": filtering})
    truncated = run.watch.of_ids("truncated")
    cut = torch.tensor([truncated[name] for name in run.watch.trained])
    assert 0 < cut.sum() < len(cut)
    expected = (~cut).float() if filtering else torch.ones(len(cut))
    assert torch.equal(run.watch.columns["sample_mask"], expected)


@pytest.mark.parametrize("included", [False, True])
def test_filtered_samples_count_in_statistics_if_configured(run, likely, included):
    run.step(
        likely,
        {
            "grpo.overlong_filtering": True,
            "grpo.statistics_include_filtered": included,
            "grpo.normalize_advantages": False,
        },
    )
    rewards, truncated = run.watch.of_ids("total_reward"), run.watch.of_ids("truncated")
    expected = []
    for start in range(0, 32, 8):
        group = run.watch.trained[start : start + 8]
        kept = [name for name in group if included or not truncated[name]]
        for name in group:
            others = [rewards[other] for other in kept if other != name]
            above = rewards[name] - sum(others) / max(1, len(others))
            expected.append(above if len(kept) > 1 else 0.0)
    assert 0 < sum(truncated.values()) < 32
    torch.testing.assert_close(run.watch.columns["advantages"], torch.tensor(expected))


def test_the_columns_of_a_step_are_those_of_the_policies(run, likely, network):
    run.step(likely)
    columns = run.watch.columns
    width = int(columns["input_lengths"].max())
    padded = {
        name: torch.stack(
            [torch.nn.functional.pad(row, (0, width - len(row))) for row in columns[name].unbind()]
        )
        for name in COLUMNS
        if columns[name].is_nested or columns[name].dim() > 1
    }
    with torch.no_grad():
        initial = token_logprobs(
            network, padded["input_ids"], columns["input_lengths"], temperature=TEMPERATURE
        )
    mask = padded["token_mask"].bool()
    close = {"atol": 1e-4, "rtol": 0}
    torch.testing.assert_close(padded["reference_policy_logprobs"], initial, **close)
    torch.testing.assert_close(
        padded["prev_logprobs"][mask], padded["generation_logprobs"][mask], **close
    )
    assert (padded["prev_logprobs"] - initial).abs().max() > 1e-3  # the policy has learnt
    rewards = run.watch.of_ids("total_reward")
    for i, name in enumerate(run.watch.trained):
        others = [rewards[n] for n in rewards if n != name and n[:-3] == name[:-3]]
        assert len(others) == 7
        sign = rewards[name] - sum(others) / 7
        assert float(columns["advantages"][i]) * sign >= 0


def test_validation_has_a_partition_of_its_own_and_clears_it(run, likely):
    stepper = run.stepper(likely)
    mean = stepper.validate(50, run.prompts(likely), StepReport())
    rewards = run.watch.of_ids("total_reward")
    assert {meta.partition_id for meta, _ in run.watch.rollouts} == {"val"}
    assert len(rewards) == 4
    assert mean == pytest.approx(sum(rewards.values()) / 4)
    assert len(run.watch.missing(run.watch.generated, "val")) == 4


def test_what_fails_in_a_worker_is_named_and_the_worker_lives_on(run):
    with pytest.raises(
        WorkerError, match=r"^generation worker: install_weights failed: VersionNotFoundError"
    ):
        run.actors.calls.one(GENERATION, "install_weights", "nobody-made-it")
    assert run.actors.calls.one(GENERATION, "metrics")


def test_a_policy_worker_that_does_not_see_the_run_s_folder_is_named(run, likely, tmp_path):
    policy = run.stepper(likely)._policy
    policy.see(tmp_path)
    with pytest.raises(
        WorkerError,
        match=rf"^policy worker 0: {tmp_path}/gone: no such folder on .*; run.output has to be a",
    ):
        policy.see(tmp_path / "gone")


def test_a_late_worker_is_named(run):
    calls = ActorCalls(timeout_s=0.0)
    calls.add(GENERATION, run.actors.calls.handle(GENERATION))
    batch = {"input_ids": torch.full((64, 8), 5), "input_lengths": torch.full((64,), 8)}
    named = r"^generate: (no answer from generation worker|Ray did not answer) in 0 s"
    with pytest.raises(WorkerError, match=named):
        calls.one(GENERATION, "generate", batch, greedy=False)


def kill(class_name):
    [process] = [
        child
        for child in psutil.Process().children(recursive=True)
        if " ".join(child.cmdline()).startswith(f"ray::{class_name}")
    ]
    process.kill()


@pytest.mark.parametrize(
    ("class_name", "name"), [("VerifierEnvironment", ENVIRONMENT), ("RolloutActor", ROLLOUT)]
)
def test_a_process_that_died_is_named_by_the_call_that_needed_it(run, likely, class_name, name):
    """Comes last: what died here stays dead."""
    kill(class_name)
    with pytest.raises(WorkerError, match=rf"^{name} died during rollout_to_tq: The actor died"):
        run.step(likely)
