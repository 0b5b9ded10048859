"""Python's garbage collection and how it is kept out of what is timed.

Every process of a benchmark imports this module, also those that are there because they import
little, so it imports nothing else.
"""

from __future__ import annotations

import gc


def freeze_garbage(_actor: object = None) -> None:
    """Exempt every living object of this process from garbage collection.

    A full collection stops a process with torch and Ray for some 100 ms, and would hit one system
    or the other by chance.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
