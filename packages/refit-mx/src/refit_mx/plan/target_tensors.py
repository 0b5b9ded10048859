"""`TargetTensor`: what a receiver wants, as parts of published tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_mx.errors import LayoutError
from refit_mx.tensor_types import ITEM_SIZES, MOST_AXES, Box

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class TargetPart:
    """A box of a published tensor, and where it lies in a target.

    The axes of the box and of the target are matched from the last one. Leading axes that one of
    them lacks have size 1: so one expert's matrix is a part of a stack, and the other way round.

    Attributes:
        tensor: name of the published tensor.
        box: of it.
        at: first element of each axis, counted in the target.
        global_shape: of the published tensor, as the receiver knows it; a source that publishes
            another is refused. None: any that has the box.
    """

    tensor: str
    box: Box
    at: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None

    def placed(self) -> Box:
        """The same part, counted in the target.

        Raises:
            LayoutError: the target lacks an axis along which the box has another size than 1.
        """
        lacking = len(self.box.shape) - len(self.at)
        if lacking <= 0:
            return Box(self.at, (1,) * -lacking + self.box.shape)
        if any(size != 1 for size in self.box.shape[:lacking]):
            raise LayoutError(
                f"{self.tensor!r}: a box of shape {self.box.shape} cannot lie at {self.at}: "
                f"expected sizes of 1 along its first {lacking} axes, which the target lacks"
            )
        return Box(self.at, self.box.shape[lacking:])


@dataclass(frozen=True)
class TargetTensor:
    """One tensor that a receiver wants, contiguous and C-ordered.

    Attributes:
        name: of the target; the receiver's own.
        dtype: of the published bytes, which are fetched as they are; one of `ITEM_SIZES`.
        shape: of the target, 0 to `MOST_AXES` axes.
        parts: disjoint, and together all of it.

    Raises:
        LayoutError: an unknown dtype, a shape that no tensor has, or parts that reach out of it,
            overlap or leave something out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TargetPart, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise LayoutError(
                f"target {self.name!r}: dtype {self.dtype!r}; "
                f"expected one of {', '.join(ITEM_SIZES)}"
            )
        if len(self.shape) > MOST_AXES or any(size < 0 for size in self.shape):
            raise LayoutError(
                f"target {self.name!r}: shape {self.shape}; "
                f"expected at most {MOST_AXES} axes, none negative"
            )
        if len(self.parts) == 1:
            part = self.parts[0]
            if part.box.shape == self.shape and part.at == (0,) * len(self.shape):
                return
        self._check_parts()

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def _check_parts(self) -> None:
        placed = []
        for part in self.parts:
            if len(part.at) != len(self.shape) or any(at < 0 for at in part.at):
                raise LayoutError(
                    f"target {self.name!r}: part of {part.tensor!r} lies at {part.at}; "
                    f"expected one number for each axis of {self.shape}, none negative"
                )
            box = part.placed()
            if any(
                start + size > full
                for start, size, full in zip(box.start, box.shape, self.shape, strict=True)
            ):
                raise LayoutError(
                    f"target {self.name!r}: part of {part.tensor!r} lies at {box.start} with shape "
                    f"{box.shape}; expected it inside {self.shape}"
                )
            if box.size:
                placed.append(box)
        held = sum(box.size for box in placed)
        if held != math.prod(self.shape) or _overlap(placed):
            raise LayoutError(
                f"target {self.name!r}: its {len(self.parts)} parts have {held} elements, "
                f"overlapping ones counted twice; expected each of the {math.prod(self.shape)} of "
                f"shape {self.shape} once"
            )


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of some boxes that are not empty share an element."""
    if len(boxes) < 2:
        return False
    start = np.array([box.start for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    stop = start + np.array([box.shape for box in boxes], dtype=np.int64).reshape(start.shape)
    # Parts side by side along one axis, as nearly all are, need no pairs.
    for axis in range(start.shape[1]):
        order = np.argsort(start[:, axis], kind="stable")
        if (stop[order[:-1], axis] <= start[order[1:], axis]).all():
            return False
    step = max(1, _PAIRS_AT_ONCE // len(boxes))
    for first in range(0, len(boxes), step):
        some = slice(first, first + step)
        shared = ((start[some, None] < stop[None, :]) & (start[None, :] < stop[some, None])).all(
            axis=2
        )
        # Each shares everything with itself.
        if shared.sum() > shared.shape[0]:
            return True
    return False
