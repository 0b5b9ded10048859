"""`StreamingDataset`: a dataset that claims batches of a partition and fetches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from tensordict import TensorDict
from torch.utils.data import IterableDataset

from dataplane_core.client import DataPlaneClient
from dataplane_core.ledger.selection import TagFilter, optional_claim_keywords
from dataplane_core.meta import KVBatchMeta
from dataplane_core.streaming.held_claims import release


@dataclass(eq=False, repr=False)
class StreamingDataset(IterableDataset[tuple[TensorDict, KVBatchMeta]]):
    """Dataset that claims batches of a partition until none is left, and fetches them.

    It acknowledges nothing. With leases, iteration ends when every sample is acknowledged, so
    acknowledge each batch before you request the next. To prefetch, use `StreamingDataLoader`.

    Args:
        make_client: builds the client in the process that iterates; picklable for workers.
        partition_id: partition to claim from.
        task_name: the consumer task.
        required_fields: fields that a sample must have.
        select_fields: fields to fetch; None means ``required_fields``.
        batch_size: maximum samples of a batch; the last batches may be smaller.
        dp_rank: data-parallel rank. This argument and the next three are as in
            `DataPlaneClient.claim_meta`.
        dp_world: number of data-parallel ranks.
        where: conditions that a sample's tags must meet.
        seed: seed of the claim order.
        timeout_s: how long one claim waits, in seconds. It must exceed the lease, so that samples
            of a crashed consumer can be claimed again.
    """

    make_client: Callable[[], DataPlaneClient]
    partition_id: str
    task_name: str
    _: KW_ONLY
    required_fields: list[str]
    select_fields: list[str] | None = None
    batch_size: int
    dp_rank: int | None = None
    dp_world: int | None = None
    where: Sequence[TagFilter] = ()
    seed: int | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        self.where = tuple(self.where)

    def __iter__(self) -> Iterator[tuple[TensorDict, KVBatchMeta]]:
        with self.make_client() as client:
            yield from self.batches(client, lambda meta: None)

    def batches(
        self,
        client: DataPlaneClient,
        on_claim: Callable[[KVBatchMeta], None],
        *,
        wait_for_leased: bool = True,
    ) -> Iterator[tuple[TensorDict, KVBatchMeta]]:
        """Yield the batches that ``client`` claims and fetches.

        Args:
            client: the client that claims and fetches.
            on_claim: called with each claim before its batch is fetched.
            wait_for_leased: as `DataPlaneClient.claim_meta`; False where batches are prefetched.

        Raises:
            ClaimTimeoutError: (TimeoutError) until the deadline no batch was complete, or samples
                stayed leased.
            DataPlaneError: as `claim_meta` and `get_data`; the claim is released.
        """
        # An adapter without leases need not know the keyword.
        wait_for_leased = wait_for_leased or not client.capabilities.leases
        while True:
            meta = client.claim_meta(
                self.partition_id,
                self.task_name,
                self.required_fields,
                self.batch_size,
                self.dp_rank,
                timeout_s=self.timeout_s,
                **optional_claim_keywords(self.dp_world, self.where, self.seed, wait_for_leased),
            )
            if not meta.size:
                return
            on_claim(meta)
            try:
                batch = client.get_data(meta, self.select_fields)
            except BaseException:  # also on an interrupt: make the samples claimable at once
                release(client, meta)
                raise
            yield batch, meta
