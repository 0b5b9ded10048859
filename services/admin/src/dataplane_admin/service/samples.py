"""Facts of samples, and the divergence of trainer and generator at their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any  # Any: JSON

from dataplane_admin import models
from dataplane_admin.service.errors import NotFound
from dataplane_admin.store import Store
from observability.views import printable

THRESHOLD = 0.5
"""Difference of log-probabilities, in nats, above which a token diverges."""
_MANY = 0.5
"""Share of diverging tokens above which all tokens seem to be shifted."""
_PRECISION = 1.0
"""Difference in nats above which rounding is no explanation."""


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


def group(store: Store, run: str, name: str) -> models.SampleGroup:
    """Return the samples of one prompt. Raises NotFound."""
    samples = store.group(run, name)
    if not samples:
        raise NotFound(f"group '{printable(name[:100])}' does not exist in this run")
    # g10 comes after g9.
    samples.sort(key=lambda each: (len(each.sample_id), each.sample_id))
    turns = [_turns(store, each) for each in samples]
    return models.SampleGroup(
        run_id=run,
        group=name,
        prompt=list(takewhile(_is_given, next(filter(None, turns), []))),
        samples=samples,
        responses=[
            next((turn.content for turn in reversed(of_sample) if not _is_given(turn)), None)
            for of_sample in turns
        ],
    )


def _turns(store: Store, facts: models.SampleFacts) -> list[models.Turn]:
    """Return the conversation of a sample; empty if its text is not stored."""
    if not facts.has_text:
        return []
    _, text = store.sample_text(facts.run_id, facts.sample_id)
    return [models.Turn(**turn) for turn in (text or {}).get("turns", [])]


def _is_given(turn: models.Turn) -> bool:
    """Return whether the model did not generate a message."""
    return turn.role != "assistant"


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
    shifted = after > 1 and share > _MANY
    evidence = f"{100 * share:.0f} % of the tokens from this token on diverge"
    if shifted:
        evidence += ", as if shifted"
    elif place and tokens[place - 1].mask == 0:
        evidence += "; the text before, which the model did not generate, may be tokenized anew"
    return models.Cause(
        name="Tokenization",
        likely=shifted,
        evidence=f"{evidence}; to check, compare the token ids of generator and trainer",
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
        evidence = f"generated by weight version {version}, scored by {trainer_version}"
    else:
        likely, evidence = False, f"generated and scored by weight version {version}"
    if version is not None and before is not None and before != version:
        likely, evidence = True, f"{evidence}; the previous token has version {before}"
    return models.Cause(name="Weight version", likely=likely, evidence=evidence)


def _experts(
    beyond: Sequence[tuple[int, float]], differences: Sequence[tuple[int, float]]
) -> models.Cause:
    return models.Cause(
        name="Routed experts",
        likely=False,
        evidence=f"{len(beyond)} of {len(differences)} tokens diverge, and their routing is not "
        "recorded; in a mixture of experts, isolated tokens diverge if the trainer routes them to "
        "other experts; to check, replay the generator's routing",
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
        evidence=f"{known}; the difference of {abs(difference):.2g} nats at this token "
        + ("is more than rounding explains" if large else "may be rounding"),
    )
