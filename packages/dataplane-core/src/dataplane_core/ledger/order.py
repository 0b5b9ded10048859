"""The order in which a task is handed its samples: first puts, a seed, or a user's own."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias  # Any: tags hold the caller's own primitives

from dataplane_core.errors import ConfigError, InvalidRequestError
from dataplane_core.ledger.rows import Row

ClaimOrder: TypeAlias = Callable[[str, Mapping[str, Any]], float]
"""A user's own order: id and tags of a sample to a number; the smallest is claimed first.

Called once when a sample becomes ready, and again when its tags change.
"""


def load_order(path: str | None) -> ClaimOrder | None:
    """The order that the configuration names as ``module:function``; None if it names none.

    Raises:
        ConfigError: (a ValueError) if there is no such function.
    """
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"data-plane config: claim_order: found {path!r}; expected module:function ({error})"
        ) from error
    if not callable(found):
        raise ConfigError(f"data-plane config: claim_order: {path!r} cannot be called")
    order: ClaimOrder = found
    return order


class Places:
    """Where samples stand in one queue.

    Args:
        seed: of the claims, which goes before ``order``.
        order: the user's own; None is the order of first puts.

    Attributes:
        error: what ``order`` did wrong first; its samples stand last.
    """

    def __init__(self, seed: int | None, order: ClaimOrder | None) -> None:
        self._seed = seed
        self._order = order
        self.error: str | None = None

    def of(self, row: Row) -> float:
        """The place of ``row``; an integer, exact, without a user's order."""
        if self._seed is not None:
            digest = hashlib.blake2b(f"{self._seed}:{row.sample_id}".encode(), digest_size=8)
            return int.from_bytes(digest.digest(), "big")
        if self._order is None:
            return row.sequence
        try:
            place = float(self._order(row.sample_id, row.tags))
            if math.isnan(place):
                raise ValueError("not a number")
        except Exception as error:  # noqa: BLE001  # whatever a user's function raises
            # It runs while a put becomes visible, which must not fail half-way; the claim tells.
            self.error = self.error or f"sample {row.sample_id!r}: {type(error).__name__}: {error}"
            return math.inf
        return place

    def check(self) -> None:
        """Raise `InvalidRequestError` if the user's order failed for a sample."""
        if self.error is not None:
            raise InvalidRequestError(
                f"claim_meta: the configured claim_order failed on {self.error}"
            )
