"""`GeneratorFleet`: the generators of an asynchronous run, which may leave and join."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from dataplane_core import DataPlaneClient
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.checkpoint.folder import RunState
from grpo_trainer.config.loading import TrainerConfig
from grpo_trainer.config.sections import VllmSection
from grpo_trainer.errors import WorkerError, first_line
from grpo_trainer.policy.driver import Policy
from grpo_trainer.refit.weight_sync import RefitWeightSync
from grpo_trainer.rollout.generator import GeneratorReport
from grpo_trainer.rollout.journal_file import prune
from grpo_trainer.rollout.totals import total_metrics
from grpo_trainer.run.processes import GeneratorActors, RunActors
from grpo_trainer.samples.partition import TRAIN
from observability import emit

_REPORT_S = 60.0
"""Seconds within which a generator must report; else it counts as lost."""

_STOP_S = 10.0
"""Seconds that generators may take to finish their rollouts when the run ends."""


class GeneratorFleet:
    """The generators of a run.

    A generator that dies, fails or does not answer is removed, as long as ``min_generators``
    remain. Its claims are ended, so that others claim its prompts at once. With ``replace_lost``
    another one is started, and joins between two steps.

    Args:
        client: the driver's client.
        journal: folder of the run's journal; None for no journal.
        notice: called with a line when a generator leaves or joins.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        actors: RunActors,
        weight_sync: RefitWeightSync,
        policy: Policy,
        config: TrainerConfig,
        *,
        run_id: str,
        journal: Path | None,
        notice: Callable[[str], object],
    ) -> None:
        self._client = client
        self._actors = actors
        self._owners: dict[GeneratorActors, str] = {}
        self._calls: ActorCalls = actors.calls
        self._weight_sync = weight_sync
        self._policy = policy
        self._config = config
        self._run_id = run_id
        self._journal = journal
        self._records_responses = (
            journal is not None
            and config.grpo.asynchronous.partial_rollouts  # else a response has one version
            and not isinstance(config.policy.generation, VllmSection)
        )
        self._notice = notice
        self._starting: GeneratorActors | None = None
        self._is_started = False
        self._work = GeneratorReport()

    def start(self) -> None:
        """Let all generators claim prompts. Their weights must be installed."""
        for names in self._actors.generators:
            self._start(names)
        self._is_started = True

    def stop(self) -> None:
        """Let the generators finish their rollouts, and claim no further prompts.

        If a generator dies, fails or does not answer, a notice says so. No error is raised, because
        the run needs no generator any more.
        """
        if not self._is_started:
            return
        names = [each.rollout for each in self._actors.generators]
        errors: dict[str, WorkerError] = {}
        try:
            self._calls.each(
                "stop_generating", dict.fromkeys(names, ((_STOP_S,), {})), errors=errors
            )
        except WorkerError as error:  # no answer
            self._notice(str(error))
        for each in self._actors.generators:
            lost = errors.get(each.rollout)
            if lost is not None:
                self._notice(str(lost))
            self._emit_left(each, "finished" if lost is None else first_line(lost))

    def _start(self, names: GeneratorActors) -> None:
        # Workers share the run's seed: without separate streams, all would draw the same numbers.
        self._calls.call(names.worker, "begin", f"{names.worker} {uuid.uuid4().hex}")
        if self._records_responses:
            self._calls.call(names.worker, "open_journal", str(self._journal))
        owner: str = self._calls.call(
            names.rollout,
            "start_generating",
            self._config.grpo.model_dump(mode="json"),
            run_id=self._run_id,
            lease_s=self._config.data_plane["claim_lease_s"],
            verbose=self._config.tracing.verbose,
            journal=None if self._journal is None else str(self._journal),
            record_responses=self._records_responses,
        )
        self._owners[names] = owner
        emit("generator_joined", TRAIN, generator=names.rollout, owner=owner)

    def _emit_left(self, names: GeneratorActors, reason: str) -> None:
        owner = self._owners.get(names)
        emit("generator_left", TRAIN, generator=names.rollout, owner=owner, reason=reason)

    @property
    def filtered(self) -> int:
        """Samples of groups of equal rewards that were cleared since the last `take_metrics`."""
        return self._work.filtered

    def fill_short_step(self, filling: bool) -> None:
        """Call `Generator.fill_short_step` on all generators."""
        for names in list(self._actors.generators):
            try:
                self._calls.call(names.rollout, "fill_short_step", filling)
            except WorkerError as error:
                self._drop(names, error)

    def prune_journal(self, state: RunState) -> None:
        """Remove the journal's files that the checkpoint of ``state`` does not need."""
        if self._journal is None or not self._is_started:
            return
        open_files = set()
        for names in list(self._actors.generators):
            try:
                open_files.add(self._calls.call(names.rollout, "rotate_journal"))
                if self._records_responses:
                    open_files.add(self._calls.call(names.worker, "rotate_journal"))
            except WorkerError:
                return  # `collect` removes the generator; the next checkpoint prunes
        prune(
            self._journal,
            open_files=open_files,
            untrained=state.pending_prompts,
            position=state.prompts_position,
        )

    def sync(self, version: int) -> None:
        """Install the policy's weights on all generators; drop the processes that die during it.

        Raises:
            WorkerError: as `RefitWeightSync.sync`, or too few generators remain.
        """
        while True:
            workers = [each.worker for each in self._actors.generators]
            try:
                self._weight_sync.sync(version)
                # After this call, vLLM servers that were lost get requests again.
                self._calls.each("clear_metrics", dict.fromkeys(workers, ((), {})))
            except WorkerError as error:
                if not self.drop_dead(error):
                    self._policy.ranks.drop_dead(error)
            else:
                return

    def drop_dead(self, error: WorkerError) -> bool:
        """Remove the generators that died; return False if none did.

        Raises:
            WorkerError: ``error``, if too few generators remain.
        """
        dead = [each for each in self._actors.generators if self._is_dead(each)]
        for names in dead:
            self._drop(names, error)
        return bool(dead)

    def replace_lost(self, version: int) -> None:
        """Admit a generator that has started, and start another if one is missing.

        Call it between two steps.
        """
        names = self._starting
        if names is not None and self._is_dead(names):
            self._starting = None
            self._remove(names)
            self._notice(f"{names.rollout} died while it started")
        elif names is not None and self._calls.is_alive(names.worker):
            self._starting = None
            self._admit(names, version)
        section = self._config.grpo.asynchronous
        missing = len(self._actors.generators) < section.generators
        if section.replace_lost and missing and self._starting is None:
            self._starting = self._actors.start_generator()

    def _admit(self, names: GeneratorActors, version: int) -> None:
        """Let a generator that has started take part, or remove it if it fails to join."""
        try:
            self._actors.admit_generator(names)
        except WorkerError as error:
            self._remove(names)
            self._notice(f"{names.rollout} did not join: {error}")
            return
        self.sync(version)
        if names not in self._actors.generators:  # lost in the refit
            return
        try:
            self._start(names)
        except WorkerError as error:
            self._drop(names, error)
        else:
            self._notice(f"{names.rollout} joined")

    def _remove(self, names: GeneratorActors) -> None:
        """Remove both actors of a generator that does not take part."""
        for name in names:
            self._calls.remove(name)

    def collect(self) -> None:
        """Collect the generators' reports, and remove generators that failed.

        Raises:
            WorkerError: too few generators remain; says why the last one was lost.
        """
        for names in list(self._actors.generators):
            try:
                report: GeneratorReport = self._calls.each(
                    "take_report", {names.rollout: ((), {})}, timeout_s=_REPORT_S
                )[names.rollout]
                self._work.add(report)
                if report.error is not None:
                    raise WorkerError(f"{names.rollout}: {report.error}")
            except WorkerError as error:
                self._drop(names, error)

    def _is_dead(self, names: GeneratorActors) -> bool:
        return any(self._calls.is_dead(name) for name in names)

    def _drop(self, names: GeneratorActors, error: WorkerError) -> None:
        if len(self._actors.generators) <= self._config.grpo.asynchronous.min_generators:
            raise error
        self._actors.remove_generator(names)
        self._emit_left(names, first_line(error))
        owner = self._owners.pop(names, None)
        inspector = self._client.inspector
        for claim in inspector.list_claims(TRAIN):
            if claim.owner == owner:
                inspector.end_claim(TRAIN, claim.claim, expired_only=False)
        self._notice(f"continuing without {names.rollout}: {error}")

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of generation since the last call; no means without samples."""
        size = self._config.grpo.num_generations_per_prompt
        work, self._work = self._work, GeneratorReport()
        generated = {}
        if work.rewards:
            reward = float(torch.tensor(work.rewards).mean())
            generated = {"generated_reward": reward, **total_metrics(work.rollouts)}
        return {
            "generators": len(self._actors.generators),
            "generated": len(work.rewards),
            "filtered_groups": work.filtered // size,
            "masked_groups": work.masked // size,
            "lost_groups": work.lost // size,
            "restored_groups": work.restored // size,
            "continued_tokens": work.continued_tokens,
            "generator_wait_s": work.idle_s,
            "journal_s": work.journal_s,
            **generated,
        }
