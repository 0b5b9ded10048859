"""Policy worker of an asynchronous run: it claims groups as they become ready, and trains on them.

Gradients are accumulated claim by claim until the ranks have the samples of an optimizer step.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any  # Any: batches

import torch
import torch.distributed as dist

from column_io import BatchedDataDict, read_columns, write_columns
from dataplane_core import DP_TRAIN_FIELDS, KVBatchMeta, TagFilter, held_claim
from dataplane_core.telemetry import detail_span, span
from grpo_trainer.policy.logprob_gap import LogprobGap
from grpo_trainer.policy.loss import LossSums
from grpo_trainer.policy.worker import PolicyWorker
from grpo_trainer.samples.partition import (
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    TRAIN,
    TRAIN_TASK,
    WEIGHT_VERSION,
    position_of,
)
from observability import record_trained, traced

_GENERATED = "generation_logprobs"
_MEANS = ("loss", "kl", "clip_fraction", "approx_entropy", "importance_ratio")

STREAM_FIELDS = [
    name for name in DP_TRAIN_FIELDS if name not in (PREV_LOGPROBS, REFERENCE_LOGPROBS)
]
"""Fields that generators put and the loss needs; the ranks compute the others."""


def trainable_filter(version: int, max_staleness: int) -> TagFilter:
    """Return the filter of samples that are fresh enough to train weights ``version``."""
    return TagFilter(WEIGHT_VERSION, ">=", version - max_staleness)


def even_shares(total: int, ranks: int) -> list[int]:
    """Divide ``total`` among ranks; the shares differ by at most 1."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


@dataclass
class StreamedPart:
    """Part of a step on which one rank trained.

    Attributes:
        steps: metrics of each completed optimizer step, over all ranks; see `train_stream`.
        positions: positions of the prompts that these steps trained, of all ranks.
        sample_ids: the samples of this rank.
        rewards: reward of each.
        staleness: staleness of each, in versions.
        gap: difference to the generator's log-probabilities.
        wait_s: seconds that the rank was blocked in claims.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sample_ids: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    gap: LogprobGap = field(default_factory=lambda: LogprobGap.total([]))
    wait_s: float = 0.0

    def __len__(self) -> int:
        """Return the number of completed optimizer steps."""
        return len(self.steps)


class StreamingPolicyWorker(PolicyWorker):
    """Class of a policy worker's Ray actor in an asynchronous run."""

    _part: StreamedPart

    @traced
    def train_stream(
        self, version: int, *, steps: int, batch_size: int, learning_rate: float
    ) -> StreamedPart:
        """Train on the next samples that are not too stale.

        Args:
            version: number of the current weights.
            steps: optimizer steps.
            batch_size: samples of an optimizer step, over all ranks; a multiple of the group size.
            learning_rate: learning rate of the steps.

        Returns:
            The rank's part. A ``grad_norm`` that is not finite means that an optimizer step and
            all later ones were skipped; the ranks agree.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._part = part = StreamedPart()
        shares = even_shares(batch_size // self._group_size, self._world)
        for _ in range(steps):
            with span("optimizer_step", "productive"), self._collective():
                self._stream_step(version, shares, part)
            if not math.isfinite(part.steps[-1]["grad_norm"]):
                break
        return part

    def stream_progress(self) -> StreamedPart:
        """Return the completed optimizer steps of the last `train_stream`, also of a failed one."""
        return self._part

    @property
    def _group_size(self) -> int:
        size: int = self._grpo["num_generations_per_prompt"]
        return size

    def _stream_step(self, version: int, shares: list[int], part: StreamedPart) -> None:
        """Make one optimizer step with ``shares[rank]`` groups of each rank."""
        self._optimizer.zero_grad()
        rows = shares[self._rank] * self._group_size
        sums = torch.zeros(len(_MEANS) + 1, device=self._device, dtype=torch.float64)
        metas: list[KVBatchMeta] = []
        is_even = len(set(shares)) == 1
        with ExitStack() as claims:
            while (missing := rows - sum(meta.size for meta in metas)) > 0:
                meta = self._claim_groups(version, missing, part, is_even=is_even)
                held = held_claim(self._client, meta, renew_every_s=(self._lease_s or 0.0) / 3)
                claims.enter_context(held)
                metas.append(meta)
                sums += self._accumulate(meta, part)
            # All ranks learn what this step trains: a rank that dies cannot report it.
            positions = torch.zeros(sum(shares), device=self._device, dtype=torch.float64)
            first = sum(shares[: self._rank])
            trained = sorted({position_of(each) for meta in metas for each in meta.sample_ids})
            positions[first : first + len(trained)] = torch.tensor(trained, dtype=torch.float64)
            sums = torch.cat([sums, positions])
            dist.all_reduce(sums)
            sums, positions = sums[: len(_MEANS) + 1], sums[len(_MEANS) + 1 :]
            tokens = sums[-1]
            divisor = float(tokens) or 1.0
            norm = self._reduce_gradients(divisor)
            if tokens > 0 and math.isfinite(norm):
                self._optimizer.step()
                for meta in metas:
                    record_trained(self._client, meta, field=_GENERATED, task=TRAIN_TASK)
        tags = [tag for meta in metas for tag in meta.tags or []]
        part.rewards += [tag["reward"] for tag in tags]
        part.staleness += [version - tag[WEIGHT_VERSION] for tag in tags]
        part.sample_ids += [each for meta in metas for each in meta.sample_ids]
        part.positions += [int(each) for each in positions.tolist()]
        means = dict(zip(_MEANS, (sums[:-1] / divisor).tolist(), strict=True))
        part.steps.append({**means, "grad_norm": norm, "tokens": float(tokens)})

    def _claim_groups(
        self, version: int, missing: int, part: StreamedPart, *, is_even: bool
    ) -> KVBatchMeta:
        """Claim up to ``missing`` samples of the next groups.

        If the ranks need equal numbers of samples, each drawn batch is split among all ranks.
        """
        section = self._grpo["asynchronous"]
        started = time.perf_counter()
        meta = self._client.claim_meta(
            TRAIN,
            TRAIN_TASK,
            STREAM_FIELDS,
            min(missing, section["prompts_per_claim"] * self._group_size),
            self._rank,
            # Before the driver's deadline, so that the error says what is missing.
            timeout_s=0.9 * self._timeout_s,
            dp_world=self._world if is_even else None,
            where=[trainable_filter(version, section["max_staleness"])],
        )
        part.wait_s += time.perf_counter() - started
        return meta

    def _accumulate(self, meta: KVBatchMeta, part: StreamedPart) -> torch.Tensor:
        """Add the gradient of a claim's summed loss; return the sums of `_MEANS` and the tokens."""
        batch = read_columns(self._client, meta, STREAM_FIELDS, pad_value_dict=self._pad)
        totals = torch.zeros(len(_MEANS) + 1, device=self._device, dtype=torch.float64)
        scores = []
        for micro in self._micro_batches(batch):
            with detail_span("micro_batch", "productive"):
                sums, gap, logprobs = self._stream_loss(micro)
                sums.loss.backward()  # type: ignore[no-untyped-call]
            part.gap = LogprobGap.total([part.gap, gap])
            if self._records_texts:
                scores.append(logprobs)
            totals += torch.stack(
                [
                    sums.loss.detach(),
                    sums.kl,
                    sums.clipped,
                    sums.approx_entropy,
                    sums.importance,
                    sums.tokens,
                ]
            )
        if self._records_texts:
            write_columns(self._client, meta, {PREV_LOGPROBS: torch.cat(scores).cpu()}, claim=meta)
        return totals

    def _stream_loss(
        self, micro: BatchedDataDict[Any]
    ) -> tuple[LossSums, LogprobGap, torch.Tensor]:
        """Return the sums of `grpo_loss`, the gap to the generator, and the log-probabilities.

        With ``recompute_prev_logprobs`` the proximal policy is the policy before this optimizer
        step, so its log-probabilities need no further pass. Without it, the update is clipped to
        the policy that drew the tokens.
        """
        logprobs = self._logprobs(self._model, micro)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = self._logprobs(self._reference, micro)
        drawn = micro[_GENERATED]
        decoupled = self._grpo["recompute_prev_logprobs"]
        sums = self._grpo_loss(
            micro,
            logprobs,
            logprobs.detach() if decoupled else drawn,
            reference_logprobs=reference,
            behavior_logprobs=drawn if decoupled else None,
            max_importance_ratio=self._grpo["asynchronous"]["max_importance_ratio"],
        )
        logprobs = logprobs.detach()
        return sums, LogprobGap.of(logprobs, drawn, micro["token_mask"] > 0), logprobs
