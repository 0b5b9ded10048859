"""`Tally`: what a claim that timed out could have had."""

from __future__ import annotations

from collections.abc import Iterator

from dataplane_core.ledger.rows import Row
from dataplane_core.ledger.selection import ClaimRequest
from dataplane_core.ledger.tasks import Task


class Tally:
    """Counts the open samples of a task that meet a claim's conditions, for its error.

    Args:
        chunks: the partition's rows.
        task: the claiming task.
        request: the claim.

    Attributes:
        present: samples that meet the conditions.
        ready: those of them with all fields.
        lacking: field to how many of them lack it.
    """

    def __init__(self, chunks: Iterator[list[Row]], task: Task, request: ClaimRequest) -> None:
        self._chunks = chunks
        self._task = task
        self._request = request
        self.present = self.ready = 0
        self.lacking = dict.fromkeys(request.required_fields, 0)

    def step(self) -> bool:
        """Count the next chunk; whether that was the last."""
        rows = next(self._chunks, None)
        if rows is None:
            return True
        for row in rows:
            if row.sample_id in self._task.open and self._request.matches(row.tags):
                self.present += 1
                missing = [name for name in self.lacking if name not in row.cells]
                self.ready += not missing
                for name in missing:
                    self.lacking[name] += 1
        return False
