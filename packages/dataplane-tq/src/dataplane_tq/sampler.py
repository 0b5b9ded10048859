"""`ClaimSampler`: claims as the contract has them, decided inside TransferQueue's controller.

The controller calls a sampler for each ``get_meta`` in its only request thread, so what is decided
here is atomic. The client asks with ``batch_size=0``: TransferQueue then always calls the sampler
instead of answering "not enough" by itself, and the limits travel in ``sampling_config``.
"""

from __future__ import annotations

from typing import Any  # Any: the controller's live status object, which has no public type

from transfer_queue.sampler import BaseSampler


class ClaimSampler(BaseSampler):
    """Takes up to ``max_samples`` ready rows, or none if the claim would rather wait."""

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Choose the rows of one claim.

        Args:
            ready_indexes: rows that have all required fields and that the task has not consumed.
            batch_size: unused, see the module's docstring.
            args: unused.
            kwargs: ``partition``, the controller's status object; ``task_name``; ``max_samples``;
                ``whole``, True to take either ``max_samples`` rows or the last ones of the
                partition; ``unput``, how many declared samples are still to be put.

        Returns:
            The rows, twice: all that are handed out are consumed.
        """
        partition = kwargs.get("partition")
        limit = kwargs["max_samples"]
        if kwargs["whole"] and len(ready_indexes) < limit and partition is not None:
            unclaimed = _unclaimed(partition, kwargs["task_name"])
            if kwargs["unput"] + unclaimed - len(ready_indexes) > 0:
                return [], []
        taken = ready_indexes[:limit]
        return taken, taken


def _unclaimed(partition: Any, task_name: str) -> int:
    present = partition.global_indexes
    consumed = partition.consumption_status.get(task_name)
    if consumed is None or not present:
        return len(present)
    rows = [index for index in present if index < len(consumed)]
    return len(present) - int(consumed[rows].sum())
