"""Changing the data plane by hand, with a record of who asked for what and what became of it.

That it was asked for is written down before anything is done, and nothing is done without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal, cast

import structlog

from dataplane_admin.answers import models
from dataplane_admin.answers.errors import (
    AnswerError,
    Late,
    NotAllowed,
    NotFound,
    Refused,
    Unavailable,
)
from dataplane_admin.answers.partitions import ask, found
from dataplane_admin.live import Live
from dataplane_admin.store import AuditEntry, Store, StoreError
from dataplane_core import DataPlaneActions
from observability.views import printable

logger = structlog.get_logger("dataplane_admin")

Action = Literal["clear", "reset-consumption", "end-claim"]

# Ids of samples that a record of the audit names.
_MOST_IDS = 20


class Actions:
    """The three things that can be done, if any may be.

    Args:
        store: keeps the record.
        live: the data plane.
        allowed: whether anything may be done at all.
    """

    def __init__(self, store: Store, live: Live | None, *, allowed: bool) -> None:
        self._store = store
        self._live = live
        self._allowed = allowed

    def clear(self, asked: models.ClearSamples, actor: str) -> models.ActionResult:
        """See `Answers.clear`."""
        ids = asked.sample_ids

        named = f"partition '{printable(asked.partition)}'"

        def act(plane: DataPlaneActions) -> None:
            plane.clear_samples(ids, asked.partition, force=asked.force)

        return self._do(
            "clear",
            asked.partition,
            asked.confirm,
            {"samples": None if ids is None else _told(ids), "force": asked.force},
            actor,
            act,
            lambda _: (
                f"{named} cleared" if ids is None else f"{len(ids)} samples of {named} cleared"
            ),
        )

    def reset_consumption(self, asked: models.ResetConsumption, actor: str) -> models.ActionResult:
        """See `Answers.reset_consumption`."""
        return self._do(
            "reset-consumption",
            asked.partition,
            asked.confirm,
            {"task": asked.task, "samples": _told(asked.sample_ids)},
            actor,
            lambda plane: plane.reset_consumption(asked.partition, asked.task, asked.sample_ids),
            lambda count: (
                f"{count} of {len(asked.sample_ids)} samples can be claimed again by task "
                f"'{printable(asked.task)}'"
            ),
        )

    def end_claim(self, asked: models.EndClaim, actor: str) -> models.ActionResult:
        """See `Answers.end_claim`."""

        def act(plane: DataPlaneActions) -> int:
            count = plane.end_claim(asked.partition, asked.claim, expired_only=asked.expired_only)
            if count == 0:
                raise NotFound(
                    f"claim {printable(asked.claim)} of partition '{printable(asked.partition)}' "
                    "holds nothing, or is not there any more"
                )
            return count

        return self._do(
            "end-claim",
            asked.partition,
            asked.confirm,
            {"claim": asked.claim, "expired_only": asked.expired_only},
            actor,
            act,
            lambda count: (
                f"claim {printable(asked.claim)} ended; {count} samples can be claimed again"
            ),
        )

    def _do(
        self,
        action: Action,
        partition: str,
        confirm: str,
        parameters: Mapping[str, object],
        actor: str,
        act: Callable[[DataPlaneActions], int | None],
        sentence: Callable[[int | None], str],
    ) -> models.ActionResult:
        if not self._allowed:
            raise NotAllowed("actions are off; start the service with --allow-actions")

        def record(outcome: str) -> None:
            self._store.record_action(
                AuditEntry(
                    actor=actor,
                    action=action,
                    target=partition,
                    parameters=parameters,
                    outcome=outcome,
                    time_ns=time.time_ns(),
                )
            )

        try:
            record("asked for")
        except StoreError as error:
            raise Unavailable(
                f"nothing was changed: the audit record takes no entry: {error}"
            ) from None
        outcome = "failed: the service failed; its log says why"
        try:
            if confirm != partition:
                raise Refused(
                    "confirm: found something else than the partition's id; expected it once more"
                )
            if self._live is not None:
                found(self._live.snapshot, partition)
            # Every client that can be looked into can be acted upon, see `DataPlaneActions`.
            count = ask(self._live, lambda plane: act(cast("DataPlaneActions", plane)))
            told = sentence(count)
            outcome = f"done: {told}"
        except Late as error:
            outcome = f"unknown: {error}; it may still be carried out"
            raise Late(f"{error}; it may still be carried out") from None
        except AnswerError as error:
            outcome = f"failed: {error}"
            raise
        finally:
            unwritten = _unwritten(record, outcome)
        return models.ActionResult(
            action=action,
            partition=partition,
            samples=count,
            sentence=f"{told}; {unwritten}" if unwritten else told,
        )


def _unwritten(record: Callable[[str], None], outcome: str) -> str:
    """Write down what came of an action, which has been carried out whether that succeeds or not;
    a sentence if it does not, else empty."""
    try:
        record(outcome)
    except StoreError as error:
        logger.error("outcome_not_recorded", outcome=outcome, reason=str(error))
        return f"the audit record has only that it was asked for: {error}"
    return ""


def _told(ids: list[str]) -> dict[str, object]:
    return {"count": len(ids), "first": ids[:_MOST_IDS]}
