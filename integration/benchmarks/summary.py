"""`Summary`: median, spread and tail of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        """Summarise one or more samples."""
        low, median, high, p99 = np.percentile(samples, [25, 50, 75, 99])
        return cls(float(median), float(p99), float(high - low), len(samples))
