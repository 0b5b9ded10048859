"""The data-plane contract: configuration, metadata, client, errors, and a client in memory.

Importing this package imports neither torch nor ray: the names that need torch are loaded when they
are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane_core.client import Capabilities, DataPlaneClient, TaskCounts
from dataplane_core.config import DataPlaneConfig, ObservabilityConfig, validate_config
from dataplane_core.errors import (
    CapacityExceeded,
    ClaimTimeoutError,
    ClosedError,
    ConfigError,
    DataPlaneError,
    DeadlineExceededError,
    DuplicateSampleError,
    InvalidRequestError,
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
from dataplane_core.ledger import (
    FieldSummary,
    PartitionSummary,
    SampleState,
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
    from dataplane_core.in_memory import InMemoryDataPlaneClient

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
    "Capabilities",
    "CapacityExceeded",
    "ClaimTimeoutError",
    "ClosedError",
    "ConfigError",
    "DataPlaneClient",
    "DataPlaneConfig",
    "DataPlaneError",
    "DeadlineExceededError",
    "DuplicateSampleError",
    "FieldSummary",
    "InMemoryDataPlaneClient",
    "InvalidRequestError",
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
    "TagFilter",
    "TaskCounts",
    "TaskSummary",
    "UnavailableError",
    "UnknownTaskError",
    "UnsupportedError",
    "build_data_plane_client",
    "validate_config",
]


def __getattr__(name: str) -> object:
    if name == "InMemoryDataPlaneClient":
        from dataplane_core.in_memory import InMemoryDataPlaneClient

        return InMemoryDataPlaneClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
