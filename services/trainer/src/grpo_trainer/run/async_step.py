"""Asynchronous GRPO step: generators run ahead while the policy trains.

The driver puts prompts, generators claim and fill them, and policy ranks claim complete groups as
they become ready. The number of samples in the store bounds how far generators run ahead. With the
default ``max_samples_ahead``, a sample is at most ``max_staleness`` versions old if prompts are
trained in their order. The samples of a step are cleared only after the step: an earlier clear
would let generators run further ahead. Slow responses can still make a group older; such a group is
not claimed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from dataplane_core import DP_TRAIN_FIELDS, TagFilter
from dataplane_core.telemetry import span, step_context
from grpo_trainer.checkpoint.folder import RunState
from grpo_trainer.errors import DynamicSamplingError, GradientError, StalenessError, WorkerError
from grpo_trainer.policy.driver import StreamedStep
from grpo_trainer.policy.learning_rate import learning_rate
from grpo_trainer.policy.logprob_gap import LogprobGap
from grpo_trainer.rollout.prompts import Prompt
from grpo_trainer.run.generator_fleet import GeneratorFleet
from grpo_trainer.run.processes import GeneratorActors, RunActors
from grpo_trainer.run.prompt_feed import PromptFeed
from grpo_trainer.run.step import GRPOStep, StepReport
from grpo_trainer.samples.advantages import mean_and_std
from grpo_trainer.samples.partition import (
    GENERATE_TASK,
    IS_FILLER,
    PREV_LOGPROBS,
    PROMPT,
    TRAIN,
    TRAIN_TASK,
    VALIDATION,
    WEIGHT_VERSION,
    WEIGHT_VERSIONS,
)
from observability import emit

_DROP_EVERY_S = 1.0
_MAX_STALE_FACTOR = 2
"""Maximum samples of a step that are too stale, as a multiple of ``max_samples_in_store``."""


class AsyncGRPOStep(GRPOStep):
    """Runner of asynchronous steps; the other arguments are those of `GRPOStep`.

    Args:
        actors: the run's processes, whose generators may change.
        pending: positions of prompts that an earlier part of the run took and did not train.
        journal: folder of the run's journal; None for no journal.
        notice: called with a line when a generator leaves or joins.
    """

    def __init__(
        self,
        *args: object,
        actors: RunActors,
        pending: Iterable[int] = (),
        journal: Path | None = None,
        notice: Callable[[str], object] = lambda line: None,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # those of the base class
        size = self._config.grpo.num_generations_per_prompt
        self._actors = actors
        self._feed = PromptFeed(self._client, self._prompts, pending, size)
        self._fleet = GeneratorFleet(
            self._client,
            actors,
            self._weight_sync,
            self._policy,
            self._config,
            run_id=self._run_id,
            journal=journal,
            notice=notice,
        )
        self._is_started = self._is_short = False
        self._remaining = 0
        self._version = self._dropped = 0
        self._dropped_at = 0.0

    def untrained_prompts(self) -> list[int]:
        """Return the positions of the prompts that the run has taken and not trained."""
        return self._feed.untrained()

    def on_checkpoint(self, state: RunState) -> None:
        """Remove the journal's files that the checkpoint of ``state`` makes superfluous."""
        self._fleet.prune_journal(state)

    def stop(self) -> None:
        """Let the generators finish their rollouts, and start no others."""
        self._fleet.stop()

    def _install(self, version: int) -> None:
        self._fleet.sync(version)

    def _validator(self) -> GeneratorActors:
        return self._actors.generators[0]

    def _validate(self, step: int, prompts: Sequence[Prompt], report: StepReport) -> None:
        while True:
            try:
                return super()._validate(step, prompts, report)
            except WorkerError as error:
                if not self._fleet.drop_dead(error):
                    raise
                self._client.clear_samples(None, VALIDATION)

    def _run(self, step: int, report: StepReport) -> None:
        grpo, policy = self._config.grpo, self._config.policy
        with report.phase("refit"):
            self._fleet.sync(step)
        self._remaining = (grpo.num_steps - step) * self._config.samples_per_step
        if not self._is_started:
            self._start()
        self._fleet.replace_lost(step)
        self._version, self._dropped = step, 0
        if self._is_short:
            self._fleet.fill_short_step(False)
            self._is_short = False
            self._drop_matching(TagFilter(IS_FILLER, "==", True), "surplus")
        self._drop_stale()
        with report.phase("train"):
            rate = learning_rate(policy.optimizer, step, grpo.num_steps)
            trained = self._policy.train_stream(
                step,
                grpo,
                samples=self._config.samples_per_step,
                learning_rate=rate,
                while_waiting=self._supply_generators,
            )
        self._record_texts(trained.sample_ids, (PREV_LOGPROBS, WEIGHT_VERSIONS))
        with report.phase("clear", "overhead"):
            self._client.clear_samples(trained.sample_ids, TRAIN)
            self._feed.forget(trained.sample_ids)
        self._fleet.collect()
        report.metrics.update(
            self._metrics(trained),
            stale_groups=self._dropped // grpo.num_generations_per_prompt,
            learning_rate=rate,
            **self._fleet.take_metrics(),
        )
        norm = trained.means["grad_norm"]
        if not math.isfinite(norm):
            raise GradientError(
                f"step {step + 1}: the gradient's norm is {norm}; expected a finite number. No "
                "weight or checkpoint contains it. Start a new run with a checkpoint's model/ as "
                "policy.model.name, and a lower policy.optimizer.learning_rate"
            )

    def _start(self) -> None:
        """Register the partition, put the first prompts, and start the generators."""
        grpo = self._config.grpo
        # A blocking claim stops waiting once all declared samples were put. Their exact number is
        # unknown, since groups that are stale or have equal rewards are replaced. So declare more
        # samples than the steps can put.
        factor = grpo.dynamic_sampling.max_batches + _MAX_STALE_FACTOR + 1
        self._client.register_partition(
            TRAIN,
            [PROMPT, *DP_TRAIN_FIELDS],
            grpo.num_steps * factor * self._config.max_samples_in_store,
            [GENERATE_TASK, TRAIN_TASK],
            grpo_group_size=grpo.num_generations_per_prompt,
        )
        self._top_up()
        self._fleet.start()
        self._is_started = True

    def _supply_generators(self) -> None:
        """Put further prompts, and collect the generators' reports."""
        if time.monotonic() > self._dropped_at + _DROP_EVERY_S:
            # Slow responses may be stale when they finish. They would take the space of prompts
            # that the ranks wait for.
            self._drop_stale()
        self._top_up()
        self._fleet.collect()
        self._check_filtered()

    def _check_filtered(self) -> None:
        """Fill the step with groups of equal rewards if too many were filtered, or raise.

        A step may filter ``(max_batches - 1) * max_samples_in_store`` samples. Groups that fill the
        step after that are excluded from the loss.
        """
        sampling = self._config.grpo.dynamic_sampling
        allowed = (sampling.max_batches - 1) * self._config.max_samples_in_store
        if self._fleet.filtered <= allowed:
            return
        if sampling.when_short == "raise":
            raise DynamicSamplingError(
                f"dynamic sampling: {self._fleet.filtered} samples of step {self._version + 1} "
                "were in groups of equal rewards; raise grpo.dynamic_sampling.max_batches, or set "
                "when_short to proceed"
            )
        if not self._is_short:
            self._fleet.fill_short_step(True)
            self._is_short = True

    def _top_up(self) -> None:
        """Put prompts until the store holds as many samples as it may."""
        counts = self._client.inspector.count_samples(TRAIN, GENERATE_TASK, [PROMPT])
        stored = counts.put - counts.cleared
        missing = min(self._config.max_samples_in_store, self._remaining) - stored
        # A prompt has no weight version: the put of its response says which weights generated it.
        with step_context(self._run_id, self._version, weight_version=None):
            self._feed.put(max(0, missing) // self._config.grpo.num_generations_per_prompt)

    def _drop_stale(self) -> None:
        """Clear the groups that are too stale for this and later steps."""
        self._dropped_at = time.monotonic()
        oldest = self._version - self._config.grpo.asynchronous.max_staleness
        if oldest <= 0:
            return
        self._dropped += self._drop_matching(TagFilter(WEIGHT_VERSION, "<", oldest), "stale")
        if self._dropped > _MAX_STALE_FACTOR * self._config.max_samples_in_store:
            raise StalenessError(
                f"step {self._version + 1}: {self._dropped} samples were too stale to be trained; "
                "raise grpo.asynchronous.max_staleness, lower max_samples_ahead, or generate with "
                "fewer concurrent rollouts"
            )

    def _drop_matching(self, where: TagFilter, reason: str) -> int:
        """Clear the groups that are ready and match; return the number of their samples."""
        dropped = self._client.claim_meta(
            TRAIN,
            TRAIN_TASK,
            [PROMPT],
            self._config.max_samples_in_store,
            blocking=False,
            where=[where],
        )
        if dropped.size:
            with span("drop", "wasted"):
                emit("dropped", TRAIN, dropped.sample_ids, reason=reason)
                self._client.clear_samples(dropped.sample_ids, TRAIN, force=True)
                self._feed.forget(dropped.sample_ids)
        return dropped.size

    def _metrics(self, trained: StreamedStep) -> dict[str, float]:
        """Return the metrics of the samples that the ranks trained."""
        parts = trained.parts
        staleness = [each for part in parts for each in part.staleness]
        reward, std = mean_and_std(torch.tensor([each for part in parts for each in part.rewards]))
        return {
            "reward": reward,
            "reward_std": std,
            "samples": len(trained.sample_ids),
            "groups": len(trained.sample_ids) // self._config.grpo.num_generations_per_prompt,
            "staleness": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "trainer_wait_s": max(part.wait_s for part in parts),
            **LogprobGap.total(part.gap for part in parts).metrics,
            "policy_ranks": len(self._policy.ranks.names),
            **trained.means,
        }
