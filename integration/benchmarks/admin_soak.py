"""Memory and database size of the admin service over an hour of telemetry.

The telemetry of a run with a step every two seconds is sent as fast as the service accepts it. The
store may hold only a fraction of it, so retention deletes all the time.
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
"""Steps in an hour, of two seconds each."""
SAMPLES = 20
MAX_BYTES = 24 << 20
SOAK_HEADINGS = ["after", "memory MB"]

_SHRINK_S = 90.0
_MARKS = tuple(range(STEPS // 10, STEPS + 1, STEPS // 10))


@dataclass(frozen=True)
class SoakResult:
    """Result of the soak benchmark.

    Attributes:
        memory: bytes of the service's memory after each tenth of the hour.
        peak_bytes: size of the database after the last request; the hour is sent much faster than
            in real time.
        file_bytes: size of the database at the end of the wait that follows.
        shrunk_s: seconds until the database was at most twice its limit; None if it never was.
    """

    memory: list[int]
    peak_bytes: int
    file_bytes: int
    shrunk_s: float | None

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `SOAK_HEADINGS`."""
        rows = [
            [f"{mark * 2 // 60} min", f"{nbytes / 1e6:.0f}"]
            for mark, nbytes in zip(_MARKS, self.memory, strict=True)
        ]
        later = "above limit" if self.shrunk_s is None else f"{self.shrunk_s:.0f} s later"
        return [
            *rows,
            ["database at the end", f"{self.peak_bytes / 1e6:.0f}"],
            [f"database, {later}", f"{self.file_bytes / 1e6:.0f}"],
        ]

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        first, last = self.memory[1], self.memory[-1]
        return [
            Entry("admin.soak_memory_mb", last / 1e6, "MB", None, 0.0, 1),
            Entry("admin.soak_growth_pct", 100 * (last / first - 1), "%", "a fifth", 0.0, 1),
            Entry("admin.soak_events", STEPS * SAMPLES * EVENTS_A_SAMPLE, "1", None, 0.0, 1),
        ]


def measure_soak() -> SoakResult:
    """Start a service, send the hour, and stop the service.

    Raises:
        RuntimeError: the service did not start, or refused a request.
    """
    with serving(live_samples=0, max_bytes=MAX_BYTES) as service:
        folder = service.folder
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
        memory, _ = fill(connection, service.process, STEPS, SAMPLES, _MARKS)
        connection.close()
        peak, shrunk_s = _size(folder), None
        began = time.monotonic()
        while shrunk_s is None and time.monotonic() - began < _SHRINK_S:
            time.sleep(0.1)
            if _size(folder) <= 2 * MAX_BYTES:
                shrunk_s = time.monotonic() - began
        size = _size(folder)
    return SoakResult(memory, peak, size, shrunk_s)


def _size(folder: Path) -> int:
    return (folder / "admin.sqlite").stat().st_size
