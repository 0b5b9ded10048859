"""`SimulatedLatency`: makes a small generator as slow as a large one, for benchmarks and tests."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedLatency:
    """Log-normal time that each response takes at least, while the processor is idle.

    Attributes:
        median_s: median of the times, in seconds.
        sigma: standard deviation of their logarithms; 1 gives a long tail.
    """

    median_s: float
    sigma: float

    def longest_s(self, seed: int, rows: int) -> float:
        """Return the time of the slowest of ``rows`` responses; equal seeds draw equal times."""
        draw = random.Random(seed).gauss  # noqa: S311  # not for secrets
        return self.median_s * math.exp(self.sigma * max(draw(0.0, 1.0) for _ in range(rows)))

    def wait(self, seed: int, rows: int, *, since: float) -> None:
        """Wait until the slowest response would have finished that began at ``since``.

        ``since`` is a time of `time.perf_counter`.
        """
        time.sleep(max(0.0, since + self.longest_s(seed, rows) - time.perf_counter()))
