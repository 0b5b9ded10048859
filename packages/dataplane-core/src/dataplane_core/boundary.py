"""Argument checks for every method of the contract, shared by all clients.

Each client checks its arguments here before it does anything else. So all clients accept and refuse
the same arguments with the same messages, and a refused call stores nothing. Each check raises an
`InvalidRequestError` (a ValueError) that names the invalid argument. The results are plain: new
lists of str, ints, floats, and tags of primitives.
`dataplane_core.tensors.rows.checked_leaves` checks the values of fields, and
`dataplane_core.tensors.columns.check_columns` checks padded columns.

Public to authors of adapters. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal  # Any: callers may pass any type

from dataplane_core.arguments import (
    MIN_INT,
    argument_type_error,
    checked_bool,
    checked_distinct_ids,
    checked_int,
    checked_name,
    checked_names,
    checked_seconds,
)
from dataplane_core.declaration import tagged_lengths
from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger.selection import ClaimRequest, TagFilter
from dataplane_core.meta import LEASE, KVBatchMeta, lease_token
from dataplane_core.tags import checked_tags

LeaseAction = Literal["acknowledge", "release", "renew"]


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A checked put; see `DataPlaneClient.put_samples`.

    Attributes:
        operation: method and its main arguments, for errors.
        sample_ids: distinct ids.
        partition_id: their partition.
        tags: one dict of primitives per id, or None.
        token: token of the lease under which the caller writes, or None.
        origin: name of the put, or None.
        acknowledge: whether the put also acknowledges the samples that the lease holds.
    """

    operation: str
    sample_ids: list[str]
    partition_id: str
    tags: list[dict[str, Any]] | None
    token: str | None
    origin: str | None
    acknowledge: bool = False

    def result(self, fields: Iterable[str]) -> KVBatchMeta:
        """Return the put's result for the names of the fields written; its tags are copies."""
        tags = None if self.tags is None else [dict(tag) for tag in self.tags]
        return KVBatchMeta(
            self.partition_id, None, self.sample_ids, list(fields) or None, tags=tags
        )


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A checked read; see `DataPlaneClient.get_samples`.

    Attributes:
        operation: method and its main arguments, for errors.
        sample_ids: ids, which may repeat.
        partition_id: their partition.
        fields: the fields to read, without repeats.
    """

    operation: str
    sample_ids: list[str]
    partition_id: str
    fields: list[str]


@dataclass(frozen=True, slots=True)
class ClaimCall:
    """A checked claim; see `DataPlaneClient.claim_meta`.

    Attributes:
        operation: method and its main arguments, for errors.
        partition_id: the partition.
        request: the claim.
        timeout_s: how long to wait, in seconds; 0 for a claim that does not block.
    """

    operation: str
    partition_id: str
    request: ClaimRequest
    timeout_s: float

    def result(
        self, sample_ids: list[str], tags: Sequence[dict[str, Any]], token: str | None = None
    ) -> KVBatchMeta:
        """Return the claim's result for the samples claimed, their tags, and the lease's token."""
        return KVBatchMeta(
            partition_id=self.partition_id,
            task_name=self.request.task_name,
            sample_ids=sample_ids,
            fields=list(self.request.required_fields),
            sequence_lengths=tagged_lengths(tags),
            extra_info={} if token is None else {LEASE: token},
            tags=list(tags) if any(tags) else None,
        )


@dataclass(frozen=True, slots=True)
class LeaseCall:
    """A checked `DataPlaneClient.acknowledge`, ``renew`` or ``release``.

    Attributes:
        operation: method and its main arguments, for errors.
        action: the method.
        sample_ids: samples of the claim to which the call applies.
        partition_id: their partition.
        task_name: the claiming task, or None.
        token: token of the lease; empty without samples.
    """

    operation: str
    action: LeaseAction
    sample_ids: list[str]
    partition_id: str
    task_name: str | None
    token: str


def check_put(
    method: str,
    sample_ids: object,
    partition_id: object,
    tags: object = None,
    *,
    claim: object = None,
    origin: object = None,
    acknowledge: object = False,
) -> PutRequest:
    """Check the arguments of a put, except the values of its fields.

    Raises:
        DuplicateSampleError: (a ValueError) an id is given twice.
        InvalidRequestError: (a ValueError) ids, tags, claim or origin are invalid, or
            ``acknowledge`` is given without a claim.
    """
    partition = checked_name(method, "partition_id", partition_id)
    operation = f"{method}(partition={partition!r})"
    if checked_bool(operation, "acknowledge", acknowledge) and claim is None:
        raise argument_type_error(
            operation, "claim", claim, "a leased claim, which acknowledge=True needs"
        )
    ids = checked_distinct_ids(operation, sample_ids)
    return PutRequest(
        operation,
        ids,
        partition,
        None if tags is None else _checked_tags(operation, ids, tags),
        None if claim is None else _token(operation, checked_meta(operation, "claim", claim)),
        None if origin is None else checked_name(operation, "origin", origin, empty=True),
        bool(acknowledge),
    )


def _checked_tags(operation: str, ids: list[str], tags: object) -> list[dict[str, Any]]:
    if isinstance(tags, str | bytes) or not isinstance(tags, Sequence):
        raise argument_type_error(operation, "tags", tags, "a list of one dict per id, or None")
    if len(tags) != len(ids):
        raise InvalidRequestError(
            f"{operation}: {len(tags)} tags for {len(ids)} ids; give one dict per id, or None"
        )
    return [
        checked_tags(operation, sample_id, own) for sample_id, own in zip(ids, tags, strict=True)
    ]


def check_read(
    method: str,
    sample_ids: object,
    partition_id: object,
    select_fields: object,
    *,
    origins: object = None,
) -> ReadRequest:
    """Check the arguments of a read."""
    partition = checked_name(method, "partition_id", partition_id)
    operation = f"{method}(partition={partition!r})"
    if origins is not None and not isinstance(origins, dict):
        raise argument_type_error(operation, "origins", origins, "a dict to fill, or None")
    ids = checked_names(operation, "sample_ids", sample_ids)
    fields = checked_names(operation, "select_fields", select_fields)
    return ReadRequest(operation, ids, partition, list(dict.fromkeys(fields)))


def fields_to_read(meta: Any, select_fields: object) -> Any:
    """Return the fields that ``get_data`` reads: ``select_fields``, or ``meta.fields`` if None.

    Raises:
        InvalidRequestError: (a ValueError) ``meta`` is not a meta, or ``select_fields`` and
            ``meta.fields`` are both None.
    """
    checked_meta("get_data", "meta", meta)
    names = meta.fields if select_fields is None else select_fields
    if names is None:
        raise InvalidRequestError(
            f"get_data(partition={meta.partition_id!r}): neither select_fields nor meta.fields "
            "names the fields to read"
        )
    return names


def check_claim(
    partition_id: object,
    task_name: object,
    required_fields: object,
    batch_size: object,
    dp_rank: object = None,
    blocking: object = True,
    timeout_s: object = 60.0,
    *,
    dp_world: object = None,
    where: object = (),
    seed: object = None,
    wait_for_leased: object = True,
    sample_ids: object = None,
    lease_s: float | None = None,
    owner: str = "",
) -> ClaimCall:
    """Check the arguments of a claim, and add the client's lease length and process name.

    Raises:
        InvalidRequestError: (a ValueError) an argument is invalid, or two contradict each other.
    """
    operation = "claim_meta"
    partition = checked_name(operation, "partition_id", partition_id)
    task = checked_name(operation, "task_name", task_name)
    operation = f"claim_meta(partition={partition!r}, task={task!r})"
    blocks = checked_bool(operation, "blocking", blocking)
    limit_s = checked_seconds(operation, "timeout_s", timeout_s)
    if not isinstance(where, list | tuple) or not all(isinstance(c, TagFilter) for c in where):
        raise argument_type_error(operation, "where", where, "a list of TagFilter")
    size = checked_int(operation, "batch_size", batch_size, minimum=1)
    ids = None if sample_ids is None else checked_distinct_ids(operation, sample_ids)
    if ids is not None:
        if len(ids) != size:
            raise InvalidRequestError(
                f"{operation}: batch_size {size} for {len(ids)} sample_ids; expected {len(ids)}"
            )
        if dp_world is not None or where or seed is not None:
            raise InvalidRequestError(
                f"{operation}: sample_ids with dp_world, where or seed; expected sample_ids alone"
            )
    request = ClaimRequest(
        task_name=task,
        required_fields=tuple(checked_names(operation, "required_fields", required_fields)),
        batch_size=size,
        blocking=blocks,
        where=tuple(where),
        seed=None if seed is None else checked_int(operation, "seed", seed, minimum=MIN_INT),
        dp_rank=None if dp_rank is None else checked_int(operation, "dp_rank", dp_rank),
        dp_world=None
        if dp_world is None
        else checked_int(operation, "dp_world", dp_world, minimum=1),
        lease_s=lease_s,
        owner=owner,
        wait_for_leased=checked_bool(operation, "wait_for_leased", wait_for_leased),
        sample_ids=None if ids is None else tuple(ids),
    )
    return ClaimCall(operation, partition, request, limit_s if blocks else 0.0)


def check_consumption(partition_id: object, task_names: object) -> tuple[str, list[str]]:
    """Check the arguments of ``check_consumption_status``."""
    operation = "check_consumption_status"
    partition = checked_name(operation, "partition_id", partition_id)
    return partition, checked_names(
        f"{operation}(partition={partition!r})", "task_names", task_names
    )


def check_clear(
    method: str, sample_ids: object, partition_id: object, force: object = False
) -> tuple[list[str] | None, str, bool]:
    """Check the arguments of ``clear_samples`` or ``withdraw_samples``."""
    partition = checked_name(method, "partition_id", partition_id)
    operation = f"{method}(partition={partition!r})"
    ids = None
    if sample_ids is not None or method != "clear_samples":  # None clears the partition
        ids = checked_names(operation, "sample_ids", sample_ids)
    return ids, partition, checked_bool(operation, "force", force)


def check_lease_call(action: LeaseAction, meta: object) -> LeaseCall:
    """Check the argument of ``acknowledge``, ``renew`` or ``release``.

    A meta without samples needs no lease.

    Raises:
        InvalidRequestError: (a ValueError) ``meta`` is not a meta, or carries no lease.
    """
    claim: Any = checked_meta(action, "meta", meta)
    partition = checked_name(action, "meta.partition_id", claim.partition_id)
    task = claim.task_name
    if task is not None:
        task = checked_name(action, "meta.task_name", task)
    operation = f"{action}(partition={partition!r}, task={task!r})"
    ids = checked_names(operation, "meta.sample_ids", claim.sample_ids)
    token = _token(operation, claim) if ids else ""
    return LeaseCall(operation, action, ids, partition, task, token)


def _token(operation: str, claim: Any) -> str:
    return checked_name(operation, f"extra_info[{LEASE!r}]", lease_token(claim))


def check_inspection(method: str, partition_id: object, **names: object) -> tuple[str, ...]:
    """Check the partition and the other names of an inspection.

    Returns:
        The partition, and the names in the order given.
    """
    return (
        checked_name(method, "partition_id", partition_id),
        *(checked_name(method, argument, name) for argument, name in names.items()),
    )


def checked_meta(operation: str, argument: str, meta: Any) -> Any:
    """Return ``meta`` if it has the attributes of a `KVBatchMeta`; its class does not matter."""
    attributes = ("partition_id", "task_name", "sample_ids", "fields", "extra_info")
    if isinstance(meta, type) or not all(hasattr(meta, name) for name in attributes):
        raise argument_type_error(operation, argument, meta, "a KVBatchMeta")
    if not isinstance(meta.extra_info, dict):
        raise argument_type_error(operation, f"{argument}.extra_info", meta.extra_info, "a dict")
    return meta
