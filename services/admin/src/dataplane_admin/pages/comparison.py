"""Comparison of two traces by stage, by process and on the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import words

_NOTABLE = 0.02
"""Share of a trace's duration below which a difference is ignored."""
_CAUSE = 0.25
"""Minimum share of the total change for a stage to be named in the headline."""


@dataclass(frozen=True)
class PairRow:
    """Seconds of one span, stage, process or bucket in both traces.

    The widths of its bars are in percent of the longest bar of the table.
    """

    name: str
    depth: int
    a_s: float
    b_s: float
    a_width: float
    b_width: float
    difference: str
    trend: str
    """``more``, ``less`` or empty."""
    counts: str = ""


@dataclass(frozen=True)
class ComparisonPage:
    """Content of the comparison page."""

    facts: models.TraceComparison
    sentence: str
    stages: Sequence[PairRow]
    processes: Sequence[PairRow]
    buckets: Sequence[PairRow]
    critical: Sequence[PairRow]
    spans: Sequence[PairRow]


def comparison_page(compared: models.TraceComparison) -> ComparisonPage:
    """Return the page of a comparison."""
    longest_s = max(compared.a.seconds, compared.b.seconds)
    stages = [row for row in compared.rows if row.depth == 1]
    return ComparisonPage(
        facts=compared,
        sentence=_sentence(compared, stages),
        stages=_rows(_pairs_of(stages), longest_s),
        processes=_rows(
            ((pair.process, 0, pair.a_busy_s, pair.b_busy_s, "") for pair in compared.processes),
            longest_s,
        ),
        buckets=_rows(
            ((pair.bucket, 0, pair.a_s, pair.b_s, "") for pair in compared.buckets), longest_s
        ),
        critical=_rows(_pairs_of(compared.critical), longest_s),
        spans=_rows(_pairs_of(compared.rows), longest_s),
    )


def signed(seconds: float) -> str:
    """Return a difference such as ``+310 ms``, with a true minus sign if it is negative."""
    if abs(seconds) < 5e-7:
        return "0"
    return ("+" if seconds > 0 else "\N{MINUS SIGN}") + words.duration(abs(seconds))


def _sentence(compared: models.TraceComparison, stages: Sequence[models.ComparedRow]) -> str:
    a, b = compared.a, compared.b
    change = b.seconds - a.seconds
    if not a.seconds or abs(change) < _NOTABLE * a.seconds:
        both = f"{words.duration(a.seconds)} and {words.duration(b.seconds)}"
        return f"{_name(a)} and {_name(b, middle=True)} have about the same duration: {both}"
    direction = "slower" if change > 0 else "faster"
    text = (
        f"{_name(b)} is {words.duration(abs(change))} {direction} than {_name(a, middle=True)} "
        f"({signed(change)[0]}{100 * abs(change) / a.seconds:.0f} %)"
    )
    causes = [row for row in stages if row.difference_s * change > 0]
    causes.sort(key=lambda row: -abs(row.difference_s))
    named = [row for row in causes[:2] if abs(row.difference_s) >= _CAUSE * abs(change)]
    if not named:
        return text
    text += f", mostly in {_differences(named)}"
    if sum(abs(row.difference_s) for row in named) <= abs(change):
        return text
    against = [row for row in stages if row.difference_s * change < 0]
    against.sort(key=lambda row: -abs(row.difference_s))
    return text + (f", against {_differences(against[:1])}" if against else "")


def _differences(rows: Iterable[models.ComparedRow]) -> str:
    return " and ".join(f"{row.name} ({signed(row.difference_s)})" for row in rows)


def _name(facts: models.TraceFacts, *, middle: bool = False) -> str:
    if facts.step is None:
        return facts.name
    return f"{'step' if middle else 'Step'} {facts.step}"


_Pair = tuple[str, int, float, float, str]


def _pairs_of(rows: Iterable[models.ComparedRow]) -> Iterable[_Pair]:
    for row in rows:
        counts = (
            f"{row.a_count}" if row.a_count == row.b_count else f"{row.a_count} → {row.b_count}"
        )
        yield (
            row.name,
            row.depth,
            row.a_s,
            row.b_s,
            "" if counts == "1" else f"\N{MULTIPLICATION SIGN}{counts}",
        )


def _rows(pairs: Iterable[_Pair], longest_trace_s: float) -> list[PairRow]:
    listed = list(pairs)
    longest = max((max(a, b) for _, _, a, b, _ in listed), default=0.0) or 1.0
    return [
        PairRow(
            name=name,
            depth=depth,
            a_s=a,
            b_s=b,
            a_width=round(100 * max(0.0, a) / longest, 3),
            b_width=round(100 * max(0.0, b) / longest, 3),
            difference=signed(b - a),
            # Color only differences that matter for the entire trace.
            trend=("more" if b > a else "less") if abs(b - a) >= _NOTABLE * longest_trace_s else "",
            counts=counts,
        )
        for name, depth, a, b, counts in listed
    ]
