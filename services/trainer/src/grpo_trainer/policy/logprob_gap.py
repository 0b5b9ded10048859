"""Difference between the policy's and the generator's log-probabilities of the same tokens.

Both engines compute the same function with different kernels, and perhaps different weights. The
loss cannot distinguish the difference from a change of the policy, so every step's metrics show
its size and its tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

BINS = 512
_LOW, _HIGH = 1e-10, 1e3
"""Bounds of the histogram; each bin is 6 % wide."""


@dataclass(frozen=True)
class LogprobGap:
    """Sums over generated tokens, which can be added over micro-batches and ranks.

    Tokens whose gap is not finite are excluded; ``grpo.max_logprob_error`` excludes their samples.

    Attributes:
        tokens: number of tokens.
        absolute: sum of the absolute differences, in nats.
        largest: largest absolute difference, in nats.
        k3: sum of Schulman's k3 estimate of KL(generator, policy): the tokens are the generator's.
            It is ``r - 1 - log r``, where ``r`` is the ratio of policy to generator
            (http://joschu.net/blog/kl-approx.html).
        histogram: tokens per bin of the absolute difference, log-spaced; int64 (bins,).
    """

    tokens: int
    absolute: float
    largest: float
    k3: float
    histogram: torch.Tensor

    @classmethod
    def of(cls, policy: torch.Tensor, generator: torch.Tensor, mask: torch.Tensor) -> LogprobGap:
        """Compare two columns.

        Args:
            policy: log-probabilities, float (rows, width).
            generator: log-probabilities, float (rows, width).
            mask: bool (rows, width), true for the tokens that count.
        """
        log_ratio = (policy.double() - generator.double())[mask]
        log_ratio = log_ratio[log_ratio.isfinite()]
        absolute, k3 = log_ratio.abs(), log_ratio.expm1() - log_ratio
        bins = (absolute.clamp(_LOW, _HIGH).log() - _EDGES[0].log()) / _WIDTH
        return cls(
            tokens=len(absolute),
            absolute=float(absolute.sum()),
            largest=float(absolute.max()) if len(absolute) else 0.0,
            k3=float(k3.sum()),
            histogram=torch.bincount(bins.long().clamp(0, BINS - 1).cpu(), minlength=BINS),
        )

    @classmethod
    def total(cls, gaps: Iterable[LogprobGap]) -> LogprobGap:
        """Add the gaps of different tokens."""
        parts = list(gaps)
        return cls(
            tokens=sum(part.tokens for part in parts),
            absolute=sum(part.absolute for part in parts),
            largest=max((part.largest for part in parts), default=0.0),
            k3=sum(part.k3 for part in parts),
            histogram=sum((part.histogram for part in parts), torch.zeros(BINS).long()),
        )

    def quantile(self, share: float) -> float:
        """Return the absolute difference that ``share`` of the tokens do not exceed.

        The result is exact up to the width of a bin: at most 6 % too large.
        """
        if not self.tokens:
            return 0.0
        reached = self.histogram.cumsum(0) >= share * self.tokens
        return min(float(_EDGES[int(reached.int().argmax()) + 1]), self.largest)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of a step."""
        tokens = max(self.tokens, 1)
        return {
            "rollout_logprob_diff_mean": self.absolute / tokens,
            "rollout_logprob_diff_p99": self.quantile(0.99),
            "rollout_logprob_diff_max": self.largest,
            "rollout_k3_kl": self.k3 / tokens,
        }


_EDGES = torch.logspace(math.log10(_LOW), math.log10(_HIGH), BINS + 1, dtype=torch.float64)
_WIDTH = float(_EDGES[1].log() - _EDGES[0].log())
