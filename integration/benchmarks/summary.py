"""`Summary`: median, spread and tail of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Summary:
    """Median, spread and tail of samples.

    Attributes:
        value: median.
        p99: 99th percentile, interpolated; close to the largest if there are few samples.
        spread: interquartile range.
        count: number of samples.
    """

    value: float
    p99: float
    spread: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarize one or more samples."""
        low, median, high, p99 = np.percentile(samples, [25, 50, 75, 99])
        return cls(float(median), float(p99), float(high - low), len(samples))

    @classmethod
    def of_ratio(cls, above: Sequence[float], below: Sequence[float]) -> Summary:
        """Summarize the ratio of two operations that were measured in the same rounds.

        The value is the ratio of the two medians. The tail and the spread are those of the ratios
        of single rounds.
        """
        rounds = cls.of([a / b for a, b in zip(above, below, strict=True)])
        return replace(rounds, value=float(np.median(above) / np.median(below)))
