"""The data-plane contract: configuration, metadata, client, errors, and an in-memory client.

Importing this package imports neither torch nor ray: names that need torch load at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dataplane_core.capabilities import Capabilities, TaskCounts
from dataplane_core.client import DataPlaneClient
from dataplane_core.config import DataPlaneConfig, ObservabilityConfig, validate_config
from dataplane_core.errors import (
    CapacityExceeded,
    CheckpointError,
    ClaimTimeoutError,
    ClosedError,
    ConfigError,
    DataPlaneError,
    DeadlineExceededError,
    DuplicateSampleError,
    InvalidRequestError,
    InvalidTypeError,
    LeaseLostError,
    MissingDataError,
    PartitionNotFoundError,
    SamplesLeasedError,
    SchemaMismatchError,
    UnavailableError,
    UnknownTaskError,
    UnsupportedError,
)
from dataplane_core.factory import build_data_plane_client
from dataplane_core.held_claim import held_claim
from dataplane_core.inspector import DataPlaneActions, DataPlaneInspector, StoreInspector
from dataplane_core.ledger import (
    AssignmentSummary,
    ClaimSummary,
    FieldSummary,
    PartitionSummary,
    SampleState,
    StatePage,
    StorageSummary,
    TagFilter,
    TaskSummary,
)
from dataplane_core.meta import KVBatchMeta
from dataplane_core.schema import (
    DP_TRAIN_FIELDS,
    ELEM_COUNTS_PER_GB,
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_IDS,
    INPUT_LENGTHS,
    LP_SEED_FIELDS,
    META_IDX,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    ROUTED_EXPERTS_FIELD,
    SAMPLE_MASK,
    Layout,
)

if TYPE_CHECKING:
    from dataplane_core.async_client import AsyncDataPlaneClient
    from dataplane_core.checkpoint import restore_partition, save_partition
    from dataplane_core.in_memory import InMemoryDataPlaneClient
    from dataplane_core.streaming import StreamingDataLoader, StreamingDataset


__all__ = [
    "DP_TRAIN_FIELDS",
    "ELEM_COUNTS_PER_GB",
    "GLOBAL_FORWARD_PAD_SEQLEN",
    "INPUT_IDS",
    "INPUT_LENGTHS",
    "LP_SEED_FIELDS",
    "META_IDX",
    "MICRO_BATCH_INDICES",
    "MICRO_BATCH_LENGTHS",
    "ROUTED_EXPERTS_FIELD",
    "SAMPLE_MASK",
    "AssignmentSummary",
    "AsyncDataPlaneClient",
    "Capabilities",
    "CapacityExceeded",
    "CheckpointError",
    "ClaimSummary",
    "ClaimTimeoutError",
    "ClosedError",
    "ConfigError",
    "DataPlaneActions",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "DataPlaneInspector",
    "DeadlineExceededError",
    "DuplicateSampleError",
    "FieldSummary",
    "InMemoryDataPlaneClient",
    "InvalidRequestError",
    "InvalidTypeError",
    "KVBatchMeta",
    "Layout",
    "LeaseLostError",
    "MissingDataError",
    "ObservabilityConfig",
    "PartitionNotFoundError",
    "PartitionSummary",
    "SampleState",
    "SamplesLeasedError",
    "SchemaMismatchError",
    "StatePage",
    "StorageSummary",
    "StoreInspector",
    "StreamingDataLoader",
    "StreamingDataset",
    "TagFilter",
    "TaskCounts",
    "TaskSummary",
    "UnavailableError",
    "UnknownTaskError",
    "UnsupportedError",
    "build_data_plane_client",
    "held_claim",
    "restore_partition",
    "save_partition",
    "validate_config",
]


_LAZY = {
    "AsyncDataPlaneClient": "async_client",
    "InMemoryDataPlaneClient": "in_memory",
    "StreamingDataLoader": "streaming",
    "StreamingDataset": "streaming",
    "restore_partition": "checkpoint",
    "save_partition": "checkpoint",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        module = importlib.import_module(f"dataplane_core.{_LAZY[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
