"""`MetricsDataPlaneClient`: one event per operation, and running totals.

The wrapper never holds its lock while the inner client works or a listener runs, because either
may block for as long as it likes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from opentelemetry.metrics import get_meter_provider

from dataplane_core import DataPlaneClient, ObservabilityConfig
from observability.events import Event, log_event
from observability.lane import later
from observability.operations import ObservedClient, Observer, Operation
from observability.outstanding import Outstanding, PendingPut

_SETTLING = ("acknowledge", "release", "renew")


class MetricsDataPlaneClient(ObservedClient):
    """A client that does what ``inner`` does and tells what each operation cost.

    Every call is passed on as it came, with any further keyword that ``inner`` understands, and its
    answer or error is returned as it is. The account covers what went through this object: samples
    that another client puts or clears in the same store are not seen.

    Args:
        inner: the client that does the work.
        on_event: called after each operation with a dict of

            - ``op``: register, claim_meta, get_data, check_consumption_status, put, get, clear or
              close;
            - ``partition_id``: empty for close;
            - ``n_keys``: samples named by the call; for claim_meta those claimed, for register the
              declared number, for ``clear_samples(None, ...)`` 0;
            - ``n_bytes``: bytes of the tensors put or read, of ragged ones the packed values, of
              columns that were read with their padding;
            - ``wall_ms``: duration of the call, in milliseconds;
            - ``status``: ok, timeout (the call raised a TimeoutError) or error.

            It runs in the thread of the caller, possibly in several at once. If it raises, that is
            logged and counted in ``failures``, and the operation's own outcome stands. Settling a
            claim moves no data and is no event. None: no events, totals only.
    """

    def __init__(
        self, inner: DataPlaneClient, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._account = Account()
        observers: list[Observer] = [] if on_event is None else [_Listener(on_event)]
        super().__init__(inner, [*observers, self._account])

    def snapshot(self) -> dict[str, int]:
        """The totals at this moment. Calls that raised have changed none of them.

        Returns:
            ``total_ops``, ``total_bytes``, ``total_keys``: sums over the events;
            ``bytes_outstanding``, ``n_keys_outstanding``: put and not cleared. A field of a sample
            counts once, with its last value; samples without tensors count as keys;
            ``peak_bytes_outstanding``: the most that ``bytes_outstanding`` ever was;
            ``max_bytes_per_key_seen``: the most that one sample ever held;
            ``last_put_bytes_per_key``: bytes of the last put that named samples, divided by their
            number and rounded down.
        """
        return self._account.snapshot()

    def outstanding_by_partition(self) -> dict[str, int]:
        """Bytes put and not cleared of each partition that holds samples; see `snapshot`."""
        return self._account.by_partition()


class Account(Observer):
    """The totals of one client. Threads may share it.

    What happened is noted in its order, and entered `later` or when somebody asks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[Callable[[], None]] = deque()
        self._outstanding = Outstanding()
        self._total_ops = 0
        self._total_bytes = 0
        self._total_keys = 0
        self._last_put_bytes_per_key = 0

    def snapshot(self) -> dict[str, int]:
        """See `MetricsDataPlaneClient.snapshot`."""
        with self._lock:
            self._enter_noted()
            return {
                "total_ops": self._total_ops,
                "total_bytes": self._total_bytes,
                "total_keys": self._total_keys,
                "bytes_outstanding": self._outstanding.n_bytes,
                "peak_bytes_outstanding": self._outstanding.peak_n_bytes,
                "n_keys_outstanding": self._outstanding.n_keys,
                "max_bytes_per_key_seen": self._outstanding.max_bytes_per_key,
                "last_put_bytes_per_key": self._last_put_bytes_per_key,
            }

    def by_partition(self) -> dict[str, int]:
        """See `MetricsDataPlaneClient.outstanding_by_partition`."""
        with self._lock:
            self._enter_noted()
            return dict(self._outstanding.by_partition)

    def begin(self, call: Operation) -> PendingPut | None:
        """See `Observer.begin`."""
        if call.op != "put":
            return None
        pending = PendingPut(call.partition_id)
        self._noted.append(partial(self._outstanding.begin_put, pending))
        return pending

    def end(self, call: Operation, state: PendingPut | None) -> None:
        """See `Observer.end`."""
        if call.error is None and call.op not in _SETTLING:
            ids = None if call.sample_ids is None else tuple(call.sample_ids)
            self._noted.append(partial(self._enter, call, ids, state))
        if state is not None:
            self._noted.append(partial(self._outstanding.end_put, state))
        later(get_meter_provider(), self._catch_up)

    def _catch_up(self) -> None:
        with self._lock:
            self._enter_noted()

    def _enter_noted(self) -> None:
        while self._noted:
            self._noted.popleft()()

    def _enter(
        self, call: Operation, sample_ids: Sequence[str] | None, pending: PendingPut | None
    ) -> None:
        self._total_ops += 1
        self._total_bytes += call.n_bytes
        self._total_keys += call.n_keys
        if pending is not None:
            self._outstanding.add(pending, sample_ids or (), call.put_bytes)
            if call.n_keys:
                self._last_put_bytes_per_key = call.n_bytes // call.n_keys
        elif call.op == "clear":
            self._outstanding.clear(sample_ids, call.partition_id)


class _Listener(Observer):
    """Hands events to a callback; the totals count the operation already when it is told."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event

    def end(self, call: Operation, state: None) -> None:
        """See `Observer.end`."""
        if call.op not in _SETTLING:
            self._on_event(
                {
                    "op": call.op,
                    "partition_id": call.partition_id,
                    "n_keys": call.n_keys,
                    "n_bytes": call.n_bytes,
                    "wall_ms": call.wall_s * 1000,
                    "status": call.status,
                }
            )


def wrap(client: DataPlaneClient, observability_cfg: ObservabilityConfig) -> MetricsDataPlaneClient:
    """The middleware ``metrics`` of `dataplane_core.build_data_plane_client`.

    Events go to ``observability_cfg["callback"]`` if it is there, else to `log_event`.
    """
    return MetricsDataPlaneClient(client, observability_cfg.get("callback", log_event))
