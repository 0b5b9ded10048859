"""OpenTelemetry metrics of a client's operations; docs/telemetry.md lists them.

Metrics are labeled with the pattern of a partition's name: the name with ``#`` in place of numbers
and hexadecimal ids. With names, a run with one partition per step would add time series each step.
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
from observability.middleware.metrics import Totals
from observability.middleware.observed_client import ObservedClient
from observability.middleware.operation import Observer, Op, Operation
from observability.middleware.origin import Origin
from observability.middleware.tracing import origins_of

logger = structlog.get_logger("observability")

MAX_PATTERNS = 32
"""Maximum number of patterns of one client; all further ones are replaced by `OTHER`."""
OTHER = "other"

_SCOPE = "rl-dataplane"
_MAX_WATCHED = 64
"""Maximum number of pairs of partition and task whose counts one client queries."""
# Callbacks of two instruments within this time belong to one collection.
_ONE_COLLECTION_S = 1.0
# Maximum number of values of staleness recorded per call of `record_trained`: 100,000 calls of a
# histogram would take a second.
_MAX_STALENESS_VALUES = 32
_BOUNDARIES_S = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
_OPERATION_NAMES: Mapping[Op, str] = {"claim_meta": "claim", "get_data": "get"}
_TaskKey = tuple[Hashable, str, str]
"""A task in a store: the store's identity, the partition and the name of the task."""
_CountsByLabels = dict[tuple[str, str], list[TaskCounts]]
"""Counts by name of the task and pattern of the partition."""
_NUMBER_HASH_OR_UUID = re.compile(
    r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-f]{8,}|\d+"
)


@dataclass
class CollectionState:
    """The progress of one collection of metrics.

    Attributes:
        counted_tasks: tasks whose samples were counted in this collection.
        unreachable_stores: identities of stores that a query could not reach.
    """

    counted_tasks: set[_TaskKey] = field(default_factory=set)
    unreachable_stores: set[Hashable] = field(default_factory=set)


class NamePatterns:
    """A thread-safe mapping of partition names to at most `MAX_PATTERNS` patterns and `OTHER`."""

    def __init__(self) -> None:
        self._patterns: set[str] = set()
        self._lock = threading.Lock()

    def pattern_of(self, partition_id: str) -> str:
        """Return the name with numbers, hashes and UUIDs replaced by ``#``."""
        pattern = _NUMBER_HASH_OR_UUID.sub("#", partition_id)[:64]
        if pattern not in self._patterns:
            with self._lock:
                if len(self._patterns) >= MAX_PATTERNS and pattern not in self._patterns:
                    return OTHER
                self._patterns.add(pattern)
        return pattern


class MeterDataPlaneClient(ObservedClient):
    """A client that records OpenTelemetry metrics of its operations.

    Args:
        inner: the wrapped client.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Meters(inner)])


class Meters(Observer):
    """An observer that records metrics.

    At each export of metrics, the store is queried for its bytes, and for the ready and
    acknowledged samples of each task that claims through this client. If the store does not report
    its bytes, the bytes that this client put and did not clear are reported instead.

    The values of all open clients of a process are summed. But the bytes of a store and the samples
    of a task are not summed: they count once, even if several clients report them.

    Args:
        client: the client to query.

    Attributes:
        meter: the meter that the instruments were created with.
        store_key: identity of the store; equal for all clients of the store.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        client = as_client(client)
        self._client = client
        self._store = as_client(_innermost(client))
        self.store_key = self._store.store_key
        self._is_failure_logged = False
        self._patterns = NamePatterns()
        self._totals = None if self._storage() else Totals()
        self._watched: OrderedDict[tuple[str, str], list[str]] = OrderedDict()
        self._lock = threading.Lock()
        meter = get_meter(_SCOPE)
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration",
            unit="s",
            description="Duration of data-plane operations.",
            explicit_bucket_boundaries_advisory=_BOUNDARIES_S,
        )
        self._io = meter.create_counter(
            "dataplane.io", unit="By", description="Bytes of tensors put and read."
        )
        self._age = meter.create_histogram(
            "dataplane.claim.age",
            unit="s",
            description="Time from the put of a sample to its claim.",
            explicit_bucket_boundaries_advisory=_BOUNDARIES_S,
        )
        self.meter = meter
        _open_meters[id(self)] = self
        _create_observable_instruments(meter)

    def begin(self, call: Operation) -> object:
        return None if self._totals is None else self._totals.begin(call)

    def end(self, call: Operation, state: object) -> None:
        if self._totals is not None:
            self._totals.end(call, state)  # type: ignore[arg-type]  # from its own `begin`
        if call.op == "close":
            _open_meters.pop(id(self), None)
            return
        self._record(call)
        if call.error is None and call.op == "claim_meta":
            self._record_claim(call)

    def _record(self, call: Operation) -> None:
        partition = self._patterns.pattern_of(call.partition_id)
        attributes = {
            "messaging.operation.name": _OPERATION_NAMES.get(call.op, call.op),
            "messaging.destination.name": partition,
        }
        if call.error is not None:
            attributes[telemetry.ERROR_TYPE] = type(call.error).__qualname__
        self._duration.record(call.wall_s, attributes)
        if call.error is None and call.n_bytes:
            direction = "put" if call.op == "put" else "get"
            labels = {"dataplane.direction": direction, "messaging.destination.name": partition}
            self._io.add(call.n_bytes, labels)

    def _record_claim(self, call: Operation) -> None:
        task = call.tasks[0]
        pair = call.partition_id, task
        with self._lock:
            self._watched[pair] = list(call.fields)
            self._watched.move_to_end(pair)
            if len(self._watched) > _MAX_WATCHED:
                self._watched.popitem(last=False)
        if not has_sdk(get_meter_provider()):
            return  # nothing to record, so do not query the store
        now = time.time_ns()
        for origin, _ in origins_of(call):
            self._age.record(max(0, now - origin.time_ns) / 1e9, {"dataplane.task": task})

    def outstanding(self) -> Iterator[tuple[str, str, int]]:
        """Yield the bytes put and not cleared, each with the name and value of its label.

        The label is ``dataplane.unit`` if the store reports its bytes. Otherwise it is
        ``messaging.destination.name``, and its value is the pattern of a partition.
        """
        if self._totals is None:
            for unit in self._storage():
                yield "dataplane.unit", unit.name, unit.used
            return
        for partition_id, n_bytes in self._totals.by_partition().items():
            yield "messaging.destination.name", self._patterns.pattern_of(partition_id), n_bytes

    def counts(self, collection: CollectionState) -> Iterator[tuple[str, str, TaskCounts]]:
        """Yield partition pattern, task and counts for each task that claims through this client.

        Tasks that were counted earlier in this collection are skipped.
        """
        with self._lock:
            watched = list(self._watched.items())
        for (partition_id, task), fields in watched:
            if self.store_key in collection.unreachable_stores:
                return
            key = self.store_key, partition_id, task
            if key in collection.counted_tasks:
                continue
            try:
                counts = self._client.inspector.count_samples(partition_id, task, fields)
            except (PartitionNotFoundError, UnknownTaskError, UnsupportedError):
                with self._lock:
                    self._watched.pop((partition_id, task), None)
            except (UnavailableError, DeadlineExceededError):
                # A further query of this store would block as well.
                collection.unreachable_stores.add(self.store_key)
            except DataPlaneError:
                pass  # for example, this client was closed; another client may count the task
            except Exception:  # noqa: BLE001  # a failing store must not stop the queries of others
                self._log_first_failure()
            else:
                collection.counted_tasks.add(key)
                yield self._patterns.pattern_of(partition_id), task, counts

    def _storage(self) -> list[StorageSummary]:
        try:
            return self._client.inspector.list_storage()
        except DataPlaneError:
            return []  # for example, the store is unreachable
        except Exception:  # noqa: BLE001  # a failing store must not stop the queries of others
            self._log_first_failure()
            return []

    def _log_first_failure(self) -> None:
        """Log the current exception, unless one was logged before."""
        if not self._is_failure_logged:
            self._is_failure_logged = True
            logger.error(
                "store_not_counted",
                store=type(self._store).__name__,
                stack=traceback.format_exc(),
            )


_open_meters: WeakValueDictionary[int, Meters] = WeakValueDictionary()
"""The `Meters` of open clients by id, in order of creation."""


def _create_observable_instruments(meter: Meter) -> None:
    """Create the observable instruments. Their callbacks report all open clients.

    Only the first call has an effect: an SDK keeps the first instrument of a name.
    """
    meter.create_observable_up_down_counter(
        "dataplane.outstanding",
        [partial(_observe_outstanding, meter)],
        unit="By",
        description="Bytes put and not cleared.",
    )
    callbacks = _CountCallbacks(meter)
    meter.create_observable_gauge(
        "dataplane.ready",
        [partial(callbacks.observe, "ready")],
        unit="{sample}",
        description="Samples that a task can claim now.",
    )
    meter.create_observable_gauge(
        "dataplane.acknowledged",
        [partial(callbacks.observe, "acknowledged")],
        unit="{sample}",
        description="Samples in the store that a task has acknowledged.",
    )


def _meters_of_same_sdk(meter: Meter) -> list[Meters]:
    """Return the open `Meters` of the meter's SDK.

    A forked child also has the `Meters` of its parent, which belong to the parent's SDK.
    """
    sdk_meter = _sdk_meter(meter)
    all_meters = (reference() for reference in _open_meters.valuerefs())
    return [
        meters
        for meters in all_meters
        if meters is not None and _sdk_meter(meters.meter) is sdk_meter
    ]


def _sdk_meter(meter: Meter) -> object:
    """Return the SDK's meter behind a meter, which is a proxy if created before the SDK's setup."""
    return getattr(meter, "_real_meter", None) or meter


def _observe_outstanding(meter: Meter, options: CallbackOptions) -> Iterable[Observation]:
    units: dict[tuple[Hashable, str], int] = {}
    totals: Counter[tuple[str, str]] = Counter()
    for meters in _meters_of_same_sdk(meter):
        for label, value, n_bytes in meters.outstanding():
            if label == "dataplane.unit":
                units[meters.store_key, value] = n_bytes  # the same for every client of a store
            else:
                totals[label, value] += n_bytes
    for (_, unit), n_bytes in units.items():
        totals["dataplane.unit", unit] += n_bytes
    for (label, value), n_bytes in totals.items():
        yield Observation(n_bytes, {label: value})


class _CountCallbacks:
    """The callbacks of ``dataplane.ready`` and ``dataplane.acknowledged``.

    In each collection, the first callback queries the stores, and the second uses the same counts.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        # By state: time and result of the last query, until its callback has reported them.
        self._unused: dict[str, tuple[float, _CountsByLabels]] = {}

    def observe(self, state: str, options: CallbackOptions) -> Iterable[Observation]:
        """Yield the number of samples in a state, per task and pattern of partitions."""
        queried_s, counts_by_labels = self._unused.pop(state, (-math.inf, {}))
        if time.monotonic() - queried_s > _ONE_COLLECTION_S:
            counts_by_labels = self._query()
            other_state = "acknowledged" if state == "ready" else "ready"
            self._unused[other_state] = time.monotonic(), counts_by_labels
        for (task, pattern), counts in counts_by_labels.items():
            samples = sum(getattr(each, state) for each in counts)
            labels = {"dataplane.task": task, "messaging.destination.name": pattern}
            yield Observation(samples, labels)

    def _query(self) -> _CountsByLabels:
        """Return the counts of the tasks of all open clients, each task once."""
        collection = CollectionState()
        counts_by_labels: _CountsByLabels = {}
        # The newest client is queried first, because its required fields are the most recent.
        for meters in reversed(_meters_of_same_sdk(self._meter)):
            for pattern, task, counts in meters.counts(collection):
                counts_by_labels.setdefault((task, pattern), []).append(counts)
        return counts_by_labels


def has_sdk(provider: MeterProvider) -> bool:
    """Return whether a provider belongs to an SDK, not to OpenTelemetry's API."""
    return not type(provider).__module__.startswith("opentelemetry.metrics")


def _innermost(client: DataPlaneClient) -> DataPlaneClient:
    """Return the client below all wrappers."""
    while isinstance(inner := getattr(client, "inner", None), DataPlaneClient):
        client = inner
    return client


def record_trained(
    client: DataPlaneClient, meta: KVBatchMeta, *, field: str, task: str = "train"
) -> None:
    """Record that an optimizer step consumed samples, and their staleness.

    Args:
        client: client of the store that holds the samples.
        meta: the samples.
        field: a field that the generation put. Its origin has the samples' weight version.
        task: name of the task that trains.
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
        return  # for example, the store is unreachable: the training step must not fail
    except Exception:  # noqa: BLE001  # an adapter may raise anything
        logger.error("staleness_not_recorded", stack=traceback.format_exc())
        return
    samples_by_staleness: dict[int, int] = {}
    for text, count in origins.items():
        origin = Origin.parse(text)
        if origin is not None and origin.weight_version is not None:
            staleness = version - origin.weight_version
            samples_by_staleness[staleness] = samples_by_staleness.get(staleness, 0) + count
    histogram = get_meter(_SCOPE).create_histogram(
        "rl.staleness",
        unit="{version}",
        description="Weight versions between a sample's generation and its training.",
        explicit_bucket_boundaries_advisory=[0, 1, 2, 4, 8, 16, 32],
    )
    recorded_values = _scaled_down(samples_by_staleness, _MAX_STALENESS_VALUES)
    for staleness, count in recorded_values.items():
        for _ in range(count):
            histogram.record(staleness, {"dataplane.task": task})


def _scaled_down(counts: Mapping[int, int], max_sum: int) -> dict[int, int]:
    """Scale counts down in proportion if their sum exceeds ``max_sum``; keep each at least 1.

    The new sum is about ``max_sum``.
    """
    total = sum(counts.values())
    if total <= max_sum:
        return dict(counts)
    return {key: max(1, round(count * max_sum / total)) for key, count in counts.items()}
