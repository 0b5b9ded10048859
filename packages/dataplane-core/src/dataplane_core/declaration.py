"""A partition's declaration, and the errors that every client derives from it.

Public to authors of adapters, so that all clients refuse the same requests with the same messages.
It needs no torch, so that a control process can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any  # Any: tags hold the caller's own primitives

from dataplane_core.arguments import (
    checked_int,
    checked_mapping,
    checked_name,
    checked_names,
    repr_with_type,
)
from dataplane_core.errors import (
    CapacityExceeded,
    ClaimTimeoutError,
    InvalidRequestError,
    MissingDataError,
    SchemaMismatchError,
    listed,
)
from dataplane_core.tags import LENGTH_TAG

if TYPE_CHECKING:
    from dataplane_core.tensors.rows import Column


@dataclass(frozen=True)
class PartitionDeclaration:
    """A partition as `DataPlaneClient.register_partition` declared it."""

    partition_id: str
    fields: tuple[str, ...]
    num_samples: int
    consumer_tasks: tuple[str, ...]
    grpo_group_size: int | None = None
    enums: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
    ) -> PartitionDeclaration:
        """Return the declaration; raise `InvalidRequestError` that names an invalid argument."""
        partition = checked_name("register_partition", "partition_id", partition_id)
        operation = f"register_partition({partition!r})"
        vocabularies: Mapping[Any, Any] = {}
        if enums is not None:
            expected = "a dict of field to allowed values, or None"
            vocabularies = checked_mapping(operation, "enums", enums, expected)
        return cls(
            partition_id=partition,
            fields=_distinct(operation, "fields", fields),
            num_samples=checked_int(operation, "num_samples", num_samples),
            consumer_tasks=_distinct(operation, "consumer_tasks", consumer_tasks),
            grpo_group_size=(
                None
                if grpo_group_size is None
                else checked_int(operation, "grpo_group_size", grpo_group_size, minimum=1)
            ),
            enums={
                checked_name(operation, "a field of enums", name): tuple(
                    checked_names(operation, f"enums[{name!r}]", values, empty=True)
                )
                for name, values in vocabularies.items()
            },
        )

    def claim_timeout(
        self,
        task_name: str,
        *,
        ready: int,
        present: int,
        not_put: int,
        lacking: Mapping[str, int],
        batch_size: int,
        timeout_s: float,
        holders: Mapping[str, int] | None = None,
        first_expiry_s: float | None = None,
        claimer: str = "",
        assigned: int = 0,
        large_group: tuple[str, int] | None = None,
        absent: int | None = None,
    ) -> ClaimTimeoutError:
        """Return the error of a blocking claim whose deadline passed.

        Args:
            task_name: the claiming task.
            ready: number of unclaimed samples that match the claim and have all required fields.
            present: number of unclaimed samples that match the claim, ready or not.
            not_put: number of declared samples that were never put.
            lacking: required field to the number of present samples without it.
            batch_size: number of samples that the claim requested.
            timeout_s: its deadline, in seconds.
            holders: process to the number of samples that it holds under leases of the task.
            first_expiry_s: seconds until the first of these leases and assignments expires.
            claimer: the claiming process, as ``holders`` names it.
            assigned: number of samples assigned to data-parallel ranks; a claim of ``sample_ids``
                counts only its own samples.
            large_group: name and size of a group too large for the claim.
            absent: number of named samples that the partition lacks, for a claim of
                ``sample_ids``; else None.
        """
        holders = dict(holders or {})
        leased = sum(holders.values())
        wanted = min(batch_size, present + not_put or leased + assigned)
        if absent is not None:
            wanted = batch_size
        reasons = [f"{count} lack {name!r}" for name, count in lacking.items()]
        if not_put:
            reasons.append(f"{not_put} of {self.num_samples} declared samples were not put")
        if absent:
            reasons.append(f"{absent} of the named samples are not in the partition")
        if leased:
            reasons.append(f"{leased} are leased: {named_holders(holders, claimer)}")
        if assigned:
            reasons.append(f"{assigned} are assigned to data-parallel ranks")
        if large_group is not None:
            reasons.append(describe_large_group(large_group, batch_size))
        if first_expiry_s is not None:
            holding = " or ".join(["lease"] * (leased > 0) + ["assignment"] * (assigned > 0))
            reasons.append(f"the first {holding} expires in {round(first_expiry_s, 1):g} s")
        if claimer and claimer in holders:
            reasons.append(
                "acknowledge or release this process's claims before it claims again, or claim "
                "with blocking=False"
            )
        return ClaimTimeoutError(
            f"claim_meta(partition={self.partition_id!r}, task={task_name!r}): {ready} of {wanted} "
            f"samples ready after {timeout_s:g} s; {'; '.join(reasons) or 'none were put'}",
            ready=ready,
            missing=max(0, wanted - ready),
            missing_fields=dict(lacking),
            leased=leased,
            holders=holders,
            first_expiry_s=first_expiry_s,
        )


_MAX_NAMED_HOLDERS = 10


def describe_large_group(group: tuple[str, int], batch_size: int) -> str:
    """Return why a claim cannot take a group, given as its name and size."""
    name, size = group
    return (
        f"group {name!r} has {size} samples and batch_size is {batch_size}; a claim takes complete "
        f"groups, so claim with a batch_size of at least {size}"
    )


def named_holders(holders: Mapping[str, int], claimer: str) -> str:
    """Return the processes that hold leases as text: ``claimer`` first, then by sample count."""
    order = sorted(holders, key=lambda owner: (owner != claimer, -holders[owner], owner))
    named = [
        f"{holders[owner]} by {repr(owner) if owner else 'a process without a name'}"
        f"{' (this process)' if owner and owner == claimer else ''}"
        for owner in order[:_MAX_NAMED_HOLDERS]
    ]
    if len(order) > _MAX_NAMED_HOLDERS:
        named.append(f"others by {len(order) - _MAX_NAMED_HOLDERS} more processes")
    return ", ".join(named)


def _distinct(operation: str, argument: str, value: object) -> tuple[str, ...]:
    names = checked_names(operation, argument, value)
    if len(set(names)) != len(names):
        raise InvalidRequestError(f"{operation}: {argument} {names!r}; expected each name once")
    return tuple(names)


def capacity_exceeded(partition_id: str, *, new: int, held: int, capacity: int) -> CapacityExceeded:
    """Return the error of a put that is too large, or got no free capacity in time."""
    cause = "no put that large can succeed" if new > capacity else "nothing was cleared in time"
    return CapacityExceeded(
        f"put_samples(partition={partition_id!r}): {new} new samples, {held} of {capacity} held; "
        f"{cause}: clear samples or raise storage_capacity"
    )


def check_kinds(columns: Mapping[str, str], known: Mapping[str, str], *, partition_id: str) -> None:
    """Raise `SchemaMismatchError` if a field of ``columns`` has another kind in ``known``."""
    for name, kind in columns.items():
        if known.get(name, kind) != kind:
            raise SchemaMismatchError(
                f"put_samples(partition={partition_id!r}): field {name!r} holds {known[name]} and "
                f"cannot take {kind}; clear the partition before changing a field's dtype"
            )


def check_enums(columns: Mapping[str, Column], declaration: PartitionDeclaration) -> None:
    """Refuse values outside a field's declared vocabulary."""
    for name, vocabulary in declaration.enums.items():
        if name not in columns:
            continue
        undeclared = [
            value
            for value in columns[name].rows
            if not isinstance(value, str) or value not in vocabulary
        ]
        if undeclared:
            raise InvalidRequestError(
                f"put_samples(partition={declaration.partition_id!r}): field {name!r} holds "
                f"{repr_with_type(undeclared[0])}; declared values: {listed(vocabulary)}"
            )


def missing_data(
    partition_id: str,
    sample_ids: Sequence[str],
    select_fields: Sequence[str],
    fields_of: Callable[[str], Iterable[str] | None],
) -> MissingDataError:
    """Return the error of a read whose samples or fields are missing.

    Args:
        partition_id: partition that was read.
        sample_ids: requested ids.
        select_fields: requested fields.
        fields_of: returns the fields written for an id; None if the id is unknown.
    """
    unknown: list[str] = []
    lacking: list[str] = []
    absent: dict[str, None] = {}
    for sample_id in sample_ids:
        present = fields_of(sample_id)
        if present is None:
            unknown.append(sample_id)
            continue
        missing = set(select_fields) - set(present)
        if missing:
            lacking.append(sample_id)
            absent.update(dict.fromkeys(name for name in select_fields if name in missing))
    reasons = []
    if unknown:
        reasons.append(f"{len(unknown)} ids are unknown or cleared: {listed(unknown)}")
    if lacking:
        reasons.append(
            f"{len(absent)} fields are not written for {len(lacking)} ids: fields "
            f"{listed(absent)}; ids {listed(lacking)}"
        )
    return MissingDataError(
        f"get_samples(partition={partition_id!r}): of {len(sample_ids)} requested ids, "
        + "; ".join(reasons),
        sample_ids=unknown + lacking,
        fields=absent,
    )


def tagged_lengths(tags: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the tag ``input_lengths`` of each sample, or 0; None if no sample has this tag."""
    if not any(LENGTH_TAG in tag for tag in tags):
        return None
    return [int(tag.get(LENGTH_TAG, 0)) for tag in tags]
