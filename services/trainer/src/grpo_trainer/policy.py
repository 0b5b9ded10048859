"""The policy as the driver sees it: shards of metas out, a few numbers per sample back."""

from __future__ import annotations

from pathlib import Path
from typing import Any  # Any: results of remote methods

from column_io import DynamicBatchingArgs, round_up, shard_meta_for_dp
from dataplane_core import GLOBAL_FORWARD_PAD_SEQLEN, KVBatchMeta
from dataplane_core.telemetry import inject
from grpo_trainer.actor_calls import ActorCalls
from grpo_trainer.sections import PolicySection
from grpo_trainer.waiting import Awaited


class Policy:
    """Spreads work over the data-parallel workers.

    Args:
        calls: the run's actors.
        workers: names of the policy workers, by rank.
        config: the configuration's ``policy``.
    """

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
        """Fix the sequence width that every reader of the batch pads to."""
        multiple = self._config.make_sequence_length_divisible_by
        if self._dynamic is not None:
            multiple = max(multiple, self._config.dynamic_batching.sequence_length_round)
        longest = max(meta.sequence_lengths or [0])
        meta.extra_info[GLOBAL_FORWARD_PAD_SEQLEN] = round_up(longest, multiple)

    def compute_logprobs(self, meta: KVBatchMeta, column: str) -> list[float]:
        """Have every rank score its shard and write ``column``.

        Returns:
            What `PolicyWorker.compute_logprobs` returns as ``error``, in the order of ``meta``.
        """
        shards, inverse = self._shard(meta)
        carrier = inject()
        results = self._calls.each(
            "compute_logprobs",
            {
                name: ((shard, column), {"carrier": carrier})
                for name, shard in zip(self._workers, shards, strict=True)
            },
            awaited=Awaited(meta.partition_id, (column,), meta.size),
        )
        joined = [value for name in self._workers for value in results[name]["error"]]
        return joined if inverse is None or not joined else [joined[place] for place in inverse]

    def train(
        self, meta: KVBatchMeta, *, global_batch_size: int, learning_rate: float
    ) -> dict[str, float]:
        """One optimiser step for every ``global_batch_size`` rows of ``meta``."""
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

    def see(self, folder: Path) -> None:
        """Have every rank look for ``folder``, which is absolute.

        Raises:
            WorkerError: one does not see it.
        """
        self._calls.each("see", {name: ((str(folder),), {}) for name in self._workers})

    def save(self, folder: Path) -> dict[str, int]:
        """Write model and optimiser into ``folder``, which is absolute and there.

        Returns:
            What rank 0 says that it wrote; see `save_policy`.
        """
        written: dict[str, int] = self._calls.one(self._workers[0], "save", str(folder))
        return written

    def load(self, folder: Path) -> None:
        """Have every rank take model and optimiser from ``folder``."""
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
