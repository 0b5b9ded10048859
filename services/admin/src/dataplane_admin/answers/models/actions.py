"""What may be asked to be changed, what came of it, and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dataplane_admin.answers.models.base import Model, Text


class ClearSamples(Model):
    """Drop samples, or a partition as a whole."""

    partition: str = Field(min_length=1, max_length=4096)
    sample_ids: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None, min_length=1, max_length=10_000
    )
    """Which; null for the whole partition and its declaration."""
    force: bool = False
    """Also what a task holds under a lease."""
    confirm: str = Field(max_length=4096)
    """The id of the partition, once more."""


class ResetConsumption(Model):
    """Let a task claim samples again that it has consumed."""

    partition: str = Field(min_length=1, max_length=4096)
    task: str = Field(min_length=1, max_length=4096)
    sample_ids: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        min_length=1, max_length=10_000
    )
    confirm: str = Field(max_length=4096)
    """The id of the partition, once more."""


class EndClaim(Model):
    """End a claim as if its lease had run out: its samples can be claimed again."""

    partition: str = Field(min_length=1, max_length=4096)
    claim: str = Field(min_length=1, max_length=4096)
    expired_only: bool = True
    """Refuse a claim whose lease still runs."""
    confirm: str = Field(max_length=4096)
    """The id of the partition, once more."""


class ActionResult(Model):
    """What an action did."""

    action: Literal["clear", "reset-consumption", "end-claim"]
    partition: Text
    samples: int | None
    """How many were changed; None where the data plane does not say."""
    sentence: Text


class Problem(Model):
    """An error as RFC 9457 has it, ``application/problem+json``."""

    type: str
    title: str
    status: int
    detail: Text
    """What was found and what was expected."""
