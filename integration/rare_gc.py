"""Plugin of pytest that makes garbage collections rare.

Tests create many objects and keep few, and the processes of tests have imported much. Collections
at Python's thresholds took a fifth of the tests' CPU time. At `THRESHOLDS` alone, a process would
retain everything that it made, so it also collects after every `TESTS` tests.
"""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 20)
TESTS = 80

_finished = 0

gc.set_threshold(*THRESHOLDS)


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    global _finished
    _finished += 1
    if _finished % TESTS == 0:
        gc.collect()
