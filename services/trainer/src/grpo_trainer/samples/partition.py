"""The partitions of a run, and the fields and tags that rollouts write into them."""

from __future__ import annotations

TRAIN, VALIDATION = "train", "val"


def sample_id(position: int, number: int) -> str:
    """Return the id of sample ``number`` of the prompt at ``position``, in an asynchronous run."""
    return f"{position:09d}_g{number}"


def position_of(sample_id: str) -> int:
    """Return the position of a sample's prompt in the stream."""
    return int(sample_id.partition("_")[0])


PROMPT = "prompt"
"""Field of asynchronous runs with the prompt of a sample that is to be generated."""

GENERATE_TASK = "generate"
"""Task of asynchronous runs whose consumers generate the responses to prompts."""

WEIGHT_VERSION = "weight_version"
"""Tag with the number of the weights that drew the oldest token of a sample's group."""

WEIGHT_VERSIONS = "weight_versions"
"""Field of asynchronous runs that record texts: the spans of weight versions of a response."""

IS_FILLER = "is_filler"
"""Tag of an asynchronous run: whether a sample only fills a step, excluded from the loss."""
