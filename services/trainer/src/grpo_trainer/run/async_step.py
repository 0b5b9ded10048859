"""Asynchronous GRPO step: generators run ahead while the policy trains.

The driver puts prompts, generators claim and fill them, and policy ranks claim complete groups as
they become ready. The number of samples in the store bounds how far generators run ahead: a prompt
is put only when its samples, trained in the order of the prompts, are at most ``max_staleness``
versions old. A group that is older nevertheless, because its responses took long, is not claimed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import torch

from dataplane_core import DP_TRAIN_FIELDS, DataPlaneClient, TagFilter
from dataplane_core.telemetry import span
from dataplane_core.tensors.columns import object_array
from grpo_trainer.errors import DynamicSamplingError, GradientError, WorkerError
from grpo_trainer.policy.advantages import mean_and_std
from grpo_trainer.policy.learning_rate import learning_rate
from grpo_trainer.policy.logprob_gap import LogprobGap
from grpo_trainer.policy.stages import TRAIN_TASK
from grpo_trainer.policy.streaming_worker import StreamedPart
from grpo_trainer.rollout.generator import GeneratorReport
from grpo_trainer.rollout.partition import GENERATE_TASK, PROMPT, TRAIN, WEIGHT_VERSION
from grpo_trainer.rollout.prompts import PromptStream
from grpo_trainer.rollout.totals import RolloutTotals
from grpo_trainer.run.step import GRPOStep, StepReport
from observability import emit

_PAGE = 10_000
_STOP_S = 10.0
"""Seconds that generators may take to finish their rollouts when the run ends."""


class PromptFeed:
    """Source of an asynchronous run's prompts: the stream, after the ``pending`` ones.

    Args:
        client: the driver's client.
        stream: the run's stream.
        pending: positions of prompts that were taken, and whose samples were not trained.
        group_size: samples of a prompt.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        stream: PromptStream,
        pending: Iterable[int],
        group_size: int,
    ) -> None:
        self._client = client
        self._stream = stream
        self._pending = deque(pending)
        self._group_size = group_size

    def put(self, count: int) -> None:
        """Put the next ``count`` prompts, each as the samples of a group."""
        positions: list[int] = []
        while len(positions) < count:
            if self._pending:
                positions.append(self._pending.popleft())
            else:
                positions.append(self._stream.position)
                self._stream.take(1)
        rows = [
            (f"{position:09d}_g{number}", self._stream.at(position).model_dump())
            for position in positions
            for number in range(self._group_size)
        ]
        if rows:
            ids, prompts = zip(*rows, strict=True)
            self._client.put_columns(list(ids), TRAIN, {PROMPT: object_array(prompts)})

    def untrained(self) -> list[int]:
        """Return the positions of the prompts that are taken and not trained, in order."""
        stored: set[int] = set()
        start = 0
        while page := self._client.list_samples(TRAIN, start=start, limit=_PAGE):
            stored |= {int(sample.sample_id.partition("_")[0]) for sample in page}
            start += len(page)
        return sorted(stored | {*self._pending})


class AsyncGRPOStep(GRPOStep):
    """Runner of asynchronous steps; the arguments are those of `GRPOStep`.

    Args:
        generators: names of the generators' actors.
        pending: positions of prompts that an earlier part of the run took and did not train.
    """

    def __init__(
        self, *args: object, generators: list[str], pending: Iterable[int] = (), **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # those of the base class
        grpo = self._config.grpo
        self._generators = generators
        self._feed = PromptFeed(
            self._client, self._prompts, pending, grpo.num_generations_per_prompt
        )
        self._is_started = False
        self._remaining = 0
        self._dropped = 0
        self._totals = RolloutTotals()
        self._rewards: list[float] = []
        self._filtered = self._lost = 0
        self._idle_s = 0.0

    def untrained_prompts(self) -> list[int]:
        """Return the positions of the prompts that the run has taken and not trained."""
        return self._feed.untrained()

    def stop(self) -> None:
        """Let the generators finish what they play, and start nothing else."""
        if self._is_started:
            self._calls.each("stop_generating", dict.fromkeys(self._generators, ((_STOP_S,), {})))

    def _run(self, step: int, report: StepReport) -> None:
        grpo, policy = self._config.grpo, self._config.policy
        with report.phase("refit"):
            self._weight_sync.sync(step)
        self._remaining = (grpo.num_steps - step) * self._config.samples_per_step
        if not self._is_started:
            self._start()
        self._drop_stale(step)
        with report.phase("train"):
            rate = learning_rate(policy.optimizer, step, grpo.num_steps)
            parts = self._policy.train_stream(
                step,
                samples=self._config.samples_per_step,
                global_batch_size=policy.global_batch_size,
                learning_rate=rate,
                meanwhile=self._tend,
            )
        self._tend()
        norm = parts[0].means["grad_norm"]
        if not math.isfinite(norm):
            raise GradientError(
                f"step {step + 1}: the gradient's norm is {norm}; expected a finite number. No "
                "weight or checkpoint contains it. Resume with a lower "
                "policy.optimizer.learning_rate in a new run"
            )
        report.metrics.update(self._metrics(parts, rate))

    def _start(self) -> None:
        """Register the partition, put the first prompts, and start the generators."""
        grpo, tracing = self._config.grpo, self._config.tracing
        sampling = grpo.dynamic_sampling
        batches = sampling.max_batches if sampling.enabled else 1
        # Twice: groups that became too stale are replaced as well.
        self._limit = 2 * batches * self._remaining + self._config.max_samples_in_store
        self._client.register_partition(
            TRAIN,
            [PROMPT, *DP_TRAIN_FIELDS],
            self._limit,
            [GENERATE_TASK, TRAIN_TASK],
            grpo_group_size=grpo.num_generations_per_prompt,
        )
        self._top_up()
        arguments = {
            "run_id": self._run_id,
            "lease_s": self._config.data_plane["claim_lease_s"],
            "verbose": tracing.verbose,
        }
        settings = (grpo.model_dump(mode="json"),)
        self._calls.each("start_generating", dict.fromkeys(self._generators, (settings, arguments)))
        self._is_started = True

    def _tend(self) -> None:
        """Keep the generators supplied, and collect what they report."""
        self._top_up()
        reports = self._calls.each("take_report", dict.fromkeys(self._generators, ((), {})))
        for name, report in reports.items():
            self._add(name, report)

    def _top_up(self) -> None:
        size = self._config.grpo.num_generations_per_prompt
        counts = self._client.count_samples(TRAIN, GENERATE_TASK, [PROMPT])
        stored = counts.put - counts.cleared
        missing = min(self._config.max_samples_in_store, self._remaining) - stored
        if counts.put + missing > self._limit:
            raise DynamicSamplingError(
                f"asynchronous step: {counts.put} samples were generated, and too few of them "
                "were in groups with unequal rewards and fresh; raise "
                "grpo.dynamic_sampling.max_batches or grpo.asynchronous.max_staleness"
            )
        self._feed.put(max(0, missing) // size)

    def _add(self, name: str, report: GeneratorReport) -> None:
        if report.error is not None:
            raise WorkerError(f"{name}: {report.error}")
        for samples, rollout, generated in report.rollouts:
            self._totals.add(samples, rollout, generated)
        self._rewards += report.rewards
        self._filtered += report.filtered
        self._lost += report.lost
        self._idle_s += report.idle_s

    def _drop_stale(self, step: int) -> None:
        """Clear the groups that are too stale for this step and later ones."""
        oldest = step - self._config.grpo.asynchronous.max_staleness
        if oldest <= 0:
            return
        stale = self._client.claim_meta(
            TRAIN,
            TRAIN_TASK,
            [PROMPT],
            self._config.max_samples_in_store,
            blocking=False,
            where=[TagFilter(WEIGHT_VERSION, "<", oldest)],
        )
        if stale.size:
            with span("drop", "wasted"):
                emit("dropped", TRAIN, stale.sample_ids, reason="stale")
                self._client.clear_samples(stale.sample_ids, TRAIN, force=True)
            self._dropped += stale.size

    def _metrics(self, parts: list[StreamedPart], rate: float) -> dict[str, float]:
        """Return the step's metrics, and start to count for the next step."""
        size = self._config.grpo.num_generations_per_prompt
        staleness = [each for part in parts for each in part.staleness]
        reward, std = mean_and_std(torch.tensor([each for part in parts for each in part.rewards]))
        generated = torch.tensor(self._rewards or [math.nan])
        metrics = {
            "reward": reward,
            "reward_std": std,
            "samples": len(staleness),
            "groups": len(staleness) // size,
            "generated": len(self._rewards),
            "generated_reward": float(generated.mean()),
            "filtered_groups": self._filtered // size,
            "stale_groups": self._dropped // size,
            "lost_groups": self._lost // size,
            "staleness": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "trainer_wait_s": max(part.wait_s for part in parts),
            "generator_wait_s": self._idle_s,
            **LogprobGap.total(part.gap for part in parts).metrics,
            **parts[0].means,
            "learning_rate": rate,
            **(self._totals.metrics if self._rewards else {}),
        }
        self._totals = RolloutTotals()
        self._rewards = []
        self._filtered = self._lost = self._dropped = 0
        self._idle_s = 0.0
        return metrics
