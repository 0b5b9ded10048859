"""Generators of an asynchronous run: which take part, and what each holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dataplane_admin import models
from observability.records import Event


def generators(events: Iterable[Event], claims: Sequence[models.Claim]) -> list[models.Generator]:
    """Return the generators of a partition: first those that take part, then those that left.

    Those that take part are sorted by name, those that left by time, the latest first. ``events``
    says when generators joined and left, oldest first.
    """
    joined: dict[str, Event] = {}
    left: dict[str, Event] = {}
    for event in events:
        name = _text(event, "generator")
        if event.name == "generator_left":
            left[name] = event
        else:
            joined[name] = event
            left.pop(name, None)
    listed = [_generator(name, joined.get(name), left.get(name), claims) for name in joined | left]
    listed.sort(key=lambda each: (-(each.left_ns or 0), _by_number(each.name)))
    return [each for each in listed if each.left_ns is None] + [
        each for each in listed if each.left_ns is not None
    ]


def _generator(
    name: str, joined: Event | None, left: Event | None, claims: Sequence[models.Claim]
) -> models.Generator:
    newest = left or joined
    assert newest is not None  # each name has joined or left
    owner = _text(newest, "owner")
    held = [claim for claim in claims if owner and claim.owner == owner]
    return models.Generator(
        name=name,
        owner=owner,
        joined_ns=None if joined is None else joined.time_ns,
        left_ns=None if left is None else left.time_ns,
        reason="" if left is None else _text(left, "reason"),
        claims=len(held),
        samples=sum(claim.samples for claim in held),
        oldest_claim_s=max((claim.age_s for claim in held), default=None),
    )


def _by_number(name: str) -> tuple[int, str]:
    """Return a key that sorts ``rollout actor 10`` after ``rollout actor 2``."""
    return len(name), name


def _text(event: Event, key: str) -> str:
    value = event.attributes.get(f"dataplane.{key}")
    return value if isinstance(value, str) else ""
