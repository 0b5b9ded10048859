"""`SimulatedLatency`: delay of a small generator's responses, for benchmarks and tests."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedLatency:
    """Log-normal minimum duration of a response; the processor is idle for the added time.

    Attributes:
        median_s: median of the durations, in seconds.
        sigma: standard deviation of their logarithms; 1 gives a long tail.
    """

    median_s: float
    sigma: float

    def longest_s(self, seed: int, rows: int) -> float:
        """Return the duration of the slowest of ``rows`` responses; it is equal for equal seeds."""
        draw = random.Random(seed).gauss  # noqa: S311  # not for secrets
        return self.median_s * math.exp(self.sigma * max(draw(0.0, 1.0) for _ in range(rows)))

    def pace(self, seed: int, budgets: Sequence[int], prefix_lengths: Sequence[int]) -> Pace:
        """Return the pace of the slowest response of a call that begins now.

        Args:
            seed: seed of the call.
            budgets: maximum tokens of each response.
            prefix_lengths: number of tokens that each response has already; they take no time.
        """
        tokens = max(budget - n for budget, n in zip(budgets, prefix_lengths, strict=True))
        longest_s = self.longest_s(seed, len(budgets))
        return Pace(longest_s * tokens / max(budgets) if any(prefix_lengths) else longest_s, tokens)


class Pace:
    """Pace of a response that begins now, and draws up to ``tokens`` tokens in ``seconds``."""

    def __init__(self, seconds: float, tokens: int) -> None:
        self._began_s = time.perf_counter()
        self._seconds, self._tokens = seconds, tokens

    def ahead_s(self, drawn: int | None = None) -> float:
        """Return the seconds by which ``drawn`` tokens are early; None means all tokens."""
        share = 1.0 if drawn is None else drawn / max(1, self._tokens)
        return max(0.0, self._began_s + self._seconds * share - time.perf_counter())
