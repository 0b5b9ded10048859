"""Manual changes of the data plane and of tags, recorded in the audit log.

Every action is recorded before it runs; without that entry it does not run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

import structlog

from dataplane_admin import models
from dataplane_admin.live import Live
from dataplane_admin.service.errors import (
    NotAllowed,
    NotFound,
    Refused,
    ServiceError,
    TimedOut,
    Unavailable,
)
from dataplane_admin.service.partitions import ask, partition_of
from dataplane_admin.store import Store, StoreError, WriteUnfinished
from dataplane_core import DataPlaneActions
from observability.views import printable

logger = structlog.get_logger("dataplane_admin")

Action = Literal["clear", "redeliver", "end-claim"]

_Result = TypeVar("_Result")

# Sample ids in one entry of the audit log.
_MAX_IDS = 20


class Actions:
    """The manual actions, whose audit log is in ``store``.

    Each method raises a `ServiceError` if its action is refused or fails.
    """

    def __init__(self, store: Store, live: Live | None, *, allowed: bool) -> None:
        self._store = store
        self._live = live
        self._allowed = allowed

    def clear(self, change: models.ClearSamples, actor: str) -> models.ActionResult:
        """Clear samples or a partition."""
        ids = change.sample_ids
        named = f"partition '{printable(change.partition)}'"

        def act(plane: DataPlaneActions) -> None:
            plane.clear_samples(ids, change.partition, force=change.force)

        return self._do(
            "clear",
            change.partition,
            change.confirm,
            {"samples": None if ids is None else _shortened(ids), "force": change.force},
            actor,
            act,
            lambda _: (
                f"{named} cleared" if ids is None else f"samples of {named} cleared: {len(ids)}"
            ),
        )

    def redeliver(self, change: models.RedeliverSamples, actor: str) -> models.ActionResult:
        """Redeliver acknowledged samples to a task."""
        return self._do(
            "redeliver",
            change.partition,
            change.confirm,
            {"task": change.task, "samples": _shortened(change.sample_ids)},
            actor,
            lambda plane: plane.reset_consumption(change.partition, change.task, change.sample_ids),
            lambda count: (
                f"{count} of {len(change.sample_ids)} samples can be claimed again by task "
                f"'{printable(change.task)}'"
            ),
        )

    def end_claim(self, change: models.EndClaim, actor: str) -> models.ActionResult:
        """End a claim."""

        def act(plane: DataPlaneActions) -> int:
            count = plane.end_claim(
                change.partition, change.claim, expired_only=change.expired_only
            )
            if count == 0:
                raise NotFound(
                    f"claim {printable(change.claim)} of partition '{printable(change.partition)}' "
                    "does not exist, or holds no samples"
                )
            return count

        return self._do(
            "end-claim",
            change.partition,
            change.confirm,
            {"claim": change.claim, "expired_only": change.expired_only},
            actor,
            act,
            lambda count: (
                f"claim {printable(change.claim)} ended; samples that can be claimed again: {count}"
            ),
        )

    def tag_run(self, change: models.TagRun, actor: str) -> models.TaggedRun:
        """Replace the tags of a run."""
        tags = sorted(set(change.tags))

        def act() -> None:
            if self._store.run(change.run) is None:
                raise NotFound(f"run '{printable(change.run)}' does not exist")
            self._store.tag_run(change.run, tags)

        listed = printable(", ".join(tags)) or "none"
        _, text = self._recorded(
            "tag-run",
            change.run,
            {"tags": tags},
            actor,
            act,
            lambda _: f"run '{printable(change.run)}' has the tags {listed}",
        )
        return models.TaggedRun(run_id=change.run, tags=tags, sentence=text)

    def _do(
        self,
        action: Action,
        partition: str,
        confirm: str,
        parameters: dict[str, object],
        actor: str,
        act: Callable[[DataPlaneActions], int | None],
        sentence: Callable[[int | None], str],
    ) -> models.ActionResult:
        def change() -> int | None:
            if confirm != partition:
                raise Refused("confirm: found another text; expected the partition id")
            if self._live is not None:
                partition_of(self._live.snapshot, partition)
            return ask(self._live, act)

        count, text = self._recorded(action, partition, parameters, actor, change, sentence)
        return models.ActionResult(action=action, partition=partition, samples=count, sentence=text)

    def _recorded(
        self,
        action: str,
        target: str,
        parameters: dict[str, object],
        actor: str,
        act: Callable[[], _Result],
        sentence: Callable[[_Result], str],
    ) -> tuple[_Result, str]:
        """Run an action, with an entry of the audit log before it and one with its outcome.

        Return the action's result, and one sentence on it.
        """
        if not self._allowed:
            raise NotAllowed("actions are disabled; start the service with --allow-actions")

        def record(outcome: str) -> None:
            self._store.record_action(
                models.AuditEntry(
                    id=0,
                    actor=actor,
                    action=action,
                    target=target,
                    parameters=parameters,
                    outcome=outcome,
                    time_ns=time.time_ns(),
                )
            )

        try:
            record("requested")
        except StoreError as error:
            raise Unavailable(f"nothing was changed: cannot write the audit log: {error}") from None
        outcome = "failed: internal error; see the service's log"
        try:
            result = act()
            text = sentence(result)
            outcome = f"done: {text}"
        except TimedOut as error:
            outcome = f"unknown: {error}; the action may still run"
            raise TimedOut(f"{error}; the action may still run") from None
        except ServiceError as error:
            outcome = f"failed: {error}"
            raise
        except StoreError as error:
            outcome = f"{'unknown' if isinstance(error, WriteUnfinished) else 'failed'}: {error}"
            raise Unavailable(f"the store failed: {error}") from None
        finally:
            problem = _record_outcome(record, outcome)
        return result, f"{text}; {problem}" if problem else text


def _record_outcome(record: Callable[[str], None], outcome: str) -> str:
    """Record the outcome of a finished action.

    Return one sentence if that fails, else an empty text: the action itself is done.
    """
    try:
        record(outcome)
    except StoreError as error:
        logger.error("outcome_not_recorded", outcome=outcome, reason=str(error))
        return f"the audit log has no outcome: {error}"
    return ""


def _shortened(ids: list[str]) -> dict[str, object]:
    return {"count": len(ids), "first": ids[:_MAX_IDS]}
