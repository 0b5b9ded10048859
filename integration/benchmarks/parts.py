"""`Parts`: announces the parts of a run, and reports their durations at its end."""

from __future__ import annotations

import time

from rich.console import Console

PARTS_HEADINGS = ["part", "seconds"]


class Parts:
    """Parts of a run; each ends where the next begins.

    Args:
        console: console for the announcements.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began: list[tuple[str, float]] = []

    def begin(self, title: str) -> None:
        """End the current part, and begin the next."""
        self.console.log(title, style="dim")
        self._began.append((title, time.monotonic()))

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `PARTS_HEADINGS`: the parts up to now, and their sum."""
        now = time.monotonic()
        ends = [*(began for _, began in self._began[1:]), now]
        rows = [
            [title, f"{end - began:.1f}"]
            for (title, began), end in zip(self._began, ends, strict=True)
        ]
        return [*rows, ["total", f"{now - self._began[0][1]:.1f}"]]
