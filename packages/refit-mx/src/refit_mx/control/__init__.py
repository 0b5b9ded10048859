"""The control plane: the server and the client for versions, workers, shards and leases."""

from refit_mx.control.access import ControlAccess as ControlAccess
from refit_mx.control.client import ControlClient as ControlClient
from refit_mx.control.client import VersionInfo as VersionInfo
from refit_mx.control.embedded import EmbeddedControlServer as EmbeddedControlServer
from refit_mx.control.heartbeat import Heartbeat as Heartbeat
from refit_mx.control.leases import VersionLease as VersionLease
from refit_mx.control.limits import Limits as Limits
from refit_mx.control.records import PayloadFormat as PayloadFormat
from refit_mx.control.records import Shard as Shard
from refit_mx.control.records import VersionState as VersionState
from refit_mx.control.records import WorkerRole as WorkerRole
from refit_mx.control.store import MemoryStore as MemoryStore
from refit_mx.control.store import SqliteStore as SqliteStore
from refit_mx.control.store import Store as Store
