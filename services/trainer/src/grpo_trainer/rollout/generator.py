"""Generator of an asynchronous run: it claims prompts and fills their samples until it is stopped.

A prompt is put as the samples of one group, which have only the field `PROMPT`. A generator claims
complete groups under a lease, generates their responses, and puts all columns under that lease. The
put that makes a sample ready for training also acknowledges it. If a generator dies before that
put, its lease expires, and another one claims the groups. If a generator is late, its put is
refused. So each sample is filled exactly once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any  # Any: metrics

import torch

from dataplane_core import (
    DP_TRAIN_FIELDS,
    ClaimTimeoutError,
    KVBatchMeta,
    LeaseLostError,
    held_claim,
)
from dataplane_core.process import process_name
from dataplane_core.schema import TOKEN_ALIGNED_FIELDS
from dataplane_core.telemetry import span, step_context
from grpo_trainer.actors.telemetry import RunActor, TelemetrySettings
from grpo_trainer.config.sections import GRPOSection
from grpo_trainer.errors import WorkerError, first_line
from grpo_trainer.refit.weight_sync import version_number
from grpo_trainer.rollout.batch import rollout_batch
from grpo_trainer.rollout.journal import FinishedGroup, Journal
from grpo_trainer.rollout.prompts import Prompt
from grpo_trainer.rollout.remote_generation import JournalUse, StreamingGeneration
from grpo_trainer.rollout.sample_records import GENERATED_TOKENS, record_generated
from grpo_trainer.rollout.totals import RolloutBatch
from grpo_trainer.samples.partition import (
    GENERATE_TASK,
    IS_FILLER,
    PREV_LOGPROBS,
    PROMPT,
    REFERENCE_LOGPROBS,
    TRAIN,
    WEIGHT_VERSION,
    WEIGHT_VERSIONS,
    position_of,
)
from grpo_trainer.samples.shaping import CARRY, ShapedRewards, shape_rewards
from observability import emit
from rollout_actor import SyncRolloutActor, WeightVersionSpan

_SHAPED = ("advantages", "sample_mask")
"""Columns that make a sample ready for training."""

_ROLLOUT_FIELDS = [
    name for name in DP_TRAIN_FIELDS if name not in (PREV_LOGPROBS, REFERENCE_LOGPROBS, *_SHAPED)
]
"""Columns of a rollout that training needs."""

_CLAIM_S = 2.0
"""Seconds that an idle generator waits for a prompt before it checks whether to stop."""


class RolloutActor(SyncRolloutActor, RunActor):
    """`SyncRolloutActor` with telemetry; the remaining arguments are those of the base class."""

    def __init__(self, telemetry: TelemetrySettings | None, *args: Any, **kwargs: Any) -> None:
        self._start_telemetry(telemetry, "grpo.rollout")
        super().__init__(*args, **kwargs)


@dataclass
class GeneratorReport:
    """Work of a generator since its last report.

    Attributes:
        rollouts: number of samples of each rollout, its metrics, and its tokens and seconds.
        rewards: reward of every generated sample.
        filtered: samples of groups whose rewards are all equal, which were cleared.
        masked: samples of such groups that were put to fill a step, excluded from the loss.
        restored: samples that were finished before a crash and restored from the journal.
        lost: samples whose lease ended before they were put; another generator claims them.
        continued_tokens: tokens drawn before a crash and restored from the journal, of responses
            that the crash interrupted.
        idle_s: seconds without a prompt, summed over the concurrent rollouts.
        journal_s: seconds spent on the journal.
        error: why the generator stopped; None while it works.
    """

    rollouts: list[RolloutBatch] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    filtered: int = 0
    masked: int = 0
    restored: int = 0
    lost: int = 0
    continued_tokens: int = 0
    idle_s: float = 0.0
    journal_s: float = 0.0
    error: str | None = None

    def add(self, later: GeneratorReport) -> None:
        """Add the work of a later report, also of another generator."""
        for each in fields(self):
            if each.name != "error":
                total = getattr(self, each.name) + getattr(later, each.name)
                setattr(self, each.name, total)


class Generator(RolloutActor):
    """Class of a generator's Ray actor.

    Args:
        telemetry: the run's telemetry.
        generation: client of the generation worker.
        args, kwargs: the remaining arguments of `SyncRolloutActor`.
    """

    def __init__(
        self,
        telemetry: TelemetrySettings | None,
        generation: StreamingGeneration,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(telemetry, generation, *args, **kwargs)
        self._generation = generation
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._report = GeneratorReport()
        self._fills_short_step = False
        self._journal: Journal | None = None
        self._journal_lock = threading.Lock()
        self._records_responses = False

    def start_generating(
        self,
        grpo: Mapping[str, Any],
        *,
        run_id: str,
        lease_s: float,
        verbose: bool,
        journal: str | None = None,
        record_responses: bool = False,
    ) -> str:
        """Start to claim prompts; return this process's name, the owner of its claims.

        Args:
            grpo: section ``grpo`` of the configuration.
            run_id: the run's id.
            lease_s: length of a claim's lease, in seconds.
            verbose: record details in the trace.
            journal: folder of the run's `Journal`; None for no journal.
            record_responses: record responses in the worker's `ResponseJournal`, which the caller
                has opened.
        """
        self._grpo = GRPOSection.model_validate(grpo)
        self._run_id, self._lease_s, self._verbose = run_id, lease_s, verbose
        self._journal = None if journal is None else Journal(Path(journal))
        self._records_responses = record_responses
        self._threads = [
            threading.Thread(target=self._generate, name=f"rollout {number}", daemon=True)
            for number in range(self._grpo.asynchronous.concurrent_rollouts)
        ]
        for thread in self._threads:
            thread.start()
        return process_name()

    def stop_generating(self, timeout_s: float) -> None:
        """Claim no more prompts; wait up to ``timeout_s`` for the rollouts in progress.

        The samples of unfinished rollouts stay leased until this process ends.
        """
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def fill_short_step(self, filling: bool) -> None:
        """Put groups of equal rewards, excluded from the loss, if ``filling``; else clear them."""
        self._fills_short_step = filling

    def rotate_journal(self) -> str:
        """Append to a new file of the journal from now on; return its name."""
        with self._journal_lock:
            if self._journal is None:
                raise AssertionError("the generator keeps no journal")
            return self._journal.rotate()

    def take_report(self) -> GeneratorReport:
        """Return what happened since the last call."""
        with self._lock:
            report, self._report = self._report, GeneratorReport(error=self._report.error)
        return report

    def _generate(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._context(), span("grpo.generator"):
                    started = time.perf_counter()
                    claim = self._claim()
                    with self._lock:
                        self._report.idle_s += time.perf_counter() - started
                    if claim is not None:
                        # A new context, as the weights may be newer after the wait.
                        with self._context(), span("grpo.rollout"):
                            self._fill(claim)
        except Exception as error:  # noqa: BLE001  # the driver gets any error with the report
            with self._lock:
                self._report.error = f"{type(error).__name__}: {first_line(error)}"
            self._stopping.set()

    def _claim(self) -> KVBatchMeta | None:
        """Claim the ready groups, or wait for one; return None if none comes within `_CLAIM_S`."""
        size = self._grpo.num_generations_per_prompt
        count = self._grpo.asynchronous.prompts_per_rollout * size
        task = TRAIN, GENERATE_TASK, [PROMPT]
        claim = self._dp_client.claim_meta(*task, count, blocking=False)
        if not claim.size:
            try:
                claim = self._dp_client.claim_meta(*task, size, timeout_s=_CLAIM_S)
            except ClaimTimeoutError:
                return None
        return claim.subset(sorted(range(claim.size), key=claim.sample_ids.__getitem__))

    def _context(self, version: int | None = None) -> AbstractContextManager[None]:
        """Return the context of work with a weight version, by default the current one."""
        if version is None:
            version = version_number(self._generation.weight_version())
        return step_context(self._run_id, None, weight_version=version, verbose=self._verbose)

    def _fill(self, claim: KVBatchMeta) -> None:
        """Fill the samples of a claim, or clear them."""
        size = self._grpo.num_generations_per_prompt
        missing: list[int] = []
        for start in range(0, claim.size, size):
            group = self._find_finished(claim.sample_ids[start])
            if group is None:
                missing += range(start, start + size)
            else:
                self._hold(claim.subset(range(start, start + size)), partial(self._restore, group))
        if missing:
            self._hold(claim.subset(missing), self._generate_groups)

    def _hold(self, claim: KVBatchMeta, fill: Callable[[KVBatchMeta], list[str]]) -> None:
        """Let ``fill`` put and acknowledge a claim's samples; clear the samples that it returns."""
        every_s = self._lease_s / 3
        try:
            with held_claim(self._dp_client, claim, renew_every_s=every_s, acknowledge=False):
                filtered = fill(claim)
                rows = [row for row, each in enumerate(claim.sample_ids) if each in {*filtered}]
                self._dp_client.acknowledge(claim.subset(rows))
        except LeaseLostError as error:
            with self._lock:
                self._report.lost += len(error.sample_ids)
            return
        if filtered:
            # Step N installs version N. The span has no step, since its trace is no step.
            version = version_number(self._generation.weight_version())
            with span("drop", "wasted"):
                with step_context(self._run_id, version, weight_version=version):
                    emit("dropped", TRAIN, filtered, reason="equal_rewards")
                self._dp_client.clear_samples(filtered, TRAIN)

    def _find_finished(self, sample_id: str) -> FinishedGroup | None:
        """Return a sample's group from the journal; None if it was not finished before a crash."""
        if self._journal is None:
            return None
        with self._journal_lock:
            return self._journal.find(position_of(sample_id))

    def _restore(self, group: FinishedGroup, claim: KVBatchMeta) -> list[str]:
        """Put a group that was finished before a crash; return its samples if it was filtered."""
        with self._lock:
            self._report.restored += claim.size
        if not group.columns:
            return claim.sample_ids
        # If the crash lost these weights, the run trains a new version with their number. Until
        # then, no sample may have a higher number than the installed weights.
        version = min(group.weight_version, version_number(self._generation.weight_version()))
        lengths = group.columns["input_lengths"].tolist()
        tags = [
            {"input_lengths": length, "reward": reward, WEIGHT_VERSION: version}
            for length, reward in zip(lengths, group.rewards, strict=True)
        ]
        with self._context(version):
            self._dp_client.put_columns(
                claim.sample_ids,
                TRAIN,
                group.columns,
                tags,
                lengths=lengths,
                ragged=[name for name in _ROLLOUT_FIELDS if name in TOKEN_ALIGNED_FIELDS],
                claim=claim,
                acknowledge=True,
            )
        return []

    def _generate_groups(self, claim: KVBatchMeta) -> list[str]:
        """Generate a claim's samples and put their columns; return the ids of filtered samples."""
        started = time.perf_counter()
        size = self._grpo.num_generations_per_prompt
        stored = self._dp_client.get_data(claim.subset(range(0, claim.size, size)))
        prompts = [Prompt.model_validate(each) for each in stored.get(PROMPT).tolist()]
        with self._recording_responses(claim, prompts) as use:
            meta, carry, metrics, _ = self.rollout_to_tq(
                rollout_batch(prompts, group_size=size),
                partition_id=TRAIN,
                group_size=size,
                finish_generation=False,
                carry_keys=[*CARRY, GENERATED_TOKENS, WEIGHT_VERSIONS],
                claim=claim,
            )
        shaped = shape_rewards(carry, self._grpo)
        versions = required_versions(carry, claim.sample_ids)
        record_generated(claim.sample_ids, carry, shaped.advantages, prompts)
        keep = torch.ones(claim.size, dtype=torch.bool)
        masked = 0
        if self._grpo.dynamic_sampling.enabled:
            if self._fills_short_step:
                shaped.sample_mask[~shaped.is_informative] = 0.0
                masked = int((~shaped.is_informative).sum())
            else:
                keep = shaped.is_informative
        self._put(claim, meta, carry, shaped, keep, versions)
        filtered = [claim.sample_ids[row] for row in (~keep).nonzero()[:, 0].tolist()]
        generated = {
            "tokens": int(carry[GENERATED_TOKENS].sum()) - use.continued_tokens,
            "seconds": time.perf_counter() - started,
        }
        with self._lock:
            self._report.rollouts.append((claim.size, metrics, generated))
            self._report.rewards += carry["total_reward"].tolist()
            self._report.filtered += len(filtered)
            self._report.masked += masked
            self._report.continued_tokens += use.continued_tokens
            self._report.journal_s += use.seconds
        return filtered

    def _recording_responses(
        self, claim: KVBatchMeta, prompts: Sequence[Prompt]
    ) -> AbstractContextManager[JournalUse]:
        """Record and continue the responses to a claim's prompts during the block."""
        if not self._records_responses:
            return nullcontext(JournalUse())
        positions = map(position_of, claim.sample_ids[:: self._grpo.num_generations_per_prompt])
        token_ids = [prompt.token_ids for prompt in prompts]
        return self._generation.recorded(dict(zip(positions, token_ids, strict=True)))

    def _append_to_journal(
        self,
        claim: KVBatchMeta,
        tags: list[dict[str, Any]],
        shaped: ShapedRewards,
        keep: torch.Tensor,
    ) -> None:
        """Append the finished groups of a claim to the journal.

        Call it before the put that makes them ready: policy workers may soon train and clear them.
        A group that only fills a short step is recorded like a cleared one, so that after a crash
        the step tries other prompts first.
        """
        if self._journal is None:
            return
        started = time.perf_counter()
        size = self._grpo.num_generations_per_prompt
        for start in range(0, claim.size, size):
            rows = slice(start, start + size)
            columns: dict[str, Any] = {}
            if keep[start] and not tags[start][IS_FILLER]:
                columns = {
                    **self._dp_client.get_columns(claim.sample_ids[rows], TRAIN, _ROLLOUT_FIELDS),
                    "advantages": shaped.advantages[rows].clone(),
                    "sample_mask": shaped.sample_mask[rows].clone(),
                }
            group = FinishedGroup(
                position_of(claim.sample_ids[start]),
                tags[start][WEIGHT_VERSION],
                [each["reward"] for each in tags[rows]],
                columns,
            )
            with self._journal_lock:
                self._journal.append(group)
        with self._lock:
            self._report.journal_s += time.perf_counter() - started

    def _put(
        self,
        claim: KVBatchMeta,
        meta: KVBatchMeta,
        carry: Mapping[str, Any],
        shaped: ShapedRewards,
        keep: torch.Tensor,
        versions: Sequence[Sequence[WeightVersionSpan]],
    ) -> None:
        """Put the columns that make the rows of ``keep``, bool (n,), ready for training."""
        size = self._grpo.num_generations_per_prompt
        current = version_number(self._generation.weight_version())  # for a row without tokens
        oldest = [
            min((version_number(each["version"]) for each in spans), default=current)
            for spans in versions
        ]
        rewards, lengths = carry["total_reward"].tolist(), meta.sequence_lengths or []
        informative = shaped.is_informative.tolist()
        tags = [
            {
                "input_lengths": lengths[row],
                "reward": rewards[row],
                # All samples of a group have the same tag, so a filter selects all or none.
                WEIGHT_VERSION: min(oldest[row // size * size : (row // size + 1) * size]),
                IS_FILLER: bool(self._grpo.dynamic_sampling.enabled and not informative[row]),
            }
            for row in range(claim.size)
        ]
        self._append_to_journal(claim, tags, shaped, keep)
        rows = keep.nonzero()[:, 0].tolist()
        if rows:
            columns = {
                "advantages": shaped.advantages[keep],
                "sample_mask": shaped.sample_mask[keep],
            }
            self._dp_client.put_columns(
                [claim.sample_ids[row] for row in rows],
                TRAIN,
                columns,
                [tags[row] for row in rows],
                claim=claim,
                acknowledge=True,
            )


def required_versions(
    carry: Mapping[str, Any], sample_ids: Sequence[str]
) -> list[list[WeightVersionSpan]]:
    """Return the spans of weight versions of each row of a rollout.

    Raises:
        WorkerError: a row has none.
    """
    versions = list(carry[WEIGHT_VERSIONS])
    if None in versions:
        raise WorkerError(
            f"sample {sample_ids[versions.index(None)]!r}: the generation backend reported no "
            "weight_versions; expected spans for every response with grpo.mode async, because "
            "staleness is computed from them"
        )
    return versions
