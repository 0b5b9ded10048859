"""The order in which a task claims samples: first puts, a seed, or a configured function."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias  # Any: tags hold the caller's own primitives

from dataplane_core.errors import ConfigError, InvalidRequestError
from dataplane_core.ledger.rows import Row

ClaimOrder: TypeAlias = Callable[[str, Mapping[str, Any]], float]
"""A configured order: maps a sample's id and tags to a number; the smallest is claimed first.

Equal numbers are claimed in the order of first puts. A group has its samples' smallest number.

The function is called each time a ready sample enters a claim queue. That can be several times per
sample: a claim with new terms builds a queue, and a change of tags rebuilds the queues.
"""


def load_order(path: str | None) -> ClaimOrder | None:
    """Return the order configured as ``module:function``; None if none is configured.

    Raises:
        ConfigError: (a ValueError) there is no such function.
    """
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"data-plane config: claim_order: found {path!r}; expected module:function ({error})"
        ) from error
    if not callable(function):
        raise ConfigError(f"data-plane config: claim_order: {path!r} cannot be called")
    order: ClaimOrder = function
    return order


class Positions:
    """Positions of samples in the claim order of one queue.

    Args:
        seed: seed of the claims; it takes precedence over ``order``.
        order: the configured order; None means the order of first puts.

    Attributes:
        by_sequence: whether the order is that of first puts.
        failures: sequence of each queued sample for which ``order`` failed, to the error; such
            samples come last.
    """

    def __init__(self, seed: int | None, order: ClaimOrder | None) -> None:
        self._seed = seed
        self._order = order
        self.by_sequence = seed is None and order is None
        self.failures: dict[int, str] = {}

    def of(self, row: Row) -> float:
        """Return the position of ``row``; an exact integer unless an order is configured."""
        if self._seed is not None:
            digest = hashlib.blake2b(f"{self._seed}:{row.sample_id}".encode(), digest_size=8)
            return int.from_bytes(digest.digest(), "big")
        if self._order is None:
            return row.sequence
        try:
            position = float(self._order(row.sample_id, row.tags))
            if math.isnan(position):
                raise ValueError("not a number")
        except Exception as error:  # noqa: BLE001  # a user's function can raise anything
            # This runs while a put becomes visible, which must not fail half-way: `check` raises
            # the error in the claim.
            self.failures[row.sequence] = (
                f"sample {row.sample_id!r}: {type(error).__name__}: {error}"
            )
            return math.inf
        return position

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop the failures of samples that leave the queue."""
        if self.failures:
            for sequence in sequences:
                self.failures.pop(sequence, None)

    def check(self) -> None:
        """Raise `InvalidRequestError` if the configured order failed for a queued sample."""
        for failure in self.failures.values():
            raise InvalidRequestError(f"claim_meta: the configured claim_order failed on {failure}")
