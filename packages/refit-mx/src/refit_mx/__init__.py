"""New weights from trainers to generators: layouts and slices."""

from refit_mx.layout import TargetTPLayout
from refit_mx.slice_range import SliceRange, intersect

__all__ = ["SliceRange", "TargetTPLayout", "intersect"]
