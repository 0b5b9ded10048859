"""Driver's side of the policy: it sends shards of metas and receives a few numbers per sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple  # Any: results of remote methods

from column_io import DynamicBatchingArgs, round_up, shard_meta_for_dp
from dataplane_core import GLOBAL_FORWARD_PAD_SEQLEN, KVBatchMeta
from dataplane_core.telemetry import inject
from grpo_trainer.actors.blocked import AwaitedColumns
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.config.sections import PolicySection
from grpo_trainer.policy.logprob_gap import LogprobGap

if TYPE_CHECKING:
    from grpo_trainer.policy.streaming_worker import StreamedPart


class Scores(NamedTuple):
    """Differences between a scoring pass and the generator.

    Attributes:
        errors: mean absolute difference to the generator's log-probabilities, per sample; empty
            for the reference policy.
        gap: `LogprobGap` of all tokens.
    """

    errors: list[float]
    gap: LogprobGap


class Policy:
    """Data-parallel ``workers``, named by rank, that share the policy's work."""

    def __init__(self, calls: ActorCalls, workers: list[str], config: PolicySection) -> None:
        self._calls = calls
        self._workers = workers
        self._config = config
        batching = config.dynamic_batching
        self._dynamic: DynamicBatchingArgs | None = None
        if batching.enabled:
            self._dynamic = {
                "input_key": "input_ids",
                "input_lengths_key": "input_lengths",
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
        shards, inverse = self._shard(meta)
        carrier = inject()
        results = self._calls.each(
            "compute_logprobs",
            {
                name: ((shard, column), {"carrier": carrier})
                for name, shard in zip(self._workers, shards, strict=True)
            },
            awaited=AwaitedColumns(meta.partition_id, (column,), meta.size),
        )
        joined = [value for name in self._workers for value in results[name]["error"]]
        if inverse is not None and joined:
            joined = [joined[place] for place in inverse]
        return Scores(joined, LogprobGap.total(results[name]["gap"] for name in self._workers))

    def train(
        self, meta: KVBatchMeta, *, global_batch_size: int, learning_rate: float
    ) -> dict[str, float]:
        """Make one optimizer step for every ``global_batch_size`` rows of ``meta``."""
        shards, _ = self._shard(meta, global_batch_size)
        arguments: dict[str, Any] = {
            "rows_per_step": global_batch_size // len(self._workers),
            "learning_rate": learning_rate,
            "carrier": inject(),
        }
        results = self._calls.each(
            "train",
            {
                name: ((shard,), arguments)
                for name, shard in zip(self._workers, shards, strict=True)
            },
        )
        return results[self._workers[0]]

    def train_stream(
        self,
        version: int,
        *,
        samples: int,
        global_batch_size: int,
        learning_rate: float,
        meanwhile: Callable[[], None],
    ) -> list[StreamedPart]:
        """Let the ranks claim and train on the next ``samples``; return their parts, by rank.

        One optimizer step is made for every ``global_batch_size``. ``meanwhile`` is called several
        times a second until then.
        """
        arguments: dict[str, Any] = {
            "samples": samples,
            "rows_per_step": global_batch_size // len(self._workers),
            "learning_rate": learning_rate,
            "carrier": inject(),
        }
        results = self._calls.each(
            "train_stream",
            dict.fromkeys(self._workers, ((version,), arguments)),
            meanwhile=meanwhile,
        )
        return [results[name] for name in self._workers]

    def check_visible(self, folder: Path) -> None:
        """Check that every rank sees ``folder``, an absolute path.

        Raises:
            WorkerError: a rank does not see it.
        """
        self._calls.each("check_visible", {name: ((str(folder),), {}) for name in self._workers})

    def save(self, folder: Path) -> dict[str, int]:
        """Have rank 0 write model and optimizer into ``folder``, as `save_policy`."""
        written: dict[str, int] = self._calls.call(self._workers[0], "save", str(folder))
        return written

    def load(self, folder: Path) -> None:
        """Have every rank load model and optimizer from ``folder``."""
        self._calls.each("load", {name: ((str(folder),), {}) for name in self._workers})

    def _shard(
        self, meta: KVBatchMeta, batch_size: int | None = None
    ) -> tuple[list[KVBatchMeta], list[int] | None]:
        return shard_meta_for_dp(
            meta,
            dp_world=len(self._workers),
            batch_size=batch_size,
            dynamic_batching_args=self._dynamic,
        )
