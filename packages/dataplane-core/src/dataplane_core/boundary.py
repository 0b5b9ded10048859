"""The one check of what callers hand to a client, for every method of the contract.

Each client passes its arguments through here before it does anything else, so all of them take and
refuse the same, with the same words, and store nothing of what is refused. What comes back is
plain: lists of their own of str, ints, floats, and tags of primitives. Values inside fields are
checked by `dataplane_core.rows.checked_leaves`, padded columns by
`dataplane_core.columns.check_columns`.

Public to authors of adapters. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any  # Any: whatever a caller gives as an argument

from dataplane_core.arguments import (
    checked_bool,
    checked_distinct_ids,
    checked_int,
    checked_name,
    checked_names,
    checked_seconds,
    refused,
)
from dataplane_core.client import LEASE, lease_token
from dataplane_core.errors import InvalidRequestError
from dataplane_core.ledger.selection import ClaimRequest, TagFilter
from dataplane_core.tags import checked_tags


@dataclass(frozen=True, slots=True)
class PutRequest:
    """A checked put; see `DataPlaneClient.put_samples`.

    Attributes:
        where: names the call in errors.
        sample_ids: distinct ids.
        partition_id: their partition.
        tags: one dict of primitives per id, or None.
        token: of the lease under which the caller writes, or None.
        origin: name of the put, or None.
    """

    where: str
    sample_ids: list[str]
    partition_id: str
    tags: list[dict[str, Any]] | None
    token: str | None
    origin: str | None

    def copied_tags(self) -> list[dict[str, Any]] | None:
        """The tags in dicts that the caller may change."""
        return None if self.tags is None else [dict(tag) for tag in self.tags]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A checked read; see `DataPlaneClient.get_samples`.

    Attributes:
        where: names the call in errors.
        sample_ids: ids, which may repeat.
        partition_id: their partition.
        fields: the fields to read, each once.
    """

    where: str
    sample_ids: list[str]
    partition_id: str
    fields: list[str]


@dataclass(frozen=True, slots=True)
class ClaimCall:
    """A checked claim; see `DataPlaneClient.claim_meta`.

    Attributes:
        where: names the call in errors.
        partition_id: the partition.
        request: what is claimed.
        timeout_s: how long to wait, in seconds; 0 of a claim that does not block.
    """

    where: str
    partition_id: str
    request: ClaimRequest
    timeout_s: float


@dataclass(frozen=True, slots=True)
class SettleRequest:
    """A checked `DataPlaneClient.acknowledge`, ``renew`` or ``release``.

    Attributes:
        where: names the call in errors.
        sample_ids: the claim's samples that are meant.
        partition_id: their partition.
        task_name: the claiming task, or None.
        token: of the lease.
    """

    where: str
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
) -> PutRequest:
    """The arguments of a put besides its values.

    Raises:
        DuplicateSampleError: (a ValueError) an id is given twice.
        InvalidRequestError: (a ValueError) ids, tags, claim or origin are something else.
    """
    partition = checked_name(method, "partition_id", partition_id)
    where = f"{method}(partition={partition!r})"
    ids = checked_distinct_ids(where, sample_ids)
    return PutRequest(
        where,
        ids,
        partition,
        None if tags is None else _checked_tags(where, ids, tags),
        None if claim is None else _token(where, checked_meta(where, "claim", claim)),
        None if origin is None else checked_name(where, "origin", origin, empty=True),
    )


def _checked_tags(where: str, ids: list[str], tags: object) -> list[dict[str, Any]]:
    if isinstance(tags, str | bytes) or not isinstance(tags, Sequence):
        raise refused(where, "tags", tags, "a list of one dict per id, or None")
    if len(tags) != len(ids):
        raise InvalidRequestError(
            f"{where}: {len(tags)} tags for {len(ids)} ids; give one dict per id, or None"
        )
    return [checked_tags(where, sample_id, own) for sample_id, own in zip(ids, tags, strict=True)]


def check_read(
    method: str,
    sample_ids: object,
    partition_id: object,
    select_fields: object,
    *,
    origins: object = None,
) -> ReadRequest:
    """The arguments of a read.

    Raises:
        InvalidRequestError: (a ValueError) one is something else.
    """
    partition = checked_name(method, "partition_id", partition_id)
    where = f"{method}(partition={partition!r})"
    if origins is not None and not isinstance(origins, dict):
        raise refused(where, "origins", origins, "a dict that is filled, or None")
    ids = checked_names(where, "sample_ids", sample_ids)
    fields = checked_names(where, "select_fields", select_fields)
    return ReadRequest(where, ids, partition, list(dict.fromkeys(fields)))


def fields_to_read(meta: Any, select_fields: object) -> Any:
    """The fields that ``get_data`` reads: the selected ones, else those of ``meta``.

    Raises:
        InvalidRequestError: (a ValueError) ``meta`` is no meta, or neither names the fields.
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
    lease_s: float | None = None,
    owner: str = "",
) -> ClaimCall:
    """The arguments of a claim, and what the client adds: its lease and its process.

    Raises:
        InvalidRequestError: (a ValueError) one is something else, or they do not fit together.
    """
    call = "claim_meta"
    partition = checked_name(call, "partition_id", partition_id)
    task = checked_name(call, "task_name", task_name)
    call = f"claim_meta(partition={partition!r}, task={task!r})"
    whole = checked_bool(call, "blocking", blocking)
    limit_s = checked_seconds(call, "timeout_s", timeout_s)
    if not isinstance(where, list | tuple) or not all(isinstance(c, TagFilter) for c in where):
        raise refused(call, "where", where, "a list of TagFilter")
    request = ClaimRequest(
        task_name=task,
        required_fields=tuple(checked_names(call, "required_fields", required_fields)),
        batch_size=checked_int(call, "batch_size", batch_size, least=1),
        whole=whole,
        where=tuple(where),
        seed=None if seed is None else checked_int(call, "seed", seed, least=-(2**63)),
        dp_rank=None if dp_rank is None else checked_int(call, "dp_rank", dp_rank),
        dp_world=None if dp_world is None else checked_int(call, "dp_world", dp_world, least=1),
        lease_s=lease_s,
        owner=owner,
        wait_for_leased=checked_bool(call, "wait_for_leased", wait_for_leased),
    )
    return ClaimCall(call, partition, request, limit_s if whole else 0.0)


def check_consumption(partition_id: object, task_names: object) -> tuple[str, list[str]]:
    """The arguments of ``check_consumption_status``.

    Raises:
        InvalidRequestError: (a ValueError) one is something else.
    """
    call = "check_consumption_status"
    partition = checked_name(call, "partition_id", partition_id)
    return partition, checked_names(f"{call}(partition={partition!r})", "task_names", task_names)


def check_clear(
    method: str, sample_ids: object, partition_id: object, force: object = False
) -> tuple[list[str] | None, str, bool]:
    """The arguments of ``clear_samples``, or of ``withdraw_samples``.

    Raises:
        InvalidRequestError: (a ValueError) one is something else.
    """
    partition = checked_name(method, "partition_id", partition_id)
    where = f"{method}(partition={partition!r})"
    ids = None
    if sample_ids is not None or method != "clear_samples":  # only there None means all
        ids = checked_names(where, "sample_ids", sample_ids)
    return ids, partition, checked_bool(where, "force", force)


def check_settle(method: str, meta: object) -> SettleRequest:
    """The argument of ``acknowledge``, ``renew`` or ``release``.

    Without samples there is nothing to settle, and no lease is asked for.

    Raises:
        InvalidRequestError: (a ValueError) it is no meta, or carries no lease.
    """
    claim: Any = checked_meta(method, "meta", meta)
    partition = checked_name(method, "meta.partition_id", claim.partition_id)
    task = claim.task_name
    if task is not None:
        task = checked_name(method, "meta.task_name", task)
    where = f"{method}(partition={partition!r}, task={task!r})"
    ids = checked_names(where, "meta.sample_ids", claim.sample_ids)
    return SettleRequest(where, ids, partition, task, _token(where, claim) if ids else "")


def _token(where: str, claim: Any) -> str:
    return checked_name(where, f"extra_info[{LEASE!r}]", lease_token(claim))


def check_look(method: str, partition_id: object, **names: object) -> tuple[str, ...]:
    """The partition and the other names that an inspector's method is asked for.

    Returns:
        The partition, and the names in the order given.

    Raises:
        InvalidRequestError: (a ValueError) one is something else.
    """
    return (
        checked_name(method, "partition_id", partition_id),
        *(checked_name(method, argument, name) for argument, name in names.items()),
    )


def checked_meta(where: str, argument: str, meta: Any) -> Any:
    """``meta`` if it has what a `KVBatchMeta` has; a class of another package may stand for it.

    Raises:
        InvalidRequestError: (a ValueError) it has not.
    """
    wanted = ("partition_id", "task_name", "sample_ids", "fields", "extra_info")
    if isinstance(meta, type) or not all(hasattr(meta, name) for name in wanted):
        raise refused(where, argument, meta, "a KVBatchMeta")
    if not isinstance(meta.extra_info, dict):
        raise refused(where, f"{argument}.extra_info", meta.extra_info, "a dict")
    return meta
