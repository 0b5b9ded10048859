"""Data-parallel rank of the policy: it scores its shard, trains on it, and publishes weights.

A rank receives the sample ids of its shard in a `KVBatchMeta`, claims these samples for the stage's
task, and moves the columns directly between the data plane and its device. It acknowledges the
samples when the stage's result is written. Each optimizer step has three all-reduces: the number of
tokens, the metrics, and the flat gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any  # Any: batches and transformers' models

import torch
import torch.distributed as dist

from column_io import BatchedDataDict, read_columns, write_columns
from dataplane_core import (
    DP_TRAIN_FIELDS,
    LP_SEED_FIELDS,
    KVBatchMeta,
    build_data_plane_client,
    held_claim,
)
from dataplane_core.telemetry import detail_span, span
from grpo_trainer.actors.address import bind_to_node_interface
from grpo_trainer.actors.telemetry import RunActor, TelemetrySettings
from grpo_trainer.checkpoint.policy_state import (
    check_visible,
    load_optimizer,
    load_weights,
    save_policy,
)
from grpo_trainer.model.load import load_model
from grpo_trainer.policy.logprob_gap import LogprobGap
from grpo_trainer.policy.loss import LossSums, grpo_loss, token_logprobs
from grpo_trainer.policy.process_group import (
    connect_store,
    host_store,
    join_process_group,
    leave_process_group,
    share_state,
)
from grpo_trainer.refit.settings import RefitSettings
from grpo_trainer.refit.source import RefitSource
from grpo_trainer.samples.partition import (
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    TASK_OF_COLUMN,
    TRAIN_TASK,
)
from observability import record_trained, traced
from refit_mx import RefitConfigError

_PREV, _REFERENCE, _GENERATED = PREV_LOGPROBS, REFERENCE_LOGPROBS, "generation_logprobs"
_CLAIM_S = 20.0
"""Deadline of a claim of samples that an earlier stage has completed."""

_LOSS_METRICS = ("loss", "kl", "clip_fraction", "approx_entropy")


class PolicyWorker(RunActor):
    """Class of a policy worker's Ray actor.

    ``policy`` and ``grpo`` are the sections of these names in the configuration, as dicts.
    ``timeout_s`` is the deadline of the rendezvous, and of each collective operation.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        *,
        model: str,
        policy: Mapping[str, Any],
        grpo: Mapping[str, Any],
        data_plane: Mapping[str, Any],
        pad_token_id: int,
        timeout_s: float,
        telemetry: TelemetrySettings | None = None,
    ) -> None:
        self._start_telemetry(telemetry, "grpo.policy", str(rank))
        torch.set_num_threads(policy["num_threads"])
        gpus = policy["num_gpus_per_worker"]
        self._device = torch.device("cuda" if gpus > 0 else "cpu")
        self._rank, self._world = rank, world
        self._policy, self._grpo = policy, grpo
        self._pad = {"input_ids": pad_token_id}
        self._temperature = policy["generation"]["temperature"]
        self._model = load_model(model, self._device).eval()
        self._reference: Any = None
        if grpo["kl_coefficient"] > 0:
            self._reference = load_model(model, self._device).eval().requires_grad_(False)
        optimizer = policy["optimizer"]
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer["learning_rate"],
            betas=tuple(optimizer["betas"]),
            eps=optimizer["eps"],
            weight_decay=optimizer["weight_decay"],
        )
        self._client = build_data_plane_client(data_plane, bootstrap=False)
        self._lease_s = data_plane.get("claim_lease_s")
        self._refit: RefitSource | None = None
        # NCCL refuses ranks that share a GPU.
        self._backend, self._timeout_s = "nccl" if gpus >= 1 else "gloo", timeout_s
        self._store: Any = None
        self._steps: list[dict[str, float]] = []

    def ready(self) -> None:
        """Return once the model is loaded."""

    def rendezvous_address(self, world: int) -> tuple[str, int]:
        """Host the store of ``world`` ranks as the new rank 0; return its host and port.

        The rank leaves the group that it was in.
        """
        leave_process_group()
        self._rank = 0
        self._store = host_store(world, timeout_s=self._timeout_s)
        return self._store.host, self._store.port

    def join_group(self, host: str, port: int, *, rank: int, world: int) -> None:
        """Join a process group through rank 0's store; return once all ranks have joined."""
        if rank > 0:
            leave_process_group()
            self._store = connect_store(host, port, world, timeout_s=self._timeout_s)
        self._rank, self._world = rank, world
        join_process_group(
            self._store,
            backend=self._backend,
            rank=self._rank,
            world=self._world,
            timeout_s=self._timeout_s,
        )

    def progress(self) -> list[dict[str, float]]:
        """Return the completed optimizer steps of the last `train`, also of one that failed."""
        return self._steps

    def share_state(self) -> None:
        """Copy model and optimizer from rank 0; all ranks must call it."""
        share_state(self._model, self._optimizer)

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Leave the process group if the block raises: else other ranks would wait for this one."""
        try:
            yield
        except BaseException:  # whatever ends the block
            leave_process_group()
            raise

    @traced
    def compute_logprobs(self, meta: KVBatchMeta, column: str) -> dict[str, Any]:
        """Score the shard and write the result as ``column``.

        Args:
            meta: this rank's shard.
            column: "prev_logprobs", scored by the policy, or "reference_policy_logprobs", scored by
                the initial policy.

        Returns:
            ``error``: mean absolute difference to the generator's log-probabilities per sample, in
            the shard's order; empty for the initial policy. ``gap``: the `LogprobGap` of all
            tokens.
        """
        wanted = [*LP_SEED_FIELDS, *([_GENERATED] if column == _PREV else [])]
        with self._claimed(meta, TASK_OF_COLUMN[column], wanted) as claim:
            batch = read_columns(self._client, meta, wanted, pad_value_dict=self._pad)
            scores, errors, gap = self._score(batch, column)
            write_columns(self._client, meta, {column: scores}, claim=claim)
        return {"error": errors, "gap": gap}

    @contextmanager
    def _claimed(self, meta: KVBatchMeta, task: str, fields: list[str]) -> Iterator[KVBatchMeta]:
        """Claim the samples of a shard; acknowledge them after the block, or release them."""
        claim = self._client.claim_meta(
            meta.partition_id,
            task,
            fields,
            meta.size,
            self._rank,
            timeout_s=_CLAIM_S,
            sample_ids=meta.sample_ids,
        )
        with held_claim(self._client, claim, renew_every_s=(self._lease_s or 0.0) / 3):
            yield claim

    def _score(
        self, batch: BatchedDataDict[Any], column: str
    ) -> tuple[torch.Tensor, list[float], LogprobGap]:
        """Return the log-probabilities, (rows, width), and the differences to the generator's."""
        model = self._model if column == _PREV else self._reference
        width = batch["input_ids"].shape[1]
        parts, errors, gaps = [], [], []
        with torch.no_grad(), span("forward", "productive"):
            for micro in self._micro_batches(batch):
                with detail_span("micro_batch", "productive"):
                    scored = self._logprobs(model, micro)
                parts.append(torch.nn.functional.pad(scored, (0, width - scored.shape[1])))
                if column == _PREV:
                    mask = micro["token_mask"] > 0
                    # A prompt's token can have probability 0, and infinity times 0 is NaN.
                    difference = torch.where(mask, (scored - micro[_GENERATED]).abs(), 0.0)
                    total = difference.sum(1, dtype=torch.float64)
                    errors += (total / mask.sum(1).clamp(min=1)).tolist()
                    gaps.append(LogprobGap.of(scored, micro[_GENERATED], mask))
        return torch.cat(parts).cpu(), errors, LogprobGap.total(gaps)

    @traced
    def train(
        self, meta: KVBatchMeta, *, rows_per_step: int, learning_rate: float
    ) -> list[dict[str, float]]:
        """Train on the shard.

        Args:
            meta: this rank's shard.
            rows_per_step: the rank's rows of one optimizer step; divides the shard.
            learning_rate: learning rate of this call's steps.

        Returns:
            ``loss``, ``kl``, ``clip_fraction``, ``approx_entropy``, ``grad_norm``, ``tokens`` of
            each optimizer step, over all ranks. A ``grad_norm`` that is not finite means that this
            optimizer step and all later ones were skipped. The ranks agree, because all use the
            norm of the summed gradient.
        """
        self._steps = []
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        skipped = set()
        if not self._grpo["recompute_prev_logprobs"]:
            skipped.add(_PREV)
        if self._reference is None:
            skipped.add(_REFERENCE)
        fields = [name for name in DP_TRAIN_FIELDS if name not in skipped]
        with self._claimed(meta, TRAIN_TASK, fields):
            batch = read_columns(self._client, meta, fields, pad_value_dict=self._pad)
            with self._collective():
                self._train(meta, batch, rows_per_step)
        return self._steps

    def _train(self, meta: KVBatchMeta, batch: BatchedDataDict[Any], rows_per_step: int) -> None:
        used: list[int] = []
        for step in range(meta.size // rows_per_step):
            with span("optimizer_step", "productive"):
                done = self._optimize(batch.get_batch(step, rows_per_step))
            self._steps.append(done)
            if not math.isfinite(done["grad_norm"]):
                break
            if done["tokens"] > 0:
                used += range(step * rows_per_step, (step + 1) * rows_per_step)
        if used:  # if this fails, `PolicyRanks.acknowledge_trained` records what was trained
            record_trained(self._client, meta.subset(used), field=_GENERATED)

    def _optimize(self, chunk: BatchedDataDict[Any]) -> dict[str, float]:
        mask = chunk["token_mask"].float() * chunk["sample_mask"].float()[:, None]
        # float32 counts exactly only to 2^24; a global batch of long responses exceeds that.
        tokens = mask.sum(dtype=torch.float64).to(self._device)
        dist.all_reduce(tokens)
        # Not clamped to 1: loss multipliers below 1 can make the sum smaller than 1, and it still
        # is the right divisor.
        divisor: Any = tokens if tokens > 0 else 1.0
        self._optimizer.zero_grad()
        totals = torch.zeros(len(_LOSS_METRICS), device=self._device, dtype=torch.float64)
        for micro in self._micro_batches(chunk):
            with detail_span("micro_batch", "productive"):
                sums = self._grpo_loss(
                    micro,
                    self._logprobs(self._model, micro),
                    micro[_PREV] if _PREV in micro else micro[_GENERATED],
                    reference_logprobs=micro.get(_REFERENCE),
                )
                (sums.loss / divisor).backward()
            totals += torch.stack([sums.loss.detach(), sums.kl, sums.clipped, sums.approx_entropy])
        dist.all_reduce(totals)
        norm = self._reduce_gradients()
        if tokens > 0 and math.isfinite(norm):
            self._optimizer.step()
        means = (totals / divisor).tolist()
        return {
            **dict(zip(_LOSS_METRICS, means, strict=True)),
            "grad_norm": norm,
            "tokens": float(tokens),
        }

    def _logprobs(self, model: Any, micro: BatchedDataDict[Any]) -> torch.Tensor:
        """Return `token_logprobs` of a micro-batch."""
        ids, lengths = micro["input_ids"], micro["input_lengths"]
        return token_logprobs(model, ids, lengths, temperature=self._temperature)

    def _grpo_loss(
        self,
        micro: BatchedDataDict[Any],
        logprobs: torch.Tensor,
        prev: torch.Tensor,
        **options: Any,
    ) -> LossSums:
        """Return the sums of `grpo_loss`; ``options`` are its optional arguments."""
        return grpo_loss(
            logprobs,
            prev,
            micro["advantages"],
            micro["token_mask"].float() * micro["sample_mask"].float()[:, None],
            clip_low=self._grpo["clip_low"],
            clip_high=self._grpo["clip_high"],
            kl_coefficient=self._grpo["kl_coefficient"],
            **options,
        )

    def _reduce_gradients(self, divisor: float = 1.0) -> float:
        """Sum gradients over ranks, divide and clip them; return the norm before clipping."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        flat /= divisor
        start = 0
        for gradient in gradients:
            stop = start + gradient.numel()
            gradient.copy_(flat[start:stop].view_as(gradient))
            start = stop
        limit = self._policy["optimizer"]["max_grad_norm"]
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def _micro_batches(self, batch: BatchedDataDict[Any]) -> Iterator[BatchedDataDict[Any]]:
        """Yield the planned micro-batches; without a plan, slices of ``micro_batch_size`` rows."""
        if batch.micro_batch_indices is not None:
            for micro in batch.make_microbatch_iterator_with_dynamic_shapes():
                yield micro.to(self._device)
            return
        size = self._policy["micro_batch_size"]
        for start in range(0, batch.size, size):
            yield batch.slice(start, min(start + size, batch.size)).to(self._device)

    def join_refit(self, settings: RefitSettings) -> None:
        """Prepare to publish weights as the current rank; call it again after a rank has died."""
        if self._refit is not None:
            self._refit.close()
        bind_to_node_interface()
        self._refit = RefitSource(settings, rank=self._rank, world=self._world)

    @traced(bucket="overhead")
    def publish_weights(self, version_id: str) -> None:
        """Publish the part of the weights assigned to this rank, as `RefitSource.publish`."""
        if self._refit is None:
            raise RefitConfigError(f"policy worker {self._rank} has not joined a refit")
        self._refit.publish(version_id, self._model.state_dict())

    def check_visible(self, folder: str) -> None:
        """Refuse a ``folder`` that this machine does not see."""
        check_visible(Path(folder))

    def save(self, folder: str) -> dict[str, int]:
        """Write model and optimizer into ``folder``; see `save_policy`."""
        return save_policy(Path(folder), self._model, self._optimizer)

    def load(self, folder: str) -> None:
        """Load model and optimizer from ``folder``."""
        load_weights(Path(folder), self._model)
        load_optimizer(Path(folder), self._model, self._optimizer)
