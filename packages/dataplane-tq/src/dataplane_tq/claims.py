"""`Claim`: one call of ``claim_meta``, from the first look to the batch or the deadline.

What is ready is decided in the controller (`ClaimSampler`); how many samples are still to come, and
when to look again, comes from the directory.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any  # Any: Ray handles, and TransferQueue's metas

import torch

from dataplane_core import ClaimTimeoutError, KVBatchMeta
from dataplane_core.declaration import tagged_lengths
from dataplane_tq.directory import ClaimView
from dataplane_tq.engine import Engine

SAMPLE_ID = "__sample_id__"
"""Tag that carries a row's id, so that a claim learns ids and tags in the one request it is."""


@dataclass(frozen=True)
class Claim:
    """What is asked for; `run` claims it.

    Attributes:
        engine: the process's connection.
        directory: handle of the partition directory.
        partition_id: partition to claim from.
        task_name: the claiming task.
        required_fields: fields that a sample must have.
        batch_size: most samples to claim.
    """

    engine: Engine
    directory: Any
    partition_id: str
    task_name: str
    required_fields: list[str]
    batch_size: int

    def run(self, *, blocking: bool, timeout_s: float, poll_s: float) -> KVBatchMeta:
        """Claim, as `DataPlaneClient.claim_meta` says.

        Args:
            blocking: wait for a full batch or the partition's last samples.
            timeout_s: how long to wait, in seconds.
            poll_s: how long at most between two looks, should a wake-up be lost, in seconds.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            view = self._view()
            claimed = self._try(view, whole=blocking)
            if claimed is not None:
                return claimed
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._timeout(timeout_s)
            turn = min(remaining, poll_s)
            self.engine.ask(
                self._what,
                self.directory.wait_for_change,
                self.partition_id,
                view.version,
                turn,
                timeout_s=turn + self.engine.timeout_s,
            )

    @property
    def _what(self) -> str:
        return f"claim_meta(partition={self.partition_id!r}, task={self.task_name!r})"

    def _view(self) -> ClaimView:
        view: ClaimView = self.engine.ask(
            self._what, self.directory.claim_view, self.partition_id, self.task_name
        )
        return view

    def _try(self, view: ClaimView, *, whole: bool) -> KVBatchMeta | None:
        """The batch, or None if the claim has to wait; ``whole`` as `ClaimSampler` has it."""
        rows = self.engine.run(
            self._what,
            self.engine.client.async_get_meta,
            data_fields=list(self.required_fields),
            batch_size=0,
            partition_id=self.partition_id,
            mode="fetch",
            task_name=self.task_name,
            sampling_config={
                "task_name": self.task_name,
                "max_samples": self.batch_size,
                "whole": whole,
                "unput": view.unput,
            },
        )
        if whole and not rows.size and (view.unput or bool(self._open_rows().any())):
            return None
        tags = [dict(tag) for tag in rows.custom_meta]
        sample_ids = [tag.pop(SAMPLE_ID) for tag in tags]
        return KVBatchMeta(
            partition_id=self.partition_id,
            task_name=self.task_name,
            sample_ids=sample_ids,
            fields=list(self.required_fields),
            sequence_lengths=tagged_lengths(tags),
            tags=tags if any(tags) else None,
        )

    def _open_rows(self) -> torch.Tensor:
        """For every present row, in index order, whether the task has not claimed it."""
        _, consumed = self.engine.run(
            self._what,
            self.engine.client.async_get_consumption_status,
            self.task_name,
            self.partition_id,
        )
        return torch.zeros(0, dtype=torch.bool) if consumed is None else consumed == 0

    def _timeout(self, timeout_s: float) -> ClaimTimeoutError:
        view, open_rows = self._view(), self._open_rows()
        present = int(open_rows.sum())
        ready = torch.ones(present, dtype=torch.bool)
        lacking: dict[str, int] = {}
        for name in self.required_fields:
            _, produced = self.engine.run(
                self._what,
                self.engine.client.async_get_production_status,
                [name],
                self.partition_id,
            )
            has = torch.zeros(present, dtype=torch.bool)
            if produced is not None and len(produced) == len(open_rows):
                has = (produced == 1).all(dim=1)[open_rows]
            if not bool(has.all()):
                lacking[name] = int((~has).sum())
            ready &= has
        return view.declaration.claim_timeout(
            self.task_name,
            ready=int(ready.sum()),
            present=present,
            leased=0,
            unput=view.unput,
            lacking=lacking,
            batch_size=self.batch_size,
            timeout_s=timeout_s,
        )
