"""Storage of alerts and of notifications, shared by all services on one database.

The service that holds the lease evaluates the rules, and stores alerts together with their
notifications. Any service may send a notification. It first claims the notification by moving the
time of the next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, func, select

from dataplane_admin.models import Alert, AuditEntry
from dataplane_admin.store.apply import ALERTS, apply_audit
from dataplane_admin.store.tables import AlertHolderModel, AlertModel, NotificationModel
from dataplane_admin.store.texts import excerpt
from dataplane_admin.store.work import Work

MAX_NOTIFICATIONS = 1_000
"""Maximum number of stored notifications of all webhooks."""
MAX_AGE_S = 3_600.0
"""Seconds after which a notification is dropped, unless its alert is still raised."""
_MAX_CLEARED = 1_000
_HOLDER = 1


@dataclass(frozen=True)
class Notification:
    """A notification for one webhook; ``message`` is its id for the receiver."""

    id: int
    message: str
    body: str
    attempts: int


def message_of(alert: Alert) -> str:
    """Return the id of the notification about the state of an alert, raised or cleared."""
    # Alert ids start over in a new database; times do not.
    event = "raised" if alert.cleared_ns is None else "cleared"
    return f"alert-{alert.id}-{alert.raised_ns}-{event}"


def hold_lease(work: Work, holder: str, until_ns: int) -> bool:
    """Acquire or renew the lease until a time; return False while another service holds it."""
    row = work.connection.execute(select(AlertHolderModel.__table__)).first()
    if row is not None and row.holder != holder and row.until_ns > work.now_ns:
        return False
    values = {"id": _HOLDER, "holder": holder, "until_ns": until_ns}
    work.save(AlertHolderModel, "id", [values], () if row is None else (_HOLDER,))
    return True


def is_holder(work: Work, holder: str) -> bool:
    """Return whether this service still holds the lease."""
    query = select(AlertHolderModel.holder)
    return work.connection.execute(query).scalar() == holder


def apply_alerts(
    work: Work,
    alerts: Sequence[tuple[Alert, str]],
    notify: Callable[[Alert, str], Sequence[tuple[str, str, str]]],
) -> Counter[str]:
    """Store alerts and their notifications; return how many of each webhook exceed the maximum.

    Args:
        work: the transaction of the holder.
        alerts: the alerts, each with the reason of its end; the id of a new one is 0.
        notify: takes a stored alert and the reason; returns webhook, message id and body of each
            notification.
    """
    notifications: list[tuple[str, str, str]] = []
    entries: list[AuditEntry] = []
    for given, reason in alerts:
        alert = given.model_copy(update={"id": given.id or work.state.next_id()})
        row = alert.model_dump() | {"sentence": excerpt(alert.sentence)}
        work.save(AlertModel, "id", [row], (given.id,))
        if not given.id or alert.cleared_ns is not None:
            entries.append(_entry(alert, reason))
            notifications += notify(alert, reason)
    apply_audit(work, entries)
    _drop_cleared(work)
    return _queue(work, notifications)


def claim_notification(work: Work, webhook: str, until_ns: int) -> Notification | None:
    """Return the oldest notification of a webhook if it is due, and claim it until a time.

    A notification is sent only after those before it, so a receiver sees them in order.
    """
    row = work.connection.execute(
        select(NotificationModel.__table__)
        .where(NotificationModel.webhook == webhook, ~_is_expired(work))
        .order_by(NotificationModel.id)
        .limit(1)
    ).first()
    if row is None or row.next_ns > work.now_ns:
        return None
    attempts = row.attempts + 1
    claim = {"id": row.id, "attempts": attempts, "next_ns": until_ns}
    work.change(NotificationModel, "id", [claim])
    return Notification(row.id, row.message, row.body, attempts)


def finish_notification(work: Work, notification_id: int) -> bool:
    """Delete a delivered or refused notification."""
    return bool(work.drop(NotificationModel.id, [notification_id]))


def retry_notification(work: Work, notification_id: int, error: str, next_ns: int) -> bool:
    """Store the error of an attempt and the time of the next attempt; return True."""
    row = {"id": notification_id, "error": excerpt(error), "next_ns": next_ns}
    work.change(NotificationModel, "id", [row])
    return True


def drop_expired(work: Work) -> Counter[str]:
    """Delete notifications that are too old; return how many of each webhook.

    They may belong to a webhook that no service has any more.
    """
    expired = _is_expired(work)
    webhooks = work.connection.scalars(select(NotificationModel.webhook).where(expired)).all()
    work.connection.execute(delete(NotificationModel).where(expired))
    return Counter(webhooks)


def _is_expired(work: Work) -> ColumnElement[bool]:
    raised = select(AlertModel.__table__).where(AlertModel.cleared_ns.is_(None))
    messages = [message_of(Alert.of(row)) for row in work.connection.execute(raised)]
    return and_(
        NotificationModel.created_ns < work.now_ns - int(MAX_AGE_S * 1e9),
        NotificationModel.message.not_in(messages),
    )


def _entry(alert: Alert, reason: str) -> AuditEntry:
    raised = alert.cleared_ns is None
    return AuditEntry(
        id=0,
        time_ns=alert.raised_ns if alert.cleared_ns is None else alert.cleared_ns,
        actor=ALERTS,
        action="raise-alert" if raised else "clear-alert",
        target=alert.run_id or alert.subject,
        parameters={
            "rule": alert.name,
            "severity": alert.severity,
            "value": float(f"{alert.value:.6g}"),
            "bound": alert.bound,
        },
        outcome=f"raised: {alert.sentence}" if raised else f"cleared: {reason}",
    )


def _drop_cleared(work: Work) -> None:
    oldest = (
        select(AlertModel.cleared_ns)
        .where(AlertModel.cleared_ns.is_not(None))
        .order_by(AlertModel.cleared_ns.desc())
        .offset(_MAX_CLEARED)
        .limit(1)
    )
    before_ns = work.connection.execute(oldest).scalar()
    if before_ns is not None:
        work.connection.execute(delete(AlertModel).where(AlertModel.cleared_ns <= before_ns))


def _queue(work: Work, notifications: Sequence[tuple[str, str, str]]) -> Counter[str]:
    stored = work.connection.execute(select(func.count()).select_from(NotificationModel)).scalar()
    free = max(0, MAX_NOTIFICATIONS - int(stored or 0))
    work.add(
        NotificationModel,
        [
            {
                "id": work.state.next_id(),
                "webhook": webhook,
                "message": message,
                "body": body,
                "error": "",
                "attempts": 0,
                "created_ns": work.now_ns,
                "next_ns": work.now_ns,
            }
            for webhook, message, body in notifications[:free]
        ],
    )
    return Counter(webhook for webhook, _, _ in notifications[free:])
