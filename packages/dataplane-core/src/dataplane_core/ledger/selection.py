"""Claim requests, and the split of a drawn batch over data-parallel ranks."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: tags hold the caller's own primitives

from dataplane_core.errors import InvalidRequestError
from dataplane_core.tags import primitive

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, allowed: value in allowed,
}


def optional_claim_keywords(
    dp_world: int | None,
    where: Sequence[TagFilter],
    seed: int | None,
    wait_for_leased: bool = True,
    sample_ids: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Return the optional keywords of `claim_meta` that differ from their defaults.

    An adapter written for the published contract lacks these keywords; without them it can still
    serve claims that use the defaults.
    """
    keywords: dict[str, Any] = {} if dp_world is None else {"dp_world": dp_world}
    # The client checks the values, so nothing here may fail on a wrong type.
    if not isinstance(where, list | tuple) or where:
        keywords["where"] = where
    if seed is not None:
        keywords["seed"] = seed
    if wait_for_leased is not True:
        keywords["wait_for_leased"] = wait_for_leased
    if sample_ids is not None:
        keywords["sample_ids"] = sample_ids
    return keywords


@dataclass(frozen=True)
class TagFilter:
    """A condition on one tag, as ``TagFilter("weight_version", ">=", 3)``.

    A sample without the tag, or whose tag cannot be compared with ``value``, does not match.

    Attributes:
        tag: name of the tag.
        op: one of ``== != < <= > >= in``.
        value: the primitive to compare the tag with; for ``in`` a list of primitives, which
            becomes a tuple.

    Raises:
        InvalidRequestError: (a ValueError) the operator is unknown, or no tag can hold the value.
    """

    tag: str
    op: str
    value: Any

    def __post_init__(self) -> None:
        if self.op not in _OPERATORS:
            raise InvalidRequestError(
                f"filter on tag {self.tag!r}: operator {self.op!r}; expected one of "
                f"{' '.join(_OPERATORS)}"
            )
        if self.op == "in" and not isinstance(self.value, list | tuple | set | frozenset):
            raise InvalidRequestError(
                f"filter on tag {self.tag!r}: 'in' needs a list, found {self.value!r}"
            )
        try:
            value: Any = (
                tuple(primitive(each) for each in self.value)
                if self.op == "in"
                else primitive(self.value)
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(f"filter on tag {self.tag!r}: {error}") from None
        if isinstance(self.value, set | frozenset):
            value = tuple(sorted(value, key=repr))  # in the same order in every process
        object.__setattr__(self, "value", value)

    def matches(self, tags: Mapping[str, Any]) -> bool:
        """Return whether a sample with these tags matches."""
        if self.tag not in tags:
            return False
        try:
            return bool(_OPERATORS[self.op](tags[self.tag], self.value))
        except TypeError:
            return False


@dataclass(frozen=True)
class Ranks:
    """Data-parallel ranks whose claims have the same terms, and so share each drawn batch.

    The order in which a claim names fields and conditions does not matter.
    """

    required: frozenset[str]
    where: frozenset[TagFilter]
    seed: int | None
    world: int


@dataclass(frozen=True)
class ClaimRequest:
    """One claim, as `Partition.claim` serves it.

    Attributes:
        task_name: the claiming task.
        required_fields: fields that a sample must have.
        batch_size: maximum samples to claim; with groups a multiple of the group size.
        blocking: wait for a full batch or, once nothing more can come, take the remainder; False
            takes the samples that are ready.
        where: conditions that a sample's tags must all meet.
        seed: claim in an order that depends on the seed and the ids alone; None means the ledger's
            order: the configured order, or else the order of first puts.
        dp_rank: the caller's data-parallel rank.
        dp_world: number of ranks that share each drawn batch of ``dp_world * batch_size`` samples.
        lease_s: length of the claim's lease in seconds; None means a claim without a lease.
        owner: "host:pid" of the claiming process, for inspectors.
        wait_for_leased: with ``blocking`` and nothing ready, wait for leased samples.
        sample_ids: claim these samples and no others; None claims the first ready ones.
    """

    task_name: str
    required_fields: tuple[str, ...]
    batch_size: int
    blocking: bool = False
    where: tuple[TagFilter, ...] = ()
    seed: int | None = None
    dp_rank: int | None = None
    dp_world: int | None = None
    lease_s: float | None = None
    owner: str = ""
    wait_for_leased: bool = True
    sample_ids: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InvalidRequestError(
                f"claim_meta: batch_size {self.batch_size}; expected at least 1"
            )
        if self.dp_world is not None and (
            self.dp_rank is None or not 0 <= self.dp_rank < self.dp_world
        ):
            raise InvalidRequestError(
                f"claim_meta: dp_rank {self.dp_rank} with dp_world {self.dp_world}; expected a "
                "rank from 0 to dp_world - 1"
            )

    def matches(self, tags: Mapping[str, Any]) -> bool:
        """Return whether a sample with these tags meets every condition."""
        return all(condition.matches(tags) for condition in self.where)

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share the drawn batch; None without ``dp_world``."""
        if self.dp_world is None:
            return None
        required, where = frozenset(self.required_fields), frozenset(self.where)
        return Ranks(required, where, self.seed, self.dp_world)


def balance(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Split items over ranks with even counts and about equal total lengths.

    Items go longest first, each to the rank with the smallest total among those that may take more
    (LPT scheduling with a cap on the count).

    Args:
        lengths: weight of each item, for example its tokens.
        world: number of ranks.

    Returns:
        For each rank the indices of its items, ascending. Counts differ by at most one.
    """
    small, larger = divmod(len(lengths), world)
    # ``larger`` ranks get ``small + 1`` items, the others ``small``.
    parts: list[list[int]] = [[] for _ in range(world)]
    lightest = [(0, rank) for rank in range(world)]  # heap of the ranks that may take more
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(lightest)
        while not larger and len(parts[rank]) == small:
            load, rank = heapq.heappop(lightest)
        parts[rank].append(index)
        if len(parts[rank]) <= small:
            heapq.heappush(lightest, (load + lengths[index], rank))
        else:
            larger -= 1
    return [sorted(part) for part in parts]
