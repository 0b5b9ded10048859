"""Whether the admin service stays as large as it is while a run goes on for an hour.

An hour's telemetry of a run with a step every two seconds is sent as fast as it is taken. The store
may keep a fraction of it, so that retention works all the time.
"""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass
from pathlib import Path

from integration.benchmarks.admin_history import EVENTS_A_SAMPLE
from integration.benchmarks.admin_pages import fill
from integration.benchmarks.admin_service import serving
from integration.benchmarks.results_file import Entry

STEPS = 1_800
"""Of two seconds each."""
SAMPLES = 20
MOST_BYTES = 24 << 20
SOAK_HEADINGS = ["after", "memory MB"]

_SETTLING_S = 90.0
_MARKS = tuple(range(STEPS // 10, STEPS + 1, STEPS // 10))


@dataclass(frozen=True)
class SoakResult:
    """What was measured.

    Attributes:
        memory: of the service in bytes, after each tenth of the hour.
        most_bytes: of the database after the last request, which came much faster than
            in an hour.
        file_bytes: of the database once nothing more came.
        settled_s: how long it took until it was about as small as it may be; None if it was not.
    """

    memory: list[int]
    most_bytes: int
    file_bytes: int
    settled_s: float | None

    def rows(self) -> list[list[str]]:
        """For a table with `SOAK_HEADINGS`."""
        found = [
            [f"{mark * 2 // 60} min", f"{nbytes / 1e6:.0f}"]
            for mark, nbytes in zip(_MARKS, self.memory, strict=True)
        ]
        settled = "not settled" if self.settled_s is None else f"{self.settled_s:.0f} s later"
        return [
            *found,
            ["database at the end", f"{self.most_bytes / 1e6:.0f}"],
            [f"database, {settled}", f"{self.file_bytes / 1e6:.0f}"],
        ]

    def entries(self) -> list[Entry]:
        """For the file of results."""
        first, last = self.memory[1], self.memory[-1]
        return [
            Entry("admin.soak_memory_mb", last / 1e6, "MB", None, 0.0, 1),
            Entry("admin.soak_growth_pct", 100 * (last / first - 1), "%", "a fifth", 0.0, 1),
            Entry("admin.soak_events", STEPS * SAMPLES * EVENTS_A_SAMPLE, "1", None, 0.0, 1),
        ]


def measure_soak() -> SoakResult:
    """Send the hour; starts and stops a service of its own.

    Raises:
        RuntimeError: the service did not start, or refused a request.
    """
    with serving(live_samples=0, most_bytes=MOST_BYTES) as service:
        folder = service.folder
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        memory, _ = fill(connection, service.process, STEPS, SAMPLES, _MARKS)
        connection.close()
        most, settled_s = _size(folder), None
        began = time.monotonic()
        while settled_s is None and time.monotonic() - began < _SETTLING_S:
            time.sleep(0.1)
            if _size(folder) <= 2 * MOST_BYTES:
                settled_s = time.monotonic() - began
        size = _size(folder)
    return SoakResult(memory, most, size, settled_s)


def _size(folder: Path) -> int:
    return (folder / "admin.sqlite").stat().st_size
