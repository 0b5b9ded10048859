"""A partition's declaration, and what every client answers from its books the same way.

Public to authors of adapters, so that all clients refuse the same requests with the same words.
Needs no torch: a control process can use it without.
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
    shown,
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
    from dataplane_core.rows import Column


@dataclass(frozen=True)
class PartitionDeclaration:
    """What `DataPlaneClient.register_partition` declared."""

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
        """The declaration, or `InvalidRequestError` naming the argument that is wrong."""
        partition = checked_name("register_partition", "partition_id", partition_id)
        where = f"register_partition({partition!r})"
        vocabularies: Mapping[Any, Any] = {}
        if enums is not None:
            expected = "a dict of field to allowed values, or None"
            vocabularies = checked_mapping(where, "enums", enums, expected)
        return cls(
            partition_id=partition,
            fields=_distinct(where, "fields", fields),
            num_samples=checked_int(where, "num_samples", num_samples),
            consumer_tasks=_distinct(where, "consumer_tasks", consumer_tasks),
            grpo_group_size=(
                None
                if grpo_group_size is None
                else checked_int(where, "grpo_group_size", grpo_group_size, least=1)
            ),
            enums={
                checked_name(where, "a field of enums", name): tuple(
                    checked_names(where, f"enums[{name!r}]", values, empty=True)
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
        unput: int,
        lacking: Mapping[str, int],
        batch_size: int,
        timeout_s: float,
        holders: Mapping[str, int] | None = None,
        first_expiry_s: float | None = None,
        claimer: str = "",
        assigned: int = 0,
    ) -> ClaimTimeoutError:
        """The error of a blocking claim whose deadline passed.

        Args:
            task_name: the claiming task.
            ready: samples that could be claimed.
            present: unclaimed samples, ready or not.
            unput: declared samples that were never put.
            lacking: required field to the number of present samples without it.
            batch_size: samples the claim asked for.
            timeout_s: its deadline, in seconds.
            holders: process to the number of samples that it holds under leases of the task.
            first_expiry_s: seconds until the first of the task's leases expires.
            claimer: the process that claims, as ``holders`` names it.
            assigned: samples of the task that wait for another data-parallel rank.
        """
        holders = dict(holders or {})
        leased = sum(holders.values())
        wanted = min(batch_size, present + unput or leased + assigned)
        reasons = [f"{count} lack {name!r}" for name, count in lacking.items()]
        if unput:
            reasons.append(f"{unput} of {self.num_samples} declared samples were not put")
        if leased:
            reasons.append(f"{leased} are leased: {named_holders(holders, claimer)}")
        if assigned:
            reasons.append(f"{assigned} wait for the data-parallel ranks that they were drawn for")
        if first_expiry_s is not None:
            reasons.append(f"the first lease expires in {round(first_expiry_s, 1):g} s")
        if claimer and claimer in holders:
            reasons.append(
                "acknowledge or release what this process holds before it claims again, or claim "
                "with blocking=False"
            )
        return ClaimTimeoutError(
            f"claim_meta(partition={self.partition_id!r}, task={task_name!r}): {ready} of {wanted} "
            f"samples ready after {timeout_s:g} s; {'; '.join(reasons) or 'none was put'}",
            ready=ready,
            missing=max(0, wanted - ready),
            missing_fields=dict(lacking),
            leased=leased,
            holders=holders,
            first_expiry_s=first_expiry_s,
        )


_NAMED_HOLDERS = 10


def named_holders(holders: Mapping[str, int], claimer: str) -> str:
    """Name the processes that hold leases, ``claimer`` first, then whoever holds the most."""
    order = sorted(holders, key=lambda owner: (owner != claimer, -holders[owner], owner))
    named = [
        f"{holders[owner]} by {repr(owner) if owner else 'a process without a name'}"
        f"{' (this process)' if owner and owner == claimer else ''}"
        for owner in order[:_NAMED_HOLDERS]
    ]
    if len(order) > _NAMED_HOLDERS:
        named.append(f"others by {len(order) - _NAMED_HOLDERS} more processes")
    return ", ".join(named)


def _distinct(where: str, argument: str, value: object) -> tuple[str, ...]:
    names = checked_names(where, argument, value)
    if len(set(names)) != len(names):
        raise InvalidRequestError(f"{where}: {argument} {names!r}; expected each name once")
    return tuple(names)


def capacity_exceeded(partition_id: str, *, new: int, held: int, capacity: int) -> CapacityExceeded:
    """The error of a put that found no room until its deadline, or never can."""
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
        strange = [
            value
            for value in columns[name].rows
            if not isinstance(value, str) or value not in vocabulary
        ]
        if strange:
            raise InvalidRequestError(
                f"put_samples(partition={declaration.partition_id!r}): field {name!r} holds "
                f"{shown(strange[0])}; declared values: {listed(vocabulary)}"
            )


def missing_data(
    partition_id: str,
    sample_ids: Sequence[str],
    select_fields: Sequence[str],
    fields_of: Callable[[str], Iterable[str] | None],
) -> MissingDataError:
    """The error of a read that cannot be answered whole.

    Args:
        partition_id: partition that was read.
        sample_ids: ids that were asked for.
        select_fields: fields that were asked for.
        fields_of: the fields that are written for an id, or None if the id is not known.
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
    found = []
    if unknown:
        found.append(f"{len(unknown)} ids are unknown or cleared: {listed(unknown)}")
    if lacking:
        found.append(
            f"{len(absent)} fields are not written for {len(lacking)} ids: fields "
            f"{listed(absent)}; ids {listed(lacking)}"
        )
    return MissingDataError(
        f"get_samples(partition={partition_id!r}): of {len(sample_ids)} ids asked for, "
        + "; ".join(found),
        sample_ids=unknown + lacking,
        fields=absent,
    )


def tagged_lengths(tags: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """``input_lengths`` of each tag, 0 where it is absent; None if no tag has it."""
    if not any(LENGTH_TAG in tag for tag in tags):
        return None
    return [int(tag.get(LENGTH_TAG, 0)) for tag in tags]
