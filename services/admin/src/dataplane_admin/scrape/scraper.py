"""Scraper: reads all targets at an interval, and sends what they report.

Each read has a separate daemon thread. A read that hangs leaves a gap in the series of its target.
It delays neither other targets nor the end of the process.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import httpx
import structlog

from dataplane_admin.scrape.engines import read_engine
from dataplane_admin.scrape.export import LoadExporter
from dataplane_admin.scrape.node import Node
from dataplane_admin.scrape.reading import Reading, ScrapeError

logger = structlog.get_logger("dataplane_admin")

_MAX_TIMEOUT_S = 5.0


@dataclass
class _Health:
    """State of a target or receiver. Its changes are logged; a failure that continues is not."""

    event: str
    facts: Mapping[str, str]
    failure: str = ""

    def note(self, failure: str = "", reason: str = "") -> None:
        """Record the outcome of an attempt: kind and reason of its failure, if it failed."""
        if failure and failure != self.failure:
            logger.warning(f"{self.event}_failed", reason=reason, **self.facts)
        if not failure and self.failure:
            logger.info(f"{self.event}_recovered", **self.facts)
        self.failure = failure


class _Target:
    """An engine or this node, and the thread of its last read."""

    def __init__(
        self, name: str, resource: Mapping[str, str], read: Callable[[], Sequence[Reading]]
    ) -> None:
        self.resource = resource
        self._read = read
        self._health = _Health("scrape", {"target": name})
        self._thread = threading.Thread()
        self._outcome: Sequence[Reading] | str = ""

    def start(self) -> None:
        """Start a read, unless the last one still runs."""
        if not self._thread.is_alive():
            self._outcome = ""
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def finish(self, deadline: float) -> Sequence[Reading]:
        """Return what was read until a deadline of `time.monotonic`; empty if the read failed."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        outcome = "no answer in time" if self._thread.is_alive() else self._outcome
        if isinstance(outcome, str):
            self._health.note("read", outcome)
            return ()
        self._health.note()
        return outcome

    def _run(self) -> None:
        try:
            self._outcome = self._read()
        except ScrapeError as error:
            self._outcome = str(error)
        except Exception as error:  # noqa: BLE001  # a driver or the kernel may fail in any way
            self._outcome = f"{type(error).__name__}: {error}"


def scrape(
    engines: Sequence[str],
    *,
    node: bool,
    to: str,
    token: str | None,
    run_id: str,
    interval_s: float,
) -> NoReturn:
    """Scrape until the process ends.

    ``run_id`` is the run that engines and node belong to, empty for all runs.
    """
    timeout_s = min(interval_s, _MAX_TIMEOUT_S)
    host = socket.gethostname()
    run = {"rl.run_id": run_id} if run_id else {}
    targets = [
        _Target(
            url,
            {"service.instance.id": engine_name(url, host), **run},
            partial(read_engine, url, timeout_s),
        )
        for url in dict.fromkeys(engines)
    ]
    if node:
        targets.append(_Target(host, {"host.name": host, **run}, Node().read))
    exporter = LoadExporter(to, token=token, timeout_s=timeout_s)
    export_health = _Health("export", {"endpoint": exporter.endpoint})
    due = time.monotonic()
    while True:
        deadline, time_ns = time.monotonic() + timeout_s, time.time_ns()
        for target in targets:
            target.start()
        readings = [(target.resource, target.finish(deadline)) for target in targets]
        trouble = exporter.send([each for each in readings if each[1]], time_ns)
        if trouble is None:
            export_health.note()
        else:
            export_health.note(trouble[0], ": ".join(trouble))
        # After a slow scrape, the next one is due at the next multiple of the interval.
        due += interval_s * (1 + max(0.0, (time.monotonic() - due) // interval_s))
        time.sleep(max(0.0, due - time.monotonic()))


def engine_name(url: str, host: str) -> str:
    """Return the name of an engine: host and port; ``host`` replaces a loopback address.

    Raises ValueError if it is not a URL with http or https and a host.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.userinfo:
        raise ValueError("found a URL with a user or password; expected one without a user")
    is_http = parsed.scheme in ("http", "https")
    if not is_http or not parsed.host or not 0 < (parsed.port or 80) <= 65_535:
        raise ValueError(f"found {url!r}; expected a URL such as http://127.0.0.1:8000/metrics")
    name = parsed.host
    try:
        local = ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = name == "localhost"
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    return f"{host if local else name}:{port}"
