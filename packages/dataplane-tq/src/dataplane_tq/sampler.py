"""`ConsumptionSampler`: how TransferQueue's controller learns what was claimed.

A sampler is the one part of a user's that TransferQueue runs inside its controller, in the thread
that serves all requests, so what it does is atomic there. Claims are decided by the directory,
whose cost does not grow with what was consumed; this sampler enters them into the controller's
consumption status, which TransferQueue's own tools and metrics read. Requests of other clients go
to another sampler, which may be a user's.
"""

from __future__ import annotations

import importlib
from typing import Any  # Any: the controller's live status object, which has no public type

import torch

from dataplane_core import ConfigError
from dataplane_tq.upstream import BaseSampler, SequentialSampler

CONSUMED = "dataplane_tq_consumed"
"""Key of ``sampling_config``: ids of samples to enter as consumed."""


def load_sampler(path: str | None) -> BaseSampler | None:
    """The sampler that the configuration names as ``module:Class``; None if it names none.

    Raises:
        ConfigError: (a ValueError) if there is no such class, or it is no sampler.
    """
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"data-plane config: sampler: found {path!r}; expected module:Class ({error})"
        ) from error
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise ConfigError(
            f"data-plane config: sampler: {path!r} is not a subclass of "
            "transfer_queue.sampler.BaseSampler"
        )
    return found()


class ConsumptionSampler(BaseSampler):
    """Enters what the data plane's clients report, and lets ``inner`` serve everybody else.

    Args:
        inner: the sampler for requests that come from TransferQueue's own clients.
    """

    def __init__(self, inner: BaseSampler | None = None) -> None:
        super().__init__()
        self.inner = SequentialSampler() if inner is None else inner

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Serve one request of the controller, as `BaseSampler.sample`.

        Args:
            ready_indexes: rows that could be handed out.
            batch_size: how many are asked for.
            args: passed on.
            kwargs: ``partition``, the controller's status object, and the request's own
                ``sampling_config``: with `CONSUMED` also ``task_name``.
        """
        sample_ids = kwargs.get(CONSUMED)
        if sample_ids is None:
            return self.inner.sample(ready_indexes, batch_size, *args, **kwargs)
        partition = kwargs.get("partition")
        if partition is not None:
            _consume(partition, kwargs["task_name"], sample_ids)
        return [], []

    def clear_cache(self, partition_id: str) -> None:
        self.inner.clear_cache(partition_id)

    def has_cached_result(self, *args: Any, **kwargs: Any) -> bool:
        return self.inner.has_cached_result(*args, **kwargs)

    def save_checkpoint(self) -> dict[str, Any]:
        return self.inner.save_checkpoint()

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        self.inner.load_checkpoint(state)


def _consume(partition: Any, task_name: str, sample_ids: list[str]) -> None:
    indexes = [
        partition.keys_mapping[sample_id]
        for sample_id in sample_ids
        if sample_id in partition.keys_mapping
    ]
    if indexes:
        status = partition.consumption_status
        if task_name not in status:
            status[task_name] = torch.zeros(partition.allocated_samples_num, dtype=torch.int8)
        status[task_name][indexes] = 1
