"""`StreamingDataLoader`: an iterator over the batches that one rank claims of a partition.

Workers claim and fetch. They report every claim at once to the training process, which alone renews
and acknowledges leases: when it dies, its leases expire and its samples become claimable again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal  # Any: the result of a collate callable

import torch.multiprocessing
from tensordict import TensorDict
from torch.utils.data import DataLoader

from dataplane_core.arguments import checked_int, checked_period, repr_with_type
from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    LeaseLostError,
    listed,
)
from dataplane_core.meta import LEASE, KVBatchMeta
from dataplane_core.streaming.dataset import StreamingDataset
from dataplane_core.streaming.feed import (
    DeliveredBatch,
    Feed,
    WorkerFailure,
    collate_batch,
    max_wait_s,
    with_timeout,
)
from dataplane_core.streaming.held_claims import HeldClaims, indices_of, release
from dataplane_core.streaming.lease_watch import LeaseWatch, wait_timeout

_POLL_S = 0.05
_STATE_FORMAT = 1


class StreamingDataLoader:
    """Iterator over a partition's batches that acknowledges them and resumes exactly.

    Each batch is ``(TensorDict, KVBatchMeta)``, or what ``collate`` returns for the two.

    Iteration ends when the task has nothing left to claim, no other consumer holds a lease, and
    nothing is assigned to another data-parallel rank. The loader waits for samples of dead
    consumers and delivers them. With ``"commit"`` it does not wait for live consumers: they commit
    their samples themselves, possibly after their loops. Each wait ends after ``timeout_s``, which
    must exceed both the lease and the time for which other consumers hold a batch.

    With leases (``claim_lease_s`` in the client's config), held and prefetched batches are renewed
    in the background, and released when the loop stops early. ``acknowledge_on`` says when a batch
    is acknowledged:

    - ``"next"``: when the loop requests the next batch, or at `ack`. If the process dies, an
      unacknowledged batch is delivered again, an acknowledged one never. A loop that returns to an
      older checkpoint does not get the batches acknowledged since then.
    - ``"commit"``: at `commit` alone; requesting the next batch, or `ack`, marks a batch as done.
      `state_dict` lists the done samples. Save it together with the model, then call `commit`.
      After a crash, restart from that state. Samples that it does not list are delivered again once
      their leases expire. Samples that it lists never are, even if `commit` was not reached. So
      training that resumes from the newest saved state uses every sample exactly once. If the
      lease of a done sample is lost, the loader claims it again and holds it until its `commit`,
      but does not deliver it twice.

    The current batch is not done before `ack`. To include it in `state_dict`, call `ack` first.
    Without leases a claim is final: a crash loses what was claimed and not trained on.

    A batch that lost its lease before its turn, in a suspended process for example, is claimed
    again instead of delivered. Samples that were withdrawn or cleared by force are left out; the
    remaining samples of their claim keep the lease.

    With several ranks and ``"commit"``, a rank may die after others have left their loops. Once
    every live rank has committed, iterate again, until an iteration delivers nothing. On a resume,
    each rank loads the union of all ranks' ``done``, because it may claim samples that another rank
    has done. Without ``capabilities.inspection`` the loader cannot see whether a lease is renewed,
    and waits for every lease: commit each batch inside the loop.

    Args:
        dataset: what to claim.
        num_workers: processes that claim and fetch; 0 does both in this process, without
            prefetching.
        prefetch_factor: batches that each worker prefetches.
        pin_memory: as for a torch DataLoader.
        collate: makes a batch of the fields and their meta, in the worker.
        acknowledge_on: when a batch is acknowledged, see above.
        renew_every_s: seconds between renewals; no more than a third of the lease.
        batch_timeout_s: seconds that a worker may take for a batch, apart from its blocking claim:
            to start, make its client, fetch, and collate.
        multiprocessing_context: how workers start. Forking a process that has threads can hang it.

    Raises:
        DeadlineExceededError: (TimeoutError) while iterating: no worker delivered a batch within
            the dataset's ``timeout_s`` plus ``batch_timeout_s``.
        InvalidRequestError: (a ValueError) an argument is invalid; or, while iterating: the result
            of ``collate`` in a worker cannot be pickled.
        LeaseLostError: while iterating: the delivered batch lost its lease before the next was
            requested, see `ack`; or for ``timeout_s`` each batch lost its lease before it could be
            delivered.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        collate: Callable[[TensorDict, KVBatchMeta], Any] | None = None,
        acknowledge_on: Literal["next", "commit"] = "next",
        renew_every_s: float = 5.0,
        batch_timeout_s: float = 600.0,
        multiprocessing_context: str = "spawn",
    ) -> None:
        call = "StreamingDataLoader"
        if acknowledge_on not in ("next", "commit"):
            raise InvalidRequestError(
                f"{call}: acknowledge_on is {repr_with_type(acknowledge_on)}; expected 'next' or "
                "'commit'"
            )
        methods = torch.multiprocessing.get_all_start_methods()
        if multiprocessing_context not in methods:
            raise InvalidRequestError(
                f"{call}: multiprocessing_context is {repr_with_type(multiprocessing_context)}; "
                f"expected one of {listed(methods)}"
            )
        renew_every_s = checked_period(call, "renew_every_s", renew_every_s)
        self.dataset = dataset
        self._num_workers = checked_int(call, "num_workers", num_workers)
        self._prefetch_factor = checked_int(call, "prefetch_factor", prefetch_factor, minimum=1)
        self._pin_memory = pin_memory
        self._collate = collate
        self._acknowledge_on = acknowledge_on
        self._batch_timeout_s = checked_period(call, "batch_timeout_s", batch_timeout_s)
        self._context = multiprocessing_context
        self._check_every_s = max(_POLL_S, renew_every_s / 10)
        self._client = dataset.make_client()
        self._held = HeldClaims(self._client)
        # Done samples; True if acknowledged, or done in a saved state.
        self._done: dict[str, bool] = {}
        self._uncommitted: dict[str, KVBatchMeta] = {}  # sample to the claim that holds it
        self._listed: list[str] = []  # uncommitted samples in the last state_dict
        self._iterating = False
        # Time since which every batch has lost its lease before delivery; None after a delivery.
        self._all_lost_since: float | None = None
        self._closing = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_periodically,
            args=(renew_every_s,),
            name="dataplane-renew",
            daemon=True,
        )
        self._renewer.start()

    def __iter__(self) -> Iterator[Any]:
        if self._iterating:
            raise InvalidRequestError("StreamingDataLoader: it is being iterated already")
        self._iterating = True
        workers = self._num_workers
        try:
            watch: LeaseWatch | None = None  # holders that were live at the last wait
            while True:
                before = self._count_awaited(watch)
                any_batch = yield from self._round(workers)
                workers = 0  # few samples remain, for which starting processes does not pay off
                if any_batch:
                    watch = None  # holders that were live then may be dead now
                elif after := self._count_awaited(watch):
                    watch = self._wait_for_others(after)
                elif not before:
                    return  # others held nothing before and after the round: no sample is left
        finally:
            self._iterating = False
            self._held.release(self._uncommitted)

    def _round(self, workers: int) -> Generator[Any, None, bool]:
        """Claim until nothing is left; return whether a batch was delivered or lost."""
        any_batch = False
        with contextlib.ExitStack() as stack:
            if workers:
                reports = torch.multiprocessing.get_context(self._context).SimpleQueue()
                listener = threading.Thread(target=self._listen, args=(reports,), daemon=True)
                listener.start()
                stack.callback(listener.join, 5.0)
                # In a thread, because it may block: a worker killed in its put keeps the lock.
                end = threading.Thread(target=reports.put, args=(None,), daemon=True)
                stack.callback(end.start)
                feed = Feed(self.dataset, self._collate, reports.put, None)
            else:
                feed = Feed(
                    self.dataset,
                    self._collate,
                    self._held.add,
                    self._client,
                    # With "next" this loader holds nothing when it claims in its own process.
                    wait_for_leased=self._acknowledge_on == "next",
                )
            loader: DataLoader[Any] = DataLoader(
                feed,
                batch_size=None,
                collate_fn=_identity,
                num_workers=workers,
                prefetch_factor=self._prefetch_factor if workers else None,
                pin_memory=self._pin_memory,
                timeout=max_wait_s(self.dataset, self._batch_timeout_s) if workers else 0,
                multiprocessing_context=self._context if workers else None,
            )
            for item in with_timeout(loader, self.dataset, self._batch_timeout_s):
                if isinstance(item, WorkerFailure):
                    raise item.error
                held = self._renew_claim(item.meta)
                if held is None:
                    any_batch = True
                    continue
                fresh = self._undone_part(item, held)
                if fresh is not None:
                    any_batch = True
                    self._all_lost_since = None
                    yield fresh.content
                    self.ack(fresh.meta)
        return any_batch

    def _renew_claim(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """Return what a claim still holds when its turn has come; None if it lost everything."""
        if LEASE not in meta.extra_info:
            return meta
        try:
            held, lost = self._held.renew_claim(meta)
        except DataPlaneError:  # store unavailable for now; `acknowledge` will report a loss
            self._held.add(meta)
            return meta
        if held is not None:
            return held
        now = time.monotonic()
        if self._all_lost_since is None:
            self._all_lost_since = now
        elif now > self._all_lost_since + self.dataset.timeout_s:
            raise LeaseLostError(
                f"StreamingDataLoader(partition={meta.partition_id!r}, "
                f"task={self.dataset.task_name!r}): for {self.dataset.timeout_s:g} s each batch "
                "lost its lease before it could be delivered; claim_lease_s must exceed the time "
                "to fetch and collate a batch, and three times renew_every_s"
            ) from lost
        return None

    def _undone_part(self, item: DeliveredBatch, held: KVBatchMeta) -> DeliveredBatch | None:
        """Return the part of a batch that is still held and not done yet; None if empty."""
        done = indices_of(held, self._done)
        if not done and held.size == item.meta.size:
            return item
        if done:
            self._handle_reclaimed(held.subset(done))
        rest = held.drop(done)
        if rest is None:
            return None
        batch = self._client.get_data(rest, self.dataset.select_fields)
        fresh = collate_batch(batch, rest, self._collate)
        return fresh.pin_memory() if self._pin_memory and torch.cuda.is_available() else fresh

    def _handle_reclaimed(self, meta: KVBatchMeta) -> None:
        """Acknowledge samples that are done in a saved state; hold the rest until `commit`."""
        if LEASE not in meta.extra_info:
            return
        saved = [index for index, each in enumerate(meta.sample_ids) if self._done[each]]
        if saved:
            self._held.acknowledge(meta.subset(saved))  # samples lost by now are claimed again
        unsaved = meta.drop(saved)
        if unsaved is not None:
            self._uncommitted.update(dict.fromkeys(unsaved.sample_ids, unsaved))

    def ack(self, meta: KVBatchMeta) -> None:
        """Mark a delivered batch as done; with ``"next"`` acknowledge it too.

        Raises:
            LeaseLostError: the lease expired, or some of the samples were released. The lost
                samples are delivered again unless they were cleared; the rest is marked as done.
        """
        done = indices_of(meta, self._done)
        rest = meta.drop(done) if done else meta
        if rest is None:
            return
        acknowledged = LEASE not in meta.extra_info or self._acknowledge_on == "next"
        held: KVBatchMeta | None = rest
        lost = None
        if LEASE in meta.extra_info:
            update = self._held.acknowledge if acknowledged else self._held.renew_claim
            held, lost = update(rest)
        if held is not None:
            self._done.update(dict.fromkeys(held.sample_ids, acknowledged))
            if not acknowledged:
                self._uncommitted.update(dict.fromkeys(held.sample_ids, held))
        if lost is not None:
            raise lost

    def commit(self) -> None:
        """Acknowledge the samples of the last `state_dict`; call it once that state is durable.

        Raises:
            LeaseLostError: leases expired; other consumers may get their samples. The remaining
                samples are acknowledged, and a further `commit` does not retry the lost ones.
            DataPlaneError: the store is unavailable, as `DataPlaneClient.acknowledge`. What was not
                acknowledged is held and renewed, and `commit` can be called again.
        """
        committed = [each for each in self._listed if each in self._uncommitted]
        self._done.update(dict.fromkeys(committed, True))
        lost: list[str] = []
        try:
            for meta in self._claims_of(committed):
                acknowledged, _ = self._held.acknowledge(meta)
                done = set() if acknowledged is None else set(acknowledged.sample_ids)
                lost += [each for each in meta.sample_ids if each not in done]
                for sample_id in meta.sample_ids:
                    del self._uncommitted[sample_id]
        except DataPlaneError as error:
            if lost:
                error.add_note(self._describe_loss(lost, len(committed)))
            raise
        if lost:
            raise LeaseLostError(self._describe_loss(lost, len(committed)))

    def _claims_of(self, sample_ids: Sequence[str]) -> list[KVBatchMeta]:
        """Return the claims, or parts of claims, that hold these uncommitted samples."""
        held: dict[int, tuple[KVBatchMeta, set[str]]] = {}
        for sample_id in sample_ids:
            meta = self._uncommitted[sample_id]
            held.setdefault(id(meta), (meta, set()))[1].add(sample_id)
        return [
            meta if len(ids) == meta.size else meta.subset(indices_of(meta, ids))
            for meta, ids in held.values()
        ]

    def _describe_loss(self, lost: Sequence[str], committed: int) -> str:
        return (
            f"commit(partition={self.dataset.partition_id!r}, task={self.dataset.task_name!r}): "
            f"the leases of {len(lost)} of {committed} samples expired or were ended before, and "
            f"other consumers may hold the samples: {listed(lost)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`: plain data with the ids of the done samples."""
        self._listed = list(self._uncommitted)
        return {
            "format": _STATE_FORMAT,
            "partition_id": self.dataset.partition_id,
            "task_name": self.dataset.task_name,
            "done": list(self._done),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state: the samples done in it are not delivered again.

        Raises:
            InvalidRequestError: (a ValueError) it is the state of another task or format, or the
                loader is being iterated.
        """
        if self._iterating:
            raise InvalidRequestError("load_state_dict: end the iteration first")
        if state.get("format") != _STATE_FORMAT or state.get("task_name") != self.dataset.task_name:
            raise InvalidRequestError(
                f"load_state_dict: format {state.get('format')!r} of task "
                f"{state.get('task_name')!r}; expected format {_STATE_FORMAT} of "
                f"{self.dataset.task_name!r}"
            )
        for meta in self._claims_of(list(self._uncommitted)):  # the state may lack them
            self._held.forget(meta)
            release(self._client, meta)
        self._uncommitted, self._listed = {}, []
        self.dataset.partition_id = state["partition_id"]
        self._done = dict.fromkeys(state["done"], True)

    def next_partition(self, partition_id: str) -> None:
        """Iterate over another partition from now on; call it between two iterations."""
        if self._iterating or self._uncommitted:
            raise InvalidRequestError(
                "next_partition: first end the iteration, and commit the done samples"
            )
        self.dataset.partition_id = partition_id
        self._done, self._listed = {}, []

    def close(self) -> None:
        """Release all held samples, also done but uncommitted ones, and close the client."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._renewer.join(5.0)
        self._uncommitted = {}
        self._held.release(kept=())
        self._client.close()

    def __enter__(self) -> StreamingDataLoader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _listen(self, reports: Any) -> None:
        while (meta := reports.get()) is not None:
            self._held.add(meta)

    def _renew_periodically(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            self._held.renew_all()

    def _count_awaited(self, watch: LeaseWatch | None) -> int:
        """Return how many samples other consumers hold; 0 if ``watch`` saw all of them live."""
        self._held.renew_all()  # drops leases that were lost, so that they count as held by others
        others = self._count_held_by_others()
        return 0 if watch is not None and watch.all_live() else others

    def _count_held_by_others(self) -> int:
        promises = self._client.capabilities
        if not (promises.leases and promises.conservation):
            return 0
        dataset = self.dataset
        counts = self._client.inspector.count_samples(
            dataset.partition_id, dataset.task_name, dataset.required_fields
        )
        return max(0, counts.leased - self._held.samples)

    def _wait_for_others(self, others: int) -> LeaseWatch | None:
        """Wait until other consumers hold fewer samples or, with "commit", all prove to be live.

        Returns:
            The watch that saw all holders live; None if other consumers hold fewer samples.

        Raises:
            ClaimTimeoutError: (TimeoutError) neither happened in time.
        """
        dataset = self.dataset
        watch = None
        if self._acknowledge_on == "commit" and self._client.capabilities.inspection:
            watch = LeaseWatch(self._client.inspector, dataset.partition_id, dataset.task_name)
        deadline = time.monotonic() + dataset.timeout_s
        next_check = 0.0
        while (held := self._count_held_by_others()) >= others:
            others = held
            now = time.monotonic()
            if watch is not None and now >= next_check:
                if watch.all_live():
                    return watch
                next_check = now + self._check_every_s
            if now >= deadline:
                raise wait_timeout(self._client, dataset, others)
            self._closing.wait(_POLL_S)
        return None


def _identity(item: Any) -> Any:
    return item
