"""`StreamingDataLoader`: a rank's batches of a partition, claimed by the rank itself.

Workers claim and fetch; the process that trains settles. It learns of every claim the moment it is
made, so it alone renews and settles leases: when it dies nobody renews, and all comes back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal  # Any: what a collate callable makes is the caller's own

import torch.multiprocessing
from tensordict import TensorDict
from torch.utils.data import DataLoader

from dataplane_core.client import LEASE
from dataplane_core.errors import (
    DataPlaneError,
    InvalidRequestError,
    LeaseLostError,
    listed,
)
from dataplane_core.held_claims import HeldClaims, places, release
from dataplane_core.lease_watch import LeaseWatch, waited_in_vain
from dataplane_core.meta import KVBatchMeta
from dataplane_core.streaming_dataset import StreamingDataset
from dataplane_core.streaming_feed import Delivered, Failed, Feed, collated, in_time, longest_wait_s

_POLL_S = 0.05
_STATE_FORMAT = 1


class StreamingDataLoader:
    """Iterates over a partition's batches, settles them, and resumes exactly.

    Each batch is ``(TensorDict, KVBatchMeta)``, or what ``collate`` makes of the two. Iteration
    ends when nothing is left to claim, no other consumer of the task holds a lease and nothing
    waits for another data-parallel rank: what a dead consumer held, or would have got, is waited
    for and delivered here. With ``"commit"``, live ranks do not keep it: what they hold or what
    waits for them is theirs to commit, after their loops too. Each wait ends after ``timeout_s``,
    which has to be longer than the lease and than others hold a batch.

    With leases (``claim_lease_s`` in the client's config) a batch, and what is prefetched, is
    renewed in the background while it is held, and released when the loop ends early, by an error
    or otherwise. When it is settled depends on ``settle``:

    - ``"next"``: when the loop asks for the next batch, or at `ack`. Delivery counts by step: a
      batch not acknowledged when the process dies comes again, an acknowledged one never. A loop
      that goes back to an older checkpoint does not see again what was acknowledged after it.
    - ``"commit"``: at `commit` alone; asking for the next batch, or `ack`, marks a batch as done.
      `state_dict` names the samples done; once it is on disk together with the model, call
      `commit`. After a crash the loop restarts from that state: what is not done in it comes again
      (its leases expire), what is done in it never does, whether or not `commit` was reached. So
      counted over the steps that the newest saved state contains, every sample was delivered to
      them exactly once. What is done, and comes back because its lease was lost, is held again
      until its `commit` and not delivered twice.

    The batch in hand is not done until it is acknowledged; call `ack` before `state_dict` to count
    it. Without leases a claim is final: what was claimed and not trained on is lost in a crash.

    A batch whose lease was lost before its turn, in a process that was stopped for example, is not
    delivered but claimed anew. Samples that were cleared by force or withdrawn are left out, and
    cost no other sample of their claim its lease.

    Of several ranks with ``"commit"``, one may die after others have left their loops. Its samples
    come back to the store: once every live rank has committed, iterate again, until an iteration
    delivers nothing. Ranks that resume load the union of all their ``done``, since any of them may
    claim what another had done. A client without ``capabilities.inspection`` does not tell whether
    a lease is renewed: there every lease is waited for, so commit each batch inside the loop.

    Args:
        dataset: what to claim.
        num_workers: processes that claim and fetch; 0 does it in this one, without prefetching.
        prefetch_factor: batches that each worker is ahead.
        pin_memory: as for a torch DataLoader.
        collate: makes a batch of the fields and their meta, in the worker.
        settle: when a batch is settled, see above.
        renew_every_s: seconds between renewals; a third of the lease at most.
        batch_timeout_s: seconds that a worker may take for a batch besides waiting for its claim:
            to start, to make its client, to fetch, and to collate, which nothing else bounds.
        multiprocessing_context: how workers start. Forking a process that has threads can hang it.

    Raises:
        DeadlineExceededError: (TimeoutError) while iterating: no worker handed a batch over within
            the dataset's ``timeout_s`` and ``batch_timeout_s`` together.
        InvalidRequestError: (a ValueError) while iterating: what ``collate`` made in a worker
            cannot be pickled.
        LeaseLostError: while iterating: for ``timeout_s`` each batch lost its lease before it could
            be delivered.
    """

    def __init__(
        self,
        dataset: StreamingDataset,
        *,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        collate: Callable[[TensorDict, KVBatchMeta], Any] | None = None,
        settle: Literal["next", "commit"] = "next",
        renew_every_s: float = 5.0,
        batch_timeout_s: float = 600.0,
        multiprocessing_context: str = "spawn",
    ) -> None:
        self.dataset = dataset
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin_memory = pin_memory
        self._collate = collate
        self._settle = settle
        self._batch_timeout_s = batch_timeout_s
        self._context = multiprocessing_context
        self._look_every_s = max(_POLL_S, renew_every_s / 10)
        self._client = dataset.make_client()
        self._held = HeldClaims(self._client)
        self._done: dict[str, bool] = {}  # whether settled, or done in a saved state
        self._uncommitted: dict[str, KVBatchMeta] = {}  # sample to the claim that holds it
        self._named: list[str] = []  # by the last state_dict
        self._iterating = False
        self._losing_since: float | None = (
            None  # no batch was delivered since, those there were lost
        )
        self._closing = threading.Event()
        self._renewer = threading.Thread(
            target=self._renew_often, args=(renew_every_s,), name="dataplane-renew", daemon=True
        )
        self._renewer.start()

    def __iter__(self) -> Iterator[Any]:
        if self._iterating:
            raise InvalidRequestError("StreamingDataLoader: it is being iterated already")
        self._iterating = True
        workers = self._num_workers
        try:
            watch: LeaseWatch | None = None  # who lived when others were last waited for
            while True:
                before = self._to_wait_for(watch)
                more = yield from self._round(workers)
                workers = 0  # what others give back now is little; no processes are started for it
                if more:
                    watch = None  # who lived then may be dead now
                elif after := self._to_wait_for(watch):
                    watch = self._wait_for_others(after)
                elif not before:
                    return
        finally:
            self._iterating = False
            self._held.release(self._uncommitted)

    def _round(self, workers: int) -> Generator[Any, None, bool]:
        """Claim until nothing is left; False if no batch was delivered and none went back."""
        more = False
        with contextlib.ExitStack() as stack:
            if workers:
                reports = torch.multiprocessing.get_context(self._context).SimpleQueue()
                listener = threading.Thread(target=self._listen, args=(reports,), daemon=True)
                listener.start()
                stack.callback(listener.join, 5.0)
                stack.callback(reports.put, None)
                feed = Feed(self.dataset, self._collate, reports.put, None)
            else:
                feed = Feed(
                    self.dataset,
                    self._collate,
                    self._held.add,
                    self._client,
                    # With "next" this loader holds nothing when it claims in its own process.
                    wait_for_leased=self._settle == "next",
                )
            loader: DataLoader[Any] = DataLoader(
                feed,
                batch_size=None,
                collate_fn=_as_it_is,
                num_workers=workers,
                prefetch_factor=self._prefetch_factor if workers else None,
                pin_memory=self._pin_memory,
                timeout=longest_wait_s(self.dataset, self._batch_timeout_s) if workers else 0,
                multiprocessing_context=self._context if workers else None,
            )
            for item in in_time(loader, self.dataset, self._batch_timeout_s):
                if isinstance(item, Failed):
                    raise item.error
                held = self._still_held(item.meta)
                if held is None:
                    more = True
                    continue
                fresh = self._fresh(item, held)
                if fresh is not None:
                    more = True
                    self._losing_since = None
                    yield fresh.content
                    self._finish(fresh.meta)
        return more

    def _still_held(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """What a claim holds when its turn has come; the rest is or will be others'."""
        if LEASE not in meta.extra_info:
            return meta
        try:
            held, lost = self._held.renewed(meta)
        except DataPlaneError:  # a store that is away for a moment; a loss is said when it settles
            self._held.add(meta)
            return meta
        if held is not None:
            return held
        now = time.monotonic()
        if self._losing_since is None:
            self._losing_since = now
        elif now > self._losing_since + self.dataset.timeout_s:
            raise LeaseLostError(
                f"StreamingDataLoader(partition={meta.partition_id!r}, "
                f"task={self.dataset.task_name!r}): for {self.dataset.timeout_s:g} s each batch "
                "lost its lease before it could be delivered; claim_lease_s has to be longer than "
                "fetching and collating a batch takes, and three times renew_every_s"
            ) from lost
        return None

    def _fresh(self, item: Delivered, held: KVBatchMeta) -> Delivered | None:
        """What of a batch is still held and not done yet; None if nothing is."""
        known = places(held, self._done)
        if not known and held.size == item.meta.size:
            return item
        if known:
            self._claimed_again(held.subset(known))
        rest = held.drop(known)
        if rest is None:
            return None
        batch = self._client.get_data(rest, self.dataset.select_fields)
        fresh = collated(batch, rest, self._collate)
        return fresh.pin_memory() if self._pin_memory and torch.cuda.is_available() else fresh

    def _claimed_again(self, meta: KVBatchMeta) -> None:
        """Settle what a saved state has as done, and hold what no saved state has yet."""
        if LEASE not in meta.extra_info:
            return
        saved = [place for place, each in enumerate(meta.sample_ids) if self._done[each]]
        if saved:
            self._held.acknowledge(meta.subset(saved))  # what is lost by now comes once more
        unsaved = meta.drop(saved)
        if unsaved is not None:
            self._uncommitted.update(dict.fromkeys(unsaved.sample_ids, unsaved))

    def ack(self, meta: KVBatchMeta) -> None:
        """Mark a delivered batch as trained on, and settle it unless ``settle`` is ``"commit"``.

        Raises:
            LeaseLostError: the lease expired, or ended for some of the samples; these are or will
                be delivered again unless they were cleared. The others are marked all the same.
        """
        self._finish(meta)

    def _finish(self, meta: KVBatchMeta) -> None:
        known = places(meta, self._done)
        rest = meta.drop(known) if known else meta
        if rest is None:
            return
        settled = LEASE not in meta.extra_info or self._settle == "next"
        held: KVBatchMeta | None = rest
        lost = None
        if LEASE in meta.extra_info:
            held, lost = self._held.acknowledge(rest) if settled else self._held.renewed(rest)
        if held is not None:
            self._done.update(dict.fromkeys(held.sample_ids, settled))
            if not settled:
                self._uncommitted.update(dict.fromkeys(held.sample_ids, held))
        if lost is not None:
            raise lost

    def commit(self) -> None:
        """Settle what the last `state_dict` named as done; call it once that state is durable.

        Raises:
            LeaseLostError: leases expired before; their samples may be delivered to others. All
                else is settled, and the loader does not come back to the lost ones.
            DataPlaneError: as `DataPlaneClient.acknowledge`, of a store that is away; what was not
                settled is kept and renewed, and `commit` can be called again.
        """
        named = [sample_id for sample_id in self._named if sample_id in self._uncommitted]
        self._done.update(dict.fromkeys(named, True))
        lost: list[str] = []
        try:
            for meta in self._claims_of(named):
                settled, _ = self._held.acknowledge(meta)
                known = set() if settled is None else set(settled.sample_ids)
                lost += [each for each in meta.sample_ids if each not in known]
                for sample_id in meta.sample_ids:
                    del self._uncommitted[sample_id]
        except DataPlaneError as error:
            if lost:
                error.add_note(self._loss(lost, len(named)))
            raise
        if lost:
            raise LeaseLostError(self._loss(lost, len(named)))

    def _claims_of(self, sample_ids: Sequence[str]) -> list[KVBatchMeta]:
        """The claims, or parts of them, that hold samples that are not committed."""
        held: dict[int, tuple[KVBatchMeta, set[str]]] = {}
        for sample_id in sample_ids:
            meta = self._uncommitted[sample_id]
            held.setdefault(id(meta), (meta, set()))[1].add(sample_id)
        return [
            meta if len(ids) == meta.size else meta.subset(places(meta, ids))
            for meta, ids in held.values()
        ]

    def _loss(self, lost: Sequence[str], named: int) -> str:
        return (
            f"commit(partition={self.dataset.partition_id!r}, task={self.dataset.task_name!r}): "
            f"the leases of {len(lost)} of {named} samples expired or were ended before, and "
            f"others may hold them: {listed(lost)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs: plain data, the ids done in this partition among it."""
        self._named = list(self._uncommitted)
        return {
            "format": _STATE_FORMAT,
            "partition_id": self.dataset.partition_id,
            "task_name": self.dataset.task_name,
            "done": list(self._done),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: its samples that are done are not delivered again.

        Raises:
            InvalidRequestError: (a ValueError) it is the state of another task or format, or the
                loader is being iterated.
        """
        if self._iterating:
            raise InvalidRequestError("load_state_dict: end the iteration before")
        if state.get("format") != _STATE_FORMAT or state.get("task_name") != self.dataset.task_name:
            raise InvalidRequestError(
                f"load_state_dict: format {state.get('format')!r} of task "
                f"{state.get('task_name')!r}; expected format {_STATE_FORMAT} of "
                f"{self.dataset.task_name!r}"
            )
        for meta in self._claims_of(list(self._uncommitted)):  # the state may not have them
            self._held.forget(meta)
            release(self._client, meta)
        self._uncommitted, self._named = {}, []
        self.dataset.partition_id = state["partition_id"]
        self._done = dict.fromkeys(state["done"], True)

    def next_partition(self, partition_id: str) -> None:
        """Iterate over another partition from now on; call it between two iterations."""
        if self._iterating or self._uncommitted:
            raise InvalidRequestError(
                "next_partition: end the iteration and commit what is done before"
            )
        self.dataset.partition_id = partition_id
        self._done, self._named = {}, []

    def close(self) -> None:
        """Release what is held, done but uncommitted batches too, and close the client."""
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

    def _renew_often(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            self._held.renew()

    def _to_wait_for(self, watch: LeaseWatch | None) -> int:
        """Samples that others hold, 0 if they live and commit them in their own time."""
        self._held.renew()  # a lease that was lost here may be another's by now
        others = self._held_by_others()
        return 0 if watch is not None and watch.all_live() else others

    def _held_by_others(self) -> int:
        promises = self._client.capabilities
        if not (promises.leases and promises.conservation):
            return 0
        dataset = self.dataset
        counts = self._client.count_samples(
            dataset.partition_id, dataset.task_name, dataset.required_fields
        )
        return max(0, counts.leased - self._held.samples)

    def _wait_for_others(self, others: int) -> LeaseWatch | None:
        """Wait until others hold fewer samples, or, with "commit", all of them gave signs of life.

        Returns:
            What saw the signs of life; None if others hold fewer.

        Raises:
            ClaimTimeoutError: (TimeoutError) neither came in time.
        """
        dataset = self.dataset
        watch = None
        if self._settle == "commit" and self._client.capabilities.inspection:
            watch = LeaseWatch(self._client, dataset.partition_id, dataset.task_name)
        deadline = time.monotonic() + dataset.timeout_s
        next_look = 0.0
        while (held := self._held_by_others()) >= others:
            others = held
            now = time.monotonic()
            if watch is not None and now >= next_look:
                if watch.all_live():
                    return watch
                next_look = now + self._look_every_s
            if now >= deadline:
                raise waited_in_vain(
                    self._client,
                    dataset.partition_id,
                    dataset.task_name,
                    others,
                    dataset.timeout_s,
                )
            self._closing.wait(_POLL_S)
        return None


def _as_it_is(item: Any) -> Any:
    return item
