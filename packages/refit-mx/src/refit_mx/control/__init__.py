"""The control plane: the server and the client for versions, workers, shards and leases."""

from refit_mx.control.access import ControlAccess
from refit_mx.control.client import ControlClient, VersionInfo
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.control.heartbeat import Heartbeat
from refit_mx.control.leases import VersionLease
from refit_mx.control.limits import Limits
from refit_mx.control.records import PayloadFormat, Shard, VersionState, WorkerRole
from refit_mx.control.store import MemoryStore, SqliteStore, Store

__all__ = [
    "ControlAccess",
    "ControlClient",
    "EmbeddedControlServer",
    "Heartbeat",
    "Limits",
    "MemoryStore",
    "PayloadFormat",
    "Shard",
    "SqliteStore",
    "Store",
    "VersionInfo",
    "VersionLease",
    "VersionState",
    "WorkerRole",
]
