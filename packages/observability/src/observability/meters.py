"""OpenTelemetry metrics of a client's operations; docs/telemetry.md lists them.

Names of partitions become classes before they are labels, so that a run which registers a new
partition each step does not make a new time series each step.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import structlog
from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.metrics import (
    CallbackOptions,
    Meter,
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
from observability.lane import later
from observability.lifecycle import emit
from observability.metrics import Account
from observability.operations import ObservedClient, Observer, Op, Operation
from observability.origin import Origin
from observability.tracing import origins_of

logger = structlog.get_logger("observability")

MOST_CLASSES = 32
"""Classes of partitions in one process; the rest is `OTHER`."""
OTHER = "other"

_SCOPE = "rl-dataplane"
_MOST_WATCHED = 64
# Between two instruments of one collection, several times what asking takes.
_ONE_COLLECTION_S = 1.0
# A histogram takes one value at a time: a hundred thousand would keep the lane busy for seconds.
_MOST_STALENESS = 32
_SECONDS = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
_NAMES: Mapping[Op, str] = {"claim_meta": "claim", "get_data": "get"}
_Place = tuple[Hashable, str, str]
"""The identity of a store, a partition and a task."""
_Totals = dict[tuple[str, str], list[TaskCounts]]
"""By task and class of partitions."""
_VARYING = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}|[0-9a-f]{8,}|\d+")


@dataclass
class Asked:
    """What stores were asked at one collection.

    Attributes:
        places: those that were answered.
        away: identities of stores that could not be reached.
    """

    places: set[_Place] = field(default_factory=set)
    away: set[Hashable] = field(default_factory=set)


class PartitionClasses:
    """Turns names of partitions into a bounded number of labels. Threads may share it."""

    def __init__(self, most: int = MOST_CLASSES) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def of(self, partition_id: str) -> str:
        """The label: the name with what varies replaced by ``#``."""
        label = _VARYING.sub("#", partition_id)[:64]
        if label not in self._known:
            with self._lock:
                if len(self._known) >= self._most:
                    return OTHER
                self._known.add(label)
        return label


class MeterDataPlaneClient(ObservedClient):
    """A client whose operations are OpenTelemetry metrics.

    Args:
        inner: the client that does the work.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Meters(inner)])


class Meters(Observer):
    """Records the metrics.

    What is outstanding, ready and consumed is asked of the store when metrics are exported, ready
    and consumed for the tasks that claim through this client. Where a store does not tell its
    bytes, what went through this client is counted. The clients of a process are told together;
    one that was closed is not asked any more.

    Args:
        client: is asked.

    Attributes:
        meter: that its metrics are told by.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        client = as_client(client)
        self._client = client
        self._store = as_client(_innermost(client))
        self._store_key = self._store.store_key
        self._failed = False
        self._classes = PartitionClasses()
        self._account = None if _tells_bytes(client) else Account()
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
            description="From a sample's put to its claim.",
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
            self._account.end(call, state)  # type: ignore[arg-type]  # what its begin returned
        if call.op == "close":
            _live.pop(id(self), None)
            return
        # The context that is current now is that of the span an exemplar names.
        record = partial(self._record, call, otel_context.get_current())
        if call.error is not None:
            record()  # it holds on to what was to be put
            return
        later(get_meter_provider(), record)
        if call.op == "claim_meta":
            self._claimed(call)

    def _record(self, call: Operation, context: Context) -> None:
        partition = self._classes.of(call.partition_id)
        attributes = {
            "messaging.operation.name": _NAMES.get(call.op, call.op),
            "messaging.destination.name": partition,
        }
        if call.error is not None:
            attributes[telemetry.ERROR_TYPE] = type(call.error).__qualname__
        self._duration.record(call.wall_s, attributes, context)
        if call.error is None and call.n_bytes:
            direction = "put" if call.op == "put" else "get"
            labels = {"dataplane.direction": direction, "messaging.destination.name": partition}
            self._io.add(call.n_bytes, labels, context)

    def _claimed(self, call: Operation) -> None:
        task = call.tasks[0]
        place = call.partition_id, task
        with self._lock:
            self._watched[place] = list(call.fields)
            self._watched.move_to_end(place)
            if len(self._watched) > _MOST_WATCHED:
                self._watched.popitem(last=False)
        if not _listened():
            return  # spare the store the question
        now = time.time_ns()
        for origin, _ in origins_of(call):
            self._age.record(max(0, now - origin.time_ns) / 1e9, {"dataplane.task": task})

    @property
    def store_key(self) -> Hashable:
        """Equal for the clients of one store."""
        return self._store_key

    def outstanding(self) -> Iterator[tuple[str, str, int]]:
        """Bytes put and not cleared: label, its value, and how many.

        By ``dataplane.unit`` as the store tells them, else by class of partitions.
        """
        if self._account is None:
            for unit in self._storage():
                yield "dataplane.unit", unit.name, unit.used
            return
        for partition_id, n_bytes in self._account.by_partition().items():
            yield "messaging.destination.name", self._classes.of(partition_id), n_bytes

    def counts(self, asked: Asked) -> Iterator[tuple[str, str, TaskCounts]]:
        """Of each partition and task that claims through this client its class, the task, and its
        counts; but for those that were ``asked``, which it adds to."""
        with self._lock:
            watched = list(self._watched.items())
        for (partition_id, task), fields in watched:
            if self._store_key in asked.away:
                return
            place = self._store_key, partition_id, task
            if place in asked.places:
                continue
            try:
                counts = self._client.count_samples(partition_id, task, fields)
            except (PartitionNotFoundError, UnknownTaskError, UnsupportedError):
                with self._lock:
                    self._watched.pop((partition_id, task), None)
            except (UnavailableError, DeadlineExceededError):
                asked.away.add(self._store_key)  # each question would wait as long
            except DataPlaneError:
                pass  # this client was closed, for example; another of the store may answer
            except Exception:  # noqa: BLE001  # whatever it raises, the others are asked
                self._tell_failed()
            else:
                asked.places.add(place)
                yield self._classes.of(partition_id), task, counts

    def _storage(self) -> list[StorageSummary]:
        try:
            return self._client.list_storage()
        except DataPlaneError:
            return []  # it went away, for example
        except Exception:  # noqa: BLE001  # whatever it raises, the others are asked
            self._tell_failed()
            return []

    def _tell_failed(self) -> None:
        """A third party's adapter raises what it likes; an export goes on."""
        if not self._failed:
            self._failed = True
            logger.exception("store_not_counted", store=type(self._store).__name__)


_live: WeakValueDictionary[int, Meters] = WeakValueDictionary()
"""Those whose clients are in use, in the order in which they were made."""


def _observe(meter: Meter) -> None:
    """Make what is asked at an export. Of one name an SDK makes one instrument, and keeps the
    callbacks that came with it first, so they are about all that are live."""
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
        description="Samples that a task could claim now.",
    )
    meter.create_observable_gauge(
        "dataplane.consumed",
        [partial(counts.observe, "acknowledged")],
        unit="{sample}",
        description="Samples present that a task has consumed.",
    )


def _live_of(meter: Meter) -> list[Meters]:
    """Those of the same SDK: a forked child has those of its parent as well."""
    own = _sdks(meter)
    found = (reference() for reference in _live.valuerefs())
    return [one for one in found if one is not None and _sdks(one.meter) is own]


def _sdks(meter: Meter) -> object:
    """What stands behind a meter that was made before an SDK was set up."""
    return getattr(meter, "_real_meter", None) or meter


def _observe_outstanding(meter: Meter, options: CallbackOptions) -> Iterable[Observation]:
    units: dict[tuple[Hashable, str], int] = {}
    totals: Counter[tuple[str, str]] = Counter()
    for one in _live_of(meter):
        for key, label, n_bytes in one.outstanding():
            if key == "dataplane.unit":
                units[one.store_key, label] = n_bytes  # every client of a store is told the same
            else:
                totals[key, label] += n_bytes
    for (_, unit), n_bytes in units.items():
        totals["dataplane.unit", unit] += n_bytes
    for (key, label), n_bytes in totals.items():
        yield Observation(n_bytes, {key: label})


class _Counts:
    """What two instruments tell at one collection, asked once."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        # By the instrument that has not told them yet: when they were asked, and what came of it.
        self._left: dict[str, tuple[float, _Totals]] = {}

    def observe(self, state: str, options: CallbackOptions) -> Iterable[Observation]:
        """One instrument's: of each task and class of partitions the samples of a state."""
        asked_s, totals = self._left.pop(state, (-math.inf, {}))
        if time.monotonic() - asked_s > _ONE_COLLECTION_S:
            totals = self._ask()
            other = "acknowledged" if state == "ready" else "ready"
            self._left[other] = time.monotonic(), totals
        for (task, label), counts in totals.items():
            samples = sum(getattr(one, state) for one in counts)
            labels = {"dataplane.task": task, "messaging.destination.name": label}
            yield Observation(samples, labels)

    def _ask(self) -> _Totals:
        # A partition of one store is there once, however many clients claim from it; the newest
        # of them knows best with which fields.
        asked = Asked()
        totals: _Totals = {}
        for one in reversed(_live_of(self._meter)):
            for label, task, counts in one.counts(asked):
                totals.setdefault((task, label), []).append(counts)
        return totals


def _listened() -> bool:
    """Whether an SDK is set up: until then the provider is one of the API's own classes."""
    return not type(get_meter_provider()).__module__.startswith("opentelemetry.metrics")


def _innermost(client: DataPlaneClient) -> DataPlaneClient:
    """The client below what wraps it."""
    while isinstance(inner := getattr(client, "inner", None), DataPlaneClient):
        client = inner
    return client


def _tells_bytes(client: DataPlaneClient) -> bool:
    try:
        return bool(client.list_storage())
    except DataPlaneError:
        return False


def trained(client: DataPlaneClient, meta: KVBatchMeta, *, field: str, task: str = "train") -> None:
    """Tell that an optimiser step used samples, and how old the weights are that made them.

    Args:
        client: of the store that holds them.
        meta: the samples.
        field: one that generation wrote; its puts tell the version of the weights.
        task: what trained.
    """
    emit("trained", meta.partition_id, meta.sample_ids, task=task)
    version = telemetry.step_facts().get(telemetry.WEIGHT_VERSION)
    client = as_client(client)
    if not isinstance(version, int) or not client.capabilities.origins or not _listened():
        return
    try:
        found = client.read_origins(meta.sample_ids, meta.partition_id, [field])
    except DataPlaneError:
        return  # nothing of observability ends a training step
    context = otel_context.get_current()
    later(get_meter_provider(), partial(_record_staleness, version, task, found, context))


def _record_staleness(
    version: int, task: str, origins: Mapping[str, int], context: Context
) -> None:
    by_staleness: dict[int, int] = {}
    for text, count in origins.items():
        origin = Origin.parsed(text)
        if origin is not None and origin.weight_version is not None:
            stale = version - origin.weight_version
            by_staleness[stale] = by_staleness.get(stale, 0) + count
    staleness = get_meter(_SCOPE).create_histogram(
        "rl.staleness",
        unit="{version}",
        description="Versions between the weights that generated samples and those trained.",
        explicit_bucket_boundaries_advisory=[0, 1, 2, 4, 8, 16, 32],
    )
    for stale, count in _in_proportion(by_staleness, _MOST_STALENESS).items():
        for _ in range(count):
            staleness.record(stale, {"dataplane.task": task}, context)


def _in_proportion(counts: Mapping[int, int], most: int) -> dict[int, int]:
    """Scale down to ``most`` in all, and none to nothing."""
    total = sum(counts.values())
    if total <= most:
        return dict(counts)
    return {key: max(1, round(count * most / total)) for key, count in counts.items()}
