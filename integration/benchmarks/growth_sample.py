"""Sample whose put is measured as a store grows: fields, kinds and sizes. Imports no torch."""

from __future__ import annotations

TASK = "train"
ROWS = 32
"""Samples of a small operation."""
TOKENS = 8
PER_TOKEN = {
    "input_ids": "torch.int64",
    "token_mask": "torch.int64",
    "generation_logprobs": "torch.float32",
    "prev_logprobs": "torch.float32",
    "advantages": "torch.float32",
}
"""Dtype of each field with a value per token."""
PER_SAMPLE = {
    "input_lengths": "torch.int64",
    "sample_mask": "torch.float32",
    "total_reward": "torch.float32",
}
"""Dtype of each field with a value per sample."""
BULK_ROWS, BULK_ROW_BYTES = 64, 512 << 10
BULK_BYTES = BULK_ROWS * BULK_ROW_BYTES
