"""The partitions of a run, and the fields and tags that rollouts write into them."""

from __future__ import annotations

TRAIN, VALIDATION = "train", "val"

PROMPT = "prompt"
"""Field of asynchronous runs with the prompt of a sample that is to be generated."""

GENERATE_TASK = "generate"
"""Task of asynchronous runs whose consumers generate the responses to prompts."""

WEIGHT_VERSION = "weight_version"
"""Tag with the number of the weights that drew the oldest token of a sample's group."""
