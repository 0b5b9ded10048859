"""Requests and results of actions, and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dataplane_admin.models.base import Model, Text


class ClearSamples(Model):
    """Clear samples or an entire partition."""

    partition: str = Field(min_length=1, max_length=4096)
    sample_ids: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None, min_length=1, max_length=10_000
    )
    """Ids of the samples; null for the entire partition and its declaration."""
    force: bool = False
    """True to clear leased samples as well."""
    confirm: str = Field(max_length=4096)
    """The partition's id, repeated as confirmation."""


class RedeliverSamples(Model):
    """Redeliver acknowledged samples to a task."""

    partition: str = Field(min_length=1, max_length=4096)
    task: str = Field(min_length=1, max_length=4096)
    sample_ids: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        min_length=1, max_length=10_000
    )
    confirm: str = Field(max_length=4096)
    """The partition's id, repeated as confirmation."""


class EndClaim(Model):
    """End a claim as if its lease had expired: its samples can be claimed again."""

    partition: str = Field(min_length=1, max_length=4096)
    claim: str = Field(min_length=1, max_length=4096)
    expired_only: bool = True
    """True to refuse a claim whose lease has not expired."""
    confirm: str = Field(max_length=4096)
    """The partition's id, repeated as confirmation."""


class ActionResult(Model):
    """Result of an action."""

    action: Literal["clear", "redeliver", "end-claim"]
    partition: Text
    samples: int | None
    """Number of changed samples; None if unknown."""
    sentence: Text


class Problem(Model):
    """An error, ``application/problem+json`` of RFC 9457."""

    type: str
    title: str
    status: int
    detail: Text
    """One sentence on the error; for invalid input, what was found and what was expected."""
