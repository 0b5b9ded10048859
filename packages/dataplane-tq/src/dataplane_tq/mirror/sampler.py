"""`ConsumptionSampler`: enters claims into the status of TransferQueue's controller.

A sampler is the only user code that TransferQueue runs inside its controller. It runs in the thread
that serves all requests, so it is atomic. The directory decides claims, at a cost that does not
grow with the consumed samples. This sampler copies the claims to the controller's consumption
status, for TransferQueue's own tools and metrics. Requests of other clients go to another sampler,
which the user may configure.
"""

from __future__ import annotations

import importlib
from typing import Any  # Any: the controller's live status object, which has no public type

import torch

from dataplane_core import ConfigError
from dataplane_tq.upstream import BaseSampler, SequentialSampler

CONSUMED = "dataplane_tq_consumed"
"""Key of ``sampling_config``: ids of the samples to mark as consumed."""


def load_sampler(path: str | None) -> BaseSampler | None:
    """Build the sampler that is configured as ``module:Class``; None if none is.

    Raises:
        ConfigError: (a ValueError) the class does not exist, is no sampler, or needs arguments.
    """
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        sampler = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"data-plane config: sampler: found {path!r}; expected module:Class ({error})"
        ) from error
    if not (isinstance(sampler, type) and issubclass(sampler, BaseSampler)):
        raise ConfigError(
            f"data-plane config: sampler: {path!r} is not a subclass of "
            "transfer_queue.sampler.BaseSampler"
        )
    try:
        return sampler()
    except TypeError as error:
        raise ConfigError(
            f"data-plane config: sampler: {path!r} cannot be built without arguments ({error}); "
            "name a subclass that sets them"
        ) from error


class ConsumptionSampler(BaseSampler):
    """Sampler that records reports of the data plane's clients, and passes on other requests.

    Args:
        inner: sampler for the requests of TransferQueue's own clients.
    """

    def __init__(self, inner: BaseSampler | None = None) -> None:
        super().__init__()
        self.inner = SequentialSampler() if inner is None else inner

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        """Serve one request of the controller, as `BaseSampler.sample`.

        Args:
            ready_indexes: rows that are ready.
            batch_size: number of requested rows.
            args: passed to ``inner``.
            kwargs: ``partition``, which is the controller's status object, and the keys of the
                request's ``sampling_config``. A report of claims has `CONSUMED` and ``task_name``.
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
