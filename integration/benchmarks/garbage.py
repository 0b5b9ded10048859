"""Control of Python's garbage collection, to keep it out of timed code.

Every process of a benchmark imports this module, also those that must import little. So it imports
nothing else.
"""

from __future__ import annotations

import gc


def freeze_garbage(_actor: object = None) -> None:
    """Exempt every living object of this process from garbage collection.

    A full collection stops a process with torch and Ray for about 100 ms, and would hit one of the
    systems by chance.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
