"""`MetricsDataPlaneClient`: one event per operation, and running totals.

No lock is held while the inner client or a listener runs: either may block indefinitely.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias  # Any: ObservabilityConfig.callback takes an open dict

import structlog

from dataplane_core import DataPlaneClient, ObservabilityConfig
from observability.middleware.observed_client import ObservedClient
from observability.middleware.operation import Observer, Operation
from observability.middleware.outstanding import Outstanding, PendingPut

Event: TypeAlias = dict[str, Any]
"""The event of one operation, with the keys ``op``, ``partition_id``, ``n_keys``, ``n_bytes``,
``wall_ms`` and ``status``."""

_WITHOUT_EVENT = ("acknowledge", "release", "renew")
"""Operations that move no data and have no event."""


def log_event(event: Event) -> None:
    """Log one operation as one line through the application's structlog configuration."""
    structlog.get_logger("observability").info("data_plane_op", **event)


class MetricsDataPlaneClient(ObservedClient):
    """A client that reports the size and duration of each operation of ``inner``.

    Calls and results pass through unchanged, including extra keywords that ``inner`` understands.
    The totals cover only calls through this object, not puts and clears of other clients.

    Args:
        inner: the wrapped client.
        on_event: function that is called after each operation, with a dict of

            - ``op``: register, claim_meta, get_data, check_consumption_status, put, get, clear or
              close;
            - ``partition_id``: empty for close;
            - ``n_keys``: number of samples in the call; claimed samples for claim_meta, the
              declared number for register, 0 for ``clear_samples(None, ...)``;
            - ``n_bytes``: bytes of the tensors put or read. A ragged tensor counts only its packed
              values; a column that was read counts with its padding;
            - ``wall_ms``: duration of the call in milliseconds;
            - ``status``: ok, timeout (the call raised a TimeoutError) or error.

            It runs in the thread of the operation, so several calls may run at once. If it raises,
            the error is logged and counted in ``failures``, and the outcome of the operation does
            not change. Acknowledge, release and renew move no data and have no event. With None
            there are no events, only totals.
    """

    def __init__(
        self, inner: DataPlaneClient, on_event: Callable[[Event], None] | None = None
    ) -> None:
        self._totals = Totals()
        observers: list[Observer] = [] if on_event is None else [_Listener(on_event)]
        super().__init__(inner, [*observers, self._totals])

    def snapshot(self) -> dict[str, int]:
        """Return the current totals. Calls that raised do not count.

        Returns:
            ``total_ops``, ``total_bytes``, ``total_keys``: sums over the events;
            ``bytes_outstanding``, ``n_keys_outstanding``: bytes and samples put and not cleared. A
            field of a sample counts once, with its last value. A sample without tensors counts in
            ``n_keys_outstanding``;
            ``peak_bytes_outstanding``: the maximum of ``bytes_outstanding`` so far;
            ``max_bytes_per_key_seen``: the maximum of the bytes of one sample so far;
            ``last_put_bytes_per_key``: bytes of the last put divided by its number of samples,
            rounded down. Puts without samples are ignored.
        """
        return self._totals.snapshot()

    def outstanding_by_partition(self) -> dict[str, int]:
        """Return the bytes put and not cleared, for each partition that has samples."""
        return self._totals.by_partition()


class Totals(Observer):
    """An observer that maintains the totals of one client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outstanding = Outstanding()
        self._total_ops = 0
        self._total_bytes = 0
        self._total_keys = 0
        self._last_put_bytes_per_key = 0

    def snapshot(self) -> dict[str, int]:
        """See `MetricsDataPlaneClient.snapshot`."""
        with self._lock:
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
            return dict(self._outstanding.by_partition)

    def begin(self, call: Operation) -> PendingPut | None:
        if call.op != "put":
            return None
        pending = PendingPut(call.partition_id)
        with self._lock:
            self._outstanding.begin_put(pending)
        return pending

    def end(self, call: Operation, state: PendingPut | None) -> None:
        with self._lock:
            if call.error is None and call.op not in _WITHOUT_EVENT:
                self._add(call, state)
            if state is not None:
                self._outstanding.end_put(state)

    def _add(self, call: Operation, pending: PendingPut | None) -> None:
        self._total_ops += 1
        self._total_bytes += call.n_bytes
        self._total_keys += call.n_keys
        if pending is not None:
            self._outstanding.add(pending, call.sample_ids or (), call.put_bytes)
            if call.n_keys:
                self._last_put_bytes_per_key = call.n_bytes // call.n_keys
        elif call.op == "clear":
            self._outstanding.clear(call.sample_ids, call.partition_id)


class _Listener(Observer):
    """An observer that passes events to a callback."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event

    def end(self, call: Operation, state: None) -> None:
        if call.op not in _WITHOUT_EVENT:
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
    """Wrap a client: the middleware ``metrics`` of `dataplane_core.build_data_plane_client`.

    Events go to ``observability_cfg["callback"]`` if it is set, else to `log_event`.
    """
    return MetricsDataPlaneClient(client, observability_cfg.get("callback", log_event))
