"""Rare garbage collections."""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 50_000


def make_collections_rare() -> None:
    """Raise the thresholds of this process's garbage collections.

    The imports of the service, and each page, create many thousands of objects at once. With
    Python's thresholds some of the collections that this causes visit all objects, for tens of
    milliseconds.
    """
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
