"""Facts of samples, and the divergence of trainer and generator at their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: JSON

from dataplane_admin import models
from dataplane_admin.service.errors import NotFound
from dataplane_admin.store import Store
from observability.views import printable

THRESHOLD = 0.5
"""Difference of log-probabilities, in nats, above which a token diverges."""
_MANY = 0.5
_PRECISION = 1.0


def content(
    store: Store, run: str | None, sample_id: str, threshold: float
) -> models.SampleContent:
    """Return conversation and tokens of a sample. Raises NotFound."""
    facts, text = store.sample_text(run, sample_id)
    if facts is None:
        raise NotFound(f"no facts of sample '{printable(sample_id[:100])}' are stored")
    turns = [models.Turn(**turn) for turn in (text or {}).get("turns", [])]
    tokens = _tokens((text or {}).get("tokens", {}))
    version = (text or {}).get("trainer_version")
    return models.SampleContent(
        facts=facts,
        turns=turns,
        tokens=tokens,
        threshold=threshold,
        divergence=_divergence(tokens, version, threshold),
    )


def last_response(store: Store, facts: models.SampleFacts) -> str | None:
    """Return the last message of a sample that is a response; None if its text is not stored."""
    if not facts.has_text:
        return None
    _, text = store.sample_text(facts.run_id, facts.sample_id)
    turns = (text or {}).get("turns", [])
    return next((turn["content"] for turn in reversed(turns) if turn["role"] == "assistant"), None)


def _tokens(columns: dict[str, list[Any]]) -> list[models.Token]:
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    return [models.Token(**dict(zip(names, row, strict=True))) for row in rows]


def _divergence(
    tokens: Sequence[models.Token], trainer_version: int | None, threshold: float
) -> models.Divergence | None:
    """Return the first token beyond the threshold, None if there is none."""
    differences = [
        (place, each.difference) for place, each in enumerate(tokens) if each.difference is not None
    ]
    beyond = [(place, value) for place, value in differences if abs(value) > threshold]
    if not beyond:
        return None
    place, difference = beyond[0]
    rest = [abs(value) for _, value in differences if abs(value) <= threshold]
    return models.Divergence(
        place=place,
        difference=difference,
        beyond=len(beyond),
        compared=len(differences),
        causes=[
            _tokenization(tokens, place, differences, beyond),
            _version(tokens, place, trainer_version),
            _experts(beyond, differences),
            _precision(difference, rest),
        ],
    )


def _tokenization(
    tokens: Sequence[models.Token],
    place: int,
    differences: Sequence[tuple[int, float]],
    beyond: Sequence[tuple[int, float]],
) -> models.Cause:
    after = sum(other >= place for other, _ in differences)
    share = len(beyond) / after
    reasons = []
    if place and tokens[place - 1].mask == 0:
        reasons.append("it follows text that the model did not generate")
    if after > 1 and share > _MANY:
        reasons.append(f"{share:.0%} of the tokens from there on diverge, as if shifted")
    against = f"it is within a response, and only {share:.0%} of the tokens from there on diverge"
    return models.Cause(
        name="Tokenization", likely=bool(reasons), evidence="; ".join(reasons) or against
    )


def _version(
    tokens: Sequence[models.Token], place: int, trainer_version: int | None
) -> models.Cause:
    version = tokens[place].version
    before = tokens[place - 1].version if place else None
    if version is None or trainer_version is None:
        likely, evidence = False, "the version of the token or of the trainer is unknown"
    elif version != trainer_version:
        likely = True
        evidence = f"weights {version} generated it, weights {trainer_version} scored it"
    else:
        likely, evidence = False, f"weights {version} both generated and scored it"
    if version is not None and before is not None and before != version:
        likely, evidence = True, f"{evidence}; the token before has weights {before}"
    return models.Cause(name="Weight version", likely=likely, evidence=evidence)


def _experts(
    beyond: Sequence[tuple[int, float]], differences: Sequence[tuple[int, float]]
) -> models.Cause:
    share = len(beyond) / len(differences)
    isolated = share <= 0.1
    return models.Cause(
        name="Routed experts",
        likely=isolated,
        evidence=f"{len(beyond)} of {len(differences)} tokens diverge"
        + ("; isolated tokens diverge if they are routed to other experts" if isolated else ""),
    )


def _precision(difference: float, rest: Sequence[float]) -> models.Cause:
    mean = sum(rest) / len(rest) if rest else None
    known = "all tokens diverge"
    if mean is not None:
        known = f"the other tokens differ by {mean:.2g} nats on average"
    large = abs(difference) > _PRECISION
    return models.Cause(
        name="Precision",
        likely=not large and mean is not None and mean > 1e-3,
        evidence=f"{known}; {abs(difference):.2g} nats"
        + (" is more than rounding explains" if large else " may be rounding"),
    )
