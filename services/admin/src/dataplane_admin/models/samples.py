"""Facts of samples, their conversation and their tokens."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.models.base import Model, Text

SampleSort = Literal["newest", "step", "reward", "advantage", "length"]


class SampleFacts(Model):
    """Facts of a sample; unknown ones are None or empty."""

    sample_id: Text
    run_id: Text
    group: Text
    """Id of its group: the samples of one prompt."""
    step: int | None
    """Step that trains or trained on it."""
    reward: float | None
    advantage: float | None
    length: int | None
    """Tokens of its response."""
    truncated: bool | None
    first_version: int | None
    """Oldest version of the weights that generated it."""
    last_version: int | None
    state: Text
    """State, for example ``generated``, ``trained`` or ``dropped``."""
    tags: dict[Text, Text]
    """Tags by name, such as the data set of its prompt."""
    time_ns: int
    """Time of its newest facts."""
    has_text: bool
    """True if its text is stored."""


class SampleFactsPage(Model):
    """Facts of samples."""

    samples: list[SampleFacts]
    next: str | None
    """The cursor of the next page; None if this is the last."""


class Turn(Model):
    """A message of a conversation."""

    role: Text
    content: Text


class SampleGroup(Model):
    """The samples of one prompt, sorted by length of the id, then by id."""

    run_id: Text
    group: Text
    prompt: list[Turn]
    """Messages before the first response; empty unless the text of a sample is stored."""
    samples: list[SampleFacts]
    responses: list[Text | None]
    """Last response of each sample; None unless its text is stored and shown."""
    notes: list[Text]
    """Notes on the parts of a long text that are left out, a sentence each."""


class Token(Model):
    """A token; unknown values are None."""

    text: Text
    generator: float | None
    """Log-probability by the generator."""
    trainer: float | None
    """Log-probability by the trainer."""
    mask: float | None
    """Loss mask; 0 if the token is not trained on."""
    version: int | None
    """Version of the weights that generated it."""

    @property
    def difference(self) -> float | None:
        """The trainer's log-probability minus the generator's.

        None if either is unknown, or if the token is not trained on.
        """
        if self.trainer is None or self.generator is None or self.mask == 0:
            return None
        return self.trainer - self.generator


class Cause(Model):
    """A possible cause of a divergence."""

    name: Text
    likely: bool
    """True if the data supports it."""
    evidence: Text


class Divergence(Model):
    """The first token at which trainer and generator differ by more than a threshold."""

    place: int
    """Index of the token."""
    difference: float
    beyond: int
    """Number of tokens beyond the threshold."""
    compared: int
    """Number of compared tokens."""
    causes: list[Cause]


class SampleContent(Model):
    """Conversation and tokens of a sample; empty if no text is stored."""

    facts: SampleFacts
    turns: list[Turn]
    tokens: list[Token]
    tokens_omitted: int
    """Number of further tokens, which were not recorded and are not compared."""
    threshold: float
    """Threshold in nats."""
    divergence: Divergence | None
