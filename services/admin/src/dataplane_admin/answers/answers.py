"""`Answers`: one method per question, composed of the store, the live data plane and the views.

All methods are synchronous and may be called from any thread. They raise `AnswerError`, of which
the text is one sentence for whoever asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane_admin.answers import models
from dataplane_admin.settings import Settings

if TYPE_CHECKING:
    from dataplane_admin.live import Live
    from dataplane_admin.store import Store


class Answers:
    """What the service can be asked.

    Args:
        store: what arrived.
        live: the data plane that is looked into; None shows history only.
        settings: what the service was told.
    """

    def __init__(self, store: Store, live: Live | None, settings: Settings) -> None:
        self._store = store
        self._live = live
        self._settings = settings

    def status(self) -> models.Status:
        """The service in one look."""

    def partitions(self) -> models.Partitions:
        """Every partition and storage unit of the newest snapshot; empty without one."""

    def partition(self, partition_id: str) -> models.Partition:
        """One partition of the newest snapshot. Raises NotFound, Unavailable."""

    def partition_matrix(self, partition_id: str, *, windows: int = 120) -> models.Matrix:
        """Samples by field and task, in at most ``windows`` (1 to 500). Raises NotFound, ..."""

    def partition_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> models.SamplePage:
        """``limit`` (1 to 1,000) samples from place ``start``; asks the data plane."""

    def partition_claims(self, partition_id: str) -> list[models.Claim]:
        """The claims that are held, the oldest first; asks the data plane."""

    def samples(
        self,
        q: str = "",
        *,
        tag: str | None = None,
        value: str | None = None,
        partition: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> models.SampleHits:
        """By the beginning ``q`` of their id, or by ``tag`` equal to ``value`` (live only)."""

    def sample(self, sample_id: str, *, partition: str | None = None) -> models.SampleLife:
        """The life of one sample. Raises NotFound if neither events nor data plane know it."""

    def why(self) -> list[models.Wait]:
        """Why it is stuck: the longest wait first; empty if nothing waits."""

    def staleness(self, *, run: str | None = None, steps: int = 20) -> models.Staleness:
        """Of the last ``steps`` (1 to 10,000) of ``run``, or of the newest run."""

    def runs(self) -> models.Runs:
        """Every run, the newest first."""

    def traces(
        self,
        *,
        run: str | None = None,
        step: int | None = None,
        min_s: float | None = None,
        max_s: float | None = None,
        error: bool | None = None,
        name: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> models.Traces:
        """A page of traces, the newest first. Raises Refused on a cursor that is none of ours."""

    def trace(self, trace_id: str) -> models.Trace:
        """One trace, put together. Raises NotFound; Refused unless 32 hexadecimal digits."""

    def trace_compare(self, a: str, b: str) -> models.TraceComparison:
        """Two traces side by side. Raises as `trace`."""

    def audit(self, *, cursor: str | None = None, limit: int = 50) -> models.Audit:
        """A page of the audit record, the newest first."""

    def series(self, *, name: str | None = None) -> list[models.Series]:
        """The newest value of each metric series."""

    def clear(self, asked: models.ClearSamples, *, actor: str) -> models.ActionResult:
        """Drop samples or a partition. Raises NotAllowed, Refused, Conflict, Unavailable, ..."""

    def reset_consumption(
        self, asked: models.ResetConsumption, *, actor: str
    ) -> models.ActionResult:
        """Let a task claim samples again. Raises as `clear`."""

    def end_claim(self, asked: models.EndClaim, *, actor: str) -> models.ActionResult:
        """End a claim. Raises as `clear`."""
