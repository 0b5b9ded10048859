"""Steps on a real Ray: what is dropped, masked and written, and that nothing stays behind.

The tests share one set of processes; the last ones kill some of it.
"""

from __future__ import annotations

import shutil
import signal
import tempfile

import psutil
import pytest
import ray
import torch

from dataplane_core import MissingDataError
from grpo_trainer.actor_calls import ActorCalls
from grpo_trainer.errors import DynamicSamplingError, WorkerError
from grpo_trainer.loss import token_logprobs
from grpo_trainer.policy import Policy
from grpo_trainer.prompts import Prompt, PromptRecord, PromptStream
from grpo_trainer.run_actors import ENVIRONMENT, GENERATION, ROLLOUT, RunActors
from grpo_trainer.step import GRPOStep, StepReport

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


@pytest.mark.parametrize("filtering", [False, True])
def test_overlong_filtering_masks_exactly_the_truncated_samples(run, likely, filtering):
    run.step(likely, {"grpo.overlong_filtering": filtering})
    truncated = run.watch.of_ids("truncated")
    cut = torch.tensor([truncated[name] for name in run.watch.trained])
    assert 0 < cut.sum() < len(cut)
    expected = (~cut).float() if filtering else torch.ones(len(cut))
    assert torch.equal(run.watch.columns["sample_mask"], expected)


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


def test_a_late_worker_is_named(run):
    calls = ActorCalls(timeout_s=0.0)
    calls.add(GENERATION, run.actors.calls.handle(GENERATION))
    batch = {"input_ids": torch.full((64, 8), 5), "input_lengths": torch.full((64,), 8)}
    with pytest.raises(WorkerError, match=r"^generate: no answer from generation worker in 0 s$"):
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
