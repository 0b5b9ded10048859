"""One partition: its numbers, the matrix of its samples, and the samples of one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin.answers import AnswerError, Answers, models
from dataplane_admin.pages.heatmap import HeatMap, heat_map
from dataplane_admin.pages.links import to

_PAGE = 50
_FIRST_PAGE = 25
"""Without a chosen window, the samples are but a taste."""


@dataclass(frozen=True)
class PartitionPage:
    """Everything on the page of a partition.

    Attributes:
        page: samples from ``start`` on.
        problem: why there are none, if the data plane did not answer.
        window_count: samples of the window that was chosen, None without one.
        before: the address of the samples before these.
        after: of those after.
    """

    facts: models.Partition
    live: models.LiveStatus
    waits: Sequence[models.Wait]
    heat: HeatMap | None
    field_names: Sequence[str]
    page: models.SamplePage
    problem: str
    window_count: int | None
    before: str | None
    after: str | None
    claims: Sequence[models.Claim]
    claims_problem: str


def partition_page(
    answers: Answers, partition_id: str, *, start: int | None, count: int | None
) -> PartitionPage:
    """The page of a partition.

    Args:
        answers: what is asked.
        partition_id: which.
        start: place of the first sample to list; None if no window was chosen.
        count: samples of the chosen window.

    Raises:
        AnswerError: there is no such partition, or it cannot be read.
    """
    facts = answers.partition(partition_id)
    matrix = answers.partition_matrix(partition_id)
    first = start or 0
    limit = min(count or _PAGE, _PAGE) if start is not None else _FIRST_PAGE
    page, problem = _samples(answers, partition_id, first, max(1, limit))
    claims, claims_problem = _claims(answers, partition_id)
    shown = len(page.samples)
    before = after = None
    if first > 0:
        before = to("/partition", id=partition_id, start=max(0, first - limit), count=limit)
    if shown and first + shown < page.total:
        after = to("/partition", id=partition_id, start=first + shown, count=limit)
    return PartitionPage(
        facts=facts,
        live=answers.status().live,
        waits=[
            wait
            for wait in answers.why()
            if wait.partition == partition_id and wait.silent_s is None
        ][:3],
        heat=heat_map(matrix, chosen=start) if matrix.windows else None,
        field_names=[field.name for field in facts.fields],
        page=page,
        problem=problem,
        window_count=count,
        before=before,
        after=after,
        claims=claims,
        claims_problem=claims_problem,
    )


def _samples(
    answers: Answers, partition_id: str, start: int, limit: int
) -> tuple[models.SamplePage, str]:
    try:
        return answers.partition_samples(partition_id, start=start, limit=limit), ""
    except AnswerError as error:
        # The rest of the page does not ask the data plane, so it still stands.
        empty = models.SamplePage(partition=partition_id, start=start, total=0, samples=[])
        return empty, f"The samples could not be listed: {error}"


def _claims(answers: Answers, partition_id: str) -> tuple[Sequence[models.Claim], str]:
    try:
        return answers.partition_claims(partition_id), ""
    except AnswerError as error:
        return [], f"The claims could not be listed: {error}"
