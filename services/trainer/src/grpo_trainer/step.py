"""One synchronous GRPO step, from prompts to cleared samples.

The driver handles metas and a few floats per sample. The bulk goes from the rollout actor to the
data plane, and between the data plane and the policy workers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from column_io import write_columns
from dataplane_core import DP_TRAIN_FIELDS, DataPlaneClient, KVBatchMeta
from dataplane_core.telemetry import Bucket, inject, span, step_context
from grpo_trainer.actor_calls import ActorCalls
from grpo_trainer.advantages import advantages, group_statistics, mean_and_std
from grpo_trainer.config import TrainerConfig
from grpo_trainer.errors import DynamicSamplingError, GradientError
from grpo_trainer.learning_rate import learning_rate
from grpo_trainer.policy import Policy
from grpo_trainer.prompts import Prompt, PromptStream
from grpo_trainer.rollout_batch import rollout_batch
from grpo_trainer.rollout_totals import RolloutTotals
from grpo_trainer.run_actors import GENERATION, ROLLOUT
from grpo_trainer.weight_sync import WeightSync
from observability import emit

TRAIN, VALIDATION = "train", "val"
TASKS = ["prev_lp", "ref_lp", "train"]
CARRY = ["total_reward", "loss_multiplier", "truncated"]
"""What the driver asks of a rollout: one number per sample each."""


@dataclass
class Batch:
    """Samples, with the columns that the driver computes with: one number per sample each.

    ``columns`` has "advantages" and "sample_mask", float32 (n,), as they will be written; "std",
    float64 (n,), of the group's rewards; "comparable", bool (n,), whether at least two of those
    count; "truncated", bool (n,).
    """

    meta: KVBatchMeta
    columns: dict[str, torch.Tensor]

    def subset(self, rows: Sequence[int]) -> Batch:
        """The samples at ``rows``."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        columns = {name: column[index] for name, column in self.columns.items()}
        return Batch(self.meta.subset(rows), columns)

    def concat(self, other: Batch) -> Batch:
        """These samples and the other's."""
        columns = {
            name: torch.cat([column, other.columns[name]]) for name, column in self.columns.items()
        }
        return Batch(self.meta.concat(other.meta), columns)


@dataclass
class StepReport:
    """The metrics of a step while it runs.

    Attributes:
        metrics: name to number.
        seconds: phase to seconds, in the order of the phases.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    on_phase: Callable[[str], None] = lambda phase: None

    @contextmanager
    def phase(self, name: str, bucket: Bucket = "idle") -> Iterator[None]:
        """Time a phase; phases of one name add up.

        Args:
            name: of the phase and its span.
            bucket: of the span; most of the time the driver waits.
        """
        self.on_phase(name)
        started = time.perf_counter()
        try:
            with span(name, bucket):
                yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed


def trainable(kept: int, *, global_batch_size: int, group_size: int, data_parallel: int) -> int:
    """How many of ``kept`` samples, fewer than a step's, are trained on.

    Always whole groups: those of as many whole optimiser steps as there are, or if there is not
    one, of a single smaller optimiser step, which the ranks share equally. 0 if that holds no
    group: one that is larger than an optimiser step, or fewer than the ranks can share.
    """
    step = math.lcm(global_batch_size, group_size)
    part = math.lcm(data_parallel, group_size)
    return kept // step * step or min(kept, global_batch_size) // part * part


class GRPOStep:
    """Runs steps.

    Args:
        config: the run's configuration.
        calls: the run's actors.
        data_plane: the driver's client.
        policy: the policy workers.
        weight_sync: brings weights to the generation worker.
        prompts: where prompts come from.
        run_id: of the run.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        calls: ActorCalls,
        data_plane: DataPlaneClient,
        policy: Policy,
        weight_sync: WeightSync,
        prompts: PromptStream,
        run_id: str,
    ) -> None:
        self._config = config
        self._calls = calls
        self._client = data_plane
        self._policy = policy
        self._weight_sync = weight_sync
        self._prompts = prompts
        self._run_id = run_id

    def run(self, step: int, report: StepReport) -> None:
        """Run the step that follows ``step`` completed ones, and fill ``report``.

        Raises:
            WorkerError: a worker died, failed or was late.
            DataPlaneError: the data plane did.
            DynamicSamplingError: too few groups have different rewards.
            GradientError: the gradient is not finite; no weight has taken it over.
        """
        with self._context(step), span("grpo.step"):
            self._run(step, report)

    def _context(self, step: int) -> AbstractContextManager[None]:
        # A step generates and trains with the weights of as many steps as came before it.
        verbose = self._config.tracing.verbose
        return step_context(self._run_id, step, weight_version=step, verbose=verbose)

    def _stream(self, step: int) -> str:
        """Names the random numbers that the step draws."""
        return f"train {step}"

    def _run(self, step: int, report: StepReport) -> None:
        grpo = self._config.grpo
        with report.phase("refit"):
            self._weight_sync.sync(step)
        self._calls.one(GENERATION, "begin", self._stream(step))
        self._client.register_partition(
            TRAIN,
            list(DP_TRAIN_FIELDS),
            self._config.samples_per_step,
            TASKS,
            grpo_group_size=grpo.num_generations_per_prompt,
        )
        batch = self._collect(report)
        report.metrics["samples"] = batch.meta.size
        if batch.meta.size:
            self._learn(batch, step, report)
        with report.phase("clear", "overhead"):
            self._client.clear_samples(batch.meta.sample_ids, TRAIN)

    def _learn(self, batch: Batch, step: int, report: StepReport) -> None:
        grpo = self._config.grpo
        meta, sample_mask = batch.meta, batch.columns["sample_mask"]
        if grpo.overlong_filtering:
            sample_mask[batch.columns["truncated"]] = 0.0
        self._policy.stamp_pad_width(meta)
        if grpo.recompute_prev_logprobs:
            with report.phase("logprobs"):
                errors = self._policy.compute_logprobs(meta, "prev_logprobs")
            error = torch.tensor(errors)
            report.metrics["logprob_error"] = float(error.where(error.isfinite(), 0.0).max())
            if grpo.max_logprob_error is not None:
                # Not >: an error that is no number is not small.
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
        if not math.isfinite(trained["grad_norm"]):
            # Adam would write it into every weight, and every later checkpoint would hold those.
            raise GradientError(
                f"step {step + 1}: the gradient's norm is {trained['grad_norm']}; expected a "
                "finite number. Neither the weights nor a checkpoint have it, and a resumed run "
                "comes to it again: begin another one, with a checkpoint's model/ as "
                "policy.model.name, and a lower policy.optimizer.learning_rate or a "
                "grpo.max_logprob_error"
            )
        report.metrics.update({name: trained[name] for name in trained if name != "seconds"})
        report.metrics["learning_rate"] = rate

    def _collect(self, report: StepReport) -> Batch:
        """The samples to train on; what is not among them is cleared."""
        grpo, sampling = self._config.grpo, self._config.grpo.dynamic_sampling
        rows = self._config.samples_per_step
        rewards: list[torch.Tensor] = []
        totals = RolloutTotals()
        kept: Batch | None = None
        batches = 0
        limit = sampling.max_batches if sampling.enabled else 1
        while batches < limit and (kept is None or kept.meta.size < rows):
            fresh, reward = self._rollout(report, totals, first=batches == 0)
            batches += 1
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
            batches=batches,
            generated=len(reward),
            **totals.metrics,
        )
        if kept.meta.size < rows:
            rows = self._short(kept.meta.size, batches)
        report.metrics["groups"] = rows // grpo.num_generations_per_prompt
        return self._drop(kept, torch.arange(kept.meta.size) >= rows, "surplus")

    def _short(self, kept: int, batches: int) -> int:
        """Only ``kept`` samples are there: fail, or say how many of them to train on."""
        policy, grpo = self._config.policy, self._config.grpo
        if grpo.dynamic_sampling.when_short == "raise":
            raise DynamicSamplingError(
                f"dynamic sampling: {kept} of {self._config.samples_per_step} samples "
                f"are in groups with different rewards after {batches} batches; raise "
                "grpo.dynamic_sampling.max_batches, or set when_short to proceed"
            )
        return trainable(
            kept,
            global_batch_size=policy.global_batch_size,
            group_size=grpo.num_generations_per_prompt,
            data_parallel=policy.data_parallel,
        )

    def _rollout(
        self, report: StepReport, totals: RolloutTotals, *, first: bool
    ) -> tuple[Batch, torch.Tensor]:
        """Generate one batch; returns it and its rewards as the environment gave them."""
        grpo = self._config.grpo
        prompts = self._prompts.take(grpo.num_prompts_per_step)
        with report.phase("rollout"):
            meta, carry, rollout, generation = self._calls.one(
                ROLLOUT,
                "rollout_to_tq",
                rollout_batch(prompts, group_size=grpo.num_generations_per_prompt),
                partition_id=TRAIN,
                group_size=grpo.num_generations_per_prompt,
                first_iter=first,
                carry_keys=CARRY,
                carrier=inject(),
            )
        totals.add(meta.size, rollout, generation)
        counted = None
        if not grpo.statistics_include_filtered:
            counted = carry["loss_multiplier"] > 0
            if grpo.overlong_filtering:
                counted &= ~carry["truncated"]
        # In float64: in float32 a scale can make different rewards equal, or infinite.
        reward = carry["total_reward"].double() * grpo.reward_scale
        statistics = group_statistics(reward, grpo.num_generations_per_prompt, counted=counted)
        meta.stamp_tags({"baseline": statistics.baseline, "std": statistics.std})
        columns = {
            "advantages": advantages(statistics, normalize=grpo.normalize_advantages),
            "sample_mask": carry["loss_multiplier"].clone(),
            "std": statistics.std,
            "comparable": statistics.comparable,
            "truncated": carry["truncated"],
        }
        return Batch(meta, columns), carry["total_reward"]

    def _drop(self, batch: Batch, dropped: torch.Tensor, reason: str) -> Batch:
        """Clear the rows of ``dropped``, bool (n,), from the data plane; the batch without them."""
        if not dropped.any():
            return batch
        sample_ids = [batch.meta.sample_ids[i] for i in dropped.nonzero()[:, 0].tolist()]
        with span("drop", "wasted"):
            emit("dropped", TRAIN, sample_ids, reason=reason)
            self._client.clear_samples(sample_ids, TRAIN)
        return batch.subset((~dropped).nonzero()[:, 0].tolist())

    def validate(self, step: int, prompts: Sequence[Prompt], report: StepReport) -> float:
        """Mean reward of one sampled conversation for each prompt, on a partition of its own."""
        with self._context(step), span("grpo.validation"):
            return self._validate(step, prompts, report)

    def _validate(self, step: int, prompts: Sequence[Prompt], report: StepReport) -> float:
        with report.phase("refit"):
            self._weight_sync.sync(step)
        self._calls.one(GENERATION, "begin", f"validation {step}")
        size = self._config.validation.batch_size
        rewards = []
        with report.phase("validation"):
            for start in range(0, len(prompts), size):
                chunk = prompts[start : start + size]
                self._client.register_partition(VALIDATION, [], len(chunk), [])
                meta, carry, _, _ = self._calls.one(
                    ROLLOUT,
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
        return mean_and_std(torch.cat(rewards))[0]
