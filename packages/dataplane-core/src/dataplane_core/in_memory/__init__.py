"""`InMemoryDataPlaneClient`, for notebooks and tests in one process."""

import dataplane_core.tensors  # noqa: F401  # first: its error names the extra
from dataplane_core.in_memory.client import InMemoryDataPlaneClient

__all__ = ["InMemoryDataPlaneClient"]
