"""Application of a group of batches in one transaction; repeated records change nothing.

The writer holds the writers' lock, so lookups stay valid until the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from sqlalchemy import delete, select

from dataplane_admin.models import AuditEntry
from dataplane_admin.store.apply_curves import apply_curves
from dataplane_admin.store.apply_events import apply_events
from dataplane_admin.store.apply_load import apply_load
from dataplane_admin.store.apply_logs import apply_logs
from dataplane_admin.store.apply_runs import apply_tags, mark_seen
from dataplane_admin.store.apply_samples import apply_samples
from dataplane_admin.store.apply_series import apply_series
from dataplane_admin.store.apply_spans import apply_spans
from dataplane_admin.store.batch import Batch, WriteResult
from dataplane_admin.store.tables import AuditModel
from dataplane_admin.store.texts import excerpt, storable
from dataplane_admin.store.work import Work

ALERTS = "alerts"
"""Actor of the entries of the audit log about alerts."""
MAX_ENTRIES = 100_000
"""Maximum number of entries of the audit log about alerts, and of those about actions."""


def apply(work: Work, batches: Sequence[Batch]) -> list[WriteResult]:
    """Apply batches in order; return the result of each."""
    spans = apply_spans(work, batches)
    events = apply_events(work, batches)
    apply_logs(work, batches)
    apply_samples(work, batches)
    points = [point for batch in batches for point in batch.series]
    apply_series(work, points)
    apply_curves(work, points)
    apply_load(work, (point for batch in batches for point in batch.load))
    mark_seen(work, (point.run_id for point in points))
    apply_tags(work, (tags for batch in batches for tags in batch.tags))
    apply_audit(work, (entry for batch in batches for entry in batch.audit))
    shown = [change(work) for batch in batches for change in batch.changes]
    # Probes write empty batches, which change nothing.
    changed = any(shown) or any(not batch.is_empty for batch in batches)
    work.state.save(work.connection, changed=changed)
    return [
        WriteResult(
            spans=new_spans,
            events=new_events,
            repeated=sum(chunk.spans for chunk in batch.chunks)
            - new_spans
            + len(batch.events)
            - new_events,
        )
        for batch, new_spans, new_events in zip(batches, spans, events, strict=True)
    ]


def apply_audit(work: Work, entries: Iterable[AuditEntry]) -> None:
    """Append entries to the audit log, and delete its oldest entries.

    The newest `MAX_ENTRIES` of alerts, and as many of actions, are retained: an alert that is
    raised and cleared all the time must not displace the actions.
    """
    entries = list(entries)
    work.add(
        AuditModel,
        [
            {
                "id": work.state.next_id(),
                "time_ns": entry.time_ns,
                "actor": storable(entry.actor),
                "action": storable(entry.action),
                "target": storable(entry.target),
                "parameters": json.dumps(entry.parameters),
                "outcome": excerpt(entry.outcome),
            }
            for entry in entries
        ],
    )
    for of_alerts in {entry.actor == ALERTS for entry in entries}:
        chosen = AuditModel.actor == ALERTS if of_alerts else AuditModel.actor != ALERTS
        newest = select(AuditModel.id).where(chosen).order_by(AuditModel.id.desc())
        last_id = work.connection.scalar(newest.offset(MAX_ENTRIES).limit(1))
        if last_id is not None:
            old = delete(AuditModel).where(chosen, AuditModel.id <= last_id)
            work.connection.execute(old)
