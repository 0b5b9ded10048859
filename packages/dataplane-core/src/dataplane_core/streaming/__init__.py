"""PyTorch dataset and loader for a rank that claims its own batches."""

import dataplane_core.tensors  # noqa: F401  # first: its error names the extra
from dataplane_core.streaming.dataset import StreamingDataset
from dataplane_core.streaming.loader import StreamingDataLoader

__all__ = ["StreamingDataLoader", "StreamingDataset"]
