"""Checkpoints of partitions, written atomically and restored into any store."""

import dataplane_core.tensors  # noqa: F401  # first: its error names the extra
from dataplane_core.checkpoint.partition import restore_partition, save_partition

__all__ = ["restore_partition", "save_partition"]
