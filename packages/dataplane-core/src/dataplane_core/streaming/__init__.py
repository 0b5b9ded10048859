"""PyTorch dataset and loader for a rank that claims its own batches."""

import dataplane_core.tensors  # noqa: F401  # first: names the extra where torch is missing
from dataplane_core.streaming.dataset import StreamingDataset
from dataplane_core.streaming.loader import StreamingDataLoader

__all__ = ["StreamingDataLoader", "StreamingDataset"]
