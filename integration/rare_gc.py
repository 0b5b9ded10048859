"""Plugin of pytest that makes garbage collections rare.

Tests create many objects and keep few, and the processes of tests have imported much. Collections
at Python's thresholds took a fifth of the tests' CPU time.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 20)

gc.set_threshold(*THRESHOLDS)


def pytest_collection_finish() -> None:
    gc.freeze()
