"""`Summary`: what a number of samples amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Summary:
    """What a number of samples amount to.

    Attributes:
        value: their median.
        p99: their 99th percentile, interpolated; with few samples the largest.
        spread: their interquartile range.
        count: how many.
    """

    value: float
    p99: float
    spread: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarise at least one sample."""
        low, median, high, p99 = np.percentile(samples, [25, 50, 75, 99])
        return cls(float(median), float(p99), float(high - low), len(samples))
