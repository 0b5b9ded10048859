"""`PolicyRanks`: the live ranks of the policy; a run can continue without one that died.

All ranks hold the same weights and the same state of the optimizer. When a rank dies, the others
leave their collective operations and form a smaller process group. Its rank 0 is the rank with the
most completed optimizer steps, and copies its state to the others. All of them divide the samples
that no completed step has trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any  # Any: results of remote methods

from dataplane_core import DataPlaneClient, TagFilter, held_claim
from grpo_trainer.actors.calls import ActorCalls
from grpo_trainer.errors import WorkerError
from grpo_trainer.policy.streaming_worker import STREAM_FIELDS
from grpo_trainer.samples.partition import TRAIN, TRAIN_TASK
from observability import emit, record_trained

_GENERATED = "generation_logprobs"
_ACKNOWLEDGED = "acknowledged"


class PolicyRanks:
    """The ranks of a run.

    Args:
        calls: the run's actors by name.
        names: names of the ranks' actors, by rank. They are ready, and in no process group yet.
        client: the driver's client.
        changed: called with the names, by rank, after a rank was dropped.
        continues: whether the run continues without a rank that dies.
        notice: called with a line when a rank is dropped.

    Attributes:
        names: names of the live ranks, by rank.
        continues: the given argument. If False, callers need not wait for the other ranks' answers.

    Raises:
        WorkerError: a rank cannot join the process group.
    """

    def __init__(
        self,
        calls: ActorCalls,
        names: Sequence[str],
        *,
        client: DataPlaneClient,
        changed: Callable[[list[str]], object],
        continues: bool,
        notice: Callable[[str], object],
    ) -> None:
        self.names = list(names)
        self._calls = calls
        self._client = client
        self._changed = changed
        self.continues = continues
        self._notice = notice
        self._join()

    def _join(self) -> None:
        world = len(self.names)
        address = self._calls.call(self.names[0], "rendezvous_address", world)
        self._calls.each(
            "join_group",
            {
                name: (address, {"rank": rank, "world": world})
                for rank, name in enumerate(self.names)
            },
        )

    def drop_dead(self, error: WorkerError, progress: str = "progress") -> list[Any]:
        """Continue without the ranks that died.

        Call it when no rank works any more.

        Args:
            error: raised if no rank has died, or the run does not continue without one.
            progress: method to call on each rank; its result has one item per optimizer step that
                the rank completed.

        Returns:
            The results of ``progress``, by new rank. Rank 0 has completed the most steps.

        Raises:
            WorkerError: ``error``; or another rank died during this call.
        """
        dead = [name for name in self.names if self._calls.is_dead(name)]
        alive = [name for name in self.names if name not in dead]
        if not (dead and alive and self.continues):
            raise error
        self._notice(f"continuing without {', '.join(dead)}: {error}")
        for name in dead:
            emit("policy_rank_left", rank=self.names.index(name), reason=str(error))
            self._calls.remove(name)
        reports = self._calls.each(progress, dict.fromkeys(alive, ((), {})))
        self.names = sorted(alive, key=lambda name: -len(reports[name]))
        self._join()
        self._calls.each("share_state", dict.fromkeys(self.names, ((), {})))
        self._changed(self.names)
        for claim in self._client.inspector.list_claims(TRAIN):
            if claim.rank is not None:  # the live ranks hold none
                self._client.inspector.end_claim(TRAIN, claim.claim, expired_only=False)
        return [reports[name] for name in self.names]

    def release_assigned(self, where: list[TagFilter]) -> None:
        """Release the samples that match ``where`` and are assigned to ranks but not claimed.

        Call it when no rank works any more. Without this call, they stay assigned for the
        length of a lease.
        """
        claims = [
            self._client.claim_meta(
                TRAIN,
                TRAIN_TASK,
                STREAM_FIELDS,
                each.samples,
                each.rank,
                blocking=False,
                dp_world=each.world,
                where=where,
            )
            for each in self._client.inspector.list_assignments(TRAIN)
            if each.task == TRAIN_TASK
        ]
        for claim in claims:
            if claim.size:
                self._client.release(claim)

    def acknowledge_trained(self, sample_ids: Sequence[str]) -> None:
        """Acknowledge samples of completed steps that a rank had not acknowledged when it died."""
        states = [self._client.inspector.read_sample(TRAIN, each) for each in sample_ids]
        held = [
            state.sample_id
            for state in states
            if state is not None and state.tasks[TRAIN_TASK] != _ACKNOWLEDGED
        ]
        if held:
            claim = self._client.claim_meta(
                TRAIN, TRAIN_TASK, [_GENERATED], len(held), sample_ids=held
            )
            with held_claim(self._client, claim, renew_every_s=1.0):
                record_trained(self._client, claim, field=_GENERATED)
