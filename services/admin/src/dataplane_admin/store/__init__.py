"""What arrived over OTLP and what people did, kept in SQLite or PostgreSQL."""

from dataplane_admin.store.batch import (
    AuditEntry,
    Batch,
    Chunk,
    LifecycleEvent,
    SeriesPoint,
    WriteResult,
)
from dataplane_admin.store.errors import QueueFull, StoreError, StoreUnavailable, WriteRefused
from dataplane_admin.store.retention import Retention
from dataplane_admin.store.rows import (
    ClaimRow,
    Cursor,
    EventRow,
    RunRow,
    SampleCursor,
    SampleRow,
    SeriesRow,
    StalenessRow,
    StepRow,
    StoreTotals,
    TraceFilter,
    TraceRow,
    WaitRecords,
)
from dataplane_admin.store.store import Store

__all__ = [
    "AuditEntry",
    "Batch",
    "Chunk",
    "ClaimRow",
    "Cursor",
    "EventRow",
    "LifecycleEvent",
    "QueueFull",
    "Retention",
    "RunRow",
    "SampleCursor",
    "SampleRow",
    "SeriesPoint",
    "SeriesRow",
    "StalenessRow",
    "StepRow",
    "Store",
    "StoreError",
    "StoreTotals",
    "StoreUnavailable",
    "TraceFilter",
    "TraceRow",
    "WaitRecords",
    "WriteRefused",
    "WriteResult",
]
