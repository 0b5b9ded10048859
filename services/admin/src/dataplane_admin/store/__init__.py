"""Store of telemetry and of the audit log, in SQLite or PostgreSQL."""

from dataplane_admin.store.batch import Batch, LifecycleEvent, LoadPoint, SeriesPoint, WriteResult
from dataplane_admin.store.chunk import Chunk
from dataplane_admin.store.errors import (
    QueueFull,
    StoreError,
    StoreUnavailable,
    WriteRefused,
    WriteUnfinished,
)
from dataplane_admin.store.read_samples import SampleFilter
from dataplane_admin.store.retention import Retention
from dataplane_admin.store.rows import (
    ClaimRow,
    LoadRows,
    StepRow,
    StoreTotals,
    TraceFilter,
    WaitRecords,
)
from dataplane_admin.store.store import Store

__all__ = [
    "Batch",
    "Chunk",
    "ClaimRow",
    "LifecycleEvent",
    "LoadPoint",
    "LoadRows",
    "QueueFull",
    "Retention",
    "SampleFilter",
    "SeriesPoint",
    "StepRow",
    "Store",
    "StoreError",
    "StoreTotals",
    "StoreUnavailable",
    "TraceFilter",
    "WaitRecords",
    "WriteRefused",
    "WriteResult",
    "WriteUnfinished",
]
