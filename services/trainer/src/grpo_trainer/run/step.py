"""Synchronous GRPO step, from prompts to cleared samples.

The driver handles sample ids and a few floats per sample. The bulk moves from the rollout actor to
the data plane, and between the data plane and the policy workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any  # Any: transformers' tokenizers

import torch

from column_io import write_columns
from dataplane_core import DP_TRAIN_FIELDS, DataPlaneClient, KVBatchMeta
from dataplane_core.telemetry import Bucket, inject, span, step_context
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.checkpoint.folder import RunState
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.errors import DynamicSamplingError, GradientError, WorkerError
from grpo_trainer.policy.driver import Policy
from grpo_trainer.policy.learning_rate import learning_rate
from grpo_trainer.refit.weight_sync import RefitWeightSync
from grpo_trainer.rollout.batch import rollout_batch
from grpo_trainer.rollout.prompts import Prompt, PromptStream
from grpo_trainer.rollout.remote_generation import GENERATION
from grpo_trainer.rollout.sample_records import GENERATED_TOKENS, record_generated, record_texts
from grpo_trainer.rollout.totals import RolloutBatch, total_metrics
from grpo_trainer.run.processes import ROLLOUT, GeneratorActors
from grpo_trainer.samples.advantages import mean_and_std
from grpo_trainer.samples.partition import PREV_LOGPROBS, TRAIN, VALIDATION, stage_tasks
from grpo_trainer.samples.shaping import CARRY, shape_rewards
from observability import emit

_PASSED = 1 - 1e-6
"""Reward above which all answers of a conversation are correct; rounding may keep it below 1."""


@dataclass
class Batch:
    """Samples with the driver's columns, one number per sample each.

    Items of ``columns``:

    - "advantages" and "sample_mask", float32 (n,), as they will be written;
    - "std", float64 (n,), the standard deviation of the group's rewards;
    - "comparable", bool (n,), whether at least two of the group's rewards count.
    """

    meta: KVBatchMeta
    columns: dict[str, torch.Tensor]

    def subset(self, rows: Sequence[int]) -> Batch:
        """Return the samples at ``rows``."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        columns = {name: column[index] for name, column in self.columns.items()}
        return Batch(self.meta.subset(rows), columns)

    def concat(self, other: Batch) -> Batch:
        """Return these samples followed by those of ``other``."""
        columns = {
            name: torch.cat([column, other.columns[name]]) for name, column in self.columns.items()
        }
        return Batch(self.meta.concat(other.meta), columns)


@dataclass
class StepReport:
    """Metrics of a running step.

    Attributes:
        metrics: name to number.
        seconds: phase to seconds, in the order of the phases.
        on_phase: called with the name of each phase that begins.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    on_phase: Callable[[str], None] = lambda phase: None

    @contextmanager
    def phase(self, name: str, bucket: Bucket = "idle") -> Iterator[None]:
        """Time a phase; phases with the same name add up.

        The default bucket is idle: the driver waits.
        """
        self.on_phase(name)
        started = time.perf_counter()
        try:
            with span(name, bucket):
                yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed


def count_trainable(
    kept: int, *, global_batch_size: int, group_size: int, data_parallel: int
) -> int:
    """Return how many of ``kept`` samples to train on, if they are fewer than a full step's.

    The result is always a number of complete groups. It makes as many complete optimizer steps as
    possible. If it would make none, it is one smaller step that the ranks share equally in complete
    groups, or 0 if there is no such step.
    """
    step = math.lcm(global_batch_size, group_size)
    part = math.lcm(data_parallel, group_size)
    return kept // step * step or min(kept, global_batch_size) // part * part


class GRPOStep:
    """Runner of steps; ``data_plane`` is the driver's client."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        calls: ActorCalls,
        data_plane: DataPlaneClient,
        policy: Policy,
        weight_sync: RefitWeightSync,
        prompts: PromptStream,
        run_id: str,
        tokenizer: Any,
    ) -> None:
        self._config = config
        self._calls = calls
        self._client = data_plane
        self._policy = policy
        self._weight_sync = weight_sync
        self._prompts = prompts
        self._run_id = run_id
        self._tokenizer = tokenizer

    def run(self, step: int, report: StepReport) -> None:
        """Run the step after ``step`` completed steps, and fill ``report``.

        Raises:
            WorkerError: a worker died, failed or timed out.
            DataPlaneError: the data plane failed.
            DynamicSamplingError: too few groups have unequal rewards.
            StalenessError: too many samples of an asynchronous step are too stale.
            GradientError: a gradient is not finite. Its optimizer step and later ones were skipped;
                ``report`` has the metrics of the step.
        """
        with self._context(step), span("grpo.step"):
            self._run(step, report)

    def untrained_prompts(self) -> list[int]:
        """Return the positions of prompts that are taken and not trained: none if synchronous."""
        return []

    def on_checkpoint(self, state: RunState) -> None:
        """Remove what the checkpoint of ``state`` makes superfluous: nothing if synchronous."""

    def stop(self) -> None:
        """Stop what runs between steps: nothing if synchronous."""

    def _context(self, step: int) -> AbstractContextManager[None]:
        # The version of the weights is the number of completed steps.
        verbose = self._config.tracing.verbose
        return step_context(self._run_id, step, weight_version=step, verbose=verbose)

    def _install(self, version: int) -> None:
        """Install the policy's weights on the generation worker."""
        while True:
            try:
                return self._weight_sync.sync(version)
            except WorkerError as error:
                self._policy.ranks.drop_dead(error)

    def _validator(self) -> GeneratorActors:
        """Return the actors that generate a validation's conversations."""
        return GeneratorActors(ROLLOUT, GENERATION)

    def _random_stream(self, step: int) -> str:
        """Return the name of the step's random stream; benchmarks use one stream for all steps."""
        return f"train {step}"

    def _run(self, step: int, report: StepReport) -> None:
        grpo = self._config.grpo
        with report.phase("refit"):
            self._install(step)
        self._calls.call(GENERATION, "begin", self._random_stream(step))
        self._client.register_partition(
            TRAIN,
            list(DP_TRAIN_FIELDS),
            self._config.samples_per_step,
            stage_tasks(grpo),
            grpo_group_size=grpo.num_generations_per_prompt,
        )
        batch = self._collect(report)
        report.metrics["samples"] = batch.meta.size
        if batch.meta.size:
            self._learn(batch, step, report)
        scored = [PREV_LOGPROBS] if grpo.recompute_prev_logprobs else []
        self._record_texts(batch.meta.sample_ids, scored)
        with report.phase("clear", "overhead"):
            self._client.clear_samples(batch.meta.sample_ids, TRAIN)

    def _record_texts(self, sample_ids: Sequence[str], fields: Sequence[str]) -> None:
        """Record conversation and tokens of as many of a step's samples as are configured."""
        tracing = self._config.tracing
        chosen = sample_ids[: tracing.sample_texts]
        if tracing.enabled and chosen:
            with span("record_texts", "overhead"):
                record_texts(self._client, chosen, self._tokenizer, fields=fields)

    def _learn(self, batch: Batch, step: int, report: StepReport) -> None:
        grpo = self._config.grpo
        meta, sample_mask = batch.meta, batch.columns["sample_mask"]
        self._policy.stamp_pad_width(meta)
        if grpo.recompute_prev_logprobs:
            with report.phase("logprobs"):
                scores = self._policy.compute_logprobs(meta, "prev_logprobs")
            report.metrics.update(scores.gap.metrics)
            error = torch.tensor(scores.errors)
            report.metrics["logprob_error"] = float(error.where(error.isfinite(), 0.0).max())
            if grpo.max_logprob_error is not None:
                # Not >, so that NaN is masked as well.
                too_far = ~(error <= grpo.max_logprob_error)
                sample_mask[too_far] = 0.0
                report.metrics["logprob_masked"] = int(too_far.sum())
        if grpo.kl_coefficient > 0:
            with report.phase("reference"):
                self._policy.compute_logprobs(meta, "reference_policy_logprobs")
        with report.phase("advantages", "overhead"):
            # One number per sample: the loss spreads it over the sample's tokens.
            columns = {"advantages": batch.columns["advantages"], "sample_mask": sample_mask}
            write_columns(self._client, meta, columns)
        with report.phase("train"):
            size = min(self._config.policy.global_batch_size, meta.size)
            rate = learning_rate(self._config.policy.optimizer, step, grpo.num_steps)
            trained = self._policy.train(meta, global_batch_size=size, learning_rate=rate)
        report.metrics.update(
            trained, learning_rate=rate, policy_ranks=len(self._policy.ranks.names)
        )
        if not math.isfinite(trained["grad_norm"]):
            # Adam would spread the NaN or infinity to every weight, and so to later checkpoints.
            raise GradientError(
                f"step {step + 1}: the gradient's norm is {trained['grad_norm']}; expected a "
                "finite number. No weight or checkpoint contains it. A resumed run would fail "
                "at the same step: start a new run with a checkpoint's model/ as "
                "policy.model.name, and a lower policy.optimizer.learning_rate or a "
                "grpo.max_logprob_error"
            )

    def _collect(self, report: StepReport) -> Batch:
        """Generate and return the samples to train on; clear all others."""
        grpo, sampling = self._config.grpo, self._config.grpo.dynamic_sampling
        rows = self._config.samples_per_step
        rewards: list[torch.Tensor] = []
        rollouts: list[RolloutBatch] = []
        kept: Batch | None = None
        limit = sampling.max_batches if sampling.enabled else 1
        while len(rollouts) < limit and (kept is None or kept.meta.size < rows):
            fresh, reward = self._rollout(report, rollouts)
            rewards.append(reward)
            if sampling.enabled:
                fresh = self._drop(fresh, ~fresh.columns["comparable"], "filtered")
                fresh = self._drop(fresh, fresh.columns["std"] == 0, "equal_rewards")
            kept = fresh if kept is None else kept.concat(fresh)
        if kept is None:
            raise AssertionError("max_batches is at least 1")
        reward = torch.cat(rewards)
        mean, std = mean_and_std(reward)
        report.metrics.update(
            reward=mean,
            reward_std=std,
            batches=len(rollouts),
            generated=len(reward),
            **total_metrics(rollouts),
        )
        if kept.meta.size < rows:
            rows = self._size_of_short_step(kept.meta.size, len(rollouts))
        report.metrics["groups"] = rows // grpo.num_generations_per_prompt
        return self._drop(kept, torch.arange(kept.meta.size) >= rows, "surplus")

    def _size_of_short_step(self, kept: int, batches: int) -> int:
        """Return how many samples to train on if only ``kept`` remain, or raise."""
        policy, grpo = self._config.policy, self._config.grpo
        if grpo.dynamic_sampling.when_short == "raise":
            raise DynamicSamplingError(
                f"dynamic sampling: {kept} of {self._config.samples_per_step} samples "
                f"are in groups with unequal rewards after {batches} batches; raise "
                "grpo.dynamic_sampling.max_batches, or set when_short to proceed"
            )
        return count_trainable(
            kept,
            global_batch_size=policy.global_batch_size,
            group_size=grpo.num_generations_per_prompt,
            data_parallel=policy.data_parallel,
        )

    def _rollout(
        self, report: StepReport, rollouts: list[RolloutBatch]
    ) -> tuple[Batch, torch.Tensor]:
        """Generate one batch, add it to ``rollouts``, and return it with the unscaled rewards."""
        grpo = self._config.grpo
        prompts = self._prompts.take(grpo.num_prompts_per_step)
        with report.phase("rollout"):
            meta, carry, rollout, generation = self._calls.call(
                ROLLOUT,
                "rollout_to_tq",
                rollout_batch(prompts, group_size=grpo.num_generations_per_prompt),
                partition_id=TRAIN,
                group_size=grpo.num_generations_per_prompt,
                first_iter=not rollouts,
                carry_keys=[*CARRY, GENERATED_TOKENS],
                carrier=inject(),
            )
        rollouts.append((meta.size, rollout, generation))
        shaped = shape_rewards(carry, grpo)
        record_generated(meta.sample_ids, carry, shaped.advantages, prompts)
        statistics = shaped.statistics
        meta.stamp_tags({"baseline": statistics.baseline, "std": statistics.std})
        columns = {
            "advantages": shaped.advantages,
            "sample_mask": shaped.sample_mask,
            "std": statistics.std,
            "comparable": statistics.comparable,
        }
        return Batch(meta, columns), carry["total_reward"]

    def _drop(self, batch: Batch, dropped: torch.Tensor, reason: str) -> Batch:
        """Clear the rows of ``dropped``, bool (n,), and return the batch without them."""
        if not dropped.any():
            return batch
        sample_ids = [batch.meta.sample_ids[i] for i in dropped.nonzero()[:, 0].tolist()]
        with span("drop", "wasted"):
            emit("dropped", TRAIN, sample_ids, reason=reason)
            self._client.clear_samples(sample_ids, TRAIN)
        return batch.subset((~dropped).nonzero()[:, 0].tolist())

    def validate(self, step: int, prompts: Sequence[Prompt], report: StepReport) -> None:
        """Generate one conversation per prompt, in a separate partition, and report the rewards."""
        with self._context(step), span("grpo.validation"):
            self._validate(step, prompts, report)

    def _validate(self, step: int, prompts: Sequence[Prompt], report: StepReport) -> None:
        with report.phase("refit"):
            self._install(step)
        names = self._validator()
        self._calls.call(names.worker, "begin", f"validation {step}")
        size = self._config.validation.batch_size
        rewards = []
        with report.phase("validation"):
            for start in range(0, len(prompts), size):
                chunk = prompts[start : start + size]
                self._client.register_partition(VALIDATION, [], len(chunk), [])
                meta, carry, _, _ = self._calls.call(
                    names.rollout,
                    "rollout_to_tq",
                    rollout_batch(chunk, group_size=1),
                    partition_id=VALIDATION,
                    group_size=1,
                    first_iter=False,
                    finish_generation=start + size >= len(prompts),
                    carry_keys=["total_reward"],
                    carrier=inject(),
                )
                rewards.append(carry["total_reward"])
                self._client.clear_samples(meta.sample_ids, VALIDATION)
        reward = torch.cat(rewards)
        report.metrics.update(
            validation_reward=mean_and_std(reward)[0],
            validation_pass_rate=float((reward > _PASSED).double().mean()),
        )
