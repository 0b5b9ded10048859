"""Python values, one per row, in the form that a put takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: the values are the caller's own

import numpy as np


def object_column(values: Sequence[Any]) -> np.ndarray:
    """An array of dtype object (n,) whose element i is ``values[i]`` itself."""
    column = np.empty(len(values), dtype=object)
    # One by one: assigning the sequence would look inside lists and tensors.
    for place, value in enumerate(values):
        column[place] = value
    return column
