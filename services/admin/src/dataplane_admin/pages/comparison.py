"""Two traces side by side: what got slower, by stage, by process and on the critical path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane_admin.answers import models
from dataplane_admin.pages import words

_NOTABLE = 0.02
_CAUSE = 0.25
_MOST = 60


@dataclass(frozen=True)
class PairRow:
    """Seconds of one thing in both traces, as bars of percent of the longest."""

    name: str
    depth: int
    a_s: float
    b_s: float
    a_width: float
    b_width: float
    difference: str
    trend: str
    """``more``, ``less`` or nothing."""
    counts: str = ""


@dataclass(frozen=True)
class ComparisonPage:
    """Everything on the page of two traces."""

    facts: models.TraceComparison
    sentence: str
    stages: Sequence[PairRow]
    processes: Sequence[PairRow]
    buckets: Sequence[PairRow]
    critical: Sequence[PairRow]
    spans: Sequence[PairRow]


def comparison_page(compared: models.TraceComparison) -> ComparisonPage:
    """The page of a comparison."""
    whole = max(compared.a.seconds, compared.b.seconds)
    stages = [row for row in compared.rows if row.depth == 1]
    return ComparisonPage(
        facts=compared,
        sentence=_sentence(compared, stages),
        stages=_rows(_of_compared(stages), whole),
        processes=_rows(
            ((one.process, 0, one.a_busy_s, one.b_busy_s, "") for one in compared.processes), whole
        ),
        buckets=_rows(((one.bucket, 0, one.a_s, one.b_s, "") for one in compared.buckets), whole),
        critical=_rows(_of_compared(compared.critical[:_MOST]), whole),
        spans=_rows(_of_compared(compared.rows), whole),
    )


def signed(seconds: float) -> str:
    """``+310 ms``, or with a true minus sign."""
    if abs(seconds) < 5e-7:
        return "0"
    return ("+" if seconds > 0 else "\N{MINUS SIGN}") + words.duration(abs(seconds))


def _sentence(compared: models.TraceComparison, stages: Sequence[models.ComparedRow]) -> str:
    a, b = compared.a, compared.b
    change = b.seconds - a.seconds
    if not a.seconds or abs(change) < _NOTABLE * a.seconds:
        both = f"{words.duration(a.seconds)} and {words.duration(b.seconds)}"
        return f"{_name(a)} and {_name(b, middle=True)} took about as long: {both}"
    way = "longer" if change > 0 else "less"
    told = (
        f"{_name(b)} took {words.duration(abs(change))} {way} than {_name(a, middle=True)} "
        f"({signed(change)[0]}{100 * abs(change) / a.seconds:.0f} %)"
    )
    causes = [one for one in stages if one.difference_s * change > 0]
    causes.sort(key=lambda one: -abs(one.difference_s))
    named = [
        f"{one.name} ({signed(one.difference_s)})"
        for one in causes[:2]
        if abs(one.difference_s) >= _CAUSE * abs(change)
    ]
    return told + (f", mostly in {' and '.join(named)}" if named else "")


def _name(facts: models.TraceFacts, *, middle: bool = False) -> str:
    if facts.step is None:
        return facts.name
    return f"{'step' if middle else 'Step'} {facts.step}"


_Pair = tuple[str, int, float, float, str]


def _of_compared(rows: Iterable[models.ComparedRow]) -> Iterable[_Pair]:
    for row in rows:
        one = f"{row.a_count}" if row.a_count == row.b_count else f"{row.a_count} → {row.b_count}"
        yield (
            row.name,
            row.depth,
            row.a_s,
            row.b_s,
            "" if one == "1" else f"\N{MULTIPLICATION SIGN}{one}",
        )


def _rows(pairs: Iterable[_Pair], whole: float) -> list[PairRow]:
    held = list(pairs)
    longest = max((max(a, b) for _, _, a, b, _ in held), default=0.0) or 1.0
    return [
        PairRow(
            name=name,
            depth=depth,
            a_s=a,
            b_s=b,
            a_width=round(100 * max(0.0, a) / longest, 3),
            b_width=round(100 * max(0.0, b) / longest, 3),
            difference=signed(b - a),
            # Colour only for what is worth a look beside the whole.
            trend=("more" if b > a else "less") if abs(b - a) >= _NOTABLE * whole else "",
            counts=counts,
        )
        for name, depth, a, b, counts in held
    ]
