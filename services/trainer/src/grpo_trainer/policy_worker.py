"""A data-parallel rank of the policy: scores its shard, trains on it, and hands out weights.

A rank is told its shard as a meta and moves the columns itself, straight between the data plane and
its device. Ranks meet in two all-reduces per optimiser step: the number of tokens, and the flat
gradient.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
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
)
from dataplane_core.telemetry import detail_span, span
from grpo_trainer.loss import LossSums, grpo_loss, token_logprobs
from grpo_trainer.meeting import find_meeting, join_meeting, open_meeting
from grpo_trainer.model import load_model
from grpo_trainer.node_address import keep_to_own_interface, node_address
from grpo_trainer.policy_state import check_seen, load_optimizer, load_weights, save_policy
from grpo_trainer.refit_source import RefitSource, start_source
from grpo_trainer.reporting import Reporting, ReportingActor
from observability import traced, trained
from refit_mx import RefitConfigError

_PREV, _REFERENCE, _GENERATED = (
    "prev_logprobs",
    "reference_policy_logprobs",
    "generation_logprobs",
)
_TOLD = ("loss", "kl", "clip_fraction", "approx_entropy")


class PolicyWorker(ReportingActor):
    """A Ray actor's class.

    Args:
        rank: of this worker among ``world``.
        world: number of workers.
        model: folder or hub name.
        policy: the configuration's ``policy`` as a dict.
        grpo: the configuration's ``grpo`` as a dict.
        data_plane: the data plane's configuration.
        pad_token_id: pads ``input_ids``.
        timeout_s: deadline of meeting the others, and of a collective operation, in seconds.
        reporting: how to report, None not to.
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
        reporting: Reporting | None = None,
    ) -> None:
        self._report(reporting, "grpo.policy", str(rank))
        torch.set_num_threads(policy["num_threads"])
        gpu = policy["num_gpus_per_worker"] > 0
        self._device = torch.device("cuda" if gpu else "cpu")
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
        self._refit: RefitSource | None = None
        self._backend, self._timeout_s = "nccl" if gpu else "gloo", timeout_s
        self._store: Any = None

    def ready(self) -> None:
        """Returns once the model is loaded."""

    def meeting_point(self) -> tuple[str, int]:
        """Host and port at which this rank, 0, waits for the others."""
        self._store = open_meeting(self._world, timeout_s=self._timeout_s)
        return self._store.host, self._store.port

    def meet(self, host: str, port: int) -> None:
        """Returns once all ranks have met, there."""
        if self._store is None:
            self._store = find_meeting(host, port, self._world, timeout_s=self._timeout_s)
        join_meeting(
            self._store,
            backend=self._backend,
            rank=self._rank,
            world=self._world,
            timeout_s=self._timeout_s,
        )

    @traced
    def compute_logprobs(self, meta: KVBatchMeta, column: str) -> dict[str, Any]:
        """Score the shard and write the result as ``column``.

        Args:
            meta: this rank's shard.
            column: "prev_logprobs", scored by the policy, or "reference_policy_logprobs", by the
                initial one.

        Returns:
            ``seconds``, and for the policy ``error``: per sample the mean absolute difference to
            the generator's log-probabilities, in the shard's order.
        """
        started = time.perf_counter()
        model = self._model if column == _PREV else self._reference
        wanted = [*LP_SEED_FIELDS, *([_GENERATED] if column == _PREV else [])]
        batch = read_columns(self._client, meta, wanted, pad_value_dict=self._pad)
        width = batch["input_ids"].shape[1]
        parts, errors = [], []
        with torch.no_grad(), span("forward", "productive"):
            for micro in self._micro_batches(batch):
                with detail_span("micro_batch", "productive"):
                    scored = token_logprobs(
                        model,
                        micro["input_ids"],
                        micro["input_lengths"],
                        temperature=self._temperature,
                    )
                parts.append(torch.nn.functional.pad(scored, (0, width - scored.shape[1])))
                if column == _PREV:
                    mask = micro["token_mask"] > 0
                    # A prompt's token can be impossible, and infinity times 0 is no number.
                    difference = torch.where(mask, (scored - micro[_GENERATED]).abs(), 0.0)
                    total = difference.sum(1, dtype=torch.float64)
                    errors += (total / mask.sum(1).clamp(min=1)).tolist()
        write_columns(self._client, meta, {column: torch.cat(parts).cpu()})
        return {"seconds": time.perf_counter() - started, "error": errors}

    @traced
    def train(
        self, meta: KVBatchMeta, *, rows_per_step: int, learning_rate: float
    ) -> dict[str, float]:
        """Optimise on the shard.

        Args:
            meta: this rank's shard.
            rows_per_step: the rank's rows of one optimiser step; divides the shard.
            learning_rate: of this call's steps.

        Returns:
            ``loss``, ``kl``, ``clip_fraction``, ``approx_entropy``, ``grad_norm``, ``tokens``: over
            all ranks, means over the optimiser steps with tokens (``tokens``: sum); ``seconds``. A
            ``grad_norm`` that is not finite says that an optimiser step was not taken, nor those
            after it; the ranks agree, since all look at the norm of the one gradient that they
            summed.
        """
        started = time.perf_counter()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        skipped = set()
        if not self._grpo["recompute_prev_logprobs"]:
            skipped.add(_PREV)
        if self._reference is None:
            skipped.add(_REFERENCE)
        fields = [name for name in DP_TRAIN_FIELDS if name not in skipped]
        batch = read_columns(self._client, meta, fields, pad_value_dict=self._pad)
        steps = []
        used: list[int] = []
        for step in range(meta.size // rows_per_step):
            steps.append(self._optimizer_step(batch.get_batch(step, rows_per_step)))
            if not math.isfinite(steps[-1]["grad_norm"]):
                break
            if steps[-1]["tokens"] > 0:
                used += range(step * rows_per_step, (step + 1) * rows_per_step)
        # A step without tokens has no loss to take the mean of; its zeros would dilute the others'.
        counted = [step for step in steps if step["tokens"] > 0] or steps
        means = {
            name: sum(step[name] for step in counted) / len(counted)
            for name in (*_TOLD, "grad_norm")
        }
        tokens = sum(step["tokens"] for step in steps)
        if used:
            trained(self._client, meta.subset(used), field=_GENERATED)
        return {**means, "tokens": tokens, "seconds": time.perf_counter() - started}

    def _optimizer_step(self, chunk: BatchedDataDict[Any]) -> dict[str, float]:
        with span("optimizer_step", "productive"):
            return self._optimize(chunk)

    def _optimize(self, chunk: BatchedDataDict[Any]) -> dict[str, float]:
        mask = chunk["token_mask"].float() * chunk["sample_mask"].float()[:, None]
        # float32 counts only to 2^24, which a global batch of long responses exceeds.
        tokens = mask.sum(dtype=torch.float64).to(self._device)
        dist.all_reduce(tokens)
        # Not clamped to 1: weights below 1 may add up to less, and the mean is over those.
        divisor: Any = tokens if tokens > 0 else 1.0
        self._optimizer.zero_grad()
        totals = torch.zeros(len(_TOLD), device=self._device, dtype=torch.float64)
        for micro in self._micro_batches(chunk):
            with detail_span("micro_batch", "productive"):
                sums = self._loss(micro)
                (sums.loss / divisor).backward()
            told = [sums.loss.detach(), sums.kl, sums.clipped, sums.approx_entropy]
            totals += torch.stack(told)
        dist.all_reduce(totals)
        norm = self._reduce_gradients()
        if tokens > 0 and math.isfinite(norm):
            self._optimizer.step()
        means = (totals / divisor).tolist()
        return {
            **dict(zip(_TOLD, means, strict=True)),
            "grad_norm": norm,
            "tokens": float(tokens),
        }

    def _loss(self, micro: BatchedDataDict[Any]) -> LossSums:
        logprobs = token_logprobs(
            self._model,
            micro["input_ids"],
            micro["input_lengths"],
            temperature=self._temperature,
        )
        return grpo_loss(
            logprobs,
            micro[_PREV] if _PREV in micro else micro[_GENERATED],
            micro["advantages"],
            micro["token_mask"].float() * micro["sample_mask"].float()[:, None],
            clip_low=self._grpo["clip_low"],
            clip_high=self._grpo["clip_high"],
            reference_logprobs=micro.get(_REFERENCE),
            kl_coefficient=self._grpo["kl_coefficient"],
        )

    def _reduce_gradients(self) -> float:
        """Sum gradients over ranks and clip them; returns the norm before clipping."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            stop = start + gradient.numel()
            gradient.copy_(flat[start:stop].view_as(gradient))
            start = stop
        limit = self._policy["optimizer"]["max_grad_norm"]
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def _micro_batches(self, batch: BatchedDataDict[Any]) -> Iterator[BatchedDataDict[Any]]:
        """The driver's micro-batch plan if the shard carries one, else cuts of equal rows."""
        if batch.micro_batch_indices is not None:
            for micro in batch.make_microbatch_iterator_with_dynamic_shapes():
                yield micro.to(self._device)
            return
        size = self._policy["micro_batch_size"]
        for start in range(0, batch.size, size):
            yield batch.slice(start, min(start + size, batch.size)).to(self._device)

    def node_address(self) -> str:
        """By which Ray knows this process's machine."""
        return node_address()

    def join_refit(self, settings: Mapping[str, Any]) -> None:
        """Get ready to publish weights.

        Args:
            settings: `RefitSettings` as a dict.
        """
        keep_to_own_interface()
        self._refit = start_source(settings, rank=self._rank, world=self._world)

    @traced(bucket="overhead")
    def publish_weights(self, version_id: str) -> int:
        """Publish this rank's share of the weights; returns its bytes.

        Raises:
            RefitError: it cannot be published in time.
        """
        if self._refit is None:
            raise RefitConfigError(f"policy worker {self._rank} has not joined a refit")
        return self._refit.publish(version_id, self._model.state_dict())

    def see(self, folder: str) -> None:
        """Refuse a ``folder`` that this machine does not see; see `check_seen`."""
        check_seen(Path(folder))

    def save(self, folder: str) -> dict[str, int]:
        """Write model and optimiser into ``folder``; see `save_policy`."""
        return save_policy(Path(folder), self._model, self._optimizer)

    def load(self, folder: str) -> None:
        """Take model and optimiser from ``folder``."""
        load_weights(Path(folder), self._model)
        load_optimizer(Path(folder), self._model, self._optimizer)
