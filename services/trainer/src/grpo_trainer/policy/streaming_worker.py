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

from column_io import BatchedDataDict, read_columns
from dataplane_core import DP_TRAIN_FIELDS, KVBatchMeta, TagFilter, held_claim
from dataplane_core.telemetry import detail_span, span
from grpo_trainer.policy.logprob_gap import LogprobGap
from grpo_trainer.policy.loss import LossSums, grpo_loss, token_logprobs
from grpo_trainer.policy.worker import PolicyWorker
from grpo_trainer.samples.partition import TRAIN, WEIGHT_VERSION
from grpo_trainer.samples.tasks import PREV_LOGPROBS, REFERENCE_LOGPROBS, TRAIN_TASK
from observability import record_trained, traced

_GENERATED = "generation_logprobs"
_MEANS = ("loss", "kl", "clip_fraction", "approx_entropy", "importance_ratio")


@dataclass
class StreamedPart:
    """Part of a step on which one rank trained.

    Attributes:
        means: loss metrics over all ranks, means over the optimizer steps with tokens; also
            ``grad_norm`` and the sum of ``tokens``.
        sample_ids: the samples of this rank.
        rewards: reward of each.
        staleness: staleness of each, in versions.
        gap: difference to the generator's log-probabilities.
        wait_s: seconds that the rank was blocked in claims.
    """

    means: dict[str, float] = field(default_factory=dict)
    sample_ids: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    gap: LogprobGap = field(default_factory=lambda: LogprobGap.total([]))
    wait_s: float = 0.0


class StreamingPolicyWorker(PolicyWorker):
    """Class of a policy worker's Ray actor in an asynchronous run."""

    @traced
    def train_stream(
        self, version: int, *, samples: int, rows_per_step: int, learning_rate: float
    ) -> StreamedPart:
        """Train on the next samples that are not too stale.

        Args:
            version: number of the current weights.
            samples: samples of the step, over all ranks.
            rows_per_step: this rank's rows of one optimizer step, a multiple of the group size.
            learning_rate: learning rate of the step.

        Returns:
            The rank's part. A ``grad_norm`` that is not finite means that an optimizer step and
            all later ones were skipped; the ranks agree.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        part = StreamedPart()
        steps = []
        for _ in range(samples // (rows_per_step * self._world)):
            with span("optimizer_step", "productive"):
                steps.append(self._stream_step(version, rows_per_step, part))
            if not math.isfinite(steps[-1]["grad_norm"]):
                break
        counted = [step for step in steps if step["tokens"] > 0] or steps
        part.means = {
            name: sum(step[name] for step in counted) / len(counted)
            for name in (*_MEANS, "grad_norm")
        }
        part.means["tokens"] = sum(step["tokens"] for step in steps)
        return part

    def _stream_step(self, version: int, rows: int, part: StreamedPart) -> dict[str, float]:
        """Make one optimizer step with ``rows`` samples of this rank."""
        self._optimizer.zero_grad()
        sums = torch.zeros(len(_MEANS) + 1, device=self._device, dtype=torch.float64)
        metas: list[KVBatchMeta] = []
        with ExitStack() as claims:
            while (missing := rows - sum(meta.size for meta in metas)) > 0:
                meta = self._claim_groups(version, missing, part)
                held = held_claim(self._client, meta, renew_every_s=(self._lease_s or 0.0) / 3)
                claims.enter_context(held)
                metas.append(meta)
                sums += self._accumulate(meta, part)
            dist.all_reduce(sums)
            tokens = sums[-1]
            divisor = float(tokens) or 1.0
            norm = self._reduce_gradients(divisor)
            if tokens > 0 and math.isfinite(norm):
                self._optimizer.step()
                for meta in metas:
                    record_trained(self._client, meta, field=_GENERATED, task=TRAIN_TASK)
        part.sample_ids += [each for meta in metas for each in meta.sample_ids]
        means = dict(zip(_MEANS, (sums[:-1] / divisor).tolist(), strict=True))
        return {**means, "grad_norm": norm, "tokens": float(tokens)}

    def _claim_groups(self, version: int, missing: int, part: StreamedPart) -> KVBatchMeta:
        """Claim this rank's part of the next groups; the ranks get equal numbers of samples."""
        own, size = self._grpo["asynchronous"], self._grpo["num_generations_per_prompt"]
        started = time.perf_counter()
        meta = self._client.claim_meta(
            TRAIN,
            TRAIN_TASK,
            self._stream_fields,
            min(missing, own["prompts_per_claim"] * size),
            self._rank,
            # Before the driver's deadline, so that the error says what is missing.
            timeout_s=0.9 * self._timeout_s,
            dp_world=self._world,
            where=[TagFilter(WEIGHT_VERSION, ">=", version - own["max_staleness"])],
        )
        part.wait_s += time.perf_counter() - started
        tags = meta.tags or []
        part.rewards += [tag["reward"] for tag in tags]
        part.staleness += [version - tag[WEIGHT_VERSION] for tag in tags]
        return meta

    @property
    def _stream_fields(self) -> list[str]:
        """Fields that generators put and the loss needs; the ranks compute the others."""
        computed = (PREV_LOGPROBS, REFERENCE_LOGPROBS)
        return [name for name in DP_TRAIN_FIELDS if name not in computed]

    def _accumulate(self, meta: KVBatchMeta, part: StreamedPart) -> torch.Tensor:
        """Add the gradient of the summed loss of a claim; return its sums, and those of tokens."""
        batch = read_columns(self._client, meta, self._stream_fields, pad_value_dict=self._pad)
        totals = torch.zeros(len(_MEANS) + 1, device=self._device, dtype=torch.float64)
        for micro in self._micro_batches(batch):
            with detail_span("micro_batch", "productive"):
                sums, gap = self._stream_loss(micro)
                sums.loss.backward()  # type: ignore[no-untyped-call]
            part.gap = LogprobGap.total([part.gap, gap])
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
        return totals

    def _stream_loss(self, micro: BatchedDataDict[Any]) -> tuple[LossSums, LogprobGap]:
        """Return the loss of stale samples: see `grpo_loss`.

        With ``recompute_prev_logprobs`` the proximal policy is that of this optimizer step, so that
        its log-probabilities cost no further pass. Without, the update is clipped to the policy
        that drew the tokens.
        """
        ids, lengths = micro["input_ids"], micro["input_lengths"]
        logprobs = token_logprobs(self._model, ids, lengths, temperature=self._temperature)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = token_logprobs(
                    self._reference, ids, lengths, temperature=self._temperature
                )
        drawn = micro[_GENERATED]
        decoupled = self._grpo["recompute_prev_logprobs"]
        mask = micro["token_mask"].float() * micro["sample_mask"].float()[:, None]
        sums = grpo_loss(
            logprobs,
            logprobs.detach() if decoupled else drawn,
            micro["advantages"],
            mask,
            clip_low=self._grpo["clip_low"],
            clip_high=self._grpo["clip_high"],
            reference_logprobs=reference,
            kl_coefficient=self._grpo["kl_coefficient"],
            behavior_logprobs=drawn if decoupled else None,
            max_importance_ratio=self._grpo["asynchronous"]["max_importance_ratio"],
        )
        return sums, LogprobGap.of(logprobs.detach(), drawn, micro["token_mask"] > 0)
