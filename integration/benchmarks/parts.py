"""`Parts`: what a run does next, said at once, and how long each part took, said at its end."""

from __future__ import annotations

import time

from rich.console import Console

PARTS_HEADINGS = ["part", "seconds"]


class Parts:
    """The parts of a run, one after the other: each ends where the next begins.

    Args:
        console: where they are said.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began: list[tuple[str, float]] = []

    def begin(self, title: str) -> None:
        """End the part before, and begin one."""
        self.console.log(title, style="dim")
        self._began.append((title, time.monotonic()))

    def rows(self) -> list[list[str]]:
        """For a table with `PARTS_HEADINGS`: the parts up to now, and their sum."""
        now = time.monotonic()
        ends = [*(began for _, began in self._began[1:]), now]
        found = [
            [title, f"{end - began:.1f}"]
            for (title, began), end in zip(self._began, ends, strict=True)
        ]
        return [*found, ["everything", f"{now - self._began[0][1]:.1f}"]]
