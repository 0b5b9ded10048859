"""`TargetTensor`: a tensor that a receiver wants, as parts of published tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_mx.errors import LayoutError
from refit_mx.layout import ITEM_SIZES, Box, TensorSpec

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class TargetPart:
    """A box of a published tensor, with its place in a target.

    Axes of the box and the target are matched from the last one. Along leading axes that only one
    of the two has, the box has size 1. So an expert's matrix can be part of a stack, and an element
    of a stack can be a target.

    Attributes:
        tensor: name of the published tensor.
        box: part of that tensor.
        at: first element on each axis of the target.
        global_shape: shape of the published tensor that the receiver expects; a source with another
            shape is refused. None accepts any tensor that contains the box.
    """

    tensor: str
    box: Box
    at: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None

    def placed(self) -> Box:
        """Return the box in the target's coordinates.

        Raises:
            LayoutError: the target lacks an axis along which the box has a size other than 1.
        """
        missing_axes = len(self.box.shape) - len(self.at)
        if missing_axes <= 0:
            return Box(self.at, (1,) * -missing_axes + self.box.shape)
        if any(size != 1 for size in self.box.shape[:missing_axes]):
            raise LayoutError(
                f"{self.tensor!r}: a box of shape {self.box.shape} cannot be placed at {self.at}: "
                f"expected sizes of 1 along its first {missing_axes} axes, which the target lacks"
            )
        return Box(self.at, self.box.shape[missing_axes:])


@dataclass(frozen=True)
class TargetTensor:
    """A tensor that a receiver wants, contiguous and C-ordered.

    Attributes:
        name: name at the receiver.
        dtype: dtype of the published bytes, which are fetched unchanged; a key of `ITEM_SIZES`.
        shape: shape of the target, 0 to `MAX_AXES` axes.
        parts: disjoint parts that together form the target.

    Raises:
        LayoutError: the dtype is unknown, the shape is invalid, or parts extend beyond the shape,
            overlap or leave a gap.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TargetPart, ...]

    def __post_init__(self) -> None:
        try:
            TensorSpec(f"target {self.name!r}", self.dtype, self.shape)
        except ValueError as error:
            raise LayoutError(str(error)) from None
        if len(self.parts) == 1:
            part = self.parts[0]
            if part.box.shape == self.shape and part.at == (0,) * len(self.shape):
                return
        self._check_parts()

    @property
    def spec(self) -> TensorSpec:
        """Spec of the target."""
        return TensorSpec(self.name, self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the target."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def _check_parts(self) -> None:
        placed = []
        for part in self.parts:
            if len(part.at) != len(self.shape) or any(at < 0 for at in part.at):
                raise LayoutError(
                    f"target {self.name!r}: part of {part.tensor!r} is at {part.at}; "
                    f"expected one number for each axis of {self.shape}, none negative"
                )
            box = part.placed()
            if any(
                start + size > full
                for start, size, full in zip(box.start, box.shape, self.shape, strict=True)
            ):
                raise LayoutError(
                    f"target {self.name!r}: part of {part.tensor!r} is at {box.start} with shape "
                    f"{box.shape}; expected it inside {self.shape}"
                )
            if box.size:
                placed.append(box)
        held = sum(box.size for box in placed)
        if held != math.prod(self.shape) or _overlap(placed):
            raise LayoutError(
                f"target {self.name!r}: its {len(self.parts)} parts have {held} elements, "
                f"counting overlaps twice; expected each of the {math.prod(self.shape)} elements "
                f"of shape {self.shape} once"
            )


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether any two of the non-empty boxes share an element."""
    if len(boxes) < 2:
        return False
    start = np.array([box.start for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    stop = start + np.array([box.shape for box in boxes], dtype=np.int64).reshape(start.shape)
    # Most targets have parts next to each other along one axis: they need no comparison of pairs.
    for axis in range(start.shape[1]):
        order = np.argsort(start[:, axis], kind="stable")
        if (stop[order[:-1], axis] <= start[order[1:], axis]).all():
            return False
    step = max(1, _PAIRS_AT_ONCE // len(boxes))
    for first in range(0, len(boxes), step):
        rows = slice(first, first + step)
        shared = ((start[rows, None] < stop[None, :]) & (start[None, :] < stop[rows, None])).all(
            axis=2
        )
        # Each box overlaps itself.
        if shared.sum() > shared.shape[0]:
            return True
    return False
