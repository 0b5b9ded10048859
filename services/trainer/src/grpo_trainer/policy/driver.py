"""Driver's side of the policy: it sends sample ids, and receives a few numbers per sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from column_io import DynamicBatchingArgs, round_up, shard_meta_for_dp
from dataplane_core import GLOBAL_FORWARD_PAD_SEQLEN, KVBatchMeta
from dataplane_core.telemetry import inject
from grpo_trainer.actors.blocked import AwaitedColumns
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.config.sections import GRPOSection, PolicySection
from grpo_trainer.errors import WorkerError
from grpo_trainer.policy.logprob_gap import LogprobGap
from grpo_trainer.policy.ranks import PolicyRanks
from grpo_trainer.policy.streaming_worker import StreamedPart, trainable_filter
from grpo_trainer.samples.partition import sample_id


class Scores(NamedTuple):
    """Differences between a scoring pass and the generator.

    Attributes:
        errors: mean absolute difference to the generator's log-probabilities, per sample; empty
            for the reference policy.
        gap: `LogprobGap` of all tokens.
    """

    errors: list[float]
    gap: LogprobGap


@dataclass
class StreamedStep:
    """Result of an asynchronous step.

    Attributes:
        means: metrics of the optimizer steps; see `step_means`.
        sample_ids: the samples that were trained.
        parts: what each rank trained; the parts of a rank that died are lost.
    """

    means: dict[str, float]
    sample_ids: list[str]
    parts: list[StreamedPart]


def step_means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means over the optimizer steps with tokens, and the sum of "tokens".

    A step without tokens has no mean loss; its zeros would dilute the other steps' values.
    """
    counted = [step for step in steps if step["tokens"] > 0] or steps
    means = {name: sum(step[name] for step in counted) / len(counted) for name in steps[0]}
    return {**means, "tokens": sum(step["tokens"] for step in steps)}


class Policy:
    """The ranks that share the policy's work.

    With ``when_rank_dies: proceed``, `compute_logprobs`, `train`, `train_stream` and `save`
    continue without a rank that dies during the call.

    Attributes:
        ranks: the live ranks.
    """

    def __init__(self, calls: ActorCalls, ranks: PolicyRanks, config: PolicySection) -> None:
        self._calls = calls
        self.ranks = ranks
        self._config = config
        batching = config.dynamic_batching
        self._dynamic: DynamicBatchingArgs | None = None
        if batching.enabled:
            self._dynamic = {
                "sequence_length_round": batching.sequence_length_round,
                "max_tokens_per_microbatch": batching.max_tokens_per_microbatch,
            }

    def stamp_pad_width(self, meta: KVBatchMeta) -> None:
        """Set the sequence width that every reader of the batch pads to."""
        multiple = self._config.make_sequence_length_divisible_by
        if self._dynamic is not None:
            multiple = max(multiple, self._config.dynamic_batching.sequence_length_round)
        longest = max(meta.sequence_lengths or [0])
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = round_up(longest, multiple)

    def compute_logprobs(self, meta: KVBatchMeta, column: str) -> Scores:
        """Have every rank score its shard and write ``column``."""
        errors: dict[str, float] = {}
        gaps: list[LogprobGap] = []
        carrier = inject()
        remaining = meta
        while remaining.size:
            shards = self._shard(remaining)
            failures: dict[str, WorkerError] = {}
            results = self._calls.each(
                "compute_logprobs",
                {name: ((shard, column), {"carrier": carrier}) for name, shard in shards.items()},
                awaited=AwaitedColumns(meta.partition_id, (column,), remaining.size),
                errors=failures if self.ranks.continues else None,
            )
            for name, result in results.items():
                gaps.append(result["gap"])
                if result["error"]:
                    errors.update(zip(shards[name].sample_ids, result["error"], strict=True))
            if failures:
                self.ranks.drop_dead(next(iter(failures.values())))
            failed = {each for name in failures for each in shards[name].sample_ids}
            remaining = remaining.subset(
                [row for row, each in enumerate(remaining.sample_ids) if each in failed]
            )
        joined = [errors[each] for each in meta.sample_ids] if errors else []
        return Scores(joined, LogprobGap.total(gaps))

    def train(
        self, meta: KVBatchMeta, *, global_batch_size: int, learning_rate: float
    ) -> dict[str, float]:
        """Make one optimizer step for every ``global_batch_size`` rows of ``meta``.

        Returns:
            The means over these steps, see `step_means`. If ``grad_norm`` is not finite, a step
            was skipped, and none was made after it.
        """
        steps: list[dict[str, float]] = []
        arguments = {"learning_rate": learning_rate, "carrier": inject()}
        while (done := len(steps) * global_batch_size) < meta.size:
            remaining = meta.subset(range(done, meta.size))
            failures: dict[str, WorkerError] = {}
            shards = self._shard(remaining, global_batch_size)
            results = self._calls.each(
                "train",
                {
                    name: (
                        (shard,),
                        {
                            "rows_per_step": shard.size * global_batch_size // remaining.size,
                            **arguments,
                        },
                    )
                    for name, shard in shards.items()
                },
                errors=failures if self.ranks.continues else None,
            )
            if failures:
                steps += self.ranks.drop_dead(next(iter(failures.values())))[0]
                self.ranks.acknowledge_trained(
                    meta.sample_ids[done : len(steps) * global_batch_size]
                )
            else:
                steps += results[self.ranks.names[0]]
            if steps and not math.isfinite(steps[-1]["grad_norm"]):
                break
        return step_means(steps)

    def train_stream(
        self,
        version: int,
        grpo: GRPOSection,
        *,
        samples: int,
        learning_rate: float,
        while_waiting: Callable[[], None],
    ) -> StreamedStep:
        """Let the ranks claim the next ``samples``, and train on them.

        ``while_waiting`` is called several times a second until all ranks have finished. If
        ``grad_norm`` is not finite, an optimizer step was skipped, and none was made after it.
        """
        batch_size = self._config.global_batch_size
        arguments = {
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "carrier": inject(),
        }
        steps: list[dict[str, float]] = []
        parts: list[StreamedPart] = []
        trained: list[str] = []
        while (left := samples // batch_size - len(steps)) > 0:
            failures: dict[str, WorkerError] = {}
            results = self._calls.each(
                "train_stream",
                dict.fromkeys(self.ranks.names, ((version,), {"steps": left, **arguments})),
                while_waiting=while_waiting,
                errors=failures if self.ranks.continues else None,
            )
            fresh = [results[name] for name in self.ranks.names if name in results]
            if failures:
                error = next(iter(failures.values()))
                fresh = self.ranks.drop_dead(error, "stream_progress")
                self.ranks.release_assigned(
                    [trainable_filter(version, grpo.asynchronous.max_staleness)]
                )
            ids = [
                sample_id(position, number)
                for position in fresh[0].positions
                for number in range(grpo.num_generations_per_prompt)
            ]
            if failures:
                self.ranks.acknowledge_trained(ids)
            steps += fresh[0].steps
            parts += fresh
            trained += ids
            if steps and not math.isfinite(steps[-1]["grad_norm"]):
                break
        return StreamedStep(step_means(steps), trained, parts)

    def check_visible(self, folder: Path) -> None:
        """Refuse an absolute ``folder`` that a rank does not see."""
        self._calls.each("check_visible", dict.fromkeys(self.ranks.names, ((str(folder),), {})))

    def save(self, folder: Path) -> dict[str, int]:
        """Have rank 0 write model and optimizer into ``folder``, as `save_policy`."""
        while True:
            try:
                written: dict[str, int] = self._calls.call(self.ranks.names[0], "save", str(folder))
            except WorkerError as error:
                self.ranks.drop_dead(error)
            else:
                return written

    def load(self, folder: Path) -> None:
        """Have every rank load model and optimizer from ``folder``."""
        self._calls.each("load", dict.fromkeys(self.ranks.names, ((str(folder),), {})))

    def _shard(self, meta: KVBatchMeta, batch_size: int | None = None) -> dict[str, KVBatchMeta]:
        """Return the shard of each rank; after the death of a rank, shards may differ in size."""
        world = len(self.ranks.names)
        count = batch_size or meta.size
        if count % world == 0:
            shards, _ = shard_meta_for_dp(
                meta,
                dp_world=world,
                batch_size=batch_size,
                dynamic_batching_args=self._dynamic,
            )
            return dict(zip(self.ranks.names, shards, strict=True))
        uneven = {}
        for rank, name in enumerate(self.ranks.names):
            rows = [row for row in range(meta.size) if row % count % world == rank]
            if rows:
                [uneven[name]], _ = shard_meta_for_dp(
                    meta.subset(rows),
                    dp_world=1,
                    batch_size=None if batch_size is None else len(range(rank, count, world)),
                    dynamic_batching_args=self._dynamic,
                )
        return uneven
