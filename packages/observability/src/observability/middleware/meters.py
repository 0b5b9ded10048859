"""OpenTelemetry metrics of a client's operations; docs/telemetry.md lists them.

Labels hold classes of partitions instead of names. Otherwise a run that registers a partition per
step would create a time series per step.
"""

from __future__ import annotations

import math
import re
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import structlog
from opentelemetry.metrics import (
    CallbackOptions,
    Meter,
    MeterProvider,
    Observation,
    get_meter,
    get_meter_provider,
)

from dataplane_core import (
    DataPlaneClient,
    DataPlaneError,
    DeadlineExceededError,
    KVBatchMeta,
    PartitionNotFoundError,
    StorageSummary,
    TaskCounts,
    UnavailableError,
    UnknownTaskError,
    UnsupportedError,
    telemetry,
)
from dataplane_core.documented_client import as_client
from observability.middleware.lifecycle import emit
from observability.middleware.metrics import Account
from observability.middleware.observed_client import ObservedClient
from observability.middleware.operation import Observer, Op, Operation
from observability.middleware.origin import Origin
from observability.middleware.tracing import origins_of

logger = structlog.get_logger("observability")

MAX_CLASSES = 32
"""Maximum number of partition classes of one client; further ones share `OTHER`."""
OTHER = "other"

_SCOPE = "rl-dataplane"
_MAX_WATCHED = 64
"""Maximum number of pairs of partition and task that one client queries."""
# Observations of two instruments within this time belong to one collection; queries take far less.
_ONE_COLLECTION_S = 1.0
# Maximum number of values recorded per step: a histogram takes one value at a time, and a hundred
# thousand would take a second.
_MAX_STALENESS = 32
_SECONDS = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
_NAMES: Mapping[Op, str] = {"claim_meta": "claim", "get_data": "get"}
_Place = tuple[Hashable, str, str]
"""The identity of a store, a partition and a task."""
_Totals = dict[tuple[str, str], list[TaskCounts]]
"""Counts by task and class of partitions."""
_VARYING = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-f]{8,}|\d+")


@dataclass
class Collected:
    """The state of one collection of metrics.

    Attributes:
        places: triples of store, partition and task whose counts are known.
        unreachable: identities of stores that could not be reached.
    """

    places: set[_Place] = field(default_factory=set)
    unreachable: set[Hashable] = field(default_factory=set)


class PartitionClasses:
    """A thread-safe mapping of partition names to a bounded number of labels."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def of(self, partition_id: str) -> str:
        """Return the label: the name with numbers, hashes and UUIDs replaced by ``#``."""
        label = _VARYING.sub("#", partition_id)[:64]
        if label not in self._known:
            with self._lock:
                if len(self._known) >= MAX_CLASSES and label not in self._known:
                    return OTHER
                self._known.add(label)
        return label


class MeterDataPlaneClient(ObservedClient):
    """A client that records OpenTelemetry metrics of its operations.

    Args:
        inner: the wrapped client.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Meters(inner)])


class Meters(Observer):
    """An observer that records metrics.

    At each export of metrics, the store is queried for outstanding bytes, and for the ready and
    acknowledged samples of the tasks that claim through this client. For a store that does not
    report its bytes, the puts and clears of this client are counted. The values of all open clients
    of a process are summed.

    Args:
        client: the client to query.

    Attributes:
        meter: the meter of its metrics.
        store_key: identity of the store; equal for all of its clients.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        client = as_client(client)
        self._client = client
        self._store = as_client(_innermost(client))
        self.store_key = self._store.store_key
        self._failed = False
        self._classes = PartitionClasses()
        self._account = None if _reports_bytes(client) else Account()
        self._watched: OrderedDict[tuple[str, str], list[str]] = OrderedDict()
        self._lock = threading.Lock()
        meter = get_meter(_SCOPE)
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration",
            unit="s",
            description="Duration of data-plane operations.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._io = meter.create_counter(
            "dataplane.io", unit="By", description="Bytes of tensors put and read."
        )
        self._age = meter.create_histogram(
            "dataplane.claim.age",
            unit="s",
            description="Time from the put of a sample to its claim.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self.meter = meter
        _live[id(self)] = self
        _observe(meter)

    def begin(self, call: Operation) -> object:
        """See `Observer.begin`."""
        return None if self._account is None else self._account.begin(call)

    def end(self, call: Operation, state: object) -> None:
        """See `Observer.end`."""
        if self._account is not None:
            self._account.end(call, state)  # type: ignore[arg-type]  # from its own `begin`
        if call.op == "close":
            _live.pop(id(self), None)
            return
        self._record(call)
        if call.error is None and call.op == "claim_meta":
            self._claimed(call)

    def _record(self, call: Operation) -> None:
        partition = self._classes.of(call.partition_id)
        attributes = {
            "messaging.operation.name": _NAMES.get(call.op, call.op),
            "messaging.destination.name": partition,
        }
        if call.error is not None:
            attributes[telemetry.ERROR_TYPE] = type(call.error).__qualname__
        self._duration.record(call.wall_s, attributes)
        if call.error is None and call.n_bytes:
            direction = "put" if call.op == "put" else "get"
            labels = {"dataplane.direction": direction, "messaging.destination.name": partition}
            self._io.add(call.n_bytes, labels)

    def _claimed(self, call: Operation) -> None:
        task = call.tasks[0]
        place = call.partition_id, task
        with self._lock:
            self._watched[place] = list(call.fields)
            self._watched.move_to_end(place)
            if len(self._watched) > _MAX_WATCHED:
                self._watched.popitem(last=False)
        if not has_sdk(get_meter_provider()):
            return  # nothing to record, so do not query the store
        now = time.time_ns()
        for origin, _ in origins_of(call):
            self._age.record(max(0, now - origin.time_ns) / 1e9, {"dataplane.task": task})

    def outstanding(self) -> Iterator[tuple[str, str, int]]:
        """Yield name and value of a label, and the bytes put and not cleared.

        The label is ``dataplane.unit`` if the store reports its bytes, else
        ``messaging.destination.name`` with the class of partition.
        """
        if self._account is None:
            for unit in self._storage():
                yield "dataplane.unit", unit.name, unit.used
            return
        for partition_id, n_bytes in self._account.by_partition().items():
            yield "messaging.destination.name", self._classes.of(partition_id), n_bytes

    def counts(self, collected: Collected) -> Iterator[tuple[str, str, TaskCounts]]:
        """Yield partition class, task and counts for each place that this client claims from.

        Skip places that are in ``collected`` already, and add the new ones to it.
        """
        with self._lock:
            watched = list(self._watched.items())
        for (partition_id, task), fields in watched:
            if self.store_key in collected.unreachable:
                return
            place = self.store_key, partition_id, task
            if place in collected.places:
                continue
            try:
                counts = self._client.count_samples(partition_id, task, fields)
            except (PartitionNotFoundError, UnknownTaskError, UnsupportedError):
                with self._lock:
                    self._watched.pop((partition_id, task), None)
            except (UnavailableError, DeadlineExceededError):
                collected.unreachable.add(self.store_key)  # further queries would block as well
            except DataPlaneError:
                pass  # for example, this client was closed; another client may answer
            except Exception:  # noqa: BLE001  # a failing store must not stop the others' queries
                self._log_failed()
            else:
                collected.places.add(place)
                yield self._classes.of(partition_id), task, counts

    def _storage(self) -> list[StorageSummary]:
        try:
            return self._client.list_storage()
        except DataPlaneError:
            return []  # for example, the store is unreachable
        except Exception:  # noqa: BLE001  # a failing store must not stop the others' queries
            self._log_failed()
            return []

    def _log_failed(self) -> None:
        """Log the first failure: adapters may raise anything, and the export must continue."""
        if not self._failed:
            self._failed = True
            logger.error(
                "store_not_counted",
                store=type(self._store).__name__,
                stack=traceback.format_exc(),
            )


_live: WeakValueDictionary[int, Meters] = WeakValueDictionary()
"""The meters of open clients, in order of creation."""


def _observe(meter: Meter) -> None:
    """Create the observable instruments, whose callbacks cover all open clients.

    An SDK has one instrument per name, with the callbacks of its first creation.
    """
    meter.create_observable_up_down_counter(
        "dataplane.outstanding",
        [partial(_observe_outstanding, meter)],
        unit="By",
        description="Bytes put and not cleared.",
    )
    counts = _Counts(meter)
    meter.create_observable_gauge(
        "dataplane.ready",
        [partial(counts.observe, "ready")],
        unit="{sample}",
        description="Samples that a task can claim now.",
    )
    meter.create_observable_gauge(
        "dataplane.acknowledged",
        [partial(counts.observe, "acknowledged")],
        unit="{sample}",
        description="Samples in the store that a task has acknowledged.",
    )


def _live_of(meter: Meter) -> list[Meters]:
    """Return the live meters of the same SDK: a forked child also has those of its parent."""
    own = _real_meter(meter)
    live = (reference() for reference in _live.valuerefs())
    return [meters for meters in live if meters is not None and _real_meter(meters.meter) is own]


def _real_meter(meter: Meter) -> object:
    """Return the SDK's meter behind a proxy that was made before the SDK was set up."""
    return getattr(meter, "_real_meter", None) or meter


def _observe_outstanding(meter: Meter, options: CallbackOptions) -> Iterable[Observation]:
    units: dict[tuple[Hashable, str], int] = {}
    totals: Counter[tuple[str, str]] = Counter()
    for meters in _live_of(meter):
        for key, label, n_bytes in meters.outstanding():
            if key == "dataplane.unit":
                units[meters.store_key, label] = n_bytes  # the same for every client of a store
            else:
                totals[key, label] += n_bytes
    for (_, unit), n_bytes in units.items():
        totals["dataplane.unit", unit] += n_bytes
    for (key, label), n_bytes in totals.items():
        yield Observation(n_bytes, {key: label})


class _Counts:
    """Counts for the two instruments of one collection, from one query to each store."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        # Key: the state whose instrument has yet to read the last query. Value: the query's time
        # and totals.
        self._pending: dict[str, tuple[float, _Totals]] = {}

    def observe(self, state: str, options: CallbackOptions) -> Iterable[Observation]:
        """Yield the samples in a state, per task and class of partitions."""
        queried_s, totals = self._pending.pop(state, (-math.inf, {}))
        if time.monotonic() - queried_s > _ONE_COLLECTION_S:
            totals = self._query()
            other = "acknowledged" if state == "ready" else "ready"
            self._pending[other] = time.monotonic(), totals
        for (task, label), counts in totals.items():
            samples = sum(getattr(each, state) for each in counts)
            labels = {"dataplane.task": task, "messaging.destination.name": label}
            yield Observation(samples, labels)

    def _query(self) -> _Totals:
        # A partition counts once, however many clients claim from it. Newest client first: its
        # required fields are the most recent.
        collected = Collected()
        totals: _Totals = {}
        for meters in reversed(_live_of(self._meter)):
            for label, task, counts in meters.counts(collected):
                totals.setdefault((task, label), []).append(counts)
        return totals


def has_sdk(provider: MeterProvider) -> bool:
    """Return whether an SDK is set up: until then the provider is a class of the API."""
    return not type(provider).__module__.startswith("opentelemetry.metrics")


def _innermost(client: DataPlaneClient) -> DataPlaneClient:
    """Return the client below all wrappers."""
    while isinstance(inner := getattr(client, "inner", None), DataPlaneClient):
        client = inner
    return client


def _reports_bytes(client: DataPlaneClient) -> bool:
    try:
        return bool(client.list_storage())
    except DataPlaneError:
        return False


def record_trained(
    client: DataPlaneClient, meta: KVBatchMeta, *, field: str, task: str = "train"
) -> None:
    """Record that an optimizer step consumed samples, and their staleness.

    Args:
        client: client of the store that holds the samples.
        meta: the samples.
        field: a field written by generation; its puts carry the weight version.
        task: the task that trained.
    """
    emit("trained", meta.partition_id, meta.sample_ids, task=task)
    version = telemetry.step_facts().get(telemetry.WEIGHT_VERSION)
    client = as_client(client)
    if (
        not isinstance(version, int)
        or not client.capabilities.origins
        or not has_sdk(get_meter_provider())
    ):
        return
    try:
        origins = client.read_origins(meta.sample_ids, meta.partition_id, [field])
    except DataPlaneError:
        return  # observability must not fail a training step
    by_staleness: dict[int, int] = {}
    for text, count in origins.items():
        origin = Origin.parsed(text)
        if origin is not None and origin.weight_version is not None:
            stale = version - origin.weight_version
            by_staleness[stale] = by_staleness.get(stale, 0) + count
    staleness = get_meter(_SCOPE).create_histogram(
        "rl.staleness",
        unit="{version}",
        description="Weight versions between a sample's generation and its training.",
        explicit_bucket_boundaries_advisory=[0, 1, 2, 4, 8, 16, 32],
    )
    for stale, count in _in_proportion(by_staleness, _MAX_STALENESS).items():
        for _ in range(count):
            staleness.record(stale, {"dataplane.task": task})


def _in_proportion(counts: Mapping[int, int], maximum: int) -> dict[int, int]:
    """Scale counts down to a sum of about ``maximum``, each at least 1."""
    total = sum(counts.values())
    if total <= maximum:
        return dict(counts)
    return {key: max(1, round(count * maximum / total)) for key, count in counts.items()}
